"""A tensor that is made when its value is asked for, so that of many one at a time is on the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Deferred:
    """In place of a live tensor where one is written. `make`: its value, of `shape`; each call makes it again."""

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    def detach(self) -> torch.Tensor:
        """Its value, of `shape`."""
        return self.make()


Value = torch.Tensor | Deferred
