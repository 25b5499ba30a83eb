"""Tests of the sources of every file: imports go downwards only, files and functions are short, no code is executed
from data, and docstrings name the shapes of tensors.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from tests.support.package_sources import FILES, PACKAGE, TORCH_FREE
from tests.support.private_names import private_attributes, private_imports, private_paths
from tests.torch_internals.names import OUTSIDE

# Rooms: the folders and files directly in the package. Each may import from the rooms that its line lists, all of them
# above it in this table. Within a room imports are free, but never circular.
ROOMS: dict[str, set[str]] = {
    "torch_internals": set(),  # imports nothing from the package
    "core": {"torch_internals"},
    "process": {"core", "torch_internals"},
    "losses": {"core", "torch_internals"},
    "parallelisms": {"core", "process", "torch_internals"},
    "config": {"core", "losses", "process"},
    "models": {"core", "parallelisms", "process", "torch_internals"},
    "lr_schedules": {"core"},
    "lr_scheduling": {"lr_schedules"},
    "optimizers": {"config", "core", "torch_internals"},
    "datasets": {"core", "process"},
    "adapters": {"config", "core", "models", "parallelisms", "torch_internals"},
    "checkpoint": {"config", "core", "models", "process", "torch_internals"},
    "metrics": {"core", "process", "torch_internals"},
    "guards": {"checkpoint", "core", "parallelisms", "process"},
    "launcher": {"checkpoint", "config", "core", "metrics", "process", "torch_internals"},
    "job": {"checkpoint", "config", "core", "datasets", "losses", "lr_schedules", "models", "parallelisms"},
    "rules": {"adapters", "checkpoint", "config", "core", "datasets", "job", "launcher", "losses", "lr_schedules"}
    | {"metrics", "models", "optimizers", "parallelisms", "process"},
    "assembly": {"adapters", "checkpoint", "config", "core", "datasets", "guards", "job", "losses"}
    | {"launcher", "lr_scheduling", "metrics", "models", "optimizers", "parallelisms", "process"},
    "training": {"adapters", "assembly", "checkpoint", "config", "core", "datasets", "guards", "job", "launcher"}
    | {"losses", "lr_scheduling", "metrics", "models", "optimizers", "parallelisms", "process", "rules"},
    "engine": {"core", "losses", "training"},
    "planner": {
        "adapters",
        "assembly",
        "config",
        "core",
        "job",
        "launcher",
        "lr_schedules",
        "losses",
        "metrics",
        "models",
        "optimizers",
    }
    | {"parallelisms", "process", "rules", "torch_internals", "training"},
    "contract": {"adapters", "assembly", "config", "core", "datasets", "job", "losses", "lr_schedules", "models"}
    | {"optimizers", "parallelisms", "process", "rules", "training"},
    "launch": {"config", "core", "launcher", "metrics", "process", "rules"},
    "commands": {"adapters", "assembly", "checkpoint", "config", "contract", "core", "datasets", "job", "launcher"}
    | {"losses", "lr_schedules", "metrics", "models", "optimizers", "parallelisms", "planner", "process", "rules"}
    | {"training"},
    "plugins": {"adapters", "checkpoint", "commands", "config", "core", "datasets", "launch", "launcher"}
    | {"job", "losses", "lr_schedules", "models", "parallelisms", "process", "rules", "training"},
    "cli": {"commands", "core", "process"},  # imports a command's module when it runs
    "train": {"cli", "config", "core", "launch", "launcher", "metrics", "process", "training"},
    "__main__": {"cli"},
    "__init__": set(),
}


def imports_of(path: Path) -> list[tuple[ast.AST, str]]:
    """Return (node, room) of every import of the package's modules."""
    rooms = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms += [(node, room_of(name.split(".")[1:])) for name in names if name.startswith("torchtitan.")]
    return rooms


def room_of(names: Sequence[str]) -> str:
    """Return the room of a module, given the parts of its name below the package."""
    return names[0]


