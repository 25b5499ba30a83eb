"""Rotary frequencies of models that read further than they were trained on, by kind of stretching."""

import math
from typing import Any

import torch

from torchtitan.models.sizes import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> torch.Tensor:
    """Radians per position, [head_dim / 2], from 1 down to about 1 / theta. `scaling`: None, or a RopeScaling."""
    exponents = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    if scaling is None:
        return 1.0 / theta**exponents
    plain = 1.0 / scaling.theta(theta, head_dim) ** exponents
    if scaling.kind == "ntk":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return yarn(plain, theta, scaling) if scaling.kind == "yarn" else llama3(plain, scaling)


def llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """[F] -> [F]. How often each wave turns within the original context decides: below low_freq_factor stretch, above
    high_freq_factor keep.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / scaling.factor


def yarn(plain: torch.Tensor, theta: float, scaling: Any) -> torch.Tensor:
    """[F] -> [F], arXiv:2309.00071: as llama3, but blended evenly over pairs of features, between the whole ones that
    turn beta_fast and beta_slow times.
    """
    head_dim = 2 * len(plain)

    def pair(turns: float) -> float:
        """The pair of features, as a fractional index, that turns so often within the original context."""
        wavelength = scaling.original_max_seq_len / (2 * math.pi * turns)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = max(math.floor(pair(scaling.beta_fast)), 0), min(math.ceil(pair(scaling.beta_slow)), head_dim - 1)
    steps = torch.arange(len(plain), device=plain.device).float() - first
    stretch = (steps / max(last - first, 0.001)).clamp(0, 1)
    return plain / scaling.factor * stretch + plain * (1 - stretch)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What turned features are multiplied with, as longer contexts flatten attention."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
