"""Config -> data: sources, loaders, what the model reads of them, and the number of steps that epochs take."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch

from torchtitan.build import global_batch_size, objective, taken
from torchtitan.config.job import JobConfig, sources_of
from torchtitan.datasets import open_source
from torchtitan.datasets.epochs import samples_in, steps_for
from torchtitan.datasets.held_out import HeldOut
from torchtitan.datasets.loader import Loader, Weighted, build_loader
from torchtitan.datasets.preparing import prepared
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokens import TokenShards
from torchtitan.distributed import device_type
from torchtitan.feed import Feed
from torchtitan.loss import Objective
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.tasks import TASKS


def feed(config: JobConfig, plan: ParallelDims, dp_rank: int, device: torch.device, draws: bool) -> Feed:
    """What the model of a rank reads. `draws`: whether it has dropout."""
    seed = config.debug.seed if draws else None
    together = TASKS[config.task.kind].together
    return Feed(objective(config), plan, dp_rank, device, config.training.document_mask, seed, together)


def with_steps(config: JobConfig, plan: ParallelDims, taken: int = 0, step: int = 0) -> JobConfig:
    """With training.epochs: the job with the number of steps that they take, when at `step` so many samples have been
    taken. Text is tokenized for that, unless it has been."""
    training = config.training
    if training.epochs is None:
        return config
    opened = [weighted.source for weighted in data_sources(config, "training")]
    sources = [source for source in opened if isinstance(source, TokenShards)]  # with epochs, all of them are
    left = max(0, samples_in(sources, training.seq_len, training.epochs) - taken)
    steps = step + steps_for(left, global_batch_size(config, plan))
    return dataclasses.replace(config, training=dataclasses.replace(training, steps=steps))


def training_loader(
    config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims, state: dict[str, Any] | None = None
) -> Loader:
    batch = global_batch_size(config, plan)
    return _loader(config, "training", vocabulary, dp_rank, plan, batch, config.training.seq_len, state)


def validation_loader(config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims) -> Loader:
    """Always the same batches: its own data set, from the start."""
    part = config.validation
    batch = part.local_batch_size * plan.dp
    seq_len = part.seq_len or config.training.seq_len
    return _loader(config, "validation", vocabulary, dp_rank, plan, batch, seq_len, None)


def held_out(
    config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims, objective: Objective
) -> HeldOut:
    part = config.validation
    samples = part.samples if part.steps is None else part.steps * part.local_batch_size * plan.dp
    loader = validation_loader(config, vocabulary, dp_rank, plan)
    return HeldOut(loader, samples, objective.first)


def data_sources(config: JobConfig, section: Literal["training", "validation"]) -> list[Weighted]:
    """Opened; what is to be gone through in epochs is tokenized before, so that it has an end that is known."""
    training, found = config.training, []
    for wanted in sources_of(config, section).values():
        assert wanted.text_field is not None  # sources_of has said it
        source = open_source(wanted.dataset, wanted.dataset_path, wanted.text_field)
        if section == "training" and training.epochs is not None and not isinstance(source, TokenShards):
            source = prepared(
                source,
                wanted.dataset_path,
                config.model.tokenizer_path,
                Path(config.job.dump_folder, "data"),
                workers=max(1, training.dataloader.num_workers),
                stop=training.on_bad_data == "stop",
            )
        found.append(Weighted(wanted.dataset, source, wanted.weight))
    return found


def _loader(
    config: JobConfig,
    section: Literal["training", "validation"],
    vocabulary: Tokenizer,
    dp_rank: int,
    plan: ParallelDims,
    batch: int,
    seq_len: int,
    state: dict[str, Any] | None,
) -> Loader:
    workers = config.training.dataloader
    on_gpu = device_type() == "cuda"
    return build_loader(
        sources=data_sources(config, section),
        tokenizer=vocabulary,
        seq_len=seq_len,
        local_batch_size=getattr(config, section).local_batch_size,
        global_batch_size=batch,
        dp_rank=dp_rank,
        dp_size=plan.dp,
        seed=config.debug.seed,
        shuffle=config.training.shuffle,
        document_mask=config.training.document_mask,
        on_bad_data=config.training.on_bad_data,
        **taken(workers, build_loader) | ({"pin_memory": on_gpu} if workers.pin_memory is None else {}),
        state=state,
        epochs=config.training.epochs if section == "training" else None,
        together=TASKS[config.task.kind].together,
    )
