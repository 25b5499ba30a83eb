"""Conversion of a document to token ids with a loss mask.

A token never crosses a border between trained and untrained spans. A prompt therefore has the same ids in training as
in generation, and no token is partly trained. Adjacent spans that are both trained, or both not, are joined first, so
other borders have no effect. Conversations (conversations.py) are the exception: they get the ids of the rendered text,
as in transformers' apply_chat_template, and character offsets decide which tokens are trained.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from torchtitan.core.files import TOKENIZATION_VERSION
from torchtitan.datasets.conversations import chat_spans, prompt_spans, unrendered_keys
from torchtitan.datasets.record_account import first_documents, unread_of
from torchtitan.datasets.sources import (
    CONVERSATIONS,
    REMEDY,
    BadRecord,
    Chat,
    DataError,
    Document,
    LabelledTexts,
    Pair,
    Source,
    Span,
    UnexpectedPair,
)
from torchtitan.datasets.tokenizer import Tokenizer, TokenizerError
from torchtitan.datasets.tokenizer.base import Range, special_names_pattern


class TrainOn(NamedTuple):
    """Options that select the tokens with a loss.

    `scope`: all answers, everything, or only the last answer. `end_tokens`: train the end-of-turn token after each
    answer, after the last answer only, after every turn, or never.
    """

    scope: Literal["completion", "all", "last_turn"] = "completion"
    end_tokens: Literal["turn", "last", "all", "none"] = "turn"

    def apply(self, spans: Sequence[Span], has_end_tokens: bool) -> list[Span]:
        """Return the spans with `trained` set by these options.

        `has_end_tokens`: the spans contain end-of-turn tokens, a special token at the end of each answer.
        """
        answers = list(_trained_runs(spans))
        ends = (
            [stop - 1 for _, stop in answers if not isinstance(spans[stop - 1].content, str)] if has_end_tokens else []
        )
        trained = [self.scope == "all" or span.trained for span in spans]
        if self.scope == "last_turn":
            for start, stop in answers[:-1]:
                trained[start:stop] = [False] * (stop - start)
        if self.end_tokens == "all":
            end_tokens = {tuple(spans[end].content) for end in ends}
            ends = [i for i, span in enumerate(spans) if not isinstance(span.content, str)]
            ends = [i for i in ends if tuple(spans[i].content) in end_tokens]
            trained = [flag or i in ends for i, flag in enumerate(trained)]
        elif self.end_tokens != "turn":
            for end in ends if self.end_tokens == "none" else ends[:-1]:
                trained[end] = False
        return [span._replace(trained=flag) for span, flag in zip(spans, trained, strict=True)]


TRAIN_ON_ANSWERS = TrainOn()


def _trained_runs(spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of trained spans."""
    start = None
    for i, trained in enumerate([*(span.trained for span in spans), False]):
        if trained and start is None:
            start = i
        elif not trained and start is not None:
            yield start, i
            start = None


class EncodedTokens(NamedTuple):
    ids: np.ndarray
    """[n] token ids."""
    loss_mask: np.ndarray
    """[n] bool: the loss mask."""


NO_TOKENS = EncodedTokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=bool))


