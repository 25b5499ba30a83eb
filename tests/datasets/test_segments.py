"""Task "documents": every row of the batch reads one document after another, segment by segment."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.jobs import arguments, train, write_texts
from tests.support.judged import lines
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.core.errors import JobError
from torchtitan.datasets.position import merge_states
from torchtitan.datasets.samples import IGNORE, global_sample_numbers
from torchtitan.datasets.segments import Documents, HeldOutSegments, SegmentLoader
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.token_shards import ShardWriter, TokenShards

LENGTHS = [30, 1, 9, 17, 8, 25, 2, 40]
SEQ_LEN = 8


def write(folder, lengths=LENGTHS):
    """Write token shards; token n of document d is 100 d + n."""
    folder.mkdir()
    writer = ShardWriter(folder, 2000)
    for document, length in enumerate(lengths):
        writer.write(np.arange(length, dtype=np.uint32) + 100 * document, None)
    writer.finish(tokenizer="t", tokenizer_path="t", source={}, skipped=0)
    return TokenShards(folder)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return Documents([write(tmp_path_factory.mktemp("data") / "tokens")])


def loader(documents, rows=3, rank=0, ranks=1, **options):
    arguments = dict(seed=1, shuffle=True, stagger=False, fingerprint={"data": "these"}) | options
    return SegmentLoader(documents, seq_len=SEQ_LEN, rows=rows, rank=rank, ranks=ranks, **arguments)


def read(batches):
    """Return for each row the (tokens, labels) of the documents that it read, without padding."""
    rows: dict[int, list] = {}
    for batch in batches:
        for row in range(len(batch["tokens"])):
            if batch["begins"][row]:
                rows.setdefault(row, []).append(([], []))
            filled = int(batch["filled"][row])
            if not filled:
                continue
            tokens, labels = rows[row][-1]
            assert int(batch["offsets"][row]) == int(batch["tokens"][row, 0]) % 100
            tokens += batch["tokens"][row, :filled].tolist()
            labels += batch["labels"][row, :filled].tolist()
            assert not batch["tokens"][row, filled:].any() and (batch["labels"][row, filled:] == IGNORE).all()
    return rows


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_reads_whole_documents_one_after_the_other(documents, shuffle):
    order = []
    for tokens, labels in (
        reading
        for row in read(itertools.islice(loader(documents, shuffle=shuffle), 40)).values()
        for reading in row[:-1]
    ):
        document = tokens[0] // 100
        assert tokens == [100 * document + n for n in range(LENGTHS[document] - 1)]
        assert labels == [token + 1 for token in tokens]
        order.append(document)
    assert set(order) == {0, 2, 3, 4, 5, 6, 7}  # document 1 has one token, so no label
    assert max(map(order.count, order)) - min(map(order.count, order)) <= 2


@pytest.mark.parametrize("state_of", [0, 1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_four_rows_read_the_same_on_any_number_of_ranks(documents, ranks, state_of):
    """Compare every step, from the beginning (`state_of` 0) and from a checkpoint of `state_of` ranks."""
    options = dict(stagger=True)
    reference = loader(documents, rows=4, **options)
    if state_of:
        list(itertools.islice(reference, 5))
        saved = [
            loader(documents, rows=4 // state_of, rank=rank, ranks=state_of, **options) for rank in range(state_of)
        ]
        for part_loader in saved:
            list(itertools.islice(part_loader, 5))
        options["state"] = json.loads(json.dumps(merge_states([part_loader.state_dict() for part_loader in saved])))
    rank_loaders = [loader(documents, rows=4 // ranks, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    for expected, *parts in itertools.islice(zip(reference, *rank_loaders, strict=True), 20):
        for name in expected.keys() - {"lanes"}:  # which each rank numbers for itself
            local_rows = torch.arange(4 // ranks)
            order = torch.cat([global_sample_numbers(local_rows, rank, ranks, 1) for rank in range(ranks)])
            assert torch.equal(torch.cat([part[name] for part in parts]), expected[name][order]), name
    assert {part_loader.samples for part_loader in rank_loaders} == {reference.samples}


def test_rows_begin_inside_their_first_document(documents):
    batch = next(iter(loader(documents, rows=6, stagger=True)))
    assert batch["begins"].all() and len(set(batch["offsets"].tolist())) > 2
    assert all(
        offset + SEQ_LEN < LENGTHS[tokens[0] // 100] or offset == 0
        for offset, tokens in zip(batch["offsets"].tolist(), batch["tokens"].tolist(), strict=True)
    )


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_a_resumed_loader_continues_where_it_stopped(documents, steps):
    ranks = [loader(documents, rank=rank, ranks=2, stagger=True) for rank in (0, 1)]
    batches = [list(itertools.islice(rank_loader, steps + 6)) for rank_loader in ranks]
    interrupted = [loader(documents, rank=rank, ranks=2, stagger=True) for rank in (0, 1)]
    for rank_loader in interrupted:
        list(itertools.islice(rank_loader, steps))
    state = json.loads(json.dumps(merge_states([rank_loader.state_dict() for rank_loader in interrupted])))
    assert state["samples"] == steps * 6
    for rank in (0, 1):
        resumed = loader(documents, rank=rank, ranks=2, state=state)
        for expected, batch in zip(batches[rank][steps:], resumed, strict=False):
            assert all(torch.equal(expected[name], batch[name]) for name in expected)


def test_a_changed_number_of_rows_begins_new_documents_and_logs_it(documents, caplog):
    first = loader(documents)
    list(itertools.islice(first, 6))
    resumed = loader(documents, rows=2, state=first.state_dict())
    assert "all rows begin with new documents" in caplog.text
    batch = next(iter(resumed))
    assert batch["begins"].all() and not batch["offsets"].any()
    assert resumed.documents_started > first.documents_started
    with pytest.raises(JobError, match="data: these in the checkpoint, others now"):
        loader(documents, fingerprint={"data": "others"}, state=first.state_dict())


def test_the_last_segments_are_replayed_after_a_resume(documents):
    first = loader(documents, rows=4, stagger=True)
    batches = list(itertools.islice(first, 5))
    resumed = loader(documents, rows=4, state=first.state_dict())
    replayed = list(resumed.replay(2 * SEQ_LEN))
    assert len(replayed) == 2
    for row, reading in enumerate(resumed.rows):
        num_segments = 0 if reading is None else min(2, (reading.offset - reading.start) // SEQ_LEN)
        for ago in (2, 1):
            batch = replayed[2 - ago]
            assert batch["begins"][row].item() == (num_segments == ago)
            if num_segments >= ago:
                assert torch.equal(batch["tokens"][row], batches[-ago]["tokens"][row])
            else:
                assert batch["filled"][row] == 0
    assert all(torch.equal(a, b) for a, b in zip(next(iter(resumed)).values(), next(iter(first)).values(), strict=True))


@pytest.mark.parametrize("rows, ranks", [(1, 1), (3, 1), (2, 2), (1, 3), (9, 1)])
@pytest.mark.parametrize("samples", [0, 4, 5])
def test_held_out_documents_are_the_same_for_any_rows_and_ranks(documents, samples, rows, ranks):
    numbers, counts = [], set()
    for rank in range(ranks):
        held_out = HeldOutSegments(documents, samples, seq_len=SEQ_LEN, rows=rows, rank=rank, ranks=ranks)
        batches = list(held_out)
        counts.add(len(batches))
        numbers += [tokens[0] // 100 for row in read(batches).values() for tokens, _ in row]
    assert len(counts) == 1
    # segments of 8 tokens: 4 of the first document, none of the second, 1 of the third
    assert sorted(numbers) == {0: [0, 2, 3, 4, 5, 6, 7], 4: [0], 5: [0, 2]}[samples]


def test_documents_of_several_folders_are_one_list(tmp_path):
    joined = Documents([write(tmp_path / "a", [5, 3]), write(tmp_path / "b", [20])])
    assert [joined.length(document) for document in range(3)] == [5, 3, 20]
    assert len(read(HeldOutSegments(joined, 0, seq_len=SEQ_LEN, rows=1, rank=0, ranks=1))[0]) == 3


def test_documents_of_one_token_only_are_refused(tmp_path):
    with pytest.raises(DataError, match="no document has two tokens"):
        loader(Documents([write(tmp_path / "short", [1, 1])]))


# --- jobs


CACHE = dict(
    task__kind="documents",
    adapter__kind="neurocache",
    adapter__neurocache__cache_size=64,
    adapter__neurocache__topk=4,
    adapter__neurocache__cache_dtype="float32",
    training__local_batch_size=2,
    training__global_batch_size=4,
    training__seq_len=16,
    training__steps=6,
    checkpoint__enable=True,
    checkpoint__interval=3,
    lr_scheduler__total_steps=6,
)


def job(home, name, **options):
    return arguments(home / name, home / "data/texts.jsonl", **CACHE | options)


def losses(argv):
    return [row["loss"] for row in train(argv)[0]]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    write_texts(folder / "data")
    return folder


def test_a_resume_with_replay_equals_an_uninterrupted_run(home):
    """A replay rebuilds the same entries here, and empty caches give other losses.

    No layer below those with a cache is trained, and entries are stored uncompressed.
    """
    exact = dict(adapter__neurocache__compression=1)
    (uninterrupted,) = run_ranks(1, losses, job(home, "whole", **exact))
    for name, warmup in (("replayed", "replay"), ("cold", "cold")):
        options = exact | dict(adapter__neurocache__resume_warmup=warmup)
        run_ranks(1, losses, job(home, name, training__steps=3, **options))
        (resumed,) = run_ranks(1, losses, job(home, name, **options))
        assert resumed[:3] == uninterrupted[:3] and (resumed == uninterrupted) == (warmup == "replay")


def losses_and_state(argv):
    rows, state = train(argv)
    return [row["loss"] for row in rows], state


SAVED = [
    (1, dict(adapter__neurocache__ordering="lru", adapter__neurocache__track_hits=True, training__steps=5)),
    (2, dict(training__local_batch_size=1, parallelism__data_parallel_shard_degree=2)),
    (2, dict(parallelism__pipeline_parallel_degree=2)),
]


@pytest.mark.parametrize("ranks, options", SAVED, ids=["lru", "FSDP 2", "PP 2"])
def test_a_resume_with_saved_caches_equals_an_uninterrupted_run(home, tmp_path, ranks, options):
    """Bit for bit, though earlier weights compressed the entries; a replay would compress them with new weights."""
    options = dict(adapter__neurocache__resume_warmup="saved", training__steps=6) | options
    uninterrupted = run_ranks(ranks, losses_and_state, job(home, tmp_path / "whole", **options))
    run_ranks(ranks, losses_and_state, job(home, tmp_path / "stopped", **options | dict(training__steps=3)))
    assert run_ranks(ranks, losses_and_state, job(home, tmp_path / "stopped", **options)) == uninterrupted
    if ranks == 1:
        replayed = options | dict(adapter__neurocache__resume_warmup="replay")
        run_ranks(ranks, losses_and_state, job(home, tmp_path / "replayed", **replayed | dict(training__steps=3)))
        assert run_ranks(ranks, losses_and_state, job(home, tmp_path / "replayed", **replayed)) != uninterrupted


def test_saved_caches_of_another_plan_are_rebuilt_by_replay(home, tmp_path):
    """The resume equals one with `resume_warmup = replay`."""
    losses_by_warmup = {}
    for warmup in ("saved", "replay"):
        options = dict(adapter__neurocache__resume_warmup=warmup, training__steps=3)
        run_ranks(1, losses, job(home, tmp_path / warmup, **options))
        options |= dict(training__steps=6, training__local_batch_size=1, parallelism__data_parallel_shard_degree=2)
        losses_by_warmup[warmup], _ = run_ranks(2, losses, job(home, tmp_path / warmup, **options))
    assert losses_by_warmup["saved"] == losses_by_warmup["replay"] and len(losses_by_warmup["saved"]) == 6


def test_saved_caches_are_dropped_where_the_data_start_over(home, tmp_path):
    """The run begins other documents, so the resume equals one with empty caches."""
    losses_by_warmup = {}
    for warmup in ("saved", "cold"):
        options = dict(adapter__neurocache__resume_warmup=warmup, adapter__neurocache__scope="global")
        run_ranks(1, losses, job(home, tmp_path / warmup, **options | dict(training__steps=3)))
        options |= dict(training__steps=6, checkpoint__exclude_from_loading='["dataloader"]')
        (losses_by_warmup[warmup],) = run_ranks(1, losses, job(home, tmp_path / warmup, **options))
    assert losses_by_warmup["saved"] == losses_by_warmup["cold"] and len(losses_by_warmup["saved"]) == 6


def training_and_validation_losses(argv):
    """Train, and return the training and the validation losses."""
    trained = losses(argv)
    folder = Path(next(argument for argument in argv if "dump_folder" in argument).partition("=")[2])
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return trained, [row["validation_loss"] for row in rows if "validation_loss" in row]


def test_validation_uses_separate_caches(home):
    """Validation leaves training losses unchanged, and its own do not depend on its batch size."""
    (plain,) = run_ranks(1, losses, job(home, "plain"))
    validation_losses = {}
    held_out = dict(validation__enable=True, validation__freq=2, validation__samples=20, validation__dataset="text")
    held_out["validation__dataset_path"] = home / "data/texts.jsonl"
    for rows in (1, 3):
        name = f"validated{rows}"
        ((trained, validation_losses[rows]),) = run_ranks(
            1, training_and_validation_losses, job(home, name, validation__local_batch_size=rows, **held_out)
        )
        assert trained == plain
    assert validation_losses[1] == pytest.approx(validation_losses[3], rel=1e-6) and len(validation_losses[1]) == 3


def test_validation_with_caches_of_several_sizes(home, tmp_path, capsys):
    """The losses equal what `torchtitan evaluate` prints for the last checkpoint; training is unchanged."""
    (plain,) = run_ranks(1, losses, job(home, tmp_path / "plain"))
    data = dict(validation__dataset="text", validation__dataset_path=home / "data/texts.jsonl")
    several = dict(
        validation__enable=True,
        validation__freq=3,
        validation__samples=0,
        adapter__neurocache__eval_cache_sizes="[0,16,64]",
    )
    (trained,) = run_ranks(1, losses, job(home, tmp_path / "several", **several | data))
    assert trained == plain
    rows = map(json.loads, (tmp_path / "several" / "metrics.jsonl").read_text().splitlines())
    row = [row for row in rows if "validation_loss" in row][-1]
    arguments = ["--cache-sizes", "64,0,16", "--out", str(tmp_path / "found.json")]
    assert cli.main(["evaluate", str(tmp_path / "several"), *arguments]) == 0, capsys.readouterr().err
    expected = [run["loss"] for run in json.loads((tmp_path / "found.json").read_text())["runs"]]
    names = ("", "_cache_0", "_cache_16")
    assert [row[f"validation_loss{name}"] for name in names] == pytest.approx(expected, rel=1e-6)
    assert len({*expected}) == 3 and "validation_loss_cache_64" not in row


@pytest.mark.parametrize(
    "options, message",
    [
        (["--task.kind=pretrain"], '"documents" with adapter.kind = "neurocache"'),
        (["--training.document_mask"], "training.document_mask: given true; allowed: false with task.kind = documents"),
        (["--training.epochs=1"], "training.epochs: given 1; allowed: unset with task.kind = documents"),
        (
            ["--training.tokens=64"],
            "training.tokens: given 64; allowed: unset with task.kind = documents; set tr",
        ),
        *(
            ([f"--model.name={name}"], f'adapter.kind: given "neurocache"; allowed: another one for {name}')
            for name in ("qwen2", "qwen3")
        ),
        (["--adapter.neurocache.cache_size=8"], "adapter.neurocache.cache_size: given 8; allowed: at least 2048"),
        (["--adapter.neurocache.eval_cache_sizes=[0,8]"], "eval_cache_sizes: given [0, 8]; allowed: at least 2048"),
        (["--adapter.neurocache.eval_cache_sizes=[-1]"], "allowed: sizes from 0 on; drop -1"),
        (
            ["--adapter.neurocache.track_hits", "--parallelism.pipeline_parallel_degree=2"],
            "track_hits: given true; allowed: false with a pipeline",
        ),
        (["--adapter.neurocache.window=3"], "adapter.neurocache.window: given 3; allowed: 1, or an even number"),
        (["--adapter.rank=4"], 'adapter.rank: given 4; allowed: nothing with adapter.neurocache.beside = "none"'),
        (
            ["--adapter.neurocache.beside=galore"],
            'adapter.neurocache.beside: given "galore"; allowed: one of none, lora',
        ),
        (
            ["--adapter.kind=lora", "--adapter.rank=8", "--adapter.neurocache.topk=4"],
            'nothing with adapter.kind = "lora"',
        ),
        (["--checkpoint.enable", "--checkpoint.last_save_in_hf"], "last_save_in_hf: given true; allowed: false with"),
        (
            [
                "--parallelism.pipeline_parallel_degree=2",
                "--adapter.neurocache.attention_layers=[2, 4]",
                '--adapter.neurocache.retrieval_map={"2" = 2}',
            ],
            "layers 2 to 4, which store, look up and read, have to be in one stage",
        ),
        (
            [
                "--parallelism.pipeline_parallel_degree=2",
                '--adapter.neurocache.retrieval_map={"2" = 2, "5" = 5}',
            ],
            "layers 2 to 5, which store, look up and read, have to be in one stage",
        ),
        (["--adapter.neurocache.cache_shard=tp"], '"none" without tensor parallel; leave it out, or set parallelism'),
        (
            [
                "--parallelism.tensor_parallel_degree=2",
                "--adapter.neurocache.cache_shard=tp",
                "--adapter.neurocache.cache_size=4097",
            ],
            'cache_size: given 4097; allowed: a multiple of 2 ranks with cache_shard = "tp"; write 4096 or 4098',
        ),
        (
            [
                "--parallelism.tensor_parallel_degree=2",
                "--adapter.neurocache.cache_shard=tp",
                "--adapter.neurocache.eval_cache_sizes=[4097]",
            ],
            'eval_cache_sizes: given [4097]; allowed: multiples of 2 ranks with cache_shard = "tp"',
        ),
        (
            [
                "--parallelism.tensor_parallel_degree=2",
                "--adapter.neurocache.cache_shard=tp",
                "--adapter.neurocache.resume_warmup=saved",
            ],
            'resume_warmup: given "saved"; allowed: not "saved" with cache_shard = "tp"',
        ),
        (
            ["--parallelism.pipeline_parallel_degree=2", "--adapter.neurocache.scope=global"],
            '"lane" with a pipeline',
        ),
    ],
)
def test_faults_of_jobs_of_documents(options, message):
    usual = {"task.kind": "documents", "adapter.kind": "neurocache"}
    usual = {
        key: value for key, value in usual.items() if not any(argument.startswith(f"--{key}=") for argument in options)
    }
    faults = lines(*(f"--{key}={value}" for key, value in usual.items()), *options)
    assert any(message in line for line in faults), faults


def test_a_job_with_a_cache_is_legal():
    assert lines("--task.kind=documents", "--adapter.kind=neurocache", "--adapter.neurocache.cache_size=4096") == []
