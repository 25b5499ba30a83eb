"""The rank processes of this machine: start, signal and clean them up.

Ranks of one machine find each other through a file in memory and communicate over loopback, so other machines cannot
reach them. Each has its own session, so that only the launcher forwards Ctrl-C to it, once.

Of the stop signals that the launcher receives, the first makes all ranks save and stop, the second does nothing and the
third kills them. A scheduler, a shell and a parent launcher may each forward the same signal, so one request can arrive
several times within moments. These count as one.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from types import FrameType

from torchtitan.launcher.forks import ForkedRank, ForkPlan, ForkServer
from torchtitan.launcher.nodes import Nodes
from torchtitan.metrics.run_end import RunEnd, read_end
from torchtitan.process.exit import stop_signals
from torchtitan.process.heartbeat import Activity, ProgressTable, SharedFile
from torchtitan.process.ranks import Launcher, Restart, variables_of

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class RankExit:
    """The end of a rank: its exit code, negative for a signal, and its last reported activity."""

    rank: int
    code: int
    activity: Activity
    at: float
    """End time on the monotonic clock."""
    end: RunEnd | None = None
    """The end that the rank has passed on."""
    before_fork: bool = False
    """True if it is the process that failed from which all ranks of this machine were to be forked."""
    host: str = ""
    """Name of its machine, of a run on several."""

    @property
    def name(self) -> str:
        name = f"rank {self.rank}"
        if self.before_fork:
            name = "the process that imports torch for all ranks of this machine"
        return f"{name} on {self.host}" if self.host else name

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        outcome = (
            f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"
        )
        if -self.code == signal.SIGBUS:
            outcome += " (a file of its data, mapped into memory, cannot be read or was cut; see dmesg)"
        return f"{self.name} {outcome}"


class RankFiles:
    """Files and a pipe that one rank shares with the launcher, to diagnose a hang."""

    def __init__(self) -> None:
        self.stacks, self.collectives = SharedFile("torchtitan-stacks"), SharedFile("torchtitan-collectives")
        self.end, self.job = SharedFile("torchtitan-end"), SharedFile("torchtitan-job")
        self.request_reader, self.request_writer = os.pipe()

    def close(self) -> None:
        self.stacks.close()
        self.collectives.close()
        self.end.close()
        self.job.close()
        os.close(self.request_reader)
        os.close(self.request_writer)


class Processes:
    """All ranks of this machine, by local rank. `command` is the program of a rank; `listener` is the socket for the
    store of several machines, on the first. With `can_fork`, the program can be a fork server (forks.py).
    `script_variables`: of the environment of a script's ranks; None for ranks of a job.
    """

    def __init__(
        self,
        command: list[str],
        num_ranks: int,
        restart: Restart | None = None,
        nodes: Nodes | None = None,
        listener: socket.socket | None = None,
        can_fork: bool = False,
        script_variables: dict[str, str] | None = None,
    ) -> None:
        self.started_at = time.monotonic()
        self.nodes, self.listener, self.script_variables = nodes or Nodes(), listener, script_variables
        self.first_rank = self.nodes.index * num_ranks
        """Global rank of this machine's first rank."""
        self.store, self.heartbeats = SharedFile("torchtitan-store"), SharedFile("torchtitan-progress")
        self.rank_files = [RankFiles() for _ in range(num_ranks)]
        self.progress = ProgressTable(self.heartbeats, num_ranks)
        self.exits: list[RankExit] = []
        """Ranks that have ended, in the order in which this was noticed."""
        self._foreign_children = _children()
        adopts = _adopt_orphans()
        plans = [self._plan(rank, restart) for rank in range(num_ranks)]
        self.running: dict[int, ForkedRank | subprocess.Popen[bytes]]
        if can_fork and adopts and num_ranks > 1:
            server = ForkServer(command, plans)
            self.running = {rank: ForkedRank(server, rank) for rank in range(num_ranks)}
        else:
            self.running = {rank: _start(command, plan) for rank, plan in enumerate(plans)}

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.nodes.count * len(self.rank_files)

    def _plan(self, rank: int, restart: Restart | None) -> ForkPlan:
        """Return the environment variables and file descriptors of a rank."""
        shared = self.rank_files[rank]
        files = (self.store, self.heartbeats, shared.stacks, shared.collectives, shared.end, shared.job)
        listen = [] if self.listener is None or rank else [self.listener.fileno()]
        launcher = Launcher(
            os.getpid(),
            self.store.path,
            self.heartbeats.path,
            shared.stacks.path,
            shared.collectives.path,
            ask=shared.request_reader,
            listen=listen[0] if listen else None,
            restart=restart,
            end=shared.end.path,
            job="" if self.script_variables is None else shared.job.path,
        )
        return ForkPlan(
            variables_of(rank, len(self.rank_files), launcher, astuple(self.nodes)) | (self.script_variables or {}),
            [*(file.descriptor for file in files), shared.request_reader, *listen],
        )

    def poll(self) -> list[RankExit]:
        """Return the ranks that have ended since the last call."""
        newly_ended = []
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                before_fork = isinstance(process, ForkedRank) and not process.is_forked
                end = read_end(self.rank_files[rank].end.read())
                host = socket.gethostname() if self.nodes.count > 1 else ""
                activity, at = self.progress[rank], time.monotonic()
                newly_ended.append(RankExit(self.first_rank + rank, code, activity, at, end, before_fork, host))
                del self.running[rank]
        newly_ended.sort(
            key=lambda rank_exit: rank_exit.code >= 0
        )  # killed ranks first: others fail because they lost one
        self.exits += newly_ended
        return newly_ended

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for process in self.running.values():
            process.send_signal(number)

    def state(self, rank: int) -> str:
        """Return the kernel's letter for the process state: R runs, S sleeps, D waits for a disk, T is stopped."""
        return self._read_proc(rank, "stat").rpartition(")")[2].strip()[:1] or "?"

    def bytes_moved(self, rank: int) -> int:
        """Return the bytes that the process has read and written so far."""
        fields = dict(line.split(": ") for line in self._read_proc(rank, "io").splitlines())
        return sum(int(fields.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))

    def cpu_seconds(self, rank: int) -> float:
        """Return the CPU time of the process and all its descendants, including children that have ended and were
        waited for. Without those the sum would drop when a compiler ends.
        """
        pids, ticks = [self.running[rank].pid], 0
        for pid in pids:
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, _read(task).split())
        return ticks / os.sysconf("SC_CLK_TCK")

    def _read_proc(self, rank: int, name: str) -> str:
        return _read(f"/proc/{self.running[rank].pid}/{name}")

    def close(self) -> None:
        """Kill the remaining ranks and the processes that they started, and free the shared files."""
        self.signal(signal.SIGKILL)
        for process in self.running.values():
            process.wait()
        self.poll()
        while orphans := _children() - self._foreign_children:  # repeated: the children of a killed process become ours
            for child in orphans:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(child, 0)
        for shared in (self.store, self.heartbeats, *self.rank_files):
            shared.close()


