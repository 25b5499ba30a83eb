"""Build data sources and loaders from the config, and compute the number of steps of epochs."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.assembly.parts import (
    global_batch_size,
    global_rows,
    has_experts,
    isolates_documents,
    length_multiple,
    matching_options,
    model_args,
    tokenizer_kwargs,
)
from torchtitan.config.batch_shape import (
    Section,
    batch_rows,
    is_packed,
    padding_in_words,
    rows_per_sample,
    sample_count,
)
from torchtitan.config.job import JobConfig, joins_sources, sources_of
from torchtitan.core.cadence import with_end
from torchtitan.datasets import open_source
from torchtitan.datasets.encoding import TrainOn, unread_fields
from torchtitan.datasets.loader import (
    HeldOutBatches,
    Loader,
    LoaderOptions,
    WeightedSource,
    WorkerOptions,
    build_loader,
)
from torchtitan.datasets.preparing import PrepareOptions, describe_records, prepared_shards
from torchtitan.datasets.record_account import describe_unread
from torchtitan.datasets.record_format import LabelledFields, record_reader
from torchtitan.datasets.sample_packing import Packing, PackReader, samples_in_epochs, steps_for, total_samples
from torchtitan.datasets.samples import Labels
from torchtitan.datasets.segments import Documents, HeldOutSegments, SegmentLoader
from torchtitan.datasets.sources import Source
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.verification import start_verification
from torchtitan.losses.objective import Objective
from torchtitan.losses.tasks import task_of
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.process.distributed import device_type
from torchtitan.process.ranks import read_ranks

logger = logging.getLogger(__name__)


def labelled_fields(config: JobConfig) -> LabelledFields | None:
    """Return the fields that hold a record's class; None if the task learns no classes."""
    if task_of(config.task.kind).labels != "classes":
        return None
    args = model_args(config)
    return LabelledFields.from_task(config.task, args.n_classes, end_tokens=not args.causal)


def label_kind(config: JobConfig) -> Labels:
    """Return the kind of labels. A bidirectional model classifies by its first token, a causal one by its last."""
    kind = task_of(config.task.kind).labels
    if kind != "classes":
        return kind
    return "last" if model_args(config).causal else "first"


def packing(config: JobConfig, section: Section, pad_id: int) -> Packing | None:
    """Return the sample packing of a task on whole records; None if samples are cut from continuous text."""
    if not task_of(config.task.kind).whole_records:
        return None
    rows = rows_per_sample(config)
    window = config.data.packing_window if is_packed(config) else 1
    held_out, pad_left = section == "validation", config.data.padding == "left"
    step = config.training.global_batch_size  # the rules require it on several ranks
    step = step if step > 0 else config.training.local_batch_size
    shard, shards = map(int, config.data.shards.split("/"))
    return Packing(
        window,
        pad_id,
        config.validation.split,
        held_out,
        pad_left,
        rows,
        multiple=length_multiple(config),
        step_samples=step * rows if config.data.group_by_length and not held_out else 0,
        shard=(1, 1) if held_out else (shard, shards),
    )


def prepare_options(config: JobConfig, section: Section) -> PrepareOptions:
    """Return the options for tokenizing the records of a section."""
    data = config.data
    if not task_of(config.task.kind).whole_records:
        return PrepareOptions()
    rows = task_of(config.task.kind).rows_per_sample
    train_on = TrainOn(data.train_on if rows == 1 else "last_turn", data.train_on_eos)
    return PrepareOptions(train_on, seq_len_of(config, section) + 1, data.too_long, data.max_empty_ratio, rows)


def seq_len_of(config: JobConfig, section: Section) -> int:
    override = config.validation.seq_len if section == "validation" else None
    return override or config.training.seq_len


def last_step_of_data(config: JobConfig, plan: ParallelDims, samples_read: int = 0, step: int = 0) -> int | None:
    """Return the step at which training.epochs or training.tokens is used up; None if neither is set.

    `step`, `samples_read`: position of a resumed run. The text is tokenized first if epochs or a task on whole
    records need it. At step 0 such a task's records are also logged and its validation data opened, even if the result
    is None.
    """
    training, packs = config.training, task_of(config.task.kind).whole_records
    if training.epochs is None and training.tokens is None and not packs:
        return None
    sources: list[TokenShards] = []
    if packs or training.epochs is not None:
        opened = [weighted.source for weighted in data_sources(config, "training")]
        sources = [source for source in opened if isinstance(source, TokenShards)]  # all are TokenShards
    if packs and not step:
        if config.validation.enable:
            data_sources(config, "validation")
        _log_records(config, sources)
    pack_options, seed = packing(config, "training", pad_id=0), config.debug.seed
    end = total_samples(
        sources, training.seq_len, training.epochs, training.tokens, seed, training.shuffle, pack_options
    )
    return None if end is None else step + steps_for(max(0, end - samples_read), global_rows(config, plan))


def with_steps(config: JobConfig, plan: ParallelDims, samples_read: int = 0, step: int = 0) -> JobConfig:
    """Return the job with `training.steps` lowered to the end of its epochs or tokens; unchanged if it has neither.

    Arguments as for `last_step_of_data`. If `training.steps` comes first, options in epochs or tokens become steps.
    """
    return with_end(config, last_step_of_data(config, plan, samples_read, step))


