"""Falcon-H1: what it has beyond the gated decoders, which test_gated.py compares."""

import dataclasses
import logging
import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import FalconH1Config

from tests.support.hf_parity import build, tokens_for
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import GATED
from torchtitan.adapters import peft_folder
from torchtitan.adapters.low_rank import LoRA
from torchtitan.adapters.targets import misfits
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.random_draws import Constant, Normal, Uniform
from torchtitan.models import SIZES
from torchtitan.models.falcon_h1.model import HF, PLAN, FalconH1
from torchtitan.parallelisms.tensor_parallel import apply_tensor_parallel

TINY = GATED["falcon_h1"]
PUBLISHED = {  # tiiuae/Falcon-H1-0.5B-Instruct
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}


def test_a_published_config_is_read():
    assert HF.config.args_from_config(PUBLISHED) == SIZES["falcon_h1"]["0.5B"]
    assert {flavor: round(args.num_parameters / 1e9, 2) for flavor, args in SIZES["falcon_h1"].items()} == {
        "debugmodel": 0.01,
        "0.5B": 0.52,
        "1.5B-Deep": 1.55,
        "7B": 7.59,
        "34B": 33.64,
    }


def test_widths_that_follow_from_other_keys_are_read():
    """The mixer's width from its factor of the model's, and its heads' from their number."""
    config = HF.config_to_hf(TINY) | {"mamba_d_ssm": None, "mamba_d_head": "auto"}
    read = HF.config.args_from_config(config)
    assert read == dataclasses.replace(TINY, ssm_head_dim=16)
    without = {key: value for key, value in config.items() if key not in ("mlp_multipliers", "ssm_multipliers")}
    assert HF.config.args_from_config(without) == HF.config.args_from_config(
        config | {"mlp_multipliers": None, "ssm_multipliers": [1.0] * 5}
    )


def test_whole_factors_of_a_job_are_exported_as_transformers_reads_them():
    whole = dict(key_multiplier=1, gate_multiplier=2, ssm_z_multiplier=3)  # as model.overrides may have them
    config = HF.config_to_hf(dataclasses.replace(TINY, **whole))
    FalconH1Config(**config)
    assert HF.config.args_from_config(config) == dataclasses.replace(TINY, **whole)


def test_initial_values():
    model = FalconH1(TINY)
    assert model.init_rule("layers.0.attention.mixer.decay.log_rate") == Uniform(math.log(16))
    ones = ("decay.step_bias", "skip.weight", "ssm_norm.weight")
    assert {model.init_rule(f"layers.0.attention.mixer.{name}") for name in ones} == {Constant(1.0)}
    assert model.init_rule("layers.0.attention.mixer.conv_b.weight") == Normal(0.5)
    assert model.init_rule("layers.0.attention.mixer.conv_b.bias") == Constant(0.0)
    assert model.init_rule("layers.0.attention.mixer.ssm_out.weight") == Normal(0.02 / 2**0.5)


def outputs_and_gradients(model, args):
    logits = model(tokens_for(args))
    logits.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return logits.detach(), {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in gradients.items()
    }


def of_four_ranks(args):
    model = build(FalconH1, args, dtype=torch.float64)
    apply_tensor_parallel(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), PLAN, loss_parallel=False)
    return outputs_and_gradients(model, args)


def test_ranks_that_share_a_group_equal_one_device():
    """Two ranks have the heads of a group, and half of the features that it norms."""
    args = dataclasses.replace(TINY, n_kv_heads=4)
    logits, gradients = outputs_and_gradients(build(FalconH1, args, dtype=torch.float64), args)
    for ours, of_ranks in run_ranks(4, of_four_ranks, args):
        torch.testing.assert_close(ours, logits)
        torch.testing.assert_close(of_ranks, gradients)


def test_the_rank_of_an_adapter_may_exceed_the_number_of_heads():
    """Their steps are a few rows of one matrix in Hugging Face's models."""
    options = Options(kind="lora", rank=6, target=["*ssm_dt"])
    assert not list(misfits(TINY.attention_linears(0), options))
    assert list(misfits(TINY.attention_linears(0), dataclasses.replace(options, target=["*ssm_b"], rank=11)))
    model = build(FalconH1, TINY)
    LoRA(options).install(model, PLAN)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    model(tokens_for(TINY)).square().sum().backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * TINY.n_layers and all(parameter.grad.any() for parameter in trained)


def test_an_adapter_that_peft_refuses_warns(tmp_path, caplog):
    names = ("layers.0.attention.mixer.ssm_x", "layers.0.attention.mixer.ssm_out")
    for name in names:
        widths = {
            "lora_A": (2, TINY.attention_linears(0)[name[9:]][1]),
            "lora_B": (TINY.attention_linears(0)[name[9:]][0], 2),
        }
        state = {f"{name}.{kind}": torch.zeros(shape) for kind, shape in widths.items()}
        with caplog.at_level(logging.WARNING):
            peft_folder.save(tmp_path / name, state, Options(rank=2), HF.tensor_map(TINY))
        assert ("peft refuses them" in caplog.text) == name.endswith("ssm_out")
