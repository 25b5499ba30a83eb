"""Our tensors and those of Hugging Face: names, order of rows, experts one by one instead of stacked, matrices that are
one there and several here.

A family says which name is which (`Form`); this file turns that into both directions. Where heads are turned by
neighbouring pairs of features here and by the pairs (i, i + head_dim / 2) there, rows come in another order.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan.core.errors import JobError

ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
TURNED = frozenset({"attention.wq.weight", "attention.wk.weight"})
"""Whose rows come in another order there, where rotary positions turn them."""
QK_NORMS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
EXPERTS = {
    "moe.experts.w1": "mlp.experts.*.gate_proj.weight",
    "moe.experts.w2": "mlp.experts.*.down_proj.weight",
    "moe.experts.w3": "mlp.experts.*.up_proj.weight",
}
"""[experts, in, out] here; for each expert, its number in place of the star, [out, in] there."""


def with_biases(modules: Mapping[str, str]) -> dict[str, str]:
    """Names of modules, ours -> theirs, -> those of the weight and the bias that each has."""
    return {f"{ours}.{own}": f"{theirs}.{own}" for own in ("weight", "bias") for ours, theirs in modules.items()}


@dataclass(frozen=True, kw_only=True)
class Form:
    """`parts`: names within a layer, ours -> theirs, a star where theirs are one for each expert; several of ours that
    are one of theirs stand there below each other, in this order, all of the same shape. `ends`: names outside of the
    layers; `layers`: what stands before a layer's number there, and `base` the part of it that a folder may leave out
    everywhere, as one of the model without a head does.

    `head`: ours that belong to what the model is used for, which a folder of one for another use lacks.

    `turned`: those whose rows come in another order there, by heads of `head_dim` rows. `transposed`: matrices that lie
    as [in, out] there. `float32`: those that are never stored narrower. `copies`: theirs, beyond that of `hf_names`,
    that one of ours is written as once more; they are not read.
    """

    parts: Mapping[str, str]
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    layers: str = "model.layers."
    base: str = ""
    head: frozenset[str] = frozenset()
    n_experts: int = 0
    turned: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    head_dim: int = 0
    float32: frozenset[str] = frozenset()
    tied: bool = False
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _ours: dict[str, list[str]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for ours, theirs in self.parts.items():
            self._ours.setdefault(theirs, []).append(ours)

    def hf_names(self, name: str) -> list[str]:
        """Theirs for one of ours: one, or one for each expert. KeyError for what is not ours."""
        if not name.startswith("layers."):
            return [self.ends[name]]
        _, layer, part = name.split(".", 2)
        theirs = f"{self.layers}{layer}.{self.parts[part]}"
        return [theirs.replace("*", str(expert)) for expert in range(self.n_experts)] if "*" in theirs else [theirs]

    def together(self, name: str) -> list[str]:
        """All of ours, this one among them, that are one of theirs, in their order there."""
        if not name.startswith("layers."):
            return [name]
        _, layer, part = name.split(".", 2)
        return [f"layers.{layer}.{each}" for each in self._ours[self.parts[part]]]

    def our_names(self, name: str) -> tuple[list[str], int | None]:
        """Ours for one of theirs, and which expert it is. KeyError or JobError for what is not theirs."""
        if not name.startswith(self.layers):
            return [{theirs: ours for ours, theirs in self.ends.items()}[name]], None
        layer, part = name.removeprefix(self.layers).split(".", 1)
        expert = None
        if part.startswith("mlp.experts."):
            mlp, experts, number, rest = part.split(".", 3)
            part, expert = f"{mlp}.{experts}.*.{rest}", int(number)
            if not 0 <= expert < self.n_experts or str(expert) != number:
                raise JobError(f"{name}: there are {self.n_experts} experts")
        return [f"layers.{layer}.{each}" for each in self._ours[part]], expert

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors by our names (weights, or their gradients) -> by theirs. A tied head is left out. Of what is one
        there, all of ours have to be given.
        """
        theirs = {}
        for name, value in state.items():
            if self.tied and name == "output.weight":
                continue
            names = self.hf_names(name)
            together = self.together(name)
            if self.is_stacked(name):
                theirs |= {each: matrix.t() for each, matrix in zip(names, value, strict=True)}
            elif name == together[0]:
                value = value if together == [name] else torch.cat([state[each] for each in together])
                value = value.t() if self.is_transposed(name) else value
                theirs[names[0]] = self.rows_to_hf(value) if self.is_turned(name) else value
            theirs |= {copy: value.clone() for copy in self.copies.get(name, ())}  # files hold no shared memory
        return theirs

    def from_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inverse of to_hf, for load_state_dict: a tied head is there again."""
        copies = {name for names in self.copies.values() for name in names}
        ours: dict[str, torch.Tensor] = {}
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        for theirs, value in state.items():
            if theirs in copies:
                continue
            names, expert = self.our_names(theirs)
            if expert is not None:
                stacks.setdefault(names[0], {})[expert] = value.t()
                continue
            value = value.t() if self.is_transposed(names[0]) else value
            for name, part in zip(names, value.chunk(len(names)), strict=True):
                ours[name] = self.rows_from_hf(part) if self.is_turned(name) else part
        for name, experts in stacks.items():
            ours[name] = torch.stack([experts[expert] for expert in range(self.n_experts)])
        if self.tied:
            ours["output.weight"] = ours["tok_embeddings.weight"]
        return ours

    def hf_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of each of the tensors that one of ours is there, or is a part of."""
        if self.is_stacked(name):
            return shape[2], shape[1]
        shape = (shape[0] * len(self.together(name)), *shape[1:])
        return shape[::-1] if self.is_transposed(name) else shape

    def is_stacked(self, name: str) -> bool:
        return "*" in self.parts.get(_within_layer(name), "")

    def is_turned(self, name: str) -> bool:
        return _within_layer(name) in self.turned

    def is_transposed(self, name: str) -> bool:
        return _within_layer(name) in self.transposed

    def is_float32(self, name: str) -> bool:
        return _within_layer(name) in self.float32

    def rows_to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        """[heads head_dim, ...] in our order of turned pairs -> the same in theirs, halves apart"""
        return weight.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    def rows_from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        """The inverse, [heads head_dim, ...] too."""
        return weight.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _within_layer(name: str) -> str:
    return name.split(".", 2)[-1] if name.startswith("layers.") else name


