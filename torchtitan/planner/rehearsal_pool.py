"""Several rehearsals at once: each is alone in its process, as a world of its own, and computes nothing."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from torchtitan.core.errors import JobError
from torchtitan.process.exit import die_with

MOST = 8
"""Each process takes about a GB."""

T = TypeVar("T")


def all_of(function: Callable[..., T], tasks: Sequence[tuple[Any, ...]]) -> list[T]:
    """What the function gives for each tuple of arguments, by as many processes as this one may use processors; by this
    one, where that is one or on another system than Linux. What is raised in one of them is raised here.
    """
    number = min(len(tasks), _processors(), MOST)
    if number < 2 or sys.platform != "linux" or multiprocessing.current_process().daemon:
        return [function(*task) for task in tasks]
    context: Any = multiprocessing.get_context("fork")
    if torch.accelerator.is_available():
        # autograd has threads then after its first backward, and refuses to work in a fork from there on; CUDA does
        # from its first use. So processes are forked from one that has imported all and done nothing
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, function.__module__])
    with ProcessPoolExecutor(number, context, _begin) as pool:
        begun = [pool.submit(function, *task) for task in tasks]
        try:
            return [each.result() for each in begun]
        except BrokenProcessPool:
            remedy = "with fewer processors (taskset --cpu-list 0 torchtitan ...) it has fewer processes"
            raise JobError(
                f"a rehearsal was ended, as where memory runs out: each takes about a GB; {remedy}"
            ) from None
        finally:  # after a failure, or Ctrl-C, none that waits is begun
            pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """Of each process. It ends with the one that it was forked from, and by Ctrl-C at once. Threads of that one are not
    in it, and what would wait for them must not be begun. On GPUs, of which autograd would take some memory for itself,
    it has nothing to do.
    """
    die_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
