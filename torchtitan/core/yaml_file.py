"""Read another program's YAML file as data: plain values, of bounded size, without duplicate keys."""

from pathlib import Path
from typing import Any

import yaml

from torchtitan.core.errors import JobError
from torchtitan.core.files import read_file

LARGEST = 2**20
"""Maximum size in bytes. An options file has a few thousand."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, and aliases, which let a short file expand without limit."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, f"an alias (*{event.anchor}); write out its value", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = set()
        for key, _ in node.value:
            if key.value in keys and isinstance(key.value, str):
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} twice", key.start_mark)
            keys.add(key.value if isinstance(key.value, str) else id(key))
        return super().construct_mapping(node, deep)


def read(path: str | Path) -> dict[str, Any]:
    """Return the table in a YAML file: plain values. Raises JobError, naming the file, for anything else."""
    path = Path(path).expanduser()
    text = read_file(path, LARGEST)
    try:
        table = _load(text)
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        error_text = " ".join(str(error).split())[:300] or type(error).__name__
        raise JobError(f"{path}: not valid YAML: {error_text}") from None
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise JobError(f"{path}: not a table; write a line `name: value` for each entry")
    return table


def parse_value(text: str) -> Any:
    """Parse a flag's value as YAML. Raises JobError if it is invalid."""
    try:
        return _load(text.encode())
    except (yaml.YAMLError, ValueError, RecursionError):
        raise JobError(f"{text[:100]!r}: not a YAML value; quote it") from None


def _load(text: bytes) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
