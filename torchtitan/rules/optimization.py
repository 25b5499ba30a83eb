"""Rules on the optimizer and its needs, its schedule, precision, recompute and compile."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from torchtitan.adapters import NONE
from torchtitan.adapters.targets import layer_of, target_linears, with_wildcards
from torchtitan.config.options import Fault, show
from torchtitan.config.sections.training import Optimizer
from torchtitan.core.errors import FLOAT8_MULTIPLE, LimitError
from torchtitan.lr_schedules import CONSTANT, CYCLICAL, JAGGED, ScheduleError
from torchtitan.models.sizes import HEAD, STACK, linears, split_side
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.spec import LAYER_MATRICES, SHARED, is_target_matrix, sides
from torchtitan.rules.facts import Facts, Rule

BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs")
"""Backends of torch.compile that come with torch and train."""


def schedule_can_be_built(facts: Facts) -> Iterator[Fault]:
    """Separate from `schedule_fits`, because it reads all options of the schedule."""
    try:
        facts.learning_rate  # noqa: B018 (computed to see whether it raises)
    except ScheduleError as error:
        yield facts.fault(error.key, error.allowed, error.remedy)


def schedule_fits(facts: Facts) -> Iterator[Fault]:
    shape = facts.config.lr_scheduler
    if shape.t_max is not None and shape.total_steps is not None:
        yield facts.fault("lr_scheduler.t_max", "unset with lr_scheduler.total_steps", "drop one of the two")
    needed = {"epoch": "epochs", "token": "tokens"}.get(shape.t_max_unit)
    if shape.t_max is not None and needed and getattr(facts.config.training, needed) is None:
        yield facts.fault("lr_scheduler.t_max_unit", f"another without training.{needed}", 'set it, or write "step"')
    if shape.decay_ratio is not None and shape.decay_type == CONSTANT:
        yield facts.fault("lr_scheduler.decay_ratio", 'unset with decay_type = "constant"', "drop one of the two")
    restarts = shape.decay_type in (JAGGED, CYCLICAL)
    if shape.decay_ratio is not None and restarts:
        yield facts.fault("lr_scheduler.decay_ratio", f'unset with decay_type = "{shape.decay_type}"', "drop it")
    if shape.warmup_type != "linear" and (restarts or shape.warmup_steps == 0):
        setting = f'decay_type = "{shape.decay_type}"' if restarts else "lr_scheduler.warmup_steps = 0"
        yield facts.fault("lr_scheduler.warmup_type", f'"linear" with {setting}', "leave it out")
    if shape.convention != "default" and restarts:
        yield facts.fault("lr_scheduler.convention", f'"default" with decay_type = "{shape.decay_type}"', "drop it")
    if shape.cycle_length is not None and not restarts:
        allowed = f'unset, except with decay_type = "{JAGGED}" or "{CYCLICAL}"'
        yield facts.fault("lr_scheduler.cycle_length", allowed, "drop it")
    for name in ("restart_warmup_steps", "adjust_step") if shape.decay_type != JAGGED else ():
        if getattr(shape, name):
            yield facts.fault(f"lr_scheduler.{name}", f'unset, except with decay_type = "{JAGGED}"', "drop it")
    if shape.num_cycles > 1 and shape.decay_type != "cosine_restarts":
        yield facts.fault("lr_scheduler.num_cycles", '1, except with decay_type = "cosine_restarts"', "drop it")


def optimizer_options(facts: Facts) -> Iterator[Fault]:
    """Refuse options that the optimizer rejects or does not read."""
    optimizer, default = facts.config.optimizer, Optimizer()
    spec = OPTIMIZERS.get(optimizer.name)
    if spec is None:
        return
    shared = {key: getattr(optimizer, key) for key in SHARED}
    shared = {key: v for key, v in shared.items() if key in spec.shared or v != getattr(default, key)}
    for key, value, allowed, remedy in spec.faults(optimizer.name, shared, optimizer.options):
        yield facts.fault(key, allowed, remedy, value=value)
    if optimizer.implementation is not None and optimizer.implementation not in spec.implementations:
        allowed_names = ", ".join(map(show, spec.implementations))
        yield facts.fault(
            "optimizer.implementation", f'{allowed_names} with optimizer.name = "{optimizer.name}"', "leave it out"
        )


def step_in_backward(facts: Facts) -> Iterator[Fault]:
    config, key = facts.config, "optimizer.early_step_in_backward"
    if not config.optimizer.early_step_in_backward:
        return
    if config.training.max_norm > 0:
        reason = "clipping needs all gradients at once, but each is freed before the next is computed"
        yield facts.fault("training.max_norm", f"0 with {key}", reason)
    if facts.layout.tp > 1 or facts.layout.cp > 1:
        reason = "norms' gradients are summed over tensor-parallel ranks after backward"
        reason = reason if facts.layout.tp > 1 else "it has only been verified with data parallel"
        yield facts.fault(key, "false with tensor or context parallel", reason)
    if config.training.enable_cpu_offload and facts.job.device_type == "cuda":
        reason = "before torch 2.13, FSDP2 does not wait for the copy of gradients to the host (pytorch #180666)"
        yield facts.fault(key, "false with training.enable_cpu_offload on a GPU", reason)
    if config.training.global_batch_size > (samples := facts.layout.samples_per_pass):
        reason = "accumulation keeps gradients from one forward pass to the next"
        yield facts.fault("training.global_batch_size", f"-1 or {samples} with {key}", reason)


def precision(facts: Facts) -> Iterator[Fault]:
    training = facts.config.training
    if training.dtype == "bfloat16" and training.mixed_precision_param == "float32":
        reason = "computing in float32 adds nothing to weights kept in bfloat16"
        yield facts.fault("training.mixed_precision_param", '"bfloat16" with training.dtype = "bfloat16"', reason)
    if training.frozen_dtype is None:
        return
    key = "training.frozen_dtype"
    if facts.config.adapter.kind == NONE and not training.unfrozen:
        yield facts.fault(key, "unset without an adapter or training.unfrozen", "no weights are frozen; leave it out")
    elif training.dtype == "bfloat16":
        yield facts.fault(key, 'unset with training.dtype = "bfloat16"', "all weights have that type; leave it out")
    elif training.frozen_dtype == "bfloat16" and training.mixed_precision_param == "float32":
        reason = "frozen weights would be rounded and cast back in each step; set both, or leave it out"
        yield facts.fault(key, '"float32" with training.mixed_precision_param = "float32"', reason)


def float8(facts: Facts) -> Iterator[Fault]:
    training, key, excluded = facts.config.training, "training.float8", "training.float8_exclude"
    if training.float8 == "none":
        if training.float8_exclude:
            yield facts.fault(excluded, 'unset with training.float8 = "none"', "set a recipe, or leave it out")
        return
    if training.dtype == training.mixed_precision_param == "float32":
        reason = "operands are rounded to 8 bits, and a GPU returns products in bfloat16"
        yield facts.fault(key, '"none" with training.mixed_precision_param = "float32"', reason)
    if facts.config.adapter.kind != NONE:
        reason = "an adapter multiplies its matrices in its own way"
        yield facts.fault(key, f'"none" with adapter.kind = "{facts.config.adapter.kind}"', reason)
    for name in ("gather", "reduce"):
        if getattr(facts.config.parallelism, quantized := f"fsdp_quantized_{name}") != "none":
            reason = "errors of the two would add up; tensorwise products have a gather in float8 of their own"
            yield facts.fault(f"parallelism.{quantized}", '"none" with training.float8', reason)
    inside = linears_in_blocks(facts)
    for pattern in training.float8_exclude if inside else ():
        if not any(fnmatchcase(name, pattern) for name in inside):
            allowed = f"patterns that fit one of {', '.join(with_wildcards(inside))}"
            yield facts.fault(excluded, allowed, "correct or drop it", value=show(pattern))
    chosen = [sizes for name, sizes in inside.items() if not matches_any(name, training.float8_exclude)]
    if inside and not any(outputs % FLOAT8_MULTIPLE == inputs % FLOAT8_MULTIPLE == 0 for outputs, inputs in chosen):
        allowed = f"at least one linear with sides that are multiples of {FLOAT8_MULTIPLE}"
        yield facts.fault(key, allowed, 'write "none": no linear of this model would multiply in float8')


def linears_in_blocks(facts: Facts) -> dict[str, tuple[int, int]]:
    """Return the sizes of the linears that float8 converts by name, (outputs, inputs); empty if they are not known."""
    layers = linears(facts.model.args)
    return {name: sizes for name, sizes in layers.items() if layer_of(name) is not None and not name.endswith(STACK)}


def recompute_and_compile(facts: Facts) -> Iterator[Fault]:
    config, compiled, mode = facts.config, facts.config.compile, facts.config.activation_checkpoint.mode
    recomputes_experts = mode != "none" and facts.model.experts and facts.layout.ep == 1
    if mode == "memory_budget" and facts.layout.tp > 1:
        reason = "the compiler cannot determine the mesh sizes of sharded weights (torch 2.13)"
        remedy = f'{reason}; write "full" or "selective"'
        yield facts.fault("activation_checkpoint.mode", "another mode with tensor parallel", remedy)
    elif mode == "memory_budget" and facts.layout.ep > 1:
        remedy = 'expert-parallel layers are not compiled, so a budget does not apply; write "full" or "selective"'
        yield facts.fault("activation_checkpoint.mode", "another mode with expert parallel", remedy)
    elif mode == "memory_budget" and not facts.layout.compiles_model:
        allowed = '"memory_budget" only with a compiled model, as the compiler applies the budget'
        remedy = 'set compile.enable = true with "model" in compile.components, or another mode'
        yield facts.fault("activation_checkpoint.mode", allowed, remedy)
    elif mode == "memory_budget" and compiled.backend != "inductor":
        allowed = '"inductor" with activation_checkpoint.mode = "memory_budget"'
        yield facts.fault("compile.backend", allowed, "the others do not choose what to compute again")
    elif compiled.backend == "eager" and facts.layout.compiles_model and recomputes_experts:
        reason = "its recompute changes the counts of tokens that backward needs (torch 2.13)"
        remedy = f'{reason}; write "aot_eager", or activation_checkpoint.mode = "none"'
        yield facts.fault("compile.backend", "another backend for experts that are recomputed", remedy)
    if compiled.enable and not compiled.components:
        yield facts.fault("compile.components", '"model", "loss" or both', "or set compile.enable = false")
    if compiled.enable and compiled.scope == "model" and set(compiled.components) != {"model", "loss"}:
        reason = "the loss is part of the whole model"
        yield facts.fault("compile.components", '["model", "loss"] with compile.scope = "model"', reason)
    layout = facts.layout
    cut = [
        f"{name} {degree}" for name, degree in (("tp", layout.tp), ("cp", layout.cp), ("pp", layout.pp)) if degree > 1
    ]
    if compiled.enable and compiled.scope == "model" and cut:
        yield facts.fault("compile.scope", f'"block" if the model is split ({", ".join(cut)})', 'write "block"')
    if compiled.enable and compiled.backend == "inductor" and facts.job.device_type == "cpu" and not has_cpp_compiler():
        remedy = "install one (Debian, Ubuntu: apt install g++), or set compile.enable = false"
        yield facts.fault("compile.enable", "true only with a C++ compiler, which inductor needs on a CPU", remedy)
    if compiled.enable and compiled.scope == "model" and config.training.enable_cpu_offload:
        yield facts.fault("compile.scope", '"block" with training.enable_cpu_offload', 'write "block"')


def sharded_model_is_compiled_by_block(facts: Facts) -> Iterator[Fault]:
    compiled = facts.config.compile
    if compiled.enable and compiled.scope == "model" and (shards := facts.layout.shards) > 1:
        allowed = f'"block" if parameters are sharded (here over {shards} ranks)'
        remedy = 'write "block", or parallelism.data_parallel_shard_degree = 1 with replicas'
        yield facts.fault("compile.scope", allowed, remedy)


def has_cpp_compiler() -> bool:
    """Return True if inductor would find a C++ compiler on the PATH; ignores the variable CXX."""
    return any(map(shutil.which, ("g++", "clang++", "c++")))


OPTIONS = "optimizer.options"


def options_of_the_optimizer(facts: Facts) -> dict[str, Any] | None:
    """Return the optimizer's arguments with defaults; None if its name or an option is wrong."""
    section = facts.config.optimizer
    spec = OPTIMIZERS.get(section.name)
    shared = {key: getattr(section, key) for key in SHARED}
    if spec is None or any(spec.faults(section.name, {key: shared[key] for key in spec.shared}, section.options)):
        return None
    return spec.arguments(shared, section.options)


