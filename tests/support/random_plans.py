"""Random legal plans: jobs as a user could write them, each held against the plain model on one device.

The rules decide which plans are legal. A legal plan that fails or computes something else is a bug of the rules or of
the engine.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from tests.support.adapted import perturb_parameters
from tests.support.jobs import full
from torchtitan.adapters.targets import QUANTIZED_MULTIPLES
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import load
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.random_draws import initialize
from torchtitan.core.tensor_storage import draw_stores
from torchtitan.job import ResolvedJob
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.models import SIZES
from torchtitan.models.layers import use_float8
from torchtitan.parallelisms import quantized_collectives
from torchtitan.parallelisms.pipeline.cut import SCHEDULES, model_modules
from torchtitan.parallelisms.quantized_collectives import pack, unpack
from torchtitan.rules import check

IN_FLOAT64 = {"float32": torch.float64, "bfloat16": torch.float64}
"""The type of both computations. In float32 rounding reaches 2e-5 of a gradient's largest entry (LoRA's A below several
layers), and a tolerance above that would hide small faults. In float64 rounding is a billion times smaller."""
TOLERANCES = {"exact": (1e-10, 1e-12), "float8": (5e-3, 1e-12), "quantized": (1e-5, 1e-7)}
"""Tolerances relative to a gradient's largest entry, and to the norm of all gradients. Normalized routing weights do
not change when all scores grow, so sums over a router's gate cancel and only rounding is left.

