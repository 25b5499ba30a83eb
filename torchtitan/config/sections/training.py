"""Training data, batches, steps and precision; validation on held-out data."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import (
    STRICT,
    Cadence,
    Dataset,
    NonNegative,
    Place,
    Positive,
    Precision,
    RecordFormat,
)


@dataclass(config=STRICT, kw_only=True)
class DataLoader:
    num_workers: NonNegative = 0
    """Processes that read, tokenize and pack in parallel with training; 0 uses the trainer's process."""
    persistent_workers: bool = False
    """Keep the workers between passes."""
    pin_memory: bool | None = None
    """Use page-locked batches, for faster copies to a GPU. Unset: if there is a GPU."""
    prefetch_factor: Positive | None = None
    """Batches that each worker holds ready (needs num_workers > 0)."""


@dataclass(config=STRICT, kw_only=True)
class DataSource:
    dataset: Dataset
    """Dataset by name (see `torchtitan list datasets`); "text" and "tokens" read the files at dataset_path."""
    dataset_path: Place | None = None
    """Path or name of the data, as training.dataset_path."""
    text_field: str | None = None
    """Replaces training.text_field for this source. Unset: training.text_field."""
    format: RecordFormat | None = None
    """Replaces training.format for this source. Unset: training.format."""
    fields: dict[str, str] = field(default_factory=dict)
    """Replaces training.fields for this source. Unset: training.fields, unless this source sets format."""
    template: dict[str, str] = field(default_factory=dict)
    """Replaces training.template for this source. Unset: training.template, unless this source sets format."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples from this source, relative to the other sources' weights."""


@dataclass(config=STRICT, kw_only=True)
class Training:
    """Training data, batch sizes, length of the run and precision."""

    dataset: Dataset = "python_stdlib"
    """Dataset by name (see `torchtitan list datasets`); "text" and "tokens" read the files at dataset_path."""
    dataset_path: Place | None = None
    """File, folder or glob for dataset = "text" and "tokens"; local copy or other name of a Hugging Face dataset."""
    sources: list[DataSource] = field(default_factory=list)
    """Datasets mixed by weight, instead of dataset and dataset_path, which name a single one."""
    mixing: Literal["weights", "sizes"] = "weights"
    """Proportions of several sources: their weights, or their sizes, as if they were one source. With sizes, text is
    tokenized before the run. With training.epochs sources are always joined by size."""
    text_field: str = "text"
    """Field that holds the text, token ids or segments in .json, .jsonl, .csv, .parquet, .arrow and Hugging Face
    datasets."""
    format: RecordFormat | None = None
    """Format of records. Unset: plain text for records with text_field, else the format that matches their fields. If
    both apply, tasks on whole records refuse the record."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names in the records of the format's fields, if they differ, e.g. {instruction = "question"}; role and content
    are those inside messages."""
    template: dict[str, str] = field(default_factory=dict)
    """Prompt of instruction records instead of Stanford Alpaca's: format and no_input_format with {instruction},
    {input} and {system}, system_format, system_prompt, and the separator before the answer."""
    document_mask: bool = False
    """Restrict attention to each document within a packed sample."""
    shuffle: bool = True
    """Shuffle documents, by debug.seed and the epoch. False keeps the stored order; every rank then tokenizes every
    document of a text dataset."""
    on_bad_data: Literal["stop", "skip"] = "stop"
    """Reaction to a record that cannot be read: stop and name it, or skip and count it."""
    local_batch_size: Positive = 8
    """Samples (or pairs, for tasks on pairs) per data-parallel rank and forward pass."""
    global_batch_size: Annotated[int, Field(ge=-1)] = -1
    """Samples (or pairs) per optimizer step over all ranks; gradients are accumulated to reach it. -1: local_batch_size
    times the data-parallel degree."""
    seq_len: Positive = 2048
    """Tokens per sample."""
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient's global 2-norm to this; 0 turns clipping off (the norm is still logged)."""
    steps: Positive = 10000
    """Optimizer steps. With epochs or tokens the run ends with whichever comes first; a default sets no limit then."""
    epochs: Positive | None = None
    """Passes over all data, after which the run ends. Text is tokenized before the run, into job.dump_folder/data.
    Unset: the data repeat until training.steps."""
    tokens: Positive | None = None
    """Number of tokens after which the run ends, rounded up to whole samples and without padding."""
    unfrozen: list[str] = field(default_factory=list)
    """Names of the parameters to train; * matches anything, e.g. ["layers.3*", "*norm*"]. All others are frozen. Empty:
    all, or those that the adapter trains."""
    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    """Scale of uniform noise on token embeddings in training, divided by sqrt(tokens of the record x width) (NEFTune).
    With task.kind = "dpo" the first loss is then not ln 2, as the reference has no noise. 0: none."""
    loss_chunks: NonNegative = 0
    """Number of chunks to compute the output head and cross-entropy in, which keeps the logits small. 0: as many as
    keep a chunk's float32 logits under 512 MiB."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP)."""
    dtype: Precision = "float32"
    """Type of the parameters and the optimizer state."""
    mixed_precision_param: Precision = "bfloat16"
    """Type of the computation in forward and backward."""
    mixed_precision_reduce: Precision = "float32"
    """Data type of gradient reductions."""
    gc_freq: Positive = 50
    """Steps between collections of Python's garbage, on all ranks at once."""
    gc_debug: bool = False
    """Collect after every step and log the objects found, to look for reference cycles."""
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(config=STRICT, kw_only=True)
class Validation:
    """Held-out data and how often it is evaluated."""

    enable: bool = False
    """Measure the loss on held-out data."""
    dataset: Dataset = "python_stdlib_validation"
    """Dataset by name (see `torchtitan list datasets`); "text" and "tokens" read the files at dataset_path."""
    dataset_path: Place | None = None
    """Path or name of the held-out data, as training.dataset_path."""
    sources: list[DataSource] = field(default_factory=list)
    """Held-out datasets, as training.sources."""
    local_batch_size: Positive = 8
    """Samples (or pairs) per data-parallel rank and forward pass."""
    seq_len: Positive | None = None
    """Tokens per sample. Unset: training.seq_len."""
    freq: Cadence = 10
    """Distance between validations: steps, a fraction of the run (0.1), "epoch" or "N/epoch"; also after the last
    step."""
    samples: NonNegative = 80
    """Samples (or pairs) per validation, over all ranks: always the same ones, under every plan. 0: all, for whole
    records (task.kind = "sft")."""
    split: Annotated[float, Field(gt=0)] | None = None
    """Part of the training data held out for validation: below 1 a fraction of each source's records, else their
    number. Only for whole records (task.kind = "sft")."""
    steps: Positive | None = None
    """Batches of each data-parallel rank per validation, instead of samples, as in torchtitan; the number of samples
    then depends on the plan."""
    generated: NonNegative = 0
    """Prompts of the validation data, always the same ones, that are continued greedily at each validation, into
    generated.jsonl in job.dump_folder."""
    generated_tokens: Positive = 64
    """Maximum number of tokens generated for each prompt."""
