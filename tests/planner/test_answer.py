"""Figures of an answer of `torchtitan plan`."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import pytest

from torchtitan.core.hardware import load_hardware
from torchtitan.planner import answer
from torchtitan.planner.plan import Plan
from torchtitan.planner.search import Candidate, Result
from torchtitan.planner.time.measured_runs import usual_calibration
from torchtitan.planner.time.messages import Calibration, Parts, StepTime


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [(0.0001234, 3, "0.000123"), (0.5, 3, "0.500"), (12.345, 3, "12.345"), (1.234, 0, "1.23"), (1234.5, 0, "1,234")],
)
def test_figures_have_three_significant_digits(value, decimals, text):
    assert answer.figure(value, decimals) == text


def test_amounts_have_the_letter_of_their_size():
    assert [answer.amount(count) for count in (15e12, 2.5e9, 3e6, 999)] == ["15 T", "2.5 G", "3 M", "999"]


def candidate(seconds, needed=1.0):
    parts = dict.fromkeys(answer.PARTS, seconds / len(answer.PARTS))
    memory = SimpleNamespace(low=0.9 * needed, needed=needed)
    return SimpleNamespace(time=SimpleNamespace(seconds=seconds, parts=parts), memory=memory)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.2, "takes 20.0% longer: "),
        (0.999, "is as fast as the best"),
        (0.8, "is 25.0% faster on the whole network; plans are ordered by a step on a slower one"),
    ],
)
def test_a_plan_is_slower_or_faster_than_the_best(seconds, text):
    assert answer.loss_of(candidate(seconds), candidate(1.0), memory=1.0).startswith(text)


def test_other_hardware_without_a_plan_that_counts_as_fitting_says_so():
    (line,) = answer.comparison([("4 GPUs", None)], candidate(1.0), answer.Cost(1.0, None))
    assert line.split(maxsplit=2)[2] == "no plan that counts as fitting"


@pytest.mark.parametrize("state", [1.0, 2.0])
def test_a_job_that_does_not_fit_is_told_what_needs_less(state):
    result = Result(excluded=Counter(memory=1))
    text = answer.no_plan(result, gpus=1, memory=1.0, state=state, smaller="a GPU needs 1 B with less")
    assert text.endswith(
        "; a GPU needs 1 B with less; or give more --gpus" if state > 1 else "a GPU needs 1 B with less"
    )
    assert "smaller training.seq_len" in text or state > 1


def test_step_times_of_gpus_without_published_rows_are_extrapolated():
    """Those of a CPU, whose curves are measured, and of runs on the same GPU are not."""
    time = StepTime(Parts(products=1.0), mfu=0.4, tokens_per_second=1000.0, spread=0.4)
    plan = Candidate(Plan(), time, None)
    gpu, unknown = load_hardware("h100-80"), dataclasses.replace(load_hardware("h100-80"), chip="")
    cpu, of_runs = load_hardware("cpu"), Calibration(evidence="fitted on 3 runs")
    texts = [answer.extrapolation(plan, hardware, usual_calibration(hardware)) for hardware in (gpu, unknown, cpu)]
    assert texts == ["", "no published row is of this GPU", ""]
    assert answer.extrapolation(plan, unknown, of_runs) == ""
    small = dataclasses.replace(plan, time=dataclasses.replace(time, outside="a model below 1B"))
    assert "a model below 1B" in answer.extrapolation(small, gpu, usual_calibration(gpu))
