"""Context parallel attention against written-out attention, and a Llama under it against one device.

Every rank makes the same full tensors, passes its share to the kernel, and compares its share of output and gradients
with the reference. Tests are parametrized by what changes the communication; each loops over the other cases.
"""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.pool import run_ranks
from torchtitan.core.errors import JobError, LimitError
from torchtitan.core.random_draws import clean_name, initialize
from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.llama.model import Llama
from torchtitan.parallelisms import attention_kernels, ring_attention
from torchtitan.parallelisms.context_parallel import (
    METHODS,
    apply_context_parallel,
    build_layout,
    shard_sequence,
)
from torchtitan.parallelisms.sequence_layout import SequenceLayout, Tokens

# float32 and float64: sums in another order. bfloat16 against float64: rounding of inputs' products to 8 bits
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SAMPLES, SEQ_LEN, HEADS, HEAD_DIM = 2, 24, 4, 8


class KernelHolder(nn.Module):
    """A minimal module with an attention kernel."""

    def __init__(self, kernel=None):
        super().__init__()
        self.set_attention_kernels([kernel or AttentionKernel()])

    def set_attention_kernels(self, kernels):
        self.kernels = nn.ModuleList(kernels)

    @property
    def kernel(self):
        return self.kernels[0]


def parallel_kernel(ranks, method, balance, kernel=None):
    """Return the attention kernel that context parallel makes of the model's one."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    holder = KernelHolder(kernel)
    apply_context_parallel(holder, mesh["cp"], method, balance)
    return holder.kernel


def tokens_of(q, documents):
    return Tokens(torch.arange(q.shape[2]), documents)


def reference_attention(q, k, v, documents, visibility=torch.tril):
    """Compute attention [B, H, S, E] with explicit scores; `visibility` zeroes hidden entries of a matrix of ones."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    visible = visibility(torch.ones(length, length, dtype=torch.bool))
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None, :])[:, None]
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v


def full_tensors(heads, kv_heads, dtype, value_dim=HEAD_DIM):
    """Return q, k, v, the output's gradient, and document ids.

    One document ends inside the first rank's share, one is longer than a share, and one has a single token.
    """
    make = torch.Generator().manual_seed(0)
    sizes = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, value_dim), (heads, value_dim))
    shapes = [(SAMPLES, n, SEQ_LEN, width) for n, width in sizes]
    q, k, v, grad = (torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes)
    starts = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.long)
    starts[0, [2, 3, 17]] = 1
    starts[1, [9, 10, 23]] = 1
    return q, k, v, grad, starts.cumsum(1)


def relative_error(got, expected):
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def attend_and_compare(ranks, method, balance, cases, kernel=AttentionKernel, reference=reference_attention):
    """Return the largest relative errors of the output and the three gradients for each case of `kernel_cases`."""
    kernel, layout, rank = (
        parallel_kernel(ranks, method, balance, kernel()),
        build_layout(ranks, method, balance),
        dist.get_rank(),
    )
    errors = {}
    for case in cases:
        heads, kv_heads, value_dim, dtype, with_documents = case
        *qkv, grad, documents = full_tensors(heads, kv_heads, dtype, value_dim)
        documents = documents if with_documents else None
        exact = [x.double().requires_grad_() for x in qkv]
        expected = reference(*exact, documents)
        expected_grads = torch.autograd.grad(expected, exact, grad.double())
        local = [layout.shard(x, rank, dim=2).requires_grad_() for x in qkv]
        mask = kernel.prepare(tokens_of(local[0], None if documents is None else layout.shard(documents, rank)))
        y = kernel(*local, mask)
        grads = torch.autograd.grad(y, local, layout.shard(grad, rank, dim=2))
        assert y.dtype == dtype and [g.dtype for g in grads] == [dtype] * 3
        with torch.no_grad():
            assert torch.equal(kernel(*local, mask), y)
        pairs = zip((y, *grads), (expected, *expected_grads), strict=True)
        errors[case] = [relative_error(got, layout.shard(full_tensor, rank, dim=2)) for got, full_tensor in pairs]
    return errors


