"""GaLore (arXiv:2403.03507): keep the moments of a matrix in the low-rank subspace where its gradient is largest.

The basis of the subspace is refreshed periodically, from the current gradient. Between refreshes, a step projects the
gradient, updates the moments in the subspace, and maps the result back to the full matrix. All weights are trained.
Weight decay acts on the full weight with the full learning rate; the projected update uses rate x scale. Embeddings,
head, norms, biases and stacks of experts use plain moments. So do matrices with a short side no longer than the rank,
as projecting them would save nothing.

`residual = "fira"` (arXiv:2410.01623) also applies the part of the gradient outside the subspace. Each of its rows or
columns is scaled by the ratio of update to gradient norm that the moments gave the projected row or column.

APOLLO (arXiv:2412.05270) scales the raw gradient by factors from Adam's moments of a random projection. There is one
factor for each row or column of a matrix. The projection needs no singular vectors and no state: it is a function of
the matrix's name and the number of the refresh. `per = "tensor"` has one factor for the full matrix, where a rank of 1
suffices (APOLLO-Mini; its scale is sqrt(128)).
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch

from torchtitan.core import random_draws
from torchtitan.core.errors import JobError
from torchtitan.optimizers import moments
from torchtitan.optimizers import projection as bases
from torchtitan.optimizers.by_parameter import ByParameter, add, begin_moments, decay_of, gradient_of, plain_step
from torchtitan.optimizers.layout import Layout, by_owners
from torchtitan.optimizers.moments import Moments, Options, State
from torchtitan.optimizers.projection import Projection, limited
from torchtitan.optimizers.spec import sides, sides_under_plan

logger = logging.getLogger(__name__)

INNER: dict[str, Moments] = {
    "adamw": moments.Adam(),
    "adamw_8bit": moments.Adam(packed=True),
    "adafactor": moments.AdafactorMoments(),
}
AXIS = {"left": 0, "right": 1}
"""Dimension of a matrix that each side's basis shortens."""
ALIKE, TIMES = 0.4, 5
"""Threshold of `adaptive_gap`: mean cosine of successive bases' first directions, over TIMES refreshes."""


class RefreshTask(NamedTuple):
    """A matrix that is due for a new basis."""

    name: str
    parameter: torch.Tensor
    state: State


