"""What is learned."""

from dataclasses import field
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.kinds import STRICT


@dataclass(config=STRICT, kw_only=True)
class Task:
    kind: str = "pretrain"
    """What is learned: a key of torchtitan.tasks.TASKS. pretrain: the next token, wherever a label counts. sft: the
    same of records that are whole and apart from each other, see [data]. documents: the same of documents that are read
    from beginning to end, each in a row of its own, training.seq_len tokens a batch. masked_lm: words that were
    hidden. seq_cls: the class of a record. dpo, ipo, orpo: which of two answers is preferred, see [dpo]."""
    label_field: str = "label"
    """The field that holds a record's class, of seq_cls; its text is in training.text_field."""
    second_text_field: str | None = None
    """The field of a second text, of seq_cls with pairs."""
    labels: list[str] = field(default_factory=list)
    """Names of the classes in their order, where data or exports have names. Unset: numbers from 0 on."""
    mask_share: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Share of the words that are to be found, of masked_lm."""
    mask_token: str | None = None
    """The special token that hides words. Unset: <mask> or [MASK]."""
