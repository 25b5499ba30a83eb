"""The run of a job on one rank: its parts, built and restored; going back to a checkpoint, validation and reports.

The engine (engine.py) adds the calls that make steps, and the trainer (trainer.py) a loop.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.assembly import observers, parts
from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint import TrainerHooks
from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.core.cadence import describe_end
from torchtitan.core.callbacks import Callback
from torchtitan.datasets.segments import SegmentLoader
from torchtitan.guards import MOST_EMPTY_STEPS
from torchtitan.guards.stop_conditions import Stops
from torchtitan.job import ResolvedJob
from torchtitan.launcher import run_folder
from torchtitan.launcher.rank import StopSignals
from torchtitan.metrics.goodput import CAUSE_OF, Goodput
from torchtitan.process import distributed
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import Ranks, Restart
from torchtitan.training import preflight
from torchtitan.training.batches import Batch, Prefetcher, batch_preparer, prepare_adapter
from torchtitan.training.callbacks import CallbackRunner, callbacks_of
from torchtitan.training.caller_batches import CallerBatches, Pending
from torchtitan.training.final_export import Exports
from torchtitan.training.reference_logprobs import load_references
from torchtitan.training.reporting import log_end, log_start, plan_to_record, record_start
from torchtitan.training.restore import Restorer, TrainState
from torchtitan.training.step import training_step
from torchtitan.training.validation import Validator

logger = logging.getLogger(__name__)


class Run:
    """The parts of a job on one rank, restored to where its run stopped."""

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
        self.callbacks = CallbackRunner(self.model, callbacks_of(config.callbacks, callbacks), in_backward)
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
        hooks.extra_state, hooks.after_failed_save = self.callbacks, self._note_failed_save
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

    def roll_back(self, reason: str) -> None:
        """Return to the newest checkpoint in the middle of a step."""
        bad_step = self.current_step + 1
        self._go_back(self.checkpointer.roll_back)
        self.guards.steps.on_rollback(self.current_step)
        logger.warning("step %d: %s; back to step %d, to do its steps again", bad_step, reason, self.current_step)
        event: dict[str, Any] = {"cause": reason, "steps_lost": bad_step - 1 - self.current_step}
        self.metrics.record_event(self.current_step, "rollback", event | {"rolled_back": self.guards.steps.rolled_back})

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

    def _note_failed_save(self, reason: str) -> None:
        self.metrics.record_event(self.current_step, "failed_save", {"reason": reason})

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
        is_left = self.is_in_script and not self.done and not self.stops.agreed
        reason = self.findings.stop_reason or "the program has ended" * is_left
        log_end(self.job, self.ranks, self.metrics, self.goodput, folders, self.current_step, reason)
