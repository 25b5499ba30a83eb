"""`torchtitan presets`: list, print or copy the jobs that come with the package. Needs no torch."""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from torchtitan.config.options import hint
from torchtitan.core.errors import JobError
from torchtitan.core.presets import MODEL, RECORDS, jobs
from torchtitan.importers.translation import family_in
from torchtitan.models import SIZES
from torchtitan.models.hf.config import CONFIG

USAGE = """\
usage: torchtitan presets ls [WORD ...]
       torchtitan presets cat NAME
       torchtitan presets cp NAME [FILE] [--model FOLDER] [--data FILES]

The jobs that come with the package. Each is said by its name wherever a job's file can be, too.
  ls               what there is, for what hardware; with words, those whose heads have all of them
  cat              print one
  cp               copy one into FILE (default: NAME.toml), which must not exist; its runs go to outputs/FILE
  --model FOLDER   a model in the form of Hugging Face, written into the job wherever it asks for one
  --data FILES     your records, likewise: a file, a folder or a pattern"""


def main(argv: list[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(USAGE)
        return 0
    options = parse(argv)
    if options.action == "ls":
        return list_all(options.words)
    text = job_named(options.words[0]).read_text()
    if options.action == "cat":
        print(text, end="")
        return 0
    name, *targets = options.words
    return copy(name, text, Path(targets[0] if targets else f"{name}.toml"), options)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments. Raises JobError if they match none of the three usages above."""
    parser = argparse.ArgumentParser(prog="torchtitan presets", usage=USAGE.removeprefix("usage: "), allow_abbrev=False)
    parser.add_argument("action", choices=("ls", "cat", "cp"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--model")
    parser.add_argument("--data")
    options = parser.parse_intermixed_args(argv)
    most = {"ls": len(options.words), "cat": 1, "cp": 2}[options.action]
    if len(options.words) > most or (options.action != "ls" and not options.words):
        names = " ".join(options.words) or "no name"
        raise JobError(f"torchtitan presets {options.action}: given {names}; allowed: {USAGE}")
    if options.action != "cp" and (options.model or options.data):
        raise JobError("--model, --data: allowed with torchtitan presets cp, which writes them into the copy")
    return options


@dataclass(frozen=True)
class Head:
    """The first comment of a job: a sentence on what it does, and the hardware it is for."""

    what: str
    hardware: str


def head_of(text: str) -> Head:
    comment = " ".join(line.removeprefix("#").strip() for line in text.split("\n\n")[0].splitlines())
    summary, _, remainder = comment.partition(" Hardware: ")
    return Head(re.split(r"\.(?= |$)", summary)[0], re.split(r"\.(?= )| \(", remainder)[0])


def list_all(keywords: list[str]) -> int:
    heads = {name: path.read_text().split("\n\n")[0] for name, path in jobs().items()}
    matches = {name: head_of(text) for name, text in heads.items() if all(w.lower() in text.lower() for w in keywords)}
    if not matches:
        print(f"no job's head has {' and '.join(keywords)}; there are {', '.join(heads)}", file=sys.stderr)
        return 2
    for name, head in matches.items():
        print(f"{name:17} {head.hardware:27} {head.what}")
    return 0


def job_named(name: str) -> Path:
    presets = jobs()
    if name not in presets:
        raise JobError(
            f"{name}: not a preset; allowed: {', '.join(presets)}; {hint(name, presets) or 'see presets ls'}"
        )
    return presets[name]


def copy(name: str, text: str, path: Path, options: argparse.Namespace) -> int:
    """Write a preset to a file, with the given model and data filled in.

    Raises JobError if the preset has no placeholder for them, or if the file exists.
    """
    for flag, value, placeholder in (("--model", options.model, MODEL), ("--data", options.data, RECORDS)):
        if value is not None and placeholder not in text:
            raise JobError(f"{flag}: the job {name} asks for none; drop it, or take one of the fine-tuning jobs")
    if options.model is not None:
        folder = Path(options.model).expanduser()
        if not (folder / CONFIG).is_file():
            allowed = f"a folder with a {CONFIG}, as Hugging Face's models are"
            raise JobError(f"--model: given {options.model}; allowed: {allowed}; give the folder of your download")
        family = family_in(folder)
        if family is None:
            raise JobError(f"{folder}: a model of another family; allowed: one of {', '.join(SIZES)}")
        text = with_value(text.replace(json.dumps(MODEL), quoted(str(folder))), "name", family)
    if options.data is not None:
        text = text.replace(json.dumps(RECORDS), quoted(options.data))
    for base in jobs():
        # the base is not in the folder of the copy
        text = text.replace(f'extends = "{base}.toml"', f'extends = "{base}"')
    text = with_value(text, "dump_folder", f"./outputs/{path.stem}")
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise JobError(f"{path}: it is there already; give another name, or remove it") from None
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror}); give another name") from None
    print(f"wrote {path}; its head says what to change and how to start it\n  torchtitan check {path}")
    return 0


def quoted(value: str) -> str:
    """Return a TOML string. Every JSON string is valid in TOML."""
    return json.dumps(value, ensure_ascii=False)


def with_value(text: str, key: str, value: str) -> str:
    """Replace the first assignment of `key` by `value`, and drop the comment on its line."""
    return re.sub(rf"^{key} = .*$", lambda _: f"{key} = {quoted(value)}", text, count=1, flags=re.MULTILINE)
