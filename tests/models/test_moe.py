"""The mixture-of-experts layer: products and routing, against plain loops over tokens and experts."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.support.tiny_moe import ARGS, build_moe, tokens
from torchtitan.core.errors import JobError
from torchtitan.models.moe import layer as products
from torchtitan.models.moe.layer import Experts, MoE, grouped_mm, sort_by_expert
from torchtitan.models.moe.router import Router

SIZES = {
    "even": [4, 4, 4, 4],
    "uneven": [1, 7, 3, 5],
    "none for some": [0, 9, 0, 7],
    "none for the ends": [0, 10, 6, 0],
    "all to one": [0, 0, 16, 0],
    "no rows": [0, 0, 0, 0],
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# -- grouped products -------------------------------------------------------------------------------------------------


def product_and_gradients(product, x, w, sizes):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    y = product(x, w, ends)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, (x, w), weight)


def by_rows(x, w, ends):
    """Multiply row by row."""
    experts = torch.bucketize(torch.arange(len(x)), ends, right=True)
    return torch.einsum("ri,rio->ro", x, w[experts])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_native_product_equals_the_loop(sizes, dtype, monkeypatch):
    x, w = torch.randn(sum(sizes), 16).to(dtype), torch.randn(4, 16, 24).to(dtype)
    called = []
    native = products._native
    monkeypatch.setattr(products, "_native", lambda *args, **kwargs: called.append(1) or native(*args, **kwargs))
    ours = product_and_gradients(grouped_mm, x, w, sizes)
    assert called
    exact = product_and_gradients(by_rows, x.double(), w.double(), sizes)
    # relative to the largest: float32 sums of 24 terms, and results rounded to 11 or 8 bits, some of them twice
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for product in (products._loop, products._opaque):
        for got, expected, precise in zip(ours, product_and_gradients(product, x, w, sizes), exact, strict=True):
            largest = precise.abs().max().item() if precise.numel() else 0.0
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * largest)
            torch.testing.assert_close(got.double(), precise, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype, width", [(torch.float64, 16), (torch.float32, 15)])
def test_the_loop_runs_where_the_native_product_does_not(sizes, dtype, width, monkeypatch):
    monkeypatch.setattr(products, "_native", None)  # an error if it was called all the same
    x, w = torch.randn(sum(sizes), width, dtype=dtype), torch.randn(4, width, 7, dtype=dtype)
    exact = product_and_gradients(by_rows, x.double(), w.double(), sizes)
    for product in (grouped_mm, products._opaque):
        for got, expected in zip(product_and_gradients(product, x, w, sizes), exact, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_alignment_decides_as_torch_does():
    for dtype, width in ((torch.float32, 6), (torch.float32, 8), (torch.bfloat16, 12), (torch.bfloat16, 16)):
        x, w = torch.randn(4, width).to(dtype), torch.randn(2, width, 16).to(dtype)
        ends = torch.tensor([1, 4], dtype=torch.int32)
        runs = products._runs_natively(dtype, (width, 16))
        if runs:
            products._native(x, w, offs=ends)
        else:
            with pytest.raises(RuntimeError, match="16 bytes"):
                products._native(x, w, offs=ends)


def test_gradients_of_the_layers_own_functions():
    layer, x = (
        build_moe(dataclasses.replace(ARGS, n_shared_experts=1), dtype=torch.float64),
        tokens(1, 3, dtype=torch.float64),
    )
    x = x.requires_grad_()
    ids, _ = layer.route(x)

    def run(x):
        _, weights = layer.route(x, ids)
        xs, order = layer.dispatch(x, ids, weights)
        return layer.combine(xs * 2, weights, order)

    torch.autograd.gradcheck(run, (x,))


def test_shapes_are_known_without_values():
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device("meta"):
            layer = MoE(ARGS).to(dtype)
            x = torch.zeros(2, 5, 16, dtype=dtype, requires_grad=True)
            y = layer(x)
        y.sum().backward()
        assert y.shape == (2, 5, 16) and y.is_meta and x.grad.shape == x.shape


def test_autocast_computes_experts_in_its_type():
    layer = build_moe(ARGS)
    with torch.autocast("cpu", torch.bfloat16):
        x = tokens().to(torch.bfloat16).requires_grad_()
        y = layer(x)
        _, weights = layer.route(x)
    assert y.dtype == torch.bfloat16 and weights.dtype == torch.float32
    y.sum().backward()
    assert layer.experts.w1.grad.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(y.float(), layer(x.float()), rtol=0.03, atol=0.03)  # 8 bits
    layer.compile(backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), y, rtol=0.03, atol=0.03)


# -- the layer --------------------------------------------------------------------------------------------------------


def slowly(layer, x):
    """The layer's formula, one token and one expert at a time."""
    args, router, experts = layer.args, layer.router, layer.experts
    out = []
    for token in x.flatten(0, 1):
        logits = router.gate.weight @ token
        scores = logits.sigmoid() if args.score == "sigmoid" else logits.softmax(-1)
        ranked = scores.detach() if router.expert_bias is None else scores.detach() + router.expert_bias
        size = args.n_experts // args.n_groups
        groups = ranked.view(args.n_groups, size)
        value = groups.max(-1).values if args.group_score == "max" else groups.sort(-1).values[:, -2:].sum(-1)
        best = value.argsort(descending=True)[: args.top_groups].tolist()
        allowed = [e for e in range(args.n_experts) if e // size in best]
        ids = sorted(allowed, key=lambda e: -ranked[e].item())[: args.top_k]
        total = sum(scores[e] for e in ids) if args.normalize_top_k else 1
        y = torch.zeros_like(token)
        for e in ids:
            weight = args.route_scale * scores[e] / total
            row = token * weight if args.score_before_experts else token
            result = (F.silu(row @ experts.w1[e]) * (row @ experts.w3[e])) @ experts.w2[e]
            y = y + (result if args.score_before_experts else result * weight)
        out.append(y if layer.shared_experts is None else y + layer.shared_experts(token))
    return torch.stack(out).view_as(x)


ROUTINGS = {
    "plain": {},
    "sigmoid": {"score": "sigmoid"},
    "normalized": {"normalize_top_k": True, "route_scale": 2.5},
    "sigmoid, normalized": {"score": "sigmoid", "normalize_top_k": True, "expert_bias": True},
    "scores before": {"score_before_experts": True},
    "groups": {"n_groups": 4, "top_groups": 2, "route_scale": 16.0},
    "groups by two": {"n_groups": 2, "top_groups": 1, "group_score": "top2", "score": "sigmoid", "expert_bias": True},
    "one expert": {"top_k": 1},
    "all experts": {"top_k": 8},
    "shared": {"n_shared_experts": 2},
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_equal_to_the_formula(routing):
    args = dataclasses.replace(ARGS, **ROUTINGS[routing])
    layer, x = build_moe(args, dtype=torch.float64), tokens(dtype=torch.float64).requires_grad_()
    if args.expert_bias:
        layer.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    weight = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for run in (layer, lambda x: slowly(layer, x)):
        y = run(x)
        inputs = {"x": x, **dict(layer.named_parameters())}
        gradients = torch.autograd.grad((y * weight).sum(), list(inputs.values()), allow_unused=True)
        results.append({"y": y, **dict(zip(inputs, gradients, strict=True))})
    for name, expected in results[1].items():
        got = results[0][name]
        if expected is None:  # normalized over a single expert, its score has no say
            expected = torch.zeros_like(got)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10 * expected.abs().max().item(), msg=name)


def test_rows_of_an_expert_stay_in_the_order_of_the_tokens():
    order = sort_by_expert(torch.tensor([[2, 0], [0, 2], [3, 2]]), 5)
    assert order.copies.tolist() == [1, 2, 0, 3, 5, 4]
    assert order.rows.tolist() == [2, 0, 1, 3, 5, 4]
    assert order.sizes.tolist() == [2, 0, 3, 1, 0]


def test_all_tokens_to_one_expert():
    layer, x = build_moe(dataclasses.replace(ARGS, top_k=1)), tokens()
    with torch.no_grad():
        layer.router.gate.weight.zero_()
        layer.router.gate.weight[5] = 10
    y = layer(x.abs())
    assert layer.router.load.tolist() == [0] * 5 + [20] + [0] * 2
    torch.testing.assert_close(y, slowly(layer, x.abs()))
    y.sum().backward()
    idle = [e for e in range(8) if e != 5]
    assert not layer.experts.w1.grad[idle].any() and layer.experts.w1.grad[5].any()


def test_a_bias_chooses_but_does_not_weigh():
    args = dataclasses.replace(ARGS, expert_bias=True, top_k=1)
    router, x = build_moe(args).router, tokens()
    before, _ = router(x)
    router.expert_bias[3] = 2  # scores are below 1
    ids, weights = router(x)
    assert (before != 3).any() and (ids == 3).all()
    torch.testing.assert_close(weights, router.scores(x).flatten(0, 1)[:, 3:4])


def test_experts_come_from_the_best_groups():
    args = dataclasses.replace(ARGS, n_groups=4, top_groups=2)
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.6, 0.7, 0.1, 0.65, 0.64]])

    def choose(**change):
        return sorted(Router(dataclasses.replace(args, **change)).choose(scores)[0].tolist())

    assert choose() == [0, 4, 5]  # best single scores: 0.9 and 0.7
    assert choose(group_score="top2") == [3, 6, 7]  # best pairs: 0.65 + 0.64 and 0.5 + 0.6
    assert choose(group_score="top2", top_groups=4) == [0, 4, 6]
    router = Router(dataclasses.replace(args, expert_bias=True))
    router.expert_bias -= 2  # groups that are left out rank below everything, negative scores too
    assert sorted(router.choose(scores)[0].tolist()) == [0, 4, 5]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_experts": 0}, "n_experts = 0: must be at least 1"),
        ({"n_shared_experts": -1}, "n_shared_experts = -1: must not be negative"),
        ({"top_k": 9}, "top_k = 9 with n_experts = 8: .* 8 at most"),
        ({"n_groups": 3}, "n_groups = 3 with n_experts = 8: .*must divide"),
        ({"n_groups": 4, "top_groups": 1}, "top_groups = 1 with n_groups = 4 of 2 experts: must be between 2,.*and 4"),
        ({"n_groups": 4, "top_groups": 5}, "top_groups = 5 with n_groups = 4"),
        (
            {"n_groups": 8, "top_groups": 3, "group_score": "top2"},
            "'top2' needs groups of at least 2 experts.* groups of 1",
        ),
    ],
)
def test_impossible_routings_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(ARGS, **change)


