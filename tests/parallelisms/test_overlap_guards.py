"""Overlapped pipelines: one order of collectives per group, errors that end all ranks, bounded memory."""

import gc
import random
import time
from collections import Counter
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import toy_moe
from tests.support.overlap_runs import (
    CUTS,
    EP,
    MICROBATCHES,
    PP,
    VALID,
    SimulatedPeer,
    fake_step,
    groups,
    pipeline,
    random_case,
    start_fake,
)
from tests.support.pool import run_alone, run_ranks
from tests.support.segment_policies import POLICIES
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.pipeline.overlap import stage as segmented_stage
from torchtitan.parallelisms.pipeline.overlap.chunk import Chunk, NodeLoop
from torchtitan.parallelisms.pipeline.overlap.exchange import AllToAll
from torchtitan.parallelisms.pipeline.overlap.segments import Turn, in_order, interleave
from torchtitan.parallelisms.pipeline.tables import build_table

# The order of collectives


def fake_traces(number):
    chooser = random.Random(7)
    different, issued = [], 0
    for seed in range(number):
        case = random_case(chooser)
        rank = chooser.randrange(PP)
        one, other = (fake_step(rank, case, 2 * seed + ep_rank) for ep_rank in range(EP))
        issued += len(one)
        if one != other:
            different.append((seed, case[0], case[3:]))
    return different, issued


def test_fifty_schedules_and_routings_issue_the_same_on_both_ranks_of_a_group():
    different, issued = run_alone(fake_traces, 50)
    assert not different and issued > 2500


def rank_dependent_traces():
    """Record the order of collectives if it depended on the rank."""
    table = build_table("DualPipeV", PP, MICROBATCHES, 2, overlap=True)
    case = ("", table, CUTS[4], toy_moe.LAYERS, "full", True, MICROBATCHES)
    traces = [fake_step(0, case, 2)]

    def forward_first(forward, backward):
        return [Turn(1 - of, node) for of, node in interleave(backward, forward)]

    segmented_stage.interleave = forward_first
    return traces[0], fake_step(0, case, 3)


def test_an_order_that_depends_on_the_rank_would_be_seen():
    one, other = run_alone(rank_dependent_traces)
    assert one != other and Counter(one) == Counter(other)


# Errors


class Fault(RuntimeError):
    pass


