"""A cache of past states beside a decoder: what is found, kept and read, each against a few lines of plain Python."""

import itertools

import pytest
import torch

from tests.support.remembering import plain, read, remembering, segments
from torchtitan.adapters.neurocache.attention import Reading, Retrieved, of_earlier_token
from torchtitan.adapters.neurocache.cache import Found, Segment, Store, beside, nearest, places_of
from torchtitan.adapters.neurocache.generation import reader_of
from torchtitan.adapters.neurocache.sizes import added_parameters, cache_bytes
from torchtitan.config.sections.adapter import Neurocache as Cache
from torchtitan.core.errors import JobError
from torchtitan.core.initialization import clean_name
from torchtitan.parallelisms.parallelize import apply_activation_checkpoint


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- what is found


def by_hand(query, keys, count, topk, similarity, bucketed=False):
    """Ages of the best entries, the later one of equals; `keys` [M, C] lie at number mod M."""
    size = len(keys)
    scored = []
    for number in range(max(0, count - size), count):
        key = keys[number % size].double()
        dot = (query.double() @ key).item()
        score = dot if similarity == "dot" else 2 * dot - (key @ key).item()
        scored.append((-score, count - 1 - number, number % size))
    scored.sort()
    if bucketed:
        seen, best = set(), []
        for entry in scored:
            if entry[2] % 512 not in seen:
                seen.add(entry[2] % 512)
                best.append(entry)
        scored = best
    return [age for _, age, _ in scored[:topk]]


