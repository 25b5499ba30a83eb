"""The lines at the start of a run: what runs, on what, on which data, and how the learning rate goes."""

import logging
import math
from pathlib import Path

import torch

from torchtitan import build
from torchtitan.config.job import JobConfig, describe_sources
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.lr_scheduling import LRSchedulers
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.parallel_model import ParallelModel

logger = logging.getLogger(__name__)


def introduce(
    config: JobConfig,
    dims: ParallelDims,
    device: torch.device,
    model: ParallelModel,
    vocabulary: Tokenizer,
    schedulers: LRSchedulers,
    sizes: str,
) -> None:
    """Log them. `sizes`: the model's, in words."""
    training, samples = config.training, build.global_batch_size(config, dims)
    passes = samples // (training.local_batch_size * dims.dp)
    tags = f" [{', '.join(config.job.tags)}]" if config.job.tags else ""
    logger.info("%s%s", config.job.description, tags)
    logger.info("model      %s %s: %s", config.model.name, config.model.flavor, sizes)
    logger.info(
        "plan       %s on %s, %s; %d sample%s of %d tokens a step%s",
        dims.describe(),
        device.type,
        build.describe_precision(config),
        samples,
        "s" * (samples != 1),
        training.seq_len,
        f" (accumulated over {passes} passes)" if passes > 1 else "",
    )
    if model.adapter is not None:
        logger.info("adapter    %s", model.adapter.describe())
    end = "" if training.epochs is None else f"; epochs: {training.epochs}, which take {training.steps} steps"
    data = describe_sources(config, "training")
    logger.info("data       %s, tokenizer of %d%s", data, vocabulary.vocab_size, end)
    if config.metrics.log_lr_schedule:
        logger.info("schedule   %s", schedulers.schedule.describe(config.optimizer.lr))
    before, now = schedulers.rate_before, schedulers.last_lr
    if before is not None and not math.isclose(before, now, rel_tol=1e-3):
        logger.warning("the learning rate jumps from %.3g, as the checkpoint's job had it, to %.3g", before, now)
    logger.info("folder     %s", Path(config.job.dump_folder).resolve())
    if not config.checkpoint.enable or config.checkpoint.load_only:
        off = "checkpoint.load_only is set" if config.checkpoint.enable else "checkpoint.enable is off"
        logger.warning("nothing will be saved: %s; what this run learns is lost with its end", off)
