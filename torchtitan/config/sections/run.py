"""The run itself: its folder, its ranks, its seed.

What a run does about a bad step, how often it looks whether its ranks still agree, when it has learned enough.

What a run shows and records of itself.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Cadence, Form, NameIn, NonNegative, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Job:
    """The run: its folder, name, time limit and restarts."""

    config_file: list[str] = field(default_factory=list)
    """TOML files, merged in order (later ones win). Repeat the option for several."""
    dump_folder: Place = "./outputs"
    """Everything that the run writes goes here. Started again with the same folder, a job with checkpoints resumes."""
    description: str = "default job"
    """Free text, shown at the start and kept in the run's config.toml."""
    tags: list[str] = field(default_factory=list)
    """Words to find the run by, kept with it and told to trackers."""
    time_limit: (
        Annotated[
            str,
            Field(pattern=r"^(\d+-)?\d+:[0-5]\d:[0-5]\d$"),
            Form('"[days-]hours:minutes:seconds", as "12:00:00" or "2-12:00:00"'),
        ]
        | None
    ) = None
    """Longest run, as [days-]hours:minutes:seconds; it stops ahead of it, saved, as on a signal. Unset: none but the
    end of a SLURM allocation."""
    clean_start: Literal["never", "unsaved", "always"] = "never"
    """Empty dump_folder before the run: if no checkpoint or export is in it, or always. Only what a run has made goes.
    With "always" whoever gives the command again (by hand, systemd, Kubernetes) begins anew; only restarts by our
    launcher and by SLURM go on."""
    print_config: bool = False
    """Print the resolved job as TOML before anything else."""
    max_restarts: NonNegative = 3
    """With checkpoints, all ranks are started again after a crash or a hang, this many times without a new checkpoint
    in between (then exit code 5)."""
    rejoin_seconds: NonNegative = 900
    """Longest wait for the network between machines to come back, in a run that may be started again. Meanwhile no rank
    runs; then all start again from the newest checkpoint. 0: the run ends at once."""
    preflight: bool | None = None
    """Before training, look whether every rank answers, has the same code, torch, job, tokenizer, data and folder, and
    how fast each axis of the mesh is; a difference is refused in one message. Unset: with several machines."""


@dataclass(config=STRICT, kw_only=True)
class Comm:
    """Timeouts of ranks that make no progress, and the trace of collectives."""

    init_timeout_seconds: Positive = 300
    """Longest time in which no rank gets on, in the start, the first step and the first validation."""
    train_timeout_seconds: Positive = 100
    """Longest time in which no rank gets on, afterwards: then the run has hung. Collectives wait as long, too."""
    trace_buf_size: NonNegative = 20000
    """Entries of torch's flight recorder; 0 turns it off."""


@dataclass(config=STRICT, kw_only=True)
class Memory:
    """The limit of GPU memory per rank."""

    limit: Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=256)] | str | None = None
    """Most that a rank takes of its GPU's memory: a share of it (0.9), whole MiB (20000), or a text with MiB, GiB, MB
    or GB ("20GiB"). Unset: all. On a CPU nothing is limited; `torchtitan check` says what the state needs of it."""


@dataclass(config=STRICT, kw_only=True)
class Debug:
    """Seed and determinism."""

    seed: NonNegative = 0
    """Of initial weights, data order and random numbers."""
    deterministic: bool = False
    """Only deterministic kernels; a run then repeats bit for bit on the same machine."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where a kernel has no deterministic form."""


@dataclass(config=STRICT, kw_only=True)
class Guard:
    """Non-finite and outlier steps, and the comparison of replicas."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """After a loss or gradient that is NaN or infinite while the weights are finite: stop with the last good step
    saved; leave the step's update out; or go back to the newest checkpoint and do its steps again, once, as an error of
    the machine does not come again. With anything but stop the host waits for the device in every step. If the weights
    are not finite, the run goes back once for each step, and ends if it comes again."""
    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    """The same after a loss or gradient norm far above those before it."""
    spike_window: Annotated[int, Field(ge=4)] = 128
    """Steps before a step that its loss and norm are compared with; from half as many on."""
    spike_sigmas: Annotated[float, Field(gt=0)] = 6.0
    """So many standard deviations above their mean is a spike (at least so many times 1 % of the mean)."""
    loss_rise: Annotated[float, Field(gt=0)] | None = None
    """Stop, saved, once the mean loss of a window lies this far above the lowest such mean. Unset: never."""
    loss_threshold: float | None = None
    """A loss that stays above this for loss_patience steps falls under loss_policy. Every step counts once, logged or
    not. Unset: never."""
    loss_patience: Positive = 3
    """So many steps in a row above loss_threshold."""
    loss_policy: Literal["stop", "skip", "rollback"] = "stop"
    """As non_finite, for the last of these steps, and for those after it until the loss is below again."""
    patience: Positive = 5
    """So many bad steps in a row, or ways back to one checkpoint, end the run."""
    replica_check_interval: NonNegative = 100
    """Every so many steps, and before every save, compare what several ranks must hold alike; 0: never."""
    shard_checksums: bool = False
    """Checksums of all weights and optimizer moments after each step, compared before the next update and before every
    save: a bit that flips in memory between steps is reported with its rank and tensor, and the run goes back to the
    newest checkpoint, once for each step. Costs two passes over them in every step."""


@dataclass(config=STRICT, kw_only=True)
class EarlyStop:
    """The end of a run that no longer improves."""

    patience: Positive | None = None
    """End the run after so many validations in a row none of which was better than the best before it. It ends as one
    that is done: the last step is saved and exported. Unset: never."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Better is what is more than this better than the best so far."""
    metric: str | None = None
    """What is looked at, under its name in metrics.jsonl. Unset: checkpoint.best_metric, else validation_loss."""


@dataclass(config=STRICT, kw_only=True)
class Metrics:
    """Log lines, metrics files, plots and trackers."""

    log_freq: Cadence = 10
    """Log every this many steps, each such share of the run (0.01), "epoch" or "N/epoch"; always the first and the last
    step."""
    enable_tensorboard: bool = False
    """Write TensorBoard events, with the tags torchtitan's users know, the job as text and its options as hparams."""
    save_tb_folder: str = "tb"
    """Folder of the events, inside job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (needs `pip install 'torchtitan-toml[wandb]'`)."""
    trackers: list[Annotated[str, NameIn("torchtitan.metrics.trackers:TRACKERS")]] = field(default_factory=list)
    """Where metrics go beside metrics.jsonl: "tensorboard", "wandb", "mlflow", "aim", or another of `torchtitan list
    trackers`. The first two are also turned on by options of their own."""
    histogram_freq: NonNegative = 0
    """Histograms of all weights and gradients every this many steps, in TensorBoard; 0: none."""
    log_timestamps: bool = False
    """Begin each console line with date and time."""
    log_files: bool = False
    """Also write every rank's lines, with their times, to logs/ in job.dump_folder."""
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
class Profiling:
    """Profiler traces and memory snapshots."""

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
