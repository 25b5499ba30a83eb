"""Readers that translate command lines and files of other programs to jobs, and the parser of such command lines.

A reader is one file and one entry in SOURCES. `torchtitan import` chooses it by the script that the command line runs,
by its flags, or by the program of its command or options file (programs.py). Readers do not import torch.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from os.path import expanduser
from typing import NamedTuple

from torchtitan.core import yaml_file
from torchtitan.core.errors import JobError
from torchtitan.core.registry import Registry
from torchtitan.plugins.importers.launchers import MODULES, OPTIONS, options_of_file, takes_value
from torchtitan.plugins.importers.programs import CONFIGS, PROGRAMS, command_in
from torchtitan.plugins.importers.translation import CommandLine


class ImportSource(NamedTuple):
    """A kind of command line that can be imported.

    `script`: the file name of the script, or None for any script with these `flags`, or of the program `program`, a key
    of programs.PROGRAMS. `reader`: "module:function", which translates a translation.CommandLine to a
    translation.JobDraft. `uses_accelerate`: True if the script takes precision, sharding and compilation from
    accelerate launch.
    """

    script: str | None
    reader: str
    description: str
    flags: tuple[str, ...] = ()
    program: str = ""
    uses_accelerate: bool = False

    def __str__(self) -> str:
        if self.program:
            return f"files and commands of {PROGRAMS[self.program].title}"
        return self.script or f"any script with --{' --'.join(self.flags)}"

    def matches(self, line: CommandLine) -> bool:
        """Return True for a command line of this source, if its script and flags say so."""
        if self.script is None:
            return bool(self.flags) and set(self.flags) <= {name for name, _ in line.flags}
        return line.script == self.script


_BUILTIN = {
    "relora": ImportSource(
        "torchrun_main.py", "torchtitan.plugins.importers.relora:read", "pretraining with restarted adapters"
    ),
    "galore": ImportSource(
        None,
        "torchtitan.plugins.importers.galore:read",
        "LoRA, GaLore and both in 8 bits, compared with AdamW",
        ("mode", "optimizer", "model"),
    ),
    "axolotl": ImportSource(
        None,
        "torchtitan.plugins.importers.axolotl:read",
        "fine-tuning, with its launcher",
        program="axolotl",
        uses_accelerate=True,
    ),
    "llamafactory": ImportSource(
        None,
        "torchtitan.plugins.importers.llama_factory:read",
        "fine-tuning and pretraining by its YAML",
        program="llamafactory",
        uses_accelerate=True,
    ),
    "trl": ImportSource(
        None,
        "torchtitan.plugins.importers.trl:read",
        "sft and dpo, by its command or scripts",
        program="trl",
        uses_accelerate=True,
    ),
    "deepspeed": ImportSource(
        None, "torchtitan.plugins.importers.deepspeed:read", "DeepSpeed's ZeRO stages", program="deepspeed"
    ),
}
SOURCES: Registry[ImportSource] = Registry("torchtitan.importers", _BUILTIN, ImportSource)


ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
HARMLESS = re.compile(
    r"(.*/)?(python[\d.]*|axolotl|llamafactory-cli|lmf|nohup|env|time|exec|torchrun|deepspeed|accelerate(-launch)?)"
    r"|launch|train|-[umBO]"
    r"|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
)
"""Words before a script that do not affect the job: interpreters, launchers, and the modules that they run."""
WORLD_SIZE = "world_size"
"""A flag of `torchtitan import` itself, wherever it stands in the line. No script has one of this name."""
AXOLOTL_LAUNCHER, AXOLOTL_PYTHON = ("launcher", "num_processes", "main_process_port"), ("accelerate", "no_accelerate")
"""Flags of Axolotl's own command about its launcher. They are no keys of its file."""
OWN_COMMANDS = ("llamafactory", "trl", "torchtune")
"""Programs whose commands run a script of theirs, so that a line has no name of one."""
OF_TRAINER = {"gradient_accumulation_steps", "debug"}
"""Options of accelerate launch that transformers' Trainer has too. `trl` gives them to its script."""
TRL_CONFIG = "accelerate_config"
_ON_8_GPUS = {"mixed_precision": "bf16", "num_processes": "8"}
TRL_CONFIGS = {
    "single_gpu": {"mixed_precision": "bf16", "num_processes": "1"},
    "multi_gpu": {**_ON_8_GPUS, "multi_gpu": ""},
    **{f"fsdp{version}": {**_ON_8_GPUS, "use_fsdp": "", "fsdp_version": str(version)} for version in (1, 2)},
    **{f"zero{stage}": {**_ON_8_GPUS, "use_deepspeed": "", "zero_stage": str(stage)} for stage in (1, 2, 3)},
}
"""The files of `accelerate config` that trl ships, by name."""
LISTS = {"report_to", "lora_target_modules", "lora_modules_to_save", "lora_target_parameters", "loss_type"}
LISTS |= {"loss_weights", "label_names", "optim_target_modules", "include_for_metrics", "fsdp", "debug"}
"""Flags that take several values in trl and LLaMA-Factory."""
TORCHTITAN = "torchtitan.train"
"""The module of PyTorch's torchtitan that lines run as a script."""
TORCHTITAN_SCRIPTS = ("run_train.sh", "run_llama_train.sh")
"""Scripts that run it, on NGPU ranks."""
SHELL_OPERATORS = {">", ">>", "2>", "2>>", "&>", "&>>", "2>&1", "|", "&"}
"""Shell operators for redirection, pipes and background jobs. They end the command."""


