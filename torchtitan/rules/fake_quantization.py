"""Rules on quantization-aware training, the section [qat]."""

from collections.abc import Iterator
from dataclasses import fields

from torchtitan.adapters import NONE
from torchtitan.adapters.targets import with_wildcards
from torchtitan.config.options import Fault
from torchtitan.config.sections.model import Qat
from torchtitan.models.sizes import STACK, linears, split_side
from torchtitan.rules.facts import Facts, Rule

INPUTS = {"int4": ("none", "int8", "fp8"), "int8": ("none", "int8")}
"""Types of weights -> those of inputs that torchao trains with; other weights have inputs of their own type."""
GROUPS = {"nvfp4": 16, "mxfp4": 32}
ROW = "fp8"
ALONE = ("int4", "int8")
"""Types of weights whose scales depend on their groups alone, so that rows of an embedding may have them."""
OPTIONS = tuple(option.name for option in fields(Qat) if option.name != "weight_dtype")


def formats_exist(facts: Facts) -> Iterator[Fault]:
    options = facts.config.qat
    kind = options.weight_dtype
    if kind == "none":
        return
    allowed = INPUTS.get(kind, (kind,))
    if options.activation_dtype not in allowed:
        choice = " or ".join(f'"{name}"' for name in allowed)
        yield facts.fault("qat.activation_dtype", f'{choice} with qat.weight_dtype = "{kind}"', "write one of these")
    if options.group_size is not None and kind == ROW:
        reason = "a row of weights has one scale: leave it out"
        yield facts.fault("qat.group_size", f'unset with qat.weight_dtype = "{kind}"', reason)
    elif (group := GROUPS.get(kind)) and options.group_size not in (None, group):
        yield facts.fault("qat.group_size", f'{group} with qat.weight_dtype = "{kind}"', "leave it out")
    if options.quantize_embedding and kind not in ALONE:
        reason = "the rows of an embedding have no inputs to round with them: leave it out"
        yield facts.fault("qat.quantize_embedding", f'false with qat.weight_dtype = "{kind}"', reason)
    steps, start = facts.steps, facts.job.schedule.start
    if steps is not None and start < steps <= start + options.after_steps:
        count = f" - {start}, the steps from the weights' step on" if start else ""
        reason = "no step would round: lower it, or leave the section out"
        yield facts.fault("qat.after_steps", f"less than training.steps = {steps}{count}", reason)


def groups_divide_widths(facts: Facts) -> Iterator[Fault]:
    """Require whole groups in each row, on each rank of tensor parallel."""
    options, args, tp = facts.config.qat, facts.model.args, facts.layout.tp
    if options.weight_dtype == "none" or options.group == 1:
        return
    inputs = {name: size[1] for name, size in linears(args).items() if not name.endswith(STACK)}
    widths = {name: width // (tp if split_side(name) == 1 else 1) for name, width in inputs.items()}
    if options.quantize_embedding:
        widths["tok_embeddings"] = getattr(args, "word_dim", args.dim)
    uneven: dict[tuple[int, bool], list[str]] = {}
    for name, width in widths.items():
        if width % options.group:
            uneven.setdefault((width, width != inputs.get(name, width)), []).append(name)
    for (width, is_split), names in uneven.items():
        parts = f", its part on each of {tp} ranks of tensor parallel" if is_split else ""
        allowed = f"a divisor of {width}, the width of {', '.join(with_wildcards(names))}{parts}"
        remedy = "lower parallelism.tensor_parallel_degree" if is_split else "give another"
        fixed = options.weight_dtype in GROUPS and not is_split
        yield facts.fault(
            "qat.group_size",
            allowed,
            'write another qat.weight_dtype, as "int8"' if fixed else remedy,
            value=str(options.group),
        )


def nothing_else_rounds(facts: Facts) -> Iterator[Fault]:
    config, key = facts.config, "qat.weight_dtype"
    if config.qat.weight_dtype == "none":
        return
    if config.adapter.kind != NONE:
        reason = "an adapter multiplies its matrices in its own way, and merging would move weights off the grid"
        yield facts.fault(key, f'"none" with adapter.kind = "{config.adapter.kind}"', reason)
    if config.training.float8 != "none":
        reason = "linears would be rounded twice: leave one of the two out"
        yield facts.fault(key, f'"none" with training.float8 = "{config.training.float8}"', reason)
    if config.parallelism.fsdp_quantized_gather != "none":
        reason = "weights would be rounded to one grid and then to another"
        yield facts.fault("parallelism.fsdp_quantized_gather", '"none" with qat.weight_dtype', reason)
    if config.task.kind in ("dpo", "ipo"):
        reason = (
            "answers would be compared with those of a reference that rounds too, or does not: train on pairs first"
        )
        yield facts.fault(key, f'"none" with task.kind = "{config.task.kind}"', reason)


def options_are_read(facts: Facts) -> Iterator[Fault]:
    options = facts.config.qat
    for name in OPTIONS if options.weight_dtype == "none" else ():
        if getattr(options, name) != getattr(Qat(), name):
            yield facts.fault(f"qat.{name}", "nothing without qat.weight_dtype", "set that, or leave it out")


RULES: tuple[Rule, ...] = (formats_exist, groups_divide_widths, nothing_else_rounds)
WITHOUT_EFFECT: tuple[Rule, ...] = (options_are_read,)
