"""Conversion of a document to token ids with a loss mask.

A token never crosses a border between trained and untrained spans. A prompt therefore has the same ids in training as
in generation, and no token is partly trained. Adjacent spans that are both trained, or both not, are joined first, so
other borders have no effect. Conversations are the exception: they get the ids of the rendered text, as in
transformers' apply_chat_template, and character offsets decide which tokens are trained.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, groupby, islice, repeat
from typing import Any, Literal, NamedTuple

import numpy as np

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
from torchtitan.datasets.template_process import CRASH, OUT_OF_TIME, RenderingFailed, limits, render
from torchtitan.datasets.template_worker import BEGIN, END, MAX_TEXT, SYNTAX, TOO_LONG, TOO_MUCH_MEMORY
from torchtitan.datasets.tokenizer import Tokenizer, TokenizerError

CHAT_TOKENIZATION_VERSION = 2
"""Version of the tokenization of conversations. Raise it whenever the same conversations give other tokens. Version 1
tokenized an answer and its header separately."""
SAMPLED_RECORDS = 16
"""Number of records that are read to find out whether a source has conversations."""


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
        return [Span(span.content, flag) for span, flag in zip(spans, trained, strict=True)]


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


class Tokens(NamedTuple):
    ids: np.ndarray
    """[n] token ids."""
    loss_mask: np.ndarray
    """[n] bool: the loss mask."""


NO_TOKENS = Tokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=bool))


def chat_tokenization(source: Source, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the tokenization version of conversations, for a fingerprint; empty for a source without them."""
    if tokenizer.chat_template is None:
        return {}
    contents = [item.content for item in islice(source.documents(), SAMPLED_RECORDS) if isinstance(item, Document)]
    contents += [content.chosen.content for content in contents if isinstance(content, Pair)]
    return {CONVERSATIONS: CHAT_TOKENIZATION_VERSION} if any(isinstance(content, Chat) for content in contents) else {}


def encode(tokenizer: Tokenizer, document: Document, train_on: TrainOn = TRAIN_ON_ANSWERS) -> Tokens:
    """Encode a document, with its begin and end ids; no ids for a document without text.

    Begin and end have the loss mask of the adjacent token. Raises BadRecord if the template or the tokenizer fails on
    the document, DataError if template and tokenizer do not match."""
    if isinstance(document.content, Pair):
        raise UnexpectedPair(
            f"{document.location}: a pair of answers, which only task.kind dpo, ipo and orpo learn; choose one of "
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
            return _encode_rendered(tokenizer, document.spans)
        pieces = list(_pieces(tokenizer, document))
    except TokenizerError as error:
        raise BadRecord(f"{document.location}: {error}; {REMEDY}") from None
    if not pieces:
        return NO_TOKENS
    if not document.has_begin_end:
        (_, first), (_, last) = pieces[0], pieces[-1]
        pieces = [(tokenizer.begin_ids, first), *pieces, ([tokenizer.eos_id], last and train_on.end_tokens != "none")]
    ids = np.concatenate([np.array(piece, dtype=np.int64) for piece, _ in pieces])
    return Tokens(ids, np.repeat([flag for _, flag in pieces], [len(piece) for piece, _ in pieces]))


def _encode_rendered(tokenizer: Tokenizer, spans: Sequence[Span]) -> Tokens:
    """Encode a conversation as its template renders it.

    Text between two special tokens is encoded as a whole, so that ids do not depend on the loss mask. A token is
    trained if any of its characters is."""
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


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], location: str) -> list[int]:
    """Return the prompt ids of a conversation, the same ids as in training. Raises errors like `encode`."""
    spans = prompt_spans(tokenizer, messages, location)
    return encode(tokenizer, Document(spans, location, has_begin_end=True)).ids.tolist()


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


