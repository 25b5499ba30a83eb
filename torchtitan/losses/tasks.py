"""The tasks that a job can train for, by name, each with its objective, and the chunks of their loss. No torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from torchtitan.core.errors import JobError
from torchtitan.core.registry import Option, Registry


@dataclass(frozen=True)
class TaskSpec:
    """A task: its objective, and how batches and samples are made for it."""

    objective: str
    """The "module:attribute" of an Objective (objective.py), called with the number of chunks (0: by batch)."""
    rows_per_sample: int = 1
    """Adjacent rows of a batch that one loss needs: 2 for pairs, rows 2i and 2i + 1. A job's batch sizes count them as
    one sample, and a microbatch never separates them."""
    loss_per_token: bool = True
    """True if the loss is a sum over tokens, so that context parallel ranks can add up their parts."""
    whole_records: bool = False
    """True if samples consist of whole records, which do not see each other; else text is concatenated and cut."""
    streams_documents: bool = False
    """True if each row of the batch reads a document from beginning to end, one segment a batch, then the next one."""
    labels: Literal["next", "same", "classes", "ends"] = "next"
    """The label of a token: the next token, itself where it was masked, or its record's class (on one token only).
    "ends": the last token of a record has label 0, all others none."""
    options_section: str = ""
    """Section of the job whose options are further arguments of the objective."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Further arguments of the objective, which a job gives in the table task.options."""

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objective's arguments of task.options, with defaults for missing ones."""
        return {name: option.default for name, option in self.options.items()} | dict(options)


Weight = Annotated[float, Field(ge=0)]
_SUMMED = TaskSpec("torchtitan.losses.objective:SummedCrossEntropy")
_PAIRS = TaskSpec(
    "torchtitan.losses.preference:Preference",
    rows_per_sample=2,
    loss_per_token=False,
    whole_records=True,
    options_section="dpo",
)
_built_in = {
    "pretrain": _SUMMED,
    "sft": replace(_SUMMED, whole_records=True),
    "documents": replace(_SUMMED, streams_documents=True),
    "masked_lm": replace(_SUMMED, labels="same"),
    "seq_cls": TaskSpec("torchtitan.losses.classification:ClassCrossEntropy", whole_records=True, labels="classes"),
    "dpo": _PAIRS,
    "ipo": replace(_PAIRS, objective="torchtitan.losses.preference:IPO"),
    "orpo": replace(_PAIRS, objective="torchtitan.losses.preference:ORPO"),
    "reward": replace(
        _PAIRS,
        objective="torchtitan.losses.reward:Reward",
        labels="ends",
        options_section="",
        options={"center_coefficient": Option(Weight, 0.0, "Weight of the squared sum of a pair's rewards.")},
    ),
}
TASKS: Registry[TaskSpec] = Registry("torchtitan.tasks", _built_in, TaskSpec)


def task_of(kind: str) -> TaskSpec:
    """Return the task of this kind; KeyError if it is unknown."""
    return TASKS[kind]


def rows_per_sample(kind: str) -> int:
    """Return the rows of a sample of this kind of task: 2 for pairs, else 1; also 1 for an unknown task."""
    task = TASKS.get(kind)
    return 1 if task is None else task.rows_per_sample


MASK_TOKENS = ("<mask>", "[MASK]")


def mask_token(special_tokens: Collection[str], chosen_token: str | None) -> str:
    """Return the special token that replaces masked words: `chosen_token`, or else one of MASK_TOKENS.

    Raises JobError if the tokenizer has none.
    """
    for token in [chosen_token] if chosen_token else MASK_TOKENS:
        if token in special_tokens:
            return token
    fault = f"{chosen_token!r} is none of" if chosen_token else f"none of {', '.join(MASK_TOKENS)} is among"
    shown = ", ".join(list(special_tokens)[:8]) or "none"
    more = " ..." * (len(special_tokens) > 8)
    raise JobError(f"{fault} the special tokens of the tokenizer, which are {shown}{more}")


CHUNK_BYTES = {"cpu": 2**29, "cuda": 2**30}
"""Limit of a chunk's float32 logits, by type of device; others have cuda's.

Each chunk reads and writes the head's gradient once, and while it is computed its logits exist two to three times.
"""


def auto_chunks(rows: int, width: int, device_type: str) -> int:
    """Return the number of chunks, at least 1, that keeps float32 logits [rows, width] within CHUNK_BYTES each."""
    rows_of_chunk = max(1, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // max(1, 4 * width))
    return max(1, -(-rows // rows_of_chunk))
