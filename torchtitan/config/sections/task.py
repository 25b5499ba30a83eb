"""What is learned."""

from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT


@dataclass(config=STRICT, kw_only=True)
class Task:
    kind: str = "pretrain"
    """What is learned: a key of torchtitan.tasks.TASKS. pretrain: the next token, wherever a label counts. sft: the
    same of records that are whole and apart from each other, see [data]. documents: the same of documents that are read
    from beginning to end, each in a row of its own, training.seq_len tokens a batch."""
