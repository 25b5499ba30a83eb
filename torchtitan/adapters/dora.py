"""DoRA (arXiv:2402.09353): LoRA for the directions of a matrix's rows, with a separately trained magnitude.

The adapted matrix W + scale B A gives the directions of the rows. The magnitude is the norm of each row. It starts as
the row norms of W, so the model starts unchanged.

The row norms of the adapted matrix are recomputed in each forward and count as constant in backward (section 4.3).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchtitan.adapters.interface import merge_shards
from torchtitan.adapters.low_rank import LoRASettings, LowRank, LowRankLinear, add_low_rank_output
from torchtitan.core.initialization import Constant, Init, local_part
from torchtitan.models.layers import autocast_off


@torch.no_grad()
def adapted_row_norms(linear: Any) -> torch.Tensor:
    """Return the row norms [out] of the adapted matrix; `linear` may be a stand-in with a rank's weights."""
    with autocast_off(linear.weight.device.type):
        matrix = linear.weight + linear.settings.scale * (linear.lora_B @ linear.lora_A)
        squares = matrix.to(torch.promote_types(matrix.dtype, torch.float32)).square().sum(1)
    if linear.rows_are_sharded:
        squares = torch.ops._c10d_functional.all_reduce(squares, "sum", linear.border.group)
        squares = torch.ops._c10d_functional.wait_tensor(squares)
    return squares.sqrt()


class DoRALinear(LowRankLinear):
    """A LowRankLinear with a trained row magnitude, `lora_magnitude` [out]."""

    rows_are_sharded = False  # True if each rank of the group of `border` has a part of every row

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        super().add_low_rank_parameters(settings)
        self.lora_magnitude = nn.Parameter(self.weight.detach().new_empty(self.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = add_low_rank_output(self, x, F.linear(x.flatten(0, -2), self.weight))
        y = y * (self.lora_magnitude / adapted_row_norms(self)).to(y.dtype)
        return y if self.bias is None else y + self.bias

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
        matrix = super().merged_weight(name, value.to(torch.promote_types(value.dtype, torch.float32)))
        rows = (self.lora_magnitude, (0,)), (row_norms(matrix), (0,))
        merged = merge_shards(matrix, lambda shard, magnitude, norm: shard * (magnitude / norm)[:, None], *rows)
        return merged.to(value.dtype)  # rounded once


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
