"""Rules on what an optimizer asks of the model, of precision and of where parameters are."""

from collections.abc import Iterator
from typing import Any

from torchtitan.adapters.targets import without_numbers
from torchtitan.config.options import Fault, show
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.patterns import HIDDEN, sides, taken
from torchtitan.optimizers.spec import SHARED
from torchtitan.rules.facts import Facts

OPTIONS = "optimizer.options"


def options_of_the_optimizer(facts: Facts) -> dict[str, Any] | None:
    """With defaults; None where the optimizer or what it is given is wrong by itself."""
    given = facts.config.optimizer
    spec = OPTIMIZERS.get(given.name)
    shared = {key: getattr(given, key) for key in SHARED}
    if spec is None or any(spec.wrong(given.name, {key: shared[key] for key in spec.shared}, given.options)):
        return None
    return spec.arguments(shared, given.options)


def optimizer_has_matrices(facts: Facts) -> Iterator[Fault]:
    options = options_of_the_optimizer(facts)
    if not options or "targets" not in options or not facts.matrices:
        return
    known = ", ".join(without_numbers(facts.matrices))
    written = options["targets"] != HIDDEN  # the default has names of several families
    patterns = [[pattern] for pattern in options["targets"]] if written else [options["targets"]]
    for some in patterns or [[]]:
        if not any(taken(name, shape, some) for name, shape in facts.matrices.items()):
            remedy = "correct or drop it" if some else 'or write optimizer.name = "AdamW"'
            yield facts.fault(OPTIONS, f"targets that fit one of {known}", remedy, given=f"targets = {show(some)}")


def optimizer_projects_something(facts: Facts) -> Iterator[Fault]:
    options = options_of_the_optimizer(facts)
    if not options or "rank" not in options or "targets" not in options:
        return
    chosen = {name: shape for name, shape in facts.matrices.items() if taken(name, shape, options["targets"])}
    projected = {name: sides(name, shape, options) for name, shape in chosen.items()}
    rank = f"rank = {options['rank']}"
    if chosen and not any(projected.values()):
        longest = max(map(min, chosen.values()))
        remedy = "lower it, or write another optimizer.name: with such a rank nothing is saved"
        yield facts.fault(OPTIONS, f"rank below {longest}, the longest short side of its matrices", remedy, given=rank)
    if options.get("on_conflict") != "error":
        return
    shards, tp = facts.fsdp_shards or 1, facts.tp
    cut = [name for name, found in projected.items() if facts.cut_sides(name, shards, tp).intersection(found)]
    if cut:
        given, names = 'on_conflict = "error"', ", ".join(without_numbers(cut))
        remedy = 'as FSDP shards rows; write side = "right" too'
        if tp > 1:
            remedy = "as each rank has a part of the side that becomes short; or leave these out of targets"
        yield facts.fault(OPTIONS, f'on_conflict = "gather" or "flip" for {names}', remedy, given=given)


def optimizer_suits_the_precision(facts: Facts) -> Iterator[Fault]:
    name, dtype = facts.config.optimizer.name, facts.config.training.dtype
    only = name in OPTIMIZERS and OPTIMIZERS[name].only_in
    if only and dtype != only:
        remedy = f'set training.dtype = "{only}", or write optimizer.name = "AdamW"'
        yield facts.fault("optimizer.name", f'another with training.dtype = "{dtype}"', remedy)


def optimizer_reaches_the_other_ranks(facts: Facts) -> Iterator[Fault]:
    name, offloaded = facts.config.optimizer.name, facts.config.training.enable_cpu_offload
    between_gpus = facts.device == "cuda" and facts.world_size > 1
    if name in OPTIMIZERS and OPTIMIZERS[name].sums and offloaded and between_gpus:
        why = "its step sums over ranks, and between GPUs that goes for what is on them"
        yield facts.fault("training.enable_cpu_offload", f'false with optimizer.name = "{name}"', why)
