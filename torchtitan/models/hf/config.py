"""config.json: how it is read, what families share of it, and the sizes of a folder. No torch, so that a job can be
judged by them at once.

A family says which config is which arguments (`ConfigForm`), in its file `hf_config.py`.

Stretched rotary wavelengths as a config.json has them, alike in all families that have RopeScaling. No torch.
"""

import json
import os
import struct
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchtitan.core.errors import JobError
from torchtitan.core.files import FileError, open_file, read_file
from torchtitan.models.sizes import RopeScaling

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
UNTRAINED = "untrained_token_ids"
"""Of a config.json that `torchtitan convert` wrote: tokens that it has added, which nothing has been learned of yet."""
LARGEST_JSON = 64 * 2**20
"""Bytes. The index of the largest models has a tenth of it, a tokenizer's JSON up to a half."""
LARGEST_HEADER = 100 * 2**20
"""Bytes, of a safetensors file; the format's own limit."""
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
RANGES = {
    "norm_eps": (1e-20, 0.1),
    "rope_theta": (1.0, 1e12),
    "ffn_dim_multiplier": (1e-3, 1e3),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 100.0),
    "mscale_all_dim": (0.0, 100.0),
    "route_scale": (1e-6, 1e4),
    "bias_rate": (0.0, 1.0),
    "aux_loss_weight": (0.0, 100.0),
}
"""Of arguments, from and to: far beyond all published models (norms 1e-12 to 1e-5, theta 1e4 to 5e10)."""
SPELLINGS = {
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "route_scale": ("routed_scaling_factor",),
    "aux_loss_weight": ("router_aux_loss_coef", "aux_loss_alpha"),
}
"""What config.json calls an argument, where that differs."""
Block = tuple[int, int]
Number = TypeVar("Number", int, float)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. JobError."""
    try:
        content = json.loads(read_file(path, LARGEST_JSON).decode())
    except FileError as error:
        raise JobError(f"{path.name} {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise JobError(f"{path.name} holds no JSON object")
    return content


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file, of a folder's index or its one file; nothing where neither says so. What is wrong with them
    is found where they are loaded (folders.py).
    """
    try:
        if os.path.exists(folder / INDEX):  # which does not raise for a name too long
            names = read_json(folder / INDEX).get("weight_map")
            return names if isinstance(names, dict) else {}
        file = folder if folder.is_file() else folder / SINGLE
        return dict.fromkeys(header_of(file), file.name)
    except (OSError, ValueError):
        return {}


