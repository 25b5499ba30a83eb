"""Which of a document is learned, and what becomes of one that is too long or has nothing to learn."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from torchtitan.datasets.sources import Chat, DataError, Document, Labelled, Span

PERCENTILES = (50, 90, 99, 100)
ROOMY = 0.99
"""The share of records that an advice about seq_len wants to keep whole."""


class TrainOn(NamedTuple):
    """`what`: the answers, everything, or the last answer alone. `ends`: the token that ends a turn is learned after
    each answer, after the last one, after each turn of anybody, or never.
    """

    what: Literal["completion", "all", "last_turn"] = "completion"
    ends: Literal["turn", "last", "all", "none"] = "turn"

    def choose(self, spans: Sequence[Span], closed: bool) -> list[Span]:
        """Spans with these flags instead. `closed`: whether they bring the tokens that end turns: a special token at
        the end of an answer.
        """
        answers = list(_answers(spans))
        ends = [stop - 1 for _, stop in answers if not isinstance(spans[stop - 1].content, str)] if closed else []
        trained = [self.what == "all" or span.trained for span in spans]
        if self.what == "last_turn":
            for start, stop in answers[:-1]:
                trained[start:stop] = [False] * (stop - start)
        if self.ends == "all":
            known = {tuple(spans[end].content) for end in ends}
            ends = [i for i, span in enumerate(spans) if not isinstance(span.content, str)]
            ends = [i for i in ends if tuple(spans[i].content) in known]
            trained = [flag or i in ends for i, flag in enumerate(trained)]
        elif self.ends != "turn":
            for end in ends if self.ends == "none" else ends[:-1]:
                trained[end] = False
        return [Span(span.content, flag) for span, flag in zip(spans, trained, strict=True)]


ANSWERS = TrainOn()


def _answers(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Where each run of trained spans begins and ends."""
    start = None
    for i, trained in enumerate([*(span.trained for span in spans), False]):
        if trained and start is None:
            start = i
        elif not trained and start is not None:
            yield start, i
            start = None


Pieces = list[tuple[np.ndarray, np.ndarray | None]]
"""Of a document: ids, and whether each is trained (None: all)."""
Fate = Literal["whole", "truncated", "split", "dropped", "empty"]


class Made(NamedTuple):
    """What has become of a document of so many tokens."""

    pieces: Pieces
    length: int
    fate: Fate
    place: str


@dataclass(frozen=True)
class Recipe:
    """`longest`: tokens of a document that a sample has room for; None: samples are cut from all documents, end to end,
    so that none is too long, and one without trained tokens is read. `together`: documents of a record, 2 of a pair,
    which stay or go together.
    """

    train_on: TrainOn = ANSWERS
    longest: int | None = None
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    max_empty_ratio: float = 0.01
    together: int = 1

    def apply(self, ids: np.ndarray, trained: np.ndarray, document: Document) -> Made:
        """DataError for a document that is too long where that is one, or that must not be cut."""
        fate: Fate = "whole"
        parts = [(ids, trained)] if len(ids) else []
        if self.longest is not None and len(ids) > self.longest:
            parts, fate = self._cut(ids, trained, document)
        if self.longest is not None and fate != "dropped":
            parts = [(i, t) for i, t in parts if t[1:].any()]
            fate = fate if parts else "empty"
        pieces = [(i.astype(np.uint32), None if t.all() else t) for i, t in parts]
        return Made(pieces, len(ids), fate, document.place)

    def _cut(
        self, ids: np.ndarray, trained: np.ndarray, document: Document
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], Fate]:
        longest = self.longest
        assert longest is not None
        if self.too_long == "drop":
            return [], "dropped"
        is_chat = isinstance(document.content, Chat)
        if self.too_long == "error" or is_chat:
            cut = f", and data.too_long = {self.too_long!r} would cut its last answer off" * (self.too_long != "error")
            others = '"drop"' if is_chat else '"drop", "truncate" or "split"'
            raise DataError(
                f"{document.place}: {len(ids)} tokens, but a sample of training.seq_len = {longest - 1} has room for "
                f"{longest}{cut}; raise training.seq_len to {len(ids) - 1}, or set data.too_long to {others}"
            )
        if isinstance(document.content, Labelled):  # its class stands behind it, and perhaps the end of its text
            own = 2 if document.content.ended else 1
            ids, trained = (np.concatenate([x[: longest - own], x[-own:]]) for x in (ids, trained))
            return [(ids, trained)], "truncated"
        if self.too_long == "truncate":
            return [(ids[:longest], trained[:longest])], "truncated"
        # a piece begins with the last token of the one before, so that every token is learned once
        starts = range(0, len(ids) - 1, longest - 1)
        return [(ids[start : start + longest], trained[start : start + longest]) for start in starts], "split"


