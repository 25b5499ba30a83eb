"""Options of a job that name a source on the Hugging Face Hub, and their folders in the client's cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli

from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError, Fault, show
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, read_file
from torchtitan.core.hub import is_hub_source, local_path, recorded_commits

PURPOSES = {
    ("model", "hf_folder"): "sizes",
    ("model", "tokenizer_path"): "tokenizer",
    ("checkpoint", "initial_load_path"): "weights",
    ("adapter", "initial_path"): "weights",
    ("dpo", "reference"): "weights",
    ("training", "dataset_path"): "records",
    ("validation", "dataset_path"): "records",
}
"""What a source is for (core/hub.py), by section and option. The sources of a mixture have options of their own."""
JOB = "config.toml"
LARGEST_JOB = 2**20


def with_local_folders(config: JobConfig) -> JobConfig:
    """Return the job with the local folders of its sources. Raises ConfigError if one is not to be had.

    A run that is started again takes the commits that it began with, which its config.toml holds.
    """
    faults: list[Fault] = []
    began_with: dict[str, Any] | None = None

    def local(section: str, name: str, text: str, purpose: str, number: int | None = None) -> str:
        nonlocal began_with
        began_with = _recorded(config) if began_with is None else began_with
        key = f"{section}.{name}" if number is None else f"{section}.sources[{number}].{name}"
        try:
            return local_path(text, purpose, recorded_commits(_values(began_with.get(section), name, number)))
        except JobError as error:
            faults.append(Fault("", key, show(text), "", str(error).removeprefix(f"{text}: ")))
            return text

    resolved = config
    for (section, name), purpose in PURPOSES.items():
        part = getattr(resolved, section, None)
        if part is None:  # another job class, of a test
            continue
        changes: dict[str, Any] = {}
        if is_hub_source(value := getattr(part, name)):
            changes[name] = local(section, name, value, purpose)
        sources = part.sources if name == "dataset_path" else []
        if any(is_hub_source(source.dataset_path) for source in sources):
            changes["sources"] = [
                replace(source, dataset_path=local(section, name, source.dataset_path, purpose, number))
                if is_hub_source(source.dataset_path)
                else source
                for number, source in enumerate(sources)
            ]
        if changes:
            resolved = replace(resolved, **{section: replace(part, **changes)})
    if faults:
        raise ConfigError(faults)
    return resolved


def _recorded(config: JobConfig) -> dict[str, Any]:
    """Return the tables of the config.toml of the job's run; empty if it has none that can be read."""
    try:
        return tomli.loads(read_file(Path(config.job.dump_folder, JOB), LARGEST_JOB).decode(errors="replace"))
    except (FileError, tomli.TOMLDecodeError):
        return {}


def _values(table: Any, name: str, number: int | None) -> list[object]:
    """Return the values of an option in a section's table; of a source, those of all, with the one of its number last.

    Several options may name one repository at different commits.
    """
    table = table if isinstance(table, dict) else {}
    if number is None:
        return [table.get(name)]
    sources = table.get("sources")
    values = [source.get(name) for source in sources if isinstance(source, dict)] if isinstance(sources, list) else []
    return values + values[number : number + 1]
