"""Nothing of the public interface (docs/stability.md) is removed: names, options, entry points, formats, exit codes."""

import dataclasses
import hashlib
import inspect
import json
import re
import signal

import pytest

from tests.support import jobs
from tests.support.jobs import ROOT
from tests.support.pool import run_alone
from torchtitan import adapters, engine, lr_schedules, models, optimizers
from torchtitan.checkpoint import layout
from torchtitan.commands import COMMANDS
from torchtitan.config.options import options
from torchtitan.core import plugins
from torchtitan.core.callbacks import CALLBACKS
from torchtitan.losses import tasks
from torchtitan.process import exit as exits
from torchtitan.training.reference_logprobs import sizes_of_identity

RECORD = ROOT / "tests/public_interface.json"
"""The interface of the last version. `python -m tests.repository.test_public_interface` adds names; it removes none."""
PAGE = (ROOT / "docs/python.md").read_text()
REGISTRIES = (adapters.ADAPTERS, CALLBACKS, lr_schedules.DECAYS, models.SIZES, optimizers.OPTIMIZERS, tasks.TASKS)


def members(value: object) -> list[str]:
    """Return the documented attributes of a class with the arguments of its methods, or the arguments of a function."""
    if not inspect.isclass(value):
        return list(inspect.signature(value).parameters) if inspect.isfunction(value) else []
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    for name, member in inspect.getmembers(value):
        if name.startswith("_") or name in dir(Exception) or not re.search(rf"\b{name}\b", PAGE):
            continue
        call = member if inspect.isfunction(member) or inspect.ismethod(member) else None
        names += (
            [f"{name}({argument})" for argument in inspect.signature(call).parameters if argument != "self"]
            if call
            else []
        )
        names.append(name)
    return names


def interface() -> dict[str, list[str]]:
    """Return the names of the public interface, by kind."""
    codes = {name: value for name, value in vars(exits).items() if isinstance(value, int) and name.isupper()}
    stops = {signal.Signals(number).name: 128 + number for number in exits.STOP_SIGNALS}
    return {
        "python": [f"{name}.{member}" for name in engine.__all__ for member in ["", *members(getattr(engine, name))]],
        "options": list(options()),
        "entry points": [*(registry.group for registry in REGISTRIES), plugins.IMPORTERS],
        "names": [f"{registry.group}: {name}" for registry in REGISTRIES for name in registry.data],
        "commands": list(COMMANDS),
        "exit codes": [f"{name} {code}" for name, code in (codes | stops).items()],
        "checkpoints": [f"format {layout.FORMAT}", layout.MANIFEST, layout.step_name(1)],
        # a size that is added belongs in LATER_SIZES of reference_logprobs.py: else files of references do not fit
        "sizes": [
            f"{family} {flavor} {digest(args)}"
            for family, flavors in models.SIZES.items()
            for flavor, args in flavors.items()
        ],
    }


def digest(args: object) -> str:
    """Return a short digest of a model's sizes, as files of a run hold them."""
    return hashlib.sha256(json.dumps(sizes_of_identity(args), sort_keys=True, default=str).encode()).hexdigest()[:16]


def missing(current: dict[str, list[str]]) -> list[str]:
    """Return what the record has and the code lacks."""
    record = json.loads(RECORD.read_text())
    return [f"{kind}: {name}" for kind, names in record.items() for name in names if name not in current.get(kind, [])]


def test_nothing_is_removed():
    lacking = missing(interface())
    assert not lacking, "programs, jobs or tools of others use these: keep them, under their old name if they move"


def test_what_is_new_is_recorded():
    record = json.loads(RECORD.read_text())
    unrecorded = {kind: sorted(set(names) - set(record[kind])) for kind, names in interface().items()}
    assert not any(unrecorded.values()), (
        "run `python -m tests.repository.test_public_interface`, if they are meant to be public"
    )


@pytest.mark.parametrize("kind", ["python", "options", "entry points", "exit codes", "sizes"])
def test_a_removed_name_is_noticed(kind):
    current = interface()
    removed = current[kind].pop()
    assert missing(current) == [f"{kind}: {removed}"]


def test_the_fields_of_metrics_stay(tmp_path):
    steps = dict(training__steps=2, validation__enable=True, validation__freq=2, validation__steps=1)
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **steps)
    run_alone(jobs.train, argv)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    fields = {name for row in rows for name in row}
    page = (ROOT / "docs/stability.md").read_text()
    documented = set(page.split("<!-- metrics -->")[1].replace("`", " ").replace(",", " ").split())
    assert documented <= fields


def write() -> None:
    """Add what is new to the record."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    joined = {kind: sorted({*record.get(kind, []), *names}) for kind, names in interface().items()}
    RECORD.write_text(json.dumps(joined, indent=1) + "\n")


if __name__ == "__main__":
    write()
