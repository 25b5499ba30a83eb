"""Models with the adapters that the table of combinations names."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from tests.support.documented_adapter import IA3
from tests.support.scale_adapter import ScaleAdapter
from torchtitan.adapters.interface import Adapter, Unfrozen
from torchtitan.adapters.low_rank import DoRA, LoRA
from torchtitan.adapters.quantized import Int8LoRA, QLoRA
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.random_draws import Normal, draw
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.plugins.neurocache.adapter import Neurocache
from torchtitan.plugins.neurocache.options import NeurocacheOptions as Cache

_SMALL = Options(rank=4, alpha=8.0, target=["all-linear", "output"])


def _unfrozen(*patterns: str) -> Callable[[Options], Adapter]:
    """Return a constructor of an adapter that trains the parameters with these patterns."""
    return lambda options: Unfrozen(patterns)


_CACHE = dict(topk=3, cache_dtype="float32")
ROWS = {
    "scale": (ScaleAdapter, Options()),
    "documented": (IA3, Options(target=["all-linear"])),
    "lora": (LoRA, _SMALL),
    "lora, one A": (LoRA, Options(rank=4, alpha=8.0, gate_up_rank=6, target=["all-linear"])),  # of gate and up
    "lora, tanh(s)": (LoRA, Options(kind="lora", rank=4, train_scaling=True)),
    "lora only": (LoRA, Options(kind="lora", rank=4, lora_only=True)),
    "dora": (DoRA, Options(kind="dora", rank=4, alpha=8.0)),
    "lora_dropout": (LoRA, Options(rank=4, alpha=8.0, dropout=0.25, target=["layers.*[!s]"])),  # no stacks of experts
    "dora_dropout": (DoRA, Options(kind="dora", rank=4, alpha=8.0, dropout=0.25)),
    "qlora": (QLoRA, Options(kind="qlora", rank=4, alpha=8.0)),
    "qlora_dropout": (QLoRA, Options(kind="qlora", rank=4, alpha=8.0, dropout=0.25)),
    "qlora, tanh(s)": (QLoRA, Options(kind="qlora", rank=4, train_scaling=True)),
    "neurocache": (Neurocache, Options(kind="neurocache", neurocache=Cache(cache_size=40, track_hits=True, **_CACHE))),
    "neurocache, lora": (
        Neurocache,
        Options(
            kind="neurocache",
            rank=4,
            alpha=8.0,
            neurocache=Cache(cache_size=24, beside="lora", ordering="lru", **_CACHE),
        ),
    ),
    **{
        f"neurocache, {kind}": (
            Neurocache,
            Options(kind="neurocache", rank=4, alpha=8.0, neurocache=Cache(cache_size=40, beside=kind, **_CACHE)),
        )
        for kind in ("dora", "qlora", "lora_int8")
    },
    # retrieve all entries: rounding cannot change the selection
    "neurocache, all found": (
        Neurocache,
        Options(kind="neurocache", neurocache=Cache(cache_size=24, topk=24, window=1)),
    ),
    "neurocache, shared": (
        Neurocache,
        Options(kind="neurocache", neurocache=Cache(cache_size=40, cache_shard="tp", **_CACHE)),
    ),
    "neurocache, authors' heads": (
        Neurocache,
        Options(kind="neurocache", neurocache=Cache(cache_size=40, compat_head_layout=True, context=3, **_CACHE)),
    ),
    "neurocache, one for all": (
        Neurocache,
        Options(kind="neurocache", neurocache=Cache(cache_size=40, cache_shard="tp", scope="global", **_CACHE)),
    ),
    "neurocache, two readers": (
        Neurocache,
        Options(kind="neurocache", neurocache=Cache(cache_size=40, retrieval_map={"3": 4, "4": 3}, **_CACHE)),
    ),
    "unfrozen": (_unfrozen("layers.*norm*", "layers.*.wo.weight", "output.weight"), Options()),
    "unfrozen, last": (_unfrozen("norm.weight", "output.weight"), Options()),
    "lora_int8": (Int8LoRA, Options(kind="lora_int8", rank=4, alpha=8.0)),
    "qlora, experts": (QLoRA, Options(kind="qlora", rank=4, alpha=8.0, target=["all-linear"])),
    "lora_int8, all experts": (
        Int8LoRA,
        Options(kind="lora_int8", rank=4, target=["*attention*", "*moe.experts.w2"], quantized_experts="all"),
    ),
    "lora_int8_dropout": (Int8LoRA, Options(kind="lora_int8", rank=4, alpha=8.0, dropout=0.25)),
    "lora_int8, tanh(s)": (Int8LoRA, Options(kind="lora_int8", rank=4, train_scaling=True)),
}
"""What a row of the table may name -> kind and options."""


def installed(name: str, model: nn.Module, plan: ParallelPlan) -> tuple[ParallelPlan, Adapter | None]:
    """Install the adapter of this name; return the changed plan and the adapter."""
    if name == "none":
        return plan, None
    kind, options = ROWS[name]
    adapter = kind(options)
    return adapter.install(model, plan), adapter


@torch.no_grad()
def perturb_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Change the adapters' parameters from their initial values, at which some gradients are zero."""
    for name, parameter in named_parameters:
        if "lora_B" in name:
            draw(parameter, Normal(0.1), name)
        elif "ia3_scale" in name:
            draw(parameter, Normal(1.0), name)


@torch.no_grad()
def perturb_biases(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Change biases from zero, which would hide a wrong split."""
    for name, parameter in named_parameters:
        if name.endswith(".bias"):
            draw(parameter, Normal(0.1), name)
