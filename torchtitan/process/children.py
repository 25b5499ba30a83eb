"""Start child processes, which run our package and not another of its name, and which end with this process.

All Python programs of this package are started by `python_command` (a test holds that), except for scripts in isolated
mode (`python -I`), which import nothing of it. On Linux a child that is tied to this process is killed when this one
ends in any way, also by SIGKILL. It is tied to the thread that starts it, so this should be the main thread.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan.process.run_module import EXEC

_SCRIPT = str(Path(__file__).with_name("run_module.py"))


def python_command(module: str, *arguments: str, tied: bool = False) -> list[str]:
    """Return the command that runs a module of this package as `python -m` does, whatever the current folder holds.

    `tied`: the child is killed when this process ends. Ranks tie themselves to their launcher.
    """
    return [sys.executable, _SCRIPT, str(os.getpid() if tied else 0), module, *arguments]


def tied_command(command: Sequence[str], number: int = signal.SIGTERM) -> list[str]:
    """Return the command that runs another program, which gets a signal when this process ends."""
    return [sys.executable, _SCRIPT, f"{os.getpid()}:{int(number)}", EXEC, *command]
