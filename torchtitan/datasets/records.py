"""Conversion of a record's field to a document, and of a document to token ids with a loss mask.

A token never crosses a border between trained and untrained spans. A prompt therefore has the same ids in training as
in generation, and no token is partly trained. Adjacent spans that are both trained, or both not, are joined first, so
other borders have no effect. Conversations are the exception: their ids are those of the rendered text, as in
transformers' apply_chat_template, and character offsets decide which tokens are trained.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple

import numpy as np

from torchtitan.datasets.loss_mask import ANSWERS, TrainOn
from torchtitan.datasets.sources import (
    CONVERSATIONS,
    REMEDY,
    BadRecord,
    Chat,
    DataError,
    Document,
    Labelled,
    Pair,
    PairFound,
    Source,
    Span,
)
from torchtitan.datasets.templates import chat_spans, prompt_spans
from torchtitan.datasets.tokenizer import Tokenizer, TokenizerError

LARGEST_ID = 2**31 - 1
CONVERSATIONS_READ = 2
"""Another number whenever the same conversations become other tokens. In version 1 they were tokenized in pieces, an
answer apart from its header."""
LOOKED_AT = 16
"""Records by which it is told whether a source has conversations."""
ROLES = {"role", "from"}
ROLE_OF = {"human": "user", "gpt": "assistant"}
"""Role names of the ShareGPT format."""


class Tokens(NamedTuple):
    ids: np.ndarray
    """[n] integers."""
    trained: np.ndarray
    """[n] bool: the loss mask."""


NO_TOKENS = Tokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=bool))


def tokenization_of(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a fingerprint says of how conversations are tokenized; nothing of a source without them."""
    if tokenizer.chat_template is None:
        return {}
    contents = [item.content for item in islice(source.documents(), LOOKED_AT) if isinstance(item, Document)]
    contents += [content.chosen.content for content in contents if isinstance(content, Pair)]
    return {CONVERSATIONS: CONVERSATIONS_READ} if any(isinstance(content, Chat) for content in contents) else {}


def document_of(value: Any, field: str, place: str, short_place: str) -> Document:
    """Convert a field's value to a document. Raises DataError, which names `place`.

    The value is text; a list of token ids, which includes begin and end; a list of segments {text, label}, trained if
    label is true; or a conversation, a list of messages {role, content} or {from, value}, in which the assistant's
    messages are trained."""
    if isinstance(value, str):
        return Document(value, short_place)
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= LARGEST_ID for item in value):
        return Document([Span(value)], short_place, framed=True)
    if isinstance(value, list) and value and all(isinstance(item, dict) and ROLES & item.keys() for item in value):
        return Document(Chat([_message(item, i, field, place) for i, item in enumerate(value)]), short_place)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return Document([_segment(item, i, field, place) for i, item in enumerate(value)], short_place)
    kind = "nothing (null)" if value is None else type(value).__name__
    allowed = "not text, nor a list of token ids, of segments {text, label} or of messages {role, content}"
    raise DataError(f"{place}: field {field!r} holds {kind}, {allowed}; {REMEDY}")


def _segment(item: dict[str, Any], number: int, field: str, place: str) -> Span:
    content, trained = item.get("text"), item.get("label")
    if not isinstance(content, str) or not isinstance(trained, bool):
        types = ", ".join(f"{name}: {type(value).__name__}" for name, value in list(item.items())[:20]) or "nothing"
        raise DataError(
            f"{place}: segment {number} of field {field!r} has {types}; allowed: text: str and label: bool (whether it "
            f"is trained); {REMEDY}"
        )
    return Span(content, trained)


def role_of(name: Any) -> Any:
    """Map a ShareGPT role name to the usual one; return other names unchanged."""
    return ROLE_OF.get(name, name) if isinstance(name, str) else name


def _message(item: dict[str, Any], number: int, field: str, place: str) -> dict[str, Any]:
    if "from" in item and "role" not in item:
        item = {"role": role_of(item["from"]), "content": item.get("value")}
    item = {key: value for key, value in item.items() if value is not None}
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            kind = type(item[key]).__name__ if key in item else "nothing"
            raise DataError(f"{place}: message {number} of field {field!r} has {kind} as {key}, not text; {REMEDY}")
    return item


