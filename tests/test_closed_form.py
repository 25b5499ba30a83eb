"""Memory by formula against the rehearsal, and its parts against the simulated schedules."""

import pytest

from tests.support.memory_plans import MODELS, memory_plans
from tests.support.pool import run_alone
from torchtitan.config.manager import load
from torchtitan.core.hardware import load_hardware
from torchtitan.parallelisms.pipeline.actions import with_full_backward
from torchtitan.parallelisms.pipeline.runtime import build_table
from torchtitan.parallelisms.pipeline.simulator import simulate
from torchtitan.planner import estimate
from torchtitan.planner.closed_form import predict_memory
from torchtitan.planner.rank_layout import in_flight

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 3,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""Schedule -> stages per rank."""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("merged", [False, True])
def test_microbatches_in_flight_are_those_of_the_simulation(schedule, merged):
    chunks = SCHEDULES[schedule]
    for pp in (2, 4, 8):
        for microbatches in (2 * pp, 3 * pp, 8 * pp):
            table = build_table(schedule, pp, microbatches, chunks)
            simulated = simulate(with_full_backward(table) if merged else table).peak_activations
            counts = [in_flight(schedule, rank, pp, microbatches, chunks, merged) for rank in range(pp)]
            assert counts == [chunks * peak for peak in simulated], (pp, microbatches)


def rehearsed_peaks(jobs):
    """Return the peak of the tensors of each job's worst rank, in bytes."""
    return [estimate.worst(estimate.predict(load(arguments), ranks, "cuda")).peak for ranks, arguments in jobs]


DENSE = MODELS[:6]


def test_the_formula_agrees_with_the_rehearsal():
    """A sample of random plans; scripts/compare_memory.py compares any number of them."""
    jobs = list(memory_plans(1, 4, DENSE))
    for (_, arguments), peak in zip(jobs, run_alone(rehearsed_peaks, jobs), strict=True):
        assert predict_memory(load(arguments)).total == pytest.approx(peak, rel=0.03), arguments


def test_a_gpu_reserves_more_than_its_tensors():
    (_, arguments), *_ = memory_plans(1, 1, DENSE)
    prediction = predict_memory(load(arguments), load_hardware("h100-80"))
    assert prediction.total < prediction.low < prediction.high
