"""Virtual environments that a test makes, fills by pip and leaves no trace of."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

LONGEST = 400
"""Seconds that pip may take; a tenth of it is usual."""
CONSTRAINTS = ("-c", ROOT / "constraints.txt")


@contextmanager
def environment(folder: Path, python: str | Path = sys.executable) -> Iterator[Path]:
    """Empty, and without a pip: the tests' own installs into it. With a torch it would be a gigabyte to keep."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def pip_install(env: Path, *words: str | Path) -> subprocess.CompletedProcess:
    """Skips the test where it takes too long."""
    pip = [sys.executable, "-m", "pip", "--python", env / "bin/python", "--disable-pip-version-check", "install"]
    try:
        return subprocess.run([*pip, "-q", "--no-compile", *words], capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip was not ready after {LONGEST} s")


def install_by_index(env: Path, *words: str | Path) -> None:
    """With what these depend on, in the versions of constraints.txt. Skips the test where pip finds no packages at
    all; where it finds some and not these, the test fails.
    """
    asked = pip_install(env, "--dry-run", "--no-deps", "tomli", *CONSTRAINTS)
    if asked.returncode:
        pytest.skip(f"pip finds no packages here: {asked.stderr.strip().splitlines()[-1]}")
    done = pip_install(env, *words, *CONSTRAINTS)
    assert done.returncode == 0, done.stderr
