"""The command `torchtitan`. Each subcommand is the `main(argv) -> exit code` of the module of its name.

Modules are imported when asked for, so that only those who need torch wait for it.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from torchtitan.leaving import exit_with

COMMANDS = {
    "train": "train the job of --job.config_file job.toml, with --section.key value to change it",
    "check": "explain a job, or all that is wrong with it, without starting it",
    "preview": "show what the model will see: decoded samples, document borders, masks",
    "schedule": "simulate a pipeline schedule: its bubble, what it keeps, how it compares, and its picture",
    "prepare": "tokenize a dataset once, into shards that are read at full speed",
    "generate": "continue a prompt with the weights of a checkpoint",
}
USAGE = "usage: torchtitan COMMAND [--help] [arguments]\n\n" + "\n".join(f"  {c:10}{t}" for c, t in COMMANDS.items())
REFUSED, INTERRUPTED, OUTPUT_CLOSED = 2, 130, 141


def run() -> NoReturn:
    """The program."""
    exit_with(lambda: main(sys.argv[1:]))


def main(argv: list[str]) -> int:
    """Run a subcommand; returns the exit code of the process."""
    return guarded(lambda: _dispatch(argv))


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h"):
        print(USAGE)
        return 0 if argv else REFUSED
    command, *rest = argv
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"torchtitan: no command {command!r}; {hint}", file=sys.stderr)
        return REFUSED
    return importlib.import_module(f"torchtitan.{command}").main(rest)


def guarded(run: Callable[[], int]) -> int:
    """`run`'s exit code. What the user caused (ValueError, Ctrl-C) ends in a line and a code, not in a traceback."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return OUTPUT_CLOSED
    except ValueError as error:
        if os.environ.get("TORCHTITAN_TRACEBACK") == "1":
            traceback.print_exc()
        else:
            print(f"{error}\n(TORCHTITAN_TRACEBACK=1 shows where this was raised)", file=sys.stderr)
        return REFUSED
