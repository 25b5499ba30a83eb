"""Tests of expert load balancing: counts, biases, and the auxiliary loss."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.tiny_moe import ARGS, build_moe, tokens
from torchtitan.core.random_draws import clean_name, initialize
from torchtitan.models import SIZES
from torchtitan.models.deepseek import DEEPSEEK
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.moe import MoEDecoderArgs
from torchtitan.models.moe import router as balance
from torchtitan.models.moe.router import Router

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


def small_model(scale=1.0, **change):
    """Build a tiny DeepSeek model with this scale of the auxiliary loss."""
    model = Deepseek(dataclasses.replace(SMALL, **change))
    initialize(model, 0, model.init_rule)
    balance.set_aux_loss_scale(model, scale)
    return model


def token_ids(batch=4, length=16):
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(0))


def step(model, batch):
    """Run forward and backward; return gradients, expert load, and auxiliary losses."""
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
    """Recomputed and compiled layers give the same gradients, including the auxiliary loss's."""
    torch._dynamo.reset()
    gradients, load, losses = step(small_model(), token_ids())
    assert load.sum(-1).tolist() == [4 * 16 * 3] * 2
    model = small_model()
    change(model)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):  # as parallelize.py sets it
        other_gradients, other_load, other_losses = step(model, token_ids())
    assert torch.equal(load, other_load) and losses == pytest.approx(other_losses, rel=1e-6)
    for name, gradient in gradients.items():
        # the compiler fuses and reorders float32
        torch.testing.assert_close(
            other_gradients[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item(), msg=name
        )


def test_nothing_is_counted_in_evaluation_nor_for_experts_that_were_chosen_before():
    model = small_model().eval()
    model(token_ids())
    layers, load = balance.take_load(model)
    assert layers == ["layers.1", "layers.2"] and not load.any()
    router, x = build_moe(ARGS).router, tokens()
    ids, weights = router(x)
    assert router.load.sum() == 60
    same_ids, same_weights = router(x, ids)
    assert same_ids is ids and torch.equal(weights, same_weights) and router.load.sum() == 60


def test_load_adds_up_until_it_is_taken():
    model = small_model()
    for part in token_ids().chunk(2):
        model(part)
    _, both = balance.take_load(model)
    assert not balance.take_load(model)[1].any()
    model(token_ids())
    assert torch.equal(balance.take_load(model)[1], both)


def test_the_bias_moves_against_the_load():
    router = Router(dataclasses.replace(ARGS, expert_bias=True))
    router.update_bias(torch.tensor([0, 1, 2, 3, 3, 3, 3, 9]), 0.5)
    # the mean is 3: up for three, down for one, moved by their mean of 0.125
    assert router.expert_bias.tolist() == [0.375] * 3 + [-0.125] * 4 + [-0.625]
    router.update_bias(torch.full((8,), 7), 0.5)
    assert router.expert_bias.tolist() == [0.375] * 3 + [-0.125] * 4 + [-0.625]


def test_the_bias_evens_out_a_skewed_problem():
    """All tokens prefer a few of 64 experts; after 400 updates of 0.002 none has 1.1 times the mean load."""
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
    model = small_model(bias_rate=0.25)
    load = torch.arange(16).view(2, 8)
    balance.update_biases(model, load)
    for router in balance.routers(model).values():
        assert router.expert_bias.tolist() == [0.25] * 4 + [-0.25] * 4
    without = small_model(expert_bias=False, score="softmax")
    balance.update_biases(without, load)
    assert not any("bias" in name for name in without.state_dict())


def test_the_auxiliary_loss_is_that_of_the_papers():
    """alpha sum_e f_e P_e of each sequence, averaged over tokens, with the gradient that autograd finds."""
    for score in ("softmax", "sigmoid"):
        args = dataclasses.replace(ARGS, score=score, aux_loss_weight=0.3)
        router, x = build_moe(args, dtype=torch.float64).router, tokens(4, 10, dtype=torch.float64).requires_grad_()
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
        (expected,) = torch.autograd.grad(mean, x)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)  # 1 / 40 was given in float32
        assert router.aux_loss.item() / valid == pytest.approx(mean.item(), rel=1e-6)


def test_the_auxiliary_loss_does_not_depend_on_microbatches_or_the_ranks_of_a_sequence():
    args = dataclasses.replace(ARGS, score="sigmoid", aux_loss_weight=0.3)

    def gradient(pieces, counts=None):
        router = build_moe(args, dtype=torch.float64).router
        router.aux_scale = torch.tensor(1 / 40)
        if counts is not None:
            balance.set_sequence_sum(nn.ModuleDict({"moe": nn.ModuleDict({"router": router})}), lambda local: counts)
        for piece in pieces:
            _, weights = router(piece)
            (weights * 0).sum().backward()
        return router.gate.weight.grad, router.aux_loss

    x = tokens(4, 10, dtype=torch.float64)
    full_batch, loss = gradient([x])
    parts, sum_of_losses = gradient(x.chunk(2))
    torch.testing.assert_close(parts, full_batch)
    torch.testing.assert_close(sum_of_losses, loss)
    # two ranks with half of the tokens of each sequence, which know the counts of all
    router = build_moe(args, dtype=torch.float64).router
    router.aux_scale = torch.tensor(0.0)
    ids, _ = router(x)
    counts = F.one_hot(ids.view(4, 30), 8).sum(1)
    halves, sum_of_losses = gradient(x.chunk(2, dim=1), counts)
    torch.testing.assert_close(halves, full_batch)
    torch.testing.assert_close(sum_of_losses, loss)


@pytest.mark.parametrize("family", [*SIZES])
def test_a_mean_over_layers_with_experts_has_some(family):
    """Families whose factor divides by their number have experts in all layers."""
    for args in SIZES[family].values():
        if getattr(args, "mean_aux_loss", False):
            assert type(args).expert_layers is MoEDecoderArgs.expert_layers and args.expert_layers == args.n_layers > 0


def test_the_auxiliary_loss_needs_its_scale():
    layer = build_moe(dataclasses.replace(ARGS, aux_loss_weight=0.1))
    with pytest.raises(AssertionError, match="set_aux_loss_scale"):
        layer(tokens())
    layer.eval()(tokens())


def test_metrics_of_the_load():
    model = small_model()
    load = torch.tensor([[3, 3, 3, 3, 3, 3, 3, 3], [24, 0, 0, 0, 0, 0, 0, 0]])
    for rate, router in zip((0.0, 0.25), balance.routers(model).values(), strict=True):
        router.update_bias(load[1], rate)
    values = {name: value.item() for name, value in balance.metrics(model, load).items()}
    assert values == pytest.approx({"load_max": 8, "load_max_mean": 4.5, "entropy": 0.5, "bias_range": 0.5})
    assert balance.metrics(model, torch.tensor([[24], [24]]))["entropy"] == 1  # one expert is never uneven
    assert balance.metrics(nn.Linear(2, 2), torch.zeros(0, 0)) == {}
    assert balance.take_load(nn.Linear(2, 2))[0] == []


def test_a_router_that_is_not_finite_is_named():
    model = small_model()
    model(token_ids())
    assert balance.not_finite(model) == []
    with torch.no_grad():
        model.layers["2"].moe.router.gate.weight[1, 1] = torch.nan
    logits = model(token_ids())
    assert not logits.isfinite().any()
    assert balance.not_finite(model) == ["layers.2"]
    assert balance.not_finite(model) == []
