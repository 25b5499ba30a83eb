"""Bytes that a step of each optimizer allocates beside its state and frees, without torch, for the planner.

They follow the code of the optimizers in eager mode, which a rehearsal runs (planner/rehearsal.py). Fused steps of
torch allocate nothing and are not asked for.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from torchtitan.optimizers.spec import Shape, is_target_matrix, sides

PIECE = 2**21
"""Elements of a piece of a parameter, for optimizers that step one after the other, except on a CPU."""
WORK = 4
"""Bytes of a value of the computation, which is in float32."""


class StepSize(NamedTuple):
    """Bytes that a step allocates for a parameter: those that live until the next parameter, or until its end."""

    passing: float = 0
    lasting: float = 0


class RankShare(NamedTuple):
    """The part of a parameter that a rank has: `values` of it, each of `value_bytes`. The parameter's mesh has as many
    `axes` that are longer than 1."""

    values: float
    value_bytes: int
    axes: int

    @property
    def copied(self) -> int:
        """1 if gradients, means and weights are copied to float32 in order to compute, else 0."""
        return int(self.value_bytes < WORK)


def in_pieces(copies: int) -> Callable[..., StepSize]:
    """Return the function for steps of a piece at a time, which have as many tensors of its size."""

    def step_size(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
        return StepSize(passing=copies * WORK * min(PIECE, share.values))

    return step_size


def adam(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
    """Return torch's: gradients with the decay of weights, and what its AdamW has."""
    decayed = bool(options["weight_decay"]) * share.values * share.value_bytes
    roots = adamw(options, name, shape, share)
    return StepSize(lasting=roots.lasting + decayed) if roots.lasting else StepSize(passing=roots.passing + decayed)


def adamw(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
    """Return torch's: roots of all second moments or, one after the other, each and its quotient."""
    size = share.values * share.value_bytes
    return StepSize(lasting=size) if options["foreach"] else StepSize(passing=2 * size)


def sgd(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
    """Return torch's: gradients with the decay of weights, and with the momentum ahead."""
    size = share.values * share.value_bytes
    if options["foreach"]:
        return StepSize(lasting=size * bool(options["weight_decay"]))
    return StepSize(passing=size * (bool(options["weight_decay"]) + bool(options["nesterov"])))


def adafactor(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
    """Return a change and its squares, or the square of the gradient and its sum."""
    return StepSize(passing=(2 + share.copied) * WORK * share.values)


def galore(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
    """Return the larger of the refresh of a basis by one of the ranks, and of the update.

    A refresh gathers the whole gradient and examines its magnitudes; a Gram matrix has eigenvectors, in two orders.
    """
    if not sides(name, shape, options):
        return adafactor(options, name, shape, share) if options["inner"] == "adafactor" else StepSize()
    update = 3 + share.copied if options["residual"] == "fira" else 1 + 2 * share.copied
    size, short, copied = prod(shape), min(shape), WORK * share.copied
    gram = 2 * WORK * short**2
    vectors = WORK * (size + short**2) if options["basis"] == "svd" else gram * (options["basis"] == "gram")
    work = max((WORK + 3) * size, vectors)  # magnitudes, and three tensors of truth values
    if share.axes:  # the messages of each axis, after those of the one before, or the whole gradient too
        work = max(WORK * (1 + share.axes) * size, WORK * size + work)
    return StepSize(passing=max(update * WORK * share.values, copied * size + work))


def apollo(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
    """Return the scaled gradient, and its squares or its limited form."""
    if not sides(name, shape, options):
        return StepSize()
    return StepSize(passing=(2 + 2 * share.copied) * WORK * share.values)


def muon(options: Mapping[str, Any], name: str, shape: Shape, share: RankShare) -> StepSize:
    """Return the direction of a matrix, which waits for those of all others, and one orthogonalization.

    That has a matrix in three states, its square in two, and the result of the one before. Among ranks it has a shard
    of each of their matrices in place of that, and then the messages with the results.
    """
    if not is_target_matrix(name, shape, options["targets"]):
        return StepSize()
    waits = options["nesterov"] or share.copied
    size, square = prod(shape), min(shape) ** 2
    product = 2 if options["precision"] == "bfloat16" else WORK
    iteration = product * (4 * size + 2 * square)
    if share.axes:
        passing = max(iteration, (4 + share.axes) * product * size)
    else:
        iteration -= product * size * (product == WORK)  # the direction itself is the first of the three
        passing = max(iteration, (product + WORK * ((product < WORK) + share.copied)) * size)
    return StepSize(passing=passing, lasting=WORK * share.values * waits)
