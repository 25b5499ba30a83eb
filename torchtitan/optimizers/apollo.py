"""APOLLO (arXiv:2412.05270): scale the raw gradient by factors from Adam's moments of a random projection.

There is one factor for each row or column of a matrix. The projection needs no singular vectors and no state: it is a
function of the matrix's name and the number of the refresh.

`per = "tensor"` has one factor for the full matrix, where a rank of 1 suffices (APOLLO-Mini; its scale is sqrt(128)).
"""

from typing import Any

import torch

from torchtitan.core import keyed_rng
from torchtitan.optimizers import moments
from torchtitan.optimizers.by_parameter import ByParameter, add, decay_of, gradient_of, plain_step
from torchtitan.optimizers.layout import Layout
from torchtitan.optimizers.moments import Options, State
from torchtitan.optimizers.projection import Projection, limited
from torchtitan.optimizers.state_sizes import sides


class APOLLO(ByParameter):
    adam = moments.Adam()

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: Any) -> None:
        self.options = options
        super().__init__(groups, lr=lr, **{key: options[key] for key in ("beta1", "beta2", "eps")})

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        side = sides(name, tuple(parameter.shape), self.options)
        if not side:
            plain_step(self.adam, parameter, state, group)
            return
        projection = self.projection(name, parameter, state.get("step", 0) // self.options["update_gap"], side[0])
        if not state:
            state["norm"] = torch.zeros((), device=parameter.device)
            self.adam.begin(state, projection.low, group, parameter.dtype, parameter.device)
        gradient = gradient_of(parameter)
        low = projection.down(gradient)
        direction = self.adam.change(low, projection.low, state, group, 1.0)
        step = gradient * self.stretch(direction, low, projection)
        add(
            parameter,
            limited(step, projection.layout, state, "norm"),
            decay_of(group),
            -group["lr"] * self.options["scale"],
        )

    def projection(self, name: str, parameter: torch.Tensor, refresh: int, side: str) -> Projection:
        """Return a random projection of a matrix [m, n] to [m, rank] or [rank, n].

        It is normal with variance 1 / rank, which preserves norms on average.
        """
        rank, (rows, columns) = self.options["rank"], parameter.shape
        shape = (rows, rank) if side == "left" else (rank, columns)
        basis = keyed_rng.normal(f"{name}/{refresh}", (0, 0), shape, parameter.device) / rank**0.5
        return Projection(Layout.of(parameter), **{side: basis})

    def stretch(self, direction: torch.Tensor, low: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return the ratio of the norms of `direction` and `low`: a scalar, or [m, 1] or [1, n] per channel.

        Both are this rank's shards of projected tensors.
        """
        if self.options["per"] == "channel":
            return projection.factors(direction, low)
        after, before = (projection.low.summed(tensor.square().sum()).sqrt() for tensor in (direction, low))
        return torch.where(before > 0, after / before, 0)
