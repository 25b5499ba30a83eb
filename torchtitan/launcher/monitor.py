"""Monitor the ranks until the last one has ended: pass on stop requests, set deadlines and choose the exit code.

A world is only useful if it is complete. Once a rank ends before its work is done, no collective of the others can
finish, so the others get a moment to log their errors and are killed. Ranks that are saving their state are waited for.
"""

import signal
import time
from pathlib import Path

from torchtitan.launcher import hangs
from torchtitan.launcher.hangs import AwakeClock, Evidence, ExitReport, HangLimits, Watchdog
from torchtitan.launcher.messages import Collect, Failed, Follow, Hung, Message, Stop
from torchtitan.launcher.multi_node import Coordinator, Worker
from torchtitan.launcher.processes import Processes, RankExit, SignalQueue, StopRequests
from torchtitan.metrics.run_end import PEER_GONE, RunEnd
from torchtitan.process.exit import CRASHED, EXPLAINED, HUNG, NOT_EXPORTED, REPORTED_BY_FIRST_RANK, STOPPED
from torchtitan.process.heartbeat import TRAINED, WITHOUT_STATE, Activity
from torchtitan.process.run_log import print_error, print_message

FOLLOW_SECONDS = 5
"""Longest wait for the other ranks once one has failed, or once all are to stop during their start."""
SHUTDOWN_SECONDS = 300
"""Longest wait for a rank that reports no progress while it saves after a stop request, or while it exits."""
POLL_SECONDS = 0.5


