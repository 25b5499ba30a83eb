"""How much of a GPU's memory a rank's process may take: a share of it, or an amount. Needs no torch.

Which processors of a machine with several NUMA nodes are a GPU's neighbours: a rank and its workers run on these.

What crosses to another socket takes longer, and shares a link with all else that does: copies between host and GPU,
launches of kernels. Needs no torch; Linux says in /sys what is whose neighbour.
"""

import logging
import os
import re
from fractions import Fraction
from pathlib import Path

from torchtitan.core.constraints import LimitError

UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
SMALLEST = 256 * UNITS["MiB"]
"""No context of CUDA is smaller, so that less is a slip: of a share, or of a unit."""
KEY = "memory.limit"

Said = int | float | str
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


def amount_of(said: Said) -> int | None:
    """Bytes; None of a share, which is a number up to 1. Whole numbers are MiB. LimitError for less than `SMALLEST`."""
    if not isinstance(said, str):
        return None if said <= 1 else int(said) * UNITS["MiB"]
    match = _AMOUNT.fullmatch(said)
    found = 0 if match is None else int(Fraction(match[1]) * UNITS[match[2]])
    if found < SMALLEST:
        allowed = f'a share up to 1, whole MiB from 256 on, or a text such as "20GiB" ({", ".join(UNITS)})'
        raise LimitError(KEY, f'"{said}"', allowed, "leave it out for all of the memory")
    return found


def share_of(said: Said, total: int) -> float:
    """Of a GPU that has so many bytes. LimitError for more than it has."""
    amount = amount_of(said)
    if amount is None:
        return float(said)
    if amount > total:
        allowed = f"at most the {total / UNITS['GiB']:.2f} GiB of this GPU"
        raise LimitError(KEY, in_words(said), allowed, "lower it, or leave it out")
    return amount / total


def in_words(said: Said) -> str:
    amount = amount_of(said)
    return f"{float(said) * 100:g} %" if amount is None else f"{amount / UNITS['GiB']:.4g} GiB"


logger = logging.getLogger(__name__)

SYS = Path("/sys")


def stay_near(address: str) -> None:
    """Bind this process to those of its processors that are nearest to the PCI device at `address`, such as
    "0000:1b:00.0", where that is known. Who has bound it more narrowly already, by torchrun's --numa-binding, numactl
    or a scheduler, is not contradicted; nor is a scheduler that has given it few of that node's and many of another's.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return
    allowed = os.sched_getaffinity(0)
    node = node_of(address)
    near = allowed & processors_of(node) if node >= 0 else set()
    if not near or near == allowed:
        return
    if 2 * len(near) * _nodes_with(allowed) < len(allowed):  # less than half of an equal share of each node
        told = "processors: all %d; only %d are of NUMA node %d, to which the GPU belongs"
        logger.info(told, len(allowed), len(near), node)
        return
    if _bound(allowed, near):
        told = "processors %d of %d: those of NUMA node %d, to which the GPU belongs"
        logger.info(told, len(near), len(allowed), node)


def _bound(allowed: set[int], near: set[int]) -> bool:
    """Whether the system let the main thread be bound, which a container may forbid, and all that run where it did."""
    try:
        os.sched_setaffinity(0, near)
        threads = os.listdir("/proc/self/task")  # those that libraries have begun, too
    except OSError as error:
        logger.info("processors: all %d, as the system does not let a process be bound (%s)", len(allowed), error)
        return False
    for thread in threads:
        try:
            if os.sched_getaffinity(int(thread)) == allowed:
                os.sched_setaffinity(int(thread), near)
        except OSError:  # it has ended meanwhile
            continue
    return True


def _nodes_with(processors: set[int]) -> int:
    """How many nodes have some of them."""
    found = (SYS / "devices/system/node").glob("node*")
    return sum(bool(processors & processors_of(int(path.name[4:]))) for path in found if path.name[4:].isdigit())


def node_of(address: str) -> int:
    """-1 where the machine has one node, or does not say."""
    try:
        return int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def processors_of(node: int) -> set[int]:
    """None where the machine does not say, or the node has memory alone."""
    try:
        listed = (SYS / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [tuple(map(int, part.split("-"))) for part in listed.split(",")]
    except (OSError, ValueError):
        return set()
    return {number for first, *last in ranges for number in range(first, (last[0] if last else first) + 1)}
