"""Tensor parallel beyond the table of combinations: other plans, pipeline parts, split backward, errors."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.plans import test_combinations
from tests.plans.combinations import Combination
from tests.support import table_rows
from tests.support.jobs import full
from tests.support.pool import run_ranks
from torchtitan.core.errors import LimitError
from torchtitan.core.random_draws import Normal, initialize
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models import SIZES
from torchtitan.models.decoder import DECODER_PLAN
from torchtitan.models.layers import RMSNorm
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms import tensor_parallel
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.parallelize import ParallelOptions, parallelize, uses_fully_shard
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.parallelisms.sequence_layout import default_positions

BATCH, LENGTH, WIDTH, WORDS = 2, 8, 16, 12
TP2 = dict(ranks=2, tp=2)
FSDP2_TP2 = dict(ranks=4, dp_shard=2, tp=2)


@pytest.mark.parametrize(
    "row",
    [
        Combination(**TP2, model="llama3.2", loss_chunks=3, document_mask=True, precision="float64"),
        Combination(**TP2, model="llama3.2", loss_chunks=3, sequence_parallel=False, loss_parallel=False),
        Combination(**TP2, precision="bfloat16", loss_chunks=3, sequence_parallel=False, accumulation=2),
        Combination(**TP2, cpu_offload=True, recompute="op"),
        Combination(**FSDP2_TP2, model="llama3.2", loss_chunks=3, recompute="op", precision="float64", reshard=False),
        Combination(**FSDP2_TP2, precision="bfloat16", loss_chunks=2, loss_parallel=False, document_mask=True),
    ],
    ids=str,
)
def test_further_combinations(row):
    test_combinations.test_equal_to_one_device(row)


def initialized(model):
    initialize(model, 7, model.init_rule)
    return model


def plain_part(first=-1, last=4, **row):
    """Build layers `first` to `last` of a Llama with three layers, as a pipeline part. -1: embedding; 3: head."""
    model = table_rows.build_plain(Combination(**row))
    model.layers = nn.ModuleDict({name: block for name, block in model.layers.items() if first <= int(name) < last})
    if first > -1:
        model.tok_embeddings = None
    if last < 4:
        model.norm = model.output = None
    return model


def split_part(mesh, dims, first=-1, last=4, options=None, **row):
    """Build the same part under tensor parallel."""
    with torch.device("meta"):
        model = plain_part(first, last, **row)
    dtype = table_rows.DTYPE[row.get("precision", "float32")]
    parallelize(model, mesh, dims, DECODER_PLAN, replace(ParallelOptions(param_dtype=dtype), **(options or {})))
    return initialized(model.to_empty(device="cpu"))


def build_mesh(world_size):
    dims = ParallelDims(world_size=world_size, tp=2)
    return dims.build_mesh("cpu"), dims


def initial_weights(world_size, model):
    built = split_part(*build_mesh(world_size), model=model)
    sizes = {name: parameter.to_local().numel() for name, parameter in built.named_parameters()}
    return {name: parameter.detach().full_tensor() for name, parameter in built.named_parameters()}, sizes


@pytest.mark.parametrize("model", ["llama3", "llama3.2"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_initial_weights_are_those_of_one_rank(world_size, model):
    expected = dict(initialized(plain_part(model=model)).named_parameters())
    for tensors, sizes in run_ranks(world_size, initial_weights, world_size, model):
        assert tensors.keys() == expected.keys()
        for name, parameter in expected.items():
            assert torch.equal(tensors[name], parameter), name
            parts = world_size // 2 if "norm" in name else world_size
            assert sizes[name] == parameter.numel() // parts, f"{name} is not split"


class Squeezed(nn.Module):
    """A region as in latent attention: replicated, normalized activations between and next to split matrices, used by
    all heads, which share a norm.
    """

    def __init__(self):
        super().__init__()
        self.squeeze = nn.Linear(WIDTH, 6)
        self.inner_norm = nn.LayerNorm(4)
        self.widen = nn.Linear(4, 8)
        self.gate = nn.Linear(WIDTH, 8, bias=False)
        self.all_heads = RMSNorm(8)
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x, scale):
        narrow, shared = self.squeeze(x).split((4, 2), dim=-1)
        heads = self.widen(self.inner_norm(narrow)) * F.silu(self.gate(x))
        heads = (
            self.all_heads(heads).unflatten(-1, (-1, 2)) * shared[..., None, :].cumsum(1) * scale
        )  # [B, S, heads, 2]
        return self.out(heads.flatten(-2))


class OtherModel(nn.Module):
    """A model unlike Llama: biases, LayerNorm, other names, and a second kind of layer without attention."""

    def __init__(self):
        super().__init__()
        self.loss = SummedCrossEntropy(2)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.ModuleDict({"before": nn.LayerNorm(WIDTH), "mix": Squeezed()}) for _ in range(2))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, positions=None, labels=None):
        x = self.words(tokens)
        scale = 1 + positions[..., None, None] / LENGTH
        for block in self.blocks:
            x = x + block["mix"](block["before"](x), scale)
        x = self.last_norm(x)
        return self.head(x) if labels is None else self.loss(x, self.head, {"labels": labels})


OTHER = ParallelPlan(
    blocks="blocks.*",
    embedding="words",
    head=("last_norm", "head"),
    gathered=("mix",),
    column=("mix.widen", "mix.gate"),
    row=("mix.out",),
    replicated=("mix.squeeze", "mix.inner_norm"),
    split_norms=("mix.all_heads",),
    sequence=("before",),
)
FROZEN = ("blocks.0.mix.gate.weight", "blocks.1.before.weight", "blocks.1.mix.out.bias", "last_norm.bias")


def plain_other_model(plan=None):
    """Build the model and run it backward, plain or under a plan of two ranks."""
    with torch.device("meta" if plan else "cpu"):
        model = OtherModel().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in FROZEN)
    if plan:
        mesh, dims = build_mesh(2)
        parallelize(model, mesh, dims, OTHER, replace(ParallelOptions(param_dtype=torch.float64), **plan))
        model.to_empty(device="cpu")
    initialize(model, 3, lambda name: Normal(0.3))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
    loss = model(tokens[:, :-1], positions=default_positions(tokens[:, :-1]), labels=tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def split_other_model(plan):
    loss, grads = plain_other_model(plan)
    return loss, {name: None if grad is None else grad.full_tensor() for name, grad in grads.items()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("loss_parallel", [True, False])
def test_a_plan_for_another_model(sequence_parallel, loss_parallel):
    loss, grads = plain_other_model()
    plan = dict(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    for got_loss, got in run_ranks(2, split_other_model, plan):
        assert got_loss == pytest.approx(loss, rel=1e-12)
        for name, grad in grads.items():
            if name in FROZEN:
                assert got[name] is None and grad is None, f"{name} is frozen"
            else:
                assert (got[name] - grad).abs().max() <= 1e-10 * grad.abs().max(), name


# Modules with additional parameters


class LowRank(nn.Linear):
    """x W' + b + x A' B', split like its linear."""

    def forward(self, x):
        return nn.Linear.forward(self, x) + x @ self.a.t() @ self.b.t()

    def tensor_placements(self, role, weight_placement):
        if role == "row":
            return {"a": (Shard(1), Shard(1)), "b": (Replicate(), weight_placement)}
        by_output = (Replicate(), weight_placement) if role == "replicated" else (Shard(0), Shard(0))
        return {"a": (Replicate(), weight_placement), "b": by_output}


