"""Histograms of a model's weights and gradients, whatever the plan: of whole tensors, one at a time on each rank."""

from collections.abc import Iterable
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.metrics.trackers.interface import Histogram
from torchtitan.process import distributed

BUCKETS = 64


def histograms_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Histogram]:
    """By tag, of what this rank's parts of the model have: `weights/NAME`, and `gradients/NAME` where there is one. All
    ranks call it, as sharded tensors are made whole; packed weights have none.
    """
    found = {}
    for name, parameter in parameters:
        if parameter.is_floating_point():
            found[f"weights/{name}"] = histogram(parameter.detach())
            if parameter.grad is not None:
                found[f"gradients/{name}"] = histogram(parameter.grad)
    return found


def of_all_ranks(found: dict[str, Histogram]) -> dict[str, Histogram]:
    """On the first rank those of all parts of a pipeline; on the others nothing."""
    if dist.get_world_size() == 1:
        return found
    gathered = distributed.gather_json({tag: asdict(histogram) for tag, histogram in found.items()})
    return {tag: Histogram(**fields) for part in gathered or () for tag, fields in part.items()}


def histogram(tensor: torch.Tensor) -> Histogram:
    """Of the values of a tensor of any shape that are finite: what is not ends the run by itself, and is told there."""
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float()
    whole = whole[whole.isfinite()]
    low, high = (float(value) for value in torch.aminmax(whole)) if whole.numel() else (0.0, 0.0)
    counts = torch.histc(whole, BUCKETS, low, high)
    limits = torch.linspace(low, high, BUCKETS + 1, dtype=torch.float64)[1:]
    squares = float(whole.double().square().sum())
    total = float(whole.double().sum())
    return Histogram(low, high, whole.numel(), total, squares, limits.tolist(), counts.long().tolist())
