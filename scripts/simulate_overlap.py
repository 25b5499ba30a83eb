"""Simulate bench_overlap.py exactly and within seconds: the same stages, orders and loop, with a clock for each rank.

    python scripts/simulate_overlap.py                    steps in units, and to ZBV; tables in docs/dualpipev.md
    python scripts/simulate_overlap.py --p 8 --m 32 --a 1

Use it to try an order before implementing it. Besides the current orders it shows two rejected ones: pairs of forwards
while a rank has nothing else to do, and all input gradients before all weight gradients at the end. `least` is a lower
bound for any order that keeps at most 2p + 1 microbatches of a stage (for `none` only).
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bench_overlap import RUNS, Layers

from torchtitan.parallelisms.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    Table,
    count_stages,
    input_keys,
    output_keys,
    pair,
    running_order,
)
from torchtitan.parallelisms.pipeline.overlap import segments
from torchtitan.parallelisms.pipeline.overlap.chunk import NodeLoop
from torchtitan.parallelisms.pipeline.overlap.segments import (
    Node,
    NodeLists,
    RecomputePolicy,
    Turn,
    in_order,
    interleave,
)
from torchtitan.parallelisms.pipeline.tables import build_table

UNIT = 1.0  # time of attention and of experts, for each of F, I and W


class Rank:
    """The state of one rank: its clock, when its channel is free, and its microbatches."""

    def __init__(self, overlap: bool):
        self.now = self.channel = 0.0
        self.loop = NodeLoop(overlap)
        self.chunks: dict[tuple[int, int], Share] = {}  # by stage and microbatch


class Share:
    """One microbatch in one stage, like chunk.Chunk, but only its timing."""

    def __init__(self, rank: Rank, a: float):
        self.rank, self.a = rank, a
        self.flying: dict[tuple, float] = {}
        self.gradient: float | None = None  # when it arrives
        self.done = 0.0

    def run(self, node: Node) -> None:
        rank, place = self.rank, (node.phase, node.block, node.step)
        if self.gradient is not None and node.phase in (segments.BACKWARD, segments.INPUT):
            rank.now, self.gradient = max(rank.now, self.gradient), None
        if node.kind == segments.COMPUTE:
            rank.now += 0 if node.light else UNIT
        elif node.kind == segments.ISSUE:
            rank.channel = self.flying[place] = max(rank.channel, rank.now) + self.a * UNIT
        elif node.kind == segments.WAIT:
            rank.now = max(rank.now, self.flying.pop(place, 0.0))
        elif node.kind == segments.DONE:
            self.done = rank.now

    def has_weights(self, node: Node) -> bool:
        return not node.light


def step(table: Table, policy: str, a: float, overlap: bool) -> float:
    """Return the units from the start to the end of the last rank. Messages between ranks take no time."""
    stages = count_stages(table)
    lists = [
        NodeLists(Layers(1, UNIT, stage + 1 == stages).programs(), RecomputePolicy(policy)) for stage in range(stages)
    ]
    ranks = [Rank(overlap) for _ in table]
    arrivals: dict[tuple, float] = defaultdict(float)
    for number, action in running_order(table):
        rank = ranks[number]
        for group in [action.singles] if overlap else [(single,) for single in action.singles]:
            if group[0].kind != WEIGHT_GRAD:
                orders = [_nodes(lists[single.stage], single.kind) for single in group]
                rank.loop.run(_order(group, orders), *(partial(_begin, rank, s, a, arrivals, stages) for s in group))
            sent = 0.0
            for single in group:
                if single.kind != WEIGHT_GRAD:  # outputs of a pair are sent in the order of the table
                    sent = max(sent, rank.chunks[single.stage, single.microbatch].done)
                    arrivals.update((key, sent) for key in output_keys(single))
                if single.kind in (BACKWARD, WEIGHT_GRAD):
                    rank.loop.run_overdue(rank.chunks[single.stage, single.microbatch])
    for rank in ranks:
        rank.loop.run_deferred(lambda _: True)
    return max(rank.now for rank in ranks)


def _begin(rank: Rank, single: Action, a: float, arrivals: dict[tuple, float], stages: int) -> Share:
    """Begin an action: wait for its input and return its microbatch."""
    arrival = max((arrivals[key] for key in input_keys(single, stages)), default=0.0)
    share = rank.chunks.setdefault((single.stage, single.microbatch), Share(rank, a))
    if single.kind == FORWARD:
        rank.now = max(rank.now, arrival)
    else:
        share.gradient = arrival
    return share


def _nodes(lists: NodeLists, kind: str) -> list[Node]:
    """Return the nodes of an action of this kind."""
    return {FORWARD: lists.forward, BACKWARD: lists.backward, INPUT_GRAD: lists.input_grads}[kind]


def _order(group: Sequence[Action], orders: Sequence[list[Node]]) -> list[Turn]:
    """Return the order in which the nodes of one action or of a pair run."""
    if len(group) == 1:
        return in_order(*orders)
    if group[1].kind == FORWARD:  # of two forwards the first one leads, as a backward does
        return [Turn(1 - of, node) for of, node in interleave(*reversed(orders))]
    return interleave(*orders)


# Rejected orders


def forwards_in_pairs(table: Table) -> Table:
    """Pair adjacent, independent forwards before a row's first backward."""
    return [list(_paired(row)) for row in table]


