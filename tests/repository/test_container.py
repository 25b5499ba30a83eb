"""The image's parts, where no builder is: what is sent to it suffices for a wheel, and its steps are shell.

tests/repository/test_wheel.py builds, installs and uses a wheel from the same files.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

TEXT = (ROOT / "Dockerfile").read_text()
STEPS = [
    line.partition(" ")[::2]
    for line in re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    if line
]
"""Instruction and its arguments."""


def build_context() -> list[str]:
    """Return the files and folders that .dockerignore lets through; it excludes all others."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*" and lines[-1] == "**/__pycache__"
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def copy_build_context(folder: Path) -> None:
    for name in build_context():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def test_nothing_else_is_sent_to_the_builder():
    assert set(build_context()) == {
        *("pyproject.toml", "README.md", "constraints.txt", "torchtitan_toml.py"),
        *("torchtitan", "train_configs", "tests/assets/tokenizer", "wheels"),
    }


@pytest.mark.parametrize("offline", ["", "1"])
def test_each_step_is_shell_that_asks_the_right_index(offline, tmp_path):
    """pip and the system's programs are replaced by ones that print their arguments."""
    stubs = "\n".join(f'{name}() {{ echo {name} "$@"; }}' for name in ("pip", "apt_get", "useradd", "mkdir", "chown"))
    printed = ""
    for instruction, argument in STEPS:
        if instruction == "RUN":
            command = re.sub(r"--mount=\S+", "", argument).replace("apt-get", "apt_get").replace("rm -rf", "echo rm")
            script = f'OFFLINE={offline} COMPILER=g++ TORCH=cu130 EXTRAS="[data]"\n{stubs}\n{command}'
            printed += subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=True).stdout
    assert printed.count("--no-index") == (2 if offline else 0)
    assert ("download.pytorch.org/whl/cu130" in printed) == ("apt_get" in printed) == (not offline)
    assert "-c /source/constraints.txt" in printed and "/wheel/*.whl[data]" in printed


def test_the_image_runs_as_an_ordinary_user():
    kinds = [instruction for instruction, _ in STEPS]
    users = [argument for instruction, argument in STEPS if instruction == "USER"]
    assert users == ["titan"] and kinds.index("USER") > max(n for n, kind in enumerate(kinds) if kind == "RUN")
    assert "useradd --uid 1000" in TEXT and ("ENTRYPOINT", '["torchtitan"]') in STEPS


def test_arguments_are_declared_in_the_stage_that_uses_them():
    stages = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)
    for stage in stages[1:]:
        code = re.sub(r"^#.*\n", "", stage, flags=re.MULTILINE)
        used = set(re.findall(r"\$\{?([A-Z]+)", code.partition("\n")[2]))
        assert used <= set(re.findall(r"^ARG (\w+)", code, re.MULTILINE))


def test_the_page_names_the_pinned_torch():
    (pin,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"`constraints.txt` pins torch {pin}." in (ROOT / "docs/clusters.md").read_text()
