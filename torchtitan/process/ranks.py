"""The rank of this process, read from the environment that launchers set. Needs no torch.

A process that the launcher or torchrun started finds its rank in the environment. A process that a user started has no
rank and becomes a launcher itself.

Ranks communicate over a network interface. gloo opens one in every rank, also in a run on one machine and in one of a
single rank. Without an address of it gloo's error reads like that of a lost connection.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from torchtitan.core.bounded import Count, Seconds
from torchtitan.core.errors import JobError

LAUNCHER = "TORCHTITAN_LAUNCHER"
MEMORY_LIMIT = "TORCH_PER_PROCESS_MEMORY_LIMIT"
LOGGED_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", MEMORY_LIMIT, "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "CXX", "NCCL_DEBUG"),
    *("HF_HOME", "HF_HUB_OFFLINE", "DISABLE_MLFLOW_INTEGRATION", "MLFLOW_EXPERIMENT_NAME"),
    *("WANDB_MODE", "WANDB_PROJECT"),
)
"""Environment variables that affect a run and are logged. None is secret, as addresses and keys of services are."""


@dataclass(frozen=True)
class Restart:
    """The reason for which the launcher has restarted all ranks."""

    number: Count
    cause: str
    rank: Count
    """The rank that caused the failure, as far as is known."""
    step: Count
    """The last step that any rank had completed."""
    since: Seconds
    """Start time of the previous ranks, on the machine's monotonic clock."""
    saved: bool = False
    """True if the run has saved a checkpoint since its launch. The restart then loads the newest one."""
    ended: Seconds = 0.0
    """Time at which the failure was noticed, on the same clock."""


