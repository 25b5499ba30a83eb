"""Neurocache's hit metrics, the probe, FLOPs by formula and the comparison script, each against plain counting."""

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
from torchtitan.config import manager
from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.spec import MODELS
from torchtitan.plugins.neurocache.attention import CachedAttention
from torchtitan.plugins.neurocache.cache import UNKNOWN, compare_pairs, pairs
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Cache
from torchtitan.plugins.neurocache.sizes import cache_bytes, cache_flops
from torchtitan.rules import check


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def documents(count, lanes, length, vocab):
    """Return tokens and next-token labels, both [count, lanes, length], of documents that span all segments."""
    ids = torch.randint(0, vocab, (lanes, count * length + 1))
    cut = [ids[:, first : first + count * length].unflatten(1, (count, length)).transpose(0, 1) for first in (0, 1)]
    return cut[0].contiguous(), cut[1].contiguous()


def test_followed_compares_the_stored_next_tokens_with_the_label():
    stored = pairs(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, IGNORE_INDEX]]))
    assert stored.tolist() == [[[1, 2], [2, 3], [3, UNKNOWN]]] and stored.dtype == torch.int32
    retrieved = torch.tensor([[[[1, 9], [5, 2]], [[2, 9], [2, 9]], [[3, UNKNOWN], [3, UNKNOWN]]]])
    is_entry = torch.tensor([[[True, True], [True, False], [True, True]]])
    outcome = compare_pairs(stored, retrieved, is_entry)
    assert outcome.is_counted.tolist() == [[True, True, False]]  # the last token has no label
    assert outcome.hit[0, :2].tolist() == [True, False]
    assert outcome.same.tolist() == [[[True, False], [True, False], [True, True]]]


