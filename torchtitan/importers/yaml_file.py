"""A YAML file that another program reads, as data: plain values, of bounded size, and nothing twice."""

from pathlib import Path
from typing import Any

import yaml

from torchtitan.core.errors import JobError
from torchtitan.core.files import read_file

LARGEST = 2**20
"""Bytes. A job of any program is a few thousand."""


class _Loader(yaml.SafeLoader):
    """Without aliases, by which a short file stands for endless values, and with each key once."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, f"an alias (*{event.anchor}); write out what it stands for", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key.value, str):
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} twice", key.start_mark)
            seen.add(key.value if isinstance(key.value, str) else id(key))
        return super().construct_mapping(node, deep)


def read(path: str | Path) -> dict[str, Any]:
    """The table that a file holds. JobError, which names it, for anything else."""
    path = Path(path).expanduser()
    text = read_file(path, LARGEST)
    try:
        found = _value(text)
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise JobError(f"{path}: no YAML that is read: {said}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise JobError(f"{path}: holds no table; a job has a line `name: value` for each option")
    return found


def scalar(text: str) -> Any:
    """A flag's value as a file would have it. JobError."""
    try:
        return _value(text.encode())
    except (yaml.YAMLError, ValueError, RecursionError):
        raise JobError(f"{text[:100]!r}: no value that YAML has; quote it") from None


def _value(text: bytes) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
