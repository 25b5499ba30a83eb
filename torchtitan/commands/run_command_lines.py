"""The options of the commands that inspect a run after it has ended, or while it trains. Needs no torch."""

from collections.abc import Callable
from pathlib import Path

from torchtitan.commands.command_parser import CommandParser

FOLDER = "a run's dump_folder, a checkpoint, an export, or a Hugging Face folder"


def _plot() -> CommandParser:
    parser = CommandParser("plot")
    parser.add_argument("folder", type=Path, help="a run's dump_folder, or its metrics.jsonl")
    parser.add_argument("--to", type=Path, metavar="FILE", help="file to draw into: .html, .svg or .png")
    return parser


def _checkpoints() -> CommandParser:
    parser = CommandParser("checkpoints")
    parser.add_argument("folder", help="a run's dump_folder, or the folder of its checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    return parser


RUN_PARSERS: dict[str, Callable[[], CommandParser]] = {
    "plot": _plot,
    "checkpoints": _checkpoints,
}
