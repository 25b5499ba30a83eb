"""A row of the table of combinations: its model, its reference on one device, and its step on ranks."""

from dataclasses import replace
from functools import cache
from pkgutil import resolve_name

import numpy as np
import torch

from tests.plans.combinations import Combination
from tests.support import other_families
from tests.support.adapted import installed, perturb_biases, perturb_parameters
from torchtitan.adapters.interface import Adapter
from torchtitan.contract.step import SAMPLES, SEQ_LEN, device_step, local_batch, micro_batch, rank_step
from torchtitan.core.fake_quantization import formats_of
from torchtitan.core.random_draws import initialize
from torchtitan.core.tensor_storage import draw_stores
from torchtitan.losses.objective import IGNORE_INDEX, Objective
from torchtitan.losses.tasks import TASKS
from torchtitan.models import SIZES
from torchtitan.models.attention import use_shifted_groups
from torchtitan.models.dropout import add_embedding_noise
from torchtitan.models.fake_quantized import use_fake_quantization
from torchtitan.models.layers import use_float8
from torchtitan.models.sizes import LongRope, RopeScaling
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.parallelisms.parallelize import ParallelOptions
from torchtitan.parallelisms.pipeline.pipeline_parallel import PipelineOptions
from torchtitan.parallelisms.plan import ParallelPlan