def trained_matrices(facts: Facts) -> dict[str, tuple[int, int]]:
    """Return the shapes of the trained matrices by name, as far as the model's sizes determine them.

    With an adapter these are its own matrices and the weights trained in addition to them. Stacks of experts are left
    out.
    """
    layers = linears(facts.model.args)
    if not layers:
        return {}
    weights = {f"{name}.weight": sizes for name, sizes in layers.items() if not name.endswith("experts")}
    weights["tok_embeddings.weight"] = (facts.model.args.vocab_size, facts.model.args.dim)
    if facts.model.args.tied_embeddings:
        del weights[f"{HEAD}.weight"]
    adapter = facts.config.adapter
    if adapter.kind == NONE:
        patterns = facts.config.training.unfrozen or ["*"]
        return {name: shape for name, shape in weights.items() if matches_any(name, patterns)}
    adapted = {name: layers[name] for name in target_linears(layers, adapter) if f"{name}.weight" in weights}
    low_rank = {f"{name}.lora_A": (adapter.rank, inputs) for name, (_, inputs) in adapted.items()}
    low_rank |= {f"{name}.lora_B": (outputs, adapter.rank) for name, (outputs, _) in adapted.items()}
    dense = [name for name in weights if matches_any(name, adapter.train_fully)]
    if adapter.train_dense_rest:
        dense = [name for name in weights if name.removesuffix(".weight") not in adapted]
    return low_rank | {name: weights[name] for name in dense}


