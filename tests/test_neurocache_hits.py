"""How much a cache is of use, as a run counts it: against what a few lines of plain Python count."""

import dataclasses
import json
import os
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scripts import compare_neurocache
from scripts.probe_neurocache import LETTERS, hit_rates, motifs
from tests.support.remembering import SMALL, plain, remembering
from torchtitan.adapters.neurocache.attention import CachedAttention
from torchtitan.adapters.neurocache.cache import UNKNOWN, followed, pairs
from torchtitan.adapters.neurocache.sizes import cache_bytes, cache_flops
from torchtitan.config import manager
from torchtitan.config.sections.adapter import Neurocache as Cache
from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.spec import MODELS
from torchtitan.rules import check


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def documents(count, lanes, length, vocab):
    """Tokens [count, lanes, length] of documents that go on, and what comes behind each."""
    ids = torch.randint(0, vocab, (lanes, count * length + 1))
    cut = [ids[:, first : first + count * length].unflatten(1, (count, length)).transpose(0, 1) for first in (0, 1)]
    return cut[0].contiguous(), cut[1].contiguous()


def test_what_followed_is_told_by_the_token_that_was_kept_with_it():
    kept = pairs(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, IGNORE_INDEX]]))
    assert kept.tolist() == [[[1, 2], [2, 3], [3, UNKNOWN]]] and kept.dtype == torch.int32
    found = torch.tensor([[[[1, 9], [5, 2]], [[2, 9], [2, 9]], [[3, UNKNOWN], [3, UNKNOWN]]]])
    there = torch.tensor([[[True, True], [True, False], [True, True]]])
    told = followed(kept, found, there)
    assert told.counted.tolist() == [[True, True, False]]  # nothing is to be told behind the last
    assert told.hit[0, :2].tolist() == [True, False]
    assert told.same.tolist() == [[[True, False], [True, False], [True, True]]]


def latest(tokens, labels, length, topk):
    """Of entries in segments before, by plain Python: for each token of a document the latest ones of the same token,
    then the latest of others; hits, how many are the same, and of how many.
    """
    hits = same = entries = asked = 0
    for place, token in enumerate(tokens):
        before = range(place // length * length - 1, -1, -1)
        found = sorted(before, key=lambda n: tokens[n] != token)[:topk]
        if found:
            asked += 1
            entries += len(found)
            same += sum(tokens[n] == token for n in found)
            hits += any(labels[n] == labels[place] for n in found)
    return hits, asked, same, entries


def one_hot(model, vocab):
    """Words that have nothing in common: of two tokens the states before the first layer are the same, or at right
    angles.
    """
    with torch.no_grad():
        model.tok_embeddings.weight.copy_(torch.eye(vocab))


@pytest.mark.parametrize("topk", [1, 3])
def test_hits_are_those_of_a_count_by_hand(topk):
    vocab, length, sizes = 64, 8, dict(dim=64, n_heads=4, n_kv_heads=2)
    model, installed = remembering(sizes=sizes, topk=topk, compression=1, cache_size=64, track_hits=True, layers=1)
    one_hot(model, vocab)
    model.loss = SummedCrossEntropy(1)
    model.train()
    tokens, labels = documents(6, 2, length, 6)
    for batch, told in zip(tokens, labels, strict=True):
        model(batch, labels=told).backward()
        installed.after_batch([model])
    counts = [
        latest(row.flatten().tolist(), told.flatten().tolist(), length, topk)
        for row, told in zip(tokens.transpose(0, 1), labels.transpose(0, 1), strict=True)
    ]
    hits, asked, same, entries = (sum(each) for each in zip(*counts, strict=True))
    found = installed.metrics([model])
    assert 0 < hits < asked and same > 0
    assert found["cache_hits"] == pytest.approx(hits / asked) and found["cache_same_token"] == same / entries
    assert found["cache_filled"] == pytest.approx(sum(range(6)) * length / (6 * 64))
    assert installed.metrics([model]) == {}  # since then nothing was read


def test_how_much_a_cache_adds_is_measured():
    model, installed = remembering(track_hits=True, layers=2)
    model.loss, seen = SummedCrossEntropy(1), {"cache": 0.0, "own": 0.0}
    model.train()

    def watch(attention):
        def saw(module, inputs, out):
            read = module.cache(*inputs[:1], inputs[1].retrieved)
            seen["cache"] += read.square().sum().item()
            seen["own"] += (out - read).square().sum().item()

        attention.register_forward_hook(saw)

    for block in model.layers.values():
        watch(block.attention)
    tokens, labels = documents(3, 2, 8, 64)
    for batch, told in zip(tokens, labels, strict=True):
        with torch.no_grad():
            model(batch, labels=told)
        installed.after_batch([model])
    assert installed.metrics([model])["cache_norm"] == pytest.approx((seen["cache"] / seen["own"]) ** 0.5, rel=1e-5)


def test_what_is_not_counted_costs_nothing():
    for counts in (True, False):
        model, installed = remembering(track_hits=counts)
        model.loss = SummedCrossEntropy(1)
        model.train()
        tokens, labels = documents(1, 2, 8, 64)
        model(tokens[0], labels=labels[0])
        installed.after_batch([model])
        (store,) = model.memory.stores.values()
        assert store.bytes == cache_bytes(Cache(**SMALL, track_hits=counts), 32, 2, 2, training=True)
        assert ((0, "pairs") in store.kept) == counts
        measured = [bool(m.squares) for m in model.modules() if isinstance(m, CachedAttention)]
        assert measured == [counts, counts] and bool(installed.metrics([model])) == counts


# --- the probe


def read_in_segments(texts, length):
    """Tokens [texts, letters], what comes behind each, and both in segments of documents that go on."""
    ids = torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts])
    rows = len(texts)
    labels = torch.cat((ids[:, 1:], torch.full((rows, 1), IGNORE_INDEX)), dim=1)
    batches = [
        {
            "tokens": ids[:, start : start + length],
            "labels": labels[:, start : start + length],
            "positions": torch.arange(length).expand(rows, -1),
            "begins": torch.full((rows,), start == 0),
            "filled": torch.full((rows,), length),
        }
        for start in range(0, ids.shape[1], length)
    ]
    return ids, labels, batches


