"""The engine of a job: everything that one rank needs to train, driven step by step from Python.

`Engine` builds the parts of a job and restores its run. A program drives it, and the trainer (trainer.py) is the engine
with a loop. All ranks make the same calls in the same order. Errors of a caller are raised on all ranks.
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

from torchtitan.assembly import observers, parts
from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint import RandomState, TrainerHooks
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError
from torchtitan.core.cadence import describe_end
from torchtitan.core.callbacks import Callback
from torchtitan.datasets.segments import SegmentLoader
from torchtitan.guards import MOST_EMPTY_STEPS
from torchtitan.guards.stop_conditions import Stops
from torchtitan.job import ResolvedJob
from torchtitan.launcher import run_folder
from torchtitan.launcher.processes import StopRequests
from torchtitan.launcher.rank import StopSignals, begin_run, report_end, start_rank
from torchtitan.launcher.script import announce
from torchtitan.losses.log_probs import LossFunction
from torchtitan.metrics.goodput import CAUSE_OF, Goodput
from torchtitan.metrics.run_end import RunEnd
from torchtitan.process import distributed
from torchtitan.process.exit import CRASHED
from torchtitan.process.heartbeat import Progress
from torchtitan.process.host import host
from torchtitan.process.ranks import Ranks, Restart
from torchtitan.rules import check
from torchtitan.training import preflight
from torchtitan.training.batches import Batch, Prefetcher, batch_preparer, prepare_adapter
from torchtitan.training.callbacks import Callbacks, callbacks_of
from torchtitan.training.caller_batches import CallerBatches, EngineError, Pending, check_prompts
from torchtitan.training.ends import end_of, end_of_failure
from torchtitan.training.final_export import Exports, full_tensors
from torchtitan.training.reference_logprobs import load_references
from torchtitan.training.reporting import log_end, log_start, plan_to_record, record_start
from torchtitan.training.restore import Restorer, TrainState
from torchtitan.training.step import StepData, StepResult, training_step
from torchtitan.training.validation import Validator, chooser

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
    """Let a method tell the launcher that it is under way, and then that the script goes on, whose code may take longer
    than a step. The trainer's own loop has only the former.
    """

    @wraps(method)
    def call(engine: "Engine", *args: P.args, **kwargs: P.kwargs) -> T:
        if not engine.is_in_script:
            return method(engine, *args, **kwargs)
        engine.enter("train" if engine.is_warm else "first", engine.current_step + 1)
        try:
            return method(engine, *args, **kwargs)
        finally:
            engine.enter("script", engine.current_step)

    return call


class Engine:
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
        `**{"training.steps": 5}`. The number of ranks is that of the launcher or torchrun, or 1. Raises ConfigError
        with all faults of the job.
        """
        ranks, config = start_rank(), manager.load_from(source, options)
        if faults := check(config, ranks.world_size, distributed.device_type()):
            raise ConfigError(faults)
        with ExitStack() as resources:
            resources.enter_context(begin_run(config, ranks))
            signals = None
            if threading.current_thread() is threading.main_thread():  # only there Python lets them be handled
                signals = StopSignals(ranks)
                resources.callback(signals.restore)
            announce(config, ranks)
            engine = cls(config, ranks, callbacks)
            engine.is_in_script = True
            engine.progress.enter("script", engine.current_step)
            engine.signals, engine.resources = signals, resources.pop_all()
            if signals is not None:
                signals.on_request = engine.request_stop
        return engine

    def __init__(self, config: JobConfig, ranks: Ranks, callbacks: Sequence[Callback] = ()):
        """Build the parts and restore the run. `config`: a job without faults (`from_job` checks one)."""
        job = ResolvedJob(config, ranks.world_size, distributed.device_type())
        restart = ranks.launcher.restart if ranks.launcher else None
        job = job.restarted() if restart and restart.saved else job
        as_written = job = job.with_lasting_options()  # before its last step is computed
        # before any process group exists, because tokenizing may take long
        last_data_step = JobDatasets(job).last_step()
        self.job = job = job.ending_at(last_data_step)
        validate_every = job.schedule.cadence.validate  # refuses a save without a validation
        config, self.ranks, self.stops = job.config, ranks, Stops(observers.time_limit(job.config.job.time_limit))
        self.progress = Progress(ranks.launcher.progress if ranks.launcher else None, ranks.local_rank)
        # the failure's time is from the clock of rank 0's machine, so only rank 0 uses it
        self.goodput = Goodput(restart.ended if restart and ranks.is_main else None)
        # the launcher's watchdog reports first: it knows which rank is late, a collective only knows that it waited
        timeout = distributed.collective_timeout(ranks, config.comm.init_timeout_seconds, may_spin=True)
        watched = config.comm.init_timeout_seconds if ranks.launcher else None
        self.owns_group = not torch.distributed.is_initialized()
        """The process group ends with this engine: another one, or the program, has not created it."""
        device = distributed.init(ranks, timeout, config.comm.trace_buf_size, watched, Path(config.job.dump_folder))
        memory_limit = distributed.limit_memory(config.memory.limit, device)
        if config.debug.deterministic:
            distributed.set_deterministic(config.debug.deterministic_warn_only)
        mesh = job.layout.dims.build_mesh(device.type)
        dp_rank = job.layout.dims.dp_rank(mesh)
        distributed.set_seed(config.debug.seed, dp_rank)
        self.tokenizer = job.tokenizer()
        self.exports = Exports(job, ranks, self.tokenizer)
        self.model = ModelBuilder(job).model(mesh, device, init_weights=False)
        distributed.set_timeout(timeout)  # the mesh's groups were created with torch's default
        in_backward = config.optimizer.early_step_in_backward
        self.callbacks = Callbacks(self.model, callbacks_of(config.callbacks, callbacks), in_backward)
        self.preparer = batch_preparer(job, self.tokenizer, dp_rank, device, self.model.needs_keys)
        self.optimizers = parts.optimizers(config.optimizer, self.model)
        schedulers = parts.lr_schedulers(job, self.optimizers, job.schedule.start)
        self.findings = observers.findings(config.early_stop, job.saving.best_metric)
        self.guards = observers.guards(config.guard, self.exports.folder, self.model, self.optimizers)
        preflight.check(config, ranks, self.tokenizer.fingerprint, self.model)
        self.state, self.is_warm, self.is_closed = TrainState(), False, False
        self.is_in_script = False
        """True if a program drives this engine by its calls."""
        self.signals: StopSignals | None = None
        self.resources = ExitStack()
        """What `from_job` holds for the run: its folder and the signal handlers."""
        self.restorer = Restorer(
            job, ranks, self.model, dp_rank, self.state, schedulers, self.guards, self.findings, self.goodput
        )
        last_data_step = self._begin(as_written, restart, last_data_step, validate_every)
        sizes, end = self.metrics.header(), describe_end(as_written.config.training, last_data_step)
        log_start(self.job, self.model, self.tokenizer, schedulers, sizes, memory_limit, end)
        self.callbacks.start(self)

    def _begin(
        self, as_written: ResolvedJob, restart: Restart | None, last_data_step: int | None, validate_every: int
    ) -> int | None:
        """Restore the run or its initial weights, position the data loader, open the metrics. Return the last step
        with data, None without an end by data; it may differ from the `last_data_step` of a new run.
        """
        restorer, state, model, ranks = self.restorer, self.state, self.model, self.ranks
        hooks = TrainerHooks(restorer.trainer_state, restorer.rank_state, restorer.load_state, self.before_save)
        hooks.before_load, hooks.after_save = restorer.check_job, partial(run_folder.record_save, self.exports.folder)
        hooks.extra_state = self.callbacks
        self.checkpointer = parts.checkpointer(self.job, model, self.optimizers, hooks)
        self.guards.checkpointer = self.checkpointer
        self.progress.enter("load")
        resumed_step = restorer.restore(self.checkpointer)
        if self.checkpointer is not None:
            self.checkpointer.prepare()
        state.start_step = self.current_step
        if state.loader_state is not None:  # a padded last step, or steps of another size, shift the end
            last_data_step = JobDatasets(as_written).last_step(state.loader_state["samples"], self.current_step)
            self.job = restorer.job = as_written.ending_at(last_data_step)
        job = self.job
        self._open_data(restorer.adapter_is_fresh)
        self.preparer.references = load_references(
            job, ranks, model, self.preparer, self.current_step, self.progress, state.loader_state
        )
        self.prefetcher = Prefetcher(self.preparer, job.layout.batches_per_step, job.schedule.steps)
        preflight.check_data(self.config.job.preflight, ranks, self.loader.position().fingerprint)
        self.validator = Validator(
            job, self.tokenizer, model, self.preparer, self.progress, ranks.is_main, resumed_step, validate_every
        )
        self.metrics = observers.metrics(job, model.device, ranks, resumed_step, state.tokens, model.adapter)
        self.caller_batches = CallerBatches(job, model, self.preparer)
        self.training_step = training_step(
            job,
            ranks,
            model,
            self.optimizers,
            restorer.schedulers,
            self.guards,
            self.metrics,
            state,
            self.callbacks,
            last_data_step,
        )
        if ranks.is_main:
            plan = plan_to_record(job.layout.samples, model, ranks)
            toml = manager.to_toml(as_written.portable().config)
            run_folder.record_start(self.exports.folder, toml, self.current_step, plan)
        loaded_from = self.checkpointer.loaded_from if self.checkpointer and resumed_step is not None else None
        tags, in_background = job.config.job.tags, job.config.checkpoint.async_mode != "disabled"
        record_start(tags, in_background, restart, self.metrics, self.goodput, self.current_step, loaded_from)
        return last_data_step

    def _open_data(self, adapter_is_fresh: bool = False) -> None:
        """Open the loader at the position of the checkpoint, or at the start of the data."""
        datasets, dp_rank = JobDatasets(self.job), self.preparer.dp_rank
        self.loader = datasets.training_loader(self.tokenizer, dp_rank, self.state.loader_state)
        if isinstance(self.loader, SegmentLoader):  # the labels of long documents may come last
            longest = self.loader.documents.most_segments(self.config.training.seq_len)
            self.guards.most_empty_steps = MOST_EMPTY_STEPS + longest
        first_segments = partial(datasets.first_segments, dp_rank)
        prepare_adapter(self.loader, self.model, self.preparer, first_segments if adapter_is_fresh else None)
        self.state.position, self.state.random, self.state.is_complete = self.loader.position(), None, True
        self.fetched_position = self.state.position
        """After the data that were fetched last."""
        self.batches: Iterator[Batch] | None = None
        self.pending: Pending | None = None

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
            if error is None:
                self.finish()
                self.progress.enter("end", self.current_step)
                end = end_of(self, self.done or not self.stops.agreed, requests)
            elif isinstance(error, Exception):
                end = end_of_failure(error, self, self.ranks) or RunEnd(CRASHED, reason=f"{kind.__name__}: {error}")
            else:
                end = RunEnd(128 + (requests.first or signal.SIGINT))
            report_end(end, self.current_step, self.exports.folder, self.ranks)

    def request_stop(self) -> None:
        """End `data` after the step that is under way, on all ranks. Signal handlers may call it."""
        self.stops.requested = True

    @property
    def current_step(self) -> int:
        """Number of optimizer steps that the run has made."""
        return self.state.step

    @property
    def config(self) -> JobConfig:
        return self.job.config

    @property
    def dp_rank(self) -> int:
        """This rank's number among those with other samples, of `dp_size`. The ranks of tensor, context and pipeline
        parallel work on the same samples.
        """
        return self.preparer.dp_rank

    @property
    def dp_size(self) -> int:
        return self.model.dims.dp

    @property
    def done(self) -> bool:
        """True if the job has made its last step."""
        # a run may resume after its last step: training.steps, epochs or data can be fewer than before
        return self.current_step >= self.config.training.steps or bool(self.findings.stop_reason)

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
        if not is_first and not self.is_warm:
            step_timeout = self.config.comm.train_timeout_seconds
            distributed.set_timeout(distributed.collective_timeout(self.ranks, step_timeout))
            self.is_warm = True
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
        groups keep their ratios. Raises EngineError, and what the job's guards raise.
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
        result = self.training_step.update(pending.data, pending.loss)
        self._end_step(pending.is_fetched)
        return result

    @engine_call
    def step(self, batch: StepData | Batch) -> StepResult:
        """Make one optimizer step of `data`, or of a batch as for `forward_backward`, with the job's objective."""
        self._require_no_gradients("step", "call optim_step first")
        if isinstance(batch, StepData):
            data = batch
        else:
            self._check_time()
            data, _ = self.caller_batches.prepare(batch, self.state, self.stops, call="step")
        result = self.training_step.run(data)
        self._end_step(data is batch)
        return result

    def _end_step(self, is_fetched: bool) -> None:
        if is_fetched:
            self.stops.agreed = self.prefetcher.stopping  # begun in fetch(), so all ranks had the whole step to answer

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
        """Return the mean loss of this rank's own batches and those of all ranks, or of the job's held-out data.

        The results of held-out data are logged and count for early stopping; other metrics of the task are among them.
        """
        self._require_no_gradients("evaluate", "call optim_step first")
        if batches is not None:
            return {"loss": self.caller_batches.mean_loss(batches, self.state, self.stops)}
        if self.validator.held_out is None:
            raise EngineError("evaluate: the job has no held-out data; set validation.enable, or pass batches")
        return self.validate(False) or {}

    @engine_call
    def generate(
        self, prompts: Sequence[str], max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> list[str]:
        """Return continuations of the prompts, the same on all ranks. All ranks pass the same.

        `temperature`: 0 takes the most probable token. There is no KV cache: a token costs a forward of all prompts.
        Neither pipeline nor context parallel are supported.
        """
        self._require_no_gradients("generate", "call optim_step first")
        check_prompts(self.job, prompts, max_new_tokens, temperature)
        ids = [self.tokenizer.encode(prompt, bos=True) for prompt in prompts]
        generations, longest = self.validator.generations, max(map(len, ids))
        if longest >= generations.context:
            raise EngineError(f"generate: a prompt of {longest} tokens; allowed: fewer than {generations.context}")
        self.enter("validate", self.current_step)
        answers = generations.answers(self.model, ids, max_new_tokens, chooser(temperature, seed))
        return [self.tokenizer.decode(answer) for answer in answers]

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
        return self.checkpointer.folder_of(self.current_step)

    @engine_call
    def load(self, step: int | None = None) -> int:
        """Go back to the run's newest checkpoint, or to that of `step`, with its data position. Return its step."""
        if self.checkpointer is None or not self.checkpointer.can_roll_back():
            raise EngineError("load: the run has no checkpoint; set checkpoint.enable, and save one first")
        self._go_back(partial(self.checkpointer.roll_back, step))
        return self.current_step

    def _go_back(self, load: Callable[[], None]) -> None:
        """Drop a step that is under way, `load` a checkpoint and position the data after it."""
        self.progress.enter("load", self.current_step + 1)
        self.optimizers.zero_grad()
        self.training_step.run_hooks(self.current_step + 1, updated=False)
        self.pending = None
        load()
        self.guards.after_load()
        self.goodput.enter("restart")
        self.stops.agreed = self.prefetcher.drop()
        self.loader.close()
        self._open_data()
        self.metrics.go_back(self.current_step, self.state.tokens)
        self.validator.go_back(self.current_step)
        self.callbacks.hand_over()

    def enter(self, phase: str, step: int) -> None:
        """Report a new phase of the run to the launcher's heartbeat and to the account of its time."""
        self.progress.enter(phase, step)
        self.goodput.enter(CAUSE_OF[phase])

    def before_save(self) -> None:
        self.state.is_complete = False  # a state that is refused here is not saved again
        loss, norm = self.state.loss, self.state.grad_norm
        self.guards.refuse_to_save(self.current_step, loss, norm, self.checkpointer.not_finite)
        self.state.is_complete = True

    def _note_save(self) -> None:
        self.metrics.mark("checkpoint")
        self.goodput.saves += 1
        self.metrics.record_event(self.current_step, "goodput", self.goodput.row() | {"saved": True})

    def validate(self, stop: bool, phase: str = "validate") -> dict[str, float] | None:
        """Evaluate the held-out data, unless a rank calls this with `stop`. `phase`: reported to the launcher."""
        self.enter(phase if self.validator.has_run or phase == "export" else "first", self.current_step)
        results = self.validator.evaluate(self.current_step, stop, phase)
        if results is None:
            self.stops.agreed = True
            return None
        task_metrics = {name: value for name, value in results.items() if name != "loss"}
        logged = self.metrics.record_validation(self.current_step, results["loss"], task_metrics)
        self.findings.record(self.current_step, logged)
        self.validator.generate(self.current_step, phase)
        self.callbacks.run("after_validation", results)
        return results

    def close(self) -> None:
        """End the run, as leaving the context does: a notebook calls it before it builds another engine."""
        self.__exit__(None, None, None)

    def finish(self) -> None:
        """Wait for the save under way, report, and leave the process group."""
        if self.checkpointer:
            self.checkpointer.finish()
        self.callbacks.end()
        self.report()
        if self.owns_group:
            distributed.close()

    def report(self) -> None:
        """Close the outputs, log a summary and the paths of the results, draw the training curve."""
        self.metrics.record_event(self.current_step, "goodput", self.goodput.row())
        self.metrics.close()
        self.loader.close()
        self.validator.close()
        if self.loader.skipped:
            logger.warning("%d records could not be read and were skipped on this rank", self.loader.skipped)
        folders = {"weights": self.exports.weights}
        if self.checkpointer and not self.checkpointer.load_only:
            folders = {"checkpoints": self.checkpointer.folder} | folders
        reason = self.findings.stop_reason
        log_end(self.job, self.ranks, self.metrics, self.goodput, folders, self.current_step, reason)
