"""The package without the folder torchtitan/plugins: it works, and what a plugin would do is refused by its name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from tests.support.package_sources import TORCH_FREE

DEBUG_JOB = ("debug_model", "--model.tokenizer_path=bytes")


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A folder with a copy of the package without plugins."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "torchtitan", folder / "torchtitan", ignore=shutil.ignore_patterns("plugins", "__pycache__"))
    shutil.copytree(ROOT / "train_configs", folder / "train_configs")
    return folder


def run(core: Path, *arguments: str) -> tuple[int, str]:
    """Run Python on the copy; return the exit code and the output."""
    environment = os.environ | {"PYTHONPATH": str(core), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=core, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def test_the_core_is_imported_without_plugins_and_torch(core):
    names = "; ".join(f"import torchtitan.{name}" for name in TORCH_FREE)
    code = f"{names}; import sys, torchtitan; print(torchtitan.__path__); sys.exit('torch' in sys.modules)"
    status, output = run(core, "-c", code)
    assert status == 0 and str(core) in output, output


def test_a_job_is_checked_and_trained_without_plugins(core, tmp_path):
    """So is one whose file has the options of a plugin that it does not use, as runs record all options."""
    job = tmp_path / "job.toml"
    job.write_text('extends = "debug_model"\n[adapter.neurocache]\ntopk = 16\n')
    options = (str(job), *DEBUG_JOB[1:], f"--job.dump_folder={tmp_path / 'run'}", "--training.steps=2")
    status, output = run(core, "-m", "torchtitan", "check", *options, "--no-memory")
    assert status == 0, output
    status, output = run(core, "-m", "torchtitan", "train", *options)
    assert status == 0 and "neurocache" not in (tmp_path / "run/config.toml").read_text(), output


@pytest.mark.parametrize(
    ("arguments", "plugin"),
    [
        (("check", *DEBUG_JOB, "--adapter.kind=neurocache"), "neurocache"),
        (("check", *DEBUG_JOB, "--adapter.neurocache.topk=3"), "neurocache"),
        (("import", "train.yml"), "importers"),
        (("import", "--help"), "importers"),
        (("evaluate", "outputs", "--tasks=tasks"), "eval_tasks"),
        (("export", "outputs", "--to=target", "--format=gguf"), "gguf"),
        (("check", "old.toml", "--upgrade", "--from=v0.1"), "dialects"),
    ],
)
def test_what_needs_a_plugin_is_told_which(core, arguments, plugin):
    status, output = run(core, "-m", "torchtitan", *arguments)
    message = f"it needs the plugin torchtitan/plugins/{plugin}, which this installation lacks"
    assert status == 2 and message in output, output


def test_an_old_job_is_told_of_the_plugin_once(core):
    """Its options are unknown without the tables of the plugin; an option of the command line is no old job's."""
    for file in sorted((ROOT / "tests/fixtures/old_tomls").glob("*.toml")):
        status, output = run(core, "-m", "torchtitan", "check", str(file), "--model.flaver=debugmodel", "--no-memory")
        words = " ".join(output.split())
        message = (
            "if this is a job of PyTorch's torchtitan, it needs the plugin torchtitan/plugins/dialects, which this"
        )
        assert status == 2 and words.count(message) == 1 and "Traceback" not in output, output
        assert words.index(message) < words.index("model.flaver"), output


def test_completion_lists_options_without_plugins(core):
    status, output = run(core, "-m", "torchtitan", "completion", "bash")
    assert status == 0 and "--upgrade --from" in output, output
