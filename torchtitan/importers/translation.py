"""The result of translating a command line: options of a job, notes and faults.

Also the names of linear layers in other libraries, and the options of a job that starts from a Hugging Face folder.
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
    """A translated command line or file.

    `values`: options by dotted name. `notes`: remarks for readers of the job, one line each. `faults`: options that
    cannot be translated or are invalid; with any of them there is no job. `said_by`: the line, or a file. `dashes`:
    prefix of the options' names in it. `measures`: for a line that only evaluates, the arguments with which
    `torchtitan evaluate` does the same with the job. `launched`: launcher options that the reader has handled itself.
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
    """Return True if `number` is not NaN and a float can hold it."""
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
"""Names of linear layers in Llama, RoBERTa, GPT-2 and OPT -> adapter targets here."""


def family_in(folder: Path) -> str | None:
    """Return the model family of a folder's config.json, or None if it is not supported.

    Raises JobError if the file cannot be read.
    """
    return family_of(read_json(folder / CONFIG).get("model_type"))


def from_folder(family: str, folder: str) -> dict[str, Any]:
    """Return the options that take sizes and weights from a folder."""
    values = {"model.name": family, "model.flavor": FROM_HF, "model.hf_folder": folder}
    return values | {"checkpoint.initial_load_path": folder, "checkpoint.initial_load_in_hf": True}
