"""torch has every private name that the package uses, with the parameters that it passes.

This needs torch and the package alone, so it runs under any torch:

    python -m pytest --noconftest -o addopts= tests/torch_internals
"""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan
from tests.support.private_names import private_attributes, private_paths
from tests.torch_internals.names import ATTRIBUTES, IN_2_11, METHODS, NAMES, OUTSIDE

ROOM = Path(torchtitan.__file__).parent / "torch_internals"
SINCE_2_12 = {"_setup_forward_recv_info", "_setup_backward_recv_info", "is_root_arg", "tensor_meta"}
"""Names of pipelines that torch 2.11 lacks; the code does without."""
IS_2_11 = torch.__version__.startswith("2.11.")


SAMPLES = {"torch.Tensor": torch.zeros(()), "torch.UntypedStorage": torch.UntypedStorage(1)}
"""Objects of classes in C."""


def found(path: str) -> Any:
    """Return torch's object with this path, and import the modules on the way."""
    owner: Any = torch
    for end, name in enumerate(parts := path.split(".")[1:], start=1):
        if not hasattr(owner, name):
            importlib.import_module(".".join(["torch", *parts[:end]]))
        owner = getattr(owner, name)
    return owner


def parameters_of(function: Any) -> list[tuple[str, bool, bool]]:
    """Return name, whether it is passed by name only, and whether it has a default, of each parameter."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = function.default
    if isinstance(function, torch._ops.OpOverload):
        return [(a.name, a.kwarg_only, a.has_default_value()) for a in function._schema.arguments]
    kinds = inspect.Parameter
    return [
        (
            "*" * (p.kind == kinds.VAR_POSITIONAL) + p.name,
            p.kind == kinds.KEYWORD_ONLY,
            p.default is not kinds.empty or p.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD),
        )
        for p in inspect.signature(function).parameters.values()
        if p.name != "self" or function in (found("torch.distributed._functional_collectives.all_reduce"),)
    ]


def assert_takes(function: Any, expected: str) -> None:
    """Assert that a function has the expected parameters: some first, and others by name."""
    positional, _, keywords = expected.partition("* ")
    first = positional.split()
    try:
        actual = parameters_of(function)
    except ValueError:  # a class in C, before torch 2.13
        assert all(f"{name}: " in function.__init__.__doc__ for name in (*first, *keywords.split()))
        return
    names = [name for name, is_keyword, _ in actual if not is_keyword]
    assert names[: len(first)] == first, actual
    assert set(keywords.split()) <= {name for name, _, _ in actual}, actual
    more = [name for name, _, has_default in actual if name not in (*first, *keywords.split()) and not has_default]
    assert not more, f"torch {torch.__version__} wants {more} too"


@pytest.mark.parametrize("path", NAMES)
def test_torch_has_the_name(path):
    value, expected = found(path), NAMES[path]
    if expected is not None:
        assert_takes(value, expected)


@pytest.mark.parametrize("owner, name", [(owner, name) for owner in METHODS for name in METHODS[owner]])
def test_torch_has_the_method(owner, name):
    if IS_2_11 and name in SINCE_2_12:
        pytest.skip("the code does without")
    assert_takes(getattr(found(owner), name), METHODS[owner][name])


@pytest.mark.parametrize(
    "owner, name", [(owner, name) for owner, names in ATTRIBUTES.items() for name in names.split()]
)
def test_torch_has_the_attribute(owner, name):
    """An attribute of the class, or one that it or a class that it derives from sets."""
    if IS_2_11 and name in SINCE_2_12:
        pytest.skip("the code does without")
    name = {after: before for before, after in IN_2_11.items()}.get(name, name) if IS_2_11 else name
    kind = found(owner)
    if hasattr(kind, name) or owner in SAMPLES and hasattr(SAMPLES[owner], name):
        return
    sources = [inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("torch.")]
    pattern = re.compile(rf"(self|optimizer|opt)\.{name}\b|^    {name}\b|\"{name}\"", re.MULTILINE)
    assert any(map(pattern.search, sources)), f"torch {torch.__version__} has no {name}"


def test_the_tables_are_complete():
    """Each name that the room uses is tested, and each attribute that other rooms still use."""
    trees = [ast.parse(path.read_text()) for path in ROOM.glob("*.py")]
    paths = {path for tree in trees for _, path in private_paths(tree)}
    paths.discard("torch._C")  # as a module with functions to replace
    missing = [path for path in paths if not any(f"{path}.".startswith(f"{name}.") for name in NAMES)]
    assert not missing, "add these names to NAMES"
    listed = {name for names in ATTRIBUTES.values() for name in names.split()} | IN_2_11.keys()
    listed |= {name for methods in METHODS.values() for name in methods} | {
        n for path in NAMES for n in path.split(".")
    }
    used = {name for tree in trees for _, name in private_attributes(tree)}
    used |= {name for names in OUTSIDE.values() for name in names.split()}
    assert not used - listed, "add these attributes to METHODS or ATTRIBUTES"


def test_each_name_says_its_version_and_use():
    silent = []
    for path in ROOM.glob("*.py"):
        body = ast.parse(path.read_text()).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            text = ""
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                text, name = ast.get_docstring(node) or "", node.name
            elif isinstance(node, ast.Assign):
                text, name = after.value.value if isinstance(after, ast.Expr) else "", ast.unparse(node.targets[0])
            else:
                continue
            if path.stem != "replacement" and not re.match(r"torch 2\.\d+: \S", text):
                silent.append(f"{path.name}: {name}")
    assert not silent
