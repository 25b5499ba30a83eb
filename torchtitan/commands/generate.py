"""`torchtitan generate FOLDER --prompt "..."`: continue a text with the model of a checkpoint.

FOLDER is the job's dump_folder (newest complete checkpoint), one of its step folders, an export or a folder of Hugging
Face. The model and the tokenizer come from the config.toml that the run wrote or from the files next to the weights.
Keys and values are cached until the context is full; then the context window slides.

A model that does not fit on one device runs with `--ranks N` over that many devices of this machine: split by tensor
parallel, or, if it has experts, by expert parallel and FSDP.
"""

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.checkpoint.base_weights import VERSION_WITHOUT_RECORD, find_weights
from torchtitan.checkpoint.folders import best_in
from torchtitan.commands.command_lines import parse_command
from torchtitan.config import manager
from torchtitan.config.options import ConfigError, options
from torchtitan.config.sections.model import Model
from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, read_file
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.base import decode_stream
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.launcher.forks import first_rank, fork_ranks
from torchtitan.launcher.processes import Processes
from torchtitan.models import CONFIG_CONVERTERS, family_for_model_type
from torchtitan.models.hf.config import CONFIG, GENERATION, SAMPLING, find_text_config, sampling_options
from torchtitan.models.kv_cache import reader_for, store_for_single_rows
from torchtitan.process.children import python_command
from torchtitan.process.distributed import device_type
from torchtitan.process.exit import die_with_parent
from torchtitan.process.ranks import Ranks, likely_device, read_ranks, started_as_rank
from torchtitan.rules import OF_THE_MODEL, Facts, judge, without_unknown_names
from torchtitan.rules.model_and_data import folder_has_sizes, model_sizes, positions_are_known, tokenizer_fits
from torchtitan.training import inference_model

LOOK_SECONDS, FOLLOW_SECONDS, SPEAK_SECONDS = 0.05, 2, 3
"""Intervals in seconds: between polls of the ranks; from one rank's failure to the end of the others; before a rank
other than the first reports a failure, which the first usually has reported by then."""


def run_on_ranks(arguments: list[str], num_ranks: int) -> int:
    """Run `torchtitan ARGUMENTS` on each rank. Returns the exit code of the first failure, or 0.

    On a CPU the ranks are forked from one process (launcher/forks.py). No rank outlives this one.
    """
    world = Processes(python_command("torchtitan", *arguments), num_ranks, can_fork=likely_device() == "cpu")
    deadline = float("inf")
    try:
        while world.running and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            if any(ended.code for ended in world.poll()):
                deadline = min(deadline, time.monotonic() + FOLLOW_SECONDS)
        return next((ended.exit_code for ended in world.exits if ended.code), 0)
    finally:
        world.close()


