"""The process on its machine: a limit of GPU memory, freed memory of the host, processors near its GPU, and when it
collects garbage. Needs no torch.

On a machine with several NUMA nodes, a rank and its data workers run on the processors of the GPU's node, which Linux
lists in /sys. Traffic to another socket (copies between host and GPU, kernel launches) is slower and shares one link.

Garbage is collected at chosen moments: never during imports, and after the same steps on all ranks.
"""

import ctypes
import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from torchtitan.core.errors import LimitError, format_bytes

logger = logging.getLogger(__name__)

UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
SMALLEST = 256 * UNITS["MiB"]
"""Smallest limit in bytes. A CUDA context needs more, so a smaller value is a mistaken share or unit."""
KEY = "memory.limit"

MemoryLimit = int | float | str
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})")


def limit_in_bytes(limit: MemoryLimit) -> int | None:
    """Return a memory limit in bytes, or None if it is a fraction (a number up to 1). Larger numbers are MiB.

    Raises LimitError for text that is not an amount or is below `SMALLEST`.
    """
    if not isinstance(limit, str):
        return None if limit <= 1 else int(limit) * UNITS["MiB"]
    match = _AMOUNT.fullmatch(limit)
    size = 0 if match is None else int(Fraction(match[1]) * UNITS[match[2]])
    if size < SMALLEST:
        allowed = f'a share up to 1, whole MiB from 256 on, or a text such as "20GiB" ({", ".join(UNITS)})'
        raise LimitError(KEY, f'"{limit}"', allowed, "leave it out for all of the memory")
    return size


def limit_as_share(limit: MemoryLimit, total: int) -> float:
    """Return a limit as a share of a GPU's `total` bytes. Raises LimitError for more than that."""
    amount = limit_in_bytes(limit)
    if amount is None:
        return float(limit)
    if amount > total:
        allowed = f"at most the {total / UNITS['GiB']:.2f} GiB of this GPU"
        raise LimitError(KEY, describe_limit(limit), allowed, "lower it, or leave it out")
    return amount / total


def describe_limit(limit: MemoryLimit) -> str:
    amount = limit_in_bytes(limit)
    return f"{float(limit) * 100:g} %" if amount is None else f"{amount / UNITS['GiB']:.4g} GiB"


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of glibc's mallopt, from malloc.h."""
HEAP_GROWTH = 256 * UNITS["MiB"]
"""Bytes by which the heap grows. They are reserved addresses: a page takes memory when it is first written to."""


_malloc_trim: Callable[[ctypes.c_size_t], int] | None = None
"""glibc's function, if this process keeps freed memory."""


def keep_freed_memory() -> None:
    """Make the C library reuse freed memory instead of returning it to the system, for a process that computes on CPUs.

    By default glibc maps each large tensor of the host and unmaps it when it is freed, so the system has to fetch and
    zero the same pages in every step (docs/benchmarks.md has the cost). Afterwards the process holds its peak
    until it ends, except for what `return_unused_memory` returns.
    """
    global _malloc_trim
    if sys.platform != "linux" or _allocator_is_chosen():
        return
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)  # missing in other C libraries, such as musl
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: HEAP_GROWTH}
    if mallopt is not None and all([mallopt(name, value) == 1 for name, value in settings.items()]):
        _malloc_trim = getattr(library, "malloc_trim", None)
        logger.info("host memory: freed tensors stay with the process for reuse (MALLOC_ variables change that)")


def return_unused_memory(step: int) -> None:
    """Return free pages of the heap to the system after steps 1, 2, 4, 8, ... of a process that keeps freed memory.

    Optimizer states and compiled code are allocated between the tensors of the first steps, and then the gaps are too
    small for the same tensors in the next step. Call it while gradients are allocated, because the next backward pass
    needs their pages. `step`: counted from 1 in this process.
    """
    if _malloc_trim is not None and step > 0 and step & (step - 1) == 0:
        _malloc_trim(ctypes.c_size_t(0))


