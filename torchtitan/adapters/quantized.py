"""LoRA on quantized matrices: QLoRA (arXiv:2305.14314), in 4 bits (NF4), and LoRA on 8 bits.

A packed matrix is a few frozen integer parameters, which FSDP gathers and tensor parallel shards like the matrix
itself. It is unpacked on use, once in forward and once in backward, and never stored.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.adapters.low_rank import LoRASettings, LowRank, LowRankLinear, add_low_rank_output
from torchtitan.adapters.targets import quantization_block
from torchtitan.adapters.unpacking import nf4_codes, unpack_int8, unpack_nf4
from torchtitan.core.tensor_storage import Store
from torchtitan.models.layers import autocast_dtype

LARGEST_CODE = 127


class Quantizer(Protocol):
    """A quantized form of a matrix [out, in], which packs each row independently, with at least one number per row.

    A rank that packs some rows, or some blocks of every row, has to get the same bits as the full matrix has there.
    """

    parameter_names: tuple[str, ...]
    """Names of the parameters. The first holds codes [out, in / n], the last one number per row [out]."""

    def empty_parameters(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return the parameters of a matrix [outputs, inputs], on the meta device."""

    def block_size(self, *parts: torch.Tensor) -> int:
        """Return how many weights of a row are packed together.

        `parts`: a rank's shards of the parameters of `empty_parameters`, the first [out, in / n].
        """

    def quantize(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack float32 [out, blocks, block]; `row` [out]: the largest magnitude of each full row."""

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in], rounded once."""


class QuantizedLinear(LowRankLinear):
    """A LowRankLinear with its `weight` packed into the parameters that its quantizer names."""

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


class NF4:
    """Quantization to 4 bits.

    Each weight is one of 16 levels, the quantiles of a normal distribution, times the largest magnitude of its block of
    64. These block scales are stored in 8 bits, relative to the largest one in their row, which is a float. So a weight
    takes 1/2 + 1/64 + 4/in bytes, 0.517 at 4096 inputs.

    Blocks and their scales never cross a row of the matrix. So a rank that has some rows, or some complete blocks of
    every row, packs the same bits as the full matrix has there. (The paper groups 256 scales regardless of rows.)
    """

    parameter_names = ("weight_codes", "weight_scales", "weight_rows")

    def empty_parameters(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return codes uint8 [out, in / 2], scales uint8 [out, blocks] and row scales int32 [out].

        A byte of codes has the first weight in the high bits. Row scales are the bits of float32 values, because mixed
        precision would round floats.
        """
        codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(outputs, inputs // quantization_block(inputs), dtype=torch.uint8, device="meta")
        return codes, scales, torch.empty(outputs, dtype=torch.int32, device="meta")

    def block_size(self, *parts: torch.Tensor) -> int:
        codes, scales, _ = parts
        return 2 * codes.shape[1] // scales.shape[1]

    def quantize(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = blocks.abs().amax(-1)
        scales = (largest / row.clamp(min=torch.finfo(torch.float32).tiny)[:, None] * 255).round().clamp(max=255)
        scales = scales.to(torch.uint8)
        codes = nf4_codes(blocks, scales.float() * (row / 255)[:, None])
        return codes, scales, row.float().view(torch.int32)

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return unpack_nf4(*parts, dtype)


class NF4Linear(QuantizedLinear):
    quantizer = NF4()


class QLoRA(LowRank):
    linear_class = NF4Linear


class Int8:
    """Quantization to 8 bits.

    Each weight is an integer from -127 to 127 times a float per row, the row's largest magnitude over 127. A weight
    takes 1 + 4/in bytes; its error is at most 1/254 of its row's largest magnitude.
    """

    parameter_names = ("weight_codes", "weight_rows")

    def empty_parameters(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return codes int8 [out, in] and the bits of the float32 row scales, int32 [out].

        Mixed precision does not round integers.
        """
        codes = torch.empty(outputs, inputs, dtype=torch.int8, device="meta")
        return codes, torch.empty(outputs, dtype=torch.int32, device="meta")

    def block_size(self, *parts: torch.Tensor) -> int:
        return 1

    def quantize(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (row / LARGEST_CODE).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (blocks.flatten(1) / scale[:, None]).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
        return codes, scale.float().view(torch.int32)

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return unpack_int8(*parts, dtype)


class Int8Linear(QuantizedLinear):
    quantizer = Int8()


class Int8LoRA(LowRank):
    linear_class = Int8Linear
