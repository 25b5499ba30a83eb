"""The loss mask of documents, and the handling of documents that are too long or have nothing to train on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from torchtitan.datasets.sources import Chat, DataError, Document, Labelled, Span

PERCENTILES = (50, 90, 99, 100)
ROOMY = 0.99
"""Fraction of records that the suggested seq_len keeps uncut."""


class TrainOn(NamedTuple):
    """Which tokens have a loss.

    `what`: all answers, everything, or only the last answer. `ends`: train the end-of-turn token after each answer,
    after the last answer only, after every turn, or never.
    """

    what: Literal["completion", "all", "last_turn"] = "completion"
    ends: Literal["turn", "last", "all", "none"] = "turn"

    def choose(self, spans: Sequence[Span], closed: bool) -> list[Span]:
        """Return the spans with `trained` set by these options.

        `closed`: the spans contain end-of-turn tokens, a special token at the end of each answer.
        """
        answers = list(_answers(spans))
        ends = [stop - 1 for _, stop in answers if not isinstance(spans[stop - 1].content, str)] if closed else []
        trained = [self.what == "all" or span.trained for span in spans]
        if self.what == "last_turn":
            for start, stop in answers[:-1]:
                trained[start:stop] = [False] * (stop - start)
        if self.ends == "all":
            end_tokens = {tuple(spans[end].content) for end in ends}
            ends = [i for i, span in enumerate(spans) if not isinstance(span.content, str)]
            ends = [i for i in ends if tuple(spans[i].content) in end_tokens]
            trained = [flag or i in ends for i, flag in enumerate(trained)]
        elif self.ends != "turn":
            for end in ends if self.ends == "none" else ends[:-1]:
                trained[end] = False
        return [Span(span.content, flag) for span, flag in zip(spans, trained, strict=True)]


ANSWERS = TrainOn()


def _answers(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of trained spans."""
    start = None
    for i, trained in enumerate([*(span.trained for span in spans), False]):
        if trained and start is None:
            start = i
        elif not trained and start is not None:
            yield start, i
            start = None


Pieces = list[tuple[np.ndarray, np.ndarray | None]]
"""A document's parts: token ids and their loss mask (None: all trained)."""
Fate = Literal["whole", "truncated", "split", "dropped", "empty"]


class Made(NamedTuple):
    """A tokenized document: its pieces, its length in tokens, and whether it was cut or dropped."""

    pieces: Pieces
    length: int
    fate: Fate
    place: str


@dataclass(frozen=True)
class Recipe:
    """Options for turning documents into training pieces.

    `longest`: the most tokens of a document that fit into a sample; None: samples are cut from the concatenation of all
    documents, so no document is too long, and documents without trained tokens are read too. `together`: documents per
    record (2 for a pair), which are kept or dropped together.
    """

    train_on: TrainOn = ANSWERS
    longest: int | None = None
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    max_empty_ratio: float = 0.01
    together: int = 1

    def apply(self, ids: np.ndarray, trained: np.ndarray, document: Document) -> Made:
        """Cut, drop or keep a document. Raises DataError if it is too long and must not be cut or dropped."""
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
            alternatives = '"drop"' if is_chat else '"drop", "truncate" or "split"'
            raise DataError(
                f"{document.place}: {len(ids)} tokens, but a sample of training.seq_len = {longest - 1} has room for "
                f"{longest}{cut}; raise training.seq_len to {len(ids) - 1}, or set data.too_long to {alternatives}"
            )
        if isinstance(
            document.content, Labelled
        ):  # keep the class label at the end, and the end-of-text token if there is one
            suffix = 2 if document.content.ended else 1
            ids, trained = (np.concatenate([x[: longest - suffix], x[-suffix:]]) for x in (ids, trained))
            return [(ids, trained)], "truncated"
        if self.too_long == "truncate":
            return [(ids[:longest], trained[:longest])], "truncated"
        # each piece repeats the last token of the previous one as its first input, so that every token is a label once
        starts = range(0, len(ids) - 1, longest - 1)
        return [(ids[start : start + longest], trained[start : start + longest]) for start in starts], "split"


def joined(made: Sequence[Made]) -> Made:
    """Join the documents of one record; its fate is that of the first document that was not kept whole."""
    without_pieces = [document for document in made if not document.pieces]
    changed = [document for document in made if document.fate != "whole"]
    pieces = [] if without_pieces else [piece for document in made for piece in document.pieces]
    return Made(
        pieces, max(document.length for document in made), (without_pieces + changed + [*made])[0].fate, made[0].place
    )


class Tally:
    """Counters of kept, cut and dropped documents of a source."""

    def __init__(self) -> None:
        self.fates: Counter[str] = Counter()
        self.first_empty = ""
        self._lengths: list[int] = []

    def add(self, made: Made) -> None:
        """Count a record. One without text, such as an empty line, does not count."""
        if not made.length:
            return
        self.fates[made.fate] += 1
        self._lengths.append(made.length)
        if made.fate == "empty" and not self.first_empty:
            self.first_empty = made.place

    def check(self, name: str, recipe: Recipe) -> None:
        """Raise DataError if too many records have no trained tokens."""
        records, empty = sum(self.fates.values()), self.fates["empty"]
        if recipe.longest is not None and empty > recipe.max_empty_ratio * records:
            raise DataError(
                f"{name}: {empty} of {records} records have nothing that is trained, the first {self.first_empty}; "
                f"allowed: {recipe.max_empty_ratio:.3g} of all (data.max_empty_ratio); look at them with torchtitan "
                "preview, and correct data.train_on or the records"
            )

    def nothing_left(self, recipe: Recipe) -> str:
        """Return the reason why no token of a source is left."""
        if recipe.longest is None or not self.fates["dropped"]:
            return "no text in it; give documents with text"
        description = told(self.to_dict(), recipe.longest - 1)
        return f"no record is left of it ({description}); raise training.seq_len, or set data.too_long"

    def to_dict(self) -> dict[str, Any]:
        """Return the number of records by fate and percentiles of their lengths, JSON-able."""
        lengths = np.percentile(self._lengths or [0], PERCENTILES, method="higher").astype(int).tolist()
        fates = {"whole": self.fates["whole"]} | {fate: n for fate, n in sorted(self.fates.items()) if fate != "whole"}
        return {"fates": fates, "lengths": {str(p): length for p, length in zip(PERCENTILES, lengths, strict=True)}}


def told(records: dict[str, Any], seq_len: int) -> str:
    """Describe the result of Tally.to_dict, with advice if records were cut or dropped for their length."""
    fates, lengths = records["fates"], records["lengths"]
    description = ", ".join(f"{count:,} {fate}" for fate, count in fates.items())
    description += "; lengths " + ", ".join(f"{length} ({p} %)" for p, length in lengths.items())
    return "; ".join(filter(None, (description, advice(records, seq_len))))


def advice(records: dict[str, Any], seq_len: int) -> str:
    """Suggest a seq_len that keeps most records uncut; empty if few were cut or dropped."""
    fates, lengths = records["fates"], records["lengths"]
    cut = sum(fates.get(fate, 0) for fate in ("truncated", "split", "dropped"))
    if cut <= (1 - ROOMY) * sum(fates.values()):
        return ""
    return f"training.seq_len = {max(lengths['99'] - 1, seq_len)} would keep 99 % whole"
