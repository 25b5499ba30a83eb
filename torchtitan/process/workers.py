"""Functions in several processes of this machine, for work that takes seconds. Imports no torch."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from torchtitan.core.errors import JobError
from torchtitan.process.exit import die_with_parent
from torchtitan.process.machine import shared_memory_obstacle

MAX_PROCESSES = 8
"""Maximum number of processes. Each needs about 1 GB."""

T = TypeVar("T")


class WorkerEnded(JobError):
    """A process that the machine ended, which says nothing about the job."""


def run_in_processes(
    function: Callable[..., T],
    tasks: Sequence[tuple[Any, ...]],
    work: str,
    begin: Callable[[], None] | None = None,
    make_context: Callable[[], Any] | None = None,
) -> list[T]:
    """Return the function's result for each tuple of arguments, computed in up to MAX_PROCESSES processes.

    They are forked, or started in the context that `make_context` returns, and call `begin` first. With one processor,
    on another system than Linux, or without /dev/shm, this process computes all. An exception of the first task that
    fails is raised here and ends the others. Raises WorkerEnded if a process is killed; `work`: its name for that.
    """
    number = min(len(tasks), processors(), MAX_PROCESSES)
    if number < 2 or sys.platform != "linux" or multiprocessing.current_process().daemon or shared_memory_obstacle():
        return [function(*task) for task in tasks]
    context = make_context() if make_context else multiprocessing.get_context("fork")
    earlier = multiprocessing.active_children()
    with ProcessPoolExecutor(number, context, begin or begin_worker) as pool:
        futures = [pool.submit(function, *task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                if child not in earlier:
                    child.kill()
                    child.join()
            if not isinstance(error, BrokenProcessPool):
                raise
            remedy = "with fewer processors (taskset --cpu-list 0 torchtitan ...) it has fewer processes"
            raise WorkerEnded(f"{work} was ended, as where memory runs out: each takes about a GB; {remedy}") from None


def begin_worker() -> None:
    """Set up a worker process, which ends with its parent, and immediately on Ctrl-C."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
