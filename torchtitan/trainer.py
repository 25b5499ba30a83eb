"""The loop and the step. Nothing here is specific to a model, an optimizer or a vendor.

One step: fetch microbatches | agree on the global number of valid tokens | forward, loss, backward of each | norm and
clip | optimizer, schedule | log, validate, save. The host waits for the device only when it logs, validates or saves.
"""

import gc
import logging
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan import build, distributed
from torchtitan.checkpoint import CheckpointError, rng_state, set_rng_state
from torchtitan.config import JobConfig
from torchtitan.config_manager import to_toml
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.sources import DataError
from torchtitan.loss import IGNORE_INDEX
from torchtitan.plot import draw_training_curve
from torchtitan.ranks import Ranks

logger = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]
EXPORT_TIMEOUT_SECONDS = 1800


class NonFiniteError(ArithmeticError):
    """Loss or gradient is NaN or infinite. No checkpoint is written after it."""


class PeerStopped(RuntimeError):
    """Another rank cannot go on and has said why; this one stops with it."""


def take(batches: Iterator[Batch], count: int) -> tuple[list[Batch], DataError | None]:
    """The next batches, or why there are none: what one rank alone cannot raise, as the others would wait for it."""
    try:
        taken = list(islice(batches, count))
    except DataError as error:
        return [], error
    return taken, None if len(taken) == count else DataError(f"the data ended after {len(taken)} of {count} batches")


