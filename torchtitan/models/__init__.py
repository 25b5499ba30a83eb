"""Model families by name. No torch; `spec.py` holds what builds the models.

To add a family, write a folder and one line here.
"""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from torchtitan.core.errors import JobError
from torchtitan.core.registry import Registry
from torchtitan.models.afmoe import FAMILY as AFMOE
from torchtitan.models.apertus import FAMILY as APERTUS
from torchtitan.models.arcee import FAMILY as ARCEE
from torchtitan.models.cohere import COHERES
from torchtitan.models.deepseek import FAMILY as DEEPSEEK
from torchtitan.models.falcon import FAMILY as FALCON
from torchtitan.models.falcon_h1 import FAMILY as FALCON_H1
from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.gemma import FAMILY as GEMMA
from torchtitan.models.gemma2 import FAMILY as GEMMA2
from torchtitan.models.gemma3 import FAMILY as GEMMA3
from torchtitan.models.gemma4 import FAMILY as GEMMA4
from torchtitan.models.glm4 import GLMS
from torchtitan.models.glm4_moe import FAMILY as GLM4_MOE
from torchtitan.models.glm4_moe_lite import FAMILY as GLM4_MOE_LITE
from torchtitan.models.gpt2 import FAMILY as GPT2
from torchtitan.models.gpt_neox import FAMILY as GPT_NEOX
from torchtitan.models.gpt_oss import FAMILY as GPT_OSS
from torchtitan.models.gptj import FAMILY as GPTJ
from torchtitan.models.granite import FAMILY as GRANITE
from torchtitan.models.granite4 import FAMILY as GRANITE4
from torchtitan.models.hf.config import CONFIG, read_json
from torchtitan.models.hf.wrappers import text_part
from torchtitan.models.hunyuan import FAMILY as HUNYUAN
from torchtitan.models.lfm2 import LFMS
from torchtitan.models.llama import LLAMAS
from torchtitan.models.llama4 import FAMILY as LLAMA4
from torchtitan.models.minimax_m2 import FAMILY as MINIMAX_M2
from torchtitan.models.mistral import FAMILY as MISTRAL
from torchtitan.models.mistral4 import FAMILY as MISTRAL4
from torchtitan.models.mixtral import FAMILY as MIXTRAL
from torchtitan.models.nemotron import FAMILY as NEMOTRON
from torchtitan.models.nemotron_h import FAMILY as NEMOTRON_H
from torchtitan.models.olmo import OLMOS
from torchtitan.models.opt import FAMILY as OPT
from torchtitan.models.phi import FAMILY as PHI
from torchtitan.models.phi3 import PHIS
from torchtitan.models.qwen2 import FAMILY as QWEN2
from torchtitan.models.qwen2_moe import FAMILY as QWEN2_MOE
from torchtitan.models.qwen3 import FAMILY as QWEN3
from torchtitan.models.qwen3_moe import FAMILY as QWEN3_MOE
from torchtitan.models.qwen3_next import DELTA_NETS
from torchtitan.models.roberta import FAMILY as ROBERTA
from torchtitan.models.seed_oss import FAMILY as SEED_OSS
from torchtitan.models.smollm3 import FAMILY as SMOLLM3
from torchtitan.models.stablelm import FAMILY as STABLELM
from torchtitan.models.starcoder2 import FAMILY as STARCODER2

FAMILIES: dict[str, Family] = {
    **LLAMAS,
    "afmoe": AFMOE,
    "apertus": APERTUS,
    "arcee": ARCEE,
    **COHERES,
    "deepseek": DEEPSEEK,
    "falcon": FALCON,
    "falcon_h1": FALCON_H1,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    **GLMS,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "gptj": GPTJ,
    "granite": GRANITE,
    "granite4": GRANITE4,
    **LFMS,
    "hunyuan_v1_dense": HUNYUAN,
    "llama4": LLAMA4,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "mistral4": MISTRAL4,
    "mixtral": MIXTRAL,
    "nemotron": NEMOTRON,
    "nemotron_h": NEMOTRON_H,
    **OLMOS,
    "opt": OPT,
    "phi": PHI,
    **PHIS,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    **DELTA_NETS,
    "roberta": ROBERTA,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}
"""The families of this project."""


GROUP = "torchtitan.models"
SIZES: Registry[Mapping[str, Any]] = Registry(GROUP, FAMILIES, Family, attrgetter("sizes"))
CONFIG_CONVERTERS: Registry[ConfigConverter] = Registry(GROUP, FAMILIES, Family, attrgetter("config"))
"""Conversion between config.json and sizes. If several families share one, the first reads a folder without a job."""
PUBLISHERS: Registry[str] = Registry(GROUP, FAMILIES, Family, attrgetter("publisher"))
FROM_HF = "from_hf"
"""The flavor that takes its sizes from a folder's config.json."""


def sizes_of(model: Any) -> Any:
    """Return the sizes of a job with this section [model], see resolve_sizes."""
    return resolve_sizes(model.name, model.flavor, model.hf_folder, model.overrides, model.ignore_config_keys)


def converter_of(model: Any) -> ConfigConverter:
    """Return the family's converter of config.json, which ignores the keys that this section [model] names."""
    return CONFIG_CONVERTERS[model.name].ignoring(model.ignore_config_keys)


def resolve_sizes(
    name: str, flavor: str, folder: str | None, overrides: Mapping[str, Any], ignored_keys: Collection[str] = ()
) -> Any:
    """Return the family's frozen dataclass of sizes. `ignored_keys`: keys of config.json that are not judged.

    Raises KeyError for an unknown family or flavor, and JobError if the overrides, or the folder's config.json of
    flavor from_hf, are invalid.
    """
    if flavor != FROM_HF:
        return apply_overrides(SIZES[name][flavor], overrides)
    if folder is None:
        raise JobError("model.hf_folder is not set, which holds the config.json")
    return apply_overrides(CONFIG_CONVERTERS[name].ignoring(ignored_keys).args_from_folder(folder), overrides)


def apply_overrides(sizes: Any, overrides: Mapping[str, Any]) -> Any:
    """Return the sizes with overrides applied.

    For a size that is a table, such as rope_scaling, a table changes some of its entries and false removes it.
    """
    return dataclasses.replace(sizes, **{name: _value(sizes, name, value) for name, value in overrides.items()})


def _value(sizes: Any, name: str, value: Any) -> Any:
    table = table_type(type(sizes), name)
    if table is None:
        return value
    if value is False:
        return None
    before = getattr(sizes, name)
    return table(**value) if before is None else dataclasses.replace(before, **value)


def table_type(args: type, name: str) -> type | None:
    """Return the dataclass of a size that is a table, such as rope_scaling; None if it is a number or a string."""
    kind = typing.get_type_hints(args).get(name)
    return next((part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)), None)


def family_for_model_type(model_type: Any) -> str | None:
    """Return the first family that reads this model_type of a config.json; None if no family does."""
    return next((name for name, config in CONFIG_CONVERTERS.items() if model_type in config.model_types), None)


def family_in(folder: Path) -> str | None:
    """Return the model family of a folder's config.json, or None if it is not supported.

    Raises JobError if the file cannot be read.
    """
    return family_for_model_type(text_part(read_json(folder / CONFIG)).get("model_type"))
