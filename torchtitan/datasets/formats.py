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

from torchtitan.core.errors import LimitError
from torchtitan.datasets.messages import (
    FLAGS,
    LIST_OF_TABLES,
    MEDIA,
    MessageReader,
    as_list,
    is_messages,
    is_segments,
    parsed,
    without_absent,
)
from torchtitan.datasets.sources import REMEDY, Chat, DataError, Document, Span

PLACEHOLDERS = ("instruction", "input", "system")
REQUIRED_PLACEHOLDERS = {"format": "instruction", "no_input_format": "instruction", "system_format": "system"}
REQUIRED_PLACEHOLDERS |= {"output_format": "output"}
"""Part of a prompt template -> the placeholder that it must have."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt template for instruct records.

    `format`, and `no_input_format` for records without an input, may contain {instruction}, {input} and {system}.
    `system_format`: prefix for a system message if the format has no {system}. `system_prompt`: default system message
    of records without one. `separator`: text between prompt and answer. `output_format`: the answer, with {output}.
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
    output_format: str = "{output}"

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
            required = REQUIRED_PLACEHOLDERS.get(name)
            places = _PLACEHOLDER.findall(text) if required else []
            placeholders = PLACEHOLDERS if required in PLACEHOLDERS else (required,)
            if required and (required not in places or set(places) - {*placeholders}):
                allowed_places = ", ".join(f"{{{location}}}" for location in placeholders)
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

    def render_output(self, output: str) -> str:
        return _PLACEHOLDER.sub(lambda match: output, self.output_format)


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
    messages: Callable[[Record, str], list[dict[str, Any]]] | None = None
    """Function from a record and its location to the messages of a conversation, in place of `read`."""
    unplaced_fields: tuple[str, ...] = ()
    """Fields that such records may have and that this format has no place for. A record with one of them is refused,
    unless the job names the format."""


SIMILAR = (
    ("instruction", "response"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("input", "output"),
    ("prompt", "answer"),
)
"""Names of question and answer in common records that are no format."""


def read_prompt_completion(record: Record, prompt: PromptTemplate) -> list[Span]:
    return [Span(record["prompt"] + prompt.separator, False), Span(record["completion"])]


def read_alpaca(record: Record, prompt: PromptTemplate) -> list[Span]:
    text = prompt.render(record["instruction"], record.get("input") or "", record.get("system") or "")
    return [Span(text, False), Span(prompt.render_output(record["output"]))]


def read_instruct(record: Record, prompt: PromptTemplate) -> list[Span]:
    """Return an instruction record whose answer is encoded as a text by itself, as Axolotl does."""
    question, answer = read_alpaca(record, prompt)
    return [question, answer._replace(starts_text=True)]


def alpaca_messages(record: Record, location: str) -> list[dict[str, Any]]:
    """Return an instruction record as a conversation, as LLaMA-Factory reads it: the input is on a line of its own.

    Raises DataError, which names `location`, if a field holds no text, or the earlier turns are no pairs."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise DataError(f"{location}: field 'history' is no list of pairs [question, answer]; {REMEDY}")
    parts = {name: record[name] for name in ("instruction", "input") if record.get(name)}
    for name, part in parts.items():
        if not isinstance(part, str):
            raise DataError(f"{location}: field {name!r} holds {type(part).__name__}, not text; {REMEDY}")
    question = "\n".join(parts.values())
    turns = [*history, [question, record["output"]]]
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


CONTEXT_FIELDS = ("system", "tools", "functions", "chat_template_kwargs")
"""Fields next to a conversation: its system message, and tools (OpenAI's earlier name: functions) and variables of its
template."""
UNPLACED = ("history", *MEDIA)
"""Fields that no format has a place for: earlier turns, and what no text model reads."""
TOKEN_MASKS = ("labels", "attention_mask", "loss_mask", "completion_mask", "assistant_masks")
"""Fields next to token ids that leave some out: of the loss, or as padding."""
LISTS = ("messages", "conversations", "segments", "input_ids")
"""Fields that hold lists, so that JSON in a text, as in CSV, stands for one."""
FORMATS: dict[str, Format] = {
    "preference": Format(
        ("chosen", "rejected"),
        optional_fields=("prompt", "messages", "conversations", "question", *MESSAGE_KEYS, *CONTEXT_FIELDS),
        unplaced_fields=UNPLACED,
    ),
    "chat": Format(
        ("messages",),
        optional_fields=(*MESSAGE_KEYS, *CONTEXT_FIELDS),
        content_type=Chat,
        unplaced_fields=UNPLACED,
    ),
    "sharegpt": Format(
        ("conversations",),
        optional_fields=(*MESSAGE_KEYS, *CONTEXT_FIELDS),
        content_type=Chat,
        unplaced_fields=UNPLACED,
    ),
    "input_output": Format(("segments",), content_type=list, unplaced_fields=UNPLACED),
    "prompt_completion": Format(
        ("prompt", "completion"),
        read_prompt_completion,
        "prompt",
        optional_fields=(*MESSAGE_KEYS, *CONTEXT_FIELDS),
        template_parts=("separator",),
        unplaced_fields=("label", *UNPLACED, *CONTEXT_FIELDS),
    ),
    "alpaca": Format(
        ("instruction", "output"),
        read_alpaca,
        "instruction",
        ("input", "system"),
        template_parts=tuple(PromptTemplate.__annotations__),
        unplaced_fields=(*UNPLACED, "system", "tools", "functions"),
    ),
    "instruct": Format(
        ("instruction", "output"),
        read_instruct,
        "instruction",
        ("input", "system"),
        template_parts=tuple(PromptTemplate.__annotations__),
        detectable=False,
    ),
    "alpaca_chat": Format(
        ("instruction", "output"),
        optional_fields=("input", "history", *CONTEXT_FIELDS),
        detectable=False,
        messages=alpaca_messages,
    ),
    "completion": Format(("text",), detectable=False),
}
INSTRUCTIONS = ("alpaca", "instruct")
"""Formats that use all parts of a prompt template. Their system message is only read if the job says where it goes."""
QUESTION_FORMATS = ("chat", *(name for name, entry in FORMATS.items() if entry.question_field))
"""Formats that can render a question to a trained model."""


