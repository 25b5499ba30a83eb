"""Guards against bad training steps and damaged memory.

A bad step stops the run, is skipped, or rolls the run back to a checkpoint. Non-finite state is never saved, and ranks
that must hold equal values are compared.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from torchtitan.guards.checksums import MAX_NAMES_IN_ERRORS, Replicas, ReplicasDiffer, ShardSums
from torchtitan.guards.probe import compare_forwards
from torchtitan.guards.steps import WITHOUT_LABELS, BadStep, NonFiniteError, NothingToLearn, RollBack, StepGuard
from torchtitan.parallelisms.parallel_model import Batch, ParallelModel
from torchtitan.process import distributed
from torchtitan.process.host import host

__all__ = [
    "BadStep",
    "Guards",
    "NonFiniteError",
    "NothingToLearn",
    "Replicas",
    "ReplicasDiffer",
    "RollBack",
    "ShardSums",
    "StepGuard",
    "not_finite",
]

logger = logging.getLogger(__name__)

MOST_EMPTY_STEPS = 10
"""Steps in a row without a token to learn after which a run stops. Data that have any would hardly have so few."""
JUDGED = "loss and norm, for the guard that the job asks for"
"""Why the host reads from the device in a judged step."""


class Guards:
    """The guards of a run. Every rank has them and makes the same calls at the same steps.

    `compare_every`: interval, in steps, at which replicated tensors are compared across ranks; 0 disables it.
    `replay_every`: the same for a forward that two ranks make.
    `record_rollback(step)` records, on rank 0, that the run returns to a checkpoint because its state after `step` is
    damaged, and returns True if it has done so before.
    """

    def __init__(
        self,
        steps: StepGuard,
        replicas: Replicas,
        model: ParallelModel,
        compare_every: int,
        record_rollback: Callable[[int], bool] = lambda step: False,
        shards: ShardSums | None = None,
        replay_every: int = 0,
    ):
        self.steps, self.replicas, self.model, self.compare_every = steps, replicas, model, compare_every
        self.record_rollback, self.shards, self.replay_every = record_rollback, shards, replay_every
        self.checkpointer: Any = None
        """The checkpointer that a rollback loads from; set by the trainer once it has one."""
        self._compared = -1
        self._rollback_steps: set[int] = set()
        self.most_empty_steps = MOST_EMPTY_STEPS
        self._empty_steps = 0
        """Number of steps in a row that had nothing to learn."""
        self._finite_steps: dict[str, int] = {}
        """The last step since the start or a rollback in which a quantity was checked and finite, by its name."""

    def reason_to_skip(
        self,
        step: int,
        loss: torch.Tensor,
        norm: torch.Tensor | None,
        *,
        can_skip: bool,
        valid_tokens: int = 1,
        is_last: bool = False,
    ) -> str:
        """Return why the update of the `step`-th step is skipped, or "" to apply it. Called before the update. `loss`,
        this rank's share, and `norm` are scalars. `valid_tokens`: of the step, on all ranks. `is_last`: of the run.

        Raises, on all ranks, `RollBack`, or for a run that has to stop `BadStep` or `NothingToLearn`.
        """
        self.refuse_changed_shards(step - 1)
        self._empty_steps = 0 if valid_tokens else self._empty_steps + 1
        if not valid_tokens:
            return self._skip_empty(step, is_last)
        if not self.steps.is_active:
            if norm is not None and norm.device.type == "cpu":  # on a CPU the check costs almost nothing
                (ranks,) = distributed.sum_ints(not_finite(norm))
                self.refuse_non_finite("gradient norm", norm, ranks, step - 1, step)
            return ""
        # the norm is global, but a faulty machine may compute another value, and all ranks must reach the same verdict
        dims = self.model.dims
        local_loss, local_norm = host.value(loss, JUDGED), 0.0 if norm is None else host.value(norm, JUDGED)
        total_loss, norm_sum = distributed.sum_floats(local_loss / dims.tp, local_norm)
        mean_norm = None if norm is None else norm_sum / dims.world_size
        finite = math.isfinite(total_loss) and math.isfinite(norm_sum)
        damage = ""
        if not finite:  # with damaged weights every further step is bad too, so skipping this one would not help
            damage = self.roll_back_if_damaged(step - 1)
        verdict = self.steps.judge(
            step, total_loss, mean_norm, can_skip=can_skip, prepare_roll_back=self.prepare_roll_back
        )
        if verdict.action == "go on":
            return ""
        layer_hint = self._first_layer()
        if verdict.action == "stop":
            if not finite:
                self.stop_non_finite(f"{verdict.reason} in step {step}", step - 1, step, layer_hint, damage)
            raise BadStep(f"step {step}: {verdict.reason}; the run stops before its update")
        if verdict.action == "roll back":
            raise RollBack(verdict.reason + layer_hint)
        return verdict.reason + layer_hint

    def has_learned_nothing(self, step: int) -> bool:
        """Return True if no step up to `step`, nor the next one that has begun, had a token to learn."""
        return self._empty_steps > step

    def _skip_empty(self, step: int, is_last: bool) -> str:
        """Skip a step without a token to learn, as its update would only decay the weights. The run stops if many
        such steps follow each other, or if it has no other ones.
        """
        if self._empty_steps == self.most_empty_steps or (is_last and self._empty_steps == step):
            steps = f"none of the last {self._empty_steps} steps, up to step {step}"
            raise NothingToLearn(f"{steps}, has a token to train on: {WITHOUT_LABELS}")
        self.steps.skipped += 1
        return "it has no token to train on"

    def refuse_non_finite(
        self, quantity: str, value: torch.Tensor | None, ranks: float, step: int, measured_in: int | None = None
    ) -> None:
        """Stop the run or roll it back if a scalar is not finite on `ranks` > 0 ranks. Once NaN, weights stay NaN.

        `step`: the last one that is done. `measured_in`: the scalar's step, if it is another one.

        All ranks must agree on the number of ranks first: replicas compute their own norms, so an error of one machine
        may show there alone, and the remedy is collective.
        """
        bad_step = measured_in or step
        if not ranks:
            self._finite_steps[quantity] = bad_step
            return
        damage = self.roll_back_if_damaged(step)
        flags = distributed.all_gather_json(not_finite(value))
        numbers = ", ".join(str(rank) for rank, flag in enumerate(flags) if flag)
        reading = f"NaN or infinite on rank {numbers} alone" if value is None or not all(flags) else str(float(value))
        fault = f"the {quantity} is {reading} in step {bad_step}"
        if quantity not in self._finite_steps and bad_step > 1:
            fault += ", the first one checked"
        elif self._finite_steps.get(quantity, 0) < bad_step - 1:
            fault += f", the first one checked since step {self._finite_steps[quantity]}"
        self.stop_non_finite(fault, step, bad_step, self._first_layer(), damage)

    def refuse_to_save(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor | None, damaged: Callable[[], list[str]]
    ) -> None:
        """Raise if the state after `step` must not be saved. Called before every save, even without a logged loss.

        `loss` and `norm` are scalars. The ranks' local losses differ, and norms may, so the ranks agree first.
        """
        self.compare(step, now=True)
        self.refuse_changed_shards(step)
        norms, losses = distributed.sum_ints(not_finite(norm), not_finite(loss))
        self.refuse_non_finite("gradient norm", norm, norms, step)
        self.refuse_non_finite("loss", torch.tensor(math.nan), losses, step)
        # neither value covers the last update: it may overflow, and with a step in backward there is no other check
        if names := damaged():
            self.roll_back(describe_damage(names), step)
            self.stop_non_finite(f"{describe_damage(names)} after step {step}", step, step)

    def stop_non_finite(self, fault: str, step: int, bad_step: int, hint: str = "", damage: str = "") -> NoReturn:
        """Raise NonFiniteError. `step`: the last one that is done. `bad_step`: the one to look into. `damage`: of the
        weights and moments after `step`. Where that came before `bad_step`, its update is the one to look into.
        """
        if damage and 0 < step < bad_step:
            hint, bad_step = f"{hint}: {damage} after step {step}", step
        history = ", although the run went back to its checkpoint for that step before" * (step in self._rollback_steps)
        raise NonFiniteError(
            f"{fault}{hint}{history}; the run stops and saves no more. `torchtitan replay RUN --step {bad_step}` shows "
            "where it comes from. What usually helps, from the last checkpoint on: lower optimizer.lr, longer "
            "lr_scheduler.warmup_steps, training.max_norm = 1.0, float32"
        )

    def prepare_roll_back(self) -> bool:
        """Wait for the save under way; return True if there is a checkpoint to go back to. Every rank calls it."""
        return self.checkpointer is not None and self.checkpointer.prepare_roll_back()

    def roll_back_if_damaged(self, step: int) -> str:
        """Raise `RollBack` if weights or moments after `step` are NaN or infinite and `roll_back` allows it.

        Else return a description of the damage, or "". Every rank calls it. It reads all of them, so it is called only
        after a non-finite loss or gradient.
        """
        if self.checkpointer is None or not (names := self.checkpointer.not_finite()):
            return ""
        self.roll_back(describe_damage(names), step)
        return describe_damage(names)

    def roll_back(self, damage: str, step: int) -> None:
        """Raise `RollBack` for a damaged state after `step`, once for each step: a hardware error does not recur, but a
        fault of the job itself does. Return if the run has to stop. Every rank calls it.
        """
        if not self.prepare_roll_back():
            return
        if self.steps.tries >= self.steps.patience and self.steps.target == self.checkpointer.saved_step:
            return
        on_record = torch.distributed.get_rank() == 0 and self.record_rollback(step)
        (on_record,) = map(bool, distributed.broadcast_floats(on_record))
        repeated = on_record or step in self._rollback_steps
        self._rollback_steps.add(step)
        if not repeated:
            raise RollBack(f"{damage} after step {step}")

    def refuse_changed_shards(self, step: int) -> None:
        """Raise `RollBack`, or `BadStep` the second time, on all ranks if any rank's memory changed since `step`."""
        if self.shards is None:
            return
        names = self.shards.changed()
        if not sum(distributed.sum_ints(len(names))):
            return
        names_by_rank = distributed.all_gather_json(names)
        damage = "; ".join(describe_flips(rank, names) for rank, names in enumerate(names_by_rank) if names)
        self.roll_back(damage, step)
        history = ", again" * (step in self._rollback_steps)
        raise BadStep(
            f"{damage} after step {step}{history}; the run stops and saves no more. Have the memory of that machine "
            "tested, and start the run again without it"
        )

    def compare(self, step: int, now: bool = False) -> None:
        """Compare replicated tensors across ranks after `step`, if it is time to or with `now`. After a step (not
        `now`), record the checksums of the shards first.

        Raises `ReplicasDiffer` on all ranks.
        """
        if self.shards is not None and not now:
            self.shards.record()
        if self.compare_every and step != self._compared and (now or step % self.compare_every == 0):
            self.replicas.check()
            self._compared = step

    def replay(self, step: int, batches: Sequence[Batch]) -> None:
        """Compare the forward of the first of a step's microbatches with another rank's, if it is time to.

        Raises `ReplicasDiffer` on all ranks.
        """
        if self.replay_every and step % self.replay_every == 0 and self.model.dims.dp > 1:
            compare_forwards(self.model, batches[0], step)

    def after_load(self) -> None:
        """Forget what belongs to the state before a checkpoint was loaded in the middle of a run. Later steps are
        repeated, perhaps with other values.
        """
        self._compared = -1
        self._finite_steps.clear()
        if self.shards is not None:
            self.shards.record()

    def _first_layer(self) -> str:
        layers = self.model.not_finite_layers()
        return f" (first seen by the router of {layers[0]})" if layers else ""


def not_finite(value: torch.Tensor | None) -> int:
    """Return 1 for a scalar that is NaN or infinite, else 0. Waits for its device, so it is called only where the host
    waits anyway.
    """
    return int(value is not None and not math.isfinite(value))


def describe_damage(names: list[str]) -> str:
    """Describe tensors that hold NaN or infinity."""
    among = " among them" * (len(names) > MAX_NAMES_IN_ERRORS)
    return f"{len(names)} weights or moments are NaN or infinite, {', '.join(names[:MAX_NAMES_IN_ERRORS])}{among},"


def describe_flips(rank: int, names: list[str]) -> str:
    """Describe the tensors of a rank that changed although no step has updated them."""
    remainder = f" and {len(names) - MAX_NAMES_IN_ERRORS} more" if len(names) > MAX_NAMES_IN_ERRORS else ""
    return f"bits have changed in the memory of rank {rank}, in {', '.join(names[:MAX_NAMES_IN_ERRORS])}{remainder},"
