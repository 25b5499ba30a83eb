"""Rules on trackers, the profiler, checkpoints and folders, and on options that would do nothing."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from torchtitan.checkpoint.base_weights import Kind, counters_of, find_weights
from torchtitan.checkpoint.layout import NothingLoadable, newest_complete, read_state
from torchtitan.config.changes import changes, kept_job
from torchtitan.config.job import trackers_of
from torchtitan.config.options import Fault, hint, show
from torchtitan.core.constraints import check_pinned, check_snapshots, check_window
from torchtitan.core.errors import JobError
from torchtitan.launcher.run_folder import LOGS, OWN, out_of_place
from torchtitan.metrics.trackers import TRACKERS, left_by
from torchtitan.models import CONFIGS, FROM_HF
from torchtitan.models.hf.config import CONFIG
from torchtitan.process.machine import amount_of
from torchtitan.rules.facts import Facts
from torchtitan.rules.task import PAIRS


def trackers(facts: Facts) -> Iterator[Fault]:
    for place, name in trackers_of(facts.config).items():
        if name not in TRACKERS:
            remedy = hint(name, TRACKERS, quote=True)
            yield facts.fault(place, f"names of {', '.join(map(show, TRACKERS))}", remedy, given=show(name))
        elif obstacle := TRACKERS[name].obstacle():
            yield facts.fault(place, *obstacle)


def needs_a_gpu(facts: Facts) -> Iterator[Fault]:
    if facts.device == "cuda":
        return
    config = facts.config
    yield from facts.judged(check_pinned, config.training.dataloader.pin_memory, facts.device)
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield facts.fault("checkpoint.async_mode", '"async" or "disabled" without a GPU', 'write "async"')
    yield from facts.judged(check_snapshots, config.profiling.enable_memory_snapshot, facts.device)
    if config.model.attention_backend == "flex":
        yield facts.fault("model.attention_backend", '"auto" or "sdpa" without a GPU', "flex has no backward on a CPU")


def memory_has_a_size(facts: Facts) -> Iterator[Fault]:
    if facts.config.memory.limit is not None:
        yield from facts.judged(amount_of, facts.config.memory.limit)


def checkpoint_rules(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.checkpoint, "checkpoint."
    if options.keep_latest_k == 1:
        why = "the only checkpoint would be deleted for one that nobody has read yet"
        yield facts.fault(key + "keep_latest_k", "0 (all) or at least 2", why)
    if options.load_only and (options.last_save_model_only or options.enable_first_step_checkpoint):
        name = "last_save_model_only" if options.last_save_model_only else "enable_first_step_checkpoint"
        yield facts.fault(key + name, "false with checkpoint.load_only, which never saves", "drop one of the two")
    if options.enable and options.initial_load_in_hf and options.initial_load_path is None:
        yield facts.fault(key + "initial_load_in_hf", "true only with initial_load_path", "set the path")
    if options.initial_load_in_hf and not options.initial_load_model_only:
        why = "safetensors of Hugging Face hold no optimizer state"
        yield facts.fault(key + "initial_load_model_only", "true with initial_load_in_hf", why)
    if options.initial_load_counters and options.enable and options.initial_load_path is None:
        yield facts.fault(key + "initial_load_counters", "true only with initial_load_path", "set the path")
    if options.initial_load_counters and not options.initial_load_model_only:
        why = "without it all is taken, the counters too"
        yield facts.fault(key + "initial_load_counters", "false with initial_load_model_only = false", why)
    if options.initial_load_path is not None:
        yield from _initial_load(facts, Path(options.initial_load_path))


def _initial_load(facts: Facts, path: Path) -> Iterator[Fault]:
    key, options = "checkpoint.initial_load_path", facts.config.checkpoint
    try:
        own = newest_complete(Path(facts.config.job.dump_folder, options.folder))[0] if options.enable else None
        if own is not None and facts.adapter_save == "whole":
            return  # this run goes on from its own checkpoint and needs the first one no more
        kind, place = find_weights(path)
    except (OSError, NothingLoadable) as error:
        yield facts.fault(key, "weights", str(error))
        return
    if kind != "hf" and options.initial_load_in_hf:
        why = f"{place} is a checkpoint of {'this project' if kind == 'ours' else 'torchtitan'}; leave it out"
        yield facts.fault("checkpoint.initial_load_in_hf", "true with a folder or file of Hugging Face only", why)
    if kind == "torchtitan" and not options.initial_load_model_only:
        why = "of torchtitan's checkpoints the weights alone are read"
        yield facts.fault("checkpoint.initial_load_model_only", "true with this initial_load_path", why)
    if kind == "hf" and not options.initial_load_model_only and not options.initial_load_in_hf:
        why = "safetensors of Hugging Face hold no optimizer state"
        yield facts.fault("checkpoint.initial_load_model_only", "true with this initial_load_path", why)
    if options.initial_load_counters:
        yield from _counters(facts, kind, place)
    if kind == "hf" and (place / CONFIG).is_file() and facts.args is not None:
        yield from _other_sizes(facts, place, key)


def reference_is_of_this_model(facts: Facts) -> Iterator[Fault]:
    """As far as a folder says it ahead of its tensors. A run that goes on has kept what its reference says; one that
    was stopped ahead of its first checkpoint asks it again.
    """
    key, path, options = "dpo.reference", facts.config.dpo.reference, facts.config.checkpoint
    if path is None or facts.config.task.kind not in PAIRS:
        return
    try:
        if options.enable and newest_complete(Path(facts.config.job.dump_folder, options.folder))[0] is not None:
            return
        kind, place = find_weights(Path(path))
    except (OSError, NothingLoadable) as error:
        yield facts.fault(key, "weights", str(error))
        return
    if facts.args is None:
        return
    if kind == "hf" and (place / CONFIG).is_file():
        yield from _other_sizes(facts, place, key)
    elif kind == "ours":
        yield from _sizes_of_another_run(facts, place, key)


def _sizes_of_another_run(facts: Facts, place: Path, key: str) -> Iterator[Fault]:
    assert facts.args is not None  # who asks has looked
    try:
        kept = read_state(place)["trainer"]
    except (OSError, ValueError, KeyError):  # of an export; loading says what is wrong
        return
    for change in changes(kept, kept_job(facts.config, asdict(facts.args), 0), model_only=True):
        allowed = f"a model of {change.now}"
        yield facts.fault(key, allowed, f"{place} has {change.before}; give a model of the job's sizes")


def _counters(facts: Facts, kind: Kind, place: Path) -> Iterator[Fault]:
    found, key = counters_of(kind, place), "checkpoint.initial_load_counters"
    if found is None:
        why = f"{place} does not say how far they were trained; leave it out"
        yield facts.fault(key, "true with a checkpoint of this project, or weights beside a training_state.json", why)
    elif facts.steps is not None and facts.steps <= found.step:
        why = f"{place} has counted {found.step}, and this run counts on"
        yield facts.fault("training.steps", f"more than {found.step}", why, given=str(facts.steps))


def _other_sizes(facts: Facts, folder: Path, key: str) -> Iterator[Fault]:
    """What a folder's config.json says otherwise than the job; what its tensors say shows when they are loaded."""
    allowed = f"weights of {facts.config.model.name} {facts.config.model.flavor}"
    try:
        form = CONFIGS[facts.config.model.name]
        differing = form.differences(folder, form.of_weights(folder, facts.args, facts.config.model.overrides))
    except JobError as error:
        yield facts.fault(key, allowed, str(error))
        return
    if differing:
        remedy = f'{"; ".join(differing)}; set model.flavor = "{FROM_HF}" and model.hf_folder = {show(str(folder))}'
        yield facts.fault(key, allowed, remedy)


