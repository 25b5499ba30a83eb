"""The values of an Axolotl file under the flags that come behind it, and which of them are of their option's kind."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.config.options import hint
from torchtitan.importers import yaml_file
from torchtitan.importers.axolotl_options import FATES, OF_AN_ENTRY, TABLE_OF_DATA, Fate
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.translation import Meaning, is_finite

UNSET = ("", "None", "none", "NA", "null")
"""Words that stand for nothing, as flags have them."""
AUTO = "auto"
WORDS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def _float(value: Any) -> float | None:
    """Also of 2e-5, which YAML takes for text as it has no point."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if is_finite(number) else None


def _int(value: Any) -> int | None:
    number = _float(value)
    return int(number) if number is not None and abs(number) < 2**63 and number % 1 == 0 else None


def _bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return WORDS.get(str(value).lower()) if isinstance(value, (str, int)) else None


def _choice(value: Any) -> bool | str | None:
    """True or false, however spelt, or a word that says more."""
    said = _bool(value)
    return value if said is None and isinstance(value, str) else said


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None


def _word(value: Any) -> str | None:
    """Of what YAML reads as something else: `save_strategy: no` is false."""
    return ("yes" if value else "no") if isinstance(value, bool) else _text(value)


def _list(value: Any) -> list[Any] | None:
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        return [value]
    return value if isinstance(value, list) else None


def _words(value: Any) -> list[str] | None:
    listed = _list(value)
    return None if listed is None or any(not isinstance(item, str) for item in listed) else listed


KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bool": ("true or false", _bool),
    "int": ("a whole number", _int),
    "float": ("a finite number", _float),
    "choice": ("true or false", _choice),
    "text": ("text", _text),
    "word": ("text", _word),
    "list": ("a list", _list),
    "words": ("a list of texts", _words),
    "table": ("a table", lambda value: value if isinstance(value, dict) else None),
    "any": ("a value", lambda value: value),
}


class Values:
    """What is given, by name; None for all else. What is the same here, noted or refused is said to `meaning`
    at once.
    """

    def __init__(self, line: CommandLine, meaning: Meaning) -> None:
        self._meaning, self._values = meaning, dict[str, Any]()
        said = yaml_file.read(line.config or "")
        # the flags come last and count; of one that is a word alone, that it is there
        said |= {name: True if text is None else yaml_file.scalar(text) for name, text in line.flags}
        for name, value in said.items():
            if value is None or (isinstance(value, str) and value in UNSET):
                continue
            fate = FATES.get(name)
            if fate is None:
                self._unknown(name, value)
            elif value is False and fate.kind == "text":
                continue  # as Axolotl takes it: none
            elif (fitting := KINDS[fate.kind][1](value)) is not None:
                self._take(name, fitting, fate)
            elif value == AUTO:
                meaning.notes.append(f"{name}: auto, so that it is chosen here")
            else:
                meaning.refuse(name, value, KINDS[fate.kind][0])

    def _unknown(self, name: str, value: Any) -> None:
        if name in TABLE_OF_DATA or name in OF_AN_ENTRY:
            self._meaning.refuse(name, value, "in an entry of datasets, and not beside it")
        else:
            self._meaning.refuse(name, value, "an option that is known", hint(name, [*FATES, *TABLE_OF_DATA]))

    def _take(self, name: str, value: Any, fate: Fate) -> None:
        if fate.reason and value:
            self._meaning.refuse(name, value, "nothing", fate.reason)
        elif fate.note and value not in (None, False):
            self._meaning.notes.append(f"{name}: {fate.note}")
        elif fate.to and value != []:
            self._meaning.values[fate.to] = value
        self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        assert name in FATES, name
        return self._values.get(name)

    def of(self, name: str, default: Any) -> Any:
        """The value, or what Axolotl has without one."""
        return self._values.get(name, default)


PROMPT = {"format": "{instruction} {input} ", "no_input_format": "{instruction} ", "system_format": "{system}"}
PROMPT |= {"system_prompt": ""}
"""Parts of a prompt of one's own, and what Axolotl has where they are not said."""


def entry_of(given: Any, name: str, meaning: Meaning) -> Mapping[str, Any] | None:
    """One of datasets with what is unset left out, or None where it is none. A table as its type is a prompt of one's
    own, whatever it says."""
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, dict) or not isinstance(given.get("path"), str):
        meaning.refuse(name, given, "tables that have a path")
        return None
    nested = given.get("type")
    tables = (PROMPT, {**given, "type": None}, nested) if isinstance(nested, dict) else (given,)
    return {key: value for each in tables for key, value in each.items() if value is not None and value not in UNSET}
