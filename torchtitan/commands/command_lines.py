"""The options of every command. Needs no torch, so that help and shell completion are quick."""

import argparse
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from importlib.metadata import EntryPoint
from os.path import expanduser
from pathlib import Path
from pkgutil import resolve_name

from torchtitan.commands.command_parser import (
    CommandParser,
    OneOf,
    duration,
    number_above_0,
    number_from_0,
    plan_degrees,
    relative_time,
    relative_times,
    share_above_0,
    size_in_bytes,
    whole_number,
)
from torchtitan.core.files import shipped_jobs
from torchtitan.core.hardware import known_hardware
from torchtitan.core.hub import local_folder
from torchtitan.core.plugins import COMMAND_OPTIONS, plugin_entries
from torchtitan.core.plugins import PARSERS as PARSERS_OF_COMMANDS
from torchtitan.metrics.goodput import GPU_HOURS_PER_FAILURE
from torchtitan.planner.failures import RESTART_SECONDS
from torchtitan.process.ranks import likely_device

SHELLS = ("bash", "zsh", "fish")
LARGEST_MULTIPLE = 2**16
SPEEDS = {
    "inside": "GB/s that a rank sends to ranks of the same machine",
    "outside": "GB/s that a rank sends to other machines",
    "machine": "ranks per machine",
    "tflops": "TFLOP/s that a rank reaches: peak of its matrix products times MFU (default 40 %%)",
}
"""Options of `estimate --traffic`, with help. The hardware gives their defaults."""
USUAL_GPU = "h100-80"
"""Hardware of `estimate --traffic` without --gpu."""
FOLDER = "a run's dump_folder, a checkpoint, an export, a Hugging Face folder, or hf://owner/name"
FORMS = {
    "hf": "a Hugging Face folder",
    "file": "one safetensors file",
    "native": "an export of this project",
    "torchtitan-v0.2": "a checkpoint for PyTorch's torchtitan v0.2",
    "torchtitan-main": "a checkpoint for PyTorch's torchtitan of August 2026",
}
"""Targets of `convert`."""


