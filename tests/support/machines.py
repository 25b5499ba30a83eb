"""Several launchers on this machine, connected as on several."""

import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.support import jobs
from tests.support.forked_job import Program
from tests.support.launched_ranks import RANK, end, started
from tests.support.ports import free_port
from tests.support.restarted_ranks import ATTEMPT
from torchtitan.launcher import multi_node
from torchtitan.launcher.processes import SignalQueue

MACHINE = """
import os, sys
from dataclasses import replace
from pathlib import Path
from torchtitan.launcher import hangs, monitor, restarts
from torchtitan.launcher.multi_node import Coordinator, Worker
from torchtitan.launcher.hangs import HangLimits
from torchtitan.launcher.nodes import Nodes
from torchtitan.launcher.processes import Processes
from torchtitan.launcher.restarts import follow_coordinator, supervise
from torchtitan.launcher.processes import SignalQueue
from torchtitan.launcher.monitor import RankMonitor
monitor.FOLLOW_SECONDS, monitor.POLL_SECONDS = {follow}, 0.2
restarts.FIRST_PAUSE_SECONDS, hangs.ANSWER_SECONDS = {pause}, 0.5
program, folder, index, port = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
queue, nodes = SignalQueue(), Nodes(2, index, "127.0.0.1", port)
secret_file = folder / "launch.secret"
company = Worker(nodes, 1, secret_file) if index else Coordinator(nodes, 1)
assert (company.join(queue, 100) if index else company.wait_for_workers(queue, 100, secret_file)) is None
def watched(restart, port, listener=None):
    ranks = Processes([sys.executable, "-c", program], 1, restart, replace(nodes, port=port), listener)
    return RankMonitor(ranks, queue, HangLimits(100, {limit}), folder / "hangs", company)
def newest():
    return int((folder / "saved").read_text()) if (folder / "saved").exists() else -1
def start(restart):
    nodes, listener = company.order_start(restart)
    return watched(restart, nodes.port, listener)
if index:
    sys.exit(follow_coordinator(lambda order: watched(order.restart, order.port), queue, company, {rejoin}))
code = supervise(start, queue, lambda: {budget}, newest, company, {rejoin}).code
company.end_run(code)
sys.exit(code)
"""


def start_machines(
    program: str,
    folder,
    budget: int = 3,
    pause: float = 0.01,
    follow: float = 0.2,
    limit: float = 100,
    rejoin: float = 0,
    ports: tuple[int, int] | None = None,
) -> list[Program]:
    """Start two launchers, each with one rank that runs `program`.

    `ports`: the port on which the first listens, and the port to which the other connects.
    """
    program = RANK + ATTEMPT.format(folder=str(folder)) + program
    launcher = MACHINE.format(budget=budget, pause=pause, follow=follow, limit=limit, rejoin=rejoin)
    ports = ports or (free_port(),) * 2
    processes = []
    for index in range(2):
        arguments = (program, str(folder), str(index), str(ports[index]))
        processes.append(Program(launcher, *arguments, folder=jobs.ROOT))
    started.extend(processes)
    return processes


def wait_until_ready(process: Program) -> int:
    """Wait until the machine's rank reports that it is ready, and return its process id."""
    return int(process.stdout.readline().split()[2])


def wait_for_all(processes: list[Program]) -> list[tuple[int, str, str]]:
    return [end(process) for process in processes]


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.setattr(multi_node, "LATE_SECONDS", 0.1)
    signal_queue = SignalQueue()
    yield signal_queue
    signal_queue.close()


NO_SIGNALS = SimpleNamespace(wait=lambda seconds, also=(): select.select(also, [], [], seconds) and [])
"""The queue of a launcher that is a thread of the test."""


def run_concurrently(foreground: Callable, *background: Callable) -> list:
    """Run `foreground` in this thread, which gets the signals, and `background` in others; return results or errors."""

    def outcome(action: Callable):
        try:
            return action()
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(1, len(background))) as pool:
        waiting = [pool.submit(outcome, other) for other in background]
        return [outcome(foreground), *(future.result(60) for future in waiting)]


FINISH_AFTER_RESTART = (
    "tell('train', 8)\nif number == 0:\n  save(5)\n  say('ready', ranks.rank, os.getpid()); wait()\n"
    "say('again', number)\ntell('end', 9)"
)
