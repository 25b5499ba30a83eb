"""The process group, devices, seeds, timeouts and small reductions.

There is always a process group, of one rank if need be, so nothing downstream asks whether there is one.
"""

import random
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchtitan.ranks import Ranks, set_default


def device_type() -> str:
    """ "cuda" where torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def init(ranks: Ranks, timeout_seconds: int, trace_buf_size: int = 0) -> torch.device:
    """Join the world and return this rank's device. Collectives on CPU tensors go over gloo on every machine."""
    set_default("TORCH_FR_BUFFER_SIZE", str(trace_buf_size))
    timeout = timedelta(seconds=timeout_seconds)
    if device_type() == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"{ranks.local_world_size} ranks here and {torch.cuda.device_count()} visible GPUs; allowed: "
                "one rank a GPU; lower NGPU or --nproc-per-node, or see CUDA_VISIBLE_DEVICES"
            )
        device, backend = torch.device("cuda", ranks.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    if dist.is_initialized():
        return device
    if ranks.local_world_size == ranks.world_size and sys.platform == "linux":
        set_default("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing to offer to the network
    if ranks.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return device


def set_timeout(timeout_seconds: int) -> None:
    """Change the timeout of all groups but the checkpointer's: long for the first step (compile, cold caches), short
    afterwards. A save may take longer than any step.
    """
    for group in list(distributed_c10d._world.pg_map):  # torch has no public way to list or to change them
        if not group.group_desc.startswith("checkpoint"):
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def close() -> None:
    """Leave the world. A rank that failed does not call this: it must not wait for ranks that did not."""
    if dist.is_initialized():
        dist.destroy_process_group()


def set_seed(seed: int, rank: int) -> None:
    """Seed the generators that draw differently on every rank (dropout). Weights and data have keys of their own."""
    torch.manual_seed(seed + rank)
    random.seed(seed + rank)


def set_deterministic(warn_only: bool) -> None:
    """Only deterministic kernels from here on."""
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False


def sum_over_ranks(*values: int) -> list[int]:
    """Sums of small host integers over all ranks, over gloo: the host learns them without waiting for the GPU."""
    if dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor)
    return tensor.tolist()
