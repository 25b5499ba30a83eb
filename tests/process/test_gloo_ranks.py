"""Tests of functions on gloo ranks: their answers, an error with its place, and ranks that wait forever."""

import os

import pytest
import torch
import torch.distributed as dist

from torchtitan.process.gloo_ranks import Hang, RankError, run_on_ranks


def total(value):
    tensor = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return dist.get_rank(), int(tensor), os.environ["WORLD_SIZE"]


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("a reason")
    dist.barrier()


def wait_on_one():
    if dist.get_rank() == 0:
        dist.barrier()


def test_answers_are_in_the_order_of_the_ranks():
    assert run_on_ranks(2, total, 3) == [(0, 9, "2"), (1, 9, "2")]


def test_the_error_of_a_rank_ends_all():
    with pytest.raises(RankError, match=r"on rank 1: ValueError at .*test_gloo_ranks.py:\d+: a reason"):
        run_on_ranks(2, fail_on_one)


def test_a_hang_names_the_ranks_and_their_places():
    with pytest.raises(Hang, match=r"rank 0 did not end within 3 s: .*; rank 0 is at .*test_gloo_ranks.py:\d+"):
        run_on_ranks(2, wait_on_one, limit=3.0)