exact: other orders of sums. float8: magnitudes below 2^-13 of an operand's largest are rounded by up to 2^-17 of it,
depending on which rows a rank holds. 99 of 100 plans differed by up to 1.5e-5. In one, a later number lay at the border
of two float8 numbers, 2^-4 apart, and its token changed 6e-4 of a sum over 768. quantized: reductions of quantized
messages add in float32."""
REPRESENTABLE = 127
"""Largest integer of a message in int8. Parameters that are integers up to it times a power of two arrive exactly."""
COMMON = dict(dim=48, n_heads=6, vocab_size=264)
SIZES_OF = {
    **dict.fromkeys(("llama2",), dict(multiple_of=16)),
    **dict.fromkeys(("llama3", "llama3.1", "llama3.2"), dict(multiple_of=16, n_kv_heads=2)),
    "gemma3": dict(n_kv_heads=3, head_dim=16, ffn_dim=96, sliding_window=9, global_interval=2, query_scalar=16),
    "mistral": dict(n_kv_heads=3, head_dim=16, ffn_dim=96, sliding_window=9),
    "qwen3": dict(n_kv_heads=3, head_dim=16, ffn_dim=96),
    "qwen3_moe": dict(n_kv_heads=6, head_dim=8, expert_dim=24, n_experts=6, top_k=2),
    "deepseek": dict(
        ffn_dim=96,
        expert_dim=24,
        n_experts=6,
        top_k=2,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
}
AXES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel")


def plans(seed: int, count: int, most_ranks: int = 4) -> Iterator[tuple[int, list[str]]]:
    """Yield numbers of ranks and command lines of legal jobs."""
    for index in range(count):
        chooser = random.Random(f"{seed}/{index}")
        while True:
            ranks, arguments = _proposed(chooser, most_ranks)
            if not check(load(arguments), ranks, "cpu"):
                yield ranks, arguments
                break


def _proposed(chooser: random.Random, most_ranks: int) -> tuple[int, list[str]]:
    choose = chooser.choice
    degrees = dict.fromkeys(AXES, 1)
    ranks = 1
    while ranks == 1 or ranks < most_ranks and chooser.random() < 0.8:
        factor = choose((2, 2, 3))
        if ranks * factor <= most_ranks:
            degrees[choose(AXES)] *= factor
            ranks *= factor
    family = choose([name for name in SIZES_OF if name in SIZES])
    pp, dp = degrees["pipeline_parallel"], degrees["data_parallel_replicate"] * degrees["data_parallel_shard"]
    layers = chooser.randint(2 * pp, 2 * pp + 2) if pp > 1 else chooser.randint(1, 3)
    local, accumulation = chooser.randint(1, 4) * choose((1, pp)), choose((1, 1, 2))
    settings = {f"parallelism.{axis}_degree": degree for axis, degree in degrees.items()}
    settings |= {
        "model.name": family,
        "model.flavor": "debugmodel",
        "model.overrides": _toml(COMMON | SIZES_OF[family] | {"n_layers": layers}),
        "model.tokenizer_path": "bytes",
        "training.seq_len": choose((12, 24, 36, 48)),
        "training.local_batch_size": local,
        "training.global_batch_size": local * dp * accumulation,
        "training.mixed_precision_param": "float32",
        "training.document_mask": choose((True, False)),
        "training.loss_chunks": choose((0, 2, 3)),
        "activation_checkpoint.mode": choose(("none", "full", "selective", "full_keep_comm")),
        "activation_checkpoint.selective_ac_option": choose(("op", "2", "3")),
    }
    if "moe" in family or family == "deepseek":
        settings["parallelism.expert_parallel_degree"] = choose((1, 2, 3, ranks // pp))
    if pp > 1:
        schedule = choose(tuple(SCHEDULES))
        settings["parallelism.pipeline_parallel_schedule"] = schedule
        settings["parallelism.pipeline_parallel_microbatch_size"] = choose((1, 1, 2))
        if chooser.random() < 0.4:
            stages = pp * SCHEDULES[schedule].stages_per_rank
            settings["parallelism.module_fqns_per_model_part"] = str(_cut(chooser, layers, stages))
        else:
            settings["parallelism.pipeline_parallel_first_stage_less_layers"] = chooser.randint(0, 2)
            settings["parallelism.pipeline_parallel_last_stage_less_layers"] = chooser.randint(0, 2)
        if settings.get("parallelism.expert_parallel_degree", 1) > 1:
            settings["parallelism.pipeline_parallel_expert_parallel_overlap"] = choose((True, False))
    if degrees["context_parallel"] > 1:
        methods = ("allgather", "alltoall", "ring", "ulysses")
        settings["parallelism.context_parallel_rotate_method"] = choose(methods)
        settings["parallelism.context_parallel_load_balancer"] = choose(("headtail", "none"))
    if degrees["tensor_parallel"] > 1:
        settings["parallelism.disable_sequence_parallel"] = chooser.random() < 0.2
        settings["parallelism.disable_loss_parallel"] = chooser.random() < 0.2
    if degrees["data_parallel_shard"] > 1 and pp == 1:
        settings["parallelism.fsdp_reshard_after_forward"] = choose(("default", "never", 2))
        settings["parallelism.fsdp_prefetch"] = choose((0, 0, 2))
    if chooser.random() < 0.15:
        settings |= {"training.float8": choose(("tensorwise", "rowwise")), "training.mixed_precision_param": "bfloat16"}
    elif degrees["data_parallel_shard"] * degrees["context_parallel"] > 1:
        settings["parallelism.fsdp_quantized_gather"] = choose(("none", "none", "int8"))
        settings["parallelism.fsdp_quantized_reduce"] = choose(("none", "none", "int4"))
    if chooser.random() < 0.2:
        kind = choose(("lora", "dora", "qlora", "lora_int8"))
        settings |= {"adapter.kind": kind, "adapter.rank": 2}
        if "parallelism.expert_parallel_degree" in settings and kind in QUANTIZED_MULTIPLES:
            settings["adapter.quantized_experts"] = choose(("adapted", "all"))
            settings["adapter.target"] = choose(('["*attention*"]', '["all-linear"]'))
    return ranks, [f"--{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in settings.items()]


def _cut(chooser: random.Random, layers: int, stages: int) -> list[list[str]]:
    """Draw a cut with at least one layer per stage."""
    modules = model_modules(layers)
    ends = sorted(chooser.sample(range(1, layers), min(stages, layers) - 1))
    starts = [0, *(1 + end for end in ends)]
    return [modules[start:stop] for start, stop in zip(starts, [*starts[1:], len(modules)], strict=True)]


def _toml(table: dict[str, int]) -> str:
    return "{" + ", ".join(f"{name} = {value}" for name, value in table.items()) + "}"


def batch_of(config: JobConfig, samples: int) -> dict[str, torch.Tensor]:
    """Return documents of uneven lengths with masked labels spread unevenly over samples and so over ranks."""
    generator, length = torch.Generator().manual_seed(1), config.training.seq_len
    tokens = torch.randint(0, COMMON["vocab_size"], (samples, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(samples):
        labels[sample, : 2 * sample % length] = IGNORE_INDEX
    batch = {"tokens": tokens[:, :-1], "labels": labels}
    if config.training.document_mask:
        starts = (torch.rand(samples, length, generator=generator) < 0.15).long()
        starts[:, 0] = 0
        index = torch.arange(length).expand(samples, -1)
        batch["positions"] = index - torch.where(starts.bool(), index, 0).cummax(1).values
        batch["document_ids"] = starts.cumsum(1)
    return batch


@torch.no_grad()
def adjust_parameters(config: JobConfig, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Change adapters' parameters so that no gradient is zero; make those representable that are gathered in int8.

    A gather in int8 then changes no parameter, however they are sharded, and equals a plan without it.
    """
    named_parameters = list(named_parameters)
    perturb_parameters(named_parameters)
    if config.parallelism.fsdp_quantized_gather != "none":
        for _, parameter in named_parameters:
            largest = full(parameter.abs().max()).item()
            scale = 2.0 ** math.floor(math.log2(REPRESENTABLE / largest)) if largest else 1.0
            parameter.copy_((parameter * scale).round() / scale)


