"""What a reader makes of a command line: today's options, and all that is to be said beside them.

Linears by the names that other libraries have for them.

A model's folder in the form of Hugging Face, as what a job begins from.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan.config.options import Fault, show
from torchtitan.importers.command_line import CommandLine
from torchtitan.models import FROM_HF, family_of
from torchtitan.models.hf.config import CONFIG, read_json

SAID_BY = "the command line"


@dataclass
class Meaning:
    """`values`: options by dotted name. `notes`: what a reader of the job should know, a line each. `faults`: what has
    no meaning here, or none at all; with any of them there is no job. `said_by`: the line, or a file; `dashes`: ahead
    of the names in it. `measures`: of a line that trains nothing, the words with which `torchtitan evaluate` does what
    it did with the job. `launched`: options of the line's launcher that the reader has read itself.
    """

    said_by: str = SAID_BY
    dashes: str = "--"
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    measures: list[str] | None = None
    launched: set[str] = field(default_factory=set)

    def refuse(self, flag: str, given: Any, allowed: str, remedy: str = "") -> None:
        self.faults.append(Fault(self.said_by, f"{self.dashes}{flag}", show(given), allowed, remedy))


def is_finite(number: float) -> bool:
    """Whether it is a number, and one that a float can hold."""
    return abs(number) <= sys.float_info.max


Reader = Callable[[CommandLine], Meaning]


ATTENTION = {"q": "*attention.wq", "k": "*attention.wk", "v": "*attention.wv", "o": "*attention.wo"}
LINEARS: dict[str, list[str]] = {
    **{f"{name}_proj": [pattern] for name, pattern in ATTENTION.items()},
    "gate_proj": ["*feed_forward.w1"],
    "down_proj": ["*feed_forward.w2"],
    "up_proj": ["*feed_forward.w3"],
    "query": [ATTENTION["q"]],
    "key": [ATTENTION["k"]],
    "value": [ATTENTION["v"]],
    "c_attn": [ATTENTION[name] for name in "qkv"],
    "c_fc": ["*feed_forward.w1"],
    "c_proj": [ATTENTION["o"], "*feed_forward.w2"],
    "out_proj": [ATTENTION["o"]],
    "fc1": ["*feed_forward.w1"],
    "fc2": ["*feed_forward.w2"],
}
"""As Llama, RoBERTa, GPT-2 and OPT call them, the targets that they are here."""


def family_in(folder: Path) -> str | None:
    """The family of its config.json; None for one that is not here. JobError for a file that cannot be read."""
    return family_of(read_json(folder / CONFIG).get("model_type"))


def from_folder(family: str, folder: str) -> dict[str, Any]:
    """Sizes and weights of the folder."""
    values = {"model.name": family, "model.flavor": FROM_HF, "model.hf_folder": folder}
    return values | {"checkpoint.initial_load_path": folder, "checkpoint.initial_load_in_hf": True}
