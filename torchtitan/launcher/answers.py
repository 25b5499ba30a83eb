"""The rank's side of a hang: its stacks and the log of its collectives, when the launcher asks.

Stacks come by a signal that is handled in C, so also while a thread holds Python's lock; the log of the collectives
(torch's flight recorder) by a thread that sleeps in a pipe until then. Neither costs anything before.
"""

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

from torchtitan.ranks import Launcher

STACKS = signal.SIGUSR2


def answer(launcher: Launcher) -> None:
    """From here on this rank answers."""
    # stays open as long as the process lives
    faulthandler.register(STACKS, file=open(launcher.stacks, "w"), all_threads=True)  # noqa: SIM115
    thread = threading.Thread(target=_write_collectives, args=(launcher,), name="answers", daemon=True)
    thread.start()


def _write_collectives(launcher: Launcher) -> None:
    while os.read(launcher.ask, 1):
        torch = sys.modules.get("torch")
        if torch is not None:
            Path(launcher.collectives).write_bytes(torch._C._distributed_c10d._dump_fr_trace_json())
