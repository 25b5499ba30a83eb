"""The engine of a job: its run on one rank (run.py), driven step by step from Python.

The trainer (trainer.py) is the engine with a loop. All ranks make the same calls in the same order. Errors of a caller
are raised on all ranks.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from torchtitan.checkpoint import RandomState
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.core.callbacks import Callback
from torchtitan.core.hub import Access, set_access
from torchtitan.guards import BadStep, RollBack
from torchtitan.launcher.processes import StopRequests
from torchtitan.launcher.rank import StopSignals, begin_run, report_end, start_rank
from torchtitan.launcher.script import announce
from torchtitan.losses.log_probs import LossFunction
from torchtitan.metrics.run_end import RunEnd
from torchtitan.process import distributed
from torchtitan.process.exit import CRASHED
from torchtitan.process.host import host
from torchtitan.rules import check
from torchtitan.training.batches import Batch
from torchtitan.training.caller_batches import EngineError, Pending
from torchtitan.training.ends import end_of, end_of_failure
from torchtitan.training.final_export import full_tensors
from torchtitan.training.run import Run
from torchtitan.training.sampling import Sample, batch_of, draw_samples
from torchtitan.training.step import StepData, StepResult

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLoss:
    """The loss of a `forward_backward`."""

    share: torch.Tensor
    """This rank's share of it, a scalar on the device. All ranks' shares sum to it."""
    valid_tokens: int
    """Tokens with a label, of all ranks."""
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]

    def __float__(self) -> float:
        """Return the loss. All ranks call it, as it sums their shares; it waits for the device."""
        return float(self.sum_over_ranks(self.share))


def engine_call(method: Callable[Concatenate["Engine", P], T]) -> Callable[Concatenate["Engine", P], T]:
    """Let a method report to the launcher that it runs, and then that the script continues, which may take longer than
    a step. The trainer's loop reports its phases itself.
    """

    @wraps(method)
    def call(engine: "Engine", *args: P.args, **kwargs: P.kwargs) -> T:
        if not engine.is_in_script:
            return method(engine, *args, **kwargs)
        engine.shorten_timeout()
        engine.enter("train" if engine.is_warm else "first", engine.current_step + 1)
        try:
            return method(engine, *args, **kwargs)
        finally:
            engine.enter("script", engine.current_step)

    return call


class Engine(Run):
    """One rank's part of a run of a job, as a context manager.

        with Engine.from_job("train_configs/debug_model.toml") as engine:
            for batch in engine.data:
                engine.forward_backward(batch)
                engine.optim_step()

    Attributes: `job` (its resolved job), `model` (this rank's share, a ParallelModel), `tokenizer`, `metrics` (its
    logger) and `ranks`.
    """

    @classmethod
    def from_job(
        cls, source: str | Path | Mapping[str, Any] | JobConfig, callbacks: Sequence[Callback] = (), **options: Any
    ) -> "Engine":
        """Build the engine of a job: a TOML file or the name of a shipped job, nested tables, or a JobConfig.

        `callbacks`: they run after those of the job. `options`: values of further options, by names with a dot:
        `**{"training.steps": 5}`. The launcher or torchrun sets the number of ranks; else it is 1. The first rank of a
        machine downloads what the job names on the hub. Raises ConfigError with all faults of the job.
        """
        ranks = start_rank()
        set_access(Access.WAIT if ranks.local_rank else Access.DOWNLOAD)
        config = manager.load_from(source, options)
        if faults := check(config, ranks.world_size, distributed.device_type()):
            raise ConfigError(faults)
        with ExitStack() as resources:
            resources.enter_context(begin_run(config, ranks))
            signals = None
            if threading.current_thread() is threading.main_thread():  # only there Python lets them be handled
                signals = StopSignals(ranks)
                resources.callback(signals.restore)
            announce(config, ranks)
            try:
                engine = cls(config, ranks, callbacks)
            except Exception as error:
                end = end_of_failure(error, None, ranks) or RunEnd(CRASHED, reason=f"{type(error).__name__}: {error}")
                report_end(end, None, Path(config.job.dump_folder), ranks)
                raise
            engine.is_in_script = True
            engine.progress.enter("script", engine.current_step)
            engine.signals, engine.resources = signals, resources.pop_all()
            if signals is not None:
                signals.on_request = engine.request_stop
        return engine

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        requests = self.signals.requests if self.signals is not None else StopRequests()
        if error is not None:
            self.callbacks.on_error(error)
        with self.resources:
            try:
                if error is None:
                    self.finish()
                    self.progress.enter("end", self.current_step)
            except Exception as failure:
                report_end(self._end_of(failure, requests), self.current_step, self.exports.folder, self.ranks)
                raise
            report_end(self._end_of(error, requests), self.current_step, self.exports.folder, self.ranks)

    def _end_of(self, error: BaseException | None, requests: StopRequests) -> RunEnd:
        """Return the end of the run, by an error or without one. Failures of the run are logged."""
        if error is None:
            if not self.done and not self.stops.agreed:  # the program had enough
                return RunEnd(0)
            return end_of(self, self.done, requests)
        if isinstance(error, Exception):
            reason = f"{type(error).__name__}: {error}"
            return end_of_failure(error, self, self.ranks) or RunEnd(CRASHED, reason=reason)
        if isinstance(error, SystemExit) and not requests.first:
            return RunEnd(error.code if isinstance(error.code, int) else CRASHED if error.code else 0)
        return RunEnd(128 + (requests.first or signal.SIGINT))

    def request_stop(self) -> None:
        """End `data` after the step that is under way, on all ranks. Signal handlers may call it."""
        self.stops.requested = True

    @property
    def stopping(self) -> bool:
        """True if all ranks agreed to stop, after a stop signal or near the time limit. A call with a batch agrees."""
        return self.stops.agreed

    # One step

    @property
    def data(self) -> Iterator[StepData]:
        """This rank's data, one optimizer step at a time, until the job is done or a stop was requested."""
        if self.current_step == self.state.start_step:
            self.metrics.start()
        while not self.done and not self.stops.agreed:
            yield self.fetch()

    @engine_call
    def fetch(self) -> StepData:
        """Return this rank's data of the next step, on which all ranks have agreed."""
        self._require_no_gradients("the data of another step", "call optim_step first")
        is_first = self.current_step == self.state.start_step
        self.enter("first" if is_first else "data", self.current_step + 1)
        self.shorten_timeout()
        self.state.random, started = RandomState(), time.perf_counter()
        self.batches = iter(self.loader) if self.batches is None else self.batches
        self.prefetcher.fetch(self.batches, self.loader.position, self.current_step)
        seconds = time.perf_counter() - started
        if not is_first:
            self.enter("train", self.current_step + 1)
        self._check_time()
        valid_tokens = self.prefetcher.agree(self.stops.requested)
        preparer, position = self.preparer, self.prefetcher.position
        tokens = preparer.trained_tokens(position.samples - self.fetched_position.samples, self.config.training.seq_len)
        self.fetched_position = position
        prepare, step = preparer.to_device_for_training, self.current_step
        microbatches = [prepare(batch, index, step) for index, batch in enumerate(self.prefetcher.batches)]
        return StepData(microbatches, valid_tokens, preparer.valid_share, tokens, seconds, position)

    def shorten_timeout(self) -> None:
        """Limit collectives to the time of a step, once, after the first one."""
        if self.is_warm or self.current_step == self.state.start_step:
            return
        step_timeout = self.config.comm.train_timeout_seconds
        distributed.set_timeout(distributed.collective_timeout(self.ranks, step_timeout))
        self.is_warm = True

    def _check_time(self) -> None:
        if self.ranks.is_main:
            self.stops.check_time(self.checkpointer.longest_save_seconds if self.checkpointer is not None else 0.0)

    @engine_call
    def forward_backward(
        self,
        batch: StepData | Batch,
        loss: LossFunction | None = None,
        normalizer: float | None = None,
        is_last: bool = True,
        entropy: bool = False,
    ) -> StepLoss:
        """Accumulate the gradients of the sum of losses of all ranks, divided by `normalizer`.

        `batch`: what `data` yields, or this rank's own samples as tensors [B, S] by name: tokens, labels (the token
        that follows each position; -100 for none), optionally document_ids with positions, and columns for the loss,
        [B, S, ...] or [B]. The ranks of tensor, context and pipeline parallel pass the same. `loss`: computes the sum
        of the losses of a microbatch from `LossInputs`, with their entropy if `entropy`; None: the job's objective.
        `normalizer`: the same on all ranks; None: the number of labels of all ranks. `is_last`: False for all but the
        last call before `optim_step` saves the reductions of earlier ones. Raises EngineError.
        """
        if self.training_step.steps_in_backward:
            raise EngineError(
                "optimizer.early_step_in_backward steps inside of backward, so forward_backward and optim_step cannot "
                "be separate; call step, or turn it off"
            )
        if self.pending is None and not isinstance(batch, StepData):
            self._check_time()
        batches = self.pending.batches if self.pending else 0
        data, objective = self.caller_batches.prepare(
            batch, self.state, self.stops, loss, entropy, batches, normalizer, is_last
        )
        with nullcontext() if objective is None else self.model.objective(objective):
            share = self.training_step.forward_backward(data, normalizer, is_last)
        call = Pending(data, share, len(data.microbatches), is_last, isinstance(batch, StepData))
        self.pending = call if self.pending is None else self.pending.followed_by(call)
        return StepLoss(share, data.valid_tokens, self.model.sum_over_ranks)

    @engine_call
    def optim_step(self, lr: float | None = None) -> StepResult:
        """Clip the gradients, update the weights and log. `lr`: of this step in place of the schedule's; parameter
        groups keep their ratios. Raises EngineError, and the errors of the job's guards.
        """
        pending = self.pending
        if pending is None or not pending.is_last:
            missing = "no forward_backward before it" if pending is None else "the last one had is_last = False"
            raise EngineError(f"optim_step: {missing}; call forward_backward(batch) with is_last = True first")
        if lr is not None and not 0 <= lr < float("inf"):
            raise EngineError(f"lr: given {lr}; allowed: a number of 0 or more")
        if lr is not None:
            self.training_step.schedulers.use_once(lr)
        self.pending = None
        return self._make_step(partial(self.training_step.update, pending.data, pending.loss), pending.is_fetched)

    @engine_call
    def step(self, batch: StepData | Batch) -> StepResult:
        """Make one optimizer step of `data`, or of a batch as for `forward_backward`, with the job's objective."""
        self._require_no_gradients("step", "call optim_step first")
        if isinstance(batch, StepData):
            data = batch
        else:
            self._check_time()
            data, _ = self.caller_batches.prepare(batch, self.state, self.stops, call="step")
        return self._make_step(partial(self.training_step.run, data), data is batch)

    def _make_step(self, step: Callable[[], StepResult], is_fetched: bool) -> StepResult:
        """Make a step. Where a guard rolls back, a program gets the step that the run is back at, and why."""
        lr = self.training_step.schedulers.last_lr
        try:
            result = step()
        except RollBack as error:
            if not self.is_in_script:  # the trainer's loop rolls back
                raise
            reason = f"back to the checkpoint of an earlier step: {error}"
            self.roll_back(str(error))
            return StepResult(self.current_step, torch.zeros((), device=self.model.device), None, lr, reason)
        except BadStep:
            self.optimizers.zero_grad()  # a program may continue
            raise
        if is_fetched:
            self.stops.agreed = self.prefetcher.stopping  # begun in fetch(), so all ranks had the whole step to answer
        return result

    def _require_no_gradients(self, call: str, remedy: str) -> None:
        if self.pending is not None:
            raise EngineError(f"{call}: the gradients of a forward_backward were not used yet; {remedy}")

    # Without gradients

    @engine_call
    @torch.no_grad()
    def forward(self, batch: StepData | Batch) -> torch.Tensor:
        """Return the log-probability of each label, [B, S] on the device of every rank; 0 where there is no label.

        `batch`: as for `forward_backward`. Dropout is off.
        """
        self._require_no_gradients("forward", "call optim_step first")
        return self.caller_batches.log_probs(batch, self.state, self.stops)

    @engine_call
    def evaluate(self, batches: Sequence[StepData | Batch] | None = None) -> dict[str, float]:
        """Return the mean loss of batches of the caller's on all ranks, or of the job's held-out data.

        The results of held-out data are logged and count for early stopping; other metrics of the task are among them.
        """
        self._require_no_gradients("evaluate", "call optim_step first")
        if batches is not None:
            return {"loss": self.caller_batches.mean_loss(batches, self.state, self.stops)}
        if self.validator.held_out is None:
            raise EngineError("evaluate: the job has no held-out data; set validation.enable, or pass batches")
        return self.validate(False) or {}

    def generate(
        self, prompts: Sequence[str], max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """Return the texts of `sample`, by default of the most probable tokens."""
        return [sample.text for sample in self.sample(prompts, max_new_tokens, temperature, seed)]

    @engine_call
    def sample(
        self, prompts: Sequence[str], max_new_tokens: int = 64, temperature: float = 1.0, seed: int = 0
    ) -> list[Sample]:
        """Return continuations of the prompts, the same on all ranks. All ranks pass the same.

        `temperature`: 0 takes the most probable token. A continuation ends at an end token, which it keeps, after
        `max_new_tokens` or at training.seq_len. There is no KV cache: a token costs a forward of all prompts. Neither
        pipeline nor context parallel are supported.
        """
        self._require_no_gradients("generate", "call optim_step first")
        generations = self.validator.generations
        return draw_samples(self.job, self.model, generations, prompts, max_new_tokens, temperature, seed)

    def batch_of(self, samples: Sequence[Sample]) -> Batch:
        """Return tokens and labels [B, S] of this rank's samples, with labels on their continuations."""
        return batch_of(samples, self.caller_batches.rows, self.config.training.seq_len)

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) of the model on every rank, one at a time, with an adapter merged in.

        All ranks iterate to the end, as each tensor is gathered when it is reached.
        """
        self._require_no_gradients("weights", "call optim_step first")
        yield from full_tensors(self.model)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute without the adapter inside of this context, e.g. the log-probabilities of the base model."""
        if self.model.adapter is None:
            raise EngineError("disable_adapter: the job has no adapter; set adapter.kind")
        return self.model.adapter.disabled(self.model.parts)

    # The run

    @engine_call
    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor of all ranks, on the CPU; the ranks of a tensor-parallel group count once.

        All ranks call it, with tensors of one shape. It waits for the device.
        """
        with host.reading("engine.sum_over_ranks"):
            local_values = tensor.detach().to("cpu")
        with host.computing():
            return self.model.sum_over_ranks(local_values)

    def stop(self, reason: str) -> None:
        """End the run after this step as a complete one. All ranks call it, at the same step."""
        self.findings.requested_stop = reason

    @engine_call
    def save(self) -> Path:
        """Save a checkpoint of this step and return its folder, when it is complete."""
        self._require_no_gradients("save", "call optim_step first, as gradients are not saved")
        if self.checkpointer is None or self.checkpointer.load_only:
            raise EngineError("save: checkpoint.enable is off; set it")
        self.enter("save", self.current_step)
        if self.checkpointer.maybe_save(self.current_step, last=True):
            self._note_save()
        self.checkpointer.finish()
        if self.checkpointer.published_step != self.current_step:
            raise EngineError(f"save: step {self.current_step} was not saved; the log tells why")
        return self.checkpointer.folder_of(self.current_step)

    @engine_call
    def load(self, step: int | None = None) -> int:
        """Go back to the newest checkpoint of the run, or to the one of `step`, and to its data. Return its step."""
        if self.checkpointer is None or not self.checkpointer.prepare_roll_back():
            raise EngineError("load: the run has no checkpoint; set checkpoint.enable, and save one first")
        self._go_back(partial(self.checkpointer.roll_back, step))
        return self.current_step

    def close(self) -> None:
        """End the run, as leaving the context does: a notebook calls it before it builds another engine."""
        self.__exit__(None, None, None)
