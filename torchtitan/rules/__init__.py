"""What makes a job impossible or pointless, as far as it can be known without starting it. Needs no torch.

A rule is a function (Facts) -> faults, listed in RULES at the end; all of them always run, so that all faults come out
together. What one option can say by its type alone is in config.py.
"""

from torchtitan.config import JobConfig
from torchtitan.options import ConfigError, Fault
from torchtitan.rules.experts import (
    communication_is_kept_with_overlap,
    expert_parallel_borrows,
    experts_divide_over_expert_parallel,
    experts_divide_over_what_is_left,
    experts_that_travel_are_not_compiled,
    overlap_needs_a_pipeline_and_experts,
    tensor_parallel_knows_both_kinds_of_layers,
)
from torchtitan.rules.facts import Device, Facts, Rule
from torchtitan.rules.model_and_data import data_is_there, known_names, loader_workers, model_sizes, tokenizer_fits
from torchtitan.rules.multi_token import depths_are_whole, weight_is_of_a_loss
from torchtitan.rules.optimization import BACKENDS, precision, recompute_and_compile, schedule_fits, step_in_backward
from torchtitan.rules.output import (
    checkpoint_rules,
    folders,
    needs_a_gpu,
    needs_checkpoints,
    profiler_window,
    trackers,
    without_effect,
)
from torchtitan.rules.pipeline import (
    excluded_by_a_pipeline,
    known_schedule,
    microbatches_divide,
    named_parts_alone,
    named_parts_are_the_model,
    schedule_has_its_microbatches,
    schedule_of_a_file,
    split_backward_is_not_compiled,
    stages_suit_the_schedule,
)
from torchtitan.rules.plan import (
    batch_divides,
    degrees_fit_the_ranks,
    needs_its_degree,
    needs_shards,
)
from torchtitan.rules.tensor_and_context import (
    async_tensor_parallel,
    heads_divide_over_context_parallel,
    ring_is_not_compiled,
    rings_have_their_own_attention,
    sequence_divides,
    sizes_divide_over_tensor_parallel,
)

__all__ = ["BACKENDS", "RULES", "WITHOUT_EFFECT", "Device", "Facts", "check", "with_faults_of_the_rest"]


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


WITHOUT_EFFECT: list[Rule] = [
    needs_its_degree,
    overlap_needs_a_pipeline_and_experts,
    needs_checkpoints,
    without_effect,
]
"""Of options that are set and would do nothing on any number of ranks. A translated job leaves them out."""

RULES: list[Rule] = [
    known_names,
    model_sizes,
    tokenizer_fits,
    data_is_there,
    degrees_fit_the_ranks,
    needs_shards,
    batch_divides,
    sizes_divide_over_tensor_parallel,
    sequence_divides,
    heads_divide_over_context_parallel,
    ring_is_not_compiled,
    rings_have_their_own_attention,
    async_tensor_parallel,
    experts_divide_over_expert_parallel,
    expert_parallel_borrows,
    experts_divide_over_what_is_left,
    experts_that_travel_are_not_compiled,
    communication_is_kept_with_overlap,
    tensor_parallel_knows_both_kinds_of_layers,
    depths_are_whole,
    weight_is_of_a_loss,
    known_schedule,
    schedule_of_a_file,
    stages_suit_the_schedule,
    named_parts_are_the_model,
    named_parts_alone,
    microbatches_divide,
    schedule_has_its_microbatches,
    split_backward_is_not_compiled,
    excluded_by_a_pipeline,
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
    *WITHOUT_EFFECT,
]
