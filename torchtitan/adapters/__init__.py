"""The registry of adapter kinds. It does not import torch, as `torchtitan check` reads the names.

`assembly/parts.py` creates adapters. A new adapter is one file and one entry here.
"""

from dataclasses import dataclass

from torchtitan.core.registry import Registry

NONE = "none"
"""The kind of a job without an adapter."""
COMMON_OPTIONS = ("kind", "save", "train_fully", "train_dense_rest")
"""Options of [adapter] that the interface handles for every kind."""
RULE_CHECKED_OPTIONS = ("train_scaling", "lora_only", "relora", "neurocache")
"""Options that separate rules allow for the kinds that support them (rules/adapters.py, rules/neurocache.py)."""
LOW_RANK_OPTIONS = ("rank", "alpha", "dropout", "rslora", "target", "layers", "lr_ratio_b")
_FOLDER_OPTIONS = ("initial_path", "last_save_in_peft")


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    make: str
    """The subclass of Adapter, as "module:attribute". It is created with the job's [adapter] and its seed."""
    options: tuple[str, ...] = ()
    """Options of [adapter] that it reads in addition to COMMON_OPTIONS and RULE_CHECKED_OPTIONS. A job that sets any
    other option is refused, as it would have no effect. If `target` is among them, its patterns and the rank are
    checked against the model's linears. `initial_path` and `last_save_in_peft` need `read_folder` and
    `write_folder`."""


def _low_rank(make: str) -> AdapterSpec:
    return AdapterSpec(make=make, options=LOW_RANK_OPTIONS + _FOLDER_OPTIONS)


_built_in = {
    "lora": _low_rank("torchtitan.adapters.lora:LoRA"),
    "dora": _low_rank("torchtitan.adapters.lora:DoRA"),
    "qlora": _low_rank("torchtitan.adapters.quantized:QLoRA"),
    "neurocache": _low_rank("torchtitan.adapters.neurocache.adapter:Neurocache"),
    "lora_int8": _low_rank("torchtitan.adapters.quantized:Int8LoRA"),
}
ADAPTERS: Registry[AdapterSpec] = Registry("torchtitan.adapters", _built_in, AdapterSpec)
