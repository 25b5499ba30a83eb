"""Low-rank projections of a sharded gradient G [m, n], and the orthonormal bases that they use.

A basis spans the leading singular directions of G: rows V [rank, n] for the right side, columns U [m, rank] for the
left. Singular vectors are determined up to sign; here the largest component is positive, so that runs can be compared.
One rank fits a basis and broadcasts it, so ranks need not agree numerically.

The projected gradient R is G V^T [m, rank] for side "right", U^T G [rank, n] for "left", and U^T G V^T for "full".
Every rank has the full basis. If the projected side is sharded, each rank computes a partial sum of R. These are
reduce-scattered along the other side, so that the moments of R are sharded too, and updates are gathered. If it is not
sharded, nothing is communicated, and R is sharded like the other side of G. ("full" all-reduces R instead.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan.core.fused import NEVER, Fused
from torchtitan.optimizers.layout import Layout
from torchtitan.optimizers.moments import State
from torchtitan.torch_internals.dispatch import FakeTensor

OVERSAMPLED = 8
"""Extra directions of a random sketch."""
ITERATIONS = 2
"""Number of power iterations, for the methods that use them."""


def fit(
    method: str,
    matrix: torch.Tensor,
    side: str,
    rank: int,
    before: torch.Tensor | None,
    noise: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Return the basis of one side of `matrix` [m, n]: rows [rank, n] for "right", columns [m, rank] for "left".

    It has at most as many directions as the matrix. `before`: the previous basis of that side, of the same shape.
    `noise(shape)`: random normals, for sketches. Computed in float64 on a CPU and in float32 elsewhere.
    """
    has_values = not isinstance(matrix, FakeTensor)  # else it stands for one of a GPU
    matrix = matrix.to(torch.float64 if matrix.device.type == "cpu" and has_values else torch.float32)
    oriented = matrix if side == "right" else matrix.T  # so that the basis consists of rows
    before = before if before is None or side == "right" else before.T
    basis = METHODS[method](oriented, rank, before, noise)
    largest = basis.gather(1, basis.abs().argmax(1, keepdim=True))
    basis = basis * torch.where(largest < 0, -1.0, 1.0)
    return basis if side == "right" else basis.T.contiguous()


