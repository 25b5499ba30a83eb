"""Meter a run. Nothing is read from the device between logged steps, so metering never waits for it.

A window covers the steps from one logged step to the next. Its rates are computed from its elapsed time and its number
of steps. The first window (compilation, cold caches) and windows with a checkpoint or a validation are marked, and left
out of averages and of the estimated remaining time. MFU is tokens/s per device x FLOPs per token / peak. In
metrics.jsonl `mfu` counts only the attention that a causal mask allows, `mfu_full` all of it, both as fractions.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.metrics import console
from torchtitan.metrics.device import find_peak, read_memory
from torchtitan.metrics.json_lines import METRICS, JsonLinesWriter, Record
from torchtitan.metrics.trackers.interface import Histogram, TrackerThread
from torchtitan.process import distributed
from torchtitan.process.host import host

logger = logging.getLogger(__name__)
LOGGED = "values of a logged step"
"""Why the host reads from the device in a logged step."""
LONGEST = 700.0
"""Largest loss in the perplexity: math.exp overflows above 709."""


@dataclass
class Window:
    started: float
    steps: int = 0
    tokens: int = 0
    data_seconds: float = 0.0
    marks: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RunConstants:
    """The constants of a run that rates, MFU and remaining time are computed from."""

    total_steps: int
    device: torch.device
    compute_dtype: torch.dtype
    world_size: int
    num_parameters: int
    flops_per_token_full: float
    """FLOPs per token if attention is counted in full."""
    flops_per_token_causal: float
    """FLOPs per token if only the attention that a causal mask allows is counted."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Steps between logged steps and between histograms (0: none), and the look of console lines."""

    log_freq: int
    histogram_freq: int = 0
    log_lr: bool = True
    color: bool = False


