"""The package as users install it: a wheel in a separate environment, outside the repository."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.repository.test_container import copy_build_context
from tests.support.environments import CONSTRAINTS, environment, install_by_index, pip_install
from tests.support.jobs import ROOT, logged_steps


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copy_build_context(source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(list(map(str, build)), check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_has_all_data_files(wheel):
    paths = {path.relative_to(ROOT / "torchtitan") for path in (ROOT / "torchtitan").rglob("*") if path.is_file()}
    paths = {path for path in paths if "__pycache__" not in path.parts}
    paths |= {path.relative_to(ROOT) for path in (ROOT / "train_configs").iterdir()}
    paths |= {path.relative_to(ROOT / "tests") for path in (ROOT / "tests/assets/tokenizer").iterdir()}
    assert {f"torchtitan/{path}" for path in paths} - set(zipfile.ZipFile(wheel).namelist()) == set()


def site_of(env: Path) -> Path:
    (folder,) = env.glob("lib/python*/site-packages")
    return folder


def install_wheel_only(env: Path, wheel: Path) -> None:
    """Install only the wheel, and make the packages of this Python visible, except the repository itself."""
    pip_install(env, "--no-deps", "--no-index", wheel).check_returncode()
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_of(env) / "packages.pth").write_text("\n".join(packages))


def install_with_dependencies(env: Path, wheel: Path) -> None:
    """Install the wheel with all dependencies by pip, as a user would."""
    install_by_index(env, wheel)


def has_local_torch(env: Path) -> bool:
    """True if pip finds a local torch; otherwise it would download gigabytes, which scripts/try_wheel.sh allows."""
    trial = pip_install(env, "--dry-run", "--no-deps", "--report=-", "torch", *CONSTRAINTS)
    urls = [package["download_info"]["url"] for package in json.loads(trial.stdout or '{"install": []}')["install"]]
    return bool(urls) and urls[0].startswith("file:")


def test_the_wheel_trains_generates_and_exports_outside_the_repository(wheel, tmp_path):
    with environment(tmp_path / "env") as env:
        install = install_with_dependencies if has_local_torch(env) else install_wheel_only
        install(env, wheel)
        train_generate_and_export(env, tmp_path / "elsewhere")


def train_generate_and_export(env: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, env=variables, cwd=elsewhere, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def torchtitan(*arguments: str) -> str:
        return run(env / "bin/torchtitan", *arguments)

    where = "import torchtitan, sys; print(torchtitan.__path__[0]); print(*sys.path, sep='\\n')"
    package_path, *paths = run(env / "bin/python", "-c", where).splitlines()
    assert Path(package_path) == site_of(env) / "torchtitan" and str(ROOT) not in paths
    assert "  debug_model\n" in torchtitan("list", "jobs")
    torchtitan("init", "first.toml")
    small = ["--training.steps=2", "--training.seq_len=64", "--training.local_batch_size=1", "--validation.no_enable"]
    save = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
    torchtitan("train", "first.toml", *small, *save)
    run_folder = elsewhere / "outputs/first"
    assert [row["step"] for row in logged_steps(run_folder)] == [1, 2]
    assert (run_folder / "model_hf/tokenizer.json").is_file()
    assert "def " in torchtitan("generate", "outputs/first", "--prompt", "def ", "--max_new_tokens", "2")
    torchtitan("export", "outputs/first", "--merge", "--dtype", "float32", "--to", "exported")
    assert any((elsewhere / "exported").glob("*.safetensors"))
