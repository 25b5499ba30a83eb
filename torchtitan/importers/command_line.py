"""A command line as shells have it: on how many ranks which script runs, with which file of options and which flags."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from os.path import expanduser

from torchtitan.errors import JobError

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
WITHOUT_VALUE = {"--standalone", "--no_python", "--run_path", "--module", "-m", "-u"}
WITHOUT_VALUE |= {"--use_deepspeed", "--use_fsdp", "--multi_gpu", "--cpu"}
"""Of torchrun's, python's and accelerate's options those that are words alone."""
CONFIGS = (".yaml", ".yml", ".json")
"""How files of options end."""
OF_THE_SHELL = {">", ">>", "2>", "2>>", "&>", "&>>", "2>&1", "|", "&"}
"""Words with which a shell takes what a line prints, or does not wait for it; they end the line."""


@dataclass(frozen=True)
class CommandLine:
    """`script`: its name, or that of the file where a line has no script. `ranks`: of all machines together; None where
    the line leaves that to the machine. `flags`: behind both, in order, as (name without dashes, value), the value None
    for a flag that is a word alone. `config`: the path of a file of options. `launched`: options of what starts the
    script, ahead of it, by their names with underscores.
    """

    script: str
    ranks: int | None
    flags: list[tuple[str, str | None]] = field(default_factory=list)
    config: str | None = None
    launched: dict[str, str] = field(default_factory=dict)


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
    place = next((i for i, word in enumerate(words) if word.endswith((".py", *CONFIGS))), None)
    if place is None:
        raise JobError(
            f"no script (a word that ends in .py) and no file of options (.yml, .json) in: "
            f"{shlex.join(words)[:200] or 'nothing'}; give the line whole"
        )
    before = [word for word in words[:place] if not ASSIGNMENT.fullmatch(word)]
    script = words[place].replace("\\", "/").rpartition("/")[2]
    behind = place + 1
    if script.endswith(".py") and words[behind : behind + 1] and words[behind].endswith(CONFIGS):
        behind += 1
    config = words[behind - 1] if words[behind - 1].endswith(CONFIGS) else None
    launched = _launched(before)
    ranks = _ranks(launched, "accelerate" in before)
    return CommandLine(script, ranks, list(_flags(words[behind:])), config, launched)


def _launched(words: Sequence[str]) -> dict[str, str]:
    found, rest = dict[str, str](), iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_").replace("__", "--", 1)
        if name.startswith("--") and name not in WITHOUT_VALUE:
            found[name[2:]] = value if equals else next(rest, "")
    return found


def _ranks(launched: Mapping[str, str], by_accelerate: bool) -> int | None:
    """1 unless torchrun or accelerate is told otherwise. The latter counts the processes of all machines together."""
    if by_accelerate:
        counts = (launched.get("num_processes", "auto"), "1")
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
