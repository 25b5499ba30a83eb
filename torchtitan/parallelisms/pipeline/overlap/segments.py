"""Blocks cut into segments with separate autograd graphs, so that the forward, backward and recomputation of two
microbatches can be interleaved (as in DualPipe, arXiv:2412.19437).

A Program lists the steps of a block: local computations (Segment) and the all-to-alls between them (CountExchange,
RowExchange). A name in it denotes one tensor. Each tensor between segments is a detached leaf: the segments that read
it accumulate their gradients in it. The programs and the recompute policy alone determine the nodes of a stage's
forward and backward (NodeLists). So the nodes are known in advance and equal on all ranks of an expert-parallel group.

The policy selects the tensors that stay after the forward. Each segment with dropped tensors is recomputed once, before
backward needs them, with the random state of its forward. Routing decisions (Notes.once) and split sizes always stay,
so the sizes are never exchanged twice.

While an all-to-all is in flight, a rank computes something else: the other direction of a forward-backward pair, or
deferred weight gradients. The order of the nodes (`interleave`) depends on their lists alone, never on timing. So all
ranks of an expert-parallel group issue the same collectives in the same order, and sums are reproducible, without
barriers, locks or a second thread.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan.parallelisms.steps import Segment

POLICIES = ("none", "selective", "full_keep_comm", "full")


@dataclass(frozen=True)
class CountExchange:
    """The exchange that tells every rank how many rows it will receive.

    It reads notes["counts"] (int64 [experts], for all experts of the group, set by an earlier segment) and writes
    notes["sizes"] (exchange.Sizes).
    """

    name: str = "counts"


@dataclass(frozen=True)
class RowExchange:
    """An all-to-all of rows from `source` to `target` by notes["sizes"]; with `back`, in the reverse direction."""

    name: str
    source: str
    target: str
    back: bool = False


Step = Segment | CountExchange | RowExchange


@dataclass(frozen=True)
class Program:
    """The steps of a block, the embedding or the head, in order.

    `recompute`: False if the policy does not apply. `make_shared`: as in StepChain. Raises ValueError if a name
    is read before it is assigned, or assigned twice.
    """

    name: str
    steps: tuple[Step, ...]
    recompute: bool = True
    make_shared: Callable[[Any], Any] | None = None
    input: str = "x"
    output: str = "out"
    maker: dict[str, int] = field(init=False, repr=False, compare=False)
    users: dict[str, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        maker, users = {self.input: -1}, {self.input: []}
        for index, step in enumerate(self.steps):
            for name in input_names(step):
                if name not in maker:
                    raise ValueError(
                        f"{self.name}: {step.name} needs {name!r}; made before it are {', '.join(maker)}: "
                        f"correct its name or the order of the steps"
                    )
                users[name].append(index)
            for name in output_names(step):
                if name in maker:
                    raise ValueError(f"{self.name}: {step.name} makes {name!r} a second time: give it another name")
                maker[name], users[name] = index, []
        if self.output not in maker:
            raise ValueError(f"{self.name}: no step makes the output {self.output!r} (there are {', '.join(maker)})")
        object.__setattr__(self, "maker", maker)
        object.__setattr__(self, "users", users)


def input_names(step: Step) -> tuple[str, ...]:
    if isinstance(step, Segment):
        return step.inputs
    return (step.source,) if isinstance(step, RowExchange) else ()


def output_names(step: Step) -> tuple[str, ...]:
    if isinstance(step, Segment):
        return step.outputs
    return (step.target,) if isinstance(step, RowExchange) else ()


@dataclass(frozen=True)
class RecomputePolicy:
    """The recompute policy: the tensors that stay after the forward.

    none: everything, with its graph. full: only the block's input. full_keep_comm: the input and the results of
    all-to-alls. selective: the same and the results of operators for which `save_op` is True; or, with `every` = n > 1,
    full_keep_comm for every n-th block and none for the others.
    """

    mode: str = "none"
    save_op: Callable[[Any], bool] | None = None
    every: int = 1
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        if self.mode not in POLICIES:
            raise ValueError(f"recompute policy {self.mode!r}: choose one of {', '.join(POLICIES)}")
        if self.mode == "selective" and self.save_op is None and self.every == 1:
            raise ValueError("selective recompute needs the operators to save, or every how many blocks it is for")

    def keeps_graphs(self, programs: Sequence[Program], block: int) -> bool:
        """Return True if the forward of this block keeps its autograd graphs, so that nothing is recomputed."""
        if self.mode == "none" or not programs[block].recompute:
            return True
        number = sum(program.recompute for program in programs[:block])
        return number % self.every != 0

    def saved_names(self, program: Program) -> set[str]:
        """Return the names of the tensors that stay if the graphs are dropped."""
        exchanged = {step.target for step in program.steps if isinstance(step, RowExchange)}
        return {program.input} | (set() if self.mode == "full" else exchanged)


COMPUTE, ISSUE, POST, WAIT, DONE = "compute", "issue", "post", "wait", "done"
"""Kinds of nodes. post: the issue of a count exchange, which is too short to hide anything behind; done: the output or
the gradient of the input is there."""
FORWARD, RECOMPUTE, BACKWARD, INPUT, WEIGHT = "F", "R", "B", "I", "W"


class Node(NamedTuple):
    kind: str
    phase: str
    block: int
    step: int
    name: str = ""
    light: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.phase} {self.name}"


class NodeLists:
    """The nodes of a stage's forward, full backward and input-gradient backward, under one policy.

    After an `INPUT` node, the weight gradients of its segment can be computed at any later time.
    """

    def __init__(self, programs: Sequence[Program], policy: RecomputePolicy):
        self.programs, self.policy = tuple(programs), policy
        self.forward = list(self._forward())
        self.backward = self._backward(split=False)
        self.input_grads = self._backward(split=True)

    def node(self, kind: str, phase: str, block: int, index: int) -> Node:
        program = self.programs[block]
        step = program.steps[index]
        return Node(kind, phase, block, index, f"{program.name}.{step.name}", isinstance(step, Segment) and step.light)

    def _forward(self) -> Iterator[Node]:
        for block, program in enumerate(self.programs):
            in_flight: list[int] = []
            for index, step in enumerate(program.steps):
                for issued in [i for i in in_flight if _needs(step, program.steps[i])]:
                    in_flight.remove(issued)
                    yield self.node(WAIT, FORWARD, block, issued)
                if isinstance(step, Segment):
                    yield self.node(COMPUTE, FORWARD, block, index)
                else:
                    yield self.node(ISSUE if isinstance(step, RowExchange) else POST, FORWARD, block, index)
                    in_flight.append(index)
            yield from (self.node(WAIT, FORWARD, block, i) for i in in_flight)
        yield Node(DONE, FORWARD, len(self.programs) - 1, -1, "output")

    def _backward(self, split: bool) -> list[Node]:
        """Return the nodes of the backward.

        `split`: defer the weight gradients of all segments; otherwise only of segments with an awaited input gradient.
        """
        nodes: list[Node] = []
        for block in reversed(range(len(self.programs))):
            nodes += _BlockBackward(self, block, split).build()
        nodes.append(Node(DONE, INPUT, 0, -1, "input gradient"))
        return nodes


def _needs(step: Step, issued: Step) -> bool:
    if isinstance(issued, CountExchange):
        return isinstance(step, RowExchange)
    return issued.target in input_names(step)


class _BlockBackward:
    """A builder of the backward of one block, with its recomputation.

    A segment is recomputed as late as possible, but before the wait for the gradient of its output, so that the
    recomputation overlaps with that all-to-all.
    """

    def __init__(self, lists: NodeLists, block: int, split: bool):
        self.lists, self.block, self.split = lists, block, split
        self.program = lists.programs[block]
        self.keeps_graphs = lists.policy.keeps_graphs(lists.programs, block)
        self.available = set(self.program.maker) if self.keeps_graphs else lists.policy.saved_names(self.program)
        self.recomputed: set[int] = set()
        self.nodes: list[Node] = []

    def build(self) -> list[Node]:
        steps = self.program.steps
        in_flight: list[int] = []
        for index in reversed(range(len(steps))):
            step = steps[index]
            if isinstance(step, Segment):
                self.recompute(index)
                for issued in [i for i in in_flight if steps[i].source in step.outputs]:
                    in_flight.remove(issued)
                    self.add(WAIT, BACKWARD, issued)
                self.backward_of(index)
            elif isinstance(step, RowExchange):
                for issued in [i for i in in_flight if steps[i].source == step.target]:
                    in_flight.remove(issued)
                    self.add(WAIT, BACKWARD, issued)
                self.make(step.target)  # its shape is needed if no gradient has come for it
                self.add(ISSUE, BACKWARD, index)
                in_flight.append(index)
        for issued in in_flight:
            self.add(WAIT, BACKWARD, issued)
        return self.nodes

    def add(self, kind: str, phase: str, index: int) -> None:
        self.nodes.append(self.lists.node(kind, phase, self.block, index))

    def backward_of(self, index: int) -> None:
        step = self.program.steps[index]
        split = not step.light and (self.split or self.is_awaited(index))
        self.add(COMPUTE, INPUT if split else BACKWARD, index)

    def is_awaited(self, index: int) -> bool:
        """Return True if an all-to-all or the next rank waits for the gradient of this segment's input."""
        makers = [self.program.maker[name] for name in self.program.steps[index].inputs]
        if any(maker >= 0 and isinstance(self.program.steps[maker], RowExchange) for maker in makers):
            return True
        before = self.lists.programs[self.block - 1].steps if self.block else ()
        return -1 in makers and (not self.block or any(isinstance(step, RowExchange) for step in before))

    def recompute(self, index: int) -> None:
        if self.keeps_graphs or index in self.recomputed:
            return
        step = self.program.steps[index]
        self.recomputed.add(index)
        for name in input_names(step):
            self.make(name)
        if isinstance(step, Segment):
            self.add(COMPUTE, RECOMPUTE, index)
        else:
            self.add(ISSUE, RECOMPUTE, index)
            self.add(WAIT, RECOMPUTE, index)
        self.available.update(output_names(step))

    def make(self, name: str) -> None:
        if name not in self.available:
            self.recompute(self.program.maker[name])


