"""Data, batches and steps; the measure on held-out data."""

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
    """Processes that read, tokenize and pack beside the trainer; 0 does it in the trainer's process."""
    persistent_workers: bool = False
    """Keep the workers between passes."""
    pin_memory: bool | None = None
    """Page-locked batches, for faster copies to a GPU. Unset: where there is one."""
    prefetch_factor: Positive | None = None
    """Batches that each worker holds ready (needs num_workers > 0)."""


@dataclass(config=STRICT, kw_only=True)
class DataSource:
    dataset: Dataset
    """Dataset by name: one that is known, or "text" and "tokens" for files at dataset_path."""
    dataset_path: Place | None = None
    """As training.dataset_path."""
    text_field: str | None = None
    """As training.text_field, which it is where this is unset."""
    format: RecordFormat | None = None
    """As training.format, which it is where this is unset."""
    fields: dict[str, str] = field(default_factory=dict)
    """As training.fields, which they are where this and format are unset."""
    template: dict[str, str] = field(default_factory=dict)
    """As training.template, which it is where this and format are unset."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How many samples are from this source, in proportion to the other sources' weights."""


@dataclass(config=STRICT, kw_only=True)
class Training:
    """Training data, batch sizes, length of the run and precision."""

    dataset: Dataset = "python_stdlib"
    """Dataset by name: one that is known, or "text" and "tokens" for files at dataset_path."""
    dataset_path: Place | None = None
    """File, folder or glob for dataset = "text" and "tokens"; a local copy or another name for a Hugging Face set."""
    sources: list[DataSource] = field(default_factory=list)
    """Several datasets, mixed by weight, instead of dataset and dataset_path, which are short for a list of one."""
    mixing: Literal["weights", "sizes"] = "weights"
    """How samples are drawn from several sources: by their weights, or by their sizes, as if they were one source. With
    sizes, text is tokenized before the run. With training.epochs sources are always joined by size."""
    text_field: str = "text"
    """The field that holds the text, token ids or segments in .json, .jsonl, .csv, .parquet, .arrow and Hugging Face
    datasets."""
    format: RecordFormat | None = None
    """The format of records. Unset: records that have text_field are read
    by that, others by the format that their fields tell; those that have both are refused where whole records are
    learned."""
    fields: dict[str, str] = field(default_factory=dict)
    """What the fields of format are called in the records, where that differs, e.g. {instruction = "question"}; role
    and content are those inside messages."""
    template: dict[str, str] = field(default_factory=dict)
    """The prompt of instruct records instead of Stanford Alpaca's: format and no_input_format with {instruction},
    {input} and {system}, system_format, system_prompt, and the separator ahead of the answer."""
    document_mask: bool = False
    """Keep attention inside documents that are packed into one sample."""
    shuffle: bool = True
    """Shuffle documents, by debug.seed and the epoch. False keeps the stored order; of text, every rank then tokenizes
    every document."""
    on_bad_data: Literal["stop", "skip"] = "stop"
    """What to do with a record that cannot be read: stop with its place named, or skip and count it."""
    local_batch_size: Positive = 8
    """Samples per data-parallel rank and forward pass; pairs, where pairs of answers are learned."""
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
    """Passes over all of the data, after which the run ends. Text is tokenized before the run, into
    job.dump_folder/data. Unset: the data go round until training.steps."""
    tokens: Positive | None = None
    """Tokens after which the run ends, up to whole samples and without padding."""
    unfrozen: list[str] = field(default_factory=list)
    """Which parameters are trained, by their names; * stands for anything in one, e.g. ["layers.3*", "*norm*"]. All
    others are frozen. Empty: all are trained, or what the adapter says."""
    neftune_alpha: Annotated[float, Field(ge=0)] = 0.0
    """In training, noise on the embeddings of words: uniform up to this / sqrt(tokens of the record x their width).
    With task.kind = "dpo" the first loss is then not ln 2, as the reference is without it. 0: none."""
    loss_chunks: NonNegative = 0
    """Pieces in which the output head and the cross-entropy run, to keep the logits small. 0: as many as keep a
    piece's float32 logits under 512 MiB."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP)."""
    dtype: Precision = "float32"
    """Type of the parameters and of the optimizer's state."""
    mixed_precision_param: Precision = "bfloat16"
    """Type in which forward and backward compute."""
    mixed_precision_reduce: Precision = "float32"
    """Type in which gradients are reduced."""
    gc_freq: Positive = 50
    """Collect Python's garbage every this many steps, on all ranks together."""
    gc_debug: bool = False
    """Collect after every step and log what was found, to look for reference cycles."""
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass(config=STRICT, kw_only=True)
class Validation:
    """Held-out data and how often it is evaluated."""

    enable: bool = False
    """Measure the loss on held-out data."""
    dataset: Dataset = "python_stdlib_validation"
    """Dataset by name: one that is known, or "text" and "tokens" for files at dataset_path."""
    dataset_path: Place | None = None
    """As training.dataset_path."""
    sources: list[DataSource] = field(default_factory=list)
    """As training.sources."""
    local_batch_size: Positive = 8
    """Samples (or pairs) per data-parallel rank and forward pass."""
    seq_len: Positive | None = None
    """Tokens per sample. Unset: training.seq_len."""
    freq: Cadence = 10
    """Every this many steps, each such share of the run (0.1), "epoch" or "N/epoch"; and after the last step."""
    samples: NonNegative = 80
    """Samples (or pairs) per validation, over all ranks: always the same ones, under every plan. 0: all there are, of
    whole records (task.kind = "sft")."""
    split: Annotated[float, Field(gt=0)] | None = None
    """Validate on a part of the training data that is held out for it: below 1 a share of each source's records, else
    so many records. Whole records only (task.kind = "sft")."""
    steps: Positive | None = None
    """Batches of each data-parallel rank instead, as in torchtitan: how many samples that is depends on the plan."""
    generated: NonNegative = 0
    """So many prompts of the validation data, always the same ones, are continued at each validation, by the likeliest
    words, into generated.jsonl in job.dump_folder."""
    generated_tokens: Positive = 64
    """Words that each of them is continued by at most."""