def encode(tokenizer: Tokenizer, document: Document, train_on: TrainOn = ANSWERS) -> Tokens:
    """Encode a document, with its begin and end ids; no ids for a document without text.

    Begin and end have the loss mask of the adjacent token. Raises BadRecord if the template or the tokenizer fails on
    the document, DataError if template and tokenizer do not match."""
    if isinstance(document.content, Pair):
        raise PairFound(
            f"{document.place}: a pair of answers, which only task.kind dpo, ipo and orpo learn; choose one of these, "
            "or give other data"
        )
    is_chat = isinstance(document.content, Chat)
    if isinstance(document.content, Chat):
        spans = chat_spans(tokenizer, document.content.messages, document.place)
        document = Document(spans, document.place, framed=True)
    if isinstance(document.content, Labelled):
        document = document._replace(content=document.content.spans(tokenizer.begin, tokenizer.eos_id))
    elif train_on != ANSWERS:
        document = document._replace(content=train_on.choose(document.spans, closed=is_chat))
    try:
        if is_chat:
            return _encode_rendered(tokenizer, document.spans)
        pieces = list(_pieces(tokenizer, document))
    except TokenizerError as error:
        raise BadRecord(f"{document.place}: {error}; {REMEDY}") from None
    if not pieces:
        return NO_TOKENS
    if not document.framed:
        (_, first), (_, last) = pieces[0], pieces[-1]
        pieces = [(tokenizer.begin, first), *pieces, ([tokenizer.eos_id], last and train_on.ends != "none")]
    ids = np.concatenate([np.array(piece, dtype=np.int64) for piece, _ in pieces])
    return Tokens(ids, np.repeat([flag for _, flag in pieces], [len(piece) for piece, _ in pieces]))


def _encode_rendered(tokenizer: Tokenizer, spans: Sequence[Span]) -> Tokens:
    """Encode a conversation as its template renders it: text between two special tokens as a whole, so that ids do not
    depend on what is trained. A token is trained if any of its characters is."""
    if all(isinstance(span.content, str) and not span.content.strip() for span in spans):
        return NO_TOKENS
    ids: list[int] = []
    trained: list[bool] = []
    for is_text, group in groupby(spans, key=lambda span: isinstance(span.content, str)):
        run = list(group)
        flags = [span.trained for span in run]
        if not is_text or all(flags) or not any(flags):
            contents = ["".join(str(span.content) for span in run)] if is_text else [span.content for span in run]
            for content, flag in zip(contents, flags, strict=False):
                piece = tokenizer.encode(content) if isinstance(content, str) else list(content)
                ids += piece
                trained += [flag] * len(piece)
            continue
        texts = [str(span.content) for span in run]
        stops = list(accumulate(map(len, texts)))
        ranges = [
            (stop - len(text), stop) for text, stop, flag in zip(texts, stops, flags, strict=True) if text and flag
        ]
        piece, token_ranges = tokenizer.encode_with_ranges("".join(texts), ranges)
        mask = [False] * len(piece)
        for first, last in token_ranges:
            mask[first:last] = [True] * (last - first)
        ids += piece
        trained += mask
    return Tokens(np.array(ids, dtype=np.int64), np.array(trained, dtype=bool))


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], place: str) -> list[int]:
    """Return the prompt ids of a conversation, the same ids as in training. Raises errors like `encode`."""
    spans = prompt_spans(tokenizer, messages, place)
    return encode(tokenizer, Document(spans, place, framed=True)).ids.tolist()


def _pieces(tokenizer: Tokenizer, document: Document) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the ids and the trained flag of each run of similar spans; nothing for a blank document."""
    spans = [span for span in document.spans if len(span.content)]
    if all(isinstance(span.content, str) and span.content.isspace() for span in spans):
        return
    after_text = False
    for (trained, is_text), run in groupby(spans, key=lambda span: (span.trained, isinstance(span.content, str))):
        contents = [span.content for span in run]
        if is_text:
            text = "".join(content for content in contents if isinstance(content, str))
            yield tokenizer.encode_after(text) if after_text else tokenizer.encode(text), trained
        else:
            yield [i for ids in contents if not isinstance(ids, str) for i in ids], trained
        after_text = is_text
