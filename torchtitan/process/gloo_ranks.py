"""Run a function on gloo ranks of this machine: fresh processes, forked from one that has imported torch.

For a question about several ranks that one process asks, as of `torchtitan contract`; jobs have the launcher.
"""

import faulthandler
import os
import re
import signal
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 60.0
"""Seconds of a check."""
END_SECONDS = 2.0
"""After an error, for ranks in collectives that never end."""
STACK_SECONDS = 0.5
"""For ranks that hang, to write where they are."""
STACKS = signal.SIGUSR2
OURS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
STANDARD = sysconfig.get_path("stdlib")


class RankError(Exception):
    """A check raised on a rank, or did not end in time."""


class Hang(RankError):
    """A check did not end in time."""


def run_on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, limit: float | None = None, threads: int = 1
) -> list[Any]:
    """Return `function(*args)` of every rank. Raises RankError with the first error.

    `limit`: seconds until the ranks count as hung; None: LIMIT. `threads`: of each rank.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            pipe, child_pipe = context.Pipe()
            processes.append(
                context.Process(target=_answer, args=(rank, ranks, threads, folder, child_pipe, function, args))
            )
            processes[-1].start()
            child_pipe.close()
            pipes.append(pipe)
        try:
            return _answers(pipes, LIMIT if limit is None else limit)
        except Hang as hang:
            raise Hang(f"{hang}{_stacks(processes, Path(folder))}") from None
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(END_SECONDS)
                process.kill()
                process.join()


def _answers(pipes: list[Any], limit: float) -> list[Any]:
    answers, deadline = dict[int, Any](), time.monotonic() + limit
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready: list[Any] = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            some = "rank" if len(waiting) == 1 else "ranks"
            numbers = ", ".join(map(str, waiting.values()))
            raise Hang(f"{some} {numbers} did not end within {limit:.0f} s: ranks may wait in different collectives")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                error, answers[rank] = pipe.recv()
            except EOFError:
                raise RankError(f"the process of rank {rank} was killed") from None
            if error:
                raise RankError(f"it raised an error on rank {rank}: {error}")
    return [answers[rank] for rank in range(len(pipes))]


def _stacks(processes: list[Any], folder: Path) -> str:
    """Return where each rank is, or nothing of ranks that do not say it."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, STACKS)
    time.sleep(STACK_SECONDS)
    stacks = {rank: folder / f"stack{rank}" for rank in range(len(processes))}
    places = {rank: _place(file.read_text()) for rank, file in stacks.items() if file.exists()}
    return "".join(f"; rank {rank} is at {place}" for rank, place in places.items() if place)


def _place(stack: str) -> str:
    """Return the innermost line of a stack that is of the package, or else the innermost one."""
    lines = re.findall(r'File "(.+)", line (\d+) in', stack)  # innermost first
    brought = [
        (file, line)
        for file, line in lines
        if not file.startswith(OURS) and ("site-packages" in file or not file.startswith(STANDARD))
    ]
    return ":".join((brought or lines or [("",)])[0])


def _answer(
    rank: int, ranks: int, threads: int, folder: str, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in variables.items()}, TORCH_GLOO_LAZY_INIT="0")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo's tensors are on the CPU
    with open(os.devnull, "w") as quiet:  # what is wrong is sent
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    faulthandler.register(STACKS, file=open(Path(folder, f"stack{rank}"), "w"), all_threads=False)  # noqa: SIM115
    torch.set_num_threads(threads)
    store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        pipe.send(("", function(*args)))
    except BaseException as error:  # foreign code may raise any type
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        pipe.send((f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}: {error}", None))
    signal.signal(STACKS, signal.SIG_IGN)  # it does not hang
    with suppress(EOFError):  # a rank that ends would break the collectives of slower ones
        pipe.recv()
