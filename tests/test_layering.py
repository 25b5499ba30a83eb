"""What holds of every file, read off the sources: who may import whom (downwards only), how long files and functions
are, that nothing is executed, that docstrings give the shapes of tensors.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

PACKAGE = ROOT / "torchtitan"

# What each part of the package may import of the others. A part is a folder or a file directly below the package; files
# of the rooms in APART are parts of their own.
APART = ("config", "commands")
ALLOWED = {
    "errors": set(),
    "bars": set(),
    "files": set(),
    "imported": set(),
    "registration": set(),
    "config.sections": set(),
    "config.job": {"config.sections"},
    "tasks": {"registration"},
    "batch_shape": {"config.job", "parallelisms", "tasks"},
    "cadence": set(),
    "limits": set(),
    "memory_limit": {"limits"},
    "numa": set(),
    "ranks": set(),
    "shipped": set(),
    "leaving": set(),
    "failures": set(),
    "progress": set(),
    "launcher": {"leaving", "progress", "ranks"},
    "lr_restarts": set(),
    "lr_shapes": {"cadence", "lr_restarts", "registration"},
    "lr_scheduling": {"lr_shapes"},
    "loss": set(),
    "preferences": {"loss"},
    "by_position": {"loss"},
    "by_request": {"loss"},
    "initialization": set(),
    "keyed": set(),
    "masking": {"keyed", "loss"},
    "classes": {"loss"},
    "stores": {"initialization"},
    "deferred": set(),
    "distributed": {"memory_limit", "numa", "ranks"},
    "models": {"distributed", "stores", "deferred", "initialization", "keyed", "limits", "parallelisms"}
    | {"registration"},
    "parallelisms": {"failures", "stores", "initialization", "distributed", "limits"},
    "adapters": {"stores", "deferred", "config.sections", "initialization", "models", "parallelisms", "registration"},
    "datasets": {"distributed", "leaving", "limits", "registration", "shipped"},
    "optimizers": {"config.options", "initialization", "keyed", "registration"},
    "checkpoint": {"stores", "deferred", "distributed", "initialization"},
    "findings": {"checkpoint"},
    "guards": {"distributed", "initialization", "parallelisms"},
    "metrics": {"distributed", "initialization", "trackers"},
    "trackers": {"registration"},
    "logs": {"ranks"},
    "plot": {"metrics"},
    "profiling": {"limits"},
    "config.options": {"config.job"},
    "config.changes": {"config.job", "config.options", "tasks"},
    "config.renames": {"config.job", "config.options"},
    "config.old_models": set(),
    "config.upgrade": {"config.old_models", "config.renames"},
    "config.layers": {"cadence", "config.job", "config.options", "config.renames", "ranks"},
    "config.command_line": {"config.layers", "config.options", "config.renames", "shipped"},
    "config.manager": {"cadence", "config.command_line", "config.job", "config.layers", "config.options", "shipped"},
    "config.schema": {"config.job"},
    "rules": {
        "cadence",
        "memory_limit",
        "lr_restarts",
        "config.job",
        "config.sections",
        "config.options",
        "lr_shapes",
        "models",
        "parallelisms",
        "datasets",
        "checkpoint",
    }
    | {
        "batch_shape",
        "optimizers",
        "config.changes",
        "config.old_models",
        "run_folder",
        "adapters",
        "trackers",
        "tasks",
        "limits",
    },
    "run_folder": {"checkpoint"},
    "clean_start": {"checkpoint", "config.job", "launcher", "run_folder", "trackers"},
    "time_limit": set(),
    "weights": {"checkpoint", "deferred", "initialization", "models", "stores"},
}
for names in ALLOWED.values():
    names |= {"errors", "bars"}  # what is the user's fault may be said anywhere, and what takes long may be shown
OLD = {"config.renames", "config.upgrade", "config.old_models"}
BUILD = (
    set(ALLOWED) - {"config.options", "config.layers", "config.command_line", "config.manager", "rules", "plot"} - OLD
)
JUDGED = {"errors", "config.job", "config.sections", "config.manager", "config.options", "config.renames"}
JUDGED |= {"ranks", "rules", "optimizers"}
ALLOWED |= {
    "commands.upgrade": JUDGED | {"config.layers", "config.upgrade"},
    "commands.check": JUDGED - {"config.renames"}
    | {
        "adapters",
        "bars",
        "batch_shape",
        "cadence",
        "config.schema",
        "config.upgrade",
        "commands.upgrade",
        "memory_limit",
    },
    "importers": {"errors", "adapters", "config.options", "config.sections", "lr_restarts", "models", "registration"}
    | {"datasets"},
    "commands.importing": JUDGED - {"config.renames"}
    | {"checkpoint", "commands.check", "commands.upgrade", "config.layers", "importers", "launch", "leaving"}
    | {"run_folder"},
    "commands.list": {"adapters", "config.options", "datasets", "lr_shapes", "models", "optimizers", "registration"}
    | {"shipped", "tasks", "trackers"},
    "commands.schedule_plot": {"plot", "parallelisms"},
    "commands.schedule": JUDGED - {"config.renames"}
    | {"commands.check", "commands.schedule_plot", "parallelisms", "plot"},
}
OF_JOB = {"build", "build_data", "build_watching", "saved_model"}  # all that is made of a job
OF_JOB |= {"exports", "origin", "introduction"}
ABOVE = set(ALLOWED) | {"feed"} | OF_JOB
ALLOWED |= {
    "feed": {"classes", "datasets", "distributed", "loss", "masking", "models", "parallelisms"},
    "build": BUILD,
    "build_data": BUILD | {"build", "feed"},
    "build_watching": BUILD | {"build"},
    "saved_model": BUILD | {"build"},
    "exports": BUILD | {"build"},
    "origin": BUILD | {"build"},
    "introduction": BUILD | {"build", "plot"},
    "step_progress": {"bars", "metrics", "progress"},
    "validation": {"datasets", "distributed", "feed", "parallelisms", "progress"},
    "preflight": {
        "errors",
        "config.job",
        "config.options",
        "distributed",
        "feed",
        "initialization",
        "parallelisms",
        "ranks",
    },
    "memory": BUILD | {"build", "build_data", "feed", "rules"},
    "commands.estimate": JUDGED - {"config.renames"} | {"bars", "commands.check", "memory", "memory_limit"},
    "reference_pairs": BUILD | {"build", "build_data", "feed"},
    "reference": BUILD | {"build", "build_data", "config.options", "feed", "preferences", "reference_pairs"},
    "generated": BUILD | {"build", "build_data"},
    "trainer": ABOVE | {"preflight", "generated", "reference", "step_progress", "validation"},
    "train": ABOVE | {"launch", "trainer"},
    "launch": JUDGED | {"checkpoint", "clean_start", "launcher", "leaving", "run_folder"},
    "commands.job_of": ABOVE,
    "commands.resizing": ABOVE | {"commands.job_of"},
    "commands.convert": ABOVE | {"commands.job_of", "commands.resizing"},
    "commands.on_ranks": {"launcher"},
    "commands.generate": ABOVE | {"commands.job_of", "commands.on_ranks"},
    "commands.chat": ABOVE | {"commands.generate", "commands.job_of"},
    "commands.evaluate": ABOVE
    | {"commands.evaluate_plot", "commands.evaluate_tasks", "commands.generate", "commands.job_of"},
    "commands.evaluate_tasks": ABOVE | {"commands.generate", "commands.patience", "commands.task_files"},
    "commands.task_files": {"errors", "commands.task_figures", "importers", "models"},
    "commands.task_figures": {"errors", "config.options"},
    "commands.patience": set(),
    "commands.evaluate_plot": {"plot"},
    "commands.bench": ABOVE - OLD | {"commands.bench_plot", "commands.job_of", "leaving"},
    "commands.bench_plot": {"plot"},
    "commands.export": ABOVE | {"commands.generate"},
    "commands.preview": ABOVE,
    "commands.prepare_job": ABOVE | {"commands.check"},
    "commands.prepare": ABOVE | {"commands.prepare_job"},
    "commands.init": set(),
    "commands.plot": {"errors", "metrics", "plot"},
    "commands.presets": {"config.options", "errors", "importers", "models", "shipped"},
    "commands.checkpoints": {"checkpoint", "errors"},
    "commands.completion": {"cli", "config.options", "shipped"},
    "cli": {"errors", "imported", "leaving"},
    "__main__": {"cli"},
    "__init__": set(),
}
for names in ALLOWED.values():
    names |= {"files"}  # whose one function opens what a user names
TORCH_FREE = (
    "config.manager",
    "run_folder",
    "commands.check",
    "commands.list",
    "trackers",
    "logs",
    "commands.checkpoints",
    "cli",
    "ranks",
    "tasks",
    "models",
    "adapters",
    "datasets",
    "datasets.tokenizer",
    "train",
    "launch",
)
TORCH_FREE += ("parallelisms.pipeline.cut", "parallelisms.pipeline.actions", "parallelisms.pipeline.simulator")


def imports(path: Path) -> list[tuple[ast.AST, str]]:
    """(where, part) of every import of the package's own modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found += [(node, part_of(name.split(".")[1:])) for name in names if name.startswith("torchtitan.")]
    return found


