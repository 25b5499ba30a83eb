"""What a run shows and records of itself."""

from dataclasses import field

from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT, Cadence, NonNegative, Positive


@dataclass(config=STRICT, kw_only=True)
class Metrics:
    log_freq: Cadence = 10
    """Log every this many steps, each such share of the run (0.01), "epoch" or "N/epoch"; always the first and the last
    step."""
    enable_tensorboard: bool = False
    """Write TensorBoard events, with the tags torchtitan's users know, the job as text and its options as hparams."""
    save_tb_folder: str = "tb"
    """Folder of the events, inside job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases (needs `pip install 'torchtitan-toml[wandb]'`)."""
    trackers: list[str] = field(default_factory=list)
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
