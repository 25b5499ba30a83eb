"""Sample packing: on any number of ranks, a pass holds each document once, unbroken and separate from the others."""

import json
from itertools import groupby, islice

import numpy as np
import pytest
import torch

from tests.support import jobs
from tests.support.judged import lines
from tests.support.loaders import TOKENIZER, interleave, loader, rows
from tests.support.shards import make_shards, records, write
from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.sample_packing import Packing, PackReader, best_fit, held_out_counts
from torchtitan.datasets.samples import IGNORE, ShardPieces
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import TokenReader, TokenShards
from torchtitan.job import ResolvedJob
from torchtitan.rules import check

SEQ_LEN, END = 47, TOKENIZER.eos_id
PACKED, WINDOWS, ALONE = Packing(1000, END), Packing(8, END), Packing(1, END)
GROUPED = ALONE._replace(step_samples=6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sources of masked records of at most 48 tokens."""
    home = tmp_path_factory.mktemp("packs")
    for number, name in enumerate("ab"):
        short = [r for r in records(70 + 20 * number, seed=number) if sum(len(s["text"]) for s in r) <= SEQ_LEN - 1]
        make_shards(write(home / f"{name}.jsonl", short), home / name)
    return {name: home / name for name in "ab"}


def documents(folder):
    """Return (token ids, loss-mask flags) of every document of a folder."""
    reader = TokenReader(TokenShards(folder))
    contents = []
    for start, stop in zip(reader.documents, [*reader.documents[1:], reader.shards.tokens], strict=True):
        ids, flags = np.empty(stop - start, dtype=np.int64), np.empty(stop - start, dtype=bool)
        reader.copy(int(start), ids, flags)
        contents.append((tuple(ids.tolist()), tuple(flags.tolist())))
    return contents


def packed(folders, names="ab", **options):
    """Return a loader of the folders with sample packing."""
    sources = [("tokens", folders[name], 1.0) for name in names]
    return loader(sources=sources, **dict(seq_len=SEQ_LEN, document_mask=True, packing=PACKED) | options)


def pieces_of_sample(tokens, labels, positions, numbers):
    """Split a sample at its document numbers into (tokens, labels) pairs; positions must start at 0 in each."""
    pieces, start = [], 0
    for _, group in groupby(numbers):
        stop = start + len(list(group))
        assert positions[start:stop] == list(range(stop - start))
        pieces.append((tuple(tokens[start:stop]), tuple(labels[start:stop])))
        start = stop
    return pieces


def match_documents(samples, expected):
    """Return the ids of the expected documents that the samples hold, in order.

    Anything else fails, except padding at a sample's end. The last token of a document that fills its sample is only
    a label.
    """
    ids_of_piece = {}
    for ids, flags in expected:
        labels = [i if flag else IGNORE for i, flag in zip(ids[1:], flags[1:], strict=True)]
        ids_of_piece |= {(ids, (*labels, IGNORE)): ids, (ids[:-1], tuple(labels)): ids}
    matches = []
    for sample in samples:
        pieces = pieces_of_sample(*sample)
        if set(pieces[-1][0]) == {END}:
            assert set(pieces.pop()[1]) == {IGNORE}
        matches += [ids_of_piece[one] for one in pieces]
    return matches


def test_best_fit_is_near_the_fewest_packs():
    assert best_fit(np.array([3, 7, 5, 5]), 10).max() == 1  # 7 + 3, 5 + 5
    rng = np.random.default_rng(0)
    for room in (8, 50, 300):
        lengths = rng.integers(1, room + 1, 500)
        packs = best_fit(lengths, room)
        filled = np.bincount(packs, weights=lengths)
        assert filled.max() <= room and filled.min() > 0
        lowest = max(-(-lengths.sum() // room), (lengths > room / 2).sum())
        assert len(filled) <= 11 / 9 * lowest + 1


@pytest.mark.parametrize("packing", [PACKED, WINDOWS, ALONE, GROUPED], ids=["one window", "many", "alone", "grouped"])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_every_pass_holds_every_document_once_and_unbroken(folders, names, packing):
    all_documents = [document for name in names for document in documents(folders[name])]
    options = dict(names=names, packing=packing, local_batch_size=1)
    samples = [row for batch in packed(folders, **options, epochs=2) for row in rows(batch)]
    reader = PackReader([TokenShards(folders[name]) for name in names], SEQ_LEN, 0, True, packing)
    assert len(samples) == reader.samples(2)
    passes = [
        match_documents(samples[: reader.samples(1)], all_documents),
        match_documents(samples[reader.samples(1) :], all_documents),
    ]
    assert passes[0] != passes[1]
    assert all(sorted(one) == sorted(ids for ids, _ in all_documents) for one in passes)
    assert packing.window == 1 or len(samples) < 2 * len(all_documents)
    assert packing != PACKED or reader.efficiency > 0.9
    stored = [row for batch in packed(folders, **options, epochs=1, shuffle=False) for row in rows(batch)]
    firsts = [match_documents([sample], all_documents) for sample in stored]
    if packing == ALONE:
        assert firsts == [[ids] for ids, _ in all_documents]
    positions = {ids: position for position, (ids, _) in reversed(list(enumerate(all_documents)))}
    earliest = [min(positions[ids] for ids in one) for one in firsts]
    assert packing != PACKED or earliest[0] == 0


@pytest.mark.parametrize("packing", [WINDOWS, ALONE, GROUPED], ids=["packed", "alone", "grouped"])
def test_any_number_of_ranks_reads_the_same_and_resumes_inside_a_window(folders, packing):
    options = dict(packing=packing, epochs=3)
    reference = [row for batch in packed(folders, **options, local_batch_size=1) for row in rows(batch)]
    for ranks, workers in ((2, 0), (3, 2)):
        loaders = [packed(folders, **options, dp_rank=r, dp_size=ranks, num_workers=workers) for r in range(ranks)]
        samples = interleave([[row for batch in one for row in rows(batch)] for one in loaders])
        assert samples[: len(reference)] == reference and len(samples) - len(reference) < 2 * ranks
        assert all(set(labels) == {IGNORE} for _, labels, *_ in samples[len(reference) :])
        for one in loaders:
            one.close()
    loaders = [packed(folders, **options, dp_rank=r, dp_size=2) for r in range(2)]
    resumed = interleave([[row for batch in islice(one, 3) for row in rows(batch)] for one in loaders])
    state = json.loads(json.dumps(merge_states([one.state_dict() for one in loaders])))
    loaders = [packed(folders, **options, dp_rank=r, dp_size=3, local_batch_size=1, state=state) for r in range(3)]
    resumed += interleave([[row for batch in one for row in rows(batch)] for one in loaders])
    assert resumed[: len(reference)] == reference
    with pytest.raises(JobError, match="packing: window: [81] in the checkpoint, 9 now"):
        packed(folders, epochs=3, packing=packing._replace(window=9), state=state)


def test_grouped_steps_have_samples_of_similar_length(folders):
    """The order is shuffled again for each epoch; only the last step may mix the remaining lengths."""
    spreads, orders = {}, []
    for packing in (ALONE, GROUPED):
        samples = [
            row for batch in packed(folders, packing=packing, epochs=2, local_batch_size=1) for row in rows(batch)
        ]
        lengths = np.array([sum(number == 0 for number in numbers) for *_, numbers in samples])
        samples_per_pass = len(lengths) // 2
        steps = lengths[: samples_per_pass // 6 * 6].reshape(-1, 6)
        spreads[packing.step_samples] = (steps.max(1) - steps.min(1)).mean()
        orders.append([[row[0] for row in samples[:samples_per_pass]], [row[0] for row in samples[samples_per_pass:]]])
    assert spreads[6] < spreads[0] / 5
    assert orders[1][0] != orders[1][1] and sorted(orders[1][0]) == sorted(orders[0][0]) == sorted(orders[1][1])
    firsts = [sum(token != END for token in row) for row in orders[1][0][::6]]
    assert firsts != sorted(firsts) and firsts != sorted(firsts, reverse=True)  # steps are drawn, too


@pytest.mark.parametrize("multiple", [1, 8])
def test_batches_are_as_long_as_their_longest_sample(folders, multiple):
    all_documents = [document for name in "ab" for document in documents(folders[name])]
    batches = list(packed(folders, packing=ALONE._replace(multiple=multiple), epochs=1))
    full_batches = list(packed(folders, packing=ALONE, epochs=1))
    samples = [row for batch in batches for row in rows(batch)]
    samples = samples[: len(all_documents)]  # without the filler samples of the last step
    assert sorted(match_documents(samples, all_documents)) == sorted(ids for ids, _ in all_documents)
    widths = [batch["tokens"].shape[1] for batch in batches]
    longest = [int((batch["document_ids"] == 0).sum(1).max()) for batch in full_batches]
    assert widths == [min(-(-length // multiple) * multiple, SEQ_LEN) for length in longest] and min(widths) < SEQ_LEN
    for short, full, width in zip(batches, full_batches, widths, strict=True):
        assert all(short[name].equal(full[name][:, :width]) and short[name].is_contiguous() for name in full)


def test_data_shards_partition_the_training_documents(folders):
    all_documents = [document for name in "ab" for document in documents(folders[name])]
    options = dict(epochs=1, local_batch_size=1)
    parts = []
    for number in (1, 2, 3):
        packing = PACKED._replace(split=0.2, shard=(number, 3))
        parts.append(
            match_documents(
                [row for batch in packed(folders, packing=packing, **options) for row in rows(batch)], all_documents
            )
        )
    every = packed(folders, packing=PACKED._replace(split=0.2), **options)
    assert sorted(sum(parts, [])) == sorted(
        match_documents([row for batch in every for row in rows(batch)], all_documents)
    )
    assert max(map(len, parts)) - min(map(len, parts)) <= 2  # of two sources
    with pytest.raises(
        DataError, match=r"data.shards = 900/900: none of 160 records are in it|none of \d+ records are"
    ):
        packed(folders, packing=ALONE._replace(shard=(900, 900)), epochs=1)


def test_weights_mix_packs_of_each_source(folders):
    sources = [("tokens", folders[name], weight) for name, weight in (("a", 3.0), ("b", 1.0))]
    options = dict(sources=sources, seq_len=SEQ_LEN, document_mask=True, packing=PACKED, local_batch_size=4)
    ids_of_a = {ids for ids, _ in documents(folders["a"])}
    both = [document for name in "ab" for document in documents(folders[name])]
    for batch in islice(loader(**options), 4):
        from_a = [set(match_documents([row], both)) <= ids_of_a for row in rows(batch)]
        assert sum(from_a) == 3


def test_joined_sources_are_one_endless_source(folders):
    """Each pass holds every record once, whatever the sizes of the sources, as in an endless number of epochs."""
    options = dict(joined=True, local_batch_size=1)
    in_epochs = [row for batch in packed(folders, epochs=3, local_batch_size=1) for row in rows(batch)]
    endless = [row for batch in islice(packed(folders, **options), len(in_epochs) + 5) for row in rows(batch)]
    assert endless[: len(in_epochs)] == in_epochs and len(endless) == len(in_epochs) + 5
    both = documents(folders["a"]) + documents(folders["b"])
    assert len(documents(folders["a"])) != len(documents(folders["b"]))
    one_pass = match_documents(in_epochs[: len(in_epochs) // 3], both)
    assert sorted(one_pass) == sorted(ids for ids, _ in both)
    with pytest.raises(JobError, match="weight: in epochs in the checkpoint, 1.0 now"):
        packed(folders, state=merge_states([packed(folders, **options).state_dict()]))


def test_the_first_batch_waits_for_a_short_read(folders, monkeypatch):
    """Reads grow with the run: of short samples the largest has ten thousands."""
    sizes, read = [], PackReader.read
    monkeypatch.setattr(PackReader, "read", lambda reader, numbers: sizes.append(len(numbers)) or read(reader, numbers))
    batches = iter(packed(folders, names="a", local_batch_size=2))
    next(batches)
    assert sizes == [2 * ShardPieces.PIECE_BATCHES]
    assert len(list(islice(batches, ShardPieces.PIECE_BATCHES))) == ShardPieces.PIECE_BATCHES
    assert sizes[1:] == [4 * ShardPieces.PIECE_BATCHES]


def test_held_out_split_takes_its_share_of_each_source(folders):
    assert held_out_counts([100, 50, 3], 0.1) == [10, 5, 0] and sum(held_out_counts([100, 50, 3], 20)) == 20
    ids_by_source = {name: [ids for ids, _ in documents(folders[name])] for name in "ab"}
    both = [document for name in "ab" for document in documents(folders[name])]
    sides = []
    for held_out in (True, False):
        batches = packed(folders, packing=PACKED._replace(split=0.2, held_out=held_out), epochs=1, local_batch_size=1)
        sides.append(match_documents([row for batch in batches for row in rows(batch)], both))
    assert sorted(sides[0] + sides[1]) == sorted(ids_by_source["a"] + ids_by_source["b"])
    for source_ids in ids_by_source.values():
        assert abs(sum(ids in source_ids for ids in sides[0]) - 0.2 * len(source_ids)) <= 1
    for split, message in ((1e-9, "0 of"), (10_000, "documents would be held out; allowed: at least one")):
        with pytest.raises(DataError, match=message):
            packed(folders, packing=PACKED._replace(split=split), epochs=1)


def test_documents_longer_than_a_sample_are_refused(folders):
    with pytest.raises(DataError, match=r"documents have more than 9 tokens, the longest \d+; raise training.seq_len"):
        packed(folders, seq_len=8, epochs=1)


def job(folders, *options):
    """Load the configuration of a job on both folders."""
    names = [f"[[training.sources]]\ndataset = 'tokens'\ndataset_path = '{folders[name]}'\n" for name in "ab"]
    path = folders["a"].parent / "job.toml"
    path.write_text("".join(names))
    small = "{dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=258, multiple_of=16}"
    base = ["--task.kind=sft", "--model.tokenizer_path=bytes", f"--training.seq_len={SEQ_LEN}"]
    base += [f"--job.dump_folder={folders['a'].parent}/out", f"--model.overrides={small}"]
    return manager.load(["--job.config_file", str(path), *base, *options])


def test_prepared_records_longer_than_the_limit_are_refused_before_the_run(folders):
    """They are not cut again, so the limit of the job would not hold for them."""
    longest = max(len(ids) for name in "ab" for ids, _ in documents(folders[name]))
    assert check(job(folders, f"--data.max_tokens={longest}"), 1, "cpu") == []
    faults = check(job(folders, f"--data.max_tokens={longest - 1}"), 1, "cpu")
    assert any(f"data.max_tokens: given {longest - 1}; allowed: at least {longest}, the" in str(f) for f in faults)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_number_of_steps_is_known_before_training(folders, ranks):
    config = job(folders, "--training.epochs=2", "--training.local_batch_size=2")
    resolved = jobs.with_end(config, ranks)
    loaders = [JobDatasets(ResolvedJob(resolved, ranks)).training_loader(TOKENIZER, rank) for rank in range(ranks)]
    assert {sum(1 for _ in one) for one in loaders} == {resolved.training.steps}


@pytest.mark.parametrize("budget", [1, 300, 5000])
def test_a_budget_counts_the_tokens_of_records_and_no_padding(folders, budget):
    """The job takes the fewest samples that hold `budget` tokens, in one pass or in several."""
    config = job(folders, f"--training.tokens={budget}", "--training.local_batch_size=1", "--data.packing=off")
    resolved = jobs.with_end(config)
    batches = list(JobDatasets(ResolvedJob(resolved)).training_loader(TOKENIZER, 0))
    assert len(batches) == resolved.training.steps
    all_documents = [document for name in "ab" for document in documents(folders[name])]
    tokens_per_batch = [sum(map(len, match_documents(rows(batch), all_documents))) for batch in batches]
    assert sum(tokens_per_batch[:-1]) < budget <= sum(tokens_per_batch)
    assert budget < 5000 or len(batches) > len(all_documents)


def test_packed_records_have_the_logits_of_separate_ones(folders):
    """Logits are of about 1, in float32; the mask only changes how sums over 47 keys are grouped, hence 1e-5."""
    model = ModelBuilder(ResolvedJob(job(folders))).meta_model().to_empty(device="cpu")
    initialize(model, 7, model.init_rule)
    num_compared = 0
    for batch in packed(folders, epochs=1):
        inputs = {name: batch[name] for name in ("positions", "document_ids")}
        with torch.no_grad():
            packed_logits = model(batch["tokens"], **inputs)
        for tokens, numbers, logits in zip(batch["tokens"], batch["document_ids"], packed_logits, strict=True):
            for number in numbers.unique():
                in_document = numbers == number
                with torch.no_grad():
                    separate_logits = model(tokens[in_document][None])[0]
                torch.testing.assert_close(logits[in_document], separate_logits, rtol=0, atol=1e-5)
                num_compared += in_document.sum() < len(in_document)
    assert num_compared > 100 and separate_logits.abs().max() > 0.5


def test_validation_loss_is_the_same_packed_or_not(folders):
    """Compare the loss sum and token count of the whole held-out split, in float64 to keep rounding below 1e-10."""
    measurements = []
    for mode in ("best_fit", "off"):
        options = ["--validation.enable", "--validation.split=0.3", "--validation.samples=0", f"--data.packing={mode}"]
        config = job(folders, *options, "--validation.local_batch_size=3")
        model = ModelBuilder(ResolvedJob(config)).meta_model().to_empty(device="cpu").double()
        initialize(model, 7, model.init_rule)
        batches = list(
            JobDatasets(ResolvedJob(config)).held_out(TOKENIZER, 0, ModelBuilder(ResolvedJob(config)).objective())
        )
        with torch.no_grad():
            total = sum(
                model(b["tokens"], labels=b["labels"], positions=b["positions"], document_ids=b["document_ids"])
                for b in batches
            )
        measurements.append((float(total), sum(int((b["labels"] != IGNORE).sum()) for b in batches), len(batches)))
    (packed_loss, packed_count, packed_batches), (loss, count, num_batches) = measurements
    assert packed_count == count and packed_batches < num_batches
    assert packed_loss == pytest.approx(loss, rel=1e-10)


UNEVEN = [
    (
        ["--data.pad_to=batch"],
        'data.pad_to: given "batch"; allowed: unset with data.packing = best_fit; set data.packing',
    ),
    (
        ["--data.group_by_length"],
        "data.group_by_length: given true; allowed: unset with data.packing = best_fit; set da",
    ),
    (
        ["--data.packing=off", "--data.group_by_length", "--parallelism.data_parallel_shard_degree=2"],
        "data.group_by_length: given true; allowed: true on several ranks only with training.global_batch_size, as sa",
    ),
    (
        [
            *("--data.packing=off", "--data.group_by_length", "--training.global_batch_size=8"),
            '--training.sources=[{dataset = "python_stdlib"}, {dataset = "python_stdlib_validation"}]',
        ],
        "data.group_by_length: given true; allowed: true only with training.epochs, as sources mixed by weight "
        "cannot be group",
    ),
    (["--data.shards=3/2"], 'data.shards: given "3/2"; allowed: at most 2/2; correct it'),
    (
        ["--data.packing=off", "--data.pad_to=batch", "--data.padding=left"],
        'data.pad_to: given "batch"; allowed: seq_len with data.padding = "left"; drop one of the two',
    ),
    (
        ["--data.packing=off", "--data.pad_to=multiple:4", "--compile.enable"],
        "allowed: seq_len with compile.enable, which requires batches of one shape; drop it",
    ),
    (
        ["--data.packing=off", "--data.pad_to=multiple:4", "--parallelism.pipeline_parallel_degree=2"],
        "allowed: seq_len with parallelism.pipeline_parallel_degree, which requires batches of one shape",
    ),
    (
        ["--data.packing=off", "--data.pad_to=multiple:3", "--parallelism.tensor_parallel_degree=2"],
        'allowed: seq_len, or multiple:N with N a multiple of tensor_parallel 2 (sequence parallel); write "mult',
    ),
]


@pytest.mark.parametrize("argv, message", UNEVEN, ids=range(len(UNEVEN)))
def test_uneven_batches_are_refused_where_shapes_must_be_equal(argv, message):
    assert any(message in line for line in lines("--task.kind=sft", *argv)), lines("--task.kind=sft", *argv)


def test_group_by_length_on_one_rank_uses_the_local_batch_size(folders):
    """The group is as large as the global batch would be, so a resume on several ranks continues the same order."""
    options = ["--task.kind=sft", "--data.packing=off", "--data.group_by_length", "--training.local_batch_size=4"]
    assert lines(*options) == []
    default, explicit = (
        ResolvedJob(manager.load([*options, *more])).data.packing("training", 0)
        for more in ([], ["--training.global_batch_size=4"])
    )
    assert default == explicit and default.step_samples == 4
    assert ResolvedJob(manager.load(options)).data.packing("validation", 0).step_samples == 0


def test_rules(folders):
    assert lines("--data.too_long=drop", "--validation.split=0.1", "--validation.samples=0") == [
        'data.too_long: given "drop"; allowed: \'error\' with task.kind = pretrain; set task.kind = "sft", or drop it',
        'validation.split: given 0.1; allowed: unset with task.kind = pretrain; set task.kind = "sft", or drop it',
        'validation.samples: given 0; allowed: at least 1 with task.kind = pretrain; set task.kind = "sft", or drop it',
    ]
    sft = ["--task.kind=sft", "--validation.split=1.5", "--validation.dataset=text", "--validation.seq_len=16"]
    assert lines(*sft, "--data.too_long=split", "--data.chat_template=chatml2") == [
        "validation.split: given 1.5; allowed: unset without validation.enable; turn it on, or drop the split",
        "validation.split: given 1.5; allowed: a share below 1, or a whole number of records; write 1",
        'validation.dataset: given "text"; allowed: unset with validation.split; drop one of the two',
        "validation.seq_len: given 16; allowed: training.seq_len with validation.split; drop it",
        'data.too_long: given "split"; allowed: not split with validation.split: both sides could get parts '
        "of a record; "
        "drop or truncate long records, or give separate validation data",
        "data.chat_template: given \"chatml2\"; allowed: the name or file of a chat template; 'chatml2' is no "
        "template; give chatml, "
        "llama3, llama2, alpaca, a file that ends in .jinja, or Jinja",
    ]
    options = ["--task.kind=sft", "--validation.enable", f"--validation.dataset_path={folders['a']}"]
    assert lines(*options, "--validation.dataset=tokens", f"--training.seq_len={SEQ_LEN}") == []
    (line,) = lines(*options, "--validation.dataset=tokens", "--training.seq_len=8")
    assert line.startswith("validation.dataset_path: given") and "documents have more than 9 tokens" in line
    weighted = "--validation.sources=[{dataset = 'python_stdlib', weight = 2.0}]"
    assert lines("--task.kind=sft", "--validation.enable", weighted) == [
        "validation.sources[0].weight: given 2.0; allowed: 1 with task.kind = sft, which validates on all records "
        "alike; leave it out"
    ]
