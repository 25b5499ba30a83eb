"""Tests of `torchtitan prepare`: shards hold the documents of the text source, and an output is complete or absent."""

import gzip
import json
from itertools import islice

import numpy as np
import pytest

from torchtitan import cli
from torchtitan.commands import prepare
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source, preparing
from torchtitan.datasets.loader import LoaderOptions, WeightedSource, build_loader
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import BlockReader, TokenShards
from torchtitan.datasets.tokenizer import build_tokenizer

TEXTS = ["one", "", "zwei: ä", "  \n", "three " * 50] * 7


def write_texts(path, texts=TEXTS):
    content = "".join(json.dumps({"body": t}) + "\n" for t in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def run(path, output, *more, tokenizer="bytes"):
    options = ["--dataset_path", str(path), "--text_field", "body", "--tokenizer_path", tokenizer]
    return prepare.main([*options, "--output", str(output), *more])


def all_tokens(folder):
    """Read the tokens of all shards, and where documents start."""
    shards = TokenShards(folder)
    reader = BlockReader(shards, shards.tokens - 1, 0, shuffle=False)
    rows, (_, starts) = reader.read(np.array([0]))
    return rows[0].tolist(), starts.tolist()


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_the_shards_hold_the_documents(tmp_path, capfd, monkeypatch, workers, name):
    monkeypatch.setattr(preparing, "CHUNK_DOCUMENTS", 4)
    path = "tests/assets/tokenizer/tiktoken.model"
    assert run(write_texts(tmp_path / name), tmp_path / "out", "--workers", workers, tokenizer=path) == 0
    tokenizer = build_tokenizer(path)
    documents = [tokenizer.encode(t, bos=True, eos=True) for t in TEXTS if t.strip()]
    tokens, starts = all_tokens(tmp_path / "out")
    assert tokens == [i for document in documents for i in document]
    assert starts == np.cumsum([0, *map(len, documents)])[:-1].tolist()
    header = TokenShards(tmp_path / "out").header
    assert (header["documents"], header["tokenizer"]) == (len(documents), tokenizer.fingerprint)
    assert header["source"]["text_field"] == "body"
    captured = capfd.readouterr()
    assert f"21 documents, {len(tokens):,} tokens (uint16) in 1 shard(s)" in captured.out
    assert captured.err == ""  # no bar without a terminal
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "out"]
    assert prepare.main(["--verify", str(tmp_path / "out")]) == 0
    assert "all checksums match" in capfd.readouterr().out


def test_prepared_documents_train_like_the_text(tmp_path):
    tokenizer = build_tokenizer("bytes")
    options = LoaderOptions(seq_len=32, local_batch_size=4, shuffle=False, document_mask=True)
    records = open_source("text", str(write_texts(tmp_path / "one.jsonl", TEXTS[:9])), RecordReader("body"))
    text = build_loader([WeightedSource("text", records)], tokenizer, options)
    run(tmp_path / "one.jsonl", tmp_path / "one", "--workers", "1")
    shards = build_loader([WeightedSource("tokens", TokenShards(tmp_path / "one"))], tokenizer, options)
    pairs = zip(text, shards, strict=True)  # nine documents make one lane, so the order is the same
    for a, b in islice(pairs, 2):
        assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_bad_records_fail_or_are_skipped(tmp_path, capfd):
    path = write_texts(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + b"{broken\n")
    for workers in ("1", "2"):
        with pytest.raises(DataError, match="a.jsonl:36: no valid JSON"):
            run(path, tmp_path / "out", "--workers", workers)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    assert run(path, tmp_path / "out", "--on_bad_data", "skip", "--workers", "2") == 0
    captured = capfd.readouterr()
    assert "1 records left out" in captured.out and "left out: " in captured.err
    assert TokenShards(tmp_path / "out").header["skipped"] == 1


def test_records_without_text_are_an_error(tmp_path):
    with pytest.raises(DataError, match="no text in it"):
        run(write_texts(tmp_path / "a.jsonl", ["", " "]), tmp_path / "out", "--workers", "1")
    assert not (tmp_path / "out").exists()


def test_existing_output_is_not_overwritten(tmp_path):
    path = write_texts(tmp_path / "a.jsonl")
    (tmp_path / "out").mkdir()
    assert run(path, tmp_path / "out", "--workers", "1") == 0  # an empty folder may be filled
    before = (tmp_path / "out" / "header.json").read_bytes()
    for output in (tmp_path / "out", path):
        with pytest.raises(JobError, match="exists and is not an empty folder; give another --output"):
            run(path, output, "--workers", "1")
    assert (tmp_path / "out" / "header.json").read_bytes() == before


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    path = write_texts(tmp_path / "a.jsonl")
    for error, expected in (
        (KeyboardInterrupt, KeyboardInterrupt),
        (OSError(28, "No space left on device"), JobError),
    ):

        def fail(self, document, trained, error=error):
            raise error

        monkeypatch.setattr(preparing.ShardWriter, "write", fail)
        with pytest.raises(expected, match=None if expected is KeyboardInterrupt else "out: not made: .*No space left"):
            run(path, tmp_path / "out", "--workers", "1")
        assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--output", "x"], "give a job, or --tokenizer-path and --output"),
        (["--tokenizer_path", "bytes"], "give a job, or --tokenizer-path and --output"),
        (
            ["--tokenizer_path", "bytes", "--output", "x", "--workers", "0"],
            "--workers: given '0'; allowed: a whole number >= 1",
        ),
        (["--dataset", "tokens"], "--dataset: given 'tokens'; allowed: "),
    ],
)
def test_refused_arguments(argv, message, capsys):
    assert cli.main(["prepare", *argv]) == 2
    assert message in capsys.readouterr().err
