"""Sections of what a job trains and how: data, steps, precision, validation, optimizer, learning rate and task."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import (
    STRICT,
    Cadence,
    Dataset,
    Form,
    Fraction,
    InEpochs,
    NameIn,
    NonNegative,
    PartOfRun,
    Place,
    Positive,
    Precision,
    RecordFormat,
    Slices,
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
    slice: Slices | None = None
    """Part of the records to read, in the stored order, as in the split of datasets.load_dataset: "[:20%]", "[100:]",
    "[:5%]+[-5%:]". Unset: all."""
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
    """Names in the records of the format's fields, if they differ, e.g. {instruction = "question"}; an empty name
    leaves an optional field out. role and content are those inside messages."""
    template: dict[str, str] = field(default_factory=dict)
    """Prompt of instruction records instead of Stanford Alpaca's: format and no_input_format with {instruction},
    {input} and {system}, system_format, system_prompt, the separator before the answer, and output_format with
    {output}."""
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
    keep a chunk's float32 logits within 1 GiB on a GPU and 512 MiB on a CPU."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory (FSDP)."""
    dtype: Precision = "float32"
    """Type of the parameters, except for frozen ones (frozen_dtype), and of the optimizer state."""
    mixed_precision_param: Precision = "bfloat16"
    """Type of the computation in forward and backward."""
    frozen_dtype: Precision | None = None
    """Type of frozen weights, with an adapter or training.unfrozen. Unset: mixed_precision_param, with adapter.relora
    float32, as it adds to them; a resumed run keeps its type."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Multiply the linears of all blocks in float8, with one scale for an operand (tensorwise) or one for each row and
    column (rowwise). Embedding, head, routers and stacks of experts stay in mixed_precision_param. Devices without such
    products imitate them, which is slower than none."""
    float8_exclude: list[str] = field(default_factory=list)
    """Names of linears that do not multiply in float8; * matches anything, e.g. ["layers.0.*", "*.wk"]."""
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
    """Batches of each data-parallel rank per validation, instead of samples, as in PyTorch's torchtitan; the number of
    samples then depends on the plan."""
    generated: NonNegative = 0
    """Prompts of the validation data, always the same ones, that are continued greedily at each validation, into
    generated.jsonl in job.dump_folder."""
    generated_tokens: Positive = 64
    """Maximum number of tokens generated for each prompt."""


@dataclass(config=STRICT, kw_only=True)
class Optimizer:
    """The optimizer and its learning rate."""

    name: Annotated[str, NameIn("torchtitan.optimizers:OPTIMIZERS")] = "AdamW"
    """Optimizer."""
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment (Adam, AdamW)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment (Adam, AdamW)."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Constant added to the denominator (Adam, AdamW)."""
    options: dict[str, int | float | bool | str | list[str]] = field(default_factory=dict)
    """Further options of the optimizer, e.g. {momentum = 0.9} for SGD; `torchtitan list optimizers` lists them."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay: decoupled in AdamW, added to the gradient in Adam and SGD (as in torch)."""
    decay_norms_and_biases: bool = True
    """Apply weight decay to one-dimensional parameters (norm weights, biases) and to biases of experts too."""
    implementation: Literal["for-loop", "foreach", "fused"] | None = None
    """Implementation of the update. Unset: the fastest that the optimizer has (fused for torch's)."""
    early_step_in_backward: bool = False
    """Step each parameter as soon as its gradient is ready, then free the gradient. Saves memory; excludes clipping
    (set training.max_norm = 0) and gradient accumulation."""


@dataclass(config=STRICT, kw_only=True)
class LRScheduler:
    """The shape of the learning rate over the run."""

    warmup_steps: NonNegative | PartOfRun | InEpochs | None = None
    """Length of the warmup: steps, a fraction of the total such as 0.03, "epoch" or "N/epoch". Unset: 10 % of the
    total, at least 2."""
    warmup_type: Literal["linear", "quadratic", "cosine"] = "linear"
    """Shape of the warmup as a function of its completed fraction: linear, its square, or half a cosine."""
    total_steps: Positive | None = None
    """Length of the schedule in steps, after which the rate stays at its floor. Unset: training.steps."""
    t_max: Positive | None = None
    """Length of the schedule in units of t_max_unit, instead of total_steps."""
    t_max_unit: Literal["epoch", "step", "token"] = "epoch"
    """Unit of t_max. The rate changes with every step in any case."""
    decay_ratio: Fraction | None = None
    """Fraction of the total spent decaying, at its end; between warmup and decay the rate stays at its peak
    (warmup-stable-decay). Unset: decay starts right after warmup."""
    decay_type: Annotated[
        str, NameIn("torchtitan.lr_schedules:DECAYS", ("constant", "relora_cosine", "relora_cyclical"))
    ] = "linear"
    """Shape of the decay. docs/low_rank.md describes relora_cosine and relora_cyclical."""
    num_cycles: Positive = 1
    """Cycles of cosine_restarts."""
    min_lr_factor: Fraction = 0.1
    """Final learning rate as a fraction of optimizer.lr, reached at the last step."""
    convention: Literal["default", "torchtitan", "transformers"] = "default"
    """Steps at which the curve begins and ends. torchtitan (PyTorch's, until v0.2.2): the final rate would follow the
    last step. transformers: the same, and the first step of a warmup has rate 0."""
    cycle_length: Positive | None = None
    """Steps of a cycle of relora_cosine and relora_cyclical. Unset: adapter.relora.reset_every, or
    adapter.relora.every."""
    restart_warmup_steps: NonNegative | None = None
    """Steps over which relora_cosine returns to its curve after each restart."""
    adjust_step: NonNegative = 0
    """Number of steps to move all restarts of relora_cosine forward, including the first."""


