"""Weights in 8 bits with a scale for each block, as DeepSeek V3 is published (arXiv:2412.19437, section 3.3).

A matrix in float8_e4m3fn comes with a second one, named with the suffix `_scale_inv`, which has one number for each
block of weight_block_size rows and columns (blocks at the edges are smaller). A weight is its 8-bit value times the
number of its block.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.models.hf.packed import PackedFormat, TensorFiles
from torchtitan.models.hf.quantization import BlockSize, Quantization

STORED_TYPE = "F8_E4M3"


def scales_name(name: str) -> str:
    """Return the name of the scales of an 8-bit matrix."""
    return f"{name}_scale_inv"


def scales_shape(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix of this shape."""
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


@dataclass(frozen=True)
class Dequantized:
    """A stored 8-bit matrix and its scales; slicing reads and dequantizes only the slice."""

    weight: Any  # both as returned by safetensors' get_slice
    scales: Any
    block: BlockSize
    dtype: torch.dtype = torch.bfloat16

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """Return a slice [rows, columns] in float32."""
        first = [span.start // size for span, size in zip(spans, self.block, strict=True)]
        last = [-(-span.stop // size) for span, size in zip(spans, self.block, strict=True)]
        scales = self.scales[slice(first[0], last[0]), slice(first[1], last[1])].float()
        for dim, (span, size) in enumerate(zip(spans, self.block, strict=True)):
            # the file may hold any size; limiting it to the matrix does not change the quotient
            blocks = torch.arange(span.start, span.stop) // min(size, span.stop) - first[dim]
            scales = scales.index_select(dim, blocks)
        return self.weight[spans].float() * scales


class BlockFP8(PackedFormat):
    def __init__(self, quantization: Quantization):
        super().__init__(quantization)
        assert quantization.block is not None
        self.block = quantization.block

    def parts(self, name: str, names: Collection[str]) -> list[str]:
        scales = scales_name(name)
        return [name, scales] if scales in names else [name]

    def faults(self, name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str] | None:
        (dtype, stored_shape), scales = tensors.header(name), scales_name(name)
        if stored_shape != shape:
            return None  # a plain one has this fault, too
        if dtype != STORED_TYPE:
            is_scaled = scales in tensors.files
            return [f"{scales} is there, but {name} is stored as {dtype} instead of {STORED_TYPE}"] * is_scaled or None
        if len(shape) != 2:
            return None
        if scales not in tensors.files:
            return [f"{name} is stored as {STORED_TYPE}, but its scales, {scales}, are missing"]
        if fault := tensors.absence(scales):
            return [fault]
        return tensors.plain_faults(scales, scales_shape(shape, self.block), f"blocks of {self.block} make")

    def open(self, name: str, tensors: TensorFiles) -> Dequantized | None:
        weight = tensors.slice(name)
        if weight.get_dtype() != STORED_TYPE:
            return None
        return Dequantized(weight, tensors.slice(scales_name(name)), self.block)
