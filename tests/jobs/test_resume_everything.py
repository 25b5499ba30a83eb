"""Every task and every dataset resumes from a checkpoint and after a rollback, with the losses and the state of an
uninterrupted run.
"""

import gzip
import json
import shutil
from pathlib import Path

import datasets as hub
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.commands.prepare import main as prepare
from torchtitan.config import manager
from torchtitan.datasets import BUILT_IN
from torchtitan.guards import RollBack
from torchtitan.losses.tasks import _built_in as tasks
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

SAVED, LAST = 2, 4
ASKED = dict(task__kind="sft", training__seq_len=192)
SEEN_BY_ALL = "{dim=32, n_layers=1, n_heads=4, ffn_dim=32, vocab_size=2048, max_seq_len=64}"
CLASSES = SEEN_BY_ALL.replace("}", ", n_classes=2}")
ONE_REWARD = "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, n_classes=1}"
ROBERTA = dict(model__name="roberta", model__tokenizer_path="debug", training__seq_len=64)
WORDS = ROBERTA | dict(model__overrides=SEEN_BY_ALL, task__mask_token="<|reserved_special_token_0|>")
OF_CLASSES = ROBERTA | dict(model__overrides=CLASSES, task__kind="seq_cls")
NAMED = OF_CLASSES | dict(task__labels='["bad", "good"]')
REMEMBERS = dict(adapter__kind="neurocache", adapter__rank=4, adapter__neurocache__resume_warmup="saved")
RECORDS = {
    "texts": [{"text": f"number {n} " + "and so on " * (n % 5)} for n in range(60)],
    "sentences": [{"text": f"sentence {n}", "label": n % 2} for n in range(60)],
    "pairs": [{"prompt": f"{n} ", "chosen": f"yes {n}", "rejected": "no"} for n in range(60)],
    "asked": [{"instruction": f"what is {n}?", "input": "", "output": f"a number, {n}"} for n in range(60)],
    "blocks": [{"input_ids": [(n + place) % 250 for place in range(32)]} for n in range(60)],
}

TASKS = {
    "pretrain": ("texts.jsonl", {}),
    "sft": ("asked.jsonl", ASKED),
    "documents": ("texts.jsonl", REMEMBERS),
    "masked_lm": ("texts.jsonl", WORDS),
    "seq_cls": ("sentences.jsonl", OF_CLASSES),
    "dpo": ("pairs.jsonl", {}),
    "ipo": ("pairs.jsonl", {}),
    "orpo": ("pairs.jsonl", {}),
    "reward": ("pairs.jsonl", dict(model__overrides=ONE_REWARD)),
}
"""Task -> its records and further options."""

FILES = ("jsonl", "jsonl.gz", "csv", "parquet")
DATASETS = {
    "python_stdlib": (None, {}),
    "python_stdlib_validation": (None, {}),
    "text": ("texts.jsonl", {}),
    "tokens": ("shards", {}),
    "pretokenized": ("blocks", {}),
    "pretokenized_validation": ("blocks", {}),
    "huggingface": ("saved", {}),
    "huggingface_validation": ("saved", {}),
    "huggingface_test": ("hub", {}),
    "c4": ("hub", {}),
    "c4_validation": ("hub", {}),
    "c4_test": ("hub", {}),
    "sentiment": (None, OF_CLASSES),
    "sentiment_validation": (None, NAMED),
}
MORE = {
    **{f"text in .{kind}": ("text", f"texts.{kind}", {}) for kind in FILES[1:]},
    **{f"classes in .{kind}": ("text", f"sentences.{kind}", OF_CLASSES) for kind in FILES[1:]},
    "named classes": ("text", "sentences.jsonl", NAMED),
    "classes that datasets saved": ("huggingface", "saved classes", OF_CLASSES),
    "epochs": ("text", "texts.jsonl", dict(training__epochs=1, training__global_batch_size=16)),
    "tokens of epochs": ("tokens", "shards", dict(training__epochs=1, training__global_batch_size=16)),
    "packed records": ("text", "asked.jsonl", ASKED | dict(data__packing="best_fit")),
    "unpacked records": ("text", "asked.jsonl", ASKED | dict(data__packing="off", data__pad_to="batch")),
    "streamed from a folder": ("huggingface", "hub", {}),
}
CASES = {
    **{f"task {name}": ("text", path, more | {"task__kind": name}) for name, (path, more) in TASKS.items()},
    **{name: (name, path, more) for name, (path, more) in DATASETS.items()},
    **MORE,
}


