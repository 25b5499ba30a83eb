"""The programs of a pipeline part, made of the chains of steps that its model offers.

The step of routed experts becomes an all-to-all, the experts of this rank, and the all-to-all back. What stands behind
it and needs nothing of it (shared experts) is moved in between, to run while tokens travel:

    attention | route and sort | (counts, dispatch) | shared experts | experts | (combine) | rest
"""

from collections.abc import Sequence

import torch

from torchtitan.parallelisms.experts.expert_parallel import run_received
from torchtitan.parallelisms.pipeline.overlap.segments import CountExchange, Exchange, Program, Step
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment, StepwiseModel

ARRIVED, DONE = "rows that arrived", "rows that go back"


def programs_of(part: StepwiseModel) -> list[Program]:
    """Of a model or a pipeline part of it, which has been asked by `require_steps`."""
    return [
        Program(chain.name, tuple(with_exchanges(chain.steps)), chain.recompute, chain.own) for chain in part.chains()
    ]


def with_exchanges(steps: Sequence[Segment | RoutedExperts]) -> list[Step]:
    at = next((index for index, step in enumerate(steps) if isinstance(step, RoutedExperts)), None)
    if at is None:
        return list(steps)
    experts, behind = steps[at], steps[at + 1 :]
    waits = {experts.target}
    beside = []
    for step in behind:
        assert isinstance(step, Segment), "a block has one step of routed experts"
        if waits.isdisjoint(step.inputs):
            beside.append(step)
        else:
            waits.update(step.outputs)

    def compute(notes: Notes, rows: torch.Tensor) -> torch.Tensor:
        return run_received(experts.module, rows, notes["sizes"].received_counts)

    return [
        *steps[:at],
        CountExchange(),
        Exchange("dispatch", experts.source, ARRIVED),
        *beside,
        Segment(experts.name, compute, (ARRIVED,), (DONE,)),
        Exchange("combine", DONE, experts.target, back=True),
        *(step for step in behind if step not in beside),
    ]
