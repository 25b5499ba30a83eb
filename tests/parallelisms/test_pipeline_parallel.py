"""Pipelines beyond the table of combinations: unusual cuts and schedules, evaluation between steps, and errors.

Also: nothing is recomputed or reduced twice, gradients are not summed in bfloat16, and no microbatch is lost.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plans.combinations import Combination
from tests.support.pool import RankFailed, run_ranks
from tests.support.table_rows import DTYPE, TOLERANCE, batch, build_plain, plain_twin, reference
from torchtitan.core.random_draws import clean_name, initialize
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.parallelize import ParallelOptions, parallelize
from torchtitan.parallelisms.pipeline.cut import SCHEDULES
from torchtitan.parallelisms.pipeline.pipeline_parallel import Pipeline, PipelineOptions, cut_model, tied_names
from torchtitan.parallelisms.pipeline.runtime import annotate_errors
from torchtitan.parallelisms.sequence_layout import default_positions

CPU = torch.device("cpu")
SPLIT = [name for name, traits in SCHEDULES.items() if traits.split_backward]


def dims_of(row: Combination) -> ParallelDims:
    return ParallelDims(row.ranks, row.dp_replicate, row.dp_shard, row.cp, row.tp, row.pp)


def build(row: Combination, autocast: bool = False, **overrides: object) -> tuple[Pipeline, DeviceMesh]:
    """Return this rank's pipeline and the mesh. `overrides`: PipelineOptions that differ from the row's."""
    dims = dims_of(row)
    mesh = dims.build_mesh("cpu")
    with torch.device("meta"):
        model = build_plain(row)
    plan = MODELS[row.model].plan
    options = ParallelOptions(
        param_dtype=torch.bfloat16 if row.precision == "bfloat16" else DTYPE[row.precision],
        reduce_dtype=DTYPE[row.precision],
        reshard_after_forward=False,
        cpu_offload=row.cpu_offload,
        sequence_parallel=row.sequence_parallel,
        recompute=row.recompute if row.recompute in ("none", "full") else "selective",
        selective_option=row.recompute,
        compile_model=row.compile != "no",
        compile_backend="aot_eager",
    )
    local_batch = 8 // dims.dp // row.accumulation
    overrides = {"schedule": row.schedule, "local_batch_size": local_batch, "hidden_dim": model.args.dim} | overrides
    pipeline = PipelineOptions(**overrides)
    tied = tied_names(model)
    stages = pipeline.stages(model, plan, dims.pp)
    local_stages = pipeline.stages_of_rank(dims.axis_rank(mesh, "pp"), dims.pp, len(stages))
    parts = cut_model(model, stages, local_stages)
    for part in parts:
        parallelize(part, mesh, dims, plan, options)
        part.to_empty(device="cpu")
        initialize(part, 7, part.init_rule, drawn_as=tied)
    pipe = Pipeline(
        parts,
        local_stages,
        len(stages),
        mesh["pp"],
        pipeline,
        device=CPU,
        hidden_dtype=torch.bfloat16 if autocast else options.param_dtype,
        sequence_shards=row.tp if row.sequence_parallel else 1,
        forward_context=torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        merge_backward=row.recompute != "none" or row.compile != "no",
        tied=tied,
    )
    return pipe, mesh


def local_batches(row: Combination, mesh: DeviceMesh) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Return this rank's local batches of one step, and the number of valid tokens of all ranks."""
    full_batch, dims = batch(), dims_of(row)
    names = ("tokens", "labels", "positions", "document_ids")[: 4 if row.document_mask else 2]
    local_tensors = {name: full_batch[name][dims.dp_rank(mesh) :: dims.dp] for name in names}
    pieces = [tensor.chunk(row.accumulation) for tensor in local_tensors.values()]
    batches = [dict(zip(names, piece, strict=True)) for piece in zip(*pieces, strict=True)]
    batches = [{"positions": default_positions(tensors["tokens"])} | tensors for tensors in batches]
    return batches, int((full_batch["labels"] != IGNORE_INDEX).sum())


def step(pipe: Pipeline, batches: list[dict[str, torch.Tensor]], valid: int) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for index, part in enumerate(batches):
        total += pipe.train_step(part, valid, is_last=index == len(batches) - 1)
    pipe.sum_tied_gradients()
    return total


