"""The process group, devices, seeds, timeouts and small reductions.

There is always a process group, of one rank if need be, so nothing downstream asks whether there is one.
"""

import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan import numa
from torchtitan.errors import JobError
from torchtitan.memory_limit import in_words, share_of
from torchtitan.ranks import Launcher, Ranks, set_default

MEETING_SHARE = 0.8
"""Of all patience, for the first of several machines to be there."""


def device_type() -> str:
    """ "cuda" where torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def init(
    ranks: Ranks,
    timeout_seconds: int,
    trace_buf_size: int = 0,
    watchdog_seconds: int | None = None,
    folder: Path | None = None,
) -> torch.device:
    """Join the world and return this rank's device. Collectives on CPU tensors go over gloo on every machine.

    `watchdog_seconds`: after which somebody ends this process, if its start goes no further. By then it has said itself
    that the first of several machines is not there. `folder`: the run's, for what NCCL says of a collective that hangs.
    """
    set_up_libraries(trace_buf_size, folder)
    timeout = timedelta(seconds=timeout_seconds)
    if device_type() == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise JobError(
                f"{ranks.local_world_size} ranks here and {torch.cuda.device_count()} visible GPUs; allowed: "
                "one rank a GPU; lower NGPU or --nproc-per-node, or see CUDA_VISIBLE_DEVICES"
            )
        device, backend = torch.device("cuda", ranks.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        numa.stay_near(_address(device))
    else:
        device, backend = torch.device("cpu"), "gloo"
    if dist.is_initialized():
        return device
    if ranks.local_world_size == ranks.world_size and sys.platform == "linux":
        for library in ("GLOO", "NCCL"):
            set_default(f"{library}_SOCKET_IFNAME", "lo")  # one machine: nothing to offer to the network
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif ranks.launcher is not None:
        store = _meet(ranks, ranks.launcher, timedelta(seconds=MEETING_SHARE * (watchdog_seconds or timeout_seconds)))
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return device


def _address(device: torch.device) -> str:
    """On the PCI bus, as Linux writes it."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _meet(ranks: Ranks, launcher: Launcher, timeout: timedelta) -> dist.Store:
    """By what the launcher's ranks find each other: a file on one machine, else a store that the first rank has on a
    socket bound by its launcher (torch's own would listen on every interface)."""
    if ranks.local_world_size == ranks.world_size:
        return dist.FileStore(launcher.store, ranks.world_size)
    options = {"is_master": True, "master_listen_fd": launcher.listen} if ranks.is_main else {"is_master": False}
    try:
        return dist.TCPStore(*ranks.head, ranks.world_size, timeout=timeout, **options)
    except dist.DistError as error:
        raise JobError(
            f"HEAD_ADDR, HEAD_PORT: given {ranks.head[0]}, {ranks.head[1]}, where no store answers within "
            f"{timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}); allowed: those of the machine with "
            "NODE_RANK = 0, alike everywhere; start all machines together"
        ) from None


def set_up_libraries(trace_buf_size: int, folder: Path | None = None) -> None:
    """What torch's libraries read when they start, unless the user has set it."""
    set_default("TORCH_FR_BUFFER_SIZE", str(trace_buf_size))
    if folder is not None:
        # for a run without our launcher, which asks for the same over a pipe: a file a rank, else in /tmp
        set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        set_default("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "nccl-collectives-of-rank-"))
    # Each group of gloo would connect every rank with every other at once: some 1,560 open files a rank with 512 ranks,
    # and minutes of look-ups with thousands. So it connects those that talk, when they first do.
    set_default("TORCH_GLOO_LAZY_INIT", "1")
    if device_type() == "cuda":
        # blocks of memory that grow, instead of up to a sixth lost between blocks of fixed sizes
        set_default("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if sys.platform == "linux":
        import resource  # there is none on Windows

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the usual 1,024 are too few for a rank of hundreds
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def set_timeout(timeout_seconds: int) -> None:
    """Change the timeout of all groups but the checkpointer's: long for the first step (compile, cold caches), short
    afterwards. A save may take longer than any step.
    """
    for group in list(distributed_c10d._world.pg_map):  # torch has no public way to list or to change them
        if not group.group_desc.startswith("checkpoint"):
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def limit_memory(said: int | float | str | None, device: torch.device) -> str:
    """Let this process take no more of its device's memory (memory.limit); what was done, in words. LimitError for more
    than there is.
    """
    if said is None or device.type != "cuda":
        return "" if said is None else f"at most {in_words(said)} of a GPU; on a {device.type} nothing is limited"
    total = torch.cuda.get_device_properties(device).total_memory
    share = share_of(said, total)
    torch.cuda.set_per_process_memory_fraction(share, device)
    return f"at most {share * total / 2**30:.2f} of {total / 2**30:.2f} GiB for each rank (memory.limit)"


def close() -> None:
    """Leave the world. A rank that failed does not call this: it must not wait for ranks that did not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_seed(seed: int, rank: int) -> None:
    """Seed the generators that draw differently on every rank (dropout). Weights and data have keys of their own."""
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)  # nothing here draws from it, but a library may


def set_deterministic(warn_only: bool) -> None:
    """Only deterministic kernels from here on."""
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False


def add_up(*values: float) -> list[float]:
    """Sums of host numbers over all ranks in float64, bit for bit the same on all, over gloo."""
    if dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def of_the_first(*values: float) -> list[float]:
    """Rank 0's host numbers, on all: what ranks have added up for themselves may differ in its last bits."""
    return add_up(*(values if dist.get_rank() == 0 else [0.0] * len(values)))


def sum_over_ranks(*values: int) -> list[int]:
    """Sums of small host integers over all ranks, over gloo: the host learns them without waiting for the GPU."""
    return begin_sum(*values)()


def begin_sum(*values: int) -> Callable[[], list[int]]:
    """The same, on its way while the host does other things; who calls what is returned waits for the sums. All ranks
    begin theirs in the same order among their reductions, and somebody waits for each.
    """
    tensor = torch.tensor(values, dtype=torch.int64)
    work = dist.all_reduce(tensor, async_op=True) if dist.get_world_size() > 1 else None

    def finish() -> list[int]:
        if work is not None:
            work.wait()
        return tensor.tolist()

    return finish
