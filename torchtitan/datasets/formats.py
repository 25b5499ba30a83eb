"""Formats of fine-tuning records with several fields: which fields identify a format, and which parts are trained.

The prompt of an instruct record comes from a custom template or is Stanford Alpaca's. All placeholders are replaced in
one pass, so the text of a record is never interpreted as a placeholder or as a format.

To add a format, write a function from a record to spans and add a line to FORMATS. record_format.py decides whether a
source's records are read by one of these formats or by a single field.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torchtitan.core.constraints import LimitError
from torchtitan.datasets.sources import (
    REMEDY,
    Chat,
    DataError,
    Document,
    Pair,
    Span,
)

PLACEHOLDERS = ("instruction", "input", "system")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt template for instruct records.

    `format`, and `no_input_format` for records without an input, may contain {instruction}, {input} and {system}.
    `system_format`: prefix for a system message if the format has no {system}. `system_prompt`: default system message
    of records without one. `separator`: text between prompt and answer.
    """

    format: str = (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
        "\n\n### Response:\n"
    )
    no_input_format: str = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:\n"
    )
    system_format: str = "{system}\n\n"
    system_prompt: str = ""
    separator: str = ""

    @classmethod
    def from_options(cls, template: Mapping[str, str]) -> "PromptTemplate":
        """Return a prompt with these parts; parts that are not set are Alpaca's.

        `format` without `no_input_format` also applies to records without an input. Raises LimitError for an unknown
        part and for an unknown or missing placeholder."""
        parts = [part.name for part in fields(cls)]
        for name, text in template.items():
            key, shown = "training.template", f"{name} = {text!r}"
            if name not in parts:
                raise LimitError(key, shown, f"parts that are known: {', '.join(parts)}", "correct its name")
            required = {"format": "instruction", "no_input_format": "instruction", "system_format": "system"}.get(name)
            places = _PLACEHOLDER.findall(text) if required else []
            if required and (required not in places or set(places) - set(PLACEHOLDERS)):
                allowed_places = ", ".join(f"{{{location}}}" for location in PLACEHOLDERS)
                raise LimitError(key, shown, f"text with {{{required}}}; places are {allowed_places}", "correct them")
        if "format" in template:
            template = {"no_input_format": template["format"]} | dict(template)
        return replace(cls(), **template)

    def render(self, instruction: str, record_input: str, system: str) -> str:
        """Return the prompt text. `record_input` and `system` are empty if the record has none."""
        values = {"instruction": instruction, "input": record_input, "system": system or self.system_prompt}
        body = self.format if record_input else self.no_input_format
        head = self.system_format if values["system"] and "{system}" not in body else ""
        return _PLACEHOLDER.sub(lambda match: values[match[1]], head + body) + self.separator


ALPACA = PromptTemplate()


Record = Mapping[str, Any]
MESSAGE_KEYS = ("role", "content")
"""Keys inside messages."""


class Format(NamedTuple):
    """A record format."""

    fields: tuple[str, ...]
    """Required fields of a record."""
    read: Callable[[Record, PromptTemplate], list[Span]] | None = None
    """Function from a record to spans. None if the first field holds the whole document, which to_document reads."""
    question_field: str = ""
    """Name of the field that holds the question, if prompts can be built in this format."""
    optional_fields: tuple[str, ...] = ()
    """Optional fields."""
    content_type: type | None = None
    """Required type of a document's content if the job names this format."""
    template_parts: tuple[str, ...] = ()
    """Parts of the prompt template that this format uses."""
    detectable: bool = True
    """True if the format is detected from a record's fields."""


def read_prompt_completion(record: Record, prompt: PromptTemplate) -> list[Span]:
    return [Span(record["prompt"] + prompt.separator, False), Span(record["completion"])]


def read_alpaca(record: Record, prompt: PromptTemplate) -> list[Span]:
    text = prompt.render(record["instruction"], record.get("input") or "", record.get("system") or "")
    return [Span(text, False), Span(record["output"])]


def read_preference(record: Record, columns: Mapping[str, str], location: str, short_location: str) -> Document:
    """Convert a preference record to a pair of answers.

    Answers are texts after the prompt, or messages after the ones in `prompt` or `messages`; both answers may repeat
    these. Raises DataError, which names `location`."""
    answers = {name: record[name] for name in ("chosen", "rejected")}
    contexts = [record[name] for name in ("messages", "prompt") if record.get(name) not in (None, "")]
    if contexts and all(isinstance(part, str) for part in (contexts[0], *answers.values())):
        prompt, texts = contexts[0], list(answers.values())
        if all(text.startswith(prompt) and text != prompt for text in texts):  # the answers repeat the prompt
            texts = [text.removeprefix(prompt) for text in texts]
        pair = [Document([Span(prompt, False), Span(text)], short_location) for text in texts]
        return Document(Pair(*pair), short_location)
    for name, answer in answers.items():
        is_text = isinstance(answer, str) and bool(contexts)
        if not (is_text or isinstance(answer, list) and answer) or not all(isinstance(b, str | list) for b in contexts):
            kind = "nothing (null)" if answer is None else type(answer).__name__
            types = " and ".join(type(context).__name__ for context in contexts) or "nothing"
            raise DataError(
                f"{location}: field {columns[name]!r} holds {kind}, with {types} as prompt; allowed: text after a "
                f"prompt or messages, or messages; {REMEDY}"
            )
    turns = [_turns(answer, "assistant") for answer in answers.values()]
    for context in [*(_turns(context, "user") for context in contexts), []]:
        if _begin_with(context, turns):
            conversations = turns
        elif _continue_from(context, turns):
            conversations = [[*context, *conversation] for conversation in turns]
        else:
            # e.g. `messages` holds the preferred conversation and `prompt` its beginning
            continue
        pair = [
            to_document(conversation, columns[name], location, short_location)
            for name, conversation in zip(answers, conversations, strict=True)
        ]
        return Document(Pair(*pair), short_location)
    raise DataError(
        f"{location}: fields {columns['chosen']!r} and {columns['rejected']!r} are not both answers to the same "
        f"messages; allowed: both repeat prompt or messages, both continue them, or both begin with the same message; "
        f"{REMEDY}"
    )


