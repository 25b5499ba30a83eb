"""The picture of an evaluation: the loss by the place of a token in its document, a line for each size of a cache.

`torchtitan evaluate FOLDER`: what a model makes of held-out documents: loss, perplexity, bits per byte, and all of
them by the place of a token in its document.

FOLDER is as for `torchtitan generate`. The documents are those of the job's validation, the held-out ones of a split,
or those of the options given (--validation.dataset=text --validation.dataset_path=books), each read from beginning to
end in segments of validation.seq_len (or training.seq_len) tokens. Losses and bytes are of what is predicted: of
records, where only answers are trained, these. A model with a cache (adapter.kind = "neurocache") is measured for
several sizes of it. --out keeps the figures as JSON, --plot draws them.

With --tasks it answers the tasks of lm-eval that a folder describes instead (evaluate_tasks.py), in the context of
training.seq_len. docs/finetuning.md shows such a folder.
"""

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from torchtitan.adapters.neurocache.sizes import misfits_of
from torchtitan.build import data as build_data
from torchtitan.build import parts as build
from torchtitan.commands.evaluate_tasks import evaluate_tasks, tasks_table
from torchtitan.commands.generate import best_option, find_checkpoint
from torchtitan.commands.job_of import refuse_strangers
from torchtitan.config.job import JobConfig, Validation, describe_sources
from torchtitan.core.errors import JobError
from torchtitan.datasets.segments import Documents, HeldOutSegments
from torchtitan.datasets.sources import PairFound
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.losses.position_loss import Measured, measure, names_of, total
from torchtitan.losses.tasks import TASKS
from torchtitan.metrics.plot import HELD_OUT, INK, LOSS, RATE, SPEED, STYLE, check_format
from torchtitan.models.decoder import Decoder
from torchtitan.process.distributed import device_type
from torchtitan.training import inference_model

COLORS = (LOSS, HELD_OUT, RATE, SPEED)


def draw(found: dict[str, Any], path: Path) -> None:
    """OSError where it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "evaluation"}):
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title("loss by place in the document", loc="left", fontweight="bold")
        names = list(found["runs"][0]["by_position"])
        for number, run in enumerate(found["runs"]):
            losses = [run["by_position"][name]["loss"] for name in names]
            label = f"{run['cache_size']:,} entries" if "cache_size" in run else f"loss {run['loss']:.4f}"
            axes.plot(names, losses, marker="o", color=COLORS[number % len(COLORS)], linewidth=1.8, label=label)
        axes.set_xlabel("tokens ahead in the document")
        axes.set_ylabel("nats per token")
        axes.legend(frameon=False, labelcolor=INK)
        dated: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, facecolor="white", **dated)


NO_TEXT = (
    "pairs of answers are no documents, so they have no perplexity; the run's metrics.jsonl has their validation_loss, "
    "and of training reward_accuracy and reward_margin; give documents by --validation.dataset and "
    "--validation.dataset_path"
)


def main(argv: list[str]) -> int:
    options, words = parse(argv)
    if options.plot:
        check_format(Path(options.plot))
    config, place = find_checkpoint(Path(options.folder), options.config, words, options.best)
    if options.tasks:
        found = evaluate_tasks(config, place, Path(options.tasks), options.samples)
        print(tasks_table(found))
    else:
        with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
            data = dataclasses.replace(config.data, cache_dir=config.data.cache_dir or folder)
            config = of_documents(dataclasses.replace(config, data=data))
            found = evaluate(config, place, options.samples, options.cache_sizes)
        print(table(found))
    try:
        if options.out:
            Path(options.out).write_text(json.dumps(found, indent=2) + "\n")
        if options.plot:
            draw(found, Path(options.plot))
    except OSError as error:
        raise JobError(f"the figures above were not written: {error}; give another name") from None
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of the command, and those of a job."""
    parser = argparse.ArgumentParser(
        prog="torchtitan evaluate",
        description="Loss, perplexity and bits per byte of held-out documents, by the place of a token in them.",
        epilog="Takes options of a job as well, such as --validation.dataset_path and --validation.local_batch_size.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", help="a run's dump_folder, a checkpoint, an export, a folder of Hugging Face")
    parser.add_argument("--samples", type=int, default=0, help="segments, in whole documents; 0: all (default)")
    tasks = "tasks of lm-eval to answer instead: a folder with their files, or one of these; --samples: of each"
    parser.add_argument("--tasks", metavar="PATH", help=tasks)
    sizes = "entries of a cache, several with commas; 0: without (default: 0 and the job's)"
    parser.add_argument("--cache-sizes", "--cache_sizes", type=_sizes, help=sizes)
    parser.add_argument("--out", help="a JSON file to write the figures into")
    parser.add_argument("--plot", help="a picture to draw of them, .svg or .png")
    parser.add_argument("--config", help="the job, when the folder has no config.toml")
    best_option(parser)
    options, words = parser.parse_known_args(argv)
    refuse_strangers(parser, words)
    if options.samples < 0:
        parser.error(f"--samples {options.samples}: must be at least 0")
    if options.tasks and (options.plot or options.cache_sizes):
        parser.error("--tasks: documents are measured with --plot and --cache-sizes; leave these out")
    return options, words


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 0:
        raise ValueError
    return sizes


