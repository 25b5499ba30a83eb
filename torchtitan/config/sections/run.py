"""The run itself: its folder, its ranks, its seed."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT, Form, NonNegative, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Job:
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
    init_timeout_seconds: Positive = 300
    """Longest time in which no rank gets on, in the start, the first step and the first validation."""
    train_timeout_seconds: Positive = 100
    """Longest time in which no rank gets on, afterwards: then the run has hung. Collectives wait as long, too."""
    trace_buf_size: NonNegative = 20000
    """Entries of torch's flight recorder; 0 turns it off."""


@dataclass(config=STRICT, kw_only=True)
class Memory:
    limit: Annotated[float, Field(gt=0, le=1)] | Annotated[int, Field(ge=256)] | str | None = None
    """Most that a rank takes of its GPU's memory: a share of it (0.9), whole MiB (20000), or a text with MiB, GiB, MB
    or GB ("20GiB"). Unset: all. On a CPU nothing is limited; `torchtitan check` says what the state needs of it."""


@dataclass(config=STRICT, kw_only=True)
class Debug:
    seed: NonNegative = 0
    """Of initial weights, data order and random numbers."""
    deterministic: bool = False
    """Only deterministic kernels; a run then repeats bit for bit on the same machine."""
    deterministic_warn_only: bool = False
    """Warn instead of failing where a kernel has no deterministic form."""
