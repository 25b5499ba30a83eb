"""When the trainer saves and what it resumes from. How a save is made is in saving.py, how one is read in loading.py.

In the background modes the loop stands still only while this rank's tensors are copied into host buffers; everything
else happens in one thread at a time. A failed save is raised on all ranks at the same step: while a save is under way
each `maybe_save` exchanges a few bytes to agree on whether it has ended.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchtitan.checkpoint import folders, layout, retention, saving, tensors
from torchtitan.checkpoint.adapter_state import Kept
from torchtitan.checkpoint.agreement import Peers, describe
from torchtitan.checkpoint.base_weights import SCHEDULE_START
from torchtitan.checkpoint.best_metric import Metric
from torchtitan.checkpoint.layout import (
    MODEL,
    OPTIMIZER,
    CannotSave,
    CheckpointError,
    NotFinite,
    NothingLoadable,
    Refused,
)
from torchtitan.checkpoint.loading import Source, Wanted, claim, complete_steps, load_tensors, open_checkpoint, resolve
from torchtitan.checkpoint.saving import Care, Snapshot
from torchtitan.core.tensor_storage import Value

logger = logging.getLogger(__name__)

RETRY_PAUSES = (2.0, 10.0)
"""Seconds before a failed save is tried again."""


class Checkpointer:
    """Saves and resumes one job in one folder. Every rank constructs it and makes the same calls at the same steps.

    `model_parts` are this rank's: the model, or its parts of a pipeline under the whole model's names; `optimizers`
    are theirs. A part whose head is tied to an embedding in another part says so by `part.tied_names` =
    {"output.weight": "tok_embeddings.weight"}: its copy is not saved, and filled by a load.

    `trainer_state()` gives JSON-able values that are the same on all ranks, `rank_state()` those of this rank;
    `load_state(trainer_state, rank_states)` takes them back, the list in the order of the ranks that saved. Names in
    `exclude_from_loading` are left out of both (top-level keys); "optimizer" leaves the optimizers' state fresh.
    `before_save()` may raise, on all ranks alike, to keep a state from being saved. `before_load(trainer_state,
    model_only)` may raise before anything is changed, to refuse what a checkpoint holds. `after_save(step)` is called
    on rank 0, in the thread that saves, when one has been published. `fresh` are parameters that
    another job's checkpoint may lack (an adapter's): an initial load then leaves them as they are. `left_out` are those
    that checkpoints of this job lack: they have their values before `load` is called. `best` tells one that stays.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model_parts: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        trainer_state: Callable[[], dict[str, Any]],
        rank_state: Callable[[], dict[str, Any]],
        load_state: Callable[[dict[str, Any], list[dict[str, Any]]], None],
        interval: int = 500,
        interval_type: Literal["steps", "seconds"] = "steps",
        keep_latest_k: int = 10,
        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled",
        load_step: int = -1,
        exclude_from_loading: Sequence[str] = (),
        enable_first_step_checkpoint: bool = False,
        load_only: bool = False,
        verify: bool = True,
        on_save_error: Literal["stop", "continue"] = "stop",
        retry_pauses: Sequence[float] = RETRY_PAUSES,
        before_save: Callable[[], None] = lambda: None,
        before_load: Callable[[dict[str, Any], bool], None] = lambda trainer_state, model_only: None,
        after_save: Callable[[int], None] = lambda step: None,
        fresh: Collection[str] = (),
        left_out: Collection[str] = (),
        best: Metric | None = None,
    ):
        self.folder = Path(folder).resolve()
        self.model_parts, self.optimizers = list(model_parts), list(optimizers)
        self.trainer_state, self.rank_state, self.load_state = trainer_state, rank_state, load_state
        self.before_save, self.before_load, self.after_save = before_save, before_load, after_save
        self.fresh, self.left_out = ({MODEL + name for name in names} for names in (fresh, left_out))
        self.fresh_loaded = False
        """Whether what has been loaded held an adapter's parameters too."""
        self.interval, self.interval_type = interval, interval_type
        self.keep_latest_k, self.load_step, self.best = keep_latest_k, load_step, best
        self.excluded, self.kept = set(exclude_from_loading), Kept()  # beside parameters; set by who has them
        self.enable_first_step_checkpoint, self.load_only = enable_first_step_checkpoint, load_only
        self.verify, self.on_save_error, self.retry_pauses = verify, on_save_error, tuple(retry_pauses)

        self.main_peers, self.save_peers = Peers("main thread"), Peers("saves")
        self.staging: tensors.Staging | None = None
        if async_mode != "disabled":
            pinned = async_mode == "async_with_pinned_mem" and torch.cuda.is_available()
            self.staging = tensors.Staging(pinned)
        self.running: threading.Thread | None = None
        self.running_step = 0
        self.failure: BaseException | None = None
        self.loaded_from: Path | None = None
        self.place: folders.Place | None = None
        self.saved_step: int | None = None
        self.whole_step: int | None = None
        """The same, but for a save that is under way or has failed."""
        self.needed_bytes = 0
        """Of a checkpoint, as far as it is known."""
        self.longest_save_seconds = 0.0
        self.rewound_to: int | None = None
        """Until the first save, the step loaded: newer ones (passed over as damaged, or not asked for) are history."""
        self.last_save_time = time.monotonic()

    # Saving

    def prepare(self) -> None:
        """Before the first step: see that all ranks can write to the folder and that it is the same one for all, and
        know it again at every save. Raises `CheckpointError` on all ranks."""
        if self.load_only:
            return
        try:
            self.place = claim(self.folder, self.main_peers)

            def look() -> None:
                self.place.check()
                self.place.try_writing(self.main_peers.rank)

            self.main_peers.agree("trying to write", look)
        except CheckpointError as error:
            raise CannotSave(f"checkpoints cannot be written to {self.folder}: {error}") from error

    def maybe_save(self, step: int, last: bool = False) -> bool:
        """Save if it is time to, and always after the last step. Whether a save was made or begun.

        Raises `CheckpointError`, on all ranks, if this save or an earlier one in the background failed; with
        `on_save_error` "continue" only if it is the last, else the failure is said and the next one is tried.
        """
        if self.load_only:
            return False
        earlier = self.running is not None
        try:
            return self._save_if_due(step, last)
        except CheckpointError as error:
            if last and not earlier:
                raise
            self._go_on_without(error)
        return self._save_if_due(step, last) if earlier else False

    def _go_on_without(self, failed: CheckpointError) -> None:
        if self.on_save_error == "stop":
            raise failed
        self.saved_step = self.whole_step
        if self.main_peers.is_main:
            logger.error("%s; the run goes on without it (checkpoint.on_save_error = continue)", failed)

    def _save_if_due(self, step: int, last: bool) -> bool:
        if not self._due(step, last) or step == self.saved_step:
            if self.staging is not None and self.staging.fresh:
                self.staging.prepare(self._tensors()[0])
            return False
        self.before_save()
        self._wait()
        target = self.folder / layout.step_name(step)
        snapshot = self._snapshot(step)
        self.saved_step, self.last_save_time = step, time.monotonic()
        self.needed_bytes = self.needed_bytes or sum(t.numel() * t.itemsize for t in snapshot.tensors.values())
        if self.staging is None:
            return self._save(snapshot, target)
        self.running_step = step
        self.running = threading.Thread(target=self._save_in_background, args=(snapshot, target), name="checkpoint")
        self.running.start()
        return True

    def not_finite(self) -> list[str]:
        """Names of weights and moments with a NaN or an infinity in them, on any rank; the same answer on all."""
        names = tensors.not_finite(self._tensors()[0])
        if self.main_peers.maximum(bool(names)) == [0]:
            return []
        return sorted({name for found in self.main_peers.tell(self.main_peers.collect(names)) for name in found})

    def finish(self) -> None:
        """Wait for the save under way. Raises `CheckpointError` on all ranks if it failed on any."""
        self._wait()

    def export_model(self, path: Path, dtype: torch.dtype, step: int, plain: Mapping[str, Value] | None = None) -> bool:
        """Write the model alone, its parameters as `dtype`: a folder for `initial_load` and for inference. `plain`: the
        tensors of the plain model by its names, where the live model is another one.

        False if it is there already, of the same step and job. Waits for the save under way.
        """
        self._wait()
        snapshot = saving.snapshot_of_model(step, self.model_parts, self.trainer_state, dtype, plain)
        return saving.save(snapshot, Path(path).resolve(), None, self.save_peers, Care(verify=self.verify)) > 0

    def _due(self, step: int, last: bool) -> bool:
        """The same on all ranks; on the way, notice the end of a save in the background."""
        due = last or (step == 1 and self.enable_first_step_checkpoint)
        if self.interval_type == "steps":
            due = due or step % self.interval == 0
        elif self.main_peers.is_main:  # one clock decides, and no wall clock
            due = due or time.monotonic() - self.last_save_time >= self.interval
        if self.running is None and self.interval_type == "steps":
            return due
        unfinished = self.running is not None and self.running.is_alive()
        somebody_due, somebody_unfinished = self.main_peers.maximum(due, unfinished)
        if not somebody_unfinished:
            self._wait()
        return bool(somebody_due)

    def _wait(self) -> None:
        """Join the save under way; if it failed anywhere, fail everywhere."""
        if self.running is None:
            return
        self.running.join()
        self.running = None
        failure, self.failure = self.failure, None
        (failed,) = self.main_peers.maximum(failure is not None)
        if failed:
            reason = describe(failure) if failure else "it failed on another rank"
            raise CheckpointError(f"the checkpoint of step {self.running_step} was not saved: {reason}") from failure

    def _snapshot(self, step: int) -> Snapshot:
        """This rank's share, as of now. An error becomes part of it, since the other ranks are about to save."""
        snapshot = Snapshot("full", step)
        try:
            snapshot.tensors, snapshot.optimizer_values = self._tensors()
            # through text, so that it is JSON and later changes of nested values do not reach it
            text = json.dumps([self.trainer_state(), self.rank_state()], allow_nan=False)
            snapshot.trainer, snapshot.rank = json.loads(text)
            if self.staging is not None:
                snapshot.staged = self.staging.copy(snapshot.tensors)
        except Exception as error:
            snapshot.error = error
        return snapshot

    def _tensors(self) -> tuple[tensors.Tensors, dict[str, Any]]:
        of_optimizers, values = tensors.optimizer_state(self.model_parts, self.optimizers)
        of_optimizers |= self.kept.live(self.main_peers.rank)
        return self._without(self.left_out, tensors.model_tensors(self.model_parts)) | of_optimizers, values

    def _without(self, names: Collection[str], of_model: tensors.Tensors) -> tensors.Tensors:
        return {name: tensor for name, tensor in of_model.items() if name not in names}

    def _save(self, snapshot: Snapshot, target: Path) -> bool:
        started = time.monotonic()
        care = Care(self.place, self.verify, self.needed_bytes, self.retry_pauses)
        size = saving.save(snapshot, target, self.rewound_to, self.save_peers, care)
        self.whole_step = snapshot.step
        self.rewound_to = None  # not before: after a save that fails, what is newer is still history
        self.needed_bytes = size or self.needed_bytes
        if self.save_peers.is_main:
            self.after_save(snapshot.step)
        good = {target} if self.verify else None
        retention.retain(self.folder, self.keep_latest_k, {target, self.loaded_from}, self.save_peers, good, self.best)
        self.longest_save_seconds = max(self.longest_save_seconds, time.monotonic() - started)
        return size > 0

    def _save_in_background(self, snapshot: Snapshot, target: Path) -> None:
        try:
            self._save(snapshot, target)
        except BaseException as error:  # nobody else looks at what a thread raises
            self.failure = error

    # Loading

    def load(self) -> int | None:
        """Resume from `load_step` or the newest checkpoint that is whole; the step, or None where there is none.

        A damaged one is passed over for the next older one, which is said. One that is whole and does not fit the
        job is refused with `CheckpointError`, as is a folder whose checkpoints are all damaged (`NothingLoadable`).
        """
        complete, refused = complete_steps(self.folder, self.main_peers)
        if not complete and not refused and self.load_step < 0:
            return None
        if self.load_step >= 0:
            complete = [path for path in complete if layout.step_of(path.name) == self.load_step]
            refused = [old for old in refused if layout.step_of(old.folder.name) == self.load_step]
        for folder in complete:
            try:
                source = open_checkpoint(folder, self.main_peers)
            except CheckpointError as error:
                refused.append(Refused(folder, str(error)))
                continue
            try:
                self._restore(source, with_state=True)
            except NotFinite as error:  # from before such were not published; an older one may be good
                refused.append(Refused(folder, str(error)))
                continue
            break
        else:
            raise NothingLoadable(self._nothing(refused))
        if self.main_peers.is_main:
            for old in refused:
                logger.warning("checkpoint not used: %s", old)
            for what, here in saving.versions().items():
                if (saved := source.manifest.versions.get(what)) != here:
                    logger.warning("saved with %s %s, going on with %s: not bit-equal any more", what, saved, here)
        self.loaded_from = folder
        self.saved_step = self.whole_step = self.rewound_to = source.manifest.step
        return self.saved_step

    def can_go_back(self) -> bool:
        """Whether this run has saved or loaded something that is whole, once the save under way has ended; the same on
        all ranks. Raises `CheckpointError`, on all of them, if that save failed, unless the run goes on without it."""
        try:
            self._wait()
        except CheckpointError as error:
            self._go_on_without(error)
        if self.saved_step is None or self.load_only:
            return False
        partly = self.excluded & {"optimizer", "lr_scheduler"}  # nothing would bring these back to where they began
        return not (partly and self.loaded_from and self.saved_step == layout.step_of(self.loaded_from.name))

    def go_back(self) -> None:
        """In the middle of a run that can: take its newest checkpoint again."""
        if self.rewound_to is None:  # the run has saved since it loaded, as it was told to or not
            self.load_step, self.excluded = -1, set()
        assert self.load() is not None

    def initial_load(self, path: Path, model_only: bool = True, counters: bool = False) -> int:
        """Start from another job's checkpoint, folder of checkpoints (its newest) or export; the step to go on from.

        `model_only` takes the weights, cast to the model's dtype, and starts at step 0; with `counters` it goes on
        counting, with a schedule that begins there: `load_state` is given the step as `SCHEDULE_START` too.
        """
        source = open_checkpoint(resolve(Path(path).resolve(), self.main_peers), self.main_peers)
        if not model_only and source.manifest.kind == "model":
            raise CheckpointError(
                f"{source.folder} holds weights alone, so nothing but them can be loaded; "
                "set checkpoint.initial_load_model_only = true, or give a full checkpoint"
            )
        self._restore(source, with_state=not model_only)
        if model_only and counters:
            trainer, step = source.state["trainer"], source.manifest.step
            kept = {"step": step, "tokens": trainer["tokens"], SCHEDULE_START: step}
            of_data = {"dataloader"} - self.excluded
            ranks = [{name: state[name] for name in of_data & state.keys()} for state in source.state["ranks"]]
            self.main_peers.agree(f"going on from {source.folder.name}", lambda: self.load_state(kept, ranks))
        return 0 if model_only and not counters else source.manifest.step

    def refuse_not_finite(self, origin: Path) -> None:
        """Where weights or moments that have been read from `origin` hold a NaN or an infinity. Raises `NotFinite`."""
        if names := self.not_finite():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise NotFinite(f"{origin}: {names[0]}{more} holds NaN or infinity, from which no training comes back")

    def _restore(self, source: Source, with_state: bool) -> None:
        judge = partial(self.before_load, source.state["trainer"], not with_state)
        self.main_peers.agree(f"comparing the job with that of {source.folder.name}", judge)
        with_optimizer, reads_on = (with_state and part not in self.excluded for part in ("optimizer", "dataloader"))
        live = Wanted({}, {})

        def collect() -> None:
            live.tensors = tensors.model_tensors(self.model_parts)
            if with_optimizer:
                tensors.allocate_state(self.optimizers)
                of_optimizers, live.values = tensors.optimizer_state(self.model_parts, self.optimizers)
                live.tensors |= of_optimizers
            live.copies = tensors.copied_tensors(self.model_parts, self.optimizers if with_optimizer else ())
            self.fresh_loaded = not self.fresh.isdisjoint(source.manifest.tensors)
            absent = self.left_out if with_state else self.fresh
            if with_state or absent.isdisjoint(source.manifest.tensors):
                live.tensors, live.copies = self._without(absent, live.tensors), self._without(absent, live.copies)
            if not with_state:
                live.unpack(self.model_parts, source)

        # the parts of a pipeline differ, so a failure may be one rank's alone
        self.main_peers.agree("collecting what to load", collect)
        kept, others = self.kept.taken(source, self.main_peers) if reads_on else ({}, ())
        live.tensors |= kept
        prefixes = (MODEL, OPTIMIZER, *others) if with_optimizer else (MODEL, *others)
        load_tensors(source, live, self.main_peers, prefixes=prefixes, cast=not with_state)
        self.refuse_not_finite(source.folder)

        def go_on() -> None:
            if with_optimizer:
                tensors.set_optimizer_values(self.model_parts, self.optimizers, source.state["optimizer"])
            trainer, *ranks = (
                {name: value for name, value in part.items() if name not in self.excluded}
                for part in (source.state["trainer"], *source.state["ranks"])
            )
            self.load_state(trainer, ranks)

        if with_state:
            self.main_peers.agree(f"going on from {source.folder.name}", go_on)

    def _nothing(self, refused: list[Refused]) -> str:
        if self.load_step >= 0:
            what = f"no checkpoint of step {self.load_step} (checkpoint.load_step) can be loaded from {self.folder}"
        else:
            what = f"{self.folder} holds checkpoints and none can be loaded"
        told = "; ".join(map(str, refused)) or "there is no such step"
        return f"{what}: {told}. Repair or remove them, or give another job.dump_folder; nothing was started afresh"
