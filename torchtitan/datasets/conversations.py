"""Rendering of conversations by chat templates: trained and untrained texts, and special tokens.

The names of special tokens that stand in a message are broken apart before the template renders it, so that a message
can never contain a special token. After rendering they are put together again, as ordinary text.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from torchtitan.core.files import TOKENIZATION_VERSION
from torchtitan.datasets.messages import FLAGS
from torchtitan.datasets.sources import REMEDY, BadRecord, Chat, DataError, Span
from torchtitan.datasets.template_process import CRASH, OUT_OF_TIME, RenderingFailed, limits, render
from torchtitan.datasets.template_worker import BEGIN, END, MAX_TEXT, REFUSED, SYNTAX, TOO_LONG, TOO_MUCH_MEMORY
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.base import special_names_pattern
from torchtitan.datasets.tokenizer.chat_templates import NAMED

NAME_BREAK = "\ue0f2"
"""Splits the names of special tokens that occur in messages. A private use character, like BEGIN and END."""
Message = dict[str, Any]
RESERVED_VARIABLES = frozenset(
    ("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
    + ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
    + ("return_assistant_tokens_mask", "sanitize_control_tokens")
)
"""Arguments of transformers' apply_chat_template that are no variables which a record may set."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning, which transformers gives to templates under the first two."""


def chat_spans(tokenizer: Tokenizer, chat: Chat, location: str) -> list[Span]:
    """Render a conversation with the tokenizer's template: trained and untrained texts, and special tokens as ids.

    Raises DataError, which names `location`, if the template refuses the conversation or leaves out a part of it, or
    would train the model to begin twice or never to stop."""
    text = _render(tokenizer, chat, location)
    _check_template_tokens(tokenizer, text, location)
    _check_nothing_is_left_out(tokenizer, chat, text, location)
    return _split_spans(tokenizer, text, _answer_flags(chat.messages, location), location)


def prompt_spans(tokenizer: Tokenizer, messages: Sequence[Message], location: str) -> list[Span]:
    """Render a conversation that the model is to answer, up to the beginning of the answer.

    The spans give the same prompt ids as in training."""
    text = _render(tokenizer, Chat(messages), location, prompt=True)
    questions = [message for message in messages if message["role"] != "assistant"]  # templates may leave out thoughts
    _check_nothing_is_left_out(tokenizer, Chat(questions), text, location)
    return _split_spans(tokenizer, text, [], location)


