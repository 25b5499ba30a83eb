"""Batches and the position in them: the same samples for any number of ranks and workers, from any point on."""

import gzip
import json
import multiprocessing
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch

from tests.support.jobs import ROOT
from tests.support.loaders import SEQ_LEN, TOKENIZER, global_samples, interleave, loader, rows, write_documents
from tests.support.token_shards import make as make_shards
from torchtitan.core.errors import JobError
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.mixing import Mixture
from torchtitan.datasets.samples import IGNORE, ShardPieces, next_token_arrays, next_token_pieces
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.sources.files import text
from torchtitan.datasets.streams import IndexedStreams
from torchtitan.datasets.tokenizer import build_tokenizer


def workers_alive() -> list[multiprocessing.process.BaseProcess]:
    """Return this process's children, without the ranks of tests/support/pool.py."""
    return [child for child in multiprocessing.active_children() if type(child).__name__ != "ForkServerProcess"]


@pytest.mark.parametrize(
    ("ranks", "message"), [(64, ""), (512, "512 data-parallel ranks read 64 streams of text, so each")]
)
def test_more_ranks_than_streams_log_the_cost(tmp_path, caplog, ranks, message):
    path = write_documents(tmp_path / "a.jsonl", count=600)
    loader(path, dp_size=ranks, dp_rank=0)
    assert (message in caplog.text and "32 times" in caplog.text) if message else not caplog.text
    caplog.clear()
    loader(path, dp_size=ranks, dp_rank=1)
    assert not caplog.text


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write one dataset of each kind: indexed, stream, prepared."""
    folder = tmp_path_factory.mktemp("data")
    documents = [TOKENIZER.encode(f"{i} " * (i % 17), bos=True, eos=True) for i in range(100)]
    shards = make_shards(folder / "shards", documents)
    header = json.loads((shards / "header.json").read_text()) | {"tokenizer": TOKENIZER.fingerprint}
    (shards / "header.json").write_text(json.dumps(header))
    return {
        "indexed": dict(dataset_path=write_documents(folder / "a.jsonl")),
        "stream": dict(dataset_path=write_documents(folder / "b.jsonl.gz")),
        "prepared": dict(dataset="tokens", dataset_path=shards),
    }


KINDS = ("indexed", "stream", "prepared")


# What is in a batch


def reference(lanes, count, document_mask):
    """Compute the global samples of an indexed source in plain Python, with whole epochs as lists."""
    by_lane = []
    for lane in range(lanes.count):
        stream = []
        for epoch in range(30):
            order = lanes.order(epoch, np.arange(len(lanes.source))).tolist()
            for index in order[lane :: lanes.count]:
                content = lanes.source.get(index).text
                tokens = TOKENIZER.encode(content, bos=True, eos=True) if content.strip() else []
                stream += [(token, i == 0) for i, token in enumerate(tokens)]
        by_lane.append(stream)
    mixture, samples = Mixture([1], [lanes.count], lanes.seed), []
    for i in range(count):
        lane, before = (int(column[0]) for column in mixture.locate(np.array([i])))
        piece = by_lane[lane][before * SEQ_LEN : (before + 1) * SEQ_LEN + 1]
        assert len(piece) == SEQ_LEN + 1
        tokens, labels, positions, documents = [], [], [], []
        for t in range(SEQ_LEN):
            begins = piece[t][1] and t > 0
            documents.append(documents[-1] + begins if t else 0)
            restart = t == 0 or (begins and document_mask)
            positions.append(0 if restart else positions[-1] + 1)
            tokens.append(piece[t][0])
            labels.append(IGNORE if document_mask and piece[t + 1][1] else piece[t + 1][0])
        samples.append((tokens, labels, positions, documents))
    return samples


@pytest.mark.parametrize("document_mask", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_packing_equals_the_reference(data, shuffle, document_mask):
    path = str(data["indexed"]["dataset_path"])
    lanes = IndexedStreams(text(path, "text"), 3, shuffle)
    assert lanes.count == (16 if shuffle else 1)
    expected = reference(lanes, 120, document_mask)
    samples = global_samples(120, dataset_path=path, seed=3, shuffle=shuffle, document_mask=document_mask)
    assert samples == expected
    assert any(IGNORE in labels for _, labels, _, _ in samples) == document_mask


def test_a_batch(data):
    for kind in KINDS:
        batch = next(iter(loader(**data[kind])))
        assert set(batch) == {"tokens", "labels", "positions", "document_ids"}
        for tensor in batch.values():
            assert tensor.shape == (2, SEQ_LEN) and tensor.dtype == torch.int64 and tensor.is_contiguous()
        assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        assert torch.equal(batch["positions"], torch.arange(SEQ_LEN).expand(2, -1))


def test_short_documents_make_many_borders():
    row = np.array([[9, 1, 2, 1, 1, 5, 1]])
    begins = np.array([0, 0, 0, 0]), np.array([1, 3, 4, 6])
    tokens, labels, documents, positions = (array[0].tolist() for array in next_token_arrays(row, begins, True, 10))
    assert tokens == [9, 1, 2, 1, 1, 5]
    assert labels == [IGNORE, 2, IGNORE, IGNORE, 5, IGNORE]
    assert documents == [0, 1, 1, 2, 3, 3]
    assert positions == [0, 0, 1, 0, 0, 1]
    # A document that begins with the sample is not a border.
    begins = np.array([0, 0]), np.array([0, 3])
    assert [array[0].tolist() for array in next_token_arrays(row, begins, True, 10)[2:]] == [
        [0, 0, 0, 1, 1, 1],
        [0, 1, 2, 0, 1, 2],
    ]


@pytest.mark.parametrize("token", [-1, 10])
def test_ids_outside_the_vocabulary_are_refused(token):
    nothing = np.empty(0, dtype=np.int64)
    with pytest.raises(DataError, match="the tokenizer's vocabulary has 10"):
        next_token_arrays(np.array([[1, 2, token]]), (nothing, nothing), False, 10)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("size", [1, 3, 7, 9])
def test_pieces_are_rows_of_all_arrays(size, trained):
    """Every piece is what its rows give by themselves, in any order of the document starts."""
    rng = np.random.default_rng(size)
    ids, (row, column) = rng.integers(0, 9, (7, 12)), np.nonzero(rng.random((7, 12)) < 0.3)
    shuffled_starts = rng.permutation(len(row))
    mask = rng.random((7, 12)) < 0.5 if trained else None
    begins = row[shuffled_starts], column[shuffled_starts]
    for top, piece in zip(range(0, 7, size), next_token_pieces(ids, begins, True, 10, mask, size), strict=True):
        inside = (row >= top) & (row < top + size)
        rows_mask = None if mask is None else mask[top : top + size]
        arrays = next_token_arrays(ids[top : top + size], (row[inside] - top, column[inside]), True, 10, rows_mask)
        assert all(np.array_equal(ours, expected) for ours, expected in zip(piece, arrays, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_sizes_of_pieces_and_reads_do_not_change_samples(data, monkeypatch, workers):
    """One epoch, at whose end some samples only fill up a batch of all ranks."""
    options = dict(**data["prepared"], local_batch_size=3, epochs=1, document_mask=True, num_workers=workers)
    expected = [row for batch in loader(**options) for row in rows(batch)]
    for sizes in ((1, 1, 1), (2 * 3 * SEQ_LEN, 7 * 3 * SEQ_LEN, 50), (5 * 3 * SEQ_LEN, 1, 2**10)):
        for name, value in zip(("PIECE_TOKENS", "READ_TOKENS", "AHEAD"), sizes, strict=True):
            monkeypatch.setattr(ShardPieces, name, value)
        assert [row for batch in loader(**options) for row in rows(batch)] == expected


# The order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("document_mask", [False, True])
def test_any_number_of_ranks_gives_the_same_samples(data, kind, document_mask):
    options = dict(**data[kind], document_mask=document_mask)
    expected = global_samples(96, **options)
    for dp_size, local_batch_size in ((2, 1), (2, 6), (3, 2), (4, 2), (5, 1), (8, 3), (1, 7)):
        assert global_samples(96, dp_size, local_batch_size=local_batch_size, **options) == expected
    assert len({str(sample) for sample in expected}) > 60  # not always the same
    assert global_samples(96, **options, seed=1) != expected
    assert global_samples(96, **options, shuffle=False) != expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_continues_at_the_exact_sample(data, kind):
    """Resume again and again, each time with another number of ranks."""
    expected = global_samples(96, **data[kind])
    state, position = None, 0
    for dp_size, local_batch_size, batches in (
        (2, 3, 1),
        (3, 1, 4),
        (1, 2, 3),
        (4, 2, 1),
        (5, 1, 2),
        (1, 1, 1),
        (2, 2, 3),
    ):
        ranks = [
            loader(**data[kind], dp_rank=r, dp_size=dp_size, local_batch_size=local_batch_size, state=state)
            for r in range(dp_size)
        ]
        samples = [[row for batch in islice(rank, batches) for row in rows(batch)] for rank in ranks]
        count = dp_size * local_batch_size * batches
        assert interleave(samples) == expected[position : position + count]
        position += count
        state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
        assert state["samples"] == position
    assert rows(next(iter(loader(**data[kind], state=state)))) == expected[position : position + 2]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_change_no_sample(data, kind):
    """Prefetched batches are not counted as consumed."""
    options = dict(**data[kind], document_mask=True, local_batch_size=3)
    expected = global_samples(30, **options)
    with_workers = loader(**options, num_workers=2, prefetch_factor=2)
    batches = iter(with_workers)
    assert [row for batch in islice(batches, 4) for row in rows(batch)] == expected[:12]
    state = merge_states([with_workers.state_dict()])
    assert state["samples"] == 12
    resumed = loader(**options, state=state, num_workers=1)
    assert [row for batch in islice(resumed, 2) for row in rows(batch)] == expected[12:18]
    # an open iterator is not disturbed, and a new one starts at the first sample
    assert rows(next(batches)) == expected[12:15]
    assert rows(next(iter(with_workers))) == expected[:3]
    for open_loader in (with_workers, resumed):
        open_loader.close()
    assert not workers_alive()


def test_without_workers_no_data_loader_is_made(data, monkeypatch):
    """Its overhead is that of reading a batch of prepared tokens. The control: with a worker it is made."""
    options = data["prepared"]
    expected = [batch["tokens"] for batch in islice(loader(**options), 3)]

    def refuse(*args, **kwargs):
        raise AssertionError("a data loader is made")

    monkeypatch.setattr("torchtitan.datasets.loader.StatefulDataLoader", refuse)
    assert all(torch.equal(batch["tokens"], tokens) for batch, tokens in zip(loader(**options), expected, strict=False))
    with pytest.raises(AssertionError, match="a data loader is made"):
        loader(**options, num_workers=1)


def test_workers_on_a_hugging_face_dataset(tmp_path):
    """The library itself splits shards over workers, so the loader must not split them again."""
    for shard in range(2):
        (tmp_path / f"train-{shard}.jsonl").write_bytes(write_documents(tmp_path / "a", seed=shard).read_bytes())
    (tmp_path / "a").unlink()
    options = dict(dataset="huggingface", dataset_path=tmp_path)
    with_workers = loader(**options, num_workers=2)
    assert [row for batch in islice(with_workers, 10) for row in rows(batch)] == global_samples(20, **options)
    with_workers.close()


def test_persistent_workers_restart_from_the_first_sample(data):
    persistent = loader(**data["indexed"], num_workers=1, persistent_workers=True)
    first = [rows(batch) for batch in islice(persistent, 3)]
    (worker,) = workers_alive()
    assert [rows(batch) for batch in islice(persistent, 3)] == first
    assert workers_alive() == [worker]
    persistent.close()
    assert not workers_alive()
    assert [rows(batch) for batch in islice(persistent, 3)] == first
    persistent.close()


def test_making_batches_draws_no_random_numbers(data):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    next(iter(loader(**data["indexed"])))
    assert torch.equal(torch.rand(3), expected)


def test_a_rank_tokenizes_only_its_own_streams(data, monkeypatch):
    encoded = []
    original = type(TOKENIZER)._encode
    monkeypatch.setattr(type(TOKENIZER), "_encode", lambda self, t: encoded.append(t) or original(self, t))
    for rank in range(4):
        list(islice(loader(**data["indexed"], dp_rank=rank, dp_size=4, local_batch_size=1), 5))
    by_four = len(encoded)
    list(islice(loader(**data["indexed"], local_batch_size=4), 5))
    assert len(encoded) - by_four == by_four
    # a resume tokenizes at most one document for each stream, wherever it stands
    far = loader(**data["indexed"], local_batch_size=4)
    list(islice(far, 100))
    encoded.clear()
    next(iter(loader(**data["indexed"], local_batch_size=4, state=far.state_dict())))
    assert len(encoded) <= 16 + 8  # one a stream, and the further ones of the batch


# Refused states


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(seed=1), "seed: 0 in the checkpoint, 1 now"),
        (dict(seq_len=8), "seq_len: 16 in the checkpoint, 8 now"),
        (dict(shuffle=False), "shuffle: True in the checkpoint, False now"),
        (dict(tokenizer=build_tokenizer(str(ROOT / "tests/assets/tokenizer/tiktoken.model"))), "tokenizer: "),
    ],
)
def test_a_state_of_other_settings_is_refused(data, options, message):
    state = loader(**data["indexed"]).state_dict()
    with pytest.raises(JobError, match=message):
        loader(**data["indexed"], **options, state=state)


def test_a_state_of_other_data_is_refused(tmp_path, data):
    path = write_documents(tmp_path / "a.jsonl")
    first = loader(path)
    list(islice(first, 3))
    state = first.state_dict()
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(JobError, match=f"files: a.jsonl: {size} in the checkpoint, {size - 40} now"):
        loader(path, state=state, on_bad_data="skip")
    other = write_documents(tmp_path / "b.jsonl")
    with pytest.raises(JobError, match="files: a.jsonl: .* in the checkpoint, nothing now; files: b.jsonl: nothing in"):
        loader(other, state=state)
    with pytest.raises(JobError, match="dataset: text in the checkpoint, tokens now"):
        loader(**data["prepared"], state=state)
    for key, value, message in [
        ("version", 9, "has version 9, this program reads 2"),
        ("version", 1, "has version 1, this program reads 2, another order; finish with the program that began"),
        ("lanes", 8, "streams: 8 in the checkpoint, 16 now"),
        ("cursors", {}, "is incomplete: stream 0 is at sample 0 instead of 1; join the states"),
    ]:
        with pytest.raises(JobError, match=message):
            loader(write_documents(path), state={**state, key: value})


def test_an_older_position_in_prepared_shards_is_accepted(data):
    """Their order is unchanged; only the number of streams is another."""
    expected = global_samples(12, **data["prepared"])
    first = loader(**data["prepared"])
    list(islice(first, 3))
    older = first.state_dict() | {"version": 1}
    assert [row for batch in islice(loader(**data["prepared"], state=older), 3) for row in rows(batch)] == expected[6:]


def test_an_older_state_with_an_unexpanded_home_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_documents(tmp_path / "a.jsonl")
    state = loader(path).state_dict()
    assert state["fingerprint"]["dataset_path"] == str(path)
    state["fingerprint"]["dataset_path"] = "~/a.jsonl"
    loader(path, state=state)


def test_changed_text_of_the_same_size_is_noticed(tmp_path):
    path = write_documents(tmp_path / "a.jsonl", count=8)
    first = loader(path, local_batch_size=1)
    next(batch for batch in first if first.state_dict()["cursors"]["0"][4] > 3)  # stop inside a document
    shorter = (b'{"text":"a"}'.ljust(len(line)) for line in path.read_bytes().splitlines())
    path.write_bytes(b"".join(line + b"\n" for line in shorter))
    state = first.state_dict()
    with pytest.raises(JobError, match="samples of the contents"):
        loader(path, state=state)
    del state["fingerprint"][
        "samples of the contents"
    ]  # as in older checkpoints, or where the compared samples are equal
    with pytest.raises(DataError, match="the data have changed since"):
        next(iter(loader(path, state=state)))


@pytest.mark.parametrize("sources", [1, 2])
def test_a_state_of_an_older_tokenization_of_conversations_is_refused(sources, tmp_path):
    path, spoken = tmp_path / "a.jsonl", build_tokenizer("bytes", "{% for m in messages %}{{ m.content }}{% endfor %}")
    path.write_text('{"messages": [{"role": "user", "content": "a longer question than that"}]}\n' * 8)
    several = dict(sources=[("text", path, 1.0)] * sources, tokenizer=spoken, on_bad_data="skip")
    state = loader(**several).state_dict()
    loader(**several, state=state)
    for content in state["fingerprint"].get("sources", {"": state["fingerprint"]}).values():
        assert content.pop("conversations") == 3
    with pytest.raises(JobError, match="the tokenization of conversations has changed since"):
        loader(**several, state=state)
    texts = loader(write_documents(path), tokenizer=spoken).state_dict()
    assert "conversations" not in texts["fingerprint"]


def test_states_of_different_steps_cannot_be_merged(data):
    ranks = [loader(**data["indexed"], dp_rank=r, dp_size=2) for r in range(2)]
    next(iter(ranks[0]))
    with pytest.raises(JobError, match=r"different steps or different data cannot be joined: samples \[0, 4\]"):
        merge_states([rank.state_dict() for rank in ranks])


# Refused settings and bad data


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dataset="nothing"), "dataset is 'nothing'; allowed: python_stdlib, "),
        (
            dict(global_batch_size=6, dp_size=2),
            r"given 6; allowed: a multiple of local_batch_size 2 x 2 data-parallel ranks = 4; write 4 or 8",
        ),
        (
            dict(global_batch_size=2, dp_size=2),
            "given 2; allowed: a multiple of .* = 4; write 4 or fewer",
        ),
        (dict(prefetch_factor=2), "prefetch_factor: given 2; allowed: unset without workers"),
        (dict(persistent_workers=True), "persistent_workers: given true; allowed: false without workers"),
        (dict(pin_memory=True), "pin_memory: given true; allowed: false without a GPU"),
    ],
)
def test_impossible_settings_are_refused(data, options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match=message):
        loader(**(data["indexed"] | options))


def test_shards_of_another_tokenizer_are_refused(data):
    with pytest.raises(DataError, match="prepared with the tokenizer bytes"):
        loader(**data["prepared"], tokenizer=build_tokenizer(str(ROOT / "tests/assets/tokenizer/tiktoken.model")))


def bad_documents(path, position=7):
    content = write_documents(path).read_bytes().split(b"\n")
    content[position] = b'{"broken'
    path.write_bytes(b"\n".join(content))
    return path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_record_stops_the_run_and_is_named(tmp_path, num_workers):
    path = bad_documents(tmp_path / "a.jsonl")
    batches = loader(path, num_workers=num_workers)
    with pytest.raises(DataError, match=r"^[^\n]*a.jsonl:8: no valid JSON at byte \d+[^\n]*$"):
        list(islice(batches, 100))
    assert not workers_alive()


def test_bad_records_are_skipped_and_counted(tmp_path, caplog):
    path = bad_documents(tmp_path / "a.jsonl")
    single = loader(path, on_bad_data="skip", num_workers=1)
    batches = list(islice(single, 60))
    assert single.skipped > 1  # once in an epoch
    single.close()
    # the count is part of the data position, and summed over the ranks
    ranks = [loader(path, on_bad_data="skip", dp_rank=r, dp_size=2, local_batch_size=1) for r in range(2)]
    by_rank = [[row for batch in islice(rank, 60) for row in rows(batch)] for rank in ranks]
    assert sum(rank.skipped for rank in ranks) == single.skipped
    assert interleave(by_rank) == [row for batch in batches for row in rows(batch)]
    resumed = loader(path, on_bad_data="skip", state=merge_states([rank.state_dict() for rank in ranks]))
    assert resumed.skipped == single.skipped
    assert "left out (1 in stream" in caplog.text and "a.jsonl:8: no valid JSON" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("texts", [["", " \n"], [""] * 100])
def test_data_without_text_are_refused(tmp_path, name, texts):
    content = "".join(json.dumps({"text": t}) + "\n" for t in texts).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(DataError, match="no text in 8 epochs of stream"):
        next(iter(loader(path)))


def test_data_of_bad_records_only_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"broken\n" * 20)
    with pytest.raises(DataError, match="a.jsonl:20: no valid JSON"):
        loader(path)
    with pytest.raises(DataError, match="no text in 8"):
        next(iter(loader(path, on_bad_data="skip")))


def test_a_file_that_disappears_is_named(tmp_path):
    path = write_documents(tmp_path / "a.jsonl")
    batches = iter(loader(path))
    next(batches)
    path.unlink()
    with pytest.raises(DataError, match="No such file or directory: .*a.jsonl.*; the data must stay where"):
        list(islice(batches, 20))


def test_exit_without_closing_is_quiet(data):
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.support.loaders import loader\n"
        f"path = {str(data['stream']['dataset_path'])!r}\n"
        "for workers in (0, 1): batches = iter(loader(path, num_workers=workers)); next(batches)"
    )
    done = subprocess.run([sys.executable, "-W", "default::UserWarning", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
