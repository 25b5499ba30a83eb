"""`torchtitan import`: convert another program's command line or options file to a job."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from torchtitan.checkpoint.folders import replace_file
from torchtitan.commands.check import fewest_ranks
from torchtitan.commands.upgrade import as_file
from torchtitan.config.job import JobConfig
from torchtitan.config.layers import layer_of
from torchtitan.config.manager import assemble
from torchtitan.config.options import ConfigError, hint, show
from torchtitan.core.errors import JobError
from torchtitan.importers import SOURCES, launchers
from torchtitan.importers.command_line import CommandLine, parse, split
from torchtitan.launch import launch
from torchtitan.launcher.run_folder import IMPORTED
from torchtitan.process.exit import REFUSED
from torchtitan.process.ranks import likely_device
from torchtitan.rules import check

USAGE = """\
usage: torchtitan import [--from SOURCE] [--world-size N] [--run] "COMMAND LINE"

Prints the job (TOML) that another program's command line means, or its file of options (a path, and flags behind it),
with what is otherwise here in comments at its head. The words of the line may also be given one by one, behind the
options of this command.
  --from SOURCE    whose line it is (default: told by the script that it runs): {sources}
  --world-size N   ranks that it runs on (default: what the line tells torchrun)
  --run            write the job into its folder, as imported.toml, and train it, or measure what the line measures
Exit code: 0 if the job can start, 2 where a flag has no draft here, or the job is one that cannot start."""
EVALUATE = "torchtitan.commands.evaluate:main"
"""Imported by name on demand, as it needs torch."""


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv) or not argv:
        sources = "".join(f"\n      {name:8} {source}: {source.description}" for name, source in SOURCES.items())
        print(USAGE.format(sources=sources))
        return 0 if argv else REFUSED
    flags, line_words = _own_flags(argv)
    line = parse(split(line_words))
    if "--world_size" in flags:
        line = replace(line, ranks=int(flags["--world_size"]))
    text, config, measures = translate(line, flags.get("--from"))
    if "--run" not in flags:
        print(text, end="")
    ranks = line.ranks or fewest_ranks(config)
    if faults := check(config, ranks, likely_device()):
        print("translated; but the job cannot start as it is:", *faults, sep="\n", file=sys.stderr)
        return REFUSED
    return _run(text, config, ranks, measures) if "--run" in flags else 0


def _own_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the flags of this command and the words of the imported command line.

    Flags may precede the line, or follow it if it is quoted as one word.
    """
    flags: dict[str, str] = {}
    line_words: list[str] = []
    remaining = list(argv)
    while remaining:
        name, equals, value = remaining[0].partition("=")
        name = name.replace("-", "_").replace("__", "--", 1)
        if not name.startswith("--") or (line_words and not any(" " in line_word for line_word in line_words)):
            line_words.append(remaining.pop(0))  # everything after the first word belongs to the line
            continue
        if name not in ("--from", "--world_size", "--run") or (name == "--run" and equals):
            raise JobError(f"torchtitan import: no option {remaining[0]!r}; allowed: --from, --world-size, --run")
        remaining.pop(0)
        flags[name] = "" if name == "--run" else value if equals else (remaining.pop(0) if remaining else "")
    if not flags.get("--world_size", "1").isdecimal() or int(flags.get("--world_size", 1)) < 1:
        raise JobError(f"--world-size: given {show(flags['--world_size'])}; allowed: a whole number >= 1")
    return flags, line_words


class Translation(NamedTuple):
    """A job file, its job, and the arguments for `torchtitan evaluate` if the line only evaluates."""

    text: str
    config: JobConfig
    measures: list[str] | None


def translate(line: CommandLine, source: str | None) -> Translation:
    """Translate a command line. Raises ConfigError with all options that cannot be translated."""
    name = source or next((name for name, entry in SOURCES.items() if entry.matches(line)), None)
    if name is None or name not in SOURCES:
        sources = ", ".join(f"{name} ({entry})" for name, entry in SOURCES.items())
        near = hint(name or line.script, [*SOURCES, *(entry.script for entry in SOURCES.values() if entry.script)])
        raise JobError(
            f"{name or line.script}: not one that is read; allowed: {sources}; {near or 'say whose it is, --from'}"
        )
    draft = resolve_name(SOURCES[name].reader)(line)
    launchers.add(line, draft, SOURCES[name].uses_accelerate)
    layer = layer_of(draft.source, draft.values.items())
    if faults := [*draft.faults, *layer.all_faults()]:
        raise ConfigError(faults)
    origin = line.script if line.script == line.config else f"a command line of {line.script}"
    head = [f"Translated from {origin} ({name}).", *draft.notes]
    if draft.evaluate_args:
        head.append(f"it trains nothing: torchtitan evaluate {shlex.join(draft.evaluate_args)} --config THIS_FILE")
    return Translation(
        as_file(head, layer.values) + "\n", assemble(layer.values, ["the translation"]), draft.evaluate_args
    )


def _run(text: str, config: JobConfig, ranks: int, measures: list[str] | None) -> int:
    path = Path(config.job.dump_folder, IMPORTED)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror}); give another --save_dir") from None
    if measures:
        return resolve_name(EVALUATE)([*measures, "--config", str(path)])
    print(f"{path}: on {ranks} rank{'s' if ranks > 1 else ''}")
    return launch(ranks, ["--job.config_file", str(path)])
