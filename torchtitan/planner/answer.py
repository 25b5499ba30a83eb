"""Texts of `torchtitan plan`: tables, reasons and comparisons."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtitan.core.errors import format_bytes
from torchtitan.core.hardware import Hardware
from torchtitan.job import ResolvedJob
from torchtitan.planner.failures import Failures
from torchtitan.planner.memory.closed_form import LIMITS, fit
from torchtitan.planner.plan import Plan, Workload, pipeline_obstacle, planning_obstacle
from torchtitan.planner.search import MOST_ACTIONS, Candidate, PipelineTimer, Result
from torchtitan.planner.time.measured_runs import usual_calibration
from torchtitan.planner.time.messages import PARTS, Calibration, StepTime
from torchtitan.planner.time.step_time import StepTimer

COUNTED, SIMULATED, FORMULA, ASSUMED = "counted", "simulated", "formula", "assumed"
ASSUMED_PARTS = {"cp": "messages", "fsdp": "fsdp", "optimizer": "optimizer"}
"""Parts that published runs do not fit, and the factor by which other runs do. None fits the optimizer."""
WAITED_FOR = ("tp", "cp", "ep")
"""Axes with messages that the next matrix product needs. docs/parallelism.md describes how each can be hidden."""
HEADER = f"{'':4}{'s/step':>9} {'tok/s/GPU':>9} {'MFU':>6} {'GiB, low-high':>14} {'bubble':>7}  "


@dataclass(frozen=True)
class Cost:
    """The price of training."""

    tokens: float
    """Tokens of the run."""
    price: float | None
    """Of a GPU for an hour."""
    failures: Failures | None = None
    """What failures and saves add; None to leave them out."""

    def hours(self, candidate: Candidate) -> float:
        gpus = candidate.plan.gpus
        slowdown = self.failures.slowdown(gpus) if self.failures else 1.0
        return slowdown * self.tokens / (candidate.time.tokens_per_second * gpus) / 3600

    def gpu_hours(self, candidate: Candidate) -> float:
        return self.hours(candidate) * candidate.plan.gpus

    def money(self, candidate: Candidate) -> float | None:
        return None if self.price is None else self.gpu_hours(candidate) * self.price

    def save_interval(self, candidate: Candidate) -> int | None:
        """Return the steps between two saves that lose the least time; None without failures."""
        if self.failures is None:
            return None
        time, gpus = candidate.time, candidate.plan.gpus
        steps = self.tokens / (time.tokens_per_second * gpus * time.seconds)
        return max(1, round(min(steps, self.failures.interval(gpus) / time.seconds)))


def row(candidate: Candidate, label: str) -> str:
    """Format a line of the table."""
    time, plan, memory = candidate.time, candidate.plan, candidate.memory
    sizes = f"{figure(memory.low / 2**30)}-{figure(memory.high / 2**30)}"
    bubble = f"{time.bubble:.1%}" if plan.pp > 1 else ""
    figures = f"{figure(time.seconds, 3):>9} {time.tokens_per_second:9,.0f} {time.mfu:6.1%} {sizes:>14} {bubble:>7}"
    bound = PARTS[time.bound_by]
    return f"{label:4}{figures}  {plan}; batch {plan.batch}; {plan.options_text}; bound by {bound}"


def costs(candidate: Candidate, cost: Cost) -> str:
    """Format the duration and price of the run, with the interval of the step's time."""
    hours, money = cost.hours(candidate), cost.money(candidate)
    low, high = (hours * seconds / candidate.time.seconds for seconds in (candidate.time.low, candidate.time.high))
    text = f"{amount(cost.tokens)} tokens: {duration(hours)} ({duration(low)} to {duration(high)}), "
    text += f"{figure(cost.gpu_hours(candidate))} GPU-hours"
    return text if money is None else f"{text}, {figure(money)} at {cost.price:g} a GPU-hour"


def failure_lines(candidate: Candidate, cost: Cost) -> list[str]:
    """Format what failures and saves add to the duration, and how often to save; nothing without --mtbf-hours."""
    failures, gpus = cost.failures, candidate.plan.gpus
    if failures is None:
        return []
    between, interval, blocked = (
        duration(seconds(gpus) / 3600) for seconds in (failures.between, failures.interval, failures.blocked)
    )
    save = f"a save blocks {blocked}" + " (assumed)" * (failures.save_seconds is None)
    restart = f"a restart takes {duration(failures.restart / 3600)}" + " (assumed)" * (failures.restart_seconds is None)
    longer, share = failures.slowdown(gpus) - 1, failures.blocked(gpus) / failures.interval(gpus)
    steps = cost.save_interval(candidate)
    return [
        f"failures, one every {between}, and saves make it {longer:.1%} longer, saves alone {share:.1%}",
        f"{save}, {restart}: save every {interval}, checkpoint.interval = {steps} (Young and Daly)"
        + "; that holds for the assumed storage alone, --save-seconds gives yours" * (failures.save_seconds is None),
    ]


