"""How far the weights were trained that another run starts from: what their folder says of it. Needs no torch."""

from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.checkpoint.kinds import Kind, find_weights
from torchtitan.checkpoint.layout import CheckpointError, complete_steps, read_json, read_state

SCHEDULE_START = "schedule_start"
"""In the trainer's state: the step at which the schedule of the learning rate began."""

TRAINING_STATE = "training_state.json"
"""Beside the weights of ReLoRA's scripts: {update_step, tokens_seen, ...}."""


class Counters(NamedTuple):
    step: int
    tokens: int


def counters_of(kind: Kind, place: Path) -> Counters | None:
    """Of weights that `find_weights` found; None where nothing is said, as beside an export."""
    try:
        if kind == "ours":
            said, names = read_state(place)["trainer"], ("step", "tokens")
        else:
            beside = place if place.is_dir() else place.parent
            said, names = read_json(beside / TRAINING_STATE), ("update_step", "tokens_seen")
    except (OSError, CheckpointError):
        return None
    step, tokens = (said.get(name, 0) for name in names)
    return Counters(step, tokens) if type(step) is int and type(tokens) is int and step > 0 else None


def schedule_start(dump_folder: str, options: Any) -> int:
    """The step at which the schedule of a run begins or began, by its options in the section [checkpoint]. 0 where
    nothing can be read, which loading and the rules have words for.
    """
    try:
        complete, _ = complete_steps(Path(dump_folder, options.folder)) if options.enable else ([], [])
        if complete:
            return int(read_state(complete[0])["trainer"].get(SCHEDULE_START, 0))
        if not options.initial_load_counters or options.initial_load_path is None:
            return 0
        found = counters_of(*find_weights(Path(options.initial_load_path)))
        return 0 if found is None else found.step
    except (OSError, ValueError, TypeError, CheckpointError):
        return 0
