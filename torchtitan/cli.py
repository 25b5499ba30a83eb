"""The command `torchtitan`. A subcommand is a function `main(argv) -> exit code`, as a rule in commands/.

Modules are imported on demand, so that only the commands that need torch wait for its import.
"""

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NoReturn

from torchtitan.commands import COMMANDS
from torchtitan.core import distributions, plugins
from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.core.hub import Access, set_access
from torchtitan.core.machine_errors import MachineError
from torchtitan.core.plugins import missing_plugin, place_of
from torchtitan.process.exit import exit_with
from torchtitan.process.machine import no_gc_during_imports, use_huge_pages

USAGE = "usage: torchtitan COMMAND [--help] [arguments]\n\n" + "\n".join(f"  {c:13}{t}" for c, t in COMMANDS.items())
USAGE += "\n\n  --version  of this package and of torch"
COMPUTING = ("train", "bench", "sweep", "generate", "evaluate", "chat", "replay", "verify", "export")
"""Commands that compute with the tensors of a model, or whose processes do."""
DOWNLOADING = (*(name for name in COMPUTING if name != "train"), "convert", "prepare", "presets", "preview", "download")
"""Commands that download what a job or a folder names on the hub; `train` does so in its launcher or first rank."""
SIZING = ("plan", "estimate", "rehearse")
"""Commands that download the sizes and the tokenizer of a job's model, without weights and records."""
CRASHED, REFUSED, INTERRUPTED, OUTPUT_CLOSED = 1, 2, 130, 141


def run(*command: str) -> NoReturn:
    """Run the program, or one of its commands, with the arguments of this process, and exit with its exit code."""
    exit_with(lambda: main([*command, *sys.argv[1:]]))


def main(argv: list[str]) -> int:
    """Run a subcommand and return the exit code of the process."""
    return guarded(lambda: _dispatch(argv))


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h"):
        print(USAGE)
        return 0 if argv else REFUSED
    if argv[0] == "--version":
        if len(argv) > 1:
            raise JobError(f"torchtitan --version: one argument too many: {argv[1]}")
        print(distributions.describe_versions())
        return 0
    if problem := distributions.describe_overwritten():
        raise JobError(problem)
    command, *arguments = argv
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"torchtitan: no command {command!r}; {hint}", file=sys.stderr)
        return REFUSED
    if remedy := missing_plugin(command):
        raise JobError(f"torchtitan {command}: {remedy}")
    ours = arguments
    if command == "run":  # what follows the script belongs to it
        ours, _ = importlib.import_module("torchtitan.commands.run").split_arguments(arguments)
    if {"--help", "-h"} & set(ours):  # needs none of the command's imports
        if command == "train":
            importlib.import_module("torchtitan.config.options").print_help_if_requested(arguments)
        importlib.import_module("torchtitan.commands.command_lines").parser_of(command).print_help()
        return 0
    if command in COMPUTING and importlib.import_module("torchtitan.process.ranks").likely_device() == "cpu":
        use_huge_pages()
    if command in DOWNLOADING:
        set_access(Access.DOWNLOAD)
    elif command in SIZING:
        set_access(Access.SIZES)
    with no_gc_during_imports():
        main = resolve_name(function_of(command))
    return main(arguments)


def function_of(command: str) -> str:
    """Return the function that runs a subcommand, as "module:name"."""
    exceptions = {
        "train": "torchtitan.train:main",
        "init": "torchtitan.commands.presets:init",
        "plot": "torchtitan.commands.report:plot",
    }
    return exceptions.get(command) or place_of(plugins.COMMANDS, command) or f"torchtitan.commands.{command}:main"


def guarded(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, reporting errors of users and machines without a traceback.

    TORCHTITAN_TRACEBACK=1 in the environment shows the traceback, for developers of this project.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as end:  # the help of a command, or a wrong use of it
        return int(end.code or 0)
    except BrokenPipeError:  # the reader (head, less) closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at exit
        return OUTPUT_CLOSED
    except OSError as error:
        if not _output_is_lost():
            raise
        print(f"stdout: cannot be written ({error.strerror}); make room, or have it elsewhere", file=sys.stderr)
        return CRASHED
    except (JobError, MachineError) as error:
        if os.environ.get("TORCHTITAN_TRACEBACK") == "1":
            traceback.print_exc()
        else:
            print(wrap_lines(error), file=sys.stderr)
        return REFUSED if isinstance(error, JobError) else CRASHED


def _output_is_lost() -> bool:
    """Return True if stdout cannot be written, for example because the disk is full."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False
