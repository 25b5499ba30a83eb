"""The registry of adapter kinds. It does not import torch, as `torchtitan check` reads the names.

`assembly/parts.py` creates adapters. A new adapter is one file and one entry here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.plugins import SECTIONS, plugin_entries
from torchtitan.core.registry import Registry

NONE = "none"
"""The kind of a job without an adapter."""
COMMON_OPTIONS = ("kind", "save", "train_fully", "train_dense_rest")
"""Options of [adapter] that the interface handles for every kind."""
RULE_CHECKED_OPTIONS = ("train_scaling", "lora_only", "relora")
RULE_CHECKED_OPTIONS += tuple(name.removeprefix("adapter.") for name in plugin_entries(SECTIONS))
"""Options that separate rules allow for the kinds that support them (rules/adapters.py, and rules of plugins)."""
LOW_RANK_OPTIONS = ("rank", "alpha", "dropout", "rslora", "target", "layers", "lr_ratio_b", "gate_up_rank")
ALL_LOW_RANK_OPTIONS = (*LOW_RANK_OPTIONS, "initial_path", "last_save_in_peft")


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    make: str
    """The subclass of Adapter, as "module:attribute". It is created with the job's [adapter] and its seed."""
    options: tuple[str, ...] = ()
    """Options of [adapter] that it reads in addition to COMMON_OPTIONS and RULE_CHECKED_OPTIONS. A job that sets any
    other option is refused, as it would have no effect. If `target` is among them, its patterns and the rank are
    checked against the model's linears. `initial_path` and `last_save_in_peft` need `read_folder` and
    `write_folder`."""
    stateful: bool = False
    """True for a subclass of StatefulAdapter, in some of the layers: its state takes memory from the first step on."""
    peft_folder: bool = True
    """True if the folders that it reads are peft's. Otherwise rules of its own check adapter.initial_path."""

    def linear_kind(self, options: Options) -> str:
        """Return the kind of the adapter on the model's linears, or "none": of an adapter next to this one."""
        return options.kind

    def state_of_all_rows(self, options: Options) -> str:
        """Say that the rows of a rank share state, and by which option; empty if each row has its own."""
        return ""

    def check_evaluation(self, options: Options, args: Any, sizes: Sequence[int] | None, seq_len: int) -> None:
        """Raise JobError if segments of `seq_len` tokens do not fit the state, with one of the --cache-sizes."""


def _low_rank(make: str, *options: str) -> AdapterSpec:
    return AdapterSpec(make=make, options=(*ALL_LOW_RANK_OPTIONS, *options))


_built_in = {
    "lora": _low_rank("torchtitan.adapters.low_rank:LoRA"),
    "dora": _low_rank("torchtitan.adapters.low_rank:DoRA"),
    "qlora": _low_rank("torchtitan.adapters.quantized:QLoRA", "quantized_experts"),
    "lora_int8": _low_rank("torchtitan.adapters.quantized:Int8LoRA", "quantized_experts"),
}
ADAPTERS: Registry[AdapterSpec] = Registry("torchtitan.adapters", _built_in, AdapterSpec)


def spec_of(options: Options) -> AdapterSpec:
    """Return the spec of a job's adapter; of a job without one, or of an unknown kind, one of a plain adapter."""
    return ADAPTERS.get(options.kind, AdapterSpec(make=""))
