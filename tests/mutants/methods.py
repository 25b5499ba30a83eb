"""The methods that look for a mutant: each runs tests of this repository in the mutated copy, up to the first failure.

`table` runs the rows of the table of combinations that the ordinary run takes, `modules` the ordinary tests of the
modules that own the changed code, `full` the other rows of the table, `plans` the random plans, `curve`, `guards` and
`check` a job of a hundred steps, and `replay` a step of it under the plan (curves.py).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.mutants.corpus import ROOT, Mutant
from tests.plans.combinations import Combination, other_models, table
from tests.plans.combinations_optimizers import optimizers
from torchtitan.parallelisms.degrees import AXES

ROWS = {
    "tests/plans/test_combinations.py::test_equal_to_one_device": table() + other_models(),
    "tests/plans/test_optimizer_plans.py::test_weights_are_those_of_one_device": optimizers(),
}
"""The tests of the table, and their rows."""
PLANS = "tests/plans/test_random_plans.py"
RANK_LIMIT = "DEFAULT_LIMIT = 600.0", "DEFAULT_LIMIT = 400.0"
"""In the copy ranks have less time than in the suite, because a mutant may let them wait for each other forever."""
LIMIT = 3 * 3600.0
"""Seconds after which a method is stopped."""
Result = dict[str, Any]
"""found; by: the id of the test that failed; kind: differs (a number), raises or hangs; tried: tests; seconds."""


@cache
def ordinary_tests() -> tuple[str, ...]:
    """Return the ids of the tests that the ordinary run takes, as pytest collects them here."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "--pairwise", "tests"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(line for line in output.splitlines() if "::" in line)


def row_tests() -> dict[str, Combination]:
    """Return the rows of the table by the ids of their tests."""
    return {f"{test}[{row}]": row for test, rows in ROWS.items() for row in rows}


def ordered(ids: Iterable[str], first: dict[str, Any]) -> list[str]:
    """Sort the ids of rows: those that agree with most fields of `first`, then cheap ones (few ranks, no compiler)."""
    rows = row_tests()

    def key(test: str) -> tuple[int, bool, int, float]:
        row = rows[test]
        agreeing = sum(getattr(row, name) == value for name, value in first.items())
        inexact = row.precision == "bfloat16" or row.float8 != "none" or bool(row.reduce_bits)
        return -agreeing, row.compile != "no", row.ranks, inexact

    return sorted(ids, key=key)


def table_tests(mutant: Mutant) -> list[str]:
    """Return the rows of the ordinary run, in the order in which they are tried."""
    rows = row_tests()
    return ordered((test for test in ordinary_tests() if test in rows), dict(mutant.first))


def module_tests(mutant: Mutant) -> list[str]:
    """Return the other tests of the ordinary run in the modules that own the changed code."""
    modules, rows = tuple(f"tests/{name}.py::" for name in mutant.tests), row_tests()
    return [test for test in ordinary_tests() if test.startswith(modules) and test not in rows] if modules else []


def full_tests(mutant: Mutant) -> list[str]:
    return ordered(row_tests().keys() - set(ordinary_tests()), dict(mutant.first))


def plan_tests(mutant: Mutant) -> list[str]:
    return [test for test in ordinary_tests() if test.startswith(f"{PLANS}::test_equal_to_one_device")]


METHODS: dict[str, Callable[[Mutant], list[str]]] = {
    "table": table_tests,
    "modules": module_tests,
    "full": full_tests,
    "plans": plan_tests,
}
"""Methods that run tests, the cheapest first: each is tried where the ones before it found nothing."""


def run_tests(copy: Path, ids: Sequence[str], limit: float = LIMIT) -> Result:
    """Run tests in a copy of the repository, in this order, up to the first failure."""
    if not ids:
        return {"found": False, "tried": 0, "seconds": 0.0}
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-x", "-q", "-o", "addopts=", "-o", "junit_family=xunit1", "-p", "no:cacheprovider", "--reruns=0"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *ids]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "TORCHTITAN_MUTANT": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    seconds = round(time.monotonic() - start, 1)
    if not report.exists():
        raise RuntimeError(f"pytest did not finish in {copy}:\n{output.decode()[-4000:]}")
    return judged(ElementTree.parse(report).getroot(), ids) | {"seconds": seconds}


def judged(report: ElementTree.Element, ids: Sequence[str]) -> Result:
    """Return the result in pytest's report of a run of `ids`."""
    cases = [case for case in report.iter("testcase") if case.find("skipped") is None]
    failed = [
        (case, problem) for case in cases for tag in ("failure", "error") if (problem := case.find(tag)) is not None
    ]
    if not failed:
        assert len(cases) == len(ids), f"{len(cases)} of {len(ids)} tests ran"
        return {"found": False, "tried": len(cases)}
    case, problem = failed[0]
    text = f"{problem.get('message')} {problem.text}"
    raises = "Traceback (most recent call last)" in text
    kind = "raises" if raises else "hangs" if "no answer within" in text else "differs"
    name = case.get("name", "")
    by = next(test for test in ids if test.endswith(f"::{name}"))
    return {"found": True, "by": by, "kind": kind, "tried": len(cases)}


JOB_METHODS = ("curve", "guards", "check", "replay")
"""Methods that need a job: curves.py runs it under a plan and on one device."""


def run_job(copy: Path, mutant: Mutant, results: dict[str, Result]) -> dict[str, Result]:
    """Run the mutant's job in the copy; return the results of JOB_METHODS.

    The job is that of the row that found the mutant, else of the fields of the mutant, on as many ranks as these need.
    A job that the unmutated rules refuse shows nothing, so it is skipped.
    """
    rows, degrees = row_tests(), [mutant.first.get(axis, 1) for axis in AXES]
    row = next((rows[result["by"]] for result in results.values() if result.get("by") in rows), None)
    fields = vars(row) if row else {"ranks": prod(degrees)} | dict(mutant.first)
    if obstacle := _answer(ROOT, "obstacle", fields):
        return dict.fromkeys(JOB_METHODS, {"skipped": obstacle})
    return _answer(copy, "examine", fields)


def _answer(tree: Path, question: str, fields: Mapping[str, Any]) -> Any:
    """Return the answer of curves.py in a tree, the copy or the unmutated one, on a row with these fields."""
    command = [sys.executable, "-m", "tests.mutants.curves", question, json.dumps(fields)]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if output.returncode:
        raise RuntimeError(output.stdout[-2000:] + output.stderr[-4000:])
    return json.loads(output.stdout.splitlines()[-1])
