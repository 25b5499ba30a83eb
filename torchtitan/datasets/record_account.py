"""The account of a record: every text that it holds in fields that are read is in its document, or it is refused.

The readers of formats decide where a text goes. This module compares their result with the record itself, without
knowing how they read it. So a reader that leaves out a turn, a system message or a tool call is found by the first
record that has one, and not by the model that never learned it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from torchtitan.datasets.messages import ROLE_KEYS, as_list, parsed
from torchtitan.datasets.sources import REMEDY, BadRecord, Chat, Document, Pair, Source

RECORDS = "records"
"""Key in the fingerprint of data, with the version of the reading of records; runs of earlier versions lack it."""
RECORDS_VERSION = 2
"""Version of the reading of records. Raise it whenever the same records give other documents."""
SAMPLED_RECORDS = 16
"""Number of records that are read to learn about a source."""


def check_account(
    values: Mapping[str, Any], document: Document, location: str, role_keys: Collection[str] = ROLE_KEYS
) -> None:
    """Raise BadRecord, which names `location`, if a text in `values` (field -> value) is not in the document.

    Names of roles (values of `role_keys`) are left out, as they may have other names in the document. A text that is
    there several times must be in the document as often, except in pairs, whose answers share texts. Text that cannot
    be encoded is refused too: a tokenizer would replace it."""
    document_texts = Counter(_document_texts(document))
    all_text = "\0".join(document_texts.elements())
    is_pair = isinstance(document.content, Pair)
    for field, value in values.items():
        unseen = Counter(_texts(value, role_keys))
        while unseen:
            text, count = unseen.popitem()
            needed = 1 if is_pair else count
            if document_texts[text] >= needed or all_text.count(text) >= needed:
                continue
            content = parsed(text) if text.lstrip()[:1] in ("[", "{") else None
            if content is None:
                shown = text if len(text) <= 60 else f"{text[:60]}..."
                raise BadRecord(
                    f"{location}: the text {shown!r} of field {field!r} would not be in the sample; take it out of the "
                    f"record, or move it where the format reads it; {REMEDY}"
                )
            unseen += Counter([*_texts(content, role_keys)] * count)
    try:
        all_text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(
            f"{location}: the text has the lone surrogate {all_text[error.start]!r}, which is no character; {REMEDY}"
        ) from None


def _document_texts(document: Document) -> Iterator[str]:
    content = document.content
    if isinstance(content, Pair):
        yield from _document_texts(content.chosen)
        yield from _document_texts(content.rejected)
    elif isinstance(content, Chat):
        yield from _texts([list(content.messages), content.tools, dict(content.template_kwargs)], ROLE_KEYS)
    else:
        yield document.text


def _texts(value: Any, role_keys: Collection[str]) -> Iterator[str]:
    """Yield all texts in a nested value that are not blank, without names of roles and kinds of parts (`type`)."""
    value = as_list(value)
    if isinstance(value, str):
        if value and not value.isspace():
            yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(inner, str) or (key not in role_keys and key != "type"):
                yield from _texts(inner, role_keys)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, role_keys)


_FIRST_DOCUMENTS: WeakKeyDictionary[Source, list[Document]] = WeakKeyDictionary()


def first_documents(source: Source) -> list[Document]:
    """Return the first documents of a source, without unreadable records. A source is asked once: it may be remote."""
    if source not in _FIRST_DOCUMENTS:
        items = islice(source.documents(), SAMPLED_RECORDS)
        _FIRST_DOCUMENTS[source] = [item for item in items if isinstance(item, Document)]
    return _FIRST_DOCUMENTS[source]


def has_records(source: Source) -> bool:
    """Return True if a source has more than plain texts of one field, or tables of text, whose rows are checked."""
    files = source.fingerprint.get("files", {})
    is_table = any(str(name).lower().endswith((".csv", ".tsv")) for name in files)
    return is_table or any(d.format_name or not isinstance(d.content, str) for d in first_documents(source))


def records_version(source: Source, saved: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the version of the reading of records, for a fingerprint. `saved`: the source's, of the run to resume.

    A run that began before there were versions goes on without one, unless its first records are read otherwise now. A
    later record of this kind is refused when its turn comes (streams.py).
    """
    if saved is None or RECORDS in saved or any(document.is_reread for document in first_documents(source)):
        return {RECORDS: RECORDS_VERSION}
    return {}


def describe_unread(name: str, fields: Iterable[str], longest: int = 12) -> str:
    """Say which fields of a source's records no sample is made of; empty if there are none."""
    names = [repr(field) for field in dict.fromkeys(fields)]
    more = f" and {len(names) - longest} more" if len(names) > longest else ""
    return f"{name}: not read: {', '.join(names[:longest])}{more}" if names else ""


def unread_of(source: Source) -> list[str]:
    """Return the fields of a source's first records that no sample is made of."""
    return [field for document in first_documents(source) for field in document.unread]
