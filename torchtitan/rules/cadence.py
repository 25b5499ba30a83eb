"""Rules on how often a run does something."""

from collections.abc import Iterator

from torchtitan.cadence import SPEAKERS
from torchtitan.config.options import Fault
from torchtitan.rules.facts import Facts


def epochs_are_counted(facts: Facts) -> Iterator[Fault]:
    """What is said in epochs has a meaning where the run is as long as these."""
    for key in SPEAKERS if facts.config.training.epochs is None else ():
        section, _, name = key.partition(".")
        if isinstance(getattr(getattr(facts.config, section), name), str):
            allowed = "steps, or a share of the run such as 0.1, without training.epochs"
            yield facts.fault(key, allowed, "write one of them, or training.epochs instead of training.steps")


def seconds_are_whole(facts: Facts) -> Iterator[Fault]:
    options = facts.config.checkpoint
    if options.interval_type == "seconds" and not isinstance(options.interval, int):
        allowed = 'a whole number with checkpoint.interval_type = "seconds"'
        yield facts.fault("checkpoint.interval", allowed, 'write seconds, or interval_type = "steps"')
