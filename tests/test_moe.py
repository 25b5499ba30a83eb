"""The mixture-of-experts layer: products, routing and balance, against plain loops over tokens and experts."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan.initialization import clean_name, initialize
from torchtitan.models.deepseek import DEEPSEEK
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.moe import MoEArgs, balance
from torchtitan.models.moe import experts as products
from torchtitan.models.moe.experts import Experts, grouped_mm
from torchtitan.models.moe.layer import MoE, sort_by_expert
from torchtitan.models.moe.router import Router

ARGS = MoEArgs(dim=16, expert_dim=24, n_experts=8, top_k=3)
SIZES = {
    "even": [4, 4, 4, 4],
    "uneven": [1, 7, 3, 5],
    "none for some": [0, 9, 0, 7],
    "none for the ends": [0, 10, 6, 0],
    "all to one": [0, 0, 16, 0],
    "no rows": [0, 0, 0, 0],
}


def made(args, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    layer = MoE(args)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return layer.to(dtype)


def tokens(batch=2, length=10, dim=16, dtype=torch.float32):
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


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
    """Each row by itself."""
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
        for got, wanted, precise in zip(ours, product_and_gradients(product, x, w, sizes), exact, strict=True):
            largest = precise.abs().max().item() if precise.numel() else 0.0
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * largest)
            torch.testing.assert_close(got.double(), precise, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype, width", [(torch.float64, 16), (torch.float32, 15)])
def test_the_loop_runs_where_the_native_product_does_not(sizes, dtype, width, monkeypatch):
    monkeypatch.setattr(products, "_native", None)  # an error if it was called all the same
    x, w = torch.randn(sum(sizes), width, dtype=dtype), torch.randn(4, width, 7, dtype=dtype)
    exact = product_and_gradients(by_rows, x.double(), w.double(), sizes)
    for product in (grouped_mm, products._opaque):
        for got, wanted in zip(product_and_gradients(product, x, w, sizes), exact, strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


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
        made(dataclasses.replace(ARGS, n_shared_experts=1), dtype=torch.float64),
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
    layer = made(ARGS)
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
    layer, x = made(args, dtype=torch.float64), tokens(dtype=torch.float64).requires_grad_()
    if args.expert_bias:
        layer.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, 8))
    weight = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    results = []
    for run in (layer, lambda x: slowly(layer, x)):
        y = run(x)
        inputs = {"x": x, **dict(layer.named_parameters())}
        gradients = torch.autograd.grad((y * weight).sum(), list(inputs.values()), allow_unused=True)
        results.append({"y": y, **dict(zip(inputs, gradients, strict=True))})
    for name, wanted in results[1].items():
        got = results[0][name]
        if wanted is None:  # normalized over a single expert, its score has no say
            wanted = torch.zeros_like(got)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10 * wanted.abs().max().item(), msg=name)


def test_rows_of_an_expert_stay_in_the_order_of_the_tokens():
    order = sort_by_expert(torch.tensor([[2, 0], [0, 2], [3, 2]]), 5)
    assert order.copies.tolist() == [1, 2, 0, 3, 5, 4]
    assert order.rows.tolist() == [2, 0, 1, 3, 5, 4]
    assert order.sizes.tolist() == [2, 0, 3, 1, 0]


def test_all_tokens_to_one_expert():
    layer, x = made(dataclasses.replace(ARGS, top_k=1)), tokens()
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
    router, x = made(args).router, tokens()
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
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ARGS, **change)


# -- load and balance -------------------------------------------------------------------------------------------------

SMALL = dataclasses.replace(
    DEEPSEEK["debugmodel"],
    dim=32,
    n_layers=3,
    n_heads=2,
    vocab_size=64,
    ffn_dim=32,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    expert_dim=16,
    aux_loss_weight=0.1,
)


def small(scale=1.0, **change):
    model = Deepseek(dataclasses.replace(SMALL, **change))
    initialize(model, 0, model.init_rule)
    balance.set_aux_loss_scale(model, scale)
    return model


def words(batch=4, length=16):
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(0))


def step(model, batch):
    model(batch).square().sum().backward()
    totals = [router.aux_loss.item() for router in balance.routers(model).values()]
    return {clean_name(n): p.grad for n, p in model.named_parameters()}, balance.take_load(model)[1], totals


def keep_nothing(context, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


def recompute(model):
    for name in model.layers:
        model.layers[name] = checkpoint_wrapper(model.layers[name], early_stop=False)


def recompute_selectively(model):
    for name in model.layers:
        context = partial(create_selective_checkpoint_contexts, keep_nothing)
        model.layers[name] = checkpoint_wrapper(model.layers[name], context_fn=context, early_stop=False)


def compiled(model):
    for block in model.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)


def compiled_and_recompute(model):
    recompute(model)
    compiled(model)


@pytest.mark.parametrize("change", [recompute, recompute_selectively, compiled, compiled_and_recompute])
def test_load_and_loss_are_counted_once(change):
    """With the gradients equal too, the auxiliary one among them."""
    torch._dynamo.reset()
    gradients, load, losses = step(small(), words())
    assert load.sum(-1).tolist() == [4 * 16 * 3] * 2
    model = small()
    change(model)
    other_gradients, other_load, other_losses = step(model, words())
    assert torch.equal(load, other_load) and losses == pytest.approx(other_losses, rel=1e-6)
    for name, gradient in gradients.items():
        # the compiler fuses and reorders float32
        torch.testing.assert_close(
            other_gradients[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item(), msg=name
        )


def test_nothing_is_counted_in_evaluation_nor_for_experts_that_were_chosen_before():
    model = small().eval()
    model(words())
    layers, load = balance.take_load(model)
    assert layers == ["layers.1", "layers.2"] and not load.any()
    router, x = made(ARGS).router, tokens()
    ids, weights = router(x)
    assert router.load.sum() == 60
    again, same_weights = router(x, ids)
    assert again is ids and torch.equal(weights, same_weights) and router.load.sum() == 60


def test_load_adds_up_until_it_is_taken():
    model = small()
    for part in words().chunk(2):
        model(part)
    _, both = balance.take_load(model)
    assert not balance.take_load(model)[1].any()
    model(words())
    assert torch.equal(balance.take_load(model)[1], both)


def test_the_bias_moves_against_the_load():
    router = Router(dataclasses.replace(ARGS, expert_bias=True))
    router.update_bias(torch.tensor([0, 1, 2, 3, 3, 3, 3, 9]), 0.5)
    # the mean is 3: up for three, down for one, moved by their mean of 0.125
    assert router.expert_bias.tolist() == [0.375] * 3 + [-0.125] * 4 + [-0.625]
    router.update_bias(torch.full((8,), 7), 0.5)
    assert router.expert_bias.tolist() == [0.375] * 3 + [-0.125] * 4 + [-0.625]


def test_the_bias_evens_out_a_skewed_problem():
    """64 experts, of which a few are liked by all tokens: within 400 steps of 0.002 none has 1.1 times the mean."""
    args = dataclasses.replace(ARGS, n_experts=64, top_k=4, score="sigmoid", expert_bias=True)
    router = Router(args).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.gate.weight.normal_(std=0.3, generator=generator)
        router.gate.weight[:, 0] = torch.linspace(-1, 1, 64)

    def load(samples):
        x = torch.randn(1, samples, 16, generator=generator)
        x[..., 0] = 1  # the same for all tokens
        router.load.zero_()
        router(x)
        return router.load.clone()

    def peak():
        counts = load(65536).double()  # an expert's share of 4096 is known to 1.6 %
        return (counts.max() / counts.mean()).item()

    assert peak() > 3
    for _ in range(400):
        router.update_bias(load(4096), 0.002)
    assert peak() < 1.1


def test_biases_move_by_the_load_of_all_ranks_at_the_models_rate():
    model = small(bias_rate=0.25)
    load = torch.arange(16).view(2, 8)
    balance.update_biases(model, load)
    for router in balance.routers(model).values():
        assert router.expert_bias.tolist() == [0.25] * 4 + [-0.25] * 4
    without = small(expert_bias=False, score="softmax")
    balance.update_biases(without, load)
    assert not any("bias" in name for name in without.state_dict())


def test_the_auxiliary_loss_is_that_of_the_papers():
    """alpha sum_e f_e P_e of each sequence, averaged over tokens, with the gradient that autograd finds."""
    for score in ("softmax", "sigmoid"):
        args = dataclasses.replace(ARGS, score=score, aux_loss_weight=0.3)
        router, x = made(args, dtype=torch.float64).router, tokens(4, 10, dtype=torch.float64).requires_grad_()
        valid = 40  # tokens of the world
        router.aux_scale = torch.tensor(1 / valid)
        ids, weights = router(x)
        (got,) = torch.autograd.grad((weights * 0).sum(), x)
        scores = router.scores(x)
        shares = scores / scores.sum(-1, keepdim=True)
        losses = []
        for sequence in range(4):
            chosen = ids.view(4, 10, 3)[sequence]
            f = torch.stack([(chosen == e).sum() for e in range(8)]) * 8 / (3 * 10)
            losses.append(0.3 * (f * shares[sequence].mean(0)).sum())
        mean = torch.stack(losses).mean()  # sequences are equally long
        (wanted,) = torch.autograd.grad(mean, x)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)  # 1 / 40 was given in float32
        assert router.aux_loss.item() / valid == pytest.approx(mean.item(), rel=1e-6)


def test_the_auxiliary_loss_does_not_depend_on_microbatches_or_the_ranks_of_a_sequence():
    args = dataclasses.replace(ARGS, score="sigmoid", aux_loss_weight=0.3)

    def gradient(pieces, counts=None):
        router = made(args, dtype=torch.float64).router
        router.aux_scale = torch.tensor(1 / 40)
        if counts is not None:
            balance.set_sequence_sum(nn.ModuleDict({"moe": nn.ModuleDict({"router": router})}), lambda local: counts)
        for piece in pieces:
            _, weights = router(piece)
            (weights * 0).sum().backward()
        return router.gate.weight.grad, router.aux_loss

    x = tokens(4, 10, dtype=torch.float64)
    whole, loss = gradient([x])
    parts, sum_of_losses = gradient(x.chunk(2))
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(sum_of_losses, loss)
    # two ranks with half of the tokens of each sequence, which know the counts of all
    router = made(args, dtype=torch.float64).router
    router.aux_scale = torch.tensor(0.0)
    ids, _ = router(x)
    counts = F.one_hot(ids.view(4, 30), 8).sum(1)
    halves, sum_of_losses = gradient(x.chunk(2, dim=1), counts)
    torch.testing.assert_close(halves, whole)
    torch.testing.assert_close(sum_of_losses, loss)


def test_the_auxiliary_loss_needs_its_scale():
    layer = made(dataclasses.replace(ARGS, aux_loss_weight=0.1))
    with pytest.raises(AssertionError, match="set_aux_loss_scale"):
        layer(tokens())
    layer.eval()(tokens())


def test_metrics_of_the_load():
    model = small()
    load = torch.tensor([[3, 3, 3, 3, 3, 3, 3, 3], [24, 0, 0, 0, 0, 0, 0, 0]])
    for rate, router in zip((0.0, 0.25), balance.routers(model).values(), strict=True):
        router.update_bias(load[1], rate)
    values = {name: value.item() for name, value in balance.metrics(model, load).items()}
    assert values == pytest.approx({"load_max": 8, "load_max_mean": 4.5, "entropy": 0.5, "bias_range": 0.5})
    assert balance.metrics(nn.Linear(2, 2), torch.zeros(0, 0)) == {}
    assert balance.take_load(nn.Linear(2, 2))[0] == []


def test_a_router_that_is_not_finite_is_named():
    model = small()
    model(words())
    assert balance.not_finite(model) == []
    with torch.no_grad():
        model.layers["2"].moe.router.gate.weight[1, 1] = torch.nan
    logits = model(words())
    assert not logits.isfinite().any()
    assert balance.not_finite(model) == ["layers.2"]
    assert balance.not_finite(model) == []


# -- buffers ----------------------------------------------------------------------------------------------------------


def test_buffers_leave_the_meta_device_with_their_values_and_keep_their_type():
    with torch.device("meta"):
        layer = MoE(dataclasses.replace(ARGS, expert_bias=True))
    layer = layer.to(torch.bfloat16)
    torch.use_deterministic_algorithms(True)  # fills what is empty with NaN or the largest number
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
