"""What an optimizer keeps for a parameter, by the parameter's name and whole shape, where that is not so many values
for each of its own. No torch: `torchtitan check` adds it up.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from torchtitan.optimizers.patterns import projected_shape, sides, taken
from torchtitan.optimizers.spec import Held

BLOCK, SMALLEST = 256, 4096
"""Of moments in 8 bits: elements with a scale in common, and the size of a tensor below which nothing is packed."""

Shape = tuple[int, ...]


def adam(options: Mapping[str, Any], name: str, shape: Shape) -> Held:
    return Held(values=2 * prod(shape))


def adam_8bit(options: Mapping[str, Any], name: str, shape: Shape) -> Held:
    if prod(shape) < SMALLEST:
        return Held(bytes=2 * 4 * prod(shape))
    return Held(bytes=2 * (prod(shape) + 4 * prod(shape[:-1]) * -(-shape[-1] // BLOCK)))


def adafactor(options: Mapping[str, Any], name: str, shape: Shape) -> Held:
    second = prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
    return Held(values=second + (prod(shape) if options["beta1"] else 0))


def muon(options: Mapping[str, Any], name: str, shape: Shape) -> Held:
    return Held(values=prod(shape) * (1 if taken(name, shape, options["targets"]) else 2))


INNER = {"adamw": adam, "adamw_8bit": adam_8bit, "adafactor": adafactor}


def galore(options: Mapping[str, Any], name: str, shape: Shape) -> Held:
    """Bases on every rank; moments are shared out as the matrix is, or over its other side."""
    found = sides(name, shape, options)
    moments = INNER[options["inner"]](options, name, projected_shape(name, shape, options))
    bases = options["rank"] * sum(shape[("left", "right").index(side)] for side in found)
    limit = bool(found) and options["residual"] == "fira"
    return moments.plus(Held(everywhere=bases, bytes=4 * limit))


def apollo(options: Mapping[str, Any], name: str, shape: Shape) -> Held:
    limit = bool(sides(name, shape, options))
    return Held(values=2 * prod(projected_shape(name, shape, options)), bytes=4 * limit)
