"""Detect hangs, collect each rank's stacks and collectives, and name the rank that is behind.

A rank writes its stacks in a signal handler in C, which also works while a thread holds the GIL. A thread that sleeps
on a pipe writes the log of its collectives (torch's flight recorder). Neither costs anything before a hang.

The ranks of a world hang together, because each waits for the others in a collective. So a hang is detected by the
absence of progress on all ranks. The rank that is behind is found from the ranks' last progress reports, their process
states in the kernel, and the sequence numbers of the collectives that they have entered.
"""

import faulthandler
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from torchtitan.core.bounded import Count, ExitCode, Seconds
from torchtitan.launcher.processes import Processes
from torchtitan.process.exit import EXPLAINED, HUNG, STOPPED
from torchtitan.process.heartbeat import PHASES, Activity
from torchtitan.process.ranks import Launcher
from torchtitan.torch_internals.flight_recorder import collectives_log

STACKS = signal.SIGUSR2


def respond_to_launcher(launcher: Launcher) -> None:
    """Let this rank respond to the launcher's requests for stacks and collectives from now on."""
    write_stacks_on_request(launcher)
    thread = threading.Thread(target=_write_collectives, args=(launcher,), name="answers", daemon=True)
    thread.start()


def write_stacks_on_request(launcher: Launcher) -> None:
    """Let this process write its stacks when the launcher requests them. This starts no thread."""
    # stays open for the lifetime of the process
    faulthandler.register(STACKS, file=open(launcher.stacks, "w"), all_threads=True)  # noqa: SIM115


def _write_collectives(launcher: Launcher) -> None:
    while os.read(launcher.ask, 1):
        if (log := collectives_log()) is not None:
            Path(launcher.collectives).write_bytes(log)


ANSWER_SECONDS = 2.0
"""Time for ranks to write their stacks, and then their collectives, and the period over which CPU usage is measured."""
BUSY_SHARE = 0.1
"""Share of a core above which a rank and the processes that it started count as computing and not as waiting. It is low
because others may compute on the same core.
"""
LONG_PHASES = ("start", "load", "first", "script", "export")
"""Phases limited by comm.init_timeout_seconds."""
FILE_PHASES = ("start", "load", "save", "script", "export")
"""Phases in which file I/O counts as progress, because a large file reports nothing else for minutes."""


@dataclass(frozen=True)
class HangLimits:
    """Timeouts in seconds, from comm.*_timeout_seconds."""

    start: float
    train: float


POLL_GAP_SECONDS = 1.0
"""A launcher that polls less often than this, many times less often than it wants to, was stopped itself."""