def names_below_package(path: Path) -> tuple[str, ...]:
    """Return the parts of a module's name below the package; for an __init__.py, the folder's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


SOURCES = [(str(path.relative_to(PACKAGE)), text := path.read_text(), ast.parse(text)) for path in FILES]
"""Path within the package, text and syntax tree of every file."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_imports_follow_the_table_of_rooms():
    offenders = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {room}"
        for path in FILES
        for node, room in imports_of(path)
        if room not in ROOMS[room_of(names_below_package(path))] | {room_of(names_below_package(path))}
    ]
    assert not offenders, "imports go downwards only; ROOMS lists the rooms that a room may import"


def test_the_table_of_rooms_is_exact_and_ordered():
    rooms = {room_of(names_below_package(path)) for path in FILES}
    assert rooms == set(ROOMS)
    used = {room: set() for room in ROOMS}
    for path in FILES:
        used[room_of(names_below_package(path))] |= {room for _, room in imports_of(path)}
    unused = {room: allowed - used[room] for room, allowed in ROOMS.items() if allowed - used[room]}
    assert not unused, "remove these rooms from ROOMS, as nothing imports them there any more"
    order = list(ROOMS)
    upward = {room: allowed & set(order[order.index(room) :]) for room, allowed in ROOMS.items()}
    assert not {room: names for room, names in upward.items() if names}


def test_no_circular_imports():
    """No module imports itself, directly or through others, by imports at the top of files."""
    modules = {".".join(("torchtitan", *names_below_package(path))): path for path in FILES}
    arrows = {}
    for name, path in modules.items():
        below = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchtitan"):
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    below.add(inner if inner in modules else node.module)
        arrows[name] = below
    while independent := [name for name, below in arrows.items() if not below & arrows.keys()]:
        for name in independent:
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


def test_only_one_file_of_the_core_names_plugins():
    """The core finds plugins by this file, so that it works without them (tests/plugins/test_absent_plugins.py)."""
    naming = {name for name, text, _ in SOURCES if "torchtitan.plugins" in text and not name.startswith("plugins/")}
    assert naming == {"core/plugins.py"}


def test_private_names_of_torch_are_in_one_room():
    """So what a new torch changes is found in one place, and a test goes through its names."""
    outside = [(name, tree) for name, _, tree in SOURCES if not name.startswith("torch_internals/")]
    offenders = [
        f"{name}:{line} {path}"
        for name, tree in outside
        for line, path in (*private_imports(tree), *private_paths(tree))
    ]
    assert not offenders, "use the names and functions of torchtitan/torch_internals, or add one there"
    attributes = {name: {attribute for _, attribute in private_attributes(tree)} for name, tree in outside}
    attributes = {name: " ".join(sorted(used)) for name, used in attributes.items() if used and name not in NOT_TORCH}
    assert attributes == OUTSIDE, "the table of tests/torch_internals/names.py only shrinks"


NOT_TORCH = {"commands/completion.py"}
"""Files with private attributes of argparse's objects."""


def test_files_and_functions_stay_short():
    """Files have at most 600 lines and functions 60: split by subject before they grow further."""
    long_files = [name for name, text, _ in SOURCES if len(text.splitlines()) > 600]
    long_functions = [
        f"{name}:{node.lineno} {node.name}"
        for name, _, tree in SOURCES
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long_files + long_functions


def test_checking_a_job_needs_no_torch():
    lines = [f"import torchtitan.{name}" for name in TORCH_FREE]
    code = "; ".join([*lines, "import sys", "sys.exit('torch' in sys.modules)"])
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("module", "others"),
    [("cli", {"pydantic"}), ("commands.presets", {"torchtitan.config.job", "torchtitan.models"})],
)
def test_what_a_command_does_not_need_is_not_imported(module, others):
    """The help of the program and commands without a job are quick: validation and all options take 0.4 s."""
    code = f"import torchtitan.{module}, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not others & set(modules.split())


FORBIDDEN = (
    "weights_only=False",
    "trust_remote_code=True",
    "shell=True",
    "allow_pickle=True",
    "yaml.load",
    "os.system",
)


