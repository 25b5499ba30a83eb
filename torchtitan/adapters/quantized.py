"""LoRA on quantized matrices, in one of several forms (nf4.py, int8.py).

A packed matrix is a few frozen integer parameters, which FSDP gathers and tensor parallel shards like the matrix
itself. It is unpacked on use, once in forward and once in backward, and never stored.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.adapters.low_rank import LoRASettings, LowRankLinear, add_low_rank_output
from torchtitan.core.tensor_storage import Store
from torchtitan.models.layers import autocast_dtype


class Quantizer(Protocol):
    """A quantized form of a matrix [out, in], which packs each row independently, with at least one number per row.

    A rank that packs some rows, or some blocks of every row, has to get the same bits as the full matrix has there.
    """

    parameter_names: tuple[str, ...]
    """Names of the parameters. The first holds codes [out, in / n], the last one number per row [out]."""

    def empty_parameters(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return the parameters of a matrix [outputs, inputs], on the meta device."""

    def block_size(self, *parts: torch.Tensor) -> int:
        """Return how many weights of a row are packed together, given a rank's parameters.

        These are shards of tensors of `like`'s shapes.
        """

    def quantize(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack float32 [out, blocks, block]; `row` [out]: the largest magnitude of each full row."""

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in], rounded once."""


class QuantizedLinear(LowRankLinear):
    """A LowRankLinear with its `weight` packed into parameters with the form's names."""

    quantizer: Quantizer

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        super().add_low_rank_parameters(settings)
        self.dtype, device = self.weight.dtype, self.weight.device
        del self.weight
        for name, like in zip(
            self.quantizer.parameter_names,
            self.quantizer.empty_parameters(self.out_features, self.in_features),
            strict=True,
        ):
            parameter = nn.Parameter(torch.empty_like(like, device=device), requires_grad=False)
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (getattr(self, name) for name in self.quantizer.parameter_names)
        y = _QuantizedMatmul.apply(x.flatten(0, -2), self.quantizer, *parts)
        return add_low_rank_output(self, x, y if self.bias is None else y + self.bias.to(y.dtype))

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        placements = super().tensor_placements(role, default)
        usual = {"column": Shard(0), "head": Shard(0), "row": Shard(1)}.get(role, Replicate())
        row_name = self.quantizer.parameter_names[-1]
        for name in self.quantizer.parameter_names:
            placements[name] = (Replicate(), Replicate()) if name == row_name and role == "row" else (usual, usual)
        return placements

    def stores(self) -> dict[str, Store]:
        return {"weight": QuantizedWeight(self)}


class _QuantizedMatmul(torch.autograd.Function):
    """Compute x W^T for a packed W. Backward unpacks it again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        # A single *inputs: with more parameters than that, the compiler miscounts and takes the context for an input.
        x, quantizer, *packed = inputs
        ctx.save_for_backward(*packed)
        ctx.quantizer, ctx.types = quantizer, (x.dtype, autocast_dtype(x.device.type) or x.dtype)
        return F.linear(x.to(ctx.types[1]), quantizer.dequantize(*packed, dtype=ctx.types[1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        no_grads = (None,) * (1 + len(ctx.quantizer.parameter_names))
        if not ctx.needs_input_grad[0]:
            return None, *no_grads
        input_dtype, dtype = ctx.types
        return (grad.to(dtype) @ ctx.quantizer.dequantize(*ctx.saved_tensors, dtype=dtype)).to(input_dtype), *no_grads


class QuantizedWeight:
    """Writes and reads the matrix of a QuantizedLinear; each rank handles its shard."""

    def __init__(self, linear: QuantizedLinear):
        self.linear, self.quantizer = linear, linear.quantizer
        self.packed = linear.quantizer.parameter_names
        self.shape = (linear.out_features, linear.in_features)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """Return this rank's local tensors."""
        parts = (getattr(self.linear, name).detach() for name in self.packed)
        return [part.to_local() if isinstance(part, DTensor) else part for part in parts]

    @property
    def _codes(self) -> torch.Tensor:
        return getattr(self.linear, self.packed[0])

    def empty(self) -> torch.Tensor:
        local = self._parameters[0]
        columns = local.shape[1] * self.linear.in_features // self._codes.shape[1]
        return self._like_codes(local.new_empty((local.shape[0], columns), dtype=self.linear.dtype))

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        for part, packed in zip(self._parameters, self._pack(values), strict=True):
            part.copy_(packed)

    @torch.no_grad()
    def holds(self, values: torch.Tensor) -> bool:
        """Return True if packing `values` gives the stored codes.

        One code in a thousand may differ, as another device rounds differently.
        """
        agree = self._pack(values.to(self.linear.dtype))[0] == self._parameters[0]
        return agree.float().mean().item() >= 0.999

    def _pack(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = self._codes
        block = self.quantizer.block_size(*self._parameters)
        local = (values.to_local() if isinstance(values, DTensor) else values).float().unflatten(1, (-1, block))
        row = local.abs().amax((-1, -2))
        if isinstance(codes, DTensor):
            for axis, placement in enumerate(codes.placements):
                if placement.is_shard(1):  # the ranks of this axis share these rows
                    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=codes.device_mesh.get_group(axis))
        return self.quantizer.quantize(local, row)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """Return the matrix [out, in] as used in computation, laid out over the ranks like `empty`."""
        return self._like_codes(self.quantizer.dequantize(*self._parameters, dtype=self.linear.dtype))

    def _like_codes(self, local: torch.Tensor) -> torch.Tensor:
        codes = self._codes
        if not isinstance(codes, DTensor):
            return local
        kwargs = dict(run_check=False, shape=torch.Size(self.shape), stride=(self.shape[1], 1))
        return DTensor.from_local(local, codes.device_mesh, codes.placements, **kwargs)
