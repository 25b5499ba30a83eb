"""Prepared shards that have changed since they were made are refused: every start of a run compares their sums."""

import pytest

from tests.support import jobs
from torchtitan.assembly.data import JobDatasets
from torchtitan.commands import prepare
from torchtitan.config.manager import load
from torchtitan.core.files import FileError
from torchtitan.datasets import token_shards
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenShards, start_verification
from torchtitan.job import ResolvedJob


@pytest.fixture
def shards(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    folder = tmp_path / "shards"
    prepare.main(["--dataset_path", str(texts), "--tokenizer_path", "bytes", "--output", str(folder), "--workers=1"])
    token_shards._verifications.clear()
    return folder


def loader(tmp_path, shards, state=None):
    settings = dict(training__dataset="tokens")
    config = load(jobs.arguments(tmp_path / "run", shards, **settings))
    return JobDatasets(ResolvedJob(config)).training_loader(ResolvedJob(config).tokenizer(), 0, state)


def rot(shards):
    """Flip one bit of the last token, which no block reads."""
    file = shards / "shard-00000.bin"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_shard_that_has_rotted_is_refused_before_the_first_batch(tmp_path, shards):
    rot(shards)
    with pytest.raises(
        DataError, match="shard-00000.bin: its contents differ from the checksum in the header; make the folder"
    ):
        next(iter(loader(tmp_path, shards)))


def test_a_large_one_ends_the_run_when_the_difference_is_found(tmp_path, shards, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(token_shards, "FOREGROUND_BYTES", 0)
    rot(shards)
    with pytest.raises(DataError, match="shard-00000.bin: its contents differ from the checksum in the header"):
        batches = iter(loader(tmp_path, shards))
        while True:  # without an end, unless it is refused
            next(batches)
    assert "are compared with their sums during training" in caplog.text and "match their sums" not in caplog.text


def test_sound_shards_are_compared_once_and_read(tmp_path, shards, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(token_shards, "FOREGROUND_BYTES", 0)
    first = loader(tmp_path, shards)
    next(iter(first))
    first.verification._thread.join()
    assert first.verification.error is None and "match their sums" in caplog.text
    assert loader(tmp_path, shards).verification is first.verification
    assert start_verification([]) is None


def test_a_resume_is_refused_too(tmp_path, shards):
    """The first start may have ended because of the damage, so a resume must not train on the same shards."""
    state = loader(tmp_path, shards).state_dict()
    token_shards._verifications.clear()
    rot(shards)
    with pytest.raises(DataError, match="shard-00000.bin: its contents differ from the checksum in the header"):
        next(iter(loader(tmp_path, shards, state)))


@pytest.mark.parametrize("error", [KeyError("sha256"), MemoryError(), FileError("x", "is no file")], ids=repr)
def test_whatever_ends_the_comparison_ends_the_run(error, shards, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(token_shards, "FOREGROUND_BYTES", 0)
    monkeypatch.setattr(TokenShards, "verify", lambda *_, **__: (_ for _ in ()).throw(error))
    comparison = start_verification([TokenShards(shards)])
    comparison._thread.join()
    with pytest.raises(DataError, match="cannot be compared with its sums"):
        comparison.raise_if_damaged()
    assert "match their sums" not in caplog.text
