"""A CUDA that computes nothing: devices, streams and collectives of any rank of any world, on a CPU in seconds.

What runs on it is the project's own step, with "cuda" tensors of torch's FakeTensorMode, a device of fake_cuda.cpp
below Python, streams and events of device.py, and torch's fake process group. It shows a tensor on a wrong device, a
type that a kernel refuses, where the host waits for the device, and what is sent to whom in which order. It cannot show
NCCL, which kernels are chosen, races or speed.

All is patched for good, so it runs in processes of its own: `python -m tests.support.fake_cuda`, see __main__.py.
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
    """Why it cannot be built here; empty where it can."""
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
    """`python -m tests.support.fake_cuda` with the library of `build`, for many questions."""

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
        """What a function of step.py answers, with a fault of mutants.py planted; else a traceback."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([name, mutant, argv, rank, world_size]), file=self.process.stdin, flush=True)
        ok, answer = json.loads(self.process.stdout.readline())
        return ok, answer

    def close(self) -> None:
        self.process.communicate()
