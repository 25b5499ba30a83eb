"""Build data sources and loaders from the config, and compute the number of steps of epochs."""

import logging
from collections.abc import Sequence
from typing import Any

from torchtitan.assembly.parts import matching_options
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
from torchtitan.datasets.sample_packing import PackReader, samples_in_epochs, steps_for, total_samples
from torchtitan.datasets.segments import Documents, HeldOutSegments, SegmentLoader
from torchtitan.datasets.sources import Source
from torchtitan.datasets.token_shards import TokenShards, start_verification
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.job.layout import Section
from torchtitan.losses.objective import Objective
from torchtitan.process.ranks import read_ranks

logger = logging.getLogger(__name__)


def unread_lines(sources: Sequence[Source], tokenizer: Tokenizer) -> list[str]:
    """Name the fields of each source's records that no sample is made of, as lines."""
    described = [
        describe_unread(source.header.get("source", {}).get("name", source.name), source.header.get("unread", []))
        if isinstance(source, TokenShards)
        else describe_unread(source.name, unread_fields(source, tokenizer))
        for source in sources
    ]
    return [line for line in described if line]


class JobDatasets:
    """The data of a job: sources to open, loaders to build, and the steps that they last."""

    def __init__(self, job: ResolvedJob) -> None:
        self.job, self.config, self.data, self.task = job, job.config, job.data, job.model.spec

    # Sources

    def open_sources(self, section: Section) -> list[WeightedSource]:
        """Open a section's sources, tokenizing them first if `is_tokenized_first`, so that all lengths are known."""
        training, weighted_sources = self.config.training, list[WeightedSource]()
        earlier: list[TokenShards] = []
        for options in self.data.sources(section).values():
            reader = self.data.reader(options)
            fields = self.job.model.labelled_fields
            source = open_source(options.dataset, options.dataset_path, reader, fields, options.slice)
            if self.data.is_tokenized_first(section) and not isinstance(source, TokenShards):
                source = prepared_shards(
                    source,
                    options.dataset_path,
                    self.config.model.tokenizer_path,
                    self.data.cache,
                    workers=self.config.data.num_proc or max(1, training.dataloader.num_workers),
                    stop=training.on_bad_data == "stop",
                    options=self.prepare_options(section),
                    tokenizer_kwargs=self.job.tokenizer_kwargs,
                    earlier=earlier,
                )
                earlier += [source] if self.config.data.deduplicate else []
            weighted_sources.append(WeightedSource(options.dataset, source, options.weight))
        return weighted_sources

    def open_shards(self, section: Section) -> list[TokenShards]:
        """Open a section's sources, and return those that are tokenized."""
        opened = [weighted.source for weighted in self.open_sources(section)]
        return [source for source in opened if isinstance(source, TokenShards)]

    def prepare_options(self, section: Section) -> PrepareOptions:
        """Return the options for tokenizing the records of a section."""
        data = self.config.data
        if not self.task.whole_records:
            return PrepareOptions()
        rows = self.task.rows_per_sample
        train_on = TrainOn(data.train_on if rows == 1 else "last_turn", data.train_on_eos)
        has_last_label = self.task.labels != "ends"
        room = self.data.seq_len(section) + has_last_label
        max_tokens = min(room, data.max_tokens or room)
        is_given = max_tokens == data.max_tokens
        return PrepareOptions(
            *(train_on, max_tokens, is_given, data.too_long, data.max_empty_ratio, rows),
            min_tokens=data.min_tokens,
            distinct=data.deduplicate,
            has_last_label=has_last_label,
        )

    # Length of the run

    def last_step(self, samples_read: int = 0, step: int = 0) -> int | None:
        """Return the step at which training.epochs or training.tokens is used up; None if neither is set.

        `step`, `samples_read`: position of a resumed run. The text is tokenized first if epochs or a task on whole
        records need it. At step 0 such a task's records are also logged and its validation data opened, even if the
        result is None.
        """
        training, packs = self.config.training, self.task.whole_records
        if training.epochs is None and training.tokens is None and not packs:
            return None
        # all are tokenized
        sources = self.open_shards("training") if packs or training.epochs is not None else []
        if packs and not step:
            if self.config.validation.enable:
                self.open_sources("validation")
            self._log_records(sources)
        packing, seed = self.data.packing("training", pad_id=0), self.config.debug.seed
        end = total_samples(
            sources, training.seq_len, training.epochs, training.tokens, seed, training.shuffle, packing
        )
        return None if end is None else step + steps_for(max(0, end - samples_read), self.job.layout.rows)

    def _samples_in(self, section: Section, sources: Sequence[TokenShards]) -> int:
        """Return the samples of a pass over the sources."""
        seed, shuffle, packing = self.config.debug.seed, self.config.training.shuffle, self.data.packing(section, 0)
        return samples_in_epochs(sources, self.data.seq_len(section), 1, seed, shuffle, packing)

    def samples_per_pass(self) -> int:
        """Return the number of samples (or pairs) in a pass over training data of whole records."""
        return self._samples_in("training", self.open_shards("training")) // self.job.layout.rows_per_sample

    def _log_records(self, sources: Sequence[TokenShards]) -> None:
        """Log the records of each source and how well they fill the samples."""
        for source in sources:
            header, seq_len = source.header, self.config.training.seq_len
            options = seq_len, self.config.data.max_tokens is not None, self.task.labels != "ends"
            records = f": {describe_records(header['records'], *options)}" if "records" in header else ""
            share = header.get("trained_tokens", header["tokens"]) / max(1, header["tokens"])
            logger.info("records    %s%s; %.1f %% of the tokens trained", source.name, records, 100 * share)
        logger.info("samples    %s", self.describe_samples(sources))

    def describe_samples(self, sources: Sequence[TokenShards]) -> str:
        """Describe the samples of a pass over the training data: their number and, for whole records, the padding.

        For packed samples the text has the fill ratio, for the others the share of padding and options that avoid it.
        """
        training, packing, layout = self.config.training, self.data.packing("training", pad_id=0), self.job.layout
        if packing is None:
            return f"{self._samples_in('training', sources):,} in a pass"
        packs = PackReader(sources, training.seq_len, self.config.debug.seed, training.shuffle, packing)
        samples, has_pairs = packs.samples(1) // layout.rows_per_sample, layout.rows_per_sample > 1
        count = (layout.sample_count(samples) if has_pairs else f"{samples:,}") + " in a pass"
        if self.data.is_packed:
            return f"{count}, {100 * packs.efficiency:.1f} % full"
        if packing.multiple:
            rounded = f", rounded up to a multiple of {packing.multiple}" if packing.multiple > 1 else ""
            return f"{count}, each batch padded to its longest sample{rounded}"
        longest = int(packs.lengths[packs.numbers].max()) - 1
        return f"{count}; {self.data.describe_padding(1 - packs.efficiency, longest)}"

    # Loaders

    def training_loader(
        self, vocabulary: Tokenizer, dp_rank: int, state: dict[str, Any] | None = None
    ) -> Loader | SegmentLoader:
        loader: Loader | SegmentLoader
        if self.task.streams_documents:
            loader = SegmentLoader(
                self.documents("training"),
                **self._segments("training", dp_rank),
                seed=self.config.debug.seed,
                shuffle=self.config.training.shuffle,
                fingerprint=self.documents_fingerprint(vocabulary),
                state=state,
            )
        else:
            loader = self._loader("training", vocabulary, dp_rank, self.job.layout.rows, state)
        if read_ranks().local_rank == 0:  # one rank of each machine: disks may differ
            opened = [weighted.source for weighted in self.open_sources("training")]
            loader.verification = start_verification([source for source in opened if isinstance(source, TokenShards)])
            if dp_rank == 0:
                for line in unread_lines(opened, vocabulary):
                    logger.info("records    %s", line)
        return loader

    def validation_loader(self, vocabulary: Tokenizer, dp_rank: int) -> Loader:
        """Build the loader of the validation data; it always starts from the beginning and yields the same batches."""
        batch = self.job.layout.batch_rows("validation") * self.job.layout.dims.dp
        return self._loader("validation", vocabulary, dp_rank, batch, None)

    def _loader(
        self, section: Section, vocabulary: Tokenizer, dp_rank: int, batch: int, state: dict[str, Any] | None
    ) -> Loader:
        training, workers, epochs = self.config.training, self.config.training.dataloader, self.config.training.epochs
        if section == "validation":  # whole records are all read, whatever the weights
            epochs = 1 if self.task.whole_records else None
        pin_memory = self.job.device_type == "cuda" if workers.pin_memory is None else workers.pin_memory
        options = LoaderOptions(
            seq_len=self.data.seq_len(section),
            local_batch_size=self.job.layout.batch_rows(section),
            global_batch_size=batch,
            dp_rank=dp_rank,
            dp_size=self.job.layout.dims.dp,
            seed=self.config.debug.seed,
            shuffle=training.shuffle,
            document_mask=self.data.isolates_documents,
            on_bad_data=training.on_bad_data,
            epochs=epochs,
            tokens=training.tokens if section == "training" else None,
            joined=section == "training" and self.data.joins_sources,
            group_size=self.task.rows_per_sample,
            packing=self.data.packing(section, vocabulary.eos_id),
            labels=self.job.model.label_kind,
        )
        worker_options = WorkerOptions(**matching_options(workers, WorkerOptions) | {"pin_memory": pin_memory})
        return build_loader(self.open_sources(section), vocabulary, options, worker_options, state)

    def held_out(
        self, vocabulary: Tokenizer, dp_rank: int, objective: Objective
    ) -> HeldOutBatches | HeldOutSegments | None:
        """Return the validation batches, which restart with every iteration; None without validation."""
        part, layout = self.config.validation, self.job.layout
        if not part.enable:
            return None
        in_a_batch = layout.batch_rows("validation") * layout.dims.dp
        samples = part.samples * layout.rows_per_sample if part.steps is None else part.steps * in_a_batch
        if self.task.streams_documents:
            return HeldOutSegments(self.documents("validation"), samples, **self._segments("validation", dp_rank))
        if self.task.whole_records:
            available = self._samples_in("validation", self.open_shards("validation"))
            samples = min(samples or available, available)
        return HeldOutBatches(self.validation_loader(vocabulary, dp_rank), samples, objective.first)

    # Documents that are streamed

    def documents(self, section: Section) -> Documents:
        """Return the documents of a section's sources; for a task on whole records, those that packing selects."""
        sources, packing = self.open_shards(section), self.data.packing(section, pad_id=0)
        if packing is None:
            return Documents(sources)
        seq_len, seed = self.data.seq_len(section), self.config.debug.seed
        return Documents(sources, PackReader(sources, seq_len, seed, False, packing).numbers)

    def _segments(self, section: Section, dp_rank: int) -> dict[str, Any]:
        """Return the arguments that all readers of segments share."""
        layout = self.job.layout
        rows, seq_len = layout.batch_rows(section), self.data.seq_len(section)
        return dict(seq_len=seq_len, rows=rows, rank=dp_rank, ranks=layout.dims.dp)

    def first_segments(self, dp_rank: int, count: int) -> HeldOutSegments:
        """Return the first `count` segments of the training data in the stored order, the same for any number of
        ranks.
        """
        return HeldOutSegments(self.documents("training"), count, **self._segments("training", dp_rank))

    def documents_fingerprint(self, vocabulary: Tokenizer) -> dict[str, Any]:
        """Return all that the order of documents depends on, for the loader's state."""
        training, seed = self.config.training, self.config.debug.seed
        order: dict[str, Any] = {"seed": seed, "shuffle": training.shuffle}
        order |= {"seq_len": training.seq_len, "order": "documents"}
        sources = [weighted.source.fingerprint for weighted in self.open_sources("training")]
        return order | {
            "tokenizer": vocabulary.fingerprint,
            "sources": {str(n): item for n, item in enumerate(sources)},
        }
