"""LFM 2: the models, their parallel plan, and their names in the Hugging Face format."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan.core.random_draws import Init
from torchtitan.models.attention import SharedInputs
from torchtitan.models.gated import PLAN as GATED_PLAN
from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.hf.names import ROUTER_BIAS
from torchtitan.models.lfm2 import CONFIG, CONVOLUTION, MOE_CONFIG, SHORT
from torchtitan.models.linear_attention import CausalConvolution, StateKernel, state_init
from torchtitan.models.moe import router
from torchtitan.models.moe.decoder import PLAN as EXPERT_PLAN
from torchtitan.models.moe.decoder import ExpertDecoder
from torchtitan.parallelisms.plan import ParallelPlan


class ShortConvolution(nn.Module):
    """A layer in place of attention: a convolution of each channel over the last tokens, gated before and after it.

    Letters of the shapes: B samples, S tokens, W width of the model.
    """

    def __init__(self, args: Any, kernel: StateKernel):
        super().__init__()
        for name in SHORT:
            self.add_module(name.rpartition(".")[2], nn.Linear(args.dim, args.dim, args.conv_bias))
        self.conv_short, self.kernel = CausalConvolution(args.dim, args.conv_taps, args.conv_bias), kernel

    def forward(self, x: torch.Tensor, shared: SharedInputs) -> torch.Tensor:
        """[B, S, W] -> [B, S, W]"""
        gate, out_gate, values = self.short_b(x), self.short_c(x), self.short_x(x)
        rows = self.kernel.with_earlier(gate * values, self.conv_short.taps - 1)
        return self.short_out(out_gate * self.kernel.to_samples(self.conv_short(rows, shared.mask)))


class ShortConvDecoder(GatedDecoder):
    """A decoder in which most layers have a short convolution in place of attention (arXiv:2511.23404)."""

    @staticmethod
    def kernel_of(args: Any, layer: int) -> Callable[[], nn.Module] | None:
        return StateKernel if args.has_state(layer) else None

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: Any) -> nn.Module:
        if args.has_state(layer):
            return ShortConvolution(args, kernel)
        return GatedDecoder.build_attention(args, layer, kernel)

    def init_rule(self, name: str) -> Init:
        return state_init(name, self.args.conv_taps) or super().init_rule(name)


class Lfm2(ShortConvDecoder):
    """An LFM 2 without experts. transformers' convolutions run on over the documents of a packed sequence."""


class Lfm2MoE(ShortConvDecoder, ExpertDecoder):
    """An LFM 2 with experts, none shared, in all but the first layers."""


NAMES = {
    "attention_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "attention.wo.weight": "self_attn.out_proj.weight",
    "attention.q_norm.weight": "self_attn.q_layernorm.weight",
    "attention.k_norm.weight": "self_attn.k_layernorm.weight",
    **dict.fromkeys((f"{name}.weight" for name in SHORT[:-1]), "conv.in_proj.weight"),
    f"{SHORT[-1]}.weight": "conv.out_proj.weight",
    **{f"{CONVOLUTION}.{kind}": f"conv.conv.{kind}" for kind in ("weight", "bias")},
    **{f"feed_forward.w{i}.weight": f"feed_forward.w{i}.weight" for i in (1, 2, 3)},
}
ROUTED = {f"moe.experts.w{i}": f"feed_forward.experts.*.w{i}.weight" for i in (1, 2, 3)}
ROUTED |= {"moe.router.gate.weight": "feed_forward.gate.weight", ROUTER_BIAS: "feed_forward.expert_bias"}
ENDS = {"norm.weight": "model.embedding_norm.weight"}
COLUMN, OUT = ("attention.short_[bcx]", CONVOLUTION), SHORT[-1]


def short_plan(plan: ParallelPlan) -> ParallelPlan:
    """Return the plan of a decoder with the modules of short convolutions, which are parallel by channels."""
    optional = (*plan.optional, *COLUMN, OUT, "attention.w[qkv]", "attention.wo")
    return replace(plan, column=(*plan.column, *COLUMN), row=(*plan.row, OUT), optional=optional)


SPEC = gated_spec(Lfm2, CONFIG, NAMES, short_plan(GATED_PLAN), ENDS)
MOE_SPEC = replace(gated_spec(Lfm2MoE, MOE_CONFIG, NAMES | ROUTED, short_plan(EXPERT_PLAN), ENDS), balance=router)
