"""Programs of a few lines as ranks of a launcher, and what is left of them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import jobs

LAUNCHER = """
import sys
from pathlib import Path
from torchtitan.launcher import monitor, processes
from torchtitan.launcher.hangs import HangLimits
from torchtitan.launcher.processes import Processes
from torchtitan.launcher.processes import SignalQueue
from torchtitan.launcher.monitor import RankMonitor
from torchtitan.process.exit import exit_with
monitor.FOLLOW_SECONDS, monitor.SHUTDOWN_SECONDS, processes.ONE_REQUEST_SECONDS = {follow}, {shutdown}, 0
queue = SignalQueue()
ranks = Processes([sys.executable, "-c", sys.argv[1]], 2, can_fork={can_fork})
exit_with(RankMonitor(ranks, queue, HangLimits(1000, 1000), Path("unused")).wait)
"""
# Helpers for the programs of ranks: report a phase to the launcher, and send lines to the test.
RANK = r"""
import os, signal, sys, time
from torchtitan.process.exit import die_with_parent
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import read_ranks
ranks = read_ranks()
die_with_parent(ranks.launcher.pid)
tell = Progress(ranks.launcher.progress, ranks.local_rank).enter
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # one write, so lines of two ranks do not mix
asked = []
def handled(number, frame):
    asked.append(number)
    say("got", ranks.rank, number)
signal.signal(signal.SIGTERM, handled)
def ready(phase):
    tell(phase, 3)
    say("ready", ranks.rank, os.getpid())
def wait():
    while True:
        time.sleep(10)
def wait_to_be_asked():
    while not asked:
        time.sleep(0.01)
"""


def start(
    program: str, follow: float = 100, shutdown: float = 100, can_fork: bool = False, **options
) -> subprocess.Popen:
    """Start a launcher of two ranks that run `program`, with a pipe for its output. With `can_fork`, the program has to
    begin with a fork server, which is the place for RANK.
    """
    launcher = LAUNCHER.format(follow=follow, shutdown=shutdown, can_fork=can_fork)
    command = [sys.executable, "-c", launcher, program if can_fork else RANK + program]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options
    started.append(subprocess.Popen(command, cwd=jobs.ROOT, start_new_session=True, **pipes))
    return started[-1]


started: list[jobs.Process] = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    while started:
        started.pop().kill()  # this ends its ranks too


def lines(process: jobs.Process, count: int) -> list[list[str]]:
    """Read lines that ranks sent, each split into words."""
    return [process.stdout.readline().split() for _ in range(count)]


def ready(process: jobs.Process) -> dict[int, int]:
    """Wait until both ranks report that they are ready; return their process ids."""
    return {int(rank): int(pid) for _, rank, pid in lines(process, 2)}


def end(process: jobs.Process) -> tuple[int, str, str]:
    return jobs.finish(process, 120)


def has_ended(pid: int, seconds: float = 60) -> bool:
    """True if a process ends, or is a zombie, within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if jobs.ended(pid):
            return True
        time.sleep(0.02)
    return False


def listening(pids: list[int]) -> set[str]:
    """Return the addresses, in the notation of /proc/net/tcp, at which processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == "0A" and inode in inodes:
                addresses.add(local.rpartition(":")[0])
    return addresses


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
