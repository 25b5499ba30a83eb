"""Tests of training.shuffle = false: samples hold the documents in stored order under every plan."""

import gzip
import json
from itertools import cycle, islice

import pytest

from tests.support.judged import lines
from tests.support.loaders import SEQ_LEN, TOKENIZER, global_samples, loader
from tests.support.shards import write
from torchtitan.core.errors import JobError
from torchtitan.datasets.loader import merge_states

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
