"""Reading the records of a source: by one text field, by a format detected from their fields, or by a format that the
job names, with optional field renames.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.core.errors import LimitError
from torchtitan.datasets.formats import (
    ALPACA,
    CONTEXT_FIELDS,
    FORMATS,
    INSTRUCTIONS,
    LISTS,
    MESSAGE_KEYS,
    TOKEN_MASKS,
    UNPLACED,
    Format,
    PromptTemplate,
    Record,
    detect_format,
    field_holds,
    other_formats,
    similar_format,
    to_document,
)
from torchtitan.datasets.messages import (
    FLAGS,
    KNOWN_KEYS,
    MEDIA,
    ROLE_KEYS,
    Context,
    MessageReader,
    as_list,
    is_empty,
    is_messages,
    is_segments,
    json_in_text,
    messages_in_text,
    parsed,
    without_nulls,
)
from torchtitan.datasets.preference_records import PROMPTS, QUESTIONS, read_preference
from torchtitan.datasets.record_account import check_account
from torchtitan.datasets.sources import (
    REMEDY,
    BadRecord,
    Chat,
    DataError,
    Document,
    LabelledTexts,
    Pair,
    Span,
)

PAIRS = "preference"
ANSWERS_AND_PROMPTS = ("prompt", "completion", "chosen", "rejected", "question")
"""Fields that hold text or messages."""
MESSAGES = "messages {role, content}"


@dataclass(frozen=True)
class RecordReader:
    """Options for reading records.

    `format_name`: None: a record with `text_field` is read by that field, any other record by the first format that
    matches its fields. `fields`: the records' own names for a format's fields where they differ, and for role and
    content inside messages; an empty name leaves a field out. `template`: parts of the prompt of instruct records.
    `system`: default system message of conversations without one. `drops_system`: leave their own out before.
    `refuse_ambiguous`: each record is trained on its
    own, so a record with both `text` and the fields of a format is refused as ambiguous. `pairs`: all records are
    preference pairs.
    """

    text_field: str = "text"
    format_name: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    refuse_ambiguous: bool = False
    pairs: bool = False
    drops_system: bool = False
    prompt: PromptTemplate = field(init=False, default=ALPACA)

    def __post_init__(self) -> None:
        """Raise LimitError for unknown options and options without effect."""
        if self.format_name is None and self.template and not self.pairs:
            object.__setattr__(self, "format_name", "alpaca")
        if self.format_name is not None and self.format_name not in FORMATS:
            raise LimitError("training.format", repr(self.format_name), f"one of {', '.join(FORMATS)}", "correct it")
        if self.pairs and self.format_name not in (None, PAIRS):
            allowed = f"{PAIRS}, or unset, as pairs of answers are learned"
            raise LimitError("training.format", repr(self.format_name), allowed, "drop it, or choose another task.kind")
        record_format = FORMATS.get(self._job_format or "", Format(()))
        field_names = (*record_format.fields, *record_format.optional_fields)
        for name in self.fields:
            if name not in field_names:
                allowed = f"fields of format {self._job_format}: {', '.join(field_names)}"
                allowed = allowed if self._job_format else "unset without training.format"
                raise LimitError("training.fields", repr(name), allowed, "correct it, or drop it")
        for name in self.template:
            if (
                record_format.template_parts == ("separator",)
                and name in PromptTemplate.__annotations__
                and name not in record_format.template_parts
            ):
                allowed = f"separator alone with format {self.format_name}, as its records contain the prompt"
                raise LimitError("training.template", repr(name), allowed, 'drop it, or set format = "alpaca"')
            if not record_format.template_parts:
                allowed = f"unset with format {self._job_format}, which does not use a prompt template"
                raise LimitError("training.template", repr(name), allowed, "drop it")
        object.__setattr__(self, "prompt", PromptTemplate.from_options(self.template))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return the options that documents depend on, JSON-able; unset options are left out."""
        options: dict[str, Any] = {"format": self.format_name, "fields": dict(self.fields)}
        options |= {"template": dict(self.template)}
        options |= {"default_system": self.system, "drop_system": self.drops_system}
        return {"text_field": self.text_field} | {name: value for name, value in options.items() if value}

    @property
    def _job_format(self) -> str | None:
        """Return the format that the job sets for all records, or None."""
        return PAIRS if self.pairs else self.format_name

    def format_of(self, fields: Collection[str]) -> str | None:
        """Return the format of a record with these fields; None: no known format, or read by its text field."""
        return self._job_format or (None if self.text_field in fields else detect_format(fields))

    def ambiguity(self, fields: Collection[str]) -> str:
        """Return why a record with these fields is ambiguous, with a remedy; empty if it is not.

        Instruction datasets often contain the full text of a record in addition to its parts, and training on that text
        would include the prompt."""
        if not self.refuse_ambiguous or self._job_format or self.text_field != "text":
            return ""
        form = detect_format(fields)
        if form is None:
            return ""
        if "text" in fields:
            parts = " and ".join(map(repr, FORMATS[form].fields))
            option_hint = (
                "learn it by task.kind dpo, orpo or reward" if form == PAIRS else f'set training.format to "{form}"'
            )
            remedy = f'{option_hint}, or set training.format to "completion", which trains all of the text'
            return f"has the field 'text' and, of format {form}, {parts}; {remedy}"
        return ""

    def missing_field(self, fields: Collection[str]) -> str:
        """Return a description of the field that a record lacks; empty if it can be read."""
        form = self.format_of(fields)
        if form is None:
            return "" if self.text_field in fields else repr(self.text_field)
        absent = [column for column in self._required_columns(form) if column not in fields]
        return f"{absent[0]!r}, which format {form} needs" if absent else ""

    def remedy(self, fields: Collection[str] = ()) -> str:
        if self.pairs:
            return "set training.fields, or choose another task.kind"
        if not self._job_format and (options := similar_format(fields)):
            return options
        return "set training.fields" if self.format_name else "set training.text_field"

    def columns(self, fields: Collection[str]) -> list[str]:
        """Return the columns of a table, with all required fields, that its records are read from."""
        form = self.format_of(fields)
        return [self.text_field] if form is None else [c for c in self._column_names(form).values() if c in fields]

    def unplaced_columns(self, fields: Collection[str], texts: Collection[str] = ()) -> list[str]:
        """Return further columns that are looked at, because a record that holds something in them is refused.

        `texts`: fields that are known to hold texts alone."""
        form = self.format_of(fields)
        if form is None:
            is_list = self.text_field in LISTS
            unplaced = UNPLACED if is_list else ()  # images and masks next to plain texts are not even decoded
            masks = TOKEN_MASKS if is_list or self.text_field not in texts else ()
            return [n for n in (*CONTEXT_FIELDS, *masks, *unplaced) if n in fields and n != self.text_field]
        if self.format_name:
            return []
        names = [name for name in FORMATS[form].unplaced_fields if name in fields]
        if not self.pairs:
            names += [name for other in other_formats(form, fields) for name in FORMATS[other].fields]
        return [name for name in dict.fromkeys(names) if name not in self.columns(fields)]

    def _column_names(self, form: str) -> dict[str, str]:
        """Map each of a format's fields to its name in the records.

        The system field of instructions is only read if the job sets a prompt template or names that field."""
        record_format = FORMATS[form]
        names = [name for name in (*record_format.fields, *record_format.optional_fields) if name not in MESSAGE_KEYS]
        if form in INSTRUCTIONS and not self.template and "system" not in self.fields:
            names.remove("system")
        return {name: self.fields.get(name, name) for name in names}

    def _required_columns(self, form: str) -> list[str]:
        """Return the columns that must exist: the format's own fields and those that the job names."""
        columns = self._column_names(form)
        optional = {**dict.fromkeys(INSTRUCTIONS, ()), "alpaca_chat": FORMATS[form].optional_fields}
        optional_names = optional.get(form, CONTEXT_FIELDS)
        job_names = [n for n in self.fields if columns.get(n) and n not in optional_names]
        return [column for name, column in columns.items() if name in FORMATS[form].fields or name in job_names]

    def document(self, record: Record, location: str, short_location: str) -> Document:
        """Convert a record to a document. Raises DataError, which names `location`, if it cannot be read, or if a text
        of its fields would not be in the document."""
        if missing := self.missing_field(record):
            raise DataError(f"{location}: {self._lack(missing, record)}")
        if unclear := self.ambiguity(record):
            raise DataError(f"{location}: {unclear}")
        form = self.format_of(record)
        if form is None:
            document, read_columns = self._field_document(record, location, short_location)
        else:
            columns = {name: column for name, column in self._column_names(form).items() if column in record}
            values = {name: self._value(form, name, column, record, location) for name, column in columns.items()}
            if form == PAIRS and not any(name in columns for name in PROMPTS):
                self._refuse_without_prompt(record, location)
            document = self._read(form, values, self._column_names(form), location, short_location)
            is_text = form == "prompt_completion" and not isinstance(document.content, Chat)
            read_columns = [c for name, c in columns.items() if not (is_text and name in CONTEXT_FIELDS)]
            self._refuse_unplaced(form, record, read_columns, location)
            self._refuse_contradiction(form, record, document, location)
            document = document._replace(is_reread=_is_reread(document, record, values, columns))
        if not isinstance(document.content, str):
            role_keys = [*ROLE_KEYS, *([self.fields["role"]] if "role" in self.fields else [])]
            check_account({column: record[column] for column in read_columns}, document, location, role_keys)
        unread = (*(name for name in record if name not in read_columns), *_unknown_keys(document))
        return self._set_system_message(document._replace(unread=unread))

    def _lack(self, missing: str, record: Record) -> str:
        """Describe a missing field, with the record's fields and a remedy."""
        field_names = ", ".join(map(repr, list(record)[:20])) or "none"
        formats = ", ".join(
            f"{name} ({' and '.join(record_format.fields)})"
            for name, record_format in FORMATS.items()
            if record_format.detectable
        )
        if not self._job_format and (listed := [name for name, value in record.items() if is_messages(as_list(value))]):
            return f'no field {missing}, but messages in {listed[0]!r}; set training.text_field = "{listed[0]}"'
        hint = "" if self._job_format or similar_format(record) else f", or give records of a known format: {formats}"
        return f"no field {missing}; the record's fields: {field_names}; {self.remedy(record)}{hint}"

    def _refuse_without_prompt(self, record: Record, location: str) -> None:
        """Raise DataError if the prompt of two texts has another name, such as LLaMA-Factory's `instruction`."""
        question = next((name for name in QUESTIONS if isinstance(record.get(name), str)), None)
        if question is None or not all(isinstance(record[self.fields.get(n, n)], str) for n in ("chosen", "rejected")):
            return
        if question == "instruction" and not is_empty(record.get("input")):
            remedy = "join 'instruction' and 'input' to one text in a field 'prompt'"
        else:
            form = "" if self._job_format else f'training.format = "{PAIRS}" and '
            remedy = f'set {form}training.fields = {{ prompt = "{question}" }}'
        raise DataError(f"{location}: two answers without a field 'prompt'; {remedy}")

    def _refuse_unplaced(self, form: str, record: Record, read_columns: Collection[str], location: str) -> None:
        """Raise DataError if a record has a field that its format, which the job does not name, has no place for."""
        for name in () if self.format_name else FORMATS[form].unplaced_fields:
            value = record.get(name)
            if name not in read_columns and not is_empty(value) and (name != "label" or _is_rating(value)):
                raise DataError(f"{location}: has the field {name!r}, {_unplaced(form, name)}")

    def _refuse_contradiction(self, form: str, record: Record, document: Document, location: str) -> None:
        """Raise DataError if a record of a detected format holds other texts in the fields of another format."""
        for other in () if self._job_format else other_formats(form, record):
            try:
                check_account({name: record[name] for name in FORMATS[other].fields}, document, location)
            except BadRecord:
                fields = " and ".join(map(repr, FORMATS[other].fields))
                raise DataError(
                    f"{location}: is of format {form}, and has other texts in {fields}, of format {other}; set "
                    f'training.format to "{form}" or "{other}", which leaves the other fields out'
                ) from None

    def _value(self, form: str, name: str, column: str, record: Record, location: str) -> Any:
        """Return a field's value, from JSON if a text stands for a list, with the usual names in its messages."""
        value = as_list(record[column])
        if isinstance(value, str) and name in (*LISTS, *CONTEXT_FIELDS[1:]):
            value = json_in_text(value, f"field {column!r} of format {form} holds str, not {_kind_of(name)}", location)
        elif isinstance(value, str) and name in ANSWERS_AND_PROMPTS:
            role_keys = (self.fields["role"],) if "role" in self.fields else ROLE_KEYS
            value = messages_in_text(value, role_keys, column, location)
        return self._messages(as_list(value) if name in LISTS else value, column, location)

    def _field_document(self, record: Record, location: str, short_location: str) -> tuple[Document, list[str]]:
        """Return the document of the job's text field, and the columns that it comes from."""
        value = as_list(record[self.text_field])
        if isinstance(value, str):
            value = self._text_or_list(value, location)
        if isinstance(value, str):
            return Document(value, short_location), [self.text_field]
        is_sharegpt = self.text_field == "conversations"
        document = to_document(value, self.text_field, location, short_location, is_sharegpt)
        columns = [self.text_field]
        if document.has_begin_end:
            self._refuse_masked(value, record, location)
        if isinstance(document.content, Chat):
            self._refuse_unplaced("chat", record, columns, location)
            context = {name: record[name] for name in CONTEXT_FIELDS if name in record and name != self.text_field}
            for name in context.keys() - {"system"}:
                context[name] = self._value("chat", name, name, record, location)
            chat = self._context(context, {}, is_sharegpt, location).chat(list(document.content.messages))
            document, columns = document._replace(content=chat), [self.text_field, *context]
        return document._replace(is_reread=_is_reread(document, record, {}, {})), columns

    def _refuse_masked(self, ids: list[int], record: Record, location: str) -> None:
        """Raise DataError if a record of token ids, which are all trained, has a mask that leaves some out."""
        for name in TOKEN_MASKS:
            mask = parsed(record[name]) if isinstance(record.get(name), str) else record.get(name)
            if name != self.text_field and isinstance(mask, list) and mask not in ([], ids, [1] * len(ids)):
                raise DataError(
                    f"{location}: field {name!r} leaves out some of the token ids in {self.text_field!r}, which are "
                    "all trained; write segments {text, label}, messages, or a prompt and a completion, or take the "
                    f"field out; {REMEDY}"
                )

    def _text_or_list(self, value: str, location: str) -> Any:
        """Return the text of the text field, or the list that it stands for in a field with the name of a list."""
        content = field_holds(value, self.text_field, location) if self.text_field in LISTS else value
        if content is value and self.refuse_ambiguous and value.lstrip().startswith("["):
            listed = parsed(value)
            form, name = ("chat", "messages") if is_messages(listed) else ("input_output", "segments")
            if is_messages(listed) or (is_segments(listed) and all("label" in item for item in listed)):
                remedy = f'set training.format = "{form}" and training.fields = {{ {name} = "{self.text_field}" }}'
                raise DataError(
                    f"{location}: field {self.text_field!r} holds {name} as JSON text, which would be learned as it "
                    f'stands; {remedy}, or training.format = "completion" and training.fields = {{ text = '
                    f'"{self.text_field}" }} to learn the JSON'
                )
        return content

    def _context(self, record: Record, columns: Mapping[str, str], is_sharegpt: bool, location: str) -> Context:
        """Return what stands next to a record's conversation."""
        system = record.get("system")
        if system is not None and not isinstance(system, str):
            raise DataError(f"{location}: field 'system' holds {type(system).__name__}, not text; {REMEDY}")
        tools = MessageReader(columns.get("tools", "tools"), location, is_sharegpt).tools(record.get("tools"))
        functions = MessageReader(columns.get("functions", "functions"), location, True).tools(record.get("functions"))
        if tools and functions and tools != functions:
            raise DataError(f"{location}: fields 'tools' and 'functions' hold other tools; drop one of them; {REMEDY}")
        variables = without_nulls(record.get("chat_template_kwargs"))
        if not isinstance(variables, dict | None):
            kind = type(variables).__name__
            raise DataError(f"{location}: field 'chat_template_kwargs' holds {kind}, not a JSON object; {REMEDY}")
        system = "" if system is None or system.isspace() else system
        return Context(system, tools or functions, variables or {}, columns.get("system", "system"), location)

    def _read(
        self, form: str, record: Record, columns: Mapping[str, str], location: str, short_location: str
    ) -> Document:
        record_format, is_sharegpt = FORMATS[form], form == "sharegpt"
        if form == PAIRS:
            context = self._context(record, columns, is_sharegpt, location)
            document = read_preference(record, context, columns, location, short_location)
        elif record_format.messages is not None:
            messages = MessageReader(columns[record_format.fields[0]], location).messages(
                record_format.messages(record, location)
            )
            return Document(
                self._context(record, columns, False, location).chat(messages), short_location, format_name="chat"
            )
        elif record_format.read is None:
            name = columns[record_format.fields[0]]
            document = to_document(record[record_format.fields[0]], name, location, short_location, is_sharegpt)
            required, content = record_format.content_type, document.content
            if required is not None and not isinstance(content, required) and not _is_blank(document):
                problem = f"holds {type(content).__name__}, not {_kind_of(record_format.fields[0])}"
                raise DataError(f"{location}: field {name!r} of format {form} {problem}; {REMEDY}")
            if isinstance(content, Chat):
                context = self._context(record, columns, is_sharegpt, location)
                document = document._replace(content=context.chat(list(content.messages)))
        elif form == "prompt_completion" and (chat := self._completed_chat(record, columns, location)):
            return Document(chat, short_location, format_name="chat")
        else:
            document = Document(self._read_texts(form, record, columns, location), short_location)
        return document._replace(format_name=form)

    def _completed_chat(self, record: Record, columns: Mapping[str, str], location: str) -> Chat | None:
        """Return the conversation of a prompt and a completion that are messages; None if they are texts."""
        parts = {name: record[name] for name in ("prompt", "completion")}
        if not all(isinstance(part, list) for part in parts.values()):
            return None
        prompt, completion = (MessageReader(columns[n], location).messages(part) for n, part in parts.items())
        if not completion or completion[0]["role"] != "assistant":
            raise DataError(
                f"{location}: field {columns['completion']!r} holds messages that do not begin with an answer of the "
                f"assistant; {REMEDY}"
            )
        prompt = [{k: v for k, v in m.items() if k not in FLAGS} for m in prompt]
        prompt = [message | ({"train": False} if message["role"] == "assistant" else {}) for message in prompt]
        return self._context(record, columns, False, location).chat([*prompt, *completion])

    def _read_texts(self, form: str, record: Record, columns: Mapping[str, str], location: str) -> list[Span]:
        record_format = FORMATS[form]
        assert record_format.read is not None
        names = [name for name in record if form in INSTRUCTIONS or name in record_format.fields]
        for name in names:
            value = record[name]
            if not isinstance(value, str) and (name in record_format.fields or value is not None):
                kind = "nothing (null)" if value is None else type(value).__name__
                raise DataError(
                    f"{location}: field {columns[name]!r} of format {form} holds {kind}, not text; {REMEDY}"
                )
        return record_format.read(record, self.prompt)

    def _messages(self, value: Any, column: str, location: str) -> Any:
        """Rename the job's own names for role and content in messages to these names."""
        names = {name: self.fields[name] for name in MESSAGE_KEYS if name in self.fields}
        if not names or not isinstance(value, list):
            return value
        messages = []
        for number, message in enumerate(value):
            for name in names.values():
                if not isinstance(message, dict) or name not in message:
                    keys = ", ".join(map(repr, list(message)[:20])) if isinstance(message, dict) else "none"
                    raise DataError(
                        f"{location}: message {number} of field {column!r} has no {name!r}; there are: "
                        f"{keys or 'none'}; set training.fields, or {REMEDY}"
                    )
            extra = {key: inner for key, inner in message.items() if key not in names.values()}
            messages.append(extra | {name: message[alias] for name, alias in names.items()})
        return messages

    def _set_system_message(self, document: Document) -> Document:
        """Return the document without the system message that its conversations begin with, or with the default one."""
        content = document.content
        if self.system is None and not self.drops_system:
            return document
        if isinstance(content, Pair):
            return document._replace(content=Pair(*(self._set_system_message(answer) for answer in content)))
        if not isinstance(content, Chat):
            return document
        messages = [*content.messages]
        if self.drops_system and messages and messages[0]["role"] == "system":
            del messages[0]
        if self.system is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.system})
        return document._replace(content=content._replace(messages=messages))

    def question_document(self, form: str, text: str) -> Document:
        """Return the prompt of a record of this format with the given question, without an answer."""
        record_format = FORMATS[form]
        assert record_format.read is not None and record_format.question_field
        *prompt, _ = record_format.read(
            dict.fromkeys(record_format.fields, "") | {record_format.question_field: text}, self.prompt
        )
        return Document(prompt, "the question")


