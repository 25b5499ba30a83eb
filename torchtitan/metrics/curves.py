"""Curves of a run: its records, of any length, read into a bounded memory, and the moving average of its loss.

Of millions of logged steps some thousand remain. Neighbouring records form groups. A group retains its first record,
those with the smallest and the largest value of some keys, and the first whose value is not finite. When there are too
many groups, neighbours are joined, so the groups stay equally long. A run of up to MOST_GROUPS records of a kind is
read in full.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError
from torchtitan.metrics.json_lines import END, METRICS, Record, is_finite, iterate_records

UNIT_BITS = 100
EXTREME, MEAN = "is_extreme", "mean_loss"
"""Keys of retained records, if records were left out: true if it is retained for an extreme value only, so that it does
not count for averages; mean of the finite losses of its group."""


def smoothed_over(count: int) -> int:
    """Return the width of the smoothing window for `count` points, an odd number."""
    return 1 + 2 * min(max(count // 30, 2), (count - 1) // 2)


def smoothed(values: list[float]) -> list[float]:
    """Return the moving average over a 15th of the points, at least five if there are that many.

    Towards the beginning, where the loss falls fast, the window narrows to stay centred. At the end it keeps its width,
    because otherwise the line would end in the last step's own value. Values that are not finite are ignored.
    The sums of windows are differences of running sums, in integers so that no spike of the loss rounds them.
    """
    half = smoothed_over(len(values)) // 2
    units = [_in_units(value) if math.isfinite(value) else None for value in values]
    sums = list(itertools.accumulate((unit or 0 for unit in units), initial=0))
    counts = list(itertools.accumulate((unit is not None for unit in units), initial=0))
    means = []
    for i in range(len(values)):
        reach = min(half, i)
        first = min(i - reach, max(0, len(values) - 1 - 2 * half))
        end = min(i + reach + 1, len(values))
        count = counts[end] - counts[first]
        means.append((sums[end] - sums[first]) / (count << UNIT_BITS) if count else math.nan)
    return means


def _in_units(value: float) -> int:
    """Return a value as a whole number of 2^-UNIT_BITS."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator << UNIT_BITS) // denominator


def smoothed_losses(rows: Sequence[Record]) -> list[float]:
    """Return the smoothed loss at each row. Of thinned rows, it is that of the means of their groups."""
    losses: list[float] = []
    group_of: list[int] = []
    for row in rows:
        if EXTREME not in row or not losses:
            loss: Any = row.get(MEAN, row.get("loss"))
            losses.append(loss if is_finite(loss) else math.nan)
        group_of.append(len(losses) - 1)
    smooth = smoothed(losses)
    return [smooth[group] for group in group_of]


MOST_GROUPS = 8192


Place = tuple[int, Record]
"""A record and its number."""


class _Group:
    __slots__ = ("count", "first", "lowest", "highest", "lost", "total", "losses")

    def __init__(self) -> None:
        self.count, self.total, self.losses = 0, 0.0, 0
        self.first: Place | None = None
        self.lowest: dict[str, tuple[float, Place]] = {}
        self.highest: dict[str, tuple[float, Place]] = {}
        self.lost: dict[str, Place] = {}
        """The first record whose value is not finite, by key."""

    def add(self, number: int, record: Record, keys: Sequence[str]) -> None:
        place = number, record
        if self.first is None:
            self.first = place
        self.count += 1
        lowest, highest = self.lowest, self.highest
        for key in keys:
            value: Any = record.get(key)
            if is_finite(value):
                if key not in lowest:
                    lowest[key] = highest[key] = value, place
                elif value < lowest[key][0]:
                    lowest[key] = value, place
                elif value > highest[key][0]:
                    highest[key] = value, place
            elif key in record:
                self.lost.setdefault(key, place)
        loss: Any = record.get("loss")
        if is_finite(loss):
            self.total, self.losses = self.total + loss, self.losses + 1

    def join(self, later: "_Group") -> "_Group":
        self.count, self.total = self.count + later.count, self.total + later.total
        self.losses += later.losses
        for key, low in later.lowest.items():
            self.lowest[key] = min(self.lowest.get(key, low), low, key=_value)
            self.highest[key] = max(self.highest.get(key, low), later.highest[key], key=_value)
        self.lost = later.lost | self.lost
        return self

    def records(self) -> Iterator[tuple[int, Record]]:
        assert self.first is not None
        if self.count == 1:
            yield self.first
            return
        mean = {MEAN: self.total / self.losses} if self.losses else {}
        yield self.first[0], self.first[1] | mean
        extremes = (place for _, place in (*self.lowest.values(), *self.highest.values()))
        further_records = {
            number: record for number, record in (*extremes, *self.lost.values()) if number != self.first[0]
        }
        yield from ((number, record | mean | {EXTREME: True}) for number, record in further_records.items())


