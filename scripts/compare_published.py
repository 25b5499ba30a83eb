"""Compare the planner's step times with published runs: `python scripts/compare_published.py ROWS.json`.

A row names a model (`model`, `flavor`, `overrides`), `seq_len`, `dtype`, `gpu`, a `plan` with the fields of Plan
(planner/plan.py), a `source`, and `tokens_per_second` of a GPU or `tflops_full`, TFLOP/s of a GPU that count full
attention. `variants` are changes of the plan that the source leaves open; the fastest one counts. Without ROWS.json the
rows of tests/fixtures are replayed. `--json` prints predictions in tokens/s of a GPU, `--fit` the factors of
planner/calibration.py, and `--page` the table of docs/planning.md, with errors of factors that were fitted without the
source of the row.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli

from torchtitan.core.hardware import load_hardware
from torchtitan.models import resolve_sizes
from torchtitan.models.flops import flops_per_token, latent_flops_per_token
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.search import PipelineTimer
from torchtitan.planner.time.measured_runs import HARDWARE_SIGMA, PUBLISHED, SIGMAS, fit_factors, usual_calibration
from torchtitan.planner.time.messages import PARTS, Calibration, StepTime
from torchtitan.planner.time.step_time import StepTimer

RUNS = Path(__file__).parent.parent / "tests" / "fixtures" / "published_runs.toml"


class PublishedRun:
    """A published run, and its prediction."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.name: str = values["name"]
        self.source: str = values.get("source") or self.name.partition(":")[0]
        self.hardware = load_hardware(values["gpu"])
        self.plans = [Plan(**{**values["plan"], **changes}) for changes in values.get("variants") or [{}]]
        self._values = values
        self.plan = min(self.plans, key=lambda plan: self._step(plan, Calibration(PUBLISHED)).seconds)
        self.workload = self._workload(self.plan)
        self.speed = values.get("tokens_per_second") or self._tokens_per_second(values["tflops_full"])

    def _workload(self, plan: Plan) -> Workload:
        values = self._values
        return Workload(
            args=resolve_sizes(values["model"], values["flavor"], None, values.get("overrides", {})),
            seq_len=values["seq_len"],
            rows=plan.shards * plan.replicas * plan.microbatch * plan.microbatches * plan.passes,
            rows_per_sample=1,
            compute_bytes=2,
            stored_bytes=4,
            dtype=values["dtype"],
            ends=tuple(values.get("ends") or (1, 1)),
            reshard=values.get("reshard") or "default",
        )

    def _tokens_per_second(self, tflops: float) -> float:
        args = self.workload.args
        count_flops = latent_flops_per_token if hasattr(args, "kv_lora_rank") else flops_per_token
        return tflops * 1e12 / count_flops(args, self.workload.seq_len).full

    def _step(self, plan: Plan, calibration: Calibration) -> StepTime:
        return PipelineTimer(StepTimer(self._workload(plan), self.hardware, calibration)).step_time(plan)

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        return self.workload.tokens / self.plan.gpus / self.speed

    @cached_property
    def bubble(self) -> float:
        """Simulated bubble relative to the rest of the step. It hardly depends on the factors."""
        step = self._step(self.plan, Calibration(PUBLISHED))
        return step.bubble / (1 - step.bubble)

    def predicted(self, factors: Mapping[str, float]) -> float:
        """Return the seconds of a step by the formula."""
        step = StepTimer(self.workload, self.hardware, Calibration(factors)).step_time(self.plan)
        return (step.seconds - step.parts["bubble"]) * (1 + self.bubble)

    @cached_property
    def step(self) -> StepTime:
        """The prediction of `torchtitan plan`."""
        return self._step(self.plan, usual_calibration(self.hardware))

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.step.seconds / self.seconds - 1

    @property
    def is_inside(self) -> bool:
        """True if the published speed is in the interval."""
        return self.step.low <= self.seconds <= self.step.high

    def record(self) -> dict[str, object]:
        """Return tokens/s a GPU for --json."""
        speed, seconds = self.step.tokens_per_second, self.step.seconds
        return {
            "name": self.name,
            "source": self.source,
            "gpu": self.hardware.name,
            "published": self.speed,
            "predicted": speed,
            "low": speed * seconds / self.step.high,
            "high": speed * seconds / self.step.low,
        }


