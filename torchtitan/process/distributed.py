"""The process group, devices, seeds, timeouts and small reductions.

There is always a process group, of one rank if need be, so nothing downstream asks whether there is one.
"""

import json
import random
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan.core.errors import JobError
from torchtitan.process import machine
from torchtitan.process.machine import in_words, share_of
from torchtitan.process.ranks import Launcher, Ranks, set_default

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
        machine.stay_near(_address(device))
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


# Plain values of ranks, as JSON: torch's collectives of objects unpickle what they receive, which can run code


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Return the values of all ranks on rank 0, None on the others. Values are what JSON knows: keys are strings, and
    tuples arrive as lists. Each takes as many bytes on the way as the largest."""
    buffer = _padded_json(value, group)
    received = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))] if dist.get_rank() == 0 else None
    dist.gather(buffer, received, dst=0, group=group)
    return None if received is None else [_parse(buffer) for buffer in received]


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks on every rank, as `gather_json` does on rank 0."""
    buffer = _padded_json(value, group)
    received = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, buffer, group=group)
    return [_parse(buffer) for buffer in received]


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value, a plain one, on every rank; the other ranks' values are ignored."""
    data = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0, group=group)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(buffer, src=0, group=group)
    return value if data else json.loads(buffer.numpy().tobytes())


def scatter_json(values: list[Any] | None, group: dist.ProcessGroup | None = None) -> Any:
    """Return one of rank 0's plain values to each rank, in the order of the ranks."""
    longest, buffers = torch.tensor([0]), None
    if values is not None:
        framed = [_framed(value) for value in values]
        longest = torch.tensor([max(map(len, framed))])
        buffers = [torch.zeros(int(longest), dtype=torch.uint8) for _ in framed]
        for buffer, content in zip(buffers, framed, strict=True):
            buffer[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    dist.broadcast(longest, src=0, group=group)
    received = torch.empty(int(longest), dtype=torch.uint8)
    dist.scatter(received, buffers, src=0, group=group)
    return _parse(received)


def gather_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of all ranks on rank 0, on the CPU, of any shape, and an empty dict on the others. Of a name
    that several ranks have, the lowest rank's."""
    rank = dist.get_rank()
    shares = all_gather_json({name: [list(t.shape), str(t.dtype)] for name, t in tensors.items()})
    result = {}
    for name in sorted({name for share in shares for name in share}):
        holder = next(number for number, share in enumerate(shares) if name in share)
        if rank == holder:
            value = tensors[name].detach().cpu().contiguous()
            if rank == 0:
                result[name] = value
            else:
                dist.send(value.reshape(-1).view(torch.uint8), 0)
        elif rank == 0:
            shape, dtype = shares[holder][name]
            result[name] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            dist.recv(result[name].view(-1).view(torch.uint8), holder)
    return result


def _padded_json(value: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[8 + n] uint8: the length of the text, the text, and zeros up to the longest of all ranks."""
    content = _framed(value)
    longest = torch.tensor([len(content)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    buffer = torch.zeros(int(longest), dtype=torch.uint8)
    buffer[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    return buffer


def _framed(value: Any) -> bytearray:
    data = json.dumps(value).encode()
    return bytearray(len(data).to_bytes(8, "little") + data)


def _parse(buffer: torch.Tensor) -> Any:
    raw = buffer.numpy().tobytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
