"""Parameters that a model keeps in another form than the one in which they are drawn, saved and published: a matrix
packed into few bits. Who fills a model asks for such names here and writes through a store.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import torch
from torch import nn

from torchtitan.initialization import Init, clean_name, draw


class Store(Protocol):
    """Of one parameter of the plain model."""

    packed: tuple[str, ...]
    """The names, in the module, of what it is kept in."""
    shape: tuple[int, ...]
    """Of the plain parameter, whole."""

    def empty(self) -> torch.Tensor:
        """A tensor to be filled: of the plain parameter's shape, laid out over the ranks as what it is kept in."""

    def write(self, values: torch.Tensor) -> None:
        """Take what was filled in, of the shape that `empty` gave."""

    def read(self) -> torch.Tensor:
        """The plain parameter as it is computed with, of the shape that `empty` gives and laid out so."""

    def holds(self, values: torch.Tensor) -> bool:
        """Whether these, of a model on one device and of `shape`, are what `write` was given."""


def stores(part: nn.Module) -> Iterator[tuple[str, Store]]:
    """Plain parameters of a model, or of a part of it, that are kept otherwise: their clean names, what writes them.

    A module that has such says so by `stores()`: its own name of the plain parameter -> Store.
    """
    for name, module in part.named_modules():
        if hasattr(type(module), "stores"):
            for own, store in module.stores().items():
                yield f"{clean_name(name)}.{own}", store


def draw_stores(part: nn.Module, seed: int, rule: Callable[[str], Init], names: Collection[str] | None = None) -> None:
    """What initialize() leaves to this: the initial values that the plain parameters would have, as they are kept."""
    for name, store in stores(part):
        if names is not None and name not in names:
            continue
        values = store.empty()
        draw(values, rule(name), f"{seed}/{name}")
        store.write(values)


def packed_names(part: nn.Module) -> set[str]:
    """Clean names of the parameters that are another one in its kept form."""
    return {f"{name.rpartition('.')[0]}.{own}" for name, store in stores(part) for own in store.packed}
