"""Expert load, once per optimizer step, for the trainer. Models without experts give empty results.

    set_sequence_sum(model, total)                   once, if ranks have parts of the same sequences
    set_aux_loss_scale(model, 1 / valid_tokens)      before the step's first forward
    layers, load = take_load(model)                  after the last backward; then sum `load` over the ranks that have
                                                     other tokens for the same layers
    update_biases(model, load)                       before the next step
    metrics(model, load)                             when the step is logged

Tokens are counted in forward, in training, and not again when a forward is recomputed.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from torchtitan.core.initialization import clean_name
from torchtitan.models.moe.router import Router


def routers(model: nn.Module) -> dict[str, Router]:
    """Return layer name -> router, in the model's order."""
    modules = {clean_name(name): module for name, module in model.named_modules() if isinstance(module, Router)}
    return {name.removesuffix(".moe.router"): router for name, router in modules.items()}


def set_aux_loss_scale(model: nn.Module, scale: float) -> None:
    """Set the factor of the summed loss in backward: 1 / global number of valid tokens."""
    for router in routers(model).values():
        if router.aux_scale is None or router.aux_scale.device != router.load.device:
            router.aux_scale = torch.zeros((), device=router.load.device)
        router.aux_scale.fill_(scale)


def set_sequence_sum(model: nn.Module, sum_over_sequence: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Set the function that sums counts [B, E] over the ranks that share a sequence, for the auxiliary loss."""
    for router in routers(model).values():
        router.sum_over_sequence = sum_over_sequence


@torch.no_grad()
def take_load(model: nn.Module) -> tuple[list[str], torch.Tensor]:
    """Return and reset the tokens per expert since the last call, int64 [layers, E], with the layers' names."""
    router_of_layer = routers(model)
    if not router_of_layer:
        return [], torch.zeros(0, 0, dtype=torch.int64)
    load = torch.stack([router.load for router in router_of_layer.values()])
    for router in router_of_layer.values():
        router.load.zero_()
    return list(router_of_layer), load


@torch.no_grad()
def take_aux_loss(model: nn.Module) -> torch.Tensor | None:
    """Return and reset the summed auxiliary loss of all layers and tokens, a scalar; None without one."""
    with_loss = [router for router in routers(model).values() if router.args.aux_loss_weight]
    if not with_loss:
        return None
    total = torch.stack([router.aux_loss for router in with_loss]).sum()
    for router in with_loss:
        router.aux_loss.zero_()
    return total


@torch.no_grad()
def update_biases(model: nn.Module, load: torch.Tensor) -> None:
    """Update the biases by the load of all ranks, [layers, E], at the model's bias_rate."""
    for router, counts in zip(routers(model).values(), load, strict=True):
        if router.expert_bias is not None:
            router.update_bias(counts, router.args.bias_rate)


@torch.no_grad()
def metrics(model: nn.Module, load: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return metrics of the load [layers, E] over all layers with experts, all scalars.

    load_max and load_max_mean: the largest load of an expert relative to the mean (1 is even), in the worst and in the
    average layer. entropy: of the shares, 1 if even. bias_range: the largest difference between two biases of a layer.
    """
    router_of_layer = routers(model)
    if not router_of_layer:
        return {}
    load = load.double()
    shares = load / load.sum(-1, keepdim=True).clamp(min=1)
    peaks = shares.amax(-1) * load.shape[-1]
    # with a single expert, entropy and logarithm are 0, but the load is even
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / math.log(load.shape[-1]) if load.shape[-1] > 1 else shares
    biases = [router.expert_bias for router in router_of_layer.values() if router.expert_bias is not None]
    scalars = {"load_max": peaks.max(), "load_max_mean": peaks.mean(), "entropy": entropy.mean()}
    if biases:
        scalars["bias_range"] = torch.stack([bias.max() - bias.min() for bias in biases]).max()
    return scalars


def not_finite(model: nn.Module) -> list[str]:
    """Return and reset the layers, in order, with non-finite router scores since the last call.

    It synchronizes with the device.
    """
    router_of_layer = routers(model)
    layers = [name for name, router in router_of_layer.items() if router.not_finite.item()]
    for router in router_of_layer.values():
        router.not_finite.zero_()
    return layers
