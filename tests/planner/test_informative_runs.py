"""The runs that `torchtitan plan` names for --from: what they tell, and their commands."""

import dataclasses
import math
import random
import shlex
import statistics

import pytest

from torchtitan.commands import plan as command
from torchtitan.config import manager
from torchtitan.core.hardware import load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.planner import informative_runs
from torchtitan.planner.informative_runs import most_informative, runs_to_measure
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.search import Limits, Search
from torchtitan.planner.time.measured_runs import NOISE, changed, fit_factors, prior_sigmas, usual_calibration
from torchtitan.planner.time.step_time import StepTimer
from torchtitan.rules import check
from torchtitan.rules.loading import load_job

H100 = load_hardware("h100-80")
CASES = 10


def search_of(*options: str, gpus: int = 16) -> Search:
    job = ResolvedJob(manager.load([*options, "--model.tokenizer_path=bytes"]), gpus, "cuda")
    samples = job.layout.samples
    return Search(job, Workload.of(job, samples), samples, H100, usual_calibration(H100))


def test_a_measured_direction_leaves_the_variance_of_a_normal_posterior():
    """Of two factors with sigma 2 and 1, the first has more to tell, then the second: the first is nearly known."""
    both, first, second = [1.0, 1.0], [1.0, 0.0], [0.0, 1.0]
    assert list(most_informative([2.0, 1.0], [both], [second, first])) == [1, 0]
    assert list(most_informative([2.0, 1.0], [second], [both, first, second])) == [2, 0, 1]


def test_named_runs_calibrate_better_than_random_ones():
    """Truths are drawn from the prior of the fit. The error is of the plans that were not measured."""
    search = search_of("llama3_8b", "--training.seq_len=4096", "--training.global_batch_size=64")
    result = search.find(16, 8, Limits(H100.memory_gib * 2**30))
    plans = list(dict.fromkeys(candidate.plan for candidate in [*result.best, *result.judged]))
    leading, draw = plans[:8], random.Random(0)
    named = [plan for plan, _ in runs_to_measure(search, leading, plans)]
    assert len(named) == 3
    errors: dict[str, list[float]] = {"named": [], "random": []}
    for _ in range(CASES):
        truth = {name: math.exp(draw.gauss(0, sigma)) for name, sigma in prior_sigmas(H100).items()}
        noise = {plan: math.exp(draw.gauss(0, NOISE)) for plan in plans}
        for kind, runs in (("named", named), ("random", draw.sample(plans, 3))):
            factors = fitted(search, {plan: noise[plan] * seconds(search, plan, truth) for plan in runs})
            others = [plan for plan in leading if plan not in named and plan not in runs]
            errors[kind].append(
                statistics.fmean(
                    abs(math.log(seconds(search, plan, factors) / seconds(search, plan, truth))) for plan in others
                )
            )
    assert statistics.fmean(errors["named"]) < statistics.fmean(errors["random"])


def seconds(search: Search, plan: Plan, factors: dict[str, float]) -> float:
    calibration = dataclasses.replace(search.calibration, factors=changed(search.calibration.factors, factors))
    return StepTimer(search.workload, H100, calibration).step_time(plan).seconds


def fitted(search: Search, measured: dict[Plan, float]) -> dict[str, float]:
    sigmas = prior_sigmas(H100)
    runs = [(lambda factors, plan=plan: seconds(search, plan, factors), time) for plan, time in measured.items()]
    return fit_factors(runs, list(sigmas), sigmas)


@pytest.mark.parametrize(
    "options", [(), ("--training.tokens=1000000",), ("--training.epochs=1",), ("--model.overrides={n_layers = 4}",)]
)
def test_the_named_commands_train_the_plans(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    search = search_of("debug_model", "--training.global_batch_size=16", *options, gpus=4)
    plans = [candidate.plan for candidate in search.find(4, 6, Limits(2.0**40)).best]
    runs = runs_to_measure(search, plans, [])
    assert len({plan for plan, _ in runs}) == 3 and {plan for plan, _ in runs} <= set(plans)
    for number, (plan, line) in enumerate(runs, start=1):
        python, minus_m, launcher, ranks, *arguments = shlex.split(line)
        assert (python, minus_m, launcher, ranks) == ("python", "-m", "torchtitan.launch", "4")
        job = ResolvedJob(load_job(arguments)[0], 4, "cuda")
        assert Plan.of(job, 16) == plan and job.config.job.dump_folder == f"outputs/measured_{number}"
        assert not check(job.config, 4, "cuda", opens_data=False) and job.config.metrics.log_freq == 1
        assert job.layout.samples == 16 and not job.config.checkpoint.enable
        if "tokens" in "".join(options):
            assert job.config.training.tokens == 10 * search.workload.tokens
        else:
            assert job.config.training.epochs or job.config.training.steps == 10
        assert job.config.model.overrides == search.base.config.model.overrides
    text = "\n".join(informative_runs.run_lines(search, runs))
    assert ("ended after 10 steps" in text) == ("--training.epochs=1" in options)
    assert text.endswith("--from outputs/measured_1 outputs/measured_2 outputs/measured_3")


def test_a_plan_that_no_command_line_can_say_is_not_named(monkeypatch):
    """An option that the job's file sets would have to be unset. Another plan is refused, as the rules refuse it."""
    search, plan = search_of("debug_model", gpus=2), Plan(shards=2, microbatch=4)
    assert informative_runs._command(search, plan) and not informative_runs._command(search, Plan(tp=2, cp=3))
    monkeypatch.setattr(informative_runs, "differing_options", lambda config: {"parallelism.custom": None})
    assert not informative_runs._command(search, plan)
    assert informative_runs.run_lines(search, []) == []


def test_the_answer_names_runs_unless_some_are_given(capsys):
    arguments = ["debug_model", "--gpus=2", "--quick", "--training.global_batch_size=16"]
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert "these short runs would tell most" in text and text.count("-m torchtitan.launch 2 ") == 3


def test_runs_on_several_machines_start_on_each():
    search = search_of("llama3_8b")
    runs = runs_to_measure(search, [Plan(shards=16), Plan(tp=2, shards=8, microbatch=2)], [])
    first, *commands = informative_runs.run_lines(search, runs)[:-1]
    assert "each started on all 2 machines" in first
    assert [line.split()[3] for line in commands[1::2]] == ["8", "8"]
