"""`torchtitan evaluate FOLDER`: loss, perplexity and bits per byte of held-out documents, also by token position.

FOLDER is as for `torchtitan generate`. The documents come from the job's validation data, the held-out split, or the
given options (--validation.dataset=text --validation.dataset_path=books). Each document is read from beginning to end
in segments of validation.seq_len (or training.seq_len) tokens. Losses and bytes count only tokens that the loss mask
includes, for example only the answers of records. A model with a cache is measured for several cache sizes. --out
writes the results as JSON. --plot draws the loss by token position, one line per cache size.

With --tasks the model answers tasks of lm-eval instead (plugins/eval_tasks), by their names there or described in a
folder, in a context of training.seq_len tokens. docs/finetuning.md shows such a folder.
"""

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from torchtitan.adapters import spec_of
from torchtitan.assembly.data import JobDatasets
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import find_checkpoint
from torchtitan.commands.schedule import check_file
from torchtitan.config.sections.training import Validation
from torchtitan.core.errors import JobError
from torchtitan.core.plugins import COMMAND_OPTIONS, loaded_plugin
from torchtitan.datasets.segments import Documents, HeldOutSegments
from torchtitan.datasets.sources import UnexpectedPair
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.losses.evaluation import PositionLoss, measure_position_losses, position_class_names, total_loss
from torchtitan.metrics.plot import HELD_OUT, INK, LOSS, RATE, SPEED, STYLE, check_format
from torchtitan.models.decoder import Decoder
from torchtitan.process.distributed import device_type
from torchtitan.training import inference_model

COLORS = (LOSS, HELD_OUT, RATE, SPEED)


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot the results of `evaluate` to `path`. Raises OSError if it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "evaluation"}):
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title("loss by place in the document", loc="left", fontweight="bold")
        names = list(results["runs"][0]["by_position"])
        for number, run in enumerate(results["runs"]):
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
    options, job_args = parse_command("evaluate", argv)
    if options.tasks and (options.plot or options.cache_sizes):
        raise JobError("--tasks: documents are measured with --plot and --cache-sizes; leave these out")
    tasks = loaded_plugin(COMMAND_OPTIONS, "--tasks") if options.tasks else None
    if options.plot:
        check_format(options.plot)
    for option in ("out", "plot"):
        check_file(option, getattr(options, option))
    job, path = find_checkpoint(Path(options.folder), options.config, job_args, options.best)
    if tasks is not None:
        results = tasks.evaluate_tasks(job, path, options.tasks, options.samples)
        print(tasks.tasks_table(results))
    else:
        with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
            job = of_documents(job.with_options({"data.cache_dir": job.config.data.cache_dir or folder}))
            results = evaluate(job, path, options.samples, options.cache_sizes)
        print(table(results))
    try:
        for path in filter(None, (options.out, options.plot)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=2) + "\n")
        if options.plot:
            draw(results, options.plot)
    except OSError as error:
        raise JobError(f"the figures above were not written ({error.strerror}); give another name") from None
    return 0


def of_documents(job: ResolvedJob) -> ResolvedJob:
    """Return the job, changed to read the evaluation data.

    The data are whole documents, or with validation.split the records that the run held out, prepared as in the run.
    Validation data that are named in the job take precedence over a split. Raises JobError if the split has no
    documents.
    """
    part, task = job.config.validation, job.model.spec
    if part.sources or part.dataset_path or part.dataset != Validation().dataset:
        part = dataclasses.replace(part, split=None)
    if part.split is None:
        return job.with_options({"task.kind": "documents", "validation": part})
    if task.rows_per_sample > 1:
        raise JobError(f"validation.split: given {part.split:g}; {NO_TEXT}")
    if not task.whole_records:
        raise JobError(
            f"validation.split: given {part.split:g}; allowed: unset with task.kind = {job.config.task.kind}, which "
            "holds out no documents; give some by --validation.dataset and --validation.dataset_path"
        )
    return job