def export_has_a_form(facts: Facts) -> Iterator[Fault]:
    """transformers has not all sizes that the models can have."""
    if facts.config.checkpoint.last_save_in_hf and facts.args is not None:
        try:
            CONFIGS[facts.config.model.name].to_hf(facts.args)
        except JobError as error:
            yield facts.fault("checkpoint.last_save_in_hf", "false with this model", str(error))


USED_BY_THE_RUN = {".", *OWN, *left_by()}


def folders(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    for key, folder in {
        "checkpoint.folder": config.checkpoint.folder,
        "metrics.save_tb_folder": config.metrics.save_tb_folder,
        "profiling.save_traces_folder": config.profiling.save_traces_folder,
        "profiling.save_memory_snapshot_folder": config.profiling.save_memory_snapshot_folder,
    }.items():
        if folder.strip() and os.path.normpath(folder).split(os.sep)[0] in USED_BY_THE_RUN:
            others = ", ".join(map(show, sorted(USED_BY_THE_RUN)))
            yield facts.fault(key, f"a name that the run does not use itself ({others})", "give another")
        elif not folder.strip() or Path(folder).is_absolute() or ".." in Path(folder).parts:
            yield facts.fault(key, "a folder inside job.dump_folder", "give its name alone")
    key, dump = "job.dump_folder", config.job.dump_folder
    if not dump.strip():
        yield facts.fault(key, "a folder", 'write "./outputs"')
        return
    if fault := unwritable(Path(dump)):
        allowed, why = fault
        yield facts.fault(key, allowed, f"{why}; name another folder")
        return
    if in_the_way := out_of_place(Path(dump)):
        remedy = f"{in_the_way}; move it away, or name another folder"
        yield facts.fault(key, "a run's folder, or a new one", remedy)
    folder = config.checkpoint.folder
    if config.checkpoint.enable and "\0" not in folder and (fault := unwritable(Path(dump, folder))):
        allowed, why = fault
        yield facts.fault("checkpoint.folder", allowed, f"{why}; bring it back, or name another folder")
    if config.data.cache_dir is not None and (fault := unwritable(Path(config.data.cache_dir))):
        allowed, why = fault
        yield facts.fault("data.cache_dir", allowed, f"{why}; name another folder")


def unwritable(folder: Path) -> tuple[str, str] | None:
    """Of a folder that nothing can be written into, what is allowed and why this is not; it may have yet to be made."""
    try:
        existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if _is_there(p))
        if not existing.exists():
            return "a folder", f"{existing} is a link to {os.readlink(existing)}, which is not there (not mounted?)"
    except OSError as error:
        return "a folder", error.strerror or str(error)
    if not existing.is_dir():
        return "a folder", f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return "a folder that can be written to", f"{existing} cannot"
    return _cannot_be_filled(existing)


