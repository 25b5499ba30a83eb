"""QLoRA (arXiv:2305.14314): LoRA beside matrices that are kept in 4 bits (nf4.py).

A packed matrix is three frozen parameters without a gradient, of whole numbers, which FSDP gathers and tensor parallel
splits as it would the matrix. It is unpacked where it is used, once forward and once backward, and never kept.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.adapters.low_rank import LowRank, LowRankLinear, Strength, plus_learned, plus_product
from torchtitan.adapters.nf4 import pack, unpack
from torchtitan.adapters.targets import block_of
from torchtitan.models.layers import autocast_dtype
from torchtitan.stores import Store

PACKED = ("weight_codes", "weight_scales", "weight_rows")


class QuantizedLinear(LowRankLinear):
    """A LowRankLinear whose `weight` is packed into `weight_codes`, `weight_scales` and `weight_rows`."""

    def add_parameters(self, strength: Strength) -> None:
        super().add_parameters(strength)
        weight = self.weight
        self.dtype, blocks = weight.dtype, self.in_features // block_of(self.in_features)
        new = weight.detach().new_empty
        del self.weight
        sizes = {"codes": (self.out_features, self.in_features // 2), "scales": (self.out_features, blocks)}
        for name, size in sizes.items():
            self.register_parameter(f"weight_{name}", nn.Parameter(new(size, dtype=torch.uint8), requires_grad=False))
        rows = new(self.out_features, dtype=torch.int32)
        self.weight_rows = nn.Parameter(rows, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Packed.apply(x.flatten(0, -2), self.weight_codes, self.weight_scales, self.weight_rows)
        return plus_learned(self, x, y if self.bias is None else y + self.bias)

    def tensor_placements(self, role: str, whole: Placement) -> dict[str, tuple[Placement, Placement]]:
        told = super().tensor_placements(role, whole)
        lies = {"column": Shard(0), "head": Shard(0), "row": Shard(1)}.get(role, Replicate())
        for name in PACKED:
            told[name] = (Replicate(), Replicate()) if name == "weight_rows" and role == "row" else (lies, lies)
        if role not in ("column", "head", "row"):
            told |= {"lora_A": (Replicate(), whole), "lora_B": (Replicate(), whole)}
        return told

    def stores(self) -> dict[str, Store]:
        return {"weight": PackedWeight(self)}

    def merged(self) -> dict[str, torch.Tensor]:
        weight = PackedWeight(self).read()
        return {"weight": plus_product(weight, self.lora_B, self.lora_A, self.low_rank.scale)}


class _Packed(torch.autograd.Function):
    """x W^T of a packed W, which backward unpacks again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*packed)
        ctx.types = x.dtype, autocast_dtype(x.device.type) or x.dtype
        return F.linear(x.to(ctx.types[1]), unpack(*packed, ctx.types[1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        of_input, computed = ctx.types
        return (grad.to(computed) @ unpack(*ctx.saved_tensors, computed)).to(of_input), None, None, None


class PackedWeight:
    """Writes and reads the matrix of a QuantizedLinear, a rank its part of it."""

    packed = PACKED

    def __init__(self, linear: QuantizedLinear):
        self.linear = linear

    def empty(self) -> torch.Tensor:
        codes = self.linear.weight_codes.detach()
        local = codes.to_local() if isinstance(codes, DTensor) else codes
        return self._laid_out(local.new_empty((local.shape[0], 2 * local.shape[1]), dtype=self.linear.dtype))

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        codes = self.linear.weight_codes
        block = self.linear.in_features // self.linear.weight_scales.shape[1]
        local = (values.to_local() if isinstance(values, DTensor) else values).float().unflatten(1, (-1, block))
        largest = local.abs().amax(-1)
        row = largest.amax(-1)
        if isinstance(codes, DTensor):
            for axis, placement in enumerate(codes.placements):
                if placement.is_shard(1):  # the others on this axis have the rest of these rows
                    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=codes.device_mesh.get_group(axis))
        for name, packed in zip(PACKED, pack(local, largest, row), strict=True):
            parameter = getattr(self.linear, name)
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).copy_(packed)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """The matrix as it is computed with."""
        parts = (getattr(self.linear, name).detach() for name in PACKED)
        parts = [part.to_local() if isinstance(part, DTensor) else part for part in parts]
        return self._laid_out(unpack(*parts, self.linear.dtype))

    def _laid_out(self, local: torch.Tensor) -> torch.Tensor:
        codes = self.linear.weight_codes
        if not isinstance(codes, DTensor):
            return local
        shape = torch.Size((self.linear.out_features, self.linear.in_features))
        how = dict(run_check=False, shape=shape, stride=(shape[1], 1))
        return DTensor.from_local(local, codes.device_mesh, codes.placements, **how)


class QLoRA(LowRank):
    linear = QuantizedLinear
