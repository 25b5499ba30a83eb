"""Conversion between our tensors and Hugging Face's: names, order of rows, stacked experts, joint matrices.

A family declares its names in a `TensorMap`; this file converts in both directions. Hugging Face stores experts one by
one, and in some families joins matrices that are separate here. If heads rotate adjacent pairs of features here and the
pairs (i, i + head_dim / 2) there, the rows are in another order. Names in checkpoints of PyTorch's torchtitan:
torchtitan_names.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchtitan.core.errors import JobError

LM_HEAD, CLASSIFIER_HEAD = "lm_head.weight", "score.weight"
ENDS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": LM_HEAD,
}
ATTENTION = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
REORDERED = frozenset({"attention.wq.weight", "attention.wk.weight"})
"""Tensors with rows in another order in the HF format, if rotary positions rotate them."""
QK_NORMS = {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}
ROUTER = {"moe.router.gate.weight": "mlp.gate.weight"}
SHARED_EXPERTS = {
    "moe.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "moe.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
ROUTER_BIAS = "moe.router.expert_bias"
EXPERTS = {
    "moe.experts.w1": "mlp.experts.*.gate_proj.weight",
    "moe.experts.w2": "mlp.experts.*.down_proj.weight",
    "moe.experts.w3": "mlp.experts.*.up_proj.weight",
}
"""[experts, in, out] here; in the HF format [out, in] for each expert, with its number in place of the star."""
STACKS = {
    "mlp.experts.*.gate_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.*.up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.*.down_proj.weight": "mlp.experts.down_proj",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.experts.*.w1.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.*.w3.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.*.w2.weight": "mlp.experts.down_proj",
    "feed_forward.experts.*.w1.weight": "feed_forward.experts.gate_up_proj",
    "feed_forward.experts.*.w3.weight": "feed_forward.experts.gate_up_proj",
    "feed_forward.experts.*.w2.weight": "feed_forward.experts.down_proj",
    "mixer.experts.*.up_proj.weight": "mixer.experts.up_proj",
    "mixer.experts.*.down_proj.weight": "mixer.experts.down_proj",
}
"""Names of single experts' matrices -> those in the memory of transformers 5, and in some folders: [experts, out, in],
with the rows of all gates before those that they multiply."""


def is_after_layers(name: str, args: Any) -> bool:
    """Return True for an HF name after a model's last layer: depths of multi-token prediction that it does not have."""
    pieces = name.split(".")
    return pieces[:2] == ["model", "layers"] and pieces[2].isdecimal() and int(pieces[2]) >= args.n_layers


def with_biases(modules: Mapping[str, str]) -> dict[str, str]:
    """Map parameter names, ours -> Hugging Face's, of modules with a weight and a bias, from the modules' names."""
    return {
        f"{module}.{kind}": f"{hf_module}.{kind}"
        for kind in ("weight", "bias")
        for module, hf_module in modules.items()
    }


