"""`torchtitan prepare job.toml`: a run uses the prepared tokens, and the output describes them."""

import itertools
import json

import numpy as np
import pytest

from tests.support import jobs
from tests.support.jobs import arguments, write_texts
from tests.support.sft_jobs import sft_arguments, write_rows
from torchtitan.assembly.data import JobDatasets
from torchtitan.commands import prepare
from torchtitan.config import manager
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source, preparing
from torchtitan.datasets.encoding import TrainOn
from torchtitan.datasets.preparing import PrepareOptions, prepared_shards
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.token_shards import TokenReader, TokenShards
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.rules import check


def prepare_and_read(argv, capsys):
    assert prepare.main(argv) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_uses_the_prepared_tokens(tmp_path, capsys, monkeypatch):
    """This includes separate validation data and several workers."""
    rows, validation_rows = write_rows(tmp_path / "rows"), write_rows(tmp_path / "others", count=9)
    options = dict(validation__split=None, validation__dataset="text", validation__dataset_path=validation_rows)
    argv = [argument for argument in sft_arguments(tmp_path / "run", rows, **options) if not argument.endswith("=None")]
    (tmp_path / "job.toml").write_text(manager.to_toml(manager.load(argv)))
    shown = prepare_and_read([str(tmp_path / "job.toml"), "--data.num_proc=2"], capsys)
    monkeypatch.setattr(preparing, "prepare", lambda *args: pytest.fail("tokenized again"))
    config = manager.load(argv)
    steps = jobs.with_end(config).training.steps
    assert shown[-1] == f"kept in {tmp_path}/run/data" and f"; {steps} steps of 4 samples, on 1 rank" in shown[-2]
    (training,) = JobDatasets(ResolvedJob(config)).open_sources("training")
    JobDatasets(ResolvedJob(config)).open_sources("validation")
    assert isinstance(training.source, TokenShards)
    samples = JobDatasets(ResolvedJob(config)).describe_samples([training.source])
    assert shown[-2].startswith(f"samples {samples}; ") and [len(line.split()) for line in shown[1:3]] == [12, 12]