DTYPE = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
# float32 and float64: sums in another order. bfloat16 has 8 bits of mantissa, 2^-8 = 0.4 % per operation; a gradient
# passes tens of them, so 5 % of the largest entry separates a wrong plan from rounding (a missing factor 2 is 100 %).
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 5e-2}
FAMILIES = {**MODELS, **other_families.MODELS, "gemma4_moe": MODELS["gemma4"]}
DEBUG_SIZES = {name: SIZES[name]["debugmodel"] for name in SIZES} | {"gemma4_moe": SIZES["gemma4"]["debugmodel_moe"]}
DEBUG_SIZES |= {name: sizes["debugmodel"] for name, sizes in other_families.SIZES.items()}
QAT_GROUP = 8  # of every format, so that it divides the rows on each rank
MICRO_SIZE = dict(dim=48, n_heads=4, vocab_size=104)
LATENT = dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
DELTA = dict(n_kv_heads=2, head_dim=16, rotary_dim=8, full_interval=2, delta_key_heads=2, delta_value_heads=4)
DELTA |= dict(delta_key_dim=8, delta_value_dim=12)
MIXER = dict(n_kv_heads=2, head_dim=16, ssm_heads=4, ssm_head_dim=6, ssm_state_dim=8)
HEADS = dict(n_kv_heads=4, head_dim=16, sliding_window=7, global_interval=2, logit_cap=3.0)
HEADS |= dict(global_head_dim=24, global_kv_heads=2, global_rotary_dim=8, keys_are_values=True)
# the weight of the auxiliary loss is a hundred times the usual one, to be visible in the gradients
MICRO_SIZES = {
    "llama2": dict(multiple_of=16),
    **{name: dict(multiple_of=16, n_kv_heads=2) for name in ("llama3", "llama3.1", "llama3.2")},
    "deepseek": LATENT | dict(ffn_dim=64, expert_dim=32, aux_loss_weight=0.1),
    "glm4_moe_lite": LATENT | dict(ffn_dim=64, expert_dim=32, q_lora_rank=20),
    "minimax_m2": dict(n_kv_heads=2, head_dim=16, rotary_dim=8, expert_dim=32),
    "afmoe": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, expert_dim=32, sliding_window=7, global_interval=2)
    | dict(scaled_embeddings=True),
    "mistral4": LATENT | dict(ffn_dim=64, expert_dim=32, q_lora_rank=20, query_growth=0.5, query_period=3),
    "gpt2": dict(ffn_dim=96, max_seq_len=32, dropout=0.25, attention_dropout=0.25),
    "falcon": dict(n_kv_heads=2, head_dim=16, rotary_dim=16, ffn_dim=96, norms=2, bias=True),
    "falcon_h1": MIXER | dict(ffn_dim=96, key_multiplier=2.0, ssm_x_multiplier=3.0, down_multiplier=0.5),
    "apertus": dict(n_kv_heads=2, head_dim=16, ffn_dim=96),
    "arcee": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, mlp_bias=True),
    "gemma": dict(n_kv_heads=2, head_dim=16, ffn_dim=96),
    "gemma2": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7, query_scalar=24)
    | dict(score_cap=0.5, logit_cap=1.0),
    "gemma3": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7, global_interval=2, query_scalar=24),
    "gemma4": HEADS | dict(ffn_dim=96),
    "gemma4_moe": HEADS | dict(expert_dim=32, aux_loss_weight=0.1),
    "granite": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, attention_bias=True, mlp_bias=True, attention_dropout=0.25),
    "granite4": MIXER | dict(layer_pattern="M*", expert_dim=32, aux_loss_weight=0.1),
    "lfm2": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, layer_pattern="C*"),
    "lfm2_moe": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, layer_pattern="C*", n_dense_layers=1, expert_dim=32)
    | dict(aux_loss_weight=0.1),
    "llama4": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, expert_dim=32, moe_interval=2, no_rope_interval=3, top_k=2)
    | dict(chunk_size=5, query_growth=0.5, query_period=3, aux_loss_weight=0.1),
    "mistral": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7, query_growth=0.5, query_period=3),
    "mixtral": dict(n_kv_heads=2, head_dim=16, expert_dim=32, n_experts=4, aux_loss_weight=0.1, sliding_window=7),
    "hunyuan_v1_dense": dict(n_kv_heads=2, head_dim=16, ffn_dim=96),
    "nemotron": dict(n_kv_heads=2, head_dim=16, rotary_dim=8, ffn_dim=96, attention_bias=True),
    "cohere": dict(n_kv_heads=2, head_dim=16, ffn_dim=96),
    "cohere2": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7, global_interval=2),
    "gpt_neox": dict(n_kv_heads=4, head_dim=12, rotary_dim=4, ffn_dim=96, residual_dropout=0.25),
    "gptj": dict(n_kv_heads=4, head_dim=12, rotary_dim=4, ffn_dim=96, attention_dropout=0.25)
    | dict(residual_dropout=0.25, embedding_dropout=0.25),
    "gpt_oss": dict(n_kv_heads=2, head_dim=16, expert_dim=32, aux_loss_weight=0.1, sliding_window=7),
    "nemotron_h": MIXER | dict(layer_pattern="ME*E", expert_dim=32, ssm_groups=2, aux_loss_weight=0.1),
    "olmo2": dict(n_kv_heads=2, head_dim=16, ffn_dim=96),
    "olmo3": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7, global_interval=2),
    "qwen2_moe": dict(n_kv_heads=2, head_dim=16, expert_dim=32, aux_loss_weight=0.1, sliding_window=7)
    | dict(window_layers="0"),
    "glm": dict(n_kv_heads=2, head_dim=16, rotary_dim=8, ffn_dim=96),
    "glm4": dict(n_kv_heads=2, head_dim=16, rotary_dim=8, ffn_dim=96),
    "glm4_moe": dict(n_kv_heads=2, head_dim=16, rotary_dim=8, ffn_dim=96, expert_dim=32, qk_norm=True),
    "qwen3_next": DELTA | dict(expert_dim=32, aux_loss_weight=0.1),
    "qwen3_5": DELTA | dict(ffn_dim=96),
    "qwen3_5_moe": DELTA | dict(expert_dim=32, aux_loss_weight=0.1),
    "opt": dict(ffn_dim=96, max_seq_len=32, order="post", embed_dim=32),
    "phi": dict(n_kv_heads=2, head_dim=16, rotary_dim=8, ffn_dim=96, qk_norm=True, residual_dropout=0.25),
    "phi3": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7),
    "phi4": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, rotary_factor=0.25, longrope=LongRope((1.0, 3.0), (9.0, 9.0))),
    "qwen2": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7, window_layers="1-2"),
    "qwen3": dict(n_kv_heads=2, head_dim=16, ffn_dim=96),
    "roberta": dict(ffn_dim=96, max_seq_len=32, n_types=2),
    "seed_oss": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, attention_dropout=0.25, residual_dropout=0.25),
    "stablelm": dict(n_kv_heads=2, head_dim=16, rotary_dim=8, ffn_dim=96, qk_norm=True, side_by_side=True),
    "starcoder2": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, sliding_window=7, attention_dropout=0.25)
    | dict(residual_dropout=0.25, embedding_dropout=0.25),
    "smollm3": dict(n_kv_heads=2, head_dim=16, ffn_dim=96, no_rope_interval=2),
    "qwen3_moe": dict(n_kv_heads=2, head_dim=16, expert_dim=32, aux_loss_weight=0.1),
    **dict.fromkeys(other_families.SIZES, {}),
}


CLASSES = {"seq_cls": 4, "reward": 1}
"""Task -> outputs of its head."""


def objective(row: Combination) -> Objective:
    """Return the objective of the row's task."""
    other = other_families.OBJECTIVES.get(row.model)
    return (other or resolve_name(TASKS[row.task].objective))(row.loss_chunks)


def build_plain(row: Combination) -> torch.nn.Module:
    return build_adapted(row)[0]


