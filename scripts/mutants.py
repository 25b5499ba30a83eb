"""Apply mutants, mistakes of other training stacks re-created in this one, and record which method finds each.

    python scripts/mutants.py --list
    python scripts/mutants.py --continue --hours 2          # fill up tests/mutants/results.json, in pieces
    python scripts/mutants.py --only row-bias-on-every-rank --methods table
    python scripts/mutants.py --write                       # the tables of docs/proof.md
    python scripts/mutants.py --draw 7 --count 20           # propose drawn mutants, as TOML

Each mutant is applied to a copy of the package and its tests in a temporary folder, one at a time, and tests run there
up to the first failure; the working tree is not touched. The methods table, modules, full and plans are tried in this
order until one finds the mutant; curve, guards and check are one job of a hundred steps. tests/mutants/ has the corpus.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutants import page  # noqa: E402
from tests.mutants.corpus import Mutant, load, read_results, write_results  # noqa: E402
from tests.mutants.drawing import draw  # noqa: E402
from tests.mutants.methods import JOB_METHODS, METHODS, RANK_LIMIT, run_job, run_tests  # noqa: E402

COPIED = ("torchtitan", "tests", "scripts", "train_configs", "pyproject.toml", "README.md", "docs")


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy what the tests need into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / name)
        pool = copy / "tests/support/pool.py"
        text = pool.read_text()
        assert text.count(RANK_LIMIT[0]) == 1, "the limit of ranks has another name; correct RANK_LIMIT"
        pool.write_text(text.replace(*RANK_LIMIT))
        yield copy


def examine(
    mutant: Mutant, methods: Sequence[str], copy: Path, earlier: dict, most: int | None = None
) -> Iterator[tuple[str, dict]]:
    """Yield (method, result) of the methods without one, in order, up to the first of METHODS that finds the mutant.

    `earlier`: results of this version of the mutant, by method. `most`: tests of a method that are run; if there are
    more and these find nothing, the method has no result yet.
    """
    results = dict(earlier)
    with mutant.applied(copy):
        for method in METHODS:
            if method in methods and method not in results:
                tests = METHODS[method](mutant)
                result = run_tests(copy, tests[:most])
                if not result["found"] and result["tried"] < len(tests):
                    print(f"{mutant.name}: {method} needs more than {most} tests", flush=True)
                    break
                results[method] = result
                yield method, result
            if results.get(method, {}).get("found"):
                break
        if set(methods) & set(JOB_METHODS) and not set(JOB_METHODS) <= results.keys():
            yield from run_job(copy, mutant, results).items()


def run(
    mutants: Sequence[Mutant], methods: Sequence[str], is_continued: bool, hours: float, most: int | None = None
) -> None:
    """Run the methods on the mutants, and store each result as soon as it exists."""
    stored, deadline = read_results(), time.monotonic() + 3600 * hours
    with copied_tree() as copy:
        for mutant in (mutant for mutant in mutants if not mutant.equivalent):
            results = dict(page.current(stored, mutant))
            for method in () if is_continued else methods:
                results.pop(method, None)
            for method, result in examine(mutant, methods, copy, results, most):
                results[method] = result
                stored[mutant.name] = {**results, "digest": mutant.digest}
                write_results(stored)
                print(f"{mutant.name}: {method} {page.described(result)}", flush=True)
                if time.monotonic() > deadline:
                    print("stopped after --hours; --continue resumes here")
                    return


def print_list(mutants: Sequence[Mutant]) -> None:
    for mutant in mutants:
        print(f"{mutant.name:34} {mutant.source:36} {mutant.file:52} {mutant.fault}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print a line for each mutant: name, source, file, fault")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of mutants; default: all")
    every = [*METHODS, *JOB_METHODS]
    parser.add_argument("--methods", nargs="+", default=every, choices=every, metavar="METHOD", help=", ".join(every))
    parser.add_argument("--continue", dest="is_continued", action="store_true", help="skip what has a result already")
    parser.add_argument("--hours", type=float, default=2.0, help="stop after the first result past this time")
    parser.add_argument(
        "--most", type=int, metavar="N", help="run N tests of a method; without a find, leave it for later"
    )
    parser.add_argument("--write", action="store_true", help="write the tables of docs/proof.md from the results")
    parser.add_argument("--draw", type=int, metavar="SEED", help="print drawn mutants as TOML")
    parser.add_argument("--count", type=int, default=20, help="number of mutants to draw")
    options = parser.parse_args()
    mutants = load()
    if unknown := set(options.only) - {mutant.name for mutant in mutants}:
        parser.error(f"--only: no mutants {', '.join(sorted(unknown))}; --list prints all")
    mutants = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
    if options.list:
        print_list(mutants)
    elif options.write:
        page.PAGE.write_text(page.written(page.PAGE.read_text()))
    elif options.draw is not None:
        print(draw(options.draw, options.count))
    else:
        run(mutants, options.methods, options.is_continued, options.hours, options.most)
    return 0


if __name__ == "__main__":
    sys.exit(main())
