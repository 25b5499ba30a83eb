"""Compare the planner's formula with published runs, and print the table of docs/planning.md.

For each run it prints the step time by the factors in the package, and by factors fitted without that run. `--fit`
prints the factors of planner/calibration.py.
"""

import argparse
import statistics
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli

from torchtitan.core.hardware import load_hardware
from torchtitan.models import resolve_sizes
from torchtitan.planner.calibration import HARDWARE_SIGMA, PUBLISHED, SIGMAS, fit_factors
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.search import PipelineTimer
from torchtitan.planner.step_time import StepTimer
from torchtitan.planner.time_parts import Calibration

RUNS = Path(__file__).parent.parent / "tests" / "fixtures" / "published_runs.toml"


class PublishedRun:
    """A row of the table, and its prediction."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.name: str = values["name"]
        self.speed: float = values["tokens_per_second"]
        self.hardware = load_hardware(values["gpu"])
        self.plan = Plan(**values["plan"])
        plan = self.plan
        self.workload = Workload(
            args=resolve_sizes(values["model"], values["flavor"], None, values.get("overrides", {})),
            seq_len=values["seq_len"],
            rows=plan.shards * plan.replicas * plan.microbatch * plan.microbatches * plan.passes,
            rows_per_sample=1,
            compute_bytes=2,
            stored_bytes=4,
            dtype=values["dtype"],
            ends=tuple(values.get("ends", (1, 1))),
        )

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return self.workload.tokens / self.plan.gpus / self.speed

    @cached_property
    def bubble(self) -> float:
        """Simulated bubble relative to the rest of the step. It hardly depends on the factors."""
        step = PipelineTimer(StepTimer(self.workload, self.hardware, Calibration(PUBLISHED))).step_time(self.plan)
        return step.bubble / (1 - step.bubble)

    def predicted(self, factors: Mapping[str, float]) -> float:
        """Return the seconds of a step by the formula."""
        step = StepTimer(self.workload, self.hardware, Calibration(factors)).step_time(self.plan)
        return (step.seconds - step.parts["bubble"]) * (1 + self.bubble)


def published_runs() -> list[PublishedRun]:
    return [PublishedRun(values) for values in tomli.loads(RUNS.read_text())["run"]]


def fitted(runs: list[PublishedRun]) -> dict[str, float]:
    """Return the factors that fit these runs."""
    names = list(PUBLISHED)
    hardware = {name: HARDWARE_SIGMA for name in names if name in {run.hardware.name for run in published_runs()}}
    return fit_factors([(run.predicted, run.seconds) for run in runs], names, SIGMAS | hardware)


def errors(runs: list[PublishedRun]) -> list[tuple[float, float]]:
    """Return each run's relative error by the package's factors, and by factors fitted to the other runs."""
    pairs = []
    for run in runs:
        without = fitted([other for other in runs if other is not run])
        pairs.append((run.predicted(PUBLISHED) / run.seconds - 1, run.predicted(without) / run.seconds - 1))
    return pairs


def table(runs: list[PublishedRun], pairs: list[tuple[float, float]]) -> list[str]:
    """Return the lines of the table in docs/planning.md, and their summary. `pairs`: the `errors` of the runs."""
    lines = ["| run | published tokens/s a GPU | predicted | error | error without this row |", "|---|---|---|---|---|"]
    for run, (error, left_out) in zip(runs, pairs, strict=True):
        speed = run.workload.tokens / run.plan.gpus / run.predicted(PUBLISHED)
        lines.append(f"| {run.name} | {run.speed:,.0f} | {speed:,.0f} | {error:+.1%} | {left_out:+.1%} |")
    sizes = [abs(left_out) for _, left_out in pairs]
    summary = f"median {statistics.median(sizes):.1%}, largest {max(sizes):.1%}"
    return [*lines, "", f"Errors are of the step time. {len(runs)} rows; without the row itself: {summary}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print the fitted factors instead")
    runs = published_runs()
    if parser.parse_args().fit:
        print("\n".join(f'    "{name}": {factor:.3f},' for name, factor in fitted(runs).items()))
    else:
        print("\n".join(table(runs, errors(runs))))


if __name__ == "__main__":
    main()
