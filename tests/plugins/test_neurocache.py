"""Neurocache: lookup, replacement and attention, each against a few lines of plain Python."""

import itertools

import pytest
import torch

from tests.support.remembering import SMALL, plain, read, remembering, segments
from tests.support.tiny_decoders import GATED
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import clean_name
from torchtitan.models.kv_cache import reader_for
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms.parallelize import apply_activation_checkpoint
from torchtitan.plugins.neurocache.adapter import Neurocache
from torchtitan.plugins.neurocache.attention import EntryAttention, Retrieved, shift_tokens
from torchtitan.plugins.neurocache.cache import (
    CacheSegment,
    CacheStore,
    EntryAges,
    entry_places,
    nearest,
    with_neighbours,
)
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Cache
from torchtitan.plugins.neurocache.sizes import added_parameters, cache_bytes


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# --- lookup


def expected_ages(query, keys, count, topk, similarity, bucketed=False):
    """Return ages of the best entries, the newer first among equals. Entry n of `keys` [M, C] is at n mod M."""
    size = len(keys)
    scored = []
    for number in range(max(0, count - size), count):
        key = keys[number % size].double()
        dot = (query.double() @ key).item()
        score = dot if similarity == "dot" else 2 * dot - (key @ key).item()
        scored.append((-score, count - 1 - number, number % size))
    scored.sort()
    if bucketed:
        buckets, best = set(), []
        for entry in scored:
            if entry[2] % 512 not in buckets:
                buckets.add(entry[2] % 512)
                best.append(entry)
        scored = best
    return [age for _, age, _ in scored[:topk]]


