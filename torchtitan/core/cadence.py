"""How often a run does something: every so many steps, after each share of it, or so many times in an epoch. Needs no
torch.
"""

from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from torchtitan.core.errors import JobError

Said = int | float | str
SPEAKERS = ("metrics.log_freq", "validation.freq", "checkpoint.interval", "lr_scheduler.warmup_steps")
"""The options that say it."""
NO_LIMIT = 2**62
"""The value of training.steps in a job that training.epochs or training.tokens alone end."""


class CadenceError(JobError):
    """A cadence that has no meaning in its run."""


def steps_of(said: Said, total: int, epochs: int | None) -> int:
    """Of a run of so many steps: a whole number as it is; a share of all steps, and "epoch" or "N/epoch" of their
    `epochs`, rounded up. A share is the decimal number that is written, not the float next to it: 0.07 of 100 are 7.
    """
    return said if isinstance(said, int) else max(1, ceil(_exactly(said, total, epochs)))


def _exactly(said: Said, total: int, epochs: int | None) -> Fraction:
    """In steps, before it is rounded."""
    if isinstance(said, int):
        return Fraction(said)
    if isinstance(said, float):
        return Fraction(repr(said)) * total
    if epochs is None:  # which a rule says first
        raise CadenceError(f'"{said}" needs training.epochs: without them nothing says where an epoch ends')
    return Fraction(total, epochs * int(said.removesuffix("epoch").removesuffix("/") or 1))


def _measured_saves(interval: Said, freq: Said, total: int, epochs: int | None) -> int:
    """In steps, where each save falls on a validation. What is a multiple as it is said may be none once both are
    rounded up: it is then rounded up to the next validation.
    """
    save, validate = (_exactly(said, total, epochs) for said in (interval, freq))
    if (save / validate).denominator > 1:
        return steps_of(interval, total, epochs)  # which a limit refuses, unless it is a multiple by chance
    between = steps_of(freq, total, epochs)
    return between * ceil(save / between)


class Cadence(NamedTuple):
    """Of a run, in steps."""

    log: int
    validate: int
    save: int
    """In seconds, where the job says so."""

    def describe(self, config: Any) -> str:
        """In words, with what the job says where that is no number."""
        checkpoint = config.checkpoint
        parts = [("a line", self.log, config.metrics.log_freq, "step")]
        if config.validation.enable:
            parts.append(("a validation", self.validate, config.validation.freq, "step"))
        if checkpoint.enable and not checkpoint.load_only:
            unit = checkpoint.interval_type.removesuffix("s")
            parts.append(("a checkpoint", self.save, checkpoint.interval, unit))
        return ", ".join(f"{what} every {_counted(number, unit)}{_asked(said)}" for what, number, said, unit in parts)


def with_end(config: Any, of_data: int | None) -> Any:
    """Return the job with the number of steps that its run has. `of_data`: the step with which training.epochs or
    training.tokens end, None without them. Where training.steps comes first, options in epochs or tokens are
    converted to steps, because the run no longer has that many epochs or tokens.
    """
    training = config.training
    if of_data is None:
        return config
    if training.steps >= of_data:
        return replace(config, training=replace(training, steps=of_data))
    schedule, epochs = config.lr_scheduler, training.epochs
    units = {"epoch": epochs, "token": training.tokens}.get(schedule.t_max_unit)
    if schedule.t_max is not None and units:
        schedule = replace(schedule, t_max=ceil(Fraction(schedule.t_max * of_data, units)), t_max_unit="step")
    config = replace(config, lr_scheduler=schedule)
    for section, name in (key.split(".") for key in SPEAKERS):
        options = getattr(config, section)
        if isinstance(value := getattr(options, name), str) and epochs is not None:
            in_steps = steps_of(value, of_data, epochs)
            config = replace(config, **{section: replace(options, **{name: in_steps})})
    return config


def describe_end(training: Any, of_data: int | None) -> str:
    """Describe the end of the run. `training`: the section as it was written; `of_data` as in `with_end`."""
    if of_data is None:
        return ""
    length = f"epochs: {training.epochs}" if training.tokens is None else f"{training.tokens:,} tokens"
    if training.steps < of_data:
        return f"; training.steps = {training.steps} ends the run, before {length}, which take {of_data} steps"
    limit = "" if training.steps == NO_LIMIT else f" and end the run before training.steps = {training.steps}"
    return f"; {length}, which take {of_data} steps{limit}"


def _counted(number: int, unit: str) -> str:
    return unit if number == 1 else f"{number:,} {unit}s"


def _asked(said: Said) -> str:
    return "" if isinstance(said, int) else f" ({said})"


def cadence_of(config: Any, total: int) -> Cadence:
    """Of a job whose run has so many steps."""
    epochs, checkpoint = config.training.epochs, config.checkpoint
    freqs = config.metrics.log_freq, config.validation.freq, checkpoint.interval
    log, validate, save = (steps_of(said, total, epochs) for said in freqs)
    if checkpoint.best_metric is not None:
        save = _measured_saves(checkpoint.interval, config.validation.freq, total, epochs)
    return Cadence(log, validate, save)
