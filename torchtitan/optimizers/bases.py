"""Orthonormal bases of the directions in which a gradient [m, n] is largest: rows [rank, n] for its right side, columns
[m, rank] for its left.

Of singular vectors only the span and, up to sign, the order are determined; signs are fixed here by the largest
component, which is positive, so that runs can be compared. One rank fits a basis and hands it out: no two need agree.
"""

from collections.abc import Callable

import torch

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
