"""The training loop around the engine (engine.py). Nothing here is specific to a model, an optimizer or a vendor.

One turn: fetch | step | validate | save. The host waits for the device only when it logs, validates or saves.
"""

import gc
import logging
from functools import partial

from torchtitan.assembly import observers
from torchtitan.checkpoint import CheckpointError
from torchtitan.datasets.sources import DataError
from torchtitan.guards import BadStep, NothingToLearn, ReplicasDiffer, RollBack
from torchtitan.process import distributed
from torchtitan.process.machine import collect_garbage
from torchtitan.training.batches import PeerStopped, UnreadableData
from torchtitan.training.engine import Engine
from torchtitan.training.reporting import StepProgress

logger = logging.getLogger(__name__)


class Trainer(Engine):
    """The engine with the loop of `torchtitan train`: it trains until the job is done, validates and saves."""

    def train(self) -> bool:
        """Train until the job is done; return False if the run was asked to stop earlier."""
        self.metrics.start()
        folder, options = self.exports.folder, self.config.profiling
        profiler = observers.profiler(options, folder, self.model.device, self.ranks, self.current_step)
        run = lambda: (self.current_step, self.config.training.steps, self.state.tokens)  # noqa: E731
        progress = self.training_step.observer = StepProgress(self.ranks.logs, self.progress, self.model.dims.dp, run)
        gc.disable()  # a collection on one rank makes all others wait: collect on all together, every gc_freq steps
        try:
            with profiler, progress:
                if self.restorer.resumed_step and self.findings.is_missing(self.current_step):
                    self.maybe_validate(False)
                while not self.done and not self.stops.agreed:
                    try:
                        self.step(self.fetch())
                        if not self.stops.agreed:  # a stop leaves time to save, not to validate
                            self.maybe_validate(self.done)
                        self.maybe_save(self.done or self.stops.agreed)
                    except RollBack as error:
                        self.roll_back(str(error))
                        continue
                    except (DataError, UnreadableData, PeerStopped, BadStep, NothingToLearn):  # on all ranks or none
                        self.prefetcher.drop()
                        self.save_before_failure()
                        raise
                    profiler.step()
                    collect_garbage(self.current_step, self.config.training.gc_freq, self.config.training.gc_debug)
        finally:
            gc.enable()
        self.goodput.enter("end")
        if self.checkpointer:
            self.checkpointer.finish()
        (self.stops.out_of_time,) = map(bool, distributed.broadcast_floats(self.stops.out_of_time))
        if self.done:
            self.enter("export", self.current_step)
            timeout = self.config.comm.train_timeout_seconds
            distributed.set_timeout(distributed.collective_timeout(self.ranks, timeout, may_spin=True))
            is_missing = (
                self.validator.held_out is not None and self.findings.step != self.current_step
            )  # a stop prevented it
            validate = partial(self.validate, False, "export") if is_missing else None
            self.exports.write(self.model, self.checkpointer, self.current_step, validate)
        self.enter("end", self.current_step)
        return self.done

    def maybe_validate(self, done: bool) -> None:
        if self.validator.held_out is not None and (done or self.current_step % self.validator.every == 0):
            self.validate(self.stops.requested)

    def maybe_save(self, done: bool) -> None:
        self.enter("save", self.current_step)
        if self.checkpointer and self.checkpointer.maybe_save(self.current_step, last=done):
            self._note_save()

    def save_before_failure(self) -> None:
        """Save the last step, so that the next start loses nothing, when all ranks know that they cannot continue."""
        # after steps without anything to learn, the next start will have other data
        if not self.state.is_complete or self.current_step == 0 or self.guards.has_learned_nothing(self.current_step):
            return
        try:
            self.maybe_save(True)
            if self.checkpointer:
                self.checkpointer.finish()
        except (CheckpointError, BadStep, ReplicasDiffer, RollBack) as error:
            logger.error("step %d could not be saved before the end: %s", self.current_step, error)