def use_huge_pages() -> None:
    """Let torch align large host tensors to pages, and request huge ones. Call it before torch is imported.

    The heap of `keep_freed_memory` is less fragmented with aligned tensors: the peak is a third smaller.
    """
    if not _allocator_is_chosen():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _allocator_is_chosen() -> bool:
    """Return whether the user has set the allocator up: by MALLOC_ variables or GLIBC_TUNABLES, or by another one."""
    return any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)


SYS = Path("/sys")


def bind_near(address: str) -> None:
    """Bind this process to its processors on the NUMA node of the PCI device at `address` ("0000:1b:00.0").

    Nothing changes if the node is unknown, if the process is bound to that node already (torchrun's --numa-binding,
    numactl, a scheduler), or if a scheduler gave it few processors of that node and many of others.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return
    allowed = os.sched_getaffinity(0)
    node = node_of(address)
    near = allowed & processors_of(node) if node >= 0 else set()
    if not near or near == allowed:
        return
    if 2 * len(near) * _nodes_with(allowed) < len(allowed):  # less than half of an equal share of each node
        template = "processors: all %d; only %d are of NUMA node %d, to which the GPU belongs"
        logger.info(template, len(allowed), len(near), node)
        return
    if _bind(allowed, near):
        template = "processors %d of %d: those of NUMA node %d, to which the GPU belongs"
        logger.info(template, len(near), len(allowed), node)


def _bind(allowed: set[int], near: set[int]) -> bool:
    """Bind the main thread and all threads with the same processors. Return False if the system, such as a container,
    forbids it."""
    try:
        os.sched_setaffinity(0, near)
        threads = os.listdir("/proc/self/task")  # including threads that libraries have started
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
    """Return the number of NUMA nodes with at least one of these processors."""
    folders = (SYS / "devices/system/node").glob("node*")
    return sum(bool(processors & processors_of(int(path.name[4:]))) for path in folders if path.name[4:].isdigit())


def node_of(address: str) -> int:
    """Return the NUMA node of a PCI device, or -1 if the machine has only one or does not report it."""
    try:
        return int((SYS / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def processors_of(node: int) -> set[int]:
    """Return the processors of a NUMA node: an empty set if they are unknown or the node has only memory."""
    try:
        listed = (SYS / f"devices/system/node/node{node}/cpulist").read_text().strip()
        ranges = [tuple(map(int, part.split("-"))) for part in listed.split(",")]
    except (OSError, ValueError):
        return set()
    return {number for first, *last in ranges for number in range(first, (last[0] if last else first) + 1)}


def collect_garbage(step: int, freq: int, debug: bool) -> None:
    """Collect the younger objects every `freq` steps, or all of them after every step and log their number."""
    if debug:
        logger.info("garbage collection after step %d: %d objects were unreachable", step, gc.collect())
    elif step % freq == 0:
        gc.collect(1)


@contextmanager
def no_gc_during_imports() -> Iterator[None]:
    """Collect no garbage inside the block; if it imports a module, freeze all objects that exist at its end.

    Imports of torch make a million objects that stay. Collections during the imports take a fifth of their time, and
    with these objects each later full collection takes a fifth of a second more.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:  # else repeated calls would keep their callers' garbage for good
            gc.freeze()
        if enabled:
            gc.enable()


SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_REMEDY = (
    "give the container a larger one (docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: "
    f"Memory mounted at {SHARED_MEMORY})"
)


def shared_memory_obstacle(num_bytes: int = 0) -> str:
    """Return why processes cannot share locks and so many bytes in /dev/shm here; "" if they can."""
    if sys.platform != "linux":
        return ""
    import multiprocessing  # takes 20 ms, and most jobs have no workers

    try:
        multiprocessing.Lock()
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return f"{SHARED_MEMORY} cannot be used ({error.strerror})"
    free = status.f_bavail * status.f_frsize
    return f"{SHARED_MEMORY} has {format_bytes(free)} free, of {format_bytes(num_bytes)}" if free < num_bytes else ""