def _samples_in(config: JobConfig, section: Section, sources: Sequence[TokenShards], epochs: int) -> int:
    seed, shuffle = config.debug.seed, config.training.shuffle
    return samples_in_epochs(
        sources, seq_len_of(config, section), epochs, seed, shuffle, packing(config, section, pad_id=0)
    )


def _log_records(config: JobConfig, sources: Sequence[TokenShards]) -> None:
    """Log the records of each source and how well they fill the samples."""
    training = config.training
    for source in sources:
        header = source.header
        records = f": {describe_records(header['records'], training.seq_len)}" if "records" in header else ""
        share = header.get("trained_tokens", header["tokens"]) / header["tokens"]
        logger.info("records    %s%s; %.1f %% of the tokens trained", source.name, records, 100 * share)
    logger.info("samples    %s", describe_samples(config, sources))


def describe_samples(config: JobConfig, sources: Sequence[TokenShards]) -> str:
    """Describe the samples of a pass over the training data: their number and, for whole records, the padding.

    For packed samples the text has the fill ratio, for the others the share of padding and options that avoid it.
    """
    training, pack_options = config.training, packing(config, "training", pad_id=0)
    if pack_options is None:
        return f"{_samples_in(config, 'training', sources, epochs=1):,} in a pass"
    packs = PackReader(sources, training.seq_len, config.debug.seed, training.shuffle, pack_options)
    samples, has_pairs = packs.samples(1) // rows_per_sample(config), rows_per_sample(config) > 1
    count = (sample_count(config, samples) if has_pairs else f"{samples:,}") + " in a pass"
    if is_packed(config):
        return f"{count}, {100 * packs.efficiency:.1f} % full"
    if pack_options.multiple:
        rounded = f", rounded up to a multiple of {pack_options.multiple}" if pack_options.multiple > 1 else ""
        return f"{count}, each batch padded to its longest sample{rounded}"
    longest = int(packs.lengths[packs.numbers].max()) - 1
    return f"{count}; {padding_in_words(config, 1 - packs.efficiency, longest, has_experts(config))}"


def num_batches_per_step(config: JobConfig, plan: ParallelDims) -> int:
    """Return the number of batches that each rank reads in an optimizer step."""
    return global_batch_size(config, plan) // (config.training.local_batch_size * plan.dp)


def training_loader(
    config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims, state: dict[str, Any] | None = None
) -> Loader | SegmentLoader:
    loader = _training_loader(config, vocabulary, dp_rank, plan, state)
    if read_ranks().local_rank == 0:  # one rank of each machine: disks may differ
        opened = [weighted.source for weighted in data_sources(config, "training")]
        loader.verification = start_verification([source for source in opened if isinstance(source, TokenShards)])
        if dp_rank == 0:
            for line in unread_lines(opened, vocabulary):
                logger.info("records    %s", line)
    return loader


def unread_lines(sources: Sequence[Source], tokenizer: Tokenizer) -> list[str]:
    """Name the fields of each source's records that no sample is made of, as lines."""
    described = [
        describe_unread(source.header.get("source", {}).get("name", source.name), source.header.get("unread", []))
        if isinstance(source, TokenShards)
        else describe_unread(source.name, unread_fields(source, tokenizer))
        for source in sources
    ]
    return [line for line in described if line]


def _training_loader(
    config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims, state: dict[str, Any] | None
) -> Loader | SegmentLoader:
    if task_of(config.task.kind).streams_documents:
        return SegmentLoader(
            documents(config, "training"),
            seq_len=config.training.seq_len,
            rows=batch_rows(config),
            rank=dp_rank,
            ranks=plan.dp,
            seed=config.debug.seed,
            shuffle=config.training.shuffle,
            fingerprint=documents_fingerprint(config, vocabulary),
            state=state,
        )
    batch = global_rows(config, plan)
    return _loader(config, "training", vocabulary, dp_rank, plan, batch, config.training.seq_len, state)


def validation_loader(config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims) -> Loader:
    """Build the loader of the validation data; it always starts from the beginning and yields the same batches."""
    batch = batch_rows(config, "validation") * plan.dp
    seq_len = seq_len_of(config, "validation")
    return _loader(config, "validation", vocabulary, dp_rank, plan, batch, seq_len, None)


def samples_per_pass(config: JobConfig) -> int:
    """Return the number of samples (or pairs) in a pass over training data of whole records."""
    sources = [entry.source for entry in data_sources(config, "training")]
    rows = _samples_in(config, "training", [entry for entry in sources if isinstance(entry, TokenShards)], epochs=1)
    return rows // rows_per_sample(config)