def parse_command(command: str, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a command, and the job's arguments. Raises JobError for invalid arguments."""
    return parser_of(command).parse(argv)


def parser_of(command: str) -> CommandParser:
    """Return the parser of a command. `train` has none: it takes a job's options."""
    return PARSERS[command]()


def _check() -> CommandParser:
    parser = CommandParser(
        "check",
        "Each job is checked by itself, with the options given. For a job without faults the memory of a rank is "
        "predicted by `torchtitan estimate`, which takes seconds. Exit code: 0 if nothing is wrong, 2 otherwise.",
        takes="job",
    )
    _add_ranks_and_device(parser)
    parser.add_argument("--no-memory", action="store_true", help="do not predict the memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object: faults, warnings and the exit code")
    parser.add_argument("--upgrade", action="store_true", help="translate a job of PyTorch's torchtitan")
    upgrade = plugin_entries(COMMAND_OPTIONS).get("--upgrade")
    eras = OneOf(lambda: upgrade.load().ERAS) if upgrade else str
    parser.add_argument("--from", dest="era", type=eras, metavar="ERA", help="era of the job for --upgrade")
    parser.add_argument("--help-config", action="store_true", help="print all options of a job")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of a job, for editors")
    return parser


def _add_ranks_and_device(parser: CommandParser) -> None:
    ranks = "ranks of the job (default: the fewest that its parallel degrees allow)"
    parser.add_argument("--world-size", type=whole_number(1), metavar="N", help=ranks)
    device = "device of the ranks, also one that this machine lacks (default: its own)"
    parser.add_argument("--device", type=OneOf(("cpu", "cuda")), default=likely_device(), metavar="DEVICE", help=device)


def _estimate() -> CommandParser:
    codes = "Exit code: 0 if it fits or no limit is known, 1 if not, 2 for faults, 3 if the step fails."
    parser = CommandParser("estimate", codes, "job")
    _add_ranks_and_device(parser)
    memory = "memory of a rank, with a unit as in 80GiB (default: memory.limit, or --gpu's, or this machine's)"
    parser.add_argument("--memory", type=size_in_bytes, metavar="SIZE", help=memory)
    gpu = f"{', '.join(known_hardware())}, or a file: its memory, and its speeds for --traffic (default {USUAL_GPU})"
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    parser.set_defaults(device=None)
    cuda = "rehearse the whole step on a fake CUDA: torchtitan rehearse, with its options"
    parser.add_argument("--cuda", action="store_true", help=cuda)
    remedies = "do not look for changes that make the job fit"
    parser.add_argument("--no-remedies", action="store_true", help=remedies)
    parser.add_argument(
        "--traffic", action="store_true", help="also show the bytes that a rank sends per step, by mesh axis"
    )
    for name, description in SPEEDS.items():
        kind = whole_number(1) if name == "machine" else number_above_0
        parser.add_argument(f"--{name}", type=kind, metavar="X", help=description)
    return parser


def _rehearse() -> CommandParser:
    parser = CommandParser(
        "rehearse",
        "Needs Linux and g++. Exit code: 0 if nothing is wrong, 1 if the step fails, ranks disagree on a collective or "
        "the host waits for the device where no option asks for it, 2 for faults.",
        takes="job",
    )
    ranks = "ranks of the job (default: the fewest that its parallel degrees allow)"
    parser.add_argument("--world-size", type=whole_number(1), metavar="N", help=ranks)
    chosen = "ranks to rehearse (default: 0, its neighbor along each axis, and ranks at both ends of a pipeline)"
    parser.add_argument("--ranks", type=_whole_numbers, metavar="N,N", help=chosen)
    layers = "rehearse all layers, also of a job for which that takes minutes"
    parser.add_argument("--all-layers", action="store_true", help=layers)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="trace of the predicted step, .json for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _manifest() -> CommandParser:
    parser = CommandParser("manifest", "Paths in the job are those of the cluster.", takes="job")
    parser.add_argument("--for", dest="scheduler", type=OneOf(("slurm", "k8s")), required=True, help="slurm or k8s")
    parser.add_argument("--nodes", type=whole_number(1), default=1, metavar="N", help="machines (default 1)")
    parser.add_argument("--gpus", type=whole_number(1), default=8, metavar="N", help="GPUs of a machine (default 8)")
    volume = "shared storage: the claim of a volume and the path at which it is mounted; may be repeated"
    parser.add_argument("--volume", action="append", default=[], metavar="CLAIM:PATH", help=volume)
    grace = "seconds from a stop to the end (default: for a step and a save, by the size of the model)"
    parser.add_argument("--grace", type=whole_number(1), metavar="S", help=grace)
    for name, description in (
        ("image", "container image, see the Dockerfile"),
        ("name", "name of the job (default: by its dump_folder)"),
        ("time", "slurm: time limit (default 24:00:00)"),
        ("shm", "k8s: shared memory of a pod (default 16Gi)"),
        ("queue", "k8s: queue of Kueue, which admits all pods at once"),
    ):
        parser.add_argument(f"--{name}", metavar=name.upper(), help=description)
    return parser


def _list() -> CommandParser:
    parser = CommandParser("list", "Exit code: 2 if an installed package gives something that cannot be used.")
    kinds = OneOf("torchtitan.commands.list:KIND_NAMES")
    parser.add_argument("kinds", nargs="*", type=kinds, metavar="KIND", help=f"one of {', '.join(kinds.names)}")
    return parser


def _contract() -> CommandParser:
    parser = CommandParser("contract", "Exit code: 0 if everything holds, 1 if not, 2 if the package cannot be tried.")
    package = "an installed package, or MODULE:NAME of what its entry point would lead to"
    parser.add_argument("package", metavar="PACKAGE", help=package)
    only = "try one thing alone: family, task, optimizer, adapter or schedule, and its name"
    parser.add_argument("--only", metavar="KIND:NAME", help=only)
    options = "an option other than its default, for one task, optimizer or adapter; may be repeated"
    parser.add_argument("--options", action="append", default=[], metavar="NAME=VALUE", help=options)
    ranks = "leave out plans of more ranks (default 4)"
    parser.add_argument("--ranks", type=whole_number(1), default=4, metavar="N", help=ranks)
    parser.add_argument("--list", action="store_true", help="print the rows without running them")
    return parser


def _preview() -> CommandParser:
    parser = CommandParser("preview", takes="job")
    parser.add_argument("--samples", type=whole_number(1), default=2, metavar="N", help="samples (default 2)")
    tokens = "tokens of each sample (default 200)"
    parser.add_argument("--tokens", type=whole_number(1), default=200, metavar="N", help=tokens)
    parser.add_argument("--ids", action="store_true", help="show the token ids below the text")
    return parser


def _schedule() -> CommandParser:
    parser = CommandParser("schedule", "Without a job the options describe the pipeline.", takes="job")
    count = whole_number(1, 4096)
    parser.add_argument("--pp", type=whole_number(2, 4096), metavar="N", help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=count, metavar="N", help="microbatches (default 4 per rank)")
    table = parser.add_mutually_exclusive_group()
    schedules = OneOf("torchtitan.parallelisms.pipeline.cut:SCHEDULES")
    table.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(schedules.names)} (default 1F1B)")
    table.add_argument("--csv", help="CSV table instead: a row per rank, cells like 0F0, 1I3, 1W3, 2B1")
    chunks = "stages per rank (default: the schedule's usual number)"
    parser.add_argument("--chunks", dest="stages_per_rank", type=count, metavar="N", help=chunks)
    costs = "relative times of forward, input gradient and weight gradient of a rank's layers (default 1:1:1)"
    equal = (Fraction(1),) * 3
    parser.add_argument("--costs", type=relative_times, default=equal, metavar="F:I:W", help=costs)
    parser.add_argument(
        "--p2p", type=relative_time, default=Fraction(0), metavar="T", help="time of a message (default 0)"
    )
    overlap = "time of DualPipeV's overlapping pairs, as a fraction of F + B (default: they do not overlap)"
    parser.add_argument("--overlap", type=share_above_0, metavar="X", help=overlap)
    merge = "run I and W as one action, as recompute requires"
    parser.add_argument("--merge-backward", action="store_true", help=merge)
    parser.add_argument("--out", type=Path, default=Path("schedule.png"), help=".png or .svg (default schedule.png)")
    parser.add_argument("--write-csv", type=Path, metavar="FILE", help="also write the table")
    return parser


