"""The execution order of the nodes of one or two microbatches, and the loop that runs them.

While an all-to-all is in flight, the loop computes something else: the other direction of a forward-backward pair, or
deferred weight gradients. The order depends on the lists of nodes alone, never on timing. So all ranks of an
expert-parallel group issue the same collectives in the same order, and sums are reproducible, without barriers, locks
or a second thread.
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
    """A node, and the index `of` of its microbatch among those that run together."""

    of: int
    node: Node


def slots(nodes: Iterable[Node]) -> list[list[Node]]:
    """Split the nodes after every issue. The next node may have to wait, so the other direction runs there."""
    pieces: list[list[Node]] = [[]]
    for node in nodes:
        pieces[-1].append(node)
        if node.kind == ISSUE:
            pieces.append([])
    return [slot for slot in pieces if slot]


def merge(forward: Iterable[Node], backward: Iterable[Node]) -> list[Turn]:
    """Interleave the slots of a forward (microbatch 0) and a backward (microbatch 1), in proportion to their numbers.

    On ties the backward goes first, as its first all-to-all needs no computation. All-to-alls run one after the other:
    if the forward has just issued one and the backward would issue one after light steps only, the order of the two is
    reversed, because the backward waits for its own sooner.
    """
    forward_slots, backward_slots = slots(forward), slots(backward)
    order: list[Turn] = []
    f = b = 0
    while f < len(forward_slots) or b < len(backward_slots):
        if b < len(backward_slots) and b * len(forward_slots) <= f * len(backward_slots):
            steps_back = (
                bool(order) and order[-1].of == 0 and order[-1].node.kind == ISSUE and _hastens(backward_slots[b])
            )
            postponed = [order.pop()] if steps_back else []
            order += [*(Turn(1, node) for node in backward_slots[b]), *postponed]
            b += 1
        else:
            order += [Turn(0, node) for node in forward_slots[f]]
            f += 1
    return order


def _hastens(slot: list[Node]) -> bool:
    """Return True if the slot ends in an all-to-all and computes only light steps before it."""
    return slot[-1].kind == ISSUE and all(node.light for node in slot if node.kind == COMPUTE)


def alone(nodes: Iterable[Node]) -> list[Turn]:
    return [Turn(0, node) for node in nodes]


class Loop:
    """The loop that runs all nodes of a rank, on the calling thread.

    Without `overlap`, it waits for each all-to-all right after the issue, and computes weight gradients where the table
    has them. With `overlap`, weight gradients fill the gaps where nothing else runs between an issue and its wait.
    """

    def __init__(self, overlap: bool = True, carried: int = CARRIED):
        self.overlap, self.carried = overlap, carried if overlap else 0
        self.weights: deque[tuple[Chunk, Node]] = deque()  # oldest first

    def run(self, order: Sequence[Turn], *begin: Callable[[], Chunk]) -> None:
        """Run the turns. `begin[i]` creates the chunk of microbatch i at its first turn.

        Exceptions get a note with the segment, stage and microbatch.
        """
        chunks: dict[int, Chunk] = {}
        uncovered: set[tuple] = set()  # all-to-alls in flight that no computation has overlapped yet
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
        """Run overdue weight gradients. Call it where the table has the weight gradients of `chunk`.

        With overlap, up to `carried` of them stay deferred; without it, all of `chunk` run.
        """
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
