"""ReLoRA (arXiv:2307.05695): every so often the learned product is added to the frozen matrix, A is drawn anew and B
set to zero, so that many small steps in few directions make a change of any rank. At the same time the optimizer
forgets what it knew of A and B, or most of it.

With periods of k steps both happen behind the steps k + 1, 2 k + 1, ...: the rate of these is exactly 0
(lr_schedules/restarts.py), so that they move no weight, and the first step with fresh matrices has a small one. All
random values are a function of (seed, restart, name), and the retained optimizer state is chosen over full tensors, so
no plan changes it.
"""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan.adapters.low_rank import LowRankExperts, LowRankLinear
from torchtitan.config.sections.adapter import Relora
from torchtitan.core.initialization import Constant, Uniform, clean_name, draw, local_part

logger = logging.getLogger(__name__)

LEARNED = re.compile(r"\blora_[AB]")
"""In names: A and B, and not how strong they are."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Restarts:
    """Of one run: when, how often so far, and what is done."""

    def __init__(self, options: Relora, seed: int):
        self.options, self.seed = options, seed
        self.merges = self.resets = 0

    @torch.no_grad()
    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if due(step, self.options.every):
            self.merges += 1
            for name, module in adapted(parts):
                merge(module)
                begin_anew(module, f"{self.seed}/restart {self.merges}/{name}")
        if self.options.reset != "none" and due(step, self.options.reset_every or self.options.every):
            self.resets += 1
            self.forget(parts, optimizers)

    def forget(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Of the moments of A and B all, or a share `prune_ratio`; of nothing else any."""
        names = {p: clean_name(name) for part in parts for name, p in part.named_parameters() if LEARNED.search(name)}
        zeros = elements = tensors = 0
        for optimizer in optimizers:
            for parameter in (p for p in optimizer.state if p in names):
                state = optimizer.state[parameter]
                key = f"{self.seed}/reset {self.resets}/{names[parameter]}"
                for moment, kept in self.kept(state, key).items():
                    local = local_part(state[moment])[0]
                    local.mul_(kept)
                    zeros, elements = zeros + int((local == 0).sum()), elements + local.numel()
                    tensors += 1
                if self.options.reset_step:
                    state["step"] = state["step"] * 0
        assert tensors == len(MOMENTS) * len(names), (tensors, len(names))
        share = 100 * zeros / max(elements, 1)
        logger.info(
            "restart %d: %.1f %% of the moments of %d matrices are 0 on this rank", self.resets, share, len(names)
        )

    def kept(self, state: dict[str, Any], key: str) -> dict[str, torch.Tensor]:
        """For each moment, 1 where this rank's part of it stays and 0 elsewhere. By default one choice for both, made
        by the second: what keeps the first without the second would be divided by nearly nothing.
        """
        if self.options.mask == "joint":
            return dict.fromkeys(MOMENTS, self._kept(state["exp_avg_sq"], key))
        return {moment: self._kept(state[moment], f"{key}/{moment}") for moment in MOMENTS}

    def _kept(self, moment: torch.Tensor, key: str) -> torch.Tensor:
        local, _, offset = local_part(moment)
        if self.options.reset == "zero":
            return torch.zeros_like(local)
        if self.options.reset == "random":
            drawn = torch.empty_like(moment, dtype=torch.float32)
            draw(drawn, Uniform(1.0), key)
            return (local_part(drawn)[0] > 2 * self.options.prune_ratio - 1).to(local.dtype)
        whole = moment.full_tensor() if isinstance(moment, DTensor) else moment
        spans = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
        return largest(whole, self.options.prune_ratio)[spans].to(local)


def due(step: int, period: int | None) -> bool:
    """Behind this step, the 1-based number of it in the schedule."""
    return period is not None and step > 1 and step % period == 1


def largest(values: torch.Tensor, prune_ratio: float) -> torch.Tensor:
    """Of any shape: 1 at the largest magnitudes, 0 at floor(prune_ratio n) others: by count, of equal ones the first.
    (A threshold keeps none of equal values, and torch.quantile ends at 2^24.)
    """
    count = values.numel() - math.floor(prune_ratio * values.numel())
    order = values.float().abs().flatten().argsort(descending=True, stable=True)
    return torch.zeros(values.numel(), device=values.device).index_fill_(0, order[:count], 1.0).view(values.shape)


def adapted(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, LowRankLinear | LowRankExperts):
                yield clean_name(name), module


def merge(module: LowRankLinear | LowRankExperts) -> None:
    """Add what has been learned to the frozen matrices, in place: optimizers and compiled graphs hold these tensors."""
    for name in module.folds:
        matrix = getattr(module, name)
        local_part(matrix)[0].copy_(local_part(module.folded(name, matrix))[0])


def begin_anew(module: LowRankLinear | LowRankExperts, key: str) -> None:
    """A as it begins, B zero."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("lora_"):
            init = module.own_init(name)
            assert isinstance(init, Uniform | Constant)
            draw(parameter, init, f"{key}.{name}")
