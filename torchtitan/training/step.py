"""The training step: everything between the microbatches of one step and those of the next.

The trainer, `torchtitan replay` and the rehearsals of the planner and of `torchtitan rehearse` run this step. They
differ in the data, which a rehearsal makes up, and in the observer. The host waits for the device only if the step is
logged or the job asks for it, and reads values only by `host`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchtitan.assembly import observers
from torchtitan.datasets.position import Position
from torchtitan.datasets.segments import SegmentPosition
from torchtitan.guards import Guards, not_finite
from torchtitan.job import ResolvedJob
from torchtitan.lr_scheduling import LRSchedulers
from torchtitan.metrics.logger import LOGGED, MetricsLogger, gather_histograms, histograms_of
from torchtitan.metrics.stragglers import Stragglers
from torchtitan.optimizers.build import Optimizers
from torchtitan.parallelisms.parallel_model import Batch, ParallelModel
from torchtitan.process.host import host
from torchtitan.process.machine import return_unused_memory
from torchtitan.process.ranks import Ranks
from torchtitan.training.callbacks import CallbackRunner
from torchtitan.training.restore import TrainState

FORWARD_BACKWARD, CLIPPING, GUARDS, OPTIMIZER = "forward and backward", "clipping", "guards", "optimizer"
AFTER_UPDATE, LOG, COMPARISON = "after the update", "log", "comparison of replicas"


@dataclass(frozen=True)
class StepData:
    """Data of one step on this rank, and what all ranks have agreed on."""

    microbatches: Sequence[Batch]
    valid_tokens: int
    """Tokens with a loss, of all ranks."""
    valid_share: float
    """This data-parallel rank's share of them."""
    tokens: int
    """Tokens of all ranks."""
    seconds: float
    """How long this rank waited for data."""
    position: Position | SegmentPosition | None
    """Data position after the step."""


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step."""

    step: int
    """Number of the step, counted from 1."""
    loss_share: torch.Tensor
    """This rank's share of the loss, a scalar on the device; all ranks' shares sum to it."""
    grad_norm: torch.Tensor | None
    """Norm of the gradient before it was clipped, a scalar on the device; None if the optimizer steps in backward."""
    lr: float
    """Learning rate of the step."""
    skip_reason: str
    """Why the update was skipped; empty if it was not."""


class StepObserver:
    """Is told when a part of a step begins and ends, unless it fails; "forward and backward" of each microbatch."""

    def start(self, data: StepData) -> None:
        """Note the data of the step that begins."""

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


@dataclass
class TrainingStep:
    """The step of a job, and what it changes. All ranks run it together.

    `max_norm`: of the gradients. `last_step`: of the run. `steps_in_backward`: the optimizer steps in backward.
    `epochs` and `data_steps`: passes over the data, None without an end by epochs, and their steps.
    """

    model: ParallelModel
    optimizers: Optimizers
    schedulers: LRSchedulers
    guards: Guards
    metrics: MetricsLogger
    stragglers: Stragglers
    state: TrainState
    max_norm: float
    last_step: int
    steps_in_backward: bool
    dp_rank: int
    callbacks: CallbackRunner
    epochs: int | None = None
    data_steps: int | None = None
    observer: StepObserver = field(default_factory=StepObserver)
    has_begun: bool = False
    """True between the first gradients of a step and its update."""

    def run(self, data: StepData) -> StepResult:
        """Make one optimizer step. Raises what `Guards` raises, on all ranks."""
        return self.update(data, self.forward_backward(data))

    def forward_backward(self, data: StepData, normalizer: float | None = None, is_last: bool = True) -> torch.Tensor:
        """Accumulate the gradients of all microbatches. Return this rank's share of the loss, a scalar.

        `normalizer`: what the sum of losses is divided by, of all ranks; None: `data.valid_tokens`. `is_last`: no more
        gradients are accumulated in this step.
        """
        self.observer.start(data)
        if not self.has_begun:
            self.has_begun = True
            self.callbacks.run("before_step", data)
            self.guards.replay(self.state.step + 1, data.microbatches)
        self.stragglers.begin_step(data.seconds)
        self.state.is_complete = not self.steps_in_backward
        loss, valid_tokens = torch.zeros((), device=self.model.device), max(data.valid_tokens, 1)
        # without a token to learn nothing is updated, but an adapter may remember the batch
        num_run = 0 if self.steps_in_backward and not data.valid_tokens else len(data.microbatches)
        for index, batch in enumerate(data.microbatches[:num_run]):
            self.observer.begin(FORWARD_BACKWARD)
            is_last_batch = is_last and index == num_run - 1
            loss += self.model.forward_backward(batch, valid_tokens, is_last=is_last_batch, normalizer=normalizer)
            self.observer.end(FORWARD_BACKWARD)
        return loss

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients and return their norm, a scalar; None if the optimizer steps in backward, which frees
        them.
        """
        if self.steps_in_backward:
            return None
        self.observer.begin(CLIPPING)
        norm = self.model.clip_gradients(self.max_norm)
        self.observer.end(CLIPPING)
        return norm

    def update(self, data: StepData, loss: torch.Tensor) -> StepResult:
        """Clip, update the weights and log, after the gradients of `data`. `loss`: this rank's share, a scalar."""
        self.callbacks.run("after_backward")
        state, observer, norm = self.state, self.observer, self.clip()
        observer.begin(GUARDS)
        skip_reason = self.reason_to_skip(data, loss, norm)
        observer.end(GUARDS)
        lr = self.schedulers.last_lr
        state.is_complete = False
        if not skip_reason:
            observer.begin(OPTIMIZER)
            self.optimizers.step()
            observer.end(OPTIMIZER)
            state.loss, state.grad_norm = loss, norm
        observer.begin(AFTER_UPDATE)
        self.schedulers.step()
        return_unused_memory(state.step + 1 - state.start_step)
        self.optimizers.zero_grad()
        state.step += 1
        self.run_hooks(state.step, updated=not skip_reason)
        state.tokens += data.tokens
        observer.end(AFTER_UPDATE)
        observer.begin(LOG)
        if skip_reason:
            self.metrics.record_skip(state.step, skip_reason, self.guards.steps.skipped)
        self.log(data, loss if data.valid_tokens else None, norm, lr, refuse=not skip_reason)
        observer.end(LOG)
        state.position, state.random, state.is_complete = data.position, None, True
        observer.begin(COMPARISON)
        self.guards.compare(state.step)
        observer.end(COMPARISON)
        result = StepResult(state.step, loss, norm, lr, skip_reason)
        self.callbacks.run("after_step", result)
        return result

    def reason_to_skip(self, data: StepData, loss: torch.Tensor, norm: torch.Tensor | None) -> str:
        """Return why the update is skipped, or "", from the scalars loss and norm. Record histograms when due."""
        step = self.state.step + 1
        if self.metrics.histograms_due(step):
            histograms = gather_histograms(histograms_of(self.model.named_parameters()))
            self.metrics.record_histograms(step, histograms)
        return self.guards.reason_to_skip(
            step,
            loss,
            norm,
            can_skip=not self.steps_in_backward,
            valid_tokens=data.valid_tokens,
            is_last=step >= self.last_step,
        )

    def run_hooks(self, step: int, updated: bool) -> None:
        """Run the model's hooks after a step, which reset its counters. `updated`: the step was applied."""
        self.has_begun = False
        self.model.after_step(step - self.state.schedule_start, self.optimizers.optimizers, updated=updated)

    def log(
        self, data: StepData, loss: torch.Tensor | None, norm: torch.Tensor | None, lr: float, refuse: bool = True
    ) -> None:
        """Record a step. `loss`, this rank's share, and `norm` are scalars; a step with nothing to learn has no loss.
        `refuse`: raise if one is not finite."""
        step, extra, mean = self.state.step, dict[str, torch.Tensor | float](), None
        if loss is not None and self.metrics.due(step):
            with host.reading(LOGGED):
                mean, extra["max_loss"] = self.losses(data, loss, norm, refuse)
                extra |= self.model.extra_metrics() | self.guards.steps.counts() | self.optimizers.measured()
                extra |= self.stragglers.compare(step, self.metrics)
            if self.epochs is not None:
                extra["epoch"] = step * self.epochs / (self.data_steps or 1)
        tokens = self.state.tokens - self.metrics.tokens_seen
        self.metrics.record(
            step, loss=mean, grad_norm=norm, lr=lr, tokens=tokens, data_seconds=data.seconds, extra=extra
        )

    @host.computes
    def losses(
        self, data: StepData, loss: torch.Tensor, norm: torch.Tensor | None, refuse: bool
    ) -> tuple[float, float]:
        """Return the mean loss of all tokens, and the largest mean of a data-parallel rank's tokens, from the scalars
        that `log` has.
        """
        # the means of the data-parallel ranks, and last the number of ranks with a bad norm
        means = loss.new_zeros(self.model.dims.dp + 1)
        means[self.dp_rank] = loss / data.valid_share
        means[-1] = 0 if norm is None else ~norm.isfinite()
        means, loss = self.model.sum_over_ranks(means), self.model.sum_over_ranks(loss)
        if refuse:
            self.guards.refuse_non_finite("gradient norm", norm, float(means[-1]), self.state.step)
            self.guards.refuse_non_finite("loss", loss, not_finite(loss), self.state.step)
        return float(loss), float(means[:-1].max())


def training_step(
    job: ResolvedJob,
    ranks: Ranks,
    model: ParallelModel,
    optimizers: Optimizers,
    schedulers: LRSchedulers,
    guards: Guards,
    metrics: MetricsLogger,
    state: TrainState,
    callbacks: CallbackRunner,
    data_steps: int | None = None,
) -> TrainingStep:
    """Build the step of a job from its parts. `data_steps`: as in `TrainingStep`."""
    if callbacks.names["on_log"]:
        metrics.on_record = callbacks.on_log
    return TrainingStep(
        model,
        optimizers,
        schedulers,
        guards,
        metrics,
        observers.stragglers(job.model, model, ranks),
        state,
        max_norm=job.config.training.max_norm,
        last_step=job.schedule.steps,
        steps_in_backward=job.config.optimizer.early_step_in_backward,
        dp_rank=model.dims.dp_rank(model.mesh),
        callbacks=callbacks,
        epochs=job.config.training.epochs,
        data_steps=data_steps,
    )
