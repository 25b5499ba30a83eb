"""Tests stand where the code is: tests/<room>/test_<module>.py, or test_<room>.py for a room of one subject."""

from pathlib import PurePath

from tests.support.jobs import ROOT

LONG = 100
"""Lines from which a module has a test of its name."""
UNNAMED = {
    "adapters/peft_config",
    "checkpoint/stored_tensors",
    "checkpoint/weight_sources",
    "commands/command_lines",
    "commands/command_parser",
    "commands/contract",
    "commands/plan",
    "commands/replay",
    "commands/script_rank",
    "config/sections/model",
    "config/sections/run",
    "config/sections/training",
    "core/callbacks",
    "datasets/__init__",
    "datasets/preference_records",
    "datasets/template_worker",
    "launch",
    "launcher/monitor",
    "launcher/rank",
    "losses/evaluation",
    "metrics/json_lines",
    "models/__init__",
    "models/family",
    "models/gpt2/__init__",
    "models/opt/__init__",
    "models/qwen3_moe/__init__",
    "models/roberta/__init__",
    "models/roberta/model",
    "models/spec",
    "parallelisms/expert_parallel",
    "parallelisms/pipeline/runtime",
    "parallelisms/plan",
    "parallelisms/ring_attention",
    "parallelisms/sequence_layout",
    "train",
    "training/caller_batches",
    "training/run",
    "training/step",
}
"""Modules without one, which other tests reach. The set only shrinks."""


def names_of_tests(module: PurePath) -> set[str]:
    """Return the tests, relative to tests/, of which a module may have one: its own, or one of a folder around it."""
    folder, name = module.parent, module.name
    if name == "__init__":
        folder, name = folder.parent, folder.name
    room = folder.parts[0] if folder.parts else name
    own = f"{room}/test_{name}.py" if folder.parts else f"test_{name}.py"
    return {own, *(f"{room}/test_{part}.py" for part in (folder.parts or (name,)))}


def test_every_long_module_has_a_test_of_its_name():
    tests = {path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    unnamed = set()
    for path in (ROOT / "torchtitan").rglob("*.py"):
        module = path.relative_to(ROOT / "torchtitan").with_suffix("")
        if len(path.read_text().splitlines()) >= LONG and not names_of_tests(module) & tests:
            unnamed.add(module.as_posix())
    assert unnamed - UNNAMED == set(), "give it a test of its name"
    assert UNNAMED - unnamed == set(), "take it out of UNNAMED"


def test_names_of_tests():
    assert names_of_tests(PurePath("checkpoint/saving")) == {
        "checkpoint/test_saving.py",
        "checkpoint/test_checkpoint.py",
    }
    assert names_of_tests(PurePath("planner/memory/rank_sizes")) == {
        *("planner/test_rank_sizes.py", "planner/test_memory.py", "planner/test_planner.py")
    }
    assert names_of_tests(PurePath("guards/__init__")) == {"guards/test_guards.py", "test_guards.py"}
    assert names_of_tests(PurePath("cli")) == {"test_cli.py", "cli/test_cli.py"}