def held_out(
    config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims, objective: Objective
) -> HeldOutBatches | HeldOutSegments | None:
    """Return the validation batches, which restart with every iteration; None without validation."""
    part = config.validation
    if not part.enable:
        return None
    in_a_batch = batch_rows(config, "validation") * plan.dp
    samples = part.samples * rows_per_sample(config) if part.steps is None else part.steps * in_a_batch
    if task_of(config.task.kind).streams_documents:
        segment_options = dict(
            seq_len=seq_len_of(config, "validation"),
            rows=batch_rows(config, "validation"),
            rank=dp_rank,
            ranks=plan.dp,
        )
        return HeldOutSegments(documents(config, "validation"), samples, **segment_options)
    if task_of(config.task.kind).whole_records:
        opened = [weighted.source for weighted in data_sources(config, "validation")]
        available = _samples_in(config, "validation", [s for s in opened if isinstance(s, TokenShards)], epochs=1)
        samples = min(samples or available, available)
    loader = validation_loader(config, vocabulary, dp_rank, plan)
    return HeldOutBatches(loader, samples, objective.first)


def documents(config: JobConfig, section: Section) -> Documents:
    """Return the documents of a section's sources; for a task on whole records, those that packing selects."""
    opened = [weighted.source for weighted in data_sources(config, section)]
    sources = [source for source in opened if isinstance(source, TokenShards)]
    pack_options = packing(config, section, pad_id=0)
    if pack_options is None:
        return Documents(sources)
    return Documents(
        sources, PackReader(sources, seq_len_of(config, section), config.debug.seed, False, pack_options).numbers
    )


def first_segments(config: JobConfig, dp_rank: int, plan: ParallelDims, count: int) -> HeldOutSegments:
    """Return the first `count` segments of the training data in the stored order, the same for any number of ranks."""
    return HeldOutSegments(
        documents(config, "training"),
        count,
        seq_len=config.training.seq_len,
        rows=batch_rows(config),
        rank=dp_rank,
        ranks=plan.dp,
    )


def documents_fingerprint(config: JobConfig, vocabulary: Tokenizer) -> dict[str, Any]:
    """Return all that the order of documents depends on, for the loader's state."""
    training = config.training
    order = {"seed": config.debug.seed, "shuffle": training.shuffle, "seq_len": training.seq_len, "order": "documents"}
    sources = [weighted.source.fingerprint for weighted in data_sources(config, "training")]
    return order | {"tokenizer": vocabulary.fingerprint, "sources": {str(n): item for n, item in enumerate(sources)}}


def is_tokenized_first(config: JobConfig, section: Section) -> bool:
    """Return True if a section's text is tokenized before the run."""
    task = task_of(config.task.kind)
    joined = joins_sources(config) and (config.training.epochs is not None or len(config.training.sources) > 1)
    return task.whole_records or task.streams_documents or (section == "training" and joined)


def cache_of(config: JobConfig) -> Path:
    """Return the folder of the token cache."""
    return Path(config.data.cache_dir or Path(config.job.dump_folder, "data"))


def data_sources(config: JobConfig, section: Section) -> list[WeightedSource]:
    """Open a section's sources, tokenizing them first if `is_tokenized_first`, so that all lengths are known."""
    training, weighted_sources, tokenize_first = config.training, [], is_tokenized_first(config, section)
    task = task_of(config.task.kind)
    folder = cache_of(config)
    for source_config in sources_of(config, section).values():
        reader = record_reader(source_config, config.data.default_system, task.whole_records, task.rows_per_sample > 1)
        source = open_source(source_config.dataset, source_config.dataset_path, reader, labelled_fields(config))
        if tokenize_first and not isinstance(source, TokenShards):
            source = prepared_shards(
                source,
                source_config.dataset_path,
                config.model.tokenizer_path,
                folder,
                workers=config.data.num_proc or max(1, training.dataloader.num_workers),
                stop=training.on_bad_data == "stop",
                options=prepare_options(config, section),
                tokenizer_kwargs=tokenizer_kwargs(config),
            )
        weighted_sources.append(WeightedSource(source_config.dataset, source, source_config.weight))
    return weighted_sources


def _loader(
    config: JobConfig,
    section: Section,
    vocabulary: Tokenizer,
    dp_rank: int,
    plan: ParallelDims,
    batch: int,
    seq_len: int,
    state: dict[str, Any] | None,
) -> Loader:
    workers, epochs = config.training.dataloader, config.training.epochs
    if section == "validation":  # whole records are all read, whatever the weights
        epochs = 1 if task_of(config.task.kind).whole_records else None
    pin_memory = device_type() == "cuda" if workers.pin_memory is None else workers.pin_memory
    options = LoaderOptions(
        seq_len=seq_len,
        local_batch_size=batch_rows(config, section),
        global_batch_size=batch,
        dp_rank=dp_rank,
        dp_size=plan.dp,
        seed=config.debug.seed,
        shuffle=config.training.shuffle,
        document_mask=isolates_documents(config),
        on_bad_data=config.training.on_bad_data,
        epochs=epochs,
        tokens=config.training.tokens if section == "training" else None,
        joined=section == "training" and joins_sources(config),
        group_size=task_of(config.task.kind).rows_per_sample,
        packing=packing(config, section, vocabulary.eos_id),
        labels=label_kind(config),
    )
    worker_options = WorkerOptions(**matching_options(workers, WorkerOptions) | {"pin_memory": pin_memory})
    return build_loader(data_sources(config, section), vocabulary, options, worker_options, state)
