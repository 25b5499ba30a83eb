"""Rules on names, the model's sizes, its tokenizer and the data."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchtitan.config import Training, Validation
from torchtitan.datasets import DATASETS
from torchtitan.datasets.tokens import TokenShards
from torchtitan.models import SIZES
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.options import Fault, describe, hint, show
from torchtitan.rules.facts import Facts
from torchtitan.rules.optimization import BACKENDS


def known_names(facts: Facts) -> Iterator[Fault]:
    config = facts.config
    names = [("model.name", SIZES), ("optimizer.name", OPTIMIZERS), ("training.dataset", DATASETS)]
    names += [("model.flavor", SIZES[config.model.name])] if config.model.name in SIZES else []
    names += [("validation.dataset", DATASETS)] if config.validation.enable else []
    names += [("compile.backend", BACKENDS)] if config.compile.enable else []
    for key, known in names:
        section, name = key.split(".")
        given = getattr(getattr(config, section), name)
        if given not in known:
            yield facts.fault(key, f"one of {', '.join(map(show, known))}", hint(given, known, quote=True))


MAY_BE_ZERO = (
    "n_dense_layers",
    "n_shared_experts",
    "q_lora_rank",
    "aux_loss_weight",
    "bias_rate",
    "n_mtp_layers",
    "mtp_loss_weight",
)
"""Sizes of which 0 means that a part of the model is not there."""


def model_sizes(facts: Facts) -> Iterator[Fault]:
    model, key = facts.config.model, "model.overrides"
    sizes = SIZES.get(model.name, {}).get(model.flavor)
    if sizes is None:
        return
    types = {name: kind for name, kind in typing.get_type_hints(type(sizes)).items() if not _is_table(kind)}
    faults = []
    for name, value in model.overrides.items():
        given = f"{name} = {show(value)}"
        if name not in types:
            faults.append(facts.fault(key, f"sizes of {model.name}: {', '.join(types)}", hint(name, types), given=name))
        elif not _is_a(types[name], value):
            faults.append(facts.fault(key, f"{name} = {describe(types[name])}", "", given=given))
        elif value < 0 or value == 0 and value is not False and name not in MAY_BE_ZERO:
            least = f"{name} >= 0" if name in MAY_BE_ZERO else f"{name} > 0"
            faults.append(facts.fault(key, least, "", given=given))
    yield from faults
    if not faults and facts.args is None:
        try:
            dataclasses.replace(sizes, **model.overrides)
            yield facts.fault(key, "sizes of a model that can be", "")
        except ValueError as error:
            yield facts.fault(key, f"sizes that fit together: {error}", "")


def _is_a(kind: Any, value: Any) -> bool:
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return False
    return True


def _is_table(kind: Any) -> bool:
    return any(dataclasses.is_dataclass(part) for part in (kind, *typing.get_args(kind)))


HOMES = {"llama": "meta-llama", "deepseek": "deepseek-ai", "qwen3_moe": "Qwen"}
"""Of model families, on Hugging Face."""


def tokenizer_fits(facts: Facts) -> Iterator[Fault]:
    key = "model.tokenizer_path"
    if isinstance(facts.tokenizer, Exception):
        remedy = str(facts.tokenizer)
        if facts.config.model.flavor != "debugmodel" and "No such file" in remedy:
            family = facts.config.model.name.rstrip(".123")
            remedy += f"; its own is in the models of huggingface.co/{HOMES.get(family, '')}"
            remedy += ", after the licence is accepted" * (family == "llama")
        yield facts.fault(key, "a tokenizer", remedy)
    elif facts.args and facts.tokenizer.vocab_size > facts.args.vocab_size:
        yield facts.fault(
            key,
            f"at most the {facts.args.vocab_size} tokens of model {facts.config.model.flavor}",
            f"use its tokenizer, or set model.overrides = {{vocab_size = {facts.tokenizer.vocab_size}}}",
            given=f"{show(facts.config.model.tokenizer_path)} with {facts.tokenizer.vocab_size} tokens",
        )


def data_is_there(facts: Facts) -> Iterator[Fault]:
    training, validation = facts.config.training, facts.config.validation
    yield from _data_fault(facts, "training", training, training.seq_len)
    if validation.enable:
        yield from _data_fault(facts, "validation", validation, validation.seq_len or training.seq_len)


def _data_fault(facts: Facts, section: str, part: Training | Validation, seq_len: int) -> Iterator[Fault]:
    if part.dataset not in DATASETS:
        return
    try:
        source = DATASETS[part.dataset](part.dataset_path, facts.config.training.text_field)
        if isinstance(source, TokenShards):
            source.blocks(seq_len)
            if not isinstance(facts.tokenizer, Exception):
                source.check_tokenizer(facts.tokenizer.fingerprint, facts.tokenizer.vocab_size)
    except (OSError, ValueError) as error:  # beside DataError, those of names that no file can have
        yield facts.fault(f"{section}.dataset_path", f"data for dataset {show(part.dataset)}", str(error))


def loader_workers(facts: Facts) -> Iterator[Fault]:
    loader = facts.config.training.dataloader
    if loader.num_workers == 0 and loader.prefetch_factor is not None:
        remedy = "set training.dataloader.num_workers, or leave it out"
        yield facts.fault("training.dataloader.prefetch_factor", "unset without workers", remedy)
    if loader.num_workers == 0 and loader.persistent_workers:
        remedy = "set training.dataloader.num_workers, or leave it out"
        yield facts.fault("training.dataloader.persistent_workers", "false without workers", remedy)
