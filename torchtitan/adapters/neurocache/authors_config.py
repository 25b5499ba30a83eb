"""Compare neurocache_config.json of the authors' library with a job's options.

It does not import torch, as jobs are checked before they start.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.adapters.neurocache.sizes import Layers, layers_of
from torchtitan.config.sections.adapter import Neurocache as Options
from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import read_json

CONFIG, WEIGHTS = "neurocache_config.json", "neurocache_model.safetensors"
NAMES = {
    "cache_size": "cache_size",
    "compression": "compression_factor",
    "topk": "topk",
    "window": "neighborhood_size",
    "context": "context_size",
    "similarity": "similarity_fn",
    "cache_dtype": "cache_dtype",
}
"""Names of options, ours -> the authors'."""
OF_THE_WEIGHTS = ("compression_factor", "neighborhood_size", "context_size", "similarity_fn")
"""Options that must match those of training; the others may be changed when the adapter is reused."""


def config_of(options: Options, n_layers: int, base: str) -> dict[str, Any]:
    """Return the authors' config for a job's adapter; `base`: path of its model."""
    layers = layers_of(options, n_layers)
    return {theirs: getattr(options, ours) for ours, theirs in NAMES.items()} | {
        "cache_type": options.ordering.upper(),
        "global_cache": options.scope == "global",
        "retrieval_map": {str(reader): storing for reader, storing in layers.readers.items()},
        "attention_layers": layers.attending,
        "base_model_name_or_path": base,
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
    }


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's options that the config contains, by name; values are not validated."""
    options = {ours: config[theirs] for ours, theirs in NAMES.items() if theirs in config}
    if "cache_type" in config:
        options["ordering"] = str(config["cache_type"]).lower()
    if config.get("global_cache"):
        options["scope"] = "global"
    return options | {name: config[name] for name in ("retrieval_map", "attention_layers") if config.get(name)}


def read(folder: Path) -> dict[str, Any]:
    """Read the adapter's config. Raises JobError if there is none."""
    try:
        return read_json(folder / CONFIG)
    except JobError as error:
        raise JobError(f"{folder}: no adapter of Neurocache ({CONFIG}, {WEIGHTS}): {error}") from error


def differences(config: Mapping[str, Any], options: Options, n_layers: int) -> Iterator[str]:
    """Yield each reason why an adapter with this config does not fit the job."""
    expected, layers = config_of(options, n_layers, ""), layers_of(options, n_layers)
    for name in OF_THE_WEIGHTS:
        if config.get(name, expected[name]) != expected[name]:
            yield f"{name} = {config[name]!r}, the job's is {expected[name]!r}"
    config_layers = _layers(config, layers)
    if config_layers is None or (config_layers.readers, config_layers.attending) != (layers.readers, layers.attending):
        description = ", ".join(f"{name} = {config.get(name)!r}" for name in ("retrieval_map", "attention_layers"))
        yield f"{description}, the job's are {expected['retrieval_map']} and {expected['attention_layers']}"


def _layers(config: Mapping[str, Any], default: Layers) -> Layers | None:
    """Return the config's layers, or None if they are malformed."""
    map_, attending = config.get("retrieval_map") or default.readers, config.get("attention_layers")
    try:
        readers = {int(reader): int(storing) for reader, storing in map_.items()}
        return Layers(readers, default.attending if attending is None else [int(layer) for layer in attending])
    except (AttributeError, TypeError, ValueError, OverflowError):  # OverflowError: json reads Infinity
        return None
