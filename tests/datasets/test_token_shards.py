"""Prepared token shards: reads return the written documents, and damaged folders are refused."""

import json
import shutil

import numpy as np
import pytest

from tests.support.token_shards import VOCABULARY, make
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import BlockReader, ShardWriter, TokenShards, tokens


def random_documents(count=30, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, rng.integers(1, 40)).tolist() for _ in range(count)]


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
@pytest.mark.parametrize("shard_tokens", [7, 100, 2**28])
@pytest.mark.parametrize("seq_len", [1, 5, 33, 300])
def test_blocks_are_the_concatenated_documents(tmp_path, vocab_size, dtype, shard_tokens, seq_len):
    documents = [*random_documents(), [vocab_size - 1] * 3]
    shards = TokenShards(make(tmp_path / "shards", documents, vocab_size, shard_tokens))
    shards.verify()
    all_ids = [i for document in documents for i in document]
    starts = np.cumsum([0, *map(len, documents)]).tolist()
    assert shards.header["dtype"] == dtype and shards.tokens == len(all_ids)
    assert len(shards.header["shards"]) == -(-len(all_ids) // shard_tokens)
    reader = BlockReader(shards, seq_len, seed=0, shuffle=False)
    assert reader.blocks == (len(all_ids) - 1) // seq_len
    rows, (begin_rows, begin_columns) = reader.read(reader.order(np.arange(reader.blocks)))
    for block in range(reader.blocks):
        first = block * seq_len
        assert rows[block].tolist() == all_ids[first : first + seq_len + 1]
        begins = begin_columns[begin_rows == block].tolist()
        assert begins == [s - first for s in starts if first <= s <= first + seq_len]


def test_the_order_is_a_permutation_of_each_epoch(tmp_path):
    shards = TokenShards(make(tmp_path / "shards", random_documents()))
    reader = BlockReader(shards, 4, seed=5, shuffle=True)
    n = reader.blocks
    starts = reader.order(np.arange(3 * n))
    epochs = starts.reshape(3, n)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(0, 4 * n, 4))
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
    # a slice that begins anywhere and crosses epochs
    assert reader.order(np.arange(n - 3, n + 5)).tolist() == starts[n - 3 : n + 5].tolist()
    assert BlockReader(shards, 4, seed=6, shuffle=True).order(np.arange(n)).tolist() != starts[:n].tolist()


def test_ids_outside_the_vocabulary_are_not_written(tmp_path):
    writer = ShardWriter(tmp_path, 10)
    writer.write([])
    for ids in ([3, 10], [-1]):
        with pytest.raises(DataError, match="but the tokenizer's vocabulary ends at 9"):
            writer.write(ids)


# Refusals


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tokens") / "shards", random_documents())


def damage(good, folder, change):
    """Apply `change` to a copy of good shards; return the error of verifying it."""
    shutil.copytree(good, folder)
    change(folder)
    with pytest.raises(DataError) as error:
        TokenShards(folder).verify()
    assert "torchtitan prepare" in str(error.value)
    return str(error.value).replace(str(folder), "")


def edit(**changes):
    """Return a change of the header."""

    def change(folder):
        path = folder / "header.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def edit_shard(**changes):
    """Return a change of the header's first shard."""

    def change(folder):
        path = folder / "header.json"
        header = json.loads(path.read_text())
        header["shards"][0] |= changes
        path.write_text(json.dumps(header))

    return change


def flip(name):
    """Return a change that flips one bit of a file."""

    def change(folder):
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 4
        (folder / name).write_bytes(bytes(content))

    return change


def cut(name):
    """Return a change that truncates a file by two bytes."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-2])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: (f / "header.json").unlink(), ": there is no header.json in it"),
        (lambda f: (f / "shard-00001.bin").unlink(), "/shard-00001.bin: the file is missing"),
        (cut("shard-00000.bin"), "/shard-00000.bin: 198 bytes, 200 by the header"),
        (cut("documents.bin"), "/documents.bin: 238 bytes, 240 by the header"),
        (cut("header.json"), "/header.json: damaged"),
        (flip("shard-00002.bin"), "/shard-00002.bin: its contents differ from the checksum in the header"),
        (flip("documents.bin"), "/documents.bin: its contents differ from the checksum in the header"),
        (edit(version=3), "/header.json: version 3, but this program reads versions 1 and 2"),
        (edit(version=2), "/header.json: fields are missing or do not fit"),
        (edit(trained={}), "/header.json: fields are missing or do not fit"),
        (lambda f: (f / "header.json").write_text("[]"), "/header.json: version None"),
        (edit(tokens=5), " tokens in shards, 5 in the header"),
        (edit(dtype="object"), "/header.json: fields are missing or do not fit"),
        (edit(shards=None), "/header.json: fields are missing or do not fit"),
        (edit(index={"name": "x.bin"}), "/header.json: fields are missing or do not fit"),
        (edit(tokenizer=None), "/header.json: fields are missing or do not fit"),
        (edit_shard(name="../secret.bin"), "/header.json: fields are missing or do not fit"),
        (edit_shard(name="/etc/passwd"), "/header.json: fields are missing or do not fit"),
        (edit_shard(tokens=99), "/header.json: fields are missing or do not fit"),
        (edit(shards=[], tokens=0), ": 0 tokens in shards, 0 in the header"),
    ],
)
def test_damage_is_named(good, tmp_path, change, message):
    assert message in damage(good, tmp_path / "copy", change)


def test_document_starts_that_do_not_ascend_are_refused(good, tmp_path):
    shutil.copytree(good, tmp_path / "copy")
    starts = np.fromfile(good / "documents.bin", dtype="<i8")
    starts[:] = 10**9
    starts[::2] = 7
    starts.tofile(tmp_path / "copy" / "documents.bin")
    reader = BlockReader(TokenShards(tmp_path / "copy"), 8, 0, False)
    with pytest.raises(DataError, match="documents.bin: damaged, the starts do not ascend"):
        reader.read(reader.order(np.arange(reader.blocks)))


def test_other_refusals(good, tmp_path):
    with pytest.raises(DataError, match=r"needs training.dataset_path: a folder made by `torchtitan prepare"):
        tokens(None, "text")
    with pytest.raises(DataError, match="no such folder; give a folder made by torchtitan prepare"):
        tokens(str(tmp_path / "no"), "text")
    shards = tokens(str(good), "text")
    with pytest.raises(DataError, match=r"tokens are too few for one sample; at least 1001 are needed"):
        shards.blocks(1000)
    shards.check_tokenizer("f" * 64, VOCABULARY)
    with pytest.raises(
        DataError, match=r"prepared with the tokenizer bytes \(fingerprint ffff.*set model.tokenizer_path"
    ):
        shards.check_tokenizer("e" * 64, VOCABULARY)
    with pytest.raises(DataError, match="258 ids, but the tokenizer has 200"):
        shards.check_tokenizer("f" * 64, 200)