# Execution order of one or two microbatches


class Turn(NamedTuple):
    """A node, and the index of its chunk among the one or two that run together."""

    chunk: int
    node: Node


def split_after_issues(nodes: Iterable[Node]) -> list[list[Node]]:
    """Split the nodes after every issue. The next node may have to wait, so the other direction runs there."""
    pieces: list[list[Node]] = [[]]
    for node in nodes:
        pieces[-1].append(node)
        if node.kind == ISSUE:
            pieces.append([])
    return [slot for slot in pieces if slot]


def interleave(forward: Iterable[Node], backward: Iterable[Node]) -> list[Turn]:
    """Interleave the slots of a forward (microbatch 0) and a backward (microbatch 1), in proportion to their numbers.

    On ties the backward goes first, as its first all-to-all needs no computation. All-to-alls run one after the other:
    if the forward has just issued one and the backward would issue one after light steps only, the order of the two is
    reversed, because the backward waits for its own sooner.
    """
    forward_slots, backward_slots = split_after_issues(forward), split_after_issues(backward)
    order: list[Turn] = []
    f = b = 0
    while f < len(forward_slots) or b < len(backward_slots):
        if b < len(backward_slots) and b * len(forward_slots) <= f * len(backward_slots):
            steps_back = (
                bool(order) and order[-1].chunk == 0 and order[-1].node.kind == ISSUE and _hastens(backward_slots[b])
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


def in_order(nodes: Iterable[Node]) -> list[Turn]:
    return [Turn(0, node) for node in nodes]