def evaluate(job: ResolvedJob, place: Path, samples: int, sizes: list[int] | None) -> dict[str, Any]:
    """Return the metrics of the model stored in `place`."""
    config, args = job.config, job.model.args
    if getattr(args, "n_classes", 0) or not getattr(args, "causal", True):
        head = "; validation of its own task measures it" if getattr(args, "n_classes", 0) else ""
        raise JobError(
            f"{config.model.name} does not predict next tokens, as the evaluation needs{head}; give a decoder"
        )
    tokenizer, seq_len = job.tokenizer(), job.data.seq_len("validation")
    try:
        documents = JobDatasets(job).documents("validation")
    except UnexpectedPair as error:
        where = str(error).partition(": ")[0]
        raise JobError(f"{where}: {NO_TEXT}") from None
    rows = config.validation.local_batch_size
    batches = HeldOutSegments(documents, samples, seq_len=seq_len, rows=rows, rank=0, ranks=1)
    spec_of(config.adapter).check_evaluation(config.adapter, args, sizes, seq_len)
    model, _ = inference_model.load_model(job, place, torch.device(device_type()))
    assert isinstance(model, Decoder)
    if sizes and model.memory is None:
        raise JobError("--cache-sizes: this model has no cache; leave it out")
    size_of = None if model.memory is None else model.memory.cache_size[False]
    requested_sizes = [None] if size_of is None else sizes or [0, size_of]
    bytes_told = sum(_bytes_of(documents, document, tokenizer) for document in batches.order)
    data, read = job.data.describe_sources("validation"), len(batches.order)
    if config.validation.split is not None:
        data += f", held out by validation.split = {config.validation.split:g}"
    print(f"{config.model.name} {config.model.flavor}, {place.name}: {read} documents of {data}", file=sys.stderr)
    runs = []
    for size in requested_sizes:
        if size is not None:
            model.memory.clear()
            model.memory.cache_size[False] = size
        losses = measure_position_losses(model, batches, seq_len, config.training.loss_chunks)
        totals = total_loss(losses)
        of_bytes = totals.nats / math.log(2) / bytes_told if bytes_told else math.nan
        by_position = {
            name: _figures(part)
            for name, part in zip(position_class_names(seq_len), losses, strict=True)
            if part.tokens
        }
        size_entry = {} if size is None else {"cache_size": size}
        runs.append(size_entry | _figures(totals) | {"bits_per_byte": of_bytes, "by_position": by_position})
    results = {"of": str(place), "data": data, "documents": read, "seq_len": seq_len}
    return results | {"bytes": bytes_told, "runs": runs}


def _figures(measured: PositionLoss) -> dict[str, Any]:
    return {"tokens": measured.tokens, "loss": measured.loss, "perplexity": measured.perplexity}


def _bytes_of(documents: Documents, document: int, tokenizer: Tokenizer) -> int:
    """Return the number of UTF-8 bytes of the predicted text of a document."""
    return len(tokenizer.decode(documents.label_ids(document).tolist()).encode(errors="replace"))


def table(results: dict[str, Any]) -> str:
    """Format the results, one row per range of token positions."""
    lines = []
    for run in results["runs"]:
        if "cache_size" in run:
            lines.append(f"cache of {run['cache_size']:,} entries")
        lines.append(f"{'tokens ahead':>20} {'tokens':>12} {'loss':>9} {'perplexity':>12} {'bits/token':>11}")
        for name, row in (*run["by_position"].items(), ("all", run)):
            bits = row["loss"] / math.log(2)
            lines.append(
                f"{name:>20} {row['tokens']:>12,} {row['loss']:>9.4f} {row['perplexity']:>12.3f} {bits:>11.4f}"
            )
        lines.append(
            f"{run['bits_per_byte']:.4f} bits per byte of {results['bytes']:,}, {results['documents']:,} documents"
        )
    return "\n".join(lines)