class RankMonitor:
    """Monitors one start of this machine's ranks.

    Evidence of a hang is written below `folder`. `peers` connects it to the other machines.
    `remedy` is the advice after a failed export.
    """

    stopping = "stopping after this step"

    def __init__(
        self,
        processes: Processes,
        queue: SignalQueue,
        limits: HangLimits,
        folder: Path,
        peers: Coordinator | Worker | None = None,
        remedy: str = "",
    ) -> None:
        self.remedy = remedy
        self.processes, self.queue, self.folder = processes, queue, folder
        self.peers = peers or Coordinator()
        self.clock = AwakeClock()
        self.watchdog = Watchdog(processes, limits, self.clock)
        self.hang_evidence: Evidence | None = None
        self.failure_reported = False
        self.followed_at: float | None = None
        """Time when another machine was reported to have failed while this machine's ranks were fine."""
        self.requests = StopRequests()
        self.requested_at = 0.0
        self.gave_up = False

    def wait(self) -> int:
        """Wait for this machine's ranks to end and return their exit code."""
        try:
            while self.processes.running:
                signals = self.queue.wait(POLL_SECONDS, self.peers.sockets)
                self.clock.tick()
                for number in signals:
                    self.request_stop(number)
                self.processes.poll()
                self.on_poll()
                if not self.failure_reported and not self.no_failure:
                    self.failure_reported = True
                    self.peers.report_event(Failed())
                for message in self.peers.take_orders():
                    self.handle_message(message)
                if self.processes.running and self.is_overdue():
                    self.kill_remaining()
                elif self.no_failure and self.followed_at is None:
                    self.check_for_hang()
        finally:
            self.steps = self.last_step()
            self.processes.close()
        return self.exit_code()

    @property
    def no_failure(self) -> bool:
        """True if no rank has ended before its work was done."""
        return all(map(self.is_complete, self.processes.exits))

    def is_complete(self, rank_exit: RankExit) -> bool:
        """Return True if a rank has ended after its work was done."""
        return rank_exit.activity.phase == "end"

    def on_poll(self) -> None:
        """Do nothing; called after each look at the ranks."""

    def handle_message(self, message: Message) -> None:
        """Handle a message from another machine."""
        if isinstance(message, Stop) and not self.requests.count:
            self.request_stop(message.number, from_peer=True)
        elif isinstance(message, Follow) and self.no_failure and self.followed_at is None:
            self.followed_at = time.monotonic()
        elif (
            isinstance(message, Collect) and self.hang_evidence is None and self.processes.running
        ):  # they may just have ended
            self.hang_evidence = hangs.collect_evidence(self.processes, self.folder, message.name, message.seconds)
            self.processes.signal(signal.SIGKILL)

    def request_stop(self, number: int, from_peer: bool = False) -> None:
        if not self.requests.add(number):
            return
        if self.requests.count == 1:
            self.requested_at = time.monotonic()
            if not from_peer:
                self.peers.report_event(Stop(number=number))
            print_message(f"{self.stopping} (twice more to stop at once, without saving)")
            self.processes.signal(self.stop_signal(number))
        elif self.requests.count == 2:
            print_message("still stopping (once more to stop at once, without saving)")
        else:
            self.processes.signal(signal.SIGKILL)

    def stop_signal(self, number: int) -> int:
        """Return the signal that asks ranks to stop."""
        return signal.SIGTERM  # during its start a rank would print a traceback on INT

    def exit_seconds(self) -> float:
        """Return the longest time in which all ranks may leave after their end."""
        return SHUTDOWN_SECONDS

    def stop_seconds(self, activity: Activity) -> float:
        """Return the longest wait after a stop request for a rank with nothing to save; 0 for one that may save."""
        return FOLLOW_SECONDS if activity.phase in WITHOUT_STATE else 0

    def is_overdue(self) -> bool:
        """Return True if the ranks that still run have had their time and are to be killed."""
        early = [rank_exit for rank_exit in self.processes.exits if not self.is_complete(rank_exit)]
        waits: list[tuple[float, float]] = [(rank_exit.at, FOLLOW_SECONDS) for rank_exit in early]
        if self.followed_at is not None:
            waits.append((self.followed_at, FOLLOW_SECONDS))
        activities = [self.processes.progress[rank] for rank in self.processes.running]
        if activities and all(row.phase == "end" for row in activities):  # nothing else would end a stuck exit
            waits.append((max(row.since for row in activities), self.exit_seconds()))
        if self.requests.count:
            waits += [(self.requested_at, limit) for row in activities if (limit := self.stop_seconds(row))]
            waits.append((max([self.requested_at, *(row.since for row in activities)]), SHUTDOWN_SECONDS))
        now = time.monotonic()
        return any(self.clock.seconds(since, now) >= limit for since, limit in waits)

    def check_for_hang(self) -> None:
        if self.hang_evidence is not None:
            return
        seconds_stuck = self.watchdog.seconds_stuck(time.monotonic())
        if seconds_stuck is not None:
            self.peers.report_event(Hung(seconds=seconds_stuck))  # once all machines are stuck, all collect evidence

    def last_step(self) -> int:
        """Return the last step that any rank completed; 0 if none was completed since the start."""
        rows = [self.processes.progress[rank] for rank in range(len(self.processes.rank_files))]
        return max(max(0, row.step - (row.phase in ("first", "data", "train"))) for row in rows)

    def exit_report(self, code: int) -> ExitReport:
        """Return how the ranks ended, for the coordinator."""
        first = self.first_failure()
        end, end_by = self.first_end(code)
        return ExitReport(
            code,
            str(first) if first else "",
            first.rank if first else self.processes.first_rank,
            self.steps,
            by_signal=first is not None and first.code < 0,
            followed=self.followed_at is not None,
            asked=self.requests.count > 0,
            done=self.all_in_phase("end"),
            trained=self.all_in_phase(*TRAINED),
            evidence=self.hang_evidence,
            end_cause=end.cause,
            end_reason=end.reason,
            end_by=end_by,
        )

    def first_end(self, code: int) -> tuple[RunEnd, str]:
        """Return the end that best says why ranks ended with this code, and which of them it is of; "" if of all."""
        ends = [(rank_exit.end, rank_exit.name) for rank_exit in self.processes.exits if rank_exit.end is not None]
        ends = [(end, name) for end, name in ends if end.code == code]
        if not ends:
            return RunEnd(code), ""
        # some ranks only follow another one
        end, name = min(ends, key=lambda entry: entry[0].reason in ("", PEER_GONE))
        alike, ranks = sum(other.reason == end.reason for other, _ in ends), len(self.processes.rank_files)
        is_of_all = not end.reason or (alike == ranks and (ranks > 1 or self.processes.world_size == 1))
        return end, "" if is_of_all else name

    def all_in_phase(self, *phases: str) -> bool:
        """Return True if the last phase that every rank of this machine reported is one of these."""
        return all(self.processes.progress[rank].phase in phases for rank in range(len(self.processes.rank_files)))

    def kill_remaining(self) -> None:
        if not self.processes.exits and self.followed_at is None:
            self.gave_up = True
            rank_names = ", ".join(f"rank {self.processes.first_rank + local}" for local in self.processes.running)
            print_error(f"not stopped in time and killed: {rank_names}")
        self.processes.signal(signal.SIGKILL)

    def exit_code(self) -> int:
        """Return the exit code of the first failure and print its message. Consequences of it are not printed."""
        failed, first = self.failed, self.first_failure()
        if self.hang_evidence is not None:
            return HUNG
        if first is None:
            return 0
        if self.requests.first is not None and self.stopped_on_request(failed):
            return 128 + self.requests.first
        if not self.is_explained(first) and first.activity.phase == "export" and self.all_in_phase(*TRAINED):
            if self.followed_at is None:
                remedy = self.remedy and f"; {self.remedy}"
                print_error(f"training is complete, but the export failed: {first}{remedy}")
            return NOT_EXPORTED
        unreported = first.exit_code in REPORTED_BY_FIRST_RANK and self.processes.first_rank not in {
            rank_exit.rank for rank_exit in failed if rank_exit.exit_code == first.exit_code
        }
        if (not self.is_explained(first) or unreported) and not self.gave_up and self.followed_at is None:
            hint = "" if first.code < 0 else "; its output above tells why"
            hint = " and the others did not" if unreported else hint
            print_error(f"{first}{hint}")
        # a rank that the stop request ended may take others with it, whose collectives fail: these are consequences
        return 128 + self.requests.first if self.requests.first and first.exit_code in STOPPED else first.exit_code

    @property
    def failed(self) -> list[RankExit]:
        """The ranks that ended with a failure, in the order in which this was noticed."""
        return [rank_exit for rank_exit in self.processes.exits if rank_exit.code]

    def first_failure(self) -> RankExit | None:
        """Return the end that explains why the ranks ended; None if none failed.

        A rank that refuses to go on closes its connections before its process is gone, so another rank may fail and
        end before it.
        """
        failed = self.failed
        if failed and failed[0].code == CRASHED:
            refused = (e for e in failed if e.exit_code not in STOPPED and self.is_explained(e))
            return next(refused, failed[0])
        return failed[0] if failed else None

    def is_explained(self, rank_exit: RankExit) -> bool:
        """Return True if a rank has logged the reason of its end."""
        return rank_exit.exit_code in EXPLAINED

    def stopped_on_request(self, failed: list[RankExit]) -> bool:
        """Return True if all ranks ended because of the stop request: by themselves, killed with nothing to save, or
        killed by the third request.
        """
        return self.requests.count > 2 or all(
            rank_exit.exit_code in STOPPED
            or (rank_exit.code == -signal.SIGKILL and rank_exit.activity.phase in WITHOUT_STATE)
            for rank_exit in failed
        )
