"""The command `torchtitan`: dispatch to subcommands, and no traceback for a user's mistake."""

import gc
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

from torchtitan import cli, train
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import ConfigError
from torchtitan.config.options import Fault
from torchtitan.core.errors import JobError
from torchtitan.process.ranks import Ranks
from torchtitan.training import trainer

REPOSITORY = Path(__file__).parent.parent


def torchtitan(*argv: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "torchtitan", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def command(monkeypatch):
    """Replace the main function of `torchtitan check`."""

    def install(main):
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=main))

    return install


def test_every_command_has_a_function():
    assert [name for name in cli.COMMANDS if not callable(resolve_name(cli.function_of(name)))] == []


def test_usage(capsys):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == cli.main(["-h"]) == 0
    out = capsys.readouterr().out
    assert out == (cli.USAGE + "\n") * 3 and all(f"  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("trian", "did you mean train?"),
        ("xyz", f"there are {', '.join(cli.COMMANDS)}"),
        ("--job.config_file", f"there are {', '.join(cli.COMMANDS)}"),
    ],
)
def test_unknown_commands(name, hint, capsys):
    assert cli.main([name]) == 2
    assert capsys.readouterr().err == f"torchtitan: no command {name!r}; {hint}\n"


def test_arguments_and_exit_codes_pass_through(command):
    calls = []
    command(lambda argv: calls.append(argv) or 3)
    assert cli.main(["check", "a b", "--x"]) == 3
    assert calls == [["a b", "--x"]]


def test_garbage_collection_is_off_while_a_command_is_imported(monkeypatch):
    gc_enabled = []
    imported = SimpleNamespace(main=lambda argv: gc_enabled.append(gc.isenabled()) or 0)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: gc_enabled.append(gc.isenabled()) or imported)
    assert cli.main(["check"]) == 0 and gc_enabled == [False, True]
    gc.disable()
    try:
        assert cli.main(["check"]) == 0 and gc_enabled[2:] == [False, False], "the caller's setting is kept"
    finally:
        gc.enable()
    frozen = gc.get_freeze_count()
    assert cli.main(["check"]) == 0 and gc.get_freeze_count() <= frozen, "nothing new was imported"


def test_ctrl_c(command):
    def interrupted(argv):
        raise KeyboardInterrupt

    command(interrupted)
    assert cli.main(["check"]) == 130


def test_a_users_mistake_is_a_line_and_not_a_traceback(command, capsys, monkeypatch):
    def raise_job_error(argv):
        raise ConfigError([Fault("job.toml", "a.b", "1", "2", "")])

    command(raise_job_error)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == "job.toml: a.b: given 1; allowed: 2\n"
    monkeypatch.setenv("TORCHTITAN_TRACEBACK", "1")
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err.startswith("Traceback (most recent call last)")


def test_an_internal_error_is_a_traceback(command):
    def broken(argv):
        _one, _two = (1,)

    command(broken)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        cli.main(["check"])


@pytest.mark.parametrize("error, code", [(JobError("yours"), 2), (ValueError("ours"), None)])
def test_only_user_errors_end_a_run_without_a_traceback(error, code, monkeypatch):
    """A ValueError may also come from a bug, such as a wrong unpacking in a model's forward."""

    def broken(config, ranks):
        raise error

    monkeypatch.setattr(trainer, "Trainer", broken)
    monkeypatch.setattr(train.signal, "signal", lambda number, handler: None)
    if code is None:
        with pytest.raises(ValueError, match="ours"):
            train.run(JobConfig(), Ranks())
    else:
        assert train.run(JobConfig(), Ranks()) == code


def test_a_malformed_rank_variable_is_refused(tmp_path):
    done = torchtitan("train", folder=tmp_path, WORLD_SIZE="two")
    assert done.returncode == 2 and done.stderr.startswith(
        "WORLD_SIZE in the environment: given 'two'; allowed: a whole number; let torchrun set it\n"
    )


def test_package_errors_are_job_errors_or_no_value_errors():
    """An error class that derives from ValueError but not from JobError would be reported as a bug of the program."""
    for info in pkgutil.walk_packages([str(REPOSITORY / "torchtitan")], "torchtitan."):
        # the modules of fake_cuda load a library that their command compiles, and one imports lm-eval, an extra
        others = ("torchtitan.planner.fake_cuda.", "torchtitan.plugins.eval_tasks.lm_eval_model")
        if not info.name.endswith("__main__") and not info.name.startswith(others):
            for kind in vars(importlib.import_module(info.name)).values():
                if isinstance(kind, type) and issubclass(kind, ValueError) and kind.__module__ == info.name:
                    assert issubclass(kind, JobError), kind


@pytest.mark.parametrize("name", ["train", "check"])
def test_a_bad_job_exits_with_2_one_line_a_fault_and_no_files(name, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('[job]\ndump_folder = "out"\n[training]\nstep = 1\nseq_len = 0\n[modl]\n')
    files = ["--job.config_file", str(job)] if name == "train" else [str(job)]
    done = torchtitan(
        name,
        *files,
        "--optimizer.lr",
        "nan",
        "--model.tokenizer_path=bytes",
        folder=tmp_path,
        PYTHONPROFILEIMPORTTIME="1",
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    messages = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and done.stdout == ""
    assert "pydantic" in imported and "torch" not in imported
    assert [line.split(": given")[0] for line in messages[:4]] == [
        f"{job}: training.step",
        f"{job}: modl",
        f"{job}: training.seq_len",
        "command line: optimizer.lr",
    ]
    assert len(messages) == 5 and messages[4].startswith("4 faults")
    assert list(tmp_path.iterdir()) == [job]


def test_an_impossible_job_leaves_no_files(tmp_path):
    tokenizer = REPOSITORY / "tests/assets/tokenizer/tiktoken.model"
    options = [f"--model.tokenizer_path={tokenizer}", "--parallelism.data_parallel_shard_degree=3"]
    done = torchtitan("train", *options, folder=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "start 3 ranks" in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["--help"], ["check", "--help-config"]])  # less and more than Python's output buffer
def test_a_closed_pipe_is_no_traceback(argv):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchtitan", *argv]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("argv", [["--help"], ["check", "--help-config"]])
def test_a_full_disk_under_stdout_is_one_error_line(argv):
    command = [sys.executable, "-m", "torchtitan", *argv]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "stdout: cannot be written (No space left on device); make room, or have it elsewhere\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_lone_surrogates_and_control_characters_in_arguments_are_printed_safely(tmp_path):
    odd = os.fsdecode(b"\xff\x1b[2J")
    done = torchtitan(
        "check", "--no-memory", "--job.description", odd, odd, "--model.tokenizer_path=bytes", folder=tmp_path
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr and "2 faults" in done.stderr
    done = torchtitan(odd, folder=tmp_path)
    assert done.returncode == 2 and "\x1b" not in done.stderr