def kernel_cases(ranks):
    """Return (heads, kv_heads, value_dim, dtype, documents); with few kv_heads, ulysses has to repeat them."""
    sizes = [(4, 4, 8), (4, 2, 5), (4, 1, 8)] if ranks == 4 else [(4, 2, 8), (4, 1, 5), (6, 3, 8)]
    return [(*size, dtype, documents) for size in sizes for dtype in TOLERANCE for documents in (False, True)]


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("balance", (True, False), ids=("headtail", "in order"))
@pytest.mark.parametrize("method", METHODS)
def test_equal_to_written_out_attention(method, balance, ranks):
    for errors in run_ranks(ranks, attend_and_compare, ranks, method, balance, kernel_cases(ranks)):
        assert len(errors) == 18
        for case, worst in errors.items():
            assert max(worst) <= TOLERANCE[case[3]], f"{case}: output, q, k, v differ by {worst}"


# --- custom kernels


class NonCausal(AttentionKernel):
    """A kernel without a causal mask."""

    def __init__(self):
        super().__init__(causal=False)


def reference_to_all(q, k, v, documents):
    return reference_attention(q, k, v, documents, visibility=lambda ones: ones)


class HalvedQueries(AttentionKernel):
    """A kernel that halves the queries and does not declare support for parts of a sequence."""

    def forward(self, q, k, v, mask):
        return super().forward(q / 2, k, v, mask)


class HalvedQueriesOfParts(HalvedQueries):
    """The same, declared to support parts of a sequence."""

    accepts_query_slices = True


def reference_half(q, k, v, documents):
    return reference_attention(q / 2, k, v, documents)


class Window(AttentionKernel):
    """A kernel with a window of two: each token sees itself and its predecessor."""

    def __init__(self):
        super().__init__(window=2)


def reference_window(q, k, v, documents):
    return reference_attention(q, k, v, documents, visibility=lambda ones: ones.tril().triu(-1))


class UndeclaredKernel(torch.nn.Module):
    """A kernel that does not derive from AttentionKernel and declares nothing."""

    def prepare(self, queries, keys=None):
        return AttentionKernel("sdpa").prepare(queries, keys)

    def forward(self, q, k, v, mask):
        return AttentionKernel("sdpa")(q, k, v, mask)


KERNELS = {
    NonCausal: (reference_to_all, METHODS),
    HalvedQueries: (reference_half, ("ulysses",)),
    HalvedQueriesOfParts: (reference_half, ("ulysses", "allgather")),
    Window: (reference_window, ("ulysses", "allgather")),
    UndeclaredKernel: (reference_attention, ("ulysses",)),
}


def attend_or_return_error(method, balance, name):
    """Compare the named kernel with its reference, or return the error that refuses it."""
    kernel = globals()[name]
    cases = [(4, 2, 5, torch.float64, False), (4, 2, 8, torch.float64, True)]
    try:
        return attend_and_compare(2, method, balance, cases, kernel, KERNELS[kernel][0])
    except JobError as error:
        return str(error)


@pytest.mark.parametrize("balance", (True, False), ids=("headtail", "in order"))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_custom_kernels_are_correct_or_refused(kernel, method, balance):
    for outcome in run_ranks(2, attend_or_return_error, method, balance, kernel.__name__):
        if method in KERNELS[kernel][1]:
            assert all(max(worst) <= 1e-10 for worst in outcome.values()), outcome
        else:
            assert f"{method!r} with the attention kernel {kernel.__name__}" in outcome and "Choose one" in outcome


# --- the whole model


ARGS = LlamaArgs(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, vocab_size=61, multiple_of=16)


def build(dtype=torch.float64):
    model = Llama(ARGS)
    initialize(model, 3, model.init_rule)
    model.to(dtype).loss = SummedCrossEntropy(1)
    return model


