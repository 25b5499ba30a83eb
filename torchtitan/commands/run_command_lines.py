"""The options of the commands that inspect a run after it has ended, or while it trains. Needs no torch."""

from collections.abc import Callable
from pathlib import Path

from torchtitan.commands.command_parser import CommandParser, number_from_0, whole_number

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


def _replay() -> CommandParser:
    parser = CommandParser("replay", "One process makes the step, whatever the plan of the run. Nothing is written.")
    parser.add_argument("run", help="a run's dump_folder")
    parser.add_argument("--step", type=whole_number(1), required=True, metavar="N", help="step, counted from 1")
    parser.add_argument(
        "--rank", type=whole_number(0), metavar="R", help="show only the samples of this rank of the run"
    )
    samples = "samples to print as text, highest losses first (default 3)"
    parser.add_argument("--samples", type=whole_number(0), default=3, metavar="N", help=samples)
    tokens = "tokens of each printed sample (default 200)"
    parser.add_argument("--tokens", type=whole_number(1), default=200, metavar="N", help=tokens)
    return parser


def _report() -> CommandParser:
    parser = CommandParser("report", "The page fetches nothing. Needs pip install 'torchtitan-toml[report]'.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's dump_folder")
    parser.add_argument(
        "--to", type=Path, default=Path("report.html"), metavar="FILE", help="page (default report.html)"
    )
    return parser


def _why_parser() -> CommandParser:
    parser = CommandParser("why", "It reads the records that the run has logged, and says what these cannot tell.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's dump_folder")
    gpu = "hardware of the run: a name of `torchtitan plan --help`, or a file (default: by the device that it recorded)"
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    parser.add_argument("--json", action="store_true", help="print one JSON object: causes, remedies and the lines")
    return parser


RUN_PARSERS: dict[str, Callable[[], CommandParser]] = {
    "plot": _plot,
    "report": _report,
    "why": _why_parser,
    "diff": _diff,
    "replay": _replay,
    "checkpoints": _checkpoints,
}
