"""The command `torchtitan`. A subcommand is a function `main(argv) -> exit code`, as a rule in commands/.

Modules are imported on demand, so that only the commands that need torch wait for its import.
"""

import difflib
import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable
from pkgutil import resolve_name
from typing import NoReturn

from torchtitan.core.errors import JobError, wrap_lines
from torchtitan.process.exit import exit_with
from torchtitan.process.machine import no_gc_during_imports, use_huge_pages
from torchtitan.process.ranks import likely_device

COMMANDS = {
    "train": "train a job: train job.toml, with --section.key value to change it",
    "check": "check a job, or list all that is wrong with it, without starting it",
    "estimate": "predict memory and communication per rank, and whether the job fits, without a GPU",
    "plan": "find the fastest parallel plans of a job for some GPUs, with their time, memory and price",
    "list": "list models, datasets, tokenizers, optimizers, adapters and schedules, also of installed packages",
    "preview": "show the first samples that the model will see: decoded, with document borders and masks",
    "schedule": "simulate a pipeline schedule: its bubble, peak memory, comparison with others, and a picture",
    "bench": "measure speed and memory of a job's steps, for each combination of some options' values",
    "sweep": "train a job for each combination of some options' values, and compare the losses",
    "prepare": "tokenize a dataset once into shards, or all that a job tokenizes before it starts",
    "generate": "continue a prompt with the weights of a checkpoint or a Hugging Face folder",
    "evaluate": "measure loss and bits per byte of held-out documents, or answer lm-eval tasks",
    "chat": "talk with a model in the format of its training records",
    "import": "convert another program's command line or config to a job (Axolotl, DeepSpeed, ReLoRA)",
    "convert": "convert weights between checkpoints, Hugging Face folders and torchtitan's own format",
    "plot": "draw the loss of a run in the terminal, or into a page or picture",
    "report": "draw runs over one another in a self-contained page: curves, events, jobs, generated texts",
    "why": "say what bounds a run's speed, from its own records, and what to change first",
    "diff": "compare two runs, checkpoints or weights: the options, first step and tensors that differ",
    "replay": "make one step of a run again: its samples, gradients and activations, and the origin of a NaN",
    "checkpoints": "list a run's checkpoints, their state, and the one that a resume takes",
    "export": "write a checkpoint's weights for other programs, with an adapter merged or alone",
    "presets": "list, print or copy the jobs that come with the package",
    "init": "write a commented job to begin with",
    "completion": "print the completion script of bash, zsh or fish",
}
USAGE = "usage: torchtitan COMMAND [--help] [arguments]\n\n" + "\n".join(f"  {c:13}{t}" for c, t in COMMANDS.items())
USAGE += "\n\n  --version  of this package and of torch"
COMPUTING = ("train", "bench", "sweep", "generate", "evaluate", "chat", "replay", "export")
"""Commands that compute with the tensors of a model, or whose processes do."""
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
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"torchtitan: no command {command!r}; {hint}", file=sys.stderr)
        return REFUSED
    if {"--help", "-h"} & set(arguments):  # needs none of the command's imports
        if command == "train":
            importlib.import_module("torchtitan.config.options").print_help_if_requested(arguments)
        importlib.import_module("torchtitan.commands.command_lines").parser_of(command).print_help()
        return 0
    if command in COMPUTING and likely_device() == "cpu":
        use_huge_pages()
    with no_gc_during_imports():
        main = resolve_name(function_of(command))
    return main(arguments)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def function_of(command: str) -> str:
    """Return the function that runs a subcommand, as "module:name"."""
    exceptions = {
        "train": "torchtitan.train:main",
        "import": "torchtitan.commands.importing:main",  # `import` is a keyword of Python
        "init": "torchtitan.commands.presets:init",
    }
    return exceptions.get(command, f"torchtitan.commands.{command}:main")


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
            print(wrap_lines(error), file=sys.stderr)
        return REFUSED


def _output_is_lost() -> bool:
    """Return True if stdout cannot be written, for example because the disk is full."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False
