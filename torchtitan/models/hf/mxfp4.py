"""Matrices of experts in MXFP4: numbers of 4 bits with a scale for each block of 32, as gpt-oss is published.

The matrices [E, in, out] of E experts are two tensors. `_blocks` [E, out, in / 32, 16] has two numbers in a byte, the
first in the lower bits: a sign, and an index into MAGNITUDES. `_scales` [E, out, in / 32] are exponents of 2, plus 127
(OCP Microscaling Formats, version 1.0).
"""

from dataclasses import dataclass
from typing import Any

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
STORED_TYPE = "U8"


def packed_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the two tensors, by name, of matrices [E, in, out]; in is a multiple of BLOCK."""
    experts, inputs, outputs = shape
    blocks = (experts, outputs, inputs // BLOCK)
    return {f"{name}_blocks": (*blocks, BLOCK // 2), f"{name}_scales": blocks}


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers [..., 32 n] of blocks [..., n, 16] and scales [..., n], exactly, in float32."""
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    numbers = values[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)  # [..., n, 32]
    return torch.ldexp(numbers, scales[..., None].int() - 127).flatten(-2)


@dataclass(frozen=True)
class PackedExperts:
    """Stored matrices [E, in, out]; slicing reads and decodes only the slice."""

    blocks: Any  # both as returned by safetensors' get_slice
    scales: Any

    def __getitem__(self, spans: tuple[slice, slice, slice]) -> torch.Tensor:
        """Return a slice [experts, in, out] in float32."""
        experts, inputs, outputs = spans
        first, last = inputs.start // BLOCK, -(-inputs.stop // BLOCK)
        numbers = decode(*(part[experts, outputs, slice(first, last)] for part in (self.blocks, self.scales)))
        return numbers[..., inputs.start - BLOCK * first : inputs.stop - BLOCK * first].transpose(1, 2)
