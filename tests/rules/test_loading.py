"""Tests of loading and judging a job: trial runs of a few steps, and what a command gets of a job with faults."""

import shutil
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan import launch
from torchtitan.config.options import ConfigError
from torchtitan.config.sections.training import LRScheduler
from torchtitan.core.files import shipped_jobs
from torchtitan.job import ResolvedJob
from torchtitan.process.ranks import read_ranks
from torchtitan.rules import NAMES
from torchtitan.rules.facts import Facts
from torchtitan.rules.loading import _saved_schedules, fewest_ranks, load_job, load_valid
from torchtitan.training.trainer import Trainer

DEBUG = """
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.8
convention = "torchtitan"
[training]
steps = 100
"""
CYCLES = """
[lr_scheduler]
warmup_steps = 2
decay_type = "relora_cyclical"
cycle_length = 10
[training]
steps = 20
"""
NOTICE = "a trial run by training.steps = 5: the job's schedule does not fit, and is shortened: "


def job(folder: Path, text: str, *options: str) -> list[str]:
    (folder / "job.toml").write_text(text)
    return ["--job.config_file", str(folder / "job.toml"), *options]


@pytest.mark.parametrize("key", NAMES)
@pytest.mark.parametrize("end", ["--training.steps=5", "--training.tokens=99999"])
def test_an_unknown_name_of_a_trial_run_is_reported(tmp_path, key, end):
    """The schedule, which is judged before the names, depends on some of them."""
    section, _, option = key.partition(".")
    text = f'{DEBUG}[{section}]\n{option} = "unknwon"\n' if f"[{section}]" not in DEBUG else ""
    text = text or DEBUG.replace(f"[{section}]\n", f'[{section}]\n{option} = "unknwon"\n')
    arguments = job(tmp_path, text, end, "--model.tokenizer_path=bytes", "--compile.enable")
    with pytest.raises(ConfigError) as error:
        load_valid(arguments, 1, "cpu")
    assert key in [fault.key for fault in error.value.faults]


@pytest.mark.parametrize(
    "text, changes, expected",
    [
        (DEBUG, "lr_scheduler.warmup_steps 20 -> 1", {"warmup_steps": 1, "decay_ratio": 0.8}),
        (
            DEBUG.replace("0.8", "1.0").replace("20", "0"),
            "",
            {"warmup_steps": 0, "decay_ratio": 1.0},
        ),
        (
            DEBUG.replace("0.8", "0.9").replace("= 20", "= 10").replace('"torchtitan"', '"default"'),
            "lr_scheduler.warmup_steps 10 -> 1",
            {"warmup_steps": 1, "decay_ratio": 0.9},
        ),
        (
            DEBUG.replace("0.8", "0.3").replace("= 20", "= 70"),
            "lr_scheduler.warmup_steps 70 -> 4, lr_scheduler.decay_ratio 0.3 -> unset",
            {"warmup_steps": 4, "decay_ratio": None},
        ),
        (
            "[lr_scheduler]\nwarmup_steps = 0.9\ndecay_ratio = 0.5\n[training]\nepochs = 2\n",
            "lr_scheduler.warmup_steps 0.9 -> unset, lr_scheduler.decay_ratio 0.5 -> unset",
            {"warmup_steps": None},
        ),
        (
            CYCLES,
            "lr_scheduler.total_steps unset -> 20",
            {"total_steps": 20, "cycle_length": 10},
        ),
    ],
)
def test_a_trial_run_has_a_schedule_that_fits(text, changes, expected, tmp_path):
    options = ["--training.steps=5"]
    if "epochs" in text:
        text = text.replace("[training]\nepochs = 2\n", "")
    config, notice = load_job(job(tmp_path, text, *options))
    assert notice.replace("nothing", "unset") == (NOTICE + changes if changes else "")
    assert {key: getattr(config.lr_scheduler, key) for key in expected} == expected
    schedule = Facts(ResolvedJob(config)).learning_rate
    assert all(0 <= schedule.multiplier(step) <= 1 for step in range(5)) and config.training.steps == 5


@pytest.mark.parametrize("name", shipped_jobs())
def test_every_shipped_job_can_be_tried_for_a_few_steps(name):
    for steps in (1, 2, 5):
        config, _ = load_job(["--job.config_file", name, f"--training.steps={steps}"])
        job = ResolvedJob(config, fewest_ranks(config.parallelism))
        Facts(job).learning_rate  # noqa: B018 (it raises if it does not fit)