def failing_rank(rank, folder, phase):
    """Run a rank that fails in `phase` in a separate process; it writes its end to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    try:
        table = build_table("DualPipeV", PP, MICROBATCHES, 2, overlap=True)
        pp_group, ep_group, _ = groups()
        schedule, stages = pipeline(
            table, CUTS[4], AllToAll(ep_group), pp_group, POLICIES["full"], True, rank=rank // EP, ep_rank=rank % EP
        )
        if rank == 2:
            spoil(stages[0].submod.layers["3"], phase)  # stage 1's last
        tokens, labels = toy_moe.batch(MICROBATCHES, rank % EP)
        schedule.run(tokens, {"labels": labels}, VALID)
        message = "no error"
    except Exception as error:
        message = "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", [])])
    with open(f"{folder}/{rank}", "w") as file:
        file.write(f"{time.time()}\n{message}")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Fault("spoilt")


def spoil(block, phase):
    calls = Counter()
    compute = block.experts.forward

    def forward(rows, counts):
        calls["all"] += 1
        if phase == "forward" and calls["all"] == 3:
            raise Fault("spoilt")
        out = compute(rows, counts)
        return Broken.apply(out) if phase == "backward" else out

    block.experts.forward = forward


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_error_names_its_place_and_stops_the_others(phase, tmp_path):
    context = get_context("forkserver")
    processes = [context.Process(target=failing_rank, args=(rank, str(tmp_path), phase)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert not any(process.is_alive() for process in processes)
    ends = [(tmp_path / str(rank)).read_text().split("\n", 1) for rank in range(4)]
    text = ends[2][1]
    assert text.startswith("Fault\nspoilt")
    assert "in segment layers.3.experts" in text and "of pipeline stage 1, microbatch" in text and phase in text
    for rank in (0, 1, 3):
        assert "no error" not in ends[rank][1]
        assert float(ends[rank][0]) - float(ends[2][0]) < 200  # and not gloo's half an hour


# Memory


class LiveBytes(TorchDispatchMode):
    """Tracks bytes of live storages that operators created, without views of parameters."""

    def __init__(self, parts):
        super().__init__()
        tensors = [t for part in parts for p in part.parameters() for t in (p, p.grad)]
        self.others = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in tensors}
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        counted_storages = self.others | {ref.cdata for ref, _ in self.made if not ref.expired()}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                ref = StorageWeakRef(tensor.untyped_storage())
                if ref.cdata not in counted_storages:
                    counted_storages.add(ref.cdata)  # of views that one operator made, such as a split, one counts
                    self.made.append((ref, tensor.untyped_storage().nbytes()))
        self.peak = max(self.peak, self.live())
        return out

    def live(self):
        self.made = [item for item in self.made if not item[0].expired()]
        return sum(nbytes for _, nbytes in self.made)


def memory(policy, counts):
    """(bytes that a microbatch keeps in a stage between forward and backward, most that one alone needs in either,
    most on pipeline rank 0 by the number of microbatches), gradients of parameters not counted. One layer a stage.
    """
    table = build_table("DualPipeV", PP, 2 * PP, 2, overlap=True)
    cuts = [range(i, i + 1) for i in range(2 * PP)]
    more = {"rank": 1, "kinds": "m" * 2 * PP}  # that has no ends: their logits are not to be counted as a layer's
    start_fake(1, PP)
    _, stages = pipeline(table, cuts, SimulatedPeer(0, (4,)), dist.group.WORLD, POLICIES[policy], False, **more)
    stage = stages[0]
    for parameter in stage.submod.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes([stage.submod]) as live:
        x = torch.randn(2, 4, toy_moe.DIM, dtype=torch.float64).requires_grad_()
        chunk, loop = Chunk(stage.lists, SimulatedPeer(0, (4,)), x), NodeLoop()
        loop.run(in_order(stage.lists.forward), lambda: chunk)
        gradient, chunk.output = torch.ones_like(chunk.output), None
        saved_bytes = live.live() - gradient.nbytes
        chunk.start_backward(gradient)
        loop.run(in_order(stage.lists.backward), lambda: chunk)
        loop.run_deferred(lambda _: True)
    most = []
    for microbatches in counts:
        table = build_table("DualPipeV", PP, microbatches, 2, overlap=True)
        start_fake(1, PP)
        schedule, stages = pipeline(
            table, cuts, SimulatedPeer(0, (4,)), dist.group.WORLD, POLICIES[policy], True, **more
        )
        for stage in stages:
            for parameter in stage.submod.parameters():
                parameter.grad = torch.zeros_like(parameter)
        tokens, labels = toy_moe.batch(microbatches, 0)
        gc.collect()
        with LiveBytes([stage.submod for stage in stages]) as all_live:
            schedule.run(tokens, {"labels": labels}, VALID)
        most.append(all_live.peak)
    return saved_bytes, live.peak, most


@pytest.mark.parametrize("policy", ["none", "full_keep_comm", "full"])
def test_peak_activations(policy):
    """2p + 1 chunks are kept, whatever the number of microbatches. Under way beside them are a forward and a backward
    in parts, and segments that wait for their weights' gradients: less than two whole microbatches."""
    saved_bytes, one, (few, many) = run_alone(memory, policy, [4 * PP, 8 * PP])
    x = 2 * 4 * toy_moe.DIM * 8
    routing = 2 * 128 + 2 * 32 + 8  # ids and order of 8 tokens by 2, counts sent and received, the balancing loss
    exchanged = 2 * 16 * toy_moe.DIM * 8
    expected = {"full": x + routing, "full_keep_comm": x + routing + exchanged}
    assert saved_bytes == expected.get(policy, saved_bytes) and saved_bytes >= expected["full"]
    tokens_and_sums = 2 * 64 + 2 * 8  # a microbatch's tokens and labels, and the balancing loss of each stage
    assert many - few <= 4 * PP * tokens_and_sums
    assert many - 8 * PP * tokens_and_sums <= (2 * PP + 1) * saved_bytes + 2 * one


def counts_and_tokens() -> tuple[list[int], list[int], bool, float]:
    dims = ParallelDims(4, 1, 4, ep=2)
    mesh = dims.build_expert_mesh("cpu")
    counts, tokens = dims.build_counts_group(mesh), mesh["ep"].get_group()
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=counts)
    return *map(dist.get_process_group_ranks, (counts, tokens)), counts is tokens, total.item()


def test_counts_have_a_group_of_their_own_of_the_same_ranks():
    first, second = ([0, 1], [0, 1], False, 1.0), ([2, 3], [2, 3], False, 5.0)
    assert run_ranks(4, counts_and_tokens) == [first, first, second, second]