def test_the_probe_finds_what_a_count_by_hand_does():
    """Before the first layer of a model whose words have nothing in common, on documents of motifs."""
    length, topk, texts = 96, 4, [motifs(seed, 768) for seed in range(2)]
    model = plain(dim=64, n_heads=4, n_kv_heads=2, n_layers=1).eval()
    one_hot(model, 64)
    ids, labels, batches = read_in_segments(texts, length)
    (row,) = hit_rates(model, MODELS["llama3"].plan, batches, topk, 1)
    counts = [latest(own.tolist(), told.tolist(), length, topk) for own, told in zip(ids, labels, strict=True)]
    hits, asked, same, entries = (sum(each) for each in zip(*counts, strict=True))
    # behind each document's last token nothing is to be told: it is not asked, and its entries are not counted
    assert row["hit"] == pytest.approx(hits / (asked - 2), abs=2 / asked)
    assert row["same"] == pytest.approx(same / entries, abs=2 * topk / entries)
    assert row["hit"] == pytest.approx(row["hit_hard"], abs=0.1)  # of a model that knows nothing most tokens are hard
    # a quarter of the numbers finds about as much, far more than entries taken by chance
    (squeezed,) = hit_rates(model, MODELS["llama3"].plan, batches, topk, 4)
    assert squeezed["hit"] == pytest.approx(row["hit"], abs=0.05)
    assert squeezed["hit"] > 3 * (1 - (1 - 1 / len(LETTERS)) ** topk)


