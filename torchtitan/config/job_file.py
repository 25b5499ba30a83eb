"""Write chosen options as a job's file, with comments: for programs that translate jobs."""

from dataclasses import dataclass, field
from typing import Any

import tomli_w

from torchtitan.config.layers import Values, nest
from torchtitan.config.options import options


@dataclass
class Comments:
    """The comments of a file: at its head, and above or next to a section or option (by today's name)."""

    head: list[str] = field(default_factory=list)
    above: dict[str, list[str]] = field(default_factory=dict)
    inline: dict[str, str] = field(default_factory=dict)

    def without_option(self, translated: set[str]) -> list[str]:
        """Return the comments of options that were not translated, each followed by the option's name."""
        lines = [
            f"{line}  [{name}]"
            for name, lines in self.above.items()
            if name not in translated
            for line in lines
            if name
        ]
        return lines + [f"{line}  [{name}]" for name, line in self.inline.items() if name not in translated]


def _is_table(value: Any) -> bool:
    """Return True for a table or a list with tables."""
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def as_file(head: list[str], values: Values, comments: Comments | None = None) -> str:
    """Format options by section in their usual order, with `head` above them and comments where they were."""
    comments = comments or Comments()
    ordered = {key: values[key] for key in options() if key in values}
    sections = dict.fromkeys(key.rpartition(".")[0] for key in ordered)
    lines = [*comments.head, *(f"# {line}" for line in head), *comments.without_option({*ordered, *sections})]
    for section in sections:
        comment = comments.inline.get(section, "")
        lines += ["", *comments.above.get(section, []), f"[{section}]  {comment}".rstrip()]
        of_section = {key: value for key, value in ordered.items() if key.rpartition(".")[0] == section}
        for key, value in sorted(of_section.items(), key=lambda pair: _is_table(pair[1])):
            lines += comments.above.get(key, [])
            if _is_table(value):  # a separate table, after the plain values
                lines += _tables(key, value)
            else:
                text = tomli_w.dumps({key.rpartition(".")[2]: value}).rstrip()
                lines += [f"{text}  {comments.inline.get(key, '')}".rstrip()]
    return "\n".join([*lines, *comments.above.get("", [])])


def _tables(key: str, value: Any) -> list[str]:
    """Format a table, or a list of tables with a header each.

    As one line of its section the list would need that section open, and another table may have ended it.
    """
    if isinstance(value, dict):
        return ["", tomli_w.dumps(nest({key: value})).rstrip()]
    texts = (tomli_w.dumps(nest({key: item})).rstrip().removeprefix(f"[{key}]\n") for item in value)
    return [line for text in texts for line in ("", f"[[{key}]]", text)]
