"""A command that needs several devices, run as that many ranks of this machine."""

import sys
import time

from torchtitan.launcher.processes import Processes

LOOK_SECONDS, FOLLOW_SECONDS, SPEAK_SECONDS = 0.05, 2, 3
"""Between looks at the ranks; for the others, once one has ended by a failure; before another than the first says why
it has failed: mostly that one has said it, and the others have been ended."""


def run_on_ranks(words: list[str], num_ranks: int) -> int:
    """`torchtitan WORDS` on each; the exit code of the first that failed, or 0. None of them outlives this process."""
    world = Processes([sys.executable, "-m", "torchtitan", *words], num_ranks)
    deadline = float("inf")
    try:
        while world.running and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            if any(ended.code for ended in world.look()):
                deadline = min(deadline, time.monotonic() + FOLLOW_SECONDS)
        return next((ended.exit_code for ended in world.ended if ended.code), 0)
    finally:
        world.close()
