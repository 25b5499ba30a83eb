"""Rules that find impossible or pointless jobs before they start. Needs no torch.

A rule is a function (Facts) -> faults. Each module of this package lists its rules at its end. All of them always run,
so that a user sees all faults at once. Checks of a single option's type are in config/sections/.

A mistake in one option neither hides faults that do not depend on it nor causes faults that follow from it: options
that have no valid value are hidden, and a rule stops as soon as it reads one, or a fact of the job that cannot be
computed. So it reads what may be wrong last.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from torchtitan.adapters import ADAPTERS, NONE
from torchtitan.config.changes import advice
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError, Fault, hint, show
from torchtitan.core import plugins
from torchtitan.core.errors import LimitError
from torchtitan.core.plugins import missing_plugin, plugin_entries
from torchtitan.datasets import DATASETS
from torchtitan.job import ResolvedJob
from torchtitan.losses.tasks import TASKS
from torchtitan.lr_schedules import CONSTANT, CYCLICAL, DECAYS, JAGGED
from torchtitan.models import FROM_HF, SIZES
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.rules import (
    adapters,
    callbacks,
    checkpoint,
    fake_quantization,
    model_and_data,
    monitoring,
    optimization,
    parallelism,
    pipeline,
    task,
)
from torchtitan.rules.facts import Device, Facts, Rule
from torchtitan.rules.optimization import BACKENDS

__all__ = ["BACKENDS", "OF_THE_MODEL", "RULES", "WITHOUT_EFFECT", "Device", "Facts", "check", "with_faults_of_the_rest"]

PLUGINS = [entry.load() for entry in plugin_entries(plugins.RULES).values()]
MODULES = (
    model_and_data,
    parallelism,
    task,
    pipeline,
    adapters,
    *PLUGINS,
    optimization,
    fake_quantization,
    checkpoint,
    monitoring,
    callbacks,
)

WITHOUT_EFFECT: list[Rule] = [rule for module in MODULES for rule in module.WITHOUT_EFFECT]
"""Rules on options that are set and would do nothing on any number of ranks. A translated job leaves these out."""

RULES: list[Rule] = [rule for module in MODULES for rule in module.RULES] + WITHOUT_EFFECT
OF_THE_MODEL: list[Rule] = [rule for module in PLUGINS for rule in module.OF_THE_MODEL]
"""Rules of plugins that judge the model alone, without the data and the training."""


def check(
    config: JobConfig,
    world_size: int,
    devices: Device,
    said_by: Mapping[str, str] | None = None,
    unknown: Collection[str] = (),
    opens_data: bool = True,
) -> list[Fault]:
    """Return all faults of a job on `world_size` ranks of this kind of device. Without faults it can start.

    Names are checked first. A rule stops when it reads an unknown name or an option of `unknown`. `opens_data`: False
    leaves out the rules that open the tokenizer and the data.
    """
    facts, faults = without_unknown_names(Facts(ResolvedJob(hide(config, unknown), world_size, devices), said_by or {}))
    return faults + judge(facts, (rule for rule in RULES if opens_data or rule not in model_and_data.READ_FILES))


def judge(facts: Facts, rules: Iterable[Rule]) -> list[Fault]:
    """Return the faults that rules find. An error of the job's facts that ends some of them is one of these faults."""
    faults: list[Fault] = []
    errors: list[LimitError] = []
    for rule in rules:
        try:
            for fault in rule(facts):
                faults.append(fault)
        except UnknownValue:
            continue
        except LimitError as error:
            errors.append(error)
    for fault in map(facts.refused, errors):
        if fault not in faults:
            faults.append(fault)
    return faults


def with_faults_of_the_rest(
    error: ConfigError, world_size: int, devices: Device, said_by: Mapping[str, str] | None = None
) -> list[Fault]:
    """Return the faults of a job's text, and the faults of the options that could still be read."""
    if error.rest is None:
        return error.faults
    return error.faults + check(error.rest, world_size, devices, said_by, error.unknown)


def _flavors(facts: Facts) -> Collection[str] | None:
    name = facts.config.model.name
    return [*SIZES[name], FROM_HF] if name in SIZES else None


NAMES: dict[str, Callable[[Facts], Collection[str] | None]] = {
    "model.name": lambda facts: SIZES,
    "task.kind": lambda facts: TASKS,
    "optimizer.name": lambda facts: OPTIMIZERS,
    "adapter.kind": lambda facts: (NONE, *ADAPTERS),
    "lr_scheduler.decay_type": lambda facts: (*DECAYS, CONSTANT, JAGGED, CYCLICAL),
    "model.flavor": _flavors,
    "compile.backend": lambda facts: BACKENDS if facts.config.compile.enable else None,
}
"""Options that hold a name, and the allowed names in a job; None if the job does not use the name."""


def without_unknown_names(facts: Facts) -> tuple[Facts, list[Fault]]:
    """Return the facts with unknown names hidden, and the faults of these and of unknown datasets."""
    rules = [partial(_known_name, key=key) for key in NAMES]
    faults = judge(facts, [*rules, *(partial(_known_datasets, section=name) for name in ("training", "validation"))])
    config = hide(facts.config, {fault.key for fault in faults if fault.key in NAMES})
    return dataclasses.replace(facts, job=dataclasses.replace(facts.job, config=config)), faults


def _known_name(facts: Facts, key: str) -> Iterator[Fault]:
    section, option = key.split(".")
    name, names = getattr(getattr(facts.config, section), option), NAMES[key](facts)
    if names is not None and name not in names:
        remedy = (advice(name) if key == "model.name" else "") or missing_plugin(name) or hint(name, names, quote=True)
        yield facts.fault(key, f"one of {', '.join(map(show, names))}", remedy)


def _known_datasets(facts: Facts, section: str) -> Iterator[Fault]:
    validation, part = facts.config.validation, getattr(facts.config, section)
    if section == "validation" and (not validation.enable or validation.split is not None):
        return
    names = {f"{section}.sources[{number}].dataset": source.dataset for number, source in enumerate(part.sources)}
    for place, name in (names or {f"{section}.dataset": part.dataset}).items():
        if name not in DATASETS:
            near = hint(name, DATASETS, quote=True)
            yield facts.fault(place, f"one of {', '.join(map(show, DATASETS))}", near)


class UnknownValue(Exception):
    """A rule has read an option that has no valid value."""


def hide(config: JobConfig, keys: Collection[str]) -> JobConfig:
    """Return the job with these options hidden: reading one raises UnknownValue."""
    if not keys:
        return config
    config = copy.deepcopy(config)
    names: defaultdict[str, set[str]] = defaultdict(set)
    for key in keys:
        section, _, name = key.rpartition(".")
        names[section].add(name)
    for section, hidden in names.items():
        part = attrgetter(section)(config)
        part.__class__ = _hiding(type(part), frozenset(hidden))
    return config


def _hiding(section: type, hidden: frozenset[str]) -> type:
    def read(self: Any, name: str) -> Any:
        if name in hidden:
            raise UnknownValue(name)
        return object.__getattribute__(self, name)

    return type(section.__name__, (section,), {"__getattribute__": read})
