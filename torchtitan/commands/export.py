"""`torchtitan export FOLDER --to DIRECTORY --merge`: write a run's weights in the Hugging Face layout, in one process.

FOLDER is the job's dump_folder (newest complete checkpoint) or one of its step folders. --merge merges the adapter into
its base model one matrix at a time: the sum is computed in float32 and rounded once. If the base is quantized, the
adapter is merged into the original weights, which must be the ones that the run quantized. By default weights keep the
run's dtype: bfloat16 would round them and lose adapter updates below its 8 significant bits.

The export is then loaded and compared with the run: the loss on held-out samples and a greedy continuation. If they
differ, the directory is named DIRECTORY.unverified and the exit code is 1. Only one of the two models is in memory at a
time. Without --merge only the adapter is written, in the usual layout for adapters of its kind (mostly peft's). That is
refused if the run trained other parameters too.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.adapters import NONE
from torchtitan.build import data, parts
from torchtitan.checkpoint.folders import replace_folder
from torchtitan.checkpoint.layout import read_manifest
from torchtitan.commands.command_lines import parse_command
from torchtitan.commands.generate import find_checkpoint, sample
from torchtitan.config.job import JobConfig
from torchtitan.core.errors import JobError, format_bytes
from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy
from torchtitan.losses.tasks import task_of
from torchtitan.training import inference_model

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Relative tolerance by dtype: of the loss, for rounding the weights to the dtype once, and of the difference of two
tokens' logits to the largest logit, below which either token may be chosen."""
PACKED_TOLERANCE = 3e-2
"""Relative tolerance of the loss if the run computed with a quantized base and the export has the original weights.
Generated tokens then differ."""
ROUNDING = {"bfloat16": "8 significant bits, by up to 0.4 %", "float16": "11 significant bits, and none above 65,504"}
"""Loss of precision of a float32 weight in a narrower dtype."""
SAMPLES, NEW_TOKENS, PROMPT_TOKENS = 8, 32, 16
UNVERIFIED = 1


def main(argv: list[str]) -> int:
    options, _ = parse_command("export", argv)
    target = Path(options.to)
    if target.exists():
        raise JobError(f"--to {target}: exists; give another directory")
    config, step_folder = find_checkpoint(Path(options.folder), options.config, best=options.best)
    if options.merge:
        dtype = options.dtype or config.training.dtype
        print(announcement(config, dtype), flush=True)
        return export(config, step_folder, target, dtype, options.merge_base == "unpacked")
    if options.dtype:
        raise JobError(f"--dtype: given {options.dtype}; allowed: with --merge only; an adapter alone keeps its type")
    if config.adapter.kind == NONE:
        raise JobError(f"{options.folder}: its job has no adapter; write --merge for the weights of the model")
    model, adapter = inference_model.load_model(config, step_folder, torch.device("cpu"))
    assert adapter is not None
    parts.save_peft(config, target, adapter, adapter.full_tensors([model]))
    print(f"{target}: the adapter of {step_folder.name}, in {adapter.folder_format}")
    return 0


def announcement(config: JobConfig, dtype: str) -> str:
    """Describe the export in one line: its type and size, and the cost of rounding or the saving by it."""
    number, run_dtype = parts.model_args(config).num_parameters, config.training.dtype
    size = format_bytes(number * parts.DTYPES[dtype].itemsize)
    line = f"writing {number:,} parameters in {dtype}"
    if dtype != run_dtype:
        line += f", though the run has {run_dtype}: {size}"
        return line + (f"; each weight is rounded to {ROUNDING[dtype]}" if dtype in ROUNDING else "")
    line += f", the type of the run: {size}"
    narrower = f"; --dtype bfloat16 takes half of it and rounds each weight to {ROUNDING['bfloat16']}"
    return line + narrower * (dtype == "float32")


Samples = list[tuple[torch.Tensor, torch.Tensor]]
"""Tokens and labels, each [1, S], of samples that may differ in length."""


@dataclass(frozen=True)
class Answer:
    """A model's loss on held-out samples, and the logits [V] at each step of a greedy continuation."""

    loss: float
    logits: list[torch.Tensor]


