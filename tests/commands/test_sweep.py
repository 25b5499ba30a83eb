"""Tests of `torchtitan sweep`: real runs side by side, resuming a half-done sweep, its table and its picture."""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.logged_runs import png_size, write_run
from torchtitan import cli
from torchtitan.commands import sweep
from torchtitan.commands.sweep import combinations, failure_reason
from torchtitan.config.manager import load, to_toml
from torchtitan.metrics.plot import draw_losses


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return the command line of a tiny job in the working directory."""
    monkeypatch.chdir(tmp_path)
    texts = jobs.write_texts(tmp_path / "texts")
    arguments = jobs.arguments(tmp_path / "run", texts, training__steps=2, model__overrides=jobs.SHALLOW)
    (tmp_path / "job.toml").write_text(to_toml(load(arguments)))
    return ["job.toml"]


class FakeRun:
    """A launcher that ends at once with the next of `codes`, after the run has logged three steps."""

    started: list[tuple[list[str], dict]] = []
    codes: list[int] = []
    active = most_active = 0

    def __init__(self, command, env, **options):
        self.config = load(command[command.index("--job.config_file") :])
        FakeRun.started.append((command, env))
        FakeRun.active += 1
        FakeRun.most_active = max(FakeRun.active, FakeRun.most_active)
        options["stdout"].write(b"one line\nthe reason\n")
        self.returncode, self.signals = None, []

    def poll(self):
        if self.returncode is None:
            FakeRun.active -= 1
            self.returncode = FakeRun.codes.pop(0)
            folder = Path(self.config.job.dump_folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_run(folder / "metrics.jsonl", [3.0, 2.0, self.config.optimizer.lr])
        return self.returncode

    def kill(self):
        raise AssertionError("an ended run is not killed")


@pytest.fixture
def fake_runs(monkeypatch):
    FakeRun.started, FakeRun.active, FakeRun.most_active = [], 0, 0
    monkeypatch.setattr(sweep.subprocess, "Popen", FakeRun)
    monkeypatch.setattr(sweep, "LOOK_SECONDS", 0.01)
    return FakeRun


def test_real_runs_side_by_side(job, tmp_path, capfd):
    arguments = ["sweep", *job, "--over", "optimizer.lr=1e-3,1e-2", "--workers", "2"]
    assert cli.main(arguments) == 0
    head, *done, columns, first, second, drawn = capfd.readouterr().out.splitlines()
    home = tmp_path / "run_sweep"
    assert head == f"2 combinations in {home}, 0 already done; logs in {home}/logs"
    assert sorted(done) == ["optimizer.lr = 1e-2: ok", "optimizer.lr = 1e-3: ok"]
    assert columns.split() == ["optimizer.lr", "steps", "loss", "validation", "tokens/s", "result"]
    losses = [jobs.logged_steps(home / f"optimizer.lr={lr}")[-1]["loss"] for lr in ("1e-3", "1e-2")]
    assert [first.split()[0], second.split()[0]] == ["1e-3", "1e-2"] and losses[0] != losses[1]
    assert drawn == f"losses drawn into {home}/losses.png" and png_size(home / "losses.png")[0] == 1500
    rows = [json.loads(line) for line in (home / "sweep.jsonl").read_text().splitlines()]
    assert {row["exit_code"] for row in rows} == {0} and not (tmp_path / "run").exists()
    before = (home / "optimizer.lr=1e-3/metrics.jsonl").read_bytes()
    assert cli.main([*arguments, "--debug.seed=7"]) == 2
    assert f"{home}/optimizer.lr=1e-3: trained by another job (debug.seed" in capfd.readouterr().err
    assert cli.main([*arguments, "--job.description=again"]) == 0  # a quiet option makes no other job
    assert ", 2 already done" in capfd.readouterr().out
    assert (home / "optimizer.lr=1e-3/metrics.jsonl").read_bytes() == before


def test_a_half_done_sweep_is_completed(job, tmp_path, fake_runs, capsys):
    fake_runs.codes = [0, 7, 0]
    arguments = ["sweep", *job, "--over=optimizer.lr=0.1,0.2,0.3", "--to=all"]
    assert cli.main(arguments) == 1
    out = capsys.readouterr().out
    assert "optimizer.lr = 0.2: exit code 7: the reason" in out and len(fake_runs.started) == 3
    with (tmp_path / "all/sweep.jsonl").open("a") as file:
        file.write('{"cut off by a cra')
    fake_runs.codes = [0, 0]
    assert cli.main([*arguments[:-2], "--over=optimizer.lr=0.1,0.2,0.3,0.4", "--to=all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 combinations in all, 2 already done; logs in all/logs"
    assert [load(command[5:]).optimizer.lr for command, _ in fake_runs.started[3:]] == [0.2, 0.4]
    table = [line.split() for line in lines[-5:-1]]
    assert [row[0] for row in table] == ["0.1", "0.2", "0.3", "0.4"] and {row[-1] for row in table} == {"ok"}
    assert [row[2].endswith("*") for row in table] == [True, False, False, False]
    other = [*arguments[:-2], "--training.steps=9", "--over=optimizer.lr=0.1,0.5"]
    assert cli.main([*other, "--to=all"]) == 2
    message = "all/optimizer.lr=0.1: trained by another job (training.steps 2 there, 9 now)\n"
    assert message + "give another folder by --to; nothing was started" in capsys.readouterr().err
    assert len(fake_runs.started) == 5 and load(["all/jobs/optimizer.lr=0.1.toml"]).training.steps == 2
    fake_runs.codes = [0] * 2
    assert cli.main([*other, "--to=elsewhere"]) == 0 and len(fake_runs.started) == 7
    capsys.readouterr()
    assert cli.main([*other, "--to=all/optimizer.lr=0.1"]) == 2 and len(fake_runs.started) == 7
    assert "all/optimizer.lr=0.1: the folder of a run; give another folder by --to" in capsys.readouterr().err


def test_workers_share_the_machine(job, fake_runs, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep.os, "cpu_count", lambda: 8)
    fake_runs.codes = [0] * 4
    over = ["--over=optimizer.lr=0.1,0.2", "--over=debug.seed=1,2"]
    job = [*job, "--training.global_batch_size=16"]
    assert cli.main(["sweep", *job, *over, "--workers=2", "--ranks=2"]) == 0
    assert fake_runs.most_active == 2
    (command, environment), *_ = fake_runs.started
    assert command[3:5] == ["torchtitan.launch", "2"] and environment["OMP_NUM_THREADS"] == "2"
    monkeypatch.setattr(sweep, "likely_device", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert sweep.visible_devices(4) == ["4", "5", "6", "7"]
    fake_runs.codes = [0] * 2
    assert cli.main(["sweep", *job, "--over=optimizer.lr=0.5,0.6", "--workers=2", "--ranks=2", "--to=gpus"]) == 0
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in fake_runs.started[-2:]] == ["4,5", "6,7"]
    capsys.readouterr()
    assert cli.main(["sweep", *job, "--over=optimizer.lr=0.5,0.6", "--workers=3", "--ranks=2"]) == 2
    assert "given 6; allowed: at most 4, the GPUs here" in capsys.readouterr().err


def test_a_signal_reaches_the_runs_and_ends_the_sweep(job, tmp_path, fake_runs, capsys, monkeypatch):
    """The run that trains is asked to stop, and no further one starts."""

    class Waiting(FakeRun):
        def send_signal(self, number):
            self.signals.append(number)
            FakeRun.codes = [128 + number]

        def poll(self):
            return super().poll() if self.signals else None

    monkeypatch.setattr(sweep.subprocess, "Popen", Waiting)

    def interrupt():
        while not FakeRun.started:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert cli.main(["sweep", *job, "--over=optimizer.lr=0.1,0.2"]) == 130
    thread.join()
    assert len(FakeRun.started) == 1
    assert "not started" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "torchtitan sweep: --over: not given; allowed: KEY=VALUE,VALUE"),
        (["--over=optimizer.lr"], "--over: given 'optimizer.lr'; allowed: section.key=VALUE,VALUE"),
        (["--over=optimizer.lr=1,-1"], "optimizer.lr: given -1"),
        (["--over=optimizer.rl=1,2"], 'optimizer.rl: given "1"'),
        (["--over=job.dump_folder=a,b"], "--over job.dump_folder: given a; allowed: options that a sweep does not set"),
        (["--over=optimizer.lr=1,2", "--workers=0"], "--workers: given '0'"),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, list) else "",
)
def test_bad_arguments_start_nothing(arguments, message, job, fake_runs, capsys):
    assert cli.main(["sweep", *job, *arguments]) == 2
    assert message in capsys.readouterr().err and not fake_runs.started and not Path("run_sweep").exists()


def test_names_of_folders_are_plain_and_differ():
    plain = sweep.folder_name({"optimizer.lr": "1e-4", "debug.seed": "1"})
    assert plain == "optimizer.lr=1e-4,debug.seed=1"
    paths = [sweep.folder_name({"training.dataset_path": path}) for path in ("a/b", "a-b", "../a", "x" * 500)]
    assert len(set(paths)) == 4 and not any("/" in path or len(path) > 140 for path in paths)


def test_runs_without_a_logged_step_have_no_picture(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    assert (
        not draw_losses([("a", tmp_path / "metrics.jsonl")], tmp_path / "a.png") and not (tmp_path / "a.png").exists()
    )


def test_only_runs_that_ended_well_are_ranked(tmp_path):
    """A run without a finite loss at its end and one that was stopped have lower losses, and no star."""
    runs = []
    for number, (result, losses) in enumerate([("ok", [3.0, 2.0]), ("exit code 7: x", [1.0]), ("ok", [0.5, math.nan])]):
        run = sweep.SweepRun({"debug.seed": str(number)}, tmp_path, load([]), result)
        run.folder.mkdir()
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        text = "".join(json.dumps(row).replace("NaN", "null") + "\n" for row in rows)
        (run.folder / "metrics.jsonl").write_text(text)
        runs.append(run)
    cells = [line.split() for line in sweep.table(runs)][1:]
    assert [row[2] for row in cells] == ["2.0000*", "1.0000", "-"]
    assert list(sweep.table(runs))[3].endswith("ok, loss not finite since step 2")


def test_a_reason_is_the_last_error_as_a_whole():
    log = "ERROR: an older one\nstep 1\nERROR: the loss is nan; start again in\n    another job.dump_folder\n"
    assert failure_reason(log, 1) == "ERROR: the loss is nan; start again in another job.dump_folder"
    assert failure_reason("step 1\nKilled\n", 9) == "Killed" and failure_reason("", 9) == "exit code 9"


def test_advice_about_folders_is_that_of_a_sweep(job, fake_runs, monkeypatch, capsys):
    fake_runs.codes = [1]
    monkeypatch.setattr(sweep, "read_end", lambda log: "ERROR: undo it, or start in another job.dump_folder")
    assert cli.main(["sweep", *job, "--over=optimizer.lr=0.1", "--job.dump_folder=run/"]) == 1
    assert "start in another folder by --to" in capsys.readouterr().out
    assert Path("run_sweep").is_dir() and not Path("run").exists()


def test_a_file_in_the_way_and_a_closed_pipe(job, fake_runs, monkeypatch, capsys):
    Path("all").mkdir()
    Path("all/logs").touch()
    assert cli.main(["sweep", *job, "--over=optimizer.lr=0.1", "--to=all"]) == 2
    assert "all/logs: cannot be written (File exists); give another folder by --to" in capsys.readouterr().err

    def close_pipe(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sweep, "train_all", close_pipe)
    with pytest.raises(BrokenPipeError):
        sweep.main([*job, "--over=optimizer.lr=0.1"])


def test_values_with_commas():
    text = """training.unfrozen=["a,b", 'c'],[], {x = [1,2]},it's,"q,q" """
    assert [case["training.unfrozen"] for case in combinations("--over", [text])] == [
        """["a,b", 'c']""",
        "[]",
        "{x = [1,2]}",
        "it's",
        '"q,q"',
    ]
