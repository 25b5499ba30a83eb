"""What GPT-2, OPT and RoBERTa share as a plain torch model: the parts of a decoder, put together as in 2018."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from torchtitan.initialization import Constant, Init, Normal
from torchtitan.models.classic import ClassicArgs
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.layers import MLP, AttentionKernel, GroupedQueryAttention
from torchtitan.models.norms import LayerNorm


def norm_of(args: ClassicArgs) -> LayerNorm:
    return LayerNorm(args.dim, args.norm_eps)


def block_of(
    args: ClassicArgs,
    activation: Callable[[torch.Tensor], torch.Tensor],
    order: Literal["pre", "post"],
    layer: int,
    kernel: AttentionKernel,
) -> Block:
    """With biases everywhere. `activation` keeps the shape."""
    attention = GroupedQueryAttention(args, kernel, bias=True)
    return Block(args, attention, MLP(args.dim, args.ffn_dim, activation), partial(norm_of, args), order, args.dropout)


class Classic(Decoder):
    """Initial weights are normal with a deviation of 0.02; `narrows`: what feeds the residual stream is narrower with
    the number of layers, as in GPT-2.
    """

    narrows = False

    def init_rule(self, name: str) -> Init:
        *_, module, kind = name.split(".")
        if kind == "bias":
            return Constant(0.0)
        if module.endswith("norm"):
            return Constant(1.0)
        narrow = self.narrows and module in ("wo", "w2")
        return Normal(0.02 / (2 * self.args.n_layers) ** 0.5 if narrow else 0.02)
