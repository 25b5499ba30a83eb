"""The chunked loss against torch's cross-entropy without chunks: values, gradients, memory, FSDP, a vocabulary that is
split over ranks, and compile.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from tests.support.pool import run_ranks
from tests.support.tiny_decoders import LLAMA, ROBERTA
from torchtitan.core.random_draws import initialize
from torchtitan.losses.objective import (
    IGNORE_INDEX,
    Objective,
    SummedCrossEntropy,
    cross_entropies,
    summed_cross_entropy,
)
from torchtitan.losses.tasks import CHUNK_BYTES, auto_chunks
from torchtitan.models.llama.model import SPEC as LLAMA_SPEC
from torchtitan.models.roberta.model import SPEC as ROBERTA_SPEC

WIDTH, VOCABULARY = 8, 20


def example(dtype=torch.float64, batch=2, length=9):
    torch.manual_seed(0)
    hidden = torch.randn(batch, length, WIDTH, dtype=dtype, requires_grad=True)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    labels = torch.randint(0, VOCABULARY, (batch, length))
    labels[0, 3:5] = IGNORE_INDEX
    return hidden, head, labels


def reference(hidden, head, labels):
    logits = (hidden @ head.weight.T).flatten(0, 1)
    keep = labels.flatten() != IGNORE_INDEX
    return F.cross_entropy(logits[keep].double(), labels.flatten()[keep], reduction="none").sum()


def documents(seed, rows=3, length=20, vocabulary=64):
    """Return a batch of documents of random lengths, of which half have no label."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: torch.randint(high, (rows, length), generator=generator)  # noqa: E731
    begins = draw(5) == 0
    begins[:, 0] = False
    numbers, index = begins.long().cumsum(1), torch.arange(length).expand(rows, -1)
    has_label = (draw(2) == 1).gather(1, numbers) & (draw(3) > 0)
    positions = index - torch.where(begins, index, 0).cummax(1).values
    labels = draw(vocabulary).where(has_label, IGNORE_INDEX)
    return {"tokens": draw(vocabulary), "labels": labels, "positions": positions, "document_ids": numbers}


@pytest.mark.parametrize("name", ["llama3", "roberta"])
def test_documents_without_labels_are_left_out(name):
    """The loss and its gradients do not change, and are those of all tokens; one row has the others' tokens."""
    spec, args = (LLAMA_SPEC, LLAMA["llama3"]) if name == "llama3" else (ROBERTA_SPEC, ROBERTA["words"])
    model = spec.build(args).double()
    initialize(model, 7, model.init_rule)
    model.loss, shortened = SummedCrossEntropy(), 0
    for seed in range(8):
        batch = documents(seed)
        joined = model.loss.join_documents(batch)
        size = joined["tokens"].numel()
        shortened += size < 60
        assert (size < 60 and {len(x) for x in joined.values()} == {1} and size % 8 == 0) or joined is batch
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).flatten(0, 1)
        expected = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        results = [model(**batch), model(**joined), expected]
        gradients = [torch.autograd.grad(result, list(model.parameters()), allow_unused=True) for result in results]
        for result, others in zip(results[:2], gradients[:2], strict=True):
            torch.testing.assert_close(result, results[2], rtol=1e-12, atol=0)
            torch.testing.assert_close(others, gradients[2], rtol=1e-9, atol=1e-13)
    assert model.may_join_documents and shortened > 4


def test_a_loss_that_reads_samples_gets_them_whole():
    class OfSamples(SummedCrossEntropy):
        def rows(self, hidden, batch):
            return hidden, batch["labels"]

    batch = documents(0)
    assert OfSamples().join_documents(batch) is batch
    assert SummedCrossEntropy().join_documents({**batch, "column": torch.zeros(3)})["tokens"] is batch["tokens"]
    again = {**batch, "document_ids": batch["document_ids"] % 2}
    assert SummedCrossEntropy().join_documents(again) is again
    without = {**batch, "labels": torch.full_like(batch["labels"], IGNORE_INDEX)}
    assert SummedCrossEntropy().join_documents(without) is without


