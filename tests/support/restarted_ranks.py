"""Ranks that end in some way at each start."""

from pathlib import Path

from tests.support import jobs
from tests.support.forked_job import Program
from tests.support.launched_ranks import RANK, started
from torchtitan.launcher import hangs

SUPERVISOR = """
import os, sys
from pathlib import Path
from torchtitan.launcher import hangs, monitor, restarts
from torchtitan.launcher.hangs import HangLimits
from torchtitan.launcher.processes import Processes
from torchtitan.launcher.restarts import supervise
from torchtitan.launcher.processes import SignalQueue
from torchtitan.launcher.monitor import RankMonitor
monitor.FOLLOW_SECONDS, monitor.POLL_SECONDS = {follow}, 0.1
restarts.FIRST_PAUSE_SECONDS, hangs.ANSWER_SECONDS, hangs.BUSY_SHARE = {pause}, {answer}, {busy}
queue, folder = SignalQueue(), Path(sys.argv[2])
def start(restart):
    ranks = Processes([sys.executable, "-c", sys.argv[1]], 2, restart)
    return RankMonitor(ranks, queue, HangLimits({start}, {limit}), folder / "hangs", remedy="export it again")
def newest():
    return int((folder / "saved").read_text()) if (folder / "saved").exists() else -1
sys.exit(supervise(start, queue, lambda: {budget}, newest).code)
"""
# Prefix of a rank's program: `number` counts restarts, `save` records a saved step in `folder`.
ATTEMPT = r"""
from pathlib import Path
from torchtitan.launcher.hangs import respond_to_launcher
folder = Path({folder!r})
number = ranks.launcher.restart.number if ranks.launcher.restart else 0
def save(step):
    mine = folder / f"saved-{{ranks.rank}}"
    mine.write_text(str(step))
    mine.rename(folder / "saved")  # atomic, in case this rank is killed meanwhile
"""


def supervise(
    program: str,
    folder: Path,
    budget: int = 3,
    pause: float = 0.01,
    follow: float = 0.1,
    start: float = 100,
    limit: float = 100,
    answer: float = 0.5,
    busy: float = hangs.BUSY_SHARE,
) -> Program:
    """Start a launcher over two ranks that run `program`. `start`, `limit`: limits of a start and a step in seconds."""
    program = RANK + ATTEMPT.format(folder=str(folder)) + program
    times = dict(pause=pause, follow=follow, start=start, limit=limit, answer=answer, busy=busy)
    supervisor = SUPERVISOR.format(budget=budget, **times)
    started.append(Program(supervisor, program, str(folder), folder=jobs.ROOT))
    return started[-1]


CRASH = "os.kill(os.getpid(), 9) if ranks.rank else wait()"


def read_evidence(folder: Path) -> dict[str, str]:
    (hang_folder,) = (folder / "hangs").iterdir()
    return {path.name: path.read_text() for path in hang_folder.iterdir()}
