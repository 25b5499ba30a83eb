"""Rules on adapters and on the choice of trained parameters."""

from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

from torchtitan.adapters import ADAPTERS, COMMON_OPTIONS, NONE, RULE_CHECKED_OPTIONS, peft_config, spec_of
from torchtitan.adapters.targets import (
    QUANTIZED_MULTIPLES,
    layer_of,
    linear_adapter_options,
    matrix_of,
    misfits,
    packed_matrices,
    quantization_block,
    quantized_stacks,
    target_linears,
    unreadable_by_peft,
    with_wildcards,
)
from torchtitan.config.options import Fault, show
from torchtitan.config.sections.model import Adapter, Relora
from torchtitan.core.errors import JobError
from torchtitan.lr_schedules import CYCLICAL, JAGGED
from torchtitan.models.sizes import HEAD, linears, parameters, split_side
from torchtitan.parallelisms import degrees
from torchtitan.rules.facts import Facts, Rule


def adapter_fits_the_model(facts: Facts) -> Iterator[Fault]:
    options = linear_adapter_options(facts.config.adapter)
    if options is None or options.kind not in ADAPTERS or not (layers := linears(facts.model.args)):
        return
    if "target" not in ADAPTERS[options.kind].options:
        return
    for key, allowed, remedy in misfits(layers, options):
        yield facts.fault(key, allowed, remedy)
    adapts_tied_head = facts.model.args.tied_embeddings and HEAD in target_linears(layers, options)
    if facts.config.checkpoint.last_save_model_only and adapts_tied_head:
        reason = "merging would untie the head from the embedding: set adapter.last_save_in_peft"
        yield facts.fault("checkpoint.last_save_model_only", "false with an adapter on a tied head", reason)
    if options.relora.every is not None and adapts_tied_head:
        reason = "a restart would merge the head's adapter into the embedding too: leave output out of adapter.target"
        yield facts.fault("adapter.relora.every", "unset with an adapter on a tied head", reason)


def experts_have_a_gate(facts: Facts) -> Iterator[Fault]:
    """Require that options on w3 of experts are for a model whose experts have it."""
    options, args = linear_adapter_options(facts.config.adapter), facts.model.args
    if options is None or getattr(args, "gated_experts", True):
        return
    if options.gate_up_rank:
        yield facts.fault("adapter.gate_up_rank", "0 for experts without a gate", "leave it out")
    if patterns := [pattern for pattern in options.target if matrix_of(pattern) == "w3"]:
        yield facts.fault("adapter.target", "w1 and w2 of experts, which have no gate", f'drop "{patterns[0]}"')


def packs_divide_over_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    """Require that tensor parallel gives each rank equally many quantization blocks of the inputs of QLoRA targets."""
    options = linear_adapter_options(facts.config.adapter)
    if facts.layout.tp == 1 or options is None or options.kind != "qlora":
        return
    layers = linears(facts.model.args)
    split_layers = {name: layers[name][1] for name in target_linears(layers, options) if split_side(name) == 1}
    blocks = {
        name: inputs // quantization_block(inputs)
        for name, inputs in split_layers.items()
        if quantization_block(inputs)
    }
    of_all_layers = {f"blocks of {with_wildcards([name])[0]}": number for name, number in blocks.items()}
    yield from facts.judged(degrees.check_even_split, facts.layout.tp, of_all_layers)


def trained_whole(facts: Facts) -> tuple[str, list[str], str] | None:
    """Return the option that selects which of the model's own parameters are trained, its patterns, and another remedy.

    None if all are trained, or if the kind of adapter is unknown.
    """
    options, unfrozen = facts.config.adapter, facts.config.training.unfrozen
    if options.kind == NONE:
        return ("training.unfrozen", unfrozen, "leave it out") if unfrozen else None
    if options.train_dense_rest or options.kind not in ADAPTERS:
        return None
    return "adapter.train_fully", options.train_fully, "train_dense_rest = true"


def what_is_unfrozen_is_the_models(facts: Facts) -> Iterator[Fault]:
    """Refuse training.unfrozen with an adapter, which has adapter.train_fully instead."""
    if facts.config.training.unfrozen and facts.config.adapter.kind != NONE:
        remedy = "write adapter.train_fully for parameters to train with the adapter"
        yield facts.fault("training.unfrozen", f'nothing with adapter.kind = "{facts.config.adapter.kind}"', remedy)


