"""Tests of `torchtitan bench`: the combinations that it measures, results of failed ones, and refused arguments."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from tests.support import jobs
from torchtitan import cli
from torchtitan.commands import bench
from torchtitan.commands.command_lines import parse_command
from torchtitan.config.manager import load, to_toml
from torchtitan.core.errors import JobError
from torchtitan.core.files import shipped_jobs as shipped


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(working_directory):
    """Write the file of a tiny job that saves, validates and ends after 2 epochs; return it as a list of arguments."""
    options = dict(
        training__global_batch_size=-1,
        training__epochs=2,
        checkpoint__enable=True,
        validation__enable=True,
        optimizer__lr=1e-3,
    )
    config = load(jobs.arguments(working_directory / "run", jobs.write_texts(working_directory / "texts"), **options))
    (working_directory / "tiny.toml").write_text(to_toml(config))
    return ["tiny.toml"]


def read_rows(path="bench.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_a_combination_out_of_memory_does_not_stop_the_others(tiny, working_directory, capfd):
    sweep = "{vocab_size = 260},{vocab_size = 4000000000}"  # the last has a matrix of 4 TB, which fits no machine
    arguments = ["bench", *tiny, f"--sweep=model.overrides={sweep}", "--steps=2", "--plot=picture.svg"]
    assert cli.main(arguments) == 0
    fits, too_large = read_rows()
    assert (
        fits["result"] == "ok"
        and fits["exit_code"] == 0
        and fits["options"] == {"model.overrides": "{vocab_size = 260}"}
    )
    assert (
        fits["tokens_per_second"] == pytest.approx(8 * 32 / fits["step_seconds"], rel=0.5) and fits["memory_gib"] > 0.1
    )
    assert (too_large["result"], too_large["exit_code"]) == ("out of memory", 8) and "step_seconds" not in too_large
    head, *lines = capfd.readouterr().out.splitlines()
    assert head.split() == ["model.overrides", "tokens/s", "s/step", "GiB", "result"]
    assert lines[0].endswith("  ok") and lines[1].endswith("-  out of memory") and len(lines) == 2
    assert "<svg" in Path("picture.svg").read_text()
    assert not (working_directory / "run").exists()


def fake_jobs(monkeypatch, codes, rows=4):
    """Replace the start of a job: return the next exit code and write the metrics that a run would log."""
    started, codes = [], iter(codes)

    def run(command, log, seconds):
        config = load(command[command.index("--job.config_file") :])
        started.append((command, config))
        if (code := next(codes)) == 0:
            folder = Path(config.job.dump_folder)
            values = [
                dict(loss=1.0, tokens_per_second=10.0**i, step_seconds=1 / 10**i, memory_gib=4 - i) for i in range(rows)
            ]
            (folder / "metrics.jsonl").write_text(
                "".join(json.dumps(row | {"step": i}) + "\n" for i, row in enumerate(values))
            )
        log.write(b"something before\nthe reason of it\n\n")
        return code

    monkeypatch.setattr(bench, "exit_code_of", run)
    return started


def test_every_combination_is_measured_the_same_way(tiny, monkeypatch, capsys):
    started = fake_jobs(monkeypatch, [0] * 4)
    arguments = ["--sweep=training.seq_len=16,32", "--sweep", "model=llama2/debugmodel,llama3/debugmodel", "--ranks=2"]
    assert cli.main(["bench", *tiny, *arguments, "--out=rows.jsonl"]) == 0
    shapes = [(config.training.seq_len, config.model.name) for _, config in started]
    assert shapes == [(16, "llama2"), (16, "llama3"), (32, "llama2"), (32, "llama3")]
    (first, config), *_ = started
    assert first[3:5] == ["torchtitan.launch", "2"] and (config.training.steps, config.training.epochs) == (
        4,
        None,
    )
    assert not config.checkpoint.enable and not config.validation.enable and config.optimizer.lr == 1e-3
    assert (
        len({config.job.dump_folder for _, config in started}) == 4 and len({c.data.cache_dir for _, c in started}) == 1
    )
    row = read_rows("rows.jsonl")[1]
    assert row["options"] == {"training.seq_len": "16", "model": "llama3/debugmodel"} and row["ranks"] == 2
    assert (row["tokens_per_second"], row["step_seconds"], row["memory_gib"]) == (
        100.0,
        0.01,
        4,
    )  # the first is left out
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (8, "out of memory"),
        (137, "out of memory: killed, as by the system"),
        (-9, "out of memory: killed, as by the system"),
        (2, "refused"),
        (1, "failed: the reason of it"),
        (None, "too slow: stopped by --timeout"),
    ],
    ids=str,
)
def test_results_of_failed_combinations(code, result, tiny, monkeypatch, capsys):
    fake_jobs(monkeypatch, [code])
    assert cli.main(["bench", *tiny]) == 1
    assert capsys.readouterr().out.splitlines()[1].split("-  ")[-1] == result
    assert read_rows()[0]["exit_code"] == code and read_rows()[0]["options"] == {}


def test_data_that_end_too_early_are_a_failure(tiny, monkeypatch):
    fake_jobs(monkeypatch, [0], rows=2)
    assert cli.main(["bench", *tiny]) == 1
    assert read_rows()[0]["result"] == "failed"


def test_a_measurement_is_stopped_at_its_timeout():
    with open("log", "wb") as log:
        assert bench.exit_code_of([sys.executable, "-c", "import time; time.sleep(60)"], log, 0.2) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep=training.seq_len"], "--sweep: given 'training.seq_len'; allowed: section.key=VALUE,VALUE"),
        (["--sweep=training.seq_len=1,,2"], "given 'training.seq_len=1,,2'"),
        (["--sweep=seq_len=1"], "given 'seq_len=1'; allowed: section.key="),
        (["--sweep=training.seq_len=8,8"], "allowed: each option once, with values that differ"),
        (["--sweep=training.seq_len=8", "--sweep=training.seq_len=9"], "allowed: each option once"),
        (["--sweep=model=llama3"], "given model=llama3; allowed: FAMILY/FLAVOR"),
        (["--sweep=training.seq_len=" + ",".join(map(str, range(1, 202)))], "given more than 200 combinations"),
        (["--sweep=training.seq_lem=8,16"], "did you mean training.seq_len?  (training.seq_lem = 8)"),
        (["--sweep=training.seq_len=8,-1"], "(training.seq_len = -1)"),
        (["--sweep=model=llama3/8C"], "(model = llama3/8C)"),
        (["--ranks=3", "--sweep=parallelism.data_parallel_shard_degree=2"], "nothing was measured"),
        (
            ["--sweep=training.steps=10,20"],
            "--sweep training.steps: given 10; allowed: options that affect the computation of a step; bench "
            "sets this option to the same value in all combinations  (training.steps = 10)",
        ),
        (
            ["--sweep=job.dump_folder=a,b"],
            "--sweep job.dump_folder: given a; allowed: options that affect the computation of a step",
        ),
        (["--sweep=validation.freq=10,100"], "--sweep validation.freq: given 100; allowed: options that affect the"),
        (["--sweep=guard.spike=off,stop"], "--sweep guard.spike: given stop; allowed: options that affect the"),
        (["--plot=a.gif"], "--plot: given 'a.gif'; allowed: names with .svg or .png"),
        (["--out=none/a.jsonl"], "none/a.jsonl: cannot be written (No such file or directory); give another name"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1][:60],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments, message, tiny, monkeypatch, capsys):
    started = fake_jobs(monkeypatch, [])
    assert cli.main(["bench", *tiny, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split("\n    ")) and started == []


@pytest.mark.parametrize(
    "arguments", [["--steps=0"], ["--ranks=0"], ["--timeout=0"], ["--swep=a"], ["--steps=x"]], ids=str
)
def test_bad_options_of_the_command(arguments):
    with pytest.raises(JobError, match="^torchtitan bench: "):
        parse_command("bench", arguments)


@pytest.mark.parametrize("name", [name for name in shipped() if "debug" in name])
def test_shipped_jobs_stay_valid_when_cut_to_the_measured_steps(name):
    options = parse_command("bench", [name])[0]
    (config,) = bench.checked_configs([{}], [name], options)
    assert config.training.steps == options.steps + 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--early_stop.patience=2", "--validation.enable"],
        ["--guard.non_finite=rollback", "--checkpoint.enable"],
        ["--job.clean_start=always"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_options_that_need_a_disabled_section_are_reset(arguments):
    job = ["debug_model", *arguments]
    (config,) = bench.checked_configs([{}], job, parse_command("bench", job)[0])
    assert config.job.clean_start == "never" and config.early_stop.patience is None
    assert config.guard.non_finite == "stop"


def test_a_relora_schedule_in_epochs_is_kept():
    job = ["relora_debug", "--training.epochs=2", "--lr_scheduler.warmup_steps=epoch"]
    config = bench.only_steps(load(job), 3)
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.warmup_steps) == ("relora_cosine", None)
    assert config.lr_scheduler.total_steps == load(job).training.steps


def test_the_base_of_an_adapter_is_not_loaded(tiny):
    loaded = [*tiny, "--adapter.kind=lora", "--adapter.save=alone", "--checkpoint.initial_load_path=none"]
    config = bench.only_steps(load(loaded), 3)
    assert config.checkpoint.initial_load_path is None and (config.adapter.kind, config.adapter.save) == (
        "lora",
        "whole",
    )
    assert isinstance(parse_command("bench", [*loaded])[0], argparse.Namespace)
