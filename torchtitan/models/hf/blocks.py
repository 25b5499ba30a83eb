"""Weights in 8 bits with a scale for each block, in which DeepSeek V3 is published (arXiv:2412.19437, section 3.3).

Beside a matrix in float8_e4m3fn stands another one of the same name and `_scale_inv`, with one number for each block of
weight_block_size rows and columns, those at the edges being smaller. A weight is its 8 bits times its block's number.
"""

from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.models.hf.config import Block

FP8 = "F8_E4M3"


def scales_name(name: str) -> str:
    return f"{name}_scale_inv"


def scales_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


@dataclass(frozen=True)
class Dequantized:
    """A stored matrix and its scales, of which only what a slice needs is read."""

    weight: Any  # both as safetensors' get_slice gives them
    scales: Any
    block: Block

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """float32"""
        first = [span.start // size for span, size in zip(spans, self.block, strict=True)]
        last = [-(-span.stop // size) for span, size in zip(spans, self.block, strict=True)]
        scales = self.scales[slice(first[0], last[0]), slice(first[1], last[1])].float()
        for dim, (span, size) in enumerate(zip(spans, self.block, strict=True)):
            # a size comes from the file, and may be any: no larger than the matrix, it divides to the same
            blocks = torch.arange(span.start, span.stop) // min(size, span.stop) - first[dim]
            scales = scales.index_select(dim, blocks)
        return self.weight[spans].float() * scales
