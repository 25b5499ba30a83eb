"""Automatic restarts of all ranks after a crash: how often, from which step, and with which messages.

Ranks are programs of a few lines in most tests; some train a small job.
"""

import dataclasses
import io
import json
import os
import re
import signal
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest

from tests.support import jobs
from tests.support.launched_ranks import end, has_ended, nothing_is_left
from tests.support.pool import run_alone, run_ranks
from tests.support.restarted_ranks import CRASH, read_evidence, supervise
from torchtitan import train
from torchtitan.config import manager
from torchtitan.process.exit import EXPLAINED, failure_kind
from torchtitan.process.ranks import Launcher, Restart, read_ranks
from torchtitan.process.run_log import set_up_logging
from torchtitan.training import final_export
from torchtitan.training.trainer import Trainer

assert nothing_is_left  # a fixture, for all tests here too


def test_a_crash_restarts_from_the_last_save(tmp_path):
    program = (
        f"tell('train', 8)\nif number == 0:\n  save(5)\n  {CRASH}\nsay(ranks.launcher.restart.cause); tell('end', 9)"
    )
    code, out, err = end(supervise(program, tmp_path))
    assert (code, out) == (0, "rank 1 was ended by SIGKILL\n" * 2)
    assert err.splitlines() == [
        "rank 1 was ended by SIGKILL",
        "restart 1 of 3 in 0.01 s: rank 1 was ended by SIGKILL after step 7; going on from step 5, so that 2 steps are "
        "done again",
    ]


def test_repeated_crashes_are_given_up(tmp_path):
    code, out, err = end(supervise(f"ready('train'); {CRASH}", tmp_path, budget=2))
    assert code == 5 and out.count("ready 1") == 3
    assert re.findall(r"restart \d of 2 in ([0-9.]+) s", err) == ["0.01", "0.02"]  # the pause doubles
    assert err.splitlines()[-4:] == [
        "crashed 3 times without saving anything in between; given up. Its faults:",
        *["step 2: rank 1 was ended by SIGKILL"] * 3,
    ]


def test_each_new_checkpoint_resets_the_budget(tmp_path):
    program = f"tell('train', 8)\nsave(number)\nif number < 5:\n  {CRASH}\ntell('end', 9)"
    code, out, err = end(supervise(program, tmp_path, budget=1))
    assert code == 0 and err.count("restart 1 of 1") == 5


def test_restarts_know_whether_this_run_has_saved(tmp_path):
    """A checkpoint of a later step that exists at the launch does not count as saved by this run."""
    (tmp_path / "saved").write_text("9")
    report = "if ranks.rank: say(bool(number) and ranks.launcher.restart.saved)"
    program = f"tell('train', 8)\n{report}\nif number == 1: save(5)\n{CRASH}"
    code, out, err = end(supervise(program, tmp_path, budget=1))
    reported = [line for line in out.splitlines() if line in ("True", "False")]
    assert code == 5 and reported == ["False"] * 2 + ["True"]
    assert err.count("restart 1 of 1") == 2  # the checkpoint of step 5 is a new one


def test_a_failure_after_the_last_save_is_not_restarted(tmp_path):
    code, out, err = end(supervise("tell('end', 3); sys.exit(1)", tmp_path))
    assert code == 1 and "restart" not in err


def test_a_rank_that_dies_in_the_export_is_not_started_again(tmp_path):
    code, out, err = end(supervise(f"tell('export', 3); {CRASH}", tmp_path))
    assert code == 10 and err == (
        "training is complete, but the export failed: rank 1 was ended by SIGKILL; export it again\n"
    )


@pytest.mark.parametrize("code", sorted(EXPLAINED))
def test_deterministic_failures_are_not_restarted(code, tmp_path):
    process = supervise(f"ready('train'); sys.exit({code})", tmp_path)
    ended, out, err = end(process)
    slow = f"rank 1 ended with exit code {code} and the others did not\n"  # rank 0 reports the reason, but was too late
    assert ended == code and out.count("ready") <= 2 and err in ("", slow)


def test_without_a_budget_the_exit_code_is_that_of_the_crash(tmp_path):
    code, out, err = end(supervise(f"ready('train'); {CRASH}", tmp_path, budget=0))
    assert (code, err) == (137, "rank 1 was ended by SIGKILL\n")


def test_a_stop_in_the_pause_ends_the_run(tmp_path):
    process = supervise(f"tell('train', 3); {CRASH}", tmp_path, pause=100)
    assert any("restart 1" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 143


# Hangs


# The verdict


# Kinds of failures


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "memory"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
            "memory",
        ),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), "peer"),
        (RuntimeError("Application timeout caused pair closure"), "peer"),  # gloo's other words for a timeout
        (RuntimeError("shape mismatch"), None),
        (OSError("Broken pipe"), None),
    ],
    ids=str,
)
def test_kinds_of_failures(error, kind):
    assert failure_kind(error) == kind


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def out_of_memory(argv):
    """Run out of memory in the third step; return the exit code and the standard error."""
    errors = io.StringIO()
    config, ranks = manager.load(argv), read_ranks()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(errors):
        step = Trainer.step

        def hungry(self, batch):
            if self.current_step == 2:
                raise MemoryError("no more")
            return step(self, batch)

        patch.setattr(Trainer, "step", hungry)
        set_up_logging(ranks)
        return train.run(config, ranks), errors.getvalue()