UNSAFE_CALLS = ("eval", "exec", "pickle.load", "pickle.loads", "torch.load")


def test_no_code_from_files_is_executed():
    texts = [f"{name}: {pattern}" for name, text, _ in SOURCES for pattern in FORBIDDEN if pattern in text]
    calls = [
        f"{name}:{node.lineno} {called}"
        for name, _, tree in SOURCES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in UNSAFE_CALLS
    ]
    assert not texts + calls


PICKLING = {
    *("gather_object", "all_gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""Collectives of torch that unpickle what other ranks have sent, which can run code."""


def test_ranks_exchange_no_pickles():
    """torchtitan.process.distributed has gather_json, all_gather_json and broadcast_json instead."""
    name_of = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}
    offenders = [
        f"{name}: {used}"
        for name, _, tree in SOURCES
        for node in ast.walk(tree)
        if type(node) in name_of and (used := getattr(node, name_of[type(node)])) in PICKLING
    ]
    assert not offenders


# Functions with tensors in their signature document the shapes

SHAPE = re.compile(r"\[[^\]]*\]|\bshape[sd]?\b|\bscalars?\b", re.IGNORECASE)
"""[B, S, D], "of any shape", "of its shape", "a scalar"."""
BY_NAME = re.compile(r"(Mapping|dict|tuple)\[str, torch\.Tensor\]")
"""Tensors by name, which have the shapes of the parameters or batch entries so named."""
OF_THE_CLASS = ("__init__", "__call__", "forward", "backward")
"""Methods that the docstring of the class may document."""

CLASSES = [node for _, _, tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def names_shapes(node: ast.AST) -> bool:
    return bool(SHAPE.search(ast.get_docstring(node) or ""))


def has_tensor_arguments(function: Function) -> bool:
    signature = function.args
    arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg, signature.kwarg]
    annotations = [function.returns, *(argument.annotation for argument in arguments if argument is not None)]
    texts = [BY_NAME.sub("", ast.unparse(annotation)) for annotation in annotations if annotation is not None]
    return any(re.search(r"\bTensor\b", text) for text in texts)


def methods(owner: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in owner.body if isinstance(node, Function)}


def interfaces(owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield the classes of the package that a class derives from, and the protocols that it implements."""
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases}
    for other in CLASSES:
        if other.name in bases and other is not owner:
            yield other
            yield from interfaces(other)
        elif is_protocol(other) and methods(other).keys() <= methods(owner).keys():
            yield other


def is_protocol(owner: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "Protocol" for base in owner.bases)


def has_documented_shapes(owner: ast.ClassDef | None, function: Function) -> bool:
    """Return True if the function, its class, or an interface that it implements documents the shapes."""
    if names_shapes(function) or owner is None:
        return names_shapes(function)
    for interface in (owner, *interfaces(owner)):
        method = methods(interface).get(function.name)
        if (method is not None and names_shapes(method)) or (function.name in OF_THE_CLASS and names_shapes(interface)):
            return True
    return False


def public_functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    owners = [None, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
    for owner in owners:
        for node in (owner or tree).body:
            if isinstance(node, Function) and (node.name[0] != "_" or node.name in OF_THE_CLASS):
                yield owner, node


def test_docstrings_name_the_shapes_of_tensors():
    silent = [
        f"{name}:{function.lineno} {function.name}"
        for name, _, tree in SOURCES
        for owner, function in public_functions(tree)
        if has_tensor_arguments(function) and not has_documented_shapes(owner, function)
    ]
    assert not silent, "say the tensors' shapes in the docstring, as [B, S, D], or that it is any shape"


def test_the_rule_on_shapes_finds_missing_ones(monkeypatch):
    """Shapes may be documented by the function, the class or an interface; one without any is reported."""
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
    functions = [
        f for owner, f in public_functions(tree) if has_tensor_arguments(f) and not has_documented_shapes(owner, f)
    ]
    assert [function.name for function in functions] == ["silent", "other", "further"]
