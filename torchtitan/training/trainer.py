"""The training loop and the training step. Nothing here is specific to a model, an optimizer or a vendor.

One step: fetch microbatches | agree on the global number of valid tokens | forward, loss, backward of each | norm and
clip | optimizer, schedule | log, validate, save. The host waits for the device only when it logs, validates or saves.
"""

import gc
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan.assembly import observers, parts
from torchtitan.assembly.data import JobDatasets
from torchtitan.checkpoint import CheckpointError, RandomState, TrainerHooks, base_weights, set_rng_state
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import to_toml
from torchtitan.core.cadence import describe_end
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.segments import SegmentLoader
from torchtitan.datasets.sources import DataError
from torchtitan.guards import MOST_EMPTY_STEPS, BadStep, NothingToLearn, ReplicasDiffer, RollBack, not_finite
from torchtitan.job import ResolvedJob
from torchtitan.launcher import run_folder
from torchtitan.metrics.device import describe_memory
from torchtitan.metrics.goodput import CAUSE_OF, Goodput
from torchtitan.metrics.logger import gather_histograms, histograms_of
from torchtitan.process import distributed
from torchtitan.process.heartbeat import Progress
from torchtitan.process.machine import collect_garbage, return_unused_memory
from torchtitan.process.ranks import Ranks, Restart, likely_device
from torchtitan.training import preflight
from torchtitan.training.batches import Batch, PeerStopped, Prefetcher, UnreadableData, batch_preparer, prepare_adapter
from torchtitan.training.final_export import Exports
from torchtitan.training.reference_logprobs import load_references
from torchtitan.training.reporting import StepProgress, log_end, log_start, plan_to_record, record_start
from torchtitan.training.restore import Restorer, TrainState
from torchtitan.training.validation import Validator

logger = logging.getLogger(__name__)

WATCHDOG_SECONDS, SPINNING_SECONDS = 3600, 30
"""Under our launcher, collectives fail this long after its watchdog would end the run. The watchdog knows of the time
in which launcher and ranks were stopped (`docker pause`), collectives do not: they would fail on waking up. The second
value is for start, first step and export on GPUs. A rank that waits for others spins there, which looks like one that
compiles, so the watchdog does not notice a hang.
"""
COMMON_FAILURES = BadStep | ReplicasDiffer | NothingToLearn
"""Raised by all ranks at the same step."""


