"""What makes a job impossible or pointless, as far as it can be known without starting it. Needs no torch.

A rule is a function (Facts) -> faults, listed in RULES at the end; all of them always run, so that all faults come out
together. What one option can say by its type alone is in config.py.
"""

import dataclasses
import importlib.util
import math
import os
import shutil
import typing
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchtitan.checkpoint.layout import newest_complete, resolve
from torchtitan.config import JobConfig, Parallelism, Training, Validation
from torchtitan.datasets import DATASETS
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.datasets.tokens import TokenShards
from torchtitan.lr_shapes import LRSchedule, ScheduleError
from torchtitan.models import SIZES
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.options import ConfigError, Fault, describe, hint, show

BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs")
"""Backends of torch.compile that come with torch and train."""
UNSUPPORTED: dict[str, Any] = {
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_async_tensor_parallel": False,
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
}
"""Options that this version knows and does not do yet, and the one value that they may have."""

Device = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the rules look at: the job, where it is to run, and what follows from both."""

    config: JobConfig
    world_size: int
    device: Device

    def fault(self, key: str, allowed: str, remedy: str, given: str = "") -> Fault:
        """A fault of the job's option `key`, with its value unless `given` says it better."""
        value: Any = self.config
        for part in key.split("."):
            value = getattr(value, part)
        files = " + ".join(self.config.job.config_file) or "the job"
        return Fault(files, key, given or show(value), allowed, remedy)

    @cached_property
    def shard(self) -> int | None:
        """Data-parallel shards, with -1 worked out; None where the degrees do not fit the ranks."""
        degree, others = self.config.parallelism.data_parallel_shard_degree, math.prod(self.other_degrees.values())
        if degree == -1:
            return self.world_size // others if self.world_size % others == 0 else None
        return degree if degree * others == self.world_size else None

    @cached_property
    def other_degrees(self) -> dict[str, int]:
        degrees = self.config.parallelism
        return {
            "data_parallel_replicate_degree": degrees.data_parallel_replicate_degree,
            "context_parallel_degree": degrees.context_parallel_degree,
            "tensor_parallel_degree": degrees.tensor_parallel_degree,
            "pipeline_parallel_degree": degrees.pipeline_parallel_degree,
        }

    @cached_property
    def samples(self) -> int | None:
        """Samples of a forward pass over all data-parallel ranks."""
        dp = self.shard and self.shard * self.config.parallelism.data_parallel_replicate_degree
        return dp and dp * self.config.training.local_batch_size

    @cached_property
    def args(self) -> Any | None:
        """The model's sizes; None where name, flavor or overrides are wrong."""
        sizes = SIZES.get(self.config.model.name, {}).get(self.config.model.flavor)
        try:
            args = sizes and dataclasses.replace(sizes, **self.config.model.overrides)
            return args if args and args.num_parameters else None
        except (TypeError, ValueError, OverflowError):
            return None

    @cached_property
    def tokenizer(self) -> Tokenizer | OSError | ValueError:
        try:
            return build_tokenizer(self.config.model.tokenizer_path)
        except (OSError, ValueError) as error:  # beside TokenizerError, those of names that no file can have
            return error

    @cached_property
    def schedule(self) -> LRSchedule:
        """Raises ScheduleError."""
        shape = dataclasses.asdict(self.config.lr_scheduler)
        return LRSchedule(**shape | {"total_steps": shape["total_steps"] or self.config.training.steps})


Rule = Callable[[Facts], Iterator[Fault]]


def check(config: JobConfig, world_size: int, devices: Device) -> list[Fault]:
    """All faults of a job that is to run on `world_size` ranks of this kind of device; none means it can start."""
    facts = Facts(config, world_size, devices)
    return [fault for rule in RULES for fault in rule(facts)]


def with_faults_of_the_rest(error: ConfigError, world_size: int, devices: Device) -> list[Fault]:
    """A job's faults all at once: those of its text, and those of what can be understood of it.

    What was misspelt or mistyped counts as unset there, so faults of the same option are left out.
    """
    if error.rest is None:
        return error.faults
    wrong = {fault.key for fault in error.faults}
    return error.faults + [fault for fault in check(error.rest, world_size, devices) if fault.key not in wrong]


# Model, tokenizer, data


