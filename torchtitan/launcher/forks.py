"""Fork the ranks of a machine from one process, which imports torch once for all of them.

The launcher starts the program of a rank once, with FORKS in its environment: the fork server. It imports what every
rank needs, forks the ranks and ends. The launcher adopts the ranks as orphans (`_adopt_orphans` in processes.py), so
their exit codes, signals and death with the launcher work as for ranks that it has started itself. The CPU time of the
imports is spent once, and their memory is shared except for pages that a rank writes to.

`multiprocessing`'s fork server is not used: ranks would be children of that server, and it unpickles its input.

Ranks on GPUs are started one by one: a process that has used CUDA cannot be forked.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from torchtitan.process.heartbeat import SharedFile
from torchtitan.process.ranks import LAUNCHER, Launcher, read_launcher

FORKS = "TORCHTITAN_FORKS"
"""Environment variable of a fork server: file descriptor and path of its plans, which it replaces by the process IDs of
the ranks."""
POLL_SECONDS = 0.001


@dataclass(frozen=True)
class ForkPlan:
    """One rank: the variables that its environment has in addition to the server's, and its file descriptors."""

    variables: dict[str, str]
    descriptors: list[int]


# The launcher's side


class ForkServer:
    """A process that imports the modules of a rank, forks one process for each plan, and ends."""

    def __init__(self, command: list[str], plans: list[ForkPlan]) -> None:
        self._file = SharedFile("torchtitan-forks")
        os.write(self._file.descriptor, json.dumps([[plan.variables, plan.descriptors] for plan in plans]).encode())
        descriptors = {descriptor for plan in plans for descriptor in plan.descriptors}
        self.process = subprocess.Popen(
            command,
            env=os.environ | {FORKS: f"{self._file.descriptor}:{self._file.path}"},
            pass_fds=[*descriptors, self._file.descriptor],
            start_new_session=True,
        )
        self._num_ranks = len(plans)
        self.code: int | None = None
        """Exit code, as of the last call of `pids`."""
        self._pids: list[int] = []
        self._signals: list[int] = []

    def pids(self) -> list[int]:
        """Return the process IDs of the ranks; empty before the server has ended, and if it has failed."""
        if self.code is None and (code := self.process.poll()) is not None:
            pids = [] if code else _parse_pids(self._file.read())  # of a server that has not forked still the plans
            self._pids, self.code = (pids, code) if code or len(pids) == self._num_ranks else ([], 1)
            self._file.close()
            for pid in self._pids:
                for number in self._signals:  # the server may have been too close to its end to receive them
                    os.kill(pid, number)
        return self._pids

    def send_signal(self, number: int) -> None:
        self._signals.append(number)
        self.process.send_signal(number)


class ForkedRank:
    """The part of `subprocess.Popen` that the launcher uses, for a rank that a fork server forks.

    Before the fork, signals go to the server, and if the server fails, its exit code is the rank's.
    """

    def __init__(self, server: ForkServer, local_rank: int) -> None:
        self._server, self._local_rank = server, local_rank
        self._code: int | None = None

    @property
    def pid(self) -> int:
        pids = self._server.pids()
        return pids[self._local_rank] if pids else self._server.process.pid

    @property
    def is_forked(self) -> bool:
        return bool(self._server.pids())

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        self._server.process.wait()
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self._code is None and self.is_forked:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        elif self._code is None:  # not by process.poll(): the server may have ended since
            self._code = self._server.code
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self.is_forked:
            os.kill(self.pid, number)
        elif self._local_rank == 0:  # once for all ranks
            self._server.send_signal(number)


# The server's side


def first_rank() -> Launcher | None:
    """Return the first rank's connection to the launcher if this process is a fork server, else None."""
    if FORKS not in os.environ:
        return None
    with open(os.environ[FORKS].partition(":")[2]) as file:
        return read_launcher(json.load(file)[0][0][LAUNCHER])


def fork_ranks() -> None:
    """Fork the ranks of this fork server. Returns in each of them, with its environment; the server ends.

    If threads run, a fork may inherit a lock that one of them holds. Then each rank is started from scratch instead.
    Threads of libraries are not counted: those that start some while they are imported (OpenBLAS) handle a fork.
    """
    descriptor, _, path = os.environ.pop(FORKS).partition(":")
    with open(path) as file:
        plans = [ForkPlan(*fields) for fields in json.load(file)]
    sys.stdout.flush()
    sys.stderr.flush()
    server, num_threads, pids = os.getpid(), threading.active_count(), []
    for plan in plans:
        pid = os.fork()
        if pid == 0:
            _wait_for_adoption(server, path)
            descriptors = {number for rank in plans for number in rank.descriptors}
            for number in (int(descriptor), *(descriptors - set(plan.descriptors))):
                os.close(number)
            os.environ.update(plan.variables)
            if num_threads > 1:
                os.execv(sys.executable, sys.orig_argv)
            return
        pids.append(pid)
    with open(path, "w") as file:
        json.dump(pids, file)
    os._exit(0)


def _wait_for_adoption(server: int, path: str) -> None:
    """Start a session and wait until this fork is the launcher's child. End the fork if the server has failed."""
    os.setsid()
    while os.getppid() == server:
        time.sleep(POLL_SECONDS)
    with open(path) as file:
        text = file.read()
    if os.getpid() not in _parse_pids(text):  # the server was killed
        os._exit(1)


def _parse_pids(text: str) -> list[int]:
    """Return the process IDs that a server has written; empty if the text is still the plans, or cut off."""
    return json.loads(text) if re.fullmatch(r"\[[1-9]\d{0,9}(, [1-9]\d{0,9})*\]", text) else []