@pytest.mark.parametrize("similarity", ["l2", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_bytes", [1, 2**20])
def test_nearest_agrees_with_scores_computed_one_by_one(dtype, similarity, block_bytes):
    """Keys are small integers: scores are exact and many are equal. Caches are empty, partly filled, full, wrapped."""
    size, counts = 12, [0, 2, 7, 12, 17, 40]
    keys = torch.randint(-2, 3, (len(counts), size, 4)).to(dtype)
    queries = torch.randint(-2, 3, (len(counts), 5, 4)).to(dtype)
    options = dict(similarity=similarity, block_bytes=block_bytes)
    hits = nearest(queries, keys, torch.tensor(counts), 4, **options)
    for lane, count in enumerate(counts):
        for token in range(5):
            expected = expected_ages(queries[lane, token], keys[lane], count, 4, similarity)
            assert hits.exists[lane, token].tolist() == [True] * len(expected) + [False] * (4 - len(expected))
            assert hits.ages[lane, token, : len(expected)].tolist() == expected


def test_a_bucketed_lookup_finds_one_entry_per_bucket():
    keys, queries = torch.randint(-2, 3, (1, 1024, 3)).float(), torch.randint(-2, 3, (1, 4, 3)).float()
    for count in (300, 1024, 1500):
        hits = nearest(queries, keys, torch.tensor([count]), 20, bucketed=True)
        for token in range(4):
            expected = expected_ages(queries[0, token], keys[0], count, 20, "l2", bucketed=True)
            assert hits.ages[0, token].tolist() == expected and hits.exists[0, token].all()


def test_negative_zero_is_zero_and_infinities_keep_their_order():
    keys = torch.tensor([[[1.0], [-1.0], [3e38], [-3e38]]])
    hits = nearest(torch.tensor([[[0.0], [1e38], [-1e38]]]), keys, torch.tensor([4]), 4, similarity="dot")
    assert hits.exists.all()
    assert hits.ages[0].tolist() == [[0, 1, 2, 3], [1, 3, 2, 0], [0, 2, 3, 1]]


@pytest.mark.parametrize("window, offsets", [(1, [0]), (2, [0, 1]), (4, [-1, 0, 1, 2])])
@pytest.mark.parametrize("count", [3, 8, 10, 16, 21])
def test_a_window_adds_the_neighbours_of_a_hit(window, offsets, count):
    """In a ring of 8 the newest and the oldest entry are adjacent, but not neighbours in the document."""
    size = 8
    numbers = torch.arange(max(0, count - size), count)
    hits = EntryAges((count - 1 - numbers)[None, None], torch.ones(1, 1, len(numbers), dtype=torch.bool))
    widened = with_neighbours(hits, window, size, torch.tensor([count]))
    places = entry_places(widened, size, torch.tensor([count]))
    for index, number in enumerate(numbers.tolist()):
        for column, offset in enumerate(offsets):
            entry = index * window + column
            exists = max(0, count - size) <= number + offset < count
            assert widened.exists[0, 0, entry].item() == exists
            if exists:
                assert places[0, 0, entry].item() == (number + offset) % size


# --- replacement


def test_lru_retains_the_entries_used_last():
    """The reference is a dictionary per lane: number of the entry -> time of its last store or hit."""
    lanes, size, length, layer = 2, 12, 4, 5
    store = CacheStore(lanes, size, [layer], {"key": 1}, torch.float32, torch.device("cpu"), "lru")
    last_used: list[dict[int, int]] = [{} for _ in range(lanes)]
    number = itertools.count(1)
    for time in range(1, 13):
        begins = torch.tensor([time == 7, time == 4])
        counts = store.counts.masked_fill(begins, 0)
        filled = torch.tensor([length, 1 + time % length])
        states = torch.zeros(lanes, length, 1)
        ages = torch.randint(0, size, (lanes, length, 2))
        hits = EntryAges(ages, ages < counts[:, None, None])
        for lane in range(lanes):
            if begins[lane]:
                last_used[lane] = {}
            entries = list(last_used[lane])
            for age in ages[lane].flatten().tolist():
                if age < len(entries):
                    last_used[lane][entries[len(entries) - 1 - age]] = time
            new = [next(number) for _ in range(int(filled[lane]))]
            states[lane, : len(new), 0] = torch.tensor(new).float()
            surplus = len(last_used[lane]) + len(new) - size
            for entry, _ in sorted(last_used[lane].items(), key=lambda item: item[1])[: max(0, surplus)]:
                del last_used[lane][entry]
            last_used[lane] |= dict.fromkeys(new, time)
        store.commit(CacheSegment(slice(0, lanes), counts, filled, {(layer, "key"): states}, {layer: hits}))
        for lane in range(lanes):
            entries = store.entries[layer, "key"][lane, : store.counts[lane], 0].tolist()
            assert entries == list(map(float, last_used[lane]))
            used = store.used[layer][lane, : store.counts[lane]].tolist()
            assert used == list(last_used[lane].values())


def test_a_reset_lane_and_padding_change_no_other_entry():
    model, installed = remembering(topk=24, cache_size=24)
    batches = segments(4)
    with torch.no_grad():
        model.eval()
        read(model, installed, batches[:3])
        store = model.memory.stores[False, 0]
        before = {key: entries.clone() for key, entries in store.entries.items()}
        read(model, installed, batches[3:], begins=[[True, False]], filled=[[8, 3]])
    assert store.counts.tolist() == [8, 27]
    for key, entries in store.entries.items():
        # the second lane's third segment is at 16 to 23, so the next three entries go to 0 to 2
        assert torch.equal(entries[1, 3:], before[key][1, 3:]) and not torch.equal(entries[1, :3], before[key][1, :3])
        assert torch.equal(entries[0, 8:], before[key][0, 8:])


# --- attention


def test_before_the_first_token_are_zeros():
    x = torch.arange(1.0, 7).view(1, 6, 1)
    assert shift_tokens(x, 2).flatten().tolist() == [0, 0, 1, 2, 3, 4]
    assert not shift_tokens(x, 9).any()
    assert shift_tokens(torch.ones(1, 3, 2, dtype=torch.bool), 1).tolist()[0][0] == [False, False]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
def test_absorbed_attention_equals_the_explicit_one(heads, kv_heads, context):
    reading = EntryAttention(5, kv_heads, 3, context, scrambled=False).double()
    torch.nn.init.normal_(reading.wk), torch.nn.init.normal_(reading.wv)
    q, rows = torch.randn(2, 7, heads, 3).double(), torch.randn(2, 7, 4, 5).double()
    is_valid = torch.rand(2, 7, 4) < 0.6
    is_valid[0] = False  # a lane without entries
    absorbed = reading(q, Retrieved(rows, is_valid))
    shifted_rows = [shift_tokens(rows, shift) for shift in range(context)]
    mask = torch.cat([shift_tokens(is_valid, shift) for shift in range(context)], -1)
    torch.testing.assert_close(
        absorbed, reading.attend_expanded(q, shifted_rows, mask[..., None, :]), rtol=1e-12, atol=1e-12
    )
    assert not absorbed[0].any()
    for token in range(7):  # also one head of each token, by a softmax over a list of entries
        entries = [(t, n) for t in range(max(0, token - context + 1), token + 1) for n in range(4) if is_valid[1, t, n]]
        if entries:
            token_rows = torch.stack([rows[1, t, n] for t, n in entries])
            k, v = token_rows @ reading.wk[:3].t(), token_rows @ reading.wv[:3].t()
            expected = torch.softmax(k @ q[1, token, 0] * 3**-0.5, 0) @ v
            torch.testing.assert_close(absorbed[1, token, 0], expected, rtol=1e-12, atol=1e-12)


def test_the_head_layout_of_the_original_code_is_supported():
    """The original code views projected entries [N, H E] as [H, N, E], without a transpose."""
    reading = EntryAttention(3, 2, 2, 1, scrambled=True).double()
    torch.nn.init.normal_(reading.wk), torch.nn.init.normal_(reading.wv)
    q, rows, is_valid = torch.randn(1, 1, 2, 2).double(), torch.randn(1, 1, 3, 3).double(), torch.ones(1, 1, 3).bool()
    k, v = ((rows[0, 0] @ w.t()).reshape(2, 3, 2) for w in (reading.wk, reading.wv))
    expected = torch.softmax((k @ q[0, 0, :, :, None]).squeeze(-1) * 2**-0.5, -1)[:, None] @ v
    torch.testing.assert_close(reading(q, Retrieved(rows, is_valid))[0, 0], expected.squeeze(1))
    straight = EntryAttention(3, 2, 2, 1, scrambled=False).double()
    straight.load_state_dict(reading.state_dict())
    assert not torch.allclose(straight(q, Retrieved(rows, is_valid)), reading(q, Retrieved(rows, is_valid)))


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
    for tokens in (batches, changed):
        model, installed = remembering(dtype=torch.float64, layers=4, ordering=ordering, cache_size=12, **MAPS[name])
        with torch.no_grad():
            outputs.append(read(model.train(training), installed, tokens))
    assert torch.equal(outputs[0][2, :, :5], outputs[1][2, :, :5])
    assert not torch.allclose(outputs[0][2, :, 5:], outputs[1][2, :, 5:])


def test_output_depends_on_earlier_segments_of_the_same_lane():
    """A change in one lane leaves the other lane's output as it was."""
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


def test_training_compresses_retrieved_states_again():
    """With unchanged weights the result equals the stored states; compressing again lets the weights get gradients."""
    batches = segments(3)
    model, installed = remembering(dtype=torch.float64)
    trained = read(model.train(), installed, batches)
    with torch.no_grad():
        stored = read(model.eval(), installed, batches)
    torch.testing.assert_close(trained, stored, rtol=1e-5, atol=1e-6)  # keys are stored in float32
    trained[2].square().sum().backward()
    for name in ("h_proj.weight", "h_norm.weight", "h_norm.bias"):
        assert model.memory.get_parameter(name).grad.abs().max() > 1e-6, name


def test_compressing_the_cache_or_the_hits_gives_the_same():
    """The cheaper way is taken: of 24 entries compress 16 hits, or the cache if there are 48 hits."""
    model, _ = remembering(dtype=torch.float64)
    memory, states, widths = model.memory, torch.randn(2, 24, 32).double(), []
    memory.h_norm.register_forward_hook(lambda _, inputs, out: widths.append(out.shape[1:-1]))
    places = torch.randint(0, 24, (2, 8, 6))
    of_hits, of_cache = (
        memory._compress_again(states, indices, torch.float64) for indices in (places[..., :2], places)
    )
    assert widths == [(8, 2), (24,)]
    torch.testing.assert_close(of_hits, of_cache[:, :, :2], rtol=1e-12, atol=1e-12)


def test_no_backward_below_the_first_trained_layer():
    model, installed = remembering(layers=4, retrieval_map={"2": 2}, adapter=dict(rank=2, layers=[2, 3]), beside="lora")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    layers_with_gradient = []

    def watch(layer):
        def add_gradient_hook(block, inputs, out):
            if out.requires_grad:
                out.register_hook(lambda grad: layers_with_gradient.append(layer))

        model.layers[str(layer)].register_forward_hook(add_gradient_hook)

    watch(1), watch(2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for tokens in segments(3):
        model(tokens).logsumexp(-1).sum().backward()
        optimizer.step()
        installed.after_batch([model])
    assert set(layers_with_gradient) == {2}
    for name, parameter in model.named_parameters():
        trains = name in installed.added_parameters
        assert parameter.requires_grad == trains == (not torch.equal(before[name], parameter)), name
        assert trains or parameter.grad is None
    assert any("lora_A" in name for name in installed.added_parameters) and not any(
        ".1." in name for name in installed.added_parameters
    )


@pytest.mark.parametrize("ordering", ["fifo", "lru"])
def test_recompute_neither_retrieves_nor_stores_again(ordering):
    """Gradients and caches equal those without recompute, bit for bit; each microbatch is stored once."""
    results = []
    for mode, selective_option in (("none", "2"), ("full", "2"), ("selective", "op"), ("selective", "2")):
        options = dict(retrieval_map={"1": 1}, ordering=ordering, cache_size=40, track_hits=True, layers=4)
        model, installed = remembering(**options)
        apply_activation_checkpoint(model, installed.plan, mode, selective_option)
        for tokens in segments(4):
            model(tokens).logsumexp(-1).sum().backward()
            installed.after_batch([model])
        store = model.memory.stores[True, 0]
        assert store.counts.tolist() == [32, 32]
        gradients = {clean_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((gradients, store.tensors()))
    for gradients, cache_tensors in results[1:]:
        assert gradients.keys() == results[0][0].keys() == installed.added_parameters
        assert all(torch.equal(gradients[name], results[0][0][name]) for name in gradients)
        assert all(torch.equal(cache_tensors[name], results[0][1][name]) for name in cache_tensors)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(window=3), "window: allowed: 1, or an even number; write 2 or 4"),
        (dict(cache_size=2), "cache_size: allowed: at least 3, topk; raise it"),
        (dict(compression=5), "compression: allowed: a divisor of the width 32 of the model"),
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
def test_invalid_options_are_refused(options, message):
    with pytest.raises(JobError) as raised:
        remembering(**options)
    assert message in str(raised.value)


@pytest.mark.parametrize("family", ["glm4_moe", "granite4", "nemotron_h"])
def test_models_without_plain_attention_are_refused(family):
    """Queries have norms, a mixer is in the place of attention, or a block has no attention."""
    spec = MODELS[family]
    model = spec.build(GATED[family])
    installed = Neurocache(Options(kind="neurocache", neurocache=Cache(**SMALL)))
    with pytest.raises(JobError, match=f"with {type(model).__name__}: it is added to causal attention"):
        installed.install(model, spec.plan)


def test_a_segment_that_is_longer_than_the_cache_is_refused():
    """Two of its tokens would share one entry, and which of them is stored would be undefined."""
    store = CacheStore(1, 4, [0], {"key": 1}, torch.float32, torch.device("cpu"))
    segment = CacheSegment(slice(0, 1), store.counts.clone(), torch.tensor([5]), {(0, "key"): torch.ones(1, 5, 1)}, {})
    with pytest.raises(AssertionError, match="two tokens of a segment"):
        store.commit(segment)


@torch.no_grad()
def test_a_cache_set_by_hand_copies_repeated_tokens():
    """Set the weights so that the model without cache repeats its input, and the cache reads the entry after a match.

    A repeated random sequence is then predicted, except for the last token of each segment.
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
    correct = out.argmax(-1)[:, :, :-1] == motif[:, 1:]
    assert not correct[0].any() and correct[1:].float().mean() > 0.9


@pytest.mark.parametrize(
    "family, ordering", [("llama", "fifo"), ("llama", "lru"), ("mistral", "fifo"), ("opt", "fifo")]
)
@torch.no_grad()
def test_generation_in_pieces_equals_reading_in_segments(family, ordering):
    """The reader carries earlier tokens' hits within a segment, and stores the segment when it is full."""
    options = dict(dtype=torch.float64, cache_size=20, ordering=ordering, context=3)
    model, installed = remembering(family, **options)
    tokens = segments(5, lanes=1)
    expected = read(model.eval(), installed, tokens).flatten(0, 2)  # [40, V]
    model, _ = remembering(family, **options)
    reader, context = reader_for(model.eval(), 8)
    ids = tokens.flatten()[None]
    for end in (3, 4, 8, 9, 19, 20, 21, 40):
        logits = reader(ids[:, -context:][:, :end])[0]
        torch.testing.assert_close(logits, expected[end - len(logits) : end], rtol=1e-6, atol=1e-7)
    assert model.memory.stores[False, 0].counts.tolist() == ([20] if ordering == "lru" else [40])
    restarted = reader(ids[:, :5])[0]  # another text
    torch.testing.assert_close(restarted, expected[:5], rtol=1e-6, atol=1e-7)


# --- sizes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("ordering", ["fifo", "lru"])
@pytest.mark.parametrize("scope", ["lane", "global"])
@pytest.mark.parametrize("compression", [1, 4])
def test_cache_bytes_are_those_of_the_tensors(compression, scope, ordering, training):
    if scope == "global" and ordering == "lru":
        return
    options = dict(retrieval_map={"0": 2, "1": 1}, compression=compression, scope=scope, ordering=ordering)
    model, installed = remembering(layers=4, **options)
    with torch.no_grad():
        read(model.train(training), installed, segments(1, lanes=3))
    (store,) = model.memory.stores.values()
    expected = cache_bytes(installed.options.neurocache, 32, 4, 3, training)
    assert store.bytes == expected


@pytest.mark.parametrize(
    "dim, layers, heads, attention, compression, expected_megabytes",
    [  # OPT-1.3B and Llama 2 7B in bfloat16: millions of bytes of a lane, 16k and 128k entries, in use and in training
        (2048, 24, 32, 62.9, 1.05, (16.8, 83.9, 134, 671)),
        (4096, 32, 32, 335, 4.2, (33.6, 168, 268, 1342)),
    ],
)
def test_published_sizes(dim, layers, heads, attention, compression, expected_megabytes):
    options = Cache()
    counts = added_parameters(options, layers, dim, heads, heads, dim // heads)
    assert [count / 1e6 for count in counts] == pytest.approx([attention, compression], rel=0.01)
    megabytes = [
        cache_bytes(Cache(cache_size=size), dim, layers, 1, training) / 1e6
        for size in (16384, 131072)
        for training in (False, True)
    ]
    assert megabytes == pytest.approx(expected_megabytes, rel=0.005)


@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
@pytest.mark.parametrize("compression", [1, 4])
def test_added_parameters_are_those_of_the_model(family, compression):
    model, installed = remembering(family, layers=4, compression=compression, retrieval_map={"2": 1})
    args, options = model.args, installed.options.neurocache
    expected = added_parameters(options, 4, args.dim, args.n_heads, args.num_kv_heads, args.head_dim)
    assert (
        sum(expected)
        == sum(model.get_parameter(name).numel() for name in installed.added_parameters)
        == installed.num_trained
    )


def test_a_cache_is_initialized_from_the_attention_of_its_layer():
    model, _ = remembering(retrieval_map={"1": 1})
    attention, cache = model.layers["1"].attention, model.layers["1"].attention.cache
    assert torch.equal(cache.wq.weight, attention.wq.weight) and torch.equal(cache.wo.weight, attention.wo.weight)
    assert torch.equal(cache.reading.wk, attention.wk.weight[:, :8]) and torch.equal(
        cache.reading.wv, attention.wv.weight[:, :8]
    )
    assert model.memory.h_proj.weight.std().item() == pytest.approx(32**-0.5, rel=0.15)
    drawn, _ = remembering(retrieval_map={"1": 1}, init="random")
    assert not torch.equal(drawn.layers["1"].attention.cache.wq.weight, attention.wq.weight)


def test_bucketed_lookup_has_high_recall():
    """Recall at 16 of 16384 normalized keys is at least 0.97; each bucket of 32 entries yields at most one hit."""
    keys = torch.nn.functional.layer_norm(torch.randn(1, 16384, 64), (64,))
    queries = torch.nn.functional.layer_norm(torch.randn(1, 64, 64), (64,))
    exact, bucketed = (nearest(queries, keys, torch.tensor([20000]), 16, bucketed=b).ages[0] for b in (False, True))
    recall = (exact[:, :, None] == bucketed[:, None, :]).any(-1).float().mean().item()
    assert 0.97 <= recall < 1


def test_compiled_blocks_are_compiled_once():
    """The lookup is outside the compiled blocks, and its result has the same shape from the first batch on."""
    torch._dynamo.reset()
    model, installed = remembering()
    compiled_graphs = []

    def backend(graph, inputs):
        compiled_graphs.append(graph)
        return graph.forward

    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    graph_counts = []
    for tokens in segments(6):
        model(tokens).sum().backward()
        installed.after_batch([model])
        graph_counts.append(len(compiled_graphs))
    assert graph_counts[1] == graph_counts[-1]
    assert not any("topk" in str(graph.code) for graph in compiled_graphs)
