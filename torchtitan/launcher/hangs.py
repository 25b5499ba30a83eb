"""The rank's side of a hang: its stacks and the log of its collectives, when the launcher asks.

Stacks come by a signal that is handled in C, so also while a thread holds Python's lock; the log of the collectives
(torch's flight recorder) by a thread that sleeps in a pipe until then. Neither costs anything before.

A hang: noticed, explained on disk, ended.

The ranks of a world hang together, as each waits for the others in a collective; so nobody getting on is the sign, and
who is behind the question. It is answered by what each has told last, by what the kernel says of its process, and by
the numbers of the collectives that it has entered.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from torchtitan.launcher.processes import Processes
from torchtitan.process.heartbeat import PHASES, Doing
from torchtitan.process.ranks import Launcher

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


ANSWER_SECONDS = 2.0
"""How long ranks get to write their stacks and collectives, and for how long it is watched whether one is busy."""
BUSY = 0.1
"""Share of a core from which on a rank, with the processes that it started, computes (others may compute beside it) and
does not wait."""
LONG = ("start", "load", "first", "export")
"""Phases that may take comm.init_timeout_seconds."""
WITH_FILES = ("start", "load", "save", "export")
"""Phases in which reading and writing is getting on, though a large file says nothing else for minutes."""


@dataclass(frozen=True)
class Limits:
    """In seconds, of comm.*_timeout_seconds."""

    start: float
    train: float


class Watchdog:
    """Asked now and then whether all ranks have stood still for too long."""

    def __init__(self, processes: Processes, limits: Limits) -> None:
        self.processes, self.limits = processes, limits
        self._files: dict[int, tuple[int, float]] = {}
        self._busy_at = 0.0

    def standing(self, now: float) -> float | None:
        """For how long nobody has got on, once that is too long."""
        doing = {rank: self.processes.progress[rank] for rank in self.processes.running}
        if not doing or any(each.phase == "end" for each in doing.values()):
            return None
        latest = max(self._busy_at, *(self._last(rank, each, now) for rank, each in doing.items()))
        long = any(each.phase in LONG for each in doing.values())
        limit = self.limits.start if long else self.limits.train
        if now - latest <= limit:
            return None
        # a compiler computes for long and tells nothing. Of several ranks in a step, here or on other machines, those
        # that wait for a GPU would look the same, so there the question is not asked
        if (long or self.processes.world_size == 1) and self._busy():
            self._busy_at = time.monotonic()
            return None
        # looking took a while, in which a rank may have got on after all
        moved = any(self.processes.progress[rank] != each for rank, each in doing.items())
        return None if moved else now - latest

    def _busy(self) -> bool:
        ranks = list(self.processes.running)
        before = [self.processes.cpu_seconds(rank) for rank in ranks]
        time.sleep(ANSWER_SECONDS)
        after = [self.processes.cpu_seconds(rank) for rank in ranks]
        return any(b - a > BUSY * ANSWER_SECONDS for a, b in zip(before, after, strict=True))

    def _last(self, rank: int, doing: Doing, now: float) -> float:
        told = doing.since or self.processes.began
        if doing.phase not in WITH_FILES:
            return told
        moved, at = self._files.get(rank, (-1, told))
        count = self.processes.bytes_moved(rank)
        if count != moved:
            self._files[rank] = count, now
            return now
        return max(told, at)


@dataclass(frozen=True)
class Evidence:
    """What the ranks of a machine were doing when none of them got on, by their number in the world. Plain values, as
    machines tell it to each other."""

    seconds: float
    """For how long none had got on."""
    place: str
    """Where their stacks and collectives are."""
    problem: str
    """Why they could not be written there, or empty."""
    doing: dict[int, tuple[str, int, float]]
    states: dict[int, str]
    logs: dict[int, dict[str, Any]]


def folder_name() -> str:
    """Of one hang that is seen now."""
    return time.strftime("%Y%m%d-%H%M%S")


def collect(processes: Processes, place: Path, seconds: float) -> Evidence:
    """Ask all ranks of this machine for their stacks and collectives and write them into `place`."""
    for rank in processes.running:
        os.write(processes.shared[rank].ask, b"?")
    processes.signal(STACKS)
    time.sleep(ANSWER_SECONDS)
    here = {processes.first + local: local for local in processes.running}
    logs = {rank: processes.shared[local].collectives.read() for rank, local in here.items()}
    problem = ""
    try:
        place.mkdir(parents=True, exist_ok=True)
        for rank, local in here.items():
            (place / f"rank-{rank}.stacks.txt").write_text(processes.shared[local].stacks.read())
            (place / f"rank-{rank}.collectives.json").write_text(logs[rank])
    except OSError as error:
        problem = str(error.strerror)
    return Evidence(
        seconds,
        str(place),
        problem,
        {rank: astuple(processes.progress[local]) for rank, local in here.items()},
        {rank: processes.state(local) for rank, local in here.items()},
        {rank: _parsed(text) for rank, text in logs.items()},
    )


def explain(found: list[Evidence]) -> tuple[str, int]:
    """Of all machines: one line for a person, and the rank behind; the first machine writes the summary."""
    doing = {rank: Doing(*row) for each in found for rank, row in each.doing.items()}
    states = {rank: state for each in found for rank, state in each.states.items()}
    late, why = verdict(doing, states, {rank: log for each in found for rank, log in each.logs.items()})
    line = f"hang: no rank has got on for {max(each.seconds for each in found):.0f} s; {why}"
    place = Path(found[0].place)
    table = [f"rank {rank}: {each}, process {states[rank]}" for rank, each in sorted(doing.items())]
    problem = next((each.problem for each in found if each.problem), "")
    try:
        (place / "summary.txt").write_text("\n".join([line, *table, ""]))
    except OSError as error:
        problem = problem or str(error.strerror)
    if problem:
        return f"{line}; what the ranks were doing could not be written to {place} ({problem})", late
    return f"{line}; stacks and collectives of all ranks: {place}", late


def verdict(
    doing: Mapping[int, Doing], states: Mapping[int, str], logs: Mapping[int, dict[str, Any]]
) -> tuple[int, str]:
    """The rank that is behind and why that is thought. `states` are the kernel's letters, `logs` the flight
    recorder's."""
    entered = collectives(logs)
    waiting = f"; {_waits(entered)}" if entered else ""
    differing = disagreement(entered)
    if differing:
        return differing[0], f"the ranks are in different collectives: {differing[1]}"
    stopped = [rank for rank, state in states.items() if state in "Tt"]
    if stopped:
        return stopped[0], f"{_named(stopped)} stopped by a signal, {doing[stopped[0]]}{waiting}"
    place = {rank: (each.step, PHASES.index(each.phase)) for rank, each in doing.items()}
    last = [rank for rank in place if place[rank] == min(place.values())]
    if len(last) == len(place):
        last = _behind(entered)
    if not last:
        return min(doing), f"all ranks are {doing[min(doing)]}, none is behind"
    return last[0], f"{_named(last)} behind, {doing[last[0]]}{waiting}"


