"""What stands before the answer of an instruct record, by a prompt of one's own or by Stanford Alpaca's.

Places are filled by plain replacement, all at once: what a record says is never read as a place, or as a format.

Records of several fields, as fine-tuning data have them: which fields tell a format, and what of them is trained.

Adding a format: a function from a record to spans, and a line in FORMATS. How a source's records are read, by one of
these or by a single field, says record_format.py.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torchtitan.core.constraints import LimitError
from torchtitan.datasets.records import document_of, role_of
from torchtitan.datasets.sources import REMEDY, Chat, DataError, Document, Pair, Span

PLACES = ("instruction", "input", "system")
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Prompt:
    """`format` and, for records without an input, `no_input_format`: with the places {instruction}, {input} and
    {system}. `system_format`: what stands before them where something is said as system and they have no place for it;
    `system_prompt` is said where a record says nothing. `separator`: between prompt and answer.
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
    def of(cls, template: Mapping[str, str]) -> "Prompt":
        """What is not said is Alpaca's; a format alone is also that of records without an input. LimitError for a part
        that is not known, a place that nothing fills, or one that is missing."""
        parts = [part.name for part in fields(cls)]
        for name, text in template.items():
            key, said = "training.template", f"{name} = {text!r}"
            if name not in parts:
                raise LimitError(key, said, f"parts that are known: {', '.join(parts)}", "correct its name")
            wanted = {"format": "instruction", "no_input_format": "instruction", "system_format": "system"}.get(name)
            places = _PLACE.findall(text) if wanted else []
            if wanted and (wanted not in places or set(places) - set(PLACES)):
                known = ", ".join(f"{{{place}}}" for place in PLACES)
                raise LimitError(key, said, f"text with {{{wanted}}}; places are {known}", "correct them")
        if "format" in template:
            template = {"no_input_format": template["format"]} | dict(template)
        return replace(cls(), **template)

    def text(self, instruction: str, given: str, system: str) -> str:
        """`given`: the input; empty where there is none, as `system` is."""
        values = {"instruction": instruction, "input": given, "system": system or self.system_prompt}
        body = self.format if given else self.no_input_format
        head = self.system_format if values["system"] and "{system}" not in body else ""
        return _PLACE.sub(lambda place: values[place[1]], head + body) + self.separator


ALPACA = Prompt()


Record = Mapping[str, Any]
MESSAGE = ("role", "content")
"""Names inside messages."""


class Format(NamedTuple):
    fields: tuple[str, ...]
    """That a record of it has."""
    read: Callable[[Record, Prompt], list[Span]] | None = None
    """None: the first field says all, as document_of reads it."""
    asked: str = ""
    """The field that holds a question, where a model can be asked in this form."""
    more: tuple[str, ...] = ()
    """Fields that it may have."""
    holds: type | None = None
    """What the content of its documents is, for one that is asked for by name."""
    parts: tuple[str, ...] = ()
    """Of a prompt, those that it is read by."""
    by_fields: bool = True
    """Whether its fields tell it."""


def prompt_completion(record: Record, prompt: Prompt) -> list[Span]:
    return [Span(record["prompt"] + prompt.separator, False), Span(record["completion"])]


def alpaca(record: Record, prompt: Prompt) -> list[Span]:
    text = prompt.text(record["instruction"], record.get("input") or "", record.get("system") or "")
    return [Span(text, False), Span(record["output"])]


def preference(record: Record, columns: Mapping[str, str], place: str, short_place: str) -> Document:
    """Two answers: texts behind the prompt, or messages behind those of prompt or messages, perhaps repeated in both.
    Raises DataError, which names `place`."""
    answers = {name: record[name] for name in ("chosen", "rejected")}
    befores = [record[name] for name in ("messages", "prompt") if record.get(name) not in (None, "")]
    if befores and all(isinstance(each, str) for each in (befores[0], *answers.values())):
        prompt, texts = befores[0], list(answers.values())
        if all(text.startswith(prompt) and text != prompt for text in texts):  # it would be read twice
            texts = [text.removeprefix(prompt) for text in texts]
        pair = [Document([Span(prompt, False), Span(text)], short_place) for text in texts]
        return Document(Pair(*pair), short_place)
    for name, answer in answers.items():
        is_text = isinstance(answer, str) and bool(befores)
        if not (is_text or isinstance(answer, list) and answer) or not all(isinstance(b, str | list) for b in befores):
            kind = "nothing (null)" if answer is None else type(answer).__name__
            beside = " and ".join(type(before).__name__ for before in befores) or "nothing"
            raise DataError(
                f"{place}: field {columns[name]!r} holds {kind}, beside {beside} as prompt; allowed: text behind a "
                f"prompt or messages, or messages; {REMEDY}"
            )
    turns = [_turns(answer, "assistant") for answer in answers.values()]
    for before in [*(_turns(before, "user") for before in befores), []]:
        if _repeated(before, turns):
            wholes = turns
        elif _followed(before, turns):
            wholes = [[*before, *each] for each in turns]
        else:
            continue  # as where the preferred conversation stands in messages, beside its prompt
        pair = [
            document_of(each, columns[name], place, short_place) for name, each in zip(answers, wholes, strict=True)
        ]
        return Document(Pair(*pair), short_place)
    raise DataError(
        f"{place}: fields {columns['chosen']!r} and {columns['rejected']!r} are not both answers to the same messages; "
        f"allowed: both repeat those of prompt or messages, both go on from them, or both begin alike; {REMEDY}"
    )


def _turns(value: str | list[Any], role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _speaker(message: Any) -> Any:
    return role_of(message.get("role", message.get("from"))) if isinstance(message, dict) else None


def _repeated(before: list[Any], turns: list[list[Any]]) -> bool:
    """Whether both conversations begin with these messages, perhaps behind what the system says, and go on; without
    any, whether they begin alike, and not with an answer."""
    if not before:
        return turns[0][0] == turns[1][0] and _speaker(turns[0][0]) != "assistant"
    if _speaker(before[0]) != "system":
        turns = [each[1:] if _speaker(each[0]) == "system" else each for each in turns]
    return all(each[: len(before)] == before and len(each) > len(before) for each in turns)


def _followed(before: list[Any], turns: list[list[Any]]) -> bool:
    """Whether both are what comes behind these messages: nobody speaks twice, and neither holds them, nor is held at
    their end, as the preferred conversation is behind what the system says."""
    return bool(before) and all(
        each[: len(before)] != before
        and before[-len(each) :] != each
        and _speaker(each[0]) not in ("system", _speaker(before[-1]))
        for each in turns
    )


FORMATS: dict[str, Format] = {
    "preference": Format(("chosen", "rejected"), more=("prompt", "messages", *MESSAGE)),
    "chat": Format(("messages",), more=MESSAGE, holds=Chat),
    "sharegpt": Format(("conversations",), more=MESSAGE, holds=Chat),
    "input_output": Format(("segments",), holds=list),
    "prompt_completion": Format(("prompt", "completion"), prompt_completion, "prompt", parts=("separator",)),
    "alpaca": Format(
        ("instruction", "output"), alpaca, "instruction", ("input", "system"), parts=tuple(Prompt.__annotations__)
    ),
    "completion": Format(("text",), by_fields=False),
}


def format_of(fields: Collection[str]) -> str | None:
    """The first of FORMATS whose fields are all there."""
    told = (name for name, known in FORMATS.items() if known.by_fields)
    return next((name for name in told if all(field in fields for field in FORMATS[name].fields)), None)
