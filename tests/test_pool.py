"""The harness itself: results in order, failures named by rank, a fresh set of ranks after a failure."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support import shared_meshes
from tests.support.jobs import ROOT
from tests.support.pool import RankFailed, run_ranks
from torchtitan.checkpoint.agreement import Peers
from torchtitan.parallelisms.parallel_dims import ParallelDims


def sum_of_ranks(offset):
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def test_every_rank_answers_in_order():
    assert run_ranks(2, sum_of_ranks, 10) == [(0, 21.0), (1, 21.0)]


def test_a_failing_rank_is_named_and_the_next_test_gets_fresh_ranks():
    with pytest.raises(RankFailed, match=r"rank 1 ---[\s\S]*planted"):
        run_ranks(2, fail_on_rank_one)
    assert run_ranks(2, sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def crash_on_rank_one(marker: Path, times: int):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if dist.get_rank() == 1 and len(list(marker.iterdir())) < times:
        Path(marker, str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_crash_below_python_is_tried_once_more(tmp_path):
    with pytest.warns(UserWarning, match=r"crash_on_rank_one.* is run again: [\s\S]*rank 1 ---\nprocess ended .* -11"):
        assert run_ranks(2, crash_on_rank_one, tmp_path, 1) == [None, None]
    with pytest.warns(UserWarning), pytest.raises(RankFailed, match="exit code -11"):
        run_ranks(2, crash_on_rank_one, tmp_path, 3)


def wait_for_ever():
    while True:
        time.sleep(0.1)


def test_ranks_that_hang_say_where():
    with pytest.raises(RankFailed, match=r"rank 0 ---\nno answer within 1 s[\s\S]*in wait_for_ever[\s\S]*rank 1 ---"):
        run_ranks(2, wait_for_ever, limit=1)


def makes_meshes_and_groups() -> tuple[bool, bool]:
    dims, group = ParallelDims(2, 1, 2), Peers("a").group
    return dims.build_mesh("cpu") is dims.build_mesh("cpu"), Peers("a").group is group is not Peers("b").group


def test_equal_meshes_and_groups_are_one():
    """Else the threads of their groups add up over the tests, until the machine does nothing but switch threads."""
    assert run_ranks(2, makes_meshes_and_groups) == [(True, True)] * 2


def test_ranks_listen_where_they_are_told(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        shared_meshes.share_gloo_device()


KILLED = """
import os, signal
from tests.support import pool

pool._context.set_forkserver_preload([])
print(pool.run_ranks(1, os.getpid)[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_do_not_outlive_a_killed_pytest():
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 20
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(done.stdout)}").exists()
