"""Sources mixed by weight: their shares and order, and the same samples as from the separate sources."""

import json
import math
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from tests.support import jobs
from tests.support.loaders import global_samples, interleave, loader, rows
from tests.support.mixtures import toml
from tests.support.pool import run_ranks
from tests.support.shards import make_shards, records, write
from torchtitan.assembly.data import JobDatasets
from torchtitan.config import manager
from torchtitan.config.options import ConfigError
from torchtitan.core.errors import JobError
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.mixing import LARGEST_PERIOD, MIXED, Mixture, shares
from torchtitan.job import ResolvedJob
from torchtitan.rules import check

# The order of sources


@pytest.mark.parametrize(
    "weights, expected",
    [
        ([1.0], [1]),
        ([5, 5], [1, 1]),
        ([3, 1], [3, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1e-3, 0.999], [1, 999]),
        ([0.3, 0.3, 0.3], [1, 1, 1]),
    ],
)
def test_a_period_is_the_fewest_samples_that_meet_the_weights(weights, expected):
    assert shares(weights) == expected


def test_weights_of_many_digits_are_met_to_within_a_sample():
    weights = [0.123456789, 0.5, 0.00123456, 2.7182818]
    counts = shares(weights)
    assert sum(counts) == LARGEST_PERIOD
    assert all(abs(c - w / sum(weights) * LARGEST_PERIOD) < 1 for c, w in zip(counts, weights, strict=True))
    with pytest.raises(JobError, match="weight 1e-06 of source 1 is less than one sample in 10,000 of all 2 sources"):
        shares([1.0, 1e-6])


