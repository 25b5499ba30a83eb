"""Folders of pretokenized blocks with an args.json: a sample is a block, and faults of a folder are reported."""

from itertools import islice

import pyarrow
import pyarrow.ipc
import pytest
import torch

from tests.support import judged
from tests.support.judged import lines
from tests.support.loaders import loader
from tests.support.saved_blocks import LENGTH, blocks, save
from torchtitan.datasets import DATASETS
from torchtitan.datasets.samples import IGNORE
from torchtitan.datasets.sources import DataError

anywhere = judged.anywhere


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sample_is_a_block(tmp_path, shuffle, mask):
    folder = save(tmp_path / "data")
    block_loader = loader(folder, "pretokenized", shuffle=shuffle, document_mask=mask, seq_len=LENGTH)
    batches = list(islice(block_loader, 20))  # an epoch of 40 blocks
    tokens = torch.cat([batch["tokens"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert sorted(tokens.tolist()) == sorted(blocks()) and (tokens.tolist() != sorted(blocks()) or not shuffle)
    assert torch.equal(labels[:, :-1], tokens[:, 1:]) and (labels[:, -1] == IGNORE).all()


def test_splits(tmp_path):
    folder = save(tmp_path / "data", split="validation")
    assert len(DATASETS["pretokenized"](str(folder), "text")) == 40
    held_out = DATASETS["pretokenized_validation"](str(folder), "text")
    assert [sum((list(s.content) for s in d.spans), []) for d in held_out.documents()] == blocks()[:8]
    (fault,) = lines(
        *job_options(save(tmp_path / "one", split="test")), "--validation.enable", *held_out_words(tmp_path)
    )
    assert "there is no split 'validation', only test, train" in fault


def held_out_words(folder):
    return ["--validation.dataset=pretokenized_validation", f"--validation.dataset_path={folder}/one"]


def job_options(folder, length=LENGTH):
    return [f"--training.seq_len={length}", "--training.dataset=pretokenized", f"--training.dataset_path={folder}"]


def test_a_matching_job_has_no_faults(tmp_path):
    assert lines(*job_options(save(tmp_path / "data"))) == []


@pytest.mark.parametrize(
    "overrides, length, tokenizer, message",
    [
        ({}, 32, "bytes", "blocks of 16 tokens (sequence_length in args.json), but samples of 32 are wanted; set"),
        (
            {"tokenizer": "debug"},
            LENGTH,
            "bytes",
            "made with the tokenizer debug (args.json), but model.tokenizer_path",
        ),
        ({"tokenizer": "google/t5-v1_1-base"}, LENGTH, "bytes", "give that one, in a folder of its name"),
        ({"sequence_length": "16"}, LENGTH, "bytes", "the tokenizer (a name) or the sequence_length is missing"),
        ({"tokenizer": None}, LENGTH, "bytes", "the tokenizer (a name) or the sequence_length is missing"),
    ],
)
def test_mismatches_are_faults(tmp_path, overrides, length, tokenizer, message):
    (line,) = lines(*job_options(save(tmp_path / "data", **overrides), length), tokenizer=tokenizer)
    assert line.startswith("training.dataset_path: ") and message in line


@pytest.mark.parametrize("place", ["t5-base", "models--google--t5-base/snapshots/ab"])
def test_a_hub_tokenizer_is_recognized_by_its_folder(tmp_path, place):
    from torchtitan.core.files import TOKENIZER

    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "tokenizer.model").write_bytes(TOKENIZER.read_bytes())
    folder = save(tmp_path / "data", tokenizer="google/t5-base")
    assert lines(*job_options(folder), tokenizer=tmp_path / place) == []


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    (line,) = lines(*job_options(save(tmp_path / "data", blocks(largest=60_000))))
    assert "holds the id" in line and "the tokenizer bytes has" in line


@pytest.mark.parametrize("broken, message", [(None, "No such file"), ("{", "damaged"), ("[1]", "is missing")])
def test_malformed_args_json_is_refused(tmp_path, broken, message):
    folder = save(tmp_path / "data")
    (folder / "args.json").unlink()
    if broken is not None:
        (folder / "args.json").write_text(broken)
    with pytest.raises(DataError, match=message):
        DATASETS["pretokenized"](str(folder), "text")


def test_blocks_of_another_length_than_stated_are_refused(tmp_path):
    uneven = [*blocks(10), [1, 2, 3], *blocks(10)]
    source = DATASETS["pretokenized"](str(save(tmp_path / "data", uneven)), "text")
    with pytest.raises(DataError, match="row 10: 3 ids instead of 16 ids"):
        source.get(10)
    with pytest.raises(DataError, match="blocks of 16 tokens"):
        loader(tmp_path / "data", "pretokenized", seq_len=8)


def test_an_empty_split_is_refused(tmp_path):
    folder = save(tmp_path / "data")
    (file,) = folder.glob("*.arrow")
    pyarrow.ipc.new_stream(str(file), pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int64())})).close()
    (line,) = lines(*job_options(folder))
    assert "has no rows; one block at least is needed" in line


def test_a_folder_without_blocks_is_refused(tmp_path):
    (tmp_path / "args.json").write_text('{"tokenizer": "bytes", "sequence_length": 16}')
    with pytest.raises(DataError, match="no blocks of train in it; give a folder that save_to_disk wrote"):
        DATASETS["pretokenized"](str(tmp_path), "text")
