"""Run `python -m torchtitan.launch` with ranks, or their fork server, that are forks of the launcher.

For `run_script` and tests of commands.

A rank in a new interpreter needs three seconds for imports; a fork of a process that has imported torch starts at once,
with the same environment, session and signals. Tests that use `jobs.start` cover new interpreters.
"""

import os
import runpy
import signal
import sys
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

from torchtitan import launch
from torchtitan.launcher import forks, processes
from torchtitan.process.children import python_command
from torchtitan.process.exit import exit_with, stop_signals


class Forked:
    """The part of `subprocess.Popen` that the launcher uses. Files not listed in `pass_fds` stay open in the fork."""

    def __init__(self, command: list[str], env: dict[str, str], pass_fds: Any, start_new_session: bool) -> None:
        assert command[:3] == python_command("")[:3] and start_new_session
        self._process = get_context("fork").Process(target=_run_rank, args=(command[3:], env))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run_rank(argv: list[str], env: dict[str, str]) -> None:
    """Run a rank's module as `python -m` would, in this fork."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (*stop_signals(), signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    sys.argv = argv
    sys.modules.pop(argv[0], None)  # a command of this process may have imported it, and runpy warns of it
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def fork_ranks() -> None:
    """Let this process fork the ranks that it launches from now on."""
    processes.subprocess = forks.subprocess = SimpleNamespace(Popen=Forked)  # type: ignore[assignment]


if __name__ == "__main__":
    while "=" in sys.argv[1]:
        name, _, os.environ[name] = sys.argv.pop(1).partition("=")
    fork_ranks()
    exit_with(lambda: launch.main(sys.argv[1:]))