class Scaled(nn.LayerNorm):
    """Modules that are not split need no placements."""

    def forward(self, x):
        return nn.LayerNorm.forward(self, x) * self.scale


def with_more_parameters(model):
    for module in list(model.modules()):
        like = dict(dtype=torch.float64, device=model.head.weight.device)
        if isinstance(module, nn.Linear):
            module.__class__ = LowRank
            module.a = nn.Parameter(torch.empty(3, module.in_features, **like))
            module.b = nn.Parameter(torch.empty(module.out_features, 3, **like))
        elif isinstance(module, nn.LayerNorm):
            module.__class__ = Scaled
            module.scale = nn.Parameter(torch.empty(1, **like))
    return model


def gradients_with_more(plan=None):
    """Return gradients of the plain model, or of one split over two ranks."""
    with torch.device("cpu" if plan is None else "meta"):
        model = with_more_parameters(OtherModel().double())
    if plan is not None:
        parallelize(model, *build_mesh(2), OTHER, replace(ParallelOptions(param_dtype=torch.float64), **plan))
        model.to_empty(device="cpu")
    initialize(model, 3, lambda name: Normal(0.3))
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], positions=default_positions(tokens[:, :-1]), labels=tokens[:, 1:]).backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_module_defines_placements_of_its_parameters(sequence_parallel):
    """Ranks have a part of each matrix and of its addition; gradients equal one device's."""
    grads = gradients_with_more()
    assert sum(name.endswith((".a", ".b", ".scale")) for name in grads) == 2 * 9 + 5
    for got in run_ranks(2, gradients_with_more, dict(sequence_parallel=sequence_parallel)):
        for name, grad in grads.items():
            assert (got[name] - grad).abs().max() <= 1e-10 * grad.abs().max(), name