def duration(hours: float) -> str:
    """Format hours with the unit that suits them."""
    for unit, least, size in (("days", 48, 24), ("h", 1, 1), ("min", 1 / 30, 1 / 60)):
        if hours >= least:
            return f"{hours / size:.1f} {unit}"
    return f"{figure(hours * 3600)} s"


def figure(value: float, decimals: int = 0) -> str:
    """Format a number with at least these decimals, and a number below 10 with at least 3 significant digits."""
    if 0 < abs(value) < 10:
        decimals = max(decimals, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def amount(count: float) -> str:
    """Format a large number with the letter of a power of 1000."""
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.4g} {letter}"
    return f"{count:,.0f}"


def gpus_text(count: int) -> str:
    return f"{count:,} GPU" + "s" * (count != 1)


def explanation(candidate: Candidate, calibration: Calibration) -> list[str]:
    """Format where the time and memory of a plan go, with the class of evidence of each figure."""
    time, memory = candidate.time, candidate.memory
    lines = [f"{candidate.plan}; batch {candidate.plan.batch}", f"  {'a step':42}{figure(time.seconds, 3):>10} s"]
    for name, title in PARTS.items():
        if seconds := time.parts[name]:
            assumed = name in ASSUMED_PARTS and ASSUMED_PARTS[name] not in calibration.factors
            fitted = ASSUMED if assumed else calibration.evidence
            kind = SIMULATED if name == "bubble" and time.simulated else fitted
            lines.append(f"  {title:42}{figure(seconds, 3):>10} s {seconds / time.seconds:6.1%}  {kind}")
    lines.append(f"  {'interval':42}{figure(time.low, 3):>10} to {figure(time.high, 3)} s")
    for name, size in asdict(memory).items():
        if name not in LIMITS:
            lines.append(f"  {name:42}{format_bytes(size):>12}  {COUNTED if name == 'parameters' else FORMULA}")
    lines.append(f"  {'tensors at the peak':42}{format_bytes(memory.total):>12}  {FORMULA}")
    reserved = f"{format_bytes(memory.low)} to {format_bytes(memory.high)}"
    lines.append(f"  {'reserved, with allocator and libraries':42}{reserved:>12}")
    lines.append(f"  {'counts as fitting in':42}{format_bytes(memory.needed):>12}")
    return lines


def loss_of(plan: Candidate, best: Candidate, memory: float) -> str:
    """Return why a plan loses against the best one: memory, or the parts of the step that take longer."""
    if (verdict := fit(plan.memory.low, plan.memory.needed, memory)) != "fits":
        return f"{verdict}: needs {format_bytes(plan.memory.low)} to {format_bytes(plan.memory.needed)}"
    slower = plan.time.seconds / best.time.seconds - 1
    if abs(slower) < 0.005:
        return "is as fast as the best"
    if slower < 0:
        faster = best.time.seconds / plan.time.seconds - 1
        return f"is {faster:.1%} faster on the whole network; plans are ordered by a step on a slower one"
    more = {name: plan.time.parts[name] - best.time.parts[name] for name in PARTS}
    reasons = [name for name in sorted(more, key=lambda part: -more[part]) if more[name] > 0.1 * max(more.values())]
    texts = ", ".join(f"{PARTS[name]} +{figure(more[name], 3)} s" for name in reasons[:3])
    return f"takes {slower:.1%} longer: {texts}"