def test_out_of_memory_lists_the_memory_by_kind(texts, tmp_path):
    code, errors = run_alone(
        out_of_memory, jobs.arguments(tmp_path, texts)
    )  # in a fresh process, because it installs signal handlers
    assert code == 8 and "ERROR: out of memory: no more\n  parameters      0.00 GiB\n  gradients " in errors
    assert "  optimizer " in errors and "  at most " in errors


def failing_export(argv, error: str, tracker: bool = False):
    """Train; the export fails with `error`, and with `tracker` the tracker fails too. Return exit code and output."""

    def unreachable(trainer: Trainer) -> None:
        raise RuntimeError("the tracker is unreachable")

    if tracker:
        Trainer.report = unreachable

    def fail(*args: object) -> None:
        raise {"bug": KeyError("tok_embeddings"), "disk": OSError(28, "No space left on device")}[error]

    final_export.Exports._write_weights = fail
    lines, out = io.StringIO(), io.StringIO()
    with redirect_stderr(lines), redirect_stdout(out):
        ranks = read_ranks()
        set_up_logging(ranks, False)
        code = train.run(manager.load(argv), ranks)
    return code, lines.getvalue() + out.getvalue()


@pytest.mark.parametrize(
    "error, reason", [("bug", "KeyError: 'tok_embeddings'"), ("disk", r"\[Errno 28\] No space left on device")]
)
def test_a_failed_export_has_its_exit_code_and_says_that_training_is_complete(error, reason, texts, tmp_path):
    options = dict(checkpoint__enable=True, checkpoint__last_save_model_only=True, checkpoint__export_dtype="bfloat16")
    argv = jobs.arguments(tmp_path, texts, training__steps=2, **options)
    code, printed = run_alone(failing_export, argv, error)
    assert code == 10 and (tmp_path / "checkpoint" / "step-00000002").is_dir()
    command = rf"torchtitan export {tmp_path} --to NEW_FOLDER --merge --dtype bfloat16"
    assert re.search(
        rf"training is complete \(step 2\), but the export failed: {reason}; everything is saved: run `{command}`, or "
        "start the same job again, which then only exports",
        printed,
    )
    assert ("Traceback" in printed) == (error == "bug")
    assert "step 2/2, loss" in printed  # the lines at the end of every run


def test_a_tracker_that_fails_too_hides_no_failed_export(texts, tmp_path):
    options = dict(checkpoint__enable=True, checkpoint__last_save_model_only=True, training__steps=2)
    code, printed = run_alone(failing_export, jobs.arguments(tmp_path, texts, **options), "disk", True)
    assert code == 10 and "Traceback" not in printed
    assert printed.index("but the export failed: [Errno 28]") < printed.index("RuntimeError: the tracker is unreach")


def resume_after_restart(argv, saved: bool):
    """Resume after a launcher's restart; return the step and whether the optimizer's state was loaded."""
    with tempfile.NamedTemporaryFile() as shared:
        shared.write(bytes(64))
        shared.flush()
        restart = Restart(1, "a crash", 0, 5, time.monotonic(), saved)
        launcher = Launcher(os.getpid(), "", shared.name, "", "", 0, restart=restart)
        trainer = Trainer(manager.load(argv), dataclasses.replace(read_ranks(), launcher=launcher))
        trainer.metrics.close()
    return trainer.restorer.resumed_step, any(optimizer.state for optimizer in trainer.optimizers)


def test_a_restart_does_not_go_back_again(texts, tmp_path):
    options = dict(checkpoint__enable=True, checkpoint__interval=2, training__steps=4)
    run_ranks(1, jobs.train, jobs.arguments(tmp_path, texts, **options))
    back = options | dict(checkpoint__load_step=2, checkpoint__exclude_from_loading='["optimizer"]')
    argv = jobs.arguments(tmp_path, texts, **back)
    assert run_ranks(1, resume_after_restart, argv, False) == [(2, False)]
    assert run_ranks(1, resume_after_restart, argv, True) == [(4, True)]


# Complete jobs


ALONE = dict(training__local_batch_size=4, training__steps=40, checkpoint__enable=True, checkpoint__interval=5)
ALONE |= dict(optimizer__lr=1e-3, model__overrides=jobs.SHALLOW)


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory):
    argv = jobs.arguments(tmp_path_factory.mktemp("undisturbed"), texts, **ALONE)
    return run_ranks(2, jobs.train, argv)[0][0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_job_recovers_to_the_same_losses(number, texts, undisturbed, tmp_path):
    hang = dict(comm__train_timeout_seconds=5) if number == signal.SIGSTOP else {}
    process = jobs.start(jobs.arguments(tmp_path / "run", texts, **ALONE, **hang), ranks=2)
    jobs.wait_for_step(tmp_path / "run", 6, process)
    ranks = jobs.children(process.pid)
    os.kill(ranks[1], number)
    code, out, err = jobs.finish(process)
    assert code == 0, err
    assert "Traceback" not in err and "restart 1 of 3" in err and all(map(has_ended, ranks))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row.get("event") == "restart"]
    assert event["rank"] == 1 and event["step"] % 5 == 0
    assert 0 <= event["steps_lost"] <= 5 and event["seconds_lost"] > 0
    rows = jobs.logged_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed]
    if number == signal.SIGSTOP:
        assert "rank 1 is stopped by a signal" in err
        evidence = read_evidence(tmp_path / "run")
        assert (
            "training/trainer.py" in evidence["rank-0.stacks.txt"]
            and "all_reduce" in evidence["rank-0.collectives.json"]
        )