def exact_pack(rows: torch.Tensor, sizes: Sequence[int], bits: int) -> torch.Tensor:
    """Pack messages in 8 bits as `pack` does, but those in 4 bits as float32 numbers, flat in rows of bytes."""
    return pack(rows, sizes, bits) if bits == 8 else rows.float().contiguous().view(torch.uint8)


def exact_unpack(messages: torch.Tensor, sizes: Sequence[int], bits: int) -> torch.Tensor:
    return unpack(messages, sizes, bits) if bits == 8 else messages.view(torch.float32)


@patch.multiple(quantized_collectives, pack=exact_pack, unpack=exact_unpack)
@patch.dict(parts.DTYPES, IN_FLOAT64)
def on_ranks(arguments: list[str]) -> tuple[float, dict[str, np.ndarray]]:
    """Run a step on every rank of a plan; return the loss and the full gradients of this rank's parameters.

    Reductions in int4 are lossy, so equality is tested with exact messages;
    tests/parallelisms/test_quantized_collectives.py bounds the errors of the others.
    """
    torch._dynamo.reset()
    config = load(arguments)
    dims = ResolvedJob(config, dist.get_world_size()).layout.dims
    model = ModelBuilder(ResolvedJob(config, dims.world_size)).model(dims.build_mesh("cpu"), torch.device("cpu"))
    adjust_parameters(config, model.named_parameters())
    samples, size = ResolvedJob(config, dims.world_size).layout.samples, config.training.local_batch_size
    full_batch, rank = batch_of(config, samples), dims.dp_rank(model.mesh)
    valid = ModelBuilder(ResolvedJob(config)).objective().count(full_batch)
    local_batch = {name: tensor[rank :: dims.dp] for name, tensor in full_batch.items()}
    passes = samples // (size * dims.dp)
    loss = torch.zeros((), dtype=torch.float64)
    for index in range(passes):
        part = {name: tensor[index * size : (index + 1) * size] for name, tensor in local_batch.items()}
        loss += model.forward_backward(part, valid, is_last=index == passes - 1)
    dist.all_reduce(loss)
    model.clip_gradients(0.0)
    grads = {name: full(p.grad).numpy() for name, p in model.named_parameters() if p.requires_grad}
    return (loss / dims.tp).item(), grads


@cache
@patch.dict(parts.DTYPES, IN_FLOAT64)
def on_one_device(arguments: tuple[str, ...], samples: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Run the plain model on all samples in one pass."""
    config = load(list(arguments))
    model, plan, adapter = ModelBuilder(ResolvedJob(replace(config, parallelism=Parallelism()))).adapted_model()
    if (recipe := config.training.float8) != "none":
        use_float8(model, plan, recipe, exclude=(), use_kernel=False)
    model.to_empty(device="cpu")
    initialize(model, config.debug.seed, model.init_rule)
    draw_stores(model, config.debug.seed, model.init_rule)
    if adapter is not None:
        adapter.init_from_base([model])
    adjust_parameters(config, model.named_parameters())
    batch = batch_of(config, samples)
    valid = ModelBuilder(ResolvedJob(config)).objective().count(batch)
    balance = parts.model_spec(ResolvedJob(config).model).balance_of(model.args)
    if balance is not None:
        balance.set_aux_loss_scale(model, 1 / valid)
    loss = model(**batch) / valid
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def precision_of(config: JobConfig) -> str:
    """Return the key of TOLERANCES for a job."""
    if config.training.float8 != "none":
        return "float8"
    return "exact" if config.parallelism.fsdp_quantized_reduce == "none" else "quantized"


def differences(arguments: list[str], ranks: int, answers: list[tuple[float, dict[str, np.ndarray]]]) -> list[str]:
    """Return descriptions of the differences between ranks and one device."""
    config = load(arguments)
    samples = ResolvedJob(config, ranks).layout.samples
    loss, grads = on_one_device(tuple(arguments), samples)
    norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads.values()])).item()
    tolerance, cancelled = TOLERANCES[precision_of(config)]
    checked_names, problems = set(), []
    for got_loss, got in answers:
        if abs(got_loss - loss) > tolerance * abs(loss):
            problems.append(f"loss {got_loss} instead of {loss}")
        for name, grad in got.items():
            expected = grads[name if name in grads else "tok_embeddings.weight"]
            error = (torch.from_numpy(grad) - expected).abs().max().item()
            if not error <= tolerance * expected.abs().max().item() + cancelled * norm:
                problems.append(f"{name}: {error:.2e}, its largest entry {expected.abs().max():.2e}, norm {norm:.2e}")
        checked_names |= got.keys()
    return problems + [f"{name} has no gradient on any rank" for name in grads.keys() - checked_names]
