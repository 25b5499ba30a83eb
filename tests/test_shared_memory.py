"""Runs in a container whose /dev/shm is full, read-only or missing: they save and resume."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, SHALLOW, arguments, write_texts

STATES = {
    "full": "mount -t tmpfs -o size=64k,nr_inodes=2 tmpfs /dev/shm && head -c 64k /dev/zero > /dev/shm/full || true",
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
    "missing": "mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9",
}


def in_container(state: str, *command: str, **options) -> subprocess.CompletedProcess:
    """Run a command in a mount namespace with this /dev/shm. Skips the test where the machine has none."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this machine cannot make a mount namespace (unshare -m, as root)")
    script = f'({STATES[state]}) && exec "$@"'
    whole = ["unshare", "-m", "sh", "-c", script, "sh", *command]
    return subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


def launch(state: str, ranks: int, argv: list[str]) -> subprocess.CompletedProcess:
    return in_container(state, sys.executable, "-m", "torchtitan.launch", str(ranks), *argv)


@pytest.mark.parametrize(("state", "ranks"), [("full", 1), ("full", 2), ("read-only", 2), ("missing", 2)])
def test_a_run_saves_and_resumes(state: str, ranks: int, tmp_path: Path):
    probe = "import multiprocessing\ntry: multiprocessing.Lock()\nexcept OSError: print('none')"
    assert in_container(state, sys.executable, "-c", probe).stdout == "none\n"
    options = {"checkpoint__enable": True, "checkpoint__interval": 2, "model__overrides": SHALLOW}
    options |= {"training__local_batch_size": 8 // ranks, "checkpoint__on_save_error": "stop"}
    texts = write_texts(tmp_path)
    for steps, resumed in ((2, False), (4, True)):
        done = launch(state, ranks, arguments(tmp_path / "run", texts, training__steps=steps, **options))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / f"run/checkpoint/step-{steps:08d}/manifest.json").exists()
        assert ("resumed from step 2" in done.stdout + done.stderr) == resumed
        assert "failed" not in done.stdout + done.stderr