def _value(extreme: tuple[float, Place]) -> float:
    return extreme[0]


class Thinner:
    """Retains some of many records of one kind: the extremes of `keys`, and evenly spaced ones."""

    def __init__(self, keys: Sequence[str], most: int = MOST_GROUPS) -> None:
        self.keys, self.most, self.size = tuple(keys), most, 1
        self._groups: list[_Group] = []
        self._last: tuple[int, Record] | None = None

    def add(self, number: int, record: Record) -> None:
        """Add a record; `number` gives its position among the records of all kinds."""
        if not self._groups or self._groups[-1].count >= self.size:
            if len(self._groups) == self.most:
                pairs = zip(self._groups[::2], self._groups[1::2], strict=True)
                self._groups, self.size = [first.join(later) for first, later in pairs], 2 * self.size
            self._groups.append(_Group())
        self._groups[-1].add(number, record, self.keys)
        self._last = number, record

    def records(self) -> dict[int, Record]:
        """Return the retained records by their numbers, the very last one among them."""
        retained = {number: record for group in self._groups for number, record in group.records()}
        if self._last is not None and self._last[0] not in retained:
            retained[self._last[0]] = self._last[1] | {EXTREME: True}
        return retained


def read_thinned(
    path: Path, keys: Sequence[str] = (), prepare: Callable[[Record], Iterable[Record]] = lambda record: (record,)
) -> list[Record]:
    """Return the records of a metrics.jsonl, thinned by kind: logged steps, validations, and each kind of event.

    `prepare`: maps each record to those that take its place, before anything is left out.
    """
    thinners: dict[Any, Thinner] = {}
    number = 0
    for record in iterate_records(path):
        for prepared in prepare(record):
            kind = "step" if "loss" in prepared else prepared.get("event")
            if kind not in thinners:
                thinners[kind] = Thinner(("validation_loss",) if kind is None else keys if kind == "step" else ())
            thinners[kind].add(number, prepared)
            number += 1
    numbered = {number: record for thinner in thinners.values() for number, record in thinner.records().items()}
    return [numbered[number] for number in sorted(numbered)]


def read_run(
    path: Path,
    keys: Sequence[str] = (),
    prepare: Callable[[Record], Iterable[Record]] = lambda record: (record,),
    or_ended: bool = False,
) -> list[Record]:
    """Return the records of a run as `read_thinned`, from its folder or its metrics.jsonl. Raises JobError if none has
    a loss; with `or_ended` an end is enough.
    """
    path = path / METRICS if path.is_dir() else path
    try:
        records = read_thinned(path, keys, prepare)
    except (OSError, FileError) as error:
        remedy = f"give the dump_folder of a run that has logged, or its {METRICS}"
        reason = error.reason if isinstance(error, FileError) else f"cannot be read ({error.strerror})"
        raise JobError(f"{path}: {reason}; {remedy}") from None
    ends = [record.get("reason") or record.get("cause") for record in records if record.get("event") == END]
    if not any(is_finite(record.get("loss")) for record in records) and not (or_ended and ends):
        fault = "no logged step with a loss" + (f", and it ended: {ends[-1]}" if ends else "")
        raise JobError(f"{path}: {fault}; give the dump_folder of a run, or try again after its first step")
    return records
