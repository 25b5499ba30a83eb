"""Load a JobConfig from TOML files and the arguments of a command line, and write it back. Imports no torch.

Precedence: environment (only memory.limit) > command line > later file > earlier file or `extends` > defaults. A later
value replaces an earlier one completely, also lists and tables. Only entries of a free table that the command line sets
one by one (`--optimizer.options.rank=64`) leave the other entries. Each file and the command line are checked
separately, so all faults are reported at once with their source; a wrong value is a fault even if it is overridden.
"""

from collections.abc import Iterable, Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from torchtitan.config.changes import Moved, renamed
from torchtitan.config.hub_sources import with_local_folders
from torchtitan.config.job import JobConfig, as_dict
from torchtitan.config.layers import (
    COMMAND_LINE,
    Entries,
    Layer,
    assemble,
    joined_entries,
    layer_of,
    merged,
    of_environment,
    walk,
)
from torchtitan.config.options import (
    YES_OR_NO,
    ConfigError,
    Fault,
    describe,
    free_table,
    hint,
    members,
    option_at,
    options,
    parse_entry,
    parse_value,
    print_help_if_requested,
    show,
)
from torchtitan.core.cadence import NO_LIMIT
from torchtitan.core.files import FileError, find_job_file, read_file, shipped_jobs

_ALIASES = dict.fromkeys(("config", "config_file", "config-file", "job.config"), "job.config_file")


def _is_job(argument: str) -> bool:
    return not argument.startswith("-") and (argument.endswith(".toml") or argument in shipped_jobs())