def patterns_fit_the_model(facts: Facts) -> Iterator[Fault]:
    """Require that each pattern matches a parameter other than the matrices that the adapter quantizes or replaces."""
    if (trained := trained_whole(facts)) is None or not (names := parameters(facts.model.args)):
        return
    key, patterns, _ = trained
    options = linear_adapter_options(facts.config.adapter)
    if options is not None and (options.kind in QUANTIZED_MULTIPLES or options.lora_only):
        layers = linears(facts.model.args)
        replaced = {f"{name}.weight" for name in target_linears(layers, options)}
        stacks = quantized_stacks(layers, options)
        replaced |= {f"{stack}.{matrix}" for stack in stacks for matrix in packed_matrices(stack, options)}
        names = [name for name in names if name not in replaced]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            allowed_patterns = ", ".join(sorted(with_wildcards(names)))
            yield facts.fault(
                key, f"patterns that fit one of {allowed_patterns}", "correct or drop it", value=show(pattern)
            )


def new_head_is_trained(facts: Facts) -> Iterator[Fault]:
    """Require that a new classification head is trained: a frozen one would keep its initial values."""
    is_head_new = facts.model.labelled_fields is not None or facts.model.spec.labels == "ends"
    if not is_head_new or (trained := trained_whole(facts)) is None:
        return
    key, chosen, other = trained
    heads = [name for name in linears(facts.model.args) if layer_of(name) is None]
    frozen = [name for name in heads if not any(fnmatchcase(f"{name}.weight", pattern) for pattern in chosen)]
    if frozen:
        patterns = ", ".join(f'"{name}.*"' for name in heads)
        allowed = f"patterns that match {' and '.join(f'{name}.weight' for name in frozen)}, the head of classes"
        yield facts.fault(key, allowed, f"write [{patterns}], or {other}")


def new_rows_are_trained(facts: Facts) -> Iterator[Fault]:
    """Require that the rows of added tokens are trained: they all start as the same mean and cannot be told apart."""
    options, trained = facts.config.adapter, trained_whole(facts)
    if trained is None or linear_adapter_options(options) is not options or not facts.untrained_tokens:
        return
    key, chosen, other = trained
    adapted = [] if options.kind == NONE else target_linears(linears(facts.model.args), options)
    tied = facts.model.args.tied_embeddings
    required = [] if tied else [HEAD] * (HEAD not in adapted)
    required = [f"{name}.weight" for name in ("tok_embeddings", *required)]
    accepted = [*required, f"{HEAD}.weight"] if tied else required  # either name of tied weights will do
    matched = {name for name in accepted if any(fnmatchcase(name, pattern) for pattern in chosen)}
    if frozen := [name for name in required if name not in matched and not (tied and matched)]:
        new = len(facts.untrained_tokens)
        allowed = f"patterns that match {' and '.join(frozen)}, with rows of {new} new token{'s' if new > 1 else ''}"
        patterns = ", ".join(f'"{name}"' for name in dict.fromkeys([*chosen, *required]))
        yield facts.fault(key, allowed, f"write [{patterns}], or {other}")


def adapter_alone_has_its_model(facts: Facts) -> Iterator[Fault]:
    options, checkpoint = facts.config.adapter, facts.config.checkpoint
    if options.kind == NONE:
        return
    save = facts.saving.adapter_save
    if save == "alone" and not checkpoint.initial_load_path:
        reason = "checkpoints without the model must record its path"
        yield facts.fault("adapter.save", '"whole" without checkpoint.initial_load_path', reason, value=show(save))
    if save == "alone" and not checkpoint.initial_load_model_only:
        remedy = "the first start would load the step and data position of the other job too"
        yield facts.fault("checkpoint.initial_load_model_only", 'true with adapter.save = "alone"', remedy)


def adapter_folders_fit(facts: Facts) -> Iterator[Fault]:
    options = facts.config.adapter
    if options.kind == NONE:
        return
    if options.initial_path is not None:
        yield from _adapter_is_of_this_kind(facts, Path(options.initial_path))
    for name in ("train_fully", "train_dense_rest"):
        if options.last_save_in_peft and getattr(options, name):
            remedy = "its folder can only hold low-rank matrices; keep checkpoints, or merge the adapter"
            yield facts.fault("adapter.last_save_in_peft", f"false with adapter.{name}", remedy)
    if options.last_save_in_peft:
        refused = unreadable_by_peft(facts.config.model.name, linears(facts.model.args), options)
        if refused:
            allowed = f'false with adapter.kind = "dora" of {", ".join(with_wildcards(refused))}'
            reason = "peft takes them for experts by their names, without DoRA: leave them out of adapter.target"
            yield facts.fault("adapter.last_save_in_peft", allowed, reason)


