"""config.json: reading and checking it, fields that families share, and a folder's sizes and rotary scaling.

A family converts its config in its `__init__.py` (`ConfigConverter`). No torch, so that a job is checked quickly.
"""

import json
import math
import os
import struct
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys, FileError, agreed_value, load_json, open_file, read_file
from torchtitan.models.hf.config_keys import GENERATION_KEYS
from torchtitan.models.hf.wrappers import text_part
from torchtitan.models.sizes import RopeScaling

GENERATION = "generation_config.json"
SAMPLING = {
    "temperature": "a number >= 0",
    "top_k": "a whole number >= 0",
    "top_p": "a number above 0, at most 1",
}
"""Keys of it that commands apply, with their allowed values."""
NOT_SAMPLED = {"min_p": 0, "typical_p": 1, "repetition_penalty": 1, "no_repeat_ngram_size": 0, "num_beams": 1}
"""Keys of it that commands have no option for, with the value at which each does nothing."""
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
UNTRAINED = "untrained_token_ids"
"""Key that `torchtitan convert` adds to config.json: ids of added tokens that have not been trained yet."""
LARGEST_JSON = 64 * 2**20
"""Bytes. The index of the largest models is a tenth of it, a tokenizer's JSON up to half of it."""
LARGEST_HEADER = 100 * 2**20
"""Bytes of a safetensors header; the format's own limit."""
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
RANGES = {
    "norm_eps": (1e-20, 0.1),
    "rope_theta": (1.0, 1e12),
    "local_rope_theta": (1.0, 1e12),
    "ffn_dim_multiplier": (1e-3, 1e3),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "query_growth": (0.0, 100.0),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 100.0),
    "mscale_all_dim": (0.0, 100.0),
    "route_scale": (1e-6, 1e4),
    "bias_rate": (0.0, 1.0),
    "aux_loss_weight": (0.0, 100.0),
    "embedding_multiplier": (1e-3, 1e6),
    "attention_multiplier": (1e-6, 1e3),
    "residual_multiplier": (1e-6, 1e3),
    "logits_divisor": (1e-6, 1e6),
    "logit_scale": (1e-6, 1e6),
    "swiglu_limit": (1e-3, 1e6),
    "swiglu_alpha": (1e-3, 1e3),
    "score_cap": (0.0, 1e6),
    "logit_cap": (0.0, 1e6),
}
"""Allowed ranges of arguments, far beyond all published models (norms 1e-12 to 1e-5, theta 1e4 to 5e10)."""
HF_KEYS = {
    "logits_divisor": ("logits_scaling",),
    "score_cap": ("attn_logit_softcapping",),
    "logit_cap": ("final_logit_softcapping",),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "local_rope_theta": ("rope_local_base_freq",),
    "route_scale": ("routed_scaling_factor",),
    "aux_loss_weight": ("router_aux_loss_coef", "aux_loss_alpha"),
}
"""Names in config.json of arguments that have another name here."""
Number = TypeVar("Number", int, float)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises JobError."""
    try:
        content = load_json(read_file(path, LARGEST_JSON).decode())
    except FileError as error:
        raise JobError(f"{path.name} {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise JobError(f"{path.name} holds no JSON object")
    return content


def tensor_files(folder: Path) -> dict[str, str]:
    """Return tensor name -> file from a folder's index, or of its single file; empty if neither is readable.

    Errors in these files are reported when the weights are loaded (hf/load.py).
    """
    try:
        if os.path.exists(folder / INDEX):  # does not raise for a name that is too long
            names = read_json(folder / INDEX).get("weight_map")
            return names if isinstance(names, dict) else {}
        file = folder if folder.is_file() else folder / SINGLE
        return dict.fromkeys(read_header(file), file.name)
    except (OSError, ValueError):
        return {}


PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
_LOADED = "load it with transformers (AutoModelForCausalLM.from_pretrained) and save it again (save_pretrained)"
REMEDIES = {
    **dict.fromkeys(PICKLES, f"a pickle, which is not read, as it can run code; {_LOADED}"),
    "consolidated*.pth": "a pickle in Meta's format, which is not read, as it can run code; convert it with "
    "transformers' convert_llama_weights_to_hf.py, or get the folder of safetensors that is published with it",
    "*.gguf": f"a file of llama.cpp, which is not read; {_LOADED}, with gguf_file = its name",
}
"""Names of weights in other formats, and what to do with them."""


def unreadable_weights(path: Path) -> str:
    """Describe weights of a format that is not read, in a folder or a file, with a remedy; "" without any."""
    names = sorted(file.name for file in path.iterdir()) if path.is_dir() else [path.name]
    for pattern, remedy in reversed(REMEDIES.items()):
        if name := next((name for name in names if fnmatch(name, pattern)), None):
            return f"{name} is {remedy}"
    return ""


def find_config(path: Path) -> dict[str, Any] | None:
    """Return the config.json of a folder or of a safetensors file; None if there is none.

    A file's is in its metadata or in the same folder. Raises JobError if it cannot be read.
    """
    folder = path.parent if path.is_file() else path
    if path.is_file():
        try:
            metadata = read_header(path, with_metadata=True).get("__metadata__", {})
            config_text = metadata.get(CONFIG) if isinstance(metadata, dict) else None
            if config_text is not None and not isinstance(config := load_json(str(config_text)), dict):
                raise JobError(f"its {CONFIG} is no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise JobError(f"{path} is no safetensors file, or one that is cut off: {error}") from error
        if config_text is not None:
            return config
    return read_json(folder / CONFIG) if os.path.exists(folder / CONFIG) else None


def find_text_config(path: Path) -> dict[str, Any] | None:
    """Return `find_config` as the config of a text model (`text_part`). Raises JobError."""
    config = find_config(path)
    return None if config is None else text_part(config)


def end_token_ids(folder: Path, ignored_keys: Collection[str] = ()) -> frozenset[int]:
    """Return the tokens that end a text of the model in a folder, as transformers finds them.

    They are the eos_token_id of generation_config.json or, only without this file, of config.json: an id or a list.
    Raises JobError for another value and, unless it is ignored, for an unknown key of generation_config.json.
    """
    name = GENERATION if os.path.exists(folder / GENERATION) else CONFIG
    content = find_text_config(folder) if name == CONFIG else read_json(folder / name)
    if content is None:
        return frozenset()
    if name == GENERATION:
        judged = {key: value for key, value in content.items() if key not in ignored_keys}
        keys = ", ".join(json.dumps(key) for key in GENERATION_KEYS.unknown(judged))
        remedy = f"if it does not matter, set model.ignore_config_keys = [{keys}]"
        GENERATION_KEYS.check(judged, str(folder / name), remedy)
    ids = content.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise JobError(f"{folder / name}: eos_token_id = {content['eos_token_id']!r}; allowed: null, an id or a list")
    return frozenset(ids)


def sampling_options(folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what generation_config.json sets of temperature, top_k and top_p, and its settings that have no option.

    As in transformers, these count with do_sample only; if it is false, the temperature is 0. Raises JobError for a
    value that transformers refuses too.
    """
    content = read_json(folder / GENERATION) if os.path.exists(folder / GENERATION) else {}
    if not content.get("do_sample"):
        return ({"temperature": 0} if content.get("do_sample") is False else {}), {}
    values = {key: content[key] for key in SAMPLING if content.get(key) is not None}
    for key, value in values.items():
        if not _can_sample(key, value):
            raise JobError(f"{folder / GENERATION}: {key} = {value!r}; allowed: {SAMPLING[key]}")
    unsupported = {key: content[key] for key, neutral in NOT_SAMPLED.items() if content.get(key) not in (None, neutral)}
    return values, unsupported


