"""Adapters by kind. No torch here, as `torchtitan check` reads the names; `build/parts.py` makes them.

A new adapter is one file and one entry here.
"""

from dataclasses import dataclass

from torchtitan.core.registry import Registry

NONE = "none"
"""The kind of a job that trains the model itself."""
OF_EVERY_KIND = ("kind", "save", "train_fully", "train_dense_rest")
"""Of [adapter], what the interface does whatever the kind."""
BY_RULES = ("train_scaling", "lora_only", "relora", "neurocache")
"""And what rules of their own allow to the kinds that can do it (rules/adapters.py, rules/neurocache.py)."""
OF_LOW_RANK = ("rank", "alpha", "dropout", "rslora", "target", "layers", "lr_ratio_b")
_FOLDERS = ("initial_path", "last_save_in_peft")


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    make: str
    """Where the subclass of Adapter is, "module:attribute". It is made with the job's [adapter] and its seed."""
    reads: tuple[str, ...] = ()
    """What it reads of [adapter] beside OF_EVERY_KIND and BY_RULES. A job that sets another option is refused, as that
    would do nothing. With `target` the patterns and the rank are held against the model's linears, and `initial_path`
    and `last_save_in_peft` need `read_folder` and `write_folder`."""


def _low_rank(make: str) -> AdapterSpec:
    return AdapterSpec(make=make, reads=OF_LOW_RANK + _FOLDERS)


_own = {
    "lora": _low_rank("torchtitan.adapters.lora:LoRA"),
    "dora": _low_rank("torchtitan.adapters.dora:DoRA"),
    "qlora": _low_rank("torchtitan.adapters.nf4:QLoRA"),
    "neurocache": _low_rank("torchtitan.adapters.neurocache.adapter:Neurocache"),
    "lora_int8": _low_rank("torchtitan.adapters.int8:Int8LoRA"),
}
ADAPTERS: Registry[AdapterSpec] = Registry("torchtitan.adapters", _own, AdapterSpec)
