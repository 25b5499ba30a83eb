"""Tests of messages about typical mistakes: they name the place, report no consequences, and their advice works."""

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from torchtitan import cli
from torchtitan.config.manager import load, said_by
from torchtitan.config.options import help_text, overview, sections
from torchtitan.core import errors
from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.launch import load_job
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.rules import check

LONGEST_LINE = 200


@pytest.fixture(autouse=True)
def a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text("[training]\nlocal_batch_size = 4\nglobal_batch_size = 6\n")
    (tmp_path / "job.toml").write_text('extends = "base.toml"\n[checkpoint]\nkeep_latest_k = 1\n')
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def load_faults(capsys, *argv: str) -> list[str]:
    assert load_job(list(argv), 1) is None
    return capsys.readouterr().err.splitlines()[:-1]


# The place


def test_a_fault_names_its_file_or_the_command_line(capsys):
    base, job = load_faults(capsys, "job.toml")
    assert base.startswith("base.toml: training.global_batch_size: given 6;")
    assert job.startswith("job.toml: checkpoint.keep_latest_k: given 1;")
    (line,) = load_faults(capsys, "job.toml", "--checkpoint.keep_latest_k=2", "--training.global_batch_size", "7")
    assert line.startswith("command line: training.global_batch_size: given 7;")


def test_the_source_of_an_option_is_the_last_that_sets_it():
    argv = ["job.toml", "--training.global_batch_size=8"]
    assert said_by(argv) == {
        "training.local_batch_size": "base.toml",
        "checkpoint.keep_latest_k": "job.toml",
        "training.global_batch_size": "command line",
    }


# One mistake causes one fault


@pytest.mark.parametrize(
    "argv",
    [
        ["--checkpoint.enabel", "--checkpoint.load_step=5"],
        ["--checkpoint.enable=yes", "--checkpoint.load_step=5"],
        ["--model.nmae=deepseek", "--model.flavor=16B"],
        ["--model.flavr=8B", "--parallelism.tensor_parallel_degree=1", "--model.overrides={n_experts = 8}"],
        ["--training.local_batchsize=8", "--training.global_batch_size=12"],
    ],
)
def test_a_misspelt_option_causes_one_fault_only(argv, capsys):
    assert len(load_faults(capsys, *argv)) == 1


def test_independent_faults_are_reported_with_a_misspelt_option(capsys):
    first, second = load_faults(capsys, "--metrics.log_freqq=1", "--checkpoint.enable", "--checkpoint.keep_latest_k=1")
    assert "metrics.log_freqq" in first and "checkpoint.keep_latest_k" in second


# Their advice


def test_upgrade_is_advised_once_for_an_old_file(tmp_path, capsys):
    (tmp_path / "old.toml").write_text(
        "[training]\nbatch_size = 4\ntensor_parallel_degree = 1\n[float8]\nemulate = true\n"
    )
    faults = load_faults(capsys, "old.toml")
    assert len(faults) == 3 and [fault.count("--upgrade` translate the file") for fault in faults].count(1) == 1


@pytest.mark.parametrize(
    "argument", ["--compile.enable=1", "--compile.enable=yes", "--compile.enable yes", "--compile.enable on"]
)
def test_a_flag_is_written_true_or_false(argument, capsys):
    (line,) = load_faults(capsys, *argument.split())
    assert line.endswith("allowed: true or false; write true")
    assert load(["--compile.enable=true"]).compile.enable and load(["--compile.enable"]).compile.enable


def test_an_option_without_its_value_is_refused(capsys):
    (line,) = load_faults(capsys, "--training.steps", "--compile.enable")
    assert line.endswith("allowed: a whole number >= 1; write --training.steps VALUE")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--lr_scheduler.lr_min", "0.1"], "--lr_scheduler.min_lr_factor=0.1"),
        (["--checkpoint.enable_checkpoint"], "--checkpoint.enable=true"),
        (["--checkpoint.no_enable_checkpoint"], "--checkpoint.enable=false"),
        (["--validation.enabled=true"], "--validation.enable=true"),
        (["--metrics.enable_color_printing"], "--metrics.disable_color_printing=false"),
        (["--optimizer.fused=true"], "--optimizer.implementation=fused"),
        (["--training.batch_size=4"], "--training.local_batch_size=4"),
        (["--training.seed", "7"], "--debug.seed=7"),
        (["--model.hf_assets_path=my files/12"], "--model.tokenizer_path='my files/12'"),
    ],
)
def test_the_advice_for_a_moved_option_can_be_pasted(arguments, remedy, capsys):
    (line,) = load_faults(capsys, *arguments)
    assert line.endswith(f"where it has moved; write {remedy}")
    key, _, value = shlex.split(remedy)[0].removeprefix("--").partition("=")
    section, _, name = key.rpartition(".")
    loaded = getattr(getattr(load(shlex.split(remedy)), section), name)
    assert str(loaded).lower() == value


