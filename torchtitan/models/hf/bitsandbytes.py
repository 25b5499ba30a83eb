"""Matrices that bitsandbytes packed in 4 or 8 bits, as folders for QLoRA are published (arXiv:2305.14314, section 3).

4 bits: a matrix [out, in] is one row of numbers, two in a byte, the first in the higher bits. Each is an index into
`weight.quant_map`, times the scale of its block, of usually 64. The scales, `weight.absmax`, are floats, or bytes that
are packed likewise: an index into `weight.nested_quant_map`, times the `weight.nested_absmax` of 256 scales, plus an
offset. Sizes are JSON in the bytes of a tensor whose name ends with the kind, nf4 or fp4. The bytes may be stored as a
type of more bytes, which FSDP can then shard.

8 bits: int8 [out, in], times a float of each row over 127, `SCB` (arXiv:2208.07339, section 2).
"""

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys
from torchtitan.models.hf.packed import PackedFormat, TensorFiles

STATES = tuple(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *STATES)
"""Ends of the names of the tensors that belong to 4 bits."""
STATE_KEYS = DeclaredKeys(
    used=frozenset(("quant_type", "blocksize", "shape", "nested_blocksize", "nested_offset")),
    harmless=frozenset(("dtype", "nested_dtype")),
)
MOST_STATE_BYTES = 4096
STORAGE = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}
"""Bytes of the types that 4-bit numbers are stored as."""


def row_names(name: str) -> tuple[str, str]:
    """Return the names of the row scales, and of the layout, of a matrix in 8 bits."""
    return f"{name.removesuffix('weight')}SCB", f"{name}_format"


@dataclass(frozen=True)
class PackedState:
    """Sizes of a matrix in 4 bits. `nested_block`: scales that share one scale; 0 if scales are floats."""

    shape: tuple[int, ...]
    block: int
    nested_block: int = 0
    nested_offset: float = 0.0

    @classmethod
    def parse(cls, content: bytes) -> "PackedState":
        """Raises ValueError for anything else than what bitsandbytes writes."""
        state = json.loads(content.decode())
        if not isinstance(state, dict):
            raise ValueError("it is no table")
        try:
            STATE_KEYS.check(state, "it", "convert the weights to bfloat16 first")
        except JobError as error:
            raise ValueError(str(error)) from None
        shape, block, nested = state.get("shape"), state.get("blocksize"), state.get("nested_blocksize", 0)
        offset = state.get("nested_offset", 0.0)
        sizes = [*shape, block, nested] if isinstance(shape, list) else [None]
        if any(type(size) is not int or size < 0 for size in sizes) or block < 8 or block % 8:
            raise ValueError(f"shape = {shape!r}, blocksize = {block!r}, nested_blocksize = {nested!r}")
        if type(offset) not in (int, float) or not math.isfinite(offset):
            raise ValueError(f"nested_offset = {offset!r}")
        return cls(tuple(shape), block, nested, float(offset))


