"""A predicted step as a trace in Chrome's format, which Perfetto opens beside a profile.

A track for each rank of a pipeline has its actions, as they are simulated; without a pipeline, forward and backward of
each block. A track for each mesh axis has the messages of the first rank, before computation hides any. A message of
an axis takes an equal share of the axis' time, and begins with an action, or when the one before it has ended: which
action issues how much of them is not modelled.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.core.errors import JobError
from torchtitan.parallelisms.pipeline.actions import ACTION_NAMES, BACKWARD, FORWARD, WEIGHT_GRAD
from torchtitan.planner.plan import Plan
from torchtitan.planner.search import TICK, PipelineTimer
from torchtitan.planner.time.messages import PARTS, StepTime
from torchtitan.planner.time.step_time import StepTimer

MOST_ACTIONS = 100_000
"""Most actions of a trace: more take minutes to simulate, and hundreds of MB."""
RANKS, MESSAGES = 1, 2
"""Numbers of the groups of tracks."""


class TraceSpan(NamedTuple):
    """An action of a rank or a message. Seconds from the begin of the step."""

    name: str
    start: float
    end: float


def check_ending(path: Path | None) -> None:
    """Raise JobError for the name of a file that is no trace's."""
    if path is not None and path.suffix != ".json":
        raise JobError(f"--trace: given {str(path)!r}; allowed: names with .json; rename it")


def write_trace(path: Path, timer: PipelineTimer, plan: Plan) -> None:
    """Write the trace of a step. Raises JobError for a step of too many actions, OSError if it cannot be written."""
    actions = 3 * plan.passes * plan.microbatches * (timer.timer.workload.args.n_layers if plan.pp == 1 else plan.pp)
    actions *= plan.stages_per_rank
    if actions > MOST_ACTIONS:
        raise JobError(f"--trace: a step of {actions:,} actions; allowed: {MOST_ACTIONS:,}; give a smaller batch")
    step = timer.step_time(plan)
    tracks = _pipeline(timer, plan) if plan.pp > 1 else [_blocks(timer.timer, plan)]
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(tracks):
        events += _track(RANKS, rank, f"rank {rank}", [*spans, *_end(step, max(row[-1].end for row in tracks))])
    issuing = [span for span in tracks[0] if not span.name.startswith(ACTION_NAMES[WEIGHT_GRAD])]
    for number, (axis, message) in enumerate(timer.timer.messages_of_step(plan, 0).items()):
        events += _track(MESSAGES, number, axis, _queued(axis, message.seconds, issuing))
    groups = {RANKS: f"predicted step: {plan}", MESSAGES: "messages of the first rank, before any is hidden"}
    events += [_name("process_name", group, 0, name) for group, name in groups.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _blocks(timer: StepTimer, plan: Plan) -> list[TraceSpan]:
    """Return forward and backward of each block and of the head, pass by pass."""
    (stage,) = timer.stages(plan)
    block_of_kind = {kind: timer.block(plan, kind, plan.replayed_share(stage.total())) for kind in stage}
    blocks = [(f"block {layer}", block_of_kind[kind]) for layer, kind in enumerate(timer.workload.kind_of_layer)]
    product, logits = timer.head(plan)
    cheap = logits + timer.waited_at_ends(plan, embedding=True, head=True) / 2
    head = product + cheap, product * (1 + (timer.workload.base is None)) + cheap
    forward = [*((name, block.forward) for name, block in blocks), ("head", head[0])]
    backward = [("head", head[1]), *((name, block.input_grad + block.weight_grad) for name, block in blocks[::-1])]
    kinds = (FORWARD, forward), (BACKWARD, backward)
    actions = [(f"{ACTION_NAMES[kind]} {name}", seconds) for kind, lengths in kinds for name, seconds in lengths]
    return _one_by_one(actions * plan.passes)


def _pipeline(timer: PipelineTimer, plan: Plan) -> list[list[TraceSpan]]:
    """Return the simulated actions of each rank, pass by pass. Ranks that take turns on a core end earlier."""
    simulation = timer.simulation(plan, plan.microbatches)
    tick = TICK / timer.timer.messages.turns(plan)
    length = float(simulation.makespan) * tick
    return [
        [
            TraceSpan(
                f"{ACTION_NAMES[span.action.kind]} stage {span.action.stage}, microbatch {span.action.microbatch}",
                number * length + float(span.start) * tick,
                number * length + float(span.end) * tick,
            )
            for number in range(plan.passes)
            for span in spans
        ]
        for spans in simulation.spans
    ]


def _end(step: StepTime, start: float) -> list[TraceSpan]:
    """Return what follows the actions of all ranks: sums of gradients, and the parts that are of a whole step."""
    of_step = {name: step.parts[name] for name in ("fsdp", "optimizer", "stragglers")}
    sums = step.seconds - start - sum(of_step.values())
    parts = [("sums of gradients", sums), *((PARTS[name], seconds) for name, seconds in of_step.items())]
    return _one_by_one([(name, seconds) for name, seconds in parts if seconds > TICK], start)


def _one_by_one(lengths: Iterable[tuple[str, float]], start: float = 0.0) -> list[TraceSpan]:
    spans = []
    for name, seconds in lengths:
        spans.append(TraceSpan(name, start, start + seconds))
        start += seconds
    return spans


def _queued(axis: str, seconds: float, issuing: list[TraceSpan]) -> Iterator[TraceSpan]:
    """Yield a message of an equal share of the seconds for each action, one after the other."""
    end, share = 0.0, seconds / len(issuing)
    for action in issuing:
        start = max(end, action.start)
        end = start + share
        yield TraceSpan(f"{axis} of {action.name}", start, end)


def _track(group: int, number: int, title: str, spans: Iterable[TraceSpan]) -> Iterator[dict[str, Any]]:
    """Yield the events of a track, in microseconds."""
    yield _name("thread_name", group, number, title)
    for span in spans:
        times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
        yield {"ph": "X", "pid": group, "tid": number, "name": span.name, **times}


def _name(kind: str, group: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": group, "tid": number, "name": kind, "args": {"name": name}}
