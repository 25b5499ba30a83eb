"""The command `torchtitan`. Each subcommand is the `main(argv) -> exit code` of a module in commands/, or of train.py.

Modules are imported on demand, so that only the commands that need torch wait for its import.
"""

import difflib
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from torchtitan.core.errors import JobError, folded
from torchtitan.process.exit import exit_with
from torchtitan.process.gc_freeze import lasting

COMMANDS = {
    "train": "train a job: train job.toml, with --section.key value to change it",
    "check": "explain a job, or all that is wrong with it, without starting it",
    "estimate": "what a job needs of memory, whether it fits, and what would make it fit, without a GPU",
    "list": "list models, datasets, tokenizers, optimizers, adapters and schedules, also of installed packages",
    "preview": "show what the model will see: decoded samples, document borders, masks",
    "schedule": "simulate a pipeline schedule: its bubble, what it keeps, how it compares, and its picture",
    "bench": "measure speed and memory of a job's steps, for each combination of some options' values",
    "prepare": "tokenize a dataset once, into shards that are read at full speed, or what a job wants so",
    "generate": "continue a prompt with the weights of a checkpoint or of a Hugging Face folder",
    "evaluate": "loss and bits per byte of held-out documents, by the place of a token, or answers to tasks of lm-eval",
    "chat": "talk with what a run has learned, in the form of its records",
    "import": "the job that a file or command line of another program means (Axolotl, DeepSpeed, ReLoRA)",
    "convert": "weights from one form to another: checkpoints, Hugging Face folders, torchtitan's own",
    "plot": "draw the loss of a run so far in the terminal, or into a page or picture",
    "checkpoints": "list what a run has saved, in what state it is, and what a resume would take",
    "export": "write a checkpoint's weights, an adapter folded in or alone, for other programs",
    "presets": "the jobs that come with the package: list them, print one, copy one to change",
    "init": "write a commented job to begin with",
    "completion": "print the script with which bash, zsh or fish completes this command",
}
USAGE = "usage: torchtitan COMMAND [--help] [arguments]\n\n" + "\n".join(f"  {c:13}{t}" for c, t in COMMANDS.items())
USAGE += "\n\n  --version  of this package and of torch"
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
        print(", ".join(f"{name} {_version(name)}" for name in ("torchtitan-toml", "torch")))
        return 0
    command, *arguments = argv
    if command == "train":  # its help needs none of its imports
        importlib.import_module("torchtitan.config.help").print_help_if_requested(arguments)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"torchtitan: no command {command!r}; {hint}", file=sys.stderr)
        return REFUSED
    with lasting():
        module = importlib.import_module(module_of(command))
    return module.main([_one_spelling(argument) for argument in arguments])


def _one_spelling(argument: str) -> str:
    """Replace dashes in an option's name by underscores, so that both spellings work."""
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") and " " not in name else argument


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def module_of(command: str) -> str:
    """Return the module of a subcommand: `train` has its own, all others are in commands/."""
    # `import` is a keyword of Python
    elsewhere = {"train": "torchtitan.train", "import": "torchtitan.commands.importing"}
    return elsewhere.get(command, f"torchtitan.commands.{command}")


def guarded(run: Callable[[], int]) -> int:
    """Return the exit code of `run`, reporting user errors (JobError, Ctrl-C) without a traceback.

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
    except JobError as error:
        if os.environ.get("TORCHTITAN_TRACEBACK") == "1":
            traceback.print_exc()
        else:
            print(folded(error), file=sys.stderr)
        return REFUSED


def _output_is_lost() -> bool:
    """Return True if stdout cannot be written, for example because the disk is full."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False
