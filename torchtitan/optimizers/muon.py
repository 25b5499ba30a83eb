"""Muon (kellerjordan.github.io/posts/muon): momentum with orthogonalized updates for matrices.

The update of a matrix is the running mean of its gradients, with all singular values set to about 1 by Newton-Schulz
iterations. This applies to the matrices of the layers; embeddings, head, norms and biases use AdamW at the same rate.
With the default `adjust`, both kinds of updates have about the same size (arXiv:2502.16982), so they can share one rate
and one weight decay.

On one device, matrices are updated bit for bit like in torch.optim.Muon, which supports only matrices. For sharded ones
its DTensor products would gather their factors in every iteration and add partial sums in bfloat16, so results would
depend on the sharding. Here each rank orthogonalizes some of the full matrices (layout.by_owners).
"""

import math
from typing import Any

import torch

from torchtitan.optimizers import moments
from torchtitan.optimizers.by_parameter import ByParameter, add, decay_of, gradient_of, plain_step
from torchtitan.optimizers.layout import Layout, by_owners, local
from torchtitan.optimizers.moments import Options, State
from torchtitan.optimizers.spec import is_target_matrix

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
TINY = 1e-7


Task = tuple[torch.Tensor, Options, torch.Tensor]
"""A parameter, its group and this rank's shard of the matrix to orthogonalize."""


class Muon(ByParameter):
    """The Muon optimizer. `momentum`: decay of the mean; `precision`: dtype of products; the rest as in AdamW."""

    adam = moments.Adam()

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        *,
        targets: list[str],
        momentum: float,
        nesterov: bool,
        adjust: str,
        precision: str,
        **options: float,
    ) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=nesterov, **options)
        self.targets, self.adjust = targets, adjust
        self.precision = {"bfloat16": torch.bfloat16, "float32": torch.float32}[precision]
        self.matrices: list[Task] = []

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        super().step()
        waiting, self.matrices = self.matrices, []

        def layout_of(task: Task) -> Layout:
            return Layout.of(task[0])

        def shard_of(task: Task) -> torch.Tensor:
            return task[2].to(self.precision)  # the first thing that orthogonalized() does, so bits are the same

        def work(task: Task, matrix: torch.Tensor) -> torch.Tensor:
            return orthogonalized(matrix)

        for (parameter, group, mean), direction in by_owners(waiting, layout_of, shard_of, work):
            rate = adjusted_rate(group["lr"], self.adjust, parameter.shape)
            add(parameter, direction.to(mean.dtype), decay_of(group), -rate)

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        if not is_target_matrix(name, parameter.shape, self.targets):
            plain_step(self.adam, parameter, state, group)
            return
        gradient = gradient_of(parameter)
        if "mean" not in state:
            state["mean"] = torch.zeros_like(parameter)
        mean = local(state["mean"]).to(gradient.dtype)
        mean.lerp_(gradient, 1 - group["momentum"])
        local(state["mean"]).copy_(mean)
        self.matrices.append((parameter, group, gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix [m, n] with all singular values moved to about 0.7 to 1.2, by Newton-Schulz iterations.

    Five iterations of x <- a x + b (x x^T) x + c (x x^T)^2 x, on the transposed matrix if it is tall. They are computed
    in the matrix's dtype, so it must have the precision of the products, Muon's `precision`.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=TINY)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjusted_rate(rate: float, rule: str, shape: torch.Size) -> float:
    """Return the rate adjusted for a matrix's shape.

    original: larger for tall matrices; rms: a weight's mean change is 0.2 of the rate, as in AdamW.
    """
    rows, columns = shape
    return rate * (math.sqrt(max(1, rows / columns)) if rule == "original" else 0.2 * math.sqrt(max(rows, columns)))
