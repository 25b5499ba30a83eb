"""Start launchers, and the ranks that they start, as forks of a process that has imported torch.

A rank in a new interpreter needs three seconds of CPU time for imports, and a launcher half a second; a fork starts at
once, with the same environment, session and signals. Tests that use `jobs.start_new` cover new interpreters.
"""

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent import futures
from multiprocessing import connection, get_context, set_start_method
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support.pool import fork
from torchtitan.launcher import forks, processes
from torchtitan.process.children import python_command
from torchtitan.process.exit import stop_signals


class Program:
    """`python -c text arguments` in a fork, with the part of `subprocess.Popen` that tests use.

    It is the leader of a session, and forks the ranks that it launches. `environment`: added to this process's.
    """

    def __init__(self, text: str, *arguments: str, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.args = (text, *arguments)
        pipes = [os.pipe() for _ in range(2)]
        writers = [connection.Connection(writer, readable=False) for _, writer in pipes]
        variables = os.environ | (environment or {})
        self._process = fork(_run_program, writers, str(folder), variables, text, arguments)
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (open(reader) for reader, _ in pipes)  # noqa: SIM115
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends and wait for the program's. It is killed after `timeout` seconds."""
        with futures.ThreadPoolExecutor(2) as threads:
            streams = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            if futures.wait(streams, timeout).not_done:
                self.kill()
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        self.wait(timeout)
        return streams[0].result(), streams[1].result()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_program(
    streams: list[Any], folder: str, environment: dict[str, str], text: str, arguments: Sequence[str]
) -> None:
    gc.freeze()
    os.setsid()
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    set_start_method(None, force=True)  # the platform's default, as for a user, and not the inherited one
    fork_ranks()
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    _run_text(text, arguments)


def _run_text(text: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-c", *arguments]
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(text, "<string>", "exec"), module.__dict__)


class Forked:
    """The part of `subprocess.Popen` that the launcher uses. Files not listed in `pass_fds` stay open in the fork."""

    def __init__(self, command: list[str], env: dict[str, str], pass_fds: Any, start_new_session: bool) -> None:
        assert (command[1] == "-c" or command[:3] == python_command("")[:3]) and start_new_session
        self._process = get_context("fork").Process(target=_run_rank, args=(command[1:], env))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_rank(arguments: list[str], env: dict[str, str]) -> None:
    """Run a rank's module as `python -m` would, or its text as `python -c`, in this fork."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (*stop_signals(), signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    atexit._clear()  # functions of the process that this is a fork of
    try:
        if arguments[0] == "-c":
            return _run_text(arguments[1], arguments[2:])
        sys.argv = arguments[2:]
        sys.modules.pop(sys.argv[0], None)  # a command of this process may have imported it, and runpy warns of it
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    finally:  # multiprocessing leaves out the functions at exit
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def fork_ranks() -> None:
    """Let this process fork the ranks that it launches from now on."""
    processes.subprocess = forks.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[assignment]