def record_reader(
    source: Any, system: str | None, refuse_ambiguous: bool, pairs: bool, drops_system: bool = False
) -> RecordReader:
    """Return the RecordReader of one of a job's sources, with these of its options.

    Raises LimitError, which names the options in short form."""
    options = (source.text_field, source.format, source.fields, source.template, system, refuse_ambiguous, pairs)
    return RecordReader(*options, drops_system)


def _unknown_keys(document: Document) -> list[str]:
    """Name the keys of a conversation's messages that only a template made for them would read."""
    if isinstance(document.content, Pair):
        return list(dict.fromkeys(key for answer in document.content for key in _unknown_keys(answer)))
    messages = document.content.messages if isinstance(document.content, Chat) else []
    return [f"{key} of messages" for key in dict.fromkeys(k for m in messages for k in m if k not in KNOWN_KEYS)]


def _kind_of(name: str) -> str:
    kinds = {"segments": "segments {text, label}", "tools": "tools", "input_ids": "token ids"}
    return "a table of variables" if name == "chat_template_kwargs" else f"a list of {kinds.get(name, MESSAGES)}"


def _is_rating(label: Any) -> bool:
    """Return True if a label says that an answer is good or bad; others are names or numbers of classes."""
    return (
        label in (True, False) if isinstance(label, bool | int) else str(label).lower() in ("true", "false", "0", "1")
    )


