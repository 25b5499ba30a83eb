"""The run as a process: folder, ranks, guards, early stopping, metrics, profiling and checkpoints."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Cadence, Form, NameIn, NonNegative, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Job:
    """The run: its folder, name, time limit and restarts."""

    config_file: list[str] = field(default_factory=list)
    """TOML files, merged in order (later ones take precedence). Repeat the option for several."""
    dump_folder: Place = "./outputs"
    """Folder for everything that the run writes. A job with checkpoints that is started again with the same folder
    resumes."""
    description: str = "default job"
    """Free text, shown at the start and kept in the run's config.toml."""
    tags: list[str] = field(default_factory=list)
    """Words to find the run by, stored with it and passed to trackers."""
    time_limit: (
        Annotated[
            str,
            Field(pattern=r"^(\d+-)?\d+:[0-5]\d:[0-5]\d$"),
            Form('"[days-]hours:minutes:seconds", as "12:00:00" or "2-12:00:00"'),
        ]
        | None
    ) = None
    """Maximum duration of the run, as [days-]hours:minutes:seconds; the run saves and stops shortly before, as on a
    signal. Unset: only the end of a SLURM allocation."""
    clean_start: Literal["never", "unsaved", "always"] = "never"
    """Empty dump_folder before the run: never, only if it has no checkpoint or export (unsaved), or always. Only files
    that a run has made are deleted. With "always" a repeated command (by hand, systemd, Kubernetes) starts
    from scratch; only restarts by our launcher and by SLURM resume."""
    print_config: bool = False
    """Print the resolved job as TOML before anything else."""
    max_restarts: NonNegative = 3
    """Restarts of all ranks after a crash or a hang without a new checkpoint in between, for jobs with checkpoints;
    then the run ends with exit code 5."""
    rejoin_seconds: NonNegative = 900
    """Maximum wait for the network between machines to come back, if the run may restart. No rank runs meanwhile;
    afterwards all restart from the newest checkpoint. 0: the run ends at once."""
    preflight: bool | None = None
    """Check before training that all ranks answer and have the same code, torch, job, tokenizer, data and folder, and
    measure each axis of the mesh; all differences are reported in one error. Unset: with several machines."""


@dataclass(config=STRICT, kw_only=True)
class Comm:
    """Timeouts of ranks that make no progress, and the trace of collectives."""

    init_timeout_seconds: Positive = 300
    """Seconds without progress of any rank after which a run counts as hung, until the first step and the first
    validation are done."""
    train_timeout_seconds: Positive = 100
    """Seconds without progress of any rank after which a run counts as hung, later on; under torchrun also the timeout
    of collectives."""
    trace_buf_size: NonNegative = 20000
    """Entries of torch's flight recorder; 0 turns it off."""


@dataclass(config=STRICT, kw_only=True)
class Memory:
    """The limit of GPU memory per rank."""

    limit: Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=256)] | str | None = None
    """Maximum GPU memory of a rank: a fraction (0.9), whole MiB (20000), or a text with MiB, GiB, MB or GB ("20GiB").
    Unset: all. Not enforced on a CPU, where `torchtitan check` only compares it with the size of the state."""


@dataclass(config=STRICT, kw_only=True)
class Debug:
    """Seed and determinism."""

    seed: NonNegative = 0
    """Seed of initial weights, data order and random numbers."""
    deterministic: bool = False
    """Use only deterministic kernels; a run then repeats bit for bit on the same machine."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where a kernel has no deterministic form."""