def known_names(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    names = [("model.name", SIZES), ("optimizer.name", OPTIMIZERS), ("training.dataset", DATASETS)]
    names += [("model.flavor", SIZES[config.model.name])] if config.model.name in SIZES else []
    names += [("validation.dataset", DATASETS)] if config.validation.enable else []
    names += [("compile.backend", BACKENDS)] if config.compile.enable else []
    for key, known in names:
        section, name = key.split(".")
        given = getattr(getattr(config, section), name)
        if given not in known:
            yield facts.fault(key, f"one of {', '.join(map(show, known))}", hint(given, known, quote=True))


def model_sizes(facts: Facts) -> Iterator[Fault]:
    model, key = facts.config.model, "model.overrides"
    sizes = SIZES.get(model.name, {}).get(model.flavor)
    if sizes is None:
        return
    types = {name: kind for name, kind in typing.get_type_hints(type(sizes)).items() if not _is_table(kind)}
    faults = []
    for name, value in model.overrides.items():
        given = f"{name} = {show(value)}"
        if name not in types:
            faults.append(facts.fault(key, f"sizes of {model.name}: {', '.join(types)}", hint(name, types), given=name))
        elif not _is_a(types[name], value):
            faults.append(facts.fault(key, f"{name} = {describe(types[name])}", "", given=given))
        elif value <= 0 and value is not False:
            faults.append(facts.fault(key, f"{name} > 0", "", given=given))
    yield from faults
    if not faults and facts.args is None:
        try:
            dataclasses.replace(sizes, **model.overrides)
            yield facts.fault(key, "sizes of a model that can be", "")
        except ValueError as error:
            yield facts.fault(key, f"sizes that fit together: {error}", "")


def _is_a(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return False
    return True


def _is_table(kind: Any) -> bool:
    return any(dataclasses.is_dataclass(part) for part in (kind, *typing.get_args(kind)))


def tokenizer_fits(facts: Facts) -> Iterator[Fault]:
    key = "model.tokenizer_path"
    if isinstance(facts.tokenizer, Exception):
        remedy = str(facts.tokenizer)
        if facts.config.model.flavor != "debugmodel" and "No such file" in remedy:
            remedy += "; Llama's own are in the models of huggingface.co/meta-llama, after the licence is accepted"
        yield facts.fault(key, "a tokenizer", remedy)
    elif facts.args and facts.tokenizer.vocab_size > facts.args.vocab_size:
        yield facts.fault(
            key,
            f"at most the {facts.args.vocab_size} tokens of model {facts.config.model.flavor}",
            f"use its tokenizer, or set model.overrides = {{vocab_size = {facts.tokenizer.vocab_size}}}",
            given=f"{show(facts.config.model.tokenizer_path)} with {facts.tokenizer.vocab_size} tokens",
        )


def data_is_there(facts: Facts) -> Iterator[Fault]:
    training, validation = facts.config.training, facts.config.validation
    yield from _data_fault(facts, "training", training, training.seq_len)
    if validation.enable:
        yield from _data_fault(facts, "validation", validation, validation.seq_len or training.seq_len)


def _data_fault(facts: Facts, section: str, part: Training | Validation, seq_len: int) -> Iterator[Fault]:
    if part.dataset not in DATASETS:
        return
    try:
        source = DATASETS[part.dataset](part.dataset_path, facts.config.training.text_field)
        if isinstance(source, TokenShards):
            source.blocks(seq_len)
            if not isinstance(facts.tokenizer, Exception):
                source.check_tokenizer(facts.tokenizer.fingerprint, facts.tokenizer.vocab_size)
    except (OSError, ValueError) as error:  # beside DataError, those of names that no file can have
        yield facts.fault(f"{section}.dataset_path", f"data for dataset {show(part.dataset)}", str(error))


# Ranks and batches


def degrees_fit_the_ranks(facts: Facts) -> Iterator[Fault]:
    degree, key = facts.config.parallelism.data_parallel_shard_degree, "parallelism.data_parallel_shard_degree"
    others = math.prod(facts.other_degrees.values())
    product = " x ".join(f"{name.removesuffix('_degree')} {n}" for name, n in facts.other_degrees.items() if n > 1)
    if degree == 0:
        yield facts.fault(key, "at least 1, or -1 for the ranks that are left", "write -1")
    elif facts.shard is None and degree == -1:
        allowed = f"ranks that can be divided by {product} = {others}"
        remedy = f"start a multiple of {others} ranks, or lower a degree"
        yield facts.fault(key, allowed, remedy, given=f"{facts.world_size} ranks")
    elif facts.shard is None:
        arithmetic = f"data_parallel_shard {degree}" + f" x {product}" * bool(product) + f" = {degree * others}"
        remedy = f"start {degree * others} ranks, or write -1 to shard over those that are left"
        yield facts.fault(key, f"degrees whose product is the number of ranks, {facts.world_size}", remedy, arithmetic)


def supported(facts: Facts) -> Iterator[Fault]:
    for key, only in UNSUPPORTED.items():
        section, name = key.split(".")
        if getattr(getattr(facts.config, section), name) != only:
            yield facts.fault(key, show(only), "it is not in this version; data parallel is (shard, replicate, both)")


def batch_divides(facts: Facts) -> Iterator[Fault]:
    asked, samples = facts.config.training.global_batch_size, facts.samples
    key = "training.global_batch_size"
    if asked == 0:
        yield facts.fault(key, "at least 1, or -1 for one forward pass a step", "write -1")
    elif asked > 0 and samples and asked % samples:
        local = facts.config.training.local_batch_size
        allowed = f"a multiple of local_batch_size {local} x {samples // local} data-parallel ranks = {samples}"
        below = asked // samples * samples
        remedy = f"write {below} or {below + samples}" if below else f"write {samples} or fewer samples a rank"
        yield facts.fault(key, allowed, remedy)


# Optimizer, schedule, precision, memory


def schedule_fits(facts: Facts) -> Iterator[Fault]:
    shape = facts.config.lr_scheduler
    try:
        facts.schedule  # noqa: B018 (it is made to see whether it can be)
    except ScheduleError as error:
        yield facts.fault(error.key, error.allowed, error.remedy)
    if shape.decay_ratio is not None and shape.decay_type == "constant":
        yield facts.fault("lr_scheduler.decay_ratio", 'unset with decay_type = "constant"', "drop one of the two")
    if shape.num_cycles > 1 and shape.decay_type != "cosine_restarts":
        yield facts.fault("lr_scheduler.num_cycles", '1, except with decay_type = "cosine_restarts"', "drop it")


def step_in_backward(facts: Facts) -> Iterator[Fault]:
    config, key = facts.config, "optimizer.early_step_in_backward"
    if not config.optimizer.early_step_in_backward:
        return
    if config.training.max_norm > 0:
        why = "clipping needs all gradients at once, and here each is gone before the next is there"
        yield facts.fault("training.max_norm", f"0 with {key}", why)
    if facts.samples and config.training.global_batch_size > facts.samples:
        why = "accumulation keeps gradients from one forward pass to the next"
        yield facts.fault("training.global_batch_size", f"-1 or {facts.samples} with {key}", why)
    if config.training.enable_cpu_offload and facts.device == "cuda":
        why = "before torch 2.13, FSDP2 hands over gradients whose copy to the host has not ended (pytorch #180666)"
        yield facts.fault(key, "false with training.enable_cpu_offload on a GPU", why)


def precision(facts: Facts) -> Iterator[Fault]:
    training = facts.config.training
    if training.dtype == "bfloat16" and training.mixed_precision_param == "float32":
        why = "computing in float32 adds nothing to weights kept in bfloat16"
        yield facts.fault("training.mixed_precision_param", '"bfloat16" with training.dtype = "bfloat16"', why)


def recompute_and_compile(facts: Facts) -> Iterator[Fault]:
    config, compiled = facts.config, facts.config.compile
    compiles_model = compiled.enable and "model" in compiled.components
    if config.activation_checkpoint.mode == "memory_budget" and not compiles_model:
        allowed = "with a compiled model only, as the compiler keeps to the budget"
        remedy = 'set compile.enable = true with "model" in compile.components, or another mode'
        yield facts.fault("activation_checkpoint.mode", allowed, remedy)
    if compiled.enable and not compiled.components:
        yield facts.fault("compile.components", '"model", "loss" or both', "or set compile.enable = false")
    if compiled.enable and compiled.scope == "model" and set(compiled.components) != {"model", "loss"}:
        why = "the whole model has its loss in it"
        yield facts.fault("compile.components", '["model", "loss"] with compile.scope = "model"', why)
    if compiled.enable and compiled.scope == "model" and (facts.shard or 1) > 1:
        allowed = f'"block" where parameters are sharded (here over {facts.shard} ranks)'
        remedy = 'write "block", or parallelism.data_parallel_shard_degree = 1 with replicas'
        yield facts.fault("compile.scope", allowed, remedy)
    if compiled.enable and compiled.backend == "inductor" and facts.device == "cpu" and not has_cpp_compiler():
        remedy = "install one (Debian, Ubuntu: apt install g++), or set compile.enable = false"
        yield facts.fault("compile.enable", "with a C++ compiler only, which inductor calls on a CPU", remedy)
    if compiled.enable and compiled.scope == "model" and config.training.enable_cpu_offload:
        yield facts.fault("compile.scope", '"block" with training.enable_cpu_offload', 'write "block"')


# Input and output


def has_cpp_compiler() -> bool:
    """As inductor looks for one, the environment's CXX aside."""
    return any(map(shutil.which, ("g++", "clang++", "c++")))


def trackers(facts: Facts) -> Iterator[Fault]:
    if facts.config.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        remedy = "pip install 'torchtitan-toml[wandb]', or leave it out"
        yield facts.fault("metrics.enable_wandb", "with the wandb package only, which is not installed", remedy)


def loader_workers(facts: Facts) -> Iterator[Fault]:
    loader = facts.config.training.dataloader
    if loader.num_workers == 0 and loader.prefetch_factor is not None:
        remedy = "set training.dataloader.num_workers, or leave it out"
        yield facts.fault("training.dataloader.prefetch_factor", "unset without workers", remedy)
    if loader.num_workers == 0 and loader.persistent_workers:
        remedy = "set training.dataloader.num_workers, or leave it out"
        yield facts.fault("training.dataloader.persistent_workers", "false without workers", remedy)


def needs_a_gpu(facts: Facts) -> Iterator[Fault]:
    if facts.device == "cuda":
        return
    config = facts.config
    if config.training.dataloader.pin_memory:
        yield facts.fault("training.dataloader.pin_memory", "false without a GPU", "it speeds copies to one")
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        yield facts.fault("checkpoint.async_mode", '"async" or "disabled" without a GPU', 'write "async"')
    if config.profiling.enable_memory_snapshot:
        yield facts.fault("profiling.enable_memory_snapshot", "false without a GPU", "it records CUDA's allocator")
    if config.model.attention_backend == "flex":
        yield facts.fault("model.attention_backend", '"auto" or "sdpa" without a GPU', "flex has no backward on a CPU")


def checkpoint_rules(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.checkpoint, "checkpoint."
    if options.keep_latest_k == 1:
        why = "the only checkpoint would be deleted for one that nobody has read yet"
        yield facts.fault(key + "keep_latest_k", "0 (all) or at least 2", why)
    needs_enable = {"load_step": options.load_step >= 0, "initial_load_path": options.initial_load_path is not None}
    used_alone = ("load_only", "last_save_model_only", "enable_first_step_checkpoint")
    needs_enable |= {name: getattr(options, name) for name in used_alone}
    for name in (name for name, used in needs_enable.items() if used and not options.enable):
        yield facts.fault(key + name, "nothing with checkpoint.enable = false", "set checkpoint.enable = true")
    if options.load_only and (options.last_save_model_only or options.enable_first_step_checkpoint):
        name = "last_save_model_only" if options.last_save_model_only else "enable_first_step_checkpoint"
        yield facts.fault(key + name, "false with checkpoint.load_only, which never saves", "drop one of the two")
    if options.last_save_in_hf and not options.last_save_model_only:
        yield facts.fault(key + "last_save_in_hf", "true only with last_save_model_only", "set both")
    if options.initial_load_in_hf and options.initial_load_path is None:
        yield facts.fault(key + "initial_load_in_hf", "true only with initial_load_path", "set the path")
    if options.initial_load_in_hf and not options.initial_load_model_only:
        why = "safetensors of Hugging Face hold no optimizer state"
        yield facts.fault(key + "initial_load_model_only", "true with initial_load_in_hf", why)
    if options.enable and options.initial_load_path is not None:
        yield from _initial_load(facts, Path(options.initial_load_path))


def _initial_load(facts: Facts, path: Path) -> Iterator[Fault]:
    key, options = "checkpoint.initial_load_path", facts.config.checkpoint
    try:
        if newest_complete(Path(facts.config.job.dump_folder, options.folder))[0] is not None:
            return  # this run goes on from its own checkpoint and needs the first one no more
        if not options.initial_load_in_hf:
            resolve(path)
        elif not any(path.glob("*.safetensors")):
            yield facts.fault(key, "a folder with *.safetensors", "there are none")
    except (OSError, ValueError) as error:  # NothingLoadable, and names that no folder can have
        yield facts.fault(key, "a checkpoint", str(error))


USED_BY_THE_RUN = {".", "model", "model_hf", "config.toml", "metrics.jsonl", "training.png", "wandb_run_id"}


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
        elif not folder.strip() or "\0" in folder or Path(folder).is_absolute() or ".." in Path(folder).parts:
            yield facts.fault(key, "a folder inside job.dump_folder", "give its name alone")
    key, dump = "job.dump_folder", config.job.dump_folder
    if not dump.strip() or "\0" in dump:
        yield facts.fault(key, "a folder", 'write "./outputs"')
        return
    try:
        existing = next(p for p in (Path(dump).absolute(), *Path(dump).absolute().parents) if p.exists())
    except OSError as error:
        yield facts.fault(key, "a folder", f"{error.strerror}; name another folder")
        return
    if not existing.is_dir():
        yield facts.fault(key, "a folder", f"{existing} is a file; name another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield facts.fault(key, "a folder that can be written to", f"{existing} cannot; name another folder")


def profiler_window(facts: Facts) -> Iterator[Fault]:
    profiling = facts.config.profiling
    window = profiling.profiler_warmup + profiling.profiler_active
    if (profiling.enable_profiling or profiling.enable_memory_snapshot) and profiling.profile_freq < window:
        allowed = f"at least profiler_warmup {profiling.profiler_warmup} + profiler_active {profiling.profiler_active}"
        yield facts.fault("profiling.profile_freq", f"{allowed} = {window}", f"write {window} or more")


NEEDS_DEGREE = {
    "tensor_parallel_degree": ("disable_loss_parallel",),
    "context_parallel_degree": ("context_parallel_load_balancer", "context_parallel_rotate_method"),
    "pipeline_parallel_degree": (
        "module_fqns_per_model_part",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule_csv",
    ),
}
"""Options that would decide something else, and not the way the same model is cut, were they read without a degree."""


def without_effect(facts: Facts) -> Iterator[Fault]:
    """Options that are set and would do nothing."""
    config = facts.config
    if config.debug.deterministic_warn_only and not config.debug.deterministic:
        yield facts.fault("debug.deterministic_warn_only", "false without debug.deterministic", "set both or neither")
    if config.metrics.save_for_all_ranks and not config.metrics.enable_tensorboard:
        yield facts.fault("metrics.save_for_all_ranks", "false without enable_tensorboard", "set both or neither")
    for degree, options in NEEDS_DEGREE.items():
        if getattr(config.parallelism, degree) == 1:
            for name in options:
                if getattr(config.parallelism, name) != getattr(Parallelism(), name):
                    why = "leave it out"
                    yield facts.fault(f"parallelism.{name}", f"its default while parallelism.{degree} = 1", why)
    if config.checkpoint.exclude_from_loading and not config.checkpoint.enable:
        yield facts.fault("checkpoint.exclude_from_loading", "nothing with checkpoint.enable = false", "enable them")
    if config.checkpoint.export_dtype != "float32" and not config.checkpoint.last_save_model_only:
        yield facts.fault("checkpoint.export_dtype", "float32 without last_save_model_only", "set both or neither")
    degrees = config.parallelism
    if facts.shard == 1 and not config.training.enable_cpu_offload:
        if degrees.fsdp_prefetch:
            yield facts.fault("parallelism.fsdp_prefetch", "0 where nothing is sharded", "leave it out")
        if degrees.fsdp_reshard_after_forward != "default":
            why = "leave it out"
            yield facts.fault("parallelism.fsdp_reshard_after_forward", '"default" where nothing is sharded', why)


RULES: list[Rule] = [
    known_names,
    model_sizes,
    tokenizer_fits,
    data_is_there,
    degrees_fit_the_ranks,
    supported,
    batch_divides,
    schedule_fits,
    step_in_backward,
    precision,
    recompute_and_compile,
    trackers,
    loader_workers,
    needs_a_gpu,
    checkpoint_rules,
    folders,
    profiler_window,
    without_effect,
]
