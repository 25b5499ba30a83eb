"""Print Markdown tables of the feature combinations that tests/combinations*.py compare with one device.

With --write it writes the matrix between the `matrix` marks of docs/combinations.md, and the pairs of parallelisms
between the marks of docs/features.md.
"""

import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.plans.combinations import METHODS, SCHEDULES, Combination, table  # noqa: E402
from tests.plans.combinations_optimizers import optimizers  # noqa: E402

ROWS = table() + optimizers()
BEGIN, END = "<!-- matrix -->", "<!-- /matrix -->"
PAGE, FEATURES = ROOT / "docs/combinations.md", ROOT / "docs/features.md"
AXES = {"pp": "PP", "cp": "CP", "tp": "TP"}
LAYOUT = ("ranks", "dp_replicate", "dp_shard", *AXES)
"""Fields that make a row; every other field of a combination is a column."""
TITLES = {
    "ep": "expert parallel",
    "overlap": "EP overlap",
    "microbatch_size": "one sample a microbatch",
    "method": "CP method",
    "balance": "without balance",
    "sequence_parallel": "without sequence parallel",
    "loss_parallel": "without loss parallel",
    "loss_chunks": "loss in pieces",
    "reshard": "gathered weights kept",
    "cpu_offload": "CPU offload",
    "gather_int8": "int8 gathers",
    "reduce_bits": "int8 or int4 reductions",
    "noise": "noise on embeddings",
    "rope": "rotary scaling",
    "groups": "attention in groups",
    "qat": "quantization-aware training",
}
WORDS = {"2": "every 2nd", "memory_budget": "budget", "no": "none"}
ONLY_WITH = {"method": "cp", "balance": "cp", "sequence_parallel": "tp", "loss_parallel": "tp", "schedule": "pp"}
ALL = {"method": METHODS, "schedule": SCHEDULES}


def layout_of(row: Combination) -> str:
    data = {(False, False): [], (True, False): ["DDP"], (False, True): ["FSDP"], (True, True): ["HSDP"]}
    names = [AXES[axis] for axis in ("pp",) if row.pp > 1] + data[row.dp_replicate > 1, row.dp_shard > 1]
    return " x ".join(names + [AXES[axis] for axis in ("cp", "tp") if getattr(row, axis) > 1]) or "one rank"


def cell(rows: Iterable[Combination], column: str, default: object) -> str:
    """Return the values of a text option that occur, or a check mark if another option is on."""
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
        layout_rows = [row for row in rows if layout_of(row) == layout]
        sizes = ", ".join(str(n) for n in sorted({row.ranks for row in layout_rows}) if n > 1)
        name = f"{layout} ({sizes} ranks)" if sizes else layout
        lines.append([name, *(cell(layout_rows, column.name, column.default) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pairs(rows: list[Combination]) -> str:
    """Return the table of parallelisms that are tested together, with the largest number of ranks."""
    on = {
        "FSDP": lambda row: row.dp_shard > 1,
        "DDP": lambda row: row.dp_replicate > 1,
        **{name: lambda row, axis=axis: getattr(row, axis) > 1 for axis, name in AXES.items()},
        "EP": lambda row: row.ep > 1,
    }
    lines = [["", *on], ["---"] * (len(on) + 1)]
    for a, has_a in on.items():
        cells = []
        for b, has_b in on.items():
            ranks = [row.ranks for row in rows if has_a(row) and has_b(row)]
            cells.append(f"{max(ranks)} ranks" if ranks and a != b else "")
        lines.append([a, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def written_into(text: str, block: str) -> str:
    """Return the text with the block between its marks. Raises ValueError if a mark is missing."""
    head, begin, after_begin = text.partition(BEGIN)
    _, end, tail = after_begin.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}, between which the table goes")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


if __name__ == "__main__":
    tables = {PAGE: matrix(ROWS), FEATURES: pairs(ROWS)}
    for page, content in tables.items():
        if "--write" in sys.argv[1:]:
            page.write_text(written_into(page.read_text(), content))
        else:
            print(content, end="\n\n")