def other_formats(form: str, fields: Collection[str]) -> list[str]:
    """Return the further formats all of whose required fields are among these."""
    names = [name for name, record_format in FORMATS.items() if record_format.detectable and name != form]
    return [name for name in names if all(field in fields for field in FORMATS[name].fields)]


def detect_format(fields: Collection[str]) -> str | None:
    """Return the first of FORMATS with all its required fields present, or None."""
    detectable = (name for name, record_format in FORMATS.items() if record_format.detectable)
    return next((name for name in detectable if all(field in fields for field in FORMATS[name].fields)), None)


LARGEST_ID = 2**31 - 1


def to_document(value: Any, field: str, location: str, short_location: str, maps_roles: bool = False) -> Document:
    """Convert a field's value to a document. Raises DataError, which names `location`.

    The value is text; a list of token ids, which includes begin and end; a list of segments {text, label}, trained if
    label is true; or a conversation, a list of messages {role, content} or {from, value}. The messages of the assistant
    are trained. `maps_roles`: role names are ShareGPT's in any case."""
    value = as_list(value)
    if isinstance(value, str):
        return Document(value, short_location)
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= LARGEST_ID for item in value):
        return Document([Span(value)], short_location, has_begin_end=True)
    if is_messages(value):
        return Document(Chat(MessageReader(field, location, maps_roles).messages(value)), short_location)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return Document([_segment_span(item, i, field, location) for i, item in enumerate(value)], short_location)
    kind = "nothing (null)" if value is None else type(value).__name__
    allowed = "not text, nor a list of token ids, of segments {text, label} or of messages {role, content}"
    raise DataError(f"{location}: field {field!r} holds {kind}, {allowed}; {REMEDY}")


def _segment_span(item: dict[str, Any], number: int, field: str, location: str) -> Span:
    item = without_absent(item)
    content, trained = item.get("text"), item.get("label")
    if not isinstance(content, str) or not isinstance(trained, bool) or not item.keys().isdisjoint(FLAGS):
        types = ", ".join(f"{name}: {type(value).__name__}" for name, value in list(item.items())[:20]) or "nothing"
        raise DataError(
            f"{location}: segment {number} of field {field!r} has {types}; allowed: text: str and label: bool (whether "
            f"it is trained), and not {', '.join(FLAGS)} of messages; {REMEDY}"
        )
    return Span(content, trained)


def field_holds(value: str, field: str, location: str) -> Any:
    """Return what a text holds in a field that one of LISTS names: a list as JSON, as in CSV, or the text itself.

    Raises DataError, which names `location`, if it begins like messages or segments, or should be ids, and is no JSON.
    """
    content = parsed(value) if value.lstrip().startswith("[") else None
    if is_messages(content) or is_segments(content):
        return content
    if isinstance(content, list) and (content or field == "input_ids") and all(type(item) is int for item in content):
        return content
    if field == "input_ids" and value.strip():
        raise DataError(f"{location}: field {field!r} holds text that is no list of token ids as JSON; {REMEDY}")
    if content is None and LIST_OF_TABLES.match(value):
        raise DataError(
            f"{location}: field {field!r} begins like a list, but is no JSON; write it with json.dumps, or {REMEDY}"
        )
    return value


def similar_format(fields: Collection[str]) -> str:
    """Return what reads records with these fields, and which fields it leaves out; empty if they are not known.

    A text that the question is about, in `context`, is the input of format alpaca."""
    if list(fields) == ["completion"]:
        return 'set training.text_field = "completion"'
    question, answer = next((names for names in SIMILAR if all(name in fields for name in names)), ("question", ""))
    before = ""
    if not answer and {"question", "answers"} <= {*fields}:  # SQuAD
        answer, before = "answer", "write one of the 'answers' as text into a field 'answer', and "
    if not answer:
        return ""
    is_alpaca = question == "instruction" or "context" in fields
    columns = {"instruction": question, "input": "context"} if is_alpaca else {"prompt": question}
    columns |= {"output" if is_alpaca else "completion": answer}
    renames = [
        f'{name} = "{column}"' for name, column in columns.items() if name != column and column in (*fields, answer)
    ]
    left_out = [repr(name) for name in fields if name not in (*columns.values(), "answers")]
    form = "alpaca" if is_alpaca else "prompt_completion"
    options = f'set training.format = "{form}" and training.fields = {{ {", ".join(renames)} }}'
    return f"{before}{options}" + (f", which leaves out {', '.join(left_out[:12])}" if left_out else "")
