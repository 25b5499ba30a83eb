"""The order in which the nodes of microbatches run, and the loop that runs them.

While an all-to-all is in flight, something else is computed: the other direction of a pair, or gradients of weights,
which nobody waits for. Both are decided by the lists of nodes and nothing else (no clocks, no arrivals), so all ranks
of an expert-parallel group issue the same collectives in the same order, and sums come out the same in every run: no
barriers, no locks, no second thread.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torchtitan.parallelisms.pipeline.overlap.chunk import Chunk
from torchtitan.parallelisms.pipeline.overlap.segments import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    ISSUE,
    RECOMPUTE,
    WAIT,
    WEIGHT,
    Node,
)
from torchtitan.process.exit import add_note

PHASES = {
    FORWARD: "forward",
    RECOMPUTE: "recomputation",
    BACKWARD: "backward",
    INPUT: "backward of the inputs",
    WEIGHT: "backward of the weights",
}
CARRIED = 2
"""Weight gradients that may wait for a gap later than the table has them, each with its segment's activations. In a
simulation at p=4, m=16 with all-to-alls as long as the experts, 2 take 15 % off ZBV and 2 % off DualPipeV; more do not
help."""


class Turn(NamedTuple):
    """`node` of the microbatch that is number `of` among those that run together."""

    of: int
    node: Node


def slots(nodes: Iterable[Node]) -> list[list[Node]]:
    """Cut behind every issue: what follows may have to wait, so there the other direction takes over."""
    cut: list[list[Node]] = [[]]
    for node in nodes:
        cut[-1].append(node)
        if node.kind == ISSUE:
            cut.append([])
    return [slot for slot in cut if slot]


def merge(forward: Iterable[Node], backward: Iterable[Node]) -> list[Turn]:
    """Slots in turn, in proportion to how many there are of each; on ties the backward (1) before the forward (0), for
    its first all-to-all can go before anything is computed.

    Where the forward issues one and the backward is about to, with next to nothing to compute before, the backward's
    goes first: it is waited for sooner, and all-to-alls travel one after the other.
    """
    forward_slots, backward_slots = slots(forward), slots(backward)
    order: list[Turn] = []
    f = b = 0
    while f < len(forward_slots) or b < len(backward_slots):
        if b < len(backward_slots) and b * len(forward_slots) <= f * len(backward_slots):
            steps_back = (
                bool(order) and order[-1].of == 0 and order[-1].node.kind == ISSUE and _hastens(backward_slots[b])
            )
            held = [order.pop()] if steps_back else []
            order += [*(Turn(1, node) for node in backward_slots[b]), *held]
            b += 1
        else:
            order += [Turn(0, node) for node in forward_slots[f]]
            f += 1
    return order


def _hastens(slot: list[Node]) -> bool:
    """Return True if it ends in an all-to-all with only light steps before that."""
    return slot[-1].kind == ISSUE and all(node.light for node in slot if node.kind == COMPUTE)


def alone(nodes: Iterable[Node]) -> list[Turn]:
    return [Turn(0, node) for node in nodes]


class Loop:
    """Runs everything of a rank, on the thread that calls it.

    Without `overlap`, an all-to-all is waited for where it is issued, and weight gradients come where the table has
    them. With it, they fill the gaps: where nothing else is computed between an issue and its wait.
    """

    def __init__(self, overlap: bool = True, carried: int = CARRIED):
        self.overlap, self.carried = overlap, carried if overlap else 0
        self.weights: deque[tuple[Chunk, Node]] = deque()  # oldest first

    def run(self, order: Sequence[Turn], *begin: Callable[[], Chunk]) -> None:
        """The turns of several microbatches; each begins at its first one. What is raised says in which segment, stage
        and microbatch.
        """
        chunks: dict[int, Chunk] = {}
        uncovered: set[tuple] = set()  # all-to-alls in flight that nothing was computed beside yet
        waited: set[tuple] = set()
        for of, node in order:
            if of not in chunks:
                chunks[of] = begin[of]()
            chunk, place = chunks[of], (of, node.phase, node.block, node.step)
            if node.kind == WAIT:
                if place in waited:
                    continue
                if place in uncovered and self.weights:
                    self._run(*self.weights.popleft())
                    uncovered.clear()
                uncovered.discard(place)
            self._run(chunk, node)
            if node.kind == ISSUE and self.overlap:
                uncovered.add(place)
            elif node.kind == ISSUE:
                self._run(chunk, node._replace(kind=WAIT))
                waited.add(place)
            elif node.kind == COMPUTE and not node.light:
                uncovered.clear()
            if node.kind == COMPUTE and node.phase == INPUT and chunk.has_weights(node):
                self.weights.append((chunk, node._replace(phase=WEIGHT)))

    def catch_up(self, chunk: Chunk) -> None:
        """Run what may not be carried further, where the table has the weight gradients of `chunk`."""
        if not self.overlap:
            self.finish(lambda other: other is chunk)
        while len(self.weights) > self.carried and self.overlap:
            self._run(*self.weights.popleft())

    def finish(self, is_due: Callable[[Chunk], bool]) -> None:
        """Run all weight gradients of the chunks for which `is_due` holds."""
        waiting, self.weights = self.weights, deque()
        for chunk, node in waiting:
            if is_due(chunk):
                self._run(chunk, node)
            else:
                self.weights.append((chunk, node))

    def _run(self, chunk: Chunk, node: Node) -> None:
        try:
            chunk.run(node)
        except Exception as error:
            add_note(error, f"in segment {node.name} ({node.kind}, {PHASES[node.phase]}) of {chunk.place}")
            raise
