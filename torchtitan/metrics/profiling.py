"""Write torch profiler traces (Chrome format) and CUDA memory snapshots at regular steps."""

import logging
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan.core.constraints import check_snapshots, check_window

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
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
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
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, window: profile) -> None:
        assert self._traces
        if self._step > self._last_trace:  # without a pause between windows, the last window is empty
            self._last_trace = self._step
            window.export_chrome_trace(str(self._path(self._traces, f"step_{self._step}", "trace.json")))

    def _write_snapshot(self, folder: Path, name: str) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path(folder, name, "memory.pickle")))

    def _path(self, folder: Path, name: str, kind: str) -> Path:
        path = folder / name / f"rank{self._rank}_{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        logger.info("profiling: writing %s", path)
        return path