def by_svd(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """Return the right singular vectors [rank, n] of [m, n], largest first, like all methods here."""
    return torch.linalg.svd(matrix, full_matrices=False)[2][:rank]


def by_gram(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """Return [rank, n] for [m, n] from eigenvectors of the short side's Gram matrix.

    For the long side they are multiplied by the matrix and orthonormalized.
    """
    rows, columns = matrix.shape
    if columns <= rows:
        return torch.linalg.eigh(matrix.T @ matrix)[1].T.flip(0)[:rank]
    short = torch.linalg.eigh(matrix @ matrix.T)[1].flip(1)[:, :rank]
    return _orthonormal(matrix.T @ short)


def by_sketch(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """Return [rank, n] for [m, n] by randomized SVD (Halko, Martinsson, Tropp, arXiv:0909.4061, alg. 4.4 and 5.1)."""
    columns = min(rank + OVERSAMPLED, *matrix.shape)
    basis = torch.linalg.qr(matrix @ noise((matrix.shape[1], columns)).to(matrix))[0]
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis)[0])[0]
    return torch.linalg.svd(basis.T @ matrix, full_matrices=False)[2][:rank]


def by_power(matrix: torch.Tensor, rank: int, before: torch.Tensor | None, noise: Callable) -> torch.Tensor:
    """Return [rank, n] for [m, n] by power iterations from the previous basis, or by a sketch if there is none."""
    if before is None:
        return by_sketch(matrix, rank, before, noise)
    basis = before.T.to(matrix)
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix.T @ (matrix @ basis))[0]
    return torch.linalg.svd(matrix @ basis, full_matrices=False)[2] @ basis.T  # ordered by singular values


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
    """A projection by one or two bases. `layout`: the gradient's."""

    layout: Layout
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None

    @property
    def low(self) -> Layout:
        """Return the layout of the projected gradient."""
        if self.left is not None and self.right is not None:
            return self.layout.resized(0, self.left.shape[1]).resized(1, self.right.shape[0])
        return self.layout.crossed(self.dim, self.rank)

    @property
    def dim(self) -> int:
        """Return the dimension that a one-sided projection shortens."""
        return 1 if self.left is None else 0

    @property
    def rank(self) -> int:
        if self.left is not None:
            return self.left.shape[1]
        assert self.right is not None
        return self.right.shape[0]

    def down(self, gradient: torch.Tensor) -> torch.Tensor:
        """Project G [m, n] to R [m, rank], [rank, n] or, on both sides, [rank, rank]; both are this rank's shards."""
        layout, both = self.layout, self.left is not None and self.right is not None
        if self.left is not None:
            gradient = self.left[layout.span(0)].to(gradient).T @ gradient
            gradient = layout.summed(gradient, 0) if both else layout.scattered(gradient, 0)
        if self.right is not None:
            gradient = gradient @ self.right[:, layout.span(1)].to(gradient).T
            gradient = layout.summed(gradient, 1) if both else layout.scattered(gradient, 1)
        return gradient

    def up(self, change: torch.Tensor) -> torch.Tensor:
        """Map a tensor of R's shape back to [m, n]; both are this rank's shards."""
        if self.left is None or self.right is None:
            change = self.layout.collected(change, self.dim)
        if self.left is not None:
            change = self.left[self.layout.span(0)].to(change) @ change
        if self.right is not None:
            change = change @ self.right[:, self.layout.span(1)].to(change)
        return change

    def factors(self, direction: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Return the ratio of the norms of `direction` and of the projected gradient `low`, both of R's shape.

        There is one for each row or column of the other side: [m, 1] or [1, n], for this rank's shard of the matrix.
        """
        before = torch.linalg.vector_norm(low, dim=self.dim, keepdim=True)
        after = torch.linalg.vector_norm(direction, dim=self.dim, keepdim=True)
        return self.layout.collected(torch.where(before > 0, after / before, 0), self.dim)

    def overlap(self, other: "Projection") -> float:
        """Return the mean squared cosine between bases of the same sides and rank: 1 if their spans are equal.

        With two sides it is the smaller value.
        """
        pairs = [(self.left, other.left)] if self.left is not None else []
        pairs += [(self.right.T, other.right.T)] if self.right is not None and other.right is not None else []
        return min(float((a.double().T @ b.double()).square().sum() / a.shape[1]) for a, b in pairs)

    def onto(self, new: "Projection", moment: torch.Tensor, square: bool) -> torch.Tensor:
        """Rotate a moment of R's shape into the new basis.

        `square`: it is a moment of squares, which treats the directions as independent.
        """
        if self.left is not None and new.left is not None:
            turn = (new.left.T.double() @ self.left.double()).to(moment)
            moment = (turn.square() if square else turn) @ moment
        if self.right is not None and new.right is not None:
            turn = (self.right.double() @ new.right.T.double()).to(moment)
            moment = moment @ (turn.square() if square else turn)
        return moment


GROWTH = 1.01
"""Maximum ratio of a step's norm to that of the last one."""


def limited(step: torch.Tensor, layout: Layout, state: State, key: str) -> torch.Tensor:
    """Clip `step`, of any shape, to GROWTH times the norm of the last step, which is stored under `key`.

    The first step is not clipped.
    """
    return _fused_limit(step, layout.summed(_fused_square_sum(step)), state[key])


def _square_sum(step: torch.Tensor) -> torch.Tensor:
    return step.square().sum()


def _limit(step: torch.Tensor, total: torch.Tensor, last_norm: torch.Tensor) -> torch.Tensor:
    norm = total.sqrt()
    max_norm = last_norm.to(norm) * GROWTH
    factor = torch.where((max_norm > 0) & (norm > max_norm), max_norm / norm, 1)
    last_norm.copy_(norm * factor)
    return step * factor


_fused_square_sum, _fused_limit = (Fused(formula, dynamic=True, after=NEVER) for formula in (_square_sum, _limit))
