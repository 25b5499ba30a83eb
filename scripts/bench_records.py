"""Measure training on whole records next to transformers' Trainer, step by step over the same batches.

    python scripts/bench_records.py [--only NAME ...] [--threads 1] [--batch 16] [--pairs 4] [--repeats 5] [--aa]
        [--recompute]

The real trainer (A) and the steps of transformers.Trainer without its loop (B: `training_step`, clipping, fused AdamW,
schedule) take turns A B B A in one process, with the same rows, padded to the longest, in float32. Neither recomputes
anything; with --recompute A does as by default, every second block. "classes": a RoBERTa of 6 layers and width 384 for
texts of 8 to 60 words; "classes, dropout" with transformers' default dropout of 0.1. "records": a Llama of 34 million
parameters, all weights trained on records of 6 to 520 tokens; "full rows": of 512 tokens, so that none is padded.
"pairs": the same model by DPO, on prompts of up to 200 tokens and answers of up to 320; both answers are in one padded
batch, as in trl's DPOTrainer, and the reference is computed before. --aa compares B with itself. --quick shows that it
runs.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_timing import Goal, Guest, heading, row, steps, take_turns, throw_lines_away
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from torchtitan.config import manager
from torchtitan.process.ranks import Ranks
from torchtitan.training import trainer

WORDS = 50265
PAD = 1
"""A byte that no text has; transformers' RoBERTa counts positions of other tokens."""


@dataclass(frozen=True)
class Kind:
    """What is trained. `lengths`: of records, in tokens. `goal`: for B's time over A's."""

    options: dict[str, str]
    peer: Callable[[dict[str, Any]], PreTrainedModel]
    sizes: dict[str, Any]
    lengths: tuple[int, int]
    goal: float

    @property
    def has_pairs(self) -> bool:
        return self.options["task.kind"] == "dpo"


def roberta(sizes: dict[str, Any]) -> PreTrainedModel:
    config = RobertaConfig(
        vocab_size=WORDS,
        hidden_size=sizes["dim"],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        intermediate_size=sizes["ffn_dim"],
        hidden_dropout_prob=sizes["dropout"],
        attention_probs_dropout_prob=sizes["attention_dropout"],
        pad_token_id=PAD,
        num_labels=2,
    )
    return RobertaForSequenceClassification(config)


def llama(sizes: dict[str, Any]) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["dim"],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        intermediate_size=sizes["multiple_of"],
    )
    return LlamaForCausalLM(config)


CLASSES = {"dim": 384, "n_layers": 6, "n_heads": 6, "ffn_dim": 1536, "dropout": 0.0, "attention_dropout": 0.0}
CLASSES |= {"vocab_size": WORDS, "max_seq_len": 512, "n_classes": 2, "pad_id": PAD}
RECORDS = {"dim": 512, "n_layers": 8, "n_heads": 8, "multiple_of": 1536, "vocab_size": 8192}
SMALL = {"dim": 32, "n_layers": 1, "n_heads": 2}
KINDS = {
    "classes": Kind({"model.name": "roberta", "task.kind": "seq_cls"}, roberta, CLASSES, (12, 88), 1.0),
    "records": Kind({"model.name": "llama3", "task.kind": "sft"}, llama, RECORDS, (6, 520), 1.3),
}
DROPPED = CLASSES | {"dropout": 0.1, "attention_dropout": 0.1}
KINDS["classes, dropout"] = replace(KINDS["classes"], sizes=DROPPED)
KINDS["full rows"] = replace(KINDS["records"], lengths=(512, 512))
KINDS["pairs"] = replace(KINDS["records"], options={"model.name": "llama3", "task.kind": "dpo"})
PROMPT = 200
"""Tokens of the longest prompt of a pair."""


def write_records(path: Path, kind: Kind, count: int) -> None:
    """Write records whose texts have, with a begin and an end token, between the kind's `lengths` tokens."""
    generator, (least, most) = random.Random(0), kind.lengths

    def text(longest: int) -> str:
        return "".join(generator.choices("abcdefgh ", k=generator.randint(least, longest) - 2))

    with path.open("w") as file:
        for number in range(count):
            if kind.has_pairs:
                record = {"prompt": text(PROMPT), "chosen": text(most - PROMPT), "rejected": text(most - PROMPT)}
            else:
                record = {"text": text(most), "label": number % 2}
            file.write(json.dumps(record) + "\n")


