"""Steps of GaLore on matrices."""

import torch
from torch import nn

from tests.support.random_tensors import random
from torchtitan.optimizers.build import build_optimizers

ADAM = dict(beta1=0.9, beta2=0.999, eps=1e-8)


class Matrix(nn.Module):
    def __init__(self, *shape, bias=0):
        super().__init__()
        self.weight = nn.Parameter(random(*shape, dtype=torch.float64))
        if bias:
            self.bias = nn.Parameter(random(bias, seed=5, dtype=torch.float64))


def build_galore(model, name="GaLore", lr=0.01, decay=0.1, **options):
    """Build an optimizer, GaLore by default, for all parameters of a model."""
    adafactor_beta2 = {"beta2": 0.95} if options.get("inner") == "adafactor" else {}
    settings = dict(shared=ADAM | adafactor_beta2, weight_decay=decay, options=options)
    return build_optimizers([model], name=name, lr=lr, **settings).optimizers[0]


def take_steps(model, optimizer, steps=5, gradient=lambda step, p: random(*p.shape, seed=step, dtype=p.dtype)):
    """Take optimizer steps with gradients of a function of (step, parameter); return the model."""
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = gradient(step, parameter)
        optimizer.step()
    return model
