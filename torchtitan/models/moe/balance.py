"""What the trainer does with the experts' load, once per optimizer step. Models without experts have empty answers.

    set_sequence_sum(model, total)                   once, where ranks have parts of the same sequences
    set_aux_loss_scale(model, 1 / valid_tokens)      before the step's first forward
    layers, load = take_load(model)                  after the last backward; then add `load` over the ranks that have
                                                     other tokens for the same layers
    update_biases(model, load)                       before the next step
    metrics(model, load)                             when the step is logged

The counts are made in forward, in training, and not again when a forward is recomputed.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from torchtitan.core.initialization import clean_name
from torchtitan.models.moe.router import Router


def routers(model: nn.Module) -> dict[str, Router]:
    """Layer's name -> its router, in the model's order."""
    found = {clean_name(name): module for name, module in model.named_modules() if isinstance(module, Router)}
    return {name.removesuffix(".moe.router"): router for name, router in found.items()}


def set_aux_loss_scale(model: nn.Module, scale: float) -> None:
    """What the sum of the tokens' losses is multiplied by before backward: 1 / global number of valid tokens."""
    for router in routers(model).values():
        if router.aux_scale is None or router.aux_scale.device != router.load.device:
            router.aux_scale = torch.zeros((), device=router.load.device)
        router.aux_scale.fill_(scale)


def set_sequence_sum(model: nn.Module, sum_over_sequence: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Where a sequence's tokens are on several ranks: what adds up their counts [B, E], for the auxiliary loss."""
    for router in routers(model).values():
        router.sum_over_sequence = sum_over_sequence


@torch.no_grad()
def take_load(model: nn.Module) -> tuple[list[str], torch.Tensor]:
    """Layers with experts, and the tokens that went to each of their experts since the last call, [layers, E] int64."""
    found = routers(model)
    if not found:
        return [], torch.zeros(0, 0, dtype=torch.int64)
    load = torch.stack([router.load for router in found.values()])
    for router in found.values():
        router.load.zero_()
    return list(found), load


@torch.no_grad()
def take_aux_loss(model: nn.Module) -> torch.Tensor | None:
    """The sum of the auxiliary losses of all layers and tokens since the last call, a scalar; None without them."""
    found = [router for router in routers(model).values() if router.args.aux_loss_weight]
    if not found:
        return None
    total = torch.stack([router.aux_loss for router in found]).sum()
    for router in found:
        router.aux_loss.zero_()
    return total


@torch.no_grad()
def update_biases(model: nn.Module, load: torch.Tensor) -> None:
    """Move the biases by the load of all ranks, [layers, E]; the rate is the model's."""
    for router, counts in zip(routers(model).values(), load, strict=True):
        if router.expert_bias is not None:
            router.update_bias(counts, router.args.bias_rate)


@torch.no_grad()
def metrics(model: nn.Module, load: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of all layers with experts, scalars: the largest load of an expert in units of the mean (1 is even), that of the
    worst and of the average layer; the entropy of the shares, 1 when even; the reach of the biases, largest minus
    smallest of a layer.
    """
    found = routers(model)
    if not found:
        return {}
    load = load.double()
    shares = load / load.sum(-1, keepdim=True).clamp(min=1)
    peaks = shares.amax(-1) * load.shape[-1]
    # of one expert the entropy is 0, and so is its logarithm, but its load is even
    entropy = -torch.special.xlogy(shares, shares).sum(-1) / math.log(load.shape[-1]) if load.shape[-1] > 1 else shares
    biases = [router.expert_bias for router in found.values() if router.expert_bias is not None]
    named = {"load_max": peaks.max(), "load_max_mean": peaks.mean(), "entropy": entropy.mean()}
    if biases:
        named["bias_range"] = torch.stack([bias.max() - bias.min() for bias in biases]).max()
    return named


def not_finite(model: nn.Module) -> list[str]:
    """Layers, first to last, whose router has seen scores that are not finite since the last call. Reads the device."""
    found = routers(model)
    bad = [name for name, router in found.items() if router.not_finite.item()]
    for router in found.values():
        router.not_finite.zero_()
    return bad
