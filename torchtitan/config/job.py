"""The job: one dataclass per TOML section. Pure data, so this file imports neither torch nor the rest of the project.

The text under a field is its help (`torchtitan check --help-config` prints it). Types and ranges that one field can
check by itself are checked here; what takes several fields, files or the model's sizes is checked in `rules/`.
"""

from dataclasses import field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
DegreeOrRest = Annotated[int, Field(ge=-1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["float32", "bfloat16"]


@dataclass(config=STRICT, kw_only=True)
class Job:
    config_file: list[str] = field(default_factory=list)
    """TOML files, merged in order (later ones win). Repeat the option for several."""
    dump_folder: str = "./outputs"
    """Everything that the run writes goes here. Started again with the same folder, a job with checkpoints resumes."""
    description: str = "default job"
    """Free text, shown at the start and kept in the run's config.toml."""
    time_limit: Annotated[str, Field(pattern=r"^(\d+-)?\d+:[0-5]\d:[0-5]\d$")] | None = None
    """Longest run, as [days-]hours:minutes:seconds; it stops ahead of it, saved, as on a signal. Unset: none but the
    end of a SLURM allocation."""
    print_config: bool = False
    """Print the resolved job as TOML before anything else."""
    max_restarts: NonNegative = 3
    """With checkpoints, all ranks are started again after a crash or a hang, this many times without a new checkpoint
    in between (then exit code 5)."""


@dataclass(config=STRICT, kw_only=True)
class Profiling:
    enable_profiling: bool = False
    """Record torch profiler traces (Chrome format)."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: Positive = 10
    """A trace window every this many steps."""
    profiler_active: Positive = 1
    """Steps recorded in a window."""
    profiler_warmup: NonNegative = 3
    """Steps of a window that warm the profiler up and are thrown away."""
    enable_memory_snapshot: bool = False
    """Write the CUDA allocator's history at the same steps (GPU only)."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, inside job.dump_folder."""


@dataclass(config=STRICT, kw_only=True)
class Metrics:
    log_freq: Positive = 10
    """Log every this many steps (the first and the last step are always logged)."""
    enable_tensorboard: bool = False
    """Write TensorBoard events, with the tags torchtitan's users know, the job as text and its options as hparams."""
    save_tb_folder: str = "tb"
    """Folder of the events, inside job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (needs `pip install 'torchtitan-toml[wandb]'`)."""
    disable_color_printing: bool = False
    """Plain console lines. Colour is off anyway when the output is not a terminal."""
    save_for_all_ranks: bool = False
    """TensorBoard events of every rank, not of rank 0 alone."""
    log_lr: bool = True
    """Show the learning rate in each console line."""
    log_lr_schedule: bool = True
    """State the learning-rate schedule in one line at the start."""
    plot: bool = True
    """Draw loss and learning rate into training.png at the end of the run."""


@dataclass(config=STRICT, kw_only=True)
class Model:
    name: str = "llama3"
    """Model family: a key of torchtitan.models.SIZES."""
    flavor: str = "debugmodel"
    """Size within the family; "from_hf" takes it, and all constants, from the config.json in hf_folder."""
    hf_folder: str | None = None
    """Folder in the form of Hugging Face whose config.json has the sizes of flavor "from_hf"."""
    tokenizer_path: str = "debug"
    """Tokenizer: a tiktoken .model (Llama 3), a sentencepiece .model (Llama 2), a Hugging Face tokenizer.json (the
    file or its folder), or a word: `bytes`, or `debug`, 2,048 tokens that come with the package."""
    overrides: dict[str, int | float | bool | str | dict[str, int | float]] = field(default_factory=dict)
    """Sizes to change in the flavor, by the field names of the family's arguments, e.g. {n_layers = 4} or
    {rope_scaling = {factor = 4.0}}; rope_scaling = false leaves the scaling out."""
    attention_backend: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention kernel. auto: flex attention for document masks on a GPU, scaled_dot_product_attention else."""


@dataclass(config=STRICT, kw_only=True)
class Optimizer:
    name: str = "AdamW"
    """A key of torchtitan.optimizers.OPTIMIZERS."""
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment (Adam, AdamW)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment (Adam, AdamW)."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator (Adam, AdamW)."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """What else the optimizer reads, e.g. {momentum = 0.9} for SGD; see torchtitan.optimizers.OPTIMIZERS."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled in AdamW, added to the gradient in Adam and SGD (as in torch)."""
    decay_norms_and_biases: bool = True
    """Whether weight decay also acts on one-dimensional parameters (norm weights, biases)."""
    implementation: Literal["for-loop", "foreach", "fused"] | None = None
    """What runs the update. Unset: the fastest that the optimizer has (fused in torch's)."""
    early_step_in_backward: bool = False
    """Step each parameter as soon as its gradient is ready, then free the gradient. Saves memory; excludes clipping
    (set training.max_norm = 0) and gradient accumulation."""


@dataclass(config=STRICT, kw_only=True)
class Relora:
    every: Annotated[int, Field(ge=2)] | None = None
    """Add what A and B have learned to the frozen matrices and begin them anew every this many steps (ReLoRA). Unset:
    never."""
    reset_every: Annotated[int, Field(ge=2)] | None = None
    """Steps between resets of A's and B's optimizer state. Unset: every."""
    reset: Literal["zero", "magnitude", "random", "none"] = "zero"
    """What of that state goes: all, the smaller ones, some at random, nothing."""
    prune_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share that goes with magnitude and random."""
    mask: Literal["joint", "independent"] = "joint"
    """Whether both moments keep the same entries. independent is for comparison: it diverges."""
    reset_step: bool = False
    """Also count the optimizer's steps from 0 again, for A and B."""

    @property
    def reset_period(self) -> int | None:
        return self.reset_every or self.every


@dataclass(config=STRICT, kw_only=True)
class Adapter:
    kind: str = "none"
    """What is trained instead of the model's own parameters: a key of torchtitan.adapters.ADAPTERS. none: the model
    itself."""
    rank: Positive = 128
    """Of the low-rank matrices A and B."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What A and B add is multiplied with alpha / rank."""
    rslora: bool = False
    """Multiply with alpha / sqrt(rank) instead, which keeps higher ranks learning."""
    target: list[str] = field(default_factory=lambda: ["*attn*", "*attention*", "*mlp*", "*feed_forward*"])
    """Which linears (and stacks of experts) get low-rank matrices, by their names; * stands for anything in one. The
    word "all-linear" stands for all of the layers' own."""
    lr_ratio_b: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of B over that of A (LoRA+, arXiv:2402.12354, which finds about 16 good)."""
    initial_path: str | None = None
    """A folder in peft's layout that the adapter begins from, beside checkpoint.initial_load_path for the model."""
    save: Literal["whole", "alone"] = "whole"
    """What checkpoints hold: the whole model, or the adapter, what else is trained and the optimizer's state, with a
    reference to the model in checkpoint.initial_load_path and its digest."""
    last_save_in_peft: bool = False
    """After the last step, also write the adapter in peft's layout, into adapter/."""
    layers: list[NonNegative] = field(default_factory=list)
    """Only in the layers of these numbers. Empty: in all."""
    train_dense_rest: bool = False
    """Train everything that is not a target too (embeddings, head, norms, biases), as when a model is trained from
    scratch."""
    train_fully: list[str] = field(default_factory=list)
    """Parameters of the model that are trained beside the adapter's, by their names; * stands for anything in one, e.g.
    ["*norm*", "output.weight"]."""
    relora: Relora = field(default_factory=Relora)


@dataclass(config=STRICT, kw_only=True)
class LRScheduler:
    warmup_steps: NonNegative | None = None
    """Steps of linear warmup. Unset: 10 % of the total, at least 2."""
    total_steps: Positive | None = None
    """Length of the schedule. Unset: training.steps. The rate stays at its floor after it."""
    decay_ratio: Fraction | None = None
    """Share of the total spent decaying, at its end; what lies between warmup and decay stays at the peak
    (warmup-stable-decay). Unset: decay starts right after warmup."""
    decay_type: str = "linear"
    """Shape of the decay: constant, relora_cosine, relora_cyclical (docs/low_rank.md), or a key of
    torchtitan.lr_shapes.DECAYS (`torchtitan list schedules`)."""
    num_cycles: Positive = 1
    """Cycles of cosine_restarts."""
    min_lr_factor: Fraction = 0.1
    """The floor, as a fraction of optimizer.lr, reached exactly at the last step."""
    cycle_length: Positive | None = None
    """Steps of a cycle of relora_cosine and relora_cyclical. Unset: adapter.relora.reset_every or every."""
    restart_warmup_steps: NonNegative | None = None
    """Steps in which relora_cosine comes back to its curve after each cut."""
    adjust_step: NonNegative = 0
    """Moves the cuts of relora_cosine that many steps ahead."""


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
    dataset: str
    """A key of torchtitan.datasets.DATASETS."""
    dataset_path: str | None = None
    """As training.dataset_path."""
    text_field: str | None = None
    """As training.text_field, which it is where this is unset."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How many samples are from this source, in proportion to the other sources' weights."""


@dataclass(config=STRICT, kw_only=True)
class Training:
    dataset: str = "python_stdlib"
    """A key of torchtitan.datasets.DATASETS."""
    dataset_path: str | None = None
    """File, folder or glob for dataset = "text" and "tokens"; a local copy or another name for a Hugging Face set."""
    sources: list[DataSource] = field(default_factory=list)
    """Several datasets, mixed by weight, instead of dataset and dataset_path, which are short for a list of one."""
    text_field: str = "text"
    """The field that holds the text, token ids or segments in .json, .jsonl, .csv, .parquet, .arrow and Hugging Face
    datasets."""
    document_mask: bool = False
    """Keep attention inside documents that are packed into one sample."""
    shuffle: bool = True
    """Shuffle documents, by debug.seed and the epoch."""
    on_bad_data: Literal["stop", "skip"] = "stop"
    """What to do with a record that cannot be read: stop with its place named, or skip and count it."""
    local_batch_size: Positive = 8
    """Samples per data-parallel rank and forward pass."""
    global_batch_size: Annotated[int, Field(ge=-1)] = -1
    """Samples per optimizer step over all ranks; gradients are accumulated to reach it. -1: local_batch_size times
    the data-parallel degree."""
    seq_len: Positive = 2048
    """Tokens per sample."""
    max_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip the gradient's global 2-norm to this; 0 turns clipping off (the norm is still logged)."""
    steps: Positive = 10000
    """Optimizer steps."""
    epochs: Positive | None = None
    """Passes over all of the data, after which the run ends, instead of after training.steps. Text is tokenized before
    the run, into job.dump_folder/data. Unset: the data go round until training.steps."""
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
class Parallelism:
    data_parallel_replicate_degree: Positive = 1
    """Copies of the (sharded) model. Alone it is DDP; with a shard degree it is HSDP."""
    data_parallel_shard_degree: DegreeOrRest = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP2). -1: all that are left."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free the gathered parameters of a block after its forward. default: always, unless pipeline parallel."""
    fsdp_prefetch: NonNegative = 0
    """Blocks whose parameters are gathered ahead in forward and backward. 0 leaves it to FSDP2 (implicit prefetch)."""
    tensor_parallel_degree: Positive = 1
    """Ranks over which each weight matrix is split."""
    disable_sequence_parallel: bool = False
    """Keep whole sequences between the blocks of tensor-parallel ranks, instead of a share each: more memory, as much
    traffic; sequences of any length."""
    disable_loss_parallel: bool = False
    """Gather the logits instead of keeping the vocabulary split over tensor-parallel ranks in the loss."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel collectives with matrix products."""
    pipeline_parallel_degree: Positive = 1
    """Ranks over which the layers are cut."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each pipeline stage. Unset: cut by cost."""
    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Layers fewer on the first stage, which has the embedding."""
    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Layers fewer on the last stage, which has the output head."""
    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers of a stage; decides the number of stages per rank."""
    pipeline_parallel_schedule: str = "1F1B"
    """Schedule of the pipeline, by torch's name."""
    pipeline_parallel_schedule_csv: str | None = None
    """A schedule of your own, from a CSV file."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Samples in a pipeline microbatch."""
    pipeline_parallel_expert_parallel_overlap: bool = False
    """Overlap expert parallelism's all-to-alls of one microbatch with the computation of another: made for DualPipeV,
    whose pairs it interleaves; in other schedules gradients of weights fill the gaps."""
    context_parallel_degree: Positive = 1
    """Ranks over which the sequence is split."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """How causal attention's work is levelled over context-parallel ranks."""
    context_parallel_rotate_method: Literal["allgather", "alltoall", "ring", "ulysses"] = "allgather"
    """How keys and values reach the other ranks."""
    expert_parallel_degree: Positive = 1
    """Ranks over which the experts are split."""


@dataclass(config=STRICT, kw_only=True)
class Checkpoint:
    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in the folder."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: Positive = 500
    """Distance between saves, in interval_type."""
    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval. The last step is always saved."""
    initial_load_path: str | None = None
    """Weights to start from when the folder holds no checkpoint of its own: a checkpoint, a folder of them, an export;
    a checkpoint of torchtitan; a folder of Hugging Face or one file of safetensors. Which it is, is found out."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path; false also takes optimizer, schedule and data position."""
    initial_load_in_hf: bool = False
    """Insist that initial_load_path is Hugging Face's."""
    last_save_model_only: bool = False
    """Also write the weights alone after the last step (beside the full checkpoint, never instead of it)."""
    last_save_in_hf: bool = False
    """Write those weights as Hugging Face safetensors."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights written by last_save_model_only."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write in the background; the loop waits only for the copy out of the live tensors."""
    keep_latest_k: NonNegative = 10
    """Keep this many checkpoints, at least 2; 0 keeps all."""
    load_step: Annotated[int, Field(ge=-1)] = -1
    """Resume from this step instead of the newest one (-1)."""
    exclude_from_loading: list[Literal["optimizer", "lr_scheduler", "dataloader", "rng"]] = field(default_factory=list)
    """Parts that keep their fresh state when a full checkpoint is loaded."""
    allow_config_change: list[str] = field(default_factory=list)
    """Options that may differ from the checkpoint's job although the curve is then another, e.g. ["optimizer.lr"].
    Without this a resume refuses them by name."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to see that saving works."""
    load_only: bool = False
    """Load, but never save."""
    verify: bool = True
    """Read every save back from the disk before it is published, and look at the content of two checkpoints that stay
    before older ones are deleted."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """After a save that failed, also when tried again: go on and say so, or stop. The last save stops in any case."""


@dataclass(config=STRICT, kw_only=True)
class ActivationCheckpoint:
    mode: Literal["none", "full", "full_keep_comm", "selective", "memory_budget"] = "selective"
    """What is recomputed in backward instead of kept: nothing, every block, every block but what all-to-alls brought
    (needs pipeline_parallel_expert_parallel_overlap), some (selective_ac_option), or what fits memory_budget (needs
    compile)."""
    selective_ac_option: Annotated[str, Field(pattern=r"^(op|[1-9]\d*)$")] = "2"
    """"op": keep matrix products and attention, recompute the rest; a number n: recompute every n-th block."""
    memory_budget: Fraction = 0.5
    """0 recomputes everything, 1 nothing; between, the compiler keeps what is dearest to recompute."""
    preserve_rng_state: bool = True
    """Restore the random state for recompute, so that dropout repeats itself."""
    early_stop: bool = False
    """Stop recomputing once everything that backward needs is there."""


@dataclass(config=STRICT, kw_only=True)
class Compile:
    enable: bool = False
    """torch.compile."""
    scope: Literal["block", "model"] = "block"
    """Each transformer block by itself (composes with FSDP, compiles once for all blocks), or the whole model with
    its loss (fastest; one rank or replicas)."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled."""
    backend: str = "inductor"
    """A backend of torch.compile."""


@dataclass(config=STRICT, kw_only=True)
class Comm:
    init_timeout_seconds: Positive = 300
    """Longest time in which no rank gets on, in the start, the first step and the first validation."""
    train_timeout_seconds: Positive = 100
    """Longest time in which no rank gets on, afterwards: then the run has hung. Collectives wait as long, too."""
    trace_buf_size: NonNegative = 20000
    """Entries of torch's flight recorder; 0 turns it off."""


@dataclass(config=STRICT, kw_only=True)
class Validation:
    enable: bool = False
    """Measure the loss on held-out data."""
    dataset: str = "python_stdlib_validation"
    """A key of torchtitan.datasets.DATASETS."""
    dataset_path: str | None = None
    """As training.dataset_path."""
    sources: list[DataSource] = field(default_factory=list)
    """As training.sources."""
    local_batch_size: Positive = 8
    """Samples per data-parallel rank and forward pass."""
    seq_len: Positive | None = None
    """Tokens per sample. Unset: training.seq_len."""
    freq: Positive = 10
    """Every this many steps, and after the last."""
    steps: Positive = 10
    """Batches per validation; always the same ones."""


@dataclass(config=STRICT, kw_only=True)
class Debug:
    seed: NonNegative = 0
    """Of initial weights, data order and random numbers."""
    deterministic: bool = False
    """Only deterministic kernels; a run then repeats bit for bit on the same machine."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where a kernel has no deterministic form."""


@dataclass(config=STRICT, kw_only=True)
class JobConfig:
    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    comm: Comm = field(default_factory=Comm)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)


