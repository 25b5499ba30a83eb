"""Every installed Python from 3.10 on knows all names in our files, and passes the tests that need no torch."""

import ast
import builtins
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.environments import environment, install_by_index
from tests.support.jobs import ROOT

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
OTHERS = [version for version in VERSIONS if version != f"{sys.version_info[0]}.{sys.version_info[1]}"]
FILES = sorted(path for folder in ("torchtitan", "tests", "scripts") for path in (ROOT / folder).rglob("*.py"))


def python_of(version: str) -> Path:
    """Find a Python on PATH or in pyenv; a shim of pyenv on PATH may not work."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(versions.glob(f"{version}.*/bin/python")))]
    for python in filter(None, candidates):
        if subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return Path(python)
    pytest.skip(f"this machine has no Python {version}")


def unknown_names(python: Path, files: list[Path]) -> list[str]:
    """List the names in files that a Python does not know."""
    query = {"files": list(map(str, files)), "standard": list(sys.stdlib_module_names), "builtins": dir(builtins)}
    command = [python, "-I", ROOT / "tests/support/known_names.py"]
    done = subprocess.run(command, input=json.dumps(query), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_files_parse_as_python_3_10():
    """Check the syntax only; the next test asks an installed 3.10."""
    for path in FILES:
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_python_knows_all_names_of_every_file(version):
    assert unknown_names(python_of(version), FILES) == []


NEWER = """
import datetime
import tomllib
import no_such_package
from typing import Self
def f():
    raise ExceptionGroup("", [ValueError(datetime.UTC)])
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compares Python 3.10 with a later one that runs the test")
def test_names_of_a_later_python_are_reported(tmp_path):
    (tmp_path / "newer.py").write_text(NEWER)
    (tmp_path / "newest.py").write_text("try:\n    pass\nexcept* ValueError:\n    pass\n")
    unknown = unknown_names(python_of("3.10"), sorted(tmp_path.iterdir()))
    assert [line.partition(": ")[2] for line in unknown[:-1]] == [
        "import tomllib",
        "import typing.Self",
        "ExceptionGroup",
        "datetime.UTC",
    ]
    assert "newest.py:3: " in unknown[-1]


# Tests without torch need few packages and run under the oldest Python; scripts/try_pythons.sh runs more under each

PACKAGES = ("pydantic", "tomli", "tomli_w", "tomlkit", "jinja2", "numpy", "tqdm", "tiktoken", "pytest")
MODULES = ("commands/test_check", "config/test_manager", "config/test_options")
MODULES += tuple(
    f"rules/test_{part}" for part in ("experts", "optimization", "monitoring", "pipeline", "tensor_and_context")
)


@pytest.mark.parametrize("version", OTHERS[:1])
def test_another_python_passes_the_tests_without_torch(version, tmp_path):
    # messages shorten long paths, so the temporary folder has a short one
    with environment(tmp_path / "env", python_of(version)) as env, tempfile.TemporaryDirectory() as short:
        install_by_index(env, "--only-binary=:all:", *PACKAGES)
        files = [ROOT / f"tests/{module}.py" for module in MODULES]
        options = ["-p", "no:cacheprovider", "--basetemp", f"{short}/own"]
        command = [env / "bin/python", "-B", "-m", "pytest", *options, *files]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-3000:] + done.stderr
