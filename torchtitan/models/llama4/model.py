"""Llama 4 for text: the model and its spec."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import nn

from torchtitan.models.attention import AttentionKernel, ChunkKernel, GroupedQueryAttention
from torchtitan.models.gated import tensor_map
from torchtitan.models.hf.names import SHARED_EXPERTS, TensorMap
from torchtitan.models.layers import UnitNorm
from torchtitan.models.llama4 import CONFIG
from torchtitan.models.moe.decoder import ExpertDecoder, expert_spec

chunks_of = cache(partial(partial, ChunkKernel))  # layers of equal chunks share a kind of attention


class Llama4(ExpertDecoder):
    """A decoder with attention within chunks, but for layers without rotary positions, whose queries grow."""

    @staticmethod
    def kernel_of(args: Any, layer: int) -> Callable[[], nn.Module] | None:
        return chunks_of(args.chunk_size) if args.rope(layer) else None

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: AttentionKernel) -> nn.Module:
        rotated = args.rope(layer) is not None
        has_norms = rotated and args.unit_heads
        return GroupedQueryAttention(
            args,
            kernel,
            UnitNorm if has_norms else None,
            bias=args.attention_bias,
            growth=(0.0 if rotated else args.query_growth, args.query_period, 1),
            norms_rotated=has_norms,
        )


_W = ((1, "gate"), (2, "down"), (3, "up"))
NAMES = {name: f"feed_forward.shared_expert.{hf_name.split('.', 2)[2]}" for name, hf_name in SHARED_EXPERTS.items()}
NAMES |= {f"feed_forward.w{i}.weight": f"feed_forward.{part}_proj.weight" for i, part in _W}
NAMES |= {f"moe.experts.w{i}": "feed_forward.experts.gate_up_proj" for i in (1, 3)}
NAMES |= {"moe.experts.w2": "feed_forward.experts.down_proj", "moe.router.gate.weight": "feed_forward.router.weight"}
SINGLE = tuple(
    {f"moe.experts.w{i}": f"feed_forward.experts.{name.format(part)}.weight" for i, part in _W}
    for name in ("{}_projs.*", "*.{}_proj")  # of Axolotl's "linearized" folders, and of compressors
)


def _tensor_map(args: Any) -> TensorMap:
    columns = frozenset(f"moe.experts.w{i}" for i, _ in _W)
    return replace(tensor_map(args, NAMES), joined_columns=columns, single_experts=SINGLE, _ours={})


SPEC = expert_spec(Llama4, CONFIG, NAMES)
SPEC = replace(SPEC, hf=replace(SPEC.hf, tensor_map=_tensor_map))
HF = SPEC.hf