def test_states_that_know_the_token_before_find_what_comes():
    """Of a model that says nothing for certain, whose first layer adds to each state the token before, as that of a
    trained one does: before the second layer half of all tokens find what comes, in a quarter of the numbers, too. The
    figures of a trained model are those of scripts/probe_neurocache.py.
    """
    model = plain(dim=128, n_heads=4, n_kv_heads=2, n_layers=2).eval()

    def add_the_token_before(block, inputs, out):
        before = out.roll((1, 64), (1, 2))
        before[:, 0] = 0
        return out + before

    with torch.no_grad():
        model.tok_embeddings.weight.copy_(torch.eye(64, 128))
        for block in model.layers.values():
            block.attention.wo.weight.zero_(), block.feed_forward.w2.weight.zero_()
    model.layers["0"].register_forward_hook(add_the_token_before)
    *_, batches = read_in_segments([motifs(seed) for seed in range(2)], 96)
    rates = {r: hit_rates(model, MODELS["llama3"].plan, batches, 8, r) for r in (1, 4)}
    for first, second in rates.values():
        assert second["hit_hard"] >= 0.5 and second["hit_hard"] > first["hit_hard"] + 0.03


def test_motifs_come_again_beyond_a_segment():
    text = motifs(0)
    pieces = [text[start : start + 8] for start in range(0, len(text), 8)]
    assert len(text) == 3072 and motifs(0) == text != motifs(1)
    assert 40 < len(set(pieces)) <= 64
    near = sum(piece in pieces[max(0, n - 4) : n] for n, piece in enumerate(pieces)) / len(pieces)
    assert 0.4 < near < 0.65


# --- how much work it is


@pytest.mark.parametrize("how", [{}, dict(compression=1), dict(context=1, window=4), dict(topk=1)])
def test_work_by_formula_is_what_torch_counts(how):
    """A model of one layer, whose frozen parts are multiplied once forward, and behind the cache once backward."""
    lanes, length, vocab = 2, 16, 64
    sizes = dict(dim=64, n_heads=4, n_kv_heads=2)
    model, installed = remembering(layers=1, sizes=sizes, **dict(cache_size=64) | how)
    args, options = model.args, installed.options.neurocache
    tokens = torch.randint(0, vocab, (5, lanes, length))
    for batch in tokens[:4]:
        with torch.no_grad():
            model(batch)
        installed.after_batch([model])
    without = plain(n_layers=1, **sizes)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        without(tokens[4])
    frozen = counter.get_total_flops() / (lanes * length)
    with FlopCounterMode(display=False) as counter:
        model(tokens[4]).sum().backward()
    counted = counter.get_total_flops() / (lanes * length)
    behind = 2 * (args.vocab_size * args.dim + 3 * args.dim * args.ffn_dim)  # gradients of states, which flow back
    no_gradient = 2 * args.dim * args.n_heads * args.head_dim  # of the state that the first query is made of
    told = cache_flops(options, 1, args.dim, args.n_heads, args.head_dim, length)
    assert counted - frozen - behind + no_gradient == pytest.approx(told, rel=0.02)
    zero = FlopsPerToken(1e9, 1e9)
    whole = installed.flops_per_token(zero, args.num_matmul_parameters, length)
    assert whole.full == whole.causal == 1e9 - 2 * args.num_matmul_parameters + told


def test_a_single_pass_and_two_layers_are_warned_of():
    _, installed = remembering(layers=4, retrieval_map={"2": 1})
    assert not any("one pass" in told for told in installed.warnings(2))
    told = list(installed.warnings(1))
    assert "a step makes one pass" in told[0] and "raise training.global_batch_size" in told[0]
    assert told[1] == "layer 2 looks up by its own states what layer 1 stored of others"
    assert list(dataclasses.replace(installed.options).neurocache.retrieval_map) == ["2"]


# --- what is compared


