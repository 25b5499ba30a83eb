"""Prepared shards that have changed since they were made are not trained on: the sums in their header are compared when
a run starts.
"""

import pytest

from tests.support import jobs
from torchtitan import build, build_data
from torchtitan.commands import prepare
from torchtitan.config.manager import load
from torchtitan.datasets import verification
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.verification import verification_of


@pytest.fixture
def shards(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    made = tmp_path / "shards"
    prepare.main(["--dataset_path", str(texts), "--tokenizer_path", "bytes", "--output", str(made), "--workers=1"])
    verification._verifications.clear()
    return made


def loader(tmp_path, shards, state=None):
    settings = dict(training__dataset="tokens")
    config = load(jobs.arguments(tmp_path / "run", shards, **settings))
    return build_data.training_loader(config, build.tokenizer(config), 0, build.dims(config, 1), state)


def rot(shards):
    """One bit of the last token, which no block reads."""
    file = shards / "shard-00000.bin"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_shard_that_has_rotted_is_refused_before_the_first_batch(tmp_path, shards):
    rot(shards)
    with pytest.raises(DataError, match="shard-00000.bin: its contents are not those of the header; make the folder"):
        next(iter(loader(tmp_path, shards)))


def test_a_large_one_ends_the_run_when_the_difference_is_found(tmp_path, shards, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(verification, "IN_FRONT", 0)
    rot(shards)
    with pytest.raises(DataError, match="shard-00000.bin: its contents are not those of the header"):
        batches = iter(loader(tmp_path, shards))
        while True:  # without an end, unless it is refused
            next(batches)
    assert "are compared with their sums while training goes on" in caplog.text and "are what was" not in caplog.text


def test_sound_shards_are_compared_once_and_read(tmp_path, shards, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(verification, "IN_FRONT", 0)
    first = loader(tmp_path, shards)
    next(iter(first))
    first.verification._thread.join()
    assert first.verification.error is None and "are what was prepared" in caplog.text
    assert loader(tmp_path, shards).verification is first.verification
    assert verification_of([]) is None


def test_a_run_that_goes_on_is_refused_too(tmp_path, shards):
    """Else the next start would go on with what the last one has ended for."""
    state = loader(tmp_path, shards).state_dict()
    verification._verifications.clear()
    rot(shards)
    with pytest.raises(DataError, match="shard-00000.bin: its contents are not those of the header"):
        next(iter(loader(tmp_path, shards, state)))
