"""neurocache_config.json of the authors' library, against a job's options. No torch: a job is judged by it before it
starts.
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
"""Options, ours -> theirs."""
OF_THE_WEIGHTS = ("compression_factor", "neighborhood_size", "context_size", "similarity_fn")
"""What an adapter was trained with and cannot do without; the others may be chosen anew for another use of it."""


def config_of(options: Options, n_layers: int, base: str) -> dict[str, Any]:
    """Of the adapter of a job; `base`: where its model is."""
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
    """The inverse: a job's options by name, as far as the file says them, of any type."""
    found = {ours: config[theirs] for ours, theirs in NAMES.items() if theirs in config}
    if "cache_type" in config:
        found["ordering"] = str(config["cache_type"]).lower()
    if config.get("global_cache"):
        found["scope"] = "global"
    return found | {name: config[name] for name in ("retrieval_map", "attention_layers") if config.get(name)}


def read(folder: Path) -> dict[str, Any]:
    """JobError where there is none."""
    try:
        return read_json(folder / CONFIG)
    except JobError as error:
        raise JobError(f"{folder}: no adapter of Neurocache ({CONFIG}, {WEIGHTS}): {error}") from error


def differences(config: Mapping[str, Any], options: Options, n_layers: int) -> Iterator[str]:
    """What keeps an adapter with this config from being the job's."""
    mine, layers = config_of(options, n_layers, ""), layers_of(options, n_layers)
    for name in OF_THE_WEIGHTS:
        if config.get(name, mine[name]) != mine[name]:
            yield f"{name} = {config[name]!r}, the job's is {mine[name]!r}"
    given = _layers(config, layers)
    if given is None or (given.readers, given.attending) != (layers.readers, layers.attending):
        told = ", ".join(f"{name} = {config.get(name)!r}" for name in ("retrieval_map", "attention_layers"))
        yield f"{told}, the job's are {mine['retrieval_map']} and {mine['attention_layers']}"


def _layers(config: Mapping[str, Any], default: Layers) -> Layers | None:
    """None where they are not layers."""
    map_, attending = config.get("retrieval_map") or default.readers, config.get("attention_layers")
    try:
        readers = {int(reader): int(storing) for reader, storing in map_.items()}
        return Layers(readers, default.attending if attending is None else [int(layer) for layer in attending])
    except (AttributeError, TypeError, ValueError, OverflowError):  # the last of an infinity, which json reads
        return None
