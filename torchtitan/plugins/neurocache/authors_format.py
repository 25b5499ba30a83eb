"""Neurocache adapters in the format of the authors' library: neurocache_config.json and a safetensors file.

Queries and keys of a cache have no rotary embedding, so either order of their matrices' rows works if both use the
same. They are read and written without reordering.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys, require_file
from torchtitan.core.hub import name_and_commit
from torchtitan.models.hf.config import read_json
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Options
from torchtitan.plugins.neurocache.sizes import CacheLayers, layers_of

if TYPE_CHECKING:  # torch is not imported, as jobs are checked before they start
    import torch

CONFIG, WEIGHTS = "neurocache_config.json", "neurocache_model.safetensors"
OPTION_NAMES = {
    "cache_size": "cache_size",
    "compression": "compression_factor",
    "topk": "topk",
    "window": "neighborhood_size",
    "context": "context_size",
    "similarity": "similarity_fn",
    "cache_dtype": "cache_dtype",
}
"""Names of options, ours -> the authors'."""
MATCHING_OPTIONS = ("compression_factor", "neighborhood_size", "context_size", "similarity_fn")
"""Options that must be as in training; the others may be changed when the adapter is reused."""


KEYS = DeclaredKeys(
    used=frozenset((*OPTION_NAMES.values(), "cache_type", "global_cache", "retrieval_map", "attention_layers")),
    harmless=frozenset(("base_model_name_or_path", "task_type", "inference_mode", "neurocache_type", "auto_mapping")),
)
"""Keys of neurocache_config.json."""


def config_of(options: Options, n_layers: int, base: str) -> dict[str, Any]:
    """Return the authors' config for a job's adapter; `base`: path of its model."""
    layers = layers_of(options, n_layers)
    return {authors_name: getattr(options, ours) for ours, authors_name in OPTION_NAMES.items()} | {
        "cache_type": options.ordering.upper(),
        "global_cache": options.scope == "global",
        "retrieval_map": {str(reader): storing for reader, storing in layers.readers.items()},
        "attention_layers": layers.attending,
        "base_model_name_or_path": name_and_commit(base)[0],
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's options that the config contains, by name; values are not validated."""
    options = {ours: config[authors_name] for ours, authors_name in OPTION_NAMES.items() if authors_name in config}
    if "cache_type" in config:
        options["ordering"] = str(config["cache_type"]).lower()
    if config.get("global_cache"):
        options["scope"] = "global"
    return options | {name: config[name] for name in ("retrieval_map", "attention_layers") if config.get(name)}


def read(folder: Path) -> dict[str, Any]:
    """Read the adapter's config. Raises JobError if there is none."""
    try:
        config = read_json(folder / CONFIG)
    except JobError as error:
        raise JobError(f"{folder}: no adapter of Neurocache ({CONFIG}, {WEIGHTS}): {error}") from error
    KEYS.check(config, str(folder / CONFIG), "remove it, if the adapter was trained without it")
    return config


def differences(config: Mapping[str, Any], options: Options, n_layers: int) -> Iterator[str]:
    """Yield each reason why an adapter with this config does not fit the job."""
    expected, layers = config_of(options, n_layers, ""), layers_of(options, n_layers)
    for name in MATCHING_OPTIONS:
        if config.get(name, expected[name]) != expected[name]:
            yield f"{name} = {config[name]!r}, the job's is {expected[name]!r}"
    config_layers = _layers(config, layers)
    if config_layers is None or (config_layers.readers, config_layers.attending) != (layers.readers, layers.attending):
        description = ", ".join(f"{name} = {config.get(name)!r}" for name in ("retrieval_map", "attention_layers"))
        yield f"{description}, the job's are {expected['retrieval_map']} and {expected['attention_layers']}"


def _layers(config: Mapping[str, Any], default: CacheLayers) -> CacheLayers | None:
    """Return the config's layers, or None if they are malformed."""
    map_, attending = config.get("retrieval_map") or default.readers, config.get("attention_layers")
    try:
        readers = {int(reader): int(storing) for reader, storing in map_.items()}
        return CacheLayers(readers, default.attending if attending is None else [int(layer) for layer in attending])
    except (AttributeError, TypeError, ValueError, OverflowError):  # OverflowError: json reads Infinity
        return None


Tensors = dict[str, "torch.Tensor"]
MEMORY = {
    "memory.h_proj.weight": "h_proj.weight",
    "memory.h_norm.weight": "h_norm.weight",
    "memory.h_norm.bias": "h_norm.bias",
}
ATTENTION = {
    "wq.weight": "q_proj.weight",
    "reading.wk": "k_proj.weight",
    "reading.wv": "v_proj.weight",
    "wo.weight": "o_proj.weight",
}


def tensor_names(options: Options, n_layers: int) -> dict[str, str]:
    """Return the names of the cache's tensors, ours -> the authors', for a model with `n_layers`."""
    mapping = dict(MEMORY) if options.compression > 1 else {}
    for number, layer in enumerate(layers_of(options, n_layers).attending):
        mapping |= {
            f"layers.{layer}.attention.cache.{ours}": f"cache_attns.{number}.{authors_name}"
            for ours, authors_name in ATTENTION.items()
        }
    return mapping


def save(folder: Path, cache: Tensors, linear_tensors: Tensors, options: Options, n: int, base: str) -> None:
    """Write full tensors of the cache (by our names) and of the linears' adapter (by peft's names).

    `n`: number of layers of the model. Raises OSError if the folder cannot be written.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: cache[ours].contiguous() for ours, name in tensor_names(options, n).items()}
    save_file(tensors | linear_tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_of(options, n, base), indent=2) + "\n")


def load(folder: Path, options: Options, n: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensors, Tensors]:
    """Read the cache's tensors of these shapes by our names, and the folder's remaining tensors.

    Raises JobError if the folder holds a different adapter, or none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if mismatches := list(differences(read(folder), options, n)):
        raise JobError(f"{folder / CONFIG}: {'; '.join(mismatches)}; give the job's [adapter.neurocache] the same")
    try:
        require_file(folder / WEIGHTS, missing_ok=True)
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise JobError(f"{folder}: no {WEIGHTS} that can be read: {error}; of a .bin file make one first") from error
    ours, faults = {}, []
    for name, authors_name in tensor_names(options, n).items():
        value = tensors.pop(authors_name, None)
        if value is None:
            faults.append(f"it lacks {authors_name}")
        elif tuple(value.shape) != shapes[name]:
            faults.append(f"{authors_name} has shape {tuple(value.shape)}, the job's is {shapes[name]}")
        else:
            ours[name] = value
    if faults:
        raise JobError(f"{folder}: {'; '.join(faults[:5])}. Give the job the model that it was made with")
    return ours, tensors