def config_beside(path: Path) -> dict[str, Any] | None:
    """The config.json of a folder, or of a file of safetensors: in its metadata or beside it. JobError where it cannot
    be read.
    """
    folder = path.parent if path.is_file() else path
    if path.is_file():
        try:
            metadata = header_of(path, with_metadata=True).get("__metadata__", {})
            kept = metadata.get(CONFIG) if isinstance(metadata, dict) else None
            if kept is not None and not isinstance(config := json.loads(str(kept)), dict):
                raise JobError(f"its {CONFIG} is no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise JobError(f"{path} is no safetensors file, or one that is cut off: {error}") from error
        if kept is not None:
            return config
    return read_json(folder / CONFIG) if os.path.exists(folder / CONFIG) else None


def untrained(config: Mapping[str, Any]) -> list[int]:
    """Tokens that a config.json calls so; whatever else stands there is none."""
    said = config.get(UNTRAINED)
    return [each for each in said if type(each) is int] if isinstance(said, list) else []


def header_of(file: Path, with_metadata: bool = False) -> dict[str, Any]:
    """Of a safetensors file: name -> dtype, shape and place of each tensor. OSError, ValueError (JobError is one)."""
    with open_file(file) as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if length > LARGEST_HEADER:
            raise JobError(f"{file.name} is no safetensors file")
        try:
            content = json.loads(opened.read(length))
        except RecursionError as error:
            raise JobError(f"{file.name} is no safetensors file") from error
    if not isinstance(content, dict):
        raise JobError(f"{file.name} is no safetensors file")
    return {name: entry for name, entry in content.items() if name != "__metadata__" or with_metadata}


def block_of(config: Mapping[str, Any]) -> Block | None:
    """Rows and columns of a block with one scale (stored.py), of a config.json; None where weights are not quantised.
    JobError where they are in another way.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    known = isinstance(given, dict) and given.get("quant_method") == "fp8" and given.get("fmt") in (None, "e4m3")
    block = given.get("weight_block_size") if known else None
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise JobError(
            f"quantization_config = {given!r}; allowed are none, or quant_method 'fp8' with fmt 'e4m3' and a "
            f"weight_block_size of two whole numbers above 0. Convert the weights to bfloat16 first"
        )
    return block[0], block[1]


def check_types(args: Any) -> None:
    """JobError unless the fields of a dataclass, and of those in it, are of their types and finite."""
    kinds = typing.get_type_hints(type(args))
    for name in (each.name for each in fields(args)):
        kind, value = kinds[name], getattr(args, name)
        try:
            TypeAdapter(kind, config=None if is_dataclass(value) else STRICT).validate_python(value)
        except ValidationError as error:
            raise JobError(f"{name} = {value!r}: {error.errors()[0]['msg'].lower()}") from None
        if is_dataclass(value):
            check_types(value)


def check_ranges(args: Any, config: Mapping[str, Any]) -> None:
    """JobError for a number with which no model computes anything, such as a slip or an attack would leave."""
    for name in (each.name for each in fields(args)):
        value = getattr(args, name)
        if is_dataclass(value):
            check_ranges(value, config)
        elif name in RANGES and value is not None and not RANGES[name][0] <= value <= RANGES[name][1]:
            key = next((key for key in SPELLINGS.get(name, ()) if key in config), name)
            raise JobError(
                f"{key} = {value!r}; allowed: from {RANGES[name][0]:g} to {RANGES[name][1]:g}; take the config.json of "
                "the model's own repository"
            )


def check_numbers(config: Mapping[str, Any], needed: Iterable[str]) -> None:
    """JobError unless all of these are whole numbers above 0."""
    missing = [key for key in needed if type(config.get(key)) is not int or config[key] < 1]
    if missing:
        raise JobError(f"no whole number above 0 for {', '.join(missing)}")


def number_of(config: Mapping[str, Any], name: str, default: Number, null: Number | None = None) -> Number:
    """One that a config may leave out, for `default`, of whose type it is. `null`: what it is where null stands there.
    JobError for all that is no such number.
    """
    given = config.get(name, default)
    if given is None and null is not None:
        return null
    try:
        return TypeAdapter(type(default), config=STRICT).validate_python(given)
    except (ValidationError, OverflowError):
        allowed = "a whole number" if isinstance(default, int) else "a finite number"
        allowed += "" if null is None else f", or null for {null}"
        raise JobError(f"{name} = {given!r}; allowed: {allowed}; correct it, or leave it out for {default}") from None


def check_only(config: Mapping[str, Any], only: Mapping[str, Any]) -> None:
    """JobError, with all of them, where a key that is there has another value than the one that the model knows."""
    wrong = {key: wanted for key, wanted in only.items() if config.get(key) not in (None, wanted)}
    if wrong:
        raise JobError("; ".join(f"{key} = {config[key]!r}, but this model only has {wrong[key]!r}" for key in wrong))


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scaling and, of transformers 5, theta. JobError where that is no object."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise JobError(f"{name} = {rope!r}; allowed are null and an object with rope_type and its numbers")
    return rope


def rope_kind(config: Mapping[str, Any]) -> str:
    rope = rope_of(config)
    return rope.get("rope_type", rope.get("type", "default"))


def rope_theta(config: Mapping[str, Any]) -> float:
    rope = rope_of(config)
    return number_of(rope if "rope_theta" in rope else config, "rope_theta", 10000.0)


def decoder_sizes(config: Mapping[str, Any], max_seq_len: int, *more: str) -> dict[str, Any]:
    """What `decoder_config` wrote, as arguments of a decoder: all but the heads of keys and values, whose default is
    each family's own. `max_seq_len`: transformers' own where nothing is said. JobError for what is no such number, of
    `more` as well.
    """
    needed = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    needed |= {"vocab_size": "vocab_size"}
    check_numbers(config, [*needed.values(), *more])
    return {ours: config[theirs] for ours, theirs in needed.items()} | {
        "norm_eps": number_of(config, "rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(config),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "max_seq_len": number_of(config, "max_position_embeddings", max_seq_len),
    }


def decoder_config(args: Any, dtype: Any) -> dict[str, Any]:
    """The fields that all families have, in the spelling that transformers 4 and 5 both read. `dtype` is torch's or its
    name.
    """
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.num_kv_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.tied_embeddings,
        "pad_token_id": None,  # the embedding of a token that transformers takes for a pad would learn nothing there
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
KINDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
"""What transformers has for each kind, by its names; of yarn the last two may be missing."""


def rotary_config(args: Any) -> dict[str, Any]:
    """What `scaling_from_hf` reads, of a family's arguments, and theta, which ntk changes."""
    scaling = args.rope_scaling
    return {
        "rope_theta": scaling.theta(args.rope_theta, args.head_dim) if scaling else args.rope_theta,
        "rope_scaling": scaling and _to_hf(scaling),
    }


def _to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    """None for ntk, which is another theta."""
    if scaling.kind == "ntk":
        return None
    return {"rope_type": scaling.kind} | {key: getattr(scaling, FIELDS[key]) for key in KINDS[scaling.kind]}


def scaling_from_hf(config: Mapping[str, Any]) -> RopeScaling | None:
    """JobError for a kind that is not here."""
    rope, kind = rope_of(config), rope_kind(config)
    if kind == "default":
        return None
    given = {key: rope[key] for key in KINDS.get(kind, ()) if rope.get(key) is not None}
    if kind not in KINDS or set(KINDS[kind]) - set(given) - {"beta_fast", "beta_slow"}:
        kinds = "; ".join(f"{name} with {', '.join(keys)}" for name, keys in KINDS.items())
        raise JobError(f"rotary scaling {dict(rope)}; allowed are none and types {kinds}")
    check_only(rope, {"attention_factor": None, "truncate": True, "mscale": None, "mscale_all_dim": None})
    return RopeScaling(kind=kind, **{FIELDS[key]: value for key, value in given.items()})
