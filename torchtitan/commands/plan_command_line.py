"""The options of `torchtitan plan`. Needs no torch."""

import argparse
import re
from pathlib import Path

from torchtitan.commands.command_parser import CommandParser, number_above_0, size_in_bytes, whole_number
from torchtitan.core.hardware import known_hardware
from torchtitan.metrics.goodput import GPU_HOURS_PER_FAILURE
from torchtitan.planner.failures import RESTART_SECONDS

DURATIONS = {"min": 60.0, "h": 3600.0, "d": 86400.0}
USUAL_GPU = "h100-80"
"""Hardware of `estimate --traffic` without --gpu."""


def plan_parser() -> CommandParser:
    parser = CommandParser(
        "plan", "The first plan is the fastest. Exit code: 0 if there is a plan, 2 if none is legal.", "job"
    )
    count = whole_number(1)
    parser.add_argument("--gpus", type=count, required=True, metavar="N", help="number of GPUs")
    gpu = f"{', '.join(known_hardware())}, or a file (default {USUAL_GPU})"
    parser.add_argument("--gpu", default=USUAL_GPU, metavar="NAME", help=gpu)
    parser.add_argument("--machine", type=count, metavar="N", help="GPUs in a machine (default: the hardware's)")
    memory = "memory of a GPU, with a unit as in 80GiB (default: the hardware's)"
    parser.add_argument("--memory", type=size_in_bytes, metavar="SIZE", help=memory)
    tokens = "tokens of the whole run, as 15e12 (default: the job's)"
    parser.add_argument("--tokens", type=number_above_0, metavar="X", help=tokens)
    price = "price of a GPU for an hour, in any currency (default: the hardware's)"
    parser.add_argument("--price", type=number_above_0, metavar="X", help=price)
    deadline = "longest duration of the run, as 30d, 12h or 45min"
    parser.add_argument("--deadline", type=_duration, metavar="TIME", help=deadline)
    parser.add_argument("--budget", type=number_above_0, metavar="X", help="highest price of the run")
    parser.add_argument("--top", type=whole_number(1, 100), default=10, metavar="N", help="plans to show (default 10)")
    mtbf = f"mean hours between two failures of a GPU, as {GPU_HOURS_PER_FAILURE:g}: adds restarts and saves to the run"
    parser.add_argument("--mtbf-hours", type=number_above_0, metavar="X", help=mtbf)
    save = "time for which a save blocks the run (default: by the size of the state)"
    parser.add_argument("--save-seconds", type=number_above_0, metavar="X", help=save)
    restart = f"time from a failure to the next step (default {RESTART_SECONDS:g})"
    parser.add_argument("--restart-seconds", type=number_above_0, metavar="X", help=restart)
    explain = "show where the time and memory of the N-th plan go"
    parser.add_argument("--explain", type=whole_number(1, 100), metavar="N", help=explain)
    rehearse = "rehearse the first N plans, for their memory to the byte; takes up to a minute each"
    parser.add_argument("--rehearse", type=whole_number(1, 100), metavar="N", default=0, help=rehearse)
    quick = "do not search plans for other hardware"
    parser.add_argument("--quick", action="store_true", help=quick)
    runs = "dump_folders of runs on this hardware: fit the formula to their measured steps"
    parser.add_argument("--from", dest="runs", type=Path, nargs="+", default=[], metavar="RUN", help=runs)
    write = "write the best plan to a .toml file that extends the job"
    parser.add_argument("--write", type=Path, metavar="FILE", help=write)
    plot = "draw time, memory and price of the plans, .png or .svg"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _duration(text: str) -> float:
    """Return the seconds of a duration with a unit."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(min|h|d)", text)
    if match and float(match[1]) > 0:
        return float(match[1]) * DURATIONS[match[2]]
    raise argparse.ArgumentTypeError(f"given {text!r}; allowed: a number with one of {', '.join(DURATIONS)}, as 30d")
