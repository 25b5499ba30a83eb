"""`torchtitan export FOLDER --to DIRECTORY`: write a run's weights in the Hugging Face layout, in one process.

FOLDER is the job's dump_folder (newest complete checkpoint) or one of its step folders. --merge merges the adapter into
its base model one matrix at a time: the sum is computed in float32 and rounded once. If the base is quantized, the
adapter is merged into the original weights, which must be the ones that the run quantized. By default weights keep the
run's dtype: bfloat16 would round them and lose adapter updates below its 8 significant bits.

The export is then read again and compared with the run on a short held-out sample: its loss, and the likeliest token at
each position. If they differ, the directory is named DIRECTORY.unverified and the exit code is 1. Embedding, head and
one layer at a time are in memory. --rounded writes the weights that quantization-aware training computes with. Without
--merge, a run with an adapter writes it alone, in the usual layout for adapters of its kind (mostly peft's). That is
refused if the run trained other parameters too.
"""

import argparse
import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.adapters import NONE
from torchtitan.assembly import parts
from torchtitan.assembly.data import JobDatasets
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint.folders import replace_folder
from torchtitan.checkpoint.layout import read_manifest
from torchtitan.checkpoint.weight_sources import Weights, open_weights
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import find_checkpoint
from torchtitan.core.errors import JobError, format_bytes
from torchtitan.core.hub import is_public, upload
from torchtitan.core.plugins import COMMAND_OPTIONS, loaded_plugin
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.models.fake_quantized import round_weights_alone, rounded_state
from torchtitan.models.hf.config import CONFIG, read_json
from torchtitan.training import inference_model

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Relative tolerance by dtype: of the loss, for rounding the weights to the dtype once, and of the difference of two
tokens' logits to the largest logit, below which either token may be chosen."""
PACKED_TOLERANCE = 3e-2
"""Relative tolerance of the loss if the run computed with a quantized base and the export has the original weights.
Generated tokens then differ."""
ROUNDING = {"bfloat16": "8 significant bits, by up to 0.4 %", "float16": "11 significant bits, and none above 65,504"}
"""Loss of precision of a float32 weight in a narrower dtype."""
MAX_BATCHES = 64
"""Maximum number of batches that are read to find a label."""
MAX_TOKENS = 128
"""Maximum length of the sample that an export is verified on, in tokens."""
UNVERIFIED = 1
RECORD = "export.json"
YES = ("y", "yes")
CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' classes that vLLM generates text with."""


class ExampleBatch(NamedTuple):
    """Tokens and labels, each [1, S]."""

    tokens: torch.Tensor
    labels: torch.Tensor


def main(argv: list[str]) -> int:
    options, _ = parse_command("export", argv)
    target = Path(options.to)
    if target.exists():
        raise JobError(f"--to {target}: exists; give another directory")
    if options.public and not options.push:
        raise JobError("--public: allowed with --push only")
    if options.push:
        confirm_push(options.push, options.public)
    code = write_export(options, target)
    if options.push and code == 0:
        try:
            print(f"uploaded: {upload(target, options.push, options.public)}")
        except JobError as error:
            later = shlex.join(["hf", "upload", options.push, str(target), "--exclude", RECORD])
            raise JobError(f"{error}; the export itself is complete; upload it later: {later}") from error
    return code


def confirm_push(repo: str, public: bool) -> None:
    """Ask whether an export is to be uploaded for everyone to read. Raises JobError without a yes."""
    if not is_public(repo, public):
        return
    if not sys.stdin.isatty():
        raise JobError(f"--push {repo}: everyone could read it, which is asked on a terminal; start it there")
    if input(f"everyone will be able to read {repo}; upload the export to it? [y/N] ").strip().lower() not in YES:
        raise JobError(f"--push {repo}: not confirmed; nothing was written")


def write_export(options: argparse.Namespace, target: Path) -> int:
    """Write what the options ask for. Return the exit code."""
    plugin = loaded_plugin(COMMAND_OPTIONS, "--format") if options.format == "gguf" else None
    job, step_folder = find_checkpoint(Path(options.folder), options.config, best=options.best)
    if options.merge or job.config.adapter.kind == NONE:
        dtype = options.dtype or job.config.training.dtype
        rounding = describe_rounding(job, options.rounded)
        print(announcement(job.model, dtype), rounding, sep="\n" if rounding else "", flush=True)
        gguf = None
        if plugin is not None:
            gguf = plugin.GGUFExport(parts.hf_extra_files(job.model, job.tokenizer(), dtype), job.tokenizer())
        return export(job, step_folder, target, dtype, options.merge_base == "unpacked", gguf, options.rounded)
    if options.rounded:
        raise JobError("--rounded: allowed for a run with qat.weight_dtype only; leave it out")
    if plugin is not None:
        raise JobError("--format: given gguf for an adapter alone; allowed: the whole model; add --merge")
    if options.dtype:
        raise JobError(
            f"--dtype: given {options.dtype}; allowed: a dtype only with --merge; an adapter alone keeps its type"
        )
    model, adapter = inference_model.load_model(job, step_folder, torch.device("cpu"))
    assert adapter is not None
    parts.save_peft(job.model, target, adapter, adapter.full_tensors([model]))
    print(f"{target}: the adapter of {step_folder.name}, in {adapter.folder_format}")
    return 0


