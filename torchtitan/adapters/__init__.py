"""Adapters by kind. No torch here, as `torchtitan check` reads the names; `build.py` makes them.

A value says where the class is, "module:attribute". A new adapter is one file and one line here.
"""

from torchtitan.registration import Registry

NONE = "none"
"""The kind of a job that trains the model itself."""

_own = {
    "lora": "torchtitan.adapters.lora:LoRA",
    "dora": "torchtitan.adapters.dora:DoRA",
    "qlora": "torchtitan.adapters.nf4:QLoRA",
    "neurocache": "torchtitan.adapters.neurocache.kind:Neurocache",
    "lora_int8": "torchtitan.adapters.int8:Int8LoRA",
}
ADAPTERS: Registry[str] = Registry("torchtitan.adapters", _own, str)