@pytest.mark.parametrize("weights, lanes", [([1], [8]), ([1, 1], [4, 4]), ([3, 1], [8, 1]), ([7, 2, 1], [4, 1, 16])])
def test_every_sample_is_the_next_of_its_stream(weights, lanes):
    """Count from the first sample on, over more than two blocks."""
    mixture = Mixture(weights, lanes, seed=3)
    count = 2 * mixture.block + 60
    located, numbers = (column.tolist() for column in mixture.locate(np.arange(count)))
    counts: Counter[int] = Counter()
    for i, (lane, number) in enumerate(zip(located, numbers, strict=True)):
        source = int(mixture.first_streams.searchsorted(lane, side="right")) - 1
        groups = max(1, lanes[source] // MIXED)
        assert (lane - mixture.first_streams[source]) % groups == i % groups  # so a rank reads only these streams
        assert number == counts[lane]
        counts[lane] += 1
    for start in (0, 5, mixture.block - 3):  # a slice that begins anywhere
        part = mixture.locate(np.arange(start, start + 50))
        assert [part[0].tolist(), part[1].tolist()] == [located[start : start + 50], numbers[start : start + 50]]
    for samples in (0, 1, 29, mixture.block, count):
        expected = Counter(located[:samples])
        assert mixture.samples_per_stream(samples).tolist() == [expected[lane] for lane in range(sum(lanes))]


@pytest.mark.parametrize("weights, lanes", [([1], [64]), ([1], [2]), ([3, 1], [16, 1]), ([5, 3], [64, 8])])
def test_ranks_read_their_own_streams(weights, lanes):
    mixture = Mixture(weights, lanes, 1)
    located = mixture.locate(np.arange(40 * max(lanes)))[0]
    for ranks in (1, 2, 3, 4, 8, 16, 64):
        lanes_by_rank = [mixture.streams_of(first, ranks) for first in range(ranks)]
        assert {lane for rank_lanes in lanes_by_rank for lane in rank_lanes} == set(range(sum(lanes)))
        for first, rank_lanes in enumerate(lanes_by_rank):
            assert set(located[first::ranks].tolist()) <= set(rank_lanes)
        if all(count // math.gcd(count, MIXED) % ranks == 0 for count in lanes):
            assert sum(map(len, lanes_by_rank)) == sum(lanes)  # no stream is read by two ranks


@pytest.mark.parametrize("weights", [[1], [2, 1]])
def test_a_stream_recurs_at_uneven_distances(weights):
    """At fixed distances a long document would return every 16 steps of 4 samples and make the loss a sawtooth."""
    mixture = Mixture(weights, [64] * len(weights), 0)
    lanes = mixture.locate(np.arange(64 * sum(weights) * 200))[0]
    steps = (np.flatnonzero(lanes == 10) // 4 * mixture.counts[0] / sum(weights)).round().astype(int)
    distances = np.bincount(np.diff(steps))
    assert distances.max() < 0.4 * distances.sum()
    # all four streams that are possible at a position are equally frequent
    often = np.bincount(mixture.locate(np.arange(10, 64 * sum(weights) * 400, 16))[0], minlength=64)[:64]
    assert often.nonzero()[0].tolist() == [10, 26, 42, 58]
    assert len({*often[often > 0]}) == 1


@pytest.mark.parametrize("weights, lanes", [([1, 1], [4, 4]), ([7, 2, 1], [4, 1, 16]), ([5, 3], [64, 8])])
def test_periods_meet_the_weights_and_blocks_use_streams_evenly(weights, lanes):
    mixture = Mixture(weights, lanes, seed=0)
    located = mixture.locate(np.arange(3 * mixture.block))[0]
    sources = mixture.first_streams.searchsorted(located, side="right") - 1
    for period in sources.reshape(-1, sum(weights)):
        assert np.bincount(period, minlength=len(weights)).tolist() == weights
    for block in located.reshape(3, -1):
        counts = np.bincount(block, minlength=sum(lanes))
        assert all(
            len({*counts[a:b]}) == 1 for a, b in zip(mixture.first_streams, mixture.first_streams[1:], strict=False)
        )


def test_the_order_depends_on_the_seed_and_on_the_block():
    def orders(seed):
        mixture = Mixture([5, 3, 2], [1, 1, 1], seed)
        return [tuple(row) for row in mixture.locate(np.arange(300))[0].reshape(30, 10).tolist()]

    assert orders(0) == orders(0) != orders(1)
    assert len({*orders(0)}) > 20


def test_the_order_has_recorded_values():
    """If the function changed, every resumed job would read another order."""
    located = Mixture([3, 2, 1], [2, 1, 4], 7).locate(np.array([0, 1, 2, 3, 10**12]))
    assert [column.tolist() for column in located] == [[0, 2, 2, 1, 2], [0, 0, 1, 0, 333333333333]]


def test_far_samples_are_located_quickly():
    mixture = Mixture([0.6, 0.4], [64, 16], 0)
    lanes, numbers = mixture.locate(np.array([10**15]))
    assert numbers[0] == pytest.approx(10**15 * (0.6 / 64 if lanes[0] < 64 else 0.4 / 16), rel=1e-12)


# Samples


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write an indexed source, prepared shards with flags, and a stream; their letters tell them apart."""
    folder = tmp_path_factory.mktemp("mixed")
    digits = ["".join(map(str, range(n % 23))) for n in range(200)]
    indexed, stream = write(folder / "a.jsonl", digits), write(folder / "c.jsonl.gz", ["#" * 9, "+" * 13] * 70)
    make_shards(write(folder / "b.jsonl", records()), folder / "shards")
    return [("text", indexed, 0.5), ("tokens", folder / "shards", 0.2), ("text", stream, 0.3)]


def test_mixed_samples_are_those_of_the_separate_sources(data):
    unmixed = [global_samples(200, sources=[source], document_mask=True) for source in data]
    lanes = [16, 1, 16]
    indices = []  # for each source: (stream, sample number) to the index among its samples
    for count in lanes:
        located = np.stack(Mixture([1], [count], 0).locate(np.arange(200)), axis=1)
        indices.append({tuple(pair): index for index, pair in enumerate(located.tolist())})
    mixture = Mixture([0.5, 0.2, 0.3], lanes, 0)
    expected = []
    for lane, number in zip(*(column.tolist() for column in mixture.locate(np.arange(120))), strict=True):
        source = int(mixture.first_streams.searchsorted(lane, side="right")) - 1
        expected.append(unmixed[source][indices[source][lane - mixture.first_streams[source], number]])
    assert global_samples(120, sources=data, document_mask=True) == expected


def test_samples_are_the_same_for_any_ranks_workers_and_resumes(data):
    expected = global_samples(96, sources=data)
    for dp_size, local_batch_size in ((2, 1), (3, 2), (4, 2)):
        assert global_samples(96, dp_size, local_batch_size=local_batch_size, sources=data) == expected
    state, position = None, 0
    for dp_size, batches, workers in ((2, 3, 0), (3, 2, 1), (1, 4, 2), (4, 2, 0)):
        ranks = [
            loader(sources=data, dp_rank=r, dp_size=dp_size, state=state, num_workers=workers) for r in range(dp_size)
        ]
        samples = [[row for batch in islice(rank, batches) for row in rows(batch)] for rank in ranks]
        count = dp_size * 2 * batches
        assert interleave(samples) == expected[position : position + count]
        position += count
        state = json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))
        for rank in ranks:
            rank.close()
    assert state["samples"] == position == 48


def test_a_rank_tokenizes_only_its_streams_of_every_source(data):
    texts = [source for source in data if source[0] == "text"]
    ranks = [loader(sources=texts, dp_rank=r, dp_size=4, local_batch_size=1) for r in range(4)]
    owners = Counter()
    for rank in ranks:
        list(islice(rank, 20))
        owners.update(rank.state_dict()["cursors"].keys())
    assert set(owners.values()) == {1} and len(owners) == 32


def test_a_state_of_other_sources_is_refused(data):
    first = loader(sources=data)
    list(islice(first, 2))
    state = merge_states([first.state_dict()])
    other = [*data[:2], (*data[2][:2], 0.31)]
    with pytest.raises(JobError, match="sources: 2: weight: 0.3 in the checkpoint, 0.31 now"):
        loader(sources=other, state=state)
    with pytest.raises(JobError, match="sources: 2: {.*c.jsonl.gz.*} in the checkpoint, nothing now"):
        loader(sources=data[:2], state=state)
    with pytest.raises(JobError, match="is incomplete: stream 0 is at sample 0 instead of"):
        loader(sources=data, state=state | {"cursors": {}})


# Jobs


def test_a_job_trains_on_a_mixture_and_resumes_on_other_ranks(data, tmp_path):
    options = dict(checkpoint__enable=True, checkpoint__interval=3, lr_scheduler__total_steps=6)
    job = toml(tmp_path / "job.toml", "training", data)

    def arguments(folder, **more):
        argv = [argument for argument in jobs.arguments(folder, "", **options, **more) if ".dataset" not in argument]
        return [f"--job.config_file={job}", *argv]

    straight = run_ranks(1, jobs.train, arguments(tmp_path / "a", training__steps=6))[0][0]
    on_two = dict(training__local_batch_size=4)
    run_ranks(2, jobs.train, arguments(tmp_path / "b", training__steps=3, **on_two))
    resumed = run_ranks(1, jobs.train, arguments(tmp_path / "b", training__steps=6))[0][0]
    # float32 sums in another order
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in straight], rel=1e-5)


def test_a_list_of_one_source_equals_the_short_form(data, tmp_path):
    """Losses are equal bit for bit, and so is the data position in the checkpoint."""
    (name, path, _), *_ = data
    short, listed = loader(path, name), loader(sources=[(name, path, 7.0)])
    assert [rows(batch) for batch in islice(short, 9)] == [rows(batch) for batch in islice(listed, 9)]
    assert short.state_dict() == listed.state_dict()
    config = manager.load(["--job.config_file", str(toml(tmp_path / "job.toml", "training", data))])
    assert (
        ResolvedJob(config).data.describe_sources("training")
        == f"0.5 text ({path}) + 0.2 tokens ({data[1][1]}) + 0.3 text ({data[2][1]})"
    )
    assert ResolvedJob(config).data.describe_sources("validation") == "python_stdlib_validation"


def test_faults_of_all_sources_are_reported_together(data, tmp_path):
    sources = [("text", tmp_path / "no", 1), ("txet", "x", 1), ("tokens", data[0][1], 1e-9)]
    for section in ("training", "validation"):
        path = toml(tmp_path / "job.toml", section, sources)
        config = manager.load(
            ["--job.config_file", str(path), "--validation.enable=true", "--model.tokenizer_path=bytes"]
        )
        faults = {fault.key: str(fault) for fault in check(config, 1, "cpu") if section in fault.key}
        assert list(faults) == [
            f"{section}.sources[1].dataset",
            f"{section}.sources[0].dataset_path",
            f"{section}.sources[2].dataset_path",
            f"{section}.sources",
        ]
        assert 'did you mean "text"?' in faults[f"{section}.sources[1].dataset"]
        assert "no such file or folder" in faults[f"{section}.sources[0].dataset_path"]
        assert "is less than one sample in 10,000" in faults[f"{section}.sources"]


def test_sources_and_the_short_form_exclude_each_other(data, tmp_path):
    path = toml(tmp_path / "job.toml", "training", data)
    argv = ["--job.config_file", str(path), "--training.dataset=c4", "--training.dataset_path=x"]
    faults = [str(fault) for fault in check(manager.load([*argv, "--model.tokenizer_path=bytes"]), 1, "cpu")]
    assert len(faults) == 2 and all("allowed: nothing with training.sources; make it one of" in line for line in faults)


def test_a_wrong_table_is_named(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[[training.sources]]\ndataset = "text"\nweight = 0\n[[training.sources]]\nwieght = 1\n')
    with pytest.raises(ConfigError) as error:
        manager.load(["--job.config_file", str(path)])
    assert [fault.key for fault in error.value.faults] == [
        "training.sources[0].weight",
        "training.sources[1].dataset",
        "training.sources[1].wieght",
    ]


def test_every_source_has_its_own_text_field(tmp_path):
    for name, field in (("a", "text"), ("b", "body")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({field: name * 99}) + "\n")
    tables = [f'{{dataset = "text", dataset_path = "{tmp_path}/{name}.jsonl"' for name in "ab"]
    config = manager.load([f'--training.sources=[{tables[0]}}}, {tables[1]}, text_field = "body"}}]'])
    texts = [
        next(weighted.source.documents()).text[0]
        for weighted in JobDatasets(ResolvedJob(config)).open_sources("training")
    ]
    assert texts == ["a", "b"]


def test_sources_are_joined_by_size(tmp_path):
    """With 480 and 32 records each is read equally often; equal weights would draw half of the samples from the 32."""

    def segments(name, count):
        values = [[{"text": name, "label": False}, {"text": str(i), "label": True}] for i in range(count)]
        return write(tmp_path / f"{name}.jsonl", values)

    large, small = segments("l", 480), segments("s", 32)
    path = toml(tmp_path / "job.toml", "training", [("text", large, 1), ("text", small, 1)])
    options = [f"--job.config_file={path}", f"--job.dump_folder={tmp_path}", "--task.kind=sft", "--training.seq_len=16"]
    options += ["--model.tokenizer_path=bytes", "--training.local_batch_size=64", "--data.packing=off"]
    shares = {}
    for mixing in ("weights", "sizes"):
        config = manager.load([*options, f"--training.mixing={mixing}"])
        assert not [fault for fault in check(config, 1, "cpu") if "mixing" in fault.key]
        vocabulary = ResolvedJob(config).tokenizer()
        batches = islice(JobDatasets(ResolvedJob(config)).training_loader(vocabulary, 0), 8)
        records = [tuple(ids) for batch in batches for ids in batch["tokens"].tolist()]
        shares[mixing] = sum(ids[1] == ord("s") for ids in records) / len(records)
        if mixing == "sizes":
            assert len(set(records)) == len(records) == 512
            assert "0.5" not in ResolvedJob(config).data.describe_sources("training")
    assert shares == {"weights": 0.5, "sizes": 32 / 512}
    path = toml(tmp_path / "job.toml", "training", [("text", large, 3), ("text", small, 1)])
    (fault,) = (
        str(f) for f in check(manager.load([*options, "--training.mixing=sizes"]), 1, "cpu") if "weight" in f.key
    )
    assert 'training.sources[0].weight: given 3.0; allowed: 1 with training.mixing = "sizes"' in fault


def test_texts_joined_by_size_are_packed_into_blocks(tmp_path):
    """Samples are blocks of the joined texts; a pass reads each block once."""
    large = write(tmp_path / "large.jsonl", ["l" * 30 for _ in range(60)])
    small = write(tmp_path / "small.jsonl", ["s" * 30 for _ in range(10)])
    path = toml(tmp_path / "job.toml", "training", [("text", large, 1), ("text", small, 1)])
    options = [f"--job.config_file={path}", f"--job.dump_folder={tmp_path}", "--training.seq_len=31"]
    config = manager.load([*options, "--model.tokenizer_path=bytes", "--training.mixing=sizes"])
    vocabulary = ResolvedJob(config).tokenizer()
    batches = islice(JobDatasets(ResolvedJob(config)).training_loader(vocabulary, 0), 9)
    letters = [letter for batch in batches for row in batch["tokens"].tolist() for letter in row]
    assert letters.count(ord("s")) / letters.count(ord("l")) == pytest.approx(10 / 60, rel=0.15)
