"""Names and layouts in checkpoints of PyTorch's torchtitan, of two versions: one table both reads and writes them.

A checkpoint may mix the versions' names, since they changed one after another between v0.2.2 and July 2026.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.models.hf.names import EXPERTS, TensorMap

V0_2, MAIN = "torchtitan-v0.2", "torchtitan-main"
"""v0.2.2 (February 2026), and its main branch of August 2026."""
_BIAS = {"moe.router.expert_bias": "moe.expert_bias"}
_MAIN_ENDS = {"output.weight": "lm_head.weight"}
_MAIN_PROJECTIONS = {
    f"attention.{matrix}.{kind}": f"attention.qkv_linear.{matrix}.{kind}"
    for matrix in ("wq", "wk", "wv")
    for kind in ("weight", "bias")
}
_EXPERT_SHAPES = {"w1": "EFD", "w2": "EDF", "w3": "EFD"}
_MAIN_BIAS = "moe.expert_bias_E"
_JUNE_2026 = {f"moe.experts.{matrix}": f"moe.experts.{matrix}_{shape}" for matrix, shape in _EXPERT_SHAPES.items()}
"""Experts for a month; they were never the names of a release, so they are only read."""
_MAIN_MOE = {
    f"moe.experts.{matrix}": f"moe.routed_experts.inner_experts.{matrix}_{shape}"
    for matrix, shape in _EXPERT_SHAPES.items()
} | {"moe.router.expert_bias": _MAIN_BIAS}


@dataclass(frozen=True)
class TorchtitanNames:
    """Names and layouts of one family in checkpoints of PyTorch's torchtitan.

    `versions`: for each version, our names (within a layer, or outside) -> those that differ there. `tensor_map`: the
    Hugging Face map, if the rows are in its order.
    """

    versions: Mapping[str, Mapping[str, str]]
    tensor_map: TensorMap | None = None
    passing: Mapping[str, str] = field(default_factory=lambda: _JUNE_2026)
    """Names that were there between the versions."""

    def name(self, ours: str, version: str) -> str:
        """Return the name of one of our tensors in a version."""
        return _renamed(ours, self.versions[version])

    def absent_biases(self, ours: Iterable[str], version: str) -> list[str]:
        """Return the names of biases of experts that a version always has, for layers that have none here.

        `ours`: names of our tensors. A bias of zeros [E] changes no choice of experts.
        """
        layers = {name.split(".moe.")[0] for name in ours if ".moe.experts." in name} if version == MAIN else set()
        without = {name.split(".moe.")[0] for name in ours if name.endswith(".moe.router.expert_bias")}
        return [f"{layer}.{_MAIN_BIAS}" for layer in sorted(layers - without)]

    def stored_name(self, ours: str, names: Mapping[str, Any]) -> str:
        """Return the one of a tensor's names that a checkpoint has, or, if it has none, the one that fits the others.

        A checkpoint with more than one of them keeps the others, which are then no part of the model.
        """
        version = MAIN if _MAIN_ENDS["output.weight"] in names else V0_2
        order = [self.name(ours, version), *(self.name(ours, other) for other in self.versions)]
        order.append(_renamed(ours, self.passing))
        return next((name for name in order if name in names), order[0])

    def shape(self, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape there of a tensor of ours."""
        return (shape[0], shape[2], shape[1]) if ours.endswith(tuple(EXPERTS)) else shape

    def to_ours(self, ours: str, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a tensor from the shape and order of rows there to ours."""
        if ours.endswith(tuple(EXPERTS)):
            return tensor.transpose(1, 2)
        if self.tensor_map is not None and self.tensor_map.is_reordered(ours):
            return self.tensor_map.rows_from_hf(ours, tensor)
        return tensor

    def from_ours(self, ours: str, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a tensor of ours, of any shape, to the shape and order of rows there: the inverse of to_ours."""
        if ours.endswith(tuple(EXPERTS)):
            return tensor.transpose(1, 2)
        if self.tensor_map is not None and self.tensor_map.is_reordered(ours):
            return self.tensor_map.rows_to_hf(ours, tensor)
        return tensor


def _renamed(ours: str, changed_names: Mapping[str, str]) -> str:
    if not ours.startswith("layers."):
        return changed_names.get(ours, ours)
    _, layer, part = ours.split(".", 2)
    return f"layers.{layer}.{changed_names.get(part, part)}"


def _llama(args: Any, tensor_map: TensorMap) -> TorchtitanNames:
    return TorchtitanNames({V0_2: {}, MAIN: _MAIN_ENDS | _MAIN_PROJECTIONS})


def _deepseek(args: Any, tensor_map: TensorMap) -> TorchtitanNames:
    compressed = {"attention.wq.weight": "attention.wq_b.weight"} if args.q_lora_rank else {}
    return TorchtitanNames({V0_2: _BIAS | compressed, MAIN: _MAIN_ENDS | _MAIN_MOE | compressed})


def _qwen3(args: Any, tensor_map: TensorMap) -> TorchtitanNames:
    return TorchtitanNames({V0_2: _BIAS, MAIN: _MAIN_ENDS | _MAIN_PROJECTIONS | _MAIN_MOE}, tensor_map)


TORCHTITAN_NAMES: dict[str, Callable[[Any, TensorMap], TorchtitanNames]] = {
    **dict.fromkeys(("llama2", "llama3", "llama3.1", "llama3.2"), _llama),
    "deepseek": _deepseek,
    **dict.fromkeys(("qwen3", "qwen3_moe"), _qwen3),
}
"""Family -> function of (args, its TensorMap). Families that PyTorch's torchtitan does not have are missing."""
