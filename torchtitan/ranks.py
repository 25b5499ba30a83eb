"""Which rank this process is, and what it prints. The only reader of the environment; needs no torch.

Started by torchrun (or `torchtitan.launch`), a process finds its rank in the environment; started by hand, it is a
world of one.
"""

import logging
import os
import sys
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    logs: bool = True
    """Whether this rank writes to the console (LOG_RANK: local ranks separated by commas; default 0)."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_terminal(self) -> bool:
        """Whether a person watches, who likes colour (https://no-color.org turns it off)."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def read_ranks() -> Ranks:
    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    world_size = number("WORLD_SIZE", 1)
    local_rank = number("LOCAL_RANK", 0)
    chosen = [part.strip() for part in os.environ.get("LOG_RANK", "0").split(",")]
    return Ranks(
        rank=number("RANK", 0),
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        logs=str(local_rank) in chosen and number("GROUP_RANK", 0) == 0,
    )


def likely_device() -> Literal["cpu", "cuda"]:
    """What torch will find, told in a microsecond: a driver's device file (NVIDIA, AMD)."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") == ""
    return "cuda" if not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))) else "cpu"


def set_default(name: str, value: str) -> None:
    """Set an environment variable that a library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def set_up_logging(ranks: Ranks) -> None:
    """Plain lines on stdout from the ranks that log; warnings of those and errors of all on stderr."""
    logger = logging.getLogger("torchtitan")
    logger.handlers.clear()
    logger.propagate = False
    logger.setLevel(logging.INFO)
    prefix = "" if ranks.is_main else f"[rank {ranks.rank}] "
    if ranks.logs:
        out = logging.StreamHandler(sys.stdout)
        out.addFilter(lambda record: record.levelno < logging.WARNING)
        out.setFormatter(logging.Formatter(prefix + "%(message)s"))
        logger.addHandler(out)
    err = logging.StreamHandler(sys.stderr)
    err.setLevel(logging.WARNING if ranks.logs else logging.ERROR)
    err.setFormatter(logging.Formatter(prefix + "%(levelname)s: %(message)s"))
    logger.addHandler(err)
