"""The ranks of this machine as processes: started, signalled, ended, and nothing of them left.

Ranks of one machine find each other through a file in memory and talk over loopback, so nobody outside can reach them.
Each is a session of its own, so that Ctrl-C comes to them from the launcher, once.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from torchtitan.launcher.nodes import Nodes
from torchtitan.process.heartbeat import Doing, ProgressTable, SharedFile
from torchtitan.process.ranks import Launcher, Restart, environment_of

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Ended:
    """How a rank ended: its exit code, negative for a signal, and what it was doing."""

    rank: int
    code: int
    doing: Doing
    at: float
    """On the monotonic clock."""

    @property
    def exit_code(self) -> int:
        """As a shell tells it."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        how = (
            f"was ended by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with exit code {self.code}"
        )
        return f"rank {self.rank} {how}"


class Shared:
    """What one rank shares with the launcher for the day on which it hangs."""

    def __init__(self) -> None:
        self.stacks, self.collectives = SharedFile("torchtitan-stacks"), SharedFile("torchtitan-collectives")
        self.asked, self.ask = os.pipe()

    def close(self) -> None:
        self.stacks.close()
        self.collectives.close()
        os.close(self.asked)
        os.close(self.ask)


class Processes:
    """All ranks of this machine, by their local number. `command` is the program of a rank; `listener` is for the
    store of several machines, on the first."""

    def __init__(
        self,
        command: list[str],
        num_ranks: int,
        restart: Restart | None = None,
        nodes: Nodes | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.began = time.monotonic()
        self.nodes, self.listener = nodes or Nodes(), listener
        self.first = self.nodes.index * num_ranks
        """The rank in the world of the first one here."""
        self.store, self.told = SharedFile("torchtitan-store"), SharedFile("torchtitan-progress")
        self.shared = [Shared() for _ in range(num_ranks)]
        self.progress = ProgressTable(self.told, num_ranks)
        self.ended: list[Ended] = []
        """In the order in which they were seen to end."""
        self._not_ours = _children()
        _adopt_orphans()
        self.running = {rank: self._start(command, rank, restart) for rank in range(num_ranks)}

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return self.nodes.count * len(self.shared)

    def _start(self, command: list[str], rank: int, restart: Restart | None) -> subprocess.Popen[bytes]:
        own = self.shared[rank]
        files = (self.store, self.told, own.stacks, own.collectives)
        listen = [] if self.listener is None or rank else [self.listener.fileno()]
        launcher = Launcher(
            os.getpid(),
            self.store.path,
            self.told.path,
            own.stacks.path,
            own.collectives.path,
            ask=own.asked,
            listen=listen[0] if listen else None,
            restart=restart,
        )
        return subprocess.Popen(
            command,
            env=environment_of(rank, len(self.shared), launcher, astuple(self.nodes)),
            pass_fds=[*(file.descriptor for file in files), own.asked, *listen],
            start_new_session=True,
        )

    def look(self) -> list[Ended]:
        """Those that have ended since the last look."""
        seen = []
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                seen.append(Ended(self.first + rank, code, self.progress[rank], time.monotonic()))
                del self.running[rank]
        seen.sort(key=lambda ended: ended.code >= 0)  # who was killed did so before those who lost it
        self.ended += seen
        return seen

    def signal(self, number: int) -> None:
        """To every rank that still runs."""
        for process in self.running.values():
            process.send_signal(number)

    def state(self, rank: int) -> str:
        """The kernel's letter for what the process does: R runs, S sleeps, D waits for a disk, T is stopped."""
        return self._of(rank, "stat").rpartition(")")[2].strip()[:1] or "?"

    def bytes_moved(self, rank: int) -> int:
        """Read and written by the process so far, in files."""
        fields = dict(line.split(": ") for line in self._of(rank, "io").splitlines())
        return sum(int(fields.get(name, 0)) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))

    def cpu_seconds(self, rank: int) -> float:
        """Computed by the process and all that it has started, with ended children that it has waited for: without
        these the sum would fall when a compiler ends."""
        pids, ticks = [self.running[rank].pid], 0
        for pid in pids:
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, _read(task).split())
        return ticks / os.sysconf("SC_CLK_TCK")

    def _of(self, rank: int, name: str) -> str:
        return _read(f"/proc/{self.running[rank].pid}/{name}")

    def close(self) -> None:
        """Kill what is left of ranks and of processes that they started, and free what they shared."""
        self.signal(signal.SIGKILL)
        for process in self.running.values():
            process.wait()
        self.look()
        while left := _children() - self._not_ours:  # again: when one ends, its own children come to us
            for child in left:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(child, 0)
        for shared in (self.store, self.told, *self.shared):
            shared.close()


def _read(path: str | Path) -> str:
    """What the kernel says; nothing of a process that is gone, and where there is no /proc."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _adopt_orphans() -> None:
    """Processes whose parent rank has ended become this process's children, where `close` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _children() -> set[int]:
    """Linux only; elsewhere ranks' own processes are left to end by themselves."""
    return set(map(int, _read(f"/proc/self/task/{os.getpid()}/children").split()))