@torch.no_grad()
def export(config: JobConfig, step_folder: Path, target: Path, dtype: str, into_unpacked: bool) -> int:
    unverified = target.with_name(target.name + ".unverified")
    if unverified.exists():
        raise JobError(f"{unverified}: exists, from an export that failed; remove it")
    samples = held_out(config)
    before, into = write(config, step_folder, unverified, dtype, into_unpacked, samples)
    reloaded = parts.meta_model(config).to(parts.DTYPES[config.training.dtype]).to_empty(device="cpu").eval()
    parts.model_spec(config).hf.load_hf(unverified, reloaded, parts.model_args(config))
    verdict = compared(config, before, answer(config, reloaded, samples), dtype, into)
    manifest = {"of": str(step_folder), "step": read_manifest(step_folder).step, "dtype": dtype, "merged_into": into}
    manifest |= verdict | {"samples": len(samples), "base": config.checkpoint.initial_load_path}
    (unverified / "export.json").write_text(json.dumps(manifest, indent=2) + "\n")
    losses = f"loss {verdict['loss_of_the_run']:.5f}, read again {verdict['loss_of_the_export']:.5f}"
    if not verdict["verified"]:
        print(f"{unverified}: NOT equal to the run: {losses}, same tokens: {verdict['same_tokens']}", file=sys.stderr)
        return UNVERIFIED
    unverified.rename(target)
    print(f"{target}: {step_folder.name} in {dtype}; {losses} on {len(samples)} samples")
    return 0


def write(
    config: JobConfig,
    step_folder: Path,
    folder: Path,
    dtype: str,
    into_unpacked: bool,
    samples: Samples,
) -> tuple[Answer, str]:
    """Write the weights. Return the run's answer to the samples, and the base that its adapter was merged into."""
    as_asked = dataclasses.replace(config.checkpoint, export_dtype=dtype)
    extra_files = parts.hf_extra_files(dataclasses.replace(config, checkpoint=as_asked), parts.tokenizer(config))
    hf, args = parts.model_spec(config).hf, parts.model_args(config)
    model, adapter = inference_model.load_model(config, step_folder, torch.device("cpu"))
    run_answer = answer(config, model, samples)
    try:
        with (
            inference_model.plain_state(config, model, adapter, into_unpacked) as (state, into),
            replace_folder(folder, write=True) as place,
        ):
            hf.save_hf(place, state, args, dtype=parts.DTYPES[dtype], extra_files=extra_files)
    except OSError as error:
        raise JobError(f"{folder}: the weights were not written: {error}; the run is untouched") from error
    return run_answer, into


def answer(config: JobConfig, model: nn.Module, samples: Samples) -> Answer:
    """Compute the loss of the samples one by one, and continue the beginning of the first greedily.

    The loss is per token, also if the run was trained on preference pairs.
    """
    if task_of(config).rows_per_sample > 1:
        model.loss = SummedCrossEntropy()
    loss = sum(model(tokens, labels=labels).item() for tokens, labels in samples)
    count = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in samples)
    vocabulary, logits = parts.tokenizer(config), []
    last = (0, -1, slice(vocabulary.vocab_size))
    # keep only the last position of each forward
    hook = model.register_forward_hook(lambda _, inputs, outputs: logits.append(outputs[last].clone()))
    kwargs = dict(max_new_tokens=NEW_TOKENS, context=config.training.seq_len, temperature=0, top_k=0, seed=0)
    for _ in sample(model, samples[0][0][0, :PROMPT_TOKENS].tolist(), vocabulary, **kwargs):
        pass
    hook.remove()
    return Answer(loss / max(count, 1), logits)


def compared(config: JobConfig, run: Answer, export: Answer, dtype: str, into: str) -> dict[str, Any]:
    """Compare the answers of run and export, with the tolerance of the coarser of the two dtypes."""
    tolerance = max(TOLERANCE[dtype], TOLERANCE.get(config.training.dtype, 0.0))
    packed = into == "original"
    close = abs(run.loss - export.loss) <= (PACKED_TOLERANCE if packed else tolerance) * abs(run.loss)
    same = None if packed else go_on_alike(run, export, tolerance)
    return {
        "verified": close and same is not False,
        "loss_of_the_run": run.loss,
        "loss_of_the_export": export.loss,
        "same_tokens": same,
    }


def go_on_alike(run: Answer, export: Answer, tolerance: float) -> bool:
    """Return True if both choose the same tokens, or first differ where the run's logits are within the tolerance."""
    for run_logits, export_logits in zip(run.logits, export.logits, strict=False):  # one may end the text earlier
        if (chosen := export_logits.argmax()) != run_logits.argmax():
            return bool(run_logits.max() - run_logits[chosen] <= tolerance * run_logits.abs().max())
    return True


def held_out(config: JobConfig) -> Samples:
    """Read up to SAMPLES samples: of the validation data where the job validates, else of the training data."""
    one, vocabulary = parts.dims(parts.one_rank_job(config), 1), parts.tokenizer(config)
    make = data.validation_loader if config.validation.enable else data.training_loader
    loader = make(parts.one_rank_job(config), vocabulary, 0, one)
    samples: Samples = []
    try:
        for batch in loader:
            samples += zip(batch["tokens"].split(1), batch["labels"].split(1), strict=True)
            if len(samples) >= SAMPLES:
                break
    finally:
        loader.close()
    return samples[:SAMPLES]
