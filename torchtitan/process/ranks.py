"""Which rank this process is, and what it prints. Reads what launchers put into the environment; needs no torch.

Started by the launcher or by torchrun, a process finds its rank in the environment; started by hand, it has none and
becomes a launcher itself.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

from torchtitan.core.errors import JobError

LAUNCHER = "TORCHTITAN_LAUNCHER"
MEMORY_LIMIT = "TORCH_PER_PROCESS_MEMORY_LIMIT"
HEEDED = (
    *("CUDA_VISIBLE_DEVICES", MEMORY_LIMIT, "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "CXX", "NCCL_DEBUG"),
    *("HF_HOME", "HF_HUB_OFFLINE", "DISABLE_MLFLOW_INTEGRATION", "MLFLOW_EXPERIMENT_NAME"),
    *("WANDB_MODE", "WANDB_PROJECT"),
)
"""Of the environment, what changes how a run goes; none of it is a secret, as addresses and keys of services are."""


@dataclass(frozen=True)
class Restart:
    """Why the launcher has started all ranks again."""

    number: int
    cause: str
    rank: int
    """Whose fault it was, as far as is known."""
    step: int
    """In which it happened."""
    since: float
    """When the ranks before had been started, on the machine's monotonic clock."""
    saved: bool = False
    """Whether the run has saved since its launch, so that there is a checkpoint that has all of the job behind it."""
    ended: float = 0.0
    """When it was noticed, on the same clock."""


@dataclass(frozen=True)
class Launcher:
    """What a rank knows of the launcher that started it. Paths are of memory that the two share."""

    pid: int
    store: str
    """By which the ranks find each other."""
    progress: str
    """Where the launcher looks for what this rank does."""
    stacks: str
    """Where this rank's stacks go when the launcher asks for them by a signal."""
    collectives: str
    """Where the log of its collectives goes when the launcher asks for that by a byte in a pipe."""
    ask: int
    """That pipe."""
    listen: int | None = None
    """With several machines, the socket on which the first rank has the store by which all find each other, instead of
    the file: at MASTER_ADDR and MASTER_PORT, for the others."""
    restart: Restart | None = None


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    logs: bool = True
    """Whether this rank writes to the console (LOG_RANK: local ranks separated by commas; default 0)."""
    launcher: Launcher | None = None
    """None under torchrun and in tests."""
    head: tuple[str, int] = ("", 0)
    """Where the store of several machines is."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_terminal(self) -> bool:
        """Whether a person watches, who likes colour (https://no-color.org turns it off)."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def number(name: str, default: int, remedy: str = "let torchrun set it") -> int:
    """A whole number of the environment."""
    given = os.environ.get(name, str(default))
    if not given.isdecimal():
        raise JobError(f"{name} in the environment: given {given!r}; allowed: a whole number; {remedy}")
    return int(given)


def read_ranks() -> Ranks:
    world_size = number("WORLD_SIZE", 1)
    local_rank = number("LOCAL_RANK", 0)
    chosen = [part.strip() for part in os.environ.get("LOG_RANK", "0").split(",")]
    return Ranks(
        rank=number("RANK", 0),
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        logs=str(local_rank) in chosen and number("GROUP_RANK", 0) == 0,
        head=(os.environ.get("MASTER_ADDR", ""), number("MASTER_PORT", 0)),
        launcher=read_launcher(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None,
    )


def heeded() -> str:
    """What of HEEDED is set here, in words."""
    set_here = [(name, os.environ[name]) for name in HEEDED if name in os.environ]
    return ", ".join(f"{name}={value.encode('unicode_escape').decode()[:200]}" for name, value in set_here)


def started_as_rank() -> bool:
    """Whether this process was started as one rank of a world, by the launcher or by torchrun."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def slurm_job() -> tuple[str, int]:
    """The job of SLURM that this process is of, and how often that was started before; ("", 0) outside of SLURM."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return os.environ.get("SLURM_JOB_ID", ""), int(restarts) if restarts.isdecimal() else 0


def slurm_seconds_left() -> float | None:
    """Until SLURM ends this allocation, by its own word; None where nothing is known."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdecimal() else None


def read_nodes() -> tuple[int, int, str, int]:
    """How many machines, which this is, the first one's address, and the port there."""
    remedy = "leave it out for one machine"
    count, index, port = (
        number(name, default, remedy) for name, default in (("NNODES", 1), ("NODE_RANK", 0), ("HEAD_PORT", 29500))
    )
    return count, index, os.environ.get("HEAD_ADDR", ""), port


def environment_of(
    local_rank: int, local_world_size: int, launcher: Launcher, nodes: tuple[int, int, str, int] = (1, 0, "", 0)
) -> dict[str, str]:
    """What the launcher of a machine starts a rank with: torchrun's names, and ours. On one machine there is no
    MASTER_ADDR, as nobody listens there."""
    count, index, head, port = nodes
    rank, world_size = index * local_world_size + local_rank, count * local_world_size
    names = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": index,
        "GROUP_WORLD_SIZE": count,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        LAUNCHER: json.dumps(asdict(launcher)),
    }
    names |= {"MASTER_ADDR": head, "MASTER_PORT": port} if count > 1 else {}
    return os.environ | {name: str(value) for name, value in names.items()}


def read_launcher(text: str) -> Launcher:
    fields = json.loads(text)
    restart = fields.pop("restart")
    return Launcher(**fields, restart=Restart(**restart) if restart else None)


def likely_device() -> Literal["cpu", "cuda"]:
    """What torch will find, told in a microsecond: a driver's device file (NVIDIA, AMD)."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") == ""
    return "cuda" if not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))) else "cpu"


def count_ranks() -> int:
    """As many as this process may use GPUs; 2, over gloo, without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
            visible = ",".join(line for line in asked.stdout.splitlines() if line.startswith("GPU"))
        except (OSError, subprocess.TimeoutExpired):
            visible = ""
    return len([device for device in visible.split(",") if device.strip()]) or 2


def set_default(name: str, value: str) -> None:
    """Set an environment variable that a library reads, unless the user has set it."""
    os.environ.setdefault(name, value)