class AllLogits(SummedCrossEntropy):
    """Reads the logits of tokens without a label too."""

    def compute_loss(self, head, hidden, *targets):
        return super().compute_loss(head, hidden, *targets) + head(hidden).square().sum()


def test_a_loss_of_all_logits_gets_all_tokens_unless_it_says_otherwise():
    hidden, head, labels = example()
    labels[:, ::2] = IGNORE_INDEX
    squares = head(hidden).square().sum() - head(hidden[labels == IGNORE_INDEX]).square().sum() * torch.arange(2)
    declared = type("Declared", (AllLogits,), {"leaves_out": True, "compute_loss": AllLogits.compute_loss})
    for kind, value in zip((AllLogits, declared), squares, strict=True):
        torch.testing.assert_close(kind()(hidden, head, {"labels": labels}), reference(hidden, head, labels) + value)
    assert AllLogits().join_documents(batch := documents(0)) is batch


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 18, 50])
def test_values_and_gradients_do_not_depend_on_the_number_of_chunks(num_chunks):
    hidden, head, labels = example()
    loss = SummedCrossEntropy(num_chunks)(hidden, head, {"labels": labels})
    expected = reference(hidden, head, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    ours, reference_gradients = (torch.autograd.grad(y / 7, (hidden, head.weight)) for y in (loss, expected))
    torch.testing.assert_close(ours, reference_gradients, rtol=1e-10, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(
            SummedCrossEntropy(num_chunks)(hidden, head, {"labels": labels}), expected, rtol=1e-12, atol=0
        )


def test_gradients_by_finite_differences():
    hidden, head, labels = example(length=4)
    loss = SummedCrossEntropy(3)
    assert torch.autograd.gradcheck(lambda h, w: loss(h, head, {"labels": labels}), (hidden, head.weight))


def test_a_frozen_head_and_a_frozen_body():
    hidden, head, labels = example()
    (expected,) = torch.autograd.grad(reference(hidden, head, labels), hidden)
    head.weight.requires_grad_(False)
    (grad,) = torch.autograd.grad(SummedCrossEntropy(3)(hidden, head, {"labels": labels}), hidden)
    torch.testing.assert_close(grad, expected)
    head.weight.requires_grad_(True)
    SummedCrossEntropy(3)(hidden.detach(), head, {"labels": labels}).backward()
    assert head.weight.grad is not None


def test_only_ignored_labels_give_zero():
    hidden, head, labels = example()
    for num_chunks in (1, 3):
        loss = SummedCrossEntropy(num_chunks)(hidden, head, {"labels": torch.full_like(labels, IGNORE_INDEX)})
        loss.backward()
        assert loss.item() == 0 and not head.weight.grad.any()


@pytest.mark.parametrize("num_chunks", [1, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_logits_give_a_float32_loss_and_keep_the_scale_of_gradients(num_chunks, autocast):
    hidden, head, labels = example(torch.float32 if autocast else torch.bfloat16, batch=8, length=64)
    valid = 509  # 1 / 509 in bfloat16 is off by 0.2 %, which the sum of all gradients would show
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = SummedCrossEntropy(num_chunks)(hidden, head, {"labels": labels})
    assert loss.dtype == torch.float32
    head = copy.deepcopy(head).double()
    exact = reference(hidden.double(), head, labels)
    assert abs(loss.item() / exact.item() - 1) < 1e-3
    assert loss.item() != loss.bfloat16().item()
    (grad,) = torch.autograd.grad(loss / valid, hidden)
    hidden64 = hidden.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(reference(hidden64, head, labels) / valid, hidden64)
    scale = (grad.double() * expected).sum() / expected.square().sum()
    assert abs(scale - 1) < 1e-3


class LiveLogits(TorchDispatchMode):
    """Record the peak bytes of live [tokens, vocabulary] tensors: logits, softmax and gradients."""

    def __init__(self):
        super().__init__()
        self.peak, self.alive = 0, WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[-1] == VOCABULARY:
                self.alive[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def peak_logits_bytes(num_chunks):
    """Return the peak bytes of logits in forward and backward."""
    hidden, head, labels = example(torch.bfloat16, batch=4, length=64)
    with LiveLogits() as tracker:
        SummedCrossEntropy(num_chunks)(hidden, head, {"labels": labels}).backward()
    return tracker.peak


@pytest.mark.parametrize("num_chunks", [2, 8])
def test_logits_take_their_share_of_memory(num_chunks):
    assert peak_logits_bytes(num_chunks) <= peak_logits_bytes(1) * (1 / num_chunks + 0.05)


def test_automatic_chunks_limit_the_bytes_of_float32_logits():
    assert auto_chunks(8 * 256, 2048, "cpu") == auto_chunks(0, 2048, "cpu") == 1
    assert auto_chunks(8192, 128256, "cpu") == 8 and auto_chunks(8192, 128256, "cuda") == 4
    assert auto_chunks(8192, 128256, "xpu") == 4  # types without a limit have that of cuda
    for device_type, limit in CHUNK_BYTES.items():
        assert 8192 * 128256 * 4 / auto_chunks(8192, 128256, device_type) <= limit
        assert auto_chunks(1, 10**9, device_type) == 1  # a chunk has at least one token


def test_the_number_of_chunks_follows_the_batch_at_hand(monkeypatch):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 4 * VOCABULARY)
    hidden, head, labels = example(torch.float32)
    objective = CountedChunks(0)
    objective.logits_width = VOCABULARY
    for samples, chunks in ((2, 5), (1, 2)):  # two of 9 rows have no label: they are left out of the smaller batch
        with torch.set_grad_enabled(samples == 2):
            objective(hidden[:samples], head, {"labels": labels[:samples]})
        assert objective.chunks == chunks
        objective.chunks = 0


class WeightPasses(TorchDispatchMode):
    """Count operations, other than views, with a result as large as the head's weight."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (VOCABULARY, WIDTH) and not func.is_view:
            self.names.append(func.name())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_add_up_the_weight_gradient_without_another_pass(dtype):
    hidden, head, labels = example(dtype)
    with WeightPasses() as passes:
        SummedCrossEntropy(5)(hidden, head, {"labels": labels}).backward()
    assert passes.names == ["aten::empty_like", *["aten::addmm.out"] * 5, "aten::mul.out"]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_weight_gradient_is_rounded_once(autocast):
    """Under autocast the weight is in float32 and its gradient is not rounded at all."""
    hidden, head, labels = example(torch.float32 if autocast else torch.bfloat16, batch=8, length=64)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        SummedCrossEntropy(16)(hidden, head, {"labels": labels}).backward()
    chunks = []
    for chunk in range(16):
        part = slice(32 * chunk, 32 * (chunk + 1))
        h, w = hidden.detach().bfloat16().flatten(0, 1)[part], head.weight.detach().bfloat16().requires_grad_()
        logits = (h @ w.T).float()
        summed_cross_entropy(logits, labels.flatten()[part]).backward()
        chunks.append(w.grad.float())
    expected = torch.stack(chunks).sum(0)
    exact = expected if autocast else expected.bfloat16()
    torch.testing.assert_close(head.weight.grad, exact, rtol=0 if autocast else 2**-7, atol=1e-6)


@pytest.mark.parametrize("kind", ["bias", "hook", "pre-hook", "parametrization", "subclass"])
def test_other_heads_get_their_gradients_from_autograd(kind):
    hidden, head, labels = example()
    if kind == "bias":
        head.bias = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.float64))
    elif kind == "hook":
        head.register_forward_hook(lambda _, inputs, output: output * 2)
    elif kind == "pre-hook":
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
    elif kind == "parametrization":
        register_parametrization(head, "weight", nn.Tanh())
    else:
        head.__class__ = Doubled
    losses = [SummedCrossEntropy(num_chunks)(hidden, head, {"labels": labels}) for num_chunks in (1, 3)]
    expected, grads = (torch.autograd.grad(loss, (hidden, *head.parameters())) for loss in losses)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("prepend", ["pre_", ""])
def test_backward_hooks_of_a_head_run_for_each_chunk(prepend):
    hidden, head, labels = example()
    calls = []
    getattr(head, f"register_full_backward_{prepend}hook")(lambda *_: calls.append(1))
    SummedCrossEntropy(3)(hidden, head, {"labels": labels}).backward()
    assert len(calls) == 3


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class CountedChunks(SummedCrossEntropy):
    chunks, leaves_out = 0, True

    def compute_loss(self, head, hidden, *targets):
        self.chunks += 1
        return super().compute_loss(head, hidden, *targets)


def test_a_negative_number_of_chunks_and_one_without_a_width_are_refused():
    hidden, head, labels = example()
    with pytest.raises(ValueError, match="num_chunks = -1.*at least 0"):
        SummedCrossEntropy(-1)
    with pytest.raises(ValueError, match="num_chunks = 0 needs logits_width"):
        SummedCrossEntropy(0)(hidden, head, {"labels": labels})


class MultipliesByTheWeight(SummedCrossEntropy):
    def compute_loss(self, head, hidden, *targets):
        return summed_cross_entropy(hidden @ head.weight.T, *targets)


class NeverCallsTheHead(SummedCrossEntropy):
    def compute_loss(self, head, hidden, *targets):
        return hidden.square().sum()


@pytest.mark.parametrize(
    "objective, error, message",
    [
        (MultipliesByTheWeight, AttributeError, "may only call the head.*weight"),
        (NeverCallsTheHead, RuntimeError, "did not call the head"),
    ],
)
def test_chunks_of_an_objective_that_does_not_call_the_head_are_refused(objective, error, message):
    hidden, head, labels = example()
    objective(1)(hidden, head, {"labels": labels})
    with pytest.raises(error, match=message):
        objective(3)(hidden, head, {"labels": labels})
    head.requires_grad_(False)
    objective(3)(hidden, head, {"labels": labels})  # needs no gradient of the head


def test_compiled_chunks_share_one_graph():
    hidden, head, labels = example(torch.float32, length=8)
    (expected,) = torch.autograd.grad(SummedCrossEntropy(4)(hidden, head, {"labels": labels}), head.weight)
    counter = CompileCounterWithBackend("aot_eager")
    loss = SummedCrossEntropy(4)
    loss.compile(backend=counter)
    for _ in range(2):
        (grad,) = torch.autograd.grad(loss(hidden, head, {"labels": labels}), head.weight)
        torch.testing.assert_close(grad, expected)
    heads = sum("cross_entropy" in graph.code for graph in counter.graphs)
    assert heads == 1, "one graph for all chunks, reused in the next step"


class Model(nn.Module):
    def __init__(self, head, num_chunks):
        super().__init__()
        self.body, self.output, self.loss = nn.Linear(WIDTH, WIDTH, bias=False), head, SummedCrossEntropy(num_chunks)
        self.body.weight.data.copy_(torch.eye(WIDTH))

    def forward(self, hidden, labels):
        return self.loss(self.body(hidden), self.output, {"labels": labels})


def fsdp_gradients(num_chunks, compute):
    hidden, head, labels = example(torch.float32)
    model = Model(head, num_chunks)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    rank = mesh.get_rank()
    loss = model(hidden[rank : rank + 1], labels[rank : rank + 1])
    (loss / 16).backward()
    return loss.item(), [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("compute, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_under_fsdp_gradients_are_those_of_one_device(compute, tolerance):
    hidden, head, labels = example(torch.float32)
    model = Model(head, 1)
    expected = model(hidden, labels)
    (expected / 16).backward()
    (loss0, grads), (loss1, _) = run_ranks(2, fsdp_gradients, 3, compute)
    assert abs((loss0 + loss1) / expected.item() - 1) < tolerance
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(
            grad, parameter.grad, rtol=tolerance, atol=tolerance * parameter.grad.abs().max().item()
        )


class SplitHead(nn.Module):
    """A head with only this rank's part of the vocabulary."""

    def __init__(self, head, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(head.weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone())

    def forward(self, hidden):
        return DTensor.from_local(hidden @ self.weight.T, self.mesh, [Shard(1)])


def split_loss(num_chunks, dtype, scale, compiled):
    """Compute loss and gradients on this rank of a split vocabulary."""
    torch._dynamo.reset()
    hidden, head, labels = example(dtype)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    head = SplitHead(head, mesh)
    loss = SummedCrossEntropy(num_chunks)
    if compiled:
        loss.compile(backend="aot_eager")
    value = loss(hidden * scale, head, {"labels": labels})
    hidden_grad, weight_grad = torch.autograd.grad(value / 7, (hidden, head.weight))
    with torch.no_grad():
        without_grad = loss(hidden * scale, head, {"labels": labels})
    return value.detach(), without_grad, hidden_grad, weight_grad


# bfloat16: the results differ by the rounding of the logits (2^-8 = 0.4 %)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("ranks, scale, compiled", [(2, 1, False), (4, 1, False), (2, 300, False), (2, 1, True)])
def test_vocabulary_split_over_ranks(ranks, scale, compiled, num_chunks, dtype, tolerance):
    hidden, head, labels = example(dtype)
    exact = copy.deepcopy(head).double()
    hidden64 = hidden.detach().double().requires_grad_()
    expected = reference(hidden64 * scale, exact, labels)
    hidden_grad, weight_grad = torch.autograd.grad(expected / 7, (hidden64, exact.weight))
    answers = run_ranks(ranks, split_loss, num_chunks, dtype, scale, compiled)
    for value, without_grad, _, _ in answers:
        assert value.dtype == without_grad.dtype == torch.promote_types(dtype, torch.float32)
        assert value.item() == answers[0][0].item(), "the same on every rank"
        assert value.item() == pytest.approx(expected.item(), rel=tolerance)
        assert without_grad.item() == pytest.approx(expected.item(), rel=tolerance)
    # each rank has the gradient from its part of the vocabulary; their sum is that of the hidden states
    got = {"hidden": sum(a[2].double() for a in answers), "weight": torch.cat([a[3] for a in answers]).double()}
    for name, grad in (("hidden", hidden_grad), ("weight", weight_grad)):
        assert (got[name] - grad).abs().max() <= tolerance * grad.abs().max(), name


def ignored_split_loss():
    hidden, head, labels = example()
    head = SplitHead(head, init_device_mesh("cpu", (2,)))
    value = SummedCrossEntropy(2)(hidden, head, {"labels": torch.full_like(labels, IGNORE_INDEX)})
    value.backward()
    return value.item(), head.weight.grad.abs().max().item()


def test_only_ignored_labels_give_zero_with_the_vocabulary_split():
    assert run_ranks(2, ignored_split_loss) == [(0.0, 0.0)] * 2


def test_an_objective_counts_labels_and_the_base_class_is_abstract():
    hidden, head, labels = example()
    ignored = labels.clone()
    ignored[0, 0] = IGNORE_INDEX
    assert SummedCrossEntropy().count({"labels": ignored}) == int((labels != IGNORE_INDEX).sum()) - 1
    for method, args in (("count", ({},)), ("rows", (hidden, {})), ("compute_loss", (head, hidden))):
        with pytest.raises(NotImplementedError):
            getattr(Objective(), method)(*args)


@pytest.mark.parametrize("offset", [0.0, -100.0, 1e4])
def test_a_constant_added_to_all_logits_does_not_change_the_loss(offset):
    """The loss is exact to 1e-6 of its size, and gradients of rows without a label are zero.

    Logits near 1e4 are rounded to 1e-3, in the reference as well.
    """
    logits = (torch.randn(8, 300) + offset).requires_grad_()
    labels = torch.randint(300, (8,))
    labels[3] = IGNORE_INDEX
    losses = cross_entropies(logits, labels)
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none")
    weights = torch.rand(8)
    (losses * weights).sum().backward()
    (expected * weights.double()).sum().backward()
    assert torch.allclose(losses.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(logits.grad.double(), wide.grad, rtol=1e-5, atol=1e-7)
    assert not logits.grad[3].any()


def test_backward_can_run_twice():
    logits = torch.randn(4, 9, requires_grad=True)
    loss = cross_entropies(logits, torch.randint(9, (4,))).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, logits)[0], first)
