"""A gradient [m, n] seen in few directions, of which this rank has a part.

right: R = G V^T [m, rank] with rows V [rank, n], left: R = U^T G [rank, n] with columns U [m, rank], full: both. Every
rank has the whole basis. Where the side that is projected is cut over ranks, each has a part of a sum, which they add
up (rank x the other side, never the matrix); else nothing is exchanged. Back up every rank makes its own part alone. So
R is laid out as G is, but for the side that is now short, which is whole.
"""

from dataclasses import dataclass

import torch

from torchtitan.optimizers.layout import Layout
from torchtitan.optimizers.moments import State


@dataclass(frozen=True)
class Projection:
    """`layout`: of the gradient."""

    layout: Layout
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None

    @property
    def low(self) -> Layout:
        """Of what is projected."""
        layout = self.layout
        if self.left is not None:
            layout = layout.resized(0, self.left.shape[1])
        return layout if self.right is None else layout.resized(1, self.right.shape[0])

    def down(self, gradient: torch.Tensor) -> torch.Tensor:
        """G [m, n] -> R [m, rank], [rank, n] or, of both sides, [rank, rank]; both this rank's parts."""
        layout = self.layout
        if self.left is not None:
            gradient = layout.summed(self.left[layout.span(0)].to(gradient).T @ gradient, 0)
        if self.right is not None:
            gradient = layout.summed(gradient @ self.right[:, layout.span(1)].to(gradient).T, 1)
        return gradient

    def up(self, change: torch.Tensor) -> torch.Tensor:
        """From R's shape back to [m, n], both this rank's parts."""
        if self.left is not None:
            change = self.left[self.layout.span(0)].to(change) @ change
        if self.right is not None:
            change = change @ self.right[:, self.layout.span(1)].to(change)
        return change

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


def factors(direction: torch.Tensor, low: torch.Tensor, axis: int) -> torch.Tensor:
    """How much longer `direction` is than the projected gradient, for each of the other axis: [m, 1] or [1, n]."""
    before = torch.linalg.vector_norm(low, dim=axis, keepdim=True)
    after = torch.linalg.vector_norm(direction, dim=axis, keepdim=True)
    return torch.where(before > 0, after / before, 0)


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
