"""Families of gated decoders against transformers: logits, every gradient, names, folders and configs."""

import dataclasses
import sys
from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    compare,
    configs,
    exact,
    refuse_config,
    save_and_load,
    twin,
)
from tests.support.tiny_decoders import GATED
from torchtitan.adapters.low_rank import LoRA
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.spec import MODELS

FAMILIES = list(dict.fromkeys(shape.split()[0] for shape in GATED))
NEW = [family for family in FAMILIES if family != "llama3"]


def parts(shape):
    """Return the family's spec, the sizes, and transformers' model and config of a shape."""
    spec, args = MODELS[shape.split()[0]], GATED[shape]
    config = spec.hf.config_to_hf(args)
    return spec, args, getattr(transformers, config["architectures"][0]), CONFIG_MAPPING[config["model_type"]]


# sums taken in another order: a few units of 2**-24, or of 2**-53, relative to the largest element
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 4e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", GATED)
def test_logits_and_every_gradient_equal_transformers(shape, dtype, tolerance, monkeypatch):
    spec, args, reference, config_class = parts(shape)
    model = build(spec.build, args, dtype=dtype)
    hf_model = twin(reference, config_class, model, spec.hf, dtype)
    exactly = dtype == torch.float64
    with exact(sys.modules[reference.__module__], model, hf_model, monkeypatch) if exactly else nullcontext():
        compare(model, hf_model, spec.hf, tolerance)


@pytest.mark.parametrize("shape", GATED)
def test_folders_and_names_go_both_ways(shape, tmp_path):
    spec, args, reference, _ = parts(shape)
    check_names_convert_both_ways(build(spec.build, args), spec.hf)
    save_and_load(spec.build, args, spec.hf, reference, tmp_path, 10000)


@pytest.mark.parametrize("family, flavor", [(family, flavor) for family in NEW for flavor in SIZES[family]])
def test_configs_go_both_ways_and_through_transformers(family, flavor, tmp_path):
    args, hf = SIZES[family][flavor], MODELS[family].hf
    config_class = CONFIG_MAPPING[hf.config_to_hf(args)["model_type"]]
    for stored in configs(args, hf, config_class, tmp_path):
        assert hf.config.args_from_config(stored) == args


@pytest.mark.parametrize("shape", GATED)
def test_factors_of_low_rank_adapters_are_trained(shape):
    """All linear layers of the blocks have them, and each gets a gradient."""
    spec, args, *_ = parts(shape)
    model = build(spec.build, args)
    LoRA(Options(rank=2, target=["all-linear"])).install(model, spec.plan)
    for parameter in (p for name, p in model.named_parameters() if "lora_b" in name.lower()):
        torch.nn.init.normal_(parameter)
    model(torch.arange(12)[None]).square().sum().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(args.block_linears(0)) * args.n_layers
    assert all(p.grad.any() for p in trained.values())


@pytest.mark.parametrize(
    "shape, change, message",
    [
        ("smollm3", {"no_rope_interval": 0}, "no_rope_interval = 0: must be at least 1"),
        ("llama3 biased", {"head_width": 7}, "head_width = 7: must be even"),
        ("llama3 biased", {"head_width": 0}, "head_dim = 0: must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused(shape, change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(GATED[shape], **change)


@pytest.mark.parametrize(
    "shape, change, message",
    [
        ("smollm3", {"no_rope_layers": [0, 1, 0]}, r"no_rope_layers = \[0, 1, 0\]; allowed: 3 entries"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window = True, but this model"),
        ("llama3 biased", {"mlp_bias": 1}, "mlp_bias = 1; allowed: true or false"),
        *((shape, {"hidden_act": "relu"}, "hidden_act = 'relu', but this model only has") for shape in GATED),
        *((shape, {"attention_sinks": 4}, "attention_sinks") for shape in GATED),
    ],
)
def test_a_config_of_another_model_is_refused(shape, change, message):
    spec, args, *_ = parts(shape)
    refuse_config(args, spec.hf, change, message)
