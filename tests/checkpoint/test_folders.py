"""Exports replace older ones completely; a start without checkpoints is logged; changed data are noticed."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.support import jobs
from tests.support.pool import run_alone, run_ranks
from torchtitan.checkpoint import folders
from torchtitan.datasets.position import VERSION, resume
from torchtitan.datasets.sources import CONTENTS, DataError, files_fingerprint
from torchtitan.datasets.token_shards import BlockReader, ShardWriter, TokenShards
from torchtitan.process import distributed


def write(folder, **files):
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_an_export_replaces_all_of_an_older_one(tmp_path, caplog):
    target = tmp_path / "model_hf"
    with folders.replace_folder(target, write=True) as folder:
        write(folder, config__json="old", model1__safetensors="a", model2__safetensors="b")
        assert not target.exists()
    with folders.replace_folder(target, write=True) as folder:
        write(folder, config__json="new", model1__safetensors="c")
        assert contents(target)["config.json"] == "old"
    assert contents(target) == {"config.json": "new", "model1.safetensors": "c"}
    assert [path.name for path in tmp_path.iterdir()] == ["model_hf"]
    (target / "notes.txt").write_text("mine")
    with folders.replace_folder(target, write=True) as folder:
        write(folder, config__json="newer")
    assert contents(target) == {"config.json": "newer"}
    (aside,) = tmp_path.glob(".aside-model_hf-*")  # a user's own file is not deleted
    assert contents(aside)["notes.txt"] == "mine" and "notes.txt" in caplog.text


def test_a_failed_export_leaves_the_older_one(tmp_path):
    write(tmp_path / "model_hf", config__json="old")
    with pytest.raises(OSError, match="planted"), folders.replace_folder(tmp_path / "model_hf", write=True) as folder:
        write(folder, config__json="half")
        raise OSError("planted")
    assert contents(tmp_path / "model_hf") == {"config.json": "old"}
    assert len(list(tmp_path.iterdir())) == 1
    with folders.replace_folder(tmp_path / "other", write=False) as folder:
        assert folder == tmp_path / "other"
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError), folders.replace_folder(tmp_path / "file", write=True) as folder:
        write(folder)


def test_an_export_that_cannot_be_published_leaves_the_older_one(tmp_path, monkeypatch):
    write(tmp_path / "model_hf", config__json="old")
    rename = Path.rename

    def refuse(self, target):
        if self.name.startswith(".tmp-"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input"), folders.replace_folder(tmp_path / "model_hf", write=True) as folder:
        write(folder, config__json="new")
    assert contents(tmp_path / "model_hf") == {"config.json": "old"}
    assert len(list(tmp_path.iterdir())) == 1


def export_twice(folder, texts):
    """Export two jobs into one folder; the second has one layer less, so fewer tensors."""
    for layers in (2, 1):
        sizes = f"{{dim=32, n_layers={layers}, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16}}"
        options = dict(model__overrides=sizes, training__steps=1, checkpoint__folder=f"checkpoint{layers}")
        options |= dict(checkpoint__enable=True)
        options |= dict(checkpoint__last_save_model_only=True, checkpoint__last_save_in_hf=True)
        (folder / "last_checkpoint").unlink(missing_ok=True)
        jobs.train(jobs.arguments(folder, texts, training__local_batch_size=4, **options))


def test_a_second_run_leaves_no_files_of_the_first_export(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    run_ranks(2, export_twice, tmp_path / "run", texts)
    index = json.loads((tmp_path / "run" / "model_hf" / "model.safetensors.index.json").read_text())
    assert not [name for name in index["weight_map"] if "layers.1." in name]
    shards = {path.name for path in (tmp_path / "run" / "model_hf").glob("*.safetensors")}
    assert shards == set(index["weight_map"].values())
    assert not list((tmp_path / "run").glob(".*-model_hf-*"))


def test_a_start_without_checkpoints_is_logged(tmp_path):
    texts = jobs.write_texts(tmp_path / "texts")
    message = "checkpoint.enable is off: the weights will be lost when the run ends"
    _, _, err = jobs.run(jobs.arguments(tmp_path / "a", texts, training__steps=1))
    assert message in err


# Fingerprints of data


def test_changed_text_of_the_same_name_and_size_is_noticed(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("x" * 100_000)
    before = files_fingerprint({"a.txt": file})
    assert files_fingerprint({"a.txt": file}) == before
    for place in (0, 33_000, 99_999):
        text = bytearray(b"x" * 100_000)
        text[place] = ord("y")
        file.write_bytes(text)
        after = files_fingerprint({"a.txt": file})
        assert after["files"] == before["files"] and after[CONTENTS] != before[CONTENTS], place
    state = {"version": VERSION, "samples": 0, "lanes": 0, "cursors": {}, "fingerprint": before}
    none = ([], lambda samples: np.zeros(0))  # lanes
    with pytest.raises(ValueError, match="samples of the contents"):
        resume(state, *none, after)
    old = {**state, "fingerprint": {"files": before["files"]}}  # as older versions wrote it, without contents
    assert resume(old, *none, after).samples == 0


def test_a_shard_that_shrinks_is_named(tmp_path):
    """Without the check a read ends in a bus error: the process of run_alone ends without an answer (the control)."""
    read_shrunk_shard(tmp_path / "a", check=True)
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_alone(read_shrunk_shard, tmp_path / "b", False)


def read_shrunk_shard(folder, check):
    """Read a shard after it was truncated, with or without the check of its size."""
    folder.mkdir()
    writer = ShardWriter(folder, 300)
    writer.write(np.arange(100_000) % 300)
    writer.finish(tokenizer="t", tokenizer_path="t")
    reader = BlockReader(TokenShards(folder), seq_len=100, seed=0, shuffle=False)
    starts = reader.order(np.array([990]))
    reader.read(starts)
    with (folder / "shard-00000.bin").open("r+b") as file:
        file.truncate(4096)
    if not check:
        reader._sizes = [0] * len(reader._sizes)
    with pytest.raises(DataError, match="shard-00000.bin: the file shrank to 4096 bytes from the 200000"):
        reader.read(starts)


def draws(seed):
    distributed.set_seed(seed, rank=1)
    return [random.random(), np.random.rand(), float(distributed.torch.rand(()))]


def test_every_generator_is_seeded():
    assert draws(3) == draws(3)
    assert all(a != b for a, b in zip(draws(3), draws(4), strict=True))
