"""Two distributions have a package called torchtitan: which one runs, and what a user of both reads."""

import importlib
import os
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT
from torchtitan import cli, engine
from torchtitan.core import distributions


@pytest.fixture
def pytorchs(tmp_path, monkeypatch):
    """Install a distribution of PyTorch's torchtitan in front of the path, with its package at a path."""

    def install(package):
        info = tmp_path / "torchtitan-0.2.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.2.2\n")
        (info / "RECORD").write_text("torchtitan/train.py,,\ntorchtitan-0.2.2.dist-info/METADATA,,\n")
        if package is None:
            (tmp_path / "torchtitan").mkdir()
            for name in ("__init__", "train"):
                (tmp_path / f"torchtitan/{name}.py").touch()
        else:
            (tmp_path / "torchtitan").symlink_to(package)  # the same folder, as in site-packages
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return install


def test_files_of_both_in_one_folder_are_reported_in_a_line(pytorchs, capsys):
    pytorchs(ROOT / "torchtitan")
    assert cli.main(["list", "jobs"]) == 2
    error = capsys.readouterr().err
    assert "PyTorch's torchtitan 0.2.2 and torchtitan-toml" in error and "Traceback" not in error
    with pytest.raises(ImportError, match="PyTorch's torchtitan 0.2.2 and torchtitan-toml"):
        importlib.reload(engine)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("; PyTorch's torchtitan 0.2.2 is installed here too\n")


def test_the_command_runs_this_package_where_python_would_import_the_other(pytorchs):
    folder = pytorchs(None)
    assert cli.main(["list", "jobs"]) == 0
    importlib.reload(engine)
    # as an editable installation of ours beside PyTorch's in site-packages
    script = "import sys, torchtitan_toml; sys.argv = ['torchtitan', 'list', 'jobs']; torchtitan_toml.run()"
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "  debug_model\n" in done.stdout, done.stderr
    bare = [sys.executable, "-c", "import torchtitan; print(torchtitan.__file__)"]
    assert str(folder) in subprocess.run(bare, env=environment, cwd=folder, capture_output=True, text=True).stdout


def test_the_version_names_this_distribution(capsys):
    assert cli.main(["--version"]) == 0
    line = capsys.readouterr().out
    assert cli.main(["--version", "all"]) == 2 and "one argument too many: all" in capsys.readouterr().err
    assert line.startswith(f"{distributions.NAME} ") and "(not PyTorch's torchtitan), torch " in line