def _can_sample(key: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if key == "top_k" else int | float):
        return False
    return 0 < value <= 1 if key == "top_p" else 0 <= value < math.inf


def untrained_token_ids(config: Mapping[str, Any]) -> list[int]:
    """Return the ids of untrained tokens that a config.json lists; entries that are not integers are ignored."""
    token_ids = config.get(UNTRAINED)
    return [token_id for token_id in token_ids if type(token_id) is int] if isinstance(token_ids, list) else []


def read_header(file: Path, with_metadata: bool = False) -> dict[str, Any]:
    """Return tensor name -> dtype, shape and offsets from the header of a safetensors file.

    Raises OSError or ValueError (JobError is one).
    """
    with open_file(file) as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if length > LARGEST_HEADER:
            raise JobError(f"{file.name} is no safetensors file")
        try:
            content = load_json(opened.read(length))
        except RecursionError as error:
            raise JobError(f"{file.name} is no safetensors file") from error
    if not isinstance(content, dict):
        raise JobError(f"{file.name} is no safetensors file")
    return {name: entry for name, entry in content.items() if name != "__metadata__" or with_metadata}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its entry of the header, and where its bytes begin and end in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def find(cls, file: Path, name: str) -> "StoredTensor | None":
        """Return a tensor of a file; None if the file cannot be read or lacks it, which loading reports."""
        try:
            entry, start = read_header(file)[name], _header_bytes(file)
            begin, end = (start + int(offset) for offset in entry["data_offsets"])
            return cls(file, str(entry["dtype"]), tuple(int(length) for length in entry["shape"]), begin, end)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def equals(self, other: "StoredTensor") -> bool:
        """Return True if the other tensor has the same type, shape and bytes."""
        if (self.dtype, self.shape, self.end - self.begin) != (other.dtype, other.shape, other.end - other.begin):
            return False
        return all(first == second for first, second in zip(self._chunks(), other._chunks(), strict=True))

    def _chunks(self, length: int = 2**24) -> Iterator[bytes]:
        with open_file(self.file) as opened:
            opened.seek(self.begin)
            for place in range(self.begin, self.end, length):
                yield opened.read(min(length, self.end - place))


