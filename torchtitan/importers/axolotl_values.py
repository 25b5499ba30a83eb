"""Read the values of an Axolotl file, overridden by command-line flags, and check each against its option's type."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtitan.config.options import hint
from torchtitan.importers import yaml_file
from torchtitan.importers.axolotl_options import FATES, OF_AN_ENTRY, TABLE_OF_DATA, Fate
from torchtitan.importers.command_line import CommandLine
from torchtitan.importers.translation import Meaning, is_finite

UNSET = ("", "None", "none", "NA", "null")
"""Spellings of an unset value in flags."""
AUTO = "auto"
WORDS = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


def _float(value: Any) -> float | None:
    """Parse a finite float. Also accepts 2e-5, which YAML reads as text because it has no decimal point."""
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
    """Parse a boolean in any spelling; return any other text unchanged."""
    flag = _bool(value)
    return value if flag is None and isinstance(value, str) else flag


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None


def _word(value: Any) -> str | None:
    """Parse a word that YAML may read as a boolean: `save_strategy: no` is false."""
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
    """The options that are set, by name; None for all others.

    Options that translate directly, are only noted or are refused are recorded in `meaning` at once.
    """

    def __init__(self, line: CommandLine, meaning: Meaning) -> None:
        self._meaning, self._values = meaning, dict[str, Any]()
        raw_values = yaml_file.read(line.config or "")
        # flags override the file; a flag without a value is true
        raw_values |= {name: True if text is None else yaml_file.scalar(text) for name, text in line.flags}
        for name, value in raw_values.items():
            if value is None or (isinstance(value, str) and value in UNSET):
                continue
            fate = FATES.get(name)
            if fate is None:
                self._unknown(name, value)
            elif value is False and fate.kind == "text":
                continue  # Axolotl reads false as unset here
            elif (parsed_value := KINDS[fate.kind][1](value)) is not None:
                self._take(name, parsed_value, fate)
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
        """Return the value, or Axolotl's default if it is unset."""
        return self._values.get(name, default)


PROMPT = {"format": "{instruction} {input} ", "no_input_format": "{instruction} ", "system_format": "{system}"}
PROMPT |= {"system_prompt": ""}
"""Parts of a custom prompt, with Axolotl's defaults."""


def entry_of(raw_entry: Any, name: str, meaning: Meaning) -> Mapping[str, Any] | None:
    """Return a dataset entry without its unset keys, or None if it is not a valid entry.

    A table as the entry's type is a custom prompt.
    """
    if isinstance(raw_entry, str):
        raw_entry = {"path": raw_entry}
    if not isinstance(raw_entry, dict) or not isinstance(raw_entry.get("path"), str):
        meaning.refuse(name, raw_entry, "tables that have a path")
        return None
    nested = raw_entry.get("type")
    tables = (PROMPT, {**raw_entry, "type": None}, nested) if isinstance(nested, dict) else (raw_entry,)
    return {key: value for table in tables for key, value in table.items() if value is not None and value not in UNSET}
