"""Supervised fine-tuning jobs: the same losses under every plan, and resumes inside a packing window."""

import signal
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.packages import install
from tests.support.pool import run_ranks
from tests.support.sft_jobs import sft_arguments, train_and_stop_after, validation_losses, write_rows


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Train on one rank; return (path of the records, losses, validation losses)."""
    folder = tmp_path_factory.mktemp("sft")
    rows = write_rows(folder)
    ((steps, _),) = run_ranks(1, jobs.train, sft_arguments(folder / "one", rows))
    return rows, [step["loss"] for step in steps], validation_losses(folder / "one")


PLANS = {
    "FSDP 2": dict(parallelism__data_parallel_shard_degree=2),
    "TP 2": dict(parallelism__tensor_parallel_degree=2),
    "PP 2": dict(parallelism__pipeline_parallel_degree=2),
}


@pytest.mark.parametrize("plan", PLANS)
def test_losses_under_every_plan_equal_one_rank(one_rank, plan, tmp_path):
    rows, losses, measures = one_rank
    steps, _ = run_ranks(2, jobs.train, sft_arguments(tmp_path, rows, **PLANS[plan]))[0]
    assert len(losses) == steps[-1]["step"] > 6  # the exact number of two passes
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=2e-4)  # 1e-5 each, through Adam's division
    assert validation_losses(tmp_path) == pytest.approx(measures, rel=2e-4) and len(measures) >= 3


WAYS = {  # ways to run four samples of unequal lengths a step: (ranks, options)
    "GA 4": (1, dict(training__local_batch_size=1, data__pad_to="seq_len")),
    "DP 2": (
        2,
        dict(training__local_batch_size=2, parallelism__data_parallel_shard_degree=2, data__pad_to="seq_len"),
    ),
    "GA 4, padded to each": (1, dict(training__local_batch_size=1)),
    "DP 2 x GA 2, padded to each": (2, dict(training__local_batch_size=1, data__pad_to="batch")),
    "TP 2, padded to a multiple": (
        2,
        dict(training__local_batch_size=4, data__pad_to="multiple:8", parallelism__tensor_parallel_degree=2),
    ),
}


@pytest.fixture(scope="module")
def one_forward_pass(tmp_path_factory):
    """Run all four samples in one forward pass, padded to seq_len."""
    folder = tmp_path_factory.mktemp("one_forward_pass")
    rows = write_rows(folder)
    options = dict(training__local_batch_size=4, data__pad_to="seq_len")
    return rows, run_ranks(1, jobs.train, unpacked_arguments(folder / "run", rows, **options))[0][0]


def unpacked_arguments(folder, rows, **options):
    settings = dict(validation__enable=False, data__packing="off", training__steps=3)
    argv = sft_arguments(folder, rows, **settings | options)
    return [argument for argument in argv if not argument.startswith(("--validation.", "--training.epochs"))]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_does_not_depend_on_how_its_batch_is_split(one_forward_pass, way, tmp_path):
    """Loss and gradients are means over all tokens of the step, not means of means."""
    rows, steps = one_forward_pass
    ranks, options = WAYS[way]
    got, _ = run_ranks(ranks, jobs.train, unpacked_arguments(tmp_path, rows, **options))[0]
    assert len(got) == len(steps) == 3
    for name in ("loss", "grad_norm"):
        assert got[0][name] == pytest.approx(steps[0][name], rel=1e-5)
        assert [step[name] for step in got] == pytest.approx([step[name] for step in steps], rel=2e-4)
    shortened = options.get("data__pad_to") != "seq_len"
    assert (got[-1]["tokens"] < steps[-1]["tokens"]) == shortened and steps[-1]["tokens"] == 3 * 4 * 384


def test_a_resume_inside_a_packing_window_on_two_ranks(one_rank, tmp_path):
    rows, losses, _ = one_rank
    saving = dict(checkpoint__enable=True, checkpoint__interval=100)
    first = sft_arguments(tmp_path, rows, **saving)
    run_ranks(1, train_and_stop_after, first, 4)
    steps, _ = run_ranks(2, jobs.train, first)[0]
    assert [step["step"] for step in steps] == list(range(1, len(losses) + 1))
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=2e-4)


SPEC = """
from torchtitan.optimizers.spec import OptimizerSpec
SPEC = OptimizerSpec(make="acme_fails.heavy:Fails", state=lambda options: 0)
"""
FAILS = """
import torch
from torchtitan.process.ranks import read_ranks


class Fails(torch.optim.SGD):
    done = 0

    def step(self, closure=None):
        Fails.done += 1
        if Fails.done == 3 and read_ranks().rank == 0:
            raise IndexError("no such row")
        return super().step(closure)
"""


def test_a_crash_of_the_first_rank_is_one_message_and_ends_all_ranks(tmp_path):
    """The other ranks, which wait for it, are ended long before the collective timeout of 300 seconds."""
    entries = "[torchtitan.optimizers]\nFails = acme_fails.light:SPEC\n"
    site = install(tmp_path / "site", "acme-fails", entries, light=SPEC, heavy=FAILS)
    rows = write_rows(tmp_path / "rows")
    argv = sft_arguments(
        tmp_path / "run", rows, optimizer__name="Fails", training__local_batch_size=1, job__max_restarts=0
    )
    process = jobs.start(argv, ranks=2, OMP_NUM_THREADS="1", PYTHONPATH=f"{site}:{jobs.ROOT}")
    ranks = jobs.started_ranks(process, 2)
    code, _, err = jobs.finish(process, 290)
    assert code == 1 and err.count("Traceback") == err.count("IndexError: no such row") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_a_terminated_run_resumes_exactly(tmp_path):
    """A signal stops the launcher; after the restart all losses equal an uninterrupted run bit for bit."""
    rows = write_rows(tmp_path / "rows")
    options = dict(training__epochs=5, training__local_batch_size=1, validation__freq=8, model__overrides=jobs.SHALLOW)
    options |= dict(checkpoint__enable=True, checkpoint__interval=1000)
    uninterrupted = run_ranks(2, jobs.train, sft_arguments(tmp_path / "straight", rows, **options))[0]
    argv = sft_arguments(tmp_path / "run", rows, **options)
    process = jobs.start(argv, ranks=2, OMP_NUM_THREADS="1")
    jobs.wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    code, _, err = jobs.finish(process)
    stopped = jobs.logged_steps(tmp_path / "run")[-1]["step"]
    assert (code, err) == (143, "") and 3 <= stopped < uninterrupted[0][-1]["step"]
    steps, weights = run_ranks(2, jobs.train, argv)[0]
    assert weights == uninterrupted[1]
    assert [(step["step"], step["loss"]) for step in steps] == [
        (step["step"], step["loss"]) for step in uninterrupted[0]
    ]
    assert validation_losses(tmp_path / "run") == validation_losses(tmp_path / "straight")
