"""A tensor that is computed when it is read, so that only one of many is on the device at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Deferred:
    """A stand-in for a tensor in a save. `make` computes its value, of `shape`, at each call."""

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    def detach(self) -> torch.Tensor:
        """Compute the value, of `shape`."""
        return self.make()


Value = torch.Tensor | Deferred