def _bench() -> CommandParser:
    parser = CommandParser("bench", "Each combination runs in separate processes and in a separate folder.", "job")
    sweep = "an option and its values, as training.seq_len=512,1024 or model=llama3.2/1B,qwen3/0.6B; may be repeated"
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE", help=sweep)
    parser.add_argument("--ranks", type=whole_number(1), default=1, metavar="N", help="ranks per job (default 1)")
    steps = "measured steps, after a first one (default 3)"
    parser.add_argument("--steps", type=whole_number(1), default=3, metavar="N", help=steps)
    _add_timeout(parser, "time limit of each combination")
    parser.add_argument("--out", default="bench.jsonl", help="file to append a JSON line each (default bench.jsonl)")
    parser.add_argument("--plot", help="picture to draw, .svg or .png")
    hardware = "measure this machine, with messages between --ranks, and write a new file for `estimate --gpu`"
    parser.add_argument("--hardware", type=Path, metavar="FILE", help=hardware)
    return parser


def _add_timeout(parser: CommandParser, purpose: str) -> None:
    help_text = f"{purpose} (default 900)"
    parser.add_argument("--timeout", type=number_above_0, default=900.0, metavar="SECONDS", help=help_text)


def _sweep() -> CommandParser:
    parser = CommandParser(
        "sweep",
        "Each combination is a run in a folder named after its values. The same command completes an interrupted "
        "sweep. Exit code: 0 if all runs ended well, 1 if not.",
        "job",
    )
    over = "an option and its values, as optimizer.lr=1e-4,3e-4,1e-3; may be repeated"
    parser.add_argument("--over", action="append", default=[], metavar="KEY=VALUE,VALUE", help=over)
    workers = "runs at the same time, which share the GPUs or CPU cores (default 1)"
    parser.add_argument("--workers", type=whole_number(1), default=1, metavar="N", help=workers)
    parser.add_argument("--ranks", type=whole_number(1), default=1, metavar="N", help="ranks per run (default 1)")
    folder = "folder of the sweep (default: the job's dump_folder with _sweep at its end)"
    parser.add_argument("--to", type=Path, metavar="FOLDER", help=folder)
    return parser