class AwakeClock:
    """Measures time without the periods when this process was stopped (SIGSTOP, `docker pause`).

    Whatever stops the launcher usually stops its ranks too, and they are not late for that. Of each period a moment
    counts, so that time passes on a machine too busy to poll.
    """

    def __init__(self) -> None:
        self._ticked_at = time.monotonic()
        self._stops: deque[tuple[float, float]] = deque(maxlen=1000)

    def tick(self) -> None:
        """Note that this process runs. Called at every poll."""
        now = time.monotonic()
        if now - self._ticked_at > POLL_GAP_SECONDS:
            self._stops.append((self._ticked_at + POLL_GAP_SECONDS / 2, now))
        self._ticked_at = now

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two times of the monotonic clock, without those when this process was stopped."""
        self.tick()  # it may have been stopped since the last poll
        stopped = sum(max(0.0, min(until, end) - max(since, start)) for since, until in self._stops)
        return end - start - stopped


class Watchdog:
    """Detects that no rank of this machine makes progress. Polled regularly."""

    def __init__(self, processes: Processes, limits: HangLimits, clock: AwakeClock | None = None) -> None:
        self.processes, self.limits, self.clock = processes, limits, clock or AwakeClock()
        self._files: dict[int, tuple[int, float]] = {}
        self._busy_at = 0.0

    def seconds_stuck(self, now: float) -> float | None:
        """Return how long no rank has made progress if that exceeds the limit, else None."""
        activities = {rank: self.processes.progress[rank] for rank in self.processes.running}
        if not activities or any(row.phase == "end" for row in activities.values()):
            return None
        latest = max(self._busy_at, *(self._last_progress(rank, row, now) for rank, row in activities.items()))
        long = any(row.phase in LONG_PHASES for row in activities.values())
        limit = self.limits.start if long else self.limits.train
        if self.clock.seconds(latest, now) <= limit:
            return None
        # A compiler computes for a long time without reporting progress. With several ranks in a step, here or on other
        # machines, ranks that busy-wait for a GPU would look the same, so CPU usage is not considered there.
        if (long or self.processes.world_size == 1) and self._busy():
            self._busy_at = time.monotonic()
            return None
        # the check took a while, and a rank may have made progress meanwhile
        moved = any(self.processes.progress[rank] != row for rank, row in activities.items())
        return None if moved else self.clock.seconds(latest, now)

    def _busy(self) -> bool:
        ranks = list(self.processes.running)
        before = [self.processes.cpu_seconds(rank) for rank in ranks]
        time.sleep(ANSWER_SECONDS)
        after = [self.processes.cpu_seconds(rank) for rank in ranks]
        return any(b - a > BUSY_SHARE * ANSWER_SECONDS for a, b in zip(before, after, strict=True))

    def _last_progress(self, rank: int, activity: Activity, now: float) -> float:
        reported = activity.since or self.processes.started_at
        if activity.phase not in FILE_PHASES:
            return reported
        last_count, changed_at = self._files.get(rank, (-1, reported))
        count = self.processes.bytes_moved(rank)
        if count != last_count:
            self._files[rank] = count, now
            return now
        return max(reported, changed_at)


PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
"""A name for a file or folder that leads nowhere else."""
ShortText = Annotated[str, Field(max_length=1000)]
MAX_COLLECTIVES = 20_000
"""Newest entries of a rank's log that machines exchange."""


@dataclass(frozen=True)
class Collective:
    """An entry of torch's flight recorder, as far as the verdict needs it."""

    is_p2p: bool
    process_group: tuple[ShortText, ShortText]
    """Its name and description."""
    input_sizes: list[list[int]]
    collective_seq_id: Count
    profiling_name: ShortText


@dataclass(frozen=True)
class CollectiveLog:
    entries: list[Collective] = field(default_factory=list)
    members: dict[ShortText, str] = field(default_factory=dict)
    """Name of a process group -> its ranks."""


@dataclass(frozen=True)
class RankState:
    """The state of a rank during a hang."""

    activity: Activity
    process: Annotated[str, Field(max_length=1)]
    """The kernel's letter."""
    log: CollectiveLog


@dataclass(frozen=True)
class Evidence:
    """The state of a machine's ranks during a hang. Plain values, as machines exchange it."""

    seconds: Seconds
    """Time without progress on any rank."""
    name: PlainName
    """Name of the folder with the stacks and collectives, within the folder of all hangs."""
    problem: ShortText
    """The error if they could not be written there, or empty."""
    ranks: Annotated[dict[Count, RankState], Field(min_length=1)]
    """By global rank."""


def hang_folder_name() -> str:
    """Return a folder name for a hang detected now."""
    return time.strftime("%Y%m%d-%H%M%S")


def collect_evidence(processes: Processes, folder: Path, name: str, seconds: float) -> Evidence:
    """Ask all ranks of this machine for their stacks and collectives and write them to a new folder in `folder`."""
    processes.signal(STACKS)
    time.sleep(ANSWER_SECONDS)
    # only then, as a thread that runs Python while the handler reads its frames spoils the stacks after its own
    for rank in processes.running:
        os.write(processes.rank_files[rank].request_writer, b"?")
    time.sleep(ANSWER_SECONDS)
    local_ranks = {processes.first_rank + local: local for local in processes.running}
    logs = {rank: processes.rank_files[local].collectives.read() for rank, local in local_ranks.items()}
    problem = ""
    try:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for rank, local in local_ranks.items():
            (folder / name / f"rank-{rank}.stacks.txt").write_text(processes.rank_files[local].stacks.read())
            (folder / name / f"rank-{rank}.collectives.json").write_text(logs[rank])
    except OSError as error:
        problem = str(error.strerror)
    states = {
        rank: RankState(processes.progress[local], processes.state(local), _parse_log(logs[rank]))
        for rank, local in local_ranks.items()
    }
    return Evidence(seconds, name, problem, states)


