"""Find what a package brings, and list the rows that try it: checks of tiny jobs under plans. Needs no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from inspect import Parameter, signature
from math import prod
from pkgutil import resolve_name
from types import FunctionType
from typing import Any

from torchtitan.adapters import ADAPTERS, AdapterSpec
from torchtitan.config.manager import load
from torchtitan.config.options import show
from torchtitan.core.errors import JobError
from torchtitan.core.registry import Registry, installed_entries, package_of
from torchtitan.losses.tasks import TASKS, TaskSpec
from torchtitan.lr_schedules import DECAYS
from torchtitan.models import SIZES
from torchtitan.models.family import Family
from torchtitan.optimizers import OPTIMIZERS, OptimizerSpec
from torchtitan.rules import check

DEBUG = "debugmodel"
KINDS: dict[str, tuple[Registry[Any], type, str]] = {
    "family": (SIZES, Family, "model.name"),
    "task": (TASKS, TaskSpec, "task.kind"),
    "optimizer": (OPTIMIZERS, OptimizerSpec, "optimizer.name"),
    "adapter": (ADAPTERS, AdapterSpec, "adapter.kind"),
    "schedule": (DECAYS, object, "lr_scheduler.decay_type"),  # any function
}
"""By kind: the registry, the type of its entries, and the option that names one."""
PLACES = {"family": ("spec",), "task": ("objective",), "optimizer": ("make", "group_of"), "adapter": ("make",)}
"""By kind: the fields of its spec that are a "module:attribute"."""
TABLES = {"task": "task.options", "optimizer": "optimizer.options", "adapter": "adapter"}
"""By kind: the table of a job that has its options."""
JOB: dict[str, Any] = {
    "model.flavor": DEBUG,
    "model.tokenizer_path": "bytes",
    "training.dataset": "python_stdlib",
    "training.seq_len": 24,
    "training.global_batch_size": 8,
    "training.steps": 4,
    "training.mixed_precision_param": "float32",
    "activation_checkpoint.mode": "none",
    "optimizer.lr": 1e-2,
    "metrics.log_freq": 1,
    "metrics.plot": False,
}
LAYERS = 5
"""Of families: enough for two stages on each of two ranks, and one more that makes the cut uneven."""
WIDE = 256
"""Width for adapters, so that no matrix has a side shorter than the default of adapter.rank."""
_llama = dict(dim=48, n_heads=4, n_kv_heads=2, vocab_size=264, multiple_of=16)
_classic = dict(dim=48, n_heads=4, ffn_dim=96, vocab_size=264, max_seq_len=32)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("llama3", _llama),
    "same": ("roberta", _classic),
    "classes": ("gpt2", _classic | dict(n_classes=4)),
    "ends": ("gpt2", _classic | dict(n_classes=1)),
}
"""The model for everything but families, and its sizes, by the labels of the task."""

_degree = "parallelism.{}_parallel_degree".format
SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
TP, CP, PP, EP = map(_degree, ("tensor", "context", "pipeline", "expert"))
SCHEDULE, RECOMPUTE = "parallelism.pipeline_parallel_schedule", "activation_checkpoint.mode"
PLANS: dict[str, dict[str, Any]] = {
    "FSDP2 2": {SHARD: 2},
    "HSDP 2x2": {REPLICATE: 2, SHARD: 2},
    "TP 2": {TP: 2, "parallelism.disable_sequence_parallel": True},
    "TP 2 with sequence parallel": {TP: 2},
    "CP 2": {CP: 2},
    "PP 2, Interleaved1F1B": {PP: 2, SCHEDULE: "Interleaved1F1B"},
    "PP 2, DualPipeV": {PP: 2, SCHEDULE: "DualPipeV"},
    "EP 2": {SHARD: 2, EP: 2},
    "FSDP2 2, recompute": {SHARD: 2, RECOMPUTE: "full"},
    "FSDP2 2, loss in chunks": {SHARD: 2, "training.loss_chunks": 3},
    "FSDP2 2 x TP 2": {SHARD: 2, TP: 2},
    "CP 2 x TP 2, recompute": {CP: 2, TP: 2, RECOMPUTE: "full"},
    "PP 2 x FSDP2 2": {PP: 2, SHARD: 2, SCHEDULE: "Interleaved1F1B"},
    "PP 2 x TP 2": {PP: 2, TP: 2, SCHEDULE: "DualPipeV"},
}
NOT_FOR = {
    "optimizer": ("EP 2", "CP 2 x TP 2, recompute", "FSDP2 2, recompute", "FSDP2 2, loss in chunks"),
    "adapter": ("EP 2", "FSDP2 2, loss in chunks"),
    "task": ("EP 2",),
}
CHECKS = {
    "family": ("save and resume", "export"),
    "task": ("count", "save and resume"),
    "optimizer": ("save and resume",),
    "adapter": ("save and resume", "merge"),
    "schedule": ("function of the step",),
}
"""Checks of a kind in addition to its plans."""
RESUMED = {SHARD: 2}
"""The plan of the job that saves and resumes."""


@dataclass(frozen=True)
class Item:
    """A name that a package brings. `place`: what it leads to, as "module:attribute". `options`: (name, text of the
    value), where others than the defaults are tried.
    """

    kind: str
    name: str
    place: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    def load(self) -> Any:
        """Return the value of its registry, to which it is added if no installed package has done so. JobError if it
        cannot be used.
        """
        registry, kind, _ = KINDS[self.kind]
        if self.name not in registry:
            registry.data[self.name] = _imported(self.place)
        elif self.name in registry.data and self.name in installed_entries(registry.group):
            raise JobError(f"{self}: the project has one of that name, so {self.place} is not used; rename it")
        value = registry[self.name]
        if self.kind == "family" and DEBUG not in value:
            raise JobError(f"{self}: it has no size called {DEBUG}; add one to its `sizes`, as small as possible")
        return value

    def check(self) -> None:
        """Raise JobError if what its spec names cannot be imported, or is not called as the trainer calls it.

        Imports it, so torch too.
        """
        self.load()
        spec = _imported(self.place)
        for field in PLACES.get(self.kind, ()):
            if not (place := getattr(spec, field)):
                continue
            constructor = _imported(place, f"{self}: {field} = ")
            if field != "spec" and (fault := _misfit(constructor, _arguments(field, spec))):
                raise JobError(f"{self}: {field} = {place}: {fault}; mend the package")


@dataclass(frozen=True)
class Row:
    """One thing to check of an item: a check by name, or the name of a plan."""

    item: Item
    name: str

    @cached_property
    def plan(self) -> dict[str, Any]:
        return RESUMED if self.name == "save and resume" else PLANS.get(self.name, {})

    @property
    def ranks(self) -> int:
        return prod(value for key, value in self.plan.items() if key.endswith("_degree") and key != EP)

    def arguments(self, **options: Any) -> list[str]:
        """Return the command line of the tiny job, with further options of a job (__ in place of the dot)."""
        kind, value = self.item.kind, self.item.load()
        task = value if kind == "task" else TASKS["pretrain"]
        name, sizes = MODELS[task.labels]
        if kind == "family":
            name, sizes = self.item.name, dict[str, Any]()
            sizes |= {"n_layers": LAYERS} if hasattr(value[DEBUG], "n_layers") else {}
            options = ({} if getattr(value[DEBUG], "causal", True) else {"task__kind": "masked_lm"}) | options
        else:
            sizes = sizes | {"n_layers": LAYERS} | ({"dim": WIDE} if kind == "adapter" else {})
        samples = 8 // task.rows_per_sample
        ranks = self.plan.get(SHARD, 1) * self.plan.get(REPLICATE, 1)
        job = JOB | {"training.global_batch_size": samples, "training.local_batch_size": samples // ranks}
        job |= {"model.name": name, "model.overrides": show(sizes), KINDS[kind][2]: self.item.name} | self.plan
        job |= {f"{TABLES[kind]}.{key}": text for key, text in self.item.options}
        job |= {key.replace("__", "."): option for key, option in options.items()}
        return [f"--{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in job.items()]

    def obstacle(self) -> str:
        """Return why `torchtitan check` refuses the row's plan, or the job that it resumes; "" if it does not."""
        faults = check(load(self.arguments()), self.ranks, "cpu")
        is_job = self.name == "save and resume"
        faults = [fault for fault in faults if is_job or fault.key in self.plan or fault.key.startswith("parallelism.")]
        return str(faults[0]).removeprefix("the job: ") if faults else ""


