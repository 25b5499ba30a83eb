"""The training loop around the step (step.py). Nothing here is specific to a model, an optimizer or a vendor.

One turn: fetch | step | validate | save. The host waits for the device only when it logs, validates or saves.
"""

import gc
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.assembly import observers, parts
from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint import CheckpointError, RandomState, TrainerHooks
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import to_toml
from torchtitan.core.cadence import describe_end
from torchtitan.datasets.segments import SegmentLoader
from torchtitan.datasets.sources import DataError
from torchtitan.guards import MOST_EMPTY_STEPS, BadStep, NothingToLearn, ReplicasDiffer, RollBack
from torchtitan.guards.stop_conditions import Stops
from torchtitan.job import ResolvedJob
from torchtitan.launcher import run_folder
from torchtitan.metrics.goodput import CAUSE_OF, Goodput
from torchtitan.process import distributed
from torchtitan.process.heartbeat import Progress
from torchtitan.process.machine import collect_garbage
from torchtitan.process.ranks import Ranks, Restart
from torchtitan.training import preflight
from torchtitan.training.batches import Batch, PeerStopped, Prefetcher, UnreadableData, batch_preparer, prepare_adapter
from torchtitan.training.final_export import Exports
from torchtitan.training.reference_logprobs import load_references
from torchtitan.training.reporting import StepProgress, log_end, log_start, plan_to_record, record_start
from torchtitan.training.restore import Restorer, TrainState
from torchtitan.training.step import StepData, training_step
from torchtitan.training.validation import Validator

logger = logging.getLogger(__name__)


