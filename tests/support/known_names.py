"""Check that this Python knows the syntax of files, and each name that they use from the standard library or builtins.
Prints each unknown name on a line.

Other versions of Python than the tests' run it, perhaps without packages, so it uses only the standard library. The
request on stdin has the `files`, and the caller's names of `standard` modules and `builtins`.
"""

import ast
import builtins
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def unknown(path: Path, standard: set[str], built_in: set[str]) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(), str(path))
    except SyntaxError as error:
        yield f"{path}:{error.lineno}: {error.msg}"
        return
    modules: dict[str, Any] = {}  # standard ones, by what they are called in this file
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] in standard]
            called = {alias.asname or alias.name: alias.name for alias in node.names if alias.name in names}
            modules |= {name: module_of(module) for name, module in called.items() if "." not in name}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in standard:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            module, _, last = name.rpartition(".")
            if module_of(name) is None and not hasattr(module_of(module), last):
                yield f"{path}:{node.lineno}: import {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and modules.get(node.value.id):
            if not hasattr(modules[node.value.id], node.attr):
                yield f"{path}:{node.lineno}: {node.value.id}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in built_in and not hasattr(builtins, node.id):
            yield f"{path}:{node.lineno}: {node.id}"


def module_of(name: str) -> Any:
    """The module, or None."""
    try:
        return importlib.import_module(name) if name else None
    except ImportError:
        return None


if __name__ == "__main__":
    warnings.simplefilter("error", SyntaxWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    request = json.load(sys.stdin)
    standard = {*request["standard"], *sys.stdlib_module_names}
    for file in request["files"]:
        for line in unknown(Path(file), standard, set(request["builtins"])):
            print(line)
