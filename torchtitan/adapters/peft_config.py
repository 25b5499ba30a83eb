"""What adapter_config.json of the library peft says, against a job's options. No torch: a job is judged by it before it
starts.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.models.hf.config import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_UNSAID = {"use_rslora": False, "use_dora": False, "bias": "none"}
"""What a folder means that says nothing of these, as peft before 0.9 writes it."""
BY_MODULE = ("rank_pattern", "alpha_pattern")
"""Ranks and strengths of some modules that are not those of the others."""
_KEEPS_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`. With the others (pissa, olora, corda, loftq, lora_ga) peft takes what A and B begin with off
the model's matrices, so these matrices are not those that were published."""
_OTHERWISE = ("layer_replication", "use_qalora", "alora_invocation_tokens", "arrow_config")
"""Another model, or A and B in another way."""


def of_options(options: Options) -> dict[str, Any]:
    """What an adapter of these options says of how it computes."""
    return {
        "peft_type": "LORA",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "use_rslora": options.rslora,
        "use_dora": options.kind == "dora",
        "bias": "none",
    }


def read(folder: Path) -> dict[str, Any]:
    """JobError where there is none."""
    try:
        return read_json(folder / CONFIG)
    except JobError as error:
        raise JobError(f"{folder}: no adapter in peft's layout ({CONFIG}, {WEIGHTS}): {error}") from error


def differences(
    config: Mapping[str, Any], options: Options, by_module: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """What keeps an adapter with this config from being the job's, each with what to do. `by_module`: what those of
    BY_MODULE may be for the job's model, where that is known.
    """
    given, mine = _UNSAID | config, of_options(options)
    if other := [f"{k} = {given.get(k)!r}, the job's is {mine[k]!r}" for k in mine if given.get(k) != mine[k]]:
        yield f"{'; '.join(other)}: give the job's [adapter] the same"
    known = by_module or {}
    if own := [f"{key} = {config[key]!r}" for key in known if config.get(key) not in (None, {}, known[key])]:
        yield (
            f"{'; '.join(own)}, but the job's rank and alpha are those of all modules: leave adapter.initial_path "
            "out, or give an adapter that has one of each"
        )
    drawn = config.get("init_lora_weights")
    if drawn not in _KEEPS_THE_BASE:
        yield (
            f"init_lora_weights = {drawn!r}, which changes the matrices that the adapter stands beside: convert it "
            "with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if other := [f"{key} = {config[key]!r}" for key in _OTHERWISE if config.get(key)]:
        yield f"{'; '.join(other)}, which is not computed here: train it without"
