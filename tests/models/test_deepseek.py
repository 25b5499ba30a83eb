"""DeepSeek V2 and V3: arguments, logits and gradients against transformers, positions. See also test_hf_deepseek."""

import dataclasses
import math

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from tests.support.hf_parity import build, compare, compare_positions, exact, twin
from tests.support.tiny_decoders import DEEPSEEK, YARN
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import Constant, Normal, initialize
from torchtitan.models import SIZES
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.deepseek import YarnScaling
from torchtitan.models.deepseek.model import HF, Deepseek
from torchtitan.models.moe.layer import MoEBlock

TINY = DEEPSEEK["v3"]
THEIRS = {
    2: (DeepseekV2ForCausalLM, DeepseekV2Config, modeling_deepseek_v2),
    3: (DeepseekV3ForCausalLM, DeepseekV3Config, modeling_deepseek_v3),
}


def theirs_of(model, dtype=torch.float32):
    theirs_class, config_class, _ = THEIRS[2 if model.args.score == "softmax" else 3]
    return twin(theirs_class, config_class, model, HF, dtype)


def test_biases_of_the_largest_are_as_many_as_published():
    with torch.device("meta"):
        model = Deepseek(SIZES["deepseek"]["671B"])
    assert sum(b.numel() for name, b in model.named_buffers() if name.endswith("expert_bias")) == 14_848


def test_the_debug_model_has_the_proportions_of_the_smallest_published():
    debug, published = SIZES["deepseek"]["debugmodel"], SIZES["deepseek"]["16B"]
    for size in ("n_heads * v_head_dim", "kv_lora_rank", "n_heads * qk_nope_head_dim", "n_heads * qk_rope_head_dim"):
        one, other = (
            math.prod(getattr(args, name) for name in size.split(" * ")) / args.dim for args in (debug, published)
        )
        assert one == other, size


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_heads": 0}, "n_heads = 0: must be at least 1"),
        ({"q_lora_rank": -1}, "q_lora_rank = -1: must be 0"),
        ({"n_dense_layers": 4}, "n_dense_layers = 4 with n_layers = 3: must be from 0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: must be even"),
        ({"v_head_dim": 32}, "v_head_dim = 32: must be at most .* = 24"),
        ({"top_k": 9}, "top_k = 9 with n_experts = 8"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(TINY, **change)


# -- against transformers ---------------------------------------------------------------------------------------------


def exact_rotation(xq, xk, freqs_cis):
    """Rotate like transformers' V2, but without its detour through float32."""
    turned = []
    for x in (xq, xk):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * freqs_cis.unsqueeze(1)
        turned.append(torch.view_as_real(pairs).flatten(3))
    return turned


# float32: sums taken in another order, a few units of 2**-24 relative to the largest element
@pytest.mark.parametrize("shape", DEEPSEEK)
def test_logits_and_every_gradient_equal_transformers(shape):
    model = build(Deepseek, DEEPSEEK[shape])
    compare(model, theirs_of(model), HF, 2e-6)


@pytest.mark.parametrize("shape", DEEPSEEK)
def test_logits_and_every_gradient_equal_transformers_exactly(shape, monkeypatch):
    model = build(Deepseek, DEEPSEEK[shape], dtype=torch.float64)
    hf_model = theirs_of(model, torch.float64)
    modeling = THEIRS[2 if DEEPSEEK[shape].score == "softmax" else 3][2]
    if modeling is modeling_deepseek_v2:
        monkeypatch.setattr(modeling, "apply_rotary_emb", exact_rotation)
    with exact(modeling, model, hf_model, monkeypatch):
        compare(model, hf_model, HF, 1e-12)


@pytest.mark.parametrize("scaling", [None, YARN, YarnScaling(), YarnScaling(factor=0.5), YarnScaling(beta_fast=1.0)])
def test_frequencies_are_those_of_transformers(scaling):
    args = dataclasses.replace(SIZES["deepseek"]["671B"], rope_scaling=scaling)
    config = DeepseekV3Config(**HF.config_to_hf(args))
    hf_rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    with torch.device("meta"):
        rotary = Deepseek(dataclasses.replace(args, n_layers=1, n_dense_layers=0)).kinds[0].rotary
    ours = rotary.frequencies(torch.device("cpu"))
    torch.testing.assert_close(ours, hf_rotary.inv_freq, rtol=3e-7, atol=0)  # float32, one rounding or two
    positions = torch.tensor([[0, 5, 4000]])
    cos, sin = hf_rotary(torch.zeros(1), positions)
    expected = torch.stack((cos, sin), dim=-1)[:, :, None, :32]
    torch.testing.assert_close(rotary(positions), expected, rtol=1e-5, atol=1e-3)  # angles of 4000, in float32


def test_positions_are_understood_alike():
    model = build(Deepseek, TINY)
    compare_positions(model, theirs_of(model))


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_narrower_than_keys_are_padded_where_that_is_faster(dtype):
    length = 512 if dtype == torch.float32 else 16
    q, k, v = (torch.randn(1, 2, length, size, dtype=dtype) for size in (72, 72, 64))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    y = AttentionKernel()(q, k, v, None)
    assert y.shape == v.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # bfloat16 has 8 bits
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_experts_begin_behind_the_dense_layers():
    kinds = [isinstance(block, MoEBlock) for block in Deepseek(TINY).layers.values()]
    assert kinds == [False, False, True]


def test_initial_weights_follow_the_recipe():
    model = Deepseek(TINY)
    for name, init in {
        "layers.0.attention.kv_norm.weight": Constant(1.0),
        "layers.2.moe.router.gate.weight": Normal(0.02),
        "layers.2.moe.experts.w1": Normal(0.02),
        "layers.2.moe.experts.w2": Normal(0.02 / 6**0.5),
        "layers.2.moe.shared_experts.w3.weight": Normal(0.02 / 6**0.5),
        "layers.2.attention.wkv_a.weight": Normal(0.02),
        "layers.1.attention.wo.weight": Normal(0.02 / 2),
    }.items():
        assert model.init_rule(name) == init, name
    initialize(model, 0, model.init_rule)
    w = model.layers["2"].moe.experts.w1
    assert w.std().item() == pytest.approx(0.9866 * 0.02, rel=0.03)
    assert not torch.equal(w[0], w[1])
