"""Rules for the files of other programs: config.json, tokenizer_config.json, adapter_config.json and their like.

1. Every key is used, known to have no effect here, or refused by name (`DeclaredKeys`). A reader that ignored the keys
   it does not know would train another model than the file describes, and say nothing.
2. Sources of the same fact agree, or are refused (`agreed_value`). Preferring one of them is a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchtitan.core.errors import JobError

EMPTY_VALUES: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of features that are off."""


@dataclass(frozen=True)
class DeclaredKeys:
    """The keys of one kind of file.

    `used`: keys that the reader interprets, including those that it refuses itself with a better message. `harmless`:
    keys without effect here, whatever their value. `defaults`: the only value, besides null, at which a further key has
    no effect, because the other program assumes the same without it. All other keys with an empty value or a leading
    underscore have none either, unless the other program reads them: `read_when_private` names such keys with an
    underscore.
    """

    used: frozenset[str]
    harmless: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read_when_private: frozenset[str] = frozenset()

    def unknown(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys, with their values, that would be ignored although they may have an effect."""
        return {key: value for key, value in content.items() if not self._has_no_effect(key, value)}

    def _has_no_effect(self, key: str, value: Any) -> bool:
        if key in self.used or key in self.harmless:
            return True
        if key in self.defaults:  # before the empty values: false is not the default of a feature that is on
            return value is None or bool(self.defaults[key] == value)
        return value in EMPTY_VALUES or (key.startswith("_") and key not in self.read_when_private)

    def check(self, content: Mapping[str, Any], file: str, remedy: str) -> None:
        """Raise JobError, which begins with `file` and ends with `remedy`, if a key would be ignored."""
        if unknown := self.unknown(content):
            keys = ", ".join(f"{key} = {_shorten(value)}" for key, value in unknown.items())
            is_one = len(unknown) == 1
            raise JobError(
                f"{file} has {'a key' if is_one else 'keys'} that this program does not know, and that may change "
                f"the result: {keys}; {remedy}"
            )


def agreed_value(fact: str, sources: Mapping[str, Any], remedy: str) -> Any:
    """Return the value that the sources of a fact agree on; None if none of them has it.

    `sources`: name of the source, for example "config.json's eos_token_id" -> its value, None if it has none. Raises
    JobError, which names two sources that differ and ends with `remedy`.
    """
    present = {name: value for name, value in sources.items() if value is not None}
    if not present:
        return None
    (first_name, first), *remaining = present.items()
    for name, value in remaining:
        if value != first:
            raise JobError(
                f"{fact}: {first_name} is {_shorten(first)}, but {name} is {_shorten(value)}; they must be equal; "
                f"{remedy}"
            )
    return first


def _shorten(value: Any, longest: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."
