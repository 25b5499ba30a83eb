"""Rules on what is trained instead of the model's own parameters."""

from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

from torchtitan.adapters import ADAPTERS, COMMON_OPTIONS, NONE, RULE_CHECKED_OPTIONS, peft_config
from torchtitan.adapters.targets import (
    QUANTIZED_MULTIPLES,
    layer_of,
    linear_adapter_options,
    misfits,
    quantization_block,
    target_linears,
    with_wildcards,
)
from torchtitan.config.options import Fault, show
from torchtitan.config.sections.adapter import Adapter, Relora
from torchtitan.core.errors import JobError
from torchtitan.lr_schedules import CYCLICAL, JAGGED
from torchtitan.models.sizes import HEAD, linears, parameters, split_side
from torchtitan.parallelisms import degrees
from torchtitan.rules.facts import Facts, Rule


def adapter_fits_the_model(facts: Facts) -> Iterator[Fault]:
    options = linear_adapter_options(facts.config.adapter)
    if options is None or options.kind not in ADAPTERS or facts.args is None or not (found := linears(facts.args)):
        return
    if "target" not in ADAPTERS[options.kind].options:
        return
    for key, allowed, remedy in misfits(found, options):
        yield facts.fault(key, allowed, remedy)
    adapts_tied_head = facts.args.tied_embeddings and HEAD in target_linears(found, options)
    if facts.config.checkpoint.last_save_model_only and adapts_tied_head:
        why = "the head is the embedding's matrix, and folding in would make them two: set adapter.last_save_in_peft"
        yield facts.fault("checkpoint.last_save_model_only", "false with an adapter beside a tied head", why)
    if options.relora.every is not None and adapts_tied_head:
        why = "a restart would fold the head's adapter into the embedding too: leave output out of adapter.target"
        yield facts.fault("adapter.relora.every", "unset with an adapter beside a tied head", why)


def packs_divide_over_tensor_parallel(facts: Facts) -> Iterator[Fault]:
    """Of inputs that are split each rank has whole blocks, as many as the others."""
    options = linear_adapter_options(facts.config.adapter)
    if facts.tp == 1 or options is None or options.kind != "qlora" or facts.args is None:
        return
    found = linears(facts.args)
    split = {name: found[name][1] for name in target_linears(found, options) if split_side(name) == 1}
    blocks = {
        name: inputs // quantization_block(inputs) for name, inputs in split.items() if quantization_block(inputs)
    }
    of_all_layers = {f"blocks of {with_wildcards([name])[0]}": number for name, number in blocks.items()}
    yield from facts.judged(degrees.check_split, facts.tp, of_all_layers)


def trained_whole(facts: Facts) -> tuple[str, list[str], str] | None:
    """The option that says which of the model's own parameters are trained, its patterns, and another remedy; None
    where all are, or where the kind of an adapter is none of ours."""
    options, unfrozen = facts.config.adapter, facts.config.training.unfrozen
    if options.kind == NONE:
        return ("training.unfrozen", unfrozen, "leave it out") if unfrozen else None
    if options.train_dense_rest or options.kind not in ADAPTERS:
        return None
    return "adapter.train_fully", options.train_fully, "train_dense_rest = true"


def what_is_unfrozen_is_the_models(facts: Facts) -> Iterator[Fault]:
    """An adapter says itself what is trained beside it."""
    if facts.config.training.unfrozen and facts.config.adapter.kind != NONE:
        remedy = "write adapter.train_fully for what is trained beside it"
        yield facts.fault("training.unfrozen", f'nothing with adapter.kind = "{facts.config.adapter.kind}"', remedy)


def patterns_fit_the_model(facts: Facts) -> Iterator[Fault]:
    """Those of what is trained whole: each fits a parameter, which is no matrix that an adapter packs or replaces."""
    if facts.args is None or (trained := trained_whole(facts)) is None or not (names := parameters(facts.args)):
        return
    key, patterns, _ = trained
    options = linear_adapter_options(facts.config.adapter)
    if options is not None and (options.kind in QUANTIZED_MULTIPLES or options.lora_only):
        gone = {f"{name}.weight" for name in target_linears(linears(facts.args), options)}
        names = [name for name in names if name not in gone]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(sorted(with_wildcards(names)))
            yield facts.fault(key, f"patterns that fit one of {known}", "correct or drop it", given=show(pattern))


def new_head_is_trained(facts: Facts) -> Iterator[Fault]:
    """A head of classes that begins anew and stays so tells nothing."""
    if not facts.tells_classes or facts.fields is None or (trained := trained_whole(facts)) is None:
        return
    key, chosen, other = trained
    heads = [name for name in linears(facts.args) if layer_of(name) is None]
    frozen = [name for name in heads if not any(fnmatchcase(f"{name}.weight", each) for each in chosen)]
    if frozen:
        patterns = ", ".join(f'"{name}.*"' for name in heads)
        allowed = f"what fits {' and '.join(f'{name}.weight' for name in frozen)}, the head of classes"
        yield facts.fault(key, allowed, f"write [{patterns}], or {other}")


