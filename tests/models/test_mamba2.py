"""Mixers of Mamba 2, of which test_gated.py compares models with transformers; here in Falcon-H1's."""

import dataclasses
import logging
import math

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.hf_parity import build, tokens_for
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import GATED
from torchtitan.adapters import peft_folder
from torchtitan.adapters.low_rank import LoRA
from torchtitan.adapters.targets import misfits
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.random_draws import Constant, Normal, Uniform
from torchtitan.models.falcon_h1.model import HF, PLAN, FalconH1
from torchtitan.parallelisms.tensor_parallel import apply_tensor_parallel

TINY = GATED["falcon_h1"]


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
