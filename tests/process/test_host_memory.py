"""Freed memory of the host: kept by a process that computes on CPUs, unless its user chose otherwise."""

import os
import platform
import subprocess
import sys
from unittest import mock

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.config import manager
from torchtitan.process import machine
from torchtitan.process.ranks import read_ranks
from torchtitan.training import step
from torchtitan.training.trainer import Trainer

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"

PAGES = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
COUNT_PAGE_FAULTS = """
import resource
import sys
import torch
from torchtitan.process import distributed
from torchtitan.process.ranks import read_ranks

if sys.argv[1] == "rank":
    distributed.init(read_ranks(), 60)

def step():
    activations = [torch.ones(2**24) for _ in range(3)]  # 64 MiB each
    del activations[0]
    activations.append(torch.ones(2**23))

for _ in range(20):  # until the heap's layout is settled
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


MEASURE_RESIDENT_MEMORY = """
from pathlib import Path
import torch
from torchtitan.process import distributed, machine
from torchtitan.process.ranks import read_ranks

distributed.init(read_ranks(), 60)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

tensors = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
del tensors[::2]
for step in (3, 4):
    before = resident()
    machine.return_unused_memory(step)
    print(before - resident())
"""


def numbers_printed(script: str, *arguments: str, **variables: str) -> list[int]:
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"} | variables
    command = [sys.executable, "-c", script, *arguments]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [int(line) for line in printed.split()]


def page_faults(kind: str, **variables: str) -> int:
    return numbers_printed(COUNT_PAGE_FAULTS, kind, **variables)[0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another allocator")
def test_a_rank_on_a_cpu_reuses_the_memory_of_freed_tensors():
    assert page_faults("rank") < PAGES // 10  # of 5 x 3.5 x PAGES
    fetched = 0.5 * 5 * 3.5 * PAGES  # glibc raises its thresholds as it goes, so it does not fetch all
    assert page_faults("plain") > fetched
    assert page_faults("rank", MALLOC_ARENA_MAX="4") > fetched


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another allocator")
def test_gaps_between_tensors_return_to_the_system_after_the_first_steps():
    gaps = 32 * 2**22 // os.sysconf("SC_PAGE_SIZE")
    after_third, after_fourth = numbers_printed(MEASURE_RESIDENT_MEMORY)
    assert after_third < gaps // 10 and after_fourth > 0.9 * gaps
    assert numbers_printed(MEASURE_RESIDENT_MEMORY, MALLOC_MMAP_MAX_="0")[1] < gaps // 10  # the user chose


def steps_that_return_memory(argv: list[str]) -> list[tuple[int, bool]]:
    """Train; return the steps, counted in this process, after which memory may return, and if gradients lived then."""
    trainer, calls = Trainer(manager.load(argv), read_ranks()), []

    def record(number: int) -> None:
        calls.append((number, all(parameter.grad is not None for _, parameter in trainer.model.named_parameters())))

    with mock.patch.object(step, "return_unused_memory", record):
        trainer.train()
    trainer.metrics.close()
    return calls


def test_a_trainer_returns_memory_before_gradients_are_freed_also_when_it_resumes(tmp_path):
    texts = jobs.write_texts(tmp_path)
    for steps, expected in ((3, [(1, True), (2, True), (3, True)]), (5, [(1, True), (2, True)])):
        argv = jobs.arguments(tmp_path / "run", texts, training__steps=steps, checkpoint__enable=True)
        assert run_ranks(1, steps_that_return_memory, argv)[0] == expected


@pytest.fixture
def no_choice(monkeypatch):
    """Unset the variables by which a user sets the allocator up."""
    for name in list(os.environ):
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD", HUGE_PAGES):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["MALLOC_MMAP_MAX_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_user_set_up_stays_as_it_is(name, no_choice, monkeypatch):
    monkeypatch.setenv(name, "")
    monkeypatch.setattr(machine.ctypes, "CDLL", None)  # not called
    machine.keep_freed_memory()
    machine.use_huge_pages()
    assert HUGE_PAGES not in os.environ


@pytest.mark.parametrize(
    ("command", "device", "setting"),
    [("train", "cpu", "1"), ("export", "cpu", "1"), ("train", "cuda", None), ("check", "cpu", None)],
)
def test_commands_that_compute_on_a_cpu_request_huge_pages(command, device, setting, no_choice, monkeypatch):
    monkeypatch.setattr("torchtitan.process.ranks.likely_device", lambda: device)
    monkeypatch.setattr(cli, "resolve_name", lambda name: lambda arguments: 0)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert cli.main([command]) == 0 and os.environ.get(HUGE_PAGES) == setting


def test_without_mallopt_nothing_changes(no_choice, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    machine.keep_freed_memory()
    assert not caplog.messages