def _prepare() -> CommandParser:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = CommandParser(
        "prepare", "With a job: tokenize all data that the job would tokenize before it starts.", takes="job"
    )
    datasets = OneOf(lambda: [name for name in resolve_name("torchtitan.datasets:DATASETS") if name != "tokens"])
    parser.add_argument("--dataset", default="text", type=datasets, metavar="NAME", help="dataset (default text)")
    parser.add_argument("--dataset-path", type=expanduser, help="file, folder or glob; a name for dataset huggingface")
    parser.add_argument("--text-field", default="text", help="field with text, ids or segments (default text)")
    parser.add_argument("--tokenizer-path", type=expanduser, help="tokenizer's file or folder, or the word bytes")
    parser.add_argument("--output", type=expanduser, help="folder to write")
    workers = f"tokenizing processes (default {cpus})"
    parser.add_argument("--workers", type=whole_number(1), default=cpus, metavar="N", help=workers)
    policies = OneOf(("stop", "skip"))
    parser.add_argument(
        "--on-bad-data", default="stop", type=policies, metavar="{stop,skip}", help="for unreadable records"
    )
    parser.add_argument("--verify", type=expanduser, metavar="FOLDER", help="only compare the checksums of a folder")
    return parser


def _generate() -> CommandParser:
    parser = CommandParser("generate", takes="options")
    parser.add_argument("--prompt", default="", help="text to continue (default: the beginning of a document)")
    parser.add_argument("--prompt-file", metavar="FILE", help="file with the text; - is stdin")
    parser.add_argument("--ranks", type=whole_number(1), default=1, metavar="N", help="devices (default 1)")
    _add_sampling(parser, max_new_tokens=200, temperature=0.8)
    return parser


def _chat() -> CommandParser:
    parser = CommandParser("chat", "Reads questions line by line from the terminal or stdin.", takes="options")
    parser.add_argument("--system", help="system message of every conversation")
    formats = OneOf(lambda: resolve_name("torchtitan.datasets.formats:QUESTION_FORMATS"))
    parser.add_argument("--format", type=formats, metavar="NAME", help="format of questions (default: the job's)")
    parser.add_argument("--apart", action="store_true", help="each line begins a new conversation")
    _add_sampling(parser, max_new_tokens=500, temperature=0.0)
    return parser


def _add_sampling(parser: CommandParser, max_new_tokens: int, temperature: float) -> None:
    """Add the options of a command that generates text, with these defaults."""
    _add_checkpoint(parser)
    length = f"maximum number of tokens to generate (default {max_new_tokens})"
    parser.add_argument("--max-new-tokens", type=whole_number(1), default=max_new_tokens, metavar="N", help=length)
    file = "generation_config.json's, else"
    heat = f"0 always takes the likeliest token (default {file} {temperature:g})"
    parser.add_argument("--temperature", type=number_from_0, metavar="T", help=heat)
    top = f"number of likeliest tokens to sample from; 0: all (default {file} 50)"
    parser.add_argument("--top-k", type=whole_number(0), metavar="K", help=top)
    mass = f"sample from the likeliest tokens of this probability together (default {file} 1: all)"
    parser.add_argument("--top-p", type=number_from_0, metavar="P", help=mass)
    parser.set_defaults(sampling={"temperature": temperature, "top_k": 50, "top_p": 1.0})
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="N", help="seed for sampling (default 0)")


