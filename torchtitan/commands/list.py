"""`torchtitan list`: print all names for a job's options, built in or from installed packages. Needs no torch."""

import sys
from typing import Any

from pydantic_core import PydanticUndefined

from torchtitan.adapters import ADAPTERS
from torchtitan.commands.command_lines import parse_command
from torchtitan.config.options import describe, show
from torchtitan.core.callbacks import CALLBACKS
from torchtitan.core.files import shipped_jobs
from torchtitan.core.registry import Registry, faults_of_packages, installed_entries, package_of
from torchtitan.datasets import DATASETS
from torchtitan.datasets.tokenizer import TOKENIZERS
from torchtitan.losses.tasks import TASKS
from torchtitan.lr_schedules import DECAYS
from torchtitan.metrics.trackers import TRACKERS
from torchtitan.models import SIZES
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.rules.callbacks import job_options

KINDS: dict[str, tuple[str, Registry[Any]]] = {
    "models": ("model.name, with flavors for model.flavor", SIZES),
    "datasets": ("training.dataset, validation.dataset", DATASETS),
    "tokenizers": ("model.tokenizer_path, in addition to paths of files", TOKENIZERS),
    "tasks": ("task.kind, with its task.options", TASKS),
    "optimizers": ("optimizer.name, with its optimizer.options", OPTIMIZERS),
    "adapters": ("adapter.kind", ADAPTERS),
    "trackers": ("metrics.trackers", TRACKERS),
    "callbacks": ("callbacks.use, with their callbacks.options", CALLBACKS),
    "schedules": ("lr_scheduler.decay_type, in addition to constant", DECAYS),
}
JOBS = "jobs"
"""A kind without a registry: the files that come with the package."""
KIND_NAMES = (*KINDS, JOBS)
REFUSED = 2


def main(argv: list[str]) -> int:
    options, _ = parse_command("list", argv)
    faults: list[str] = []
    for kind in options.kinds or KIND_NAMES:
        if kind == JOBS:
            print(f"{JOBS}  (torchtitan train NAME, --job.config_file NAME)", *shipped_jobs(), sep="\n  ")
            continue
        where, registry = KINDS[kind]
        broken = faults_of_packages(registry)
        faults += broken.values()
        print(f"{kind}  ({where})")
        for name in registry:
            if name in registry.data:
                print(f"  {name}{_more(kind, registry[name])}")
            elif name not in broken:
                package = package_of(installed_entries(registry.group)[name][0])
                print(f"  {name}{_more(kind, registry[name])}  [{package}]")
    print(*faults, sep="\n", end="\n" * bool(faults), file=sys.stderr)
    return REFUSED if faults else 0


def _default(value: Any) -> str:
    return "must be given" if value is PydanticUndefined else f"default {show(value)}"


def _more(kind: str, value: Any) -> str:
    if kind == "models":
        return f": {', '.join(value)}"
    if kind in ("optimizers", "tasks", "callbacks"):
        entries = job_options(value) if kind == "callbacks" else value.options
        options = [f"{key} ({describe(o.annotation)}; {_default(o.default)})" for key, o in entries.items()]
        return f": {', '.join(options)}" * bool(options)
    return ""
