"""Temporary virtual environments that tests fill with pip."""

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
    """Create an empty environment and delete it afterwards. It has no pip: the tests' own pip installs into it.

    With torch installed it would take a gigabyte.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def pip_install(env: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    """Run pip install; skip the test if it takes too long."""
    pip = [sys.executable, "-m", "pip", "--python", env / "bin/python", "--disable-pip-version-check", "install"]
    try:
        return subprocess.run([*pip, "-q", "--no-compile", *arguments], capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip was not ready after {LONGEST} s")


def install_by_index(env: Path, *requirements: str | Path) -> None:
    """Install packages and their dependencies in the versions of constraints.txt.

    Skips the test if pip finds no packages at all; fails if it finds some but not these.
    """
    trial = pip_install(env, "--dry-run", "--no-deps", "tomli", *CONSTRAINTS)
    if trial.returncode:
        pytest.skip(f"pip finds no packages here: {trial.stderr.strip().splitlines()[-1]}")
    done = pip_install(env, *requirements, *CONSTRAINTS)
    assert done.returncode == 0, done.stderr
