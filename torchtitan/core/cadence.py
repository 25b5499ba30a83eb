"""Convert cadences to steps: every N steps, a share of the run, or N times per epoch. Needs no torch."""

from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from torchtitan.core.errors import JobError

CadenceValue = int | float | str
CADENCE_OPTIONS = ("metrics.log_freq", "validation.freq", "checkpoint.interval", "lr_scheduler.warmup_steps")
"""The options that accept a cadence."""
NO_LIMIT = 2**62
"""The value of training.steps in a job that ends by training.epochs or training.tokens alone."""


class CadenceError(JobError):
    """A cadence that has no meaning in its run."""


def steps_of(value: CadenceValue, total: int, epochs: int | None) -> int:
    """Convert a cadence to a number of steps in a run of `total` steps, rounded up.

    An int is in steps already, and a float is a share of all steps. "epoch" is the length of one of the run's `epochs`,
    "N/epoch" an N-th of it. A float counts as the decimal number in the job: 0.07 of 100 steps are 7, not 8.
    """
    return value if isinstance(value, int) else max(1, ceil(_exactly(value, total, epochs)))


def _exactly(value: CadenceValue, total: int, epochs: int | None) -> Fraction:
    """Return the same number of steps before rounding."""
    if isinstance(value, int):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(repr(value)) * total
    if epochs is None:  # a rule reports this earlier
        raise CadenceError(f'"{value}" needs training.epochs: without them the end of an epoch is not known')
    return Fraction(total, epochs * int(value.removesuffix("epoch").removesuffix("/") or 1))


def _measured_saves(interval: CadenceValue, freq: CadenceValue, total: int, epochs: int | None) -> int:
    """Return the checkpoint interval in steps, so that each checkpoint falls on a validation.

    An interval that is a multiple of validation.freq as written may not be one after both are rounded up. It is then
    rounded up to the next validation.
    """
    save, validate = (_exactly(setting, total, epochs) for setting in (interval, freq))
    if (save / validate).denominator > 1:
        return steps_of(interval, total, epochs)  # refused by check_measured_saves, unless a multiple by chance
    validation_steps = steps_of(freq, total, epochs)
    return validation_steps * ceil(save / validation_steps)


class Cadence(NamedTuple):
    """Steps between log lines, between validations and between checkpoints."""

    log: int
    validate: int
    save: int
    """Steps between checkpoints, or seconds if checkpoint.interval_type says so."""

    def describe(self, config: Any) -> str:
        """Describe how often events happen, as in "a line every step, a checkpoint every 500 steps".

        The job's setting follows in brackets if it is not a number of steps."""
        checkpoint = config.checkpoint
        parts = [("a line", self.log, config.metrics.log_freq, "step")]
        if config.validation.enable:
            parts.append(("a validation", self.validate, config.validation.freq, "step"))
        if checkpoint.enable and not checkpoint.load_only:
            unit = checkpoint.interval_type.removesuffix("s")
            parts.append(("a checkpoint", self.save, checkpoint.interval, unit))
        return ", ".join(
            f"{event} every {_count_text(number, unit)}{_setting_text(setting)}"
            for event, number, setting, unit in parts
        )


def with_end(config: Any, of_data: int | None) -> Any:
    """Return the job with its final number of steps.

    `of_data`: the last step of training.epochs or training.tokens, None without them. If training.steps comes first,
    options in epochs or tokens are converted to steps, because the run no longer has that many epochs or tokens.
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
    for section, name in (key.split(".") for key in CADENCE_OPTIONS):
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


def _count_text(number: int, unit: str) -> str:
    return unit if number == 1 else f"{number:,} {unit}s"


def _setting_text(value: CadenceValue) -> str:
    return "" if isinstance(value, int) else f" ({value})"


def cadence_of(config: Any, total: int) -> Cadence:
    """Return the cadence of a job that runs for `total` steps."""
    epochs, checkpoint = config.training.epochs, config.checkpoint
    freqs = config.metrics.log_freq, config.validation.freq, checkpoint.interval
    log, validate, save = (steps_of(setting, total, epochs) for setting in freqs)
    if checkpoint.best_metric is not None:
        save = _measured_saves(checkpoint.interval, config.validation.freq, total, epochs)
    return Cadence(log, validate, save)
