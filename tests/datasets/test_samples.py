"""Unpacked samples are padded to the longest of their batch if the plan allows it, with the same loss as samples that
are padded to training.seq_len.
"""

import dataclasses
import json
import logging

import pytest

from tests.support import jobs, judged
from tests.support.classification_jobs import DEEPER, ROBERTA, TWO_CLASSES, validations
from tests.support.classification_jobs import job_arguments as class_arguments
from tests.support.judged import CP, EP, MOE, PP, TP, lines
from tests.support.pool import run_ranks
from tests.support.preference_jobs import BYTES, dpo_arguments, validation_losses, write_pairs
from torchtitan.assembly.data import JobDatasets
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.datasets.position import check_same_data
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob

anywhere = judged.anywhere
OFF = ("--task.kind=sft", "--data.packing=off")
CLASSES = ("--model.name=roberta", "--task.kind=seq_cls", "--model.overrides={n_classes = 2}")
MULTIPLES = [
    (("--task.kind=dpo",), "cpu", 8),
    (("--task.kind=orpo",), "cuda", 64),
    (CLASSES, "cpu", 8),
    (OFF, "cuda", 64),
    ((*OFF, TP + "3"), "cpu", 24),
    ((*OFF, TP + "3", "--parallelism.disable_sequence_parallel"), "cpu", 8),
    ((*CLASSES, CP + "8"), "cpu", 16),
    ((*OFF, "--data.pad_to=seq_len"), "cpu", 0),
    ((*OFF, "--data.pad_to=batch"), "cuda", 1),
    ((*OFF, "--data.pad_to=multiple:12"), "cuda", 12),
    (("--task.kind=sft",), "cpu", 0),
    ((*CLASSES, "--data.packing=best_fit"), "cpu", 0),
    ((), "cpu", 0),
    (("--task.kind=dpo", PP + "2"), "cpu", 0),
    ((*OFF, "--compile.enable"), "cuda", 0),
    ((*OFF, "--data.padding=left"), "cpu", 0),
    ((*OFF, MOE), "cpu", 0),
    ((*OFF, MOE, EP + "2"), "cpu", 0),
]


@pytest.mark.parametrize("arguments, device, multiple", MULTIPLES, ids=map(str, range(len(MULTIPLES))))
def test_the_multiple_of_padded_lengths(arguments, device, multiple):
    assert ResolvedJob(load(["--model.tokenizer_path=bytes", *arguments]), 8, device).data.padding_multiple == multiple


def lengths(batches):
    """Yield each batch's length and the length of its longest sample."""
    for batch in batches:
        documents = batch["document_ids"]
        yield documents.shape[1], int((documents == documents[:, :1]).sum(1).max())