def sharded_sides(matrix: str, shards: int, tp: int) -> set[str]:
    """Return which sides of a trained matrix FSDP and tensor parallel shard: "left" its rows, "right" its columns."""
    linear, _, part = matrix.rpartition(".")
    split = None if tp == 1 else split_side(linear)
    if part == "lora_A" and split == 0 or part == "lora_B" and split == 1:
        split = None  # replicated
    tensor_parallel = set() if split is None else {("left", "right")[split]}
    return tensor_parallel | {"left"} if shards > 1 else tensor_parallel


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def optimizer_has_matrices(facts: Facts) -> Iterator[Fault]:
    options = options_of_the_optimizer(facts)
    if not options or "targets" not in options or not trained_matrices(facts):
        return
    matrices = ", ".join(with_wildcards(trained_matrices(facts)))
    explicit = options["targets"] != LAYER_MATRICES  # the default has names of several families
    patterns = [[pattern] for pattern in options["targets"]] if explicit else [options["targets"]]
    for target_patterns in patterns or [[]]:
        if not any(is_target_matrix(name, shape, target_patterns) for name, shape in trained_matrices(facts).items()):
            remedy = "correct or drop it" if target_patterns else 'or write optimizer.name = "AdamW"'
            yield facts.fault(
                OPTIONS, f"targets that fit one of {matrices}", remedy, value=f"targets = {show(target_patterns)}"
            )


