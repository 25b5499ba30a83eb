"""Compare the planner's step times with published runs: `python scripts/compare_published.py ROWS.json`.

A row names a model (`model`, `flavor`, `overrides`), `seq_len`, `dtype`, `gpu`, a `plan` with the fields of Plan
(planner/plan.py), a `source`, and `tokens_per_second` of a GPU or `tflops_full`, TFLOP/s of a GPU that count full
attention. `variants` are changes of the plan that the source leaves open; the fastest one counts. Without ROWS.json the
rows of tests/fixtures are replayed. `--json` prints predictions in tokens/s of a GPU, `--fit` the factors of
planner/calibration.py, and `--page` the table of docs/planning.md, with errors of factors that were fitted without the
source of the row. `software` is a name of SOFTWARE in planner/time/measured_runs.py, by default that of SOURCES.
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
from torchtitan.planner.time.measured_runs import (
    OUTLIER,
    PUBLISHED,
    SIGMAS,
    corrected_factors,
    fit_factors,
    linearized,
    usual_calibration,
    with_software,
)
from torchtitan.planner.time.messages import PARTS, Calibration, StepTime
from torchtitan.planner.time.step_time import StepTimer

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
SOURCES = {
    "A": ("torchtitan, December 2024", "flash2"),
    "B": ("torchtitan, June 2025", "flash2"),
    "C": ("torchtitan, 2024", "flash2"),
    "D": ("NeMo Automodel", "cudnn"),
    "E": ("Llama 3", "cudnn"),
    "F": ("this project", "cudnn"),
    "llm-foundry": ("llm-foundry, 2023", "2023"),
    "foundation-model-stack/fms-fsdp": ("IBM fms-fsdp, 2024", "flash2"),
    "NVIDIA-NeMo/Megatron-Bridge": ("Megatron-Bridge, 2025", "cudnn"),
    "docs.nvidia.com/nemo-framework": ("NeMo, 2024", "cudnn"),
}
"""Title and software by a row's source: a letter alone, or the start of a longer name. Others are taken for NVIDIA's
tuned code."""
DISTRIBUTED_OPTIMIZER = ("megatron", "nemo-framework")
"""Parts of the names of sources that gather weights and reduce gradients once in a step."""
OWN, OWN_WEIGHT = "F", 4
"""Source of the runs of this project, and how often they count in the fit: plans are of this project."""


def is_of(name: str, source: str) -> bool:
    """Return whether a row's source is the one with this name in SOURCES."""
    return source == name or (len(name) > 1 and source.startswith(name))


class PublishedRun:
    """A published run, and its prediction."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.name: str = values["name"]
        self.source: str = values.get("source") or self.name.partition(":")[0]
        self.hardware = load_hardware(values["gpu"])
        self.plans = [Plan(**{**values["plan"], **changes}) for changes in values.get("variants") or [{}]]
        matching = (about for name, about in SOURCES.items() if is_of(name, self.source))
        self.title, software = next(matching, (self.source, "cudnn"))
        self.software: str = values.get("software") or software
        self._gathers_once = any(name in self.source.lower() for name in DISTRIBUTED_OPTIMIZER)
        self._values = values
        self.plan = min(self.plans, key=lambda plan: self._step(plan, self._usual).seconds)
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
            gathers_once=self._gathers_once,
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
    def _usual(self) -> Calibration:
        return usual_calibration(self.hardware, self.software)

    @cached_property
    def bubble(self) -> float:
        """Simulated bubble relative to the rest of the step. It hardly depends on the factors."""
        return self.step.bubble / (1 - self.step.bubble)

    def predicted(self, factors: Mapping[str, float]) -> float:
        """Return the seconds of a step by the formula."""
        calibration = Calibration(with_software(factors, self.hardware, self.software))
        step = StepTimer(self.workload, self.hardware, calibration).step_time(self.plan)
        return (step.seconds - step.parts["bubble"]) * (1 + self.bubble)

    @cached_property
    def step(self) -> StepTime:
        """The prediction of `torchtitan plan`."""
        return self._step(self.plan, self._usual)

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        return self.step.seconds / self.seconds - 1

    def has_inside(self, error: float) -> bool:
        """Return True if the published speed is in the interval of a prediction with this relative error."""
        return 1 / (1 + self.step.spread) <= 1 + error <= 1 + self.step.spread

    @property
    def is_inside(self) -> bool:
        """True if the published speed is in the interval."""
        return self.has_inside(self.error)

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
    rows = tomli.loads((FIXTURES / "published_runs.toml").read_text())["run"]
    rows += json.loads((FIXTURES / "published_rows.json").read_text())
    return [PublishedRun(values) for values in rows]


def weighted(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return the runs of a fit: this project's several times."""
    return [run for run in runs for _ in range(OWN_WEIGHT if run.source == OWN else 1)]


