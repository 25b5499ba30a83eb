"""Scaled rotary embeddings of every family that has them, against transformers.

Compares frequencies, logits and gradients, and converts config.json in both directions.
"""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.hf_parity import build, compare, configs, twin
from tests.support.tiny_decoders import LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE
from torchtitan.models.llama.model import HF as LLAMA_HF
from torchtitan.models.llama.model import Llama
from torchtitan.models.mistral.model import HF as MISTRAL_HF
from torchtitan.models.mistral.model import Mistral
from torchtitan.models.qwen2.model import HF as QWEN2_HF
from torchtitan.models.qwen2.model import Qwen2
from torchtitan.models.qwen3.model import HF as QWEN3_HF
from torchtitan.models.qwen3.model import Qwen3
from torchtitan.models.qwen3_moe.model import HF as QWEN3_MOE_HF
from torchtitan.models.qwen3_moe.model import Qwen3MoE
from torchtitan.models.sizes import RopeScaling

KINDS = ("linear", "ntk", "yarn", "llama3")


class Family(NamedTuple):
    model: type
    args: Any
    hf: Any
    hf_class: type
    config: type


FAMILIES = {
    "llama": Family(Llama, LLAMA["llama3.1"], LLAMA_HF, LlamaForCausalLM, LlamaConfig),
    "mistral": Family(Mistral, MISTRAL["window"], MISTRAL_HF, MistralForCausalLM, MistralConfig),
    "qwen2": Family(Qwen2, QWEN2["plain"], QWEN2_HF, Qwen2ForCausalLM, Qwen2Config),
    "qwen3": Family(Qwen3, QWEN3["plain"], QWEN3_HF, Qwen3ForCausalLM, Qwen3Config),
    "qwen3_moe": Family(Qwen3MoE, QWEN3_MOE["published"], QWEN3_MOE_HF, Qwen3MoeForCausalLM, Qwen3MoeConfig),
}
EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))


def stretched(family, kind):
    read = {"original_max_seq_len": 32} if kind in ("llama3", "yarn") else {}
    return dataclasses.replace(family.args, rope_scaling=RopeScaling(4.0, kind=kind, **read))


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_stretching_equal_transformers(family, kind):
    """Frequencies to 1e-6, logits and gradients, of a model that transformers reads off the config that is written."""
    args = stretched(family, kind)
    model = build(family.model, args)
    hf_model = twin(family.hf_class, family.config, model, family.hf)
    turned = hf_model.model.rotary_emb
    # eight rounded operations in float32 each; ntk is written as another theta, which is rounded once more
    torch.testing.assert_close(
        model.kinds[0].rotary.frequencies(torch.device("cpu")), turned.inv_freq, rtol=1e-6, atol=0
    )
    assert model.kinds[0].rotary.magnitude == pytest.approx(turned.attention_scaling, rel=1e-12)
    assert (model.kinds[0].rotary.magnitude != 1) == (kind == "yarn")
    compare(model, hf_model, family.hf, 4e-6, length=100)
    plain = (
        build(family.model, dataclasses.replace(args, rope_scaling=None))
        .kinds[0]
        .rotary.frequencies(torch.device("cpu"))
    )
    assert not torch.equal(plain, model.kinds[0].rotary.frequencies(torch.device("cpu")))


def test_ntk_is_what_transformers_calls_dynamic_at_one_length():
    """At `length` with factor f and a model of m tokens, theta grows by (f length / m - f + 1) to the d / (d - 2)."""
    family = FAMILIES["llama"]
    args, length = stretched(family, "ntk"), 2 * 32 - 32 // 4  # where 4 * length / 32 - 3 is 4
    hf_config = LLAMA_HF.config_to_hf(args) | {"rope_theta": args.rope_theta, "max_position_embeddings": 32}
    hf_config["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](LlamaConfig(**hf_config), "cpu", length)
    ours = build(Llama, args).kinds[0].rotary.frequencies(torch.device("cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_stretching_go_both_ways(family, kind, tmp_path):
    args = stretched(family, kind)
    for stored in configs(args, family.hf, family.config, tmp_path):
        read = family.hf.config.args_from_config(stored)
        if kind == "ntk":  # another theta, to whoever reads it
            theta = args.rope_scaling.theta(args.rope_theta, args.head_dim)
            assert read.rope_scaling is None and read.rope_theta == theta
        else:
            assert read.rope_scaling == args.rope_scaling and read.rope_theta == args.rope_theta
