"""A fake CUDA without computation: devices, streams and collectives of any rank of any world size, on a CPU in seconds.

It runs the project's own training step on "cuda" tensors of torch's FakeTensorMode, with a device in fake_cuda.cpp,
streams and events in device.py, and torch's fake process group. It shows tensors on a wrong device, types that a kernel
refuses, where the host waits for the device, and the order of messages between ranks. It cannot show NCCL, the choice
of kernels, races or speed.

The patches are permanent, so it runs in a separate process: `python -m tests.support.fake_cuda`, see __main__.py.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIBRARY = "FAKE_CUDA_LIBRARY"
"""Environment variable with the path of the compiled source."""
LIMIT = 300
"""Seconds that an answer may take."""


def missing() -> str:
    """Return why it cannot be built on this machine, or an empty string."""
    if sys.platform != "linux":
        return "the fake CUDA is built on Linux only"
    return "" if shutil.which("g++") else "the fake CUDA needs g++ (Debian, Ubuntu: apt install g++)"


def build(folder: Path) -> Path:
    """Compile the library for the torch that is installed; some seconds."""
    torch = Path(find_spec("torch").origin).parent
    library = folder / "libfake_cuda.so"
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), *include, *link, "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class FakeCuda:
    """A process of `python -m tests.support.fake_cuda` with the library of `build`, which answers many questions."""

    def __init__(self, library: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fake_cuda"],
            cwd=SOURCE.parents[3],
            env={**os.environ, LIBRARY: str(library), "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str, argv: list[str], rank: int, world_size: int, mutant: str = "") -> tuple[bool, Any]:
        """Call a function of step.py with a fault of mutants.py: (True, its result) or (False, a traceback)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([name, mutant, argv, rank, world_size]), file=self.process.stdin, flush=True)
        ok, answer = json.loads(self.process.stdout.readline())
        return ok, answer

    def close(self) -> None:
        self.process.communicate()