def new_rows_are_trained(facts: Facts) -> Iterator[Fault]:
    """Those of added tokens are all the same mean: a frozen one is never read as anything else, nor the likeliest."""
    options, trained = facts.config.adapter, trained_whole(facts)
    if (
        trained is None
        or linear_adapter_options(options) is not options
        or not facts.untrained_tokens
        or facts.args is None
    ):
        return
    key, chosen, other = trained
    beside = [] if options.kind == NONE else target_linears(linears(facts.args), options)
    tied = facts.args.tied_embeddings
    ends = [] if tied else [HEAD] * (HEAD not in beside)
    ends = [f"{name}.weight" for name in ("tok_embeddings", *ends)]
    fitted = [*ends, f"{HEAD}.weight"] if tied else ends  # of tied ones either name will do
    fits = {name for name in fitted if any(fnmatchcase(name, each) for each in chosen)}
    if frozen := [name for name in ends if name not in fits and not (tied and fits)]:
        new = len(facts.untrained_tokens)
        allowed = f"what fits {' and '.join(frozen)}, with rows of {new} new token{'s' if new > 1 else ''}"
        patterns = ", ".join(f'"{name}"' for name in dict.fromkeys([*chosen, *ends]))
        yield facts.fault(key, allowed, f"write [{patterns}], or {other}")


def adapter_alone_has_its_model(facts: Facts) -> Iterator[Fault]:
    options, checkpoint = facts.config.adapter, facts.config.checkpoint
    if options.kind == NONE:
        return
    save = facts.adapter_save
    if save == "alone" and not checkpoint.initial_load_path:
        why = "checkpoints without the model have to say where it is"
        yield facts.fault("adapter.save", '"whole" without checkpoint.initial_load_path', why, given=show(save))
    if save == "alone" and not checkpoint.initial_load_model_only:
        remedy = "the first start would take the other job's step and data too"
        yield facts.fault("checkpoint.initial_load_model_only", 'true with adapter.save = "alone"', remedy)


def adapter_folders_fit(facts: Facts) -> Iterator[Fault]:
    options = facts.config.adapter
    if options.kind == NONE:
        return
    if options.initial_path is not None:
        yield from _adapter_is_of_this_kind(facts, Path(options.initial_path))
    for name in ("train_fully", "train_dense_rest"):
        if options.last_save_in_peft and getattr(options, name):
            remedy = "its folder holds low-rank matrices alone; keep checkpoints, or fold the adapter in"
            yield facts.fault("adapter.last_save_in_peft", f"false with adapter.{name}", remedy)


def _adapter_is_of_this_kind(facts: Facts, folder: Path) -> Iterator[Fault]:
    key = "adapter.initial_path"
    if facts.config.adapter.kind == "neurocache":
        return  # rules/neurocache.py
    if not (folder / peft_config.CONFIG).is_file():
        yield facts.fault(key, f"a folder with {peft_config.CONFIG}, as peft writes it", "there is none")
        return
    try:
        config = peft_config.read_config(folder)
    except JobError as error:
        yield facts.fault(key, "a folder that peft wrote", str(error))
        return
    for each in peft_config.mismatches(config, facts.config.adapter):
        yield facts.fault(key, "an adapter of the job's kind", f"its {peft_config.CONFIG} has {each}")


