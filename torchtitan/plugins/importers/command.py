"""`torchtitan import`: convert another program's command line or options file to a job. No torch."""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from torchtitan.checkpoint.folders import replace_file
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.command_parser import CommandParser, OneOf, whole_number
from torchtitan.config.job import JobConfig
from torchtitan.config.layers import as_file, layer_of
from torchtitan.config.manager import assemble
from torchtitan.config.options import ConfigError, hint
from torchtitan.core.errors import JobError
from torchtitan.launch import launch
from torchtitan.launcher.run_folder import IMPORTED_JOB_FILE
from torchtitan.plugins.importers import SOURCES, CommandLine, launchers, parse, split
from torchtitan.plugins.importers.programs import program_of, refuse_other_file
from torchtitan.process.exit import REFUSED
from torchtitan.process.ranks import count_ranks, likely_device
from torchtitan.rules import check
from torchtitan.rules.loading import fewest_ranks

EVALUATE = "torchtitan.commands.evaluate:main"
"""Imported by name on demand, as it needs torch."""


def main(argv: list[str]) -> int:
    options, _ = parse_command("import", argv)
    line_args = options.line
    if line_args and " " in line_args[0]:  # a line quoted as one word may precede the options
        later, _ = parse_command("import", [*_given_options(argv, line_args), *line_args[1:]])
        if later.line:
            raise JobError(f"torchtitan import: one argument too many: {later.line[0]}")
        options, line_args = later, line_args[:1]
    elif "--run" in line_args:  # after a line of several words; no program has such a flag
        options.run, line_args = True, [arg for arg in line_args if arg != "--run"]
    line = parse(split(line_args))
    if options.world_size:
        line = replace(line, ranks=options.world_size)
    elif options.run and line.ranks is None:  # where the other program would start all GPUs
        line = replace(line, ranks=count_ranks() if likely_device() == "cuda" else 1)
    text, config, measures = translate(line, options.source)
    if not options.run:
        print(text, end="")
    fewest = fewest_ranks(
        config.parallelism
    )  # without a number of ranks one of these two has to do: a single rank shards nothing
    ranks = line.ranks or fewest
    if faults := min((check(config, n, likely_device()) for n in (ranks, line.ranks or 2 * fewest)), key=len):
        print("translated, but the job cannot start without changes:", *faults, sep="\n", file=sys.stderr)
        return REFUSED
    return _run(text, Path(config.job.dump_folder), ranks, measures) if options.run else 0


def _given_options(argv: list[str], line: list[str]) -> list[str]:
    """Return the arguments of `torchtitan import` that precede the line."""
    return argv[: len(argv) - len(line)]


class Translation(NamedTuple):
    """A job file, its job, and the arguments for `torchtitan evaluate` if the line only evaluates."""

    text: str
    config: JobConfig
    measures: list[str] | None


def translate(line: CommandLine, source: str | None) -> Translation:
    """Translate a command line. Raises ConfigError with all options that cannot be translated."""
    by_script = sorted(SOURCES.items(), key=lambda item: item[1].script is None)  # one for any script comes after these
    name = source or next((name for name, entry in by_script if entry.matches(line)), None)
    if name is None and (program := program_of(line)):
        name = next((name for name, entry in SOURCES.items() if entry.program == program), program)
    if name is None or name not in SOURCES:
        sources = ", ".join(f"{name} ({entry})" for name, entry in SOURCES.items())
        near = hint(name or line.script, [*SOURCES, *(entry.script for entry in SOURCES.values() if entry.script)])
        raise JobError(
            f"{name or line.script}: not a supported program; allowed: {sources}; "
            f"{near or 'name the program with --from'}"
        )
    if source and SOURCES[name].program:
        refuse_other_file(line, SOURCES[name].program)
    draft = resolve_name(SOURCES[name].reader)(line)
    launchers.add(line, draft, SOURCES[name].uses_accelerate)
    layer = layer_of(draft.source, draft.values.items())
    if faults := [*draft.faults, *layer.all_faults()]:
        raise ConfigError(faults)
    origin = line.script if line.script == line.config else f"a command line of {line.script}"
    head = [f"Translated from {origin} ({name}).", *draft.notes]
    if draft.evaluate_args:
        head.append(f"this only evaluates: torchtitan evaluate {shlex.join(draft.evaluate_args)} --config THIS_FILE")
    return Translation(
        as_file(head, layer.values) + "\n", assemble(layer.values, ["the translation"]), draft.evaluate_args
    )


def _run(text: str, folder: Path, ranks: int, measures: list[str] | None) -> int:
    path = folder / IMPORTED_JOB_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text)
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror}); give another --save_dir") from None
    if measures:
        return resolve_name(EVALUATE)([*measures, "--config", str(path)])
    print(f"{path}: on {ranks} rank{'s' if ranks > 1 else ''}")
    return launch(ranks, ["--job.config_file", str(path)])


def import_parser() -> CommandParser:
    parser = CommandParser(
        "import",
        "The job is printed as TOML; comments at its head list options with a different meaning here. Exit code: "
        "0 if the job can start, 2 if a flag has no meaning here or the job cannot start.",
    )
    sources = OneOf(SOURCES)
    parser.add_argument("--from", dest="source", type=sources, metavar="SOURCE", help="reader (default: by the script)")
    ranks = "ranks of the job (default: as in the command line)"
    parser.add_argument("--world-size", type=whole_number(1), metavar="N", help=ranks)
    parser.add_argument("--run", action="store_true", help="write the job into its folder as imported.toml, and run it")
    line = "the command line, quoted or as separate words, or an options file and further flags"
    parser.add_argument("line", nargs=argparse.REMAINDER, metavar="COMMAND LINE", help=line)
    readers = SOURCES.items()
    parser.epilog = "Sources: " + "; ".join(f"{name}, {reader}: {reader.description}" for name, reader in readers)
    return parser
