"""The options of the commands that inspect a run after it has ended, or while it trains. Needs no torch."""

from collections.abc import Callable
from pathlib import Path

from torchtitan.commands.command_parser import CommandParser, number_from_0

FOLDER = "a run's dump_folder, a checkpoint, an export, or a Hugging Face folder"


def _plot() -> CommandParser:
    parser = CommandParser("plot")
    parser.add_argument("folder", type=Path, help="a run's dump_folder, or its metrics.jsonl")
    parser.add_argument("--to", type=Path, metavar="FILE", help="file to draw into: .html, .svg or .png")
    return parser


def _diff() -> CommandParser:
    parser = CommandParser(
        "diff",
        "Two runs are compared by options, logged steps and checkpoints, as far as both have them; else the weights. "
        "Options of logging and saving are left out. Exit code: 0 if all is equal, 1 if not, 2 if nothing can be "
        "compared.",
    )
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help=FOLDER)
    tolerance = "largest difference that counts as equal, relative to a tensor's or metric's largest value (default 0)"
    parser.add_argument("--tolerance", type=number_from_0, default=0.0, metavar="X", help=tolerance)
    parser.add_argument("--json", action="store_true", help="print one JSON object with all differences")
    return parser


def _checkpoints() -> CommandParser:
    parser = CommandParser("checkpoints")
    parser.add_argument("folder", help="a run's dump_folder, or the folder of its checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    return parser


RUN_PARSERS: dict[str, Callable[[], CommandParser]] = {
    "plot": _plot,
    "diff": _diff,
    "checkpoints": _checkpoints,
}
