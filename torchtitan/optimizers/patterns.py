"""Which parameters an optimizer for matrices takes, by name. No torch: `torchtitan check` asks it too."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

HIDDEN = ["*attn*", "*attention*", "*mlp*", "*feed_forward*"]
"""The matrices of the layers, by the names that families give them."""


def taken(name: str, shape: Iterable[int], patterns: Iterable[str]) -> bool:
    """`*` stands for anything in a name, dots too."""
    return len(tuple(shape)) == 2 and any(fnmatchcase(name, pattern) for pattern in patterns)