def build_adapted(row: Combination) -> tuple[torch.nn.Module, ParallelPlan, Adapter | None]:
    """Build the plain model with its adapter; return both and the model's parallelism plan."""
    args = replace(
        DEBUG_SIZES[row.model],
        **MICRO_SIZE,
        **MICRO_SIZES[row.model],
        n_layers=row.layers,
    )
    if row.task in CLASSES:
        args = replace(args, n_classes=CLASSES[row.task])
    if row.rope != "plain":
        args = replace(args, rope_scaling=RopeScaling(4.0, original_max_seq_len=12, kind=row.rope))
    if row.multi_token_prediction:
        args = replace(args, n_mtp_layers=row.multi_token_prediction)
    model = FAMILIES[row.model].build(args).to(DTYPE[row.precision])
    model.loss = objective(row)
    if row.groups:
        use_shifted_groups(model, 8)
    plan = FAMILIES[row.model].plan
    plan = add_embedding_noise(model, plan, 5.0) if row.noise else plan
    plan, adapter = installed(row.adapter, model, plan)
    if row.float8 != "none":
        use_float8(model, plan, row.float8, exclude=(), use_kernel=False)
    if row.qat != "none":
        weights, inputs = row.qat.split()
        formats = formats_of(weights, None if inputs == "none" else inputs, QAT_GROUP)
        embedding = formats_of(weights, None, QAT_GROUP).weights if weights in ("int4", "int8") else None
        use_fake_quantization(model, formats, embedding)
    return model, plan, adapter


def batch() -> dict[str, torch.Tensor]:
    return micro_batch(MICRO_SIZE["vocab_size"])


def with_task_labels(row: Combination) -> dict[str, torch.Tensor]:
    """Return the batch with the labels of the row's task."""
    full_batch = batch()
    if row.task == "pretrain":
        return full_batch
    labels = torch.full_like(full_batch["labels"], IGNORE_INDEX)
    if row.task == "seq_cls":  # at the first token, or the last
        labels[:, 0 if row.model == "roberta" else -1] = full_batch["classes"]
    elif row.task == "reward":  # at the last tokens, in several places; one pair fills a step up
        labels[torch.arange(SAMPLES), -1 - torch.arange(SAMPLES) % 5] = 0
        labels[2:4] = IGNORE_INDEX
    else:
        hidden = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) < 0.3
        labels = torch.where(hidden & (full_batch["labels"] != IGNORE_INDEX), full_batch["tokens"], labels)
    return full_batch | {"labels": labels}


def model_input_names(row: Combination, draws: bool) -> list[str]:
    """Return the names of the batch tensors that the row's model reads."""
    names = ["tokens", *objective(row).targets] + ["positions", "document_ids"] * row.document_mask
    return names + ["keys"] * draws + ["lengths"] * row.noise


def samples_per_loss(row: Combination) -> int:
    """Return the number of adjacent samples that share one loss term."""
    return 2 if row.model == "pairs" else TASKS[row.task].rows_per_sample


def local_batch_size(row: Combination, dims: ParallelDims) -> int:
    return SAMPLES // dims.dp // row.accumulation


def assembled(row: Combination, frozen_dtype: torch.dtype | None = None) -> ParallelModel:
    """Build this rank's parallel model of the row. `frozen_dtype`: of frozen weights; None: the compute dtype."""
    dims = ParallelDims(row.ranks, row.dp_replicate, row.dp_shard, row.cp, row.tp, row.pp, row.ep)
    with torch.device("meta"):
        model, plan, adapter = build_adapted(row)
    local = local_batch_size(row, dims)
    microbatch_size = max(row.microbatch_size if local >= 4 * row.pp else 1, samples_per_loss(row))
    param_dtype = torch.bfloat16 if row.precision == "bfloat16" else DTYPE[row.precision]
    if adapter is not None:
        adapter.cast_frozen(model, frozen_dtype or param_dtype)
    modes = ("none", "full", "full_keep_comm", "memory_budget")
    recompute = row.recompute if row.recompute in modes else "selective"
    options = ParallelOptions(
        param_dtype=param_dtype,
        reduce_dtype=DTYPE[row.precision],
        reshard_after_forward=row.pp == 1 and (row.second_shards or row.reshard),
        prefetch=row.prefetch,
        cpu_offload=row.cpu_offload,
        gather_int8=row.gather_int8,
        reduce_bits=row.reduce_bits,
        sequence_parallel=row.sequence_parallel,
        loss_parallel=row.loss_parallel,
        cp_method=row.method,
        cp_load_balance=row.balance,
        overlap=row.overlap,
        recompute=recompute,
        selective_option=row.recompute,
        memory_budget=0.3,
        compile_model=row.compile != "no",
        compile_loss=row.compile != "no",
        compile_scope=row.compile,
        compile_backend=row.backend,
    )
    model = ParallelModel(
        model,
        dims.build_mesh("cpu"),
        dims,
        plan,
        options,
        device=torch.device("cpu"),
        seed=7,
        pipeline=PipelineOptions(
            hidden_dim=MICRO_SIZE["dim"],
            local_batch_size=local,
            microbatch_size=microbatch_size,
            schedule=row.schedule,
        ),
        balance=FAMILIES[row.model].balance_of(model.args),
        adapter=adapter,
    )
    perturb_parameters(model.named_parameters())
    perturb_biases(model.named_parameters())
    return model


def strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions in which a tensor has several elements."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def run_row(
    row: Combination, frozen_dtype: torch.dtype | None = None
) -> tuple[float, float, dict[str, np.ndarray], float, dict[str, float]]:
    """Run one accumulated step on this rank of the row.

    Returns the loss, the gradient norm, this rank's gradients, the loss in evaluation, and the expert load. Gradients
    are numpy arrays, because a tensor would be sent to the parent through a shared file.
    """
    torch._dynamo.reset()
    model = assembled(row, frozen_dtype)
    full_batch = with_task_labels(row)
    inputs = {name: full_batch[name] for name in model_input_names(row, model.needs_keys)}
    loss, norm, grads, evaluated = rank_step(
        model,
        local_batch(model, inputs, samples_per_loss(row)),
        objective(row).count(full_batch),
        row.accumulation,
        row.evaluated,
        {"lanes": torch.arange(local_batch_size(row, model.dims))} if row.remembers else None,
    )
    assert all(p.grad is None for _, p in model.named_parameters() if not p.requires_grad)
    trained = [p for _, p in model.named_parameters() if p.requires_grad]
    assert all(strides(p.grad) == strides(p) for p in trained), (
        "fused optimizers need equal strides of parameter and gradient"
    )
    assert {tensor.dtype for p in trained for tensor in (p, p.grad)} <= {DTYPE[row.precision]}
    frozen = [p for _, p in model.named_parameters() if not p.requires_grad and p.is_floating_point()]
    assert {p.dtype for p in frozen} <= {frozen_dtype or model.options.param_dtype}
    model.after_step()
    if model.balance is not None:
        counted = {int(layer.sum()) for load in model.balance.loads for layer in load}
        expected = model.balance.copies * SAMPLES * SEQ_LEN * getattr(model.parts[0].args, "top_k", 0)
        assert counted <= {expected}, f"experts have counted {counted} tokens, not {expected}"
    return loss, norm, grads, evaluated, model.extra_metrics()


def build_with_initial_weights(row: Combination) -> torch.nn.Module:
    """Build the model and adapter on one device with the initial weights of a job.

    Frozen weights are rounded to the type that they are stored in.
    """
    model, _, adapter = build_adapted(row)
    initialize(model, 7, model.init_rule)
    draw_stores(model, 7, model.init_rule)
    if adapter is not None:
        if row.precision == "bfloat16":
            adapter.cast_frozen(model, torch.bfloat16)
            model.float()
        adapter.init_from_base([model])
        perturb_parameters(model.named_parameters())
    perturb_biases(model.named_parameters())
    return model


@cache
def reference(row: Combination) -> tuple[float, float, dict[str, torch.Tensor], float, float]:
    """Compute on one device: loss, norm, gradients, largest expert load, and loss of multi-token prediction."""
    model = build_with_initial_weights(row)
    balance = FAMILIES[row.model].balance_of(model.args)
    full_batch = with_task_labels(row)
    valid = objective(row).count(full_batch)
    if balance is not None:
        balance.set_aux_loss_scale(model, 1 / valid)
    # a cache holds earlier batches, and a step's batch on all ranks is a run of consecutive samples
    inputs = {name: full_batch[name] for name in model_input_names(row, model.needs_keys)}
    remember = model.memory.commit if row.remembers else lambda: None
    loss, norm, grads = device_step(model, inputs, valid, row.accumulation, remember)
    peak = further = 0.0
    if balance is not None:
        peak = balance.metrics(model, balance.take_load(model)[1]).get("load_max", torch.zeros(())).item()
    if row.multi_token_prediction:
        further = model.take_extra_losses()["mtp_loss"].item() / valid
    return loss, norm, grads, peak, further


def plain_twin(row: Combination) -> Combination:
    """Return the row on one device, without the options that must not change the result."""
    exact = "float32" if row.precision == "bfloat16" else row.precision
    options = dict(document_mask=row.document_mask, multi_token_prediction=row.multi_token_prediction, model=row.model)
    options |= dict(float8=row.float8, qat=row.qat, task=row.task, noise=row.noise, rope=row.rope, groups=row.groups)
    options |= dict(accumulation=row.accumulation) if row.remembers else {}
    return Combination(precision=exact, pp=row.pp, adapter=row.adapter, **options)
