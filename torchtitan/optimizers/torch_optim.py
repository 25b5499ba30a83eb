"""Constructors of torch's optimizers that take the job's option names."""

from typing import Any

import torch


def adam(groups: list[dict[str, Any]], *, beta1: float, beta2: float, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(groups, betas=(beta1, beta2), **options)


def adamw(groups: list[dict[str, Any]], *, beta1: float, beta2: float, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, betas=(beta1, beta2), **options)
