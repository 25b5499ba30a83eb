"""Positions in the data: in stored order under every plan, and data that have changed are noticed."""

import gzip
import json
from itertools import cycle, islice

import numpy as np
import pytest

from tests.support.judged import lines
from tests.support.loaders import SEQ_LEN, TOKENIZER, global_samples, loader
from tests.support.pool import run_alone
from tests.support.shards import write
from torchtitan.core.errors import JobError
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.position import VERSION, resume
from torchtitan.datasets.sources import CONTENTS, DataError, files_fingerprint
from torchtitan.datasets.token_shards import BlockReader, ShardWriter, TokenShards

TEXTS = [chr(48 + i % 75) * (3 + i * 7 % 41) for i in range(150)]
COUNT = 260
"""Samples: more than an epoch of TEXTS."""


def stored_samples(texts, count):
    """Compute the tokens and labels of the first samples by concatenating the texts in order."""
    ids = [i for text in islice(cycle(texts), 4 * len(texts)) for i in TOKENIZER.encode(text, bos=True, eos=True)]
    starts = range(0, count * SEQ_LEN, SEQ_LEN)
    return [(ids[start : start + SEQ_LEN], ids[start + 1 : start + SEQ_LEN + 1]) for start in starts]


def write_parts(folder, texts, count):
    """Write the texts to `count` compressed files, which can be read only sequentially."""
    folder.mkdir()
    for number in range(count):
        share = texts[number * len(texts) // count : (number + 1) * len(texts) // count]
        content = "".join(json.dumps({"text": text}) + "\n" for text in share)
        (folder / f"{number:03d}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write the texts as an indexed file, as one compressed file, and as many."""
    folder = tmp_path_factory.mktemp("stored")
    paths = {"indexed": write(folder / "a.jsonl", TEXTS), "one stream": write_parts(folder / "one", TEXTS, 1)}
    # 75 parts are enough to give each lane its own parts, if it were not for shuffle = false
    return paths | {"many streams": write_parts(folder / "many", TEXTS, 75)}


@pytest.mark.parametrize("plan", [(1, 1, 0), (2, 2, 0), (3, 1, 2)], ids=["1", "2 by 2", "3 with workers"])
@pytest.mark.parametrize("name", ["indexed", "one stream", "many streams"])
def test_samples_follow_the_stored_order(name, plan, data):
    dp_size, local_batch_size, workers = plan
    options = dict(local_batch_size=local_batch_size, num_workers=workers, shuffle=False)
    samples = global_samples(COUNT, dp_size, dataset_path=data[name], **options)
    assert [sample[:2] for sample in samples] == stored_samples(TEXTS, COUNT)


@pytest.mark.parametrize("name", ["indexed", "many streams"])
def test_a_resume_on_other_ranks_keeps_the_stored_order(name, data):
    options = dict(dataset_path=data[name], shuffle=False, local_batch_size=1)
    ranks = [loader(**options, dp_rank=rank, dp_size=2) for rank in range(2)]
    for rank in ranks:
        list(islice(rank, 50))
    state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
    later = global_samples(60, 3, **options, state=state)
    assert [sample[:2] for sample in later] == stored_samples(TEXTS, 160)[100:]


def test_a_position_in_another_order_is_refused(data):
    """Earlier versions assigned documents to lanes in stored order too; shuffled positions are still valid."""
    options = dict(dataset_path=data["indexed"], shuffle=False)
    state = merge_states([loader(**options).state_dict()])
    assert state["lanes"] == 1
    with pytest.raises(JobError, match="read its text in 16 streams although training.shuffle = false, so not in the"):
        loader(**options, state=state | {"lanes": 16})
    shuffled = loader(dataset_path=data["indexed"]).state_dict()
    assert shuffled["lanes"] == 16
    loader(dataset_path=data["indexed"], state=merge_states([shuffled]))


def test_group_by_length_is_refused_with_the_stored_order():
    faults = lines("--task.kind=sft", "--data.packing=off", "--data.group_by_length", "--training.no_shuffle")
    assert any("data.group_by_length" in line and "training.shuffle = false" in line for line in faults)


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
