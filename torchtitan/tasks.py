"""What a job can learn: tasks by name, each with the objective that it trains for. Needs no torch."""

from dataclasses import dataclass

from torchtitan.registration import Registry


@dataclass(frozen=True)
class Task:
    """`objective`: "module:attribute" of an Objective (loss.py), made with the number of pieces in which it runs.

    `together`: neighbouring samples of a batch that one loss is made of, such as 2 for pairs: rows 2i and 2i + 1. They
    stay in one microbatch. `of_tokens`: whether the loss is a sum over tokens, or over samples each of which one token
    speaks for; then ranks that hold parts of a sequence (context parallel) add up to it. `packs`: whether samples are
    made of whole records, apart from each other, instead of all text end to end. `in_lanes`: whether each row of a
    batch reads a document from beginning to end, a segment a batch, and then the next one.
    """

    objective: str
    together: int = 1
    of_tokens: bool = True
    packs: bool = False
    in_lanes: bool = False


_own = {
    "pretrain": Task("torchtitan.loss:SummedCrossEntropy"),
    "sft": Task("torchtitan.loss:SummedCrossEntropy", packs=True),
    "documents": Task("torchtitan.loss:SummedCrossEntropy", in_lanes=True),
}
TASKS: Registry[Task] = Registry("torchtitan.tasks", _own, Task)