def test_advice_for_a_quoted_number_has_no_quotes(tmp_path, capsys):
    (tmp_path / "old.toml").write_text('[lr_scheduler]\nlr_min = "0.1"\n')
    (line,) = load_faults(capsys, "old.toml")
    assert "write lr_scheduler.min_lr_factor = 0.1, or let" in line


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["--lr_scheduler.lr_min"], "where it has moved; write --lr_scheduler.min_lr_factor VALUE"),
        (["--lr_scheduler.lr_min=low"], "moved; write --lr_scheduler.min_lr_factor, a number >= 0 and <= 1"),
        (["--training.enable_float8_linear"], "moved; write --training.float8 VALUE"),
        (["--float8.emulate"], "(the device and the recipe decide it); leave it out"),
        (["--checkpoint.enabel"], "allowed: a known option; did you mean checkpoint.enable?"),
        (["--checkpoint.no_enabel"], "allowed: a known option; did you mean checkpoint.no_enable?"),
    ],
)
def test_unknown_options_without_a_value(arguments, end, capsys):
    (line,) = load_faults(capsys, *arguments)
    assert line.endswith(end)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux's /proc, where no folder can be created")
@pytest.mark.parametrize("folder", ["/proc/nope", "/proc/nope/deeper", "/proc"])
def test_a_dump_folder_that_cannot_be_created_is_refused(folder, capsys):
    (line,) = load_faults(capsys, f"--job.dump_folder={folder}")
    assert f'job.dump_folder: given "{folder}"; allowed: a folder that can be written to; ' in line
    assert "name another folder" in line


def test_checking_a_folder_creates_nothing(tmp_path):
    config = load([f"--job.dump_folder={tmp_path / 'new' / 'run'}"])
    before = sorted(tmp_path.iterdir())
    assert check(config, 1, "cpu") == [] and sorted(tmp_path.iterdir()) == before


def test_an_estimate_without_a_job_asks_for_one(capsys):
    for arguments in ([], ["--device=cpu", "--memory=80GiB"]):
        assert cli.main(["estimate", *arguments]) == 2
        assert "no job is given" in capsys.readouterr().err


def test_a_batch_larger_than_memory_is_refused(capsys):
    (line,) = load_faults(capsys, "--training.local_batch_size=999999999")
    assert (
        "training.local_batch_size: given 999999999; allowed: a batch of token ids that fits into this machine's "
        in line
    )
    most = int(line.rpartition(" than ")[2].replace(",", ""))
    assert check(load([f"--training.local_batch_size={most // 2}"]), 1, "cpu") == []


def test_a_dataset_without_its_package_is_refused(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "datasets" else find(name, *args)
    )
    (line,) = load_faults(capsys, "--training.dataset=c4")
    assert (
        'training.dataset: given "c4"; allowed: "c4" only with the package datasets, which is not installed; pip '
        "install" in line
    )