def our_trainer(kind: Kind, folder: Path, options: argparse.Namespace, count: int) -> trainer.Trainer:
    """Build the trainer of a job of `count` steps."""
    batch = options.batch
    write_records(folder / "records.jsonl", kind, 64 * batch)
    settings = kind.options | {
        "job.dump_folder": folder / "run",
        "model.overrides": "{" + ", ".join(f"{name}={size}" for name, size in kind.sizes.items()) + "}",
        "model.tokenizer_path": "bytes",
        "training.dataset": "text",
        "training.dataset_path": folder / "records.jsonl",
        "training.local_batch_size": batch // (1 + kind.has_pairs),
        "training.seq_len": kind.lengths[1],
        "training.steps": count,
        "training.mixed_precision_param": "float32",
        "data.packing": "off",
        "metrics.plot": "false",
    }
    if not options.recompute:
        settings["activation_checkpoint.mode"] = "none"
    return trainer.Trainer(manager.load([f"--{name}={value}" for name, value in settings.items()]), Ranks())


class PairTrainer(Trainer):
    """transformers.Trainer with the loss of trl's DPOTrainer, for a reference whose log-probabilities are known: 0."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        picked = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)
        chosen, rejected = picked.where(labels != -100, 0).sum(-1).view(-1, 2).unbind(1)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class Peer:
    """The steps of transformers.Trainer."""

    def __init__(self, kind: Kind, folder: Path, count: int):
        self.model = kind.peer(kind.sizes)
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=count, learning_rate=8e-4, use_cpu=True, report_to=[], disable_tqdm=True
        )
        self.trainer = (PairTrainer if kind.has_pairs else Trainer)(self.model, arguments)
        self.trainer.create_optimizer_and_scheduler(count)
        self.trainer.current_gradient_accumulation_steps = 1  # as its loop sets it
        self.kind = kind

    def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return transformers' inputs of our batch [B, S]."""
        documents, labels = batch["document_ids"], batch["labels"]
        mask = documents == documents[:, :1]
        inputs = {"input_ids": batch["tokens"].where(mask, PAD), "attention_mask": mask.long()}
        if self.kind.has_pairs:
            return inputs | {"labels": labels}
        if self.kind.options["task.kind"] == "seq_cls":
            return inputs | {"labels": labels.amax(1)}
        return inputs | {"labels": inputs["input_ids"].where(mask, -100)}

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        self.trainer.training_step(self.model, self.inputs(batch))
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.trainer.lr_scheduler.step()
        self.model.zero_grad()


class Noted:
    """A loader that notes the batch that it handed out last."""

    def __init__(self, loader: Any):
        self.loader, self.position = loader, loader.position

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.loader:
            self.batch = batch
            yield batch


def measure(name: str, kind: Kind, options: argparse.Namespace) -> Iterator[str]:
    count = steps(options.pairs, options.repeats)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        peer, ours = Peer(kind, folder, 2 * count), our_trainer(kind, folder, options, count)
        noted = Noted(ours.loader)
        if options.aa:
            other, batch = Peer(kind, folder, 2 * count), next(iter(noted))
            turns = take_turns(lambda: peer.step(batch), lambda: other.step(batch), options.pairs, options.repeats)
        else:
            ours.loader = guest = Guest(noted, lambda: peer.step(noted.batch), options.pairs, options.repeats)
            ours.train()
            turns = guest.turns
    for clock, seconds in (("CPU", turns.cpu), ("wall", turns.wall)):
        both = [turns.median(seconds, side) for side in "AB"]
        ratios, goal = turns.ratios(seconds, "B", "A"), Goal(">=", kind.goal).unless(options.aa)
        note = f"{both[1]:.3f} / {both[0]:.3f} s"
        yield row(f"{name}: transformers / torchtitan, {clock} time", ratios, goal, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="records, or answers, of a step")
    parser.add_argument("--pairs", type=int, default=4, help="turns of each side in a repeat (default: 4)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    parser.add_argument("--recompute", action="store_true", help="recompute every second block here, as by default")
    parser.add_argument("--aa", action="store_true", help="compare transformers' steps with themselves: the noise")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    throw_lines_away()
    print(heading(threads=options.threads), flush=True)
    for name in options.only:
        kind = KINDS[name]
        if options.quick:
            options.pairs = options.repeats = 1
            kind = replace(kind, sizes=kind.sizes | SMALL)
        for line in measure(name, kind, options):
            print(line, flush=True)


if __name__ == "__main__":
    main()