def of_documents(config: JobConfig) -> JobConfig:
    """The job as it reads what is measured: whole documents, or with validation.split the records that the run has held
    out, as it made them. JobError where these are no documents. Validation data that are given stand above a split.
    """
    part, task = config.validation, TASKS[config.task.kind]
    if part.sources or part.dataset_path or part.dataset != Validation().dataset:
        part = dataclasses.replace(part, split=None)
    if part.split is None:
        kind = dataclasses.replace(config.task, kind="documents")
        return dataclasses.replace(config, task=kind, validation=part)
    if task.together > 1:
        raise JobError(f"validation.split: given {part.split:g}; {NO_TEXT}")
    if not task.packs:
        raise JobError(
            f"validation.split: given {part.split:g}; allowed: unset with task.kind = {config.task.kind}, which holds "
            "out no documents; give some by --validation.dataset and --validation.dataset_path"
        )
    return config


def evaluate(config: JobConfig, place: Path, samples: int, sizes: list[int] | None) -> dict[str, Any]:
    """Figures of the model that `place` holds."""
    args = build.model_args(config)
    if getattr(args, "n_classes", 0) or not getattr(args, "causal", True):
        raise JobError(f"{config.model.name} does not tell the next token, which is what is measured; give a decoder")
    tokenizer, seq_len = build.tokenizer(config), build_data.seq_len_of(config, "validation")
    try:
        documents = build_data.documents(config, "validation")
    except PairFound as error:
        where = str(error).partition(": ")[0]
        raise JobError(f"{where}: {NO_TEXT}") from None
    rows = config.validation.local_batch_size
    batches = HeldOutSegments(documents, samples, seq_len=seq_len, rows=rows, rank=0, ranks=1)
    check_caches(config, sizes, seq_len)
    model, _ = inference_model.filled_model(config, place, torch.device(device_type()))
    assert isinstance(model, Decoder)
    if sizes and model.memory is None:
        raise JobError("--cache-sizes: this model has no cache; leave it out")
    size_of = None if model.memory is None else config.adapter.neurocache.cache_size
    asked = [None] if size_of is None else sizes or [0, size_of]
    bytes_told = sum(_bytes_of(documents, document, tokenizer) for document in batches.order)
    chunks = config.training.loss_chunks or build.loss_chunks(config)
    data, read = describe_sources(config, "validation"), len(batches.order)
    if config.validation.split is not None:
        data += f", held out by validation.split = {config.validation.split:g}"
    print(f"{config.model.name} {config.model.flavor}, {place.name}: {read} documents of {data}", file=sys.stderr)
    runs = []
    for size in asked:
        if size is not None:
            model.memory.forget()
            model.memory.cache_size[False] = size
        parts = measure(model, batches, seq_len, chunks)
        whole = total(parts)
        of_bytes = whole.nats / math.log(2) / bytes_told if bytes_told else math.nan
        by_position = {name: _figures(part) for name, part in zip(names_of(seq_len), parts, strict=True) if part.tokens}
        told = {} if size is None else {"cache_size": size}
        runs.append(told | _figures(whole) | {"bits_per_byte": of_bytes, "by_position": by_position})
    found = {"of": str(place), "data": data, "documents": read, "seq_len": seq_len}
    return found | {"bytes": bytes_told, "runs": runs}


def check_caches(config: JobConfig, sizes: list[int] | None, seq_len: int) -> None:
    """JobError for a cache, the job's or one of --cache-sizes, that cannot hold a segment of `seq_len` tokens, or that
    the job's lookup cannot read.
    """
    options, args = config.adapter.neurocache, build.model_args(config)
    if config.adapter.kind != "neurocache":
        return
    for size in filter(None, sizes or [options.cache_size]):
        given = dataclasses.replace(options, cache_size=size)
        if wrong := list(misfits_of(given, args.n_layers, args.dim, seq_len)):
            told = f"--cache-sizes: given {size}" if sizes else f"segments of {seq_len} tokens"
            raise JobError(f"{told}: {'; '.join(map(str, wrong))}")


def _figures(measured: Measured) -> dict[str, Any]:
    return {"tokens": measured.tokens, "loss": measured.loss, "perplexity": measured.perplexity}


def _bytes_of(documents: Documents, document: int, tokenizer: Tokenizer) -> int:
    """Of the text of a document that is predicted, in UTF-8."""
    return len(tokenizer.decode(documents.predicted(document).tolist()).encode(errors="replace"))


def table(found: dict[str, Any]) -> str:
    """In lines, a row for each class of places."""
    lines = []
    for run in found["runs"]:
        if "cache_size" in run:
            lines.append(f"cache of {run['cache_size']:,} entries")
        lines.append(f"{'tokens ahead':>20} {'tokens':>12} {'loss':>9} {'perplexity':>12} {'bits/token':>11}")
        for name, row in (*run["by_position"].items(), ("all", run)):
            bits = row["loss"] / math.log(2)
            lines.append(
                f"{name:>20} {row['tokens']:>12,} {row['loss']:>9.4f} {row['perplexity']:>12.3f} {bits:>11.4f}"
            )
        lines.append(
            f"{run['bits_per_byte']:.4f} bits per byte of {found['bytes']:,}, {found['documents']:,} documents"
        )
    return "\n".join(lines)