def _is_blank(document: Document) -> bool:
    return not any(len(span.content) for span in document.spans)


def _unplaced(form: str, name: str) -> str:
    """Return why a record of this format is refused for this field, with a remedy."""
    if name == "label":
        return (
            "next to a prompt and a completion, so each is rated good or bad (KTO), which no task learns; leave the "
            f'bad ones and the field out, or set training.format = "{form}", which learns all of them'
        )
    leaves_out = f'set training.format = "{form}", which leaves the field out'
    if name in MEDIA:
        return f"which no text model reads; take such records out, or {leaves_out}"
    if name == "history":
        return f"which format {form} has no place for; write its turns as messages before the others, or {leaves_out}"
    if (form, name) == ("alpaca", "system"):
        return (
            f"which the prompt of format alpaca has no place for; {leaves_out}, and to put it before the prompt also "
            'training.fields = { system = "system" }'
        )
    remedy = "write prompt and completion as lists of messages" if form == "prompt_completion" else "write messages"
    return f"which format {form} has no place for in a record of texts; {remedy}, or {leaves_out}"


def _is_reread(document: Document, record: Record, values: Record, columns: Mapping[str, str]) -> bool:
    """Return True if versions before RECORDS_VERSION read this record otherwise."""
    content = document.content.chosen.content if isinstance(document.content, Pair) else document.content
    is_parsed = any(isinstance(record[columns[n]], str) and not isinstance(v, str | None) for n, v in values.items())
    if not isinstance(content, Chat):
        return is_parsed
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in content.messages)
    has_flags = any("loss" in message for message in content.messages)
    return (
        is_parsed or has_calls or has_flags or any(not is_empty(record.get(columns.get(n, n))) for n in CONTEXT_FIELDS)
    )


