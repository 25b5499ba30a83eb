"""What a run does about steps that go wrong: never save what is not finite, stop, leave the step out or go back; and
see that ranks which must hold the same numbers do.
"""

import logging
import math
from collections.abc import Callable
from typing import NoReturn

import torch

from torchtitan import distributed
from torchtitan.guards.replicas import Replicas, ReplicasDiffer
from torchtitan.guards.steps import BadStep, NonFiniteError, RollBack, StepGuard
from torchtitan.parallelisms.parallel_model import ParallelModel

__all__ = ["BadStep", "Guards", "NonFiniteError", "Replicas", "ReplicasDiffer", "RollBack", "StepGuard"]

logger = logging.getLogger(__name__)


class Guards:
    """Of a run on every rank, which all ask the same at the same steps. `compare_every`: so many steps, what ranks hold
    alike; 0 is never.
    """

    def __init__(self, steps: StepGuard, replicas: Replicas, model: ParallelModel, compare_every: int):
        self.steps, self.replicas, self.model, self.compare_every = steps, replicas, model, compare_every
        self._compared = -1

    def leaves_out(
        self,
        step: int,
        loss: torch.Tensor,
        norm: torch.Tensor | None,
        *,
        can_skip: bool,
        can_go_back: Callable[[], bool],
    ) -> str:
        """Before the update of the `step`-th step: why it is left out, or nothing. `loss`, this rank's share, and
        `norm` are scalars.

        Raises, on all ranks, `RollBack`, or `BadStep` for a run that has to stop.
        """
        if not self.steps.looks:
            if norm is not None and norm.device.type == "cpu":  # looking costs nothing there
                self.refuse_non_finite("gradient norm", norm, step - 1)
            return ""
        # the norm is every rank's, but a machine that errs may see another, and all have to judge alike
        dims = self.model.dims
        whole, norms = distributed.add_up(float(loss) / dims.tp, 0.0 if norm is None else float(norm))
        known = None if norm is None else norms / dims.world_size
        verdict = self.steps.judge(step, whole, known, can_skip=can_skip, can_go_back=can_go_back)
        if verdict.action == "go on":
            return ""
        where = self._first_layer()
        if verdict.action == "stop":
            if not (math.isfinite(whole) and math.isfinite(norms)):
                self.stop_non_finite(verdict.why, step - 1, where)
            raise BadStep(f"step {step}: {verdict.why}; the run stops before its update")
        if verdict.action == "roll back":
            raise RollBack(verdict.why + where)
        return verdict.why + where

    def refuse_non_finite(self, what: str, value: torch.Tensor | None, step: int) -> None:
        """Of a scalar. Waits for the device, so it is asked only where the host waits anyway. Once NaN, weights stay
        NaN.
        """
        if value is not None and not math.isfinite(value):
            self.stop_non_finite(f"the {what} is {float(value)}", step, self._first_layer())

    def refuse_to_save(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor | None, not_finite: Callable[[], list[str]]
    ) -> None:
        """Before a save, also after a step that was not logged; `loss` and `norm` are scalars. Ranks' own losses
        differ, so they agree first.
        """
        self.compare(step, now=True)
        (bad,) = distributed.sum_over_ranks(not math.isfinite(loss))
        self.refuse_non_finite("gradient norm", norm, step)
        self.refuse_non_finite("loss", torch.tensor(math.nan) if bad else None, step)
        # the last update is in neither: of one step in backward nothing else is known, and any may overflow
        if names := not_finite():
            self.stop_non_finite(f"{len(names)} weights or moments are NaN or infinite, {names[0]} among them,", step)

    def stop_non_finite(self, what: str, step: int, where: str = "") -> NoReturn:
        raise NonFiniteError(
            f"{what} after step {step}{where}; the run stops and saves no more. What usually helps, from the last "
            "checkpoint on: lower optimizer.lr, longer lr_scheduler.warmup_steps, training.max_norm = 1.0, float32"
        )

    def compare(self, step: int, now: bool = False) -> None:
        """What ranks hold alike after `step`, if it is time to, or `now`. Raises `ReplicasDiffer` on all ranks."""
        if self.compare_every and step != self._compared and (now or step % self.compare_every == 0):
            self.replicas.check()
            self._compared = step

    def went_back_to(self, step: int) -> None:
        """The run is at the state of this step again; those after it come again, with other numbers perhaps."""
        self.steps.went_back_to(step)
        self._compared = -1

    def _first_layer(self) -> str:
        layers = self.model.not_finite_layers()
        return f" (first seen by the router of {layers[0]})" if layers else ""
