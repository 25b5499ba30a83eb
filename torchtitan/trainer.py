"""The loop and the step. Nothing here is specific to a model, an optimizer or a vendor.

One step: fetch microbatches | agree on the global number of valid tokens | forward, loss, backward of each | norm and
clip | optimizer, schedule | log, validate, save. The host waits for the device only when it logs, validates or saves.
"""

import gc
import logging
import math
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torchtitan import build, distributed, run_folder
from torchtitan.checkpoint import CheckpointError, base, folders, rng_state, set_rng_state
from torchtitan.checkpoint.kinds import find_weights
from torchtitan.config.changes import changes, refused, remedy
from torchtitan.config.job import JobConfig, describe_sources, sources_of
from torchtitan.config.manager import to_toml
from torchtitan.datasets.loader import merge_states
from torchtitan.datasets.sources import DataError
from torchtitan.metrics.device import describe_memory
from torchtitan.models.dropout import token_keys
from torchtitan.plot import draw_training_curve
from torchtitan.progress import Progress
from torchtitan.ranks import Ranks
from torchtitan.weights import load_foreign

logger = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]
EXPORT_TIMEOUT_SECONDS = 1800
WATCHDOG_SECONDS = 30
"""By how much collectives outlast the launcher's watchdog."""


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


class Trainer:
    def __init__(self, config: JobConfig, ranks: Ranks):
        self.dims = build.dims(config, ranks.world_size)
        if ranks.launcher and ranks.launcher.restart and ranks.launcher.restart.saved:
            config = build.as_restarted(config)
        config = build.with_steps(config, self.dims)  # may take long, so no process group waits for it
        self.config, self.ranks = config, ranks
        self.progress = Progress(ranks.launcher.progress if ranks.launcher else None, ranks.local_rank)
        # the launcher's watchdog speaks first: it knows who is late, while a collective only knows that it waited
        self.patience = WATCHDOG_SECONDS if ranks.launcher else 0
        timeout = config.comm.init_timeout_seconds + self.patience
        self.device = distributed.init(ranks, timeout, config.comm.trace_buf_size)
        if config.debug.deterministic:
            distributed.set_deterministic(config.debug.deterministic_warn_only)
        self.mesh = self.dims.build_mesh(self.device.type)
        self.dp_rank = self.dims.dp_rank(self.mesh)
        distributed.set_seed(config.debug.seed, self.dp_rank)
        self.tokenizer = build.tokenizer(config)
        self.beside_export: dict[str, bytes] = {}
        if config.checkpoint.last_save_in_hf:  # whether the format has all this is better known before the run
            self.beside_export = build.beside_hf_weights(config, self.tokenizer)
        self.model = build.model(config, self.mesh, self.dims, self.device, drawn=False)
        self.objective = build.objective(config)
        distributed.set_timeout(timeout)  # else torch's own for the mesh's groups
        self.optimizers = build.optimizers(config, self.model)
        self.schedulers = build.lr_schedulers(config, self.optimizers)

        samples = build.global_batch_size(config, self.dims)
        self.accumulation = samples // (config.training.local_batch_size * self.dims.dp)
        self.tokens_per_step = samples * config.training.seq_len
        self.folder = Path(config.job.dump_folder)
        self.step, self.tokens = 0, 0
        self.loss, self.grad_norm = torch.zeros(()), None  # of the last step
        self.time_limit, self.out_of_time = build.time_limit(config), False  # which rank 0 looks at for all
        self.stop_requested = False  # by a signal handler, on this rank alone, at any moment
        self.stopping = False  # by the agreement of all ranks in fetch()
        self.validated = False  # the first time may compile
        self.between_steps = True  # the state is that after `step`, whole, on all ranks
        self.data_state: dict[str, Any] | None = None
        self.exported: Path | None = None
        self.base: dict[str, str] | None = None  # of an adapter that is saved alone

        self.checkpointer = build.checkpointer(
            config,
            self.model,
            self.optimizers,
            self.trainer_state,
            self.rank_state,
            self.load_state,
            self.refuse_to_save_non_finite,
            self.compare_with_job_of,
            partial(run_folder.note_saved, self.folder),
        )
        self.progress.enter("load")
        self.resumed_from = self.restore()
        if self.checkpointer is not None:
            self.checkpointer.prepare()
        if self.data_state is not None:  # a last step that was filled up, or steps of another size, shift the end
            config = self.config = build.with_steps(config, self.dims, self.data_state["samples"], self.step)
        self.loader = build.training_loader(config, self.tokenizer, self.dp_rank, self.dims, self.data_state)
        self.began_at = self.step
        self.position = self.loader.position()  # after `step`: what a step that fails has fetched is fetched again
        self.held_out = None  # every iteration over it begins again
        if config.validation.enable:
            self.held_out = build.validation_loader(config, self.tokenizer, self.dp_rank, self.dims)
        self.metrics = build.metrics(config, self.device, ranks, self.resumed_from, self.tokens)
        self.profiler = build.profiler(config, self.device, ranks, self.step)
        if ranks.is_main:
            run_folder.keep_job(self.folder, to_toml(build.movable(config)), self.step)
        self.note_restart()
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
        if self.model.adapter is not None:
            logger.info("adapter    %s", self.model.adapter.describe())
        training, data = config.training, describe_sources(config, "training")
        end = "" if training.epochs is None else f"; epochs: {training.epochs}, which take {training.steps} steps"
        logger.info("data       %s, tokenizer of %d%s", data, self.tokenizer.vocab_size, end)
        if config.metrics.log_lr_schedule:
            logger.info("schedule   %s", self.schedulers.schedule.describe(config.optimizer.lr))
        logger.info("folder     %s", self.folder.resolve())
        if self.checkpointer is None or config.checkpoint.load_only:
            off = "checkpoint.enable is off" if self.checkpointer is None else "checkpoint.load_only is set"
            logger.warning("nothing will be saved: %s; what this run learns is lost with its end", off)

    def note_restart(self) -> None:
        """A row of its own in metrics.jsonl, if the launcher has started this run again."""
        restart = self.ranks.launcher.restart if self.ranks.launcher else None
        if restart is None:
            return
        lost = time.monotonic() - restart.since
        if self.resumed_from is not None and self.checkpointer.loaded_from is not None:
            lost = min(lost, time.time() - self.checkpointer.loaded_from.stat().st_mtime)
        told = {"cause": restart.cause, "rank": restart.rank, "restarts": restart.number}
        told |= {"steps_lost": max(0, restart.step - self.step), "seconds_lost": round(lost, 1)}
        self.metrics.record_event(self.step, "restart", told)

    # What a checkpoint holds beside tensors

    def trainer_state(self) -> dict[str, Any]:
        state = {"step": self.step, "tokens": self.tokens, "lr_scheduler": self.schedulers.state_dict()}
        if self.base is not None:
            state[base.KEY] = self.base
        return (
            state
            | self.model.hooks.state_dict()
            | {"degrees": self.degrees}
            | build.job_of_checkpoint(self.config, self.dims)
        )

    @property
    def degrees(self) -> dict[str, int]:
        return self.dims.degrees | {"ep": self.dims.ep}

    def rank_state(self) -> dict[str, Any]:
        return {"rng": rng_state(), "dataloader": self.position.to_dict()}

    def load_state(self, trainer: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        """Continue what was saved on any number of ranks; parts excluded from loading are absent."""
        self.step, self.tokens = trainer["step"], trainer["tokens"]
        if "lr_scheduler" in trainer:
            self.schedulers.load_state_dict(trainer["lr_scheduler"])
        self.model.hooks.load_state_dict(trainer)
        if all("dataloader" in state for state in ranks):
            self.data_state = merge_states([state["dataloader"] for state in ranks])
        saved = self.degrees | trainer.get("degrees", {})  # what an old checkpoint does not say is taken as it is here
        same_plan = len(ranks) == self.ranks.world_size and saved == self.degrees
        if same_plan and "rng" in ranks[self.ranks.rank]:
            set_rng_state(ranks[self.ranks.rank]["rng"])
        else:  # another plan: nobody's generator is ours, but do not repeat the numbers of step 0 either
            distributed.set_seed(self.config.debug.seed + self.step, self.dp_rank)

    def compare_with_job_of(self, trainer: dict[str, Any], model_only: bool) -> None:
        """Before a checkpoint is taken: say what has changed since, refuse what makes the curve another."""
        if self.base is not None and not model_only:
            base.refuse_another(trainer, self.base)
        found = changes(trainer, build.job_of_checkpoint(self.config, self.dims), model_only)
        if bad := refused(found, self.config.checkpoint.allow_config_change):
            told = "; ".join(f"{change}: {remedy(change)}" for change in bad)
            raise CheckpointError(f"the checkpoint is of another job: {told}")
        if found:
            logger.info("changed since the checkpoint: %s", ", ".join(map(str, found)))

    def restore(self) -> int | None:
        """Resume the job of this folder, else start from `initial_load_path`, else from initial weights, drawn only
        then. The step resumed from, if any."""
        if self.checkpointer is None:
            self.model.initialize()
            return None
        options = self.config.checkpoint
        path = options.initial_load_path
        if alone := build.saves_adapter_alone(self.config):  # what checkpoints only refer to
            self.base = self.checkpointer.main_peers.decide(partial(build.base_reference, self.config))
            self.start_from(path)
        resumed = self.checkpointer.load()
        if resumed is not None:
            logger.info("resumed from step %d in %s", resumed, self.checkpointer.folder)
            if path and not alone:
                logger.info("checkpoint.initial_load_path = %s is not used: this folder's own checkpoints win", path)
        elif not path:
            self.model.initialize()
        elif not alone:
            self.start_from(path)
        if resumed is None and self.config.adapter.initial_path:
            self.model.adapter.begin_from(self.model.parts, build.peft_tensors(self.config, self.model.adapter))
            logger.info("adapter started from %s", self.config.adapter.initial_path)
        return resumed

    def start_from(self, path: str) -> None:
        """Take the weights of another job or program; an adapter's own stay as they were drawn."""
        options, adapter = self.config.checkpoint, self.model.adapter
        self.model.initialize(adapter.fresh if adapter else ())
        kind, place = find_weights(Path(path))
        if kind == "ours":
            self.checkpointer.initial_load(place, options.initial_load_model_only)
            logger.info("started from %s", path)
        else:
            args, fresh = build.model_args(self.config), adapter.fresh if adapter else ()
            load_foreign(place, self.model.parts, self.config.model.name, args, fresh)
            self.checkpointer.refuse_not_finite(Path(path))
            whose = {"hf": "Hugging Face's", "torchtitan": "torchtitan's own"}[kind]
            logger.info("started from %s weights in %s", whose, place)
        if adapter is not None:
            adapter.follow_base(self.model.parts)

    def export(self) -> None:
        """After the last step, beside the full checkpoint: the weights alone, for other programs."""
        options = self.config.checkpoint
        if self.config.adapter.last_save_in_peft:
            self.export_adapter()
        if self.checkpointer is None or not options.last_save_model_only:
            return
        dtype = build.DTYPES[options.export_dtype]
        self.exported = self.folder / ("model_hf" if options.last_save_in_hf else "model")
        if options.last_save_in_hf:
            distributed.set_timeout(EXPORT_TIMEOUT_SECONDS)  # the others wait while one writes
            try:
                with folders.published(self.exported, write=self.ranks.is_main) as folder:
                    build.model_spec(self.config).hf.save_hf(
                        folder,
                        self.plain_tensors(),
                        build.model_args(self.config),
                        dtype=dtype,
                        write=self.ranks.is_main,
                        beside=self.beside_export,
                    )
            except OSError as error:
                raise CheckpointError(f"the Hugging Face weights were not written: {error}") from error
        else:
            self.checkpointer.export_model(self.exported, dtype, self.step, self.plain_tensors())

    def export_adapter(self) -> None:
        adapter = self.model.adapter
        mine = adapter.whole_tensors(self.model.parts)
        of_all: list[Any] = [mine]
        if self.ranks.world_size > 1:  # of a pipeline each rank has its layers'
            of_all = [None] * self.ranks.world_size if self.ranks.is_main else None
            dist.gather_object(mine, of_all)
        if self.ranks.is_main:
            whole = {name: tensor for part in of_all for name, tensor in part.items()}
            try:
                build.save_peft(self.config, self.folder / "adapter", adapter, whole)
            except OSError as error:
                raise CheckpointError(f"the adapter was not written: {error}") from error

    def plain_tensors(self) -> dict[str, torch.Tensor]:
        """The plain model's: what an adapter has learned is folded into them."""
        adapter = self.model.adapter
        return dict(self.model.named_tensors()) if adapter is None else adapter.merged(self.model.parts)

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
                    try:
                        self.progress.enter("first" if first else "data", self.step + 1)
                        self.train_step(batches)
                        if not self.stopping:  # who asked gives us time to save, not more
                            self.maybe_validate(self.step == last)
                    except (DataError, PeerStopped, NonFiniteError):  # which all ranks raise here, or none
                        self.save_what_is_whole()
                        raise
                    self.maybe_save(self.step == last or self.stopping)
                    self.profiler.step()
                    self.collect_garbage()
                    if first:
                        distributed.set_timeout(self.config.comm.train_timeout_seconds + self.patience)
                        first = False
        finally:
            gc.enable()
        if self.checkpointer:
            self.checkpointer.finish()
        if self.step == last:
            self.export()
        self.progress.enter("end", self.step)
        return self.step == last

    def train_step(self, batches: Iterator[Batch]) -> None:
        """One optimizer step over `global_batch_size` samples."""
        microbatches, valid_tokens, data_seconds = self.fetch(batches)
        loss = torch.zeros((), device=self.device)
        for index, batch in enumerate(microbatches):
            batch = self.with_keys(batch, index)
            loss += self.model.forward_backward(batch, valid_tokens, is_last=index == len(microbatches) - 1)
        if not self.config.optimizer.early_step_in_backward:  # there, gradients are gone by now
            norm = self.model.clip_gradients(self.config.training.max_norm)
            if self.device.type == "cpu":  # looking costs nothing there, so a bad step never reaches the weights
                self.refuse_non_finite("gradient norm", norm)
            self.grad_norm = norm
        self.between_steps = False
        lr = self.schedulers.last_lr
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        self.step += 1
        self.model.after_step(self.step, self.optimizers.optimizers)
        self.tokens += self.tokens_per_step
        self.loss = loss
        self.log(lr, data_seconds)
        self.position, self.between_steps = self.loader.position(), True

    def fetch(self, batches: Iterator[Batch]) -> tuple[list[Batch], int, float]:
        """This rank's microbatches of the next step, the valid tokens of all ranks together, and the seconds that this
        rank waited for its data.

        The same small reduction carries two flags, so that all ranks stop at the same step: somebody has no data,
        somebody was asked to stop (after this step).
        """
        started = time.perf_counter()
        microbatches, failure = take(batches, self.accumulation)
        data_seconds = time.perf_counter() - started
        if self.step > self.began_at:
            self.progress.enter("train", self.step + 1)
        valid = sum(map(self.objective.count, microbatches))
        self.look_at_the_clock()
        valid, failed, stop = distributed.sum_over_ranks(valid, failure is not None, self.stop_requested)
        if failed:
            raise failure or PeerStopped("another rank has no data")
        self.stopping = bool(stop)
        valid = max(valid // self.dims.readers, 1)
        return [self.to_device(batch) for batch in microbatches], valid, data_seconds

    def look_at_the_clock(self) -> None:
        save_seconds = self.checkpointer.longest_save_seconds if self.checkpointer is not None else 0.0
        if self.ranks.is_main and not self.out_of_time and self.time_limit.near(save_seconds):
            logger.info("stopping after this step, ahead of the end that is known (job.time_limit or SLURM's)")
            self.stop_requested = self.out_of_time = True

    def to_device(self, batch: Batch) -> Batch:
        """What the model reads of a batch. Positions restart with each document: not without a mask."""
        of_documents = ("positions", "document_ids") if self.config.training.document_mask else ()
        names = ("tokens", *self.objective.targets, *of_documents)
        return {name: batch[name].to(self.device, non_blocking=True) for name in names}

    def with_keys(self, batch: Batch, index: int) -> Batch:
        """The step's batch number `index` of this rank, with what dropout draws by: the samples of a step are dealt out
        to the data-parallel ranks one by one.
        """
        if not self.model.draws:
            return batch
        size, length = batch["tokens"].shape
        samples = torch.arange(index * size, (index + 1) * size, device=self.device) * self.dims.dp + self.dp_rank
        return batch | {"keys": token_keys(self.config.debug.seed, self.step, samples, length)}

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
            self.stop_non_finite(f"the {what} is {float(value)}", first)

    def stop_non_finite(self, what: str, where: str = "") -> NoReturn:
        raise NonFiniteError(
            f"{what} after step {self.step}{where}; the run stops and nothing is saved after it. Usual remedies: a "
            "lower optimizer.lr, a longer lr_scheduler.warmup_steps, training.max_norm = 1.0, float32 in "
            "training.mixed_precision_param; with checkpoints, start again to go on from the last one"
        )

    def refuse_to_save_non_finite(self) -> None:
        """Before a save, also after a step that was not logged. Ranks' own losses differ, so they agree first."""
        (bad,) = distributed.sum_over_ranks(not math.isfinite(self.loss))
        self.refuse_non_finite("gradient norm", self.grad_norm)
        self.refuse_non_finite("loss", torch.tensor(math.nan) if bad else None)
        # the last update is in neither: of one step in backward nothing else is known, and any may overflow
        if self.checkpointer is not None and (names := self.checkpointer.not_finite()):
            self.stop_non_finite(f"{len(names)} weights or moments are NaN or infinite, {names[0]} among them,")

    def maybe_validate(self, done: bool) -> None:
        options = self.config.validation
        if self.held_out is None or not (done or self.step % options.freq == 0):
            return
        self.progress.enter("validate" if self.validated else "first", self.step)
        batches, failure = take(iter(self.held_out), options.steps)  # all before the first forward, which communicates
        valid = sum(map(self.objective.count, batches))
        valid, failed, stop = distributed.sum_over_ranks(valid, failure is not None, self.stop_requested)
        if failed:
            raise failure or PeerStopped("another rank has no validation data")
        self.stopping = bool(stop)
        if self.stopping:
            return
        total = torch.zeros((), device=self.device)
        self.model.train(False)
        for batch in batches:
            total += self.model.loss_sum(self.to_device(batch))
            self.progress.enter("validate", self.step)
        self.model.train()
        self.validated = True
        total = self.over_ranks(total)
        self.metrics.record_validation(self.step, (total / max(valid // self.dims.readers, 1)).item())

    def maybe_save(self, done: bool) -> None:
        self.progress.enter("save", self.step)
        if self.checkpointer and self.checkpointer.maybe_save(self.step, last=done):
            self.metrics.mark("checkpoint")

    def save_what_is_whole(self) -> None:
        """Where all ranks have found together that they cannot go on (no data, a bad gradient before it reached the
        weights): save the last step, so that the next start loses nothing. Why the run ends is said by who calls."""
        if not self.between_steps or self.step == 0:
            return
        try:
            self.maybe_save(True)
            if self.checkpointer:
                self.checkpointer.finish()
        except (CheckpointError, NonFiniteError) as error:
            logger.error("step %d could not be saved before the end: %s", self.step, error)

    def collect_garbage(self) -> None:
        options = self.config.training
        if options.gc_debug:
            logger.info("garbage collection after step %d: %d objects were unreachable", self.step, gc.collect())
        elif self.step % options.gc_freq == 0:
            gc.collect(1)

    def memory(self) -> str:
        """Who has it on this rank, for a run that ran out of it."""
        parameters = [parameter for _, parameter in self.model.named_parameters()]
        return describe_memory(self.device, parameters, self.optimizers)

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
        if self.exported is not None:
            places["weights"] = self.exported
        if self.config.metrics.plot and self.metrics.path.exists():
            picture = self.folder / "training.png"
            data = " + ".join(source.dataset for source in sources_of(self.config, "training").values())
            title = f"{self.config.model.name} {self.config.model.flavor} on {data}"
            if self.ranks.is_main:
                draw_training_curve(self.metrics.path, picture, title)
            places["picture"] = picture
        logger.info("\n%s", self.metrics.summary(places))
        if self.step < self.config.training.steps:
            how = "; start it again to go on" if "checkpoints" in places else " (checkpoint.enable is off: not saved)"
            logger.info("stopped as asked after step %d%s", self.step, how)
        distributed.close()
