"""What composes with what, as a Markdown table of the rows that tests/combinations.py holds equal to one device.

Prints it; with --write, puts it between the two `matrix` marks of README.md.
"""

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.combinations import METHODS, SCHEDULES, Combination, table  # noqa: E402

BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
AXES = {"pp": "PP", "cp": "CP", "tp": "TP"}
LAYOUT = ("ranks", "dp_replicate", "dp_shard", *AXES)
"""Fields that make a row; every other field of a combination is a column."""
TITLES = {
    "ep": "expert parallel",
    "overlap": "EP overlap",
    "method": "CP method",
    "balance": "without balance",
    "sequence_parallel": "without sequence parallel",
    "loss_parallel": "without loss parallel",
    "loss_chunks": "loss in pieces",
    "reshard": "gathered weights kept",
    "cpu_offload": "CPU offload",
}
WORDS = {"2": "every 2nd", "memory_budget": "budget", "no": "none"}
ONLY_WITH = {"method": "cp", "balance": "cp", "sequence_parallel": "tp", "loss_parallel": "tp", "schedule": "pp"}
ALL = {"method": METHODS, "schedule": SCHEDULES}


def layout_of(row: Combination) -> str:
    data = {(False, False): [], (True, False): ["DDP"], (False, True): ["FSDP"], (True, True): ["HSDP"]}
    names = [AXES[axis] for axis in ("pp",) if row.pp > 1] + data[row.dp_replicate > 1, row.dp_shard > 1]
    return " x ".join(names + [AXES[axis] for axis in ("cp", "tp") if getattr(row, axis) > 1]) or "one rank"


def cell(rows: Iterable[Combination], column: str, default: object) -> str:
    """Of an option with words for values, those that occur; of others, a mark where it is on."""
    rows = [row for row in rows if column not in ONLY_WITH or getattr(row, ONLY_WITH[column]) > 1]
    values = list(dict.fromkeys(getattr(row, column) for row in rows))
    if column in ALL and set(values) == set(ALL[column]):
        return f"all {len(values)}"
    if isinstance(default, str):
        return ", ".join(WORDS.get(value, value) for value in values)
    return "✓" * any(value != default for value in values)


def matrix(rows: list[Combination]) -> str:
    columns = [field for field in fields(Combination) if field.name not in LAYOUT]
    titles = [TITLES.get(column.name, column.name.replace("_", " ")) for column in columns]
    lines = [["", *titles], ["---"] * (len(columns) + 1)]
    for layout in dict.fromkeys(map(layout_of, rows)):
        own = [row for row in rows if layout_of(row) == layout]
        sizes = ", ".join(str(n) for n in sorted({row.ranks for row in own}) if n > 1)
        name = f"{layout} ({sizes} ranks)" if sizes else layout
        lines.append([name, *(cell(own, column.name, column.default) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written_into(text: str, block: str) -> str:
    """The text with the block between its marks. ValueError without both of them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN} and {END}, between which the table goes")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        readme = ROOT / "README.md"
        readme.write_text(written_into(readme.read_text(), matrix(table())))
    else:
        print(matrix(table()))