@pytest.mark.parametrize("kind", ["dpo", "seq_cls"])
def test_batches_are_as_long_as_their_longest_sample_needs(tmp_path, kind):
    if kind == "dpo":
        config, vocabulary = (
            load(dpo_arguments(tmp_path, write_pairs(tmp_path / "rows.jsonl"), training__seq_len=40)),
            BYTES,
        )
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=1))
    else:
        config, vocabulary = load(class_arguments(tmp_path, "gpt2", training__epochs=1)), build_tokenizer("debug")
    datasets = JobDatasets(ResolvedJob(config))
    for make in (datasets.training_loader, datasets.validation_loader):
        widths = list(lengths(make(vocabulary, 0)))
        assert all(width == -(-longest // 8) * 8 for width, longest in widths)
        assert max(width for width, _ in widths) < config.training.seq_len and len(widths) > 1


QUICK = dict(training__steps=3, validation__freq=3, lr_scheduler__warmup_steps=1, model__overrides=DEEPER)
PLANS = {
    "one rank": (1, {}),
    "FSDP 2": (2, dict(parallelism__data_parallel_shard_degree=2, training__local_batch_size=2)),
    "TP 2": (2, dict(parallelism__tensor_parallel_degree=2)),
    "CP 2": (2, dict(parallelism__context_parallel_degree=2)),
}


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Losses and validations of each task with all samples padded to training.seq_len."""
    folder = tmp_path_factory.mktemp("padded")
    rows = write_pairs(folder / "rows.jsonl")
    full = dict(data__pad_to="seq_len")
    ((pairs, _),) = run_ranks(1, jobs.train, dpo_arguments(folder / "dpo", rows, **full))
    class_job = class_arguments(folder / "classes", "roberta", **QUICK | full | FEW)
    ((classes, _),) = run_ranks(1, jobs.train, class_job)
    return rows, pairs, validation_losses(folder / "dpo"), classes, validations(folder / "classes")


FEW = dict(training__local_batch_size=4, training__global_batch_size=4)


@pytest.mark.parametrize("plan", ["one rank", "FSDP 2", "TP 2"])
def test_preference_training_does_not_depend_on_padding(padded, plan, tmp_path):
    rows, steps, validated, _, _ = padded
    ranks, options = PLANS[plan]
    got, _ = run_ranks(ranks, jobs.train, dpo_arguments(tmp_path, rows, **options))[0]
    for name in ("loss", "reward_margin", "grad_norm"):
        assert [step[name] for step in got] == pytest.approx([step[name] for step in steps], rel=1e-3, abs=1e-4)
    assert validation_losses(tmp_path) == pytest.approx(validated, rel=1e-3)
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("tokens", 0) for row in read) < 8 * 8 * 24  # 8 steps of 8 answers of up to 24 tokens


@pytest.mark.parametrize("plan", PLANS)
def test_classification_does_not_depend_on_padding(padded, plan, tmp_path):
    _, _, _, steps, validated = padded
    ranks, options = PLANS[plan]
    argv = class_arguments(tmp_path, "roberta", **QUICK | FEW | options)
    got, _ = run_ranks(ranks, jobs.train, argv)[0]
    assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in steps], rel=1e-4)
    for row, expected in zip(validations(tmp_path), validated, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


TOLD = {
    (): "32 pairs (64 answers) in a pass, each batch padded to its longest sample, rounded up to a multiple of 8",
    ("--data.pad_to=batch",): "each batch padded to its longest sample",
    (PP + "2",): (
        "% of the tokens are padding up to training.seq_len, as parallelism.pipeline_parallel_degree wants all batches "
        "of one shape; write training.seq_len = 24, which the longest needs"
    ),
    ("--compile.enable",): "as compile.enable wants all batches of one shape; write training.seq_len = 24, which the "
    "longest needs or leave compile.enable out",
    ("--data.pad_to=seq_len",): "as data.pad_to says; write training.seq_len = 24, which the longest needs or leave "
    "data.pad_to out",
}


@pytest.mark.parametrize("options", TOLD, ids=str)
def test_the_log_has_the_share_of_padding_and_a_remedy(tmp_path, caplog, options):
    caplog.set_level(logging.INFO)
    config = load([*dpo_arguments(tmp_path, write_pairs(tmp_path / "rows.jsonl"), training__seq_len=40), *options])
    JobDatasets(ResolvedJob(config, 2 if PP + "2" in options else 1)).last_step()
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("samples"))
    assert TOLD[options] in line


def test_the_share_of_padding_is_counted(tmp_path):
    """Each row reads seq_len + 1 tokens; the last one is only a label."""
    config = load([*dpo_arguments(tmp_path, write_pairs(tmp_path / "rows.jsonl")), "--data.pad_to=seq_len"])
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=1))
    sources = [entry.source for entry in JobDatasets(ResolvedJob(config)).open_sources("training")]
    batches = list(JobDatasets(ResolvedJob(config)).training_loader(BYTES, 0))
    real = sum(int((d == d[:, :1]).sum()) for d in (batch["document_ids"] for batch in batches))
    share = 1 - real / (64 * 25)
    assert f"{100 * share:.1f} % of the tokens are padding" in JobDatasets(ResolvedJob(config)).describe_samples(
        sources
    )


def test_a_batch_of_classes_has_as_many_records_as_its_size_says(tmp_path):
    config = load(class_arguments(tmp_path, "roberta"))
    assert not ResolvedJob(config).data.is_packed
    batch = next(iter(JobDatasets(ResolvedJob(config)).training_loader(build_tokenizer("debug"), 0)))
    assert int((batch["labels"] != -100).sum()) == 96


def test_classification_needs_no_padding_options(anywhere):
    assert lines(*ROBERTA, TWO_CLASSES, "--data.pad_to=batch") == []
    (line,) = lines(*ROBERTA, TWO_CLASSES, "--data.pad_to=batch", "--data.packing=best_fit")
    assert line.startswith('data.pad_to: given "batch"; allowed: unset with data.packing = best_fit')
    older_options = [
        "--data.packing=best_fit",
        "--data.pad_to=seq_len",
    ]  # as a job of an earlier version has them written out
    assert lines(*ROBERTA, TWO_CLASSES, *older_options) == [] and lines(*older_options) == []


@pytest.mark.parametrize(
    "before, now, message", [(1, 100, '"off"'), (100, 1, '"best_fit" and data.packing_window = 100')]
)
def test_a_changed_packing_is_refused_on_resume_with_a_remedy(before, now, message):
    with pytest.raises(JobError, match="the checkpoint's samples were packed with data.packing = " + message):
        check_same_data({"fingerprint": {"packing": {"window": before}}}, {"packing": {"window": now}})
