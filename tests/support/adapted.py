"""Models with the adapters that the table of combinations names."""

from collections.abc import Iterable

import torch
from torch import nn

from tests.support.scale_adapter import ScaleAdapter
from torchtitan.adapters.dora import DoRA
from torchtitan.adapters.int8 import Int8LoRA
from torchtitan.adapters.interface import Adapter
from torchtitan.adapters.lora import LoRA
from torchtitan.adapters.neurocache.kind import Neurocache
from torchtitan.adapters.nf4 import QLoRA
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.config.sections.neurocache import Neurocache as Cache
from torchtitan.initialization import Normal, draw
from torchtitan.parallelisms.plan import ParallelPlan

_SMALL = Options(rank=4, alpha=8.0, target=["all-linear", "output"])
_CACHE = dict(topk=3, cache_dtype="float32")
ROWS = {
    "scale": (ScaleAdapter, Options()),
    "lora": (LoRA, _SMALL),
    "lora, tanh(s)": (LoRA, Options(kind="lora", rank=4, train_scaling=True)),
    "lora only": (LoRA, Options(kind="lora", rank=4, lora_only=True)),
    "dora": (DoRA, Options(kind="dora", rank=4, alpha=8.0)),
    "lora_dropout": (LoRA, Options(rank=4, alpha=8.0, dropout=0.25, target=["layers.*[!s]"])),  # no stacks of experts
    "dora_dropout": (DoRA, Options(kind="dora", rank=4, alpha=8.0, dropout=0.25)),
    "qlora": (QLoRA, Options(kind="qlora", rank=4, alpha=8.0)),
    "qlora_dropout": (QLoRA, Options(kind="qlora", rank=4, alpha=8.0, dropout=0.25)),
    "qlora, tanh(s)": (QLoRA, Options(kind="qlora", rank=4, train_scaling=True)),
    "neurocache": (Neurocache, Options(kind="neurocache", neurocache=Cache(cache_size=40, **_CACHE))),
    "neurocache, lora": (
        Neurocache,
        Options(
            kind="neurocache",
            rank=4,
            alpha=8.0,
            neurocache=Cache(cache_size=24, beside="lora", ordering="lru", **_CACHE),
        ),
    ),
    "lora_int8": (Int8LoRA, Options(kind="lora_int8", rank=4, alpha=8.0)),
    "lora_int8_dropout": (Int8LoRA, Options(kind="lora_int8", rank=4, alpha=8.0, dropout=0.25)),
    "lora_int8, tanh(s)": (Int8LoRA, Options(kind="lora_int8", rank=4, train_scaling=True)),
}
"""What a row of the table may name -> kind and options."""


def installed(name: str, model: nn.Module, plan: ParallelPlan) -> tuple[ParallelPlan, Adapter | None]:
    if name == "none":
        return plan, None
    kind, options = ROWS[name]
    adapter = kind(options)
    return adapter.install(model, plan), adapter


@torch.no_grad()
def learn_something(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Move adapters' parameters off the values at which they begin, where some gradients are zero."""
    for name, parameter in named_parameters:
        if "lora_B" in name:
            draw(parameter, Normal(0.1), name)
