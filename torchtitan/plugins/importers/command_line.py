"""The options of `torchtitan import`. Needs no torch."""

import argparse

from torchtitan.commands.command_parser import CommandParser, OneOf, whole_number
from torchtitan.plugins.importers import SOURCES


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
