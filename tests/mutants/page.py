"""The tables of docs/proof.md, made from tests/mutants/results.json."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from tests.mutants.corpus import DRAWN, ROOT, Mutant, load, read_results
from tests.mutants.methods import JOB_METHODS, METHODS

PAGE = ROOT / "docs/proof.md"
Results = Mapping[str, Mapping[str, Any]]


def described(result: Mapping[str, Any]) -> str:
    """Describe a result: "found at 1 (differs), 18 s: ...", where 1 is the number of tests up to the failure."""
    if "skipped" in result:
        return f"not run: {result['skipped']}"
    seconds = f"{result['seconds']:.0f} s" if "seconds" in result else ""
    if not result["found"]:
        return f"not found in {result.get('tried', 1)}, {seconds}".rstrip(", ")
    return f"found at {result.get('tried', 1)} ({result.get('kind', 'differs')}), {seconds}: {result.get('by', '')}"


def current(results: Results, mutant: Mutant) -> Mapping[str, Any]:
    """Return the results of this version of the mutant, by method."""
    stored = results.get(mutant.name, {})
    is_current = stored.get("digest") == mutant.digest
    return {method: result for method, result in stored.items() if method != "digest"} if is_current else {}


def cell(result: Mapping[str, Any] | None, is_needless: bool) -> str:
    """Return the cell of one method."""
    if result is None:
        return "" if is_needless else "not yet run"
    if "skipped" in result:
        return "no such job"
    if not result["found"]:
        return "missed"
    return {"differs": "found", "raises": "found (error)", "hangs": "found (hang)"}[result.get("kind", "differs")]


def mutant_table(mutants: Sequence[Mutant], results: Results) -> str:
    """Return the table of mutants against methods."""
    lines = ["| mutant | source | what it does | " + " | ".join((*METHODS, *JOB_METHODS)) + " |"]
    lines.append("|" + "---|" * (3 + len(METHODS) + len(JOB_METHODS)))
    for mutant in mutants:
        by_method = current(results, mutant)
        cells, is_found = [], False
        for method in METHODS:
            cells.append(cell(by_method.get(method), is_found or bool(mutant.equivalent)))
            is_found |= bool(by_method.get(method, {}).get("found"))
        cells += [cell(by_method.get(method), bool(mutant.equivalent)) for method in JOB_METHODS]
        fault = mutant.fault + (f" Equivalent: {mutant.equivalent}" if mutant.equivalent else "")
        lines.append(f"| `{mutant.name}` | {link(mutant.source)} | {fault} | {' | '.join(cells)} |")
    return "\n".join(lines)


def link(source: str) -> str:
    """Return the source as a link: an issue or pull request of GitHub, or a paper."""
    if source == DRAWN:
        return source
    if source.startswith("arXiv:"):
        return f"[{source}](https://arxiv.org/abs/{source.removeprefix('arXiv:')})"
    repository, number = source.split("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def counts(results: Results) -> str:
    """Return the table of methods: how many mutants each found of those it was tried on, and what it cost."""
    real, drawn = load("real.toml"), [mutant for mutant in load("drawn.toml") if not mutant.equivalent]
    lines = [
        "| method | real: found of tried | drawn: found of tried | seconds a mutant, median |",
        "|---|---|---|---|",
    ]
    for method in (*METHODS, *JOB_METHODS):
        cells = []
        seconds = [s for m in (*real, *drawn) if (s := current(results, m).get(method, {}).get("seconds"))]
        for group in (real, drawn):
            tried = [current(results, mutant).get(method) for mutant in group]
            tried = [result for result in tried if result and "skipped" not in result and result.get("tried", 1)]
            cells.append(f"{sum(result['found'] for result in tried)} of {len(tried)}")
        lines.append(f"| {method} | {' | '.join(cells)} | {f'{median(seconds):.0f}' if seconds else ''} |")
    kinds = Counter(current(results, mutant).get("table", {}).get("kind") for mutant in real)
    equivalent = sum(bool(mutant.equivalent) for mutant in load("drawn.toml"))
    lines += [
        "",
        f"Of the real mistakes that the table finds, {kinds['differs']} give another number, {kinds['raises']} end in "
        f"an error and {kinds['hangs']} let ranks wait for each other. {equivalent} drawn mutants are equivalent.",
    ]
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[Results], str]] = {
    "counts": counts,
    "real": lambda results: mutant_table(load("real.toml"), results),
    "drawn": lambda results: mutant_table(load("drawn.toml"), results),
}


def written(text: str) -> str:
    """Return the page with its tables between the marks <!-- name --> and <!-- /name -->."""
    results = read_results()
    for name, render in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, tail = text.partition(begin)[0], text.partition(end)[2]
        text = f"{head}{begin}\n{render(results)}\n{end}{tail}"
    return text
