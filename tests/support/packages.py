"""Packages of outside the project, as an installer would leave them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan.core import registry


def install(folder: Path, name: str, entries: str, **modules: str) -> Path:
    """Write a package as an installer would into a folder of sys.path."""
    code, about = folder / name.replace("-", "_"), folder / f"{name.replace('-', '_')}-1.0.dist-info"
    code.mkdir(parents=True)
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)
    for module, text in {"__init__": "", **modules}.items():
        (code / f"{module}.py").write_text(text)
    return folder


@contextmanager
def installed_package(folder: Path, monkeypatch: Any, name: str, entries: str, **modules: str) -> Iterator[Path]:
    """Install a package in a folder for the time of a test, and forget it and other modules of that folder after it."""
    monkeypatch.syspath_prepend(install(folder, name, entries, **modules))
    registry.installed_entries.cache_clear()
    before = set(sys.modules)
    yield folder
    registry.installed_entries.cache_clear()
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", None)).startswith(str(folder)):
            del sys.modules[module]
