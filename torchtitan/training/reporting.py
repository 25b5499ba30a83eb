"""Report a run to its user: its plan at the start, the progress of long steps, and its results at the end."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from torchtitan.config.sections.field_types import Precision
from torchtitan.config.sections.model import Parallelism, Qat
from torchtitan.core.files import FileError
from torchtitan.core.float8 import has_kernel
from torchtitan.core.progress_bar import DELAY_SECONDS, is_watched, progress_bar
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.job.saving import JobSaving
from torchtitan.launcher.run_folder import PLOT_FILE, RecordedPlan
from torchtitan.lr_scheduling import LRSchedulers
from torchtitan.metrics.console import duration
from torchtitan.metrics.device import device_name
from torchtitan.metrics.goodput import Goodput
from torchtitan.metrics.logger import MetricsLogger
from torchtitan.metrics.plot import draw_training_curve
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import Ranks, Restart, describe_environment
from torchtitan.training.step import FORWARD_BACKWARD, StepData, StepObserver

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LINE_SECONDS = 30.0
"""Longest silence of a run that does not write to a terminal."""
PHASE_TEXTS = {
    "first": "step {step}/{total}, which may compile",
    "validate": "validation at step {step}/{total}",
    "save": "saving step {step}/{total}",
}
"""How a phase is described; the others are described by their step."""


def log_start(
    job: ResolvedJob,
    model: ParallelModel,
    vocabulary: Tokenizer,
    schedulers: LRSchedulers,
    sizes: str,
    limited: str = "",
    end: str = "",
) -> None:
    """Log the model, plan, data, schedule and folder of a run.

    `sizes`: the model's sizes as text. `limited`: the memory limit as text, if any. `end`: the text of `describe_end`.
    """
    config, layout, passes = job.config, job.layout, job.layout.batches_per_step
    tags = f" [{', '.join(config.job.tags)}]" if config.job.tags else ""
    logger.info("%s%s", config.job.description, tags)
    logger.info("model      %s %s: %s", config.model.name, config.model.flavor, sizes)
    logger.info(
        "plan       %s on %s, %s; %s of %s%d tokens a step%s",
        layout.dims.describe(),
        model.device.type,
        describe_precision(job.model, job.saving.frozen_dtype, job.device_type),
        layout.sample_count(layout.samples),
        "up to " * (job.data.padding_multiple > 0),
        config.training.seq_len,
        f" (accumulated over {passes} passes)" if passes > 1 else "",
    )
    if note := describe_quantized_messages(config.parallelism):
        logger.warning("messages   %s", note)
    if note := layout.notice():
        logger.info("pairs      %s", note)
    if note := describe_fake_quantization(config.qat):
        logger.info("rounding   %s", note)
    if model.adapter is not None:
        logger.info("adapter    %s", model.adapter.describe())
        if config.checkpoint.enable and not config.checkpoint.load_only:
            logger.info("saves      %s", describe_adapter_save(job.saving))
        for warning in model.adapter.warnings(passes):
            logger.warning("adapter    %s", warning)
    data = job.data.describe_sources("training")
    logger.info("data       %s, tokenizer of %d%s", data, vocabulary.vocab_size, end)
    if config.metrics.log_lr_schedule:
        logger.info("schedule   %s", schedulers.schedule.describe(config.optimizer.lr))
    logger.info("cadence    %s", job.schedule.cadence.describe(config))
    before, now = schedulers.rate_before, schedulers.last_lr
    if before is not None and not math.isclose(before, now, rel_tol=1e-3):
        logger.warning("the learning rate jumps from %.3g, as the checkpoint's job had it, to %.3g", before, now)
    if limited:
        logger.info("memory     %s", limited)
    if note := describe_environment():
        logger.info("variables  %s, from the environment", note)
    logger.info("folder     %s", Path(config.job.dump_folder).resolve())
    if not config.checkpoint.enable or config.checkpoint.load_only:
        off = "checkpoint.load_only is set" if config.checkpoint.enable else "checkpoint.enable is off"
        logger.warning("%s: the weights will be lost when the run ends", off)


def describe_adapter_save(saving: JobSaving) -> str:
    if not saving.saves_adapter_alone:
        return "checkpoints hold the whole model (adapter.save = whole)"
    path = saving.checkpoint.initial_load_path
    return f"checkpoints hold the adapter alone (adapter.save = alone); the model in {path} has to stay there"


def describe_precision(model: JobModel, frozen: Precision | None, device_type: str) -> str:
    """Describe the types of a model's numbers. `frozen`: the type that frozen weights are stored in."""
    training, compute = model.training, model.compute_dtype
    products: str = compute
    if training.float8 != "none":
        imitated = "" if has_kernel(device_type) else ", imitated: this device has no such products"
        products += f" and float8 ({training.float8}{imitated})"
    if compute == training.dtype:
        return products
    stored = training.dtype if frozen is None else f"{frozen} frozen and {training.dtype} trained"
    return f"{products} with {stored} parameters and {training.mixed_precision_reduce} reduction"


