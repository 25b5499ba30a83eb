"""Which parameters an optimizer for matrices takes, by name. No torch: `torchtitan check` asks it too."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

HIDDEN = ["*attn*", "*attention*", "*mlp*", "*feed_forward*"]
"""The matrices of the layers, by the names that families give them."""


def taken(name: str, shape: Iterable[int], patterns: Iterable[str]) -> bool:
    """`*` stands for anything in a name, dots too."""
    return len(tuple(shape)) == 2 and any(fnmatchcase(name, pattern) for pattern in patterns)


def sides(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a parameter [m, n], which sides an optimizer with a `rank` and maybe a `side` projects. None where the rank
    reaches the short side, as nothing would be saved.
    """
    if not taken(name, shape, options["targets"]) or options["rank"] >= min(shape):
        return ()
    side = options.get("side", "std")
    if side == "full":
        return "left", "right"
    if side in ("left", "right"):
        return (side,)
    tall = shape[0] >= shape[1]
    return ("right",) if tall == (side == "std") else ("left",)


def under_plan(found: tuple[str, ...], cut: Collection[str], on_conflict: str) -> tuple[str, ...]:
    """Of the sides that `sides` found for a matrix, those that are projected where ranks share out the sides `cut` of
    it: with "flip" the other one, if every rank has that whole.
    """
    if on_conflict != "flip" or len(found) != 1 or found[0] not in cut:
        return found
    other = "left" if found[0] == "right" else "right"
    return found if other in cut else (other,)


def projected_shape(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[int, ...]:
    """Of what is left of a gradient."""
    found = sides(name, shape, options)
    sizes = zip(("left", "right"), shape, strict=False)
    return tuple(options["rank"] if side in found else size for side, size in sizes) if found else shape