def unrendered_keys(tokenizer: Tokenizer, chat: Chat, location: str) -> list[str]:
    """Return the keys that name a speaker or a call and that the template does not render: without them the text is
    the same."""
    keys = [key for key in ("name", "tool_call_id") if any(key in message for message in chat.messages)]
    if not keys or tokenizer.chat_template is None or not (text := _render_or_nothing(tokenizer, chat, location)):
        return []
    variants = ([{k: v for k, v in message.items() if k != key} for message in chat.messages] for key in keys)
    texts = (_render_or_nothing(tokenizer, chat._replace(messages=messages), location) for messages in variants)
    return [key for key, variant in zip(keys, texts, strict=True) if variant == text]


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
    if chat.tools is not None and tokenizer.has_tool_template:
        raise DataError(
            f"{location}: a conversation with tools, for which the tokenizer has a template of its own (tool_use); "
            "give the one to use for all conversations with data.chat_template"
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
    """Return whether each answer is trained; a message sets this by `train` or `loss`, or by `weight` 0 or 1."""
    flags = []
    for number, message in enumerate(messages):
        values = {name: message[name] for name in FLAGS if name in message}
        for name, value in values.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise DataError(
                    f"{location}: message {number} has {name} = {value!r}; allowed: true or false; {REMEDY}"
                )
        if len(set(values.values())) > 1:
            raise DataError(f"{location}: message {number} has {values}, which contradict each other; {REMEDY}")
        flag = next(iter(values.values()), True)
        if message["role"] == "assistant":
            flags.append(bool(flag))
        elif flag and values:
            raise DataError(
                f"{location}: message {number} of role {message['role']!r} is to be trained, but only the assistant's "
                'are; leave its flag out, or set data.train_on = "all"'
            )
    return flags


def _check_template_tokens(tokenizer: Tokenizer, text: str, location: str) -> None:
    """Raise DataError if the template writes another tokenizer's special tokens, which would be split."""
    assert tokenizer.chat_template is not None
    mentioned = set(re.findall(r"<\|[^|<>\s]{1,40}\|>", tokenizer.chat_template)) - tokenizer.special_tokens.keys()
    if foreign := sorted(name for name in mentioned if name in text and not tokenizer.has_token(name)):
        raise DataError(
            f"{location}: the chat template writes {foreign[0]!r}, which is no special token of the tokenizer, so that "
            "it would be split into several tokens; give template and tokenizer of one model"
        )


MAX_COUNTED = 32
"""Longest text whose occurrences are counted, because other texts may contain it."""


def _check_nothing_is_left_out(tokenizer: Tokenizer, chat: Chat, rendered: str, location: str) -> None:
    """Raise BadRecord if a part of a conversation is not in its rendered text.

    Each text, and each name and argument of a tool call, must occur as often as in the messages; white space and
    escapes of JSON do not matter. Tools and tool calls must also change the text, because their words may be in it
    anyway."""
    rendered = _without_blanks(rendered.replace(NAME_BREAK, "").replace(BEGIN, "").replace(END, ""))
    is_current = tokenizer.version >= TOKENIZATION_VERSION
    texts = [
        (number, kind, text)
        for number, message in enumerate(chat.messages)
        if is_current or message["role"] == "system"
        for kind, text in (_texts(message) if is_current else [("the text", message["content"])])
    ]
    contents = Counter(_without_blanks(text) for _, _, text in texts)
    for number, kind, text in texts:
        bare = _without_blanks(text)
        spellings = {
            bare,
            *(_without_blanks(json.dumps(text.strip(), ensure_ascii=flag)[1:-1]) for flag in (False, True)),
        }
        count = sum(map(rendered.count, spellings))
        required = contents[bare]
        if is_current and len(bare) <= MAX_COUNTED:
            required = sum(other.count(bare) * times for other, times in contents.items())
        if bare and count < required:
            raise BadRecord(
                f"{location}: the chat template leaves out {kind} of message {number}, of role "
                f"{chat.messages[number]['role']!r}: {text.strip()[:40]!r}; give another template with "
                f"data.chat_template, or leave it out; {REMEDY}"
            )
    if not is_current:
        return
    without_calls = [{k: v for k, v in message.items() if k != "tool_calls"} for message in chat.messages]
    has_calls = any(message.get("tool_calls") for message in chat.messages)
    variants = [(has_calls, "the tool calls", chat._replace(messages=without_calls))]
    variants.append((bool(chat.tools), "the tools", chat._replace(tools=None)))
    for exists, name, variant in variants:
        if exists and _render_or_nothing(tokenizer, variant, location) == rendered:
            raise BadRecord(
                f"{location}: the chat template leaves out {name} of this conversation; give another template with "
                f"data.chat_template, or leave them out; {REMEDY}"
            )


def _render_or_nothing(tokenizer: Tokenizer, chat: Chat, location: str) -> str:
    """Return the text of a conversation as it is compared; empty if the template refuses it."""
    try:
        text = _render_with_marks(tokenizer, chat, location, prompt=False)
    except (RenderingFailed, DataError):
        return ""
    return _without_blanks(text.replace(NAME_BREAK, "").replace(BEGIN, "").replace(END, ""))


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the texts of a message, each with a description. Tags around thoughts may be written in other words."""
    content = message.get("content")
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else [content]
    for part in parts:
        for text in re.split("</?think>", part) if isinstance(part, str) else ():
            yield "the text", text
    if isinstance(reasoning := next(filter(None, map(message.get, REASONING_FIELDS)), None), str):
        yield "the reasoning", reasoning
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else {}
        for text in _values_in([function.get("name"), _parsed(function.get("arguments"))]):
            yield "a tool call", text


def _parsed(arguments: Any) -> Any:
    """Return the arguments of a tool call, which some programs write as JSON text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _values_in(value: Any) -> Iterator[str]:
    """Yield the names and values in the arguments of a tool call, but no true, false or null: templates spell these
    differently."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _values_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values_in(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _render_with_marks(tokenizer: Tokenizer, chat: Chat, location: str, prompt: bool) -> str:
    """Return the full text with trained parts between BEGIN and END; `prompt`: with the header of an answer."""
    names = tokenizer.special_tokens
    messages = [_break_special_names(_standard_fields(message), names, location) for message in chat.messages]
    assert tokenizer.chat_template is not None
    variables = _variables(tokenizer, chat, location)
    answers = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    is_marked = "generation" in _template_tags(tokenizer.chat_template)
    if is_marked:
        answers = []
    borders = [border for number in answers for border in ((number, True), (number + 1, False))]
    renderings = [(len(messages), prompt), *borders]
    try:
        full_text, *texts = render(tokenizer.chat_template, messages, variables, renderings)
    except RenderingFailed as error:
        if error.kind != REFUSED or all("content" in message for message in messages):
            raise
        messages = [{"content": "", **message} for message in messages]  # for templates that join texts
        full_text, *texts = render(tokenizer.chat_template, messages, variables, renderings)
    if is_marked:  # some templates write an answer and its end token in two adjacent blocks
        return _end_marks_before_blanks(full_text.replace(END + BEGIN, ""), names)
    marked_text, position = "", 0
    for number, before, after in zip(answers, texts[::2], texts[1::2], strict=True):
        if not (full_text.startswith(after) and after.startswith(before)):
            raise DataError(
                f"{location}: under the chat template the text up to message {number} is not the beginning of "
                "the full text, so its answer cannot be located; use a template with {% generation %} around answers"
            )
        answer = after[len(before) :]
        marked_text += full_text[position : len(before)] + _end_marks_before_blanks(BEGIN + answer + END, names)
        position = len(after)
    return marked_text + full_text[position:]


def _standard_fields(message: Message) -> Message:
    """Return a message as transformers gives it to a template: without nulls, its reasoning under two names."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _variables(tokenizer: Tokenizer, chat: Chat, location: str) -> dict[str, Any]:
    """Return the variables of the template in addition to the messages."""
    if tokenizer.version < TOKENIZATION_VERSION:
        return {"bos_token": "", "eos_token": "", **tokenizer.template_tokens}
    if reserved := sorted(RESERVED_VARIABLES & chat.template_kwargs.keys()):
        raise BadRecord(
            f"{location}: chat_template_kwargs has {reserved[0]!r}, which is no variable of a record; allowed: "
            f"further variables of the chat template, such as enable_thinking; {REMEDY}"
        )
    # Templates may test `tools is not none`, so absent ones are None and not undefined.
    of_record = {"tools": chat.tools, "documents": None, **chat.template_kwargs}
    tokens = tokenizer.template_tokens
    if tokenizer.chat_template in NAMED.values():  # these join them to texts
        tokens = {"bos_token": "", "eos_token": "", **tokens}
    return {**tokens, **_break_special_names(of_record, tokenizer.special_tokens, location)}


def _end_marks_before_blanks(text: str, names: Collection[str]) -> str:
    """End each trained part before the blanks after its special token: in generation the model stops before them."""
    ends = tuple(names)
    *trained, after = text.split(END)
    for number, piece in enumerate(trained):
        stripped = piece.rstrip()
        end = len(stripped) if stripped.endswith(ends) else len(piece)
        trained[number] = piece[:end] + END + piece[end:]
    return "".join(trained) + after


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
    if not names:
        return value
    return special_names_pattern(tuple(names)).sub(lambda m: m[0][0] + NAME_BREAK + m[0][1:], value)


def _split_spans(tokenizer: Tokenizer, text: str, answers: Sequence[bool], location: str) -> list[Span]:
    """Split rendered text into spans. `answers`: whether each answer is trained."""
    if text.count(BEGIN) != len(answers) and not all(answers):
        raise DataError(
            f"{location}: the chat template marks {text.count(BEGIN)} parts as generated in {len(answers)} "
            "messages of the assistant, so their flags cannot be matched to the marks; leave the flags out"
        )
    flags = iter(answers if text.count(BEGIN) == len(answers) else repeat(True))
    signs = special_names_pattern((BEGIN, END, *tokenizer.special_tokens))
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