def joined(made: Sequence[Made]) -> Made:
    """Of documents that stay together, what has become of the record: that of the first that is not whole."""
    gone = [one for one in made if not one.pieces]
    changed = [one for one in made if one.fate != "whole"]
    pieces = [] if gone else [piece for one in made for piece in one.pieces]
    return Made(pieces, max(one.length for one in made), (gone + changed + [*made])[0].fate, made[0].place)


class Tally:
    """Counts what becomes of the documents of a source."""

    def __init__(self) -> None:
        self.fates: Counter[str] = Counter()
        self.first_empty = ""
        self._lengths: list[int] = []

    def add(self, made: Made) -> None:
        """One without text, such as an empty line, is no record."""
        if not made.length:
            return
        self.fates[made.fate] += 1
        self._lengths.append(made.length)
        if made.fate == "empty" and not self.first_empty:
            self.first_empty = made.place

    def check(self, name: str, recipe: Recipe) -> None:
        """DataError if there is too little to learn."""
        records, empty = sum(self.fates.values()), self.fates["empty"]
        if recipe.longest is not None and empty > recipe.max_empty_ratio * records:
            raise DataError(
                f"{name}: {empty} of {records} records have nothing that is trained, the first {self.first_empty}; "
                f"allowed: {recipe.max_empty_ratio:.3g} of all (data.max_empty_ratio); look at them with torchtitan "
                "preview, and correct data.train_on or the records"
            )

    def nothing_left(self, recipe: Recipe) -> str:
        """Why no token is left of a source."""
        if recipe.longest is None or not self.fates["dropped"]:
            return "no text in it; give documents with text"
        said = told(self.to_dict(), recipe.longest - 1)
        return f"no record is left of it ({said}); raise training.seq_len, or set data.too_long"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: how many records had each fate, and percentiles of their lengths."""
        lengths = np.percentile(self._lengths or [0], PERCENTILES, method="higher").astype(int).tolist()
        fates = {"whole": self.fates["whole"]} | {fate: n for fate, n in sorted(self.fates.items()) if fate != "whole"}
        return {"fates": fates, "lengths": {str(p): length for p, length in zip(PERCENTILES, lengths, strict=True)}}


def told(records: dict[str, Any], seq_len: int) -> str:
    """What Tally.to_dict gave, in words, with an advice where records were cut or left out for their length."""
    fates, lengths = records["fates"], records["lengths"]
    said = ", ".join(f"{count:,} {fate}" for fate, count in fates.items())
    said += "; lengths " + ", ".join(f"{length} ({p} %)" for p, length in lengths.items())
    return "; ".join(filter(None, (said, advice(records, seq_len))))


def advice(records: dict[str, Any], seq_len: int) -> str:
    """Where records were cut or left out for their length, the length of samples that would keep most of them."""
    fates, lengths = records["fates"], records["lengths"]
    cut = sum(fates.get(fate, 0) for fate in ("truncated", "split", "dropped"))
    if cut <= (1 - ROOMY) * sum(fates.values()):
        return ""
    return f"training.seq_len = {max(lengths['99'] - 1, seq_len)} would keep 99 % whole"
