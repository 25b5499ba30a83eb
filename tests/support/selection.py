"""Choose what an ordinary and a quick run of the suite leave out.

`./run_tests.sh full` runs everything and writes DURATIONS. The ordinary run (`./run_tests.sh`) takes a pairwise cover
of the table of combinations, and leaves out the longest tests until the others fit into ORDINARY_SECONDS. The quick
run leaves out the modules that took longest.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.plans.combinations import Combination
from tests.support.jobs import ROOT

DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds of the last full run over all workers: `modules` (paths below tests/) in all, and the calls of `tests` of at
least RECORDED_SECONDS. Setups count in the module alone: a shared one is made for the first test that runs."""
RECORDED_SECONDS = 1.0
LAYOUT = ("ranks", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
ORDINARY_SECONDS = 800.0
QUICK_SECONDS = 140.0
"""Time of the tests that the ordinary and the quick run take, over all workers, as the last full run measured it.

Collecting the tests and starting the ranks comes on top."""
EVERY_NTH_ROW = 20
PAIRED = ("recompute", "schedule", "method", "adapter")
AXES = LAYOUT[1:]
PLAIN = Combination()


def settings(row: Combination) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a row that are covered in pairs: its layout as one, and the ones named in PAIRED."""
    yield "layout", row.layout
    yield from ((name, getattr(row, name)) for name in PAIRED)


def covered(row: Combination) -> frozenset[Any]:
    """Return the pairs of settings that a row tests, and the value of every other field, by itself and with each axis.

    A model is paired with an axis where all of its parameters are trained: adapters freeze what is special about a
    model, such as tied weights and biases.
    """
    others = {name: value for name, value in vars(row).items() if name not in (*LAYOUT, *PAIRED)}
    special = {name: value for name, value in others.items() if value != getattr(PLAIN, name)}
    if row.adapter != "none":
        special.pop("model", None)
    with_axes = [(axis, *item) for axis in AXES if getattr(row, axis) > 1 for item in special.items()]
    return frozenset([*itertools.combinations(settings(row), 2), *others.items(), *with_axes])


def pairwise_cover(rows: Iterable[Combination]) -> set[Combination]:
    """Return rows that together test each pair of settings and each value that any row tests, chosen greedily.

    Of rows that add equally much, the first with the fewest ranks is taken: each worker has to choose the same.
    """
    pairs = {row: covered(row) for row in rows}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(pairs, key=lambda row: (len(pairs[row] & missing), -row.ranks))
        chosen.add(best)
        missing -= pairs.pop(best)
    return chosen


def slow_modules(budget: float) -> set[str]:
    """Return the modules to leave out so that the others took at most `budget` seconds together, longest first."""
    seconds = json.loads(DURATIONS.read_text())["modules"]
    total, slow = sum(seconds.values()), set()
    for module in sorted(seconds, key=seconds.__getitem__, reverse=True):
        if total <= budget:
            break
        slow.add(module)
        total -= seconds[module]
    return slow


def left_out_items(items: list[pytest.Item], quick: bool) -> set[pytest.Item]:
    """Return the items that the ordinary or the quick run leaves out.

    Of the table of combinations the quick run takes some rows on one and two ranks, all families and axes among them.
    """
    rows = {item: row for item in items if isinstance(row := parameters(item).get("row"), Combination)}
    if quick:
        slow = slow_modules(QUICK_SECONDS)
        cheap = [item for item, row in rows.items() if row.ranks <= 2 and row.compile == "no"]
        slow_items = {item for item in items if item not in rows and module_of(item.nodeid) in slow}
        return slow_items | rows.keys() - set(cheap[::EVERY_NTH_ROW])
    table = {item: row for item, row in rows.items() if row.optimizer == "none"}
    cover = pairwise_cover(table.values())
    uncovered = {item for item, row in table.items() if row not in cover}
    return uncovered | longest_items(items, uncovered, ORDINARY_SECONDS)


def longest_items(items: list[pytest.Item], left_out: set[pytest.Item], budget: float) -> set[pytest.Item]:
    """Return the longest items not yet left out, as many as have to go for the rest to fit into `budget` seconds."""
    seconds = expected_seconds(items)
    total, longest = sum(seconds[item] for item in items if item not in left_out), set()
    for item in sorted(items, key=seconds.__getitem__, reverse=True):
        if total <= budget:
            break
        if item not in left_out:
            longest.add(item)
            total -= seconds[item]
    return longest


def expected_seconds(items: list[pytest.Item]) -> dict[pytest.Item, float]:
    """Return the seconds that each item took in the last full run.

    Items without a record share the rest of their module's time equally; items of new modules count as 0.
    """
    durations = json.loads(DURATIONS.read_text())
    tests, module_seconds = durations["tests"], Counter(durations["modules"])
    unrecorded = Counter(module_of(item.nodeid) for item in items if item.nodeid not in tests)
    for nodeid, seconds in tests.items():
        module_seconds[module_of(nodeid)] -= seconds
    shares = {module: max(module_seconds[module], 0.0) / number for module, number in unrecorded.items()}
    return {item: tests.get(item.nodeid, shares.get(module_of(item.nodeid), 0.0)) for item in items}


def parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def module_of(nodeid: str) -> str:
    """Return the path of a test's module below tests/, as two folders may hold modules of one name."""
    return nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")


class DurationRecorder:
    """A pytest plugin that adds up the time of each test and each module and writes DURATIONS."""

    def __init__(self) -> None:
        self.modules: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.modules[module_of(report.nodeid)] += report.duration
        if report.when == "call":
            self.calls[report.nodeid] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            tests = {nodeid: seconds for nodeid, seconds in self.calls.items() if seconds >= RECORDED_SECONDS}
            tables = {"modules": self.modules, "tests": tests}
            rounded = {name: {key: round(table[key], 1) for key in sorted(table)} for name, table in tables.items()}
            DURATIONS.write_text(json.dumps(rounded, indent=0) + "\n")