def misplacements():
    messages = []
    for change in (
        lambda m: setattr(m.blocks[0]["mix"].gate, "c", nn.Parameter(torch.empty(4))),
        lambda m: setattr(m.blocks[1]["mix"].gate, "b", nn.Parameter(torch.empty(7, 3))),
    ):
        model = with_more_parameters(OtherModel())
        change(model)
        with pytest.raises(ValueError) as caught:
            parallelize(model, *build_mesh(2), OTHER, ParallelOptions())
        messages.append(str(caught.value))
    return messages


def test_parameters_without_a_placement_are_refused():
    for unknown, uneven in run_ranks(2, misplacements):
        assert unknown.startswith("blocks.0.mix.gate.c: ") and "give LowRank a method tensor_placements" in unknown
        assert "given 2, which does not divide dimension 0 of blocks.1.mix.gate.b 7; allowed:" in uneven


# Sizes without optional modules

LATENT = dict(qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, kv_lora_rank=8, ffn_dim=32)
EXPERTS = dict(dim=16, n_layers=2, n_heads=2, vocab_size=WORDS, expert_dim=16, n_experts=4, aux_loss_weight=0.0)
SIZES_THAT_LACK = {
    "Qwen 3 with shared experts": ("qwen3_moe", dict(n_kv_heads=2, head_dim=8, n_shared_experts=1)),
    "DeepSeek without dense layers": ("deepseek", LATENT | dict(n_dense_layers=0)),
    "DeepSeek without shared experts": ("deepseek", LATENT | dict(n_dense_layers=1, n_shared_experts=0)),
    "DeepSeek without experts": ("deepseek", LATENT | dict(n_dense_layers=2)),
}