def describe_fake_quantization(options: Qat) -> str:
    """Return what the linears of a quantization-aware training round, or an empty text without it."""
    if options.weight_dtype == "none":
        return ""
    group = f" in groups of {options.group}" if options.group > 1 else " by rows"
    where = "weights of linears" + " and embeddings" * options.quantize_embedding
    inputs = f", inputs to {options.inputs}" if options.inputs else ""
    start = f", after step {options.after_steps}" if options.after_steps else ""
    return f"{where} to {options.weight_dtype}{group}{inputs}{start}; saved and exported weights are not rounded"


def describe_quantized_messages(options: Parallelism) -> str:
    """Return what lossy collectives round, or an empty text without them."""
    kinds = {"parameters": options.fsdp_quantized_gather, "gradients": options.fsdp_quantized_reduce}
    rounded = " and ".join(f"{name} in {kind}" for name, kind in kinds.items() if kind != "none")
    return f"ranks send {rounded}, which is lossy: losses differ from an exact plan" * bool(rounded)


def plan_to_record(samples: int, model: ParallelModel, ranks: Ranks) -> RecordedPlan:
    """Return the plan of this start, as the run's folder keeps it. `samples`: those of a step."""
    return RecordedPlan(
        degrees=model.dims.all_degrees,
        samples=samples,
        ranks=ranks.world_size,
        ranks_per_machine=ranks.local_world_size,
        device=device_name(model.device),
    )


def record_start(
    tags: Sequence[str],
    saves_in_background: bool,
    restart: Restart | None,
    metrics: MetricsLogger,
    goodput: Goodput,
    step: int,
    loaded_from: Path | None,
) -> None:
    """Account for the time before this start, and write its rows in metrics.jsonl: the job's tags and a restart.

    `step` and `loaded_from`: the step that the run continues from and its checkpoint, if there is one. The time between
    an asynchronous save and a failure counts as lost.
    """
    if tags:
        metrics.record_event(step, "tags", {"tags": ", ".join(tags)})
    saved_at = None if loaded_from is None else loaded_from.stat().st_mtime
    if loaded_from is not None and saved_at is not None and (not saves_in_background or not restart):
        goodput.saved(min((file.stat().st_mtime for file in loaded_from.iterdir()), default=saved_at), saved_at)
    elif saved_at is not None:
        saved_at = goodput.loaded_at or saved_at
    if restart is None:
        return
    now = time.monotonic()
    lost = now - restart.since
    if saved_at is not None:
        lost = min(lost, time.time() - saved_at)
    goodput.failed(max(0.0, lost - (now - restart.ended)))
    event: dict[str, float | str] = {"cause": restart.cause, "rank": restart.rank, "restarts": restart.number}
    event |= {"steps_lost": max(0, restart.step - step), "seconds_lost": round(lost, 1)}
    metrics.record_event(step, "restart", event)


def log_end(
    job: ResolvedJob,
    ranks: Ranks,
    metrics: MetricsLogger,
    goodput: Goodput,
    folders: Mapping[str, Path | None],
    step: int,
    early_stop: str = "",
) -> None:
    """Log the results up to `step`, the account of time and the paths, and draw the training curve.

    `folders`: the checkpoints and exported weights that exist, by label. `early_stop`: why the run is done before its
    last step.
    """
    config = job.config
    paths = {"metrics": metrics.path, "job": Path(config.job.dump_folder, "config.toml")}
    paths |= {label: folder for label, folder in folders.items() if folder is not None}
    if config.metrics.plot and metrics.path.exists():
        picture = Path(config.job.dump_folder) / PLOT_FILE
        data = " + ".join(source.dataset for source in job.data.sources("training").values())
        try:
            if ranks.is_main:
                draw_training_curve(metrics.path, picture, f"{config.model.name} {config.model.flavor} on {data}")
            paths = paths | {"picture": picture}
        except (OSError, FileError) as error:  # a full disk; all other outputs are written by now
            logger.warning("%s cannot be drawn: %s", picture, error)
    logger.info("\n%s", metrics.summary(paths))
    logger.info("time        %s", goodput.summary())
    best = goodput.best_interval(ranks.world_size)
    if best is not None and config.checkpoint.interval_type == "steps" and step:
        steps = max(1, round(best * step / max(goodput.seconds["train"] + goodput.seconds["data"], 1e-9)))
        basis = "its own failures" if goodput.failures else "as many failures as others report"
        logger.info("saves       best every %s, or %d steps, by %s (Young and Daly)", duration(best), steps, basis)
    if early_stop:
        logger.info("ended after step %d of %d: %s", step, config.training.steps, early_stop)
    elif step < config.training.steps:
        continuation = (
            "; start it again to continue" if "checkpoints" in paths else " (checkpoint.enable is off: not saved)"
        )
        logger.info("stopped as asked after step %d%s", step, continuation)


