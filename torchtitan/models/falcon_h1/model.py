"""Falcon-H1: the model, its parallel plan, and its names in the Hugging Face format."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from torchtitan.core.random_draws import Constant, Init
from torchtitan.models.attention import AttentionKernel
from torchtitan.models.decoder import Block, ResidualBlock
from torchtitan.models.falcon_h1 import CONFIG
from torchtitan.models.falcon_h1.layer import HybridAttention, ScaledSwiGLU
from torchtitan.models.flops import hybrid_flops_per_token
from torchtitan.models.gated import PLAN as GATED_PLAN
from torchtitan.models.gated import GatedDecoder, norm_of, tensor_map
from torchtitan.models.hf.names import ENDS, TensorMap
from torchtitan.models.linear_attention import HybridKernel, StateKernel, state_init
from torchtitan.models.spec import HuggingFace, ModelSpec


def hybrid_kernel() -> HybridKernel:
    return HybridKernel(AttentionKernel(), StateKernel(delta=False))


class FalconH1(GatedDecoder):
    """A decoder with attention and a Mamba-2 mixer side by side in each layer (arXiv:2507.22448).

    transformers rounds the factors of a mixer's inputs to float32, and without its kernels it runs on over the
    documents of a packed sequence. Its kernels put the norm after the gate even if a config says before.
    """

    @staticmethod
    def kernel_of(args: Any, layer: int) -> Callable[[], nn.Module]:
        return hybrid_kernel

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: AttentionKernel) -> nn.Module:
        return HybridAttention(args, kernel)

    @staticmethod
    def build_block(args: Any, layer: int, attention: nn.Module) -> ResidualBlock:
        return Block(args, attention, ScaledSwiGLU(args), partial(norm_of(args), args.dim, args.norm_eps))

    def init_rule(self, name: str) -> Init:
        if name.endswith("skip.weight"):
            return Constant(1.0)
        return state_init(name, self.args.conv_taps) or super().init_rule(name)


NAMES = {
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "feed_forward.w1.weight": "feed_forward.gate_proj.weight",
    "feed_forward.w2.weight": "feed_forward.down_proj.weight",
    "feed_forward.w3.weight": "feed_forward.up_proj.weight",
    **{f"attention.mixer.ssm_{part}.weight": "mamba.in_proj.weight" for part in ("z", "x", "b", "c", "dt")},
    **{f"attention.mixer.conv_{part}.weight": "mamba.conv1d.weight" for part in "xbc"},
    "attention.mixer.decay.log_rate": "mamba.A_log",
    "attention.mixer.decay.step_bias": "mamba.dt_bias",
    "attention.mixer.skip.weight": "mamba.D",
    "attention.mixer.ssm_out.weight": "mamba.out_proj.weight",
}
NORM = {"attention.mixer.ssm_norm.weight": "mamba.norm.weight"}
CONV_BIASES = {f"attention.mixer.conv_{part}.bias": "mamba.conv1d.bias" for part in "xbc"}


def hybrid_map(args: Any) -> TensorMap:
    names = NAMES | (NORM if args.ssm_norm else {}) | (CONV_BIASES if args.conv_bias else {})
    form = tensor_map(args, names)
    rows = {
        f"attention.mixer.{kind}_{part}.{tensor}": width
        for kind in ("ssm", "conv")
        for part, width in args.ssm_widths.items()
        for tensor in ("weight", "bias")
    }
    ends = ENDS | {"norm.weight": "model.final_layernorm.weight"}
    return replace(form, rows=form.rows | rows, outer_names=ends, _ours={})


COLUMN = ("attention.mixer.ssm_[zx]", "attention.mixer.ssm_dt", "attention.mixer.conv_x", "attention.mixer.decay")
SSM_NORM = "attention.mixer.ssm_norm"
PLAN = replace(
    GATED_PLAN,
    column=(*GATED_PLAN.column, *COLUMN),
    row=(*GATED_PLAN.row, "attention.mixer.ssm_out"),
    # groups are few, and a rank's heads read some of them
    replicated=(*GATED_PLAN.replicated, "attention.mixer.ssm_[bc]", "attention.mixer.conv_[bc]"),
    by_head=(*GATED_PLAN.by_head, "attention.mixer.skip"),
    split_norms=(SSM_NORM,),
    optional=(*GATED_PLAN.optional, SSM_NORM),
)
HF = HuggingFace(build=FalconH1, tensor_map=hybrid_map, config=CONFIG)
SPEC = ModelSpec(build=FalconH1, plan=PLAN, hf=HF, flops_per_token=hybrid_flops_per_token)
