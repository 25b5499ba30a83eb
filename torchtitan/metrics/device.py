"""A device's peak FLOP/s, its memory in use, and profiles: torch traces and CUDA memory snapshots."""

import logging
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan.core.errors import check_snapshots, check_window
from torchtitan.core.hardware import find_hardware
from torchtitan.core.random_draws import local_part
from torchtitan.torch_internals import memory

GIB = 2**30


@dataclass(frozen=True)
class PeakFlops:
    """Peak FLOP/s of matrix products, or None if unknown, and the source or reason."""

    flops: float | None
    reason: str


def device_name(device: torch.device) -> str:
    """Return the name by which torch reports a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_peak(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Return a device's peak for matrix products in `dtype`."""
    if device.type != "cuda":
        return PeakFlops(None, f"no peak is known for a {device.type} device")
    return peak_of(device_name(device), dtype)


def peak_of(name: str, dtype: torch.dtype) -> PeakFlops:
    """Return the peak of the hardware that torch reports by `name`. Unknown hardware has none: no other's is right."""
    if dtype not in (torch.bfloat16, torch.float16):
        return PeakFlops(None, f"MFU is relative to 16-bit matrix products, not {dtype}")
    if "MIG" in name:
        return PeakFlops(None, f"{name} is a slice of a device")
    hardware, type_name = find_hardware(name), str(dtype).removeprefix("torch.")
    flops = getattr(hardware.peak, type_name) if hardware else None
    if flops is None:
        return PeakFlops(None, f"no {type_name} peak of {name} is known (torchtitan/hardware)")
    return PeakFlops(flops, f"{flops / 1e12:,.0f} TFLOP/s, dense {type_name} of {name}")


def read_memory(device: torch.device) -> tuple[float, dict[str, float]]:
    """Return this rank's memory in GiB, and figures about it by their tags.

    GPU: the most that the allocator has reserved since the last call. CPU: the largest resident size of the process.
    """
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
        return resident, {"memory/max_resident(GiB)": resident}
    stats = torch.cuda.memory_stats(device)
    capacity = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats(device)
    figures: dict[str, float] = {}
    for kind in ("active", "reserved"):
        peak = stats[f"{kind}_bytes.all.peak"]
        figures[f"memory/max_{kind}(GiB)"] = peak / GIB
        figures[f"memory/max_{kind}(%)"] = 100 * peak / capacity
    for count in ("num_alloc_retries", "num_ooms"):
        figures[f"memory/{count}"] = stats[count]
    return figures["memory/max_reserved(GiB)"], figures


def describe_memory(
    device: torch.device,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    optimizers: Iterable[torch.optim.Optimizer],
) -> str:
    """Describe this rank's memory after it ran out: sizes of all shards by kind, and the allocator's summary."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    parameters = [parameter for _, parameter in named_parameters]
    owned: dict[str, list[torch.Tensor]] = {
        "parameters": [*parameters],
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": [value for state in states for value in state.values() if isinstance(value, torch.Tensor)],
    }
    sizes = {name: sum(local_part(tensor)[0].nbytes for tensor in tensors) for name, tensors in owned.items()}
    lines = [f"  {name:<12}{size / GIB:8.2f} GiB" for name, size in sizes.items()]
    most, _ = read_memory(device)
    lines.append(f"  {'at most':<12}{most:8.2f} GiB on this {device.type} rank, with activations and what torch keeps")
    if device.type == "cuda":
        lines.append(torch.cuda.memory_summary(device, abbreviated=True))
    return "\n".join(lines)


logger = logging.getLogger(__name__)

# Number of allocations in a snapshot's history.
MAX_ALLOCATIONS = 100_000


class Profiler:
    """Traces the training loop: a context manager around it, with a call of `step()` after each step.

    Of every `freq` steps the last `active` are traced, after `warmup` steps with discarded traces. Output goes to a
    folder `step_<n>`, one file per rank. `traces`, `snapshots`: parent folders, None to disable. A snapshot is also
    written when memory runs out; open it at https://pytorch.org/memory_viz. Raises JobError for a window longer than
    `freq`, and for snapshots without a GPU.
    """

    def __init__(
        self,
        *,
        traces: Path | None,
        snapshots: Path | None,
        freq: int,
        active: int,
        warmup: int,
        device: torch.device,
        rank: int,
        start_step: int = 0,
    ) -> None:
        if traces:
            check_window(freq, active, warmup)
        check_snapshots(snapshots is not None, device.type)
        self._traces, self._snapshots = traces, snapshots
        self._freq, self._rank = freq, rank
        self._start_step = self._step = self._last_trace = start_step
        self._profile = None
        if traces:
            gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *gpu],
                schedule=schedule(wait=freq - active - warmup, warmup=warmup, active=active),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    def __enter__(self) -> "Profiler":
        if self._snapshots:
            memory.record_memory_history(max_entries=MAX_ALLOCATIONS)
        if self._profile:
            self._profile.start()
        return self

    def step(self) -> None:
        self._step += 1
        if self._profile:
            self._profile.step()
        if self._snapshots and (self._step - self._start_step) % self._freq == 0:
            self._write_snapshot(self._snapshots, f"step_{self._step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profile:
            self._profile.stop()  # also writes a window that the end of the run cut short
        if self._snapshots:
            if kind is not None and issubclass(kind, torch.OutOfMemoryError):
                self._write_snapshot(self._snapshots, f"step_{self._step}_out_of_memory")
            memory.record_memory_history(enabled=None)

    def _write_trace(self, window: profile) -> None:
        assert self._traces
        if self._step > self._last_trace:  # without a pause between windows, the last window is empty
            self._last_trace = self._step
            window.export_chrome_trace(str(self._path(self._traces, f"step_{self._step}", "trace.json")))

    def _write_snapshot(self, folder: Path, name: str) -> None:
        memory.dump_snapshot(str(self._path(folder, name, "memory.pickle")))

    def _path(self, folder: Path, name: str, kind: str) -> Path:
        path = folder / name / f"rank{self._rank}_{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        logger.info("profiling: writing %s", path)
        return path