@dataclass(config=STRICT, kw_only=True)
class Guard:
    """Non-finite and outlier steps, and the comparison of replicas."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a NaN or infinite loss or gradient while the weights are finite. stop: stop, with the last good step
    saved. skip: skip the update. rollback: go back to the newest checkpoint and repeat its steps once, as a hardware
    error does not recur. With skip and rollback the host waits for the device in every step. If the weights are not
    finite, the run goes back once per step, and ends if it happens again."""
    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    """Reaction to an outlier: a loss or gradient norm far above previous steps. Choices as in non_finite."""
    spike_window: Annotated[int, Field(ge=4)] = 128
    """Previous steps with which a step's loss and norm are compared; comparison begins after half as many."""
    spike_sigmas: Annotated[float, Field(gt=0)] = 6.0
    """Standard deviations above the mean from which a value is a spike. A standard deviation counts as at least 1 % of
    the mean."""
    loss_rise: Annotated[float, Field(gt=0)] | None = None
    """Rise of the mean loss of a window above the lowest such mean at which the run saves and stops. Unset: never."""
    loss_threshold: float | None = None
    """Loss that must not be exceeded for loss_patience steps in a row; loss_policy is the reaction. Every step counts,
    logged or not. Unset: never."""
    loss_patience: Positive = 3
    """Consecutive steps above loss_threshold before loss_policy applies."""
    loss_policy: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction as in non_finite, for the last of these steps and all following ones until the loss falls below the
    threshold."""
    patience: Positive = 5
    """Consecutive bad steps, or rollbacks to one checkpoint, that end the run."""
    replica_check_interval: NonNegative = 100
    """Steps between comparisons of the state that must be equal on several ranks, also compared before every save; 0:
    never."""
    replay_every: NonNegative = 0
    """Steps between comparisons of a forward on two data-parallel ranks: each repeats that of the first microbatch of
    another rank, which shows a device that computes wrongly. 0: never. Costs two forwards of a microbatch."""
    shard_checksums: bool = False
    """Compute checksums of all weights and optimizer moments after each step, and compare them before the next update
    and every save. A bit flipped in memory is reported with its rank and tensor, and the run goes back to the newest
    checkpoint, once per step. Costs two passes over them in every step."""


@dataclass(config=STRICT, kw_only=True)
class EarlyStop:
    """The end of a run that no longer improves."""

    patience: Positive | None = None
    """Consecutive validations without improvement after which the run ends, with its last step saved and exported as
    usual. Unset: never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Minimum change of the metric that counts as an improvement."""
    metric: str | None = None
    """Metric to watch, named as in metrics.jsonl. Unset: checkpoint.best_metric, else validation_loss."""


@dataclass(config=STRICT, kw_only=True)
class Callbacks:
    """Code of installed packages that runs around the steps (docs/callbacks.md)."""

    use: list[Annotated[str, NameIn("torchtitan.core.callbacks:CALLBACKS")]] = field(default_factory=list)
    """Callbacks in the order of their calls: "package.module:Name", or a name of `torchtitan list callbacks`. The check
    of a job imports them."""
    options: dict[str, dict[str, int | float | bool | str | list[int | float | str]]] = field(default_factory=dict)
    """A table of options for each callback, by its name in `use`, e.g. {"my_package:Ema" = {decay = 0.999}}."""


@dataclass(config=STRICT, kw_only=True)
class Metrics:
    """Log lines, metrics files, plots and trackers."""

    log_freq: Cadence = 10
    """Distance between log lines: steps, a fraction of the run (0.01), "epoch" or "N/epoch"; the first and the last
    step are always logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard events, with the tags of PyTorch's torchtitan, the job as text and its options as hparams."""
    save_tb_folder: str = "tb"
    """Folder of the TensorBoard events, inside job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (needs `pip install 'torchtitan-toml[wandb]'`)."""
    trackers: list[Annotated[str, NameIn("torchtitan.metrics.trackers:TRACKERS")]] = field(default_factory=list)
    """Trackers to log to in addition to metrics.jsonl: "tensorboard", "wandb", "mlflow", "aim", or another of
    `torchtitan list trackers`. The first two also have separate options."""
    histogram_freq: NonNegative = 0
    """Steps between histograms of all weights and gradients in TensorBoard; 0: none."""
    log_timestamps: bool = False
    """Begin each console line with date and time."""
    log_files: bool = False
    """Also write every rank's lines, with their times, to logs/ in job.dump_folder."""
    disable_color_printing: bool = False
    """Print console lines without colour, as always when the output is not a terminal."""
    save_for_all_ranks: bool = False
    """Write TensorBoard events of every rank instead of rank 0 only."""
    log_lr: bool = True
    """Show the learning rate in each console line."""
    log_lr_schedule: bool = True
    """State the learning-rate schedule in one line at the start."""
    plot: bool = True
    """Draw loss and learning rate into training.png at the end of the run."""