def describe_rounding(job: ResolvedJob, rounded: bool) -> str:
    """Say whether the weights of a quantization-aware training are rounded; empty for others.

    Raises JobError if they are to be and there is nothing to round to.
    """
    options = job.config.qat
    if options.weight_dtype == "none":
        if rounded:
            raise JobError("--rounded: allowed for a run with qat.weight_dtype only; leave it out")
        return ""
    if not rounded:
        return f"the weights are not rounded to {options.weight_dtype}; --rounded does it"
    tied = "; the matrix of embedding and head is not" if job.model.args.tied_embeddings else ""
    return f"the weights are rounded to {options.weight_dtype}, as the run computes with them{tied}"


def announcement(model: JobModel, dtype: str) -> str:
    """Describe the export in one line: its type and size, and the cost of rounding or the saving by it."""
    number, run_dtype = model.args.num_parameters, model.training.dtype
    size = format_bytes(number * parts.DTYPES[dtype].itemsize)
    line = f"writing {number:,} parameters in {dtype}"
    if dtype != run_dtype:
        line += f", though the run has {run_dtype}: {size}"
        return line + (f"; each weight is rounded to {ROUNDING[dtype]}" if dtype in ROUNDING else "")
    line += f", the type of the run: {size}"
    narrower = f"; --dtype bfloat16 takes half of it and rounds each weight to {ROUNDING['bfloat16']}"
    return line + narrower * (dtype == "float32")


@dataclass(frozen=True)
class Answer:
    """A model's mean loss over the labels of a sample, and its logits [S, V]."""

    loss: float
    logits: torch.Tensor


@torch.no_grad()
def export(
    job: ResolvedJob,
    step_folder: Path,
    target: Path,
    dtype: str,
    into_unpacked: bool,
    gguf: Any = None,
    rounded: bool = False,
) -> int:
    """Write and verify the weights, as a Hugging Face folder or by `gguf`. Return the exit code."""
    unverified = target.with_name(target.name + ".unverified")
    if unverified.exists():
        raise JobError(f"{unverified}: exists, from an export that failed; remove it")
    sample, args, run_dtype = held_out(job), job.model.args, job.config.training.dtype
    run_answer, into = write(job, step_folder, unverified, dtype, into_unpacked, sample, rounded)
    plain_model = ModelBuilder(job).meta_model().to(parts.DTYPES[run_dtype])
    with open_weights(unverified, job.config.model.name, args) as weights:
        export_answer = answer(plain_model, weights, args.tied_embeddings, sample)
    verdict = compared(run_dtype, run_answer, export_answer, dtype, into)
    manifest = {"of": str(step_folder), "step": read_manifest(step_folder).step, "dtype": dtype, "merged_into": into}
    manifest |= verdict | {"tokens": sample.tokens.shape[1], "base": job.model.initial_load_path}
    (unverified / RECORD).write_text(json.dumps(manifest, indent=2) + "\n")
    losses = f"loss {verdict['loss_of_the_run']:.5f}, read again {verdict['loss_of_the_export']:.5f}"
    if not verdict["verified"]:
        print(f"{unverified}: NOT equal to the run: {losses}, same tokens: {verdict['same_tokens']}", file=sys.stderr)
        return UNVERIFIED
    if gguf is None:
        unverified.rename(target)
    else:
        try:
            with replace_folder(target, write=True) as place:
                gguf.write(unverified, place, job.config.job.description or step_folder.name)
                shutil.copy(unverified / RECORD, place)
        except OSError as error:
            raise JobError(f"{target}: the file was not written: {error}; {unverified} holds the model") from error
        shutil.rmtree(unverified)
    print(f"{target}: {step_folder.name} in {dtype}; {losses} on {sample.tokens.shape[1]} tokens")
    print("\n".join(usage_lines(target) if gguf is None else gguf.usage_lines(target)))
    return 0