def test_the_output_has_a_table_of_the_records(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    lengths = [10] * 50 + [60] * 40 + [90] * 10  # with begin, end and a prompt of one byte
    records = [{"prompt": "a", "completion": "b" * (length - 3)} for length in lengths]
    rows.write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = prepare_and_read(sft_arguments(tmp_path / "run", rows, training__seq_len=63), capsys)
    header, row, advice, samples, _ = shown
    assert header.split()[:4] == ["records", "whole", "cut", "left"]
    assert row.split()[2:] == ["100", "90", "0", "10", "60", "90", "90", "90", "2,900", "93.8%"]
    assert advice.endswith("training.seq_len = 89 would keep 99 % whole") and advice.startswith("training: ")
    assert samples.startswith("samples ")


def test_texts_of_epochs_have_no_records(tmp_path, capsys):
    argv = arguments(tmp_path / "run", write_texts(tmp_path), training__epochs=1)
    _, row, samples, _ = prepare_and_read([argument for argument in argv if "training.steps" not in argument], capsys)
    assert row.split()[2:3] == ["120"] and row.endswith("100.0%") and "in a pass; " in samples


def test_a_job_for_gpus_is_prepared_anywhere(tmp_path, capsys):
    argv = sft_arguments(tmp_path / "run", write_rows(tmp_path), training__dataloader__pin_memory=True)
    assert "samples " in prepare_and_read(argv, capsys)[-2]


@pytest.mark.parametrize("has_gpu, multiple", [(False, 8), (True, 64)])
def test_padding_is_that_of_this_machine(tmp_path, capsys, monkeypatch, has_gpu, multiple):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    argv = sft_arguments(tmp_path / "run", write_rows(tmp_path), data__packing="off")
    assert f"to its longest sample, rounded up to a multiple of {multiple};" in prepare_and_read(argv, capsys)[-2]


def test_refusals(tmp_path):
    texts = write_texts(tmp_path)
    with pytest.raises(JobError, match="so that nothing is tokenized before; set training.epochs, or"):
        prepare.main(arguments(tmp_path / "run", texts))
    with pytest.raises(ConfigError, match="validation.split"):
        prepare.main(sft_arguments(tmp_path / "run", texts, validation__enable=False))
    assert not (tmp_path / "run").exists()


def test_where_all_records_are_too_long(tmp_path):
    rows = write_rows(tmp_path / "rows")
    argv = sft_arguments(tmp_path / "run", rows, training__seq_len=64, validation__enable=False)
    argv = [argument for argument in argv if not argument.startswith("--validation.") or "enable" in argument]
    message = (
        r"rows.jsonl: no record is left of it \(0 whole, 60 dropped; lengths .*; training.seq_len = \d+ would keep 99 %"
    )
    with pytest.raises(JobError, match=message):
        prepare.main(argv)


# Records that are left out


def shards_of(path, records, recipe, earlier=(), workers=1):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = open_source("text", str(path), RecordReader())
    folder = path.parent / "cache"
    return prepared_shards(source, str(path), "bytes", folder, workers, True, recipe, earlier=earlier)


def batched(items, size):
    return [tuple(items[first : first + size]) for first in range(0, len(items), size)]


def documents_of(shards, group_size=1):
    """Return the documents of each record, (ids, loss mask) as lists."""
    reader, documents = TokenReader(shards), []
    for start, end in itertools.pairwise([*reader.documents.tolist(), shards.tokens]):
        ids, trained = np.empty(end - start, np.int64), np.empty(end - start, bool)
        reader.copy(start, ids, trained)
        documents.append((tuple(ids.tolist()), tuple(trained.tolist())))
    return batched(documents, group_size)


@pytest.mark.parametrize(
    "group_size, too_long, workers", [(1, "drop", 1), (1, "truncate", 2), (1, "split", 1), (2, "drop", 1)]
)
def test_the_first_of_equal_records_is_kept(tmp_path, group_size, too_long, workers):
    """Random records, with repetitions within a source and over three, against a dictionary of what is not compared."""
    rng = np.random.default_rng(group_size)

    def drawn(count):
        letters = ["ab"[rng.integers(2)] * int(rng.integers(1, 5)) for _ in range(3 * count)]
        if group_size == 2:
            names = ("prompt", "chosen", "rejected")
            return [dict(zip(names, row, strict=True)) for row in batched(letters, 3)]
        return [{"prompt": a, "completion": b + c} for a, b, c in batched(letters, 3)]

    options = dict(max_tokens=10, too_long=too_long, group_size=group_size)
    options |= dict(train_on=TrainOn("last_turn")) if group_size == 2 else {}
    seen: dict[tuple, None] = {}
    earlier, repeated = list[TokenShards](), 0
    for number, count in enumerate((40, 30, 50)):
        path, records = tmp_path / f"{number}.jsonl", drawn(count)
        everything = shards_of(path, records, PrepareOptions(**options))
        expected = [record for record in dict.fromkeys(documents_of(everything, group_size)) if record not in seen]
        shards = shards_of(path, records, PrepareOptions(**options, distinct=True), earlier, workers)
        assert documents_of(shards, group_size) == expected
        fates, documents = shards.header["records"]["fates"], everything.header["documents"]
        repeated += fates.get("repeated", 0)
        assert sum(fates.values()) == count
        if too_long != "split":
            assert fates.get("repeated", 0) == documents // group_size - len(expected)
        seen |= dict.fromkeys(expected)
        earlier.append(shards)
    assert repeated > 0


def test_records_differ_by_what_is_trained(tmp_path):
    records = [{"prompt": "ab", "completion": "c"}, {"prompt": "a", "completion": "bc"}, {"text": "abc"}]
    shards = shards_of(tmp_path / "a.jsonl", records, PrepareOptions(max_tokens=9, distinct=True))
    assert shards.header["records"]["fates"] == {"whole": 3}


def test_a_source_that_repeats_another_has_no_records(tmp_path, capsys):
    """The samples are those of one source alone, in the table, in number, and batch by batch."""
    rows = write_rows(tmp_path / "rows")
    source = f'{{dataset = "text", dataset_path = "{rows}"}}'
    argv = [a for a in sft_arguments(tmp_path / "twice", rows) if not a.startswith("--training.dataset")]
    argv += [f"--training.sources=[{source}, {source}]", "--data.deduplicate"]
    _, first, second, samples, _ = prepare_and_read(argv, capsys)
    assert first.split()[2:6] == ["60", "59", "0", "1"] and second.split()[2:6] == ["60", "0", "0", "60"]
    alone = sft_arguments(tmp_path / "once", rows, data__deduplicate=True)
    assert prepare_and_read(alone, capsys)[2] == samples
    tokenizer = build_tokenizer("bytes")
    loaders = [JobDatasets(ResolvedJob(manager.load(a))).training_loader(tokenizer, 0) for a in (argv, alone)]
    batches = list(zip(*loaders, strict=True))
    assert batches and all(one[name].equal(other[name]) for one, other in batches for name in one)


def test_short_records_are_left_out(tmp_path):
    """Each record of n letters has n + 2 tokens; a piece of a record that is split counts by itself."""
    records = [{"text": "a" * n} for n in range(1, 15)]
    for too_long, lengths, short in (("drop", [5, 6, 7, 8], 2), ("split", [*[5, 6, 7, 8] * 2, 8, *[8] * 8], 2)):
        recipe = PrepareOptions(max_tokens=8, too_long=too_long, min_tokens=5)
        shards = shards_of(tmp_path / "a.jsonl", records, recipe)
        documents = [len(ids) for ((ids, _),) in documents_of(shards)]
        assert sorted(documents) == sorted(lengths) and shards.header["records"]["fates"]["short"] == short
    with pytest.raises(JobError, match=r"no record is left of it \(0 whole, 14 short; .*; lower data.min_tokens$"):
        shards_of(tmp_path / "a.jsonl", records, PrepareOptions(max_tokens=30, min_tokens=20))


LEFT_OUT_WRONGLY = {
    "data.min_tokens: given 9; allowed: at most 8, the tokens of the longest record": dict(data__max_tokens=8),
    "data.min_tokens: given 9; allowed: None with task.kind = pretrain": dict(task__kind="pretrain"),
    "data.deduplicate: given true; allowed: False with task.kind = pretrain": dict(task__kind="pretrain"),
    "data.deduplicate: given true; allowed: false with prepared shards": dict(training__dataset="tokens"),
    "data.deduplicate: given true; allowed: true only with training.epochs": dict(
        training__sources='[{dataset = "text", dataset_path = "a"}, {dataset = "text", dataset_path = "b"}]'
    ),
}


@pytest.mark.parametrize("message", LEFT_OUT_WRONGLY)
def test_refusals_of_records_that_are_left_out(tmp_path, message):
    options = dict(task__kind="sft", data__min_tokens=9, data__deduplicate=True) | LEFT_OUT_WRONGLY[message]
    faults = check(manager.load(arguments(tmp_path / "run", tmp_path, **options)), 1, "cpu")
    assert any(str(fault).find(message) >= 0 for fault in faults), [*map(str, faults)]
