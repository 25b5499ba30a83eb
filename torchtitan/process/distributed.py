"""The process group, devices, seeds, timeouts and small reductions.

A process group always exists, of one rank if need be, so no other code has to check for one.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchtitan.core.errors import JobError
from torchtitan.process import machine
from torchtitan.process.host import host
from torchtitan.process.machine import describe_limit, limit_as_share
from torchtitan.process.ranks import Launcher, Ranks, likely_device, require_interfaces, set_default, use_loopback
from torchtitan.torch_internals.collectives import process_groups, set_group_timeout

RENDEZVOUS_SHARE = 0.8
"""Fraction of the start's timeout for which a rank waits for the first of several machines."""

WATCHDOG_SECONDS, SPINNING_SECONDS = 3600, 30
"""Under our launcher, collectives fail this long after its watchdog would end the run. The watchdog knows of the time
in which launcher and ranks were stopped (`docker pause`), collectives do not: they would fail on waking up. The second
value is for start, first step and export on GPUs. A rank that waits for others spins there, which looks like one that
compiles, so the watchdog does not notice a hang.
"""


def device_type() -> str:
    """Return "cuda" if torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def init(
    ranks: Ranks,
    timeout_seconds: int,
    trace_buf_size: int = 0,
    watchdog_seconds: int | None = None,
    folder: Path | None = None,
) -> torch.device:
    """Join the process group and return this rank's device. Collectives on CPU tensors use gloo on every machine.

    Sets the process up before that: environment variables of torch's libraries (`set_up_libraries`); on a GPU the
    current device and the processors near it, on a CPU the allocator of host memory. If a process group exists,
    nothing more happens. Raises JobError if this rank has no GPU or the first machine does not answer.

    `watchdog_seconds`: the launcher's watchdog ends a start that hangs for this time. A rank that waits for
    the first of several machines gives up at RENDEZVOUS_SHARE of it and reports that itself. `folder`: the run's
    folder, to which NCCL dumps its collectives if one hangs.
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
        machine.bind_near(pci_address(device))
    else:
        device, backend = torch.device("cpu"), "gloo"
        machine.keep_freed_memory()
    if dist.is_initialized():
        return device
    on_one_machine = ranks.local_world_size == ranks.world_size
    if ranks.launcher is None and (on_one_machine or "GLOO_SOCKET_IFNAME" in os.environ):  # the launcher has looked
        require_interfaces()
    if on_one_machine:
        use_loopback()
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif ranks.launcher is not None:
        store = _rendezvous_store(
            ranks, ranks.launcher, timedelta(seconds=RENDEZVOUS_SHARE * (watchdog_seconds or timeout_seconds))
        )
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
    else:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except ValueError as error:
            raise JobError(
                f"WORLD_SIZE in the environment: given {ranks.world_size}; allowed: with RANK, MASTER_ADDR and "
                f"MASTER_PORT, which tell where the other ranks are; unset it, or let torchrun set all ({error})"
            ) from None
    return device