def full_gradients(pipe: Pipeline) -> dict[str, torch.Tensor]:
    named_parameters = [(clean_name(name), p) for part in pipe.parts for name, p in part.named_parameters()]
    return {name: getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for name, p in named_parameters}


def sum_over_plan(row: Combination, value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / row.tp


def train_and_evaluate(row: Combination, overrides: dict) -> tuple[float, float, dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    pipe, mesh = build(row, **overrides)
    batches, valid = local_batches(row, mesh)
    loss = sum_over_plan(row, step(pipe, batches, valid))
    evaluated = sum_over_plan(row, sum(pipe.eval_step(part).double() for part in batches) / valid)
    return loss, evaluated, full_gradients(pipe)


def check(row: Combination, twin: Combination | None = None, **overrides: object) -> None:
    """Check that losses and gradients of one step of the row equal those on one device."""
    loss, _, grads, *_ = reference(twin or plain_twin(row))
    tolerance, checked_names = TOLERANCE["bfloat16" if "autocast" in overrides else row.precision], set()
    for got_loss, evaluated, got in run_ranks(row.ranks, train_and_evaluate, row, overrides):
        assert got_loss == pytest.approx(loss, rel=tolerance)
        assert evaluated == pytest.approx(loss, rel=tolerance)
        for name, grad in got.items():
            expected = grads[name if name in grads else "tok_embeddings.weight"]
            error = (grad - expected).abs().max() / expected.abs().max()
            assert error <= tolerance, f"{name}: gradient differs by {error:.2e} of its largest entry"
        checked_names |= got.keys()
    assert checked_names >= grads.keys()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_forwards_under_autocast(schedule, recompute):
    check(Combination(ranks=2, pp=2, precision="float32", schedule=schedule, recompute=recompute), autocast=True)


# Unusual cuts and tables


class Deep(Combination):
    layers = 9


@pytest.mark.parametrize("schedule", ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("dp_shard", [1, 2])
def test_four_stages_a_rank(schedule, dp_shard):
    """With more stages than torch keeps gathered at a time, parameters are gathered again between microbatches."""
    row = Deep(ranks=2 * dp_shard, pp=2, dp_shard=dp_shard, schedule=schedule)
    check(row, Deep(), layers_per_stage=1, embedding_cost=0, head_cost=-1)


def test_module_names_decide_the_cut():
    stages = [["tok_embeddings", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "layers.4", "norm", "output"]]
    check(Combination(ranks=2, pp=2, schedule="DualPipeV", microbatch_size=1), modules=stages)


def test_table_from_csv(tmp_path):
    """Microbatches out of order in every stage and direction, the last stage on rank 0, one backward split."""
    rows = (
        "0F1 0F0 0F3 0F2 2F3 2B3 2F0 2F1 2I1 2B0 2F2 2W1 2B2 0B2 0B0 0B3 0B1",
        "1F0 1F1 1F3 1F2 1B3 1I1 1B0 1W1 1B2",
    )
    path = tmp_path / "schedule.csv"
    path.write_text("\n".join(row.replace(" ", ",") for row in rows))
    for recompute in ("none", "full"):
        row = Combination(ranks=2, pp=2, microbatch_size=1, recompute=recompute)
        check(row, csv=path, microbatch_size=2)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZBVZeroBubble"])
def test_fewer_microbatches_than_stages(schedule):
    check(Combination(ranks=2, pp=2, schedule=schedule), microbatch_size=8)


# Computation and communication of a step


class Counter(TorchDispatchMode):
    """Counts collectives and sends by the name of c10d's operator."""

    def __init__(self):
        super().__init__()
        self.calls = defaultdict(int)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            self.calls[op._overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def count_work(row: Combination) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Count forwards of each block and calls of c10d in one step; return both and the expected calls."""
    pipe, mesh = build(row)
    step_inputs = local_batches(row, mesh)
    step(pipe, *step_inputs)  # the first step sends additional messages
    blocks = defaultdict(int)

    def count(name: str, forward: Callable, *args: object) -> torch.Tensor:
        blocks[name] += 1
        return forward(*args)

    for part in pipe.parts:
        for name, module in part.named_modules():
            if type(module).__name__ == "Block" or type(module).__name__ == "FSDPBlock":
                module.forward = partial(count, clean_name(name), module.forward)
    with Counter() as counter:
        step(pipe, *step_inputs)
    units = sum(len(part.layers) + (part.tok_embeddings is not None or part.output is not None) for part in pipe.parts)
    ends = [(s, s + 1) for s in range(pipe.num_stages - 1) if pipe.ranks[s] != pipe.ranks[s + 1]]
    messages = row.accumulation * pipe.options.microbatches * sum(s in pipe.stage_indices for end in ends for s in end)
    expected = {"send": messages, "recv_": messages}
    if row.dp_shard > 1:
        expected |= dict.fromkeys(("_allgather_base_", "alltoall_base_"), row.accumulation * units)
    if row.dp_replicate > 1:
        expected |= {"allreduce_": units}
    return dict(blocks), dict(counter.calls), expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", ["none", "full", "op", "2"])
def test_layers_are_recomputed_at_most_once(schedule, recompute):
    """m forwards per layer, or 2 m with recompute. No extra forward infers shapes."""
    row = Combination(ranks=2, pp=2, schedule=schedule, recompute=recompute)
    counts = {name: count for blocks, _, _ in run_ranks(2, count_work, row) for name, count in blocks.items()}
    assert len(counts) == row.layers
    if recompute == "2":
        assert set(counts.values()) == {8, 16}
    else:
        assert set(counts.values()) == {8 if recompute == "none" else 16}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_are_the_fewest_possible(schedule):
    """One message each way per microbatch and border between ranks; one gather and one reduction per FSDP unit and
    local batch, for any number of microbatches; replicas reduce once in a step of two local batches.
    """
    fsdp = Combination(ranks=4, pp=2, dp_shard=2, schedule=schedule)
    ddp = Combination(
        ranks=4, pp=2, dp_replicate=2, schedule=schedule, accumulation=1 if schedule == "DualPipeV" else 2
    )
    for row in (fsdp, ddp):
        for _, calls, expected in run_ranks(4, count_work, row):
            assert calls == expected


def gradients_in_bfloat16(row: Combination) -> dict[str, torch.Tensor]:
    pipe, mesh = build(row)
    step(pipe, *local_batches(row, mesh))
    return full_gradients(pipe)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_not_summed_in_bfloat16(schedule):
    """Gradients of microbatches are bfloat16 and their sum is float32, as if summed one by one on one device.

    A sum in bfloat16 would differ by 2^-9 of the entry; in float32 only the order of 8 terms may differ.
    """
    row = Combination(ranks=4, pp=2, dp_shard=2, schedule=schedule, precision="bfloat16")
    plain = build_plain(plain_twin(row))
    initialize(plain, 7, plain.init_rule)
    plain.bfloat16()
    everything = batch()
    valid = int((everything["labels"] != IGNORE_INDEX).sum())
    expected = {name: torch.zeros(p.shape) for name, p in plain.named_parameters()}
    for tokens, labels in zip(everything["tokens"].split(1), everything["labels"].split(1), strict=True):
        (plain(tokens, labels=labels) / valid).backward()
        for name, p in plain.named_parameters():
            expected[name] += p.grad.float()
            p.grad = None
    for grads in run_ranks(4, gradients_in_bfloat16, row):
        for name, grad in grads.items():
            assert grad.dtype == torch.float32
            assert (grad - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max(), name


# Evaluation


def evaluate_between_steps(row: Combination) -> list:
    """Train for two steps, with evaluations of different batch sizes before each; return all losses and gradients."""
    pipe, mesh = build(row, microbatch_size=2 if row.dp_shard == 1 else 1)  # DualPipeV needs 4 microbatches
    batches, valid = local_batches(row, mesh)
    smaller = {name: tensor[:3, :16] for name, tensor in batches[0].items()}
    results = []
    for _ in range(2):
        for part in (smaller, batches[0], smaller):
            for model in pipe.parts:
                model.eval()
            results.append(sum_over_plan(row, pipe.eval_step(part).double()))
            for model in pipe.parts:
                model.train()
        results.append(sum_over_plan(row, step(pipe, batches, valid)))
        assert all(p.requires_grad and p.grad is not None for part in pipe.parts for p in part.parameters())
        results.append(full_gradients(pipe))
        for part in pipe.parts:
            part.zero_grad()
    if row.dp_shard == 2:  # between steps parameters are shards, also after an evaluation
        pipe.eval_step(smaller)
        assert all(isinstance(p, DTensor) for part in pipe.parts for p in part.parameters())
    return results


# with FSDP only one schedule of each kind; an evaluation has to gather its shards
@pytest.mark.parametrize(
    ("dp_shard", "schedule"),
    [*((1, schedule) for schedule in SCHEDULES), (2, "1F1B"), (2, "InterleavedZeroBubble"), (2, "DualPipeV")],
)
def test_evaluation_between_steps(dp_shard, schedule):
    row = Combination(ranks=2 * dp_shard, pp=2, dp_shard=dp_shard, schedule=schedule, document_mask=True)
    loss, _, grads, *_ = reference(plain_twin(row))
    plain = build_plain(plain_twin(row))
    initialize(plain, 7, plain.init_rule)
    names = ("tokens", "labels", "positions", "document_ids")
    everything = {name: tensor for name, tensor in batch().items() if name in names}
    parts = [{name: t[rank::dp_shard][:3, :16] for name, t in everything.items()} for rank in range(dp_shard)]
    with torch.no_grad():
        small_loss = sum(plain(**part).item() for part in parts)
        full_loss = plain(**everything).item()
    for answer in run_ranks(row.ranks, evaluate_between_steps, row):
        for first in (0, 5):
            assert answer[first : first + 4] == pytest.approx([small_loss, full_loss, small_loss, loss], rel=1e-5)
            for name, grad in answer[first + 4].items():
                assert (grad - grads[name]).abs().max() <= 1e-5 * grads[name].abs().max(), name


# Tied weights


def tied_copies(row: Combination) -> dict:
    pipe, mesh = build(row)
    parameters = pipe._parameters()
    names = [name for name in ("tok_embeddings.weight", "output.weight") if name in parameters]
    values = {name: parameters[name].detach().clone() for name in names}
    step(pipe, *local_batches(row, mesh))
    full_values = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in values.items()}
    grads = {name: grad for name, grad in full_gradients(pipe).items() if name in names}
    return {
        "values": full_values,
        "grads": grads,
        "skipped": [name for name in names if parameters[name] in pipe.tied_copies],
    }


@pytest.mark.parametrize("layout", [dict(ranks=2), dict(ranks=4, dp_shard=2), dict(ranks=4, tp=2)], ids=str)
@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_tied_weights_are_equal_to_the_bit(layout, schedule):
    answers = run_ranks(layout["ranks"], tied_copies, Combination(**layout, pp=2, model="llama3.2", schedule=schedule))
    for kind in ("values", "grads"):
        tensors = [tensor for answer in answers for tensor in answer[kind].values()]
        assert len(tensors) == layout["ranks"]  # all on the first rank of the pipeline, or one on each
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    copies = [name for answer in answers for name in answer["skipped"]]
    assert copies == ["output.weight"] * (layout["ranks"] // 2)


def test_tied_names_of_the_full_model():
    with torch.device("meta"):
        assert tied_names(build_plain(Combination(model="llama3.2"))) == {"output.weight": "tok_embeddings.weight"}
        assert tied_names(build_plain(Combination())) == {}


def test_a_part_contains_the_modules_of_its_stage():
    with torch.device("meta"):
        model = build_plain(Combination(pp=2, model="llama3.2"))
    stages = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3"], ["layers.4", "norm", "output"]]
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    first, last = cut_model(model, stages, [0, 2])
    for part, stage in ((first, stages[0]), (last, stages[2])):
        names = {name for name, _ in part.named_parameters()}
        assert names == {name for name in all_names if any(name.startswith(f"{module}.") for module in stage)}
        assert all(block.attention.kernel is part.kernels[0] for block in part.layers.values())
    assert first.output is None and last.tok_embeddings is None and model.output is not None


# Buffers and errors


def receive_buffers(row: Combination) -> list[int]:
    """Return the largest number of receive buffers that this rank held at once, and the number after the step."""
    pipe, mesh = build(row)
    batches, valid = local_batches(row, mesh)
    buffer_counts: list[int] = []

    def count() -> int:
        stages = [stage for schedule in pipe.schedules.values() for stage in schedule._stages]
        infos = [
            info for stage in stages for part in (stage.args_recv_info, stage.grad_recv_info) for info in part.values()
        ]
        return sum(info.buffer is not None for part in infos for info in part if not info.is_root_arg)

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            buffer_counts.append(count())
            return func(*args, **(kwargs or {}))

    step(pipe, batches, valid)  # the first step infers shapes
    with Counting():
        step(pipe, batches, valid)
    return [max(buffer_counts), count()]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_buffers_live_from_the_receive_to_their_use(schedule):
    """torch's own stages keep a buffer for the activations and the gradients of every microbatch."""
    for most, after in run_ranks(2, receive_buffers, Combination(ranks=2, pp=2, schedule=schedule)):
        assert 0 < most <= 4 and after == 0


def broken_block(row: Combination, layer: str) -> None:
    pipe, mesh = build(row)
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("error in the block")

    for part in pipe.parts:
        if layer in part.layers:
            part.layers[layer].register_forward_pre_hook(fail)
    step(pipe, *local_batches(row, mesh))


def test_an_exception_keeps_its_type_and_names_stage_and_microbatch():
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, broken_block, Combination(ranks=2, pp=2, schedule="ZBVZeroBubble"), "4")
    assert "KeyError: 'error in the block'\nin pipeline stage 3, microbatch 2, forward" in str(failure.value)


@pytest.mark.parametrize("error", [OSError("inner"), RuntimeError("inner")])
def test_an_error_wrapped_by_torch_names_its_stage_and_microbatch(error):
    error.__cause__ = KeyError("another cause")
    with pytest.raises(type(error), match="inner") as caught, annotate_errors(3, 5, "backward"):
        try:
            raise error
        except Exception as inner:
            raise RuntimeError("torch's") from inner
    assert caught.value is error and caught.value.__notes__ == ["in pipeline stage 3, microbatch 5, backward"]


def refusal_message(row: Combination) -> list[str]:
    pipe, mesh = build(row)
    (part,), valid = local_batches(row, mesh)
    with pytest.raises(ValueError) as caught:
        pipe.train_step({name: tensor[:5] for name, tensor in part.items()}, valid)
    return str(caught.value)


def test_batch_of_another_size_is_refused():
    for message in run_ranks(2, refusal_message, Combination(ranks=2, pp=2)):
        assert message.startswith("a batch of 5 samples for a pipeline that takes 8 (8 microbatches of 1)")


def test_stages_that_do_not_fit_the_schedule_are_refused():
    with torch.device("meta"):
        model = build_plain(Combination(pp=2))
    plan = MODELS["llama3"].plan
    three = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "layers.4", "norm", "output"]]
    for overrides, message in (
        (dict(modules=three), "3 pipeline stages: 1F1B needs exactly 1 stage per rank, 2 on 2 ranks"),
        (dict(modules=three[:2], schedule="GPipe"), "no stage has layers.3, layers.4, norm, output"),
        (dict(schedule="ZBV"), "no pipeline schedule 'ZBV'; choose one of GPipe, 1F1B"),
        (dict(microbatch_size=3, csv="x.csv"), "sizes that would do: 1, 2, 4, 8; local batch sizes that .* 6, 9"),
        (dict(layers_per_stage=3), "make 3 stages of 5 layers .* layers per stage that would do: 4, 5, 6"),
    ):
        with pytest.raises(ValueError, match=message):
            PipelineOptions(hidden_dim=1, local_batch_size=8, **overrides).stages(model, plan, 2)


def test_torch_still_has_the_overridden_methods():
    """If torch renamed one of these methods, our override would silently not be called."""
    chunks = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad")
    losses = ("_maybe_compute_loss", "_maybe_get_loss", "_update_losses")
    for owner, names in ((PipelineStage, chunks), (_PipelineSchedule, losses)):
        for name in names:
            assert hasattr(owner, name), f"torch's {owner.__name__} has no {name} any more: see runtime.py"
