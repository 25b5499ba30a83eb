"""Decide when the trainer saves and from where it resumes. Saving is implemented in saving.py, loading in loading.py.

In the background modes the training loop only waits while this rank's tensors are copied to host buffers. Everything
else happens in one thread at a time. A failed save is raised on all ranks at the same step: during a background save
each `maybe_save` exchanges a few bytes to agree on whether it has ended.
"""

import json
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.checkpoint import folders, layout, saving, tensors
from torchtitan.checkpoint.agreement import Peers, describe
from torchtitan.checkpoint.base_weights import SCHEDULE_START
from torchtitan.checkpoint.folders import Metric
from torchtitan.checkpoint.layout import (
    MODEL,
    OPTIMIZER,
    CannotSave,
    CheckpointError,
    NotFinite,
    NothingLoadable,
    RefusedCheckpoint,
)
from torchtitan.checkpoint.loading import (
    NO_HEADS,
    AdapterState,
    CheckpointSource,
    Heads,
    LoadTargets,
    claim,
    complete_steps,
    load_tensors,
    open_checkpoint,
    resolve,
)
from torchtitan.checkpoint.saving import SaveOptions, Snapshot, TrainerHooks
from torchtitan.config.changes import CASTING
from torchtitan.config.sections.run import Checkpoint
from torchtitan.core.machine_errors import MachineError
from torchtitan.core.tensor_storage import Value

logger = logging.getLogger(__name__)

EXTRA_VALUES = "callbacks"
"""Key in the trainer's state of the values of `TrainerHooks.extra_state`."""
RETRY_PAUSES = (2.0, 10.0)
"""Seconds before each retry of a failed save."""


