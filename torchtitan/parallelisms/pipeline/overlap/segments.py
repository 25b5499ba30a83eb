"""A block as a chain of segments with detached ends, so that its forward, its backward and its recomputation can be run
piece by piece, among those of another microbatch.

A block offers a Program: local computations (Segment), each with a graph of its own, and all-to-alls between them
(CountExchange, Exchange). A name stands for one tensor: a leaf that its users read and in whose gradient their
backwards add up. Which nodes a forward and a backward of a stage consist of follows from the programs and the policy
alone, so it is known before anything runs, and is the same on all ranks of an expert-parallel group.

A policy says what stays after the forward. What does not is computed again before it is needed in the backward, each
segment once, with the random numbers of the first time. What a router chose is always kept (Notes.once), and so
are split sizes: they are never exchanged twice.

The programs of a pipeline part, made of the chains of steps that its model offers.

The step of routed experts becomes an all-to-all, the experts of this rank, and the all-to-all back. What stands behind
it and needs nothing of it (shared experts) is moved in between, to run while tokens travel:

    attention | route and sort | (counts, dispatch) | shared experts | experts | (combine) | rest
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchtitan.parallelisms.expert_parallel import run_received
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment, StepwiseModel

POLICIES = ("none", "selective", "full_keep_comm", "full")


@dataclass(frozen=True)
class CountExchange:
    """Tells every rank how many rows come to it: reads `counts` of the block's notes (int64 [experts], over all experts
    of the group, set by a segment before) and writes `sizes` (exchange.Sizes).
    """

    name: str = "counts"


@dataclass(frozen=True)
class Exchange:
    """An all-to-all of rows: `source` -> `target` by `sizes`, or, where `back`, the way they came."""

    name: str
    source: str
    target: str
    back: bool = False


Step = Segment | CountExchange | Exchange


@dataclass(frozen=True)
class Program:
    """The steps of a block (the embedding, the head), in order. `recompute`: whether the policy is for it. `own`:
    Chain's.

    ValueError if a name is used before it is made, or made twice.
    """

    name: str
    steps: tuple[Step, ...]
    recompute: bool = True
    own: Callable[[Any], Any] | None = None
    input: str = "x"
    output: str = "out"
    maker: dict[str, int] = field(init=False, repr=False, compare=False)
    users: dict[str, list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        maker, users = {self.input: -1}, {self.input: []}
        for index, step in enumerate(self.steps):
            for name in reads(step):
                if name not in maker:
                    raise ValueError(
                        f"{self.name}: {step.name} needs {name!r}; made before it are {', '.join(maker)}: "
                        f"correct its name or the order of the steps"
                    )
                users[name].append(index)
            for name in makes(step):
                if name in maker:
                    raise ValueError(f"{self.name}: {step.name} makes {name!r} a second time: give it another name")
                maker[name], users[name] = index, []
        if self.output not in maker:
            raise ValueError(f"{self.name}: no step makes the output {self.output!r} (there are {', '.join(maker)})")
        object.__setattr__(self, "maker", maker)
        object.__setattr__(self, "users", users)


def reads(step: Step) -> tuple[str, ...]:
    if isinstance(step, Segment):
        return step.inputs
    return (step.source,) if isinstance(step, Exchange) else ()


def makes(step: Step) -> tuple[str, ...]:
    if isinstance(step, Segment):
        return step.outputs
    return (step.target,) if isinstance(step, Exchange) else ()


@dataclass(frozen=True)
class Policy:
    """The policy of what is kept after the forward.

    none: everything, with its graph. full_keep_comm: the block's input and what all-to-alls brought. full: the input
    alone. selective: as full_keep_comm, and the results of the operators that `save_op` names; or, with `every` above
    1, every so many blocks as full_keep_comm and the others as none.
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
        if self.mode == "none" or not programs[block].recompute:
            return True
        number = sum(program.recompute for program in programs[:block])
        return number % self.every != 0

    def kept(self, program: Program) -> set[str]:
        """Names that stay where graphs do not."""
        exchanged = {step.target for step in program.steps if isinstance(step, Exchange)}
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
    """The nodes of a stage's forward, full backward and backward of the inputs, under one policy. An `INPUT` node
    leaves gradients of weights to be computed any time later."""

    def __init__(self, programs: Sequence[Program], policy: Policy):
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
            flying: list[int] = []
            for index, step in enumerate(program.steps):
                for issued in [i for i in flying if _needs(step, program.steps[i])]:
                    flying.remove(issued)
                    yield self.node(WAIT, FORWARD, block, issued)
                if isinstance(step, Segment):
                    yield self.node(COMPUTE, FORWARD, block, index)
                else:
                    yield self.node(ISSUE if isinstance(step, Exchange) else POST, FORWARD, block, index)
                    flying.append(index)
            yield from (self.node(WAIT, FORWARD, block, i) for i in flying)
        yield Node(DONE, FORWARD, len(self.programs) - 1, -1, "output")

    def _backward(self, split: bool) -> list[Node]:
        """Split: gradients of weights apart for all segments; else only where those of the inputs are waited for."""
        nodes: list[Node] = []
        for block in reversed(range(len(self.programs))):
            nodes += _BlockBackward(self, block, split).build()
        nodes.append(Node(DONE, INPUT, 0, -1, "input gradient"))
        return nodes