def count_valid(batch: Batch) -> int:
    """Tokens that have a label."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


class Trainer:
    def __init__(self, config: JobConfig, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.device = distributed.init(ranks, config.comm.init_timeout_seconds, config.comm.trace_buf_size)
        if config.debug.deterministic:
            distributed.set_deterministic(config.debug.deterministic_warn_only)
        self.dims = build.dims(config, ranks.world_size)
        self.mesh = self.dims.build_mesh(self.device.type)
        self.dp_rank = self.dims.dp_rank(self.mesh)
        distributed.set_seed(config.debug.seed, self.dp_rank)
        self.tokenizer = build.tokenizer(config)
        if config.checkpoint.last_save_in_hf:  # whether the format has these sizes is better known before the run
            build.model_spec(config).hf.config_to_hf(build.model_args(config))
        self.model = build.model(config, self.mesh, self.dims, self.device)
        distributed.set_timeout(config.comm.init_timeout_seconds)  # else torch's own for the mesh's groups
        self.optimizers = build.optimizers(config, self.model)
        self.schedulers = build.lr_schedulers(config, self.optimizers)

        samples = build.global_batch_size(config, self.dims)
        self.accumulation = samples // (config.training.local_batch_size * self.dims.dp)
        self.tokens_per_step = samples * config.training.seq_len
        self.folder = Path(config.job.dump_folder)
        self.step, self.tokens = 0, 0
        self.loss, self.grad_norm = torch.zeros(()), None  # of the last step
        self.stop_requested = False  # by a signal handler, on this rank alone, at any moment
        self.stopping = False  # by the agreement of all ranks in fetch()
        self.data_state: dict[str, Any] | None = None

        self.checkpointer = build.checkpointer(
            config,
            self.model,
            self.optimizers,
            self.trainer_state,
            self.rank_state,
            self.load_state,
            self.refuse_to_save_non_finite,
        )
        self.resumed_from = self.restore()
        self.loader = build.training_loader(config, self.tokenizer, self.dp_rank, self.dims, self.data_state)
        self.held_out = None  # every iteration over it begins again
        if config.validation.enable:
            self.held_out = build.validation_loader(config, self.tokenizer, self.dp_rank, self.dims)
        self.metrics = build.metrics(config, self.device, ranks, self.resumed_from, self.tokens)
        self.profiler = build.profiler(config, self.device, ranks, self.step)
        if ranks.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(to_toml(build.movable(config)))
        self.introduce()

    def introduce(self) -> None:
        """A few lines at the start: what runs, on what, on which data, and how the learning rate goes."""
        config = self.config
        logger.info("%s", config.job.description)
        logger.info("model      %s %s: %s", config.model.name, config.model.flavor, self.metrics.header())
        logger.info(
            "plan       %s on %s, %s; %d samples of %d tokens a step%s",
            self.dims.describe(),
            self.device.type,
            build.describe_precision(config),
            self.tokens_per_step // config.training.seq_len,
            config.training.seq_len,
            f" (accumulated over {self.accumulation} passes)" if self.accumulation > 1 else "",
        )
        logger.info("data       %s, tokenizer of %d", config.training.dataset, self.tokenizer.vocab_size)
        if config.metrics.log_lr_schedule:
            logger.info("schedule   %s", self.schedulers.schedule.describe(config.optimizer.lr))
        logger.info("folder     %s", self.folder.resolve())

    # What a checkpoint holds beside tensors

    def trainer_state(self) -> dict[str, Any]:
        state = {"step": self.step, "tokens": self.tokens, "lr_scheduler": self.schedulers.state_dict()}
        return state | {"degrees": self.degrees}

    @property
    def degrees(self) -> dict[str, int]:
        return self.dims.degrees | {"ep": self.dims.ep}

    def rank_state(self) -> dict[str, Any]:
        return {"rng": rng_state(), "dataloader": self.loader.state_dict()}

    def load_state(self, trainer: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Continue what was saved on any number of ranks; parts excluded from loading are absent."""
        self.step, self.tokens = trainer["step"], trainer["tokens"]
        if "lr_scheduler" in trainer:
            self.schedulers.load_state_dict(trainer["lr_scheduler"])
        if all("dataloader" in state for state in ranks):
            self.data_state = merge_states([state["dataloader"] for state in ranks])
        saved = self.degrees | trainer.get("degrees", {})  # what an old checkpoint does not say is taken as it is here
        same_plan = len(ranks) == self.ranks.world_size and saved == self.degrees
        if same_plan and "rng" in ranks[self.ranks.rank]:
            set_rng_state(ranks[self.ranks.rank]["rng"])
        else:  # another plan: nobody's generator is ours, but do not repeat the numbers of step 0 either
            distributed.set_seed(self.config.debug.seed + self.step, self.dp_rank)

    def restore(self) -> int | None:
        """Resume the job of this folder, else start from `initial_load_path`. The step resumed from, if any."""
        if self.checkpointer is None:
            return None
        options = self.config.checkpoint
        path = options.initial_load_path
        resumed = self.checkpointer.load()
        if resumed is not None:
            logger.info("resumed from step %d in %s", resumed, self.checkpointer.folder)
            if path:
                logger.info("checkpoint.initial_load_path = %s is not used: this folder's own checkpoints win", path)
        elif path and options.initial_load_in_hf:
            for part in self.model.parts:
                build.model_spec(self.config).hf.load_hf(path, part, build.model_args(self.config))
            logger.info("started from the Hugging Face weights in %s", path)
        elif path:
            self.checkpointer.initial_load(Path(path), options.initial_load_model_only)
            logger.info("started from %s", path)
        return resumed

    def export(self) -> None:
        """After the last step, beside the full checkpoint: the weights alone, for other programs."""
        options = self.config.checkpoint
        if self.checkpointer is None or not options.last_save_model_only:
            return
        dtype = build.DTYPES[options.export_dtype]
        if options.last_save_in_hf:
            distributed.set_timeout(EXPORT_TIMEOUT_SECONDS)  # the others wait while one writes
            try:
                build.model_spec(self.config).hf.save_hf(
                    self.folder / "model_hf",
                    dict(self.model.named_tensors()),
                    build.model_args(self.config),
                    dtype=dtype,
                    write=self.ranks.is_main,
                )
            except OSError as error:
                raise CheckpointError(f"the Hugging Face weights were not written: {error}") from error
        else:
            self.checkpointer.export_model(self.folder / "model", dtype, self.step)

    # The loop

    def train(self) -> bool:
        """Train up to `training.steps`; False when it stopped before because it was asked to."""
        last = self.config.training.steps
        batches = iter(self.loader)
        self.metrics.start()
        first = True
        gc.disable()  # a collection on one rank makes all others wait: do it on all together, every gc_freq steps
        try:
            with self.profiler:
                while self.step < last and not self.stopping:
                    self.train_step(batches)
                    done = self.step == last or self.stopping
                    self.maybe_validate(done)
                    self.maybe_save(done)
                    self.profiler.step()
                    self.collect_garbage()
                    if first:
                        distributed.set_timeout(self.config.comm.train_timeout_seconds)
                        first = False
        finally:
            gc.enable()
        if self.checkpointer:
            self.checkpointer.finish()
        if self.step == last:
            self.export()
        return self.step == last

    def train_step(self, batches: Iterator[Batch]) -> None:
        """One optimizer step over `global_batch_size` samples."""
        microbatches, valid_tokens, data_seconds = self.fetch(batches)
        loss = torch.zeros((), device=self.device)
        for index, batch in enumerate(microbatches):
            loss += self.model.forward_backward(batch, valid_tokens, is_last=index == len(microbatches) - 1)
        if not self.config.optimizer.early_step_in_backward:  # there, gradients are gone by now
            self.grad_norm = self.model.clip_gradients(self.config.training.max_norm)
            if self.device.type == "cpu":  # looking costs nothing there, so a bad step never reaches the weights
                self.refuse_non_finite("gradient norm", self.grad_norm)
        lr = self.schedulers.last_lr
        self.optimizers.step()
        self.model.after_step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        self.step += 1
        self.tokens += self.tokens_per_step
        self.loss = loss
        self.log(lr, data_seconds)

    def fetch(self, batches: Iterator[Batch]) -> tuple[list[Batch], int, float]:
        """This rank's microbatches of the next step, the valid tokens of all ranks together, and the seconds that this
        rank waited for its data.

        The same small reduction carries two flags, so that all ranks stop at the same step: somebody has no data,
        somebody was asked to stop (after this step).
        """
        started = time.perf_counter()
        microbatches, failure = take(batches, self.accumulation)
        data_seconds = time.perf_counter() - started
        valid = sum(map(count_valid, microbatches))
        valid, failed, stop = distributed.sum_over_ranks(valid, failure is not None, self.stop_requested)
        if failed:
            raise failure or PeerStopped("another rank has no data")
        self.stopping = bool(stop)
        valid = max(valid // self.dims.readers, 1)
        return [self.to_device(batch) for batch in microbatches], valid, data_seconds

    def to_device(self, batch: Batch) -> Batch:
        """What the model reads of a batch. Positions restart with each document: not without a mask."""
        names = ("tokens", "labels", "positions", "document_ids")[: 4 if self.config.training.document_mask else 2]
        return {name: batch[name].to(self.device, non_blocking=True) for name in names}

    # Between steps

    def log(self, lr: float, data_seconds: float) -> None:
        ranks_with_tokens = self.dims.dp * self.dims.cp  # of their own, the same number on each
        largest = self.loss * ranks_with_tokens  # the largest mean loss of a rank
        if self.metrics.due(self.step):
            self.loss = self.over_ranks(self.loss)
            if self.dims.world_size > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self.refuse_non_finite("gradient norm", self.grad_norm)
            self.refuse_non_finite("loss", self.loss)
        self.metrics.record(
            self.step,
            loss=self.loss,
            grad_norm=self.grad_norm,
            lr=lr,
            tokens=self.tokens_per_step,
            data_seconds=data_seconds,
            extra={"max_loss": largest} | (self.model.extra_metrics() if self.metrics.due(self.step) else {}),
        )

    def over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """The whole loss from the ranks' shares, of which those of a tp group are the same."""
        if self.dims.world_size > 1:
            dist.all_reduce(loss)
        return loss / self.dims.tp

    def refuse_non_finite(self, what: str, value: torch.Tensor | None) -> None:
        """Waits for the device, so it is asked only where the host waits anyway. Once NaN, weights stay NaN."""
        if value is not None and not math.isfinite(value):
            layers = self.model.not_finite_layers()
            first = f" (first seen by the router of {layers[0]})" if layers else ""
            raise NonFiniteError(
                f"the {what} is {float(value)} after step {self.step}{first}; the run stops and nothing is saved after "
                "it. Usual remedies: a lower optimizer.lr, a longer lr_scheduler.warmup_steps, "
                "training.max_norm = 1.0, float32 in training.mixed_precision_param; with checkpoints, start again to "
                "go on from the last one"
            )

    def refuse_to_save_non_finite(self) -> None:
        """Before a save, also after a step that was not logged. Ranks' own losses differ, so they agree first."""
        (bad,) = distributed.sum_over_ranks(not math.isfinite(self.loss))
        self.refuse_non_finite("gradient norm", self.grad_norm)
        self.refuse_non_finite("loss", torch.tensor(math.nan) if bad else None)

    def maybe_validate(self, done: bool) -> None:
        options = self.config.validation
        if self.held_out is None or not (done or self.step % options.freq == 0):
            return
        batches, failure = take(iter(self.held_out), options.steps)  # all before the first forward, which communicates
        valid, failed = distributed.sum_over_ranks(sum(map(count_valid, batches)), failure is not None)
        if failed:
            raise failure or PeerStopped("another rank has no validation data")
        total = torch.zeros((), device=self.device)
        self.model.train(False)
        for batch in batches:
            total += self.model.loss_sum(self.to_device(batch))
        self.model.train()
        total = self.over_ranks(total)
        self.metrics.record_validation(self.step, (total / max(valid // self.dims.readers, 1)).item())

    def maybe_save(self, done: bool) -> None:
        if self.checkpointer and self.checkpointer.maybe_save(self.step, last=done):
            self.metrics.mark("checkpoint")

    def collect_garbage(self) -> None:
        options = self.config.training
        if options.gc_debug:
            logger.info("garbage collection after step %d: %d objects were unreachable", self.step, gc.collect())
        elif self.step % options.gc_freq == 0:
            gc.collect(1)

    def close(self) -> None:
        """End the run: say how it went and where things are, draw the picture, leave the world."""
        self.metrics.close()
        for loader in (self.loader, self.held_out):
            if loader is not None:
                loader.close()
        if self.loader.skipped:
            logger.warning("%d records could not be read and were skipped on this rank", self.loader.skipped)
        places = {"metrics": self.metrics.path, "job": self.folder / "config.toml"}
        if self.checkpointer and not self.config.checkpoint.load_only:
            places["checkpoints"] = self.checkpointer.folder
        if self.config.metrics.plot and self.metrics.path.exists():
            picture = self.folder / "training.png"
            title = f"{self.config.model.name} {self.config.model.flavor} on {self.config.training.dataset}"
            if self.ranks.is_main:
                draw_training_curve(self.metrics.path, picture, title)
            places["picture"] = picture
        logger.info("\n%s", self.metrics.summary(places))
        if self.step < self.config.training.steps:
            how = "; start it again to go on" if "checkpoints" in places else " (checkpoint.enable is off: not saved)"
            logger.info("stopped as asked after step %d%s", self.step, how)
        distributed.close()