def scaling_is_trained_by_lora(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.adapter, "adapter.train_scaling"
    if not options.train_scaling or options.kind == NONE:
        return
    if options.kind not in ("lora", *QUANTIZED_MULTIPLES):
        yield facts.fault(key, f'false with adapter.kind = "{options.kind}"', "it is the strength of A and B alone")
    for name in ("alpha", "rslora"):
        if getattr(options, name) != getattr(Adapter(), name):
            why = "the learned number stands in its place: leave one of them out"
            yield facts.fault(f"adapter.{name}", "unset with adapter.train_scaling", why)
    for name, off in (("last_save_in_peft", "false"), ("initial_path", "unset")):
        if getattr(options, name):
            yield facts.fault(f"adapter.{name}", f"{off} with adapter.train_scaling", "peft knows no such number")


def matrices_are_not_needed(facts: Facts) -> Iterator[Fault]:
    """Without the targets' own matrices, what reads or changes these has nothing to do it with."""
    options, checkpoint = facts.config.adapter, facts.config.checkpoint
    if not options.lora_only or options.kind == NONE:
        return
    if options.kind != "lora":
        remedy = 'there is no matrix to pack or to measure: write kind = "lora", or leave it out'
        yield facts.fault("adapter.lora_only", f'false with adapter.kind = "{options.kind}"', remedy)
    if options.relora.every is not None:
        yield facts.fault("adapter.relora.every", "unset with adapter.lora_only", "there is no matrix to merge into")
    if checkpoint.initial_load_path is not None and checkpoint.initial_load_model_only:
        why = "the matrices of another model would have no place: leave one of them out"
        yield facts.fault("checkpoint.initial_load_path", "unset with adapter.lora_only", why)
    for name, off in (("last_save_in_peft", "false"), ("initial_path", "unset")):
        if getattr(options, name):
            yield facts.fault(f"adapter.{name}", f"{off} with adapter.lora_only", "peft has a matrix beside A and B")


def restarts_make_sense(facts: Facts) -> Iterator[Fault]:
    options, key = facts.config.adapter, "adapter.relora."
    given = options.relora
    if options.kind == NONE:
        return
    if given.every is None:
        for each in (each.name for each in fields(Relora)):
            if getattr(given, each) != getattr(Relora(), each):
                yield facts.fault(key + each, "nothing without adapter.relora.every", "set every, or leave it out")
        return
    if options.kind != "lora":
        packs = options.kind in QUANTIZED_MULTIPLES
        why = "each restart would round the packed matrices again" if packs else "it is made for A and B"
        yield facts.fault(key + "every", 'unset, except with adapter.kind = "lora"', why)
    if options.save == "alone":
        why = "the matrices themselves change at each restart"
        yield facts.fault("adapter.save", '"whole" with adapter.relora', why)
    if given.reset in ("zero", "none") and given.prune_ratio != Relora().prune_ratio:
        remedy = 'write reset = "magnitude" or "random", or leave it out'
        yield facts.fault(key + "prune_ratio", f'unset with reset = "{given.reset}"', remedy)
    yield from _reset_is_ramped(facts)
    yield from _ramps_fit(facts)


def _ramps_fit(facts: Facts) -> Iterator[Fault]:
    given, shape = facts.config.adapter.relora, facts.config.lr_scheduler.decay_type
    key, period = "adapter.relora.warmup_steps", given.reset_period
    if given.warmup_steps and shape in (JAGGED, CYCLICAL):
        yield facts.fault(key, f'0 with decay_type = "{shape}", which comes back by itself', "leave it out")
    if given.anneal_steps > 1 and not given.warmup_steps:
        yield facts.fault("adapter.relora.anneal_steps", "1 without adapter.relora.warmup_steps", "set that too")
    if given.warmup_steps + given.anneal_steps > period:
        yield facts.fault(
            key, f"with anneal_steps {given.anneal_steps} at most the {period} steps between", "shorten one"
        )


def _reset_is_ramped(facts: Facts) -> Iterator[Fault]:
    given, name, shape = facts.config.adapter.relora, facts.config.optimizer.name, facts.config.lr_scheduler.decay_type
    key = "adapter.relora.reset"
    if given.reset == "none":
        return
    if name not in ("Adam", "AdamW"):
        yield facts.fault(key, f'"none" with optimizer.name = "{name}"', "it is made for the two moments of Adam")
    if given.warmup_steps:
        return
    if shape not in (JAGGED, CYCLICAL) and not given.reset_step:
        why = "moments of 0 beside an old count make the next steps several times too long, and runs diverge"
        remedy = f'{why}: set lr_scheduler.decay_type = "{JAGGED}", or adapter.relora.reset_step = true'
        remedy += ", or adapter.relora.warmup_steps"
        yield facts.fault(key, f'"none" with lr_scheduler.decay_type = "{shape}"', remedy)
    elif not given.reset_step:
        yield from _ramps_are_there(facts)


def _ramps_are_there(facts: Facts) -> Iterator[Fault]:
    """A schedule with restarts that has none, or not where the state is reset, is as good as another schedule."""
    schedule, period = facts.config.lr_scheduler, facts.config.adapter.relora.reset_period
    why = "else a reset meets the full rate; or set adapter.relora.reset_step = true"
    if schedule.cycle_length is not None and period % schedule.cycle_length:
        allowed = f"what divides the {period} steps between resets"
        yield facts.fault("lr_scheduler.cycle_length", allowed, f"leave it out, {why}")
    if schedule.adjust_step % (schedule.cycle_length or period):
        yield facts.fault("lr_scheduler.adjust_step", "0 with adapter.relora.reset", f"leave it out, {why}")
    name = "restart_warmup_steps" if schedule.decay_type == JAGGED else "warmup_steps"
    if getattr(schedule, name) == 0:
        yield facts.fault(f"lr_scheduler.{name}", "at least 1 with adapter.relora.reset", f"give it, {why}")


def options_of_adapters_are_read(facts: Facts) -> Iterator[Fault]:
    """Options that are set and would do nothing, as there is no adapter, or one that does not read them."""
    given, default = facts.config.adapter, Adapter()
    if given.kind == NONE:
        read: tuple[str, ...] = ("kind",)
        remedy = "set a kind, or leave it out"
    elif given.kind in ADAPTERS:
        read = (*COMMON_OPTIONS, *RULE_CHECKED_OPTIONS, *ADAPTERS[given.kind].options)
        remedy = "leave it out"
    else:
        return
    for name in (each.name for each in fields(Adapter)):
        if name not in read and getattr(given, name) != getattr(default, name):
            yield facts.fault(f"adapter.{name}", f'nothing with adapter.kind = "{given.kind}"', remedy)


RULES: tuple[Rule, ...] = (
    adapter_fits_the_model,
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