def batch(documents):
    make = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, ARGS.vocab_size, (SAMPLES, SEQ_LEN + 1), generator=make)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = IGNORE_INDEX
    full_batch = {"tokens": tokens[:, :-1], "labels": labels}
    full_batch["positions"] = torch.arange(SEQ_LEN).expand(SAMPLES, -1)
    if documents:
        ids = full_tensors(1, 1, torch.float32)[-1]
        first = torch.searchsorted(ids, ids)  # the first position of each token's document
        full_batch |= {"document_ids": ids, "positions": full_batch["positions"] - first}
    return full_batch


def one_device(documents, dtype=torch.float64):
    """Return loss and gradients of the model on one device."""
    model = build(dtype)
    loss = model(**batch(documents))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def backward(model, share, variant):
    """Compute the loss and all gradients.

    The variants do what pipelines do: several forwards before their backwards, and separate passes for the gradients
    of inputs and weights.
    """
    if variant == "out of order":
        rows = [{name: x[i : i + 1] for name, x in share.items()} for i in range(SAMPLES)]
        losses = [model(**row) for row in rows]
        for loss in losses:  # first in, first out: buffers of one microbatch must not leak into another
            loss.backward()
        return torch.stack(losses).sum().detach()
    loss = model(**share)
    if variant == "split backward":
        first, *weights = model.parameters()
        (first.grad,) = torch.autograd.grad(loss, first, retain_graph=True)
        for parameter, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            parameter.grad = grad
    else:
        loss.backward()
    return loss.detach()