# Generated control characters must not reach the terminal as commands.
LARGEST_PROMPT = 2**26
"""Bytes."""
CONTROLS = dict.fromkeys([c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"], "\ufffd")


def main(argv: list[str]) -> int:
    if (launcher := first_rank()) is not None:  # this process has imported torch for all ranks
        die_with_parent(launcher.pid)
        fork_ranks()
    options, job_args = parse_command("generate", argv)
    if options.prompt and options.prompt_file:
        raise JobError("--prompt and --prompt-file: give one of them")
    sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot show
    text = prompt_of(options)
    if options.ranks > 1 and not started_as_rank():
        with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:  # the prompt may come from stdin
            Path(folder, "prompt").write_bytes(text.encode(errors="replace"))
            return run_on_ranks(["generate", *argv, "--prompt=", f"--prompt-file={folder}/prompt"], options.ranks)
    ranks = read_ranks()
    if ranks.is_main:
        generate(options, job_args, text, ranks)
        return 0
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # all ranks print the same
            generate(options, job_args, text, ranks)
    except JobError:
        time.sleep(SPEAK_SECONDS)
        raise
    return 0


def generate(options: argparse.Namespace, job_args: list[str], text: str, ranks: Ranks) -> None:
    """Generate on this rank, together with the others, and print the text."""
    if ranks.launcher is not None:
        die_with_parent(ranks.launcher.pid)
    job, place = find_decoder(options, job_args)
    config, tokenizer = job.config, job.tokenizer()
    if ranks.world_size > 1:
        model = inference_model.load_model_over_ranks(job, place, ranks)
    else:
        model, _ = inference_model.load_model(job, place, torch.device(device_type()))
        store_for_single_rows(model)
    print(f"{config.model.name} {config.model.flavor}, {place.name}", file=sys.stderr)
    sampling = sampling_of(options, job.model, place)
    # without a begin token, a document begins after the end of the previous one
    start = tokenizer.begin_ids or [tokenizer.eos_id]
    prompt_ids = tokenizer.encode(text)
    reader, context = reader_for(model, config.training.seq_len)
    tokens = sample(
        reader,
        start + prompt_ids,
        tokenizer,
        max_new_tokens=options.max_new_tokens,
        context=context,
        seed=options.seed,
        **sampling,
        ends=job.model.end_ids(place),
        agree=inference_model.broadcast_from_first if ranks.world_size > 1 else lambda choice: choice,
    )
    print(text, end="", flush=True)
    times: list[float] = []
    for piece in decode_stream(noting_times(tokens, times), prompt_ids, tokenizer):
        print(piece.translate(CONTROLS), end="", flush=True)
    print(flush=True)
    if len(times) > 1:
        rate = (len(times) - 1) / (times[-1] - times[0])
        print(f"{len(times)} tokens, after the first at {rate:.4g} tokens/s", file=sys.stderr)


def sampling_of(options: argparse.Namespace, model: JobModel, weights: Path) -> dict[str, Any]:
    """Return temperature, top_k and top_p: the command line's, generation_config.json's (printed), or the defaults."""
    folder = model.generation_folder(weights)
    from_file, unsupported = ({}, {}) if folder is None else sampling_options(folder)
    chosen = {name: value for name in options.sampling if (value := getattr(options, name)) is not None}
    if not 0 < chosen.get("top_p", 1) <= 1:
        raise JobError(f"--top-p: given {chosen['top_p']:g}; allowed: {SAMPLING['top_p']}")
    if applied := {name: value for name, value in from_file.items() if name not in chosen}:
        unused = f"; not applied: {_listed(unsupported)}" if unsupported else ""
        print(f"{GENERATION}: {_listed(applied)}{unused}", file=sys.stderr)
    return options.sampling | from_file | chosen


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def noting_times(tokens: Iterator[int], times: list[float]) -> Iterator[int]:
    """Yield the tokens and append the time, in seconds, at which each arrives."""
    for token in tokens:
        times.append(time.perf_counter())
        yield token


def find_decoder(options: argparse.Namespace, job_args: list[str]) -> tuple[ResolvedJob, Path]:
    """Return the job and the path of the weights of a model that can generate text.

    Weights with a config.json that says bfloat16 are computed with in that type, unless a job or an option says
    otherwise. Raises JobError for another kind of model, and as `find_checkpoint`.
    """
    job, place = find_checkpoint(Path(options.folder), options.config, job_args, options.best)
    require_causal_decoder(job.model)
    given_names = {argument.partition("=")[0] for argument in job_args}
    hf_config = find_text_config(place) or {}
    is_stored_in_bfloat16 = "bfloat16" in (hf_config.get("dtype"), hf_config.get("torch_dtype"))
    if is_stored_in_bfloat16 and options.config is None and not given_names & {"--job.config_file", "--training.dtype"}:
        job = job.with_options({"training.dtype": "bfloat16"})
    return job, place


def require_causal_decoder(model: JobModel) -> None:
    """Raise JobError for a model that does not predict the next token."""
    args, name = model.args, model.model.name
    if not getattr(args, "causal", True):
        description = "predicts masked words from both sides"
    elif getattr(args, "n_classes", 0):
        description = "gives rewards" if args.n_classes == 1 else f"distinguishes {args.n_classes} classes"
    else:
        return
    raise JobError(f"text generation needs a decoder, but this {name} {description}; give a causal language model")


def prompt_of(options: argparse.Namespace) -> str:
    if not options.prompt_file:
        return options.prompt
    try:
        from_stdin = options.prompt_file == "-"
        content = sys.stdin.buffer.read() if from_stdin else read_file(options.prompt_file, LARGEST_PROMPT)
        return content.decode()
    except FileError as error:
        raise JobError(
            f"--prompt-file {options.prompt_file} {error.reason}; give a text file, or - for stdin"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"--prompt-file {options.prompt_file}: {error}; give a text file in UTF-8") from None


def find_checkpoint(
    folder: Path, config_path: str | None, job_args: list[str] | None = None, best: bool = False
) -> tuple[ResolvedJob, Path]:
    """Return the job and the path of the weights: `folder` itself, or its newest complete (or `best`) checkpoint.

    `job_args` are further options of the job. Raises JobError if the job or the weights are missing, or if the model or
    tokenizer cannot be built.
    """
    job = find_job(folder, (["--job.config_file", config_path] if config_path else []) + (job_args or []))
    checkpoints = folder.resolve() / job.config.checkpoint.folder
    if best:
        return job, best_in(checkpoints if checkpoints.is_dir() else folder.resolve()).folder
    return job, find_weights(checkpoints if checkpoints.is_dir() else folder.resolve())[1]


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: list[int],
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
    top_p: float = 1.0,
    agree: Callable[[torch.Tensor], torch.Tensor] = lambda choice: choice,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Yield new token ids, up to `max_new_tokens`, the end of the document, or one of `ends`.

    `agree`: maps this rank's choice, an id [1], to the one that all ranks use.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    ids = torch.tensor([prompt], device=device)
    for _ in range(max_new_tokens):
        logits = model(ids[:, -context:])[0, -1, : tokenizer.vocab_size].float()
        if temperature == 0:
            choice = logits.argmax(keepdim=True)
        else:
            if 0 < top_k < len(logits):
                logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
            # in double precision and relative to the largest, so that no temperature, however low, divides 0 by 0
            scaled = (logits - logits.max()).double() / temperature
            probabilities = torch.softmax(scaled, 0)
            probabilities = _nucleus(probabilities, top_p) if top_p < 1 else probabilities
            choice = torch.multinomial(probabilities, 1, generator=generator)
        choice = agree(choice)
        token = int(choice)
        if token == tokenizer.eos_id or token in ends:
            return
        yield token
        ids = torch.cat([ids, choice[None]], dim=1)


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return probabilities [V] of which only the largest are not 0: as few as together have at least `top_p`."""
    ordered, ids = probabilities.sort(descending=True)
    ordered[ordered.cumsum(0) - ordered >= top_p] = 0
    return torch.zeros_like(probabilities).scatter(0, ids, ordered)


JOB = "config.toml"
ALL_OF_IT = ("--job.config_file", "--model.name", "--model.flavor")
LONGEST_CONTEXT = 8192
"""Maximum seq_len, in tokens, for a model without a job. A job can set a larger one."""


def find_job(path: Path, arguments: list[str], with_tokenizer: bool = True) -> ResolvedJob:
    """Return the job of the weights at `path`: the given one, that of the run that wrote them, or one with the sizes of
    the config.json next to them.

    `arguments` are options of a job, as on the command line. They take precedence, and if they name a job or a model,
    nothing else is read. Raises JobError if the model is unknown, or if the model or tokenizer cannot be built.
    """
    path = path.resolve()
    if not path.exists():
        remedy = "give the dump_folder of a run, a checkpoint, an export or a folder of Hugging Face"
        raise JobError(f"{path}: no such file or folder; {remedy}")
    home = path.parent if path.is_file() else path
    is_recorded = False
    if not any(argument.startswith(ALL_OF_IT) for argument in arguments):
        homes = (home, home.parent, home.parent.parent)
        jobs = [folder / JOB for folder in homes if (folder / JOB).is_file()]
        hf_config = find_text_config(path)
        is_recorded = bool(jobs) and hf_config is None
        if hf_config is not None:
            given_names = {argument.partition("=")[0] for argument in arguments}
            ignored_keys = manager.load(arguments).model.ignore_config_keys
            hf_arguments = _hf_arguments(path, home, hf_config.get("model_type"), ignored_keys)
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
    job = ResolvedJob(config, 1, device_type())
    if is_recorded and config.data.tokenization_version is None:  # the job that an earlier version has recorded
        job = job.with_options({"data.tokenization_version": VERSION_WITHOUT_RECORD})
    facts, faults = without_unknown_names(Facts(job))
    of_the_model = (folder_has_sizes, model_sizes, positions_are_known, *OF_THE_MODEL)
    faults += judge(facts, (*of_the_model, *[tokenizer_fits] * with_tokenizer))
    if not with_tokenizer:
        faults = [fault for fault in faults if fault.key != "model.tokenizer_path"]
    if faults:
        raise ConfigError(faults)
    return job


def _hf_arguments(path: Path, home: Path, model_type: object, ignored_keys: list[str]) -> list[str]:
    """Return the options for a Hugging Face folder or file, with the model's context up to LONGEST_CONTEXT."""
    family = family_for_model_type(model_type)
    if family is None:
        known_types = sorted({name for config in CONFIG_CONVERTERS.values() for name in config.model_types})
        raise JobError(f"{path}: model_type = {model_type!r}; allowed: {', '.join(known_types)}")
    args = CONFIG_CONVERTERS[family].ignoring(ignored_keys).args_from_folder(path)
    longrope = getattr(args, "longrope", None)
    length = longrope.original_max_seq_len if longrope else args.max_seq_len
    arguments = [f"--model.name={family}", "--model.flavor=from_hf", f"--model.hf_folder={path}"]
    return [*arguments, f"--model.tokenizer_path={home}", f"--training.seq_len={min(length, LONGEST_CONTEXT)}"]


def names_its_tokenizer(model: Model) -> bool:
    """Return True if the job sets a tokenizer. The default is for debugging and does not fit a larger model."""
    return model.tokenizer_path != options()["model.tokenizer_path"].default
