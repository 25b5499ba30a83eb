"""GaLore (arXiv:2403.03507): the moments of a matrix in the few directions in which its gradient is largest, which are
found anew every so often. Weights stay whole and are all trained; their state is rank x (m + n) numbers and one more.

Weight decay acts on the whole weight and by the whole rate; what comes back from few directions by rate x scale.
Embeddings, head, norms, biases and stacks of experts step by the plain moments. So do matrices whose short side is no
longer than the rank: they would be turned, and nothing saved.

Fira (arXiv:2410.01623) as `residual`: what of the gradient is outside of those directions is followed too, by the
factors that the moments gave the inside.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch

from torchtitan.core import keyed_rng
from torchtitan.core.errors import JobError
from torchtitan.optimizers import moments
from torchtitan.optimizers import projection as bases
from torchtitan.optimizers.by_parameter import ByParameter, add, gradient_of, plain_change
from torchtitan.optimizers.layout import Layout, by_owners
from torchtitan.optimizers.moments import Moments, Options, State
from torchtitan.optimizers.projection import Projection, limited
from torchtitan.optimizers.state_sizes import sides, under_plan

logger = logging.getLogger(__name__)

INNER: dict[str, Moments] = {
    "adamw": moments.Adam(),
    "adamw_8bit": moments.Adam(packed=True),
    "adafactor": moments.Adafactor(),
}
AXIS = {"left": 0, "right": 1}
"""Which side of a matrix becomes short."""
ALIKE, TIMES = 0.4, 5
"""With `adaptive_gap`: cosine of the first directions of two bases, on the mean of so many refreshes."""


class Task(NamedTuple):
    """A matrix whose basis is due."""

    name: str
    parameter: torch.Tensor
    state: State


class GaLore(ByParameter):
    """Options as in torchtitan/optimizers/__init__.py. Its state of a matrix: the bases `left` [m, rank], `right`
    [rank, n], whole on every rank; the moments; `updates` so far, the one before which a basis is due (`refresh_at`),
    the `gap` between two, how many were `skipped` as a gradient was not finite or all zero, and whether there is one
    (`fitted`).
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: Any) -> None:
        self.options = options
        self.inner = moments.Adam(eps_first=True) if options["formula"] == "galore_torch" else INNER[options["inner"]]
        inner = {key: options[key] for key in ("beta1", "beta2", "eps")}
        super().__init__(groups, lr=lr, **inner, tiny=1e-30, clip=1.0)
        named = [(name, p) for group in self.param_groups for name, p in _named(group)]
        self.sides = {p: self._sides(name, p) for name, p in named}
        self.seen: dict[str, list[float]] = {"basis_energy": [], "basis_overlap": []}
        if len(named) > 1:
            projected = sum(map(bool, self.sides.values()))
            logger.info(
                "GaLore: %d matrices by rank %d, %d parameters by plain moments",
                projected,
                options["rank"],
                len(named) - projected,
            )

    def _sides(self, name: str, parameter: torch.Tensor) -> tuple[str, ...]:
        """Those to be projected; none for what steps by plain moments."""
        found, layout = sides(name, tuple(parameter.shape), self.options), Layout.of(parameter)
        cut = [side for side, dim in AXIS.items() if layout.is_cut(dim)] if found else []
        if self.options["on_conflict"] == "error" and (conflict := set(found).intersection(cut)):
            raise JobError(
                f'optimizer.options: given on_conflict = "error"; allowed: "gather" or "flip" for {name}, whose '
                f"{min(conflict)} side is cut over ranks; write one of these, or another side"
            )
        return under_plan(found, cut, self.options["on_conflict"])

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        due = []
        for group in self.param_groups:
            for name, parameter in _named(group):
                if parameter.grad is None or not self.sides[parameter]:
                    continue
                state = self.state[parameter]
                if not state:
                    self.begin(parameter, state, group)
                if state["updates"] >= state["refresh_at"]:
                    due.append(Task(name, parameter, state))
        self.refresh(due)
        super().step()

    def begin(self, parameter: torch.Tensor, state: State, group: Options) -> None:
        """Of a matrix [m, n] that has had no gradient."""
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
        """Of a matrix [m, n], by the bases that `state` has."""
        return Projection(Layout.of(parameter), state.get("left"), state.get("right"))

    def refresh(self, due: Sequence[Task]) -> None:
        """Of as many matrices as there are ranks each fits the basis of one, and they hand them to one another."""

        def layout_of(task: Task) -> Layout:
            return Layout.of(task.parameter)

        def gathered(task: Task) -> torch.Tensor:
            return layout_of(task).gathered(gradient_of(task.parameter))

        def result(task: Task) -> torch.Tensor:
            """The bases one behind the other, and how much of the gradient they have; NaN says that there are none."""
            size = sum(task.state[side].numel() for side in self.sides[task.parameter]) + 1
            return torch.full((size,), torch.nan, dtype=task.parameter.dtype, device=task.parameter.device)

        def work(task: Task, whole: torch.Tensor) -> torch.Tensor:
            if not whole.isfinite().all() or not whole.any():
                return result(task)
            found = {side: self.fitted(task, side, whole) for side in self.sides[task.parameter]}
            seen = Projection(Layout.of(whole), **found).down(whole)
            energy = torch.linalg.vector_norm(seen) / torch.linalg.vector_norm(whole)
            return torch.cat([*(basis.flatten() for basis in found.values()), energy.square().view(1)]).to(
                task.parameter.dtype
            )

        for task, flat in by_owners(due, layout_of, gathered, work, result):
            self.turn(task, flat)

    def fitted(self, task: Task, side: str, whole: torch.Tensor) -> torch.Tensor:
        """A new basis of that side, [m, rank] or [rank, n], for the whole gradient [m, n]."""
        key, before = f"{task.name}/{task.state['updates']}/{side}", task.state[side] if task.state["fitted"] else None

        def noise(shape: tuple[int, ...]) -> torch.Tensor:
            return keyed_rng.normal(key, (0,) * len(shape), shape, whole.device)

        found = bases.fit(self.options["basis"], whole, side, self.options["rank"], before, noise)
        return found.to(task.parameter.dtype)

    def turn(self, task: Task, flat: torch.Tensor) -> None:
        """Take new bases, those of `refresh` one behind the other in one dimension [.], and see to the moments, which
        are in the directions of the old ones.
        """
        state, own = task.state, self.sides[task.parameter]
        if state["fitted"]:
            state["refresh_at"] = self.next_after(task)
        if not flat[0].isfinite():
            state["skipped"] += state["fitted"]
            return
        old = self.projection(task.parameter, {side: state[side].clone() for side in own})
        for side, found in zip(own, flat[:-1].split([state[side].numel() for side in own]), strict=True):
            state[side].copy_(found.view_as(state[side]))
        self.seen["basis_energy"].append(float(flat[-1]))
        if state["fitted"]:
            self.seen["basis_overlap"].append(old.overlap(self.projection(task.parameter, state)))
            self.see_to_moments(state, old, self.projection(task.parameter, state))
            self.lengthen(task, old)
        state["fitted"] = True
        state["refresh_at"] = self.next_after(task)

    def measured(self) -> dict[str, list[float]]:
        """Of the bases that were found since the last call: which share of their gradient's squares is in their
        directions, and which share of these the bases before them had.
        """
        found, self.seen = self.seen, {name: [] for name in self.seen}
        return found

    def next_after(self, task: Task) -> int:
        """`stagger` spreads refreshes over the steps, by the matrices' names."""
        gap, updates = task.state["gap"], task.state["updates"]
        begun = crc32(task.name.encode()) % gap if self.options["stagger"] else 0
        return updates + gap - (updates + begun) % gap

    def see_to_moments(self, state: State, old: Projection, new: Projection) -> None:
        how = self.options["state_on_refresh"]
        if how == "keep":
            return
        if isinstance(self.inner, moments.Adam):
            basis = old.left if old.right is None else old.right
            assert basis is not None
            dtype = torch.promote_types(basis.dtype, torch.float32)
            read = self.inner.read(state, old.low, dtype)
            for moment, (_, signed) in zip(read, self.inner.KEYS, strict=True):
                moment.copy_(old.onto(new, moment, square=not signed) if how == "rotate" else torch.zeros_like(moment))
            self.inner.write(state, old.low, read)
        else:
            for key in (key for key in state if key.startswith("exp_avg")):
                state[key].zero_()
        if how == "reset":
            state["step"] = 0

    def lengthen(self, task: Task, old: Projection) -> None:
        """Where directions stay, they need not be looked for so often (Q-GaLore, arXiv:2407.08296)."""
        state = task.state
        if "cosines" not in state:
            return
        pairs = [(old.left[:, 0], state["left"][:, 0])] if old.left is not None else []
        pairs += [(old.right[0], state["right"][0])] if old.right is not None else []
        cosine = min(float((a.float() @ b.float()).abs()) for a, b in pairs)
        state["cosines"] = [*state["cosines"], cosine]  # a new list: a save in the background may write the old one
        if len(state["cosines"]) == TIMES:
            if sum(state["cosines"]) / TIMES >= ALIKE:
                state["gap"] *= 2
            state["cosines"] = []

    def update(self, name: str, parameter: torch.Tensor, state: State, group: Options) -> None:
        kept, rate = 1 - group["lr"] * group["weight_decay"], group["lr"]
        decays_last = self.options["formula"] == "galore_torch"
        share = kept if decays_last else 1.0  # the factor that weight decay leaves of the change
        gradient = gradient_of(parameter)
        if not self.sides[parameter]:
            add(parameter, plain_change(self.inner, parameter, state, group), kept, share)
        elif not state["fitted"]:  # it has had no gradient yet, or none that is finite
            add(parameter, torch.zeros_like(gradient), kept)
        elif self.options["residual"] == "fira":
            projection = self.projection(parameter, state)
            state["updates"] += 1
            low = projection.down(gradient)
            direction = -self.inner.change(low, projection.low, state, group, 1.0)
            rest = (gradient - projection.up(low)) * projection.factors(direction, low)
            rest = limited(rest, projection.layout, state, "rest_norm")
            add(parameter, projection.up(direction) + rest, kept, -rate * self.options["scale"] * share)
        else:
            projection = self.projection(parameter, state)
            state["updates"] += 1
            change = self.inner.change(projection.down(gradient), projection.low, state, group, rate)
            add(parameter, projection.up(change), kept, self.options["scale"] * share)


def _named(group: Options) -> Iterable[tuple[str, torch.Tensor]]:
    return zip(group["param_names"], group["params"], strict=True)
