"""Documents that are read from beginning to end: each in a row of its own, segment by segment."""

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
    """Token n of document d is 100 d + n."""
    folder.mkdir()
    writer = ShardWriter(folder, 2000)
    for document, length in enumerate(lengths):
        writer.write(np.arange(length, dtype=np.uint32) + 100 * document, None)
    writer.finish(tokenizer="t", tokenizer_path="t", source={}, skipped=0)
    return TokenShards(folder)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return Documents([write(tmp_path_factory.mktemp("data") / "tokens")])


def loader(documents, rows=3, rank=0, ranks=1, **how):
    told = dict(seed=1, shuffle=True, stagger=False, fingerprint={"data": "these"}) | how
    return SegmentLoader(documents, seq_len=SEQ_LEN, rows=rows, rank=rank, ranks=ranks, **told)


def read(batches):
    """What each row read: (document, tokens, labels that count) of each of its documents."""
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
    met = []
    for tokens, labels in (
        each for row in read(itertools.islice(loader(documents, shuffle=shuffle), 40)).values() for each in row[:-1]
    ):
        document = tokens[0] // 100
        assert tokens == [100 * document + n for n in range(LENGTHS[document] - 1)]
        assert labels == [token + 1 for token in tokens]
        met.append(document)
    assert set(met) == {0, 2, 3, 4, 5, 6, 7}  # one token says nothing of the next
    assert max(map(met.count, met)) - min(map(met.count, met)) <= 2