def explain_hang(reports: list[Evidence], folder: Path) -> tuple[str, int]:
    """Return a one-line explanation of a hang and the rank that is behind, from the evidence of all machines.

    Their folder in `folder` also gets a summary.txt.
    """
    states = {rank: state for report in reports for rank, state in report.ranks.items()}
    late_rank, reason = find_late_rank(
        {rank: state.activity for rank, state in states.items()},
        {rank: state.process for rank, state in states.items()},
        {rank: state.log for rank, state in states.items()},
    )
    line = f"hang: no rank has got on for {max(report.seconds for report in reports):.0f} s; {reason}"
    folder = folder / reports[0].name
    table = [f"rank {rank}: {state.activity}, process {state.process}" for rank, state in sorted(states.items())]
    problem = next((report.problem for report in reports if report.problem), "")
    try:
        (folder / "summary.txt").write_text("\n".join([line, *table, ""]))
    except OSError as error:
        problem = problem or str(error.strerror)
    if problem:
        return f"{line}; what the ranks were doing could not be written to {folder} ({problem})", late_rank
    return f"{line}; stacks and collectives of all ranks: {folder}", late_rank


def find_late_rank(
    activities: Mapping[int, Activity], states: Mapping[int, str], logs: Mapping[int, CollectiveLog]
) -> tuple[int, str]:
    """Return the rank that is behind and the reason for this verdict. `states` are the kernel's process states
    (letters), `logs` the flight recorders' logs.
    """
    entered = entered_collectives(logs)
    waiting = f"; {_describe_waiting(entered)}" if entered else ""
    differing = find_mismatch(entered)
    if differing:
        return differing[0], f"the ranks are in different collectives: {differing[1]}"
    stopped = [rank for rank, state in states.items() if state in "Tt"]
    if stopped:
        return stopped[0], f"{_ranks_are(stopped)} stopped by a signal, {activities[stopped[0]]}{waiting}"
    position = {rank: (row.step, PHASES.index(row.phase)) for rank, row in activities.items()}
    last = [rank for rank in position if position[rank] == min(position.values())]
    if len(last) == len(position):
        last = _most_delayed(entered)
    if not last:
        return min(activities), f"all ranks are {activities[min(activities)]}, none is behind"
    return last[0], f"{_ranks_are(last)} behind, {activities[last[0]]}{waiting}"


Entered = dict[tuple[str, str], dict[int, dict[int, str]]]
"""Maps (name, ranks) of a process group -> rank -> sequence number of a collective -> its description."""


def entered_collectives(logs: Mapping[int, CollectiveLog]) -> Entered:
    """Return the collectives that each rank has entered, for groups that more than one rank has reported."""
    entered: Entered = {}
    for rank, log in logs.items():
        for entry in log.entries:
            if entry.is_p2p:
                continue
            name, _ = entry.process_group
            shapes = "x".join(str(size) for size in entry.input_sizes)
            group = entered.setdefault((name, log.members.get(name, "")), {})
            group.setdefault(rank, {})[entry.collective_seq_id] = f"{entry.profiling_name} of {shapes}"
    return {group: ranks for group, ranks in entered.items() if len(ranks) > 1}


def find_mismatch(entered: Entered) -> tuple[int, str] | None:
    """Return the earliest mismatch, a sequence number with different collectives on different ranks: the rank in the
    minority, and a description of what each rank is in. None if there is no mismatch.
    """
    for (name, _), ranks in entered.items():
        common = set.intersection(*(set(numbers) for numbers in ranks.values()))
        for number in sorted(common):
            kinds = {rank: numbers[number] for rank, numbers in ranks.items()}
            # sizes may differ where ranks have uneven shards; the operation must not
            operations = [kind.partition(" of ")[0] for kind in kinds.values()]
            if len(set(operations)) > 1:
                odd_rank = min(kinds, key=lambda rank: operations.count(kinds[rank].partition(" of ")[0]))
                description = ", ".join(f"rank {rank} in {kind}" for rank, kind in kinds.items())
                return odd_rank, f"number {number} of group {name or 'world'}: {description}"
    return None


