"""Rules on folders, trackers, the profiler, guards and validation metrics."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchtitan.adapters import spec_of
from torchtitan.checkpoint.folders import LOSS
from torchtitan.config.job import trackers_of
from torchtitan.config.options import Fault, hint, options, show
from torchtitan.core.cadence import CadenceError, cadence_of
from torchtitan.core.errors import check_measured_saves, check_pinned, check_snapshots, check_window
from torchtitan.launcher.run_folder import KNOWN_NAMES, LOGS_FOLDER, find_misplaced
from torchtitan.metrics.trackers import TRACKERS, entries_of
from torchtitan.process.machine import limit_in_bytes
from torchtitan.rules.facts import Facts, Rule


def trackers(facts: Facts) -> Iterator[Fault]:
    for place, name in trackers_of(facts.config.metrics).items():
        if name not in TRACKERS:
            remedy = hint(name, TRACKERS, quote=True)
            yield facts.fault(place, f"names of {', '.join(map(show, TRACKERS))}", remedy, value=show(name))
        elif obstacle := TRACKERS[name].obstacle():
            yield facts.fault(place, *obstacle)


def needs_a_gpu(facts: Facts) -> Iterator[Fault]:
    if facts.job.device_type == "cuda":
        return
    config = facts.config
    yield from facts.judged(check_pinned, config.training.dataloader.pin_memory, facts.job.device_type)
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield facts.fault("checkpoint.async_mode", '"async" or "disabled" without a GPU', 'write "async"')
    yield from facts.judged(check_snapshots, config.profiling.enable_memory_snapshot, facts.job.device_type)
    reasons = {"flex": "flex has no backward on a CPU", "fa3": "FlashAttention 3 is for Hopper GPUs"}
    if reason := reasons.get(config.model.attention_backend):
        yield facts.fault("model.attention_backend", '"auto" or "sdpa" without a GPU', reason)


def memory_has_a_size(facts: Facts) -> Iterator[Fault]:
    if facts.config.memory.limit is not None:
        yield from facts.judged(limit_in_bytes, facts.config.memory.limit)


NOT_EXPANDED = re.compile(r"~|.*\$[\w{(]")
"""Names of folders as a shell reads them: of a user's home, or with a variable or the output of a command."""
USED_BY_THE_RUN = {".", *KNOWN_NAMES, *entries_of()}


def folders(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    for key, folder in {
        "checkpoint.folder": config.checkpoint.folder,
        "metrics.save_tb_folder": config.metrics.save_tb_folder,
        "profiling.save_traces_folder": config.profiling.save_traces_folder,
        "profiling.save_memory_snapshot_folder": config.profiling.save_memory_snapshot_folder,
    }.items():
        if folder.strip() and os.path.normpath(folder).split(os.sep)[0] in USED_BY_THE_RUN:
            reserved = ", ".join(map(show, sorted(USED_BY_THE_RUN)))
            yield facts.fault(key, f"a name that the run does not use itself ({reserved})", "give another")
        elif not folder.strip() or Path(folder).is_absolute() or ".." in Path(folder).parts:
            yield facts.fault(key, "a folder inside job.dump_folder", "give its name alone")
    key, dump = "job.dump_folder", config.job.dump_folder
    if not dump.strip():
        yield facts.fault(key, "a folder", 'write "./outputs"')
        return
    if fault := unwritable(Path(dump)):
        allowed, reason = fault
        yield facts.fault(key, allowed, f"{reason}; name another folder")
        return
    if conflict := find_misplaced(Path(dump)):
        remedy = f"{conflict}; move it away, or name another folder"
        yield facts.fault(key, "a run's folder, or a new one", remedy)
    folder = config.checkpoint.folder
    if config.checkpoint.enable and "\0" not in folder and (fault := unwritable(Path(dump, folder))):
        allowed, reason = fault
        yield facts.fault("checkpoint.folder", allowed, f"{reason}; bring it back, or name another folder")
    if config.data.cache_dir is not None and (fault := unwritable(Path(config.data.cache_dir))):
        allowed, reason = fault
        yield facts.fault("data.cache_dir", allowed, f"{reason}; name another folder")


def unwritable(folder: Path) -> tuple[str, str] | None:
    """Return (allowed, reason) for a folder that cannot be written to, else None. It need not exist yet."""
    try:
        existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if _is_there(p))
        if not existing.exists():
            return "a folder", f"{existing} is a link to {os.readlink(existing)}, which is not there (not mounted?)"
        new = folder.absolute().relative_to(existing).parts
        if name := next(filter(NOT_EXPANDED.match, new), ""):
            return "a folder by its name", f"{name} is not expanded here, only a ~ of a known user at the beginning is"
    except OSError as error:
        return "a folder", error.strerror or str(error)
    if not existing.is_dir():
        return "a folder", f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return "a folder that can be written to", f"{existing} cannot"
    return _cannot_be_filled(existing)


