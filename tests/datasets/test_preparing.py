"""`torchtitan prepare job.toml`: a run uses the prepared tokens, and the output describes them."""

import json

import pytest

from tests.support import jobs
from tests.support.jobs import arguments, write_texts
from tests.support.sft_jobs import sft_arguments, write_rows
from torchtitan.assembly.data import JobDatasets
from torchtitan.commands import prepare
from torchtitan.config import manager
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.datasets import preparing
from torchtitan.datasets.token_shards import TokenShards
from torchtitan.job import ResolvedJob


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
