"""Tensors that are computed on access, and access to parameters that a model keeps in another form.

A Deferred is computed when it is read, so that only one of many is on the device at a time. A Store represents a
parameter that is initialized, saved and published in another form than the model keeps, such as a quantized matrix.
Code that fills a model writes such a parameter through its store.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from torchtitan.core.random_draws import Init, clean_name, draw


@dataclass(frozen=True)
class Deferred:
    """A stand-in for a tensor in a save. `make` computes its value, of `shape`, at each call."""

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    def detach(self) -> torch.Tensor:
        """Compute the value, of `shape`."""
        return self.make()


Value = torch.Tensor | Deferred


class Store(Protocol):
    """Access to one parameter of the plain model."""

    packed: tuple[str, ...]
    """Names, in the module, of the tensors that represent it."""
    shape: tuple[int, ...]
    """Global shape of the plain parameter."""

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of the plain parameter's shape, sharded as its stored form."""

    def write(self, values: torch.Tensor) -> None:
        """Store values of the shape that `empty` returns."""

    def read(self) -> torch.Tensor:
        """Return the plain parameter as used in forward, with the shape and sharding of `empty`."""

    def holds(self, values: torch.Tensor) -> bool:
        """Return whether writing these values of `shape` would store the same again, for a model on one device."""


def stores(part: nn.Module) -> Iterator[tuple[str, Store]]:
    """Yield the clean name and the store of every plain parameter that a model part keeps in another form.

    Modules declare them by a method `stores()`, a mapping from the plain parameter's name in the module to its Store.
    """
    for name, module in part.named_modules():
        if hasattr(type(module), "stores"):
            for local_name, store in module.stores().items():
                yield ".".join(filter(None, (clean_name(name), local_name))), store


def draw_stores(part: nn.Module, seed: int, rule: Callable[[str], Init], names: Collection[str] | None = None) -> None:
    """Initialize the parameters that `initialize` skips, with the values that the plain parameters would have."""
    for name, store in stores(part):
        if names is not None and name not in names:
            continue
        values = store.empty()
        draw(values, rule(name), f"{seed}/{name}")
        store.write(values)


def packed_names(part: nn.Module) -> set[str]:
    """Return the clean names of the tensors that represent another parameter."""
    paths = ((name.rpartition(".")[0], store) for name, store in stores(part))
    return {".".join(filter(None, (path, packed))) for path, store in paths for packed in store.packed}
