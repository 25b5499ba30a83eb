"""Combinations of options' values, as `bench --sweep` and `sweep --over` name them. Needs no torch."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from torchtitan.config.job import JobConfig
from torchtitan.config.manager import said_by
from torchtitan.config.options import ConfigError, Fault
from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.process.ranks import likely_device
from torchtitan.rules import check
from torchtitan.rules.loading import load_job

MODEL = "model"
ERROR = "ERROR:"
"""How the message of a JobError begins in a log."""
MOST = 200
"""Combinations."""


def combinations(option: str, sweeps: list[str]) -> Iterator[dict[str, str]]:
    """Yield the combinations of the values of a repeated command-line option, as option of a job -> value.

    `sweeps`: texts like `training.seq_len=512,1024`. Raises JobError for one that is not an option with values.
    """
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = split_values(text)
        if not equals or not all(values) or (key != MODEL and "." not in key):
            allowed = "section.key=VALUE,VALUE, or model=FAMILY/FLAVOR,FAMILY/FLAVOR"
            raise JobError(f"{option}: given {sweep!r}; allowed: {allowed}")
        if key in axes or len(set(values)) < len(values):
            raise JobError(f"{option}: given {sweep!r}; allowed: each option once, with values that differ")
        if key == MODEL and (malformed := [value for value in values if value.count("/") != 1]):
            raise JobError(
                f"{option}: given {MODEL}={malformed[0]}; allowed: FAMILY/FLAVOR, as `torchtitan list models` says"
            )
        axes[key] = values
    for number, chosen in enumerate(itertools.product(*axes.values())):
        if number == MOST:
            raise JobError(f"{option}: given more than {MOST} combinations; allowed: as many; leave some values out")
        yield dict(zip(axes, chosen, strict=True))


def split_values(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes. A quote opens at the start of a value or within brackets."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and (depth or not values[-1].strip()):
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth <= 0:
            values.append("")
            continue
        values[-1] += character
    return [value.strip() for value in values]


def arguments_of(case: dict[str, str]) -> list[str]:
    job_args = []
    for key, value in case.items():
        family, _, flavor = value.partition("/")
        job_args += [f"--model.name={family}", f"--model.flavor={flavor}"] if key == MODEL else [f"--{key}={value}"]
    return job_args


def case_name(case: dict[str, str]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in case.items())


def checked_jobs(
    cases: list[dict[str, str]],
    job_args: list[str],
    ranks: int,
    adjust: Callable[[dict[str, str], JobConfig], tuple[JobConfig, Iterable[Fault]]],
    consequence: str,
) -> list[JobConfig]:
    """Return the job of each combination, as `adjust` changes it.

    Raises one JobError with the faults of all combinations, and `consequence` as its last line.
    """
    configs, faults = [], dict[str, str]()
    for case in cases:
        case_args = [*job_args, *arguments_of(case)]
        try:
            config, of_adjustment = adjust(case, load_job(case_args)[0])
            case_faults = [*of_adjustment, *check(config, ranks, likely_device(), said_by(case_args))]
            configs.append(config)
        except ConfigError as error:
            case_faults = error.faults
        faults |= {str(fault): case_name(case) for fault in reversed(case_faults) if str(fault) not in faults}
    if faults:
        lines = [f"{fault}" + f"  ({name})" * bool(name) for fault, name in faults.items()]
        raise JobError("\n".join([*lines, consequence]))
    return configs


def failure_reason(log: str, code: int | None) -> str:
    """Return the last error in a failed job's log up to its end, else the last line, or the exit code."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith(ERROR)]
    reason = " ".join(lines[errors[-1] if errors else -1 :])
    return wrap_lines(reason or f"exit code {code}")