@dataclass(config=STRICT, kw_only=True)
class Task:
    """The kind of task: language modeling, fine-tuning, classification, preferences."""

    kind: Annotated[str, NameIn("torchtitan.losses.tasks:TASKS")] = "pretrain"
    """Task to learn. pretrain: the next token. sft: the next token of whole records, see [data]. documents: the next
    token of documents read in order, one stream per row, training.seq_len tokens a batch. masked_lm: masked words.
    seq_cls: the class of a record. dpo, ipo, orpo: the preferred one of two answers, see [dpo]. reward: a number for an
    answer, larger for the preferred one of two."""
    label_field: str = "label"
    """Field of a record that holds its class (seq_cls); its text is in training.text_field."""
    second_text_field: str | None = None
    """Field of a second text, for seq_cls on pairs."""
    labels: list[str] = field(default_factory=list)
    """Names of the classes in their order, if data or exports use names. Unset: numbers from 0."""
    mask_share: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Fraction of words to predict (masked_lm)."""
    mask_token: str | None = None
    """Special token that replaces masked words. Unset: <mask> or [MASK]."""
    options: dict[str, int | float | bool | str | list[str]] = field(default_factory=dict)
    """Options of a task of an installed package, e.g. {margin = 0.5}; `torchtitan list tasks` lists them."""


@dataclass(config=STRICT, kw_only=True)
class Data:
    """Chat templates, loss masks and sample packing of records."""

    chat_template: Place | None = None
    """Template that formats conversations, for any task, instead of the tokenizer's: chatml, llama2, llama3, alpaca, a
    .jinja file, or Jinja source."""
    tokenization_version: Annotated[int, Field(ge=2, le=3)] | None = None
    """Rules by which text becomes token ids. 3: those of transformers. 2: those of earlier versions, which guess a
    begin token where the tokenizer has none (Qwen), and cut conversations at special tokens. Unset: those with which
    the run's checkpoints began, otherwise 3."""
    default_system: str | None = None
    """System message of conversations that have none."""
    drop_system: bool = False
    """Leave out the system message that a conversation begins with."""
    train_on: Literal["completion", "all", "last_turn"] = "completion"
    """Part of a record that is learned: the answers (completion), everything, or the last answer."""
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    """Turns with a trained end-of-turn token: each answer (turn), the last answer, all turns of any role, or none."""
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """Handling of records longer than training.seq_len. Conversations are never cut."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Tokens of the longest record that is not too long. Unset: training.seq_len + 1, as the last is only a label."""
    min_tokens: Annotated[int, Field(ge=2)] | None = None
    """Fewest tokens of a record, question and end included, that is read. Shorter ones are left out and counted."""
    deduplicate: bool = False
    """Read records with the same tokens and labels once: the first, also over several sources. The others are left out
    and counted. Validation data are compared among themselves."""
    max_empty_ratio: Fraction = 0.01
    """Maximum fraction of a source's records without any token to learn. Sources above it are refused; below it such
    records are dropped."""
    packing: Literal["best_fit", "off"] | None = None
    """Sample packing. best_fit: records share samples of training.seq_len tokens, without seeing each other. off: each
    record is a sample. Unset: off for classification (task.kind = "seq_cls"), where batch sizes then count records,
    otherwise best_fit. Pairs of answers are never packed."""
    padding: Literal["right", "left"] = "right"
    """Side of a sample that is padded. Padding is masked in attention and loss."""
    pad_to: (
        Annotated[
            str,
            Field(pattern=r"^(seq_len|batch|multiple:[1-9]\d*)$"),
            Form('"seq_len", "batch" or "multiple:N", as "multiple:64"'),
        ]
        | None
    ) = None
    """Length of samples that are not packed: training.seq_len, the longest of the batch, or that rounded up to a
    multiple of a number, as "multiple:64". Unset: rounded up to a multiple of 8 on a CPU and 64 on a GPU, but seq_len
    with pipelines, compiled blocks, experts or padding on the left; the log then shows what fraction of the tokens is
    padding."""
    group_by_length: bool = False
    """Group unpacked samples of similar length into steps, in a new random order each epoch."""
    shards: Annotated[str, Field(pattern=r"^[1-9]\d*/[1-9]\d*$"), Form('"N/M", as "2/4"')] = "1/1"
    """Part of each source's records to train on, as "2/4" for the second of four equal parts."""
    packing_window: Annotated[int, Field(ge=2)] = 100_000
    """Records, in shuffled order, that are packed together."""
    num_proc: Positive | None = None
    """Processes that tokenize before the run. Unset: training.dataloader.num_workers, at least 1."""
    cache_dir: Place | None = None
    """Folder for data tokenized before the run. Unset: data, inside job.dump_folder."""


@dataclass(config=STRICT, kw_only=True)
class Dpo:
    """Losses on pairs of answers: dpo, ipo, orpo."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength with which the model is kept close to its reference; for orpo the weight of the odds ratio."""
    reference: Place | None = None
    """Reference model, of the same family and sizes: a Hugging Face folder, a checkpoint or a run. Unset: the model
    that training starts from (dpo, ipo)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels (dpo)."""
