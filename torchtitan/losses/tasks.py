"""What a job can learn: tasks by name, each with the objective that it trains for. Needs no torch."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torchtitan.core.errors import JobError
from torchtitan.core.registry import Registry


@dataclass(frozen=True)
class Task:
    """`objective`: "module:attribute" of an Objective (objective.py), made with the number of pieces in which it runs.

    `together`: neighbouring rows of a batch that one loss is made of, such as 2 for pairs: rows 2i and 2i + 1. Batch
    sizes of a job count them as one, and they stay in one microbatch. `of_tokens`: whether the loss is a sum over
    tokens, or over samples each of which one token speaks for; then ranks that hold parts of a sequence (context
    parallel) add up to it. `packs`: whether samples are made of whole records, apart from each other, instead of all
    text end to end. `in_lanes`: whether each row of a batch reads a document from beginning to end, a segment a batch,
    and then the next one. `labels`: what a token's label is: the next token, itself where it has been hidden ("same"),
    or its record's class, which one token of it has ("classes"). `section`: of the job, whose options the objective is
    made with, too.
    """

    objective: str
    together: int = 1
    of_tokens: bool = True
    packs: bool = False
    in_lanes: bool = False
    labels: Literal["next", "same", "classes"] = "next"
    section: str = ""


MASKS = ("<mask>", "[MASK]")


def mask_token(special: Collection[str], asked: str | None) -> str:
    """Of a tokenizer's special tokens, the one that hides words: the one that is asked for, or of a known name.
    JobError where there is none.
    """
    found = [name for name in ([asked] if asked else MASKS) if name in special]
    if not found:
        given = f"{asked!r} is none of" if asked else f"none of {', '.join(MASKS)} is among"
        shown = ", ".join(list(special)[:8]) or "none"
        raise JobError(f"{given} the special tokens of the tokenizer, which are {shown}{' ...' * (len(special) > 8)}")
    return found[0]


_own = {
    "pretrain": Task("torchtitan.losses.objective:SummedCrossEntropy"),
    "sft": Task("torchtitan.losses.objective:SummedCrossEntropy", packs=True),
    "documents": Task("torchtitan.losses.objective:SummedCrossEntropy", in_lanes=True),
    "masked_lm": Task("torchtitan.losses.objective:SummedCrossEntropy", labels="same"),
    "seq_cls": Task("torchtitan.losses.classification:ClassCrossEntropy", packs=True, labels="classes"),
    "dpo": Task("torchtitan.losses.preference:Preference", 2, of_tokens=False, packs=True, section="dpo"),
    "ipo": Task("torchtitan.losses.preference:IPO", 2, of_tokens=False, packs=True, section="dpo"),
    "orpo": Task("torchtitan.losses.preference:ORPO", 2, of_tokens=False, packs=True, section="dpo"),
}
TASKS: Registry[Task] = Registry("torchtitan.tasks", _own, Task)
