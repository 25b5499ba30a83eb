"""Pipelines of segmented stages for tests: on gloo ranks, or a single rank with simulated peers.

Ranks are numbered with expert parallel inside, so of 4 ranks 0 and 1 are pipeline rank 0. The reference is one process
with all experts over the data of both expert-parallel ranks.
"""

import random
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.pipelining._utils import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support import toy_moe
from tests.support.segment_policies import POLICIES
from torchtitan.parallelisms.pipeline.actions import stage_ranks
from torchtitan.parallelisms.pipeline.overlap.exchange import AllToAll, SplitSizes
from torchtitan.parallelisms.pipeline.overlap.stage import SegmentedSchedule, SegmentedStage
from torchtitan.parallelisms.pipeline.tables import build_table

PP, EP, MICROBATCHES, VALID = 2, 2, 6, 50.0
CUTS = {2: (range(0, 4), range(4, 6)), 4: (range(0, 2), range(2, 4), range(4, 5), range(5, 6))}
"""Layers of each stage, of 2 or 4; of the four, one has no experts and the others one layer or two with them."""
SCHEDULES = {
    "1F1B": ("1F1B", 1, False),
    "Interleaved1F1B": ("Interleaved1F1B", 2, False),
    "InterleavedZeroBubble": ("InterleavedZeroBubble", 2, False),
    "ZBVZeroBubble": ("ZBVZeroBubble", 2, False),
    "DualPipeV": ("DualPipeV", 2, False),
    "DualPipeV + overlap": ("DualPipeV", 2, True),
    "1F1B + overlap": ("1F1B", 1, True),
    "ZBVZeroBubble + overlap": ("ZBVZeroBubble", 2, True),
}
_groups: dict[str, list[dist.ProcessGroup]] = {}


