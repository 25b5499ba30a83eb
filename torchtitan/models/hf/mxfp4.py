"""Matrices of experts in MXFP4: numbers of 4 bits with a scale for each block of 32, as gpt-oss is published.

The matrices [E, in, out] of E experts are two tensors. `_blocks` [E, out, in / 32, 16] has two numbers in a byte, the
first in the lower bits: a sign, and an index into MAGNITUDES. `_scales` [E, out, in / 32] are exponents of 2, plus 127
(OCP Microscaling Formats, version 1.0).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.models.hf.packed import PackedFormat, TensorFiles

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
"""The numbers of 4 bits, by their bits."""
BLOCK = 32
STORED_TYPE = "U8"


def packed_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the two tensors, by name, of matrices [E, in, out]; in is a multiple of BLOCK."""
    experts, inputs, outputs = shape
    blocks = (experts, outputs, inputs // BLOCK)
    return {f"{name}_blocks": (*blocks, BLOCK // 2), f"{name}_scales": blocks}


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers [..., 32 n] of blocks [..., n, 16] and scales [..., n], exactly, in float32."""
    numbers = torch.tensor(VALUES)[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)  # [..., n, 32]
    return torch.ldexp(numbers, scales[..., None].int() - 127).flatten(-2)


@dataclass(frozen=True)
class PackedExperts:
    """Stored matrices [E, in, out]; slicing reads and decodes only the slice."""

    blocks: Any  # both as returned by safetensors' get_slice
    scales: Any
    dtype: torch.dtype = torch.bfloat16

    def __getitem__(self, spans: tuple[slice, slice, slice]) -> torch.Tensor:
        """Return a slice [experts, in, out] in float32."""
        experts, inputs, outputs = spans
        first, last = inputs.start // BLOCK, -(-inputs.stop // BLOCK)
        numbers = decode(*(part[experts, outputs, slice(first, last)] for part in (self.blocks, self.scales)))
        return numbers[..., inputs.start - BLOCK * first : inputs.stop - BLOCK * first].transpose(1, 2)


class PackedStacks(PackedFormat):
    """Stacks of experts that two tensors hold if none has the name of the stack."""

    def parts(self, name: str, names: Collection[str]) -> list[str]:
        packed = [*packed_shapes(name, (0, 0, 0))]
        return packed if name not in names and any(part in names for part in packed) else [name]

    def faults(self, name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str] | None:
        if name in tensors.files:
            return None
        if len(shape) != 3 or shape[1] % BLOCK:
            return [f"{name} is in blocks of {BLOCK} rows, but the model's is {shape}"]
        faults = []
        for part, expected in packed_shapes(name, shape).items():
            if fault := tensors.absence(part):
                faults.append(fault)
                continue
            dtype, stored_shape = tensors.header(part)
            if (dtype, stored_shape) != (STORED_TYPE, expected):
                faults.append(f"{part} is {stored_shape} of {dtype}, the model's is {expected} of {STORED_TYPE}")
        return faults

    def open(self, name: str, tensors: TensorFiles) -> PackedExperts | None:
        return None if name in tensors.files else PackedExperts(*map(tensors.slice, packed_shapes(name, (0, 0, 0))))
