"""What is learned.

How records become samples, where a task learns them one by one (task.kind = "sft").

How pairs of answers are learned (task.kind = "dpo", "ipo", "orpo").
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Form, Fraction, NameIn, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Task:
    """The kind of task: language modeling, fine-tuning, classification, preferences."""

    kind: Annotated[str, NameIn("torchtitan.losses.tasks:TASKS")] = "pretrain"
    """What is learned. pretrain: the next token. sft: the next token of whole
    records, see [data]. documents: the next token of documents that are read in order, one stream per row,
    training.seq_len tokens a batch. masked_lm: masked words. seq_cls: the class of a record. dpo, ipo, orpo: the
    preferred one of two answers, see [dpo]."""
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


@dataclass(config=STRICT, kw_only=True)
class Data:
    """Chat templates, loss masks and sample packing of records."""

    chat_template: Place | None = None
    """Makes text of conversations, of any task, instead of the tokenizer's own: chatml, llama2, llama3, alpaca, a file
    that ends in .jinja, or Jinja itself, as checkpoints keep it."""
    default_system: str | None = None
    """What the system says in conversations in which it says nothing."""
    train_on: Literal["completion", "all", "last_turn"] = "completion"
    """What is learned: answers, everything, or the last answer of each record."""
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    """Where the token that ends a turn is learned: after each answer, after the last, after each turn of anybody, or
    nowhere."""
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """What becomes of a record that training.seq_len has no room for. Conversations are never cut."""
    max_empty_ratio: Fraction = 0.01
    """Refuse a source with a larger share of records of which nothing is learned; the others leave them out."""
    packing: Literal["best_fit", "off"] | None = None
    """best_fit: records share samples of training.seq_len tokens where they fit, apart from each other. off: each is a
    sample. Unset: off where classes are learned (task.kind = "seq_cls"), so that batch sizes count records, else
    best_fit. Pairs of answers are never packed."""
    padding: Literal["right", "left"] = "right"
    """Where a sample that is not full has its padding, which nobody learns or sees."""
    pad_to: (
        Annotated[
            str,
            Field(pattern=r"^(seq_len|batch|multiple:[1-9]\d*)$"),
            Form('"seq_len", "batch" or "multiple:N", as "multiple:64"'),
        ]
        | None
    ) = None
    """Length of samples that are not packed: training.seq_len, the longest of the batch, or that rounded up to a
    multiple of a number, as "multiple:64". Unset: rounded up to a multiple of 8 on a CPU and 64 on a GPU; seq_len with
    pipelines, compiled blocks, experts or padding on the left, and the start says what share of the tokens it is."""
    group_by_length: bool = False
    """Steps of samples that are about as long, where they are not packed, in an order drawn anew for each epoch."""
    shards: Annotated[str, Field(pattern=r"^[1-9]\d*/[1-9]\d*$"), Form('"N/M", as "2/4"')] = "1/1"
    """Train on one of so many equal parts of each source's records, as "2/4" on the second of four."""
    packing_window: Annotated[int, Field(ge=2)] = 100_000
    """Records, in their shuffled order, that are packed together."""
    num_proc: Positive | None = None
    """Processes that tokenize before the run. Unset: training.dataloader.num_workers, at least 1."""
    cache_dir: Place | None = None
    """Folder of what was tokenized before the run. Unset: data, inside job.dump_folder."""


@dataclass(config=STRICT, kw_only=True)
class Dpo:
    """Losses on pairs of answers: dpo, ipo, orpo."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How closely the model keeps to its reference; of orpo the weight of the answers' odds."""
    reference: Place | None = None
    """The model that answers are compared with, whole, of the same family and sizes: a folder of Hugging Face, a
    checkpoint, a run. Unset: the model that the run began from (dpo, ipo)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be the wrong way round (dpo)."""
