"""torch.cuda without a card: streams and events that only count, where the host would wait, and one H100's facts.

To be imported before anything else imports torch: torch asks once what CUDA there is.
"""

import contextlib
import ctypes
import functools
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torchtitan.planner.fake_cuda import LIBRARY
from torchtitan.process.host import host

if LIBRARY in os.environ:  # elsewhere the module can be imported, but not installed
    ctypes.CDLL(os.environ[LIBRARY], ctypes.RTLD_GLOBAL)

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.attention.flex_attention

from torchtitan.torch_internals import compiler, dispatch, replacement

compiler.load()  # asks for a device when it is imported: before there seems to be one
if LIBRARY in os.environ:
    ctypes.CDLL(os.environ[LIBRARY]).register_fake_guard()

host_waits: Counter[str] = Counter()
"""By place: `what file:function`."""
wait_lines: Counter[tuple[str, str, str]] = Counter()
"""By kind, line and reason: (what, `path:line`, a path within the package or a whole one, see process/host.py)."""


order: list[tuple[str, int]] = []
"""Gathers with the numbers that they bring, reductions with those that they add up, and waits, as they come."""
groups: set[tuple[int, ...]] = set()
"""Ranks that exchange something of the device's."""
_last: list = [None, 0]
PACKAGE = Path(__file__).parents[2]
_NO_PLACES = tuple(map(str, (Path(torch.__file__).parent, Path(contextlib.__file__).parent)))
_NO_PLACES += (str(PACKAGE / "planner"),)  # what watches a step
_NO_PLACES += (str(PACKAGE / "process" / "host.py"), str(PACKAGE / "process" / "distributed.py"))  # called all over


@functools.cache
def is_place(path: str) -> bool:
    """Return True for a source file of the package or of another one, and not of torch, Python or the fake CUDA."""
    return path[0] != "<" and (not path.startswith(_NO_PLACES) or "-packages" in path.removeprefix(_NO_PLACES[0]))


def frame_of_package() -> FrameType:
    """Return the frame of the innermost call outside of torch and Python's library, or the outermost of all."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_place(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def place_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).name}:{code.co_name}"


def shown(path: str) -> str:
    """Return a path within the package, or a whole one of another file."""
    return str(Path(path).relative_to(PACKAGE)) if Path(path).is_relative_to(PACKAGE) else path


def line_of(frame: FrameType) -> str:
    """Return the `path:line` that a frame is at, or "" for one of torch or Python's library."""
    path = frame.f_code.co_filename
    return f"{shown(path)}:{frame.f_lineno}" if is_place(path) else ""


def note_wait(operation: str) -> None:
    """Note that the host would wait for the device here. A whole list that is read number by number is one wait."""
    frame = frame_of_package()
    if frame is _last[0] and frame.f_lasti == _last[1]:
        return
    _last[:] = frame, frame.f_lasti
    order.append(("wait", 0))
    host_waits[f"{operation} {place_of(frame.f_code)}"] += 1
    wait_lines[operation, line_of(frame), host.reason] += 1


class FakeEvent:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0

    def synchronize(self):
        note_wait("event")


class FakeStream:
    device = torch.device("cuda", 0)

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or FakeEvent()

    def query(self):
        return True

    def is_capturing(self):
        return False

    def synchronize(self):
        note_wait("stream")

    def __enter__(self):
        _streams.append(self)
        return self

    def __exit__(self, *error):
        _streams.pop()


class Card:
    name, major, minor = "NVIDIA H100 80GB HBM3", 9, 0
    total_memory, multi_processor_count = 80 * 2**30, 132


_main = FakeStream()
_streams = [_main]


@contextlib.contextmanager
def _stream(stream):
    with stream or _streams[-1]:
        yield


def _nothing(*args, **kwargs):
    return None


_tensor = torch.tensor
compiled_calls: list[str] = []
"""Places of the compiled functions under way."""


def _tensor_from_numbers(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """Stand in for torch.tensor: numbers of the host are copied to the device from memory that is not pinned.

    In a compiled function they are constants of its kernel.
    """
    if device is None or torch.device(device).type != "cuda":
        return _tensor(data, **({} if device is None else {"device": device}), **kwargs)
    if not compiled_calls:
        note_wait("numbers")
    values = _tensor(data, device="cpu", **kwargs)
    return torch.empty(values.shape, dtype=values.dtype, device=device)


def replace(owner: Any, **attributes: Any) -> None:
    """Set attributes of a module or a class of torch's."""
    for name, value in attributes.items():
        replacement.replace(owner, name, value)


def install() -> None:
    """Replace what would ask a driver."""
    replace(torch, tensor=_tensor_from_numbers)
    replace(
        torch.cuda,
        **{
            "Stream": FakeStream,
            "Event": FakeEvent,
            "stream": _stream,
            "current_device": lambda: 0,
            "device_count": lambda: 8,
        },
        current_stream=lambda device=None: _streams[-1],
        default_stream=lambda device=None: _main,
        get_device_name=lambda device=None: Card.name,
        get_device_capability=lambda device=None: (Card.major, Card.minor),
        get_device_properties=lambda device=None: Card,
        get_rng_state=lambda device="cuda": torch.zeros(16, dtype=torch.uint8, device="cpu"),
        memory_stats=lambda device=None: defaultdict(int),
        synchronize=lambda device=None: note_wait("device"),
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), lambda *args, **kwargs: True),
        **dict.fromkeys(("set_device", "_lazy_init", "manual_seed", "manual_seed_all", "set_rng_state"), _nothing),
        reset_peak_memory_stats=_nothing,
    )
    replace(torch.accelerator, current_stream=torch.cuda.current_stream)
    dispatch.ignore_device_guard()
    replace(
        torch.Tensor,
        record_stream=_nothing,
        pin_memory=lambda self, *args: self,
        is_pinned=lambda self, *args: True,
    )
    replace(dist, get_default_backend_for_device=lambda device: "fake")