def sources_of(config: JobConfig, section: Literal["training", "validation"]) -> dict[str, DataSource]:
    """What a section reads, by the place that says it: its `sources`, or the one of dataset and dataset_path."""
    part = config.training if section == "training" else config.validation
    given = {f"{section}.sources[{number}]": source for number, source in enumerate(part.sources)}
    given = given or {section: DataSource(dataset=part.dataset, dataset_path=part.dataset_path)}
    field_name = config.training.text_field
    return {place: replace(source, text_field=source.text_field or field_name) for place, source in given.items()}


def describe_sources(config: JobConfig, section: Literal["training", "validation"]) -> str:
    """In words: the datasets with their paths and, of several, how large a share of the samples each has."""
    sources = list(sources_of(config, section).values())
    whole = sum(source.weight for source in sources)
    names = [s.dataset + (f" ({s.dataset_path})" if s.dataset_path else "") for s in sources]
    if len(sources) == 1:
        return names[0]
    return " + ".join(f"{s.weight / whole:.3g} {name}" for s, name in zip(sources, names, strict=True))


def as_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionaries, in the order of the fields; unset (None) fields are left out, as TOML has no null."""
    return {f.name: _plain(value) for f in fields(config) if (value := getattr(config, f.name)) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return as_dict(value) if is_dataclass(value) else value