def _needs(step: Step, issued: Step) -> bool:
    if isinstance(issued, CountExchange):
        return isinstance(step, Exchange)
    return issued.target in reads(step)


class _BlockBackward:
    """Builds the backward of one block, recomputation included.

    A segment is recomputed as late as can be, but before the wait for the gradient that its backward needs.
    """

    def __init__(self, lists: NodeLists, block: int, split: bool):
        self.lists, self.block, self.split = lists, block, split
        self.program = lists.programs[block]
        self.keeps_graphs = lists.policy.keeps_graphs(lists.programs, block)
        self.have = set(self.program.maker) if self.keeps_graphs else lists.policy.kept(self.program)
        self.recomputed: set[int] = set()
        self.nodes: list[Node] = []

    def build(self) -> list[Node]:
        steps = self.program.steps
        flying: list[int] = []
        for index in reversed(range(len(steps))):
            step = steps[index]
            if isinstance(step, Segment):
                self.recompute(index)
                for issued in [i for i in flying if steps[i].source in step.outputs]:
                    flying.remove(issued)
                    self.add(WAIT, BACKWARD, issued)
                self.backward_of(index)
            elif isinstance(step, Exchange):
                for issued in [i for i in flying if steps[i].source == step.target]:
                    flying.remove(issued)
                    self.add(WAIT, BACKWARD, issued)
                self.make(step.target)  # its gradient has the shape of it
                self.add(ISSUE, BACKWARD, index)
                flying.append(index)
        for issued in flying:
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
        if any(maker >= 0 and isinstance(self.program.steps[maker], Exchange) for maker in makers):
            return True
        before = self.lists.programs[self.block - 1].steps if self.block else ()
        return -1 in makers and (not self.block or any(isinstance(step, Exchange) for step in before))

    def recompute(self, index: int) -> None:
        if self.keeps_graphs or index in self.recomputed:
            return
        step = self.program.steps[index]
        self.recomputed.add(index)
        for name in reads(step):
            self.make(name)
        if isinstance(step, Segment):
            self.add(COMPUTE, RECOMPUTE, index)
        else:
            self.add(ISSUE, RECOMPUTE, index)
            self.add(WAIT, RECOMPUTE, index)
        self.have.update(makes(step))

    def make(self, name: str) -> None:
        if name not in self.have:
            self.recompute(self.program.maker[name])


ARRIVED, RETURNED = "rows that arrived", "rows that go back"


def programs_of(part: StepwiseModel) -> list[Program]:
    """Return the programs of a model or a pipeline part of it that `require_steps` has checked."""
    return [
        Program(chain.name, tuple(with_exchanges(chain.steps)), chain.recompute, chain.own) for chain in part.chains()
    ]


def with_exchanges(steps: Sequence[Segment | RoutedExperts]) -> list[Step]:
    at = next((index for index, step in enumerate(steps) if isinstance(step, RoutedExperts)), None)
    if at is None:
        return list(steps)
    experts, later_steps = steps[at], steps[at + 1 :]
    waits = {experts.target}
    concurrent = []
    for step in later_steps:
        assert isinstance(step, Segment), "a block has one step of routed experts"
        if waits.isdisjoint(step.inputs):
            concurrent.append(step)
        else:
            waits.update(step.outputs)

    def compute(notes: Notes, rows: torch.Tensor) -> torch.Tensor:
        return run_received(experts.module, rows, notes["sizes"].received_counts)

    return [
        *steps[:at],
        CountExchange(),
        Exchange("dispatch", experts.source, ARRIVED),
        *concurrent,
        Segment(experts.name, compute, (ARRIVED,), (RETURNED,)),
        Exchange("combine", RETURNED, experts.target, back=True),
        *(step for step in later_steps if step not in concurrent),
    ]