Entered = dict[tuple[str, str], dict[int, dict[int, str]]]
"""(name, ranks) of a group -> rank -> number of a collective -> what it is."""


def collectives(logs: Mapping[int, dict[str, Any]]) -> Entered:
    """What each rank has entered, of the groups that more than one rank has told of."""
    found: Entered = {}
    for rank, log in logs.items():
        for entry in log.get("entries", []):
            if entry["is_p2p"]:
                continue
            name, _ = entry["process_group"]
            members = log["pg_config"].get(name, {}).get("ranks", "")
            shapes = "x".join(str(size) for size in entry["input_sizes"])
            group = found.setdefault((name, members), {})
            group.setdefault(rank, {})[entry["collective_seq_id"]] = f"{entry['profiling_name']} of {shapes}"
    return {group: ranks for group, ranks in found.items() if len(ranks) > 1}


def disagreement(entered: Entered) -> tuple[int, str] | None:
    """The earliest collective of one number that is not the same on all ranks: a rank that is alone with its own, and
    what each is in."""
    for (name, _), ranks in entered.items():
        common = set.intersection(*(set(numbers) for numbers in ranks.values()))
        for number in sorted(common):
            kinds = {rank: numbers[number] for rank, numbers in ranks.items()}
            # sizes differ by right where ranks have uneven parts; the operation never does
            operations = [kind.partition(" of ")[0] for kind in kinds.values()]
            if len(set(operations)) > 1:
                alone = min(kinds, key=lambda rank: operations.count(kinds[rank].partition(" of ")[0]))
                told = ", ".join(f"rank {rank} in {kind}" for rank, kind in kinds.items())
                return alone, f"number {number} of group {name or 'world'}: {told}"
    return None


def _behind(entered: Entered) -> list[int]:
    """Ranks that have not entered a collective in which others of their group are."""
    late: dict[int, int] = {}
    for ranks in entered.values():
        newest = max(max(numbers) for numbers in ranks.values())
        for rank, numbers in ranks.items():
            if max(numbers) < newest:
                late[rank] = late.get(rank, 0) + newest - max(numbers)
    return sorted(late, key=lambda rank: -late[rank])[:1]


def _waits(entered: Entered) -> str:
    """The newest collective that some ranks of a group are in and others not, else the newest of all."""
    for (name, _), ranks in entered.items():
        newest = max(max(numbers) for numbers in ranks.values())
        inside = [rank for rank, numbers in ranks.items() if max(numbers) == newest]
        if len(inside) < len(ranks):
            what = ranks[inside[0]][newest]
            return f"{_named(inside)} waiting in {what} (number {newest} of group {name or 'world'})"
    return "all have entered the same collectives"


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"


def _parsed(text: str) -> dict[str, Any]:
    """Of the recorder's log what the verdict reads; nothing from a rank that could not answer."""
    try:
        log = json.loads(text)
    except ValueError:
        return {}
    names = ("is_p2p", "process_group", "input_sizes", "collective_seq_id", "profiling_name")
    return {
        "entries": [{name: entry[name] for name in names} for entry in log.get("entries", [])],
        "pg_config": log.get("pg_config", {}),
    }
