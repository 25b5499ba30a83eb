"""Exports of a run replace older ones completely, or leave them."""

import json
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.checkpoint import folders


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