def split(argv: Sequence[str]) -> list[str]:
    """Split a command line given as one string into words; return several words unchanged.

    Escaped line ends are joined and ~ is expanded, as a shell does. Raises JobError for unbalanced quotes.
    """
    if len(argv) != 1:
        return list(argv)
    try:
        return list(map(expanduser, shlex.split(argv[0].replace("\\\n", " "), comments=True)))
    except ValueError as error:
        raise JobError(f"the command line cannot be split into words: {error}; quote it as for a shell") from None


def parse(argv: Sequence[str]) -> CommandLine:
    """Parse the words of a command line.

    Raises JobError if there is neither a script nor an options file, or if a word after it is not a flag.
    """
    argv = list(takewhile(lambda arg: arg not in SHELL_OPERATORS, argv))
    program, command_index = command_in(argv)
    if program in OWN_COMMANDS:
        return _own_command(program, argv, command_index)
    argv, launcher_args = _split_at_dashes(argv)
    launcher, first = _launcher(argv)
    launched, begin = _launched(launcher, argv, first)
    script_index = next((i for i, arg in enumerate(argv) if i >= begin and _is_script(arg)), None)
    if script_index is None:
        raise JobError(
            f"no script (a word that ends in .py) and no options file (.yml, .json) in: "
            f"{shlex.join(argv)[:200] or 'nothing'}; give the whole line"
        )
    leading_words = [*argv[:first], *argv[begin:script_index]] if launcher else argv[:script_index]
    unread = tuple(arg for arg in leading_words if not (ASSIGNMENT.fullmatch(arg) or HARMLESS.fullmatch(arg)))
    script = argv[script_index].replace("\\", "/").rpartition("/")[2]
    flags_start = script_index + 1
    if script.endswith(".py") and argv[flags_start : flags_start + 1] and argv[flags_start].endswith(CONFIGS):
        flags_start += 1
    config = argv[flags_start - 1] if argv[flags_start - 1].endswith(CONFIGS) else None
    flags = list(_flags(argv[flags_start:]))
    if not launcher and script.endswith(CONFIGS) and "-m" not in leading_words:
        launcher, launched, flags = _own_launcher(script, flags, launcher_args)
        ranks = _ranks(launcher, launched) if launcher else 1
    elif launcher_args:
        raise JobError(
            f"{shlex.join(['--', *launcher_args])[:200]}: only Axolotl's own command passes words on; drop them"
        )
    else:
        ranks = _ranks(launcher, launched)
    environment = _environment(argv[:script_index])
    if script in TORCHTITAN_SCRIPTS:
        count = environment.get("NGPU", "")
        script, ranks = TORCHTITAN, int(count) if count.isdecimal() else None
    return CommandLine(
        script, _world_size(flags, ranks), flags, config, launcher, launched, unread, program, environment
    )