def items_of(target: str) -> list[Item]:
    """Return what an installed package brings by its entry points, or the one item of "module:Name".

    Raises JobError if it brings nothing.
    """
    if ":" in target:
        value, name = _imported(target), target.partition(":")[2].rpartition(".")[2]
        kind = next((kind for kind, (_, cls, _) in KINDS.items() if cls is not object and isinstance(value, cls)), "")
        types = [cls.__name__ for _, cls, _ in KINDS.values() if cls is not object]
        if isinstance(value, type):
            raise JobError(
                f"{target} is a class; give the {', '.join(types[:-1])} or {types[-1]} that its entry point leads to"
            )
        if not kind and not (isinstance(value, FunctionType) and _takes(value, 0.0, 0.0)):
            described = "a function of other arguments" if callable(value) else f"a {type(value).__name__}"
            raise JobError(f"{target}: given {described}; allowed: {', '.join(types)}, or a function f(p, cycles)")
        return [Item(kind or "schedule", name, target)]
    items = [
        Item(kind, name, point.value)
        for kind, (registry, _, _) in KINDS.items()
        for name, points in installed_entries(registry.group).items()
        for point in points
        if _plain(target) in (_plain(package_of(point)), _plain(point.value.partition(":")[0].partition(".")[0]))
    ]
    if items:
        return items
    groups = ", ".join(registry.group for registry, _, _ in KINDS.values())
    try:
        metadata.distribution(target)
    except metadata.PackageNotFoundError:
        raise JobError(f"{target}: no installed package of this name; install it, or write MODULE:NAME") from None
    raise JobError(f"{target}: it brings nothing to check; allowed: entry points of {groups}")


