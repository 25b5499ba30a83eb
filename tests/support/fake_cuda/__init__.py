"""A CUDA that computes nothing: devices, streams and collectives of any rank of any world, on a CPU in seconds.

What runs on it is the project's own step, with "cuda" tensors of torch's FakeTensorMode, a device of fake_cuda.cpp
below Python, streams and events of device.py, and torch's fake process group. It shows a tensor on a wrong device, a
type that a kernel refuses, where the host waits for the device, and what is sent to whom in which order. It cannot show
NCCL, which kernels are chosen, races or speed.

All is patched for good, so it runs in a process of its own: `python -m tests.support.fake_cuda`, see __main__.py.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIBRARY = "FAKE_CUDA_LIBRARY"
"""Environment variable with the path of the compiled source."""
MUTANT = "FAKE_CUDA_MUTANT"


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


def run(library: Path, *arguments: str, mutant: str = "", timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """`python -m tests.support.fake_cuda` with the library of `build`, and a fault of mutants.py planted."""
    return subprocess.run(
        [sys.executable, "-m", "tests.support.fake_cuda", *arguments],
        cwd=SOURCE.parents[3],
        env={**os.environ, LIBRARY: str(library), MUTANT: mutant, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
