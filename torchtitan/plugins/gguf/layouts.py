"""Convert the tensors of a Hugging Face folder to those of llama.cpp: other names, orders of rows, and parts.

A layout returns, for a tensor of the folder, names that gguf's table knows and what becomes of the tensor under each.
It is applied to tensors without storage too, for their shapes.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

Convert = Callable[[torch.Tensor], torch.Tensor]
Layout = Callable[[str, Mapping[str, Any]], list[tuple[str, Convert]]]
_ROTATED = re.compile(r".*\.self_attn\.([qk])_proj\.(?:weight|bias)")
_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads"}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def plain(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    return [(name.replace("correction_bias", "correction.bias"), _same)]


def adjacent_pairs(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """llama.cpp rotates features 2i and 2i + 1 of queries and keys, and transformers i and i + head_dim / 2."""
    if match := _ROTATED.fullmatch(name):
        heads = config[_HEADS[match[1]]]
        return [(name, lambda rows: with_adjacent_pairs(rows, heads))]
    return plain(name, config)


def centered_norms(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """The folder's weights of norms are differences from 1."""
    return [(name, (lambda weight: weight + 1) if name.endswith("norm.weight") else _same)]


def with_adjacent_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows [heads * head_dim, ...] with rows i and i + head_dim / 2 of each head next to each other."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def gpt_oss(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Gates and what they multiply alternate in a stack [experts, in, 2 out]; sinks and biases have other names."""
    name = re.sub(r"experts\.(\w+_proj)_bias\Z", r"experts.\1.bias", name)
    if name.endswith("gate_up_proj"):
        return [(name.replace("gate_up", part) + ".weight", _every_second(n)) for n, part in enumerate(("gate", "up"))]
    if name.endswith("gate_up_proj.bias"):
        return [
            (name.replace("gate_up", "gate"), lambda x: x[:, ::2]),
            (name.replace("gate_up", "up"), lambda x: x[:, 1::2]),
        ]
    if name.endswith("experts.down_proj"):
        return [(name + ".weight", lambda stack: stack.mT)]
    return [(name + ".weight" if name.endswith("sinks") else name, _same)]


def _every_second(first: int) -> Convert:
    return lambda stack: stack[..., first::2].mT


