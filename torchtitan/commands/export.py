"""`torchtitan export FOLDER --to DIRECTORY --merge`: a run's weights in the form of Hugging Face, by one process.

FOLDER is the job's dump_folder (newest complete checkpoint) or one of its step folders. --merge folds an adapter into
the model that it was trained beside: added up in float32, rounded once. What was written is read again and compared
with what the run has, its loss on held-out samples and, in float32, the tokens that it would go on with; if they
differ, the directory is called DIRECTORY.unverified and the exit code is 1. Without --merge the adapter is written
alone, in peft's layout.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan import build, build_data, saved_model
from torchtitan.adapters.interface import Adapter
from torchtitan.checkpoint.layout import read_manifest
from torchtitan.commands.generate import find_checkpoint, sample
from torchtitan.config.job import JobConfig
from torchtitan.errors import JobError
from torchtitan.loss import IGNORE_INDEX

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Of the loss, relative: what rounding a model's weights to the type once may change."""
PACKED_TOLERANCE = 3e-2
"""The same where the run computed with a packed base, and what is written has the weights that were packed."""
SAMPLES, NEW_TOKENS, PROMPT_TOKENS = 8, 32, 16
UNVERIFIED = 1


def main(argv: list[str]) -> int:
    options = parse(argv)
    target = Path(options.to)
    if target.exists():
        raise JobError(f"--to {target}: it is there already; name a directory that is not")
    config, step_folder = find_checkpoint(Path(options.folder), options.config)
    model, adapter = saved_model.filled_model(config, step_folder, torch.device("cpu"))
    if not options.merge:
        if adapter is None:
            raise JobError(f"{options.folder}: its job has no adapter; write --merge for the weights of the model")
        build.save_peft(config, target, adapter, adapter.whole_tensors([model]))
        print(f"{target}: the adapter of {step_folder.name}, in peft's layout")
        return 0
    return export(config, step_folder, model, adapter, target, options.dtype)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchtitan export", description="A run's weights for other programs.")
    parser.add_argument("folder", help="a run's dump_folder, or one of its checkpoint/step-... folders")
    parser.add_argument("--to", required=True, help="the directory to write, which must not exist")
    parser.add_argument("--merge", action="store_true", help="the whole model, with an adapter folded in")
    parser.add_argument("--dtype", choices=TOLERANCE, default="bfloat16", help="of the weights (default bfloat16)")
    parser.add_argument("--config", help="the job, when the folder has no config.toml")
    return parser.parse_args(argv)


@torch.no_grad()
def export(
    config: JobConfig, step_folder: Path, model: nn.Module, adapter: Adapter | None, target: Path, dtype: str
) -> int:
    hf, args = build.model_spec(config).hf, build.model_args(config)
    state, into = saved_model.plain_state(config, step_folder, model, adapter)
    written = target.with_name(target.name + ".unverified")
    if written.exists():
        raise JobError(f"{written}: it is there, from an export that failed; remove it")
    as_asked = dataclasses.replace(config.checkpoint, export_dtype=dtype)
    beside = build.beside_hf_weights(dataclasses.replace(config, checkpoint=as_asked), build.tokenizer(config))
    try:
        hf.save_hf(written, state, args, dtype=build.DTYPES[dtype], beside=beside)
    except OSError as error:
        raise JobError(f"{written}: the weights were not written: {error}; the run is untouched") from error
    del state
    again = build.meta_model(config).to(build.DTYPES[config.training.dtype]).to_empty(device="cpu").eval()
    hf.load_hf(written, again, args)
    verdict = compared(config, model, again, dtype, PACKED_TOLERANCE if into == "original" else TOLERANCE[dtype])
    manifest = {"of": str(step_folder), "step": read_manifest(step_folder).step, "dtype": dtype, "merged_into": into}
    manifest |= verdict
    manifest["base"] = config.checkpoint.initial_load_path
    (written / "export.json").write_text(json.dumps(manifest, indent=2) + "\n")
    told = f"loss {verdict['loss_of_the_run']:.5f}, read again {verdict['loss_of_the_export']:.5f}"
    if not verdict["verified"]:
        print(f"{written}: NOT what the run has: {told}, same tokens: {verdict['same_tokens']}", file=sys.stderr)
        return UNVERIFIED
    written.rename(target)
    print(f"{target}: {step_folder.name} in {dtype}; {told} on {verdict['samples']} samples")
    return 0


def compared(config: JobConfig, model: nn.Module, again: nn.Module, dtype: str, tolerance: float) -> dict[str, Any]:
    """The run's model and what was read again, on the first held-out samples (of the training data without any) and,
    in float32, greedily from the beginning of the first of them.
    """
    tokens, labels = held_out(config)
    losses = [
        (each(tokens, labels=labels) / (labels != IGNORE_INDEX).sum().clamp(min=1)).item() for each in (model, again)
    ]
    close = abs(losses[0] - losses[1]) <= tolerance * abs(losses[0])
    same: bool | None = None
    if dtype == "float32" and tolerance == TOLERANCE[dtype]:
        vocabulary = build.tokenizer(config)
        prompt = tokens[0, :PROMPT_TOKENS].tolist()
        how = dict(max_new_tokens=NEW_TOKENS, context=config.training.seq_len, temperature=0, top_k=0, seed=0)
        same = list(sample(model, prompt, vocabulary, **how)) == list(sample(again, prompt, vocabulary, **how))
    return {
        "verified": close and same is not False,
        "loss_of_the_run": losses[0],
        "loss_of_the_export": losses[1],
        "samples": len(tokens),
        "same_tokens": same,
    }


def held_out(config: JobConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, [up to SAMPLES, S]."""
    one, vocabulary = build.dims(build.on_one_rank(config), 1), build.tokenizer(config)
    make = build_data.validation_loader if config.validation.enable else build_data.training_loader
    loader = make(build.on_one_rank(config), vocabulary, 0, one)
    tokens: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    try:
        for batch in loader:
            tokens.append(batch["tokens"])
            labels.append(batch["labels"])
            if sum(map(len, tokens)) >= SAMPLES:
                break
    finally:
        loader.close()
    return torch.cat(tokens)[:SAMPLES], torch.cat(labels)[:SAMPLES]
