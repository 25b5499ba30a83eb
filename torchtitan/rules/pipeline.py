"""Rules on pipeline parallel: its schedule, stages, microbatches, and the options that it excludes."""

import re
from collections.abc import Iterator
from importlib import metadata

from torchtitan.config.options import Fault, hint, show
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.errors import JobError, LimitError
from torchtitan.parallelisms.pipeline.actions import INPUT_GRAD, WEIGHT_GRAD, ScheduleTableError, count_stages
from torchtitan.parallelisms.pipeline.cut import (
    SCHEDULES,
    ScheduleTraits,
    check_microbatches,
    check_stage_modules,
    model_modules,
    schedule_traits,
)
from torchtitan.rules.facts import Facts, Rule

SCHEDULE, CSV = "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"
PARTS, SIZE = "parallelism.module_fqns_per_model_part", "parallelism.pipeline_parallel_layers_per_stage"
WHOLE_BACKWARD = ("Interleaved1F1B", "LoopedBFS", "1F1B", "GPipe")
"""Schedules that compile, the quickest first."""
TORCH_OF_PIPELINES = 2, 12, 1


def traits_of(facts: Facts) -> ScheduleTraits | None:
    """Return the traits of the job's schedule; None without a pipeline, with a CSV schedule or an unknown name."""
    try:
        degrees = facts.config.parallelism
        by_name = facts.layout.pp > 1 and degrees.pipeline_parallel_schedule_csv is None
        return schedule_traits(degrees.pipeline_parallel_schedule) if by_name else None
    except JobError:
        return None


def pipelines_need_a_newer_torch(facts: Facts) -> Iterator[Fault]:
    """Refuse pipelines on NCCL where plain sends and coalesced receives use different communicators and never match."""
    if facts.layout.pp == 1 or facts.job.device_type != "cuda":
        return
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:  # jobs are judged here but run elsewhere
        return
    if _numbers(installed) < TORCH_OF_PIPELINES:
        needed = ".".join(map(str, TORCH_OF_PIPELINES))
        allowed = f"1 with torch {installed} on GPUs"
        remedy = f"before torch {needed} the ranks of a pipeline wait for each other forever; install torch {needed}"
        yield facts.fault("parallelism.pipeline_parallel_degree", allowed, f"{remedy} or newer, or use another plan")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version such as 2.13.0+cpu."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def known_schedule(facts: Facts) -> Iterator[Fault]:
    degrees = facts.config.parallelism
    if facts.layout.pp > 1 and degrees.pipeline_parallel_schedule_csv is None and traits_of(facts) is None:
        schedule = degrees.pipeline_parallel_schedule
        yield facts.fault(SCHEDULE, f"one of {', '.join(map(show, SCHEDULES))}", hint(schedule, SCHEDULES, quote=True))


def named_parts_are_the_model(facts: Facts) -> Iterator[Fault]:
    parts = facts.config.parallelism.module_fqns_per_model_part
    if facts.layout.pp > 1 and parts is not None:
        modules = model_modules(facts.model.args.n_layers)
        try:
            check_stage_modules(parts, modules)
        except JobError as error:
            yield facts.fault(PARTS, "a list of module names for each stage", str(error), value=f"{len(parts)} stages")


def stages_suit_the_schedule(facts: Facts) -> Iterator[Fault]:
    """Require enough layers for the stages, and a number of stages that suits the schedule and the ranks."""
    degrees, traits = facts.config.parallelism, traits_of(facts)
    if traits is None:
        return
    n_layers = facts.model.args.n_layers
    try:
        facts.layout.num_stages(n_layers, traits.name)
    except JobError as error:
        allowed = f"stages that suit {traits.name} on {facts.layout.pp} ranks"
        if degrees.module_fqns_per_model_part is not None:
            yield facts.fault(PARTS, allowed, str(error), value=f"{len(degrees.module_fqns_per_model_part)} stages")
        elif degrees.pipeline_parallel_layers_per_stage is not None:
            yield facts.fault(SIZE, allowed, str(error))
        else:
            yield facts.fault("parallelism.pipeline_parallel_degree", allowed, str(error))


def schedule_of_a_file(facts: Facts) -> Iterator[Fault]:
    """Require a valid CSV schedule, which alone sets the number of stages."""
    degrees = facts.config.parallelism
    if facts.layout.pp == 1 or degrees.pipeline_parallel_schedule_csv is None:
        return
    if degrees.pipeline_parallel_schedule != Parallelism().pipeline_parallel_schedule:
        yield facts.fault(SCHEDULE, f"its default with {CSV}", "drop one of the two")
    if degrees.pipeline_parallel_layers_per_stage is not None:
        yield facts.fault(SIZE, f"unset with {CSV}, which sets the stages", "drop one of the two")
    table = facts.schedule_table
    if isinstance(table, ScheduleTableError):
        for fault in table.faults:
            yield facts.fault(CSV, fault.allowed, fault.remedy, value=f"{fault.where}: {fault.value}")
    elif table is not None and count_stages(table) > (n_layers := facts.model.args.n_layers):
        allowed = f"at most as many stages as layers, {n_layers}"
        value = f"{degrees.pipeline_parallel_schedule_csv} with {count_stages(table)} stages"
        yield facts.fault(CSV, allowed, "write a schedule with fewer stages", value)