def no_plan(result: Result, gpus: int, memory: float, state: float, smaller: str) -> str:
    """Return the error if no plan is legal: which constraint excludes most.

    `state`: bytes of a replica's. `smaller`: what a GPU needs with options that make the state smaller.
    """
    counts = ", ".join(f"{name} {count:,}" for name, count in result.excluded.most_common(4))
    if not result.complete:
        searched = f"the search ended at its limit of {MOST_ACTIONS:,} steps, and none of the plans before it is legal"
        return f"no plan found on {gpus_text(gpus)}: {searched} ({counts}); give another --gpus"
    if not result.excluded:
        reason = "no degrees divide the GPUs, the global batch, the sequence and the model's sizes"
        return f"no plan on {gpus_text(gpus)}: {reason}; give another --gpus or training.global_batch_size"
    most, _ = result.excluded.most_common(1)[0]
    if most == "memory" and state > gpus * memory:
        sizes = f"parameters, gradients and optimizer state alone take {format_bytes(state)}"
        has = f"{gpus_text(gpus)} ha{'s' if gpus == 1 else 've'} {format_bytes(gpus * memory)}"
        return f"no legal plan: {sizes}, and {has}; {smaller or 'nothing makes it smaller'}; or give more --gpus"
    remedies = {
        "memory": f"give more --gpus, a --gpu with more than {format_bytes(memory)}, or a smaller training.seq_len"
        + f"; {smaller}" * bool(smaller),
        "deadline or budget": "give a later --deadline, a larger --budget, or more --gpus",
    }
    remedy = remedies.get(most, f"change {most} in the job")
    return f"no legal plan on {gpus_text(gpus)}; plans excluded by constraint: {counts}; most by {most}: {remedy}"


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that no other beats in both time and memory, fastest first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda one: (one.time.seconds, one.memory.total)):
        if not front or candidate.memory.total < front[-1].memory.total:
            front.append(candidate)
    return front


def interval(spread: float) -> str:
    """Format how far below and above a step's time is likely to be."""
    return f"-{spread / (1 + spread):.0%}/+{spread:.0%}"


def extrapolation(candidate: Candidate, hardware: Hardware, calibration: Calibration) -> str:
    """Return which published rows the step time of a plan lacks; empty if it has them, or needs none.

    A CPU needs none, as its curves are measured.
    """
    if candidate.time.outside:
        return f"no published row has {candidate.time.outside}"
    lacks_rows = calibration.evidence.startswith(ASSUMED) and not hardware.cores
    return "no published row is of this GPU" if lacks_rows else ""


def as_record(candidate: Candidate, cost: Cost, options: Mapping[str, Any], extrapolated: str) -> dict[str, Any]:
    """Return a plan for --json: figures, parts and the `options` of a job. `extrapolated`: by `extrapolation`."""
    time = candidate.time
    return {
        "plan": candidate.plan._asdict(),
        "options": options,
        "step_seconds": time.seconds,
        "step_seconds_low": time.low,
        "step_seconds_high": time.high,
        "extrapolated": extrapolated,
        "tokens_per_second_per_gpu": time.tokens_per_second,
        "mfu": time.mfu,
        "bubble": time.bubble,
        "parts": dict(time.parts),
        "memory": asdict(candidate.memory),
        "hours": cost.hours(candidate),
        "gpu_hours": cost.gpu_hours(candidate),
        "price": cost.money(candidate),
        "checkpoint_interval": cost.save_interval(candidate),
    }


Predicted = tuple[PipelineTimer, Plan, StepTime]
"""A job's plan, what predicts its steps, and a step."""


def predicted_step(job: ResolvedJob, hardware: Hardware) -> Predicted | None:
    """Predict a step of a job as `torchtitan plan` does; None for a job that the formulas do not describe."""
    obstacle = planning_obstacle(job.model) or pipeline_obstacle(job)
    if obstacle or (hardware.cores is None) != (job.device_type == "cuda"):
        return None
    plan, workload = Plan.of(job, job.layout.samples), Workload.of(job, job.layout.samples)
    timer = PipelineTimer(StepTimer(workload, hardware, usual_calibration(hardware)))
    return timer, plan, timer.step_time(plan)


def step_line(predicted: Predicted | None) -> list[str]:
    """Format the time of a step; nothing for a job that the formulas do not describe."""
    if predicted is None:
        return []
    *_, step = predicted
    exposed = sum(step.parts[axis] for axis in (*WAITED_FOR, "fsdp"))
    share = f"{exposed / step.seconds:.0%} of it adds what no computation hides of the messages"
    return [
        f"a step takes {step.seconds:.3g} s ({step.low:.3g} to {step.high:.3g}), as `torchtitan plan` says; {share}"
    ]


def comparison(gained: Sequence[tuple[str, Candidate | None]], best: Candidate, cost: Cost) -> list[str]:
    """Format what other hardware would bring."""
    lines = []
    for change, candidate in gained:
        if candidate is None:
            lines.append(f"  {change:24} no plan that counts as fitting")
            continue
        speed = best.time.seconds / candidate.time.seconds - 1
        money = cost.gpu_hours(candidate) / cost.gpu_hours(best) - 1
        lines.append(f"  {change:24} {speed:+7.1%} speed, {money:+7.1%} GPU-hours: {candidate.plan}")
    return lines
