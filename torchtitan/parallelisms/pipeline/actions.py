"""Tables of pipeline actions: read one from a CSV file, check it, write it. It does not import torch, so that a job's
schedule can be checked before anything starts.

A table has one row per rank, the rank's actions in execution order. An action starts as soon as its inputs arrive. So a
table is valid if it has every action once and no cycle makes ranks wait for one another (a deadlock). Actions are
written as in torch.distributed.pipelining: stage, kind, microbatch, e.g. 3F0.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, read_file

FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD, OVERLAP = "F", "I", "W", "B", "OVERLAP_F_B"
ACTION_NAMES = {
    FORWARD: "forward",
    INPUT_GRAD: "input gradient",
    WEIGHT_GRAD: "weight gradient",
    BACKWARD: "full backward",
}
SINGLE = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
RUNTIME_ACTION = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
PLURAL = {"stage": "stages", "microbatch": "microbatches"}
MAX_FILE_BYTES = 2**26
"""Largest file that is read: 64 ranks with 512 microbatches take a twentieth."""
MAX_LISTED = 6
"""Number of actions that a fault lists; the others are counted."""


class Action(NamedTuple):
    """One action: F forward, I input gradient, W weight gradients, B full backward (I and W), or an overlapping pair.

    A pair has stage and microbatch -1, and its F and B in `parts`.
    """

    stage: int
    kind: str
    microbatch: int
    parts: tuple["Action", ...] = ()

    @property
    def singles(self) -> tuple["Action", ...]:
        return self.parts or (self,)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"


Table = list[list[Action]]
Key = tuple[int, str, int]
"""An input or output of an action: the hidden states F or the gradient I of the input, of (stage, ., microbatch)."""


class ScheduleFault(NamedTuple):
    where: str
    value: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: given {self.value}; allowed: {self.allowed}; {self.remedy}"


class ScheduleTableError(JobError):
    """An error that lists all faults of a table, one per line."""

    def __init__(self, faults: Sequence[ScheduleFault]) -> None:
        self.faults = list(faults)
        super().__init__("\n".join(map(str, self.faults)))


def pair(forward: Action, backward: Action) -> Action:
    return Action(-1, OVERLAP, -1, (forward, backward))


def count_stages(table: Table) -> int:
    return 1 + max(single.stage for row in table for action in row for single in action.singles)


def stage_ranks(table: Table) -> dict[int, int]:
    return {single.stage: rank for rank, row in enumerate(table) for action in row for single in action.singles}


def with_full_backward(table: Table) -> Table:
    """Return the table with I and W merged to one B in the position of I, as recompute needs it."""

    def merge(action: Action) -> Action:
        if action.parts:
            return action._replace(parts=tuple(map(merge, action.parts)))
        return action._replace(kind=BACKWARD) if action.kind == INPUT_GRAD else action

    return [[merge(action) for action in row if action.kind != WEIGHT_GRAD] for row in table]


def split_pairs(table: Table) -> Table:
    """Return the table with each pair as two actions, for a runtime that does not overlap pairs.

    This is never slower there: the rank sends the forward's result before the backward, and not after it.
    """
    return [[single for action in row for single in action.singles] for row in table]


# Order


@lru_cache(2**17)
def input_keys(action: Action, num_stages: int) -> tuple[Key, ...]:
    """Return the inputs of an action. The parts of a pair begin together, so a pair needs all of their inputs."""
    keys: list[Key] = []
    for stage, kind, microbatch, _ in action.singles:
        if kind == FORWARD:
            keys += [(stage - 1, FORWARD, microbatch)] if stage else []
        elif kind == WEIGHT_GRAD:
            keys.append((stage, INPUT_GRAD, microbatch))
        else:
            keys.append((stage, FORWARD, microbatch))
            keys += [(stage + 1, INPUT_GRAD, microbatch)] if stage + 1 < num_stages else []
    return tuple(keys)


@lru_cache(2**17)
def output_keys(action: Action) -> tuple[Key, ...]:
    kinds = {FORWARD: FORWARD, INPUT_GRAD: INPUT_GRAD, BACKWARD: INPUT_GRAD}
    return tuple((s.stage, kinds[s.kind], s.microbatch) for s in action.singles if s.kind in kinds)


Locator = Callable[[int, int], str]
"""A function (rank, index in the rank's row) -> the location of an action, for errors."""


def _step_in_table(rank: int, step: int) -> str:
    return f"rank {rank}, step {step}"


def running_order(table: Table, locate: Locator = _step_in_table) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) for all actions, each after its inputs. Raise ScheduleTableError on a deadlock."""
    num_stages = count_stages(table)
    waiting = [[(action, input_keys(action, num_stages)) for action in row] for row in table]
    at, done = [0] * len(table), set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(waiting):
            while at[rank] < len(row) and done.issuperset(row[at[rank]][1]):
                action = row[at[rank]][0]
                yield rank, action
                done.update(output_keys(action))
                at[rank] += 1
                moved = True
    if any(at[rank] < len(row) for rank, row in enumerate(table)):
        raise ScheduleTableError([_deadlock_fault(table, at, done, locate)])


def _deadlock_fault(table: Table, at: list[int], done: set[Key], locate: Locator) -> ScheduleFault:
    """Return the fault of a deadlock: an input that no action produces, or a cycle of waiting actions."""
    num_stages = count_stages(table)
    makers = {
        key: (rank, i) for rank, row in enumerate(table) for i, action in enumerate(row) for key in output_keys(action)
    }
    rank = next(rank for rank, row in enumerate(table) if at[rank] < len(row))
    chain: list[tuple[int, int, int]] = []  # a waiting rank, and the rank and step that produce its input
    while rank not in [waiting for waiting, _, _ in chain]:
        action = table[rank][at[rank]]
        missing = next(key for key in input_keys(action, num_stages) if key not in done)
        if missing not in makers:
            where = f"{locate(rank, at[rank])}, action {action}"
            allowed = "actions that get their inputs from other actions of the table"
            return ScheduleFault(
                where, f"without its input {_describe_key(missing)}", allowed, "add the action that produces it"
            )
        chain.append((rank, *makers[missing]))
        rank = chain[-1][1]
    ring = chain[[waiting for waiting, _, _ in chain].index(rank) :]
    links, remedies = [], []
    for waiting, other, step in ring:
        needed, first = table[other][step], table[other][at[other]]
        position = "" if step == at[other] else f", which comes after {first} ({locate(other, at[other])})"
        links.append(f"{table[waiting][at[waiting]]} waits for {needed} ({locate(other, step)}){position}")
        remedies += [] if step == at[other] else [f"move {needed} before {first}"]
    return ScheduleFault(
        f"{locate(rank, at[rank])}, action {table[rank][at[rank]]}",
        "a deadlock: " + "; ".join(links),
        "every action after the actions that produce its inputs",
        " or ".join(remedies) or "take one of the pairs apart",
    )


def _describe_key(key: Key) -> str:
    stage, kind, microbatch = key
    return f"{stage}F{microbatch}" if kind == FORWARD else f"{stage}I{microbatch} or {stage}B{microbatch}"


# Completeness


def find_faults(
    table: Table, ranks: int, num_stages: int, microbatches: int, locate: Locator = _step_in_table
) -> list[ScheduleFault]:
    """Return the faults of a table.

    Later checks run only if the earlier ones pass: first rows, numbers, ranks of stages and duplicates; then missing
    actions; then the order.
    """
    faults = []
    if len(table) != ranks:
        allowed = f"{ranks}, one for each rank of the pipeline"
        faults.append(ScheduleFault("the table", f"{len(table)} rows", allowed, "give every rank its row"))
    for rank, row in enumerate(table):
        if not row:
            allowed = "the actions of at least one stage"
            faults.append(ScheduleFault(f"rank {rank}", "no actions", allowed, "give the rank a stage"))
    faults += _out_of_range(table, num_stages, microbatches, locate) or _misplaced(table, locate)
    faults = faults or _missing(table, num_stages, microbatches)
    if not faults:
        try:
            for _ in running_order(table, locate):
                pass
        except ScheduleTableError as error:
            faults = error.faults
    return faults


def _located(table: Table, locate: Locator) -> Iterator[tuple[int, str, Action]]:
    """Yield (rank, location for messages, action) for all single actions."""
    for rank, row in enumerate(table):
        for step, action in enumerate(row):
            yield from ((rank, f"{locate(rank, step)}, action {single}", single) for single in action.singles)


def _out_of_range(table: Table, num_stages: int, microbatches: int, locate: Locator) -> list[ScheduleFault]:
    """Return the first stage and microbatch number that are too large, with the count of the others."""
    faults = []
    for name, limit, numbers in (
        ("stage", num_stages, [(where, single.stage) for _, where, single in _located(table, locate)]),
        ("microbatch", microbatches, [(where, single.microbatch) for _, where, single in _located(table, locate)]),
    ):
        beyond = [(where, number) for where, number in numbers if number >= limit]
        if beyond:
            more = f" (and {len(beyond) - 1} more such actions)" if len(beyond) > 1 else ""
            value, allowed = f"{name} {beyond[0][1]}{more}", f"0 to {limit - 1}"
            faults.append(ScheduleFault(beyond[0][0], value, allowed, f"correct it, or make more {PLURAL[name]}"))
    return faults


def _misplaced(table: Table, locate: Locator) -> list[ScheduleFault]:
    """Return the faults of stages on two ranks and of duplicate actions."""
    faults = []
    owner: dict[int, int] = {}
    first: dict[Key, str] = {}
    for rank, where, single in _located(table, locate):
        if owner.setdefault(single.stage, rank) != rank:
            value = f"stage {single.stage}, which is on rank {owner[single.stage]}"
            faults.append(
                ScheduleFault(where, value, "each stage on one rank", f"move it to rank {owner[single.stage]}")
            )
        double = {first.setdefault(key, where) for key in _work_keys(single)} - {where}
        if double:
            value, remedy = f"a second time, after {double.pop()}", "drop one of them (B is I and W together)"
            faults.append(ScheduleFault(where, value, "every action once", remedy))
    return faults


def _work_keys(single: Action) -> list[Key]:
    kinds = (INPUT_GRAD, WEIGHT_GRAD) if single.kind == BACKWARD else (single.kind,)
    return [(single.stage, kind, single.microbatch) for kind in kinds]


def _missing(table: Table, num_stages: int, microbatches: int) -> list[ScheduleFault]:
    """Return a fault for each stage with missing actions, or for the table if it has too few stages or microbatches."""
    singles = [single for row in table for action in row for single in action.singles]
    present = {key for single in singles for key in _work_keys(single)}
    most, stages = 1 + max(single.microbatch for single in singles), stage_ranks(table)
    short = [("stages", len(stages), num_stages), ("microbatches", most, microbatches)]
    faults = [
        ScheduleFault("the table", f"{has} {subject}", f"{needed}", f"write it for {needed}, or use {has}")
        for subject, has, needed in short
        if has < needed
    ]
    for stage, rank in () if faults else sorted(stages.items()):
        absent = []
        for microbatch in range(microbatches):
            kinds = [kind for kind in (FORWARD, INPUT_GRAD, WEIGHT_GRAD) if (stage, kind, microbatch) not in present]
            if kinds[-2:] == [INPUT_GRAD, WEIGHT_GRAD]:
                kinds[-2:] = [BACKWARD]
            absent += [f"{stage}{kind}{microbatch}" for kind in kinds]
        if absent:
            more = f" and {len(absent) - MAX_LISTED} more" if len(absent) > MAX_LISTED else ""
            value = f"no action {', '.join(absent[:MAX_LISTED])}{more}"
            allowed = f"every action of {microbatches} microbatches once"
            faults.append(ScheduleFault(f"rank {rank}, stage {stage}", value, allowed, "add the missing actions"))
    return faults


# CSV, in torch's format


def load_schedule_csv(path: str | Path, ranks: int, num_stages: int | None, microbatches: int) -> Table:
    """Read and check a table of compute actions. Raises ScheduleTableError with all of its faults.

    `num_stages`: the expected number of stages; None accepts the table's. A step in an error is the cell's index in its
    row, from 0, with empty cells counted.
    """
    table, cells, faults = _read(Path(path))
    if not faults:
        num_stages = len(stage_ranks(table)) if num_stages is None else num_stages
        faults = find_faults(
            table, ranks, num_stages, microbatches, lambda rank, i: _step_in_table(rank, cells[rank][i])
        )
    if faults:
        raise ScheduleTableError([fault._replace(where=f"{path}, {fault.where}") for fault in faults])
    return table


def _read(path: Path) -> tuple[Table, list[list[int]], list[ScheduleFault]]:
    """Return the actions, the cell index of each in its row, and the faults of cells that cannot be parsed."""
    allowed = "a CSV file with a row for each rank, its actions in order"
    try:
        content = read_file(path, MAX_FILE_BYTES).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(content, newline="")))
    except (ValueError, csv.Error) as error:
        reason = error.reason if isinstance(error, FileError) else f"cannot be read ({error})"
        return [], [], [ScheduleFault("the file", f"what {reason}", allowed, "name another file")]
    while rows and not any(map(str.strip, rows[-1])):
        rows.pop()
    if not rows:
        return [], [], [ScheduleFault("the file", "no rows", allowed, "`torchtitan schedule --write_csv` writes one")]
    table, cells, faults = [], [], []
    for rank, row in enumerate(rows):
        table.append([])
        cells.append([])
        for step, cell in enumerate(row):
            try:
                action = parse_action(cell)
            except ScheduleTableError as error:
                shown = cell.strip()[:40]
                faults += [
                    fault._replace(where=f"{_step_in_table(rank, step)}, action {shown}") for fault in error.faults
                ]
                continue
            if action:
                table[rank].append(action)
                cells[rank].append(step)
    return table, cells, faults


def parse_action(text: str) -> Action | None:
    """Parse `3F0` or `(0F4;3B1)OVERLAP_F_B`, or return None for an empty cell. Raises ScheduleTableError otherwise."""
    text = text.strip()
    if not text:
        return None
    if match := SINGLE.fullmatch(text):
        return Action(int(match[1]), match[2], int(match[3]))
    fault = ScheduleFault("", "no action", "stage, one of F I W B, and microbatch, as 3F0", "correct it")
    if RUNTIME_ACTION.fullmatch(text):
        fault = fault._replace(value="an action that the runtime adds by itself", remedy="leave it out")
    elif match := PAIR.fullmatch(text):
        parts = [SINGLE.fullmatch(part.strip()) for part in match[1].split(";")]
        kinds = [part[2] for part in parts if part]
        if len(parts) == 2 and kinds == [FORWARD, BACKWARD]:
            forward, backward = (Action(int(part[1]), part[2], int(part[3])) for part in parts if part)
            if (forward.stage, forward.microbatch) != (backward.stage, backward.microbatch):
                return pair(forward, backward)
        allowed = "a forward and a full backward that do not need each other, as (0F4;3B1)OVERLAP_F_B"
        fault = fault._replace(value="no pair that can overlap", allowed=allowed)
    raise ScheduleTableError([fault])


def to_csv(table: Table) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[str(action) for action in row] for row in table])
    return out.getvalue()