Row = Mapping[str, Any]


@dataclass(frozen=True)
class LabelledFields:
    """The fields of labelled records.

    `second_text`: field of the second text, if there are two. `class_names`: class names in order; without them classes
    are numbers. `end_tokens`: append an end token to each text, for a model that reads the class at the first token;
    otherwise the last token of the text is used.
    """

    text: str
    label: str
    num_classes: int
    second_text: str | None = None
    class_names: tuple[str, ...] = ()
    end_tokens: bool = False

    @classmethod
    def from_task(cls, task: Any, num_classes: int, end_tokens: bool) -> "LabelledFields":
        """Return the fields of a job's [task]; `open_source` sets each source's text field."""
        return cls("", task.label_field, num_classes, task.second_text_field, tuple(task.labels), end_tokens)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Return the options that documents depend on, JSON-able. Checkpoints hold these keys."""
        return {
            "text": self.text,
            "label": self.label,
            "classes": self.num_classes,
            "second": self.second_text,
            "names": self.class_names,
            "ended": self.end_tokens,
        }

    def document(self, row: Row, location: str, short_location: str) -> Document:
        """Convert a row to a document. Raises DataError, which names `location`."""
        texts = []
        for name in (self.text, *([self.second_text] if self.second_text else [])):
            value = row.get(name)
            if isinstance(value, str):
                texts.append(value)
            else:
                keys = ", ".join(map(repr, list(row)[:20])) or "none"
                issue = f"holds {type(value).__name__}, not text" if name in row else f"is not there; there are {keys}"
                remedy = "set training.text_field and task.second_text_field"
                raise DataError(f"{location}: field {name!r} {issue}; {remedy}, or {REMEDY}")
        content = LabelledTexts(texts, self._class_of(row, location), self.end_tokens)
        read = (self.text, self.second_text, self.label)
        unread = tuple(name for name in row if name not in read)
        return Document(content, short_location, has_begin_end=True, unread=unread)

    def _class_of(self, row: Row, location: str) -> int:
        label = row.get(self.label)
        if isinstance(label, str) and label in self.class_names:
            return self.class_names.index(label)
        if isinstance(label, str) and label.isdecimal():  # a table of text holds numbers as text
            label = int(label)
        if isinstance(label, int) and 0 <= label < self.num_classes:
            return int(label)
        problem = f"holds {label!r}" if self.label in row else "is not there"
        names = (
            f", or one of {', '.join(map(repr, self.class_names))}"
            if self.class_names
            else ", or names that task.labels has"
        )
        fix = "correct task.label_field, task.labels or n_classes in model.overrides"
        raise DataError(
            f"{location}: field {self.label!r} {problem}; allowed: a class from 0 to {self.num_classes - 1}{names}; "
            f"{fix}, or {REMEDY}"
        )