def in_order(names: Iterable[str]) -> list[str]:
    """As modules stand in the model; within a module, the order stays."""
    ends = {"tok_embeddings": 0, "entrance": 0, "layers": 1, "norm": 2, "output": 3}

    def place(name: str) -> tuple[int, int]:
        first, second, *_ = name.split(".")
        return ends[first], int(second) if first == "layers" else 0

    return sorted(names, key=place)


BIAS = {"moe.router.expert_bias": "moe.expert_bias"}


@dataclass(frozen=True)
class TorchtitanForm:
    """`renamed`: within a layer, ours -> theirs. `form`: that of Hugging Face, where rows come in the same order."""

    renamed: dict[str, str]
    form: Form | None = None

    def name(self, ours: str) -> str:
        if not ours.startswith("layers."):
            return ours
        _, layer, part = ours.split(".", 2)
        return f"layers.{layer}.{self.renamed.get(part, part)}"

    def shape(self, ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], shape[2], shape[1]) if ours.endswith(tuple(EXPERTS)) else shape

    def to_ours(self, ours: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of their shape -> of ours."""
        if ours.endswith(tuple(EXPERTS)):
            return tensor.transpose(1, 2)
        if self.form is not None and self.form.is_turned(ours):
            return self.form.rows_from_hf(tensor)
        return tensor


def _deepseek(args: Any, form: Form) -> TorchtitanForm:
    compressed = {"attention.wq.weight": "attention.wq_b.weight"} if args.q_lora_rank else {}
    return TorchtitanForm(BIAS | compressed)


FORMS: dict[str, Callable[[Any, Form], TorchtitanForm]] = {
    **dict.fromkeys(("llama2", "llama3", "llama3.1", "llama3.2"), lambda args, form: TorchtitanForm({})),
    "deepseek": _deepseek,
    "qwen3": lambda args, form: TorchtitanForm({}, form),
    "qwen3_moe": lambda args, form: TorchtitanForm(BIAS, form),
}
"""By family: (args, its form of Hugging Face) -> torchtitan's. A family that torchtitan does not have is not here."""