def _is_script(arg: str) -> bool:
    return arg.endswith((".py", *CONFIGS)) or arg.rpartition("/")[2] in (TORCHTITAN, *TORCHTITAN_SCRIPTS)


def _environment(args: Sequence[str]) -> dict[str, str]:
    """Return the variables that a line sets before its first command."""
    return dict(item.split("=", 1) for item in takewhile(ASSIGNMENT.fullmatch, (arg for arg in args if arg != "env")))


def _own_command(program: str, argv: Sequence[str], index: int) -> CommandLine:
    """Parse a line whose command, at `index`, runs a script of its program: `trl sft --model_name_or_path ...`.

    trl starts accelerate, and gives it the options that its script does not have. LLaMA-Factory starts as many
    processes as NPROC_PER_NODE and NNODES say, else one for each GPU that it sees.
    """
    environment, args = _environment(argv[:index]), argv[index + 2 :]
    config = args[0] if args and args[0].endswith(CONFIGS) else None
    flags = [] if program == "torchtune" else list(_flags(args[config is not None :]))
    launcher, launched, ranks = "", dict[str, str](), None
    if program == "trl":
        launcher, names = "accelerate", OPTIONS["accelerate"].keys() - OF_TRAINER | {TRL_CONFIG}
        launched = {name: text or "" for name, text in flags if name in names}
        flags = [(name, text) for name, text in flags if name not in names]
        launched = _accelerate_config(launched.pop(TRL_CONFIG, None)) | launched
        ranks = _ranks(launcher, launched)
    elif program == "llamafactory":
        ranks = _visible_ranks(environment)
    script = config or " ".join(argv[index : index + 2])
    return CommandLine(script, _world_size(flags, ranks), flags, config, launcher, launched, (), program, environment)


def _accelerate_config(name: str | None) -> dict[str, str]:
    """Return the options of accelerate in a file, or in one that trl ships under this name."""
    if name is None:
        return {}
    return dict(TRL_CONFIGS[name]) if name in TRL_CONFIGS else options_of_file(yaml_file.read(name))


def _visible_ranks(environment: Mapping[str, str]) -> int | None:
    """Return how many processes LLaMA-Factory starts, or None if that depends on the machine."""
    devices = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = environment.get("NPROC_PER_NODE", str(len(devices) or ""))
    counts = (count, environment.get("NNODES", "1"))
    return int(counts[0]) * int(counts[1]) if all(text.isdecimal() for text in counts) else None


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after `--`, which separates the launcher's words in `axolotl train FILE -- ...`."""
    index = argv.index("--") if "--" in argv else len(argv)
    return argv[:index], argv[index + 1 :]


def _own_launcher(
    file: str, flags: list[tuple[str, str | None]], launcher_args: Sequence[str]
) -> tuple[str, dict[str, str], list[tuple[str, str | None]]]:
    """Return the launcher that the program of an options file starts itself, its options, and the other flags.

    Axolotl's command starts accelerate, unless --launcher names another; "" for python, which starts one process.
    DeepSpeed's files say nothing about a launcher: accelerate's default, all GPUs, is assumed.
    """
    of_launcher = {name: text or "" for name, text in flags if name in AXOLOTL_LAUNCHER + AXOLOTL_PYTHON}
    flags = [(name, text) for name, text in flags if name not in of_launcher]
    launcher = of_launcher.pop("launcher", "accelerate")
    if launcher not in ("accelerate", "torchrun", "python"):
        raise JobError(f"{file}: --launcher: given {launcher!r}; allowed: accelerate, torchrun or python")
    is_python = launcher == "python" or "no_accelerate" in of_launcher or of_launcher.get("accelerate") == "false"
    if is_python and launcher_args:
        raise JobError(
            f"{file}: {shlex.join(launcher_args)[:200]}: words for a launcher, but python starts none; drop them"
        )
    if is_python:
        return "", {}, flags
    launched, end = _launched(launcher, launcher_args, 0)
    if end < len(launcher_args):
        raise JobError(f"{file}: {launcher_args[end]!r} after -- is no option of {launcher}")
    for name in AXOLOTL_PYTHON:
        of_launcher.pop(name, None)
    return launcher, of_launcher | launched, flags