def _turns(value: str | list[Any], role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _role_in(message: Any) -> Any:
    return standard_role(message.get("role", message.get("from"))) if isinstance(message, dict) else None


def _begin_with(before: list[Any], turns: list[list[Any]]) -> bool:
    """Return True if both conversations begin with these messages, perhaps after a system message, and continue.

    Without messages: True if both begin with the same message and it is not an answer."""
    if not before:
        return turns[0][0] == turns[1][0] and _role_in(turns[0][0]) != "assistant"
    if _role_in(before[0]) != "system":
        turns = [conversation[1:] if _role_in(conversation[0]) == "system" else conversation for conversation in turns]
    return all(conversation[: len(before)] == before and len(conversation) > len(before) for conversation in turns)


def _continue_from(before: list[Any], turns: list[list[Any]]) -> bool:
    """Return True if both conversations continue these messages.

    The first speaker of a continuation differs from the last one before it, and a continuation neither repeats the
    messages nor is their end, as the preferred conversation after a system message would be."""
    return bool(before) and all(
        conversation[: len(before)] != before
        and before[-len(conversation) :] != conversation
        and _role_in(conversation[0]) not in ("system", _role_in(before[-1]))
        for conversation in turns
    )


FORMATS: dict[str, Format] = {
    "preference": Format(("chosen", "rejected"), optional_fields=("prompt", "messages", *MESSAGE_KEYS)),
    "chat": Format(("messages",), optional_fields=MESSAGE_KEYS, content_type=Chat),
    "sharegpt": Format(("conversations",), optional_fields=MESSAGE_KEYS, content_type=Chat),
    "input_output": Format(("segments",), content_type=list),
    "prompt_completion": Format(
        ("prompt", "completion"), read_prompt_completion, "prompt", template_parts=("separator",)
    ),
    "alpaca": Format(
        ("instruction", "output"),
        read_alpaca,
        "instruction",
        ("input", "system"),
        template_parts=tuple(PromptTemplate.__annotations__),
    ),
    "completion": Format(("text",), detectable=False),
}
QUESTION_FORMATS = ("chat", *(name for name, entry in FORMATS.items() if entry.question_field))
"""Formats that can render a question to a trained model."""


def detect_format(fields: Collection[str]) -> str | None:
    """Return the first of FORMATS with all its required fields present, or None."""
    detectable = (name for name, record_format in FORMATS.items() if record_format.detectable)
    return next((name for name in detectable if all(field in fields for field in FORMATS[name].fields)), None)


LARGEST_ID = 2**31 - 1
ROLE_KEYS = {"role", "from"}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Role names of the ShareGPT format."""


def to_document(value: Any, field: str, location: str, short_location: str) -> Document:
    """Convert a field's value to a document. Raises DataError, which names `location`.

    The value is text; a list of token ids, which includes begin and end; a list of segments {text, label}, trained if
    label is true; or a conversation, a list of messages {role, content} or {from, value}. The messages of the assistant
    are trained."""
    if isinstance(value, str):
        return Document(value, short_location)
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= LARGEST_ID for item in value):
        return Document([Span(value)], short_location, has_begin_end=True)
    if isinstance(value, list) and value and all(isinstance(item, dict) and ROLE_KEYS & item.keys() for item in value):
        return Document(
            Chat([_standard_message(item, i, field, location) for i, item in enumerate(value)]), short_location
        )
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return Document([_segment_span(item, i, field, location) for i, item in enumerate(value)], short_location)
    kind = "nothing (null)" if value is None else type(value).__name__
    allowed = "not text, nor a list of token ids, of segments {text, label} or of messages {role, content}"
    raise DataError(f"{location}: field {field!r} holds {kind}, {allowed}; {REMEDY}")


def _segment_span(item: dict[str, Any], number: int, field: str, location: str) -> Span:
    content, trained = item.get("text"), item.get("label")
    if not isinstance(content, str) or not isinstance(trained, bool):
        types = ", ".join(f"{name}: {type(value).__name__}" for name, value in list(item.items())[:20]) or "nothing"
        raise DataError(
            f"{location}: segment {number} of field {field!r} has {types}; allowed: text: str and label: bool (whether "
            f"it is trained); {REMEDY}"
        )
    return Span(content, trained)


def standard_role(name: Any) -> Any:
    """Map a ShareGPT role name to the usual one; return other names unchanged."""
    return SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name


def _standard_message(item: dict[str, Any], number: int, field: str, location: str) -> dict[str, Any]:
    if "from" in item and "role" not in item:
        item = {"role": standard_role(item["from"]), "content": item.get("value")}
    item = {key: value for key, value in item.items() if value is not None}
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            kind = type(item[key]).__name__ if key in item else "nothing"
            raise DataError(f"{location}: message {number} of field {field!r} has {kind} as {key}, not text; {REMEDY}")
    return item
