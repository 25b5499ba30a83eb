"""A fake CUDA without computation: devices, streams and collectives of any rank of any world size, on a CPU in seconds.

It runs the project's own training step on "cuda" tensors of torch's FakeTensorMode, with a device in fake_cuda.cpp,
streams and events in device.py, and torch's fake process group. It shows tensors on a wrong device, types that a kernel
refuses, where the host waits for the device, and the order of messages between ranks. It cannot show NCCL, the choice
of kernels, races or speed.

The patches are permanent, so it runs in a separate process: `python -m torchtitan.planner.fake_cuda`, see __main__.py.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.process.children import python_command

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
LIBRARY = "FAKE_CUDA_LIBRARY"
"""Environment variable with the path of the compiled source."""
LIMIT = 600
"""Seconds that an answer may take."""
Question = tuple[str, str, Sequence[Any]]
"""Function "module:name", function without arguments to call before it or "", and its arguments, as JSON has them."""


def missing() -> str:
    """Return why it cannot be built on this machine, or an empty string."""
    if sys.platform != "linux":
        return "the fake CUDA is built on Linux only"
    return "" if shutil.which("g++") else "the fake CUDA needs g++ (Debian, Ubuntu: apt install g++)"


def build(folder: Path) -> Path:
    """Compile the library for the torch that is installed; some seconds. Raises JobError where that is impossible."""
    if reason := missing():
        raise JobError(reason)
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    library = folder / "libfake_cuda.so"
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), *include, *link, "-o", str(library)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode:
        errors = [line for line in compiled.stderr.splitlines() if "error" in line] or [compiled.stderr.strip()]
        raise JobError(f"the fake CUDA does not compile with this g++ and torch: {errors[0]}")
    return library


class FakeCuda:
    """A process of `python -m torchtitan.planner.fake_cuda` with the library of `build`. It answers many questions."""

    def __init__(self, library: Path):
        # torch of a CUDA build writes there that its hooks are replaced
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            python_command("torchtitan.planner.fake_cuda", tied=True),
            env={**os.environ, LIBRARY: str(library), "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, function: str, *arguments: Any, before: str = "") -> tuple[bool, Any]:
        """Call a function "module:name" there: (True, its result) or (False, a traceback)."""
        ((_, ok, answer),) = self.ask_all([(function, before, arguments)])
        return ok, answer

    def ask_all(self, questions: Sequence[Question]) -> Iterator[tuple[int, bool, Any]]:
        """Yield (number of the question, True, result) or (number, False, traceback), as they come.

        As many are answered at once as there are processors. Raises JobError if the process ends before.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(questions), file=self.process.stdin, flush=True)
        for _ in questions:
            if not (line := self.process.stdout.readline()):
                code = self.process.wait()
                self.errors.seek(0)
                *_, reason = ["it printed nothing", *self.errors.read().strip().splitlines()]
                raise JobError(f"the process of the fake CUDA ended, exit code {code}: {reason}")
            yield tuple(json.loads(line))

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.communicate()
        self.errors.close()
