"""Sizes of optimizer states that depend on a parameter's name and full shape, and which parameters are matrices.

It does not import torch, as `torchtitan check` uses it.
"""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from torchtitan.optimizers.spec import StateSize

LAYER_MATRICES = ["*attn*", "*attention*", "*mlp*", "*feed_forward*"]
"""Patterns for the matrices of the layers, in the model families' names."""


def is_target_matrix(name: str, shape: Iterable[int], patterns: Iterable[str]) -> bool:
    """Return True for a matrix with a name that matches a pattern; `*` matches anything, dots too."""
    return len(tuple(shape)) == 2 and any(fnmatchcase(name, pattern) for pattern in patterns)


def sides(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sides of a parameter [m, n] that an optimizer with a `rank`, and maybe a `side`, projects.

    There are none if the rank reaches the short side, as nothing would be saved.
    """
    if not is_target_matrix(name, shape, options["targets"]) or options["rank"] >= min(shape):
        return ()
    side = options.get("side", "std")
    if side == "full":
        return "left", "right"
    if side in ("left", "right"):
        return (side,)
    tall = shape[0] >= shape[1]
    return ("right",) if tall == (side == "std") else ("left",)


def sides_under_plan(allowed_sides: tuple[str, ...], cut: Collection[str], on_conflict: str) -> tuple[str, ...]:
    """Return the sides to project, given the result of `sides` and the sharded sides `cut`.

    With `on_conflict` = "flip", a sharded single side is replaced by the other side if that is not sharded.
    """
    if on_conflict != "flip" or len(allowed_sides) != 1 or allowed_sides[0] not in cut:
        return allowed_sides
    other = "left" if allowed_sides[0] == "right" else "right"
    return allowed_sides if other in cut else (other,)


def projected_shape(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a projected gradient."""
    projected = sides(name, shape, options)
    sizes = zip(("left", "right"), shape, strict=False)
    return tuple(options["rank"] if side in projected else size for side, size in sizes) if projected else shape


BLOCK, SMALLEST = 256, 4096
"""For moments in 8 bits: elements per scale, and the size of a tensor below which it is not packed."""

Shape = tuple[int, ...]


def adam(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    return StateSize(values=2 * prod(shape))


def adam_8bit(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    if prod(shape) < SMALLEST:
        return StateSize(bytes=2 * 4 * prod(shape))
    return StateSize(bytes=2 * (prod(shape) + 4 * prod(shape[:-1]) * -(-shape[-1] // BLOCK)))


def adafactor(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    second = prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
    return StateSize(values=second + (prod(shape) if options["beta1"] else 0))


def muon(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    return StateSize(values=prod(shape) * (1 if is_target_matrix(name, shape, options["targets"]) else 2))


INNER = {"adamw": adam, "adamw_8bit": adam_8bit, "adafactor": adafactor}


def galore(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    """Return GaLore's state: bases in full on every rank; moments sharded like the matrix, or over its other side."""
    projected = sides(name, shape, options)
    moments = INNER[options["inner"]](options, name, projected_shape(name, shape, options))
    bases = options["rank"] * sum(shape[("left", "right").index(side)] for side in projected)
    limit = bool(projected) and options["residual"] == "fira"
    return moments.plus(StateSize(everywhere=bases, bytes=4 * limit))


def apollo(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    limit = bool(sides(name, shape, options))
    return StateSize(values=2 * prod(projected_shape(name, shape, options)), bytes=4 * limit)