@dataclass(config=STRICT, kw_only=True)
class Profiling:
    """Profiler traces and memory snapshots."""

    enable_profiling: bool = False
    """Record torch profiler traces (Chrome format)."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, inside job.dump_folder."""
    profile_freq: Positive = 10
    """Steps between recorded windows."""
    profiler_active: Positive = 1
    """Steps recorded in a window."""
    profiler_warmup: NonNegative = 3
    """Steps at the start of a window that warm up the profiler and are discarded."""
    enable_memory_snapshot: bool = False
    """Write the CUDA allocator's history at the same steps (GPU only)."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, inside job.dump_folder."""


@dataclass(config=STRICT, kw_only=True)
class Checkpoint:
    """Saving, resuming, initial weights and exports."""

    enable: bool = False
    """Save checkpoints, and resume from the newest complete one in the folder. If off, a run can still start from
    initial_load_path."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, inside job.dump_folder."""
    interval: Cadence = 500
    """Distance between saves: steps, a fraction of the run such as 0.1, "epoch" or "N/epoch"; or seconds."""
    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval. The last step is always saved."""
    initial_load_path: Place | None = None
    """Weights to start from if the folder holds no checkpoint: a checkpoint or a folder of them, an export, a
    checkpoint of PyTorch's torchtitan, a Hugging Face folder, or a safetensors file. The format is detected."""
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path; false also loads optimizer, schedule and data position."""
    initial_load_counters: bool = False
    """Also continue the step and token counts and the data position of initial_load_path, with a new optimizer and
    schedule. training.steps then includes the steps of the earlier run."""
    initial_load_in_hf: bool = False
    """Require initial_load_path to be in Hugging Face format."""
    last_save_model_only: bool = False
    """Also write the weights alone after the last step, in addition to the full checkpoint."""
    last_save_in_hf: bool = False
    """Write those weights as Hugging Face safetensors."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights written by last_save_model_only."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write in the background; training only waits for the copy of the live tensors."""
    keep_latest_k: NonNegative = 10
    """Number of newest checkpoints to keep, at least 2; 0 keeps all. The one that the run has resumed from is kept in
    addition, and the best one."""
    best_metric: str | None = None
    """Also keep the best checkpoint by this validation metric, named as in metrics.jsonl, e.g. "validation_loss".
    Requires interval to be a multiple of validation.freq."""
    best_mode: Literal["min", "max"] | None = None
    """Direction of best_metric: the lowest value is the best, or the highest. Unset: the lowest loss, the highest of
    any other metric."""
    export_best: bool = False
    """Export the weights of the best checkpoint at the end instead of the last step's."""
    load_step: Annotated[int, Field(ge=-1)] = -1
    """Resume from this step instead of the newest one (-1)."""
    exclude_from_loading: list[Literal["optimizer", "lr_scheduler", "dataloader", "rng"]] = field(default_factory=list)
    """Parts that start from scratch when a full checkpoint is loaded."""
    allow_config_change: list[str] = field(default_factory=list)
    """Options that may differ from the checkpoint's job although they change the loss curve, e.g. ["optimizer.lr"]. A
    resume refuses all others by name."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step, to test that saving works."""
    load_only: bool = False
    """Load, but never save."""
    verify: bool = True
    """Read every checkpoint back from disk before it is published, and verify two of the remaining ones before older
    ones are deleted."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """Reaction to a save that fails twice: log it and continue, or stop. A failure of the last save always stops the
    run."""