def count_hits(tokens, labels, length, topk):
    """Count hits in plain Python: (hits, lookups, entries of the same token, entries).

    Each token retrieves `topk` entries of earlier segments: the latest ones of the same token, then the latest others.
    """
    hits = same = entries = lookups = 0
    for position, token in enumerate(tokens):
        before = range(position // length * length - 1, -1, -1)
        candidates = sorted(before, key=lambda n: tokens[n] != token)[:topk]
        if candidates:
            lookups += 1
            entries += len(candidates)
            same += sum(tokens[n] == token for n in candidates)
            hits += any(labels[n] == labels[position] for n in candidates)
    return hits, lookups, same, entries


def one_hot(model, vocab):
    """Make embeddings one-hot: the states of two tokens before the first layer are equal or orthogonal."""
    with torch.no_grad():
        model.tok_embeddings.weight.copy_(torch.eye(vocab))


@pytest.mark.parametrize("topk", [1, 3])
def test_hits_equal_a_count_in_plain_python(topk):
    vocab, length, sizes = 64, 8, dict(dim=64, n_heads=4, n_kv_heads=2)
    model, installed = remembering(sizes=sizes, topk=topk, compression=1, cache_size=64, track_hits=True, layers=1)
    one_hot(model, vocab)
    model.loss = SummedCrossEntropy(1)
    model.train()
    tokens, labels = documents(6, 2, length, 6)
    for batch, batch_labels in zip(tokens, labels, strict=True):
        model(batch, labels=batch_labels).backward()
        installed.after_batch([model])
    counts = [
        count_hits(row.flatten().tolist(), batch_labels.flatten().tolist(), length, topk)
        for row, batch_labels in zip(tokens.transpose(0, 1), labels.transpose(0, 1), strict=True)
    ]
    hits, lookups, same, entries = (sum(column) for column in zip(*counts, strict=True))
    metrics = installed.metrics([model])
    assert 0 < hits < lookups and same > 0
    assert metrics["cache_hits"] == pytest.approx(hits / lookups) and metrics["cache_same_token"] == same / entries
    assert metrics["cache_filled"] == pytest.approx(sum(range(6)) * length / (6 * 64))
    assert installed.metrics([model]) == {}  # metrics reset the counts


def test_cache_norm_is_the_ratio_of_cache_and_attention_outputs():
    model, installed = remembering(track_hits=True, layers=2)
    model.loss, squares = SummedCrossEntropy(1), {"cache": 0.0, "own": 0.0}
    model.train()

    def watch(attention):
        def add_squares(module, inputs, out):
            read = module.cache(*inputs[:1], inputs[1].retrieved)
            squares["cache"] += read.square().sum().item()
            squares["own"] += (out - read).square().sum().item()

        attention.register_forward_hook(add_squares)

    for block in model.layers.values():
        watch(block.attention)
    tokens, labels = documents(3, 2, 8, 64)
    for batch, batch_labels in zip(tokens, labels, strict=True):
        with torch.no_grad():
            model(batch, labels=batch_labels)
        installed.after_batch([model])
    assert installed.metrics([model])["cache_norm"] == pytest.approx(
        (squares["cache"] / squares["own"]) ** 0.5, rel=1e-5
    )


def test_without_track_hits_nothing_is_counted():
    for counts in (True, False):
        model, installed = remembering(track_hits=counts)
        model.loss = SummedCrossEntropy(1)
        model.train()
        tokens, labels = documents(1, 2, 8, 64)
        model(tokens[0], labels=labels[0])
        installed.after_batch([model])
        (store,) = model.memory.stores.values()
        assert store.bytes == cache_bytes(Cache(**SMALL, track_hits=counts), 32, 2, 2, training=True)
        assert ((0, "pairs") in store.entries) == counts
        measured = [bool(m.squares) for m in model.modules() if isinstance(m, CachedAttention)]
        assert measured == [counts, counts] and bool(installed.metrics([model])) == counts


# --- the probe


def read_in_segments(texts, length):
    """Return tokens and labels [texts, letters], and the same cut into batches of one segment each."""
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


def test_the_probe_equals_a_count_in_plain_python():
    """Probe the states before the first layer of a model with one-hot embeddings, on documents of motifs."""
    length, topk, texts = 96, 4, [motifs(seed, 768) for seed in range(2)]
    model = plain(dim=64, n_heads=4, n_kv_heads=2, n_layers=1).eval()
    one_hot(model, 64)
    ids, labels, batches = read_in_segments(texts, length)
    (row,) = hit_rates(model, MODELS["llama3"].plan, batches, topk, 1)
    counts = [
        count_hits(text_ids.tolist(), text_labels.tolist(), length, topk)
        for text_ids, text_labels in zip(ids, labels, strict=True)
    ]
    hits, lookups, same, entries = (sum(column) for column in zip(*counts, strict=True))
    # the last token of a document has no label: the probe skips its lookup, and so its entries
    assert row["hit"] == pytest.approx(hits / (lookups - 2), abs=2 / lookups)
    assert row["same"] == pytest.approx(same / entries, abs=2 * topk / entries)
    assert row["hit"] == pytest.approx(row["hit_hard"], abs=0.1)  # most tokens are hard for an untrained model
    # states compressed to a quarter find about as much, far more than entries drawn at random
    (squeezed,) = hit_rates(model, MODELS["llama3"].plan, batches, topk, 4)
    assert squeezed["hit"] == pytest.approx(row["hit"], abs=0.05)
    assert squeezed["hit"] > 3 * (1 - (1 - 1 / len(LETTERS)) ** topk)


def test_states_that_know_the_previous_token_predict_the_next():
    """Lookups before the second layer predict half of all tokens, also with states compressed to a quarter.

    The model's logits are uniform, and its first layer adds the previous token to each state, as an induction head of a
    trained model does. scripts/probe_neurocache.py gives the figures of a trained model.
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


def test_motifs_repeat_farther_apart_than_a_segment():
    text = motifs(0)
    pieces = [text[start : start + 8] for start in range(0, len(text), 8)]
    assert len(text) == 3072 and motifs(0) == text != motifs(1)
    assert 40 < len(set(pieces)) <= 64
    near = sum(piece in pieces[max(0, n - 4) : n] for n, piece in enumerate(pieces)) / len(pieces)
    assert 0.4 < near < 0.65


# --- FLOPs


@pytest.mark.parametrize("overrides", [{}, dict(compression=1), dict(context=1, window=4), dict(topk=1)])
def test_flops_by_formula_are_those_that_torch_counts(overrides):
    """Count a one-layer model: frozen matrices are multiplied once forward, and once backward after the cache."""
    lanes, length, vocab = 2, 16, 64
    sizes = dict(dim=64, n_heads=4, n_kv_heads=2)
    model, installed = remembering(layers=1, sizes=sizes, **dict(cache_size=64) | overrides)
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
    flops = counter.get_total_flops() / (lanes * length)
    backward = 2 * (args.vocab_size * args.dim + 3 * args.dim * args.ffn_dim)  # gradients with respect to activations
    no_gradient = 2 * args.dim * args.n_heads * args.head_dim  # the input of the first query needs no gradient
    expected = cache_flops(options, 1, args.dim, args.n_heads, args.head_dim, length)
    assert flops - frozen - backward + no_gradient == pytest.approx(expected, rel=0.02)
    zero = FlopsPerToken(1e9, 1e9)
    total = installed.flops_per_token(zero, args.num_matmul_parameters, length)
    assert total.full == total.causal == 1e9 - 2 * args.num_matmul_parameters + expected


def test_warnings_of_a_single_pass_and_of_reading_another_layer():
    _, installed = remembering(layers=4, retrieval_map={"2": 1})
    assert not any("one pass" in warnings for warnings in installed.warnings(2))
    warnings = list(installed.warnings(1))
    assert "a step makes one pass" in warnings[0] and "raise training.global_batch_size" in warnings[0]
    assert warnings[1] == "layer 2 looks up by its own states what layer 1 stored of others"
    assert list(dataclasses.replace(installed.options).neurocache.retrieval_map) == ["2"]


# --- scripts/compare_neurocache.py


def test_the_jobs_of_the_comparison_are_valid(tmp_path):
    """All jobs use the same data and number of steps."""
    texts = tmp_path / "train"
    texts.mkdir()
    (texts / "a.txt").write_text("a text")
    from_base = {"checkpoint.initial_load_path": tmp_path}
    for name, options in {"base": {}, **compare_neurocache.adapters(1, 20)}.items():
        options_of_run = compare_neurocache.job_arguments(tmp_path, name, 20, options | (from_base if options else {}))
        config = manager.load(options_of_run)
        faults = {fault.key for fault in check(config, 1, "cpu")}  # only files that earlier jobs will write
        assert faults <= {"checkpoint.initial_load_path", "validation.dataset_path"}, name
        assert (config.training.steps, config.training.global_batch_size, config.optimizer.lr) == (20, 8, 3e-3)
    run = {"loss": 2.0, "perplexity": 7.389, "by_position": {"0-128": {"loss": 2.5}, "2,048-": {"loss": 1.9}}}
    other = {"loss": 2.2, "perplexity": 9.025, "by_position": {"0-128": {"loss": 2.5}, "2,048-": {"loss": 1.8}}}
    repeats = [[row | {"cache_size": 0}, row | {"cache_size": 4096}] for row in (run, other)]
    results = {"base": [[run]], "cache": repeats}
    assert compare_neurocache.table(results).splitlines() == [
        "| | entries | 0-128 | 2,048- | all | perplexity |",
        "|---|---|---|---|---|---|",
        "| base |  | 2.500 | 1.900 | 2.000 | 7.39 |",
        "| cache | 0 | 2.500 ± 0.000 | 1.850 ± 0.050 | 2.100 ± 0.100 | 8.21 ± 0.82 |",
        "| cache | 4,096 | 2.500 ± 0.000 | 1.850 ± 0.050 | 2.100 ± 0.100 | 8.21 ± 0.82 |",
    ]
    compare_neurocache.draw(results, tmp_path / "places.png")
    assert (tmp_path / "places.png").stat().st_size > 1000


def test_documents_are_folders_of_packages():
    documents = dict(compare_neurocache.documents(("peft",), 70_000))
    assert documents and all(name.startswith("peft") and len(text) == 70_000 for name, text in documents.items())


def test_half_written_documents_are_written_again(tmp_path, monkeypatch):
    def interrupted(packages, most):
        yield "first", "text"
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_neurocache, "documents", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare_neurocache.write_documents(tmp_path)
    documents = [(str(n), "text") for n in range(6)]
    monkeypatch.setattr(compare_neurocache, "documents", lambda packages, most: iter(documents))
    for _ in range(2):  # the second call leaves complete folders alone
        compare_neurocache.write_documents(tmp_path)
        assert {file.stem for file in (tmp_path / "train").iterdir()} >= {"0", "2", "4"}
        assert {file.stem for file in (tmp_path / "held_out").iterdir()} == {"0", "3"}


def test_the_base_reads_pieces_of_all_documents(tmp_path):
    texts = tmp_path / "train"
    texts.mkdir()
    (texts / "a.txt").write_text("a" * 4500)
    (texts / "b.txt").write_text("b")
    compare_neurocache.write_pieces(texts, tmp_path / "pieces.jsonl")
    pieces = [json.loads(line)["text"] for line in (tmp_path / "pieces.jsonl").read_text().splitlines()]
    assert pieces == ["a" * 2000, "a" * 2000, "a" * 500, "b"]


def test_seconds_of_interrupted_starts_are_added_up(tmp_path):
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

    def make_checkpoint(step, at):
        (tmp_path / "checkpoint" / f"step-{step:08d}").mkdir(parents=True)
        os.utime(tmp_path / "checkpoint" / f"step-{step:08d}", (at, at))

    monkeypatch.setattr(compare_neurocache, "torchtitan", evaluate)
    make_checkpoint(1, at=100)
    for _ in range(2):  # the folder's own mtime is later, as after a restart
        assert compare_neurocache.evaluate(tmp_path, (0, 8), 4) == [{"loss": 2.0}]
    assert measured == [
        ("evaluate", tmp_path, "--samples", 4, "--cache-sizes", "0,8", "--out", tmp_path / "places.json")
    ]
    make_checkpoint(2, at=300)
    compare_neurocache.evaluate(tmp_path, (), 4)
    assert len(measured) == 2 and "--cache-sizes" not in measured[1]