def _paired(row: Sequence[Action]) -> Iterator[Action]:
    warm_up = next(index for index, action in enumerate(row) if action.kind != FORWARD)
    index = 0
    while index < len(row):
        one, two = row[index], row[index + 1] if index + 1 < warm_up else None
        if two is None or (one.microbatch == two.microbatch and one.stage + 1 == two.stage):
            yield one
            index += 1
        else:
            yield pair(one, two)
            index += 2


def weights_last(table: Table) -> Table:
    """After a row's last forward, move the weight gradients after all input gradients."""
    rows = []
    for row in table:
        end = 1 + max(i for i, action in enumerate(row) for single in action.singles if single.kind == FORWARD)
        remaining = [part for action in row[end:] for part in _split(action)]
        rows.append(row[:end] + sorted(remaining, key=lambda action: action.kind == WEIGHT_GRAD))
    return rows


def _split(action: Action) -> list[Action]:
    """Split a backward into input gradients and weight gradients."""
    return [action._replace(kind=kind) for kind in (INPUT_GRAD, WEIGHT_GRAD)] if action.kind == BACKWARD else [action]


TRIED: dict[str, Callable[[Table], Table]] = {
    "+ forwards in pairs": forwards_in_pairs,
    "+ weights last": weights_last,
    "+ both": lambda table: weights_last(forwards_in_pairs(table)),
}


def least(p: int, m: int, a: float) -> float:
    """Return a lower bound for a step of DualPipeV under `none`.

    It looks at the rank of the middle stages p - 1 and p, which keeps at most 2p + 1 microbatches of a stage. However
    much is hidden, a stage takes `hop` units for a forward, and for an input gradient.

    Before its first backward the rank waits for 2p forwards and p - 1 backwards of other ranks and computes at most
    2p + 1 forwards. After the rank's last forward that microbatch still passes p - 1 forwards, 2p backwards and a last
    weight gradient, while the rank has only the backwards of its kept microbatches to compute.
    """
    hop, max_microbatches = 2 * UNIT + 2 * a * UNIT, 2 * p + 1
    way = (3 * p - 1) * hop
    return 12 * m * UNIT + max(0, way - 2 * max_microbatches * UNIT) + max(0, way + UNIT - 4 * max_microbatches * UNIT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--p", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--m", type=int, default=16, help="microbatches")
    parser.add_argument("--a", type=float, nargs="+", default=[1.0, 0.5], help="units that an all-to-all takes")
    args = parser.parse_args()
    for a in args.a:
        for policy in ("none", "full_keep_comm", "full"):
            tables = {run: build_table(name, args.p, args.m, 2, overlap=on) for run, (name, on) in RUNS.items()}
            units = {run: step(tables[run], policy, a, on) for run, (_, on) in RUNS.items()}
            best = tables["DualPipeV + overlap"]
            units |= {name: step(change(best), policy, a, True) for name, change in TRIED.items()}
            if policy == "none":
                units["least"] = least(args.p, args.m, a)
            shown = ", ".join(f"{run} {value:g} ({value / units['ZBV']:.3f})" for run, value in units.items())
            print(f"p={args.p} m={args.m} a={a:g} {policy}: {shown}")
