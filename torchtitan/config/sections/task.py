"""The task, the conversion of records to samples, and the losses on pairs of answers."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.config.sections.field_types import STRICT, Form, Fraction, NameIn, Place, Positive


@dataclass(config=STRICT, kw_only=True)
class Task:
    """The kind of task: language modeling, fine-tuning, classification, preferences."""

    kind: Annotated[str, NameIn("torchtitan.losses.tasks:TASKS")] = "pretrain"
    """Task to learn. pretrain: the next token. sft: the next token of whole records, see [data]. documents: the next
    token of documents read in order, one stream per row, training.seq_len tokens a batch. masked_lm: masked words.
    seq_cls: the class of a record. dpo, ipo, orpo: the preferred one of two answers, see [dpo]."""
    label_field: str = "label"
    """Field of a record that holds its class (seq_cls); its text is in training.text_field."""
    second_text_field: str | None = None
    """Field of a second text, for seq_cls on pairs."""
    labels: list[str] = field(default_factory=list)
    """Names of the classes in their order, if data or exports use names. Unset: numbers from 0."""
    mask_share: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Fraction of words to predict (masked_lm)."""
    mask_token: str | None = None
    """Special token that replaces masked words. Unset: <mask> or [MASK]."""


@dataclass(config=STRICT, kw_only=True)
class Data:
    """Chat templates, loss masks and sample packing of records."""

    chat_template: Place | None = None
    """Template that formats conversations, for any task, instead of the tokenizer's: chatml, llama2, llama3, alpaca, a
    .jinja file, or Jinja source."""
    default_system: str | None = None
    """System message of conversations that have none."""
    train_on: Literal["completion", "all", "last_turn"] = "completion"
    """Part of a record that is learned: the answers (completion), everything, or the last answer."""
    train_on_eos: Literal["turn", "last", "all", "none"] = "turn"
    """Turns with a trained end-of-turn token: each answer (turn), the last answer, all turns of any role, or none."""
    too_long: Literal["error", "drop", "truncate", "split"] = "error"
    """Handling of records longer than training.seq_len. Conversations are never cut."""
    max_empty_ratio: Fraction = 0.01
    """Maximum fraction of a source's records without any token to learn. Sources above it are refused; below it such
    records are dropped."""
    packing: Literal["best_fit", "off"] | None = None
    """Sample packing. best_fit: records share samples of training.seq_len tokens, without seeing each other. off: each
    record is a sample. Unset: off for classification (task.kind = "seq_cls"), where batch sizes then count records,
    otherwise best_fit. Pairs of answers are never packed."""
    padding: Literal["right", "left"] = "right"
    """Side of a sample that is padded. Padding is masked in attention and loss."""
    pad_to: (
        Annotated[
            str,
            Field(pattern=r"^(seq_len|batch|multiple:[1-9]\d*)$"),
            Form('"seq_len", "batch" or "multiple:N", as "multiple:64"'),
        ]
        | None
    ) = None
    """Length of samples that are not packed: training.seq_len, the longest of the batch, or that rounded up to a
    multiple of a number, as "multiple:64". Unset: rounded up to a multiple of 8 on a CPU and 64 on a GPU, but seq_len
    with pipelines, compiled blocks, experts or padding on the left; the log then says what fraction of the tokens is
    padding."""
    group_by_length: bool = False
    """Group unpacked samples of similar length into steps, in a new random order each epoch."""
    shards: Annotated[str, Field(pattern=r"^[1-9]\d*/[1-9]\d*$"), Form('"N/M", as "2/4"')] = "1/1"
    """Part of each source's records to train on, as "2/4" for the second of four equal parts."""
    packing_window: Annotated[int, Field(ge=2)] = 100_000
    """Records, in shuffled order, that are packed together."""
    num_proc: Positive | None = None
    """Processes that tokenize before the run. Unset: training.dataloader.num_workers, at least 1."""
    cache_dir: Place | None = None
    """Folder for data tokenized before the run. Unset: data, inside job.dump_folder."""


@dataclass(config=STRICT, kw_only=True)
class Dpo:
    """Losses on pairs of answers: dpo, ipo, orpo."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Strength with which the model is kept close to its reference; for orpo the weight of the odds ratio."""
    reference: Place | None = None
    """Reference model, of the same family and sizes: a Hugging Face folder, a checkpoint or a run. Unset: the model
    that training starts from (dpo, ipo)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels (dpo)."""