def _cannot_be_filled(folder: Path) -> tuple[str, str] | None:
    """Create and remove a folder in it, since permissions do not show that /proc or a full disk takes nothing. Its name
    is one that a run's own cleanup removes."""
    trial = folder / f".{LOGS}.tmp"
    try:
        trial.mkdir()
        trial.rmdir()
    except FileExistsError:  # another check is at it
        return None
    except OSError as error:
        reason = f"nothing can be made in {folder.resolve()} ({error.strerror or error})"
        return "a folder that can be written to", reason
    return None


def _is_there(path: Path) -> bool:
    """Also a link that leads nowhere. Raises OSError for names that nothing can have."""
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
    """Options that are set and would do nothing."""
    config = facts.config
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        yield facts.fault("debug.deterministic_warn_only", "false without debug.deterministic", "set both or neither")
    if config.metrics.save_for_all_ranks and not config.metrics.enable_tensorboard:
        yield facts.fault("metrics.save_for_all_ranks", "false without enable_tensorboard", "set both or neither")
    if config.metrics.histogram_freq and "tensorboard" not in trackers_of(config).values():
        yield facts.fault("metrics.histogram_freq", "0 without TensorBoard", "set metrics.enable_tensorboard too")
    options, key = config.checkpoint, "checkpoint."
    if options.export_dtype != "float32" and not options.last_save_model_only:
        yield facts.fault(key + "export_dtype", '"float32" without last_save_model_only', "set both or neither")
    if options.last_save_in_hf and not options.last_save_model_only:
        yield facts.fault(key + "last_save_in_hf", "true only with last_save_model_only", "set both")


def needs_checkpoints(facts: Facts) -> Iterator[Fault]:
    """Options of checkpoints that are set and would do nothing, as there are none. A run can begin from other weights
    all the same."""
    options = facts.config.checkpoint
    names: tuple[str, ...] = ("load_only", "last_save_model_only", "enable_first_step_checkpoint", "best_metric")
    if options.initial_load_path is None:
        names = ("initial_load_in_hf", "initial_load_counters", *names, "exclude_from_loading", "allow_config_change")
    used = {"load_step": options.load_step >= 0} | {name: bool(getattr(options, name)) for name in names}
    for name in (name for name, is_used in used.items() if is_used and not options.enable):
        allowed = "nothing with checkpoint.enable = false"
        yield facts.fault(f"checkpoint.{name}", allowed, "set checkpoint.enable = true, or leave it out")