class GaLore(ByParameter):
    """The GaLore optimizer. Its options are described in torchtitan/optimizers/__init__.py.

    The state of a matrix: the bases `left` [m, rank] and `right` [rank, n], in full on every rank; the moments; the
    number of `updates`, the update before which a refresh is due (`refresh_at`), the `gap` between two, how many were
    `skipped` as a gradient was not finite or all zero, and `fitted`, True once there is a basis.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: Any) -> None:
        self.options = options
        self.inner = moments.Adam(eps_first=True) if options["formula"] == "galore_torch" else INNER[options["inner"]]
        inner = {key: options[key] for key in ("beta1", "beta2", "eps")}
        super().__init__(groups, lr=lr, **inner, tiny=1e-30, clip=1.0)
        named_parameters = [(name, p) for group in self.param_groups for name, p in _named_parameters(group)]
        self.sides = {p: self._sides(name, p) for name, p in named_parameters}
        self.seen: dict[str, list[float]] = {"basis_energy": [], "basis_overlap": []}
        if len(named_parameters) > 1:
            projected = sum(map(bool, self.sides.values()))
            logger.info(
                "GaLore: %d matrices by rank %d, %d parameters by plain moments",
                projected,
                options["rank"],
                len(named_parameters) - projected,
            )

    def _sides(self, name: str, parameter: torch.Tensor) -> tuple[str, ...]:
        """Return the sides to project; none for parameters with plain moments."""
        requested, layout = sides(name, tuple(parameter.shape), self.options), Layout.of(parameter)
        cut = [side for side, dim in AXIS.items() if layout.is_cut(dim)] if requested else []
        if self.options["on_conflict"] == "error" and (conflict := set(requested).intersection(cut)):
            raise JobError(
                f'optimizer.options: given on_conflict = "error"; allowed: "gather" or "flip" for {name}, whose '
                f"{min(conflict)} side is cut over ranks; write one of these, or another side"
            )
        return sides_under_plan(requested, cut, self.options["on_conflict"])

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        due = []
        for group in self.param_groups:
            for name, parameter in _named_parameters(group):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not self.sides[parameter]:
                    # before the refresh, so that the first one needs as much memory as later ones
                    begin_moments(self.inner, parameter, state, group)
                    continue
                if not state:
                    self.begin(parameter, state, group)
                if state["updates"] >= state["refresh_at"]:
                    due.append(RefreshTask(name, parameter, state))
        self.refresh(due)
        super().step()

    def begin(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        """Initialize the state of a matrix [m, n] before its first gradient."""
        rank, gap = self.options["rank"], self.options["update_gap"]
        state.update(updates=0, refresh_at=0, gap=gap, skipped=0, fitted=False)
        for side in self.sides[parameter]:
            shape = (parameter.shape[0], rank) if side == "left" else (rank, parameter.shape[1])
            state[side] = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
        if self.options["adaptive_gap"]:
            state["cosines"] = []
        if self.options["residual"] == "fira":
            state["rest_norm"] = torch.zeros((), device=parameter.device)
        low = self.projection(parameter, state).low
        self.inner.begin(state, low, group, parameter.dtype, parameter.device)

    def projection(self, parameter: torch.Tensor, state: State) -> Projection:
        """Return the projection of a matrix [m, n] by the bases in `state`."""
        return Projection(Layout.of(parameter), state.get("left"), state.get("right"))

    def refresh(self, due: Sequence[RefreshTask]) -> None:
        """Compute new bases for these matrices. Each rank computes some of them and broadcasts the results."""

        def layout_of(task: RefreshTask) -> Layout:
            return Layout.of(task.parameter)

        def shard_of(task: RefreshTask) -> torch.Tensor:
            return gradient_of(task.parameter)

        def result(task: RefreshTask) -> torch.Tensor:
            """Return an empty result: the concatenated bases and their share of the gradient. NaN means no basis."""
            size = sum(task.state[side].numel() for side in self.sides[task.parameter]) + 1
            return torch.full((size,), torch.nan, dtype=task.parameter.dtype, device=task.parameter.device)

        def work(task: RefreshTask, full_gradient: torch.Tensor) -> torch.Tensor:
            if not full_gradient.isfinite().all() or not full_gradient.any():
                return result(task)
            new_bases = {side: self.compute_basis(task, side, full_gradient) for side in self.sides[task.parameter]}
            projected = Projection(Layout.of(full_gradient), **new_bases).down(full_gradient)
            energy = torch.linalg.vector_norm(projected) / torch.linalg.vector_norm(full_gradient)
            return torch.cat([*(basis.flatten() for basis in new_bases.values()), energy.square().view(1)]).to(
                task.parameter.dtype
            )

        for task, flat in by_owners(due, layout_of, shard_of, work, result):
            self.turn(task, flat)

    def compute_basis(self, task: RefreshTask, side: str, full_gradient: torch.Tensor) -> torch.Tensor:
        """Return a new basis of that side, [m, rank] or [rank, n], for the full gradient [m, n]."""
        key, previous = (
            f"{task.name}/{task.state['updates']}/{side}",
            task.state[side] if task.state["fitted"] else None,
        )

        def noise(shape: tuple[int, ...]) -> torch.Tensor:
            return random_draws.normal(key, (0,) * len(shape), shape, full_gradient.device)

        basis = bases.fit(self.options["basis"], full_gradient, side, self.options["rank"], previous, noise)
        return basis.to(task.parameter.dtype)

    def turn(self, task: RefreshTask, flat: torch.Tensor) -> None:
        """Install the new bases of `refresh`, concatenated to one dimension [n], and adapt the moments to them."""
        state, projected_sides = task.state, self.sides[task.parameter]
        if state["fitted"]:
            state["refresh_at"] = self.next_after(task)
        if not flat[0].isfinite():
            state["skipped"] += state["fitted"]
            return
        old = self.projection(task.parameter, {side: state[side].clone() for side in projected_sides})
        for side, basis in zip(
            projected_sides, flat[:-1].split([state[side].numel() for side in projected_sides]), strict=True
        ):
            state[side].copy_(basis.view_as(state[side]))
        self.seen["basis_energy"].append(float(flat[-1]))
        if state["fitted"]:
            self.seen["basis_overlap"].append(old.overlap(self.projection(task.parameter, state)))
            self.see_to_moments(state, old, self.projection(task.parameter, state))
            self.lengthen(task, old)
        state["fitted"] = True
        state["refresh_at"] = self.next_after(task)

    def measured(self) -> dict[str, list[float]]:
        """Return and clear measurements of the bases fitted since the last call.

        "basis_energy": share of the squared gradient within the basis. "basis_overlap": overlap with the previous one.
        """
        measurements, self.seen = self.seen, {name: [] for name in self.seen}
        return measurements

    def next_after(self, task: RefreshTask) -> int:
        """Return the update of the next refresh. `stagger` spreads refreshes over the steps, by the matrices' names."""
        gap, updates = task.state["gap"], task.state["updates"]
        begun = crc32(task.name.encode()) % gap if self.options["stagger"] else 0
        return updates + gap - (updates + begun) % gap

    def see_to_moments(self, state: State, old: Projection, new: Projection) -> None:
        """Keep, rotate or reset the moments after a refresh, as `state_on_refresh` selects.

        rotate: map Adam's moments from the old basis to the new one (Projection.onto).
        """
        policy = self.options["state_on_refresh"]
        if policy == "keep":
            return
        if isinstance(self.inner, moments.Adam):
            basis = old.left if old.right is None else old.right
            assert basis is not None
            dtype = torch.promote_types(basis.dtype, torch.float32)
            read = self.inner.read(state, old.low, dtype)
            for moment, (_, signed) in zip(read, self.inner.KEYS, strict=True):
                moment.copy_(
                    old.onto(new, moment, square=not signed) if policy == "rotate" else torch.zeros_like(moment)
                )
            self.inner.write(state, old.low, read)
        else:
            for key in (key for key in state if key.startswith("exp_avg")):
                state[key].zero_()
        if policy == "reset":
            state["step"] = 0

    def lengthen(self, task: RefreshTask, old: Projection) -> None:
        """Double the refresh gap if successive bases stay similar (Q-GaLore, arXiv:2407.08296)."""
        state = task.state
        if "cosines" not in state:
            return
        pairs = [(old.left[:, 0], state["left"][:, 0])] if old.left is not None else []
        pairs += [(old.right[0], state["right"][0])] if old.right is not None else []
        cosine = min(float((a.float() @ b.float()).abs()) for a, b in pairs)
        state["cosines"] = [*state["cosines"], cosine]  # a new list, as a background save may be writing the old one
        if len(state["cosines"]) == TIMES:
            if sum(state["cosines"]) / TIMES >= ALIKE:
                state["gap"] *= 2
            state["cosines"] = []

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        decay_factor, rate = decay_of(group), group["lr"]
        decays_last = self.options["formula"] == "galore_torch"
        share = decay_factor if decays_last else 1.0  # the fraction of the update that weight decay leaves
        if not self.sides[parameter]:
            plain_step(self.inner, parameter, state, group, share)
            return
        gradient = gradient_of(parameter)
        if not state["fitted"]:  # no finite, nonzero gradient yet
            add(parameter, torch.zeros_like(gradient), decay_factor)
        elif self.options["residual"] == "fira":
            projection = self.projection(parameter, state)
            state["updates"] += 1
            low = projection.down(gradient)
            direction = -self.inner.change(low, projection.low, state, group, 1.0)
            residual = (gradient - projection.up(low)) * projection.factors(direction, low)
            residual = limited(residual, projection.layout, state, "rest_norm")
            add(parameter, projection.up(direction) + residual, decay_factor, -rate * self.options["scale"] * share)
        else:
            projection = self.projection(parameter, state)
            state["updates"] += 1
            change = self.inner.change(projection.down(gradient), projection.low, state, group, rate)
            add(parameter, projection.up(change), decay_factor, self.options["scale"] * share)


def _named_parameters(group: Options) -> Iterable[tuple[str, torch.Tensor]]:
    return zip(group["param_names"], group["params"], strict=True)


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
        basis = random_draws.normal(f"{name}/{refresh}", (0, 0), shape, parameter.device) / rank**0.5
        return Projection(Layout.of(parameter), **{side: basis})

    def stretch(self, direction: torch.Tensor, low: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return the ratio of the norms of `direction` and `low`: a scalar, or [m, 1] or [1, n] per channel.

        Both are this rank's shards of projected tensors.
        """
        if self.options["per"] == "channel":
            return projection.factors(direction, low)
        after, before = (projection.low.summed(tensor.square().sum()).sqrt() for tensor in (direction, low))
        return torch.where(before > 0, after / before, 0)