def _add_checkpoint(parser: CommandParser) -> None:
    """Add the options of a command that reads a run's weights."""
    parser.add_argument("folder", type=local_folder, help=FOLDER)
    parser.add_argument("--config", help="the job, if the folder has no config.toml")
    best = "take the best checkpoint of a run (checkpoint.best_metric) instead of the newest"
    parser.add_argument("--best", action="store_true", help=best)


def _evaluate() -> CommandParser:
    parser = CommandParser("evaluate", takes="options")
    _add_checkpoint(parser)
    samples = "segments, in whole documents, or documents per task; 0: all (default)"
    parser.add_argument("--samples", type=whole_number(0), default=0, metavar="N", help=samples)
    tasks = "lm-eval tasks to answer instead: names, separated by commas, or a task's YAML file, or a folder of them"
    parser.add_argument("--tasks", metavar="TASKS", help=tasks)
    sizes = "entries of a cache, separated by commas; 0: without (default: 0 and the job's)"
    parser.add_argument("--cache-sizes", type=_whole_numbers, metavar="N,N", help=sizes)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, help="picture to draw, .svg or .png")
    return parser


def _whole_numbers(text: str) -> list[int]:
    """Parse whole numbers separated by commas: of entries of a cache, of ranks."""
    return [whole_number(0)(part) for part in text.split(",")]


def _convert() -> CommandParser:
    parser = CommandParser("convert", "Options of a job name the model if nothing next to the weights does.", "options")
    source = "a run, a checkpoint, an export, a folder, a safetensors file or hf://owner/name"
    parser.add_argument("source", type=local_folder, help=source)
    parser.add_argument("target", help="folder to write, or file if the name ends in .safetensors")
    forms = "; ".join(f"{name}: {description}" for name, description in FORMS.items())
    kind = f"{forms} (default: native for a Hugging Face source, else hf)"
    parser.add_argument("--to", type=OneOf(FORMS, {"ours": "native"}), metavar=f"{{{','.join(FORMS)}}}", help=kind)
    tokens = "special tokens to add; their rows are the mean of the others"
    parser.add_argument("--add-tokens", nargs="+", default=[], metavar="TOKEN", help=tokens)
    parser.add_argument("--eos-token", metavar="TOKEN", help="token that ends a document; may be a new one")
    multiple = "round the rows of the vocabulary up to a multiple of N; 1 drops rows without a token"
    parser.add_argument("--vocab-multiple", type=whole_number(1, LARGEST_MULTIPLE), metavar="N", help=multiple)
    _add_dtype(parser, "dtype of the weights (default: unchanged)")
    return parser


def _add_dtype(parser: CommandParser, description: str) -> None:
    dtypes = OneOf(("float32", "bfloat16", "float16"))
    parser.add_argument("--dtype", type=dtypes, metavar="{float32,bfloat16,float16}", help=description)