def test_contradictions_are_refused_where_no_trial_is_meant(tmp_path):
    both = ["--training.steps=5", "--lr_scheduler.warmup_steps=9"]
    for text, options in ((DEBUG.replace("= 100", "= 5"), []), (DEBUG, both)):
        with pytest.raises(ConfigError, match="lr_scheduler.warmup_steps"):
            load_valid(job(tmp_path, text, *options), 1, "cpu")


def test_the_launcher_tells_how_a_trial_run_is_shortened(tmp_path, capsys):
    arguments = job(tmp_path, DEBUG, "--training.steps=5")
    config = launch.load_job(arguments, 1, notices=True)
    told = " ".join(capsys.readouterr().err.split())
    assert config.lr_scheduler.warmup_steps == 1 and told == f"{NOTICE}lr_scheduler.warmup_steps 20 -> 1"
    assert launch.load_job(arguments, 1) == config and capsys.readouterr() == ("", "")


def test_all_faults_come_at_once_and_some_do_not_matter(tmp_path):
    arguments = job(tmp_path, DEBUG, "--training.stepz=5", "--optimizer.name=Adm")
    with pytest.raises(ConfigError) as error:
        load_valid(arguments, None, "cpu")
    assert [fault.key for fault in error.value.faults] == ["training.stepz", "optimizer.name"]
    key = "parallelism.enable_async_tensor_parallel"
    gpus = [*arguments[:2], "--compile.enable", "--parallelism.tensor_parallel_degree=2", f"--{key}"]
    assert load_valid(gpus, None, None).job.world_size == 2  # a fault on a CPU only
    with pytest.raises(ConfigError, match=key):
        load_valid(gpus, None, "cpu")
    assert load_valid(gpus, 2, "cpu", lambda fault: fault.key != key).job.device_type == "cpu"


def train_loaded(argv: list[str]) -> tuple[int, dict[int, float]]:
    """Train a judged job on this rank; return the step that it resumed from, and all learning rates by step."""
    config = load_valid(argv, 1, "cpu").config
    trainer = Trainer(config, read_ranks())
    first = trainer.state.step
    trainer.train()
    trainer.metrics.close()
    return first, {row["step"]: row["lr"] for row in jobs.logged_steps(Path(config.job.dump_folder))}


@pytest.mark.parametrize("first", [[], ["--training.steps=4"]])
def test_a_run_that_ends_earlier_is_resumed(first, tmp_path):
    """A resume refuses another schedule than the checkpoint's, so it is that one, or its first steps."""
    texts = jobs.write_texts(tmp_path / "texts")
    options = jobs.arguments(tmp_path / "run", texts, checkpoint__enable=True, checkpoint__interval=4)
    options = [option for option in options if "training.steps" not in option]
    argv = job(tmp_path, "[lr_scheduler]\nwarmup_steps = 10\n[training]\nsteps = 12\n", *options)
    ((_, rates),) = run_ranks(1, train_loaded, [*argv, *first])
    if not first:  # as if it had been stopped after its first checkpoint
        for step in ("step-00000008", "step-00000012"):
            shutil.rmtree(tmp_path / "run/checkpoint" / step)
    config, notice = load_job([*argv, "--training.steps=8"])
    assert "the job's schedule does not fit, and is that of step-00000004: lr_scheduler." in notice
    ((step, resumed_rates),) = run_ranks(1, train_loaded, [*argv, "--training.steps=8"])
    assert step == 4 and resumed_rates.keys() == set(range(1, 9))
    if first:
        assert config.lr_scheduler.warmup_steps == 3 and config.lr_scheduler.total_steps is None
    else:
        assert resumed_rates.items() <= rates.items() and config.lr_scheduler.total_steps == 12


@pytest.mark.parametrize("saved", [{"warmup_steps": "many"}, {"total_steps": [1]}, {"decay_ratio": {}}])
def test_a_foreign_schedule_in_a_checkpoint_is_no_candidate(saved):
    shape = LRScheduler(warmup_steps=10)
    assert _saved_schedules(shape, {"job": {"lr_scheduler": saved, "training": {"steps": 12}}}) == []
    assert _saved_schedules(shape, {"job": {"lr_scheduler": {}, "training": {"steps": "x"}}}) == []
    assert len(_saved_schedules(shape, {"job": {"lr_scheduler": {}, "training": {"steps": 12}}})) == 2