def _cannot_be_filled(folder: Path) -> tuple[str, str] | None:
    """Create and remove a folder in it, since permissions do not show a full disk or a file system such as /proc.

    A run's cleanup would remove a leftover folder of this name.
    """
    trial = folder / f".{LOGS_FOLDER}.tmp"
    try:
        trial.mkdir()
        trial.rmdir()
    except FileExistsError:  # another check made it
        return None
    except OSError as error:
        reason = f"no file can be created in {folder.resolve()} ({error.strerror or error})"
        return "a folder that can be written to", reason
    return None


def _is_there(path: Path) -> bool:
    """Return True if the path exists, also as a dangling link. Raises OSError for invalid names."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def profiler_window(facts: Facts) -> Iterator[Fault]:
    profiling = facts.config.profiling
    if profiling.enable_profiling or profiling.enable_memory_snapshot:
        window = profiling.profiler_active, profiling.profiler_warmup
        yield from facts.judged(check_window, profiling.profile_freq, *window)


def without_effect(facts: Facts) -> Iterator[Fault]:
    """Report options of debug, metrics and checkpoint that are set and have no effect."""
    config = facts.config
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        yield facts.fault("debug.deterministic_warn_only", "false without debug.deterministic", "set both or neither")
    if config.metrics.save_for_all_ranks and not config.metrics.enable_tensorboard:
        yield facts.fault("metrics.save_for_all_ranks", "false without enable_tensorboard", "set both or neither")
    if config.metrics.histogram_freq and "tensorboard" not in trackers_of(config.metrics).values():
        yield facts.fault("metrics.histogram_freq", "0 without TensorBoard", "set metrics.enable_tensorboard too")
    options, key = config.checkpoint, "checkpoint."
    if options.export_dtype != "float32" and not options.last_save_model_only:
        yield facts.fault(key + "export_dtype", '"float32" without last_save_model_only', "set both or neither")
    if options.last_save_in_hf and not options.last_save_model_only:
        yield facts.fault(key + "last_save_in_hf", "true only with last_save_model_only", "set both")


POLICIES = ("non_finite", "spike", "loss_policy")


def policies_can_be_followed(facts: Facts) -> Iterator[Fault]:
    guard, saves = facts.config.guard, facts.config.checkpoint
    for name in POLICIES:
        policy, key = getattr(guard, name), f"guard.{name}"
        if policy == "skip" and facts.config.optimizer.early_step_in_backward:
            reason = "each update happens in backward, before the loss or the norm is known"
            yield facts.fault(key, '"stop" or "rollback" with optimizer.early_step_in_backward', reason)
        if policy == "rollback" and (not saves.enable or saves.load_only):
            reason = "a rollback needs a checkpoint; set it, or write skip"
            allowed = '"rollback" only with checkpoint.enable' + (" and without load_only" if saves.load_only else "")
            yield facts.fault(key, allowed, reason)
    if guard.shard_checksums and facts.config.optimizer.early_step_in_backward:
        reason = "each update happens in backward, before the checksums can be compared"
        yield facts.fault("guard.shard_checksums", "false with optimizer.early_step_in_backward", reason)


def loss_is_the_same_on_another_rank(facts: Facts) -> Iterator[Fault]:
    key, layout = "guard.replay_every", facts.job.layout
    if not facts.config.guard.replay_every:
        return
    if layout.dims.dp == 1:
        yield facts.fault(key, "0 with one data-parallel rank", "there is no other rank to compare with; leave it out")
    if layout.ep > 1:
        reason = "experts see the tokens of other samples too, so the bits of a loss depend on the rank; leave it out"
        yield facts.fault(key, "0 with parallelism.expert_parallel_degree", reason)
    if spec_of(facts.config.adapter).stateful:
        yield facts.fault(key, "0 with an adapter that keeps a cache on each rank", "leave it out")


def guards_without_effect(facts: Facts) -> Iterator[Fault]:
    guard = facts.config.guard
    watched = {
        "spike_window": guard.spike != "off" or guard.loss_rise is not None,
        "spike_sigmas": guard.spike != "off",
        "loss_patience": guard.loss_threshold is not None,
        "loss_policy": guard.loss_threshold is not None,
        "patience": {getattr(guard, name) for name in POLICIES} & {"skip", "rollback"},
    }
    needs = {"patience": "a guard with skip or rollback"}
    needs |= dict.fromkeys(("loss_patience", "loss_policy"), "guard.loss_threshold")
    for name, is_used in watched.items():
        key = f"guard.{name}"
        if not is_used and getattr(guard, name) != (default := options()[key].default):
            allowed = f"{show(default)} without {needs.get(name, 'guard.spike')}"
            yield facts.fault(key, allowed, "set both, or leave it out")


OF_CLASSES = ("validation_accuracy", "validation_f1")


def _measured(facts: Facts, key: str, name: str) -> Iterator[Fault]:
    """Require that validation measures the metric `name`, the value of option `key`."""
    metrics = (LOSS, *(OF_CLASSES if facts.model.learns_classes else ()))
    if not facts.config.validation.enable:
        yield facts.fault(key, "nothing without validation.enable", "set both, or leave it out")
    elif name not in metrics:
        remedy = hint(name, metrics, 0.8, quote=True) or "a validation of this task measures only these"
        yield facts.fault(key, ", ".join(map(show, metrics)), remedy)


def best_is_measured(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.checkpoint, "checkpoint.best_metric"
    if options.best_metric is None:
        for name in ("best_mode", "export_best"):
            if getattr(options, name):
                yield facts.fault(f"checkpoint.{name}", "nothing without checkpoint.best_metric", f"set {key}")
        return
    yield from _measured(facts, key, options.best_metric)
    if options.load_only:
        yield facts.fault(key, "nothing with checkpoint.load_only, which never saves", "drop one of the two")
    if options.export_best and not (options.last_save_model_only or facts.config.adapter.last_save_in_peft):
        reason = "they select the export"
        needed = "checkpoint.last_save_model_only or adapter.last_save_in_peft"
        yield facts.fault("checkpoint.export_best", f"false without {needed}", f"{reason}; set one of them")


def saves_are_measured(facts: Facts) -> Iterator[Fault]:
    """Require that each checkpoint falls on a validation.

    If the intervals depend on the length of the data, the run itself checks them before it starts.
    """
    config = facts.config
    if config.checkpoint.best_metric is None or not config.validation.enable:
        return
    if config.checkpoint.interval_type == "seconds":
        reason = "each checkpoint must coincide with a validation, and validations are scheduled in steps"
        yield facts.fault("checkpoint.interval_type", '"steps" with checkpoint.best_metric', reason)
        return
    intervals = config.checkpoint.interval, config.validation.freq
    if all(isinstance(value, int) for value in intervals):
        yield from facts.judged(check_measured_saves, *intervals)
    elif facts.steps is not None:
        with suppress(CadenceError):  # another rule reports it
            cadence = cadence_of(facts.job_with_end.config, facts.steps)
            yield from facts.judged(check_measured_saves, cadence.save, cadence.validate)


def early_stop_can_be_told(facts: Facts) -> Iterator[Fault]:
    options = facts.config.early_stop
    if options.patience is None:
        for name in ("min_delta", "metric"):
            if getattr(options, name):
                yield facts.fault(f"early_stop.{name}", "nothing without early_stop.patience", "set both or neither")
    elif options.metric is None and not facts.config.validation.enable:
        yield facts.fault("early_stop.patience", "nothing without validation.enable", "set both, or leave it out")
    if options.patience is not None and options.metric is not None:
        yield from _measured(facts, "early_stop.metric", options.metric)


RULES: tuple[Rule, ...] = (
    policies_can_be_followed,
    loss_is_the_same_on_another_rank,
    best_is_measured,
    saves_are_measured,
    early_stop_can_be_told,
    trackers,
    needs_a_gpu,
    memory_has_a_size,
    folders,
    profiler_window,
)
WITHOUT_EFFECT: tuple[Rule, ...] = (
    guards_without_effect,
    without_effect,
)
