"""`torchtitan presets` lists, prints or copies the jobs of the package; `torchtitan init` writes a first one."""

import argparse
import importlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.command_parser import hint
from torchtitan.core.errors import JobError
from torchtitan.core.files import MODEL_PLACEHOLDER, RECORDS_PLACEHOLDER, shipped_jobs
from torchtitan.core.hub import is_hub_source, local_path


def main(argv: list[str]) -> int:
    options, _ = parse_command("presets", argv)
    arguments, most = options.arguments, {"ls": None, "cat": 1, "cp": 2, "init": None}[options.action]
    if most and not 1 <= len(arguments) <= most:
        allowed = "a name" if most == 1 else "a name, and a file to write"
        raise JobError(f"torchtitan presets {options.action}: given {len(arguments)} arguments; allowed: {allowed}")
    if options.action != "cp" and (options.model or options.data):
        raise JobError("--model, --data: only allowed with torchtitan presets cp, which writes them into the copy")
    if options.action == "ls":
        return list_all(arguments)
    if options.action == "init":
        return init(arguments)
    text = job_named(arguments[0]).read_text()
    if options.action == "cat":
        print(text, end="")
        return 0
    name, *targets = arguments
    return copy(name, text, Path(targets[0] if targets else f"{name}.toml"), options)


@dataclass(frozen=True)
class Head:
    """The first comment of a preset, split into its summary sentence and its hardware."""

    summary: str
    hardware: str


def head_of(text: str) -> Head:
    comment = " ".join(line.removeprefix("#").strip() for line in text.split("\n\n")[0].splitlines())
    summary, _, remainder = comment.partition(" Hardware: ")
    return Head(re.split(r"\.(?= |$)", summary)[0], re.split(r"\.(?= )| \(", remainder)[0])


def list_all(keywords: list[str]) -> int:
    heads = {name: path.read_text().split("\n\n")[0] for name, path in shipped_jobs().items()}
    matches = {name: head_of(text) for name, text in heads.items() if all(w.lower() in text.lower() for w in keywords)}
    if not matches:
        print(f"no preset mentions {' and '.join(keywords)}; available: {', '.join(heads)}", file=sys.stderr)
        return 2
    for name, head in matches.items():
        print(f"{name:17} {head.hardware:27} {head.summary}")
    return 0


def job_named(name: str) -> Path:
    presets = shipped_jobs()
    if name not in presets:
        raise JobError(
            f"{name}: not a preset; allowed: {', '.join(presets)}; {hint(name, presets) or 'see presets ls'}"
        )
    return presets[name]


def copy(name: str, text: str, path: Path, options: argparse.Namespace) -> int:
    """Write a preset to a file, with the given model and data filled in.

    Raises JobError if the preset has no placeholder for them, or if the file exists.
    """
    replaced = ("--model", options.model, MODEL_PLACEHOLDER), ("--data", options.data, RECORDS_PLACEHOLDER)
    for flag, value, placeholder in replaced:
        if value is not None and placeholder not in text:
            raise JobError(
                f"{flag}: the preset {name} has no place for it; drop it, or use one of the fine-tuning presets"
            )
    if options.model is not None:
        is_remote = is_hub_source(options.model)
        folder = Path(local_path(options.model, "sizes") if is_remote else options.model).expanduser()
        models = importlib.import_module("torchtitan.models")  # all families, which takes a while
        if not (folder / models.CONFIG).is_file():
            allowed = f"a folder with a {models.CONFIG}, as Hugging Face's models are"
            raise JobError(f"--model: given {options.model}; allowed: {allowed}; give the folder of your download")
        family = models.family_in(folder)
        if family is None:
            raise JobError(f"{folder}: an unsupported model family; allowed: one of {', '.join(models.SIZES)}")
        place = quoted(options.model if is_remote else str(folder))
        text = set_value(text.replace(json.dumps(MODEL_PLACEHOLDER), place), "name", family)
    if options.data is not None:
        text = text.replace(json.dumps(RECORDS_PLACEHOLDER), quoted(options.data))
    for base in shipped_jobs():
        # the base is not in the folder of the copy
        text = text.replace(f'extends = "{base}.toml"', f'extends = "{base}"')
    text = set_value(text, "dump_folder", f"./outputs/{path.stem}")
    write_new_file(path, text)
    print(f"wrote {path}; its first comment explains what to change and how to start it\n  torchtitan check {path}")
    return 0


def quoted(value: str) -> str:
    """Return a TOML string. Every JSON string is valid in TOML."""
    return json.dumps(value, ensure_ascii=False)


def set_value(text: str, key: str, value: str) -> str:
    """Replace the first assignment of `key` by `value`, and drop the comment on its line."""
    return re.sub(rf"^{key} = .*$", lambda _: f"{key} = {quoted(value)}", text, count=1, flags=re.MULTILINE)


FIRST_JOB = """\
# A first job. Explain it: torchtitan check {name}    Train it: torchtitan train {name}
# Every option, its default and meaning: torchtitan train --help

[job]
dump_folder = "./outputs/{stem}"          # checkpoints, metrics and the picture go here

[model]
name = "llama3"                          # families: llama3, llama3.1, deepseek, qwen3_moe, ...
flavor = "debugmodel"                    # a size of the family: 8B, 70B, ...
tokenizer_path = "debug"                 # a tokenizer's file or folder; debug comes with the package

[training]
dataset = "python_stdlib"                # "text" for your own: .txt, .jsonl, .parquet
# dataset_path = "my_texts/*.jsonl"      # a file, a folder or a pattern, for dataset = "text"
local_batch_size = 4                     # samples of a rank and forward pass
seq_len = 256                            # tokens of a sample
steps = 60                               # optimizer steps

[optimizer]
lr = 3e-3                                # the peak; warmup and decay follow from the number of steps

[metrics]
log_freq = 1                             # steps between log lines

[checkpoint]
enable = true                            # a job that is started again resumes
interval = 50
"""


def init(argv: list[str]) -> int:
    """Run `torchtitan init [FILE]`: write a commented job that runs unchanged."""
    options, _ = parse_command("init", argv)
    path = Path(options.file)
    write_new_file(path, FIRST_JOB.format(name=path, stem=path.stem))
    print(f"wrote {path}\n  torchtitan check {path}\n  torchtitan train {path}")
    return 0


def write_new_file(path: Path, text: str) -> None:
    """Write a file. Raises JobError if it exists, or cannot be written."""
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise JobError(f"{path}: exists; give another name, or remove it") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror}); give another name") from None
