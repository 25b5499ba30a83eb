"""`torchtitan contract PACKAGE`: hold what a package brings against one device, under every plan.

Loss and all gradients are compared in float64 on gloo ranks of this machine; for an optimizer, the weights after three
steps. Exit code 0 if everything holds, 1 if not.
"""

import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.commands.command_lines import parse_command
from torchtitan.config.options import hint
from torchtitan.contract import checks
from torchtitan.contract.checks import differences, resume_difference
from torchtitan.contract.items import PLANS, Item, Row, items_of, rows_of, with_options
from torchtitan.core.errors import JobError
from torchtitan.process.gloo_ranks import Hang, RankError, run_on_ranks

HOLDS, FAILS, LEFT_OUT = "holds", "FAILS", "left out"
TOLERANCE = {"optimizer": 1e-5}
"""Largest difference, of a weight's largest change; else of a gradient's largest entry."""
EXACT = 1e-9
ON_ONE_RANK = {"export": checks.export, "merge": checks.merge, "count": checks.count}


def main(argv: list[str]) -> int:
    options, _ = parse_command("contract", argv)
    items = items_of(options.package)
    if options.only is not None:
        names = [str(item) for item in items]
        if options.only not in names:
            near = hint(options.only, names)
            raise JobError(
                "; ".join(filter(None, (f"--only: given {options.only}; allowed: {', '.join(names)}", near)))
            )
        items = [item for item in items if str(item) == options.only]
    for item in items:
        item.check()
        fewest = min(row.ranks for row in rows_of(item))
        if fewest > options.ranks:
            raise JobError(f"--ranks {options.ranks}: no row of {item} has that few ranks; the smallest needs {fewest}")
    if options.options:
        items = [with_options(items, options.options)]
    rows = [row for item in items for row in rows_of(item)]
    if options.list:
        rows = [row for row in rows if row.ranks <= options.ranks]
        print(*(f"{row.item}  {row.name}  ({row.ranks} rank{'s' * (row.ranks > 1)})" for row in rows), sep="\n")
        return 0
    outcomes: dict[Item, dict[str, list[str]]] = {item: {HOLDS: [], FAILS: [], LEFT_OUT: []} for item in items}
    with tempfile.TemporaryDirectory(prefix="contract-") as folder:
        expected: dict[Item, Any] = {}
        for number, row in enumerate(rows, 1):
            start = time.monotonic()
            if row.ranks > options.ranks:
                outcome, lines = LEFT_OUT, [f"it needs {row.ranks} ranks; --ranks is {options.ranks}"]
            else:
                outcome, lines = _judge(row, expected, Path(folder), outcomes[row.item][FAILS])
            outcomes[row.item][outcome].append(row.name)
            print(f"[{number}/{len(rows)}] {row.item}  {row.name}: {outcome}  ({time.monotonic() - start:.1f} s)")
            print(*(f"    {line}\n" for line in lines), sep="", end="", flush=True)
    return _table(outcomes)


def _judge(row: Row, expected: dict[Item, Any], folder: Path, failing: Collection[str] = ()) -> tuple[str, list[str]]:
    """Return the outcome of a row, and what is wrong, or why it is left out.

    `expected`: results of one device, or a hang. `failing`: names of the item's rows that have failed so far.
    """
    if obstacle := row.obstacle():
        return LEFT_OUT, [f"torchtitan check refuses it: {obstacle}"]
    if isinstance(expected.get(row.item), Hang):
        return LEFT_OUT, ["not tried after a hang"]
    file = str(folder / f"{row.item.kind}-{row.item.name}.npz")
    try:
        if row.item.kind == "schedule":
            (line,) = run_on_ranks(1, checks.function_of_step, row.item)
            lines = [line] * bool(line)
        elif row.name == "save and resume":
            run_folder = Path(tempfile.mkdtemp(dir=folder))
            lines = resume_difference(row, run_on_ranks(row.ranks, checks.resumed, row, run_folder)[0])
        elif row.name in PLANS:
            if row.item not in expected:
                (expected[row.item],) = run_on_ranks(1, checks.reference, row, file)
            tolerance = TOLERANCE.get(row.item.kind, EXACT)
            answers = run_on_ranks(row.ranks, checks.under_plan, row, expected[row.item], file, tolerance)
            lines = differences(row, expected[row.item], answers, np.load(file), failing)
        else:
            (line,) = run_on_ranks(1, ON_ONE_RANK[row.name], row)
            if line.startswith(checks.UNTRIED):
                return LEFT_OUT, [line.removeprefix(checks.UNTRIED)]
            lines = [line] * bool(line)
    except RankError as error:
        lines = [str(error)]
        if isinstance(error, Hang):
            expected[row.item] = error
    return (FAILS if lines else HOLDS), lines


def _table(outcomes: dict[Item, dict[str, list[str]]]) -> int:
    width = max(len(str(item)) for item in outcomes)
    print(f"\n{'':{width}}  holds  fails  left out")
    for item, by_outcome in outcomes.items():
        counts = [len(by_outcome[outcome]) for outcome in (HOLDS, FAILS, LEFT_OUT)]
        failing = f"  {'; '.join(by_outcome[FAILS])}"
        print(f"{item!s:{width}}  {counts[0]:5}  {counts[1]:5}  {counts[2]:8}{failing}".rstrip())
    return int(any(by_outcome[FAILS] for by_outcome in outcomes.values()))