def _world_size(flags: list[tuple[str, str | None]], ranks: int | None) -> int | None:
    """Take --world-size N out of the flags and return it, or `ranks` without it."""
    for flag in [flag for flag in flags if flag[0] == WORLD_SIZE]:
        flags.remove(flag)
        text = flag[1] or ""
        if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
            raise JobError(f"--world-size: given {text or 'nothing'}; allowed: a whole number >= 1")
        ranks = int(text)
    return ranks


def _launcher(argv: Sequence[str]) -> tuple[str, int]:
    """Return the launcher's name ("" without one) and the index of its first option."""
    for i, arg in enumerate(argv):
        name = arg.replace("\\", "/").rpartition("/")[2]
        if name in ("torchrun", "deepspeed", "accelerate-launch"):
            return name.partition("-")[0], i + 1
        if name == "accelerate" and argv[i + 1 : i + 2] == ["launch"]:
            return name, i + 2
        if arg == "-m" and i + 1 < len(argv) and argv[i + 1] in MODULES:
            return MODULES[argv[i + 1]], i + 2
        if arg.endswith((".py", *CONFIGS)):
            break
    return "", 0


def _launched(launcher: str, argv: Sequence[str], begin: int) -> tuple[dict[str, str], int]:
    """Return the launcher's options and the index of the first word after them.

    Options on the command line override a file of `accelerate config`. Raises JobError for an unreadable file.
    """
    options: dict[str, str] = {}
    while launcher and begin < len(argv) and argv[begin].startswith("-"):
        name, equals, value = argv[begin].partition("=")
        name = name.lstrip("-").replace("-", "_")
        begin += 1
        if not equals and takes_value(launcher, name) and begin < len(argv):
            value, begin = argv[begin], begin + 1
        options[name] = value
    if launcher == "accelerate" and "config_file" in options:
        options = options_of_file(yaml_file.read(options["config_file"])) | options
    return options, begin


def _ranks(launcher: str, launched: Mapping[str, str]) -> int | None:
    """Return the total number of ranks, or None if it depends on the machine; 1 if python starts a script.

    accelerate counts the processes of all machines together. Without a number, it and deepspeed use all GPUs.
    """
    if launcher == "accelerate":
        counts = (launched.get("num_processes", "auto"), "1")
    elif launcher == "deepspeed":
        counts = (launched.get("num_gpus", "auto"), launched.get("num_nodes", "1"))
    else:
        counts = (launched.get("nproc_per_node", "1"), launched.get("nnodes", "1"))
    return int(counts[0]) * int(counts[1]) if all(count.isdecimal() for count in counts) else None


def _flags(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield names and values of flags. Several values of one of LISTS are separated by blanks."""
    number = 0
    while number < len(argv):
        name, equals, value = argv[number].partition("=")
        if not name.startswith("--") and ASSIGNMENT.fullmatch(argv[number]):
            name = f"--{name}"  # a key of the options file, as LLaMA-Factory's command overrides it
        if not name.startswith("--") or len(name) < 3:
            raise JobError(f"{argv[number]!r} is neither a flag nor its value; quote values with blanks")
        number, name = number + 1, name[2:].replace("-", "_")
        if not equals and number < len(argv) and not argv[number].startswith("--"):
            value, equals = argv[number], "="
            number += 1
            while name in LISTS and number < len(argv) and not argv[number].startswith("--"):
                value += f" {argv[number]}"
                number += 1
        yield name, value if equals else None
