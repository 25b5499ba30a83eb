"""Find the job that weights belong to.

This is the job given on the command line, the job of the run that wrote the weights, or one with the sizes of the
config.json next to them.
"""

from pathlib import Path

from torchtitan.config import manager
from torchtitan.config.job import JobConfig
from torchtitan.config.options import ConfigError, options
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, family_for_model_type
from torchtitan.models.hf.config import CONFIG, find_config
from torchtitan.rules import Facts, known_names
from torchtitan.rules.model_and_data import folder_has_sizes, model_sizes, positions_are_learned, tokenizer_fits
from torchtitan.rules.neurocache import cache_fits_the_model

JOB = "config.toml"
ALL_OF_IT = ("--job.config_file", "--model.name", "--model.flavor")
LONGEST_CONTEXT = 8192
"""Maximum seq_len, in tokens, for a model without a job. A job can set a larger one."""


def find_job(path: Path, arguments: list[str], with_tokenizer: bool = True) -> JobConfig:
    """Return the job of the weights at `path`.

    `arguments` are options of a job, as on the command line. They take precedence, and if they name a job or a model,
    nothing else is read. Raises JobError if the model is unknown, or if the model or tokenizer cannot be built.
    """
    path = path.resolve()
    if not path.exists():
        remedy = "give the dump_folder of a run, a checkpoint, an export or a folder of Hugging Face"
        raise JobError(f"{path}: no such file or folder; {remedy}")
    home = path.parent if path.is_file() else path
    if not any(argument.startswith(ALL_OF_IT) for argument in arguments):
        homes = (home, home.parent, home.parent.parent)
        jobs = [folder / JOB for folder in homes if (folder / JOB).is_file()]
        hf_config = find_config(path)
        if hf_config is not None:
            given_names = {argument.partition("=")[0] for argument in arguments}
            hf_arguments = _hf_arguments(path, home, hf_config.get("model_type"))
            arguments = [
                argument for argument in hf_arguments if argument.partition("=")[0] not in given_names
            ] + arguments
        elif jobs:
            arguments = ["--job.config_file", str(jobs[0]), *arguments]
        else:
            looked = ", ".join(str(folder / JOB) for folder in homes)
            raise JobError(
                f"no job found ({looked}, {home / CONFIG}): give the dump_folder of a run, a folder with config.json, "
                "or --config JOB.toml"
            )
    config = manager.load(arguments)
    facts = Facts(config, 1, "cpu")
    of_the_model = (known_names, folder_has_sizes, model_sizes, positions_are_learned, cache_fits_the_model)
    rules = (*of_the_model, *[tokenizer_fits] * with_tokenizer)
    faults = [fault for rule in rules for fault in rule(facts)]
    if not with_tokenizer:
        faults = [fault for fault in faults if fault.key != "model.tokenizer_path"]
    if faults:
        raise ConfigError(faults)
    return config


def _hf_arguments(path: Path, home: Path, model_type: object) -> list[str]:
    """Return the options for a Hugging Face folder or file, with the model's context up to LONGEST_CONTEXT."""
    family = family_for_model_type(model_type)
    if family is None:
        known_types = sorted({name for config in CONFIG_CONVERTERS.values() for name in config.model_types})
        raise JobError(f"{path}: model_type = {model_type!r}; allowed: {', '.join(known_types)}")
    length = CONFIG_CONVERTERS[family].args_from_folder(path).max_seq_len
    arguments = [f"--model.name={family}", "--model.flavor=from_hf", f"--model.hf_folder={path}"]
    return [*arguments, f"--model.tokenizer_path={home}", f"--training.seq_len={min(length, LONGEST_CONTEXT)}"]


def names_its_tokenizer(config: JobConfig) -> bool:
    """Return True if the job sets a tokenizer. The default is for debugging and does not fit a larger model."""
    return config.model.tokenizer_path != options()["model.tokenizer_path"].default
