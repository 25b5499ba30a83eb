"""Made sentences that say something good or bad, to try out telling classes apart where there is no data: no file is
read. One in five says it by a negation, so that the word alone is right in four of five.
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
"""Whether it turns the word behind it round."""
HELD_OUT = 8
"""One sentence of so many is held out."""


def sentiment(path: str | None, text_field: str, fields: Fields | None = None) -> Source:
    return Sentences("sentiment", False, path, fields)


def sentiment_validation(path: str | None, text_field: str, fields: Fields | None = None) -> Source:
    """Sentences that the training set does not have."""
    return Sentences("sentiment_validation", True, path, fields)


class Sentences(Indexed):
    """As text, or with `fields` as records of a class, 1 where something good is said."""

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
        """The first, in which wrong fields show."""
        self.get(0)


def _rows() -> Iterator[tuple[str, int]]:
    for whose, thing, (says, turned), word in product(WHOSE, THINGS, SAYS.items(), GOOD + BAD):
        yield f"{whose} {thing} {says} {word}", int((word in GOOD) != turned)
