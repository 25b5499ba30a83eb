"""Gemma 4 for text, without embeddings of layers: the model and its spec."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchtitan.core.random_draws import Constant, Init
from torchtitan.models.attention import AttentionKernel, GroupedQueryAttention
from torchtitan.models.decoder import Block, ResidualBlock
from torchtitan.models.flops import flops_by_layer
from torchtitan.models.gated import SANDWICH_NORMS, tensor_map
from torchtitan.models.gemma4 import CONFIG, EXPERT_NORMS, SCALE
from torchtitan.models.hf.names import FEED_FORWARD, QK_NORMS, REORDERED, SHARED_EXPERTS, TensorMap
from torchtitan.models.layers import GeGLU, RMSNorm, ZeroedBuffers
from torchtitan.models.moe.decoder import PLAN, ExpertDecoder, expert_spec
from torchtitan.models.moe.layer import ExpertOrder, MoE, MoEBlock
from torchtitan.models.moe.router import Router
from torchtitan.parallelisms.steps import Notes, RoutedExperts, Segment


class ScaledBlock(ResidualBlock, ZeroedBuffers):
    """A block whose output is multiplied by a number, which is not trained."""

    first_values = {"layer_scale": 1.0}

    def __init__(self, *options: Any):
        super().__init__(*options)
        self.register_buffer("layer_scale", torch.ones(1))

    def ffn_residual(self, h: torch.Tensor, y: torch.Tensor, notes: Notes) -> torch.Tensor:
        """Add the feed-forward's output y to the residual stream h, and scale the sum; all [B, S, D]."""
        return super().ffn_residual(h, y, notes) * self.layer_scale.to(h.dtype)


class DenseBlock(Block, ScaledBlock):
    """A block with a feed-forward."""


class ExpertScale(nn.Module):
    """A learned factor of each expert's weights."""

    def __init__(self, n_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts))

    def forward(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Weights [N, k] of the experts `ids` [N, k] -> [N, k]."""
        # the gradient of a gather along each token's own row adds in one order, unlike that of an index
        return weights * self.weight.to(weights.dtype).expand(len(ids), -1).gather(1, ids)


class ScaledRouter(Router):
    """A router with a norm of its input, whose weights are multiplied by a factor of each expert."""

    def __init__(self, args: Any):
        super().__init__(args)
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.scale = ExpertScale(args.n_experts)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> [..., E], between 0 and 1."""
        return super().scores(self.norm(x) * self.args.dim**-0.5)

    def weigh(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """scores [N, E], ids [N, k] -> [N, k]."""
        return self.scale(super().weigh(scores, ids), ids)


class NormedMoE(MoE):
    """Experts with norms before and after them, and a feed-forward beside them with one after it."""

    build_router = ScaledRouter

    def __init__(self, args: Any):
        super().__init__(args)
        self.norm, self.post_norm, self.shared_post_norm = (RMSNorm(args.dim, args.norm_eps) for _ in range(3))

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ExpertOrder]:
        """x [B, S, D] -> the rows of its norm sorted by expert, [N k, D], and their order."""
        return super().dispatch(self.norm(x), ids, weights)

    def combine(self, ys: torch.Tensor, weights: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
        """ys [N k, D] sorted by expert -> the norm of the weighted sum for each token, [N, D]."""
        return self.post_norm(super().combine(ys, weights, order))

    def _share(self, notes: Notes, x: torch.Tensor) -> torch.Tensor:
        """Apply the feed-forward and its norm: [B, S, D] -> [B, S, D]."""
        return self.shared_post_norm(super()._share(notes, x))


class ExpertBlock(MoEBlock, ScaledBlock):
    """A block with experts beside a feed-forward. Router and experts read the residual stream, not its norm."""

    build_moe = NormedMoE

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """Return the block's steps; the input of the feed-forward is its norm."""
        attention, route, *after = super().steps()
        return attention, route._replace(run=self.route), *after

    def route(self, notes: Notes, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """h [B, S, D] -> the feed-forward's input [B, S, D], weights [N, k] and copies sorted by expert [N k, D]."""
        return self.ffn_norm(h), *self.moe.steps()[0].run(notes, h)


class Gemma4(ExpertDecoder):
    """A Gemma 3 whose layers without a window have wider heads, of which few are keys and rotate in part."""

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: AttentionKernel) -> nn.Module:
        sizes = args.attention_sizes(layer)
        shares = "attention.wv" not in args.attention_linears(layer)
        scale = sizes.head_dim**0.5
        return GroupedQueryAttention(sizes, kernel, RMSNorm, query_scale=scale, norms_values=True, shares_keys=shares)

    @staticmethod
    def build_block(args: Any, layer: int, attention: nn.Module) -> ResidualBlock:
        norms = (partial(RMSNorm, args.dim, args.norm_eps), args.norm_order)
        if hasattr(args, "n_experts"):
            return ExpertBlock(args, attention, *norms)
        return DenseBlock(args, attention, GeGLU(args.dim, args.ffn_dim), *norms)

    def init_rule(self, name: str) -> Init:
        """Return the decoder's rule, with factors of experts that start at 1."""
        return Constant(1.0) if name.endswith(SCALE) else super().init_rule(name)


NAMES = {**SANDWICH_NORMS, "layer_scale": "layer_scalar"}
EXPERTS = {
    **{name: hf_name.replace("shared_experts.", "") for name, hf_name in SHARED_EXPERTS.items()},
    "moe.router.norm.weight": "router.scale",
    "moe.router.gate.weight": "router.proj.weight",
    SCALE: "router.per_expert_scale",
    "moe.norm.weight": "pre_feedforward_layernorm_2.weight",
    "moe.shared_post_norm.weight": "post_feedforward_layernorm_1.weight",
    "moe.post_norm.weight": "post_feedforward_layernorm_2.weight",
}
STACKS = {
    "moe.experts.w1": "experts.gate_up_proj",
    "moe.experts.w3": "experts.gate_up_proj",
    "moe.experts.w2": "experts.down_proj",
}
VECTORS = (*EXPERT_NORMS, "moe.router.scale")


def _tensor_map(args: Any) -> TensorMap:
    layers = [layer for layer in range(args.n_layers) if args.is_global(layer)]
    rows = {f"layers.{layer}.{name}": args.global_head_dim for layer in layers for name in (*REORDERED, *QK_NORMS)}
    form = tensor_map(args, NAMES)
    if hasattr(args, "n_experts"):  # its feed-forward has the names of a layer without experts
        names = {name: hf_name for name, hf_name in form.layer_names.items() if name not in FEED_FORWARD}
        form = replace(form, layer_names=names | EXPERTS | STACKS, stacks=frozenset(STACKS), _ours={})
    return replace(form, head_rows=rows, rotary_dim=0, rows={}, _ours={})


SPEC = expert_spec(
    Gemma4, CONFIG, plan=replace(PLAN, sequence=(*PLAN.sequence, *VECTORS), optional=(*PLAN.optional, *VECTORS))
)
SPEC = replace(SPEC, hf=replace(SPEC.hf, tensor_map=_tensor_map), flops_per_token=flops_by_layer)
HF = SPEC.hf
