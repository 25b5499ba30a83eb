"""Models with low-rank adapters, and their tensors."""

import torch

from tests.support.hf_parity import build
from torchtitan.adapters.low_rank import DoRA, LoRA
from torchtitan.core.random_draws import initialize
from torchtitan.models.spec import MODELS

KINDS = {"lora": LoRA, "dora": DoRA}


def adapter_tensors(model, adapter):
    """Return the tensors that the adapter added."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name in adapter.added_parameters}


def moved_model(family, args, options, seed=0):
    """Return an adapted model and its adapter, with every adapter tensor and bias changed from its initial value."""
    model = build(MODELS[family].build, args)
    adapter = KINDS[options.kind](options)
    adapter.install(model, MODELS[family].plan)
    initialize(model, seed, model.init_rule)
    adapter.init_from_base([model])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in adapter.added_parameters or name.endswith(".bias"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval(), adapter


def plain_copy(model, adapter, family):
    """Return a plain model with the adapted model's base weights."""
    plain = MODELS[family].build(model.args)
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if n not in adapter.added_parameters})
    return plain