NAME_BREAK = "\ue0f2"
"""Splits the names of special tokens that occur in messages. A private use character, like BEGIN and END."""
Message = dict[str, Any]
RESERVED_VARIABLES = frozenset(
    "messages conversation tools add_generation_prompt continue_final_message chat_template tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
"""Arguments of transformers' apply_chat_template that are no variables which a record may set."""


def chat_spans(tokenizer: Tokenizer, chat: Chat, location: str) -> list[Span]:
    """Render a conversation with the tokenizer's template: trained and untrained texts, and special tokens as ids.

    Raises DataError, which names `location`, if the template refuses the conversation, or would train the model to
    begin twice or never to stop."""
    text = _render(tokenizer, chat, location)
    _check_special_tokens(tokenizer, text, chat.messages, location)
    return _split_spans(tokenizer, text, _answer_flags(chat.messages, location), location)


def prompt_spans(tokenizer: Tokenizer, messages: Sequence[Message], location: str) -> list[Span]:
    """Render a conversation that the model is to answer, up to the beginning of the answer.

    The spans give the same prompt ids as in training."""
    return _split_spans(tokenizer, _render(tokenizer, Chat(messages), location, prompt=True), [], location)


def end_of_turn_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end an answer: the end-of-document token, and the template's end-of-turn token."""
    ends = {tokenizer.eos_id}
    if tokenizer.chat_template is not None:
        question, answer = ({"role": role, "content": "a"} for role in ("user", "assistant"))
        try:
            spans = chat_spans(tokenizer, Chat([question, answer]), "the chat template")
        except DataError:  # reported when a conversation is rendered
            return frozenset(ends)
        *_, last = (span.content for span in spans if span.trained)
        ends |= set() if isinstance(last, str) else {last[-1]}
    return frozenset(ends)


def _render(tokenizer: Tokenizer, chat: Chat, location: str, prompt: bool = False) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{location}: a conversation, but the tokenizer has no chat template; give one with data.chat_template, "
            "with chat_template.jinja beside the tokenizer's file, or in tokenizer_config.json"
        )
    try:
        return _render_with_marks(tokenizer, chat, location, prompt)
    except RenderingFailed as error:
        raise _rendering_error(error, tokenizer, location) from None


def _rendering_error(error: RenderingFailed, tokenizer: Tokenizer, location: str) -> DataError:
    """Return the error of a failed rendering.

    It is a BadRecord, which a job may skip, unless the template itself is unusable."""
    if error.kind == TOO_LONG:
        return BadRecord(f"{location}: the chat template makes more than {MAX_TEXT:,} characters of it; {REMEDY}")
    if error.kind in (OUT_OF_TIME, TOO_MUCH_MEMORY, CRASH):
        text = f"ended its process ({error})" if error.kind == CRASH else f"needs more than {limits()}"
        return DataError(
            f"{location}: {tokenizer.template_name} {text} for this conversation, which published templates never do; "
            "give another one with data.chat_template"
        )
    kind = DataError if error.kind == SYNTAX else BadRecord  # a syntax error concerns all conversations
    return kind(f"{location}: the chat template refuses this conversation: {error}; {REMEDY}")


def _answer_flags(messages: Sequence[Message], location: str) -> list[bool]:
    """Return whether each answer is trained; a message sets this by `train`, or by `weight` 0 or 1."""
    flags = []
    for number, message in enumerate(messages):
        flag = message.get("train", message.get("weight", True))
        if not isinstance(flag, bool | int) or flag not in (0, 1):
            raise DataError(f"{location}: message {number} has train = {flag!r}; allowed: true or false; {REMEDY}")
        if message["role"] == "assistant":
            flags.append(bool(flag))
        elif flag and ("train" in message or "weight" in message):
            raise DataError(
                f"{location}: message {number} of role {message['role']!r} is to be trained, but only the assistant's "
                'are; leave its flag out, or set data.train_on = "all"'
            )
    return flags


def _check_special_tokens(tokenizer: Tokenizer, text: str, messages: Sequence[Message], location: str) -> None:
    """Raise DataError if the template writes another tokenizer's special tokens, or drops the system message.

    Special tokens of another tokenizer would be encoded as several ordinary tokens."""
    assert tokenizer.chat_template is not None
    mentioned = set(re.findall(r"<\|[^|<>\s]{1,40}\|>", tokenizer.chat_template)) - tokenizer.special_tokens.keys()
    foreign = sorted(name for name in mentioned if name in text)
    if foreign:
        raise DataError(
            f"{location}: the chat template writes {foreign[0]!r}, which is no special token of the tokenizer, so that "
            "it would be split into several tokens; give template and tokenizer of one model"
        )
    names = tokenizer.special_tokens
    for number, message in enumerate(messages):
        if (
            message["role"] == "system"
            and _break_special_names(message["content"], names, location).strip() not in text
        ):
            raise DataError(
                f"{location}: the chat template leaves out what message {number} says, of role 'system'; give another "
                "template, or leave the message out"
            )