def named_parts_alone(facts: Facts) -> Iterator[Fault]:
    """Refuse other options on the cut if the modules of each stage are listed."""
    degrees, defaults = facts.config.parallelism, Parallelism()
    if facts.layout.pp > 1 and degrees.module_fqns_per_model_part is not None:
        for option in ("layers_per_stage", "first_stage_less_layers", "last_stage_less_layers"):
            name = f"pipeline_parallel_{option}"
            if getattr(degrees, name) != getattr(defaults, name):
                yield facts.fault(f"parallelism.{name}", f"its default with {PARTS}", "drop one of the two")


def microbatches_divide(facts: Facts) -> Iterator[Fault]:
    if facts.layout.pp > 1:
        yield from facts.judged(lambda: facts.layout.microbatches)


def schedule_has_its_microbatches(facts: Facts) -> Iterator[Fault]:
    traits = traits_of(facts)
    if traits and (fault := _microbatch_fault(facts, traits.name)):
        batch = f"{facts.config.training.local_batch_size}, {facts.layout.microbatches} microbatches"
        yield facts.fault("training.local_batch_size", f"microbatches that suit {traits.name}", fault, batch)


def _microbatch_fault(facts: Facts, schedule: str) -> str:
    """Return the reason why the schedule cannot run the microbatches; "" if it can, or if another rule reports it."""
    n_layers, microbatches = facts.model.args.n_layers, facts.layout.microbatches
    try:
        stages = facts.layout.num_stages(n_layers, schedule)
    except JobError:
        return ""
    try:
        check_microbatches(schedule, microbatches, facts.layout.pp, stages)
        return ""
    except JobError as error:
        return str(error)


def split_backward_is_not_compiled(facts: Facts) -> Iterator[Fault]:
    """Refuse split backward with compile: a compiled block returns input and weight gradients together."""
    if not facts.config.compile.enable:
        return
    traits = traits_of(facts)
    if traits and traits.split_backward:
        nearest = next((name for name in WHOLE_BACKWARD if _suits(facts, name)), None)
        write = f"write {show(nearest)}, or " if nearest else "set "
        yield facts.fault(SCHEDULE, "a schedule without split backward with compile", f"{write}compile.enable = false")
    table = facts.schedule_table
    if isinstance(table, list) and any(action.kind in (INPUT_GRAD, WEIGHT_GRAD) for row in table for action in row):
        allowed = "a schedule without split backward (I and W) with compile"
        yield facts.fault(CSV, allowed, "write B for the two, or compile.enable = false")


def _suits(facts: Facts, schedule: str) -> bool:
    """Return True if the schedule suits the stages and microbatches, as far as other rules find these possible."""
    try:
        n_layers = facts.model.args.n_layers
    except LimitError:
        return True
    try:
        return facts.layout.num_stages(n_layers, schedule) > 0 and not _microbatch_fault(facts, schedule)
    except LimitError:  # microbatches
        return True
    except JobError:
        return False


def excluded_by_a_pipeline(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    if facts.layout.pp == 1:
        return
    if config.optimizer.early_step_in_backward:
        reason = "gradients are complete only after the last microbatch"
        yield facts.fault("optimizer.early_step_in_backward", "false with a pipeline", reason)
    if config.parallelism.fsdp_prefetch:
        reason = "stages keep gathered parameters until the last microbatch"
        yield facts.fault("parallelism.fsdp_prefetch", "0 with a pipeline", reason)
    if config.parallelism.fsdp_reshard_after_forward not in ("default", "never"):
        reason = "parameters would be gathered again for each microbatch"
        yield facts.fault("parallelism.fsdp_reshard_after_forward", '"default" or "never" with a pipeline', reason)


RULES: tuple[Rule, ...] = (
    pipelines_need_a_newer_torch,
    known_schedule,
    schedule_of_a_file,
    stages_suit_the_schedule,
    named_parts_are_the_model,
    named_parts_alone,
    microbatches_divide,
    schedule_has_its_microbatches,
    split_backward_is_not_compiled,
    excluded_by_a_pipeline,
)
WITHOUT_EFFECT: tuple[Rule, ...] = ()
