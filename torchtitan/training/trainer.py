"""The loop and the step. Nothing here is specific to a model, an optimizer or a vendor.

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

from torchtitan.build import data, observers, parts
from torchtitan.build.data import batches_of_a_step, held_out, training_loader
from torchtitan.checkpoint import CheckpointError, RandomState, TrainerHooks, base_weights, set_rng_state
from torchtitan.config.job import JobConfig
from torchtitan.config.manager import to_toml
from torchtitan.core.cadence import describe_end, with_end
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.sources import DataError
from torchtitan.guards import BadStep, ReplicasDiffer, RollBack, not_finite
from torchtitan.launcher import run_folder
from torchtitan.metrics.device import describe_memory
from torchtitan.metrics.goodput import CAUSE_OF, Goodput
from torchtitan.metrics.logger import histograms_of, of_all_ranks
from torchtitan.process import distributed
from torchtitan.process.gc_freeze import collect_garbage
from torchtitan.process.heartbeat import Progress
from torchtitan.process.ranks import Ranks
from torchtitan.training import preflight
from torchtitan.training.batches import Ahead, Batch, PeerStopped, feed, prepare_adapter
from torchtitan.training.final_export import Exports
from torchtitan.training.reference_logprobs import references
from torchtitan.training.restore import Origin
from torchtitan.training.run_summary import conclude, introduce, look_back
from torchtitan.training.step_progress import StepProgress
from torchtitan.training.validation import Generated, measure

logger = logging.getLogger(__name__)

WATCHDOG_SECONDS = 30
"""By how much collectives outlast the launcher's watchdog."""