class Trainer:
    """One rank's training run: builds the parts of a job, restores its state and trains until the job is done."""

    def __init__(self, config: JobConfig, ranks: Ranks):
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
        self.preparer = batch_preparer(job, self.tokenizer, dp_rank, device, self.model.needs_keys)
        self.optimizers = parts.optimizers(config.optimizer, self.model)
        schedulers = parts.lr_schedulers(job, self.optimizers, job.schedule.start)
        self.findings = observers.findings(config.early_stop, job.saving.best_metric)
        self.guards = observers.guards(config.guard, self.exports.folder, self.model, self.optimizers)
        preflight.check(config, ranks, self.tokenizer.fingerprint, self.model)
        self.state = TrainState()
        self.restorer = Restorer(
            job, ranks, self.model, dp_rank, self.state, schedulers, self.guards, self.findings, self.goodput
        )
        last_data_step = self.begin(as_written, restart, last_data_step, validate_every)
        sizes, end = self.metrics.header(), describe_end(as_written.config.training, last_data_step)
        log_start(self.job, self.model, self.tokenizer, schedulers, sizes, memory_limit, end)

    def begin(
        self, as_written: ResolvedJob, restart: Restart | None, last_data_step: int | None, validate_every: int
    ) -> int | None:
        """Restore the run or its initial weights, position the data loader, open the metrics. Return the last step
        with data, None without an end by data; it may differ from the `last_data_step` of a new run.
        """
        restorer, state, model, ranks = self.restorer, self.state, self.model, self.ranks
        hooks = TrainerHooks(restorer.trainer_state, restorer.rank_state, restorer.load_state, self.before_save)
        hooks.before_load, hooks.after_save = restorer.check_job, partial(run_folder.record_save, self.exports.folder)
        self.checkpointer = parts.checkpointer(self.job, model, self.optimizers, hooks)
        self.guards.checkpointer = self.checkpointer
        self.progress.enter("load")
        resumed_step = restorer.restore(self.checkpointer)
        if self.checkpointer is not None:
            self.checkpointer.prepare()
        state.start_step = self.step
        if state.loader_state is not None:  # a padded last step, or steps of another size, shift the end
            last_data_step = JobDatasets(as_written).last_step(state.loader_state["samples"], self.step)
            self.job = restorer.job = as_written.ending_at(last_data_step)
        job = self.job
        self.open_data(restorer.adapter_is_fresh)
        self.preparer.references = load_references(
            job, ranks, model, self.preparer, self.step, self.progress, state.loader_state
        )
        self.prefetcher = Prefetcher(self.preparer, job.layout.batches_per_step, job.schedule.steps)
        preflight.check_data(self.config.job.preflight, ranks, self.loader.position().fingerprint)
        self.validator = Validator(
            job, self.tokenizer, model, self.preparer, self.progress, ranks.is_main, resumed_step, validate_every
        )
        self.metrics = observers.metrics(job, model.device, ranks, resumed_step, state.tokens, model.adapter)
        self.training_step = training_step(
            job, ranks, model, self.optimizers, restorer.schedulers, self.guards, self.metrics, state, last_data_step
        )
        if ranks.is_main:
            plan = plan_to_record(job.layout.samples, model, ranks)
            run_folder.record_start(self.exports.folder, to_toml(as_written.portable().config), self.step, plan)
        loaded_from = self.checkpointer.loaded_from if self.checkpointer and resumed_step is not None else None
        record_start(job.config, restart, self.metrics, self.goodput, self.step, loaded_from)
        return last_data_step

    def open_data(self, adapter_is_fresh: bool = False) -> None:
        """Open the loader at the position of the checkpoint, or at the start of the data."""
        datasets, dp_rank = JobDatasets(self.job), self.preparer.dp_rank
        self.loader = datasets.training_loader(self.tokenizer, dp_rank, self.state.loader_state)
        if isinstance(self.loader, SegmentLoader):  # the labels of long documents may come last
            longest = self.loader.documents.most_segments(self.config.training.seq_len)
            self.guards.most_empty_steps = MOST_EMPTY_STEPS + longest
        first_segments = partial(datasets.first_segments, dp_rank)
        prepare_adapter(self.loader, self.model, self.preparer, first_segments if adapter_is_fresh else None)
        self.state.position, self.state.random, self.state.is_complete = self.loader.position(), None, True

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def config(self) -> JobConfig:
        return self.job.config

    # The loop

    def train(self) -> bool:
        """Train until the job is done; return False if the run was asked to stop earlier."""
        batches, is_first, step_timeout = iter(self.loader), True, self.config.comm.train_timeout_seconds
        self.metrics.start()
        folder, options = self.exports.folder, self.config.profiling
        profiler = observers.profiler(options, folder, self.model.device, self.ranks, self.step)
        run = lambda: (self.step, self.config.training.steps, self.state.tokens)  # noqa: E731
        progress = self.training_step.observer = StepProgress(self.ranks.logs, self.progress, self.model.dims.dp, run)
        gc.disable()  # a collection on one rank makes all others wait: collect on all together, every gc_freq steps
        try:
            with profiler, progress:
                if self.restorer.resumed_step and self.findings.is_missing(self.step):
                    self.maybe_validate(False)
                while not self.done and not self.stops.agreed:
                    try:
                        self.enter("first" if is_first else "data", self.step + 1)
                        self.train_step(batches)
                        if not self.stops.agreed:  # a stop leaves time to save, not to validate
                            self.maybe_validate(self.done)
                        self.maybe_save(self.done or self.stops.agreed)
                    except RollBack as error:
                        batches = self.roll_back(str(error))
                        continue
                    except (DataError, UnreadableData, PeerStopped, BadStep, NothingToLearn):  # on all ranks or none
                        self.prefetcher.drop()
                        self.save_before_failure()
                        raise
                    profiler.step()
                    collect_garbage(self.step, self.config.training.gc_freq, self.config.training.gc_debug)
                    if is_first:
                        distributed.set_timeout(distributed.collective_timeout(self.ranks, step_timeout))
                        is_first = False
        finally:
            gc.enable()
        self.goodput.enter("end")
        if self.checkpointer:
            self.checkpointer.finish()
        (self.stops.out_of_time,) = map(bool, distributed.broadcast_floats(self.stops.out_of_time))
        if self.done:
            self.enter("export", self.step)
            distributed.set_timeout(distributed.collective_timeout(self.ranks, step_timeout, may_spin=True))
            is_missing = self.validator.held_out is not None and self.findings.step != self.step  # a stop prevented it
            validate = partial(self.validate, False, "export") if is_missing else None
            self.exports.write(self.model, self.checkpointer, self.step, validate)
        self.enter("end", self.step)
        return self.done

    @property
    def done(self) -> bool:
        # a run may resume after its last step: training.steps, epochs or data can be fewer than before
        return self.step >= self.config.training.steps or bool(self.findings.stop_reason)

    def enter(self, phase: str, step: int) -> None:
        """Report a new phase of the run to the launcher's heartbeat and to the account of its time."""
        self.progress.enter(phase, step)
        self.goodput.enter(CAUSE_OF[phase])

    def train_step(self, batches: Iterator[Batch]) -> None:
        """Make one optimizer step over `global_batch_size` samples."""
        self.state.random = RandomState()
        self.training_step.run(self.fetch(batches))
        self.stops.agreed = self.prefetcher.stopping  # begun in fetch(), so all ranks had the whole step to answer

    def fetch(self, batches: Iterator[Batch]) -> StepData:
        """Return this rank's data of the next step, on which all ranks have agreed."""
        started = time.perf_counter()
        self.prefetcher.fetch(batches, self.loader.position, self.step)
        seconds = time.perf_counter() - started
        if self.step > self.state.start_step:
            self.enter("train", self.step + 1)
        if self.ranks.is_main:
            self.stops.check_time(self.checkpointer.longest_save_seconds if self.checkpointer is not None else 0.0)
        valid_tokens = self.prefetcher.agree(self.stops.requested)
        preparer, position = self.preparer, self.prefetcher.position
        tokens = preparer.trained_tokens(position.samples - self.state.position.samples, self.config.training.seq_len)
        prepare = preparer.to_device_for_training
        microbatches = [prepare(batch, index, self.step) for index, batch in enumerate(self.prefetcher.batches)]
        return StepData(microbatches, valid_tokens, preparer.valid_share, tokens, seconds, position)

    def roll_back(self, reason: str) -> Iterator[Batch]:
        """Return to the newest checkpoint in the middle of a step. Return the batches that follow it."""
        bad_step = self.step + 1
        self.progress.enter("load", bad_step)
        self.optimizers.zero_grad()
        self.training_step.run_hooks(bad_step, updated=False)
        self.checkpointer.roll_back()
        self.guards.on_rollback(self.step)
        self.goodput.enter("restart")
        self.stops.agreed = self.prefetcher.drop()
        self.loader.close()
        self.open_data()
        self.metrics.go_back(self.step, self.state.tokens)
        self.validator.go_back(self.step)
        logger.warning("step %d: %s; back to step %d, to do its steps again", bad_step, reason, self.step)
        event: dict[str, Any] = {"cause": reason, "steps_lost": bad_step - 1 - self.step}
        self.metrics.record_event(self.step, "rollback", event | {"rolled_back": self.guards.steps.rolled_back})
        return iter(self.loader)

    def before_save(self) -> None:
        self.state.is_complete = False  # a state that is refused here is not saved again
        self.guards.refuse_to_save(self.step, self.state.loss, self.state.grad_norm, self.checkpointer.not_finite)
        self.state.is_complete = True

    def maybe_validate(self, done: bool) -> None:
        if self.validator.held_out is not None and (done or self.step % self.validator.every == 0):
            self.validate(self.stops.requested)

    def validate(self, stop: bool, phase: str = "validate") -> None:
        """Evaluate the held-out data, unless a rank calls this with `stop`. `phase`: reported to the launcher."""
        self.enter(phase if self.validator.has_run or phase == "export" else "first", self.step)
        results = self.validator.evaluate(self.step, stop, phase)
        self.stops.agreed = results is None
        if results is None:
            return
        self.findings.record(self.step, self.metrics.record_validation(self.step, results.pop("loss"), results))
        self.validator.generate(self.step, phase)

    def maybe_save(self, done: bool) -> None:
        self.enter("save", self.step)
        if self.checkpointer and self.checkpointer.maybe_save(self.step, last=done):
            self.metrics.mark("checkpoint")
            self.goodput.saves += 1
            self.metrics.record_event(self.step, "goodput", self.goodput.row() | {"saved": True})

    def save_before_failure(self) -> None:
        """Save the last step, so that the next start loses nothing, when all ranks know that they cannot continue."""
        # after steps without anything to learn, the next start will have other data
        if not self.state.is_complete or self.step == 0 or self.guards.has_learned_nothing(self.step):
            return
        try:
            self.maybe_save(True)
            if self.checkpointer:
                self.checkpointer.finish()
        except (CheckpointError, BadStep, ReplicasDiffer, RollBack) as error:
            logger.error("step %d could not be saved before the end: %s", self.step, error)

    def close(self) -> None:
        """Report, and leave the process group."""
        self.report()
        distributed.close()

    def report(self) -> None:
        """Close the outputs, log a summary and the paths of the results, draw the training curve."""
        self.metrics.record_event(self.step, "goodput", self.goodput.row())
        self.metrics.close()
        self.loader.close()
        self.validator.close()
        if self.loader.skipped:
            logger.warning("%d records could not be read and were skipped on this rank", self.loader.skipped)
        folders = {"weights": self.exports.weights}
        if self.checkpointer and not self.checkpointer.load_only:
            folders = {"checkpoints": self.checkpointer.folder} | folders
        log_end(self.job, self.ranks, self.metrics, self.goodput, folders, self.step, self.findings.stop_reason)