def _export() -> CommandParser:
    details = "A run with an adapter writes it alone, unless --merge is given. Exit code: 1 if the copy differs."
    parser = CommandParser("export", details)
    _add_checkpoint(parser)
    parser.add_argument("--to", required=True, metavar="FOLDER", help="folder to write, which must not exist")
    push = "repository of the Hugging Face Hub to upload the folder to; a new one is private"
    parser.add_argument("--push", metavar="OWNER/NAME", help=push)
    public = "create a repository that everyone can read; asks first"
    parser.add_argument("--public", action="store_true", help=public)
    formats = "hf: a Hugging Face folder (default), gguf: a file for llama.cpp and a Modelfile for Ollama"
    parser.add_argument("--format", type=OneOf(("hf", "gguf")), default="hf", metavar="{hf,gguf}", help=formats)
    parser.add_argument("--merge", action="store_true", help="write the whole model, with the adapter merged into it")
    _add_dtype(parser, "dtype of the model's weights (default: training.dtype of the run)")
    base = "quantized base to merge into: the original weights (default), or those that the run computed with"
    bases = OneOf(("original", "unpacked"))
    parser.add_argument("--merge-base", type=bases, default="original", metavar="{original,unpacked}", help=base)
    rounded = "write weights as quantization-aware training rounds them; a matrix tied to the embedding is not rounded"
    parser.add_argument("--rounded", action="store_true", help=rounded)
    return parser


def _download() -> CommandParser:
    details = "A source that is in the cache is compared with the hub and brought up to date."
    parser = CommandParser("download", details)
    source = "hf://owner/name, hf://owner/name@revision, or hf://datasets/owner/name for records"
    parser.add_argument("source", nargs="+", help=source)
    only = "what to download: sizes and tokenizer, or with the weights (default)"
    parser.add_argument("--only", type=OneOf(("tokenizer", "weights")), default="weights", metavar="WHAT", help=only)
    return parser


def _of_plugin(entry: EntryPoint) -> CommandParser:
    return entry.load()()


def _plan() -> CommandParser:
    order = "Plans are ordered by a step on a network that is slower than expected; those that may fit come first."
    parser = CommandParser("plan", f"{order} Exit code: 0 if there is a plan, 2 if none is legal.", "job")
    count = whole_number(1)
    parser.add_argument("--gpus", type=count, required=True, metavar="N", help="number of GPUs")
    gpu = f"{', '.join(known_hardware())}, or a file (default {USUAL_GPU})"
    parser.add_argument("--gpu", default=USUAL_GPU, metavar="NAME", help=gpu)
    parser.add_argument("--machine", type=count, metavar="N", help="GPUs in a machine (default: the hardware's)")
    memory = "memory of a GPU, with a unit as in 80GiB (default: the job's memory.limit, or the hardware's)"
    parser.add_argument("--memory", type=size_in_bytes, metavar="SIZE", help=memory)
    tokens = "tokens of the whole run, as 15e12 (default: the job's)"
    parser.add_argument("--tokens", type=number_above_0, metavar="X", help=tokens)
    price = "price of a GPU for an hour, in any currency (default: the hardware's)"
    parser.add_argument("--price", type=number_above_0, metavar="X", help=price)
    deadline = "longest duration of the run, as 30d, 12h or 45min"
    parser.add_argument("--deadline", type=duration, metavar="TIME", help=deadline)
    parser.add_argument("--budget", type=number_above_0, metavar="X", help="highest price of the run")
    parser.add_argument("--top", type=whole_number(1, 100), default=10, metavar="N", help="plans to show (default 10)")
    mtbf = f"mean hours between two failures of a GPU, as {GPU_HOURS_PER_FAILURE:g}: adds restarts and saves to the run"
    parser.add_argument("--mtbf-hours", type=number_above_0, metavar="X", help=mtbf)
    save = "time for which a save blocks the run (default: by the size of the state)"
    parser.add_argument("--save-seconds", type=number_above_0, metavar="X", help=save)
    restart = f"time from a failure to the next step (default {RESTART_SECONDS:g})"
    parser.add_argument("--restart-seconds", type=number_above_0, metavar="X", help=restart)
    explain = "show where the time and memory of the N-th plan go"
    parser.add_argument("--explain", type=whole_number(1, 100), metavar="N", help=explain)
    rehearse = (
        "rehearse the first N plans, and up to N that may fit, for their memory to the byte; a minute each or less"
    )
    parser.add_argument("--rehearse", type=whole_number(1, 100), metavar="N", default=0, help=rehearse)
    quick = "do not search plans for other hardware"
    parser.add_argument("--quick", action="store_true", help=quick)
    runs = "dump_folders of runs on this hardware: fit the formula to their measured steps"
    parser.add_argument("--from", dest="runs", type=Path, nargs="+", default=[], metavar="RUN", help=runs)
    write = "write the best plan to a .toml file that extends the job"
    parser.add_argument("--write", type=Path, metavar="FILE", help=write)
    plot = "draw time, memory and price of the plans, .png or .svg"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="trace of the predicted step, .json for Perfetto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


