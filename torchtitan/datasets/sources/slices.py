"""Slices of a source's records: `[:20%]` or `[100:200]+[-10%:]`, as in the `split` of datasets.load_dataset.

A percentage is rounded to the nearest record and a half to the even one, a negative number counts from the end, and a
number beyond the end is the end. Slices joined by + are read one after the other. All sizes are found when the first
record is needed: those of files that can only be read forward by reading them once.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, islice

from torchtitan.datasets.sources import (
    DataError,
    Document,
    DocumentOrError,
    IndexedSource,
    Part,
    SequentialSource,
    Source,
    UnreachableData,
    document_or_error,
)
from torchtitan.datasets.sources.files import TextFile
from torchtitan.datasets.sources.tables import RowGroup

KEY = "slice"
"""Key in a fingerprint. Sources without a slice lack it."""


def select(source: Source, slices: str) -> Source:
    """Return a source that has only these records. Raises DataError for a source without records to count."""
    has_pieces = isinstance(source, IndexedSource) and any(isinstance(file, TextFile) for file in source.files)
    if has_pieces or not isinstance(source, IndexedSource | SequentialSource):
        raise DataError(f"{source.name}: has no records that slice = {slices!r} could count; drop slice")
    return IndexedSlice(source, slices) if isinstance(source, IndexedSource) else SequentialSlice(source, slices)


def record_ranges(slices: str, records: int) -> list[range]:
    """Return the numbers that `slices` selects of so many records, in order. A range may be empty."""
    borders = (part.strip("[]").split(":") for part in slices.split("+"))
    return [range(_position(first, 0, records), _position(end, records, records)) for first, end in borders]


def _position(border: str, default: int, records: int) -> int:
    number = int(border.removesuffix("%") or default)
    if border.endswith("%"):
        number = int(round(number * records / 100.0))  # in the operations of `datasets`, and so with its rounding
    return min(max(records + number, 0) if number < 0 else number, records)


def _needed(slices: str) -> int | None:
    """Return how many records there have to be for `slices` to mean the same as with any more; None for all."""
    borders = [part.strip("[]").split(":") for part in slices.split("+")]
    ends = [end for _, end in borders]
    if not all(ends) or any("%" in border or "-" in border for pair in borders for border in pair):
        return None
    return max(map(int, ends))


def _nonempty_ranges(source: Source, slices: str, records: int) -> list[range]:
    ranges = [numbers for numbers in record_ranges(slices, records) if numbers]
    if not ranges:
        raise DataError(f"{source.name}: slice = {slices!r} selects none of its {records} records; correct slice")
    return ranges


def _empty_line(location: str) -> DataError:
    return DataError(f"{location}: an empty line, which is no record that a slice could count; remove empty lines")


class IndexedSlice(IndexedSource):
    def __init__(self, source: IndexedSource, slices: str) -> None:
        source.fingerprint[KEY] = slices
        super().__init__(f"{source.name} {slices}", source.fingerprint, source.files)
        self._source, self._slices = source, slices

    @cached_property
    def _ranges(self) -> list[range]:
        for file in self.files:
            if (number := file.empty_record()) is not None:
                raise _empty_line(file.get(number).location)
        return _nonempty_ranges(self._source, self._slices, len(self._source))

    def __len__(self) -> int:
        return sum(map(len, self._ranges))

    def documents(self) -> Iterator[DocumentOrError]:
        for numbers in self._ranges:
            yield from (document_or_error(self._source.get, number) for number in numbers)

    def get(self, index: int) -> Document:
        for numbers in self._ranges:
            if index < len(numbers):
                return self._source.get(numbers[index])
            index -= len(numbers)
        raise IndexError(index)


class SequentialSlice(SequentialSource):
    def __init__(self, source: SequentialSource, slices: str) -> None:
        source.fingerprint[KEY] = slices
        super().__init__(f"{source.name} {slices}", source.fingerprint)
        self.packages, self._source, self._slices = source.packages, source, slices

    def open(self) -> list[Part]:
        parts, needed, counts = self._source.parts, _needed(self._slices), list[int]()
        for part in parts:
            remaining = None if needed is None else needed - sum(counts)
            counts.append(0 if remaining == 0 else _count(part, remaining))
        ends = list(accumulate(counts))
        sliced: list[Part] = []
        for numbers in _nonempty_ranges(self._source, self._slices, ends[-1] if ends else 0):
            for part, end, count in zip(parts, ends, counts, strict=True):
                begin = end - count
                first, stop = max(numbers.start, begin), min(numbers.stop, end)
                if first < stop:
                    sliced.append(SlicedPart(part, first - begin, stop - begin))
        return sliced


def _count(part: Part, most: int | None) -> int:
    """Return the number of records of a part, or `most` if there are more. Raises DataError if it cannot be read."""
    if isinstance(part, RowGroup):
        return part.size if most is None else min(part.size, most)
    count = 0
    for document in islice(part.read(0), most):
        if isinstance(document, UnreachableData):
            raise document
        if isinstance(document, DataError):
            raise DataError(f"{document}; with a slice it cannot be left out, as it may be the last one")
        if document.is_empty_line:
            raise _empty_line(document.location)
        count += 1
    return count


class SlicedPart(Part):
    """The records of a part from number `first` to before `stop`."""

    def __init__(self, part: Part, first: int, stop: int) -> None:
        self.part, self.first, self.stop, self.size = part, first, stop, stop - first

    def read(self, start: int) -> Iterator[DocumentOrError]:
        return islice(self.part.read(self.first + start), max(0, self.size - start))