@dataclass(frozen=True)
class Launcher:
    """A rank's connection to the launcher that started it. Paths lead to memory that the two share."""

    pid: int
    store: str
    """Path of the file store for the rendezvous of the ranks of one machine."""
    progress: str
    """Path of the heartbeats that the launcher reads."""
    stacks: str
    """Path to which this rank writes its stacks when the launcher requests them with a signal."""
    collectives: str
    """Path to which this rank writes the log of its collectives when the launcher requests it with a byte in a pipe."""
    ask: int
    """File descriptor of that pipe."""
    listen: int | None = None
    """File descriptor of the socket on which the first rank of several machines serves the rendezvous store, at
    MASTER_ADDR and MASTER_PORT. It replaces the file store."""
    restart: Restart | None = None
    end: str = ""
    """Path to which this rank writes how it ends (metrics/run_end.py)."""
    job: str = ""
    """Path to which an engine writes its job (launcher/script.py); "" under the launcher of a job, which has it."""


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    logs: bool = True
    """True if this rank writes to the console (LOG_RANK: local ranks separated by commas; default 0)."""
    launcher: Launcher | None = None
    """The connection to our launcher; None under torchrun and in tests."""
    head: tuple[str, int] = ("", 0)
    """Address and port of the rendezvous store of several machines."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def keeps_folder(self) -> bool:
        """Return whether this rank holds the lock of the run's folder and records the end of the run there: the first
        one, unless its launcher has the job and does both."""
        return self.is_main and (self.launcher is None or self.launcher.job != "")

    @property
    def on_terminal(self) -> bool:
        """Return whether stdout is a terminal that may show colours (see https://no-color.org)."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def parse_number(text: str) -> int | None:
    """Return the whole number that a text is, of at most 18 digits; None if it is none."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def env_number(name: str, default: int, remedy: str = "let torchrun set it") -> int:
    """Return a whole number from the environment."""
    text = os.environ.get(name, str(default))
    number = parse_number(text)
    if number is None:
        raise JobError(f"{name} in the environment: given {text[:100]!r}; allowed: a whole number; {remedy}")
    return number


def read_ranks() -> Ranks:
    """Return this process's place. Raises JobError if the variables contradict each other, as left from another run."""
    world_size, rank, local_rank = (env_number(*entry) for entry in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    local_world_size = env_number("LOCAL_WORLD_SIZE", world_size)
    _require_at_most("RANK", rank, "WORLD_SIZE", world_size, world_size - 1)
    _require_at_most("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size, local_world_size - 1)
    _require_at_most("LOCAL_WORLD_SIZE", local_world_size, "WORLD_SIZE", world_size, world_size)
    return Ranks(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        logs=local_rank in logging_ranks() and env_number("GROUP_RANK", 0) == 0,
        head=(os.environ.get("MASTER_ADDR", ""), env_number("MASTER_PORT", 0)),
        launcher=read_launcher(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None,
    )


def logging_ranks(local_world_size: int | None = None) -> list[int]:
    """Return the local ranks that write to the console. Raises JobError if it is none of this number of ranks."""
    text = os.environ.get("LOG_RANK") or "0"
    chosen = [parse_number(part.strip()) for part in text.split(",")]
    ranks = [number for number in chosen if number is not None]
    if len(ranks) < len(chosen) or local_world_size is not None and min(ranks) >= local_world_size:
        limit = "" if local_world_size is None else f", one of them below {local_world_size}"
        raise JobError(
            f"LOG_RANK in the environment: given {text[:100]!r}; allowed: local ranks separated by commas{limit}; "
            "leave it out for the first"
        )
    return ranks


def _require_at_most(name: str, value: int, limiting: str, size: int, limit: int) -> None:
    if value > limit:
        raise JobError(
            f"{name} in the environment: given {value}; allowed: at most {limit} with {limiting} = {size}; unset RANK, "
            "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or let torchrun set all of them"
        )


def describe_environment() -> str:
    """Describe the variables in LOGGED_VARIABLES that are set, with their values."""
    set_here = [(name, os.environ[name]) for name in LOGGED_VARIABLES if name in os.environ]
    return ", ".join(f"{name}={value.encode('unicode_escape').decode()[:200]}" for name, value in set_here)


def started_as_rank() -> bool:
    """Return whether the launcher or torchrun started this process as a rank."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def slurm_job() -> tuple[str, int]:
    """Return the ID of this process's SLURM job and its number of restarts; ("", 0) outside of SLURM."""
    return os.environ.get("SLURM_JOB_ID", ""), parse_number(os.environ.get("SLURM_RESTART_COUNT", "")) or 0


def slurm_seconds_left() -> float | None:
    """Return the seconds until SLURM ends this allocation, or None if the end is unknown."""
    end = parse_number(os.environ.get("SLURM_JOB_END_TIME", ""))
    return end - time.time() if end is not None else None


def read_nodes() -> tuple[int, int, str, int]:
    """Return the number of machines, this machine's index, the first machine's address and its port."""
    remedy = "leave it out for one machine"
    count, index, port = (
        env_number(name, default, remedy) for name, default in (("NNODES", 1), ("NODE_RANK", 0), ("HEAD_PORT", 29500))
    )
    return count, index, os.environ.get("HEAD_ADDR", ""), port


def variables_of(
    local_rank: int, local_world_size: int, launcher: Launcher, nodes: tuple[int, int, str, int] = (1, 0, "", 0)
) -> dict[str, str]:
    """Return the environment variables of a rank that the launcher starts: torchrun's and our own.

    On one machine MASTER_ADDR is left out, because no rank listens there.
    """
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
    return {name: str(value) for name, value in names.items()}


def read_launcher(text: str) -> Launcher:
    fields = json.loads(text)
    restart = fields.pop("restart")
    return Launcher(**fields, restart=Restart(**restart) if restart else None)


def likely_device() -> Literal["cpu", "cuda"]:
    """Predict the device that torch will find, from a driver's device file (NVIDIA, AMD), in a microsecond."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") == ""
    return "cuda" if not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))) else "cpu"


def count_ranks() -> int:
    """Return the number of GPUs that this process may use, or 2 (ranks on the CPU, over gloo) without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
            visible = ",".join(line for line in listing.stdout.splitlines() if line.startswith("GPU"))
        except (OSError, subprocess.TimeoutExpired):
            visible = ""
    return len([device for device in visible.split(",") if device.strip()]) or 2


def set_default(name: str, value: str) -> None:
    """Set an environment variable that a library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915


def require_interfaces() -> None:
    """Raise `JobError` if an interface that gloo will use has no address: those of GLOO_SOCKET_IFNAME, or loopback."""
    if sys.platform != "linux":
        return
    value = os.environ.get("GLOO_SOCKET_IFNAME", "")
    names = (value or LOOPBACK).split(",")
    usable = [name for _, name in socket.if_nameindex() if ipv4_of(name) or any(ipv6_rows(name))]
    for name in names:
        if name in usable:
            continue
        if not value:
            raise JobError(
                f"network: the loopback interface ({name}) has no address, and ranks communicate over it; allowed: a "
                f"machine or container where it is up (ip link set {name} up), or GLOO_SOCKET_IFNAME for another one"
            )
        raise JobError(
            f"GLOO_SOCKET_IFNAME: given {name!r}, which is no interface with an address here; allowed: "
            f"{', '.join(usable) or 'none, as no interface has one'}; or leave it out"
        )


def use_loopback() -> None:
    """Make gloo and NCCL communicate over loopback, unless the user has named an interface: one machine needs no
    network."""
    if sys.platform == "linux":
        for library in ("GLOO", "NCCL"):
            set_default(f"{library}_SOCKET_IFNAME", LOOPBACK)


def ipv4_of(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    import fcntl  # missing on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def ipv6_rows(name: str | None = None, table: Path = Path("/proc/net/if_inet6")) -> list[tuple[int, str]]:
    """Return the IPv6 addresses, as numbers, and their interfaces, all or those of one interface: from the kernel's
    table, which has a line per address: 32 hexadecimal digits, four numbers, the name.
    """
    lines = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
    return [(int(fields[0], 16), fields[-1]) for fields in lines if name in (None, fields[-1])]