def _header_bytes(file: Path) -> int:
    with open_file(file) as opened:
        return 8 + int(struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))[0])


def check_types(args: Any) -> None:
    """Raise JobError unless all fields of a dataclass, nested ones too, have their declared types and are finite."""
    kinds = typing.get_type_hints(type(args))
    for name in (field.name for field in fields(args)):
        kind, value = kinds[name], getattr(args, name)
        try:
            TypeAdapter(kind, config=None if is_dataclass(value) else STRICT).validate_python(value)
        except ValidationError as error:
            raise JobError(f"{name} = {value!r}: {error.errors()[0]['msg'].lower()}") from None
        if is_dataclass(value):
            check_types(value)


def check_ranges(args: Any, config: Mapping[str, Any]) -> None:
    """Raise JobError for a number outside RANGES, for example a typo or a malicious value."""
    for name in (field.name for field in fields(args)):
        value = getattr(args, name)
        if is_dataclass(value):
            check_ranges(value, config)
        elif name in RANGES and value is not None and not RANGES[name][0] <= value <= RANGES[name][1]:
            key = next((key for key in HF_KEYS.get(name, ()) if key in config), name)
            raise JobError(
                f"{key} = {value!r}; allowed: from {RANGES[name][0]:g} to {RANGES[name][1]:g}; take the config.json of "
                "the model's own repository"
            )


def check_numbers(config: Mapping[str, Any], needed: Iterable[str]) -> None:
    """Raise JobError unless all of these are integers above 0."""
    missing = [key for key in needed if type(config.get(key)) is not int or config[key] < 1]
    if missing:
        raise JobError(f"no whole number above 0 for {', '.join(missing)}")


def read_number(config: Mapping[str, Any], name: str, default: Number, null: Number | None = None) -> Number:
    """Return a number of a config, with the type of `default`; `default` if the key is absent.

    `null`: the value if the config has null. Raises JobError for anything else.
    """
    value = config.get(name, default)
    if value is None and null is not None:
        return null
    try:
        return TypeAdapter(type(default), config=STRICT).validate_python(value)
    except (ValidationError, OverflowError):
        allowed = "a whole number" if isinstance(default, int) else "a finite number"
        allowed += "" if null is None else f", or null for {null}"
        raise JobError(f"{name} = {value!r}; allowed: {allowed}; correct it, or leave it out for {default}") from None


def read_window(config: Mapping[str, Any], default: int, nullable: bool = True) -> int:
    """Return the number of tokens of `sliding_window`; 0 for none, which null stands for if the family has such models.

    `default`: transformers' for an absent key. Raises JobError for anything else.
    """
    window = read_number(config, "sliding_window", default, null=0 if nullable else None)
    if window < 1 and config.get("sliding_window") is not None:
        raise JobError(f"sliding_window = {window}; allowed: a number of tokens{', or null for none' * nullable}")
    return window


def read_flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a flag of a config; `default` if the key is absent. Raises JobError for anything but true and false."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise JobError(f"{name} = {value!r}; allowed: true or false; correct it, or leave it out for {default}")
    return value


def check_supported(config: Mapping[str, Any], only: Mapping[str, Any], nullable: Collection[str] = ()) -> None:
    """Raise JobError if a key is present with a value that the model does not support; it names all such keys.

    Null is allowed in place of numbers and lists, and for the keys in `nullable`. transformers refuses it for the other
    words and flags.
    """
    unsupported = {
        key: allowed
        for key, allowed in only.items()
        if key in config and not _is_supported(config[key], allowed, key in nullable)
    }
    if unsupported:
        raise JobError(
            "; ".join(f"{key} = {config[key]!r}, but this model only has {unsupported[key]!r}" for key in unsupported)
        )


def _is_supported(value: Any, allowed: Any, may_be_null: bool) -> bool:
    if value is None:
        return may_be_null or not isinstance(allowed, bool | str)
    allowed_types = (int, float) if type(allowed) is float else (type(allowed),)
    return bool(value == allowed) and type(value) in allowed_types


