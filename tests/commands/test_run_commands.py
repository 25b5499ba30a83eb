"""The commands that read a run, on one real run: on two ranks, crashed and restarted, with its metrics cut off too."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks, start_script
from tests.support.report_pages import figure_in
from torchtitan import cli
from torchtitan.commands import sweep
from torchtitan.config.manager import load, to_toml

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEPS, INTERVAL, CRASH_STEP = 6, 2, 3
NO_LOSS = "no logged step with a loss; give the dump_folder of a run, or try again after its first step"


class CrashingLauncher:
    """The part of `subprocess.Popen` that `torchtitan sweep` uses. A rank of the launched job is killed once."""

    def __init__(self, command, stdout, **_):
        script = jobs.ROOT / "tests/support/crashing_job.py"
        self.process = start_script(
            [stdout.name] * 2, jobs.ROOT, script, str(CRASH_STEP), *command[command.index("torchtitan.launch") + 1 :]
        )

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.returncode


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with `undisturbed`, a run on two ranks, and `all`, a sweep with the same job, which crashed."""
    home = tmp_path_factory.mktemp("runs")
    texts = jobs.write_texts(home)
    options = {"training__steps": STEPS, "checkpoint__enable": True, "checkpoint__interval": INTERVAL}
    options |= {"training__local_batch_size": 4, "debug__seed": 3, "validation__enable": True, "validation__freq": 3}
    options |= {"validation__samples": 8, "validation__dataset": "text", "validation__dataset_path": texts}
    arguments = jobs.arguments(home / "undisturbed", texts, **options)
    run_ranks(2, jobs.train, arguments)
    (home / "job.toml").write_text(to_toml(load(arguments)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep.subprocess, "Popen", CrashingLauncher)
        patch.setattr(sweep, "LOOK_SECONDS", 0.05)
        assert cli.main(sweep_of(home)) == 0
    return home


def sweep_of(home: Path) -> list[str]:
    return ["sweep", str(home / "job.toml"), "--over=optimizer.lr=1e-2", "--ranks=2", f"--to={home / 'all'}"]


@pytest.fixture(scope="module")
def run(home):
    """Return the folder of the run that was killed before step 4, and restarted from step 2."""
    return home / "all/optimizer.lr=1e-2"


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "copy"))


def cut(run: Path) -> None:
    """Leave only the lines of two steps and a half of a run's metrics."""
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[: text.index('{"step": 3, "loss"') + 40])


def empty(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


def output_of(capsys, *arguments: object, code: int = 0) -> str:
    """Run a command and return its output, or its message if it is refused. `code`: its exit code."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == code
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    return output.out if code < 2 else output.err


def test_the_run_restarted(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row.get("event") == "restart"]
    assert (event["step"], event["steps_lost"]) == (
        INTERVAL,
        1,
    )  # either rank may be seen to end first
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "validation_loss" in row] == [3, 6]


def test_sweep_reads_the_runs_that_it_has_made(home, run, tmp_path, capsys):
    head, columns, row, drawn = output_of(capsys, *sweep_of(home)).splitlines()
    assert head.startswith("1 combination in ") and ", 1 already done; logs in " in head
    assert row.split()[:2] == ["1e-2", str(STEPS)] and row.endswith("ok") and drawn.endswith("losses.png")
    copy = Path(shutil.copytree(home, tmp_path / "copy"))
    metrics = copy / "all" / run.name
    cut(metrics)
    assert output_of(capsys, *sweep_of(copy)).splitlines()[2].split()[:2] == ["1e-2", "2"]
    empty(metrics)
    head, columns, row = output_of(capsys, *sweep_of(copy)).splitlines()
    assert row.split() == ["1e-2", "-", "-", "-", "-", "ok"]


def test_report_draws_it(home, run, copy, tmp_path, capsys):
    cut(copy)
    page = tmp_path / "page.html"
    job = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(re.sub("^lr = 0.01$", "lr = 0.02", job, flags=re.MULTILINE))
    assert output_of(capsys, "report", run, copy, "--to", page) == f"2 runs drawn into {page}\n"
    assert "<td>optimizer.lr</td><td>0.01</td><td>0.02</td>" in page.read_text()
    events, cut_events = [trace for trace in figure_in(page.read_text()) if "text" in trace]
    assert events["x"] == [2, 2, 4, 6, 6] and cut_events["x"] == [2, 2]
    assert (
        events["text"][-1].startswith("finished after step 6 (exit code 0)")
        and events["text"][0].startswith("saved; ")
        and events["text"][1].startswith("restart: cause rank ")
    )
    losses = [trace for trace in figure_in(page.read_text()) if trace["name"].endswith(", as logged")]
    assert [trace["x"] for trace in losses] == [list(range(1, STEPS + 1)), [1, 2]]
    empty(copy)
    assert NO_LOSS in output_of(capsys, "report", run, copy, "--to", page, code=2)


def test_why_accounts_for_the_restart(run, copy, capsys):
    out = output_of(capsys, "why", run)
    assert out.startswith(f"{run}: ") and "%  restarts\n" in out and "%  steps that were lost\n" in out
    assert "%  saving\n" in out and "%  validation" in out and "a rank slower than" not in out
    assert "unknown: the time after" not in out
    assert "by the planner's model" in out and ": FSDP 2 on Two cores of an AMD EPYC" in out, "the recorded plan"
    cut(copy)
    out = output_of(capsys, "why", copy)
    assert "restarts\n" not in out and "unknown: the time after step 2: the run logs its account of time at" in out
    empty(copy)
    assert NO_LOSS in output_of(capsys, "why", copy, code=2)


def test_diff_finds_it_equal_to_an_undisturbed_run(home, run, copy, capsys):
    undisturbed = home / "undisturbed"
    options, steps, tensors, last = output_of(capsys, "diff", undisturbed, run).splitlines()
    assert options == "options  equal" and last == "A and B are equal in all of this"
    assert steps == f"steps    {STEPS} that both logged (A up to {STEPS}, B up to {STEPS}), equal"
    assert tensors == f"tensors  up to step {STEPS}, 3 of 3 common checkpoints compared, equal"
    cut(copy)
    out = output_of(capsys, "diff", undisturbed, copy)
    assert f"2 that both logged (A up to {STEPS}, B up to 2), equal" in out
    empty(copy)
    assert "no step that both logged, not compared" in output_of(capsys, "diff", undisturbed, copy)


@pytest.mark.parametrize("step", [3, 5])
def test_replay_makes_its_steps_again(step, run, copy, capsys):
    """Step 3 was made twice, step 5 after the restart."""
    (record,) = [row for row in jobs.logged_steps(run) if row["step"] == step]
    out = output_of(capsys, "replay", run, f"--step={step}", "--rank=1", "--samples=1")
    assert out.startswith(f"step {step} of {run}, from the checkpoint of step {step - 1}\n")
    loss, norm = (float(re.search(rf"\n  {name} +(\S+)", out)[1]) for name in ("loss", "grad_norm"))
    assert loss == pytest.approx(record["loss"], rel=1e-5) and norm == pytest.approx(record["grad_norm"], rel=1e-4)
    assert "\n4 samples, highest loss first" in out and "rank 1\n" in out and "rank 0\n" not in out
    for damage in (cut, empty) if step == 5 else ():
        damage(copy)
        output = output_of(capsys, "replay", copy, f"--step={step}", "--samples=0")
        assert output.count("the run did not log this step") == 2
        assert float(re.search(r"\n  loss +(\S+)", output)[1]) == loss