def _read(path: str | Path) -> str:
    """Return the text of a /proc file; "" for a process that is gone, or without /proc."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _start(command: list[str], plan: ForkPlan) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=os.environ | plan.variables, pass_fds=plan.descriptors, start_new_session=True)


def _adopt_orphans() -> bool:
    """Make this process the parent of processes that outlive their parent: those of a rank, which `close` ends, and
    ranks that were forked. Return True if it is. Linux only.
    """
    return sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def _children() -> set[int]:
    """Return the PIDs of this process's children.

    Linux only; elsewhere the processes that ranks start are left to end by themselves.
    """
    return set(map(int, _read(f"/proc/self/task/{os.getpid()}/children").split()))


# Stop signals to the launcher

ONE_REQUEST_SECONDS = 0.5
"""Signals within this time after a request count as copies of it."""


class StopRequests:
    """Counts stop requests. Used by the launcher and, without one, by the rank itself."""

    def __init__(self) -> None:
        self.first: int | None = None
        """The signal of the first request."""
        self.count = 0
        self._last = 0.0

    def add(self, number: int) -> bool:
        """Return True if this signal is a new request and not a copy of the last one."""
        now = time.monotonic()
        if self.first is not None and now - self._last < ONE_REQUEST_SECONDS:
            return False
        self.first = self.first or number
        self.count += 1
        self._last = now
        return True


class SignalQueue:
    """Collects stop signals, and wakes its `wait` for them and for the end of a child."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._received: list[int] = []
        handlers = {number: self._remember for number in stop_signals()} | {signal.SIGCHLD: self._wake}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)

    def _wake(self, number: int, frame: FrameType | None) -> None:
        """Do nothing. A signal without a handler would not end the wait."""

    def wait(self, seconds: float, sockets: Sequence[socket.socket] = ()) -> list[int]:
        """Return the stop signals received so far.

        Waits at most `seconds` for one, or until one of `sockets` is readable.
        """
        if not self._received:
            select.select([self._read, *(connection.fileno() for connection in sockets)], [], [], max(0.0, seconds))
        while True:
            try:
                if not os.read(self._read, 4096):
                    break
            except BlockingIOError:
                break
        received, self._received = self._received, []
        return received

    def close(self) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)