ROPE_FILE_KEYS = DeclaredKeys(
    used=frozenset(
        ("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        + ("original_max_position_embeddings", "attention_factor", "truncate", "mscale", "mscale_all_dim")
    ),
    harmless=frozenset(("finetuned",)),
    defaults={"partial_rotary_factor": 1.0},
)


def rope_config(config: Mapping[str, Any], theta: float = 10000.0) -> Mapping[str, Any]:
    """Return rotary scaling and theta, by the keys of transformers 5, without nulls.

    They are in `rope_parameters`, or in `rope_scaling` with theta next to it, or in both if they agree; `theta` is the
    default. Raises JobError for another type, an unknown key or a contradiction.
    """
    check_supported(config, {"partial_rotary_factor": 1.0})
    tables = {name: config[name] for name in ("rope_parameters", "rope_scaling") if config.get(name) not in (None, {})}
    tables = {name: _full_rope(name, table, config, theta) for name, table in (tables or {"rope_scaling": {}}).items()}
    return agreed_value("rotary positions", tables, "remove the one that the model was not trained with")


def split_partial_rotary(config: Mapping[str, Any], default: float) -> tuple[dict[str, Any], float]:
    """Return a config without partial_rotary_factor, and this factor, which a table of rotary positions may have."""
    key, tables = "partial_rotary_factor", ("rope_parameters", "rope_scaling")
    plain = {name: value for name, value in config.items() if name != key}
    factors = {key: read_number(config, key, default)} if key in config else {}
    for name in tables:
        if isinstance(table := config.get(name), Mapping) and key in table:
            factors[f"{name}'s {key}"] = read_number(table, key, default)
            plain[name] = {entry: value for entry, value in table.items() if entry != key}
    return plain, agreed_value(key, factors, "remove the wrong one") if factors else default


def _full_rope(name: str, table: Any, config: Mapping[str, Any], theta: float) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise JobError(f"{name} = {table!r}; allowed are null and an object with rope_type and its numbers")
    ROPE_FILE_KEYS.check(table, name, "remove it, if the model was trained without it")
    kinds = {f"{name}'s {key}": table.get(key) for key in ("rope_type", "type")}
    kind = agreed_value("the type of rotary positions", kinds, "remove the wrong one") or "default"
    if table.get("rope_type", kind) is None:
        raise JobError(
            f"{name} has rope_type = None; allowed: no rope_type, or one of default, {', '.join(ROPE_KINDS)}"
        )
    full = {key: value for key, value in table.items() if value is not None and key not in ("type", "finetuned")}
    full |= {"rope_type": kind} | {"rope_theta": _agreed_theta(name, table, config, theta)}
    length = "original_max_position_embeddings"
    if kind in ("yarn", "llama3") and length in config and config[length] is None:
        raise JobError(f"{length} = None next to {name}; leave it out")  # transformers prefers it to the table's
    if kind != "default" and config.get(length) is not None:
        lengths = {f"{name}'s {length}": full.get(length), length: config[length]}
        full[length] = agreed_value("the length before the scaling", lengths, "remove the wrong one")
    return full


def _agreed_theta(name: str, table: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> float:
    sources = {f"{name}'s rope_theta": read_number(table, "rope_theta", theta)} if "rope_theta" in table else {}
    if config.get("rope_theta") is not None or not sources:
        sources["rope_theta"] = read_number(config, "rope_theta", theta)
    return agreed_value("rope_theta", sources, "remove the one that the model was not trained with")


def decoder_sizes(
    config: Mapping[str, Any], max_seq_len: int, *more: str, theta: float = 10000.0, norm_eps: float = 1e-6
) -> dict[str, Any]:
    """Return the arguments of a decoder that `decoder_config` writes, except the number of key/value heads.

    Its default differs between families. `max_seq_len`, `theta` and `norm_eps`: transformers' defaults. Raises JobError
    for an invalid number, also of the keys in `more`.
    """
    needed = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    needed |= {"vocab_size": "vocab_size"}
    check_numbers(config, [*needed.values(), *more])
    return {argument: config[hf_name] for argument, hf_name in needed.items()} | {
        "norm_eps": read_number(config, "rms_norm_eps", norm_eps),
        "rope_theta": rope_config(config, theta)["rope_theta"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "max_seq_len": read_number(config, "max_position_embeddings", max_seq_len),
    }


def decoder_config(args: Any, dtype: Any) -> dict[str, Any]:
    """Return the fields that all families share, in a spelling that transformers 4 and 5 both read.

    `dtype` is a torch dtype or its name.
    """
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.num_kv_heads,
        "hidden_act": "silu",
        "attention_bias": getattr(args, "attention_bias", False),
        "rms_norm_eps": args.norm_eps,
        "max_position_embeddings": args.max_seq_len,
        "rope_theta": args.rope_theta,
        "tie_word_embeddings": args.tied_embeddings,
        "pad_token_id": None,  # transformers would not train the embedding of a pad token
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_biases(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return the sizes that say which linear layers have biases."""
    return {name: read_flag(config, name, False) for name in ("attention_bias", "mlp_bias")}


def gated_sizes(
    config: Mapping[str, Any],
    max_seq_len: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    head_dim_may_be_null: bool = False,
    theta: float = 10000.0,
) -> dict[str, Any]:
    """Return the arguments of `GatedArgs` that `gated_config` writes.

    `max_seq_len`, `kv_heads`, `head_dim` and `theta` are transformers' defaults for absent keys. `kv_heads` of None is
    as many as query heads, and so is null in the file; `head_dim` of None is the width divided by the number of heads,
    and in some families so is null in the file. Raises JobError for a bad number.
    """
    sizes = decoder_sizes(config, max_seq_len, "intermediate_size", theta=theta)
    heads = sizes["n_heads"]
    head_dim = head_dim or sizes["dim"] // heads
    return sizes | {
        "rope_scaling": scaling_from_hf(config),
        "n_kv_heads": read_number(config, "num_key_value_heads", kv_heads or heads, null=heads),
        "head_dim": read_number(config, "head_dim", head_dim, null=head_dim if head_dim_may_be_null else None),
        "ffn_dim": config["intermediate_size"],
    }


def gated_config(args: Any, dtype: Any) -> dict[str, Any]:
    """Return the fields that all families with `GatedArgs` share; see decoder_config."""
    widths = {"head_dim": args.head_dim, "intermediate_size": args.ffn_dim}
    return decoder_config(args, dtype) | rotary_config(args) | widths


ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
ROPE_KINDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
"""transformers' fields for each kind of scaling; the last two of yarn may be missing."""


def rotary_config(args: Any) -> dict[str, Any]:
    """Return the fields that `scaling_from_hf` reads, and theta, which ntk changes."""
    scaling = args.rope_scaling
    return {
        "rope_theta": scaling.theta(args.rope_theta, getattr(args, "rotary_dim", args.head_dim))
        if scaling
        else args.rope_theta,
        "rope_scaling": scaling and _to_hf(scaling),
    }


def _to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return transformers' rotary scaling; None for ntk, which is expressed by theta alone."""
    if scaling.kind == "ntk":
        return None
    table = {"rope_type": scaling.kind} | {key: getattr(scaling, ROPE_KEYS[key]) for key in ROPE_KINDS[scaling.kind]}
    factor = scaling.attention_factor
    table |= {} if factor is None else {"attention_factor": factor}
    return table if scaling.truncate else table | {"truncate": False}


def scaling_from_hf(config: Mapping[str, Any]) -> RopeScaling | None:
    """Return the rotary scaling of a config. Raises JobError for an unsupported kind."""
    rope = rope_config(config)
    kind = rope["rope_type"]
    if kind == "default":
        return None
    values = {key: rope[key] for key in ROPE_KINDS.get(kind, ()) if rope.get(key) is not None}
    if kind not in ROPE_KINDS or set(ROPE_KINDS[kind]) - set(values) - {"beta_fast", "beta_slow"}:
        kinds = "; ".join(f"{name} with {', '.join(keys)}" for name, keys in ROPE_KINDS.items())
        raise JobError(f"rotary scaling {dict(rope)}; allowed are none and types {kinds}")
    if kind != "yarn":
        check_supported(rope, {"attention_factor": None, "mscale": None, "mscale_all_dim": None, "truncate": True})
    sizes = {ROPE_KEYS[key]: value for key, value in values.items()}
    truncate = read_flag(rope, "truncate", True)
    return RopeScaling(kind=kind, **sizes, attention_factor=_attention_factor(rope), truncate=truncate)


def _attention_factor(rope: Mapping[str, Any]) -> float | None:
    """Return the factor of rotated features that a table sets; None if it is yarn's usual one."""
    if "attention_factor" in rope:
        return read_number(rope, "attention_factor", 1.0)
    weights = [read_number(rope, key, 0.0) for key in ("mscale", "mscale_all_dim")]
    if not all(weights):
        return None
    first, second = (0.1 * weight * math.log(max(rope["factor"], 1.0)) + 1 for weight in weights)
    return first / second