def _adapter_is_of_this_kind(facts: Facts, folder: Path) -> Iterator[Fault]:
    key = "adapter.initial_path"
    if not spec_of(facts.config.adapter).peft_folder:
        return  # checked by its own rules
    if not (folder / peft_config.CONFIG).is_file():
        yield facts.fault(key, f"a folder with {peft_config.CONFIG}, as peft writes it", "there is none")
        return
    try:
        config = peft_config.read_config(folder)
    except JobError as error:
        yield facts.fault(key, "a folder that peft wrote", str(error))
        return
    for mismatch in peft_config.mismatches(config, facts.config.adapter):
        yield facts.fault(key, "an adapter of the job's kind", f"its {peft_config.CONFIG} has {mismatch}")


def scaling_is_trained_by_lora(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.adapter, "adapter.train_scaling"
    if not options.train_scaling or options.kind == NONE:
        return
    if options.kind not in ("lora", *QUANTIZED_MULTIPLES):
        yield facts.fault(key, f'false with adapter.kind = "{options.kind}"', "it only scales A and B")
    for name in ("alpha", "rslora"):
        if getattr(options, name) != getattr(Adapter(), name):
            reason = "the learned scale replaces it: leave one of them out"
            yield facts.fault(f"adapter.{name}", "unset with adapter.train_scaling", reason)
    for name, off in (("last_save_in_peft", "false"), ("initial_path", "unset")):
        if getattr(options, name):
            yield facts.fault(f"adapter.{name}", f"{off} with adapter.train_scaling", "peft has no learned scale")


def matrices_are_not_needed(facts: Facts) -> Iterator[Fault]:
    """Refuse options that read or change the base matrices with adapter.lora_only, which has none."""
    options, checkpoint = facts.config.adapter, facts.config.checkpoint
    if not options.lora_only or options.kind == NONE:
        return
    if options.kind != "lora":
        remedy = 'there is no matrix to quantize or to normalize by: write kind = "lora", or leave it out'
        yield facts.fault("adapter.lora_only", f'false with adapter.kind = "{options.kind}"', remedy)
    if options.relora.every is not None:
        yield facts.fault("adapter.relora.every", "unset with adapter.lora_only", "there is no matrix to merge into")
    if checkpoint.initial_load_path is not None and checkpoint.initial_load_model_only:
        reason = "the matrices of another model would be unused: leave one of them out"
        yield facts.fault("checkpoint.initial_load_path", "unset with adapter.lora_only", reason)
    for name, off in (("last_save_in_peft", "false"), ("initial_path", "unset")):
        if getattr(options, name):
            yield facts.fault(f"adapter.{name}", f"{off} with adapter.lora_only", "peft has a matrix next to A and B")


def restarts_make_sense(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.adapter, "adapter.relora."
    relora_options = options.relora
    if options.kind == NONE:
        return
    if relora_options.every is None:
        for option in (option.name for option in fields(Relora)):
            if getattr(relora_options, option) != getattr(Relora(), option):
                yield facts.fault(key + option, "nothing without adapter.relora.every", "set every, or leave it out")
        return
    if options.kind != "lora":
        packs = options.kind in QUANTIZED_MULTIPLES
        reason = "each restart would quantize the matrices again" if packs else "it is made for A and B"
        yield facts.fault(key + "every", 'unset, except with adapter.kind = "lora"', reason)
    if options.save == "alone":
        reason = "the matrices themselves change at each restart"
        yield facts.fault("adapter.save", '"whole" with adapter.relora', reason)
    if relora_options.reset in ("zero", "none") and relora_options.prune_ratio != Relora().prune_ratio:
        remedy = 'write reset = "magnitude" or "random", or leave it out'
        yield facts.fault(key + "prune_ratio", f'unset with reset = "{relora_options.reset}"', remedy)
    yield from _reset_is_ramped(facts)
    yield from _ramps_fit(facts)


def _ramps_fit(facts: Facts) -> Iterator[Fault]:
    relora_options, shape = facts.config.adapter.relora, facts.config.lr_scheduler.decay_type
    key, period = "adapter.relora.warmup_steps", relora_options.reset_period
    if relora_options.warmup_steps and shape in (JAGGED, CYCLICAL):
        yield facts.fault(key, f'0 with decay_type = "{shape}", which has restarts itself', "leave it out")
    if relora_options.anneal_steps > 1 and not relora_options.warmup_steps:
        yield facts.fault("adapter.relora.anneal_steps", "1 without adapter.relora.warmup_steps", "set that too")
    if relora_options.warmup_steps + relora_options.anneal_steps > period:
        yield facts.fault(
            key, f"with anneal_steps {relora_options.anneal_steps} at most the {period} steps between", "shorten one"
        )


def _reset_is_ramped(facts: Facts) -> Iterator[Fault]:
    relora_options, name, shape = (
        facts.config.adapter.relora,
        facts.config.optimizer.name,
        facts.config.lr_scheduler.decay_type,
    )
    key = "adapter.relora.reset"
    if relora_options.reset == "none":
        return
    if name not in ("Adam", "AdamW"):
        yield facts.fault(key, f'"none" with optimizer.name = "{name}"', "it is made for the two moments of Adam")
    if relora_options.warmup_steps:
        return
    if shape not in (JAGGED, CYCLICAL) and not relora_options.reset_step:
        reason = "moments of 0 with an old step count make the next steps several times too long, and runs diverge"
        remedy = f'{reason}: set lr_scheduler.decay_type = "{JAGGED}", or adapter.relora.reset_step = true'
        remedy += ", or adapter.relora.warmup_steps"
        yield facts.fault(key, f'"none" with lr_scheduler.decay_type = "{shape}"', remedy)
    elif not relora_options.reset_step:
        yield from _ramps_are_there(facts)


def _ramps_are_there(facts: Facts) -> Iterator[Fault]:
    """Require that the schedule restarts, with a warmup, wherever the optimizer state is reset."""
    schedule, period = facts.config.lr_scheduler, facts.config.adapter.relora.reset_period
    reason = "otherwise a reset occurs at the full rate; or set adapter.relora.reset_step = true"
    if schedule.cycle_length is not None and period % schedule.cycle_length:
        allowed = f"a divisor of the {period} steps between resets"
        yield facts.fault("lr_scheduler.cycle_length", allowed, f"leave it out, {reason}")
    if schedule.adjust_step % (schedule.cycle_length or period):
        yield facts.fault("lr_scheduler.adjust_step", "0 with adapter.relora.reset", f"leave it out, {reason}")
    name = "restart_warmup_steps" if schedule.decay_type == JAGGED else "warmup_steps"
    if getattr(schedule, name) == 0:
        yield facts.fault(f"lr_scheduler.{name}", "at least 1 with adapter.relora.reset", f"give it, {reason}")


def options_of_adapters_are_read(facts: Facts) -> Iterator[Fault]:
    """Report options that are set although the job has no adapter, or one that does not read them."""
    adapter_options, default = facts.config.adapter, Adapter()
    if adapter_options.kind == NONE:
        read_options: tuple[str, ...] = ("kind",)
        remedy = "set a kind, or leave it out"
    elif adapter_options.kind in ADAPTERS:
        read_options = (*COMMON_OPTIONS, *RULE_CHECKED_OPTIONS, *ADAPTERS[adapter_options.kind].options)
        remedy = "leave it out"
    else:
        return
    for name in (field.name for field in fields(Adapter)):
        value = getattr(adapter_options, name)
        recorded = (name, value) == ("save", "whole")  # by each run in its config.toml
        if name not in read_options and value != getattr(default, name) and not recorded:
            yield facts.fault(f"adapter.{name}", f'nothing with adapter.kind = "{adapter_options.kind}"', remedy)


RULES: tuple[Rule, ...] = (
    adapter_fits_the_model,
    experts_have_a_gate,
    packs_divide_over_tensor_parallel,
    adapter_alone_has_its_model,
    adapter_folders_fit,
    new_head_is_trained,
    new_rows_are_trained,
    patterns_fit_the_model,
    what_is_unfrozen_is_the_models,
    restarts_make_sense,
    matrices_are_not_needed,
    scaling_is_trained_by_lora,
)
WITHOUT_EFFECT: tuple[Rule, ...] = (options_of_adapters_are_read,)