def optimizer_projects_something(facts: Facts) -> Iterator[Fault]:
    options = options_of_the_optimizer(facts)
    if not options or "rank" not in options or "targets" not in options:
        return
    chosen = {
        name: shape
        for name, shape in trained_matrices(facts).items()
        if is_target_matrix(name, shape, options["targets"])
    }
    projected = {name: sides(name, shape, options) for name, shape in chosen.items()}
    rank = f"rank = {options['rank']}"
    if chosen and not any(projected.values()):
        longest = max(map(min, chosen.values()))
        remedy = "lower it, or write another optimizer.name: such a rank saves no memory"
        yield facts.fault(OPTIONS, f"rank below {longest}, the longest short side of its matrices", remedy, value=rank)
    if options.get("on_conflict") != "error":
        return
    shards, tp = 1, facts.layout.tp
    with suppress(LimitError):  # the ranks do not fit, and sizes that tensor parallel cuts are still found
        shards = facts.layout.fsdp_shards
    cut = [
        name
        for name, projected_sides in projected.items()
        if sharded_sides(name, shards, tp).intersection(projected_sides)
    ]
    if cut:
        value, names = 'on_conflict = "error"', ", ".join(with_wildcards(cut))
        remedy = 'FSDP shards rows; write side = "right" too'
        if tp > 1:
            remedy = "each rank has only a part of the projected side; or leave these out of targets"
        yield facts.fault(OPTIONS, f'on_conflict = "gather" or "flip" for {names}', remedy, value=value)


def optimizer_suits_the_precision(facts: Facts) -> Iterator[Fault]:
    name, dtype = facts.config.optimizer.name, facts.config.training.dtype
    only = name in OPTIMIZERS and OPTIMIZERS[name].only_in
    if only and dtype != only:
        remedy = f'set training.dtype = "{only}", or write optimizer.name = "AdamW"'
        yield facts.fault("optimizer.name", f'another with training.dtype = "{dtype}"', remedy)


def optimizer_reaches_the_other_ranks(facts: Facts) -> Iterator[Fault]:
    name, offloaded = facts.config.optimizer.name, facts.config.training.enable_cpu_offload
    between_gpus = facts.job.device_type == "cuda" and facts.job.world_size > 1
    if name in OPTIMIZERS and OPTIMIZERS[name].sums and offloaded and between_gpus:
        reason = "its step reduces over ranks, which needs tensors on the GPU"
        yield facts.fault("training.enable_cpu_offload", f'false with optimizer.name = "{name}"', reason)


RULES: tuple[Rule, ...] = (
    schedule_can_be_built,
    schedule_fits,
    optimizer_options,
    optimizer_has_matrices,
    optimizer_projects_something,
    optimizer_suits_the_precision,
    optimizer_reaches_the_other_ranks,
    step_in_backward,
    precision,
    float8,
    recompute_and_compile,
    sharded_model_is_compiled_by_block,
)
WITHOUT_EFFECT: tuple[Rule, ...] = ()
