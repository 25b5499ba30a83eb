"""Generated positive and negative sentences for trying out classification without data files.

One sentence in five contains a negation, so the adjective alone predicts four of five labels.
"""

from collections.abc import Iterator
from itertools import product
from zlib import crc32

from torchtitan.datasets.labelled import Fields
from torchtitan.datasets.sources import DataError, Document, Indexed, Item, Source

THINGS = ("film", "book", "song", "meal", "hotel", "game", "play", "road", "trip", "talk", "coat", "garden", "picture")
WHOSE = ("the", "this", "their new", "our old", "your")
GOOD = ("good", "great", "lovely", "brilliant", "clever", "charming", "bright", "warm", "fresh", "superb")
BAD = ("bad", "awful", "boring", "stupid", "dull", "ugly", "broken", "cold", "stale", "poor")
SAYS = {"was": False, "is": False, "is really": False, "seems": False, "was not": True}
"""Verb phrase -> True if it negates the adjective."""
HELD_OUT = 8
"""One sentence in this many is held out."""


def sentiment(path: str | None, text_field: str, fields: Fields | None = None) -> Source:
    return Sentences("sentiment", False, path, fields)


def sentiment_validation(path: str | None, text_field: str, fields: Fields | None = None) -> Source:
    """Return the held-out sentences, which are not in the training set."""
    return Sentences("sentiment_validation", True, path, fields)


class Sentences(Indexed):
    """Sentences as text or, with `fields`, as labelled records: class 1 is positive."""

    def __init__(self, name: str, held_out: bool, path: str | None, fields: Fields | None) -> None:
        if path is not None:
            raise DataError(f"dataset_path is {path!r}, but {name} is made of words and takes none; leave it out")
        self.rows = [row for row in _rows() if (crc32(row[0].encode()) % HELD_OUT == 0) == held_out]
        self.fields = fields
        super().__init__(name, {"sentences": len(self.rows)}, [])

    def __len__(self) -> int:
        return len(self.rows)

    def documents(self) -> Iterator[Item]:
        return map(self.get, range(len(self)))

    def get(self, index: int) -> Document:
        text, label = self.rows[index]
        place = f"{self.name}, sentence {index}"
        if self.fields is None:
            return Document(text, place)
        return self.fields.document({"text": text, "label": label}, place, place)

    def probe(self) -> None:
        """Read the first sentence, which reveals wrong field names."""
        self.get(0)


def _rows() -> Iterator[tuple[str, int]]:
    for determiner, thing, (verb, negated), word in product(WHOSE, THINGS, SAYS.items(), GOOD + BAD):
        yield f"{determiner} {thing} {verb} {word}", int((word in GOOD) != negated)
