"""Compare peft's adapter_config.json with a job's options.

It does not import torch, as jobs are checked before they start.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.files import DeclaredKeys
from torchtitan.models.hf.config import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_DEFAULTS = {"use_rslora": False, "use_dora": False, "bias": "none"}
"""Defaults of keys that are missing in a config, as peft before 0.9 writes it."""
PER_MODULE_KEYS = ("rank_pattern", "alpha_pattern")
"""Keys that override rank and alpha for single modules."""
_INITS_KEEPING_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model unchanged. With the others (pissa, olora, corda, loftq,
lora_ga) peft subtracts the initial product of A and B from the model's matrices, which then differ from the published
ones."""
_KEYS = DeclaredKeys(
    used=frozenset(
        ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "init_lora_weights", *PER_MODULE_KEYS)
    ),
    # which modules have A and B, and what is trained besides, is told by the tensors; the rest is of training or of the
    # place of files
    harmless=frozenset(
        ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")
        + ("trainable_token_indices", "target_parameters", "lora_dropout", "fan_in_fan_out", "inference_mode")
        + ("task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "runtime_config")
        + ("megatron_config", "megatron_core", "eva_config", "corda_config", "loftq_config", "lora_ga_config")
        + ("qalora_group_size", "ensure_weight_tying")
    ),
)
"""Keys of adapter_config.json. All others may change the model, or how A and B are used: layer_replication, use_qalora,
alora_invocation_tokens, arrow_config, lora_bias, use_bdlora, and those of later versions of peft."""


def config_entries(options: Options) -> dict[str, Any]:
    """Return the config entries that define the computation of an adapter with these options."""
    return {
        "peft_type": "LORA",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "use_rslora": options.rslora,
        "use_dora": options.kind == "dora",
        "bias": "none",
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read the adapter's config. Raises JobError if there is none."""
    try:
        return read_json(folder / CONFIG)
    except JobError as error:
        raise JobError(f"{folder}: no adapter in peft's layout ({CONFIG}, {WEIGHTS}): {error}") from error


def mismatches(
    config: Mapping[str, Any], options: Options, by_module: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield each reason why an adapter with this config does not fit the job, with a remedy.

    `by_module`: values that the keys of PER_MODULE_KEYS may have for the job's model, if that is known.
    """
    values, expected = _DEFAULTS | config, config_entries(options)
    if other := [
        f"{k} = {values.get(k)!r}, the job's is {expected[k]!r}" for k in expected if values.get(k) != expected[k]
    ]:
        yield f"{'; '.join(other)}: give the job's [adapter] the same"
    if by_module is not None and (extra := _other_scales(config, options, by_module)):
        yield (
            f"{'; '.join(extra)}, but the job's rank and alpha apply to all modules: leave adapter.initial_path "
            "out, or give an adapter with one rank and one alpha"
        )
    init = config.get("init_lora_weights")
    if init not in _INITS_KEEPING_THE_BASE:
        yield (
            f"init_lora_weights = {init!r}, which changes the matrices that the adapter is added to: convert it "
            "with peft (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    if other := [f"{key} = {value!r}" for key, value in _KEYS.unknown(config).items()]:
        yield f"{'; '.join(other)}, which is not computed here: train it without"


def _other_scales(config: Mapping[str, Any], options: Options, by_module: Mapping[str, Any]) -> list[str]:
    """Return the entries of PER_MODULE_KEYS by which a module has neither the job's rank and alpha nor those allowed.

    Rank and alpha are judged together: their quotient scales the product of A and B.
    """
    patterns = {key: config.get(key) or {} for key in PER_MODULE_KEYS}
    if any(not isinstance(pattern, dict) for pattern in patterns.values()):
        return [f"{key} = {config[key]!r}" for key in PER_MODULE_KEYS]
    common = dict(zip(PER_MODULE_KEYS, (options.rank, options.alpha), strict=True))
    for module in dict.fromkeys(name for pattern in patterns.values() for name in pattern):
        values = {key: pattern.get(module, common[key]) for key, pattern in patterns.items()}
        joint = {key: by_module[key].get(module) for key in PER_MODULE_KEYS}
        if module not in by_module[PER_MODULE_KEYS[0]] or values not in (common, joint):
            return [f"{key} = {pattern!r}" for key, pattern in patterns.items() if pattern]
    return []