class Checkpointer:
    """Saves and resumes one job in one folder. Every rank constructs it and makes the same calls at the same steps.

    `options` is the job's section, with the interval in steps or seconds. Top-level keys of the trainer's and the
    ranks' states in its `exclude_from_loading` are not restored; "optimizer" leaves the optimizer state fresh.

    `model_parts` are this rank's: the model, or its parts of a pipeline under the full model's names; `optimizers` are
    theirs. A part with a head tied to an embedding in another part sets `part.tied_names` = {"output.weight":
    "tok_embeddings.weight"}: its copy is not saved, but filled by a load.

    `added_parameters` (an adapter's) may be missing in another job's checkpoint: an initial load then leaves them
    unchanged. `omitted_parameters` are not part of this job's checkpoints: they are set before `load` is called.
    """

    def __init__(
        self,
        folder: Path,
        options: Checkpoint,
        model_parts: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        hooks: TrainerHooks,
        added_parameters: Collection[str] = (),
        omitted_parameters: Collection[str] = (),
    ):
        self.folder, self.options, self.hooks = Path(folder).resolve(), options, hooks
        self.model_parts, self.optimizers = list(model_parts), list(optimizers)
        self.added_parameters, self.omitted_parameters = (
            {MODEL + name for name in names} for names in (added_parameters, omitted_parameters)
        )
        self.loaded_adapter = False
        """True if the loaded checkpoint also had an adapter's parameters."""
        self.best_metric: Metric | None = None
        """Selects a checkpoint to retain."""
        if options.best_metric is not None:
            self.best_metric = Metric.of(options.best_metric, options.best_mode)
        self.load_only = options.load_only or not options.enable
        self.load_step, self.excluded = options.load_step, set[str](options.exclude_from_loading)
        self.adapter_state = AdapterState()  # set by its owner
        self.retry_pauses = RETRY_PAUSES

        self.main_peers, self.save_peers = Peers("main thread"), Peers("saves")
        self.staging: tensors.Staging | None = None
        if options.async_mode != "disabled":
            pinned = options.async_mode == "async_with_pinned_mem" and torch.cuda.is_available()
            self.staging = tensors.Staging(pinned)
        self.running: threading.Thread | None = None
        self.running_step = 0
        self.failure: BaseException | None = None
        self.loaded_from: Path | None = None
        self.place: folders.CheckpointRoot | None = None
        self.saved_step: int | None = None
        self.published_step: int | None = None
        """Step of the last complete save. Unlike `saved_step`, it ignores saves that are in progress or have failed."""
        self.needed_bytes = 0
        """Size of a checkpoint, as far as it is known."""
        self.longest_save_seconds = 0.0
        self.rewound_to: int | None = None
        """The loaded step, until the first save. Newer checkpoints (damaged, or not asked for) are obsolete."""
        self.last_save_time = time.monotonic()

    # Saving

    def prepare(self) -> None:
        """Check, before the first step, that all ranks can write to the same folder, and mark it to recognize it at
        every save. Raises `CheckpointError` on all ranks."""
        if self.load_only:
            return
        try:
            self.place = claim(self.folder, self.main_peers)

            def try_folder() -> None:
                self.place.check()
                self.place.try_writing(self.main_peers.rank)

            self.main_peers.agree("trying to write", try_folder)
        except (CheckpointError, MachineError) as error:
            raise CannotSave(f"checkpoints cannot be written to {self.folder}: {error}") from error

    def maybe_save(self, step: int, last: bool = False) -> bool:
        """Save if it is time to, and always after the last step. Return True if a save was made or started.

        Raises `CheckpointError`, on all ranks, if this save or an earlier background save failed. With `on_save_error`
        "continue" only the last save raises; other failures are logged, and the next save is tried.
        """
        if self.load_only:
            return False
        was_running = self.running is not None
        try:
            return self._save_if_due(step, last)
        except CheckpointError as error:
            if last and not was_running:
                raise
            self._continue_without(error)
        return self._save_if_due(step, last) if was_running else False

    def _continue_without(self, error: CheckpointError) -> None:
        if self.options.on_save_error == "stop":
            raise error
        self.saved_step = self.published_step
        self.hooks.after_failed_save(str(error))
        if self.main_peers.is_main:
            logger.error("%s; the run goes on without it (checkpoint.on_save_error = continue)", error)

    def _save_if_due(self, step: int, last: bool) -> bool:
        if not self._due(step, last) or step == self.saved_step:
            if self.staging is not None and self.staging.fresh:
                self.staging.prepare(self._tensors()[0])
            return False
        self.hooks.before_save()
        self._wait()
        target = self.folder_of(step)
        snapshot = self._snapshot(step)
        self.saved_step, self.last_save_time = step, time.monotonic()
        self.needed_bytes = self.needed_bytes or sum(t.numel() * t.itemsize for t in snapshot.tensors.values())
        if self.staging is None:
            if has_saved := self._save(snapshot, target):
                self.hooks.extra_state.after_save(target)
            return has_saved
        self.running_step = step
        self.running = threading.Thread(target=self._save_in_background, args=(snapshot, target), name="checkpoint")
        self.running.start()
        return True

    def folder_of(self, step: int) -> Path:
        return self.folder / layout.step_name(step)

    def not_finite(self) -> list[str]:
        """Return the names of weights and moments with a NaN or an infinity on any rank; the same on all."""
        names = tensors.not_finite(self._tensors()[0])
        if self.main_peers.maximum(bool(names)) == [0]:
            return []
        return sorted({name for local in self.main_peers.broadcast(self.main_peers.gather(names)) for name in local})

    def finish(self) -> None:
        """Wait for the save under way. Raises `CheckpointError` on all ranks if it failed on any."""
        self._wait()

    def export_model(self, path: Path, dtype: torch.dtype, step: int, plain: Mapping[str, Value] | None = None) -> bool:
        """Write the model alone, its parameters as `dtype`, to a folder for `initial_load` and for inference. `plain`:
        the tensors of the plain model by name, if the live model differs.

        Return False if it exists already, with the same step and job. Waits for the save under way.
        """
        self._wait()
        snapshot = saving.snapshot_of_model(step, self.model_parts, self.hooks.trainer_state, dtype, plain)
        return (
            saving.save(snapshot, Path(path).resolve(), None, self.save_peers, SaveOptions(verify=self.options.verify))
            > 0
        )

    def _due(self, step: int, last: bool) -> bool:
        """Return True, the same on all ranks, if a save is due; also handle the end of a background save."""
        due = last or (step == 1 and self.options.enable_first_step_checkpoint)
        if self.options.interval_type == "steps":
            due = due or step % self.options.interval == 0
        elif self.main_peers.is_main:  # rank 0 decides, by a monotonic clock
            due = due or time.monotonic() - self.last_save_time >= self.options.interval
        if self.running is None and self.options.interval_type == "steps":
            return due
        unfinished = self.running is not None and self.running.is_alive()
        any_due, any_unfinished = self.main_peers.maximum(due, unfinished)
        if not any_unfinished:
            self._wait()
        return bool(any_due)

    def _wait(self) -> None:
        """Join the save under way; a failure on any rank is raised on all."""
        if self.running is None:
            return
        self.running.join()
        self.running = None
        failure, self.failure = self.failure, None
        (failed,) = self.main_peers.maximum(failure is not None)
        if failed:
            reason = describe(failure) if failure else "it failed on another rank"
            raise CheckpointError(f"the checkpoint of step {self.running_step} was not saved: {reason}") from failure
        self.hooks.extra_state.after_save(self.folder_of(self.running_step))

    def _snapshot(self, step: int) -> Snapshot:
        """Snapshot this rank's share. An error is stored in it, because the other ranks are about to save."""
        snapshot = Snapshot("full", step)
        try:
            snapshot.tensors, snapshot.optimizer_values = self._tensors()
            extra_tensors, values = self.hooks.extra_state.state()
            snapshot.tensors |= extra_tensors
            # via JSON text, which validates the values and isolates them from later changes
            trainer = self.hooks.trainer_state() | ({EXTRA_VALUES: values} if values else {})
            text = json.dumps([trainer, self.hooks.rank_state()], allow_nan=False)
            snapshot.trainer, snapshot.rank = json.loads(text)
            if self.staging is not None:
                snapshot.staged = self.staging.copy(snapshot.tensors)
        except Exception as error:
            snapshot.error = error
        return snapshot

    def _tensors(self) -> tuple[tensors.Tensors, dict[str, Any]]:
        optimizer_tensors, values = tensors.optimizer_state(self.model_parts, self.optimizers)
        optimizer_tensors |= self.adapter_state.named_tensors(self.main_peers.rank)
        model_tensors = self._without(self.omitted_parameters, tensors.model_tensors(self.model_parts))
        return model_tensors | optimizer_tensors, values

    def _without(self, names: Collection[str], model_tensors: tensors.Tensors) -> tensors.Tensors:
        return {name: tensor for name, tensor in model_tensors.items() if name not in names}

    def _save(self, snapshot: Snapshot, target: Path) -> bool:
        started = time.monotonic()
        care = SaveOptions(self.place, self.options.verify, self.needed_bytes, self.retry_pauses)
        size = saving.save(snapshot, target, self.rewound_to, self.save_peers, care)
        self.published_step = snapshot.step
        self.rewound_to = None  # only now: after a failed save, newer checkpoints are still obsolete
        self.needed_bytes = size or self.needed_bytes
        if self.save_peers.is_main:
            self.hooks.after_save(snapshot.step)
        protected, good = {target, self.loaded_from}, {target} if self.options.verify else None
        saving.delete_old(self.folder, self.options.keep_latest_k, protected, self.save_peers, good, self.best_metric)
        self.longest_save_seconds = max(self.longest_save_seconds, time.monotonic() - started)
        return size > 0

    def _save_in_background(self, snapshot: Snapshot, target: Path) -> None:
        try:
            self._save(snapshot, target)
        except BaseException as error:  # otherwise a thread's exception is lost
            self.failure = error

    # Loading

    def load(self) -> int | None:
        """Resume from `load_step` or the newest complete checkpoint; return the step, or None if there is none.

        A damaged checkpoint is skipped with a warning, in favor of the next older one. An undamaged one that does not
        fit the job is refused with `CheckpointError`, a folder with only damaged ones with `NothingLoadable`. Where the
        machine cannot read a checkpoint, `MachineError` is raised: an older one is not loaded in its place.
        """
        complete, refused = complete_steps(self.folder, self.main_peers)
        if not complete and not refused and self.load_step < 0:
            return None
        if self.load_step >= 0:
            complete = [path for path in complete if layout.step_of(path.name) == self.load_step]
            refused = [skipped for skipped in refused if layout.step_of(skipped.folder.name) == self.load_step]
        for folder in complete:
            try:
                source = open_checkpoint(folder, self.main_peers)
            except CheckpointError as error:
                refused.append(RefusedCheckpoint(folder, str(error)))
                continue
            try:
                self._restore(source, with_state=True)
            except NotFinite as error:  # saved by an old version; an older checkpoint may be finite
                refused.append(RefusedCheckpoint(folder, str(error)))
                continue
            break
        else:
            raise NothingLoadable(self._nothing_loadable(refused))
        if self.main_peers.is_main:
            for skipped in refused:
                logger.warning("checkpoint not used: %s", skipped)
            for name, version in saving.versions().items():
                if (saved := source.manifest.versions.get(name)) != version:
                    logger.warning("saved with %s %s, going on with %s: not bit-equal any more", name, saved, version)
        self.loaded_from = folder
        self.saved_step = self.published_step = self.rewound_to = source.manifest.step
        return self.saved_step

    def prepare_roll_back(self) -> bool:
        """Wait for the save under way. Return True, the same on all ranks, if a complete checkpoint exists.

        Raises the save's `CheckpointError` on all ranks if it failed, unless the run continues without it.
        """
        try:
            self._wait()
        except CheckpointError as error:
            self._continue_without(error)
        if self.saved_step is None or self.load_only:
            return False
        partial = self.excluded & {"optimizer", "lr_scheduler"}  # their initial state is not saved anywhere
        return not (partial and self.loaded_from and self.saved_step == layout.step_of(self.loaded_from.name))

    def roll_back(self, step: int | None = None) -> None:
        """Load the newest checkpoint, or that of `step`, again in the middle of a run, after `prepare_roll_back`."""
        before = self.load_step, self.excluded
        if step is not None:
            self.load_step, self.excluded = step, set()
        elif self.rewound_to is None:  # the run has saved since it loaded: resume from its newest checkpoint
            self.load_step, self.excluded = -1, set()
        try:
            assert self.load() is not None
        except CheckpointError:
            self.load_step, self.excluded = before
            raise

    def initial_load(self, path: Path, model_only: bool = True, counters: bool = False, heads: Heads = NO_HEADS) -> int:
        """Start from another job's checkpoint, folder of checkpoints (its newest) or export; return the start step.

        `model_only` loads the weights, cast to the model's dtype, and starts at step 0. With `counters` it continues
        the step count, and the schedule begins there: `load_state` also gets the step as `SCHEDULE_START`. The task's
        head keeps its values if the checkpoint has the other one of `heads`.
        """
        source = open_checkpoint(resolve(Path(path).resolve(), self.main_peers), self.main_peers)
        if not model_only and source.manifest.kind == "model":
            raise CheckpointError(
                f"{source.folder} holds weights alone, so nothing but them can be loaded; "
                "set checkpoint.initial_load_model_only = true, or give a full checkpoint"
            )
        heads = heads.replaced(source.manifest.tensors) if model_only else NO_HEADS
        self._restore(source, with_state=not model_only, heads=heads)
        if heads.names:
            names = ", ".join(sorted(name.removeprefix(MODEL) for name in heads.names))
            logger.info("%s has no %s: the head starts from its initial weights", source.folder, names)
        if model_only and counters:
            trainer, step = source.state["trainer"], source.manifest.step
            trainer_state = {"step": step, "tokens": trainer["tokens"], SCHEDULE_START: step}
            data_keys = {"dataloader"} - self.excluded
            ranks = [{name: state[name] for name in data_keys & state.keys()} for state in source.state["ranks"]]
            restore = partial(self.hooks.load_state, trainer_state, ranks)
            self.main_peers.agree(f"going on from {source.folder.name}", restore)
        return 0 if model_only and not counters else source.manifest.step

    def refuse_not_finite(self, origin: Path) -> None:
        """Raise `NotFinite` if weights or moments read from `origin` contain a NaN or an infinity."""
        if names := self.not_finite():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise NotFinite(f"{origin}: {names[0]}{more} holds NaN or infinity: training cannot recover from these")

    def _restore(self, source: CheckpointSource, with_state: bool, heads: Heads = NO_HEADS) -> None:
        judge = partial(self.hooks.before_load, source.state["trainer"], not with_state)
        self.main_peers.agree(f"comparing the job with that of {source.folder.name}", judge)
        with_optimizer, with_data = (with_state and part not in self.excluded for part in ("optimizer", "dataloader"))
        live = LoadTargets({}, {})

        def collect() -> None:
            live.tensors = tensors.model_tensors(self.model_parts)
            if with_optimizer:
                tensors.allocate_state(self.optimizers)
                optimizer_tensors, live.values = tensors.optimizer_state(self.model_parts, self.optimizers)
                live.tensors |= optimizer_tensors
            live.copies = tensors.copied_tensors(self.model_parts, self.optimizers if with_optimizer else ())
            self.loaded_adapter = not self.added_parameters.isdisjoint(source.manifest.tensors)
            absent = self.omitted_parameters if with_state else self.added_parameters
            if with_state or absent.isdisjoint(source.manifest.tensors):
                live.tensors, live.copies = self._without(absent, live.tensors), self._without(absent, live.copies)
            live.tensors, live.copies = (self._without(heads.names, t) for t in (live.tensors, live.copies))
            if not with_state:
                live.unpack(self.model_parts, source)

        # pipeline parts differ, so a single rank may fail
        self.main_peers.agree("collecting what to load", collect)
        prefixes: tuple[str, ...] = (MODEL, OPTIMIZER) if with_optimizer else (MODEL,)
        if with_data:
            adapter_tensors, adapter_prefixes = self.adapter_state.restore_targets(source, self.main_peers)
            live.tensors, prefixes = live.tensors | adapter_tensors, prefixes + adapter_prefixes
        if with_state:
            values, saved = source.state["trainer"].get(EXTRA_VALUES, {}), source.manifest.tensors
            # parameters of pipeline parts differ, so a single rank may fail
            collect_extra = partial(self.hooks.extra_state.targets, values, saved)
            extra_tensors, copies, extra_prefixes = self.main_peers.agree(
                "collecting the state of callbacks", collect_extra
            )
            live.tensors, live.copies = live.tensors | extra_tensors, live.copies | copies
            prefixes += extra_prefixes
        cast = not with_state or not CASTING.isdisjoint(self.options.allow_config_change)
        load_tensors(source, live, self.main_peers, prefixes=prefixes, cast=cast, unread=heads.other_names)
        self.refuse_not_finite(source.folder)

        def go_on() -> None:
            if with_optimizer:
                tensors.set_optimizer_values(self.model_parts, self.optimizers, source.state["optimizer"])
            trainer, *ranks = (
                {name: value for name, value in part.items() if name not in self.excluded}
                for part in (source.state["trainer"], *source.state["ranks"])
            )
            self.hooks.load_state(trainer, ranks)

        if with_state:
            self.main_peers.agree(f"going on from {source.folder.name}", go_on)

    def _nothing_loadable(self, refused: list[RefusedCheckpoint]) -> str:
        if self.load_step >= 0:
            fault = f"no checkpoint of step {self.load_step} (checkpoint.load_step) can be loaded from {self.folder}"
        else:
            fault = f"{self.folder} holds checkpoints and none can be loaded"
        reasons = "; ".join(map(str, refused)) or "there is no such step"
        return f"{fault}: {reasons}. Repair or remove them, or give another job.dump_folder; nothing was started afresh"