def with_options(items: list[Item], assignments: list[str]) -> Item:
    """Return the only item with these options of the form NAME=VALUE. JobError if it does not have them."""
    if len(items) > 1 or items[0].kind not in TABLES:
        raise JobError("--options: allowed: for one task, optimizer or adapter; choose it with --only KIND:NAME")
    pairs = [assignment.partition("=") for assignment in assignments]
    for name, sign, value in pairs:
        if not (name.strip() and sign and value.strip()):
            raise JobError(f"--options: given {name + sign + value}; allowed: NAME=VALUE")
    item = replace(items[0], options=tuple((name.strip(), value.strip()) for name, _, value in pairs))
    row = Row(item, "FSDP2 2")
    for fault in check(load(row.arguments()), row.ranks, "cpu"):
        if f"{fault.key}.".startswith(f"{TABLES[item.kind]}."):
            raise JobError(f"--options: {str(fault).removeprefix('the job: ')}")
    return item


def _arguments(field: str, spec: Any) -> dict[str, str]:
    """Return argument -> where the spec says it, for what a field of a spec names; nothing if it says none."""
    if field == "group_of" or not isinstance(spec, OptimizerSpec | TaskSpec):
        return {}
    arguments = dict.fromkeys(spec.options, "options")
    if isinstance(spec, OptimizerSpec):
        flags = [flag for flags in spec.implementations.values() for flag in flags]
        arguments |= {"lr": "a job"} | dict.fromkeys(spec.shared, "shared") | dict.fromkeys(flags, "implementations")
    return arguments


def _misfit(constructor: Callable[..., Any], arguments: Mapping[str, str]) -> str:
    """Return why a constructor cannot be called with a first argument and these by name; "" if it can."""
    try:
        parameters = dict(list(signature(constructor).parameters.items())[1:])
    except ValueError:  # one in native code
        return ""
    except TypeError as error:
        return str(error)
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, source in arguments.items():
        if name not in parameters and not takes_all:
            return f"{source} has {name}, which the constructor does not take"
    for name, parameter in parameters.items():
        required = parameter.default is Parameter.empty and "VAR" not in parameter.kind.name
        if arguments and required and name not in arguments:
            return f"the constructor needs {name}, which options lacks"
    return ""


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported(place: str, label: str = "") -> Any:
    try:
        return resolve_name(place)
    except Exception as error:  # foreign code may raise any type
        raise JobError(
            f"{label}{place}: cannot be imported ({type(error).__name__}: {error}); mend the package"
        ) from error


def rows_of(item: Item) -> list[Row]:
    """Return the rows of an item."""
    plans = () if item.kind == "schedule" else [name for name in PLANS if name not in NOT_FOR.get(item.kind, ())]
    return [Row(item, name) for name in (*CHECKS[item.kind], *plans)]