@pytest.mark.parametrize("state_of", [0, 1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_four_rows_read_the_same_on_any_ranks(documents, ranks, state_of):
    """Step by step, from the beginning (0) and from a checkpoint of so many ranks."""
    told = dict(stagger=True)
    whole = loader(documents, rows=4, **told)
    if state_of:
        list(itertools.islice(whole, 5))
        saved = [loader(documents, rows=4 // state_of, rank=rank, ranks=state_of, **told) for rank in range(state_of)]
        for each in saved:
            list(itertools.islice(each, 5))
        told["state"] = json.loads(json.dumps(merge_states([each.state_dict() for each in saved])))
    spread = [loader(documents, rows=4 // ranks, rank=rank, ranks=ranks, **told) for rank in range(ranks)]
    for expected, *parts in itertools.islice(zip(whole, *spread, strict=True), 20):
        for name in expected.keys() - {"lanes"}:  # which each rank numbers for itself
            own = torch.arange(4 // ranks)
            order = torch.cat([global_sample_numbers(own, rank, ranks, 1) for rank in range(ranks)])
            assert torch.equal(torch.cat([part[name] for part in parts]), expected[name][order]), name
    assert {each.samples for each in spread} == {whole.samples}


def test_rows_begin_inside_their_first_document(documents):
    batch = next(iter(loader(documents, rows=6, stagger=True)))
    assert batch["begins"].all() and len(set(batch["offsets"].tolist())) > 2
    assert all(
        offset + SEQ_LEN < LENGTHS[tokens[0] // 100] or offset == 0
        for offset, tokens in zip(batch["offsets"].tolist(), batch["tokens"].tolist(), strict=True)
    )


@pytest.mark.parametrize("steps", [1, 5, 12])
def test_a_reading_goes_on_where_it_was_left(documents, steps):
    ranks = [loader(documents, rank=rank, ranks=2, stagger=True) for rank in (0, 1)]
    batches = [list(itertools.islice(each, steps + 6)) for each in ranks]
    again = [loader(documents, rank=rank, ranks=2, stagger=True) for rank in (0, 1)]
    for each in again:
        list(itertools.islice(each, steps))
    state = json.loads(json.dumps(merge_states([each.state_dict() for each in again])))
    assert state["samples"] == steps * 6
    for rank in (0, 1):
        resumed = loader(documents, rank=rank, ranks=2, state=state)
        for expected, batch in zip(batches[rank][steps:], resumed, strict=False):
            assert all(torch.equal(expected[name], batch[name]) for name in expected)


def test_other_rows_begin_new_documents_and_say_so(documents, caplog):
    first = loader(documents)
    list(itertools.islice(first, 6))
    resumed = loader(documents, rows=2, state=first.state_dict())
    assert "all rows begin with new documents" in caplog.text
    batch = next(iter(resumed))
    assert batch["begins"].all() and not batch["offsets"].any()
    assert resumed.taken > first.taken
    with pytest.raises(JobError, match="data: these in the checkpoint, others now"):
        loader(documents, fingerprint={"data": "others"}, state=first.state_dict())


def test_what_was_read_last_is_read_again(documents):
    first = loader(documents, rows=4, stagger=True)
    batches = list(itertools.islice(first, 5))
    resumed = loader(documents, rows=4, state=first.state_dict())
    again = list(resumed.again(2 * SEQ_LEN))
    assert len(again) == 2
    for row, reading in enumerate(resumed.rows):
        behind = 0 if reading is None else min(2, (reading.offset - reading.start) // SEQ_LEN)
        for ago in (2, 1):
            batch = again[2 - ago]
            assert batch["begins"][row].item() == (behind == ago)
            if behind >= ago:
                assert torch.equal(batch["tokens"][row], batches[-ago]["tokens"][row])
            else:
                assert batch["filled"][row] == 0
    assert all(torch.equal(a, b) for a, b in zip(next(iter(resumed)).values(), next(iter(first)).values(), strict=True))


@pytest.mark.parametrize("rows, ranks", [(1, 1), (3, 1), (2, 2), (1, 3), (9, 1)])
@pytest.mark.parametrize("samples", [0, 4, 5])
def test_held_out_documents_are_the_same_for_any_rows_and_ranks(documents, samples, rows, ranks):
    found, counts = [], set()
    for rank in range(ranks):
        held_out = HeldOutSegments(documents, samples, seq_len=SEQ_LEN, rows=rows, rank=rank, ranks=ranks)
        batches = list(held_out)
        counts.add(len(batches))
        found += [tokens[0] // 100 for row in read(batches).values() for tokens, _ in row]
    assert len(counts) == 1
    # of 8 tokens: 4 segments of the first document, none of the second, 1 of the third
    assert sorted(found) == {0: [0, 2, 3, 4, 5, 6, 7], 4: [0], 5: [0, 2]}[samples]


def test_documents_of_several_folders_are_one_list(tmp_path):
    joined = Documents([write(tmp_path / "a", [5, 3]), write(tmp_path / "b", [20])])
    assert [joined.length(document) for document in range(3)] == [5, 3, 20]
    assert len(read(HeldOutSegments(joined, 0, seq_len=SEQ_LEN, rows=1, rank=0, ranks=1))[0]) == 3


def test_without_a_document_to_learn_from(tmp_path):
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


def test_a_resumed_run_remembers_what_it_read(home):
    """Below the layers that read nothing learns, and entries are kept uncompressed, so what is read again is what was
    kept; with empty caches it is not.
    """
    exact = dict(adapter__neurocache__compression=1)
    (whole,) = run_ranks(1, losses, job(home, "whole", **exact))
    for name, warmup in (("replayed", "replay"), ("cold", "cold")):
        how = exact | dict(adapter__neurocache__resume_warmup=warmup)
        run_ranks(1, losses, job(home, name, training__steps=3, **how))
        (resumed,) = run_ranks(1, losses, job(home, name, **how))
        assert resumed[:3] == whole[:3] and (resumed == whole) == (warmup == "replay")


def trained(argv):
    rows, state = train(argv)
    return [row["loss"] for row in rows], state


SAVED = [
    (1, dict(adapter__neurocache__ordering="lru", adapter__neurocache__track_hits=True, training__steps=5)),
    (2, dict(training__local_batch_size=1, parallelism__data_parallel_shard_degree=2)),
    (2, dict(parallelism__pipeline_parallel_degree=2)),
]


@pytest.mark.parametrize("ranks, how", SAVED, ids=["lru", "FSDP 2", "PP 2"])
def test_saved_caches_make_a_resume_that_of_one_run(home, tmp_path, ranks, how):
    """Bit for bit, with entries that were compressed by the weights of their time."""
    how = dict(adapter__neurocache__resume_warmup="saved", training__steps=6) | how
    whole = run_ranks(ranks, trained, job(home, tmp_path / "whole", **how))
    run_ranks(ranks, trained, job(home, tmp_path / "stopped", **how | dict(training__steps=3)))
    assert run_ranks(ranks, trained, job(home, tmp_path / "stopped", **how)) == whole
    if ranks == 1:
        replayed = how | dict(adapter__neurocache__resume_warmup="replay")
        run_ranks(ranks, trained, job(home, tmp_path / "replayed", **replayed | dict(training__steps=3)))
        assert run_ranks(ranks, trained, job(home, tmp_path / "replayed", **replayed)) != whole


def test_saved_caches_of_another_plan_are_read_again(home, tmp_path):
    """So that the resume is that of one which replays."""
    found = {}
    for warmup in ("saved", "replay"):
        how = dict(adapter__neurocache__resume_warmup=warmup, training__steps=3)
        run_ranks(1, losses, job(home, tmp_path / warmup, **how))
        how |= dict(training__steps=6, training__local_batch_size=1, parallelism__data_parallel_shard_degree=2)
        found[warmup], _ = run_ranks(2, losses, job(home, tmp_path / warmup, **how))
    assert found["saved"] == found["replay"] and len(found["saved"]) == 6


def test_saved_caches_are_left_where_the_data_begin_anew(home, tmp_path):
    """Nothing is found of documents that the run does not go on with: it is a resume with empty caches."""
    found = {}
    for warmup in ("saved", "cold"):
        how = dict(adapter__neurocache__resume_warmup=warmup, adapter__neurocache__scope="global")
        run_ranks(1, losses, job(home, tmp_path / warmup, **how | dict(training__steps=3)))
        how |= dict(training__steps=6, checkpoint__exclude_from_loading='["dataloader"]')
        (found[warmup],) = run_ranks(1, losses, job(home, tmp_path / warmup, **how))
    assert found["saved"] == found["cold"] and len(found["saved"]) == 6


def validated(argv):
    """Losses with and without validations in between, of rows of another number."""
    trained = losses(argv)
    folder = Path(next(word for word in argv if "dump_folder" in word).partition("=")[2])
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return trained, [row["validation_loss"] for row in rows if "validation_loss" in row]


def test_validation_has_caches_of_its_own(home):
    """It changes nothing of the training, and what it finds does not depend on its rows."""
    (plain,) = run_ranks(1, losses, job(home, "plain"))
    found = {}
    held_out = dict(validation__enable=True, validation__freq=2, validation__samples=20, validation__dataset="text")
    held_out["validation__dataset_path"] = home / "data/texts.jsonl"
    for rows in (1, 3):
        name = f"validated{rows}"
        ((trained, found[rows]),) = run_ranks(
            1, validated, job(home, name, validation__local_batch_size=rows, **held_out)
        )
        assert trained == plain
    assert found[1] == pytest.approx(found[3], rel=1e-6) and len(found[1]) == 3


def test_validation_with_caches_of_several_sizes(home, tmp_path, capsys):
    """As `torchtitan evaluate` finds of the last checkpoint, and nothing of it is left behind."""
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
    told = ["--cache-sizes", "64,0,16", "--out", str(tmp_path / "found.json")]
    assert cli.main(["evaluate", str(tmp_path / "several"), *told]) == 0, capsys.readouterr().err
    expected = [run["loss"] for run in json.loads((tmp_path / "found.json").read_text())["runs"]]
    names = ("", "_cache_0", "_cache_16")
    assert [row[f"validation_loss{name}"] for name in names] == pytest.approx(expected, rel=1e-6)
    assert len({*expected}) == 3 and "validation_loss_cache_64" not in row


@pytest.mark.parametrize(
    "words, message",
    [
        (["--task.kind=pretrain"], '"documents" with adapter.kind = "neurocache"'),
        (["--training.document_mask"], "training.document_mask: given true; allowed: false with task.kind = documents"),
        (["--training.epochs=1"], "training.epochs: given 1; allowed: unset with task.kind = documents"),
        (
            ["--training.tokens=64"],
            "training.tokens: given 64; allowed: unset with task.kind = documents; set tr",
        ),
        (["--model.name=qwen3"], 'adapter.kind: given "neurocache"; allowed: another one for qwen3'),
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
def test_what_a_job_cannot_ask_for(words, message):
    usual = {"task.kind": "documents", "adapter.kind": "neurocache"}
    usual = {key: value for key, value in usual.items() if not any(word.startswith(f"--{key}=") for word in words)}
    told = lines(*(f"--{key}={value}" for key, value in usual.items()), *words)
    assert any(message in line for line in told), told


def test_a_job_with_a_cache_is_legal():
    assert lines("--task.kind=documents", "--adapter.kind=neurocache", "--adapter.neurocache.cache_size=4096") == []
