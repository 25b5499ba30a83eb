"""Reading the records of a source: by one text field, by a format detected from their fields, or by a format that the
job names, with optional field renames.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.core.constraints import LimitError
from torchtitan.datasets.formats import (
    ALPACA,
    FORMATS,
    MESSAGE_KEYS,
    Format,
    PromptTemplate,
    Record,
    detect_format,
    read_preference,
    to_document,
)
from torchtitan.datasets.sources import (
    REMEDY,
    Chat,
    DataError,
    Document,
    LabelledTexts,
    Pair,
)

PAIRS = "preference"


@dataclass(frozen=True)
class RecordReader:
    """Options for reading records.

    `format_name`: None: a record with `text_field` is read by that field, any other record by the first format that
    matches its fields. `fields`: the records' own names for a format's fields where they differ, and for role and
    content inside messages. `template`: parts of the prompt of instruct records. `system`: default system message of
    conversations without one. `refuse_ambiguous`: each record is trained on its own, so a record with both `text` and
    the fields of a format is refused as ambiguous. `pairs`: all records are preference pairs.
    """

    text_field: str = "text"
    format_name: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    refuse_ambiguous: bool = False
    pairs: bool = False
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
        options = {"format": self.format_name, "fields": dict(self.fields), "template": dict(self.template)}
        options |= {"default_system": self.system}
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
        would include the prompt. Their system message has no place in Stanford Alpaca's prompt."""
        form = detect_format(fields)
        if not self.refuse_ambiguous or self._job_format or self.text_field != "text" or form is None:
            return ""
        if "text" in fields:
            parts = " and ".join(map(repr, FORMATS[form].fields))
            option_hint = (
                "learn it with task.kind dpo, ipo or orpo" if form == PAIRS else f'set training.format to "{form}"'
            )
            remedy = f'{option_hint}, or set training.format to "completion", which trains all of the text'
            return f"has the field 'text' and, of format {form}, {parts}; {remedy}"
        if form == "alpaca" and "system" in fields:
            remedy = (
                'set training.format to "alpaca", which leaves it out, and to have it said ahead of the prompt also '
            )
            remedy += 'training.fields to { system = "system" }'
            return f"has the field 'system', which the prompt of format alpaca has no place for; {remedy}"
        return ""

    def missing_field(self, fields: Collection[str]) -> str:
        """Return a description of the field that a record lacks; empty if it can be read."""
        form = self.format_of(fields)
        if form is None:
            return "" if self.text_field in fields else repr(self.text_field)
        absent = [column for column in self._required_columns(form) if column not in fields]
        return f"{absent[0]!r}, which format {form} needs" if absent else ""

    def remedy(self) -> str:
        if self.pairs:
            return "set training.fields, or choose another task.kind"
        return "set training.fields" if self.format_name else "set training.text_field"

    def columns(self, fields: Collection[str]) -> list[str]:
        """Return the columns of a table, with all required fields, that its records are read from."""
        form = self.format_of(fields)
        return [self.text_field] if form is None else [c for c in self._column_names(form).values() if c in fields]

    def _column_names(self, form: str) -> dict[str, str]:
        """Map each of a format's fields to its name in the records.

        The system field is only read if the job sets a prompt template or names that field."""
        record_format = FORMATS[form]
        names = [name for name in (*record_format.fields, *record_format.optional_fields) if name not in MESSAGE_KEYS]
        names = [name for name in names if name != "system" or self.template or "system" in self.fields]
        return {name: self.fields.get(name, name) for name in names}

    def _required_columns(self, form: str) -> list[str]:
        """Return the columns that must exist: the format's own fields and those that the job names."""
        columns = self._column_names(form)
        return [column for name, column in columns.items() if name in FORMATS[form].fields or name in self.fields]

    def document(self, record: Record, location: str, short_location: str) -> Document:
        """Convert a record to a document. Raises DataError, which names `location`, if it cannot be read."""
        if missing := self.missing_field(record):
            field_names = ", ".join(map(repr, list(record)[:20])) or "none"
            formats = ", ".join(
                f"{name} ({' and '.join(record_format.fields)})"
                for name, record_format in FORMATS.items()
                if record_format.detectable
            )
            hint = "" if self._job_format else f", or give records of a known format: {formats}"
            raise DataError(
                f"{location}: no field {missing}; the record's fields: {field_names}; {self.remedy()}{hint}"
            )
        if unclear := self.ambiguity(record):
            raise DataError(f"{location}: {unclear}")
        form = self.format_of(record)
        if form is None:
            return self._add_system_message(
                to_document(record[self.text_field], self.text_field, location, short_location)
            )
        columns = self._column_names(form)
        renamed = {name: record[column] for name, column in columns.items() if column in record}
        return self._add_system_message(
            self._read(form, renamed, columns, location, short_location)._replace(format_name=form)
        )

    def _read(
        self, form: str, record: Record, columns: Mapping[str, str], location: str, short_location: str
    ) -> Document:
        if form == "preference":
            record = {name: self._messages(value, columns[name], location) for name, value in record.items()}
            return read_preference(record, columns, location, short_location)
        record_format = FORMATS[form]
        if record_format.read is None:
            name = columns[record_format.fields[0]]
            value = self._messages(record[record_format.fields[0]], name, location)
            document = to_document(value, name, location, short_location)
            if (
                self.format_name
                and value
                and record_format.content_type
                and not isinstance(document.content, record_format.content_type)
            ):
                kind = "messages {role, content}" if record_format.content_type is Chat else "segments {text, label}"
                problem = f"holds {type(value).__name__}, not a list of {kind}"
                raise DataError(f"{location}: field {name!r} of format {form} {problem}; {REMEDY}")
            return document
        for name, value in record.items():
            if not isinstance(value, str) and (name in record_format.fields or value is not None):
                kind = "nothing (null)" if value is None else type(value).__name__
                raise DataError(
                    f"{location}: field {columns[name]!r} of format {form} holds {kind}, not text; {REMEDY}"
                )
        return Document(record_format.read(record, self.prompt), short_location)

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

    def _add_system_message(self, document: Document) -> Document:
        content = document.content
        if self.system is None:
            return document
        if isinstance(content, Pair):
            return document._replace(content=Pair(*(self._add_system_message(answer) for answer in content)))
        if isinstance(content, Chat) and all(message["role"] != "system" for message in content.messages):
            message = {"role": "system", "content": self.system}
            return document._replace(content=content._replace(messages=[message, *content.messages]))
        return document

    def question_document(self, form: str, text: str) -> Document:
        """Return the prompt of a record of this format with the given question, without an answer."""
        record_format = FORMATS[form]
        assert record_format.read is not None and record_format.question_field
        *prompt, _ = record_format.read(
            dict.fromkeys(record_format.fields, "") | {record_format.question_field: text}, self.prompt
        )
        return Document(prompt, "the question")


def record_reader(source: Any, system: str | None, refuse_ambiguous: bool, pairs: bool) -> RecordReader:
    """Return the RecordReader of one of a job's sources, with these of its options.

    Raises LimitError, which names the options in short form."""
    return RecordReader(
        source.text_field, source.format, source.fields, source.template, system, refuse_ambiguous, pairs
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
        return Document(
            LabelledTexts(texts, self._class_of(row, location), self.end_tokens), short_location, has_begin_end=True
        )

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