class MetricsLogger:
    """The metrics of a run. Every rank has a logger and records every step.

    `writes`: True on the rank that writes files. The logging set-up decides which rank shows its lines. `resume_step`:
    step at which a run resumes, None for a new one. `tokens_seen`: tokens trained on before.
    """

    def __init__(
        self,
        folder: Path,
        workload: RunConstants,
        options: LogOptions,
        *,
        writes: bool,
        resume_step: int | None = None,
        tokens_seen: int = 0,
        trackers: Sequence[TrackerThread] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path = folder / METRICS
        self.options, self.total_steps, self.world_size = options, workload.total_steps, workload.world_size
        self.device, self.peak = workload.device, find_peak(workload.device, workload.compute_dtype)
        self.num_parameters = workload.num_parameters
        self.full, self.causal = workload.flops_per_token_full, workload.flops_per_token_causal
        self.tokens_seen, self._clock = tokens_seen, clock
        self.on_record: Callable[[Record], Mapping[str, float]] = lambda record: {}
        """Returns numbers to add to the record of a logged step; called on all ranks."""
        self._file = JsonLinesWriter(self.path, resume_step) if writes else None
        self._trackers = list(trackers)
        self._first: Record | None = None
        self._last: Record | None = None
        self._validation_loss: float | None = None
        # of unmarked windows:
        self._speeds: list[float] = []
        self._recent_step_seconds: deque[float] = deque(maxlen=20)
        self.start()

    def start(self) -> None:
        """Start the clock: the first step begins."""
        self._window = Window(self._clock(), marks=["first"])
        self._started, self._tokens_at_start = self._window.started, self.tokens_seen

    def header(self) -> str:
        """Return one line with the model's size, its FLOPs per token, and the peak that MFU is relative to."""
        size = f"{console.quantity(self.num_parameters).strip()} parameters"
        flops = f"{console.quantity(self.causal)}FLOP per token"
        if self.full != self.causal:  # a bidirectional model has one count
            flops += f" (attention causal; {console.quantity(self.full)}FLOP counting it in full)"
        mfu = f"MFU against {self.peak.reason}" if self.peak.flops else f"no MFU: {self.peak.reason}"
        return f"{size}, {flops}, {mfu}"

    def due(self, step: int) -> bool:
        """Return True if the step, counted from 1, is logged."""
        return step % self.options.log_freq == 0 or step in (1, self.total_steps)

    def mark(self, reason: str) -> None:
        """Mark the current window: something other than training happens in it."""
        if reason not in self._window.marks:
            self._window.marks.append(reason)

    def record(
        self,
        step: int,
        *,
        loss: torch.Tensor | float | None,
        grad_norm: torch.Tensor | None,
        lr: float,
        tokens: int,
        data_seconds: float,
        extra: Mapping[str, torch.Tensor | float] | None = None,
    ) -> None:
        """Record a step; called after every step.

        `loss`, `grad_norm`: global scalars, needed only if the step is due. `lr`: rate that the step used. `tokens`:
        tokens of all ranks in it. `data_seconds`: how long this rank waited for data. `extra`: further scalars to log.
        A step without a `loss`, as it had nothing to learn, counts in the window and has no row.
        """
        window = self._window
        window.steps += 1
        window.tokens += tokens
        window.data_seconds += data_seconds
        self.tokens_seen += tokens
        if loss is None or not self.due(step):
            return
        # Reading these waits for the device, so the clock is read after them.
        with host.reading(LOGGED):
            mean = float(loss)
            values = {"loss": mean, "grad_norm": None if grad_norm is None else float(grad_norm)}
            extra_values = {name: float(value) for name, value in (extra or {}).items()}
        now = self._clock()
        memory, memory_tags = read_memory(self.device)
        record = {"step": step, **values, "lr": lr, **self._rates(window, now), "memory_gib": memory}
        record["perplexity"] = math.exp(min(mean, LONGEST))
        if "memory/max_active(GiB)" in memory_tags:
            record["memory_active_gib"] = memory_tags["memory/max_active(GiB)"]
        record |= self._utilization(record["tokens_per_second"]) | extra_values
        if window.marks:
            record["marked"] = window.marks
        else:
            self._speeds.append(record["tokens_per_second"])
            self._recent_step_seconds.append(record["step_seconds"])
        self._first, self._last = self._first or record, record
        self._window = Window(now)
        with host.reading(LOGGED):
            added = self.on_record(record)
        tags = {**tags_of(record, self.world_size, self.full), **memory_tags}
        self._write(record | added, tags | {f"callback_metrics/{name}": value for name, value in added.items()})
        seconds_left = self._seconds_left(step)
        logger.info(
            console.training_line(record, self.total_steps, seconds_left, self.options.color, self.options.log_lr)
        )

    def record_validation(
        self, step: int, loss: float, measured: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Log a validation, and return its metrics by their names in metrics.jsonl.

        `measured`: the task's metrics in addition to the loss. The window is marked, as not all of its time was
        training.
        """
        self.mark("validation")
        self._validation_loss = loss
        values = {"loss": loss, **(measured or {})}
        metrics = {f"validation_{name}": value for name, value in values.items()}
        self._write({"step": step} | metrics, {f"validation_metrics/{name}": value for name, value in values.items()})
        logger.info(console.validation_line(step, self.total_steps, loss, self.options.color, measured))
        return metrics

    def histograms_due(self, step: int) -> bool:
        """Return True if histograms are taken in the step, counted from 1, before its update."""
        freq = self.options.histogram_freq
        return freq > 0 and step % freq == 0

    def record_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        for tracker in self._trackers:
            tracker.histograms(histograms, step)

    def record_event(self, step: int, event: str, fields: Mapping[str, float | str]) -> None:
        """Write an event of the run at the state after `step` to metrics.jsonl, with more `fields`."""
        if self._file:
            self._file.write({"step": step, "event": event, **fields})

    def record_skip(self, step: int, reason: str, count: int) -> None:
        """Log that a step's update was skipped; called before its record. `count`: skipped updates so far."""
        logger.warning("step %d is skipped: %s; %d skipped so far", step, reason, count)
        self.mark("skipped")
        self.record_event(step, "skip", {"cause": reason, "steps_skipped": count})

    def go_back(self, step: int, tokens: int) -> None:
        """Return to the state after `step`: move later records to metrics.redone.jsonl and notify the trackers."""
        if self._file:
            self._file.close()
            self._file = JsonLinesWriter(self.path, step)
        for tracker in self._trackers:
            tracker.go_back(step)
        self.tokens_seen = tokens
        self._window = Window(self._clock(), marks=["rollback"])

    def summary(self, places: Mapping[str, object]) -> str:
        """Return a few lines for the end of the run. `places`: paths of its outputs by name."""
        if self._first is None or self._last is None:
            remedy = "raise training.steps, training.epochs or training.tokens to continue"
            done = f"nothing was left to train; {remedy}, or start from scratch in another job.dump_folder"
            return done + console.aligned(places)
        first, last = self._first, self._last
        result = [f"step {last['step']}/{self.total_steps}"]
        result.append(f"loss {last['loss']:.4f} (step {first['step']}: {first['loss']:.4f})")
        if self._validation_loss is not None:
            result.append(f"validation loss {self._validation_loss:.4f}")
        tokens, seconds = self.tokens_seen - self._tokens_at_start, self._clock() - self._started
        result.append(f"{statistics.median(self._speeds or [last['tokens_per_second']]):,.0f} tokens/s")
        result.append(f"{tokens:,} tokens in {console.duration(seconds)}")
        return ", ".join(result) + console.aligned(places)

    def close(self) -> None:
        if self._file:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def _rates(self, window: Window, now: float) -> Record:
        elapsed = now - window.started
        return {
            "tokens": self.tokens_seen,
            "tokens_per_second": window.tokens / elapsed,
            "step_seconds": elapsed / window.steps,
            "data_seconds": window.data_seconds / window.steps,
        }

    def _utilization(self, tokens_per_second: float) -> Record:
        if self.peak.flops is None:
            return {}
        share = tokens_per_second / self.world_size / self.peak.flops
        return {"mfu": share * self.causal, "mfu_full": share * self.full}

    def _seconds_left(self, step: int) -> float | None:
        """Estimate the remaining time; None while all windows so far are marked."""
        if not self._recent_step_seconds:
            return None
        return statistics.median(self._recent_step_seconds) * (self.total_steps - step)

    def _write(self, record: Record, tags: Mapping[str, float]) -> None:
        if self._file:
            self._file.write(record)
        for tracker in self._trackers:
            tracker.log(tags, record["step"])


def tags_of(record: Record, world_size: int, flops_per_token_full: float) -> dict[str, float]:
    """Return a record's values by the tags of PyTorch's torchtitan (see trackers/)."""
    per_device = record["tokens_per_second"] / world_size
    tags = {
        "loss_metrics/global_avg_loss": record["loss"],
        "throughput(tps)": per_device,
        "tflops": per_device * flops_per_token_full / 1e12,
        "time_metrics/end_to_end(s)": record["step_seconds"],
        "time_metrics/data_loading(s)": record["data_seconds"],
        "time_metrics/data_loading(%)": 100 * record["data_seconds"] / record["step_seconds"],
        "lr": record["lr"],
        "n_tokens_seen": record["tokens"],
    }
    if record["grad_norm"] is not None:
        tags["grad_norm"] = record["grad_norm"]
    if "mfu" in record:
        tags |= {"mfu(%)": 100 * record["mfu_full"], "mfu_full(%)": 100 * record["mfu_full"]}
        tags["mfu_causal(%)"] = 100 * record["mfu"]
    tags |= {f"stragglers/{name}": record[name] for name in ("slowest_rank", "slowest_ratio") if name in record}
    for name, tag in (("max_loss", "global_max_loss"), ("mtp_loss", "global_avg_mtp_loss")):
        if name in record:
            tags[f"loss_metrics/{tag}"] = record[name]
    adapters = {
        f"adapter/{name.removeprefix('adapter_')}": v for name, v in record.items() if name.startswith("adapter_")
    }
    bases = {f"optimizer/{name}": value for name, value in record.items() if name.startswith("basis_")}
    experts = {
        f"expert_metrics/{name.removeprefix('expert_')}": v for name, v in record.items() if name.startswith("expert_")
    }
    return tags | adapters | bases | experts


BUCKETS = 64


def histograms_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Histogram]:
    """Return histograms of this rank's model parts by tag: `weights/NAME`, and `gradients/NAME` if it has a gradient.

    Tensors may have any shape. All ranks call it, because sharded tensors are gathered. Packed weights have none.
    """
    histograms = {}
    with host.reading("histograms"):
        for name, parameter in parameters:
            if parameter.is_floating_point():
                histograms[f"weights/{name}"] = histogram(parameter.detach())
                if parameter.grad is not None:
                    histograms[f"gradients/{name}"] = histogram(parameter.grad)
    return histograms


def gather_histograms(histograms: dict[str, Histogram]) -> dict[str, Histogram]:
    """Gather the histograms of all pipeline stages on the first rank; other ranks get none."""
    if dist.get_world_size() == 1:
        return histograms
    gathered = distributed.gather_json({tag: asdict(histogram) for tag, histogram in histograms.items()})
    return {tag: Histogram(**fields) for part in gathered or () for tag, fields in part.items()}


def histogram(tensor: torch.Tensor) -> Histogram:
    """Return the histogram of a tensor of any shape, without NaN and infinity, which the guards handle."""
    values = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float()
    values = values[values.isfinite()]
    low, high = (float(value) for value in torch.aminmax(values)) if values.numel() else (0.0, 0.0)
    counts = torch.histc(values, BUCKETS, low, high)
    limits = torch.linspace(low, high, BUCKETS + 1, dtype=torch.float64)[1:]
    squares = float(values.double().square().sum())
    total = float(values.double().sum())
    return Histogram(low, high, values.numel(), total, squares, limits.tolist(), counts.long().tolist())