# Commands that inspect a run


def _run() -> CommandParser:
    parser = CommandParser(
        "run",
        "What follows the script belongs to it, except for --ranks right after it. The exit code is the script's, or "
        "one of docs/troubleshooting.md. torchrun runs the same script, also on several machines.",
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="a Python file, and its arguments")
    ranks = "processes on this machine that run the script (default 1)"
    parser.add_argument("--ranks", type=whole_number(1), default=1, metavar="N", help=ranks)
    restarts = (
        "restarts of all ranks after a crash without a new checkpoint in between (default: job.max_restarts of the "
        "engine's job if it saves checkpoints, else 0)"
    )
    parser.add_argument("--max-restarts", type=whole_number(0), metavar="N", help=restarts)
    return parser


def _plot() -> CommandParser:
    parser = CommandParser("plot")
    parser.add_argument("folder", type=Path, help="a run's dump_folder, or its metrics.jsonl")
    parser.add_argument("--to", type=Path, metavar="FILE", help="file to draw into: .html, .svg or .png")
    return parser


def _diff() -> CommandParser:
    parser = CommandParser(
        "diff",
        "Two runs are compared by options, logged steps and checkpoints, as far as both have them; else the weights. "
        "Options of logging and saving are left out. Exit code: 0 if all is equal, 1 if not, 2 if nothing can be "
        "compared.",
    )
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help=FOLDER)
    tolerance = "largest difference that counts as equal, relative to a tensor's or metric's largest value (default 0)"
    parser.add_argument("--tolerance", type=number_from_0, default=0.0, metavar="X", help=tolerance)
    parser.add_argument("--json", action="store_true", help="print one JSON object with all differences")
    return parser


def _checkpoints() -> CommandParser:
    parser = CommandParser("checkpoints")
    parser.add_argument("folder", help="a run's dump_folder, or the folder of its checkpoints")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    return parser


def _replay() -> CommandParser:
    parser = CommandParser(
        "replay",
        "One process makes the step, whatever the plan of the run. Nothing is written. With --under, and options of a "
        "job for both steps: exit code 0 if the two are equal, 1 if not, 2 for a plan that cannot be.",
        takes="options",
    )
    parser.add_argument("run", help="a run's dump_folder")
    under = "make the step on gloo ranks under this plan, as tp=2,pp=2, and hold it against one device"
    parser.add_argument("--under", type=plan_degrees, metavar="PLAN", help=under)
    _add_timeout(parser, "time limit of --under for each of the two steps")
    parser.set_defaults(timeout=None)
    parser.add_argument("--step", type=whole_number(1), required=True, metavar="N", help="step, counted from 1")
    parser.add_argument(
        "--rank", type=whole_number(0), metavar="R", help="show only the samples of this rank of the run"
    )
    samples = "samples to print as text, highest losses first (default 3)"
    parser.add_argument("--samples", type=whole_number(0), metavar="N", help=samples)
    tokens = "tokens of each printed sample (default 200)"
    parser.add_argument("--tokens", type=whole_number(1), metavar="N", help=tokens)
    return parser


