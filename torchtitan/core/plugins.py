"""The plugins: folders of torchtitan/plugins/ with their own options, rules and commands. The core imports none.

What they add is declared here as an installed package declares it in its metadata (core/registry.py), so that a
checkout needs no installation. A plugin without its folder adds nothing, and an error names it where it is needed.
"""

from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError

FOLDER = Path(__file__).resolve().parents[1] / "plugins"
ADAPTERS, IMPORTERS, SECTIONS, RULES = (f"torchtitan.{name}" for name in ("adapters", "importers", "sections", "rules"))
COMMANDS, PARSERS, COMMAND_OPTIONS = "torchtitan.commands", "torchtitan.parsers", "torchtitan.command_options"
DIALECTS = "torchtitan.dialects"
PLUGINS: dict[str, dict[str, str]] = {
    ADAPTERS: {"neurocache": "torchtitan.plugins.neurocache.spec:SPEC"},
    IMPORTERS: {
        "neurocache": "torchtitan.plugins.neurocache.importer:SOURCE",
        "torchtitan": "torchtitan.plugins.dialects.config_lines:SOURCE",
    },
    SECTIONS: {"adapter.neurocache": "torchtitan.plugins.neurocache.options:NeurocacheOptions"},
    RULES: {"neurocache": "torchtitan.plugins.neurocache.rules"},
    COMMANDS: {"import": "torchtitan.plugins.importers.command:main"},
    PARSERS: {"import": "torchtitan.plugins.importers.command:import_parser"},
    COMMAND_OPTIONS: {
        "--format": "torchtitan.plugins.gguf.export",
        "--tasks": "torchtitan.plugins.eval_tasks.evaluate_tasks",
        "--upgrade": "torchtitan.plugins.dialects.upgrade",
    },
    DIALECTS: {"older_torchtitan": "torchtitan.plugins.dialects:DIALECT"},
}
"""By group and name, "module:attribute", or a module. SECTIONS: dataclasses of options, by their place in the job; in
them TOLD names those that a resume may change. RULES: modules as those of torchtitan/rules/, and with OF_THE_MODEL,
rules that judge the model alone. COMMANDS: functions that run one of commands/__init__.py; PARSERS: their parsers.
COMMAND_OPTIONS: modules that an option of a command runs. DIALECTS: see config/changes.py."""


def _folder_of(place: str) -> str:
    return place.partition(":")[0].split(".")[2]


@cache
def plugin_entries(group: str) -> dict[str, EntryPoint]:
    """Return what the plugins of this installation add to a group, by name, without an import."""
    return {
        name: EntryPoint(name, place, group)
        for name, place in PLUGINS.get(group, {}).items()
        if (FOLDER / _folder_of(place) / "__init__.py").is_file()
    }


def place_of(group: str, name: str) -> str:
    """Return what a plugin adds under this name, as "module:attribute"; empty if there is none."""
    entry = plugin_entries(group).get(name)
    return "" if entry is None else entry.value


def missing_plugin(name: str) -> str:
    """Return the remedy for a name, or an option, of a plugin that this installation lacks; empty for any other."""
    for group, places in PLUGINS.items():
        for owned, place in places.items():
            if f"{name}.".startswith(f"{owned}.") and owned not in plugin_entries(group):
                plugin = f"torchtitan/plugins/{_folder_of(place)}"
                return f"it needs the plugin {plugin}, which this installation lacks: install torchtitan-toml with it"
    return ""


def loaded_plugin(group: str, name: str) -> Any:
    """Return what a plugin adds to a group under this name. Raises JobError if this installation lacks it."""
    if remedy := missing_plugin(name):
        raise JobError(f"{name}: {remedy}")
    return plugin_entries(group)[name].load()
