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
from concurrent.futures.thread import _threads_queues
from multiprocessing import connection, get_context, set_start_method
from multiprocessing.process import _children  # type: ignore[attr-defined]
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
        """Read both streams to their ends and close them, and wait for the end. Kills it after `timeout` seconds."""
        with futures.ThreadPoolExecutor(2) as threads:
            streams = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            if futures.wait(streams, timeout).not_done:
                self.kill()
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        self.stdout.close()
        self.stderr.close()
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
    _open_streams()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    set_start_method(None, force=True)  # the platform's default, as for a user, and not the inherited one
    fork_ranks()
    sys.path[:0] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    _run_text(text, arguments)


def _open_streams(buffering: int = -1) -> None:
    """Open output and errors, which may be of another kind than the files of the process that this is a fork of."""
    sys.stdout = sys.__stdout__ = open(1, "w", buffering, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115


def _run_text(text: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-c", *arguments]
    module = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(text, "<string>", "exec"), module.__dict__)


class Forked(subprocess.Popen[Any]):
    """A `subprocess.Popen` whose Python programs are forks of this process. Other programs start as usual.

    Files not listed in `pass_fds` stay open in the fork.
    """

    def _execute_child(self, args: Any, *options: Any) -> None:
        arguments = None if options[0] else _arguments_of_python(args)
        if arguments is None:
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        folder, environment, streams, new_session = options[4], options[5], options[9:15], options[20]
        variables = dict(os.environ if environment is None else environment)
        process = get_context("fork").Process(
            target=_run_python, args=(arguments, variables, folder, streams, new_session)
        )
        process.start()
        _children.discard(process)  # multiprocessing would wait for it in place of Popen
        self.pid, self._child_created = process.pid, True
        self._close_pipe_fds(*streams)  # type: ignore[attr-defined]


def _arguments_of_python(command: Any) -> list[str] | None:
    """Return the arguments of a command that runs this Python; None if it is another, or not to be run in a fork."""
    program, *arguments = [command] if isinstance(command, str | bytes | os.PathLike) else map(os.fspath, command)
    if arguments[:2] == python_command("")[1:3]:
        arguments[:2] = ["-m"]
    can_fork = arguments and (arguments[0] in ("-c", "-m", "-u") or arguments[0].endswith(".py"))
    return arguments if program == sys.executable and can_fork and not _is_tied(arguments) else None


def _is_tied(arguments: list[str]) -> bool:
    return arguments[0] == python_command("")[1]


def _run_python(
    arguments: list[str], variables: dict[str, str], folder: Any, streams: Sequence[int], new_session: bool
) -> None:
    """Run `python arguments` in this fork. `streams`: ends of pipes, or files, as of `Popen._execute_child`."""
    if new_session:
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (*stop_signals(), signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    stdin, stdin_of_parent, stdout_of_parent, stdout, stderr_of_parent, stderr = streams
    for descriptor in {stdin_of_parent, stdout_of_parent, stderr_of_parent} - {-1}:
        os.close(descriptor)
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        if descriptor != -1:
            os.dup2(descriptor, number)
    if folder is not None:
        os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    is_unbuffered = arguments[0] == "-u"
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    _open_streams(1 if is_unbuffered else -1)
    atexit._clear()  # functions of the process that this is a fork of
    _threads_queues.clear()  # its executors, for whose threads this one would wait
    try:
        _run_arguments(arguments[is_unbuffered:])
    finally:  # multiprocessing leaves out the functions at exit
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _run_arguments(arguments: list[str]) -> None:
    """Run a module as `python -m` would, a text as `python -c`, or a script."""
    if arguments[0] == "-c":
        return _run_text(arguments[1], arguments[2:])
    if arguments[0] != "-m":
        sys.argv, sys.path[:0] = arguments, [os.path.dirname(arguments[0])]
        runpy.run_path(arguments[0], run_name="__main__")
        return
    sys.argv = arguments[1:]
    sys.modules.pop(sys.argv[0], None)  # a command of this process may have imported it, and runpy warns of it
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def fork_ranks() -> None:
    """Let this process fork the ranks that it launches from now on."""
    processes.subprocess = forks.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[assignment]


def fork_programs() -> None:
    """Let this process, and its children, fork all Python programs that they start from now on."""
    subprocess.Popen = Forked  # type: ignore[misc]
