"""Matrices of 4 or 8 bits with a scale for each block, as many models are published.

A weight is its code times the scale of its block, and times a scale of the matrix where there is one. Codes are
float8_e4m3fn, int8, or 4 bits, of which a byte holds two, the first in the lower bits: floats with a sign, two bits of
exponent and one of mantissa (e2m1) in U8, and integers plus 8 in I32, where codes of 8 bits are integers plus 128.

Sources: DeepSeek V3 (arXiv:2412.19437, section 3.3) for blocks of rows and columns; NVIDIA's NVFP4, a scale in float8
for 16 numbers; the formats of compressed-tensors and of ModelOpt, by what their libraries write.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan.models.hf.mxfp4 import VALUES
from torchtitan.models.hf.packed import READABLE_DTYPES, PackedFormat, TensorFiles
from torchtitan.models.hf.quantization import (
    COMPRESSED,
    FLOAT8,
    FLOATS,
    FP8,
    INT8,
    INTEGERS,
    BlockSize,
    Quantization,
)

IN_ELEMENT = {FLOAT8: (1,), INT8: (1,), FLOATS: (2,), INTEGERS: (8, 4)}
"""Codes in an element of a stored type."""
SCALE_TYPES = (*READABLE_DTYPES, FLOAT8, "F8_E8M0")
CACHE_SCALES = ("q_scale", "k_scale", "v_scale")
ACTIVATION_SCALES = ("activation_scale", "input_scale", "input_global_scale", "output_scale", *CACHE_SCALES)
"""Scales of activations and of caches of inference, which training has no use for."""


def scales_shape(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix of this shape."""
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