def chat_tokenization(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenization version of conversations, for a fingerprint; empty for a source without them."""
    if tokenizer.chat_template is None:
        return {}
    contents = [document.content for document in first_documents(source)]
    contents += [content.chosen.content for content in contents if isinstance(content, Pair)]
    return {CONVERSATIONS: tokenizer.version} if any(isinstance(content, Chat) for content in contents) else {}


def unread_fields(source: Source, tokenizer: Tokenizer) -> list[str]:
    """Return the fields of a source's first records, and the keys of their messages, that are in no sample."""
    fields = unread_of(source)
    for document in first_documents(source):
        content = document.content.chosen.content if isinstance(document.content, Pair) else document.content
        if isinstance(content, Chat):
            fields += [f"{key} of messages" for key in unrendered_keys(tokenizer, content, document.location)]
    return list(dict.fromkeys(fields))


def spelled_token(tokenizer: Tokenizer, document: Document) -> str:
    """Return a special token that a document's text spells out, and that is encoded as text; empty if none is."""
    if not tokenizer.special_tokens:
        return ""
    match = special_names_pattern(tuple(tokenizer.special_tokens)).search(document.text)
    return match[0] if match else ""


def spelled_tokens_note(tokenizer: Tokenizer, source: Source) -> str:
    """Describe the special tokens that the first records of a source spell out; empty if they do not."""
    documents = first_documents(source)
    spelled = [(document.location, token) for document in documents if (token := spelled_token(tokenizer, document))]
    return describe_spelled(len(spelled), f"the first {len(documents)}", *spelled[0]) if spelled else ""


def describe_spelled(count: int, total: str, location: str, token: str) -> str:
    """Return the note that records spell out special tokens, which are then encoded as ordinary text."""
    return (
        f"{count} of {total} records spell out special tokens, {location} {token!r}: they are encoded as ordinary text "
        "and not as these tokens; give conversations as messages, for which a chat template writes them"
    )


def encode(tokenizer: Tokenizer, document: Document, train_on: TrainOn = TRAIN_ON_ANSWERS) -> EncodedTokens:
    """Encode a document, with its begin and end ids; no ids for a document without text.

    Begin and end have the loss mask of the adjacent token. Raises BadRecord if the template or the tokenizer fails on
    the document, DataError if template and tokenizer do not match."""
    if isinstance(document.content, Pair):
        raise UnexpectedPair(
            f"{document.location}: a pair of answers, which task.kind dpo, ipo, orpo and reward learn; choose one of "
            "these, or give other data"
        )
    is_chat = isinstance(document.content, Chat)
    if isinstance(document.content, Chat):
        spans = chat_spans(tokenizer, document.content, document.location)
        document = Document(spans, document.location, has_begin_end=True)
    if isinstance(document.content, LabelledTexts):
        document = document._replace(content=document.content.spans(tokenizer.begin_ids, tokenizer.eos_id))
    elif train_on != TRAIN_ON_ANSWERS:
        document = document._replace(content=train_on.apply(document.spans, has_end_tokens=is_chat))
    try:
        if is_chat:
            return _encode_rendered(tokenizer, document.spans, document.location)
        pieces = list(_pieces(tokenizer, document))
    except TokenizerError as error:
        raise BadRecord(f"{document.location}: {error}; {REMEDY}") from None
    if not pieces:
        return NO_TOKENS
    if not document.has_begin_end:
        (_, first), (_, last) = pieces[0], pieces[-1]
        pieces = [(tokenizer.begin_ids, first), *pieces, ([tokenizer.eos_id], last and train_on.end_tokens != "none")]
    ids = np.concatenate([np.array(piece, dtype=np.int64) for piece, _ in pieces])
    return EncodedTokens(ids, np.repeat([flag for _, flag in pieces], [len(piece) for piece, _ in pieces]))


def _encode_rendered(tokenizer: Tokenizer, spans: Sequence[Span], location: str) -> EncodedTokens:
    """Encode a conversation as its template renders it. A token is trained if any of its characters is.

    The text is encoded as a whole, special tokens included, as in transformers' apply_chat_template. Names of special
    tokens that messages spell out stay ordinary text; the text is cut around them (`encode_rendered`)."""
    if all(isinstance(span.content, str) and not span.content.strip() for span in spans):
        return NO_TOKENS
    if tokenizer.version < TOKENIZATION_VERSION or not tokenizer.reads_special_tokens:
        return _encode_between_special_tokens(tokenizer, spans)
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    texts = [span.content if isinstance(span.content, str) else names[span.content[0]] for span in spans]
    ends = list(accumulate(map(len, texts)))
    begins = [end - len(text) for text, end in zip(texts, ends, strict=True)]
    ranges: list[Range] = []
    for begin, end, span in zip(begins, ends, spans, strict=True):
        if span.trained and begin < end:
            ranges = (
                [*ranges[:-1], (ranges[-1][0], end)] if ranges and ranges[-1][1] == begin else [*ranges, (begin, end)]
            )
    spelled = []
    if tokenizer.special_tokens:
        pattern = special_names_pattern(tuple(tokenizer.special_tokens))
        for begin, span in zip(begins, spans, strict=True):
            if isinstance(span.content, str):
                spelled += [(begin + match.start(), begin + match.end()) for match in pattern.finditer(span.content)]
    ids, token_ranges = tokenizer.encode_rendered("".join(texts), ranges, spelled)
    mask = np.zeros(len(ids), dtype=bool)
    for first, last in token_ranges:
        mask[first:last] = True
    tokens = EncodedTokens(np.array(ids, dtype=np.int64), mask)
    _check_special_ids(tokenizer, tokens, spans, location)
    return tokens


def _check_special_ids(tokenizer: Tokenizer, tokens: EncodedTokens, spans: Sequence[Span], location: str) -> None:
    """Raise BadRecord if text of a message has become a special token, DataError if no end token is trained.

    The tokenizer decides which names in a text are special tokens: its normalizer may make one of another text, and
    some are only read between blanks."""
    special = set(tokenizer.special_tokens.values()) - {tokenizer.unknown_id}
    template_spans = [span for span in spans if not isinstance(span.content, str) and span.content[0] in special]
    positions = [place for place, number in enumerate(tokens.ids.tolist()) if number in special]
    if len(positions) == len(template_spans):
        return
    surplus = Counter(tokens.ids[positions].tolist()) - Counter(span.content[0] for span in template_spans)
    if surplus:
        name = next(name for name, number in tokenizer.special_tokens.items() if number in surplus)
        raise BadRecord(f"{location}: the tokenizer makes its special token {name!r} of text in a message; {REMEDY}")
    trained = {span.content[0] for span in template_spans if span.trained}
    if trained - set(tokens.ids[tokens.loss_mask].tolist()):
        raise DataError(
            f"{location}: the tokenizer does not read the special token after an answer, so the model would never "
            "learn to stop; its flags (single_word, normalized) or the chat template are wrong"
        )


def _encode_between_special_tokens(tokenizer: Tokenizer, spans: Sequence[Span]) -> EncodedTokens:
    """Encode the text between two special tokens as a whole, so that ids do not depend on the loss mask."""
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
    return EncodedTokens(np.array(ids, dtype=np.int64), np.array(trained, dtype=bool))


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], location: str) -> list[int]:
    """Return the prompt ids of a conversation, the same ids as in training. Raises errors like `encode`."""
    spans = prompt_spans(tokenizer, messages, location)
    try:
        return _encode_rendered(tokenizer, spans, location).ids.tolist()
    except TokenizerError as error:
        raise BadRecord(f"{location}: {error}; {REMEDY}") from None


def _pieces(tokenizer: Tokenizer, document: Document) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the ids and the trained flag of each run of similar spans; nothing for a blank document."""
    spans = [span for span in document.spans if len(span.content)]
    if all(isinstance(span.content, str) and span.content.isspace() for span in spans):
        return
    after_text = False
    numbers = accumulate(span.starts_text for span in spans)  # of the texts that are encoded by themselves
    keys = [(span.trained, isinstance(span.content, str), n) for span, n in zip(spans, numbers, strict=True)]
    for (trained, is_text, _), pairs in groupby(zip(spans, keys, strict=True), key=lambda pair: pair[1]):
        run = [span for span, _ in pairs]
        contents = [span.content for span in run]
        if is_text:
            text = "".join(content for content in contents if isinstance(content, str))
            continues = after_text and not run[0].starts_text
            yield tokenizer.encode_after(text) if continues else tokenizer.encode(text), trained
        else:
            yield [i for ids in contents if not isinstance(ids, str) for i in ids], trained
        after_text = is_text
