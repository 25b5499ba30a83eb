"""`compat_head_layout`: compare logits with the authors' program, written in loops.

The program reads the keys and values of a token's entries [N, K, E] as [K, N, E] without a transpose, and only then
joins the entries of the `context` tokens; the first token of a segment replaces the ones before it. A missing entry is
a row of zeros, compressed in training, which attention treats like any other.
"""

import math

import pytest
import torch

from tests.support import judged
from tests.support.judged import lines
from tests.support.remembering import SMALL, plain, read, remembering, segments
from torchtitan.models.kv_cache import reader_for
from torchtitan.plugins.neurocache.attention import EntryAttention, Retrieved

anywhere = judged.anywhere
LAYER = 1
"""The layer that stores and looks up; this one and those above it read the cache."""


class Reference:
    """The authors' program around a model without a cache, with the weights of one that has it."""

    def __init__(self, model, training, **cache):
        self.options, self.training = SMALL | dict(window=2, context=2, compression=4) | cache, training
        self.weights = {name: p.detach() for name, p in model.named_parameters()}
        self.dtype = self.weights["tok_embeddings.weight"].dtype
        self.stored: list[list[torch.Tensor]] = []  # states by lane, in order

    def compressed(self, states):
        """Project states to the width of the cache, if the cache compresses."""
        if "memory.h_proj.weight" not in self.weights:
            return states
        norm = [self.weights[f"memory.h_norm.{name}"] for name in ("weight", "bias")]
        narrow = states @ self.weights["memory.h_proj.weight"].t()
        return torch.nn.functional.layer_norm(narrow, narrow.shape[-1:], *norm)

    def entries(self, lane, state):
        """Return the rows [N, C] that a token reads: its nearest entries, each with the entries around it."""
        stored, options = self.stored[lane], self.options
        keys = [self.compressed(entry).float().to(self.dtype) for entry in stored]
        query = self.compressed(state)
        scores = [(2 * (query @ key) - key @ key).item() for key in keys]
        nearest = sorted(range(len(keys)), key=lambda i: (-scores[i], -i))[: options["topk"]]
        states = []
        for index in range(options["topk"]):
            for offset in range(
                -(options["window"] // 2) + 1 if options["window"] > 1 else 0, options["window"] // 2 + 1
            ):
                number = nearest[index] + offset if index < len(nearest) else -1
                exists = 0 <= number < len(keys)
                if self.training and "memory.h_proj.weight" in self.weights:
                    raw = stored[number].float().to(self.dtype) if exists else torch.zeros_like(state)
                    states.append(self.compressed(raw))
                else:
                    states.append(keys[number] if exists else torch.zeros_like(query))
        return torch.stack(states)

    def heads(self, rows, weight, width):
        """[N, C] -> for each head a list of N vectors, taken from the flat result in the authors' order."""
        flat, count = (rows @ weight.t()).flatten(), len(rows)
        return [
            [flat[(head * count + place) * width :][:width] for place in range(count)]
            for head in range(len(weight) // width)
        ]

    def added(self, layer, module, x):
        """x [B, S, D], the input of a layer's attention -> the output of the attention to the cache."""
        name, width = f"layers.{layer}.attention.cache", module.head_dim
        matrices = ("wq.weight", "reading.wk", "reading.wv", "wo.weight")
        wq, wk, wv, wo = (self.weights[f"{name}.{matrix}"] for matrix in matrices)
        out = torch.empty_like(x)
        for lane, states in enumerate(x):
            read = [[self.heads(rows, w, width) for w in (wk, wv)] for rows in self.retrieved[lane]]
            for token, state in enumerate(states):
                tokens = [max(token - by, 0) for by in range(self.options["context"])]
                parts = []
                for head, query in enumerate((wq @ state).split(width)):
                    shared = head * (len(wk) // width) // (len(wq) // width)
                    keys = torch.stack([key for earlier in tokens for key in read[earlier][0][shared]])
                    values = torch.stack([value for earlier in tokens for value in read[earlier][1][shared]])
                    parts.append(torch.softmax(keys @ query / math.sqrt(width), 0) @ values)
                out[lane, token] = wo @ torch.cat(parts)
        return out

    def hook(self, layer, module, inputs, output):
        """Add the attention to the cache to a layer's attention output."""
        x = inputs[0]
        if layer == LAYER:
            self.retrieved = [[self.entries(lane, state) for state in states] for lane, states in enumerate(x)]
            self.segment = x
        return output + self.added(layer, module, x)

    @torch.no_grad()
    def logits(self, model, batches):
        """Return the logits of segments read one after another."""
        self.stored = [[] for _ in batches[0]]
        for layer in range(LAYER, len(model.layers)):
            attention = model.layers[str(layer)].attention
            attention.register_forward_hook(lambda *call, layer=layer: self.hook(layer, *call))
        out = []
        for tokens in batches:
            out.append(model(tokens))
            for stored, states in zip(self.stored, self.segment, strict=True):
                stored.extend(states)
        return torch.stack(out)


def model_with_authors_layout(family="llama", dtype=torch.float64, **cache):
    """Return a model and its adapter, with all parameters of the adapter moved away from their initial values."""
    options = dict(retrieval_map={str(LAYER): LAYER}, cache_size=64, compat_head_layout=True) | cache
    model, installed = remembering(family, dtype, layers=3, **options)
    generator = torch.Generator().manual_seed(7)
    for name in sorted(installed.added_parameters):
        parameter = model.get_parameter(name)
        parameter.data += torch.randn(parameter.shape, generator=generator).to(dtype) / 3
    return model, installed


def expected_of(model, batches, family="llama", dtype=torch.float64, training=False, **cache):
    """Compute the logits of the authors' program with a model's weights."""
    base = plain(family, dtype, n_layers=3).train(training)
    base.load_state_dict(model.state_dict(), strict=False)
    return Reference(model, training, **cache).logits(base, batches)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "cache",
    [
        dict(context=1),
        dict(context=2),
        dict(context=3),
        dict(context=4, window=1, topk=5),
        dict(context=2, window=4, topk=2),
        dict(context=2, compression=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_logits_equal_those_of_the_authors_program(family, cache, training):
    """The first segment finds no entry and the second fewer than topk. Llama's key/value heads are shared, OPT's are
    not."""
    batches = segments(4, length=4)
    model, installed = model_with_authors_layout(family, **cache)
    with torch.no_grad():
        logits = read(model.train(training), installed, batches)
    expected = expected_of(model, batches, family, training=training, **cache)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_a_context_may_be_longer_than_a_segment():
    batches = segments(5, length=2)
    model, installed = model_with_authors_layout(context=4)
    with torch.no_grad():
        logits = read(model.eval(), installed, batches)
    torch.testing.assert_close(logits, expected_of(model, batches, context=4), rtol=1e-6, atol=1e-6)


def test_logits_equal_in_float32():
    batches = segments(3, length=4)
    model, installed = model_with_authors_layout("mistral", torch.float32)
    with torch.no_grad():
        logits = read(model.eval(), installed, batches)
    torch.testing.assert_close(logits, expected_of(model, batches, "mistral", torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("context", [2, 3])
def test_generation_token_by_token_equals_reading_segments(context):
    batches = segments(4, lanes=1, length=4)
    model, _ = model_with_authors_layout(context=context)
    expected = expected_of(model, batches, context=context).flatten(0, 2)
    reader, longest = reader_for(model.eval(), 4)
    ids = batches.flatten()[None]
    for end in (1, 2, 3, 4, 5, 7, 8, 10, 15, 16):
        logits = reader(ids[:, -longest:][:, :end])[0]
        torch.testing.assert_close(logits, expected[end - len(logits) : end], rtol=1e-6, atol=1e-6)


def test_entries_of_a_token_are_permuted_before_they_are_joined():
    """Two tokens with two entries each, and two heads of one number."""
    reading = EntryAttention(2, 2, 1, 2, scrambled=True).double()
    reading.wk.data, reading.wv.data = torch.zeros(2, 2).double(), torch.eye(2).double()
    rows = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]], [[10.0, 20.0], [30.0, 40.0]]]]).double()
    exists = torch.tensor([[[True, True], [True, False]]])  # ignored: no entry is masked
    result = reading(torch.zeros(1, 2, 2, 1).double(), Retrieved(rows, exists))[0, :, :, 0]
    # for each token, head 0 has both numbers of the first entry and head 1 of the second; equal scores take means
    assert result.tolist() == [[1.5, 3.5], [(1 + 2 + 10 + 20) / 4, (3 + 4 + 30 + 40) / 4]]


def test_tensor_parallel_is_refused():
    options = ("--adapter.kind=neurocache", "--task.kind=documents", "--adapter.neurocache.compat_head_layout=true")
    options += ("--adapter.neurocache.cache_size=4096", "--parallelism.tensor_parallel_degree=2")
    (fault,) = lines(*options, ranks=2)
    assert fault == (
        "adapter.neurocache.compat_head_layout: given true; allowed: false with tensor parallel; each rank has only "
        "some heads, and this layout mixes values of all heads: use another parallelism"
    )
