"""Rules on callbacks: installed ones, with options that they have. Checking a callback imports its package."""

from collections.abc import Iterator

from pydantic_core import PydanticUndefined

from torchtitan.config.options import Fault, describe, fault_of_entry, hint, show
from torchtitan.core.callbacks import CALLBACKS, Callback, callback_class, has_hook, make_callback, options_of
from torchtitan.core.errors import JobError
from torchtitan.core.registry import Option
from torchtitan.rules.facts import Facts, Rule


def callbacks_can_be_made(facts: Facts) -> Iterator[Fault]:
    section = facts.config.callbacks
    for number, name in enumerate(section.use):
        place = f"callbacks.use[{number}]"
        if name in section.use[:number]:
            yield facts.fault(place, "each callback once", "drop one")
            continue
        try:
            kind = callback_class(name)
            faults = list(_faults_of_options(facts, name, job_options(kind)))
            yield from faults
            if not faults:
                make_callback(name, section.options.get(name, {}))
        except JobError as error:
            remedy = "" if name in CALLBACKS else hint(name, CALLBACKS, quote=True)
            yield facts.fault(place, "an installed callback", remedy or str(error))
            continue
        if has_hook(kind, "after_backward") and facts.config.optimizer.early_step_in_backward:
            allowed = (
                "callbacks without after_backward with optimizer.early_step_in_backward, which frees gradients early"
            )
            yield facts.fault(place, allowed, "turn it off, or leave the callback out")


def _faults_of_options(facts: Facts, name: str, entries: dict[str, Option]) -> Iterator[Fault]:
    table = facts.config.callbacks.options.get(name, {})
    for key, value in table.items():
        if fault := fault_of_entry(entries, name, f"the callback {name}", key, value):
            text, allowed, remedy = fault
            yield facts.fault("callbacks.options", allowed, remedy, value=text)
    for key, option in entries.items():
        if option.default is PydanticUndefined and key not in table:
            allowed = f"{key} = {describe(option.annotation)}, which {name} needs"
            yield facts.fault(
                "callbacks.options", allowed, f"add it to the table of {name}", value=f"nothing for {key}"
            )


def job_options(kind: type[Callback]) -> dict[str, Option]:
    """Return the options of a callback that a job can give; fields of other types are its own."""

    def has_toml_type(option: Option) -> bool:
        try:
            return bool(describe(option.annotation))
        except (KeyError, IndexError, TypeError):
            return False

    return {key: option for key, option in options_of(kind).items() if has_toml_type(option)}


def options_are_of_used_callbacks(facts: Facts) -> Iterator[Fault]:
    section = facts.config.callbacks
    for name in section.options.keys() - set(section.use):
        allowed = f"tables of the callbacks in use: {', '.join(map(show, section.use)) or 'none'}"
        remedy = hint(name, section.use, quote=True) or f"add {show(name)} to callbacks.use"
        yield facts.fault("callbacks.options", allowed, remedy, value=f"a table of {show(name)}")


RULES: tuple[Rule, ...] = (callbacks_can_be_made,)
WITHOUT_EFFECT: tuple[Rule, ...] = (options_are_of_used_callbacks,)
