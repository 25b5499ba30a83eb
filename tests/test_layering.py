"""Who may import whom (design: downwards only), read off the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT

PACKAGE = ROOT / "torchtitan"

# What each part of the package may import of the others. A part is a folder or a file directly below the package.
ALLOWED = {
    "config": set(),
    "ranks": set(),
    "leaving": set(),
    "lr_shapes": set(),
    "lr_scheduling": {"lr_shapes"},
    "loss": set(),
    "initialization": set(),
    "distributed": {"ranks"},
    "models": {"initialization", "parallelisms"},
    "parallelisms": {"initialization", "distributed"},
    "datasets": {"distributed"},
    "optimizers": {"distributed"},
    "checkpoint": {"distributed", "initialization"},
    "metrics": {"distributed"},
    "plot": {"metrics"},
    "schedule_plot": {"plot", "parallelisms"},
    "profiling": set(),
    "options": {"config"},
    "renames": {"config", "options"},
    "config_manager": {"config", "options", "renames"},
    "rules": {"config", "options", "lr_shapes", "models", "parallelisms", "datasets", "checkpoint", "optimizers"},
    "check": {"config", "config_manager", "options", "renames", "ranks", "rules"},
    "schedule": {"config", "config_manager", "check", "options", "parallelisms", "ranks", "rules", "schedule_plot"},
}
BUILD = set(ALLOWED) - {"options", "renames", "config_manager", "rules", "check", "plot", "schedule", "schedule_plot"}
ABOVE = set(ALLOWED) | {"build"}
ALLOWED |= {
    "build": BUILD,
    "trainer": ABOVE,
    "train": ABOVE | {"trainer"},
    "launch": {"train", "leaving", "ranks"},
    "generate": ABOVE,
    "preview": ABOVE,
    "prepare": ABOVE,
    "cli": {"leaving", "options"},
    "__main__": {"cli"},
    "__init__": set(),
}
TORCH_FREE = ("config", "config_manager", "check", "cli", "ranks", "models", "datasets", "datasets.tokenizer", "train")
TORCH_FREE += ("parallelisms.pipeline_cut", "parallelisms.schedule_actions", "parallelisms.schedule_simulator")


def imports(path: Path) -> list[tuple[ast.AST, str]]:
    """(where, part) of every import of the package's own modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found += [(node, name.split(".")[1]) for name in names if name.startswith("torchtitan.")]
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path):
    part = part_of(path)
    assert part in ALLOWED, f"{part} is new: say in ALLOWED what it may import"
    upwards = {name for _, name in imports(path)} - ALLOWED[part] - {part}
    assert not upwards


def test_own_modules_are_imported_at_the_top():
    """One exception: train.py checks a job before it imports torch."""
    late = set()
    for path in FILES:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    if isinstance(node, (ast.Import, ast.ImportFrom)) and "torchtitan" in ast.unparse(node):
                        late.add(path.name)
    assert late <= {"train.py"}


def test_checking_a_job_needs_no_torch():
    lines = [f"import torchtitan.{name}" for name in TORCH_FREE]
    code = "; ".join([*lines, "import sys", "sys.exit('torch' in sys.modules)"])
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


FORBIDDEN = (
    "weights_only=False",
    "trust_remote_code=True",
    "shell=True",
    "allow_pickle=True",
    "yaml.load",
    "os.system",
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_that_is_read_is_executed(path):
    text = path.read_text()
    assert not [word for word in FORBIDDEN if word in text]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "pickle.load", "pickle.loads", "torch.load"), called
