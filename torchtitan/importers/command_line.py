"""A command line as shells have it: on how many ranks which script runs, with which file of options and which flags."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from os.path import expanduser

from torchtitan.core.errors import JobError
from torchtitan.importers import yaml_file
from torchtitan.importers.launcher_options import MODULES, options_of_file, takes_value

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
HARMLESS = re.compile(
    r"(.*/)?(python[\d.]*|axolotl|nohup|env|time|exec|torchrun|deepspeed|accelerate(-launch)?)|launch|train|-[umBO]"
    r"|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
)
"""Words ahead of a script that say nothing about the job: interpreters, launchers, and the modules that they run."""
CONFIGS = (".yaml", ".yml", ".json")
"""How files of options end."""
OF_THE_SHELL = {">", ">>", "2>", "2>>", "&>", "&>>", "2>&1", "|", "&"}
"""Words with which a shell takes what a line prints, or does not wait for it; they end the line."""


@dataclass(frozen=True)
class CommandLine:
    """`script`: its name, or that of the file where a line has no script. `ranks`: of all machines together; None where
    the line leaves that to the machine. `flags`: behind both, in order, as (name without dashes, value), the value None
    for a flag that is a word alone. `config`: the path of a file of options. `launcher`: what starts the script, one of
    launcher_options.OPTIONS, or empty. `launched`: the launcher's options by their names with underscores, "" for one
    that takes no value. `unread`: words ahead of the launcher, or of a script without one, that are not understood.
    """

    script: str
    ranks: int | None
    flags: list[tuple[str, str | None]] = field(default_factory=list)
    config: str | None = None
    launcher: str = ""
    launched: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def split(words: Sequence[str]) -> list[str]:
    """The words of a line that was given as one, its line ends escaped or not, or as many; a home's ~ is taken for it,
    as the shell does that the line was for. JobError for open quotes."""
    if len(words) != 1:
        return list(words)
    try:
        return list(map(expanduser, shlex.split(words[0].replace("\\\n", " "), comments=True)))
    except ValueError as error:
        raise JobError(f"the command line cannot be split into words: {error}; quote it as a shell needs it") from None


def parse(words: Sequence[str]) -> CommandLine:
    """JobError where nothing in it is a script, or what stands behind the script is no flag."""
    words = list(takewhile(lambda word: word not in OF_THE_SHELL, words))
    launcher, first = _launcher(words)
    launched, begin = _launched(launcher, words, first)
    place = next((i for i, word in enumerate(words) if i >= begin and word.endswith((".py", *CONFIGS))), None)
    if place is None:
        raise JobError(
            f"no script (a word that ends in .py) and no file of options (.yml, .json) in: "
            f"{shlex.join(words)[:200] or 'nothing'}; give the line whole"
        )
    others = [*words[:first], *words[begin:place]] if launcher else words[:place]
    unread = tuple(word for word in others if not (ASSIGNMENT.fullmatch(word) or HARMLESS.fullmatch(word)))
    script = words[place].replace("\\", "/").rpartition("/")[2]
    behind = place + 1
    if script.endswith(".py") and words[behind : behind + 1] and words[behind].endswith(CONFIGS):
        behind += 1
    config = words[behind - 1] if words[behind - 1].endswith(CONFIGS) else None
    flags = list(_flags(words[behind:]))
    return CommandLine(script, _ranks(launcher, launched), flags, config, launcher, launched, unread)


def _launcher(words: Sequence[str]) -> tuple[str, int]:
    """The launcher's name, or "" without one, and the place where its options begin."""
    for i, word in enumerate(words):
        name = word.replace("\\", "/").rpartition("/")[2]
        if name in ("torchrun", "deepspeed", "accelerate-launch"):
            return name.partition("-")[0], i + 1
        if name == "accelerate" and words[i + 1 : i + 2] == ["launch"]:
            return name, i + 2
        if word == "-m" and i + 1 < len(words) and words[i + 1] in MODULES:
            return MODULES[words[i + 1]], i + 2
        if word.endswith((".py", *CONFIGS)):
            break
    return "", 0


def _launched(launcher: str, words: Sequence[str], begin: int) -> tuple[dict[str, str], int]:
    """The launcher's options, those of a file of `accelerate config` under those of the line, and the place behind
    them. JobError for a file that cannot be read."""
    options: dict[str, str] = {}
    while launcher and begin < len(words) and words[begin].startswith("-"):
        name, equals, value = words[begin].partition("=")
        name = name.lstrip("-").replace("-", "_")
        begin += 1
        if not equals and takes_value(launcher, name) and begin < len(words):
            value, begin = words[begin], begin + 1
        options[name] = value
    if launcher == "accelerate" and "config_file" in options:
        options = options_of_file(yaml_file.read(options["config_file"])) | options
    return options, begin


def _ranks(launcher: str, launched: Mapping[str, str]) -> int | None:
    """1 without a launcher. accelerate counts the processes of all machines together; it and deepspeed take all GPUs
    where they are not told how many."""
    if launcher == "accelerate":
        counts = (launched.get("num_processes", "auto"), "1")
    elif launcher == "deepspeed":
        counts = (launched.get("num_gpus", "auto"), launched.get("num_nodes", "1"))
    else:
        counts = (launched.get("nproc_per_node", "1"), launched.get("nnodes", "1"))
    return int(counts[0]) * int(counts[1]) if all(count.isdecimal() for count in counts) else None


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    number = 0
    while number < len(words):
        name, equals, value = words[number].partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise JobError(
                f"{words[number]!r}, which is no flag and follows none, in the command line; quote what has blanks"
            )
        number += 1
        if not equals and number < len(words) and not words[number].startswith("--"):
            value, equals = words[number], "="
            number += 1
        yield name[2:].replace("-", "_"), value if equals else None
