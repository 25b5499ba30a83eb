"""The data of a job: sources, lengths of samples, padding and packing."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.config.sections.training import Data, DataSource, Training, Validation
from torchtitan.datasets.record_format import RecordReader, record_reader
from torchtitan.datasets.sample_packing import Packing
from torchtitan.job.layout import JobLayout, Section
from torchtitan.job.model import JobModel

ROUNDING = {"cpu": 8, "cuda": 64}
"""Lengths of batches are multiples of this by default: kernels are slow for others, and each new length costs memory
of the allocator's."""


@dataclass(frozen=True)
class JobData:
    """Sources and samples of a job with these sections."""

    data: Data
    training: Training
    validation: Validation
    model: JobModel
    layout: JobLayout
    device_type: str
    folder: Path
    """The run's folder."""

    # Sources

    def sources(self, section: Section) -> dict[str, DataSource]:
        """Return the sources of a section by option: its `sources`, or the one of dataset and dataset_path.

        With validation.split these are the training sources.
        """
        if section == "validation" and self.validation.split is not None:
            section = "training"
        part = self.training if section == "training" else self.validation
        by_option = {f"{section}.sources[{number}]": source for number, source in enumerate(part.sources)}
        by_option = by_option or {section: DataSource(dataset=part.dataset, dataset_path=part.dataset_path)}
        return {place: self._as_training(source) for place, source in by_option.items()}

    def _as_training(self, source: DataSource) -> DataSource:
        """Fill in unset options from the training section; fields and template belong to a format."""
        names = ("text_field",) if source.format else ("text_field", "format", "fields", "template")
        return replace(source, **{name: getattr(source, name) or getattr(self.training, name) for name in names})

    @property
    def all_sources(self) -> dict[str, DataSource]:
        """All sources that the job reads, by their place in the config."""
        validation_has_sources = self.validation.enable and self.validation.split is None
        return self.sources("training") | (self.sources("validation") if validation_has_sources else {})

    @property
    def joins_sources(self) -> bool:
        """True if the training sources are read as one, so that their weights have no effect."""
        return self.training.epochs is not None or self.training.mixing == "sizes"

    def describe_sources(self, section: Section) -> str:
        """Describe the datasets with their paths and, where several are mixed by weight, the share of each."""
        sources = list(self.sources(section).values())
        total_weight = sum(source.weight for source in sources)
        names = [s.dataset + (f" ({s.dataset_path})" if s.dataset_path else "") + (s.slice or "") for s in sources]
        if len(sources) == 1 or (section == "training" and self.joins_sources):
            return " + ".join(names)
        return " + ".join(f"{s.weight / total_weight:.3g} {name}" for s, name in zip(sources, names, strict=True))

    def reader(self, source: DataSource) -> RecordReader:
        """Return the reader of a source's records. LimitError for a wrong format, field or template."""
        task, data = self.model.spec, self.data
        pairs = task.rows_per_sample > 1
        return record_reader(source, data.default_system, task.whole_records, pairs, data.drop_system)

    def is_tokenized_first(self, section: Section) -> bool:
        """Return True if a section's text is tokenized before the run."""
        task, training = self.model.spec, self.training
        joined = self.joins_sources and (training.epochs is not None or len(training.sources) > 1)
        return task.whole_records or task.streams_documents or (section == "training" and joined)

    @property
    def cache(self) -> Path:
        """The folder of the token cache."""
        return Path(self.data.cache_dir or self.folder / "data")

    # Samples

    def seq_len(self, section: Section) -> int:
        override = self.validation.seq_len if section == "validation" else None
        return override or self.training.seq_len

    @property
    def lengths(self) -> dict[str, int]:
        """Sample lengths in tokens, by the option that sets them."""
        part = self.validation
        validation_length = {"validation.seq_len": part.seq_len} if part.enable and part.seq_len else {}
        return {"training.seq_len": self.training.seq_len} | validation_length

    @property
    def isolates_documents(self) -> bool:
        """True if attention and positions are confined to a document."""
        return self.training.document_mask or self.model.spec.whole_records

    @property
    def is_packed(self) -> bool:
        """True if several records share a sample. Default: True for tasks on tokens, False for classes."""
        task = self.model.spec
        if not task.whole_records or task.rows_per_sample > 1:
            return False
        return (self.data.packing or ("off" if task.labels == "classes" else "best_fit")) == "best_fit"

    def keeps_full_length(self) -> str:
        """Return why unpacked samples are padded to training.seq_len, as a clause; empty if they are not."""
        if self.data.pad_to is not None:
            return "as data.pad_to says" if self.data.pad_to == "seq_len" else ""
        if options := self.layout.fixed_by():
            return f"as {' and '.join(options)} want{'s' * (len(options) == 1)} all batches of one shape"
        if self.data.padding == "left":
            return 'as data.padding = "left" puts it before the text'
        clause = "as the balance of experts counts it, so that each batch's own length would change it"
        return clause * self.model.has_experts

    @property
    def padding_multiple(self) -> int:
        """Multiple to which batch lengths are rounded up; 0 if all batches have training.seq_len tokens."""
        pad_to = self.data.pad_to
        if not self.model.spec.whole_records or self.is_packed or self.keeps_full_length():
            return 0
        if pad_to is None:
            return math.lcm(ROUNDING[self.device_type], *self._needs().values())
        return 1 if pad_to == "batch" else int(pad_to.partition(":")[2])

    def _needs(self) -> dict[str, int]:
        return self.layout.sequence_needs(self.layout.sequence_parallel)

    def describe_padding(self, share: float, longest: int) -> str:
        """Describe the padding of samples to training.seq_len tokens, and how to avoid it.

        `share`: padding as a fraction of all tokens. `longest`: tokens of the longest sample.
        """
        needed = math.lcm(ROUNDING["cpu"], *self._needs().values())
        length = -(-longest // needed) * needed
        ways = [f"write training.seq_len = {length}, which the longest needs"] * (length < self.training.seq_len)
        if self.data.pad_to == "seq_len" and not self.layout.fixed_by():
            ways.append("leave data.pad_to out")
        if self.model.spec.rows_per_sample == 1:
            ways.append('pack the records (data.packing = "best_fit")')
        if "compile.enable" in self.layout.fixed_by():
            ways.append("leave compile.enable out")
        remedy = " or ".join(ways) or "another plan would pad each batch to its longest sample"
        reason = self.keeps_full_length()
        return f"{100 * share:.1f} % of the tokens are padding up to training.seq_len, {reason}; {remedy}"

    def packing(self, section: Section, pad_id: int) -> Packing | None:
        """Return the sample packing of a task on whole records; None if samples are cut from continuous text."""
        if not self.model.spec.whole_records:
            return None
        rows = self.layout.rows_per_sample
        held_out = section == "validation"
        step = self.training.global_batch_size  # the rules require it on several ranks
        step = step if step > 0 else self.training.local_batch_size
        shard, shards = map(int, self.data.shards.split("/"))
        return Packing(
            self.data.packing_window if self.is_packed else 1,
            pad_id,
            self.validation.split,
            held_out,
            self.data.padding == "left",
            rows,
            multiple=self.padding_multiple,
            step_samples=step * rows if self.data.group_by_length and not held_out else 0,
            shard=(1, 1) if held_out else (shard, shards),
        )
