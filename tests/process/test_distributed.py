"""Process group setup of a rank, and exchange of values and tensors between ranks."""

import os
import random
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_alone, run_ranks
from torchtitan.process import distributed
from torchtitan.process.ranks import Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits on open files are raised on Linux only")


def settings(**variables: str) -> dict[str, object]:
    """Initialize a world of one with few open files allowed; return the resulting settings."""
    for name in ("TORCH_GLOO_LAZY_INIT", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    distributed.init(Ranks(), timeout_seconds=10, trace_buf_size=7, folder=Path("/a/run"))
    distributed.close()
    return {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most),
        "lazy": os.environ["TORCH_GLOO_LAZY_INIT"],
        "recorder": os.environ["TORCH_FR_BUFFER_SIZE"],
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
        "dump": os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"],
        "dumped to": os.environ["TORCH_FR_DUMP_TEMP_FILE"],
    }


def test_libraries_are_set_up_for_large_worlds():
    allocator = "expandable_segments:True" if distributed.device_type() == "cuda" else None
    expected = {"files": True, "lazy": "1", "recorder": "7", "allocator": allocator}
    expected |= {"dump": "1", "dumped to": "/a/run/nccl-collectives-of-rank-"}
    assert run_alone(settings) == expected


def settings_with_a_users_variables() -> dict[str, object]:
    return settings(TORCH_GLOO_LAZY_INIT="0", TORCH_FR_DUMP_TEMP_FILE="/elsewhere/")


def test_a_users_setting_is_kept():
    values = run_alone(settings_with_a_users_variables)
    assert (values["lazy"], values["dumped to"]) == ("0", "/elsewhere/")


# Plain values and tensors of ranks


def exchange_values() -> tuple:
    rank = dist.get_rank()
    value = {"of": rank, "text": "\u00e9" * 10**rank, "list": [1.5, None, True], "nested": {"a": [rank] * 3}}
    broadcast_value = distributed.broadcast_json(value if rank == 0 else object())  # values of other ranks are ignored
    scattered_value = distributed.scatter_json([["x" * 10**exponent] for exponent in range(3)] if rank == 0 else None)
    return distributed.gather_json(value), distributed.all_gather_json(value), broadcast_value, scattered_value


def test_plain_values_arrive_unchanged():
    values = [
        {"of": rank, "text": "\u00e9" * 10**rank, "list": [1.5, None, True], "nested": {"a": [rank] * 3}}
        for rank in range(3)
    ]
    first, *other_ranks = run_ranks(3, exchange_values)
    assert first == (values, values, values[0], ["x"])
    assert other_ranks == [(None, values, values[0], ["x" * 10**rank]) for rank in (1, 2)]


def gathered_tensors() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    tensors = {f"of {rank}": torch.arange(6.0).view(2, 3).t() + rank, "of all": torch.tensor(rank)}
    if rank == 2:
        tensors |= {"bfloat16": torch.ones(3).bfloat16() / 3, "empty": torch.empty(0, 4), "scalar": torch.tensor(0.1)}
    return distributed.gather_tensors(tensors)


def test_tensors_are_gathered_on_the_first_rank_and_duplicates_come_from_the_lowest():
    first, *other_ranks = run_ranks(3, gathered_tensors)
    expected = {f"of {rank}": torch.arange(6.0).view(2, 3).t() + rank for rank in range(3)}
    expected |= {"bfloat16": torch.ones(3).bfloat16() / 3, "empty": torch.empty(0, 4), "scalar": torch.tensor(0.1)}
    expected |= {"of all": torch.tensor(0)}
    assert other_ranks == [{}, {}] and first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) and first[name].dtype == expected[name].dtype for name in first)


def draws(seed):
    distributed.set_seed(seed, rank=1)
    return [random.random(), np.random.rand(), float(distributed.torch.rand(()))]


def test_every_generator_is_seeded():
    assert draws(3) == draws(3)
    assert all(a != b for a, b in zip(draws(3), draws(4), strict=True))