def gradients_of_sizes(name, is_split):
    family, sizes = SIZES_THAT_LACK[name]
    with torch.device("meta" if is_split else "cpu"):
        model = MODELS[family].build(replace(SIZES[family]["debugmodel"], **EXPERTS | sizes)).double()
    model.loss = SummedCrossEntropy()
    if is_split:
        parallelize(model, *build_mesh(2), MODELS[family].plan, ParallelOptions(param_dtype=torch.float64))
        model.to_empty(device="cpu")
    initialized(model)
    tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
    return {name: full(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", SIZES_THAT_LACK)
def test_sizes_without_optional_modules(name):
    grads = gradients_of_sizes(name, False)
    for got in run_ranks(2, gradients_of_sizes, name, True):
        assert got.keys() == grads.keys()
        for name, grad in grads.items():
            assert (got[name] - grad).abs().max() <= 1e-10 * grad.abs().max(), name


# Pipeline parts


def run_parts(cuts, options):
    """Run forward and backward through all parts on two ranks, passing activations and gradients by hand."""
    everything = table_rows.batch()
    bounds, meshes = [-1, *cuts, 4], build_mesh(2)
    parts = [
        split_part(*meshes, first, last, options, precision="float64", loss_chunks=3)
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]
    sent, shapes = [], []
    x = everything["tokens"]
    positions = default_positions(x)
    for part in parts[:-1]:
        out = part(x, positions)
        shapes.append((type(out), tuple(out.shape)))
        x = out.detach().requires_grad_()
        sent.append((out, x))
    loss = parts[-1](x, positions, labels=everything["labels"])
    loss.backward()
    for out, received in reversed(sent):
        out.backward(received.grad)
    grads = {name: p.grad.full_tensor() for part in parts for name, p in part.named_parameters()}
    return loss.item(), grads, shapes


@pytest.mark.parametrize("cuts", [(1,), (0, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parts_of_a_pipeline(cuts, sequence_parallel):
    everything = table_rows.batch()
    model = initialized(plain_part(precision="float64"))
    loss = model(everything["tokens"], labels=everything["labels"])
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    length = table_rows.SEQ_LEN // (2 if sequence_parallel else 1)
    for got_loss, got, shapes in run_ranks(2, run_parts, cuts, dict(sequence_parallel=sequence_parallel)):
        assert got_loss == pytest.approx(loss.item(), rel=1e-12)
        assert shapes == [(torch.Tensor, (table_rows.SAMPLES, length, 48))] * len(cuts)
        assert got.keys() == grads.keys()
        for name, grad in grads.items():
            assert (got[name] - grad).abs().max() <= 1e-10 * grad.abs().max(), name


def split_backward(num_chunks, options):
    """Run the last part's backward in two halves, like zero-bubble schedules."""
    mesh, dims = build_mesh(2)
    part = split_part(mesh, dims, 2, 4, options, precision="float64", loss_chunks=num_chunks)
    x, labels = last_part_inputs()
    positions = default_positions(x)
    if options.get("sequence_parallel", True):
        x = x.chunk(2, dim=1)[mesh["tp"].get_local_rank()]
    x = x.clone().requires_grad_()
    loss = part(x, positions, labels=labels)
    (input_grad,), groups = stage_backward_input([loss], None, [x], iter(part.parameters()))
    before = [name for name, p in part.named_parameters() if p.grad is not None]
    stage_backward_weight(iter(part.parameters()), groups)
    return input_grad, {name: p.grad.full_tensor() for name, p in part.named_parameters()}, before


def last_part_inputs():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, LENGTH, 48, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 104, (BATCH, LENGTH), generator=generator)
    labels[0, :3] = -100
    return x, labels


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("options", [{}, dict(sequence_parallel=False), dict(loss_parallel=False)], ids=str)
def test_a_split_backward_of_inputs_and_weights(num_chunks, options):
    part = initialized(plain_part(2, 4, precision="float64"))
    x, labels = last_part_inputs()
    x.requires_grad_()
    part(x, default_positions(x), labels=labels).backward()
    answers = run_ranks(2, split_backward, num_chunks, options)
    full_grad = (
        torch.cat([answer[0] for answer in answers], dim=1) if options != dict(sequence_parallel=False) else None
    )
    torch.testing.assert_close(answers[1][0] if full_grad is None else full_grad, x.grad, rtol=1e-10, atol=1e-14)
    for _, grads, before in answers:
        assert not before, "weights' gradients came with the input's"
        for name, parameter in part.named_parameters():
            assert (grads[name] - parameter.grad).abs().max() <= 1e-10 * parameter.grad.abs().max(), name


# Without labels


def logits_of(options):
    with torch.no_grad():
        logits = split_part(*build_mesh(2), options=options)(table_rows.batch()["tokens"])
    return isinstance(logits, DTensor), full(logits)


@pytest.mark.parametrize("loss_parallel", [True, False])
def test_logits(loss_parallel):
    with torch.no_grad():
        expected = initialized(plain_part(precision="float32"))(table_rows.batch()["tokens"])
    for is_split, logits in run_ranks(2, logits_of, dict(loss_parallel=loss_parallel)):
        assert is_split == loss_parallel
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


# Compile


def compile_blocks():
    """Return the number of graphs of three blocks, and a compiled block's error for an unfinished input."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = split_part(*build_mesh(2), options=dict(compile_model=True, compile_backend=counter))
    everything = table_rows.batch()
    for _ in range(2):
        model(everything["tokens"], labels=everything["labels"]).backward()
    x = AsyncCollectiveTensor(torch.zeros(2, 4, 48))
    try:
        model.layers["0"](x, model.context(x))
    except RuntimeError as error:
        return counter.frame_count, str(error)
    return counter.frame_count, "no error"


def test_compiled_blocks():
    for graphs, error in run_ranks(2, compile_blocks):
        assert graphs == 1, "one graph for all blocks"
        assert "handed an AsyncCollectiveTensor" in error and "async_op=False" in error


class FakeMesh:
    def __init__(self, device_type):
        self.device_type = device_type

    def get_group(self):
        return type("Group", (), {"group_name": "seven"})


@pytest.mark.parametrize("device_type, compiled", [("cpu", True), ("cuda", False), ("cpu", False)])
def test_asynchronous_tensor_parallel_needs_cuda_and_the_compiler(device_type, compiled):
    missing = "GPUs" * (device_type == "cpu") + " and " * (device_type == "cpu" and not compiled)
    missing += "a compiled model (compile.enable)" * (not compiled)
    with pytest.raises(LimitError, match=re.escape(f"add {missing}, or leave it out")):
        tensor_parallel.enable_async_tensor_parallel(FakeMesh(device_type), compiled)


def test_asynchronous_tensor_parallel(monkeypatch):
    groups = []
    monkeypatch.setattr(torch.distributed._symmetric_memory, "enable_symm_mem_for_group", groups.append)
    with torch._inductor.config.patch(_micro_pipeline_tp=False):  # monkeypatch would remove it at its end
        tensor_parallel.enable_async_tensor_parallel(FakeMesh("cuda"), True)
        assert torch._inductor.config._micro_pipeline_tp and groups == ["seven"]


# Errors


def refusal_message(changes, plan, options, tokens=2):
    """Return the error of a Llama with replaced modules under the plan, or when it then reads `tokens`."""
    mesh, dims = build_mesh(2)
    with torch.device("meta"):
        model = plain_part()
        for name, module in changes.items():
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module)
    try:
        parallelize(model, mesh, dims, plan, replace(ParallelOptions(), **options))
        model.to_empty(device="cpu")(torch.zeros(1, tokens, dtype=torch.long))
    except ValueError as error:
        return str(error)
    return "no error"


REFUSALS = {
    "key and value heads": (
        {"layers.1.attention.wk": nn.Linear(48, 36)},
        {},
        "parallelism.tensor_parallel_degree: given 2, which does not divide heads of layers.1.attention.wk 3; allowed: "
        "a divisor of .*: 1, 3; write one of these",
    ),
    "width": (
        {"layers.0.feed_forward.w2": nn.Linear(33, 48)},
        {},
        "in_features of layers.0.feed_forward.w2 33; allowed",
    ),
    "vocabulary": ({"tok_embeddings": nn.Embedding(101, 48)}, {}, "vocabulary of tok_embeddings 101; allowed"),
    "head": ({"output": nn.Linear(48, 101)}, {}, "vocabulary of output 101; allowed"),
    "a norm without its head": ({"output": None}, {}, "only one of norm and output.*cut the model elsewhere"),
    "no such module": ({}, dict(row=("attention.wx",)), "no module of .* is called 'layers.*.attention.wx'"),
    "no such end": ({}, dict(embedding="embed"), "no module of .* is called 'embed'"),
    "a norm for a matrix": (
        {},
        dict(column=("attention_norm",)),
        "layers.0.attention_norm: a RMSNorm among the linears of column.*RMS norm over sharded features in split_norms",
    ),
    "another norm of split features": (
        {"layers.0.attention_norm": nn.LayerNorm(48)},
        dict(split_norms=("attention_norm",)),
        "layers.0.attention_norm: a LayerNorm in split_norms, which is for RMS norms",
    ),
    "left out": ({}, dict(row=("attention.wo",)), r"layers.0.feed_forward.w2.weight: no pattern .* add its module"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    changes, plan, message = REFUSALS[name]
    for answer in run_ranks(2, refusal_message, changes, replace(DECODER_PLAN, **plan), {}):
        assert re.search(message, answer), answer


def test_a_sequence_that_does_not_divide_is_refused():
    for answer in run_ranks(2, refusal_message, {}, DECODER_PLAN, {}, 7):
        assert answer == (
            "training.seq_len (or validation.seq_len): given 7; allowed: a multiple of tensor_parallel 2 (sequence "
            "parallel); write 6 or 8"
        )
    for answer in run_ranks(2, refusal_message, {}, DECODER_PLAN, dict(sequence_parallel=False), 7):
        assert answer == "no error"


def test_where_fully_shard_wraps():
    mixed, plain = ParallelOptions(param_dtype=torch.bfloat16), ParallelOptions()
    one, tp, dp, cp = (
        ParallelDims(**d)
        for d in (dict(world_size=1), dict(world_size=2, tp=2), dict(world_size=2), dict(world_size=2, cp=2))
    )
    model = torch.nn.Linear(2, 2)
    assert [uses_fully_shard(model, dims, plain) for dims in (one, tp, dp, cp)] == [False, False, True, True]
    assert [uses_fully_shard(model, dims, mixed) for dims in (one, tp, dp, cp)] == [False, True, True, True]
    model.weight.data = model.weight.data.bfloat16()  # the bias has to be cast yet
    assert uses_fully_shard(model, tp, mixed)
    assert not uses_fully_shard(model.bfloat16(), tp, mixed)
    assert uses_fully_shard(model, one, ParallelOptions(cpu_offload=True))