class Trainer:
    """One rank's training run: builds the parts of a job, restores its state and trains until the job is done."""

    def __init__(self, config: JobConfig, ranks: Ranks):
        job = ResolvedJob(config, ranks.world_size, distributed.device_type())
        self.dims = job.layout.dims
        restart = ranks.launcher.restart if ranks.launcher else None
        if restart and restart.saved:
            job = job.restarted()
        self.job_as_written = job = job.with_lasting_options()  # before its last step is computed
        # before any process group exists, because tokenizing may take long
        self.last_data_step = JobDatasets(job).last_step()
        self.job = job = job.ending_at(self.last_data_step)
        self.validate_every = job.schedule.cadence.validate
        self.config = config = job.config
        self.ranks = ranks
        self.progress = Progress(ranks.launcher.progress if ranks.launcher else None, ranks.local_rank)
        # the failure's time is from the clock of rank 0's machine, so only rank 0 uses it
        self.goodput = Goodput(restart.ended if restart and ranks.is_main else None)
        # the launcher's watchdog reports first: it knows which rank is late, a collective only knows that it waited
        timeout = self.collective_timeout(config.comm.init_timeout_seconds, may_spin=True)
        watched = config.comm.init_timeout_seconds if ranks.launcher else None
        self.folder = Path(config.job.dump_folder)
        device = distributed.init(ranks, timeout, config.comm.trace_buf_size, watched, self.folder)
        memory_limit = distributed.limit_memory(config.memory.limit, device)
        if config.debug.deterministic:
            distributed.set_deterministic(config.debug.deterministic_warn_only)
        mesh = self.dims.build_mesh(device.type)
        self.dp_rank = self.dims.dp_rank(mesh)
        distributed.set_seed(config.debug.seed, self.dp_rank)
        self.tokenizer = job.tokenizer()
        self.exports = Exports(job, ranks, self.tokenizer)
        self.model = parts.model(job, mesh, device, init_weights=False)
        distributed.set_timeout(timeout)  # the mesh's groups were created with torch's default
        self.preparer = batch_preparer(job, self.tokenizer, self.dp_rank, device, self.model.needs_keys)
        self.optimizers = parts.optimizers(config.optimizer, self.model)
        self.restorer = Restorer(job, self.model)
        self.schedulers = parts.lr_schedulers(job, self.optimizers, job.schedule.start)
        self.findings = observers.findings(config.early_stop, job.saving.best_metric)
        self.guards = observers.guards(config.guard, self.folder, self.model, self.optimizers)
        self.stragglers = observers.stragglers(job.model, self.model, ranks)
        preflight.check(config, ranks, self.tokenizer.fingerprint, self.model)

        self.state = TrainState()
        self.time_limit, self.out_of_time = (
            observers.time_limit(config.job.time_limit),
            False,
        )  # rank 0 checks it for all ranks
        self.stop_requested = False  # on this rank; signal handlers set it at any time
        self.stopping = False  # agreed on by all ranks
        self.step_progress = StepProgress(
            ranks.logs, self.progress, self.dims.dp, lambda: (self.step, self.config.training.steps, self.state.tokens)
        )
        self.begin(restart)
        sizes, end = self.metrics.header(), describe_end(self.job_as_written.config.training, self.last_data_step)
        log_start(self.job, self.model, self.tokenizer, self.schedulers, sizes, memory_limit, end)

    def collective_timeout(self, seconds: int, may_spin: bool = False) -> int:
        """Return the timeout of collectives where a rank without progress for `seconds` counts as hung."""
        if self.ranks.launcher is None:
            return seconds
        return seconds + (SPINNING_SECONDS if may_spin and likely_device() == "cuda" else WATCHDOG_SECONDS)

    def begin(self, restart: Restart | None) -> None:
        """Restore the run or its initial weights, position the data loader, open the metrics."""
        hooks = TrainerHooks(self.trainer_state, self.rank_state, self.load_state, self.before_save)
        hooks.before_load = self.restorer.check_job
        hooks.after_save = partial(run_folder.record_save, self.folder)
        self.checkpointer = parts.checkpointer(self.job, self.model, self.optimizers, hooks)
        self.guards.checkpointer = self.checkpointer
        self.progress.enter("load")
        resumed_step = self.restorer.restore(self.checkpointer)
        if self.checkpointer is not None:
            self.checkpointer.prepare()
        state = self.state
        state.start_step = self.step
        if state.loader_state is not None:  # a padded last step, or steps of another size, shift the end
            samples_read = state.loader_state["samples"]
            self.last_data_step = JobDatasets(self.job_as_written).last_step(samples_read, self.step)
            self.job = self.job_as_written.ending_at(self.last_data_step)
            self.config = self.job.config
        job, config = self.job, self.config
        self.open_data(self.restorer.adapter_is_fresh)
        self.preparer.references = load_references(
            job, self.ranks, self.model, self.preparer, self.step, self.progress, state.loader_state
        )
        self.prefetcher = Prefetcher(self.preparer, job.layout.batches_per_step, job.schedule.steps)
        preflight.check_data(config.job.preflight, self.ranks, self.loader.position().fingerprint)
        self.validator = Validator(
            job, self.tokenizer, self.model, self.preparer, self.progress, self.ranks.is_main, resumed_step
        )
        self.metrics = observers.metrics(
            job, self.model.device, self.ranks, resumed_step, state.tokens, self.model.adapter
        )
        if self.ranks.is_main:
            plan = plan_to_record(job.layout.samples, self.model, self.ranks)
            run_folder.record_start(self.folder, to_toml(self.job_as_written.portable().config), self.step, plan)
        loaded_from = self.checkpointer.loaded_from if resumed_step is not None else None
        record_start(config, restart, self.metrics, self.goodput, self.step, loaded_from)

    def open_data(self, adapter_is_fresh: bool = False) -> None:
        """Open the loader at the position of the checkpoint, or at the start of the data."""
        datasets = JobDatasets(self.job)
        self.loader = datasets.training_loader(self.tokenizer, self.dp_rank, self.state.loader_state)
        if isinstance(self.loader, SegmentLoader):  # the labels of long documents may come last
            longest = self.loader.documents.most_segments(self.config.training.seq_len)
            self.guards.most_empty_steps = MOST_EMPTY_STEPS + longest
        first_segments = partial(datasets.first_segments, self.dp_rank)
        prepare_adapter(self.loader, self.model, self.preparer, first_segments if adapter_is_fresh else None)
        self.state.position, self.state.random, self.state.is_complete = self.loader.position(), None, True

    @property
    def step(self) -> int:
        return self.state.step

    # A checkpoint's state besides tensors

    def trainer_state(self) -> dict[str, Any]:
        state = {"step": self.step, "tokens": self.state.tokens, "lr_scheduler": self.schedulers.state_dict()}
        state[base_weights.SCHEDULE_START] = self.state.schedule_start
        if self.restorer.base is not None:
            state[base_weights.KEY] = self.restorer.base
        if guard := self.guards.steps.state_dict():
            state[self.guards.steps.name] = guard
        state |= self.findings.state_dict(self.step) | self.model.hooks.state_dict()
        return state | {"degrees": self.dims.all_degrees} | self.job.stored_part()

    def rank_state(self) -> dict[str, Any]:
        random, position = self.state.random or RandomState(), self.state.position
        return {"rng": random.to_json(), "dataloader": position.to_dict(), "seconds": self.goodput.state_dict()}

    def load_state(self, trainer: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Continue from a state saved on any number of ranks. Parts excluded from loading are absent."""
        state = self.state
        state.step, state.tokens = trainer["step"], trainer["tokens"]
        state.schedule_start = trainer.get(base_weights.SCHEDULE_START, 0)
        if "lr_scheduler" in trainer:
            self.schedulers.load_state_dict(trainer["lr_scheduler"])
        self.model.hooks.load_state_dict(trainer)
        self.findings.load_state_dict(self.step, trainer)
        self.goodput.load_state_dict(ranks[0].get("seconds", {}) if ranks else {})
        self.guards.steps.load_state_dict(trainer.get(self.guards.steps.name, {}))
        if ranks and all("dataloader" in rank for rank in ranks):
            state.loader_state = merge_states([rank["dataloader"] for rank in ranks])
        degrees = self.dims.all_degrees | trainer.get("degrees", {})  # an old checkpoint may lack some
        same_plan = len(ranks) == self.ranks.world_size and degrees == self.dims.all_degrees
        if same_plan and "rng" in ranks[self.ranks.rank]:
            set_rng_state(ranks[self.ranks.rank]["rng"])
        else:  # no saved generator belongs to this rank; do not repeat the numbers of step 0 either
            distributed.set_seed(self.config.debug.seed + self.step, self.dp_rank)

    # The loop

    def train(self) -> bool:
        """Train until the job is done; return False if the run was asked to stop earlier."""
        batches, is_first = iter(self.loader), True
        self.metrics.start()
        profiler = observers.profiler(self.config.profiling, self.folder, self.model.device, self.ranks, self.step)
        gc.disable()  # a collection on one rank makes all others wait: collect on all together, every gc_freq steps
        try:
            with profiler, self.step_progress:
                if self.restorer.resumed_step and self.findings.is_missing(self.step):
                    self.maybe_validate(False)
                while not self.done and not self.stopping:
                    try:
                        self.enter("first" if is_first else "data", self.step + 1)
                        self.train_step(batches)
                        self.guards.compare(self.step)
                        if not self.stopping:  # a stop leaves time to save, not to validate
                            self.maybe_validate(self.done)
                        self.maybe_save(self.done or self.stopping)
                    except RollBack as error:
                        batches = self.roll_back(str(error))
                        continue
                    # all ranks raise these, or none
                    except (DataError, UnreadableData, PeerStopped, BadStep, NothingToLearn):
                        self.prefetcher.drop()
                        self.save_before_failure()
                        raise
                    profiler.step()
                    collect_garbage(self.step, self.config.training.gc_freq, self.config.training.gc_debug)
                    if is_first:
                        distributed.set_timeout(self.collective_timeout(self.config.comm.train_timeout_seconds))
                        is_first = False
        finally:
            gc.enable()
        self.goodput.enter("end")
        if self.checkpointer:
            self.checkpointer.finish()
        (self.out_of_time,) = map(bool, distributed.broadcast_floats(self.out_of_time))
        if self.done:
            self.enter("export", self.step)
            distributed.set_timeout(self.collective_timeout(self.config.comm.train_timeout_seconds, may_spin=True))
            lacks_validation = self.validator.held_out is not None and self.findings.step != self.step
            validate = partial(self.validate, False, "export") if lacks_validation else None  # a stop prevented it
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
        state = self.state
        state.random = RandomState()
        microbatches, valid_tokens, data_seconds = self.fetch(batches)
        self.stragglers.begin_step(data_seconds)
        steps_in_backward = self.config.optimizer.early_step_in_backward
        loss, norm = torch.zeros((), device=self.model.device), None
        state.is_complete = not steps_in_backward
        # without a token to learn nothing is updated, but an adapter may remember the batch
        num_run = 0 if steps_in_backward and not valid_tokens else len(microbatches)
        for index, batch in self.step_progress.through(microbatches[:num_run]):
            loss += self.model.forward_backward(batch, max(valid_tokens, 1), is_last=index == num_run - 1)
        if not steps_in_backward:  # otherwise the gradients are already freed
            norm = self.model.clip_gradients(self.config.training.max_norm)
        if self.metrics.histograms_due(self.step + 1):
            self.metrics.record_histograms(
                self.step + 1, gather_histograms(histograms_of(self.model.named_parameters()))
            )
        skip_reason = self.guards.reason_to_skip(
            self.step + 1,
            loss,
            norm,
            can_skip=not steps_in_backward,
            valid_tokens=valid_tokens,
            is_last=self.step + 1 >= self.config.training.steps,
        )
        lr = self.schedulers.last_lr
        state.is_complete = False
        if not skip_reason:
            self.optimizers.step()
            state.loss, state.grad_norm = loss, norm
        self.schedulers.step()
        return_unused_memory(self.step + 1 - state.start_step)
        self.optimizers.zero_grad()
        state.step += 1
        self.run_step_hooks(self.step, updated=not skip_reason)
        position = self.prefetcher.position
        samples = position.samples - state.position.samples
        state.tokens += self.preparer.trained_tokens(samples, self.config.training.seq_len)
        if skip_reason:
            self.metrics.record_skip(self.step, skip_reason, self.guards.steps.skipped)
        self.log(loss if valid_tokens else None, norm, lr, data_seconds, refuse=not skip_reason)
        state.position, state.random, state.is_complete = position, None, True
        self.stopping = self.prefetcher.stopping  # begun in fetch(), so all ranks had the whole step to answer

    def run_step_hooks(self, step: int, updated: bool) -> None:
        """Run the model's hooks after a step, which reset its counters. `updated`: the step was applied."""
        self.model.after_step(step - self.state.schedule_start, self.optimizers.optimizers, updated=updated)

    def fetch(self, batches: Iterator[Batch]) -> tuple[list[Batch], int, float]:
        """Return this rank's microbatches of the next step, the step's valid tokens, and the seconds spent on data."""
        started = time.perf_counter()
        self.prefetcher.fetch(batches, self.loader.position, self.step)
        data_seconds = time.perf_counter() - started
        if self.step > self.state.start_step:
            self.enter("train", self.step + 1)
        self.check_time_limit()
        valid_tokens = self.prefetcher.agree(self.stop_requested)
        prepare = self.preparer.to_device_for_training
        microbatches = [prepare(batch, index, self.step) for index, batch in enumerate(self.prefetcher.batches)]
        return microbatches, valid_tokens, data_seconds

    def check_time_limit(self) -> None:
        save_seconds = self.checkpointer.longest_save_seconds if self.checkpointer is not None else 0.0
        if self.ranks.is_main and not self.out_of_time and self.time_limit.is_near(save_seconds):
            logger.info("stopping after this step, before the time limit (job.time_limit or SLURM's) is reached")
            self.stop_requested = self.out_of_time = True

    def log(
        self, loss: torch.Tensor | None, norm: torch.Tensor | None, lr: float, data_seconds: float, refuse: bool = True
    ) -> None:
        """Record a step. `loss`, this rank's share, and `norm` are scalars; a step with nothing to learn has no loss.
        `refuse`: raise if one is not finite."""
        extra: dict[str, torch.Tensor | float] = {}
        if loss is not None and self.metrics.due(self.step):
            # mean losses of the data-parallel ranks' own tokens, and last the number of ranks with a bad norm
            means = loss.new_zeros(self.dims.dp + 1)
            means[self.dp_rank] = loss / self.preparer.valid_share
            means[-1] = 0 if norm is None else ~norm.isfinite()
            means, loss = self.model.sum_over_ranks(means), self.model.sum_over_ranks(loss)
            extra["max_loss"] = means[:-1].max()
            if refuse:
                self.guards.refuse_non_finite("gradient norm", norm, float(means[-1]), self.step)
                self.guards.refuse_non_finite("loss", loss, not_finite(loss), self.step)
            extra |= self.model.extra_metrics() | self.guards.steps.counts() | self.optimizers.measured()
            extra |= self.stragglers.compare(self.step, self.metrics)
            if (epochs := self.config.training.epochs) is not None:
                extra["epoch"] = self.step * epochs / (self.last_data_step or 1)
        tokens = self.state.tokens - self.metrics.tokens_seen
        self.metrics.record(
            self.step, loss=loss, grad_norm=norm, lr=lr, tokens=tokens, data_seconds=data_seconds, extra=extra
        )

    def roll_back(self, reason: str) -> Iterator[Batch]:
        """Return to the newest checkpoint in the middle of a step. Return the batches that follow it."""
        bad_step = self.step + 1
        self.progress.enter("load", bad_step)
        self.optimizers.zero_grad()
        self.run_step_hooks(bad_step, updated=False)
        self.checkpointer.roll_back()
        self.guards.on_rollback(self.step)
        self.goodput.enter("restart")
        self.stopping = self.prefetcher.drop()
        self.loader.close()
        self.open_data()
        self.metrics.go_back(self.step, self.state.tokens)
        self.validator.go_back(self.step)
        logger.warning("step %d: %s; back to step %d, to do its steps again", bad_step, reason, self.step)
        event: dict[str, Any] = {"cause": reason, "steps_lost": bad_step - 1 - self.step}
        self.metrics.record_event(self.step, "rollback", event | {"rolled_back": self.guards.steps.rolled_back})
        return iter(self.loader)

    def before_save(self) -> None:
        state = self.state
        state.is_complete = False  # a state that is refused here is not saved again
        self.guards.refuse_to_save(self.step, state.loss, state.grad_norm, self.checkpointer.not_finite)
        state.is_complete = True

    def maybe_validate(self, done: bool) -> None:
        if self.validator.held_out is not None and (done or self.step % self.validate_every == 0):
            self.validate(self.stop_requested)

    def validate(self, stop: bool, phase: str = "validate") -> None:
        """Evaluate the held-out data, unless a rank calls this with `stop`. `phase`: reported to the launcher."""
        self.enter(phase if self.validator.has_run or phase == "export" else "first", self.step)
        results = self.validator.evaluate(self.step, stop, phase)
        self.stopping = results is None
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
        if not self.state.is_complete or self.step == 0:
            return
        if self.guards.has_learned_nothing(self.step):  # the next start will have other data
            return
        try:
            self.maybe_save(True)
            if self.checkpointer:
                self.checkpointer.finish()
        except (CheckpointError, BadStep, ReplicasDiffer, RollBack) as error:
            logger.error("step %d could not be saved before the end: %s", self.step, error)

    def memory(self) -> str:
        """Describe the use of this rank's memory, for a run that ran out of it."""
        return describe_memory(
            self.model.device, [tensor for _, tensor in self.model.named_parameters()], self.optimizers
        )

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