# -- buffers ----------------------------------------------------------------------------------------------------------


def test_buffers_leave_the_meta_device_with_their_values_and_keep_their_type():
    with torch.device("meta"):
        layer = MoE(dataclasses.replace(ARGS, expert_bias=True))
    layer = layer.to(torch.bfloat16)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN or the largest number
    try:
        layer.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    router = layer.router
    assert layer.experts.w1.isnan().all()
    assert layer.experts.w1.dtype == torch.bfloat16
    assert router.expert_bias.dtype == router.aux_loss.dtype == torch.float32 and router.load.dtype == torch.int64
    assert not router.expert_bias.any() and not router.load.any() and not router.not_finite and not router.aux_loss
    router.expert_bias += 0.001
    layer = layer.to(torch.float16).to(torch.bfloat16)
    assert torch.equal(layer.router.expert_bias, torch.full((8,), 0.001))
    assert [name for name in layer.state_dict() if "router" in name] == ["router.expert_bias", "router.gate.weight"]
    layer.to_empty(device="cpu")  # not from meta: nothing promised, and nothing reset
    assert layer.router.expert_bias.dtype == torch.float32


def test_experts_stand_stacked():
    experts = Experts(16, 24, 4)
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    assert shapes == {"w1": (4, 16, 24), "w2": (4, 24, 16), "w3": (4, 16, 24)}
