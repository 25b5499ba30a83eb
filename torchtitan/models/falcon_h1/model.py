"""Falcon-H1: the model, its parallel plan, and its names in the Hugging Face format."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from torchtitan.models.attention import AttentionKernel
from torchtitan.models.decoder import Block, ResidualBlock
from torchtitan.models.falcon_h1 import CONFIG
from torchtitan.models.falcon_h1.layer import HybridAttention, ScaledSwiGLU
from torchtitan.models.flops import hybrid_flops_per_token
from torchtitan.models.gated import PLAN as GATED_PLAN
from torchtitan.models.gated import norm_of
from torchtitan.models.linear_attention import HybridKernel
from torchtitan.models.mamba2.decoder import MixerDecoder, mixer_map, mixer_plan, state_kernel
from torchtitan.models.spec import HuggingFace, ModelSpec


def hybrid_kernel() -> HybridKernel:
    return HybridKernel(AttentionKernel(), state_kernel())


class FalconH1(MixerDecoder):
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


NAMES = {
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "feed_forward.w1.weight": "feed_forward.gate_proj.weight",
    "feed_forward.w2.weight": "feed_forward.down_proj.weight",
    "feed_forward.w3.weight": "feed_forward.up_proj.weight",
}
NAMES_OF = partial(mixer_map, names=NAMES, ends={"norm.weight": "model.final_layernorm.weight"})
PLAN = mixer_plan(GATED_PLAN, in_all_layers=True)
HF = HuggingFace(build=FalconH1, tensor_map=NAMES_OF, config=CONFIG)
SPEC = ModelSpec(build=FalconH1, plan=PLAN, hf=HF, flops_per_token=hybrid_flops_per_token)