def _render_with_marks(tokenizer: Tokenizer, chat: Chat, location: str, prompt: bool) -> str:
    """Return the full text with trained parts between BEGIN and END; `prompt`: with the header of an answer."""
    names = tokenizer.special_tokens
    cleaned = [_break_special_names(message, names, location) for message in chat.messages]
    assert tokenizer.chat_template is not None
    by_id: dict[int | None, str] = {number: name for name, number in names.items()}
    variables = {
        "bos_token": by_id.get(tokenizer.bos_id, ""),
        "eos_token": by_id.get(tokenizer.eos_id, ""),
        **_template_variables(chat, names, location),
    }
    answers = [number for number, message in enumerate(cleaned) if message.get("role") == "assistant"]
    if "generation" in _template_tags(tokenizer.chat_template):
        answers = []
    borders = [border for number in answers for border in ((number, True), (number + 1, False))]
    full_text, *texts = render(tokenizer.chat_template, cleaned, variables, [(len(cleaned), prompt), *borders])
    marked_text, position = "", 0
    for number, before, after in zip(answers, texts[::2], texts[1::2], strict=True):
        if not (full_text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"{location}: under the chat template the text up to message {number} is not the beginning of "
                "the full text, so its answer cannot be located; use a template with {% generation %} around answers"
            )
        answer = _strip_after_end_token(after[len(before) :], names)
        marked_text += full_text[position : len(before)] + BEGIN + answer + END
        position = len(before) + len(answer)
    return marked_text + full_text[position:]


def _template_variables(chat: Chat, names: Collection[str], location: str) -> dict[str, Any]:
    """Return the variables that a record gives to the template, in addition to its messages."""
    if reserved := sorted(RESERVED_VARIABLES & chat.template_kwargs.keys()):
        raise BadRecord(
            f"{location}: chat_template_kwargs has {reserved[0]!r}, which is no variable of a record; allowed: "
            f"further variables of the chat template, such as enable_thinking; {REMEDY}"
        )
    # Templates may test `tools is not none`, so absent ones are None and not undefined.
    return _break_special_names({"tools": chat.tools, "documents": None, **chat.template_kwargs}, names, location)


def _strip_after_end_token(answer: str, names: Collection[str]) -> str:
    """Strip blanks after the special token that ends an answer: in generation the model stops before them."""
    stripped = answer.rstrip()
    return stripped if stripped.endswith(tuple(names)) else answer


def _break_special_names(value: Any, names: Collection[str], location: str) -> Any:
    """Return a message with the names of special tokens in its texts broken apart."""
    if isinstance(value, dict):
        broken = partial(_break_special_names, names=names, location=location)
        return {broken(key): broken(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_break_special_names(inner, names, location) for inner in value]
    if not isinstance(value, str):
        return value
    if {BEGIN, END, NAME_BREAK} & set(value):
        raise BadRecord(f"{location}: the characters U+E0F0 to U+E0F2 are reserved as marks; {REMEDY}")
    return _pattern_of_names(tuple(names)).sub(lambda m: m[0][0] + NAME_BREAK + m[0][1:], value) if names else value


@lru_cache(maxsize=16)
def _pattern_of_names(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for any of the names. Cached: compiling up to 256 names costs more than rendering a record."""
    return re.compile("(" + "|".join(map(re.escape, names)) + ")")


def _split_spans(tokenizer: Tokenizer, text: str, answers: Sequence[bool], location: str) -> list[Span]:
    """Split rendered text into spans. `answers`: whether each answer is trained."""
    if text.count(BEGIN) != len(answers) and not all(answers):
        raise DataError(
            f"{location}: the chat template marks {text.count(BEGIN)} parts as generated in {len(answers)} "
            "messages of the assistant, so their flags cannot be matched to the marks; leave the flags out"
        )
    flags = iter(answers if text.count(BEGIN) == len(answers) else repeat(True))
    signs = _pattern_of_names((BEGIN, END, *sorted(tokenizer.special_tokens, key=len, reverse=True)))
    spans: list[Span] = []
    trained, last = False, ""
    for piece in filter(None, signs.split(text)):
        if piece == END and last not in tokenizer.special_tokens:
            raise DataError(
                f"{location}: under the chat template an answer ends in {last[-20:]!r} and not in a special token of "
                "the tokenizer, so the model would never learn to stop; give template and tokenizer of one model"
            )
        if piece in (BEGIN, END):
            trained = piece == BEGIN and next(flags)
            continue
        if piece in tokenizer.special_tokens:
            spans.append(Span([tokenizer.special_tokens[piece]], trained))
        else:
            spans.append(Span(piece.replace(NAME_BREAK, ""), trained))
        last = piece
    if [span.content for span in spans[:2]] == [[tokenizer.bos_id]] * 2:
        raise DataError(
            f"{location}: under the chat template the text begins twice; remove one begin token from the template"
        )
    return spans


def _template_tags(source: str) -> set[str]:
    return set(re.findall(r"{%-?\s*(\w+)", source))