def _verify() -> CommandParser:
    parser = CommandParser(
        "verify",
        "Steps are made from one checkpoint to the next, on gloo ranks. Nothing is written. Exit code: 0 if "
        "all is equal, 1 if not, 2 if nothing can be made again.",
        takes="options",
    )
    parser.add_argument("run", help="a run's dump_folder, with its checkpoints")
    steps = "random steps to make again, the last one among them (default 3)"
    parser.add_argument("--steps", type=whole_number(1), default=3, metavar="K", help=steps)
    seed = "seed of the choice (default: a new one, which is printed)"
    parser.add_argument("--seed", type=whole_number(0), metavar="N", help=seed)
    under = "another plan than the run's, as tp=2,pp=2, or tp=1 for one device (default: the run's, if on processors)"
    parser.add_argument("--under", type=plan_degrees, metavar="PLAN", help=under)
    _add_timeout(parser, "time limit of the steps between two checkpoints")
    return parser


def _report() -> CommandParser:
    parser = CommandParser("report", "The page fetches nothing. Needs pip install 'torchtitan-toml[report]'.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's dump_folder")
    parser.add_argument("--to", type=Path, metavar="FILE", help="page (default report.html)")
    terminal = "draw the loss in the terminal instead; --to then takes .html, .svg or .png"
    parser.add_argument("--terminal", action="store_true", help=terminal)
    return parser


def _why_parser() -> CommandParser:
    parser = CommandParser("why", "It reads the records that the run has logged, and lists what these cannot show.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's dump_folder")
    gpu = "hardware of the run: a name of `torchtitan plan --help`, or a file (default: by the device that it recorded)"
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    parser.add_argument("--json", action="store_true", help="print one JSON object: causes, remedies and the lines")
    return parser


# Jobs and the shell


def _presets() -> CommandParser:
    parser = CommandParser(
        "presets",
        "ls [WORD ...] lists the jobs with all the words in their first comment; cat NAME prints a job; cp "
        "NAME [FILE] copies it "
        "to a new FILE (default NAME.toml), with runs in outputs/FILE; init [FILE] writes a commented first job.",
    )
    actions = OneOf(("ls", "cat", "cp", "init"))
    parser.add_argument("action", type=actions, metavar="{ls,cat,cp,init}", help="action")
    parser.add_argument("arguments", nargs="*", metavar="NAME", help=f"of {', '.join(shipped_jobs())}")
    parser.add_argument("--model", metavar="FOLDER", help="cp: Hugging Face folder of the model to train")
    parser.add_argument("--data", metavar="FILES", help="cp: records to train on: a file, a folder or a glob")
    return parser


def _init() -> CommandParser:
    parser = CommandParser("init", "The job runs unchanged, on text of Python's library.")
    parser.add_argument("file", nargs="?", default="job.toml", help="file to write (default job.toml)")
    return parser


def _completion() -> CommandParser:
    parser = CommandParser("completion", "The script contains all options; write it again after an update.")
    parser.add_argument("shell", type=OneOf(SHELLS), metavar="{bash,zsh,fish}", help="the shell")
    return parser


PARSERS: dict[str, Callable[[], CommandParser]] = {
    "check": _check,
    "estimate": _estimate,
    "rehearse": _rehearse,
    "plan": _plan,
    "manifest": _manifest,
    "list": _list,
    "contract": _contract,
    "preview": _preview,
    "schedule": _schedule,
    "bench": _bench,
    "sweep": _sweep,
    "prepare": _prepare,
    "generate": _generate,
    "evaluate": _evaluate,
    "chat": _chat,
    **{name: partial(_of_plugin, entry) for name, entry in plugin_entries(PARSERS_OF_COMMANDS).items()},
    "convert": _convert,
    "run": _run,
    "plot": _plot,
    "report": _report,
    "why": _why_parser,
    "diff": _diff,
    "replay": _replay,
    "verify": _verify,
    "checkpoints": _checkpoints,
    "export": _export,
    "download": _download,
    "presets": _presets,
    "init": _init,
    "completion": _completion,
}
