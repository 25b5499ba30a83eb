"""Log the plan of a run at its start, and its results and their paths at its end."""

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

from torchtitan.build import parts
from torchtitan.config.batch_shape import notice, padding_multiple, sample_count
from torchtitan.config.job import JobConfig, describe_sources, sources_of
from torchtitan.core.files import FileError
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.launcher.run_folder import PICTURE
from torchtitan.lr_scheduling import LRSchedulers
from torchtitan.metrics.console import duration
from torchtitan.metrics.goodput import Goodput
from torchtitan.metrics.logger import MetricsLogger
from torchtitan.metrics.plot import draw_training_curve
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process.ranks import Ranks, Restart, heeded

logger = logging.getLogger(__name__)


def introduce(
    config: JobConfig,
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
    dims, device, training = model.dims, model.device, config.training
    samples = parts.global_batch_size(config, dims)
    passes = samples // (training.local_batch_size * dims.dp)
    tags = f" [{', '.join(config.job.tags)}]" if config.job.tags else ""
    logger.info("%s%s", config.job.description, tags)
    logger.info("model      %s %s: %s", config.model.name, config.model.flavor, sizes)
    logger.info(
        "plan       %s on %s, %s; %s of %s%d tokens a step%s",
        dims.describe(),
        device.type,
        describe_precision(config),
        sample_count(config, samples),
        "up to " * (padding_multiple(config, device.type, parts.has_experts(config)) > 0),
        training.seq_len,
        f" (accumulated over {passes} passes)" if passes > 1 else "",
    )
    if note := notice(config):
        logger.info("pairs      %s", note)
    if model.adapter is not None:
        logger.info("adapter    %s", model.adapter.describe())
        if config.checkpoint.enable and not config.checkpoint.load_only:
            logger.info("saves      %s", describe_adapter_save(config))
        for warning in model.adapter.warnings(passes):
            logger.warning("adapter    %s", warning)
    data = describe_sources(config, "training")
    logger.info("data       %s, tokenizer of %d%s", data, vocabulary.vocab_size, end)
    if config.metrics.log_lr_schedule:
        logger.info("schedule   %s", schedulers.schedule.describe(config.optimizer.lr))
    logger.info("cadence    %s", parts.cadence(config).describe(config))
    before, now = schedulers.rate_before, schedulers.last_lr
    if before is not None and not math.isclose(before, now, rel_tol=1e-3):
        logger.warning("the learning rate jumps from %.3g, as the checkpoint's job had it, to %.3g", before, now)
    if limited:
        logger.info("memory     %s", limited)
    if note := heeded():
        logger.info("variables  %s, of the environment", note)
    logger.info("folder     %s", Path(config.job.dump_folder).resolve())
    if not config.checkpoint.enable or config.checkpoint.load_only:
        off = "checkpoint.load_only is set" if config.checkpoint.enable else "checkpoint.enable is off"
        logger.warning("nothing will be saved: %s; what this run learns is lost with its end", off)


def describe_adapter_save(config: JobConfig) -> str:
    if not parts.saves_adapter_alone(config):
        return "checkpoints hold the whole model (adapter.save = whole)"
    path = config.checkpoint.initial_load_path
    return f"checkpoints hold the adapter alone (adapter.save = alone); the model in {path} has to stay there"


def describe_precision(config: JobConfig) -> str:
    compute = str(parts.parallel_options(config).param_dtype).removeprefix("torch.")
    if compute == config.training.dtype:
        return compute
    return f"{compute} with {config.training.dtype} parameters and {config.training.mixed_precision_reduce} reduction"


def record_start(
    config: JobConfig,
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
    if config.job.tags:
        metrics.record_event(step, "tags", {"tags": ", ".join(config.job.tags)})
    saved_at = None if loaded_from is None else loaded_from.stat().st_mtime
    if saved_at is not None and (config.checkpoint.async_mode == "disabled" or not restart):
        goodput.saved(saved_at)
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


def conclude(
    config: JobConfig,
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
    paths = {"metrics": metrics.path, "job": Path(config.job.dump_folder, "config.toml")}
    paths |= {label: folder for label, folder in folders.items() if folder is not None}
    if config.metrics.plot and metrics.path.exists():
        picture = Path(config.job.dump_folder) / PICTURE
        data = " + ".join(source.dataset for source in sources_of(config, "training").values())
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
            "; start it again to go on" if "checkpoints" in paths else " (checkpoint.enable is off: not saved)"
        )
        logger.info("stopped as asked after step %d%s", step, continuation)