def usage_lines(folder: Path) -> list[str]:
    """Return the commands that serve an exported folder (causal models only) and that open it in transformers."""
    (architecture,) = read_json(folder / CONFIG)["architectures"]
    serve = [f"serve it: vllm serve {shlex.quote(str(folder))}"] if architecture.endswith(CAUSAL_CLASSES) else []
    return [*serve, f"in Python: transformers.{architecture}.from_pretrained({str(folder)!r})"]


def write(
    job: ResolvedJob,
    step_folder: Path,
    folder: Path,
    dtype: str,
    into_unpacked: bool,
    sample: ExampleBatch,
    rounded: bool = False,
) -> tuple[Answer, str]:
    """Write the weights. Return the run's answer to the sample, and the base that its adapter was merged into.

    `rounded`: both have the weights that quantization-aware training computes with.
    """
    extra_files = parts.hf_extra_files(job.model, job.tokenizer(), dtype)
    hf, args = parts.model_spec(job.model).hf, job.model.args
    builder = ModelBuilder(job)
    model, _, adapter = builder.adapted_model()
    if rounded:
        builder.fake_quantize(model)
        round_weights_alone(model, args.tied_embeddings)
    try:
        with (
            inference_model.open_run(job, step_folder, model, adapter) as weights,
            inference_model.plain_state(job.model, model, adapter, weights, into_unpacked) as (state, into),
            replace_folder(folder, write=True) as place,
        ):
            run_answer = answer(model, weights, args.tied_embeddings, sample)
            state = rounded_state(model, state)
            rounding = job.config.qat.of_weights if rounded else None
            hf.save_hf(place, state, args, dtype=parts.DTYPES[dtype], extra_files=extra_files, rounding=rounding)
    except OSError as error:
        raise JobError(f"{folder}: the weights were not written: {error}; the run is untouched") from error
    return run_answer, into


def answer(model: nn.Module, weights: Weights, tied: bool, sample: ExampleBatch) -> Answer:
    """Compute the logits of a sample, and the mean loss of its labels, with one layer in memory at a time."""
    with inference_model.layers_on_demand(model.eval(), weights, tied):
        logits = model(sample.tokens)[0].float()
    rows = sample.labels[0] != IGNORE_INDEX
    loss = F.cross_entropy(logits[rows], sample.labels[0, rows], reduction="sum").item()
    return Answer(loss / max(int(rows.sum()), 1), logits)


def compared(run_dtype: str, run: Answer, export: Answer, dtype: str, into: str) -> dict[str, Any]:
    """Compare the answers of run and export, with the tolerance of the coarser of the two dtypes."""
    tolerance = max(TOLERANCE[dtype], TOLERANCE.get(run_dtype, 0.0))
    packed = into == "original"
    # a loss near 0, of a confident answer, is as exact as its logits and not as itself
    close = abs(run.loss - export.loss) <= (PACKED_TOLERANCE if packed else tolerance) * max(abs(run.loss), 1.0)
    same = None if packed else choose_alike(run.logits, export.logits, tolerance)
    return {
        "verified": close and same is not False,
        "loss_of_the_run": run.loss,
        "loss_of_the_export": export.loss,
        "same_tokens": same,
    }


def choose_alike(run: torch.Tensor, export: torch.Tensor, tolerance: float) -> bool:
    """Return True if the largest logit of each row [S, V] is of the same token, or of one that ties with it.

    Tokens tie if their logits in the run differ by at most `tolerance` times the largest magnitude of the row.
    """
    chosen = run.gather(1, export.argmax(1, keepdim=True))[:, 0]
    return bool((run.amax(1) - chosen <= tolerance * run.abs().amax(1)).all())


def held_out(job: ResolvedJob) -> ExampleBatch:
    """Read a short sample with labels: of the validation data where the job validates, else of the training data.

    It ends at the last label that it can, and is at most MAX_TOKENS long.
    """
    datasets = JobDatasets(job.on_one_rank())
    make = datasets.validation_loader if job.config.validation.enable else datasets.training_loader
    loader = make(job.tokenizer(), 0)
    try:
        batch = next((batch for batch in islice(loader, MAX_BATCHES) if (batch["labels"] != IGNORE_INDEX).any()), None)
    finally:
        loader.close()
    if batch is None:
        raise JobError(
            f"the first {MAX_BATCHES} batches of the job's data have no label to verify the export on; give a job with "
            "other data by --config"
        )
    valid = batch["labels"] != IGNORE_INDEX
    row = int(valid.sum(1).argmax())
    end = int(valid[row].nonzero().max()) + 1
    span = slice(max(0, end - MAX_TOKENS), end)
    return ExampleBatch(batch["tokens"][row : row + 1, span], batch["labels"][row : row + 1, span])
