"""What makes a job impossible or pointless, as far as it can be known without starting it. Needs no torch.

A rule is a function (Facts) -> faults, listed in RULES at the end; all of them always run, each up to the first option
that has no valid value (names.py), so that all faults come out together. Checks of a single option's type are in
config/sections/.
"""

import dataclasses
from collections.abc import Collection, Mapping

from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError, Fault
from torchtitan.rules.adapters import (
    adapter_alone_has_its_model,
    adapter_fits_the_model,
    adapter_folders_fit,
    matrices_are_not_needed,
    new_head_is_trained,
    new_rows_are_trained,
    options_of_adapters_are_read,
    packs_divide_over_tensor_parallel,
    patterns_fit_the_model,
    restarts_make_sense,
    scaling_is_trained_by_lora,
    what_is_unfrozen_is_the_models,
)
from torchtitan.rules.attention import (
    async_tensor_parallel,
    dropped_attention_has_whole_rows,
    groups_are_of_training_alone,
    groups_are_parts_of_a_sequence,
    groups_fit_the_model,
    groups_have_all_keys,
    heads_divide_over_context_parallel,
    ring_is_not_compiled,
    rings_carry_no_window,
    rings_have_their_own_attention,
    sequence_divides,
    sizes_divide_over_tensor_parallel,
)
from torchtitan.rules.experts import (
    communication_is_kept_with_overlap,
    expert_parallel_borrows,
    experts_divide_over_expert_parallel,
    experts_divide_over_what_is_left,
    experts_that_travel_are_compiled_in_parts,
    overlap_needs_a_pipeline_and_experts,
)
from torchtitan.rules.facts import Device, Facts, Rule
from torchtitan.rules.model_and_data import (
    NAMES,
    data_is_there,
    end_is_said_once,
    epochs_take_all,
    folder_has_sizes,
    known_names,
    loader_workers,
    model_sizes,
    positions_are_learned,
    sources_are_said_once,
    tokenizer_fits,
    validation_is_said_once,
    weights_are_met,
)
from torchtitan.rules.monitoring import (
    best_is_measured,
    early_stop_can_be_told,
    epochs_are_counted,
    guards_without_effect,
    policies_can_be_followed,
    saves_are_measured,
    seconds_are_whole,
)
from torchtitan.rules.names import hide, known_faults
from torchtitan.rules.neurocache import (
    cache_fits_the_model,
    cache_is_shared,
    cache_options_have_a_cache,
    cache_reads_documents,
    documents_are_read_whole,
    released_cache_is_the_jobs,
)
from torchtitan.rules.optimization import (
    BACKENDS,
    optimizer_has_matrices,
    optimizer_options,
    optimizer_projects_something,
    optimizer_reaches_the_other_ranks,
    optimizer_suits_the_precision,
    precision,
    recompute_and_compile,
    schedule_fits,
    step_in_backward,
)
from torchtitan.rules.output import (
    checkpoint_rules,
    export_has_a_form,
    folders,
    memory_has_a_size,
    needs_a_gpu,
    needs_checkpoints,
    profiler_window,
    reference_is_of_this_model,
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
    batch_fits_the_memory,
    degrees_fit_the_ranks,
    model_allows_the_plan,
    needs_its_degree,
    needs_shards,
)
from torchtitan.rules.records import (
    fields_are_said_once,
    prompts_are_text,
    records_are_read_as_said,
    samples_may_differ_in_length,
)
from torchtitan.rules.resume import (
    adapter_is_of_this_model,
    changes_that_can_be_allowed,
    checkpoints_are_still_there,
    moments_are_of_this_plan,
    same_job_as_the_checkpoint,
)
from torchtitan.rules.task import (
    classes_have_names,
    model_can_learn_it,
    noise_is_the_same_again,
    options_are_of_the_task,
    pairs_are_learned_as_asked,
    prompts_can_be_continued,
    sequence_is_whole,
    split_is_possible,
    template_is_there,
    whole_records_are_asked_for,
    words_are_hidden_by_something,
)

__all__ = ["BACKENDS", "RULES", "WITHOUT_EFFECT", "Device", "Facts", "check", "with_faults_of_the_rest"]


