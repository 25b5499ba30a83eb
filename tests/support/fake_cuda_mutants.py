"""Faults that the checks on the fake CUDA have to find, each planted before a step is built."""

import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from torchtitan.parallelisms import parallel_model
from torchtitan.parallelisms.pipeline import pipeline_parallel


def wrong_device() -> None:
    """Create a tensor without naming a device."""
    clip = parallel_model.clip_gradients
    parallel_model.clip_gradients = lambda *args, **kwargs: clip(*args, **kwargs).reshape(1) + torch.ones(1)


def host_wait() -> None:
    """Read the gradient norm on the host in every step."""
    clip = parallel_model.clip_gradients

    def clip_and_read(*args, **kwargs):
        total = clip(*args, **kwargs)
        assert total.item() >= 0
        return total

    parallel_model.clip_gradients = clip_and_read


def copied_numbers() -> None:
    """Copy numbers of the host to the device in every step."""
    clip = parallel_model.clip_gradients
    parallel_model.clip_gradients = lambda *args, **kwargs: clip(*args, **kwargs) * torch.tensor(1.0, device="cuda")


def coalesced() -> None:
    """Coalesce receives as torch did before 2.12.1; these never match plain sends."""
    schedules._batch_p2p = lambda operations, desc=None: dist.batch_isend_irecv(operations) if operations else []


def other_order() -> None:
    """Swap the first two microbatches on odd ranks."""
    build = pipeline_parallel.build_table

    def build_by_rank(*args, **kwargs):
        table = build(*args, **kwargs)
        if dist.get_rank() % 2:
            swapped = {0: 1, 1: 0}
            row = table[dist.get_rank()]
            table[dist.get_rank()] = [a._replace(microbatch=swapped.get(a.microbatch, a.microbatch)) for a in row]
        return table

    pipeline_parallel.build_table = build_by_rank


def other_collective() -> None:
    """Reduce the gradient norm once more on odd ranks."""
    clip = parallel_model.clip_gradients

    def clip_and_reduce(*args, **kwargs):
        total = clip(*args, **kwargs)
        if dist.get_rank() % 2:
            dist.all_reduce(total)
        return total

    parallel_model.clip_gradients = clip_and_reduce


def shape_by_values() -> None:
    """Use a shape that only the values of a tensor on the device decide."""
    clip = parallel_model.clip_gradients
    parallel_model.clip_gradients = lambda *args, **kwargs: clip(*args, **kwargs).reshape(1).nonzero()


def ends() -> None:
    """End the process of the rank."""
    os._exit(9)