def fitted(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """Return the factors that fit these runs."""
    return fit_factors([(run.predicted, run.seconds) for run in weighted(runs)], list(PUBLISHED), SIGMAS, OUTLIER)


def refitted(runs: Sequence[PublishedRun]) -> dict[str, dict[str, float]]:
    """Return the factors that fit the runs of all sources but one, by its title, and of all by "".

    One step of the fit from PUBLISHED for each, which differ little.
    """
    several, factors = weighted(runs), {}
    rows = linearized([(run.predicted, run.seconds) for run in several], PUBLISHED)
    for title in {"", *(run.title for run in runs)}:
        others = [row for run, row in zip(several, rows, strict=True) if run.title != title]
        factors[title] = corrected_factors(PUBLISHED, others, SIGMAS, OUTLIER)
    return factors


def errors_without_source(runs: Sequence[PublishedRun], factors: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Return each run's relative error by factors fitted to the runs of other sources: `refitted(runs)`."""
    return [run.predicted(factors[run.title]) / run.seconds - 1 for run in runs]


def grouped(runs: Sequence[PublishedRun]) -> dict[tuple[str, ...], list[int]]:
    """Return the indices of runs by source, GPU and type, and all of them."""
    groups = defaultdict(list)
    for index, run in enumerate(runs):
        groups[run.title, run.hardware.name, run.workload.dtype].append(index)
    return {**dict(sorted(groups.items())), ("all", "", ""): list(range(len(runs)))}


def page(runs: Sequence[PublishedRun], without: Sequence[float]) -> list[str]:
    """Return the lines of the table in docs/planning.md. `without`: of errors_without_source."""
    columns = ["inside", "median", "absolute", "inside without the source", "median", "absolute"]
    lines = [f"| source | GPU | type | rows | {' | '.join(columns)} |", "|---" * (4 + len(columns)) + "|"]
    with_source = [run.error for run in runs]
    for key, indices in grouped(runs).items():
        figures = []
        for errors in ([values[index] for index in indices] for values in (with_source, without)):
            inside = sum(runs[index].has_inside(error) for index, error in zip(indices, errors, strict=True))
            figures += [f"{inside}", f"{statistics.median(errors):+.1%}", f"{statistics.median(map(abs, errors)):.1%}"]
        lines.append(f"| {' | '.join(key)} | {len(indices)} | {' | '.join(figures)} |")
    return lines


def comparison(runs: Sequence[PublishedRun]) -> list[str]:
    """Return a line for each row with the shares of the step's parts, and a line for each source, GPU and type."""
    lines = ["published predicted   error interval"]
    for run in runs:
        inside = "inside" if run.is_inside else "outside"
        parts = {name: run.step.parts[name] / run.step.seconds for name in PARTS}
        shown = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= 0.005)
        speeds = f"{run.speed:9,.0f} {run.step.tokens_per_second:9,.0f} {run.error:+7.1%} {inside:8}"
        extrapolated = f" (extrapolated: {run.step.outside})" * bool(run.step.outside)
        lines.append(f"{speeds}{run.hardware.name:13}{run.name}: {shown}{extrapolated}")
    lines += ["", f"{'rows':>5} {'median':>7} {'absolute':>9} {'inside':>7}  source, GPU, type"]
    for key, indices in grouped(runs).items():
        errors, inside = [runs[index].error for index in indices], sum(runs[index].is_inside for index in indices)
        figures = f"{statistics.median(errors):+7.1%} {statistics.median(map(abs, errors)):9.1%}"
        lines.append(f"{len(indices):5} {figures} {inside:7}  {', '.join(filter(None, key))}")
    return lines


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
        print("\n".join(page(runs, errors_without_source(runs, refitted(runs)))))
    else:
        print("\n".join(comparison(runs)))


if __name__ == "__main__":
    main()