def groups():
    """Return this rank's process groups (pp, ep, ep for counts)."""
    if not _groups:
        world = range(dist.get_world_size())
        _groups["pp"] = [dist.new_group([r for r in world if r % EP == e]) for e in range(EP)]
        for name in ("ep", "counts"):
            _groups[name] = [dist.new_group([r for r in world if r // EP == p]) for p in range(len(world) // EP)]
    pp, ep = dist.get_rank() // EP, dist.get_rank() % EP
    return _groups["pp"][ep], _groups["ep"][pp], _groups["counts"][pp]


class Traced:
    """A transport that records all calls."""

    def __init__(self, transport):
        self.transport, self.size, self.trace = transport, transport.size, []

    def issue(self, rows, send, receive):
        self.trace.append(("rows", rows.shape[1], str(rows.dtype)))
        return self.transport.issue(rows, send, receive)

    def issue_counts(self, counts):
        self.trace.append(("counts", len(counts)))
        return self.transport.issue_counts(counts)


def pipeline(
    table,
    cuts,
    transport,
    group,
    policy,
    overlap,
    *,
    rank,
    ep_rank=0,
    kinds=toy_moe.LAYERS,
    dtype=torch.float64,
    prepare=None,
):
    owners = stage_ranks(table)
    hidden = torch.empty(2, 4, toy_moe.DIM, dtype=dtype, device="meta", requires_grad=True)
    loss = torch.empty((), dtype=torch.promote_types(dtype, torch.float32), device="meta", requires_grad=True)
    stages = []
    for index in sorted(stage for stage, owner in owners.items() if owner == rank):
        part = toy_moe.Part(cuts[index], EP, kinds=kinds).double()
        toy_moe.fill_(part, ep_rank, EP)
        if prepare:
            prepare(part)  # the master stays in float64
        stage = SegmentedStage(
            part,
            index,
            len(owners),
            torch.device("cpu"),
            input_args=hidden if index else torch.empty(2, 4, dtype=torch.long, device="meta"),
            output_args=loss if index == len(owners) - 1 else hidden,
            group=group,
            programs=part.segment_programs(),
            context=part.segment_context,
            transport=transport,
            policy=policy,
        )
        stage.loss_gradient = 1 / VALID
        stages.append(stage)
    microbatches = sum(single.kind == "F" for row in table for a in row for single in a.singles) // len(owners)
    return SegmentedSchedule(stages, table, microbatches, overlap), stages


def reference(kinds=toy_moe.LAYERS, microbatches=MICROBATCHES, dtype=torch.float64):
    """Return (loss, balancing losses, gradients) of one process over the data of all ranks.

    They are computed in `dtype` and summed over microbatches in float64.
    """
    part = toy_moe.Part(kinds=kinds).double()
    toy_moe.fill_(part)
    part.to(dtype)
    grads = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in part.named_parameters()}
    total = balance = 0.0
    for rank in range(EP):
        tokens, labels = toy_moe.batch(microbatches, rank)
        for x, y in zip(tokens.split(2), labels.split(2), strict=True):
            loss, balancing_loss = toy_moe.plain_forward(part, x, y)
            ((loss + balancing_loss) / VALID).backward()
            total, balance = total + loss.item() / VALID, balance + balancing_loss.item()
            for name, parameter in part.named_parameters():
                if parameter.grad is not None:
                    grads[name] += parameter.grad
                    parameter.grad = None
    return total, balance, grads


def errors(runtime, stages, expected, microbatches):
    """Run a step; return the largest error of losses and gradients, relative to the largest of their kind."""
    total, balance, grads = expected
    tokens, labels = toy_moe.batch(microbatches, dist.get_rank() % EP)
    loss = runtime.run(tokens, {"labels": labels}, VALID)
    balancing_loss = sum(sum(map(float, stage.segment_losses)) for stage in stages)
    losses = torch.tensor([0.0 if loss is None else loss.item(), balancing_loss], dtype=torch.float64)
    dist.all_reduce(losses)
    all_errors = [abs(losses[0].item() - total), abs(losses[1].item() - balance)]
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            gradient = grads[name]
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if hasattr(grad, "full_tensor"):
                grad = grad.full_tensor()
            elif ".experts." in name:
                gradient = gradient.chunk(EP)[dist.get_rank() % EP]
            else:
                dist.all_reduce(grad, group=groups()[1])
            scale = grads[name].abs().max().clamp_min(1e-3)  # gradients of experts without tokens are zero
            all_errors.append(((grad - gradient).abs().max() / scale).item())
    return max(all_errors)


def run_case(name, policy, overlap, table, cuts, kinds=toy_moe.LAYERS, microbatches=MICROBATCHES, **more):
    """Run a schedule on this rank; return its errors, the trace of its transport and how often each segment ran."""
    pp_group, ep_group, counts_group = groups()
    transport = Traced(AllToAll(ep_group, counts_group))
    ep_rank = dist.get_rank() % EP
    runtime, stages = pipeline(
        table, cuts, transport, pp_group, POLICIES[policy], overlap,
        rank=dist.get_rank() // EP, ep_rank=ep_rank, kinds=kinds, **more,
    )  # fmt: skip
    expected = reference(kinds, microbatches, more.get("dtype", torch.float64))
    toy_moe.runs.clear()
    error = errors(runtime, stages, expected, microbatches)
    traces = [None] * EP
    dist.all_gather_object(traces, transport.trace, group=ep_group)
    layers = [int(i) for stage in stages for i in stage.submod.layers]
    return {
        "case": (name, policy, overlap),
        "error": error,
        "same trace": traces[0] == traces[1],
        "issued": Counter(entry[0] for entry in transport.trace),
        "layers with experts": sum(kinds[i] == "m" for i in layers),
        "runs": dict(toy_moe.runs),
        "left": [len(runtime.loop.deferred), *(len(stage.open_chunks) for stage in stages)],
    }


def random_case(chooser):
    """Draw (schedule, table, cuts, kinds, policy, overlap, microbatches) for PP ranks."""
    schedule = chooser.choice(list(SCHEDULES))
    name, chunks, _ = SCHEDULES[schedule]
    overlap = chooser.random() < 0.6
    microbatches = 2 * PP * chooser.choice((1, 2))
    table = build_table(name, PP, microbatches, chunks, overlap=overlap)
    counts = [chooser.choice((1, 1, 2, 3)) for _ in range(PP * chunks)]
    kinds = "".join(chooser.choice("dmm") for _ in range(sum(counts)))
    cuts = [range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
    return name, table, cuts, kinds, chooser.choice(list(POLICIES)), overlap, microbatches


def check(result, policy, microbatches=MICROBATCHES):
    """Check errors (1e-10: float64 sums in another order) and how often each segment ran."""
    assert result["error"] < 1e-10 and result["same trace"] and not any(result["left"]), result
    per_layer = result["layers with experts"] * microbatches
    assert result["issued"]["counts"] == per_layer, result
    assert result["issued"]["rows"] == (6 if policy == "full" else 4) * per_layer, result
    for (_, segment), count in result["runs"].items():
        recomputed = policy not in ("none", "selective 2") and segment != "choose"
        if policy != "selective 2":
            assert count == (1 + recomputed) * microbatches, (segment, result)


# One rank of a pipeline with simulated peers


class SimulatedPeer:
    """A transport with a simulated peer that sends zeros, and random numbers of rows."""

    size = EP

    def __init__(self, seed, counts=(0, 0, 1, 5)):
        self.random, self.counts = random.Random(seed), counts

    def issue(self, rows, send, receive):
        assert len(rows) == sum(send)
        return Finished(rows.new_zeros((sum(receive), *rows.shape[1:])))

    def issue_counts(self, counts):
        received = torch.tensor([self.random.choice(self.counts) for _ in counts]).view(EP, -1)
        return Finished(SplitSizes(received, counts.view(EP, -1).sum(1).tolist(), received.sum(1).tolist()))


class Finished:
    """The handle of an exchange that is complete."""

    def __init__(self, value):
        self.value = value

    def wait(self):
        return self.value


def assume_known_shapes(schedule, stages, *args):
    """Replace torch's vote of the ranks on whether shapes are known, since simulated peers cannot vote."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def start_fake(rank, world):
    """Initialize a process group of simulated peers."""
    SegmentedSchedule._warmup_p2p = assume_known_shapes
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def fake_step(rank, case, seed):
    """Return the transport trace of one rank with simulated peers and routing drawn from `seed`."""
    _, table, cuts, kinds, policy, overlap, microbatches = case
    start_fake(rank, PP)
    transport = Traced(SimulatedPeer(seed))
    runtime, stages = pipeline(
        table, cuts, transport, dist.group.WORLD, POLICIES[policy], overlap, rank=rank, kinds=kinds
    )
    generator = torch.Generator().manual_seed(seed)
    experts = seed % (toy_moe.EXPERTS + 1)  # one seed in five sends everything to the first ones
    for stage in stages:
        for block in stage.submod.layers.values():
            block.choose = lambda scores: (
                torch.rand(scores.shape, generator=generator).topk(2).indices % max(experts, 1)
            )
    tokens, labels = toy_moe.batch(microbatches, seed)
    runtime.run(tokens, {"labels": labels}, VALID)
    return transport.trace