def test_the_comparison_asks_for_jobs_that_can_run(tmp_path):
    """All of them on the same data, for the same steps."""
    texts = tmp_path / "train"
    texts.mkdir()
    (texts / "a.txt").write_text("a text")
    begun = {"checkpoint.initial_load_path": tmp_path}
    for name, options in {"base": {}, **compare_neurocache.adapters(1, 20)}.items():
        words = compare_neurocache.words(tmp_path, name, 20, options | (begun if options else {}))
        config = manager.load(words)
        faults = {fault.key for fault in check(config, 1, "cpu")}  # of what has yet to be made
        assert faults <= {"checkpoint.initial_load_path", "validation.dataset_path"}, name
        assert (config.training.steps, config.training.global_batch_size, config.optimizer.lr) == (20, 8, 3e-3)
    run = {"loss": 2.0, "perplexity": 7.389, "by_position": {"0-128": {"loss": 2.5}, "2,048-": {"loss": 1.9}}}
    other = {"loss": 2.2, "perplexity": 9.025, "by_position": {"0-128": {"loss": 2.5}, "2,048-": {"loss": 1.8}}}
    repeats = [[each | {"cache_size": 0}, each | {"cache_size": 4096}] for each in (run, other)]
    found = {"base": [[run]], "cache": repeats}
    assert compare_neurocache.table(found).splitlines() == [
        "| | entries | 0-128 | 2,048- | all | perplexity |",
        "|---|---|---|---|---|---|",
        "| base |  | 2.500 | 1.900 | 2.000 | 7.39 |",
        "| cache | 0 | 2.500 ± 0.000 | 1.850 ± 0.050 | 2.100 ± 0.100 | 8.21 ± 0.82 |",
        "| cache | 4,096 | 2.500 ± 0.000 | 1.850 ± 0.050 | 2.100 ± 0.100 | 8.21 ± 0.82 |",
    ]
    compare_neurocache.draw(found, tmp_path / "places.png")
    assert (tmp_path / "places.png").stat().st_size > 1000


def test_documents_are_folders_of_packages():
    told = dict(compare_neurocache.documents(("peft",), 70_000))
    assert told and all(name.startswith("peft") and len(text) == 70_000 for name, text in told.items())


def test_documents_that_were_half_written_are_written_anew(tmp_path, monkeypatch):
    def stopped(packages, most):
        yield "first", "text"
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_neurocache, "documents", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare_neurocache.write_documents(tmp_path)
    whole = [(str(n), "text") for n in range(6)]
    monkeypatch.setattr(compare_neurocache, "documents", lambda packages, most: iter(whole))
    for _ in range(2):  # and then are left alone
        compare_neurocache.write_documents(tmp_path)
        assert {file.stem for file in (tmp_path / "train").iterdir()} >= {"0", "2", "4"}
        assert {file.stem for file in (tmp_path / "held_out").iterdir()} == {"0", "3"}


def test_the_base_reads_pieces_of_all_documents(tmp_path):
    texts = tmp_path / "train"
    texts.mkdir()
    (texts / "a.txt").write_text("a" * 4500)
    (texts / "b.txt").write_text("b")
    compare_neurocache.write_pieces(texts, tmp_path / "pieces.jsonl")
    told = [json.loads(line)["text"] for line in (tmp_path / "pieces.jsonl").read_text().splitlines()]
    assert told == ["a" * 2000, "a" * 2000, "a" * 500, "b"]


def test_seconds_of_all_starts_are_counted(tmp_path):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), compare_neurocache.timed(tmp_path, "base"):
            time.sleep(0.01)
            raise KeyboardInterrupt
    (stage,) = json.loads((tmp_path / "seconds.json").read_text()).items()
    assert stage[0] == "base" and stage[1] >= 0.02


def test_a_run_is_measured_again_only_with_a_newer_step(tmp_path, monkeypatch):
    measured = []

    def evaluate(*argv):
        measured.append(argv)
        argv[-1].write_text('{"runs": [{"loss": 2.0}]}')
        os.utime(argv[-1], (200, 200))

    def made(step, at):
        (tmp_path / "checkpoint" / f"step-{step:08d}").mkdir(parents=True)
        os.utime(tmp_path / "checkpoint" / f"step-{step:08d}", (at, at))

    monkeypatch.setattr(compare_neurocache, "torchtitan", evaluate)
    made(1, at=100)
    for _ in range(2):  # the folder of the checkpoints is of now, as a start leaves it
        assert compare_neurocache.evaluated(tmp_path, (0, 8), 4) == [{"loss": 2.0}]
    assert measured == [
        ("evaluate", tmp_path, "--samples", 4, "--cache-sizes", "0,8", "--out", tmp_path / "places.json")
    ]
    made(2, at=300)
    compare_neurocache.evaluated(tmp_path, (), 4)
    assert len(measured) == 2 and "--cache-sizes" not in measured[1]