def train_llama(ranks, method, balance, documents, variant="plain", dtype=torch.float64):
    """Return the loss and the gradients, both summed over ranks."""
    torch._dynamo.reset()
    model = build(dtype)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))["cp"]
    apply_context_parallel(model, mesh, method, balance)
    if variant == "compile":
        for block in model.layers.values():
            block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    share = shard_sequence(batch(documents), dist.get_rank(), ranks, method, balance)
    loss = backward(model, share, variant)
    dist.all_reduce(loss)
    grads = {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        grads[clean_name(name)] = parameter.grad
    return loss.item(), grads


VARIANTS = ("plain", "out of order", "split backward")  # with shards and recompute: combinations.py
ROWS = [(method, variant, True) for method in METHODS for variant in VARIANTS]
ROWS += [(method, "plain", False) for method in METHODS]
# the trace does not cover point-to-point messages
ROWS += [(method, "compile", True) for method in METHODS if method != "ring"]


@pytest.mark.parametrize("method, variant, documents", ROWS)
def test_llama_equals_one_device(method, variant, documents):
    loss, grads = one_device(documents)
    for got_loss, got in run_ranks(2, train_llama, 2, method, True, documents, variant):
        assert got_loss == pytest.approx(loss, rel=1e-10)
        assert got.keys() == grads.keys()
        for name, grad in grads.items():
            assert relative_error(got[name], grad) <= 1e-10, name


# --- traffic


class Traffic(TorchDispatchMode):
    """Record the bytes that this rank sends to others in each collective."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.sent = ranks, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op == torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.sent.append(args[0].nbytes * (self.ranks - 1))
        elif op == torch.ops._c10d_functional.all_to_all_single.default:
            rows = sum(args[2]) - args[2][dist.get_rank()]
            self.sent.append(args[0].nbytes // args[0].shape[0] * rows)
        elif op == torch.ops.c10d.send.default:
            self.sent.append(sum(x.nbytes for x in args[0]))
        else:
            assert "c10d" not in str(op) or op.name().split("::")[1] in ("wait_tensor", "recv_"), op
        return op(*args, **kwargs or {})


def measure_traffic(ranks, method, dtype):
    """Return the bytes sent by prepare, forward and backward."""
    kernel, layout, rank = parallel_kernel(ranks, method, True), build_layout(ranks, method, True), dist.get_rank()
    *qkv, grad, documents = full_tensors(4, 2, dtype)
    local = [layout.shard(x, rank, dim=2).requires_grad_() for x in qkv]
    with Traffic(ranks) as prepared:
        mask = kernel.prepare(tokens_of(local[0], layout.shard(documents, rank)))
    with Traffic(ranks) as forward:
        y = kernel(*local, mask)
    with Traffic(ranks) as backward:
        torch.autograd.grad(y, local, layout.shard(grad, rank, dim=2))
    return prepared.sent, forward.sent, backward.sent


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("method", METHODS)
def test_traffic_is_minimal(method, dtype, ranks):
    per_head = SAMPLES * SEQ_LEN // ranks * HEAD_DIM * dtype.itemsize
    share, num_peers = 2 * 2 * per_head, ranks - 1  # keys and values of 2 heads
    if method == "allgather":
        forward = backward = [num_peers * share]
    elif method == "ulysses":  # all heads, for the other ranks' tokens; 2 key heads become 4 with 4 ranks
        forward = [(4 + 2 * max(2, ranks)) * per_head * num_peers // ranks, 4 * per_head * num_peers // ranks]
        backward = forward[::-1]
    else:
        wide = share * torch.float32.itemsize // dtype.itemsize  # gradients travel in float32
        forward, backward = [share] * num_peers, [share] * num_peers + [wide] * num_peers
    ids = SAMPLES * SEQ_LEN // ranks * torch.long.itemsize
    for got_ids, got_forward, got_backward in run_ranks(ranks, measure_traffic, ranks, method, dtype):
        assert got_ids == [num_peers * ids]
        assert got_forward == forward
        assert sorted(got_backward) == sorted(backward)


# --- the layout, the kernels, and errors


def count_visible(layout, rank, length, in_sequence):
    """Count how often each query of `rank` sees each key of the full sequence."""
    size = length // layout.ranks
    counts = torch.zeros(size, length, dtype=torch.long)
    if in_sequence:
        where = [(region, torch.arange(length)) for region in layout.visible_in_sequence(rank, size)]
    else:
        positions = [layout.positions(source, size, "cpu") for source in range(layout.ranks)]
        where = [(layout.visible_in_shard(rank, source, size), keys) for source, keys in enumerate(positions)]
    for region, keys in where:
        if region is not None:
            queries = slice(region.first_query, region.last_query)
            pairs = torch.ones(region.last_query - region.first_query, region.last_key - region.first_key).long()
            counts[queries, keys[region.first_key : region.last_key]] += pairs.tril() if region.causal else pairs
    return counts


@pytest.mark.parametrize("in_sequence", (True, False))
@pytest.mark.parametrize("headtail", (True, False))
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_regions_cover_the_causal_mask_and_headtail_is_balanced(ranks, headtail, in_sequence):
    layout, length = SequenceLayout(ranks, headtail), 24
    work = []
    for rank in range(ranks):
        counts = count_visible(layout, rank, length, in_sequence)
        positions = layout.positions(rank, length // ranks, "cpu")
        assert torch.equal(counts, (positions[:, None] >= torch.arange(length)).long())
        work.append(counts.sum())
    assert sum(work) == length * (length + 1) // 2
    assert not headtail or len(set(map(int, work))) == 1


@pytest.mark.parametrize("method", METHODS)
def test_shards_make_up_the_sequence(method):
    full_batch = {"tokens": torch.arange(48).reshape(2, 24), "labels": torch.arange(48, 96).reshape(2, 24)}
    for balance in (True, False):
        shards = [shard_sequence(full_batch, rank, 4, method, balance) for rank in range(4)]
        for name, x in full_batch.items():
            assert torch.equal(torch.cat([shard[name] for shard in shards], 1).sort().values, x)
            assert all(torch.equal(shard[name], shard[name].sort().values) for shard in shards)
        head = [shard["tokens"][0].tolist() for shard in shards][1]
        assert head == ([3, 4, 5, 18, 19, 20] if balance and method != "ulysses" else [6, 7, 8, 9, 10, 11])


def region_gradients(dtype, documents, device="cpu"):
    q, k, v, grad, ids = (x.to(device) for x in full_tensors(4, 2, dtype))
    q, grad, query_ids = q[:, :, 12:].requires_grad_(), grad[:, :, 12:], ids[:, 12:]
    regions = SequenceLayout(2, headtail=False).visible_in_sequence(1, 12)
    k.requires_grad_(), v.requires_grad_()
    y = ring_attention.RegionAttentionFunction.apply(
        q, k, v, regions, *((query_ids, ids) if documents else (None, None))
    )
    return y, *torch.autograd.grad(y, (q, k, v), grad)


@pytest.mark.parametrize("documents", (False, True))
def test_written_out_kernel_equals_the_cpu_kernel(documents, monkeypatch):
    expected = region_gradients(torch.float64, documents)
    monkeypatch.setattr(attention_kernels, "kernel_for", lambda q, bias: "written out")
    for got, want in zip(region_gradients(torch.float64, documents), expected, strict=True):
        assert relative_error(got, want) <= 1e-12


@pytest.mark.parametrize("documents", (False, True))
@pytest.mark.parametrize("kernel, dtype", [("flash", torch.bfloat16), ("efficient", torch.float32)])
def test_cuda_kernels_get_valid_arguments(kernel, dtype, documents, monkeypatch):
    """Runs on the meta device, which checks names, arguments and shapes only."""
    if kernel == "flash" and documents:
        kernel = "efficient"
    monkeypatch.setattr(attention_kernels, "kernel_for", lambda q, bias: kernel)
    shapes = [(SAMPLES, n, length, HEAD_DIM) for n, length in ((4, 12), (4, 12), (2, SEQ_LEN), (2, SEQ_LEN))]
    got = region_gradients(dtype, documents, "meta")
    assert [x.shape for x in got] == shapes and {x.dtype for x in got} == {dtype}


class DenseFlex(AttentionKernel):
    """A slow substitute for flex attention, which has no backward on a CPU and takes a minute to compile."""

    plain_attention = accepts_query_slices = True

    def __init__(self):
        super().__init__("flex")

    def forward(self, q, k, v, mask):
        visible = create_mask(mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)


def attend_by_block_mask(balance):
    mesh, rank, layout = init_device_mesh("cpu", (2,)), dist.get_rank(), SequenceLayout(2, balance)
    holder = KernelHolder(DenseFlex())
    apply_context_parallel(holder, mesh, "allgather", balance)
    q, k, v, _, documents = full_tensors(4, 2, torch.float64)
    local = [layout.shard(x, rank, dim=2) for x in (q, k, v)]
    y = holder.kernel(*local, holder.kernel.prepare(tokens_of(local[0], layout.shard(documents, rank))))
    return relative_error(y, layout.shard(reference_attention(q, k, v, documents), rank, dim=2))


@pytest.mark.parametrize("balance", (True, False))
def test_block_mask_of_gathered_keys(balance):
    assert max(run_ranks(2, attend_by_block_mask, balance)) <= 1e-12


@pytest.mark.parametrize(
    "method, balance, multiple", [("ring", True, 8), ("ring", False, 4), ("ulysses", True, 4), ("allgather", True, 8)]
)
def test_lengths_that_do_not_divide_are_refused(method, balance, multiple):
    length = 12 if multiple == 8 else 10
    with pytest.raises(LimitError) as error:
        shard_sequence({"tokens": torch.zeros(1, length)}, 0, 4, method, balance)
    pieces = "2 x context_parallel 4 (a head and a tail each)" if multiple == 8 else "context_parallel 4"
    assert str(error.value) == (
        f"training.seq_len (or validation.seq_len): given {length}; allowed: a multiple of {pieces}; write 8 or "
        f"{8 + multiple}"
    )


def test_unknown_methods_are_refused():
    with pytest.raises(JobError, match="'rings': choose one of allgather, ring, alltoall, ulysses"):
        shard_sequence({"tokens": torch.zeros(1, 8)}, 0, 2, "rings", True)


def split_three_heads():
    kernel = parallel_kernel(2, "ulysses", True)
    with pytest.raises(
        JobError, match='given 2; allowed: with "ulysses" a divisor of the 3 query heads of a rank: 1, 3'
    ):
        kernel(*(torch.zeros(1, heads, 4, 8) for heads in (3, 1, 1)), None)
    return True


def test_heads_that_do_not_divide_are_refused():
    assert all(run_ranks(2, split_three_heads))