def test_no_task_and_no_dataset_is_left_out():
    assert TASKS.keys() == tasks.keys() and DATASETS.keys() == BUILT_IN.keys()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, records in RECORDS.items():
        table = pyarrow.Table.from_pylist(records)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        if name in ("texts", "sentences"):
            with gzip.open(folder / f"{name}.jsonl.gz", "wb") as packed:
                packed.write((folder / f"{name}.jsonl").read_bytes())
            pyarrow.csv.write_csv(table, folder / f"{name}.csv")
            pyarrow.parquet.write_table(table, folder / f"{name}.parquet")
    splits = {name: hub.Dataset.from_list(RECORDS["texts"]) for name in ("train", "validation")}
    hub.DatasetDict(splits).save_to_disk(folder / "saved")
    hub.DatasetDict({"train": hub.Dataset.from_list(RECORDS["sentences"])}).save_to_disk(folder / "saved classes")
    blocks = hub.Dataset.from_list(RECORDS["blocks"])
    hub.DatasetDict({"train": blocks, "validation": blocks}).save_to_disk(folder / "blocks")
    about = {"tokenizer": "bytes", "dataset": "made", "text_field": "text", "sequence_length": 32}
    (folder / "blocks" / "args.json").write_text(json.dumps(about))
    (folder / "hub").mkdir()
    for split in ("train", "validation", "test"):
        (folder / "hub" / f"{split}.jsonl").write_bytes((folder / "texts.jsonl").read_bytes())
    source = ["--dataset", "text", "--dataset_path", str(folder / "texts.jsonl"), "--tokenizer_path", "bytes"]
    assert prepare([*source, "--output", str(folder / "shards")]) in (0, None)
    return folder


class GoesBack(Trainer):
    """A trainer that goes back to its checkpoint once, after the next step."""

    went_back = False

    def step(self, batch):
        super().step(batch)
        if self.current_step == SAVED + 1 and not self.went_back:
            self.went_back = True
            raise RollBack("of a test")


def straight_resumed_and_back(argv):
    """Return losses and final state of the job: uninterrupted, resumed, and after a rollback."""
    folder = manager.load(argv).job.dump_folder
    results = [jobs.train(argv)]
    forget_the_last(folder)
    results.append(jobs.train(argv))
    forget_the_last(folder)
    trainer = GoesBack(manager.load(argv), read_ranks())
    trainer.train()
    trainer.metrics.close()
    assert trainer.went_back
    results.append((jobs.logged_steps(trainer.exports.folder), jobs.state_hash(trainer)))
    return [([(row["step"], row["loss"]) for row in rows], state) for rows, state in results]


def forget_the_last(folder):
    for step in Path(folder, "checkpoint").glob("step-*"):
        if step.name != f"step-{SAVED:08d}":
            shutil.rmtree(step)


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_as_if_it_had_never_been_interrupted(case, data, tmp_path):
    dataset, path, more = CASES[case]
    options = dict(training__dataset=dataset, model__overrides=jobs.SHALLOW, training__steps=LAST)
    options |= dict(checkpoint__enable=True, checkpoint__interval=SAVED, training__local_batch_size=4)
    options |= dict(training__global_batch_size=4) | more
    argv = jobs.arguments(tmp_path, data / path if path else "", **options)
    argv = argv if path else [argument for argument in argv if not argument.endswith("dataset_path=")]
    (results,) = run_ranks(1, straight_resumed_and_back, argv)
    straight, resumed, went_back = results
    assert [step for step, _ in straight[0]] == list(range(1, len(straight[0]) + 1))
    assert resumed == straight
    assert went_back == straight
