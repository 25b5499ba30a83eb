"""Every file imports the modules that it names as a.b.c.

A submodule is an attribute of its package as soon as any file has imported it. Ranks and scripts of tests are forks of
a process with nearly all imports (tests/support/pool.py), so a missing import would fail only in a user's interpreter.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.support.jobs import ROOT

FILES = sorted(path for folder in ("torchtitan", "scripts") for path in (ROOT / folder).rglob("*.py"))
PACKAGES = ("numpy", "torch", "yaml")
"""External packages with modules that files name as a.b.c."""
LAZY = ("numpy.random", "torch._dynamo", "torch._dynamo.config", "torch._dynamo.exc")
LAZY += ("torch._inductor", "torch._inductor.config")
"""Modules that these packages import on first use."""


@cache
def is_module(name: str) -> bool:
    """Return True if the module has a file or folder. At most its first package gets imported."""
    root, *subpackages = name.split(".")
    spec = find_spec(root)
    if spec is None or not subpackages:
        return spec is not None
    return any(
        Path(place, *subpackages).with_suffix(".py").is_file() or Path(place, *subpackages, "__init__.py").is_file()
        for place in spec.submodule_search_locations or ()
    )


def bound(tree: ast.Module) -> tuple[dict[str, str], set[str]]:
    """Return the file's names of modules, and all modules that its imports import."""
    names, imported = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported.add(alias.name)
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module)
            for alias in node.names:
                if is_module(full_name := f"{node.module}.{alias.name}"):
                    imported.add(full_name)
                    names[alias.asname or alias.name] = full_name
    return names, {".".join(name.split(".")[:end]) for name in imported for end in range(1, name.count(".") + 2)}


def spelled(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every a.b.c that begins with a module."""
    for node in ast.walk(tree):
        parts, at = [], node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if parts and isinstance(at, ast.Name) and at.id in names:
            yield node.lineno, ".".join([names[at.id], *reversed(parts)])


def forgotten(source: str) -> set[tuple[int, str]]:
    """Return line and name of modules that are used and not imported, unless their package imports them."""
    tree = ast.parse(source)
    names, imported = bound(tree)
    return {
        (line, name)
        for line, name in spelled(tree, names)
        if is_module(name) and name not in imported | with_packages() | {*LAZY}
    }


@cache
def with_packages() -> set[str]:
    """Return the modules that a fresh interpreter has after importing these packages."""
    code = f"import sys, {', '.join(PACKAGES)}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_no_module_is_used_that_its_file_has_not_imported():
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}" for path in FILES for line, name in forgotten(path.read_text())
    ]
    assert not missing, "\n".join(missing)


def test_one_that_is_forgotten_is_found():
    several = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n"
    used = "torch.distributed.checkpoint.load\ndist.checkpoint.save\nnn.functional.silu\ntorch.nn.Linear\n"
    assert forgotten(several + used) == {(4, "torch.distributed.checkpoint"), (5, "torch.distributed.checkpoint")}
    assert forgotten(several + "import torch.distributed.checkpoint\n" + used) == set()
    assert forgotten("import torchtitan.config\ntorchtitan.config.manager.load\n") == {(2, "torchtitan.config.manager")}
