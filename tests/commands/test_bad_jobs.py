"""Every command that takes a job refuses what `check` refuses: exit code 2 and a line, never a traceback."""

import random

import pytest

from torchtitan import cli
from torchtitan.commands import COMMANDS
from torchtitan.commands.command_lines import PARSERS
from torchtitan.config.options import options
from torchtitan.planner.search import TO_BE_FETCHED

NEEDED = {
    "manifest": ["--for=k8s", "--gpus=1", "--image=image", "--volume=claim:/data", "--job.dump_folder=/data/run"],
    "plan": ["--gpus", "8"],
    "sweep": ["--over", "optimizer.lr=1e-4,2e-4"],
    "bench": ["--sweep", "training.seq_len=64,128"],
}
"""Arguments without which a command does not look at its job."""
JOB_COMMANDS = sorted(name for name in PARSERS if name != "completion" and PARSERS[name]().takes == "job")
WRONG_NAMES = [
    "training.seqlen=3",
    "model.nmae=x",
    "traning.steps=3",
    "optimizer.lrr=1",
    "adapter.rnak=3",
    "x=1",
    "a.b.c=1",
]
UNKNOWN_VALUES = ["model.name=lama", "model.flavor=9000B", "optimizer.name=Adm", "task.kind=sfft", "adapter.kind=lor"]
UNKNOWN_VALUES += ["lr_scheduler.decay_type=line", "training.dataset=tekst", "training.dtype=float8"]
WRONG_TYPES = [
    "training.seq_len=long",
    "training.steps=1.5",
    "optimizer.lr=fast",
    "training.sources=3",
    "model.overrides=[1]",
]
WRONG_TYPES += ["parallelism.tensor_parallel_degree=[]", "data.group_by_length=maybe", "debug.seed={}"]
NOT_MEASURED = ("lr_scheduler.", "validation.", "early_stop.", "callbacks.", "guard.", "checkpoint.")
NOT_MEASURED += ("metrics.", "profiling.")
"""Sections that bench replaces (`bench.only_steps`): of these it judges names and types only."""
NUMBERS = ["-1", "-9223372036854775809", "99999999999999999999", "1e400", "nan", "0x10"]
MISSING = [
    "job.config_file=/nowhere.toml",
    "training.dataset_path=/nowhere",
    "model.tokenizer_path=/nowhere/tokenizer.json",
]
SMALL_DATA = ["--training.dataset=text", "--training.dataset_path=texts.jsonl", "--model.tokenizer_path=bytes"]
"""In place of the job's own: it is judged hundreds of times, and Python's library has 1,700 files."""
VERDICTS: dict[str, bool] = {}


def draws(is_full_run: bool) -> list[str]:
    draw = random.Random("bad overrides")
    integers = [key for key, option in options().items() if "int" in str(option.annotation)]
    if is_full_run:
        numbers = [f"{draw.choice(integers)}={draw.choice(NUMBERS)}" for _ in range(40)]
        return [*WRONG_NAMES, *UNKNOWN_VALUES, *WRONG_TYPES, *MISSING, *numbers]
    groups = (WRONG_NAMES, UNKNOWN_VALUES, WRONG_TYPES, MISSING)
    return [*map(draw.choice, groups), f"{draw.choice(integers)}={draw.choice(NUMBERS)}"]


def run(command: str, override: str, capsys) -> tuple[int, str, str]:
    code = cli.main([command, "debug_model", *SMALL_DATA, *NEEDED.get(command, []), f"--{override}"])
    return code, *capsys.readouterr()


def check_refuses(override: str, capsys) -> bool:
    """Judge each override once for all commands."""
    if override not in VERDICTS:
        VERDICTS[override] = run("check", override, capsys)[0] == 2
    return VERDICTS[override]


@pytest.fixture(autouse=True)
def anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "some text"}\n' * 20)


@pytest.mark.parametrize("command", [name for name in JOB_COMMANDS if name != "check"])
def test_what_check_refuses_every_command_refuses(command, is_full_run, capsys):
    pytest.importorskip("torch")
    refused = 0
    for override in draws(is_full_run):
        key = override.partition("=")[0]
        needs_all = command not in ("estimate", "manifest", "rehearse", "plan", "schedule")  # need no data or tokenizer
        is_read = key in options() and not key.startswith("parallelism.pipeline")  # of these schedule needs no more
        if not needs_all and (key.startswith(TO_BE_FETCHED) or (command == "schedule" and is_read)):
            continue
        if command == "bench" and key.startswith(
            (*NOT_MEASURED, "training.steps", "training.epochs", "training.tokens")
        ):
            continue
        if not check_refuses(override, capsys):
            continue
        code, out, err = run(command, override, capsys)
        assert code == 2 and err.strip() and "Traceback" not in err, (override, out)
        refused += 1
    assert refused


def test_every_command_with_a_job_is_in_the_table():
    assert {"estimate", "rehearse", "plan", "preview", "schedule", "bench", "sweep", "prepare"} < {*JOB_COMMANDS}
    assert {*JOB_COMMANDS} < {*COMMANDS}
