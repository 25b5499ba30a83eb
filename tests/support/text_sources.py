"""Files of texts, and what their sources say."""

import json

import pytest

from torchtitan.datasets.sources import DataError, Document
from torchtitan.datasets.sources.files import text

TEXTS = ["first", "zweites Dokument: äöü", "", "三番目", "last\nwith two lines"]


def lines(texts=TEXTS, field="text"):
    return b"".join(json.dumps({"id": i, field: t}).encode() + b"\n" for i, t in enumerate(texts))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def documents(path, field="text"):
    """Return texts and errors of a source."""
    return [item.text if isinstance(item, Document) else item for item in text(str(path), field).documents()]


def refusal(path, field="text"):
    """The message for a source that cannot be used, or has a bad record."""
    with pytest.raises(DataError) as error:
        source = text(str(path), field)
        for item in source.documents():
            if isinstance(item, DataError):
                raise item
    return str(error.value)