def is_other_head(name: str, args: Any) -> bool:
    """Return True for the name of a language model's head if the model classifies, or gives rewards."""
    return name == LM_HEAD and getattr(args, "n_classes", 0) > 0


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """Names and layouts of a family's tensors in the Hugging Face format. "HF name" means a name in that format.

    `layer_names`: our names within a layer -> HF names, with a star for the expert's number if each expert has a tensor
    of its own, or for the head's in tensors of `by_head`. Several of our names with one HF name are joined along rows
    in this order, all of the same shape unless `rows` has the number of rows of each; with `groups` in so many parts of
    each, which alternate.
    `outer_names`: names outside of the layers. `layers`: the prefix of a layer's number in HF names. `optional_prefix`:
    the part of this prefix that a folder may omit everywhere, as one of a model without a head does.

    `interleaved`: names of which the joined ones alternate along the last dimension instead. `joined_columns`: names of
    which they follow each other along it. `single_experts`: other HF names of experts, one by one, of folders that are
    read but not written. `stacks`: names of [experts, in, out] with one HF tensor [experts, out, in], of which the
    joined ones follow each other along `out`.
    `by_head`: tensors [heads x head_dim] with one HF tensor [head_dim] for each head, and the number of heads.
    `head_rows`: of a reordered tensor, in one layer or in all, the rows of each head, where they are not `head_dim`.
    `head`: our names that belong to the task of the model, which a folder of a model for another task lacks.
    `reordered`: tensors with rows in another order, by heads of `head_dim` rows, of which only the first `rotary_dim`
    differ if it is given. `transposed`: matrices stored as
    [in, out]. `float32`: tensors that are never stored in a narrower dtype. `copies`: further HF names to which a
    tensor is also written; they are not read. `in_memory`: beginnings of HF names -> those in the memory of
    transformers 5, where they differ.
    """

    layer_names: Mapping[str, str]
    outer_names: Mapping[str, str] = field(default_factory=lambda: ENDS)
    layers: str = "model.layers."
    optional_prefix: str = ""
    head: frozenset[str] = frozenset()
    n_experts: int = 0
    reordered: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    interleaved: frozenset[str] = frozenset()
    joined_columns: frozenset[str] = frozenset()
    single_experts: tuple[Mapping[str, str], ...] = ()
    stacks: frozenset[str] = frozenset()
    groups: int = 1
    by_head: Mapping[str, int] = field(default_factory=dict)
    head_dim: int = 0
    rotary_dim: int = 0
    head_rows: Mapping[str, int] = field(default_factory=dict)
    float32: frozenset[str] = frozenset()
    tied: bool = False
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    in_memory: Mapping[str, str] = field(default_factory=dict)
    _ours: dict[str, list[str]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for part, hf_part in self.layer_names.items():
            self._ours.setdefault(hf_part, []).append(part)

    def hf_names(self, name: str) -> list[str]:
        """Return the HF names of a tensor: one, or one for each expert. Raises KeyError for an unknown name."""
        if not name.startswith("layers."):
            return [self.outer_names[name]]
        _, layer, part = name.split(".", 2)
        hf_name = f"{self.layers}{layer}.{self.layer_names[part]}"
        number = self.by_head.get(part, self.n_experts) if "*" in hf_name else 0
        return [hf_name.replace("*", str(one)) for one in range(number)] if number else [hf_name]

    def within(self, prefix: str) -> "TensorMap":
        """Return the names in the memory of a model that has this one under a prefix, in the place of "model."."""

        def moved(name: str) -> str:
            for stored, new in self.in_memory.items():
                name = new + name.removeprefix(stored) if name.startswith(stored) else name
            return prefix + name.removeprefix("model.") if name.startswith("model.") else name

        outer_names = {ours: moved(hf_name) for ours, hf_name in self.outer_names.items()}
        return replace(self, layers=moved(self.layers), outer_names=outer_names, _ours={})

    def with_stacks(self) -> "TensorMap":
        """Return the names and layouts in a folder that stacks experts (STACKS), which few families write."""
        stacks = {name for name, hf_name in self.layer_names.items() if hf_name in STACKS}
        router = ("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias")  # Mixtral's, MiniMax M2's
        names = {name: STACKS.get(hf_name, hf_name) for name, hf_name in self.layer_names.items()}
        for hf_name in router:
            names |= {name: hf_name.replace("block_sparse_moe", "mlp") for name in names if names[name] == hf_name}
        return replace(self, layer_names=names, stacks=self.stacks | stacks, _ours={})

    def other_layouts(self) -> list["TensorMap"]:
        """Return the names and layouts of experts in folders that are read but not written."""
        singles = [
            replace(self, layer_names={**self.layer_names, **names}, joined_columns=frozenset(), _ours={})
            for names in self.single_experts
        ]
        return [self.with_stacks(), *singles]

    def joined_names(self, name: str) -> list[str]:
        """Return the names of all tensors that share this one's HF tensor, in order, including this one."""
        if not name.startswith("layers."):
            return [name]
        _, layer, part = name.split(".", 2)
        return [f"layers.{layer}.{our_part}" for our_part in self._ours[self.layer_names[part]]]

    def place(self, name: str, rows: int) -> tuple[int, int]:
        """Return the first row of a tensor with this number of rows in its HF tensor, and the number of that one's."""
        names = self.joined_names(name)
        heights = [self.rows.get(_within_layer(joined_name), rows) for joined_name in names]
        return sum(heights[: names.index(name)]), sum(heights)

    def rows_in_groups(self, name: str) -> torch.Tensor:
        """Return the place in the HF tensor of each row of the tensors that are joined, one after the other: [rows]."""
        heights = [self.rows[_within_layer(joined_name)] for joined_name in self.joined_names(name)]
        parts = torch.arange(sum(heights)).split(heights)
        return torch.cat([part.view(self.groups, -1) for part in parts], dim=1).flatten().argsort()

    def rows_to_groups(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        """Order the rows [rows, ...] of tensors that are joined one after the other as in the HF tensor of `name`."""
        return joined[self.rows_in_groups(name).argsort()] if self.is_grouped(name) else joined

    def rows_from_groups(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        """Invert rows_to_groups: [rows, ...] -> [rows, ...]."""
        return joined[self.rows_in_groups(name)] if self.is_grouped(name) else joined

    def our_names(self, name: str) -> tuple[list[str], int | None]:
        """Return our names of an HF name, and the expert's number or None. KeyError or JobError if it is unknown."""
        if not name.startswith(self.layers):
            return [{hf_name: ours for ours, hf_name in self.outer_names.items()}[name]], None
        layer, part = name.removeprefix(self.layers).split(".", 1)
        expert = None
        if number := next((piece for piece in part.split(".") if piece.isdecimal()), None):
            part, expert = part.replace(f".{number}.", ".*."), int(number)
            heads = self.by_head.get(next(iter(self._ours.get(part, ())), ""))
            if part in self._ours and (expert >= (heads or self.n_experts) or str(expert) != number):
                raise JobError(f"{name}: there are {f'{heads} heads' if heads else f'{self.n_experts} experts'}")
        return [f"layers.{layer}.{our_part}" for our_part in self._ours[part]], expert

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert full tensors by name (weights, or their gradients) to HF names and shapes, without a tied head.

        Tensors that are joined in one HF tensor must all be given.
        """
        hf_state = {}
        for name, value in state.items():
            if self.tied and name == "output.weight":
                continue
            names = self.hf_names(name)
            joined = self.joined_names(name)
            if self.is_stacked(name):
                if self.is_by_head(name):
                    value = (self.rows_to_hf(name, value) if self.is_reordered(name) else value).view(len(names), -1)
                hf_state |= {key: matrix.t() for key, matrix in zip(names, value, strict=True)}
            elif self.is_interleaved(name):
                if name == joined[0]:
                    hf_state[names[0]] = torch.stack([state[key] for key in joined], dim=-1).flatten(-2)
            elif self.has_joined_columns(name):
                if name == joined[0]:
                    hf_state[names[0]] = torch.cat([state[key] for key in joined], dim=-1)
            elif self.is_stack(name):
                if name == joined[0]:
                    hf_state[names[0]] = torch.cat([state[key].transpose(1, 2) for key in joined], dim=1)
            elif name == joined[0]:
                parts = [self.rows_to_hf(key, state[key]) if self.is_reordered(key) else state[key] for key in joined]
                value = parts[0] if len(parts) == 1 else torch.cat(parts)
                value = self.rows_to_groups(name, value)
                hf_state[names[0]] = value.t() if self.is_transposed(name) else value
            hf_state |= {copy: value.clone() for copy in self.copies.get(name, ())}  # files hold no shared memory
        return hf_state

    def from_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Invert to_hf, for load_state_dict: a tied head is included again. The tensors have HF shapes."""
        copies = {name for names in self.copies.values() for name in names}
        ours: dict[str, torch.Tensor] = {}
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        for hf_name, value in state.items():
            if hf_name in copies:
                continue
            names, expert = self.our_names(hf_name)
            if expert is not None:
                stacks.setdefault(names[0], {})[expert] = value.t()
                continue
            if self.is_interleaved(names[0]):
                ours |= {name: value[..., column :: len(names)] for column, name in enumerate(names)}
                continue
            if self.has_joined_columns(names[0]):
                ours |= dict(zip(names, value.chunk(len(names), dim=-1), strict=True))
                continue
            if not value.dim():
                ours[names[0]] = value
                continue
            if self.is_stack(names[0]):
                stacked = value.transpose(1, 2).chunk(len(names), dim=2)
                ours |= dict(zip(names, stacked, strict=True))
                continue
            value = value.t() if self.is_transposed(names[0]) else value
            heights = [self.rows.get(_within_layer(name), len(value) // len(names)) for name in names]
            value = self.rows_from_groups(names[0], value)
            for name, part in zip(names, value.split(heights), strict=True):
                ours[name] = self.rows_from_hf(name, part) if self.is_reordered(name) else part
        for name, experts in stacks.items():
            parts = [experts[expert] for expert in range(len(self.hf_names(name)))]
            if self.is_by_head(name):
                ours[name] = self.rows_from_hf(name, torch.cat(parts)) if self.is_reordered(name) else torch.cat(parts)
            else:
                ours[name] = torch.stack(parts)
        if self.tied:
            ours["output.weight"] = ours["tok_embeddings.weight"]
        return ours

    def hf_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of each HF tensor that holds a tensor of ours, or a part of it."""
        if not shape:
            return shape
        if self.is_by_head(name):
            return (shape[0] // len(self.hf_names(name)),)
        if self.is_stacked(name):
            return shape[2], shape[1]
        if self.is_interleaved(name) or self.has_joined_columns(name):
            return *shape[:-1], len(self.joined_names(name)) * shape[-1]
        if self.is_stack(name):
            return shape[0], len(self.joined_names(name)) * shape[2], shape[1]
        shape = (self.place(name, shape[0])[1], *shape[1:])
        return shape[::-1] if self.is_transposed(name) else shape

    def is_grouped(self, name: str) -> bool:
        """Return True if the tensor's rows alternate by groups with those of others in the HF format."""
        return self.groups > 1 and len(self.joined_names(name)) > 1

    def is_stacked(self, name: str) -> bool:
        """Return True if the tensor has the HF tensors of all experts, or of all heads."""
        return "*" in self.layer_names.get(_within_layer(name), "")

    def is_by_head(self, name: str) -> bool:
        """Return True if each head has an HF tensor of its own."""
        return _within_layer(name) in self.by_head

    def is_stack(self, name: str) -> bool:
        """Return True if the HF tensor has the matrices of all experts, transposed."""
        return _within_layer(name) in self.stacks

    def is_interleaved(self, name: str) -> bool:
        """Return True if the tensor's columns alternate with others' in the HF format."""
        return _within_layer(name) in self.interleaved

    def has_joined_columns(self, name: str) -> bool:
        """Return True if the tensor's columns follow or precede others' in the HF format."""
        return _within_layer(name) in self.joined_columns

    def is_reordered(self, name: str) -> bool:
        """Return True if the tensor's rows are in another order in the HF format."""
        return _within_layer(name) in self.reordered

    def is_transposed(self, name: str) -> bool:
        """Return True if the HF format stores the matrix as [in, out]."""
        return _within_layer(name) in self.transposed

    def is_float32(self, name: str) -> bool:
        """Return True if the tensor is always stored in float32."""
        return _within_layer(name) in self.float32

    def rows_of_head(self, name: str) -> int:
        """Return the rows of a head in a tensor with rows in another order."""
        return self.head_rows.get(name, self.head_rows.get(_within_layer(name), self.head_dim))

    def rows_to_hf(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of whole heads of a tensor, [heads x rows of a head, ...], from adjacent pairs to halves."""
        return self._reorder(name, weight, (-1, 2))

    def rows_from_hf(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Reorder rows [heads x rows of a head, ...] from halves to adjacent pairs, the inverse of rows_to_hf."""
        return self._reorder(name, weight, (2, -1))

    def _reorder(self, name: str, weight: torch.Tensor, pairs: tuple[int, int]) -> torch.Tensor:
        """Transpose the rotated rows of each head as a matrix of this shape."""
        heads = weight.unflatten(0, (-1, self.rows_of_head(name)))
        rotated = self.rotary_dim or self.rows_of_head(name)
        turned, plain = heads[:, :rotated], heads[:, rotated:]
        turned = turned.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)
        return (torch.cat((turned, plain), dim=1) if plain.numel() else turned).flatten(0, 1)


def _within_layer(name: str) -> str:
    return name.split(".", 2)[-1] if name.startswith("layers.") else name


def sort_names(names: Iterable[str]) -> list[str]:
    """Sort names in the order of the modules in the model; within a module the order does not change."""
    ends = {"tok_embeddings": 0, "entrance": 0, "layers": 1, "norm": 2, "output": 3}

    def place(name: str) -> tuple[int, int]:
        first, second, *_ = name.split(".")
        return ends[first], int(second) if first == "layers" else 0

    return sorted(names, key=place)
