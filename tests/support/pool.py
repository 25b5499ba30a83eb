"""Ranks for distributed tests: one set of gloo processes per world size (and test worker), started once and kept.

Importing torch takes seconds; forking a rank from a server that has imported it takes 0.05 s. A rank that fails leaves
its peers inside a collective, so the whole set is killed and the next test gets a new one.
"""

import atexit
import faulthandler
import gc
import importlib
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context, set_start_method
from pathlib import Path
from typing import Any

from tests.support.leftovers import restore_environment

# Imported once for all ranks, because most of them need these and the import takes longer than their tests.
PRELOAD = [
    "tests.support.shared_meshes",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.experimental",
    "torch._inductor.compile_fx",
    "torch._dynamo.repro.after_dynamo",
    "torch.export._trace",
    "torchtitan.training.trainer",
    "tests.support.forked_job",
    "tests.support.table_rows",
    "tests.support.pool",
]
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
DEFAULT_LIMIT = 600.0

_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)
_environment = dict(os.environ)
_pools: dict[int, "RankPool"] = {}


class RankFailed(AssertionError):
    """A function raised on some rank, or did not return in time. The message holds the ranks' tracebacks."""


class RankCrashed(RankFailed):
    """A signal ended a rank, so a library crashed and not Python code."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, limit: float = DEFAULT_LIMIT) -> list[Any]:
    """Run `function(*args)`, a module-level function, on every rank; return the results in rank order.

    If a signal ends a rank, pytest repeats the test once in new folders (pyproject.toml), and a warning reports the
    crash.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = RankPool(world_size)
    try:
        return pool.run(function, args, limit)
    except BaseException as error:
        _pools.pop(world_size).kill()
        if isinstance(error, RankCrashed):
            warnings.warn(f"{function.__qualname__}{args}: {error}", stacklevel=2)
        raise


def fork(target: Callable[..., None], *args: Any) -> Any:
    """Start a process that runs `target(*args)` in the environment from before the tests.

    The fork server keeps the environment of its start, which may be during a test that has changed it.
    """
    environment = dict(os.environ)
    restore_environment(_environment)
    try:
        forkserver.ensure_running()
    finally:
        restore_environment(environment)
    process = _context.Process(target=target, args=args)
    process.start()
    return process


def run_alone(function: Callable[..., Any], *args: Any, limit: float = DEFAULT_LIMIT) -> Any:
    """Run `function(*args)` in a fresh process without a process group, if it changes the process permanently."""
    pipe, child_pipe = _context.Pipe()
    process = fork(_answer_alone, child_pipe, function.__module__, function.__qualname__, args)
    child_pipe.close()
    try:
        ok, answer = pipe.recv() if pipe.poll(limit) else (False, f"no answer within {limit:.0f} s")
    except EOFError:
        ok, answer = False, "the process ended without an answer"
    finally:
        process.kill()
        process.join()
    if not ok:
        raise RankFailed(answer)
    return answer


def run_script(folder: Path, path: Path, *arguments: str, limit: float = DEFAULT_LIMIT) -> tuple[int | None, str, str]:
    """Run `python path arguments` in `folder`; return exit code, output and errors.

    The process is forked with torch imported, which saves most of a script's time, and so are the Python programs that
    it starts. The code is None after a timeout.
    """
    with tempfile.TemporaryDirectory() as streams:
        files = [os.path.join(streams, name) for name in ("out", "err")]
        process = start_script(files, folder, path, *arguments)
        process.join(limit)
        code = process.exitcode
        process.kill()
        process.join()
        out, err = (Path(file).read_text() for file in files)
    return code, out, err


def start_script(files: list[str], folder: Path, path: Path, *arguments: str) -> Any:
    """Start `python path arguments` in `folder` and return its process. `files`: for its output and its errors."""
    return fork(_be_script, files, str(folder), str(path), *arguments)


def _be_script(files: list[str], folder: str, path: str, *arguments: str) -> None:
    from tests.support import forked_job  # which needs this module

    gc.freeze()
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    set_start_method(None, force=True)  # the platform's default, as for a user, and not the inherited one
    forked_job.fork_programs()
    sys.argv, sys.path[:0] = [path, *arguments], [os.path.dirname(path)]
    runpy.run_path(path, run_name="__main__")


class RankPool:
    def __init__(self, world_size: int):
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        self.pipes: list[connection.Connection] = []
        self.processes = []
        for rank in range(world_size):
            pipe, child_pipe = _context.Pipe()
            process = fork(_serve, rank, world_size, self.folder, child_pipe)
            child_pipe.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], limit: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        deadline = time.monotonic() + limit
        answers: dict[int, tuple[bool, Any]] = {}
        kind = RankFailed
        while len(answers) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = self.stacks()
                answers |= {
                    rank: (False, f"no answer within {limit:.0f} s\n{stacks[rank]}") for rank in waiting.values()
                }
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(60)
                    code = self.processes[rank].exitcode
                    kind = RankCrashed if code is not None and code < 0 else kind
                    answers[rank] = (False, f"process ended with exit code {code}\n{self.stack_of(rank)}")
                if not answers[rank][0]:  # its peers may wait forever; give them a moment to fail
                    deadline = min(deadline, time.monotonic() + 5)
        failed = {rank: text for rank, (ok, text) in sorted(answers.items()) if not ok}
        if failed:
            raise kind("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in failed.items()))
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def stacks(self) -> list[str]:
        """Return the stack of each rank."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        return [self.stack_of(rank) for rank in range(len(self.pipes))]

    def stack_of(self, rank: int) -> str:
        path = self.stack_file(rank)
        return path.read_text() if path.exists() else ""

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder, f"stacks-{rank}")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(rank: int, world_size: int, folder: str, pipe: connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    from tests.support.shared_meshes import share

    share()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    # lazy gloo connections hang with a FileStore; an earlier test may have enabled them as a job does, with a TCPStore
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    torch.set_num_threads(1)
    gc.freeze()  # collecting objects of the fork would take 3 to 8 % of a row
    stacks = open(os.path.join(folder, f"stacks-{rank}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks)
    faulthandler.enable(stacks)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        _answer(pipe, module, name, args)


def _answer_alone(*question: Any) -> None:
    gc.freeze()
    _answer(*question)


def _answer(pipe: connection.Connection, module: str, name: str, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    random.seed(0)
    torch.manual_seed(0)
    world = dist.group.WORLD
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        answer = (True, function(*args))
        assert world in (None, dist.group.WORLD), "the function left a process group to the next test"
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)


@atexit.register
def close_pools() -> None:
    for pool in _pools.values():
        pool.kill()
    _pools.clear()
