"""Weights of few bits in published folders, dequantized slice by slice as they are read.

A format knows by names and dtypes which tensors hold a weight together; all others are plain. Folders are only read
in these formats, never written.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchtitan.models.hf.quantization import Quantization

READABLE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFiles(Protocol):
    """The tensors of a folder's files, as `Shards` of hf/load.py reads them."""

    files: Mapping[str, str]

    def header(self, name: str) -> tuple[str, tuple[int, ...]]: ...
    def slice(self, name: str) -> Any: ...
    def absence(self, name: str) -> str: ...
    def plain_faults(self, name: str, shape: tuple[int, ...], expected: str) -> list[str]: ...


class PackedWeight(Protocol):
    """A weight of the model's shape; slicing reads and dequantizes only the slice, in float32."""

    dtype: torch.dtype
    """The smallest type that holds the numbers exactly. What reads them whole, as a merge, has those of training."""

    def __getitem__(self, spans: Any) -> torch.Tensor: ...


AT_ONCE = 2**19
"""Numbers to dequantize at a time: the steps need several times their bytes, and run from the processor's caches."""


@dataclass(frozen=True)
class InPieces:
    """A packed weight of which some rows at a time are dequantized."""

    weight: PackedWeight

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def __getitem__(self, spans: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice in float32."""
        first, last = spans[0].start, spans[0].stop
        sizes = [span.stop - span.start for span in spans]
        step = max(1, AT_ONCE // math.prod(sizes[1:]))
        values = torch.empty(sizes)
        for start in range(first, last, step):
            end = min(start + step, last)
            values[start - first : end - first] = self.weight[(slice(start, end), *spans[1:])]
        return values


class PackedFormat:
    """The format of a folder without packed weights, from which all others inherit."""

    def __init__(self, quantization: Quantization | None = None):
        """Formats whose tensors say everything themselves need no `quantization`."""

    def parts(self, name: str, names: Collection[str]) -> list[str]:
        """Return the names of the tensors, of these `names`, that hold a weight together."""
        return [name]

    def faults(self, name: str, shape: tuple[int, ...], tensors: TensorFiles) -> list[str] | None:
        """List the faults of a packed weight of the model's shape; None if it is plain."""
        return None

    def open(self, name: str, tensors: TensorFiles) -> PackedWeight | None:
        """Return a weight without faults; None if it is plain."""
        return None