def check(
    config: JobConfig,
    world_size: int,
    devices: Device,
    said_by: Mapping[str, str] | None = None,
    unknown: Collection[str] = (),
) -> list[Fault]:
    """All faults of a job that is to run on `world_size` ranks of this kind of device; none means it can start.

    Names are checked first. A rule stops when it reads an unknown name or an option of `unknown`.
    """
    facts = Facts(hide(config, unknown), world_size, devices, said_by or {})
    faults = list(known_names(facts))
    wrong_names = {fault.key for fault in faults if fault.key in NAMES}
    facts = dataclasses.replace(facts, config=hide(facts.config, wrong_names))
    return faults + [fault for rule in RULES if rule is not known_names for fault in known_faults(rule(facts))]


def with_faults_of_the_rest(
    error: ConfigError, world_size: int, devices: Device, said_by: Mapping[str, str] | None = None
) -> list[Fault]:
    """A job's faults all at once: those of its text, and those of what can be understood of it.

    Misspelt and mistyped options have no valid value, so a rule stops when it reads one.
    """
    if error.rest is None:
        return error.faults
    return error.faults + check(error.rest, world_size, devices, said_by, error.unknown)


WITHOUT_EFFECT: list[Rule] = [
    options_are_of_the_task,
    needs_its_degree,
    overlap_needs_a_pipeline_and_experts,
    options_of_adapters_are_read,
    cache_options_have_a_cache,
    needs_checkpoints,
    guards_without_effect,
    whole_records_are_asked_for,
    without_effect,
]
"""Of options that are set and would do nothing on any number of ranks. A translated job leaves them out."""

RULES: list[Rule] = [
    known_names,
    folder_has_sizes,
    model_sizes,
    positions_are_learned,
    tokenizer_fits,
    records_are_read_as_said,
    fields_are_said_once,
    prompts_are_text,
    data_is_there,
    sources_are_said_once,
    validation_is_said_once,
    weights_are_met,
    end_is_said_once,
    epochs_take_all,
    epochs_are_counted,
    seconds_are_whole,
    degrees_fit_the_ranks,
    needs_shards,
    batch_divides,
    batch_fits_the_memory,
    sizes_divide_over_tensor_parallel,
    sequence_divides,
    heads_divide_over_context_parallel,
    dropped_attention_has_whole_rows,
    groups_are_parts_of_a_sequence,
    groups_fit_the_model,
    groups_are_of_training_alone,
    groups_have_all_keys,
    ring_is_not_compiled,
    rings_carry_no_window,
    rings_have_their_own_attention,
    async_tensor_parallel,
    sequence_is_whole,
    model_can_learn_it,
    noise_is_the_same_again,
    classes_have_names,
    words_are_hidden_by_something,
    split_is_possible,
    samples_may_differ_in_length,
    prompts_can_be_continued,
    pairs_are_learned_as_asked,
    template_is_there,
    experts_divide_over_expert_parallel,
    expert_parallel_borrows,
    experts_divide_over_what_is_left,
    experts_that_travel_are_compiled_in_parts,
    communication_is_kept_with_overlap,
    model_allows_the_plan,
    known_schedule,
    schedule_of_a_file,
    stages_suit_the_schedule,
    named_parts_are_the_model,
    named_parts_alone,
    microbatches_divide,
    schedule_has_its_microbatches,
    split_backward_is_not_compiled,
    excluded_by_a_pipeline,
    adapter_fits_the_model,
    packs_divide_over_tensor_parallel,
    adapter_alone_has_its_model,
    adapter_folders_fit,
    new_head_is_trained,
    new_rows_are_trained,
    patterns_fit_the_model,
    what_is_unfrozen_is_the_models,
    cache_fits_the_model,
    cache_is_shared,
    cache_reads_documents,
    documents_are_read_whole,
    released_cache_is_the_jobs,
    restarts_make_sense,
    matrices_are_not_needed,
    scaling_is_trained_by_lora,
    schedule_fits,
    optimizer_options,
    optimizer_has_matrices,
    optimizer_projects_something,
    optimizer_suits_the_precision,
    optimizer_reaches_the_other_ranks,
    step_in_backward,
    policies_can_be_followed,
    best_is_measured,
    saves_are_measured,
    early_stop_can_be_told,
    precision,
    recompute_and_compile,
    trackers,
    loader_workers,
    needs_a_gpu,
    memory_has_a_size,
    checkpoint_rules,
    reference_is_of_this_model,
    export_has_a_form,
    folders,
    profiler_window,
    changes_that_can_be_allowed,
    same_job_as_the_checkpoint,
    adapter_is_of_this_model,
    checkpoints_are_still_there,
    moments_are_of_this_plan,
    *WITHOUT_EFFECT,
]
