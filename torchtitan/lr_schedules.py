"""Learning-rate schedules as functions of the step that return a multiplier of the peak rate. No torch.

Steps s are 0-based. With T total steps, W of warmup, S stable and D of decay (W + S + D = T) the multiplier is

    g((s + 1) / W)       in the warmup, where g rises from 0 to 1
    m + (1 - m) f(p)     after it, where m is the floor, f falls from 1 to 0, and
                         p = (s + 1 - W - S) / D, clamped to [0, 1]

So the floor is reached exactly at the last step, T - 1, and held after it. Other conventions reach it at step T:
W + S + D = T + 1, and S is 1 or more. That of transformers also has g(s / W) in the warmup.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil, cos, pi, sqrt
from typing import Any, NamedTuple, NoReturn

from torchtitan.core.cadence import steps_of
from torchtitan.core.errors import JobError
from torchtitan.core.registry import Registry

# f(p, cycles) for 0 < p < 1.
_decays: dict[str, Callable[[float, int], float]] = {
    "linear": lambda p, cycles: 1 - p,
    "sqrt": lambda p, cycles: 1 - sqrt(p),
    "cosine": lambda p, cycles: (1 + cos(pi * p)) / 2,
    "cosine_restarts": lambda p, cycles: (1 + cos(pi * (p * cycles % 1))) / 2,
}
TORCHTITAN, TRANSFORMERS = "torchtitan", "transformers"
"""Conventions of other programs."""
CONSTANT = "constant"
"""The type that does not decay."""
DECAYS: Registry[Callable[[float, int], float]] = Registry("torchtitan.schedules", _decays, Callable)


WARMUPS: dict[str, Callable[[float], float]] = {
    "linear": lambda q: q,
    "quadratic": lambda q: q * q,
    "cosine": lambda q: (1 - cos(pi * q)) / 2,
}
"""g(q) for 0 < q <= 1."""


class ScheduleError(JobError):
    """An invalid schedule, reported by the option of the [lr_scheduler] section that causes it."""

    def __init__(self, key: str, value: str, allowed: str, remedy: str) -> None:
        self.key, self.value, self.allowed, self.remedy = key, value, allowed, remedy
        super().__init__(f"{key} = {value}: {allowed}; {remedy}")


def resolve_warmup(warmup_steps: int | None, total_steps: int, is_last_decayed: bool = True) -> int:
    """Return the number of warmup steps: `warmup_steps`, or a tenth of the total, at least 2.

    `is_last_decayed`: the last step has the floor, so the warmup ends before it. Raises ScheduleError if the warmup is
    too long.
    """
    if warmup_steps is None:
        return min(max(2, total_steps // 10), total_steps - 1)
    if warmup_steps > total_steps - is_last_decayed:
        limit = "less than" if is_last_decayed else "at most"
        raise ScheduleError(
            "lr_scheduler.warmup_steps",
            str(warmup_steps),
            f"must be {limit} the {total_steps} steps in all (lr_scheduler.total_steps, else training.steps)",
            "shorten it, leave it unset (a tenth), or train longer",
        )
    return warmup_steps


JAGGED, CYCLICAL = "relora_cosine", "relora_cyclical"


class Ramps(NamedTuple):
    """Factors around restarts for a schedule without any, as in Axolotl (February 2024)."""

    every: int
    warmup: int
    anneal: int = 1

    def scale(self, c: int) -> float:
        """Return 1, except for a ramp up from 0.001 after each restart and, with anneal > 1, a ramp down before it."""
        since, share = c % self.every, 1.0
        if c < self.every - self.warmup:
            return 1.0
        if since < self.warmup:
            share = since / self.warmup
        elif since > self.every - self.anneal:
            share = (self.every - since) / self.anneal
        return share * 0.999 + 0.001


def jagged(c: int, total: int, warmup: int, cycle: int, rewarmup: int, floor: float, adjust: int = 0) -> float:
    """Return one cosine over the run that drops to 0 at every multiple of `cycle` and rises back linearly.

    The rise takes `rewarmup` steps. `adjust` shifts the drops, so that a run that continues from a step that is no
    multiple of `cycle` has them where the first run had.
    """
    if c < warmup:
        return c / max(1, warmup)
    step = c + adjust
    restarts, since = divmod(step, cycle)
    if since < rewarmup and step >= cycle:
        return since / max(1, rewarmup) * _cosine(restarts * cycle + rewarmup, total, warmup, floor)
    return _cosine(step, total, warmup, floor)


def cyclical(c: int, warmup: int, cycle: int, floor: float) -> float:
    """Return a cosine from peak to floor in each cycle, after a warmup of each cycle.

    The first two steps of later cycles have a rate of 1e-7 of the peak.
    """
    since = c % cycle
    if since < warmup:
        return 1e-7 if c >= cycle and since < 2 else since / max(1, warmup)
    return _cosine(since, cycle, warmup, floor)


def _cosine(step: int, total: int, warmup: int, floor: float) -> float:
    return floor + (1 - floor) * (1 + cos(pi * (step - warmup) / max(1, total - warmup))) / 2


@dataclass(frozen=True)
class LRSchedule:
    """The schedule of a job: the fields of the [lr_scheduler] section, and the ramps around an adapter's restarts.

    Raises ScheduleError.
    """

    total_steps: int
    warmup_steps: int | None = None
    decay_ratio: float | None = None
    decay_type: str = "linear"
    num_cycles: int = 1
    min_lr_factor: float = 0.1
    convention: str = "default"
    cycle_length: int | None = None
    restart_warmup_steps: int | None = None
    adjust_step: int = 0
    warmup_type: str = "linear"
    ramps: Ramps | None = None

    def __post_init__(self) -> None:
        if self.decay_type not in (names := (*DECAYS, CONSTANT, JAGGED, CYCLICAL)):
            allowed = f"must be one of {', '.join(names)}"
            raise ScheduleError("lr_scheduler.decay_type", repr(self.decay_type), allowed, "choose one of these")
        if self.decay_steps > self.total_steps - self.warmup:
            raise ScheduleError(
                "lr_scheduler.decay_ratio",
                str(self.decay_ratio),
                f"{self.warmup} warmup and {self.decay_steps} decay steps are more than the {self.total_steps} in all",
                "lower it or the warmup, or leave it unset (decay follows the warmup)",
            )

        if self.restarts:
            self._check_restarts()

    @property
    def restarts(self) -> bool:
        return self.decay_type in (JAGGED, CYCLICAL)

    def _check_restarts(self) -> None:
        total, cycle = self.total_steps, self.cycle_length

        def refuse(key: str, value: object, allowed: str, remedy: str) -> NoReturn:
            raise ScheduleError(f"lr_scheduler.{key}", str(value), allowed, remedy)

        if cycle is None and self.decay_type == JAGGED:
            refuse("cycle_length", "nothing", f"a number of steps with {JAGGED}", "set it, or adapter.relora.every")
        if cycle is not None and total % cycle:
            near = " or ".join(str(cycle * count) for count in (total // cycle, total // cycle + 1) if count)
            refuse("cycle_length", cycle, f"a divisor of the {total} steps in all", f"train {near} steps, or change it")
        if self.decay_type == JAGGED and self.restart_warmup_steps is None:
            refuse("restart_warmup_steps", "nothing", f"a number of steps with {JAGGED}", "set it")
        if (self.restart_warmup_steps or 0) > (cycle or total):
            refuse("restart_warmup_steps", self.restart_warmup_steps, f"at most the cycle's {cycle}", "shorten it")
        if self.warmup + self.adjust_step > (cycle or total):
            limit = f"with adjust_step {self.adjust_step} at most the cycle's {cycle or total}"
            refuse("warmup_steps", self.warmup, limit, "shorten one of the two")
        if not self.min_lr_factor:
            refuse("min_lr_factor", 0, f"more than 0 with {self.decay_type}", "write 0.1")

    @property
    def warmup(self) -> int:
        return resolve_warmup(self.warmup_steps, self.total_steps, self.convention == "default")

    @property
    def _end(self) -> int:
        """The number of steps after which the rate is at its floor."""
        return self.total_steps + (self.convention != "default")

    @property
    def decay_steps(self) -> int:
        if self.decay_type in (CONSTANT, JAGGED, CYCLICAL):
            return 0
        if self.decay_ratio is None:
            return self.total_steps - self.warmup
        steps = round(self.decay_ratio * self.total_steps)
        # with a ratio above 0 the last step has the floor
        return max(1, steps) if self.decay_ratio and self.convention == "default" else steps

    def multiplier(self, step: int) -> float:
        """Return the multiplier of the peak learning rate at a 0-based step of any size."""
        return self._curve(step) * (1.0 if self.ramps is None else self.ramps.scale(step))

    def _curve(self, step: int) -> float:
        if self.restarts:
            return self._with_restarts(min(step, self.total_steps - 1))
        if step < self.warmup:
            return WARMUPS[self.warmup_type]((step + (self.convention != TRANSFORMERS)) / self.warmup)
        decayed = step + 1 - (self._end - self.decay_steps)
        if decayed <= 0 or self.decay_steps == 0:
            return 1.0
        if decayed >= self.decay_steps:
            return self.min_lr_factor
        shape = DECAYS[self.decay_type](decayed / self.decay_steps, self.num_cycles)
        return self.min_lr_factor + (1 - self.min_lr_factor) * shape

    def _with_restarts(self, step: int) -> float:
        cycle, rewarmup = self.cycle_length or self.total_steps, self.restart_warmup_steps or 0
        if self.decay_type == CYCLICAL:
            return cyclical(step, self.warmup, cycle, self.min_lr_factor)
        return jagged(step, self.total_steps, self.warmup, cycle, rewarmup, self.min_lr_factor, self.adjust_step)

    def describe(self, peak: float) -> str:
        """Describe the schedule in one line."""
        rising = f"{self.warmup_type} " * (self.warmup_type != "linear")
        parts = [f"peak {peak:g}", f"{rising}warmup {self.warmup}" + " from 0" * (self.convention == TRANSFORMERS)]
        if self.restarts:
            parts.append(f"{self.decay_type} in cycles of {self.cycle_length or self.total_steps}")
            parts.append(f"floor {peak * self.min_lr_factor:g}")
            return f"learning rate: {', '.join(parts)}; total {self.total_steps} steps"
        stable = self._end - self.warmup - self.decay_steps
        if stable:
            parts.append(f"stable {stable}")
        if self.decay_steps:
            cycles = f" ({self.num_cycles} cycles)" if self.decay_type == "cosine_restarts" else ""
            floor = f"{peak * self.min_lr_factor:g}"
            after = " one step after the last" * (self.convention != "default")
            parts.append(f"{self.decay_type}{cycles} decay {self.decay_steps} to floor {floor}{after}")
        if self.ramps is not None:
            parts.append(f"ramps of {self.ramps.warmup} every {self.ramps.every}")
        return f"learning rate: {', '.join(parts)}; total {self.total_steps} steps"


def schedule_of(section: Any, training: Any, steps: int, relora: Any, start: int = 0) -> LRSchedule:
    """Build the schedule of a job from its [lr_scheduler], [training] and [adapter.relora] sections.

    `steps` is the number of steps of the run, `start` the step at which the schedule starts. A fractional warmup is a
    share of the schedule's length. Raises ScheduleError.
    """
    length = section.total_steps or steps - start
    if section.t_max is not None:
        run_length = {"epoch": training.epochs, "token": training.tokens}.get(section.t_max_unit)
        length = ceil(Fraction(section.t_max * steps, run_length)) if run_length else section.t_max
    period = relora.reset_period
    ramps = Ramps(period, relora.warmup_steps, relora.anneal_steps) if period and relora.warmup_steps else None
    fields = {name: value for name, value in asdict(section).items() if not name.startswith("t_max")}
    if section.warmup_steps is not None:
        reference = steps if isinstance(section.warmup_steps, str) else length
        fields["warmup_steps"] = steps_of(section.warmup_steps, reference, training.epochs)
    fields |= {"total_steps": length, "cycle_length": section.cycle_length or period, "ramps": ramps}
    return LRSchedule(**fields)