@dataclass(frozen=True)
class FourBits:
    """A matrix in 4 bits; slicing reads and dequantizes only the blocks of its rows."""

    state: PackedState
    codes: Any  # as returned by safetensors' get_slice
    scales: Any
    levels: torch.Tensor
    nested_scales: torch.Tensor
    nested_levels: torch.Tensor
    dtype: torch.dtype = torch.float32

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """Return a slice [rows, columns] in float32."""
        rows, columns = spans
        width, block = self.state.shape[1], self.state.block
        first, last = rows.start * width, rows.stop * width
        start, end = first // block, -(-last // block)
        in_element = 2 * STORAGE[self.codes.get_dtype()]  # numbers of a stored element; they divide a block
        elements = slice(start * block // in_element, -(-min(end * block, math.prod(self.state.shape)) // in_element))
        codes = self.codes[elements].flatten().view(torch.uint8)
        values = self.levels[torch.stack((codes >> 4, codes & 15), dim=-1).flatten().int()]
        values = F.pad(values, (0, (end - start) * block - len(values))).view(-1, block)  # the last block may be short
        values = (values * self._block_scales(start, end)[:, None]).flatten()
        return values[first - start * block : last - start * block].view(-1, width)[:, columns]

    def _block_scales(self, start: int, end: int) -> torch.Tensor:
        """Return the scales of blocks, float32 [end - start]."""
        scales = self.scales[slice(start, end)]
        if not self.state.nested_block:
            return scales.float()
        nested = self.nested_scales[torch.arange(start, end) // self.state.nested_block]
        return self.nested_levels[scales.int()] * nested + self.state.nested_offset


@dataclass(frozen=True)
class EightBits:
    """A matrix in 8 bits with a scale for each row; slicing reads and dequantizes only the slice."""

    codes: Any  # both as returned by safetensors' get_slice
    scales: Any
    dtype: torch.dtype = torch.float32

    def __getitem__(self, spans: tuple[slice, slice]) -> torch.Tensor:
        """Return a slice [rows, columns] in float32."""
        return self.codes[spans] * self.scales[spans[0]].float()[:, None] * (1 / 127)


class BitsAndBytes(PackedFormat):
    """Matrices of linear layers, of which the names of further tensors say that they are packed."""

    def parts(self, name: str, names: Collection[str]) -> list[str]:
        return [name, *(part for part in (*(name + end for end in PARTS), *row_names(name)) if part in names)]

    def faults(self, name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str] | None:
        parts = self.parts(name, tensors.files)[1:]
        if faults := [fault for part in parts if (fault := tensors.absence(part))]:
            return faults
        if row_names(name)[0] in parts:
            return self._faults_of_rows(name, shape, tensors)
        return self._faults_of_blocks(name, shape, tensors) if parts else None

    @staticmethod
    def _faults_of_rows(name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str]:
        scales, layout = row_names(name)
        if len(shape) != 2:
            return [f"{scales} is there, but {name} is no matrix: the model's has shape {shape}"]
        expected: dict[str, tuple[str, tuple[int, ...]]] = {name: ("I8", shape), scales: ("F32", shape[:1])}
        if layout in tensors.files:
            expected[layout] = ("U8", ())
        faults = _differences(expected, tensors)
        if not faults and layout in tensors.files and (number := int(tensors.slice(layout)[...])):
            faults.append(f"{layout} is {number}; allowed: 0, rows one after the other")
        return faults

    @staticmethod
    def _faults_of_blocks(name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str]:
        try:
            state = _state(name, tensors)
        except ValueError as error:
            return [f"{name} is in 4 bits of a form that is not read: {error}"]
        if state.shape != shape or len(shape) != 2:
            return [f"{name} has shape {state.shape}, the model's is {shape}"]
        (dtype, _), count = tensors.header(name), math.prod(shape)
        if dtype not in STORAGE:
            return [f"{name} is in 4 bits, stored as {dtype}; allowed are {', '.join(STORAGE)}"]
        blocks = -(-count // state.block)
        expected: dict[str, tuple[str, tuple[int, ...]]] = {
            name: (dtype, (-(-count // (2 * STORAGE[dtype])), 1)),
            f"{name}.absmax": ("U8" if state.nested_block else "F32", (blocks,)),
            f"{name}.quant_map": ("F32", (16,)),
        }
        if state.nested_block:
            expected[f"{name}.nested_absmax"] = ("F32", (-(-blocks // state.nested_block),))
            expected[f"{name}.nested_quant_map"] = ("F32", (256,))
        return _differences(expected, tensors)

    def open(self, name: str, tensors: TensorFiles) -> FourBits | EightBits | None:
        parts = self.parts(name, tensors.files)[1:]
        if not parts:
            return None
        codes, scales = tensors.slice(name), row_names(name)[0]
        if scales in parts:
            return EightBits(codes, tensors.slice(scales))
        nested = [f"{name}.nested_absmax", f"{name}.nested_quant_map"]
        state, none = _state(name, tensors), torch.empty(0)
        tables = [tensors.slice(part)[:] if state.nested_block else none for part in nested]
        return FourBits(state, codes, tensors.slice(f"{name}.absmax"), tensors.slice(f"{name}.quant_map")[:], *tables)


def _state(name: str, tensors: TensorFiles) -> PackedState:
    """Return the sizes of a matrix in 4 bits. Raises ValueError if they cannot be read."""
    states = [name + end for end in STATES if name + end in tensors.files]
    if len(states) != 1:
        raise ValueError(f"of {', '.join(name + end for end in STATES)} there are {len(states)}")
    dtype, shape = tensors.header(states[0])
    if dtype != "U8" or len(shape) != 1 or shape[0] > MOST_STATE_BYTES:
        raise ValueError(f"{states[0]} is {shape} of {dtype}; allowed: at most {MOST_STATE_BYTES} of U8")
    return PackedState.parse(bytes(tensors.slice(states[0])[:].tolist()))


def _differences(expected: dict[str, tuple[str, tuple[int, ...]]], tensors: TensorFiles) -> list[str]:
    """List the tensors that are missing, or of another dtype or shape than expected."""
    faults = [f"{part} is missing" for part in expected if part not in tensors.files]
    for part, (dtype, shape) in expected.items():
        if part in tensors.files and (header := tensors.header(part)) != (dtype, shape):
            faults.append(f"{part} is {header[1]} of {header[0]}, the model's is {shape} of {dtype}")
    return faults