class Trainer:
    def __init__(self, config: JobConfig, ranks: Ranks):
        self.dims = parts.dims(config, ranks.world_size)
        self.restart = ranks.launcher.restart if ranks.launcher else None
        if self.restart and self.restart.saved:
            config = parts.as_restarted(config)
        self.job = config = parts.with_adapter_save(config)  # as written, before its end is known
        self.of_data = data.last_step_of_data(config, self.dims)  # before any process group, as it may take long
        config = with_end(config, self.of_data)
        self.validate_every = parts.cadence(config).validate
        self.config, self.ranks = config, ranks
        self.progress = Progress(ranks.launcher.progress if ranks.launcher else None, ranks.local_rank)
        self.goodput = Goodput(self.restart.ended if self.restart and ranks.is_main else None)  # a clock of its machine
        # the launcher's watchdog speaks first: it knows who is late, while a collective only knows that it waited
        self.patience = WATCHDOG_SECONDS if ranks.launcher else 0
        timeout = config.comm.init_timeout_seconds + self.patience
        watched = config.comm.init_timeout_seconds if ranks.launcher else None
        self.folder = Path(config.job.dump_folder)
        self.device = distributed.init(ranks, timeout, config.comm.trace_buf_size, watched, self.folder)
        limited = distributed.limit_memory(config.memory.limit, self.device)
        if config.debug.deterministic:
            distributed.set_deterministic(config.debug.deterministic_warn_only)
        self.mesh = self.dims.build_mesh(self.device.type)
        self.dp_rank = self.dims.dp_rank(self.mesh)
        distributed.set_seed(config.debug.seed, self.dp_rank)
        self.tokenizer = parts.tokenizer(config)
        self.exports = Exports(config, ranks, self.tokenizer)
        self.model = parts.model(config, self.mesh, self.dims, self.device, drawn=False)
        distributed.set_timeout(timeout)  # else torch's own for the mesh's groups
        self.feed = feed(config, self.tokenizer, self.dims, self.dp_rank, self.device, self.model.draws)
        self.optimizers = parts.optimizers(config, self.model)
        self.schedulers = parts.lr_schedulers(config, self.optimizers)
        self.findings = observers.findings(config)
        self.guards = observers.guards(config, self.model, self.optimizers)
        preflight.check(config, ranks, self.mesh, self.device, self.tokenizer.fingerprint, self.model)

        self.accumulation = batches_of_a_step(config, self.dims)
        self.step, self.tokens, self.schedule_start = 0, 0, 0  # the last is not 0 after a start with counters
        self.loss = torch.zeros(())  # of the last step that was made
        self.grad_norm: torch.Tensor | None = None
        self.time_limit, self.out_of_time = observers.time_limit(config), False  # which rank 0 looks at for all
        self.stop_requested = False  # by a signal handler, on this rank alone, at any moment
        self.stopping = False  # by the agreement of all ranks
        self.validated = False  # the first time may compile
        self.between_steps = True  # the state is that after `step`, whole, on all ranks
        self.random: RandomState | None = None  # before the step under way: what it has drawn is drawn again
        self.data_state: dict[str, Any] | None = None
        self.step_progress = StepProgress(
            ranks.logs, self.progress, self.dims.dp, lambda: (self.step, self.config.training.steps, self.tokens)
        )
        self.begin()
        sizes, end = self.metrics.header(), describe_end(self.job.training, self.of_data)
        introduce(self.config, self.dims, self.device, self.model, self.tokenizer, self.schedulers, sizes, limited, end)

    def begin(self) -> None:
        """Take up what there is of a run, its data where it left them, and open what is written down."""
        self.origin = Origin(self.config, self.dims, self.model)
        hooks = TrainerHooks(self.trainer_state, self.rank_state, self.load_state, self.before_save)
        hooks.before_load = self.origin.compare_with_job_of
        hooks.after_save = partial(run_folder.note_saved, self.folder)
        self.checkpointer = parts.checkpointer(self.config, self.model, self.optimizers, hooks)
        self.guards.checkpointer = self.checkpointer
        self.progress.enter("load")
        self.resumed_from = self.origin.restore(self.checkpointer)
        if self.checkpointer is not None:
            self.checkpointer.prepare()
        if self.data_state is not None:  # a last step that was filled up, or steps of another size, shift the end
            self.of_data = data.last_step_of_data(self.job, self.dims, self.data_state["samples"], self.step)
            self.config = with_end(self.job, self.of_data)
        config = self.config
        self.loader = training_loader(config, self.tokenizer, self.dp_rank, self.dims, self.data_state)
        is_fresh = self.origin.adapter_is_fresh
        prepare_adapter(config, self.dims, self.dp_rank, self.loader, self.model, self.feed, is_fresh)
        self.began_at, state = self.step, self.data_state
        self.feed.references = references(config, self.ranks, self.model, self.feed, self.step, self.progress, state)
        self.position = self.loader.position()  # after `step`: what a step that fails has fetched is fetched again
        self.ahead = Ahead(self.feed, self.accumulation, config.training.steps)
        preflight.check_data(config, self.ranks, self.position.fingerprint)
        self.held_out = held_out(config, self.tokenizer, self.dp_rank, self.dims, self.feed.objective)
        self.generated = Generated(config, self.tokenizer, self.ranks.is_main, self.resumed_from)
        self.metrics = observers.metrics(
            config, self.device, self.ranks, self.resumed_from, self.tokens, self.model.adapter
        )
        self.profiler = observers.profiler(config, self.device, self.ranks, self.step)
        if self.ranks.is_main:
            run_folder.keep_job(self.folder, to_toml(parts.movable(self.job)), self.step)
        if config.job.tags:
            self.metrics.record_event(self.step, "tags", {"tags": ", ".join(config.job.tags)})
        came_from = self.checkpointer.loaded_from if self.resumed_from is not None else None
        background = config.checkpoint.async_mode != "disabled"
        look_back(self.restart, background, self.metrics, self.goodput, self.step, came_from)

    # What a checkpoint holds beside tensors

    def trainer_state(self) -> dict[str, Any]:
        state = {"step": self.step, "tokens": self.tokens, "lr_scheduler": self.schedulers.state_dict()}
        state[base_weights.SCHEDULE_START] = self.schedule_start
        if self.origin.base is not None:
            state[base_weights.KEY] = self.origin.base
        if guard := self.guards.steps.state_dict():
            state[self.guards.steps.name] = guard
        return (
            state
            | self.findings.state_dict(self.step)
            | self.model.hooks.state_dict()
            | {"degrees": self.dims.all_degrees}
            | parts.job_of_checkpoint(self.config, self.dims)
        )

    def rank_state(self) -> dict[str, Any]:
        random = self.random or RandomState()
        return {"rng": random.to_json(), "dataloader": self.position.to_dict(), "seconds": self.goodput.state_dict()}

    def load_state(self, trainer: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Continue what was saved on any number of ranks; parts excluded from loading are absent."""
        self.step, self.tokens = trainer["step"], trainer["tokens"]
        self.schedule_start = trainer.get(base_weights.SCHEDULE_START, 0)
        if "lr_scheduler" in trainer:
            self.schedulers.load_state_dict(trainer["lr_scheduler"])
        self.model.hooks.load_state_dict(trainer)
        self.findings.load_state_dict(self.step, trainer)
        self.goodput.load_state_dict(ranks[0].get("seconds", {}) if ranks else {})
        self.guards.steps.load_state_dict(trainer.get(self.guards.steps.name, {}))
        if ranks and all("dataloader" in state for state in ranks):
            self.data_state = merge_states([state["dataloader"] for state in ranks])
        saved = self.dims.all_degrees | trainer.get("degrees", {})  # an old checkpoint may lack some
        same_plan = len(ranks) == self.ranks.world_size and saved == self.dims.all_degrees
        if same_plan and "rng" in ranks[self.ranks.rank]:
            set_rng_state(ranks[self.ranks.rank]["rng"])
        else:  # another plan: nobody's generator is ours, but do not repeat the numbers of step 0 either
            distributed.set_seed(self.config.debug.seed + self.step, self.dp_rank)

    # The loop

    def train(self) -> bool:
        """Train until all is done or there is no more to learn; False when it stopped before as it was asked to."""
        batches, first = iter(self.loader), True
        self.metrics.start()
        gc.disable()  # a collection on one rank makes all others wait: do it on all together, every gc_freq steps
        try:
            with self.profiler, self.step_progress:
                if self.resumed_from and self.findings.lack(self.step):
                    self.maybe_validate(False)
                while self.step < self.config.training.steps and not self.done and not self.stopping:
                    try:
                        self.enter("first" if first else "data", self.step + 1)
                        self.train_step(batches)
                        self.guards.compare(self.step)
                        if not self.stopping:  # who asked gives us time to save, not more
                            self.maybe_validate(self.done)
                        self.maybe_save(self.done or self.stopping)
                    except RollBack as why:
                        batches = self.roll_back(str(why))
                        continue
                    except (DataError, PeerStopped, BadStep):  # which all ranks raise here, or none
                        self.ahead.drop()
                        self.save_what_is_whole()
                        raise
                    self.profiler.step()
                    collect_garbage(self.step, self.config.training.gc_freq, self.config.training.gc_debug)
                    if first:
                        distributed.set_timeout(self.config.comm.train_timeout_seconds + self.patience)
                        first = False
        finally:
            gc.enable()
        self.goodput.enter("end")
        if self.checkpointer:
            self.checkpointer.finish()
        if self.done:
            self.enter("export", self.step)
            lacks = self.held_out is not None and self.findings.step != self.step  # as after a stop in it
            validate = partial(self.validate, False, "export") if lacks else None
            self.exports.write(self.model, self.checkpointer, self.step, validate)
        self.enter("end", self.step)
        return self.done

    @property
    def done(self) -> bool:
        return self.step == self.config.training.steps or bool(self.findings.enough)

    def enter(self, phase: str, step: int) -> None:
        """What is done from now on: for the launcher, and for the account of the run's time."""
        self.progress.enter(phase, step)
        self.goodput.enter(CAUSE_OF[phase])

    def train_step(self, batches: Iterator[Batch]) -> None:
        """One optimizer step over `global_batch_size` samples."""
        self.random = RandomState()
        microbatches, valid_tokens, data_seconds = self.fetch(batches)
        early, loss, norm = self.config.optimizer.early_step_in_backward, torch.zeros((), device=self.device), None
        self.between_steps = not early
        for index, batch in self.step_progress.through(microbatches):
            loss += self.model.forward_backward(batch, valid_tokens, is_last=index == len(microbatches) - 1)
        if not early:  # there, gradients are gone by now
            norm = self.model.clip_gradients(self.config.training.max_norm)
        if self.metrics.histograms_due(self.step + 1):
            self.metrics.record_histograms(self.step + 1, of_all_ranks(histograms_of(self.model.named_parameters())))
        why, lr = self.guards.leaves_out(self.step + 1, loss, norm, can_skip=not early), self.schedulers.last_lr
        self.between_steps = False
        if not why:
            self.optimizers.step()
            self.loss, self.grad_norm = loss, norm
        self.schedulers.step()
        self.optimizers.zero_grad()
        self.step += 1
        self.model.after_step(self.step - self.schedule_start, self.optimizers.optimizers, updated=not why)
        position = self.ahead.position
        self.tokens += self.feed.tokens_of(position.samples - self.position.samples, self.config.training.seq_len)
        if why:
            self.metrics.record_skip(self.step, why, self.guards.steps.skipped)
        self.log(loss, norm, lr, data_seconds, refuse=not why)
        self.position, self.random, self.between_steps = position, None, True
        self.stopping = self.ahead.stopping  # asked of all ranks in fetch(): they have had all of the step to answer

    def fetch(self, batches: Iterator[Batch]) -> tuple[list[Batch], int, float]:
        """This rank's microbatches of the next step, all ranks' valid tokens in it, and the seconds waited for data."""
        started = time.perf_counter()
        self.ahead.take(batches, self.loader.position, self.step)
        data_seconds = time.perf_counter() - started
        if self.step > self.began_at:
            self.enter("train", self.step + 1)
        self.look_at_the_clock()
        valid = self.ahead.agree(self.stop_requested)
        ready = [self.feed.to_train_on(batch, index, self.step) for index, batch in enumerate(self.ahead.batches)]
        return ready, valid, data_seconds

    def look_at_the_clock(self) -> None:
        save_seconds = self.checkpointer.longest_save_seconds if self.checkpointer is not None else 0.0
        if self.ranks.is_main and not self.out_of_time and self.time_limit.near(save_seconds):
            logger.info("stopping after this step, ahead of the end that is known (job.time_limit or SLURM's)")
            self.stop_requested = self.out_of_time = True

    # Between steps

    def log(
        self, loss: torch.Tensor, norm: torch.Tensor | None, lr: float, data_seconds: float, refuse: bool = True
    ) -> None:
        """`loss`, this rank's share, and `norm` are scalars. `refuse`: that one of them is not finite."""
        extra: dict[str, torch.Tensor | float] = {}
        if self.metrics.due(self.step):
            means = loss.new_zeros(self.dims.dp + 1)  # of the data-parallel ranks' own tokens; ranks with a bad norm
            means[self.dp_rank], means[-1] = loss / self.feed.share, 0 if norm is None else ~norm.isfinite()
            means, loss = self.model.whole(means), self.model.whole(loss)
            extra["max_loss"] = means[:-1].max()
            if refuse:
                self.guards.refuse_non_finite("gradient norm", norm, float(means[-1]), self.step)
                self.guards.refuse_non_finite("loss", loss, not_finite(loss), self.step)
            extra |= self.model.extra_metrics() | self.guards.steps.counts() | self.optimizers.measured()
            if (epochs := self.config.training.epochs) is not None:
                extra["epoch"] = self.step * epochs / (self.of_data or 1)
        self.metrics.record(
            self.step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            tokens=self.tokens - self.metrics.tokens_seen,
            data_seconds=data_seconds,
            extra=extra,
        )

    def roll_back(self, why: str) -> Iterator[Batch]:
        """To the newest checkpoint, in the middle of a step; the batches from there on."""
        bad = self.step + 1
        self.progress.enter("load", bad)
        self.optimizers.zero_grad()
        # it forgets what it has counted
        self.model.after_step(bad - self.schedule_start, self.optimizers.optimizers, updated=False)
        self.checkpointer.go_back()
        self.guards.went_back_to(self.step)
        self.goodput.enter("restart")
        self.stopping = self.ahead.drop()
        self.loader.close()
        self.loader = training_loader(self.config, self.tokenizer, self.dp_rank, self.dims, self.data_state)
        prepare_adapter(self.config, self.dims, self.dp_rank, self.loader, self.model, self.feed)
        self.position, self.random, self.between_steps = self.loader.position(), None, True
        self.metrics.go_back(self.step, self.tokens)
        self.generated.go_back(self.step)
        logger.warning("step %d: %s; back to step %d, to do its steps again", bad, why, self.step)
        event: dict[str, Any] = {"cause": why, "steps_lost": bad - 1 - self.step}
        self.metrics.record_event(self.step, "rollback", event | {"rolled_back": self.guards.steps.rolled_back})
        return iter(self.loader)

    def before_save(self) -> None:
        self.between_steps = False  # a state that is refused here is not tried again
        self.guards.refuse_to_save(self.step, self.loss, self.grad_norm, self.checkpointer.not_finite)
        self.between_steps = True

    def maybe_validate(self, done: bool) -> None:
        if self.held_out is not None and (done or self.step % self.validate_every == 0):
            self.validate(self.stop_requested)

    def validate(self, stop: bool, phase: str = "validate") -> None:
        """Evaluate the held-out data, unless a rank calls this with `stop`. `phase`: that this is told as."""
        self.enter(phase if self.validated or phase == "export" else "first", self.step)
        measured = measure(self.model, self.feed, self.held_out, self.progress, self.step, stop, phase)
        self.stopping = measured is None
        if measured is None:
            return
        self.validated = True
        self.findings.note(self.step, self.metrics.record_validation(self.step, measured.pop("loss"), measured))
        self.generated.write(self.model, self.step, self.progress, phase)

    def maybe_save(self, done: bool) -> None:
        self.enter("save", self.step)
        if self.checkpointer and self.checkpointer.maybe_save(self.step, last=done):
            self.metrics.mark("checkpoint")
            self.goodput.saves += 1
            self.metrics.record_event(self.step, "goodput", self.goodput.row())

    def save_what_is_whole(self) -> None:
        """Where all ranks have found together that they cannot go on (no data, a bad gradient before it reached the
        weights): save the last step, so that the next start loses nothing. Why the run ends is said by who calls."""
        if not self.between_steps or self.step == 0:
            return
        try:
            self.maybe_save(True)
            if self.checkpointer:
                self.checkpointer.finish()
        except (CheckpointError, BadStep, ReplicasDiffer, RollBack) as error:
            logger.error("step %d could not be saved before the end: %s", self.step, error)

    def memory(self) -> str:
        """Who has it on this rank, for a run that ran out of it."""
        return describe_memory(self.device, [each for _, each in self.model.named_parameters()], self.optimizers)

    def close(self) -> None:
        """Report, and leave the process group."""
        self.report()
        distributed.close()

    def report(self) -> None:
        """Close the outputs, log a summary and the paths of the results, draw the picture."""
        self.metrics.record_event(self.step, "goodput", self.goodput.row())
        self.metrics.close()
        for each in (self.loader, self.held_out, self.generated):
            if each is not None:
                each.close()
        if self.loader.skipped:
            logger.warning("%d records could not be read and were skipped on this rank", self.loader.skipped)
        places = {"metrics": self.metrics.path, "job": self.folder / "config.toml"}
        if self.checkpointer and not self.checkpointer.load_only:
            places["checkpoints"] = self.checkpointer.folder
        if self.exports.weights is not None:
            places["weights"] = self.exports.weights
        conclude(self.config, self.ranks, self.metrics, self.goodput, places, self.step, self.findings.enough)
