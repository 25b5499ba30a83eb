"""Records of several fields, as fine-tuning data have them: which fields tell a format, and what of them is trained.

Adding a format: a function from a record to spans, and a line in FORMATS. A record that has the job's text_field is
read by that field alone; of any other, the first format whose fields it has.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torchtitan.datasets.records import document_of
from torchtitan.datasets.sources import REMEDY, DataError, Document, Pair, Span

Record = dict[str, Any]

ALPACA = (
    "Below is an instruction that describes a task{and_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Stanford's alpaca data."""


class Format(NamedTuple):
    fields: tuple[str, ...]
    """That a record of it has."""
    read: Callable[[Record], list[Span]] | None = None
    """None: the first field says all, as document_of reads it."""
    asked: str = ""
    """The field that holds a question, where a model can be asked in this form."""


def prompt_completion(record: Record) -> list[Span]:
    return [Span(record["prompt"], False), Span(record["completion"])]


def alpaca(record: Record) -> list[Span]:
    given = record.get("input") or ""
    prompt = ALPACA.format(
        and_input=", paired with an input that provides further context" if given else "",
        instruction=record["instruction"],
        input=f"### Input:\n{given}\n\n" if given else "",
    )
    return [Span(prompt, False), Span(record["output"])]


def preference(record: Record, place: str, short_place: str) -> Document:
    """Two answers: texts behind the prompt, or messages behind those of prompt or messages, perhaps repeated in both.
    Raises DataError, which names `place`."""
    before: Any = record.get("messages", record.get("prompt"))
    answers = [record[name] for name in ("chosen", "rejected")]
    if all(isinstance(answer, str) for answer in answers) and isinstance(before, str):
        pair = [Document([Span(before, False), Span(answer)], short_place) for answer in answers]
        return Document(Pair(*pair), short_place)
    said = [{"role": "user", "content": before}] if isinstance(before, str) else before or []
    pair = []
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if not isinstance(said, list) or not isinstance(turns, list) or not turns:
            kind = "nothing (null)" if answer is None else type(answer).__name__
            raise DataError(
                f"{place}: field {name!r} holds {kind}, beside {type(before).__name__} as prompt; allowed: text behind "
                f"a prompt or messages, or messages; {REMEDY}"
            )
        whole = turns if turns[: len(said)] == said else [*said, *turns]
        pair.append(document_of(whole, name, place, short_place))
    return Document(Pair(*pair), short_place)


FORMATS: dict[str, Format] = {
    "preference": Format(("chosen", "rejected")),
    "chat": Format(("messages",)),
    "sharegpt": Format(("conversations",)),
    "input_output": Format(("segments",)),
    "prompt_completion": Format(("prompt", "completion"), prompt_completion, "prompt"),
    "alpaca": Format(("instruction", "output"), alpaca, "instruction"),
}


def format_of(fields: Collection[str]) -> str | None:
    """The first of FORMATS whose fields are all there."""
    return next((name for name, known in FORMATS.items() if all(field in fields for field in known.fields)), None)


def question(name: str, text: str) -> Document:
    """What a model that has learned records of a format is asked with: one without its answer."""
    fields, read, asked = FORMATS[name]
    assert read is not None and asked
    *prompt, _ = read(dict.fromkeys(fields, "") | {asked: text})
    return Document(prompt, "the question")


def document_of_record(record: Record, field: str, place: str, short_place: str) -> Document:
    """By its field, or else by its format. Raises DataError, which names `place`, for a record that has neither."""
    if field in record:
        return document_of(record[field], field, place, short_place)
    name = format_of(record)
    if name is None:
        there = ", ".join(map(repr, list(record)[:20])) or "none"
        formats = ", ".join(f"{known} ({' and '.join(FORMATS[known].fields)})" for known in FORMATS)
        raise DataError(
            f"{place}: no field {field!r}; the fields there are: {there}; set training.text_field, or give records of "
            f"a known format: {formats}"
        )
    fields, read, _ = FORMATS[name]
    if name == "preference":
        return preference(record, place, short_place)._replace(form=name)
    if read is None:
        return document_of(record[fields[0]], fields[0], place, short_place)._replace(form=name)
    for key in (*fields, "input"):
        value = record.get(key)
        if not isinstance(value, str) and (key in fields or value is not None):
            kind = "nothing (null)" if value is None else type(value).__name__
            raise DataError(f"{place}: field {key!r} of format {name} holds {kind}, not text; {REMEDY}")
    return Document(read(record), short_place, form=name)