def latent(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Keys and values of DeepSeek's latent attention are two tensors, by heads, and keys are transposed."""
    if not name.endswith("kv_b_proj.weight"):
        return plain(name, config)
    heads, keys = config["num_attention_heads"], config["qk_nope_head_dim"]
    return [
        (name.replace("kv_b", "k_b"), lambda rows: rows.unflatten(0, (heads, -1))[:, :keys].mT),
        (name.replace("kv_b", "v_b"), lambda rows: rows.unflatten(0, (heads, -1))[:, keys:]),
    ]


def stacked_latent(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Mistral 4 has DeepSeek's attention, and experts in stacks, [experts, out, in]."""
    return latent(f"{name}.weight" if ".experts." in name else name, config)


def delta_net(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """The gated delta rule of Qwen 3-Next and 3.5, whose norms in front of layers are centered.

    Qwen 3-Next has queries, keys, values and gates of one key head next to each other. In Qwen 3.5 llama.cpp has the
    value heads that share a key head apart: the first of all key heads, then the second.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    beginning, is_delta, part = name.partition("linear_attn.")
    if not is_delta:
        return centered_norms(name, config)
    is_joint, before = config["model_type"] == "qwen3_next", 2 * keys * key_dim

    def tiled(rows: torch.Tensor) -> torch.Tensor:
        return rows if is_joint else rows.unflatten(0, (keys, values // keys, -1)).transpose(0, 1).flatten(0, 2)

    def with_tiled_values(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[:before], tiled(rows[before:])))

    if part == "in_proj_qkvz.weight":
        width = values // keys * value_dim

        def parts(rows: torch.Tensor) -> list[torch.Tensor]:
            split = rows.unflatten(0, (keys, -1)).split((key_dim, key_dim, width, width), dim=1)
            return [one.flatten(0, 1) for one in split]

        block = re.sub(r"model\.layers\.(\d+)\.", r"blk.\1.", beginning)
        joined = (f"{block}attn_qkv.weight", lambda rows: torch.cat(parts(rows)[:3]))
        return [joined, (f"{block}attn_gate.weight", lambda rows: parts(rows)[3])]
    conversions: dict[str, Convert] = {
        "in_proj_qkv.weight": with_tiled_values,
        "conv1d.weight": lambda taps: with_tiled_values(taps.squeeze(1)),
        "A_log": lambda rates: tiled(-rates.exp()),
        "out_proj.weight": lambda matrix: tiled(matrix.mT).mT,
        **dict.fromkeys(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias"), tiled),
    }
    return [(name.replace("dt_bias", "dt_proj.bias"), conversions.get(part, _same))]


_STATE = re.compile(r".*\.mamba\.(conv1d\.weight|A_log|D|norm\.weight|dt_bias)")


def _state(part: str, groups: int) -> Convert:
    """Return what becomes of a part of a Mamba 2 layer."""
    conversions: dict[str, Convert] = {
        "conv1d.weight": lambda taps: taps.squeeze(1),
        "A_log": lambda rates: -rates.exp()[:, None],
        "D": lambda weight: weight[:, None],
        "norm.weight": lambda weight: weight.unflatten(0, (groups, -1)),
    }
    return conversions.get(part, _same)


def falcon_h1(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Falcon-H1's factors are in the weights."""
    inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"]
    widths = (inner, inner, *[groups * config["mamba_d_state"]] * 2, config["mamba_n_heads"])
    gate, down = config["mlp_multipliers"]
    inputs, outputs = config["attention_in_multiplier"], config["attention_out_multiplier"]
    factors = {"gate_proj": gate, "down_proj": down, "q_proj": inputs, "v_proj": inputs, "o_proj": outputs}
    factors |= {"k_proj": inputs * config["key_multiplier"], "out_proj": config["ssm_out_multiplier"]}
    factors |= {"lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"]}

    def scaled_inputs(rows: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(widths), config["ssm_multipliers"], strict=True)
        return torch.cat([part * (factor * config["ssm_in_multiplier"]) for part, factor in parts])

    if name.endswith("mamba.in_proj.weight"):
        return [(name, scaled_inputs)]
    if match := _STATE.fullmatch(name):
        return [(name.replace("dt_bias", "dt_proj.bias"), _state(match[1], groups))]
    factor = factors.get(name.split(".")[-2], 1.0)
    return [(name, lambda matrix: matrix * factor if factor != 1 else matrix)]


def gpt2(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Matrices of GPT-2's layers are [in, out] in a folder."""
    is_matrix = ".h." in name and name.endswith(".weight") and ".ln_" not in name
    return [(name, (lambda matrix: matrix.T) if is_matrix else _same)]


def joint_by_head(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """A joint matrix has queries, key and value of a key head next to each other; llama.cpp has all queries first."""
    if ".query_key_value." not in name:
        return plain(name, config)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]

    def queries_first(rows: torch.Tensor) -> torch.Tensor:
        by_head = rows.unflatten(0, (groups, heads // groups + 2, -1))
        return torch.cat([part.flatten(0, 2) for part in (by_head[:, :-2], by_head[:, -2:-1], by_head[:, -1:])])

    return [(name, queries_first)]


def stacked_norms(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Norms of queries and keys, one a head, are a matrix."""
    return [(name.replace("_layernorm.norms", "_layernorm"), _same)]


def short_convolution(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """LFM 2 has taps [features, 1, taps], and experts under the names of a feed-forward."""
    if name.endswith("conv.conv.weight"):
        return [(name, lambda taps: taps.squeeze(1))]
    for ours, part in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        name = name.replace(f".experts.{ours}", f".experts.{part}_proj")
    return [(name.replace("expert_bias", "expert_bias.bias"), _same)]


def afmoe(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    return [(name.replace("expert_bias", "expert_bias.bias"), _same)]


def llama4(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Stacks of experts are [experts, in, out], and have all gates before what they multiply."""
    if name.endswith("experts.gate_up_proj"):
        parts = enumerate(("gate", "up"))
        return [(name.replace("gate_up", part) + ".weight", partial(_half, place=place)) for place, part in parts]
    return [(name + ".weight", lambda stack: stack.mT)] if name.endswith("experts.down_proj") else [(name, _same)]


def _half(stack: torch.Tensor, place: int) -> torch.Tensor:
    return _chunk(stack.mT, 2, place)


def gemma4(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Factors of layers, of the router's input and of experts have other names."""
    scales = {"router.per_expert_scale": "experts.down_proj.scale", "router.scale": "router.proj.scale"}
    name = next((name.replace(*scale) for scale in scales.items() if name.endswith(scale[0])), name)
    return [(name if name.endswith((".weight", ".scale")) else f"{name}.weight", _same)]


def granite_hybrid(name: str, config: Mapping[str, Any]) -> list[tuple[str, Convert]]:
    """Gate and what it multiplies are one matrix in Granite 4, of experts [experts, 2 out, in]."""
    if match := _STATE.fullmatch(name):
        return [(name.replace("dt_bias", "dt_proj.bias"), _state(match[1], config["mamba_n_groups"]))]
    parts = {"input_linear": ("gate", "up"), "output_linear": ("down",)}
    for joint, ends in parts.items():
        if name.endswith(f"{joint}.weight"):
            block, _, part = name.partition(".block_sparse_moe.")
            room = "mlp.experts" if part else "mlp" if not config["num_local_experts"] else "mlp.shared_experts"
            block = block.removesuffix(f".shared_mlp.{joint}.weight")
            return [
                (f"{block}.{room}.{end}_proj.weight", partial(_chunk, number=len(ends), place=place))
                for place, end in enumerate(ends)
            ]
    return adjacent_pairs(name, config)


def _chunk(matrix: torch.Tensor, number: int, place: int) -> torch.Tensor:
    return matrix.chunk(number, dim=-2)[place]