class StepProgress(StepObserver):
    """A context manager around the training loop that shows the progress of long steps.

    `shown`: False on ranks that print nothing. `run` returns the run's current step, its last step and the tokens
    trained on. `dp`: the number of ranks that each read as many tokens as this one.
    """

    def __init__(
        self,
        shown: bool,
        progress: Progress,
        dp: int,
        run: Callable[[], tuple[int, int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shown, self.progress, self.dp, self.run, self.clock = shown, progress, dp, run, clock
        self.step, self.passes, self.passes_done, self.tokens = 0, 1, 0, 0  # of the step under way
        self.all_passes_done, self.began_at = 0, clock()
        self.last_line_at = clock()
        self._bar: tqdm | None = None
        self._stop = threading.Event()
        self._listener = _Listener(self)

    def start(self, data: StepData) -> None:
        self.step, self.passes, self.passes_done, self.tokens = self.run()[0] + 1, len(data.microbatches), 0, 0
        self._sizes = [batch["tokens"].numel() * self.dp for batch in data.microbatches]

    def end(self, part: str) -> None:
        if part == FORWARD_BACKWARD:
            self.tokens += self._sizes[self.passes_done]
            self.passes_done += 1
            self.all_passes_done += 1

    def describe(self) -> str:
        """Say where the run is, in one line."""
        doing, (step, total, tokens) = self.progress.activity, self.run()
        now, started = self.clock(), doing.since
        text = PHASE_TEXTS.get(doing.phase, "step {step}/{total}").format(step=doing.step, total=total)
        if doing.step == self.step == step + 1:
            tokens += self.tokens
            text += f": pass {min(self.passes_done + 1, self.passes)} of {self.passes}"
        parts = [text, f"{duration(now - started)} so far", f"{tokens:,} tokens"]
        if self.all_passes_done:
            remaining = (total - step) * self.passes - (self.passes_done if self.step == step + 1 else 0)
            parts.append(f"about {duration(remaining * (now - self.began_at) / self.all_passes_done)} left")
        return ", ".join(parts)

    def refresh(self, on_terminal: bool) -> None:
        """Show where the run is, if it has been silent for long enough."""
        silent = self.clock() - self.last_line_at
        if not on_terminal:
            if silent >= LINE_SECONDS:
                logger.info("%s", self.describe())
        elif silent < DELAY_SECONDS:
            self._close_bar()
        else:
            if self._bar is None:
                self._bar = tqdm(bar_format="{desc} |{bar:10}|", leave=False, dynamic_ncols=True, total=self.passes)
            self._bar.total, self._bar.n = self.passes, self.passes_done
            self._bar.set_description_str(self.describe())

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "StepProgress":
        self.began_at = self.last_line_at = self.clock()
        if self.shown:
            logging.getLogger("torchtitan").addHandler(self._listener)
            self._thread = threading.Thread(target=self._watch, name="step progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.shown:
            self._stop.set()
            self._thread.join()
            logging.getLogger("torchtitan").removeHandler(self._listener)

    def _watch(self) -> None:
        on_terminal = is_watched()
        while not self._stop.wait(LOOK_SECONDS):
            self.refresh(on_terminal)
        self._close_bar()


class _Listener(logging.Handler):
    """Notes when the run has printed a line."""

    def __init__(self, owner: StepProgress) -> None:
        super().__init__(logging.INFO)
        self.owner = owner

    def emit(self, record: logging.LogRecord) -> None:
        self.owner.last_line_at = self.owner.clock()


class ReferenceProgress:
    """A progress bar on a terminal, and a line with the remaining time every 30 s. `shown`: on this rank."""

    def __init__(self, total: int, done: int, shown: bool) -> None:
        self.total, self.first, self.shown = max(total, done), done, shown
        self.began_at = self.last_line_at = time.monotonic()
        self.bar = progress_bar("reference", self.total, unit=" pairs", shown=shown)
        self.bar.update(done)
        self.done = done

    def __enter__(self) -> "ReferenceProgress":
        return self

    def show(self, done: int) -> None:
        if self.done == self.first and done > self.first and self.shown:
            self._line(done)
        self.bar.update(done - self.done)
        self.done, now = done, time.monotonic()
        if self.shown and now - self.last_line_at >= LINE_SECONDS:
            self._line(done)

    def _line(self, done: int) -> None:
        self.last_line_at = time.monotonic()
        remaining = (self.last_line_at - self.began_at) * max(0, self.total - done) / max(1, done - self.first)
        logger.info("reference  %d of %d pairs, %s left", done, max(self.total, done), duration(remaining))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.close()
        if self.shown and kind is None and self.done > self.first:
            logger.info("reference  %d pairs in %s", self.done - self.first, duration(time.monotonic() - self.began_at))