def split_job_options(argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into options of a job, each with its value, and all others."""
    job_options: list[str] = []
    command_arguments: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        is_job_option = argument.startswith("--") and "." in argument.partition("=")[0]
        (job_options if is_job_option else command_arguments).append(argument)
        if is_job_option and _value_follows(argument, remaining):
            job_options.append(remaining.pop(0))
    return job_options, command_arguments


def _value_follows(argument: str, remaining: list[str]) -> bool:
    """Return True if the first of the remaining arguments is the value of this option."""
    name, equals, _ = argument[2:].partition("=")
    key = name.replace("-", "_")
    if equals or not remaining or _positive(key):
        return False
    return remaining[0].lower() in YES_OR_NO if _is_flag(key) else not remaining[0].startswith("--")


def parse_arguments(argv: list[str]) -> tuple[list[str], Layer]:
    """Parse `job.toml`, `--section.key value`, `--section.key=value`, `--section.flag` and `--section.no-flag`.

    Returns the files and the layer of options.
    """
    pairs: list[tuple[str, Any]] = []
    faults: list[Fault] = []
    files: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        if _is_job(argument):
            files.append(argument)
            continue
        if not argument.startswith("--") or argument == "--":
            remedy = "every option is named; jobs are .toml files, or names of `torchtitan list jobs`"
            faults.append(
                Fault(COMMAND_LINE, "", show(argument), "--section.key value", hint(argument, shipped_jobs()) or remedy)
            )
            continue
        key, equals, text = argument[2:].partition("=")
        key = _ALIASES.get(key, key).replace("-", "_")
        value: Any = text if equals else remaining.pop(0) if _value_follows(argument, remaining) else None
        if not equals and (flag := _positive(key)):
            key, value = flag, False
        elif value is None and _is_flag(key):
            value = True
        if value is None and (key in options() or free_table(key)):
            allowed = describe(options()[key].annotation) if key in options() else "an entry and its value"
            faults.append(Fault(COMMAND_LINE, key, "nothing", allowed, f"write --{key} VALUE"))
        elif key == "job.config_file":
            files.append(value)
        elif earlier := _said_before(key, pairs):
            value = _meaning(key, value)
            faults.append(Fault(COMMAND_LINE, key, f"{show(value)} after {earlier}", "once", "keep one"))
        else:
            pairs.append((key, _meaning(key, value)))
    layer = layer_of(COMMAND_LINE, joined_entries(pairs))
    return files, Layer(COMMAND_LINE, layer.values, faults + layer.faults, layer.old)


def _meaning(key: str, value: Any) -> Any:
    """Parse an argument for this option, or for an entry of a free table."""
    if not isinstance(value, str):
        return value
    if key in options():
        return parse_value(options()[key].annotation, value)
    return parse_entry(key, value) if free_table(key) else value


def _said_before(key: str, pairs: list[tuple[str, Any]]) -> str:
    """Describe an earlier argument for the same option, or for its table or an entry of it; empty if there is none."""
    for other, value in pairs:
        if other == key:
            return show(value)
        if other.startswith(f"{key}.") or key.startswith(f"{other}."):
            return f"{other} = {show(value)}"
    return ""


def _positive(key: str) -> str | None:
    """Return the flag that `section.no_flag` turns off, or None."""
    section, _, last = key.rpartition(".")
    flag = f"{section}.{last[3:]}"
    return flag if last.startswith("no_") and (_is_flag(flag) or renamed(flag)) else None


def _is_flag(key: str) -> bool:
    """Return True for flags, by their current or older names."""
    if key not in options() and isinstance(moved := renamed(key), Moved):
        key = moved.to
    return key in options() and members(options()[key].annotation) == [bool]


__all__ = ["ConfigError", "Fault", "load", "to_toml"]

PYTHON = "Python"
"""The source of options that a program sets."""
LONGEST_CHAIN, MOST_FILES = 8, 64
LARGEST_FILE = 2**20
"""Largest job file in bytes. A larger file is given by mistake, and is not read into memory."""
NOT_KEPT = {("job", "config_file"), ("job", "print_config")}
"""Options about loading itself: not part of the resolved job, which stands alone."""


def load(argv: list[str]) -> JobConfig:
    """Load the job that the arguments describe (`--job.config_file job.toml --section.key value ...`).

    Raises ConfigError with all faults. `--help` prints help and exits.
    """
    print_help_if_requested(argv)
    return resolve(*read_layers(argv))


def load_from(source: str | Path | Mapping[str, Any] | JobConfig, changes: Mapping[str, Any]) -> JobConfig:
    """Load a job from Python: a file or the name of a shipped job, nested tables, or a job, with changed options.

    `changes`: dotted names of options -> values. Raises ConfigError with all faults.
    """
    files: list[str] = []
    if isinstance(source, str | Path):
        layers = _read_file(find_job_file(expanduser(str(source))), PYTHON, "job.config_file", (), files)
    elif isinstance(source, Mapping | JobConfig):
        layers = [layer_of(PYTHON, walk(dict(source) if isinstance(source, Mapping) else _portable_tables(source)))]
    else:
        fault = Fault(PYTHON, "", f"a {type(source).__name__}", "a TOML file, a mapping of tables or a JobConfig", "")
        layers = [Layer(PYTHON, {}, [fault], {})]
    return resolve(files, [*layers, layer_of(PYTHON, changes.items())])


def resolve(files: list[str], layers: list[Layer]) -> JobConfig:
    """Return the job of layers, in rising precedence, and the environment. Raises ConfigError with all faults."""
    layers = [*layers, *of_environment()]
    of_layers = [(layer, list(layer.all_faults())) for layer in layers]
    faults = [fault for _, of_layer in of_layers for fault in of_layer]
    values = merged(layer.values for layer in layers)
    if not faults:
        return with_local_folders(assemble(values, files))
    faulty_options = {option_at(fault.key) for fault in faults}
    old = any(layer.old for layer in layers)  # it has to be translated first
    unknown: set[str] = set()
    for layer, of_layer in of_layers:
        unknown = unknown - layer.values.keys() | layer.unknown(of_layer)
    valid_part = None if old else assemble({k: v for k, v in values.items() if k not in faulty_options}, files)
    raise ConfigError(faults, valid_part, frozenset(unknown))


def said_by(argv: list[str]) -> dict[str, str]:
    """Return the source of each option that is set: a file or the command line, or both for entries of a free table."""
    names: dict[str, str] = {}
    for layer in [*read_layers(argv)[1], *of_environment()]:
        for key, value in layer.values.items():
            prefix = f"{names[key]} + " if isinstance(value, Entries) and key in names else ""
            names[key] = prefix + layer.name
    return names


def to_toml(config: JobConfig) -> str:
    """Return the resolved job as TOML. Loading it gives `config` again, except for the options of loading."""
    return tomli_w.dumps(_portable_tables(config))


def _portable_tables(config: JobConfig) -> dict[str, Any]:
    """Return the job's tables, without the options of loading."""
    sections = as_dict(config)
    for section, key in NOT_KEPT:
        sections[section].pop(key, None)
    if isinstance(config, JobConfig) and config.training.steps == NO_LIMIT:
        del sections["training"]["steps"]
    return sections


# Reading


def read_layers(argv: list[str]) -> tuple[list[str], list[Layer]]:
    """Return the files in `argv`, and the layers in rising precedence: each file after its bases, then `argv`."""
    files, command_line = parse_arguments(argv)
    files = [find_job_file(expanduser(file)) for file in files]
    read: list[str] = []
    layers = [layer for file in files for layer in _read_file(file, COMMAND_LINE, "job.config_file", (), read)]
    return files, [*layers, command_line]


def _read_file(name: str, said_by: str, key: str, chain: tuple[Path, ...], read: list[str]) -> list[Layer]:
    """Return the layers of the files that a file extends, then its own layer.

    `said_by` and `key`: the file and option that name it. `read`: all files read so far; the file is appended.
    """
    read.append(name)
    if len(read) > MOST_FILES:  # eight tiny files that each extend the next one eight times would be two million
        fault = Fault(said_by, key, show(name), f"at most {MOST_FILES} files in all", "merge some")
        return [Layer(name, {}, [fault], {})] if len(read) == MOST_FILES + 1 else []  # reported once
    if len(chain) > LONGEST_CHAIN:
        allowed = f"at most {LONGEST_CHAIN} files in a chain of extends"
        return [Layer(name, {}, [Fault(said_by, key, show(name), allowed, "merge some")], {})]
    try:
        path = Path(name).resolve()
        refused = _not_a_job(name, path, said_by, key, chain)
        content = b"" if refused else read_file(path, LARGEST_FILE)
    except FileError as error:
        allowed = f"a regular file of at most {LARGEST_FILE} bytes"
        refused = Fault(said_by, key, f"{show(name)} ({error.reason})", allowed, "give a job's TOML")
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name; RuntimeError: a loop of links
        reason = getattr(error, "strerror", None) or str(error)
        refused = Fault(said_by, key, f"{show(name)} ({reason})", "the path of a readable TOML file", "")
    table = refused or _parse_toml(name, content)
    if isinstance(table, Fault):
        return [Layer(name, {}, [table], {})]

    layers: list[Layer] = []
    bases = table.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        layers.append(Layer(name, {}, [Fault(name, "extends", show(bases), "a file name or a list of them", "")], {}))
        bases = []
    for base in map(expanduser, bases):
        path_from_file = str(Path(name).parent / base) if base.strip() else base
        layers += _read_file(find_job_file(base, path_from_file), name, "extends", (*chain, path), read)
    layers.append(layer_of(name, walk(table)))
    if not chain and not any(layer.values or layer.old or layer.faults for layer in layers):
        # more likely the output of a command that failed than a job of defaults
        remedy = 'write them, or extends = "debug_model" for the job of a first run'
        layers[-1] = Layer(name, {}, [Fault(name, "", "no option at all", "a job's options", remedy)], {})
    return layers


def _not_a_job(name: str, path: Path, said_by: str, key: str, chain: tuple[Path, ...]) -> Fault | None:
    """Return the fault of a file that can be detected before it is read."""
    allowed = "the path of a TOML file"
    if not name.strip():
        return Fault(said_by, key, f"{show(name)} (an empty name)", allowed, "")
    if path.is_dir():
        return Fault(said_by, key, f"{show(name)} (a folder)", allowed, "")
    if not path.exists():
        neighbours = path.parent.glob("*.toml") if path.parent.is_dir() else []
        near = hint(path.name, [*(file.name for file in neighbours), *shipped_jobs()]) or f"looked for it as {path}"
        return Fault(said_by, key, f"{show(name)} (no such file)", allowed, near)
    if path in chain:
        cycle = " -> ".join(p.name for p in (*chain[chain.index(path) :], path))
        return Fault(said_by, key, show(name), "a file that does not extend this one", f"the cycle is {cycle}")
    if said_by != COMMAND_LINE and path.suffix != ".toml":
        # errors quote lines of the file: a stranger's job must not reveal other files of this machine
        return Fault(said_by, key, show(name), "a file with a name in .toml, after following links", "name it so")
    return None


def _parse_toml(name: str, content: bytes) -> dict[str, Any] | Fault:
    """Parse a file. Returns its first fault if it is not TOML."""
    try:
        text = content.decode().removeprefix("\ufeff")  # Windows editors begin a file with a byte order mark
        return tomli.loads(text)
    except UnicodeDecodeError as error:
        text_at_fault = f"byte 0x{content[error.start]:02x} at offset {error.start}, which is not UTF-8"
        return Fault(name, "", text_at_fault, "TOML in UTF-8", "save the file as UTF-8")
    except tomli.TOMLDecodeError as error:
        lines = [*text.split("\n"), ""]
        text_at_fault = f"{show(lines[error.lineno - 1].strip())} in line {error.lineno}, column {error.colno}"
        twice = "the same key or table twice" if error.msg.startswith("Cannot") else "not TOML"
        return Fault(name, "", text_at_fault, "valid TOML", f"{twice}: {error.msg}")
    except RecursionError:
        return Fault(name, "", "brackets in hundreds of brackets", "valid TOML of a job's size", "")
    except ValueError:  # Python's limit on digits
        return Fault(name, "", "a number of thousands of digits", "valid TOML of a job's size", "")
