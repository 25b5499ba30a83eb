"""Which job weights belong to: the one that is given, that of the run which wrote them, or one with the sizes of the
config.json beside them.
"""

import argparse
from pathlib import Path

from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError, options
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIGS, family_of
from torchtitan.models.hf.config import CONFIG, config_beside
from torchtitan.rules import (
    Facts,
    cache_fits_the_model,
    folder_has_sizes,
    known_names,
    model_sizes,
    positions_are_learned,
    tokenizer_fits,
)

JOB = "config.toml"
ALL_OF_IT = ("--job.config_file", "--model.name", "--model.flavor")
LONGEST_CONTEXT = 8192
"""Tokens, of a model without a job; more is for a job to say."""


def job_of(path: Path, words: list[str], with_tokenizer: bool = True) -> JobConfig:
    """`words` are options of a job, as on the command line; they win, and where they name a job or a model they are all
    of it. JobError where nothing says what model it is, and for a job whose model, or tokenizer, cannot be built.
    """
    path = path.resolve()
    if not path.exists():
        remedy = "give the dump_folder of a run, a checkpoint, an export or a folder of Hugging Face"
        raise JobError(f"{path}: no such file or folder; {remedy}")
    home = path.parent if path.is_file() else path
    if not any(word.startswith(ALL_OF_IT) for word in words):
        homes = (home, home.parent, home.parent.parent)
        jobs = [folder / JOB for folder in homes if (folder / JOB).is_file()]
        beside = config_beside(path)
        if beside is not None:
            given = {word.partition("=")[0] for word in words}
            found = _words_of(path, home, beside.get("model_type"))
            words = [word for word in found if word.partition("=")[0] not in given] + words
        elif jobs:
            words = ["--job.config_file", str(jobs[0]), *words]
        else:
            looked = ", ".join(str(folder / JOB) for folder in homes)
            raise JobError(
                f"no job found ({looked}, {home / CONFIG}): give the dump_folder of a run, a folder with config.json, "
                "or --config JOB.toml"
            )
    config = manager.load(words)
    facts = Facts(config, 1, "cpu")
    of_the_model = (known_names, folder_has_sizes, model_sizes, positions_are_learned, cache_fits_the_model)
    rules = (*of_the_model, *[tokenizer_fits] * with_tokenizer)
    faults = [fault for rule in rules for fault in rule(facts)]
    if not with_tokenizer:
        faults = [fault for fault in faults if fault.key != "model.tokenizer_path"]
    if faults:
        raise ConfigError(faults)
    return config


def _words_of(path: Path, home: Path, model_type: object) -> list[str]:
    """Of a folder, or a file, in the form of Hugging Face. As much context as the model was made for."""
    family = family_of(model_type)
    if family is None:
        known = sorted({each for config in CONFIGS.values() for each in config.model_types})
        raise JobError(f"{path}: model_type = {model_type!r}; allowed: {', '.join(known)}")
    length = CONFIGS[family].args_of(path).max_seq_len
    words = [f"--model.name={family}", "--model.flavor=from_hf", f"--model.hf_folder={path}"]
    return [*words, f"--model.tokenizer_path={home}", f"--training.seq_len={min(length, LONGEST_CONTEXT)}"]


def names_its_tokenizer(config: JobConfig) -> bool:
    """Or has the one for debugging, which is not a larger model's."""
    return config.model.tokenizer_path != options()["model.tokenizer_path"].default


def refuse_strangers(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Of what a command's own options leave over: everything but options of a job and their values."""
    for place, word in enumerate(words):
        is_option = word.startswith("--") and "." in word
        is_value = place > 0 and not word.startswith("--") and words[place - 1].startswith("--")
        if not is_option and not is_value:
            parser.error(f"unrecognized arguments: {word}")