def fixtures() -> list[PublishedRun]:
    """Return the published runs of tests/fixtures."""
    return [PublishedRun(values) for values in tomli.loads(RUNS.read_text())["run"]]


def fitted(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """Return the factors that fit these runs."""
    names = list(PUBLISHED)
    hardware = {name: HARDWARE_SIGMA for name in names if name in {run.hardware.name for run in fixtures()}}
    return fit_factors([(run.predicted, run.seconds) for run in runs], names, SIGMAS | hardware)


def errors_without_source(runs: Sequence[PublishedRun]) -> list[float]:
    """Return each run's relative error by factors fitted to the runs of other sources."""
    factors = {source: fitted([run for run in runs if run.source != source]) for source in {run.source for run in runs}}
    return [run.predicted(factors[run.source]) / run.seconds - 1 for run in runs]


def summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{len(errors)} rows: median of absolute errors {statistics.median(sizes):.1%}, largest {max(sizes):.1%}"


def page(runs: Sequence[PublishedRun], without: Sequence[float]) -> list[str]:
    """Return the lines of the table in docs/planning.md, and their summary. `without`: errors_without_source(runs)."""
    lines = ["| run | published tokens/s a GPU | predicted | error | error without this source |"]
    lines.append("|---|---|---|---|---|")
    for run, left_out in zip(runs, without, strict=True):
        speed = run.step.tokens_per_second
        lines.append(f"| {run.name} | {run.speed:,.0f} | {speed:,.0f} | {run.error:+.1%} | {left_out:+.1%} |")
    return [*lines, "", f"Errors are of the step time. Without the row's own source, {summary(without)}."]


def comparison(runs: Sequence[PublishedRun]) -> list[str]:
    """Return a line for each row with the shares of the step's parts, and a line for each source, GPU and type."""
    lines, groups = [], defaultdict(list)
    for run in runs:
        inside = "inside" if run.is_inside else "outside"
        parts = {name: run.step.parts[name] / run.step.seconds for name in PARTS}
        shown = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
        speeds = f"{run.speed:9,.0f} {run.step.tokens_per_second:9,.0f} {run.error:+7.1%} {inside:8}"
        lines.append(f"{speeds}{run.hardware.name:13}{run.name}: {shown}")
        groups[run.source, run.hardware.name, run.workload.dtype].append(run)
    lines += ["", f"{'rows':>5} {'median':>7} {'absolute':>9} {'inside':>7}  source, GPU, type"]
    for key, members in [*sorted(groups.items()), (("all",), list(runs))]:
        errors = [run.error for run in members]
        figures = f"{statistics.median(errors):+7.1%} {statistics.median(map(abs, errors)):9.1%}"
        lines.append(f"{len(members):5} {figures} {sum(run.is_inside for run in members):7}  {', '.join(key)}")
    return ["published predicted   error interval", *lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "rows", nargs="?", type=Path, metavar="ROWS.json", help="rows to replay in place of the fixtures"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print a list of objects, in tokens/s of a GPU")
    output.add_argument("--fit", action="store_true", help="print the factors that fit the rows")
    output.add_argument("--page", action="store_true", help="print the table of docs/planning.md")
    options = parser.parse_args()
    runs = [PublishedRun(row) for row in json.loads(options.rows.read_text())] if options.rows else fixtures()
    if options.json:
        print(json.dumps([run.record() for run in runs], indent=1))
    elif options.fit:
        print("\n".join(f'    "{name}": {factor:.3f},' for name, factor in fitted(runs).items()))
    elif options.page:
        print("\n".join(page(runs, errors_without_source(runs))))
    else:
        print("\n".join(comparison(runs)))


if __name__ == "__main__":
    main()