def _most_delayed(entered: Entered) -> list[int]:
    """Return the rank that lags most behind the newest collective of its groups, as a list; empty if none does."""
    late: dict[int, int] = {}
    for ranks in entered.values():
        newest = max(max(numbers) for numbers in ranks.values())
        for rank, numbers in ranks.items():
            if max(numbers) < newest:
                late[rank] = late.get(rank, 0) + newest - max(numbers)
    return sorted(late, key=lambda rank: -late[rank])[:1]


def _describe_waiting(entered: Entered) -> str:
    """Describe the newest collective that only some ranks of a group have entered, or say that there is none."""
    for (name, _), ranks in entered.items():
        newest = max(max(numbers) for numbers in ranks.values())
        waiting = [rank for rank, numbers in ranks.items() if max(numbers) == newest]
        if len(waiting) < len(ranks):
            collective = ranks[waiting[0]][newest]
            return f"{_ranks_are(waiting)} waiting in {collective} (number {newest} of group {name or 'world'})"
    return "all have entered the same collectives"


def _ranks_are(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


@cache
def _entry_adapter() -> TypeAdapter[Collective]:
    return TypeAdapter(Collective)


def _parse_log(text: str) -> CollectiveLog:
    """Return what the verdict needs of a flight recorder's log; an empty one if a rank could not respond, or responded
    in another form, as another version of torch might.
    """
    try:
        log = json.loads(text)
        entries = [_entry_adapter().validate_python(entry) for entry in log.get("entries", [])[-MAX_COLLECTIVES:]]
        members = {str(name): str(group.get("ranks", "")) for name, group in log.get("pg_config", {}).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):  # a ValidationError is a ValueError
        return CollectiveLog()
    return CollectiveLog(entries, members)


@dataclass(frozen=True)
class ExitReport:
    """The end of a machine's ranks. Plain values, because machines send it to each other."""

    code: ExitCode
    cause: str = ""
    """The error, or empty."""
    rank: Count = 0
    """The rank that caused the failure, as far as is known."""
    reached: Count = 0
    """The last step that any rank completed."""
    by_signal: bool = False
    """True if a signal killed this rank: a root cause, not a consequence of another failure."""
    followed: bool = False
    """True if another machine had failed before, so that this end is only a consequence."""
    asked: bool = False
    """True if a stop was requested."""
    done: bool = False
    """True if every rank had reached its end, with all state saved. Later failures (of the plot, a tracker or leaving
    the process group) are not retried.
    """
    trained: bool = False
    """True if every rank had saved the last step, so that at most the export was left to do."""
    evidence: Evidence | None = None
    """Evidence of a hang."""
    end_cause: str = ""
    """Cause of the end (metrics/run_end.py), if the rank knows it better than its exit code tells."""
    end_reason: str = ""
    """The reason that the rank has passed on."""
    end_by: str = ""
    """This rank, as in "rank 3 on host"; empty if all ranks have the reason."""

    @property
    def is_final(self) -> bool:
        """True if another start would not help or is not wanted."""
        return self.code == 0 or self.code in EXPLAINED or self.asked or self.trained


def combine_reports(reports: Sequence[ExitReport], folder: Path) -> ExitReport:
    """Combine the ends of all machines, in the order of their reports, to the run's. `folder`: it holds all hangs."""
    first = min(reports, key=_order)
    evidence = [report.evidence for report in reports if report.evidence is not None]
    cause, rank = explain_hang(evidence, folder) if first.code == HUNG and evidence else (first.cause, first.rank)
    return replace(
        first,
        cause=cause,
        rank=rank,
        end_by="" if len(reports) > 1 and len({report.end_reason for report in reports}) == 1 else first.end_by,
        reached=max(report.reached for report in reports),
        asked=any(report.asked for report in reports),
        done=all(report.done for report in reports),
        trained=all(report.trained for report in reports),
    )


def _order(report: ExitReport) -> int:
    """Return a sort key: the end that best explains why the run ended comes first."""
    if report.code in EXPLAINED - STOPPED:
        return 0
    if report.code == HUNG:
        return 1
    if report.code == 0:
        return 6
    if report.code in STOPPED:
        return 5
    return 4 if report.followed else 2 + (not report.by_signal)
