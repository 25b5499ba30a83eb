"""Mutants drawn by a seed, so that the corpus has also mistakes that nobody thought of.

A site is a line of the files that communicate, or that compute what communication sums, to which an operator applies: a
sign, a missing division, another reduction, a wrong group, a wrong dimension, a position off by one.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mutants.corpus import ROOT

PLACES = (
    "torchtitan/parallelisms/tensor_parallel.py",
    "torchtitan/parallelisms/context_parallel.py",
    "torchtitan/parallelisms/sequence_layout.py",
    "torchtitan/parallelisms/ring_attention.py",
    "torchtitan/parallelisms/expert_parallel.py",
    "torchtitan/parallelisms/expert_parallel.py",
    "torchtitan/parallelisms/data_parallel.py",
    "torchtitan/parallelisms/data_parallel.py",
    "torchtitan/parallelisms/gradients.py",
    "torchtitan/parallelisms/quantized_collectives.py",
    "torchtitan/parallelisms/quantized_collectives.py",
    "torchtitan/parallelisms/degrees.py",
    "torchtitan/parallelisms/parallel_model.py",
    "torchtitan/parallelisms/pipeline/pipeline_parallel.py",
    "torchtitan/parallelisms/pipeline/runtime.py",
    "torchtitan/parallelisms/pipeline/split_backward.py",
    "torchtitan/parallelisms/pipeline/overlap",
    "torchtitan/optimizers/layout.py",
    "torchtitan/losses/objective.py",
)
"""The list of communication sites: code that sends, sums, splits or places numbers under a plan."""
OPERATORS: dict[str, tuple[str, str]] = {
    "A sign is wrong": (r"(?<=[\w\)\]]) \+ (?=[\w\(])", " - "),
    "The sign of a difference is wrong": (r"(?<=[\w\)\]]) - (?=[\w\(])", " + "),
    "A division is missing": (r" /{1,2} (?:self\.)?\w+(?:\.\w+)*(?=[\s,)\]:]|$)", ""),
    "A sum is a maximum": (r'"sum"', '"max"'),
    "A reduction is missing": (r"dist\.all_reduce\(.*\)$", "pass"),
    "Another dimension is meant": (r"dim=1\b", "dim=0"),
    "A dimension is off by one": (r"dim=-(1|2)\b", r"dim=-\1 - 1"),
    "A split dimension is off by one": (r"\.(chunk|split|unflatten|flatten|sum)\((0|1)\b", r".\1(1 - \2"),
    "A position is off by one": (r"\b(self\.rank|border\.rank|cp_rank|ring\.rank|rank|index)\b(?= [*+-])", r"(\1 + 1)"),
    "The group is another axis's": (r"mesh\[\"(tp|cp|pp)\"\]", 'mesh["dp_shard"]'),
    "The first is taken for the last": (r"(?<=\w)\[0\]", "[-1]"),
    "Sent and received sizes are exchanged": (r"\b(receive), (send)\b", r"\2, \1"),
}
"""Fault -> (pattern, replacement)."""
SKIPPED = re.compile(r'^\s*(#|"""|assert|raise|def |class |f"|@|import|from)|->|JobError|range\(1, ')


class Site(NamedTuple):
    file: str
    line: int
    operator: str
    old: str
    new: str


def sites() -> Iterator[Site]:
    """Yield every line that an operator changes, in the order of the files."""
    for place in PLACES:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield from _sites_of(file)


def _sites_of(file: Path) -> Iterator[Site]:
    lines, in_docstring = file.read_text().splitlines(), False
    for number, line in enumerate(lines):
        quotes = line.count('"""')
        if in_docstring or quotes or SKIPPED.search(line):
            in_docstring ^= quotes % 2 == 1
            continue
        code = line.split("  # ")[0]
        for operator, (pattern, replacement) in OPERATORS.items():
            changed = re.sub(pattern, replacement, code, count=1)
            if changed != code:
                yield Site(str(file.relative_to(ROOT)), number, operator, line, changed + line[len(code) :])


def anchored(site: Site) -> tuple[str, str]:
    """Return (old, new) with as many lines around the site as make the old text unique in its file."""
    lines = (ROOT / site.file).read_text().splitlines()
    text = "\n".join(lines)
    for around in range(len(lines)):
        before, after = lines[max(0, site.line - around) : site.line], lines[site.line + 1 : site.line + 1 + around]
        old, new = ("\n".join([*before, line, *after]) for line in (site.old, site.new))
        if text.count(old) == 1:
            return old, new
    raise AssertionError("a file is unique in itself")


def draw(seed: int, count: int) -> str:
    """Return drawn mutants as TOML, at most one a line and an operator's share of them at most a quarter."""
    chooser, by_file, chosen = random.Random(seed), {}, []
    for site in sites():
        by_file.setdefault(site.file, []).append(site)
    while len(chosen) < count:
        site = chooser.choice(by_file[chooser.choice(sorted(by_file))])
        same_operator = sum(site.operator == other.operator for other in chosen)
        if all(site[:2] != other[:2] for other in chosen) and same_operator < max(count // 4, 1):
            chosen.append(site)
    return "\n".join(_as_toml(seed, number, site) for number, site in enumerate(chosen, 1))


def _as_toml(seed: int, number: int, site: Site) -> str:
    old, new = anchored(site)
    return (
        f'[[mutant]]\nname = "drawn-{seed}-{number:02}"\nsource = "drawn"\nfile = "{site.file}"\n'
        f"fault = \"{site.operator}.\"\nold = '''\n{old}'''\nnew = '''\n{new}'''\n"
    )
