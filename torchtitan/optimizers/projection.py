"""Orthonormal bases of the directions in which a gradient [m, n] is largest: rows [rank, n] for its right side, columns
[m, rank] for its left.

Of singular vectors only the span and, up to sign, the order are determined; signs are fixed here by the largest
component, which is positive, so that runs can be compared. One rank fits a basis and hands it out: no two need agree.

A gradient [m, n] seen in few directions, of which this rank has a part.

right: R = G V^T [m, rank] with rows V [rank, n], left: R = U^T G [rank, n] with columns U [m, rank], full: both. Every
rank has the whole basis. Where the side that is projected is cut over ranks, each has a part of a sum of rank x the
other side, never of the matrix: they add it up, each a share of the other side, so that what is kept of R is shared out
too, and hand one another what they made of it. Else nothing is exchanged, and R is laid out as G is, but for the side
that is now short, which is whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan.optimizers.layout import Layout
from torchtitan.optimizers.moments import State

OVERSAMPLED = 8
"""Directions that a random sketch has more than are wanted."""
ITERATIONS = 2
"""Of powers, where a method uses them."""


def fit(
    method: str,
    matrix: torch.Tensor,
    side: str,
    rank: int,
    before: torch.Tensor | None,
    noise: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The basis of one side of `matrix` [m, n]: rows [rank, n] for "right", columns [m, rank] for "left", not more than
    the matrix has. `before`: the basis of that side so far, of the same shape. `noise(shape)`: random normals, for
    sketches. Computed in float64 on a CPU and in float32 elsewhere.
    """
    matrix = matrix.to(torch.float64 if matrix.device.type == "cpu" else torch.float32)
    wide = matrix if side == "right" else matrix.T  # then rows of the basis are wanted
    before = before if before is None or side == "right" else before.T
    found = METHODS[method](wide, rank, before, noise)
    largest = found.gather(1, found.abs().argmax(1, keepdim=True))
    found = found * torch.where(largest < 0, -1.0, 1.0)
    return found if side == "right" else found.T.contiguous()


def by_svd(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """[m, n] -> the rows [rank, n] of the largest singular values, in their order; so do the other methods."""
    return torch.linalg.svd(matrix, full_matrices=False)[2][:rank]


def by_gram(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """[m, n] -> [rank, n]: eigenvectors of the short side's products; for the long side multiplied over and made
    orthogonal again.
    """
    rows, columns = matrix.shape
    if columns <= rows:
        return torch.linalg.eigh(matrix.T @ matrix)[1].T.flip(0)[:rank]
    short = torch.linalg.eigh(matrix @ matrix.T)[1].flip(1)[:, :rank]
    return _orthonormal(matrix.T @ short)


def by_sketch(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """[m, n] -> [rank, n]: randomized (Halko, Martinsson, Tropp, arXiv:0909.4061, algorithms 4.4 and 5.1)."""
    columns = min(rank + OVERSAMPLED, *matrix.shape)
    found = torch.linalg.qr(matrix @ noise((matrix.shape[1], columns)).to(matrix))[0]
    for _ in range(ITERATIONS):
        found = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ found)[0])[0]
    return torch.linalg.svd(found.T @ matrix, full_matrices=False)[2][:rank]


def by_power(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """[m, n] -> [rank, n]: from the basis so far, or from a sketch: once more towards the largest directions."""
    if before is None:
        return by_sketch(matrix, rank, before, noise)
    found = before.T.to(matrix)
    for _ in range(ITERATIONS):
        found = torch.linalg.qr(matrix.T @ (matrix @ found))[0]
    return torch.linalg.svd(matrix @ found, full_matrices=False)[2] @ found.T  # in the order of their sizes


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    return torch.linalg.qr(columns)[0].T


METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "gram": by_gram,
    "svd": by_svd,
    "rsvd": by_sketch,
    "power": by_power,
}


@dataclass(frozen=True)
class Projection:
    """`layout`: of the gradient."""

    layout: Layout
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None

    @property
    def low(self) -> Layout:
        """Of what is projected."""
        if self.left is not None and self.right is not None:
            return self.layout.resized(0, self.left.shape[1]).resized(1, self.right.shape[0])
        return self.layout.crossed(self.dim, self.rank)

    @property
    def dim(self) -> int:
        """Which becomes short, of one."""
        return 1 if self.left is None else 0

    @property
    def rank(self) -> int:
        if self.left is not None:
            return self.left.shape[1]
        assert self.right is not None
        return self.right.shape[0]

    def down(self, gradient: torch.Tensor) -> torch.Tensor:
        """G [m, n] -> R [m, rank], [rank, n] or, of both sides, [rank, rank]; both this rank's parts."""
        layout, both = self.layout, self.left is not None and self.right is not None
        if self.left is not None:
            gradient = self.left[layout.span(0)].to(gradient).T @ gradient
            gradient = layout.summed(gradient, 0) if both else layout.scattered(gradient, 0)
        if self.right is not None:
            gradient = gradient @ self.right[:, layout.span(1)].to(gradient).T
            gradient = layout.summed(gradient, 1) if both else layout.scattered(gradient, 1)
        return gradient

    def up(self, change: torch.Tensor) -> torch.Tensor:
        """From R's shape back to [m, n], both this rank's parts."""
        if self.left is None or self.right is None:
            change = self.layout.collected(change, self.dim)
        if self.left is not None:
            change = self.left[self.layout.span(0)].to(change) @ change
        if self.right is not None:
            change = change @ self.right[:, self.layout.span(1)].to(change)
        return change

    def factors(self, direction: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """How much longer `direction` is than the projected gradient, both of R's shape, for each of the side that is
        not projected: [m, 1] or [1, n], of this rank's part of the matrix.
        """
        before = torch.linalg.vector_norm(low, dim=self.dim, keepdim=True)
        after = torch.linalg.vector_norm(direction, dim=self.dim, keepdim=True)
        return self.layout.collected(torch.where(before > 0, after / before, 0), self.dim)

    def overlap(self, other: "Projection") -> float:
        """Mean squared cosine between bases of the same sides and rank, the least of both sides: 1 where they span the
        same.
        """
        pairs = [(self.left, other.left)] if self.left is not None else []
        pairs += [(self.right.T, other.right.T)] if self.right is not None and other.right is not None else []
        return min(float((a.double().T @ b.double()).square().sum() / a.shape[1]) for a, b in pairs)

    def onto(self, new: "Projection", moment: torch.Tensor, square: bool) -> torch.Tensor:
        """A moment of what is projected, of R's shape, in the new basis' directions; of squares as if directions were
        independent.
        """
        if self.left is not None and new.left is not None:
            turn = (new.left.T.double() @ self.left.double()).to(moment)
            moment = (turn.square() if square else turn) @ moment
        if self.right is not None and new.right is not None:
            turn = (self.right.double() @ new.right.T.double()).to(moment)
            moment = moment @ (turn.square() if square else turn)
        return moment


GROWTH = 1.01
"""How much longer than the last a raw step may be."""


def limited(step: torch.Tensor, layout: Layout, state: State, key: str) -> torch.Tensor:
    """`step`, of any shape, cut to GROWTH times the length of the last step, which is kept under `key`; the first is as
    it is.
    """
    norm = layout.summed(step.square().sum()).sqrt()
    most = state[key].to(norm) * GROWTH
    factor = torch.where((most > 0) & (norm > most), most / norm, 1)
    state[key].copy_(norm * factor)
    return step * factor
