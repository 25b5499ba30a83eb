"""Timing that is robust on noisy machines: two programs take turns (A B B A A B B A ...) and their ratio is judged.

A repeat gives the ratio of medians. The result is the median of the repeats, printed with the smallest and the largest.
If the goal is between the quartiles of the repeats, the verdict is "cannot tell". The option `--aa` of a benchmark
compares a program with itself, which measures the noise.
"""

import gc
import importlib.metadata
import io
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5
"""First turns of each program, which are not counted."""


def order(turns: int) -> str:
    """Return ABBAABBA..., with each letter `turns` times."""
    return "".join("AB" if turn % 2 == 0 else "BA" for turn in range(turns))


@dataclass
class Turns:
    """Wall-clock and CPU seconds of every turn of A and of B."""

    repeats: int
    wall: dict[str, list[float]] = field(default_factory=lambda: {"A": [], "B": []})
    cpu: dict[str, list[float]] = field(default_factory=lambda: {"A": [], "B": []})

    def start(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def stop(self, program: str, started: tuple[float, float]) -> None:
        self.wall[program].append(time.perf_counter() - started[0])
        self.cpu[program].append(time.process_time() - started[1])

    def ratios(self, seconds: dict[str, list[float]], above: str = "A", below: str = "B") -> list[float]:
        """Return the ratio of medians for each repeat."""
        a, b = seconds[above][WARM_UP:], seconds[below][WARM_UP:]
        size = len(a) // self.repeats
        parts = [slice(i * size, (i + 1) * size) for i in range(self.repeats)]
        return [statistics.median(a[part]) / statistics.median(b[part]) for part in parts]

    def median(self, seconds: dict[str, list[float]], program: str) -> float:
        return statistics.median(seconds[program][WARM_UP:])


def take_turns(a: Callable[[], Any], b: Callable[[], Any], pairs: int, repeats: int) -> Turns:
    """Run both in turns, with Python's garbage collector off."""
    turns = Turns(repeats)
    gc.disable()
    try:
        for program in order(WARM_UP + pairs * repeats):
            started = turns.start()
            a() if program == "A" else b()
            turns.stop(program, started)
    finally:
        gc.enable()
    return turns


class Later:
    """A loader without its first batches."""

    def __init__(self, loader: Any, left_out: int):
        self.loader, self.left_out = loader, left_out
        self.position = loader.position

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.left_out, None)


class Guest:
    """A loader for a trainer (A) that runs another loop (B) between the trainer's steps.

    The trainer's real loop is unchanged. Its step lasts from the moment that it receives a batch until it asks for the
    next one. It has to make `guest.steps` steps; the last one is not counted, because no request ends it.
    """

    def __init__(self, batches: Iterable[Any], step: Callable[[], Any], pairs: int, repeats: int):
        self.batches, self.step = batches, step
        self.turns = Turns(repeats)
        self.order = order(WARM_UP + pairs * repeats)
        self.steps = steps(pairs, repeats)

    def position(self) -> Any:
        """Return the loader's position, which the trainer records after every step."""
        return self.batches.position()

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batches)
        for program in self.order:
            started = self.turns.start()
            if program == "A":
                yield next(batches)
            else:
                self.step()
            self.turns.stop(program, started)
        yield next(batches)


def steps(pairs: int, repeats: int) -> int:
    """Return the number of steps that a trainer with a guest has to make."""
    return WARM_UP + pairs * repeats + 1


@dataclass(frozen=True)
class Goal:
    """`sign` is <= or >=; `slack` widens an equality: 1.000 within 0.001 is Goal("=", 1.0, 0.001)."""

    sign: str
    value: float
    slack: float = 0.0

    def is_met(self, value: float) -> bool:
        if self.sign == "=":
            return abs(value - self.value) <= self.slack
        return value <= self.value if self.sign == "<=" else value >= self.value

    def judge(self, values: list[float]) -> str:
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values
        met = [self.is_met(value) for value in quartiles]
        return "met" if all(met) else "cannot tell" if any(met) else "missed"

    def unless(self, against_itself: bool) -> "Goal | None":
        """Return no goal if a program is compared with itself."""
        return None if against_itself else self

    def __str__(self) -> str:
        return f"{self.sign} {self.value:g}" + (f" +- {self.slack:g}" if self.slack else "")


def heading(*, threads: int) -> str:
    """Describe versions and machine, with the titles of the columns."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchdata", "numpy"))
    return (
        f"{date.today()}, commit {commit}, Python {platform.python_version()}, {versions}\n"
        f"{os.cpu_count()} cores, {threads} thread(s), load average {os.getloadavg()[0]:.1f}; "
        f"{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}\n"
        f"{'':54} {'median':>8}   {'of repeats':<15} {'goal':<13}"
    )


def row(name: str, values: list[float], goal: Goal | None, note: str = "", digits: int = 3) -> str:
    """Format one result. `values`: one for each repeat."""
    middle, low, high = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
    verdict = f"{str(goal):<13} {goal.judge(values):<11}" if goal else f"{'':25}"
    return f"{name:<54} {middle:>8}   {f'{low} .. {high}':<15} {verdict}  {note}".rstrip()


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


def throw_lines_away() -> None:
    """Format the package's log lines as in a run, and discard them."""
    logger = logging.getLogger("torchtitan")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(_Nowhere()))
    logger.propagate = False


def seconds_to_first_step(command: list[str], threads: int) -> float:
    """Return the seconds from a program's start to its line `step 1...`. Raises RuntimeError if there is none."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seconds = None
    for line in process.stdout:
        if seconds is None and line.lstrip().startswith("step "):
            seconds = time.perf_counter() - started
    _, errors = process.communicate()
    if seconds is None or process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{errors}")
    return seconds


def torchrun(ranks: int, *command: str) -> list[str]:
    """Return the command of a Python program on several ranks; one rank is started without torchrun."""
    if ranks == 1:
        return [sys.executable, *command]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command]