def part_of(names: Sequence[str]) -> str:
    """Of a module's names below the package."""
    return ".".join(names[: 1 + (names[0] in APART)])


def names_of(path: Path) -> tuple[str, ...]:
    """The module's names below the package; of a folder's own file, the folder's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path):
    part = part_of(names_of(path))
    assert part in ALLOWED or path.read_text() == "", f"{part} is new: say in ALLOWED what it may import"
    upwards = {name for _, name in imports(path)} - ALLOWED.get(part, set()) - {part}
    assert not upwards


def test_no_circle_of_imports():
    """File by file: what a module imports at its top has never imported that module in turn."""
    modules = {".".join(("torchtitan", *names_of(path))): path for path in FILES}
    arrows = {}
    for name, path in modules.items():
        below = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchtitan"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    below.add(inner if inner in modules else node.module)
        arrows[name] = below
    while leaves := [name for name, below in arrows.items() if not below & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path):
    """What outgrows a file or a function is split by subject, before it grows on."""
    text = path.read_text()
    lengths = {path.name: len(text.splitlines()) / 400}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lengths[node.name] = (node.end_lineno - node.lineno + 1) / 60
    assert not {name for name, length in lengths.items() if length > 1}


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


PICKLING = {
    *("gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""Collectives of torch that unpickle what other ranks have sent, which can run code."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_ranks_exchange_no_pickles(path):
    """torchtitan.distributed has gather_json, all_gather_json and broadcast_json instead."""
    name_of = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if type(node) in name_of]
    assert not {getattr(node, name_of[type(node)]) for node in nodes} & PICKLING


# Whoever takes or gives tensors says of which shape

SHAPE = re.compile(r"\[[^\]]*\]|\bshape[sd]?\b|\bscalars?\b", re.IGNORECASE)
"""[B, S, D], "of any shape", "of its shape", "a scalar"."""
BY_NAME = re.compile(r"(Mapping|dict|tuple)\[str, torch\.Tensor\]")
"""Tensors by name: these have the shapes of what has the names."""
OF_THE_CLASS = ("__init__", "__call__", "forward", "backward")
"""What a class is for: its own docstring may say these."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
TREES = [(path, ast.parse(path.read_text())) for path in FILES]
CLASSES = [node for _, tree in TREES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def says_shapes(node: ast.AST) -> bool:
    return bool(SHAPE.search(ast.get_docstring(node) or ""))


def takes_or_gives_tensors(function: Function) -> bool:
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    annotations = [function.returns, *(argument.annotation for argument in arguments if argument is not None)]
    texts = [BY_NAME.sub("", ast.unparse(annotation)) for annotation in annotations if annotation is not None]
    return any(re.search(r"\bTensor\b", text) for text in texts)


def methods(owner: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in owner.body if isinstance(node, Function)}


def interfaces(owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Classes of the package that it derives from, and protocols of which it has every method."""
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases}
    for other in CLASSES:
        if other.name in bases and other is not owner:
            yield other
            yield from interfaces(other)
        elif is_protocol(other) and methods(other).keys() <= methods(owner).keys():
            yield other


def is_protocol(owner: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "Protocol" for base in owner.bases)


def is_said(owner: ast.ClassDef | None, function: Function) -> bool:
    """By the function, by its class, or by an interface that it only carries out: whose words it need not repeat."""
    if says_shapes(function) or owner is None:
        return says_shapes(function)
    for each in (owner, *interfaces(owner)):
        own = methods(each).get(function.name)
        if (own is not None and says_shapes(own)) or (function.name in OF_THE_CLASS and says_shapes(each)):
            return True
    return False


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    owners = [None, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
    for owner in owners:
        for node in (owner or tree).body:
            if isinstance(node, Function) and (node.name[0] != "_" or node.name in OF_THE_CLASS):
                yield owner, node


def test_whoever_takes_or_gives_tensors_says_their_shapes():
    silent = [
        f"{path.relative_to(PACKAGE)}:{function.lineno} {function.name}"
        for path, tree in TREES
        for owner, function in public_functions(tree)
        if takes_or_gives_tensors(function) and not is_said(owner, function)
    ]
    assert not silent, "say the tensors' shapes in the docstring, as [B, S, D], or that it is any shape"


def test_the_rule_knows_words_from_silence(monkeypatch):
    """A shape said here, by the class, by an interface, by nobody."""
    tree = ast.parse("""
def said(x: torch.Tensor): "[B, S]"
def named(x: dict[str, torch.Tensor]): "State."
def silent(x: torch.Tensor): "Twice as much."
class Store(Protocol):
    def read(self) -> torch.Tensor: "Of any shape."
class Kept:
    "Of the hidden states [B, S, D]."
    def read(self) -> torch.Tensor: ...
    def forward(self, x: torch.Tensor): ...
    def other(self, x: torch.Tensor): ...
class Longer(Kept):
    def forward(self, x: torch.Tensor): ...
    def further(self, x: torch.Tensor): ...
""")
    monkeypatch.setitem(globals(), "CLASSES", [node for node in tree.body if isinstance(node, ast.ClassDef)])
    functions = [f for owner, f in public_functions(tree) if takes_or_gives_tensors(f) and not is_said(owner, f)]
    assert [function.name for function in functions] == ["silent", "other", "further"]