@dataclass(frozen=True)
class PackedCodes:
    """Stored codes, several in an element; slicing reads and decodes only the elements of the slice."""

    stored: Any  # as returned by safetensors' get_slice
    in_element: int

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """Return a slice [rows, columns] in float32."""
        rows, columns = spans
        first = columns.start // self.in_element
        elements = self.stored[rows, slice(first, -(-columns.stop // self.in_element))]
        codes = elements.contiguous().view(torch.uint8)
        if self.in_element != 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        start = first * self.in_element
        codes = codes[:, columns.start - start : columns.stop - start]
        if elements.dtype == torch.uint8:
            return torch.tensor(VALUES)[codes.int()]
        return codes.float() - (128 if self.in_element == 4 else 8)


@dataclass(frozen=True)
class Dequantized:
    """A stored matrix and its scales; slicing reads and dequantizes only the slice.

    `factor`, `divisor`: numbers that all scales are multiplied with, or divided by.
    """

    weight: Any  # both as returned by safetensors' get_slice
    scales: Any
    block: BlockSize
    factor: float | torch.Tensor = 1.0
    divisor: float | torch.Tensor = 1.0
    dtype: torch.dtype = torch.float32

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """Return a slice [rows, columns] in float32."""
        first = [span.start // size for span, size in zip(spans, self.block, strict=True)]
        last = [-(-span.stop // size) for span, size in zip(spans, self.block, strict=True)]
        scales = self.scales[slice(first[0], last[0]), slice(first[1], last[1])].float() * self.factor / self.divisor
        for dim, (span, size) in enumerate(zip(spans, self.block, strict=True)):
            # the file may hold any size; limiting it to the matrix does not change the quotient
            blocks = torch.arange(span.start, span.stop) // min(size, span.stop) - first[dim]
            scales = scales.index_select(dim, blocks)
        return self.weight[spans].float() * scales


class ScaledMatrices(PackedFormat):
    """Matrices with further tensors, whose names are the weight's and an end."""

    def __init__(self, quantization: Quantization):
        super().__init__(quantization)
        self.blocks, self.types, self.method = quantization.blocks, quantization.types, quantization.method
        self.scales_end = "_scale_inv" if self.method == FP8 else "_scale"
        self.scale_end = "_global_scale" if self.method == COMPRESSED else "_scale_2"

    def parts(self, name: str, names: Collection[str]) -> list[str]:
        module = name.removesuffix("weight")
        parent = f"{module.rstrip('.').rpartition('.')[0]}."
        ends = ["", "_packed", "_shape", self.scales_end, self.scale_end]
        further = [f"{module}{end}" for end in ACTIVATION_SCALES] + [f"{parent}{end}" for end in CACHE_SCALES]
        parts = [part for part in (*(name + end for end in ends), *further) if part in names]
        return parts if name in parts or f"{name}_packed" in parts else [name, *parts]

    def faults(self, name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str] | None:
        stored, scales = self._stored(name, tensors), name + self.scales_end
        if faults := [fault for part in self.parts(name, tensors.files) if (fault := tensors.absence(part))]:
            return faults
        dtype, stored_shape = tensors.header(stored)
        if dtype not in IN_ELEMENT or len(shape) != 2:
            is_scaled = scales in tensors.files and dtype not in IN_ELEMENT
            return [f"{scales} is there, but {name} is stored as {dtype} instead of {FLOAT8}"] * is_scaled or None
        if dtype not in self.types:
            allowed = ", ".join(self.types) or "none of few bits"
            return [f"{stored} is stored as {dtype}; by the quantization_config allowed are {allowed}"]
        if not self._in_element(stored, shape, tensors):
            return [f"{stored} has shape {stored_shape}, {dtype}, the model's is {shape}"]
        if scales not in tensors.files:
            return [f"{name} is stored as {dtype}, but its scales, {scales}, are missing"]
        return self._faults_of_scales(name, shape, tensors)

    def _faults_of_scales(self, name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str]:
        faults, scales, scale = [], name + self.scales_end, name + self.scale_end
        dtype, scales_size = tensors.header(scales)
        if self._block(name, shape, tensors) is None:
            sizes = (f"blocks of {_described(block)} make {allowed_scales(shape, block)[0]}" for block in self.blocks)
            faults.append(f"{scales} has shape {scales_size}, {' or '.join(sizes)}")
        if dtype not in SCALE_TYPES:
            faults.append(f"{scales} is stored as {dtype}; readable are {', '.join(SCALE_TYPES)}")
        if dtype == FLOAT8 and scale not in tensors.files:
            faults.append(f"{scales} is stored as {FLOAT8}, but the scale of the matrix, {scale}, is missing")
        if scale in tensors.files and tensors.header(scale) not in (("F32", ()), ("F32", (1,))):
            faults.append(f"{scale} is {tensors.header(scale)}; allowed: one number of F32")
        size = f"{name}_shape"
        if size not in tensors.files and tensors.header(self._stored(name, tensors))[0] == INTEGERS:
            faults.append(f"{size} is missing")
        if size in tensors.files and (size_in_file := tensors.slice(size)[...].tolist()) != [*shape]:
            faults.append(f"{size} is {size_in_file}, the model's is {[*shape]}")
        return faults

    def open(self, name: str, tensors: TensorFiles) -> Dequantized | None:
        stored = self._stored(name, tensors)
        codes = tensors.slice(stored)
        if codes.get_dtype() not in IN_ELEMENT:
            return None
        shape = self._shape(name, tensors)
        block, scales = self._block(name, shape, tensors), tensors.slice(name + self.scales_end)
        assert block is not None
        if len(scales.get_shape()) < 2:
            scales = scales[...].reshape(1, 1)
        if (in_element := self._in_element(stored, shape, tensors)) != 1:
            codes = PackedCodes(codes, in_element)
        if (scale_name := name + self.scale_end) not in tensors.files:
            return Dequantized(codes, scales, block)
        scale = tensors.slice(scale_name)[...].reshape(())
        return Dequantized(codes, scales, block, **{"divisor" if self.method == COMPRESSED else "factor": scale})

    @staticmethod
    def _stored(name: str, tensors: TensorFiles) -> str:
        return f"{name}_packed" if f"{name}_packed" in tensors.files else name

    def _shape(self, name: str, tensors: TensorFiles) -> tuple[int, ...]:
        """Return the shape of the matrix that its tensors state."""
        if f"{name}_shape" in tensors.files:
            return tuple(tensors.slice(f"{name}_shape")[:].tolist())
        dtype, (rows, elements) = tensors.header(self._stored(name, tensors))
        return rows, elements * IN_ELEMENT[dtype][0]

    @staticmethod
    def _in_element(stored: str, shape: tuple[int, ...], tensors: TensorFiles) -> int:
        """Return how many codes of a matrix an element of the stored tensor has; 0 if none fits."""
        dtype, stored_shape = tensors.header(stored)
        fitting = (size for size in IN_ELEMENT[dtype] if stored_shape == (shape[0], -(-shape[1] // size)))
        return next(fitting, 0)

    def _block(self, name: str, shape: tuple[int, ...], tensors: TensorFiles) -> BlockSize | None:
        """Return the block size that gives the shape of the stored scales."""
        _, stored_shape = tensors.header(name + self.scales_end)
        fitting = (block for block in self.blocks if stored_shape in allowed_scales(shape, block))
        block = next(fitting, None)
        return block and (block[0] or shape[0], block[1] or shape[1])


def allowed_scales(shape: tuple[int, ...], block: BlockSize) -> list[tuple[int, ...]]:
    """Return the shapes that the scales of a matrix may have; a block's length of 0 stands for all rows or columns."""
    lengths = (block[0] or shape[0], block[1] or shape[1])
    return [scales_shape(shape, lengths), *([(), (1,)] if block == (0, 0) else [])]


def _described(block: BlockSize) -> str:
    return f"({block[0] or 'all rows'}, {block[1] or 'all columns'})"
