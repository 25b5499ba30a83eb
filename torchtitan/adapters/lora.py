"""LoRA (arXiv:2106.09685), rsLoRA by its scale (arXiv:2312.03732), with restarts ReLoRA (arXiv:2307.05695), and DoRA.

ReLoRA merges the product of A and B into the frozen matrix at regular steps and starts again with a new A and B = 0, so
that many low-rank updates add up to a change of any rank. At the same time the optimizer state of A and B is reset, or
most of it.

With a period of k steps both happen after steps k + 1, 2 k + 1, ... The learning rate of these steps is exactly 0
(lr_schedules.py), so they move no weight, and the first step with new matrices has a small rate. All random
values are a function of (seed, restart, name), and the retained optimizer state is chosen over full tensors, so the
result does not depend on the parallel plan.

DoRA (arXiv:2402.09353): LoRA for the directions of a matrix's rows, with a separately trained magnitude.

The adapted matrix W + scale B A gives the directions of the rows. The magnitude is the norm of each row. It starts as
the row norms of W, so the model starts unchanged.

The row norms of the adapted matrix are recomputed in each forward and count as constant in backward (section 4.3).
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.optim import Optimizer

from torchtitan.adapters.interface import merge_shards
from torchtitan.adapters.low_rank import LoRASettings, LowRank, LowRankExperts, LowRankLinear, add_low_rank_output
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.config.sections.adapter import Relora
from torchtitan.core.initialization import Constant, Init, Uniform, clean_name, draw, local_part
from torchtitan.models.layers import autocast_off
from torchtitan.torch_internals import collectives

logger = logging.getLogger(__name__)

MATRIX_NAMES = re.compile(r"\blora_[AB]")
"""Matches the names of A and B, but not the names of learned scales."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class LoRA(LowRank):
    linear_class, experts_class = LowRankLinear, LowRankExperts

    def __init__(self, options: Options, seed: int = 0):
        super().__init__(options, seed)
        self.restarts = None if options.relora.every is None else Restarts(options.relora, seed)

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if self.restarts is not None:
            self.restarts.after_step(step, parts, optimizers)

    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        return super().metrics(parts) | {f"adapter_{name}": count for name, count in self.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.restarts is None else {"merges": self.restarts.merges, "resets": self.restarts.resets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.restarts is not None:
            self.restarts.merges, self.restarts.resets = state.get("merges", 0), state.get("resets", 0)


class Restarts:
    """The restarts of one run: their schedule, their number so far, and the reset itself."""

    def __init__(self, options: Relora, seed: int):
        self.options, self.seed = options, seed
        self.merges = self.resets = 0

    @torch.no_grad()
    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if is_due(step, self.options.every):
            self.merges += 1
            for name, module in low_rank_modules(parts):
                merge_product(module)
                restart_matrices(module, f"{self.seed}/restart {self.merges}/{name}")
        if self.options.reset != "none" and is_due(step, self.options.reset_every or self.options.every):
            self.resets += 1
            self.reset_moments(parts, optimizers)

    def reset_moments(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Zero all moments of A and B, or a fraction `prune_ratio` of them, and of no other parameter."""
        names = {
            p: clean_name(name) for part in parts for name, p in part.named_parameters() if MATRIX_NAMES.search(name)
        }
        zeros: list[torch.Tensor] = []
        elements = 0
        for optimizer in optimizers:
            for parameter in (p for p in optimizer.state if p in names):
                state = optimizer.state[parameter]
                key = f"{self.seed}/reset {self.resets}/{names[parameter]}"
                for moment, mask in self.retained_masks(state, key).items():
                    local = local_part(state[moment])[0]
                    local.mul_(mask)
                    zeros.append((local == 0).sum())
                    elements += local.numel()
                if self.options.reset_step:
                    state["step"] = state["step"] * 0
        assert len(zeros) == len(MOMENTS) * len(names), (len(zeros), len(names))
        total = int(torch.stack(zeros).sum()) if zeros else 0  # the only wait for the device
        share = 100 * total / max(elements, 1)
        logger.info(
            "restart %d: %.1f %% of the moments of %d matrices are 0 on this rank", self.resets, share, len(names)
        )

    def retained_masks(self, state: dict[str, Any], key: str) -> dict[str, torch.Tensor]:
        """Return a mask for each moment: 1 where this rank's shard of it is retained, 0 elsewhere.

        By default both share one mask, chosen by the second moment: a first moment without its second would be divided
        by nearly zero.
        """
        if self.options.mask == "joint":
            return dict.fromkeys(MOMENTS, self._retained_mask(state["exp_avg_sq"], key))
        return {moment: self._retained_mask(state[moment], f"{key}/{moment}") for moment in MOMENTS}

    def _retained_mask(self, moment: torch.Tensor, key: str) -> torch.Tensor:
        local, _, offset = local_part(moment)
        if self.options.reset == "zero":
            return torch.zeros_like(local)
        if self.options.reset == "random":
            drawn = torch.empty_like(moment, dtype=torch.float32)
            draw(drawn, Uniform(1.0), key)
            return (local_part(drawn)[0] > 2 * self.options.prune_ratio - 1).to(local.dtype)
        full_tensor = moment.full_tensor() if isinstance(moment, DTensor) else moment
        spans = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
        return largest_mask(full_tensor, self.options.prune_ratio)[spans].to(local)


def is_due(step: int, period: int | None) -> bool:
    """Return True if a restart follows this step, a 1-based number in the schedule."""
    return period is not None and step > 1 and step % period == 1


def largest_mask(values: torch.Tensor, prune_ratio: float) -> torch.Tensor:
    """Return a mask of the same shape: 0 at the floor(prune_ratio n) smallest magnitudes, 1 elsewhere.

    The number of zeros is exact, and of equal values the first are retained. (A threshold would retain none of equal
    values, and torch.quantile is limited to 2^24 elements.)
    """
    count = values.numel() - math.floor(prune_ratio * values.numel())
    order = values.float().abs().flatten().argsort(descending=True, stable=True)
    return torch.zeros(values.numel(), device=values.device).index_fill_(0, order[:count], 1.0).view(values.shape)


def low_rank_modules(parts: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, LowRankLinear | LowRankExperts):
                yield clean_name(name), module


def merge_product(module: LowRankLinear | LowRankExperts) -> None:
    """Merge A and B into the frozen matrices, in place, as optimizers and compiled graphs hold these tensors."""
    for name in module.mergeable:
        matrix = getattr(module, name)
        local_part(matrix)[0].copy_(local_part(module.merged_weight(name, matrix))[0])


def restart_matrices(module: LowRankLinear | LowRankExperts, key: str) -> None:
    """Reinitialize A and set B to zero."""
    for name, parameter in module.named_parameters(recurse=False):
        if name.startswith("lora_"):
            init = module.parameter_init(name)
            assert isinstance(init, Uniform | Constant)
            draw(parameter, init, f"{key}.{name}")


@torch.no_grad()
def adapted_row_norms(linear: Any) -> torch.Tensor:
    """Return the row norms [out] of the adapted matrix, in float32 or wider.

    `linear` may be a stand-in with a rank's weights.
    """
    dtype = torch.promote_types(linear.weight.dtype, torch.float32)
    weight, b, a = (tensor.to(dtype) for tensor in (linear.weight, linear.lora_B, linear.lora_A))
    with autocast_off(linear.weight.device.type):
        squares = torch.addmm(weight, b, a, alpha=linear.settings.scale).square().sum(1)
    if linear.rows_are_sharded:
        squares = collectives.all_reduce(squares, "sum", linear.border.group)
        squares = collectives.wait_tensor(squares)
    return squares.sqrt()


class DoRALinear(LowRankLinear):
    """A LowRankLinear with a trained row magnitude, `lora_magnitude` [out]."""

    rows_are_sharded = False  # True if each rank of the group of `border` has a part of every row

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        super().add_low_rank_parameters(settings)
        self.lora_magnitude = nn.Parameter(self.weight.detach().new_empty(self.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = add_low_rank_output(self, x, F.linear(x.flatten(0, -2), self.weight))
        if not self.settings.is_disabled:
            y = y * (self.lora_magnitude / adapted_row_norms(self)).to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def parameter_init(self, name: str) -> Init | None:
        return Constant(1.0) if name == "lora_magnitude" else super().parameter_init(name)

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        placements = super().tensor_placements(role, default)
        if role in ("column", "head"):
            placements["lora_magnitude"] = (Shard(0), Shard(0))
        elif role == "row":  # each rank scales its partial sum by it
            placements["lora_magnitude"] = (Replicate(), Partial())
            self.rows_are_sharded = True
        return placements

    @torch.no_grad()
    def init_from_base(self) -> None:
        """Initialize the trained magnitudes to the row norms of W."""
        local, _, offset = local_part(self.lora_magnitude)
        local.copy_(row_norms(self.weight).narrow(0, offset[0], local.shape[0]))

    def merged_weight(self, name: str, value: torch.Tensor) -> torch.Tensor:
        matrix = super().merged_weight(name, value)
        rows = (self.lora_magnitude, (0,)), (row_norms(matrix), (0,))
        return merge_shards(matrix, lambda shard, magnitude, norm: shard * (magnitude / norm)[:, None], *rows)


class DoRA(LowRank):
    linear_class = DoRALinear


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the row norms [out] of a matrix [out, in], in full on every rank. Every rank calls it."""
    local, shape, offset = local_part(matrix)
    squares = torch.zeros(shape[0], dtype=torch.promote_types(matrix.dtype, torch.float32), device=local.device)
    squares.narrow(0, offset[0], local.shape[0]).add_(local.to(squares.dtype).square().sum(1))
    if isinstance(matrix, DTensor):
        for axis, placement in enumerate(matrix.placements):
            if not placement.is_replicate():
                dist.all_reduce(squares, group=matrix.device_mesh.get_group(axis))
    return squares.sqrt()