@pytest.mark.parametrize("similarity", ["l2", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_the_nearest_are_those_of_every_score_written_out(dtype, similarity, block_bytes):
    """Small whole numbers: scores are exact, and many are equal. Empty, partly filled, full and wrapped caches."""
    size, counts = 12, [0, 2, 7, 12, 17, 40]
    keys = torch.randint(-2, 3, (len(counts), size, 4)).to(dtype)
    queries = torch.randint(-2, 3, (len(counts), 5, 4)).to(dtype)
    told = dict(similarity=similarity, block_bytes=block_bytes)
    found = nearest(queries, keys, torch.tensor(counts), 4, **told)
    for lane, count in enumerate(counts):
        for token in range(5):
            expected = by_hand(queries[lane, token], keys[lane], count, 4, similarity)
            assert found.there[lane, token].tolist() == [True] * len(expected) + [False] * (4 - len(expected))
            assert found.ages[lane, token, : len(expected)].tolist() == expected


def test_of_a_bucket_only_the_best_is_found():
    keys, queries = torch.randint(-2, 3, (1, 1024, 3)).float(), torch.randint(-2, 3, (1, 4, 3)).float()
    for count in (300, 1024, 1500):
        found = nearest(queries, keys, torch.tensor([count]), 20, bucketed=True)
        for token in range(4):
            expected = by_hand(queries[0, token], keys[0], count, 20, "l2", bucketed=True)
            assert found.ages[0, token].tolist() == expected and found.there[0, token].all()


def test_negative_zero_is_zero_and_infinities_keep_their_order():
    keys = torch.tensor([[[1.0], [-1.0], [3e38], [-3e38]]])
    found = nearest(torch.tensor([[[0.0], [1e38], [-1e38]]]), keys, torch.tensor([4]), 4, similarity="dot")
    assert found.there.all()
    assert found.ages[0].tolist() == [[0, 1, 2, 3], [1, 3, 2, 0], [0, 2, 3, 1]]


@pytest.mark.parametrize("window, offsets", [(1, [0]), (2, [0, 1]), (4, [-1, 0, 1, 2])])
@pytest.mark.parametrize("count", [3, 8, 10, 16, 21])
def test_beside_a_hit_stand_its_neighbours_in_the_document(window, offsets, count):
    """In a ring of 8 the newest and the oldest entry lie side by side, and are none."""
    size = 8
    there = torch.arange(max(0, count - size), count)
    hits = Found((count - 1 - there)[None, None], torch.ones(1, 1, len(there), dtype=torch.bool))
    found = beside(hits, window, size, torch.tensor([count]))
    places = places_of(found, size, torch.tensor([count]))
    for index, number in enumerate(there.tolist()):
        for at, offset in enumerate(offsets):
            entry = index * window + at
            exists = max(0, count - size) <= number + offset < count
            assert found.there[0, 0, entry].item() == exists
            if exists:
                assert places[0, 0, entry].item() == (number + offset) % size


# --- what is kept


def test_the_ones_used_last_are_kept():
    """Against a dictionary: number of the entry -> when it was last stored or found."""
    lanes, size, length, layer = 2, 12, 4, 5
    store = Store(lanes, size, [layer], {"key": 1}, torch.float32, torch.device("cpu"), "lru")
    kept: list[dict[int, int]] = [{} for _ in range(lanes)]
    number = itertools.count(1)
    for time in range(1, 13):
        begins = torch.tensor([time == 7, time == 4])
        counts = store.counts.masked_fill(begins, 0)
        filled = torch.tensor([length, 1 + time % length])
        states = torch.zeros(lanes, length, 1)
        ages = torch.randint(0, size, (lanes, length, 2))
        found = Found(ages, ages < counts[:, None, None])
        for lane in range(lanes):
            if begins[lane]:
                kept[lane] = {}
            entries = list(kept[lane])
            for age in ages[lane].flatten().tolist():
                if age < len(entries):
                    kept[lane][entries[len(entries) - 1 - age]] = time
            new = [next(number) for _ in range(int(filled[lane]))]
            states[lane, : len(new), 0] = torch.tensor(new).float()
            surplus = len(kept[lane]) + len(new) - size
            for entry, _ in sorted(kept[lane].items(), key=lambda item: item[1])[: max(0, surplus)]:
                del kept[lane][entry]
            kept[lane] |= dict.fromkeys(new, time)
        store.commit(Segment(slice(0, lanes), counts, filled, {(layer, "key"): states}, {layer: found}))
        for lane in range(lanes):
            entries = store.kept[layer, "key"][lane, : store.counts[lane], 0].tolist()
            assert entries == list(map(float, kept[lane]))
            used = store.used[layer][lane, : store.counts[lane]].tolist()
            assert used == list(kept[lane].values())


def test_a_lane_that_begins_anew_and_padding_leave_the_rest_as_it_is():
    model, installed = remembering(topk=24, cache_size=24)
    batches = segments(4)
    with torch.no_grad():
        model.eval()
        read(model, installed, batches[:3])
        store = model.memory.stores[False, 0]
        before = {key: kept.clone() for key, kept in store.kept.items()}
        read(model, installed, batches[3:], begins=[[True, False]], filled=[[8, 3]])
    assert store.counts.tolist() == [8, 27]
    for key, kept in store.kept.items():
        # the second lane's third segment lies at 16 to 23, so the three come to 0 to 2
        assert torch.equal(kept[1, 3:], before[key][1, 3:]) and not torch.equal(kept[1, :3], before[key][1, :3])
        assert torch.equal(kept[0, 8:], before[key][0, 8:])


# --- what is read


def test_earlier_tokens_are_zero_ahead_of_the_first():
    x = torch.arange(1.0, 7).view(1, 6, 1)
    assert of_earlier_token(x, 2).flatten().tolist() == [0, 0, 1, 2, 3, 4]
    assert not of_earlier_token(x, 9).any()
    assert of_earlier_token(torch.ones(1, 3, 2, dtype=torch.bool), 1).tolist()[0][0] == [False, False]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_attention_brought_to_the_entries_is_that_written_out(heads, kv_heads, context):
    reading = Reading(5, kv_heads, 3, context, scrambled=False).double()
    torch.nn.init.normal_(reading.wk), torch.nn.init.normal_(reading.wv)
    q, rows = torch.randn(2, 7, heads, 3).double(), torch.randn(2, 7, 4, 5).double()
    there = torch.rand(2, 7, 4) < 0.6
    there[0] = False  # a lane without anything
    absorbed = reading(q, Retrieved(rows, there))
    reads = [of_earlier_token(rows, by) for by in range(context)]
    seen = torch.cat([of_earlier_token(there, by) for by in range(context)], -1)
    torch.testing.assert_close(absorbed, reading.written_out(q, reads, seen[..., None, :]), rtol=1e-12, atol=1e-12)
    assert not absorbed[0].any()
    for token in range(7):  # and one token, one head by a softmax over a list
        entries = [(t, n) for t in range(max(0, token - context + 1), token + 1) for n in range(4) if there[1, t, n]]
        if entries:
            own = torch.stack([rows[1, t, n] for t, n in entries])
            k, v = own @ reading.wk[:3].t(), own @ reading.wv[:3].t()
            expected = torch.softmax(k @ q[1, token, 0] * 3**-0.5, 0) @ v
            torch.testing.assert_close(absorbed[1, token, 0], expected, rtol=1e-12, atol=1e-12)


def test_the_authors_layout_of_heads_is_another_one_and_is_known():
    """[N, H E] of projected entries, read as [H, N, E]."""
    reading = Reading(3, 2, 2, 1, scrambled=True).double()
    torch.nn.init.normal_(reading.wk), torch.nn.init.normal_(reading.wv)
    q, rows, there = torch.randn(1, 1, 2, 2).double(), torch.randn(1, 1, 3, 3).double(), torch.ones(1, 1, 3).bool()
    k, v = ((rows[0, 0] @ w.t()).reshape(2, 3, 2) for w in (reading.wk, reading.wv))
    expected = torch.softmax((k @ q[0, 0, :, :, None]).squeeze(-1) * 2**-0.5, -1)[:, None] @ v
    torch.testing.assert_close(reading(q, Retrieved(rows, there))[0, 0], expected.squeeze(1))
    straight = Reading(3, 2, 2, 1, scrambled=False).double()
    straight.load_state_dict(reading.state_dict())
    assert not torch.allclose(straight(q, Retrieved(rows, there)), reading(q, Retrieved(rows, there)))


# --- in a model


def test_an_empty_cache_changes_nothing_and_everything_gets_a_gradient():
    model, installed = remembering()
    tokens = segments(1)[0]
    out = model(tokens)
    assert torch.equal(out, plain()(tokens))
    out.square().sum().backward()
    for name in installed.added_parameters:
        gradient = model.get_parameter(name).grad
        assert gradient is not None and not gradient.any(), name


MAPS = {
    "one layer": dict(retrieval_map={"1": 1}),
    "from below": dict(retrieval_map={"2": 1}),
    "from above": dict(retrieval_map={"1": 2}),
    "several": dict(retrieval_map={"0": 2, "2": 0}, attention_layers=[0, 1, 3]),
    "uncompressed": dict(retrieval_map={"1": 0}, compression=1),
}


@pytest.mark.parametrize("ordering", ["fifo", "lru"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_a_later_token_changes_nothing_before_it(name, training, ordering):
    batches = segments(3)
    changed = batches.clone()
    changed[2, :, 5] = (changed[2, :, 5] + 1) % 64
    outputs = []
    for each in (batches, changed):
        model, installed = remembering(dtype=torch.float64, layers=4, ordering=ordering, cache_size=12, **MAPS[name])
        with torch.no_grad():
            outputs.append(read(model.train(training), installed, each))
    assert torch.equal(outputs[0][2, :, :5], outputs[1][2, :, :5])
    assert not torch.allclose(outputs[0][2, :, 5:], outputs[1][2, :, 5:])


def test_what_a_document_said_before_is_read():
    """And only there: another lane does not."""
    batches = segments(3)
    changed = batches.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 64
    model, installed = remembering(dtype=torch.float64)
    with torch.no_grad():
        first = read(model.eval(), installed, batches)
        model.train().eval()  # forgets
        second = read(model, installed, changed)
    assert torch.equal(first[:, 1], second[:, 1]) and not torch.allclose(first[1:, 0], second[1:, 0])


def test_one_cache_for_all_rows():
    model, installed = remembering(scope="global", cache_size=40)
    with torch.no_grad():
        read(model.eval(), installed, segments(3), filled=[[8, 2]] * 3, begins=[[True, True]] * 3)
    assert model.memory.stores[False, 0].counts.tolist() == [30]


def test_found_states_are_compressed_anew_in_training():
    """While the weights stay, that is what is stored; and it is how they learn."""
    batches = segments(3)
    model, installed = remembering(dtype=torch.float64)
    trained = read(model.train(), installed, batches)
    with torch.no_grad():
        stored = read(model.eval(), installed, batches)
    torch.testing.assert_close(trained, stored, rtol=1e-5, atol=1e-6)  # keys are stored in float32
    trained[2].square().sum().backward()
    for name in ("h_proj.weight", "h_norm.weight", "h_norm.bias"):
        assert model.memory.get_parameter(name).grad.abs().max() > 1e-6, name


def test_compressing_all_that_is_kept_or_what_was_found_is_one():
    """Whichever is less: of 24 entries, 16 that were found or 48."""
    model, _ = remembering(dtype=torch.float64)
    memory, states, widths = model.memory, torch.randn(2, 24, 32).double(), []
    memory.h_norm.register_forward_hook(lambda _, inputs, out: widths.append(out.shape[1:-1]))
    places = torch.randint(0, 24, (2, 8, 6))
    some, every = (memory._reencoded(states, each, torch.float64) for each in (places[..., :2], places))
    assert widths == [(8, 2), (24,)]
    torch.testing.assert_close(some, every[:, :, :2], rtol=1e-12, atol=1e-12)


def test_below_the_first_that_learns_there_is_no_backward():
    model, installed = remembering(layers=4, retrieval_map={"2": 2}, adapter=dict(rank=2, layers=[2, 3]), beside="lora")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = []

    def watch(layer):
        def saw(block, inputs, out):
            if out.requires_grad:
                out.register_hook(lambda grad: seen.append(layer))

        model.layers[str(layer)].register_forward_hook(saw)

    watch(1), watch(2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for tokens in segments(3):
        model(tokens).logsumexp(-1).sum().backward()
        optimizer.step()
        installed.after_batch([model])
    assert set(seen) == {2}
    for name, parameter in model.named_parameters():
        trains = name in installed.added_parameters
        assert parameter.requires_grad == trains == (not torch.equal(before[name], parameter)), name
        assert trains or parameter.grad is None
    assert any("lora_A" in name for name in installed.added_parameters) and not any(
        ".1." in name for name in installed.added_parameters
    )


@pytest.mark.parametrize("ordering", ["fifo", "lru"])
def test_recompute_finds_and_stores_nothing_again(ordering):
    """Gradients and caches are those without recompute, bit for bit; a microbatch is stored once."""
    found = []
    for mode, how in (("none", "2"), ("full", "2"), ("selective", "op"), ("selective", "2")):
        options = dict(retrieval_map={"1": 1}, ordering=ordering, cache_size=40, track_hits=True, layers=4)
        model, installed = remembering(**options)
        apply_activation_checkpoint(model, installed.plan, mode, how)
        for tokens in segments(4):
            model(tokens).logsumexp(-1).sum().backward()
            installed.after_batch([model])
        store = model.memory.stores[True, 0]
        assert store.counts.tolist() == [32, 32]
        gradients = {clean_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((gradients, store.tensors()))
    for gradients, kept in found[1:]:
        assert gradients.keys() == found[0][0].keys() == installed.added_parameters
        assert all(torch.equal(gradients[name], found[0][0][name]) for name in gradients)
        assert all(torch.equal(kept[name], found[0][1][name]) for name in kept)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(window=3), "window: allowed: 1, or an even number; write 2 or 4"),
        (dict(cache_size=2), "cache_size: allowed: at least 3, topk; raise it"),
        (dict(compression=5), "compression: allowed: what divides the width 32 of the model"),
        (dict(retrieval_map={"4": 4}), "retrieval_map: allowed: layers from 0 to 1; drop 4"),
        (dict(attention_layers=[1, 7]), "attention_layers: allowed: layers from 0 to 1; drop 7"),
        (dict(retrieval_map={"1": 0}, attention_layers=[0]), "attention_layers: allowed: layers from 1 on"),
        (dict(retrieval_map={"last": 1}), 'numbers of layers in its keys; "last" is none'),
        (dict(attention_layers=[0, 0]), "attention_layers: allowed: each layer once"),
        (dict(lookup="bucketed", cache_size=700), 'a multiple of 512 with lookup = "bucketed"; write 512 or 1024'),
        (dict(lookup="bucketed", cache_size=1024, topk=600), "topk: allowed: at most 512"),
        (dict(scope="global", ordering="lru"), '"fifo" with scope = "global"'),
        (dict(cache_shard="tp", ordering="lru"), 'ordering: allowed: "fifo" with cache_shard = "tp"'),
        (dict(cache_shard="tp", lookup="bucketed", cache_size=512), 'lookup: allowed: "exact" with cache_shard = "tp"'),
    ],
)
def test_what_does_not_fit_is_said(options, message):
    with pytest.raises(JobError) as raised:
        remembering(**options)
    assert message in str(raised.value)


def test_a_segment_that_is_longer_than_the_cache_is_refused():
    """Two of its tokens would have one place, and which of them is kept would be chance."""
    store = Store(1, 4, [0], {"key": 1}, torch.float32, torch.device("cpu"))
    segment = Segment(slice(0, 1), store.counts.clone(), torch.tensor([5]), {(0, "key"): torch.ones(1, 5, 1)}, {})
    with pytest.raises(AssertionError, match="two tokens of a segment"):
        store.commit(segment)


@torch.no_grad()
def test_what_followed_before_is_copied():
    """A model of one layer that says each token again, and a reading that is set by hand: of the entry like the token
    and the one behind it, it reads the second. Random tokens that come again are foretold, but for a segment's last.
    """
    model, installed = remembering(
        layers=1,
        sizes=dict(dim=64, n_heads=1, n_kv_heads=1),
        cache_size=256,
        compression=1,
        topk=1,
        window=2,
        context=1,
    )
    unit, block = torch.eye(64), model.layers["0"]
    model.tok_embeddings.weight.copy_(torch.nn.init.orthogonal_(torch.empty(64, 64)))
    model.output.weight.copy_(model.tok_embeddings.weight)
    block.attention.wo.weight.zero_(), block.feed_forward.w2.weight.zero_()
    cache = block.attention.cache
    cache.wq.weight.copy_(-10 * unit), cache.reading.wk.copy_(unit), cache.reading.wv.copy_(unit)
    cache.wo.weight.copy_(10 * unit)
    motif = torch.stack([torch.randperm(64) for _ in range(2)])  # no token twice
    out = read(model.eval(), installed, motif.repeat(3, 1, 1).unflatten(-1, (1, 64)).squeeze(2))
    told = out.argmax(-1)[:, :, :-1] == motif[:, 1:]
    assert not told[0].any() and told[1:].float().mean() > 0.9


@pytest.mark.parametrize(
    "family, ordering", [("llama", "fifo"), ("llama", "lru"), ("mistral", "fifo"), ("opt", "fifo")]
)
@torch.no_grad()
def test_written_piece_by_piece_as_read_in_segments(family, ordering):
    """What the tokens before found is carried on within a segment, and a full one is stored."""
    how = dict(dtype=torch.float64, cache_size=20, ordering=ordering, context=3)
    model, installed = remembering(family, **how)
    tokens = segments(5, lanes=1)
    expected = read(model.eval(), installed, tokens).flatten(0, 2)  # [40, V]
    model, _ = remembering(family, **how)
    reader, context = reader_of(model.eval(), 8)
    ids = tokens.flatten()[None]
    for end in (3, 4, 8, 9, 19, 20, 21, 40):
        logits = reader(ids[:, -context:][:, :end])[0]
        torch.testing.assert_close(logits, expected[end - len(logits) : end], rtol=1e-6, atol=1e-7)
    assert model.memory.stores[False, 0].counts.tolist() == ([20] if ordering == "lru" else [40])
    again = reader(ids[:, :5])[0]  # another beginning
    torch.testing.assert_close(again, expected[:5], rtol=1e-6, atol=1e-7)


# --- how much it is


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ordering", ["fifo", "lru"])
@pytest.mark.parametrize("scope", ["lane", "global"])
@pytest.mark.parametrize("compression", [1, 4])
def test_bytes_by_formula_are_those_of_the_tensors(compression, scope, ordering, training):
    if scope == "global" and ordering == "lru":
        return
    options = dict(retrieval_map={"0": 2, "1": 1}, compression=compression, scope=scope, ordering=ordering)
    model, installed = remembering(layers=4, **options)
    with torch.no_grad():
        read(model.train(training), installed, segments(1, lanes=3))
    (store,) = model.memory.stores.values()
    told = cache_bytes(installed.options.neurocache, 32, 4, 3, training)
    assert store.bytes == told


@pytest.mark.parametrize(
    "dim, layers, heads, attention, compression, bytes_of",
    [  # OPT-1.3B and Llama 2 7B in bfloat16: millions of bytes of a lane, 16k and 128k entries, in use and in training
        (2048, 24, 32, 62.9, 1.05, (16.8, 83.9, 134, 671)),
        (4096, 32, 32, 335, 4.2, (33.6, 168, 268, 1342)),
    ],
)
def test_published_sizes(dim, layers, heads, attention, compression, bytes_of):
    options = Cache()
    counts = added_parameters(options, layers, dim, heads, heads, dim // heads)
    assert [count / 1e6 for count in counts] == pytest.approx([attention, compression], rel=0.01)
    found = [
        cache_bytes(Cache(cache_size=size), dim, layers, 1, training) / 1e6
        for size in (16384, 131072)
        for training in (False, True)
    ]
    assert found == pytest.approx(bytes_of, rel=0.005)


@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
@pytest.mark.parametrize("compression", [1, 4])
def test_parameters_by_formula_are_those_of_the_model(family, compression):
    model, installed = remembering(family, layers=4, compression=compression, retrieval_map={"2": 1})
    args, options = model.args, installed.options.neurocache
    told = added_parameters(options, 4, args.dim, args.n_heads, args.num_kv_heads, args.head_dim)
    assert (
        sum(told)
        == sum(model.get_parameter(name).numel() for name in installed.added_parameters)
        == installed.num_trained
    )


def test_a_cache_begins_as_the_layers_own_attention():
    model, _ = remembering(retrieval_map={"1": 1})
    own, cache = model.layers["1"].attention, model.layers["1"].attention.cache
    assert torch.equal(cache.wq.weight, own.wq.weight) and torch.equal(cache.wo.weight, own.wo.weight)
    assert torch.equal(cache.reading.wk, own.wk.weight[:, :8]) and torch.equal(cache.reading.wv, own.wv.weight[:, :8])
    assert model.memory.h_proj.weight.std().item() == pytest.approx(32**-0.5, rel=0.15)
    drawn, _ = remembering(retrieval_map={"1": 1}, init="random")
    assert not torch.equal(drawn.layers["1"].attention.cache.wq.weight, own.wq.weight)


def test_bucketed_finds_what_exact_does():
    """Recall at 16 of 16384 normed keys; each bucket of 32 entries gives one."""
    keys = torch.nn.functional.layer_norm(torch.randn(1, 16384, 64), (64,))
    queries = torch.nn.functional.layer_norm(torch.randn(1, 64, 64), (64,))
    exact, bucketed = (nearest(queries, keys, torch.tensor([20000]), 16, bucketed=b).ages[0] for b in (False, True))
    recall = (exact[:, :, None] == bucketed[:, None, :]).any(-1).float().mean().item()
    assert 0.97 <= recall < 1


def test_compiled_blocks_are_compiled_once():
    """The lookup is outside of them, and what it gives has one shape from the first batch on."""
    torch._dynamo.reset()
    model, installed = remembering()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    graphs = []
    for tokens in segments(6):
        model(tokens).sum().backward()
        installed.after_batch([model])
        graphs.append(len(seen))
    assert graphs[1] == graphs[-1]
    assert not any("topk" in str(graph.code) for graph in seen)