def pci_address(device: torch.device) -> str:
    """Return the device's address on the PCI bus as Linux writes it."""
    properties: Any = torch.cuda.get_device_properties(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _rendezvous_store(ranks: Ranks, launcher: Launcher, timeout: timedelta) -> dist.Store:
    """Return the store for the rendezvous of the launcher's ranks: a file on one machine, else the first rank's TCP
    store on a socket that its launcher bound (torch itself would listen on every interface)."""
    if ranks.local_world_size == ranks.world_size:
        return dist.FileStore(launcher.store, ranks.world_size)
    options = {"is_master": True, "master_listen_fd": launcher.listen} if ranks.is_main else {"is_master": False}
    try:
        return dist.TCPStore(*ranks.head, ranks.world_size, timeout=timeout, **options)
    except dist.DistError as error:
        raise JobError(
            f"HEAD_ADDR, HEAD_PORT: given {ranks.head[0]}, {ranks.head[1]}, where no store answers within "
            f"{timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}); allowed: address and port of the "
            "machine with NODE_RANK = 0, the same everywhere; start all machines together"
        ) from None


def set_up_libraries(trace_buf_size: int, folder: Path | None = None) -> None:
    """Set environment variables that torch's libraries read at their start, unless the user has set them, and raise
    the limit of open files."""
    set_default("TORCH_FR_BUFFER_SIZE", str(trace_buf_size))
    if folder is not None:
        # for a run without our launcher, which requests the dump over a pipe: one file per rank, by default in /tmp
        set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        set_default("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "nccl-collectives-of-rank-"))
    # By default each gloo group connects all pairs of ranks at once: some 1,560 open files per rank with 512 ranks, and
    # minutes of look-ups with thousands. A lazy group connects two ranks when they first communicate.
    set_default("TORCH_GLOO_LAZY_INIT", "1")
    if device_type() == "cuda":
        # segments that grow: with fixed sizes up to a sixth of the memory is lost to fragmentation
        set_default("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if sys.platform == "linux":
        import resource  # missing on Windows

        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # the usual 1,024 are too few for a rank of hundreds
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def collective_timeout(ranks: Ranks, seconds: int, may_spin: bool = False) -> int:
    """Return the timeout of collectives where a rank without progress for `seconds` counts as hung."""
    if ranks.launcher is None:
        return seconds
    return seconds + (SPINNING_SECONDS if may_spin and likely_device() == "cuda" else WATCHDOG_SECONDS)


def set_timeout(timeout_seconds: int) -> None:
    """Change the timeout of all process groups except the checkpointer's, as a save may take longer than any step.

    It is long for the first step (compile, cold caches) and short afterwards.
    """
    for group in process_groups():
        if not group.group_desc.startswith("checkpoint"):
            set_group_timeout(timedelta(seconds=timeout_seconds), group)


def limit_memory(limit: int | float | str | None, device: torch.device) -> str:
    """Cap this process's use of its device's memory (memory.limit) and return a description of the limit.

    Raises LimitError for more memory than the device has.
    """
    if limit is None or device.type != "cuda":
        return (
            "" if limit is None else f"at most {describe_limit(limit)} of a GPU; on a {device.type} nothing is limited"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    share = limit_as_share(limit, total)
    torch.cuda.set_per_process_memory_fraction(share, device)
    return f"at most {share * total / 2**30:.2f} of {total / 2**30:.2f} GiB for each rank (memory.limit)"


def close() -> None:
    """Destroy the process group. A failed rank does not call this: it must not wait for the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_seed(seed: int, rank: int) -> None:
    """Seed the generators that draw differently on every rank (dropout). Weights and data have their own seeds."""
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)  # unused here, but a library may draw from it


def set_deterministic(warn_only: bool) -> None:
    """Allow only deterministic kernels from now on; with `warn_only`, warn about the others."""
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False


@host.computes
def sum_floats(*values: float) -> list[float]:
    """Return the sums of host numbers over all ranks, in float64 over gloo. All ranks get the same bits."""
    if dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def broadcast_floats(*values: float) -> list[float]:
    """Return rank 0's host numbers on all ranks, as sums that ranks computed alone may differ in the last bits."""
    return sum_floats(*(values if dist.get_rank() == 0 else [0.0] * len(values)))


def sum_ints(*values: int) -> list[int]:
    """Return the sums of small host integers over all ranks, over gloo, so that the host does not wait for the GPU."""
    return begin_sum_ints(*values)()


@host.computes
def begin_sum_ints(*values: int) -> Callable[[], list[int]]:
    """Start `sum_ints` in the background; the returned function waits for the sums and returns them.

    All ranks must start their reductions in the same order, and each reduction must be waited for.
    """
    tensor = torch.tensor(values, dtype=torch.int64)
    work = dist.all_reduce(tensor, async_op=True) if dist.get_world_size() > 1 else None

    @host.computes
    def finish() -> list[int]:
        if work is not None:
            work.wait()
        return tensor.tolist()

    return finish


@host.computes
def all_gather_floats(values: torch.Tensor) -> torch.Tensor:
    """Return all ranks' values [ranks, n] on every rank, of as many host numbers [n] on each, over gloo."""
    gathered = values.new_empty(dist.get_world_size(), len(values))
    dist.all_gather(list(gathered), values)
    return gathered


# Exchange of plain values as JSON: torch's object collectives unpickle the data they receive, which can run code


@host.computes
def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Return the values of all ranks on rank 0, None on the others.

    Values must be plain JSON: keys are strings, and tuples arrive as lists. Each is padded to the size of the largest.
    """
    buffer = _padded_json(value, group)
    received = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))] if dist.get_rank() == 0 else None
    dist.gather(buffer, received, dst=0, group=group)
    return None if received is None else [_parse(buffer) for buffer in received]


@host.computes
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
    """Return the tensors of all ranks, of any shape, on rank 0 and on the CPU; an empty dict on the other ranks.

    If several ranks have a name, the lowest rank's tensor is returned.
    """
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
    """Return uint8 [8 + n]: the length of the JSON text, the text, and zeros up to the longest text of all ranks."""
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
