"""How the records of a source are read: by one field, by a format that their fields tell, or by one that the job names,
with the names that its fields have there.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.core.constraints import LimitError
from torchtitan.datasets.formats import ALPACA, FORMATS, MESSAGE, Format, Prompt, Record, format_of, preference
from torchtitan.datasets.records import document_of
from torchtitan.datasets.sources import REMEDY, Chat, DataError, Document, Pair

PAIRS = "preference"


@dataclass(frozen=True)
class Reading:
    """`form`: the format by name; None: a record that has `text_field` is read by that alone, any other by the first
    format whose fields it has. `fields`: what a format's fields are called in the records, where that differs; also
    role and content, inside messages. `template`: what is said of the prompt of instruct records. `system`: what the
    system says in conversations in which it says nothing. `whole`: records are learned from, one by one, so that one
    which has the field `text` and those of a format has to be said to be of the one or the other. `pairs`: all of them
    are pairs of answers.
    """

    text_field: str = "text"
    form: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    template: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    whole: bool = False
    pairs: bool = False
    prompt: Prompt = field(init=False, default=ALPACA)

    def __post_init__(self) -> None:
        """LimitError for what is not known, or would do nothing."""
        if self.form is None and self.template and not self.pairs:
            object.__setattr__(self, "form", "alpaca")
        if self.form is not None and self.form not in FORMATS:
            raise LimitError("training.format", repr(self.form), f"one of {', '.join(FORMATS)}", "correct it")
        if self.pairs and self.form not in (None, PAIRS):
            allowed = f"{PAIRS}, or unset, as pairs of answers are learned"
            raise LimitError("training.format", repr(self.form), allowed, "drop it, or choose another task.kind")
        known = FORMATS.get(self._asked or "", Format(()))
        for name in self.fields:
            if name not in (*known.fields, *known.more):
                allowed = f"fields of format {self._asked}: {', '.join((*known.fields, *known.more))}"
                allowed = allowed if self._asked else "unset without training.format"
                raise LimitError("training.fields", repr(name), allowed, "correct it, or drop it")
        for name in self.template:
            if known.parts == ("separator",) and name in Prompt.__annotations__ and name not in known.parts:
                allowed = f"separator alone with format {self.form}, whose prompt is in the record"
                raise LimitError("training.template", repr(name), allowed, 'drop it, or set format = "alpaca"')
            if not known.parts:
                allowed = f"unset with format {self._asked}, which has no prompt of its own"
                raise LimitError("training.template", repr(name), allowed, "drop it")
        object.__setattr__(self, "prompt", Prompt.of(self.template))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What documents depend on, JSON-able; of one field as it has always been."""
        said = {"format": self.form, "fields": dict(self.fields), "template": dict(self.template)}
        said |= {"default_system": self.system}
        return {"text_field": self.text_field} | {name: value for name, value in said.items() if value}

    @property
    def _asked(self) -> str | None:
        """The format of all records, where it is known."""
        return PAIRS if self.pairs else self.form

    def form_of(self, fields: Collection[str]) -> str | None:
        """Of a record with such fields; None: it has none of a known form, or it is read by its text field."""
        return self._asked or (None if self.text_field in fields else format_of(fields))

    def unclear(self, fields: Collection[str]) -> str:
        """Why such a record might be read in two ways, in words that end in a remedy; empty where it is clear. Sets of
        instructions often have the whole text of a record beside its parts, and all of it would be trained; and what
        their system says has no place in Stanford Alpaca's prompt."""
        form = format_of(fields)
        if not self.whole or self._asked or self.text_field != "text" or form is None:
            return ""
        if "text" in fields:
            parts = " and ".join(map(repr, FORMATS[form].fields))
            learned = (
                "learn it with task.kind dpo, ipo or orpo" if form == PAIRS else f'set training.format to "{form}"'
            )
            remedy = f'{learned}, or set training.format to "completion", which trains all of the text'
            return f"has the field 'text' and, of format {form}, {parts}; {remedy}"
        if form == "alpaca" and "system" in fields:
            remedy = (
                'set training.format to "alpaca", which leaves it out, and to have it said ahead of the prompt also '
            )
            remedy += 'training.fields to { system = "system" }'
            return f"has the field 'system', which the prompt of format alpaca has no place for; {remedy}"
        return ""

    def lacks(self, fields: Collection[str]) -> str:
        """What a record with such fields has not, in words; empty where it can be read."""
        form = self.form_of(fields)
        if form is None:
            return "" if self.text_field in fields else repr(self.text_field)
        gone = [column for column in self._needed(form) if column not in fields]
        return f"{gone[0]!r}, which format {form} needs" if gone else ""

    def remedy(self) -> str:
        if self.pairs:
            return "set training.fields, or choose another task.kind"
        return "set training.fields" if self.form else "set training.text_field"

    def columns(self, fields: Collection[str]) -> list[str]:
        """Of a table that lacks nothing, those that its records are made of."""
        form = self.form_of(fields)
        return [self.text_field] if form is None else [c for c in self._columns(form).values() if c in fields]

    def _columns(self, form: str) -> dict[str, str]:
        """The record's name for each of a format's fields. What the system says is read where a prompt is given, or
        its field is."""
        known = FORMATS[form]
        names = [name for name in (*known.fields, *known.more) if name not in MESSAGE]
        names = [name for name in names if name != "system" or self.template or "system" in self.fields]
        return {name: self.fields.get(name, name) for name in names}

    def _needed(self, form: str) -> list[str]:
        """What is called by name has to be there, too."""
        columns = self._columns(form)
        return [column for name, column in columns.items() if name in FORMATS[form].fields or name in self.fields]

    def document(self, record: Record, place: str, short_place: str) -> Document:
        """Raises DataError, which names `place`, for a record that cannot be read so."""
        if lack := self.lacks(record):
            there = ", ".join(map(repr, list(record)[:20])) or "none"
            formats = ", ".join(
                f"{name} ({' and '.join(known.fields)})" for name, known in FORMATS.items() if known.by_fields
            )
            more = "" if self._asked else f", or give records of a known format: {formats}"
            raise DataError(f"{place}: no field {lack}; the fields there are: {there}; {self.remedy()}{more}")
        if unclear := self.unclear(record):
            raise DataError(f"{place}: {unclear}")
        form = self.form_of(record)
        if form is None:
            return self._with_system(document_of(record[self.text_field], self.text_field, place, short_place))
        columns = self._columns(form)
        named = {name: record[column] for name, column in columns.items() if column in record}
        return self._with_system(self._read(form, named, columns, place, short_place)._replace(form=form))

    def _read(self, form: str, record: Record, columns: Mapping[str, str], place: str, short_place: str) -> Document:
        if form == "preference":
            record = {name: self._messages(value, columns[name], place) for name, value in record.items()}
            return preference(record, columns, place, short_place)
        known = FORMATS[form]
        if known.read is None:
            name = columns[known.fields[0]]
            value = self._messages(record[known.fields[0]], name, place)
            document = document_of(value, name, place, short_place)
            if self.form and value and known.holds and not isinstance(document.content, known.holds):
                kind = "messages {role, content}" if known.holds is Chat else "segments {text, label}"
                what = f"holds {type(value).__name__}, not a list of {kind}"
                raise DataError(f"{place}: field {name!r} of format {form} {what}; {REMEDY}")
            return document
        for name, value in record.items():
            if not isinstance(value, str) and (name in known.fields or value is not None):
                kind = "nothing (null)" if value is None else type(value).__name__
                raise DataError(f"{place}: field {columns[name]!r} of format {form} holds {kind}, not text; {REMEDY}")
        return Document(known.read(record, self.prompt), short_place)

    def _messages(self, value: Any, column: str, place: str) -> Any:
        """With role and content under these names, if the job has others for them."""
        names = {name: self.fields[name] for name in MESSAGE if name in self.fields}
        if not names or not isinstance(value, list):
            return value
        found = []
        for number, message in enumerate(value):
            for name in names.values():
                if not isinstance(message, dict) or name not in message:
                    there = ", ".join(map(repr, list(message)[:20])) if isinstance(message, dict) else "none"
                    raise DataError(
                        f"{place}: message {number} of field {column!r} has no {name!r}; there are: {there or 'none'}; "
                        f"set training.fields, or {REMEDY}"
                    )
            others = {key: inner for key, inner in message.items() if key not in names.values()}
            found.append(others | {name: message[given] for name, given in names.items()})
        return found

    def _with_system(self, document: Document) -> Document:
        content = document.content
        if self.system is None:
            return document
        if isinstance(content, Pair):
            return document._replace(content=Pair(*(self._with_system(answer) for answer in content)))
        if isinstance(content, Chat) and all(message["role"] != "system" for message in content.messages):
            said = {"role": "system", "content": self.system}
            return document._replace(content=Chat([said, *content.messages]))
        return document

    def question(self, form: str, text: str) -> Document:
        """What a model that has learned records of a format is asked with: one without its answer."""
        known = FORMATS[form]
        assert known.read is not None and known.asked
        *prompt, _ = known.read(dict.fromkeys(known.fields, "") | {known.asked: text}, self.prompt)
        return Document(prompt, "the question")


def reading_of(source: Any, system: str | None, whole: bool, pairs: bool) -> Reading:
    """Of one of a job's sources. LimitError, in words of the job's short form."""
    return Reading(source.text_field, source.format, source.fields, source.template, system, whole, pairs)