def test_wandb_without_a_key_is_refused(capsys, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: name if name == "wandb" else find(name, *args))
    (line,) = load_faults(capsys, "--metrics.enable_wandb")
    assert "because a run cannot answer its prompt; run wandb login once, set WANDB_API_KEY, or" in line
    config = load(["--metrics.enable_wandb"])
    for name, value in (("WANDB_API_KEY", "x"), ("WANDB_MODE", "offline")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert check(config, 1, "cpu") == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert check(config, 1, "cpu") == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset", "text"], "--dataset-path is not set; this dataset needs a file"),
        (
            ["--dataset", "c4_test"],
            "set --dataset-path to that folder, or --dataset python_stdlib, which needs no file",
        ),
        (["--dataset_path", "nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_prepare_names_its_own_options(argv, message, capsys):
    assert cli.main(["prepare", *argv, "--tokenizer_path", "bytes", "--output", "out"]) == 2
    err = capsys.readouterr().err
    assert message in err and "training." not in err


def test_a_misspelt_job_name_gets_a_suggestion(capsys):
    (line,) = load_faults(capsys, "debug_mode")
    assert line == 'command line: given "debug_mode"; allowed: --section.key value; did you mean debug_model?'


@pytest.mark.parametrize("command", ["preview", "generate x", "convert x y"])
def test_a_misspelt_command_option_is_refused(command, capsys):
    assert cli.main([*command.split(), "--sample", "1"]) == 2
    assert "no option --sample" in capsys.readouterr().err


def test_commands_accept_every_way_to_name_a_job(capsys):
    valid = ["--checkpoint.keep_latest_k=2", "--training.global_batch_size=8", "--training.seq_len=32"]
    for arguments in (["job.toml"], ["--config", "job.toml"], ["--job.config-file=job.toml"]):
        assert cli.main(["preview", *arguments, *valid, "--tokens=8"]) == 0
        assert "sample 0: 32 tokens" in capsys.readouterr().out


def test_unknown_chat_records_are_answered_with_the_known_formats(tmp_path, capsys):
    (tmp_path / "chat.jsonl").write_text('{"dialog": [{"who": "me", "what": "hello"}]}\n')
    arguments = [
        "preview",
        "--training.dataset=text",
        "--training.dataset_path=chat.jsonl",
        "--model.tokenizer_path=bytes",
    ]
    assert cli.main([*arguments, "--training.seq_len=32"]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "chat.jsonl:1: no field 'text'; the record's fields: 'dialog'; set training.text_field" in errors
    assert "chat (messages), sharegpt (conversations)" in errors


# Help


def test_help_of_a_section_or_an_option(capsys):
    for name in ("optimizer", "training.seq_len", "training.dataloader"):
        with pytest.raises(SystemExit) as exit_info:
            load(["--help", name])
        out = capsys.readouterr().out
        assert exit_info.value.code == 0 and f"--{name}" in out
        assert all(line.strip().startswith(f"--{name}") for line in out.splitlines() if line.startswith("  --"))
    with pytest.raises(JobError, match="--help optimiser: allowed: a section, .*; did you mean optimizer?"):
        load(["--help", "optimiser"])
    assert len(help_text()) > 10 * len(help_text("optimizer"))


def test_the_help_of_train_fits_on_a_screen_and_imports_little():
    program = "import sys; from torchtitan import cli; cli.main(['train', '--help'])"
    report = "[print(name, file=sys.stderr) for name in ('torch', 'numpy', 'torchtitan.rules') if name in sys.modules]"
    command = [sys.executable, "-c", f"{program.replace('cli.main', 'code = cli.main')}; {report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", overview() + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan.train", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == overview() + "\n" and len(done.stdout.splitlines()) <= 40
    assert all(f"\n  {name} " in done.stdout for name in sections() if "." not in name)


def test_help_lists_the_names_of_a_registry():
    out = help_text("optimizer.name")
    assert "One of " in out and set(OPTIMIZERS) <= {name.strip(" .") for name in out.rpartition("One of")[2].split(",")}
    assert "none" in help_text("adapter.kind").rpartition("One of")[2]


def test_dashes_and_underscores_are_equivalent(capsys):
    assert cli.main(["prepare", "--dataset-path", "nowhere", "--tokenizer-path=bytes", "--output", "a-b"]) == 2
    assert "nowhere: no such file" in capsys.readouterr().err
    assert cli.main(["check", "--no-memory", "--world-size=2", "--training.local-batch-size=2"]) == 0
    assert cli.main(["check", "--no_memory", "--world_size", "2"]) == 0 and "2 ranks" in capsys.readouterr().out


# Line length


def test_no_line_is_longer_than_200_characters(capsys, monkeypatch):
    monkeypatch.setattr(errors, "LONGEST_LINE", LONGEST_LINE)  # see conftest.py
    arguments = ["--parallelism.tensor_parallel_degree=3", "--training.dataset=c4_test", "--optimizer.zzz=1"]
    assert cli.main(["check", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 4 and max(map(len, lines)) <= LONGEST_LINE
    assert all(line.startswith(("    ", "command line: ", "the job: ", "3 faults")) for line in lines)
    path = "/a/path/" * 40
    assert wrap_lines(f"{path}: {'words ' * 60}").splitlines()[0] == f"{path}:"  # so that it can be copied
    assert wrap_lines("one\n\ntwo") == "one\n\ntwo"
