"""Modules that GPT-2, OPT and RoBERTa share: blocks, their parallel plan, and the head in the Hugging Face format."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch

from torchtitan.core.random_draws import Constant, Init, Normal
from torchtitan.models.attention import AttentionKernel, GroupedQueryAttention
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.hf.names import CLASSIFIER_HEAD, LM_HEAD, TensorMap
from torchtitan.models.layers import MLP, LayerNorm
from torchtitan.models.learned_positions import LearnedPositionArgs
from torchtitan.parallelisms.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    embedding="tok_embeddings",
    with_embedding=("entrance",),
    head=("norm", "output"),
    gathered=("attention", "feed_forward"),
    column=("attention.w[qkv]", "feed_forward.w1"),
    row=("attention.wo", "feed_forward.w2"),
    sequence=("attention_norm", "ffn_norm"),
    keyed=("attention_dropout", "ffn_dropout"),
    optional=("attention_dropout", "ffn_dropout"),
)


def make_norm(args: LearnedPositionArgs) -> LayerNorm:
    """Return a LayerNorm of the model's width."""
    return LayerNorm(args.dim, args.norm_eps)


def make_block(
    args: LearnedPositionArgs,
    activation: Callable[[torch.Tensor], torch.Tensor],
    order: Literal["pre", "post"],
    layer: int,
    kernel: AttentionKernel,
) -> Block:
    """Return a block with biases in all linear layers. `activation` preserves the shape."""
    attention = GroupedQueryAttention(args, kernel, bias=True)
    return Block(
        args, attention, MLP(args.dim, args.ffn_dim, activation), partial(make_norm, args), order, args.dropout
    )


class LearnedPositionDecoder(Decoder):
    """A decoder with learned positions. Initial weights are normal with a standard deviation of 0.02.

    `scales_residual_init`: the deviation of matrices that feed the residual stream shrinks with the number of layers,
    as in GPT-2.
    """

    scales_residual_init = False

    def init_rule(self, name: str) -> Init:
        *_, module, kind = name.split(".")
        if kind == "bias":
            return Constant(0.0)
        if module.endswith("norm"):
            return Constant(1.0)
        narrow = self.scales_residual_init and module in ("wo", "w2")
        return Normal(0.02 / (2 * self.args.n_layers) ** 0.5 if narrow else 0.02)


def make_tensor_map(
    args: LearnedPositionArgs,
    parts: Mapping[str, str],
    ends: Mapping[str, str],
    layers: str,
    optional_prefix: str,
    transposed: frozenset[str] = frozenset(),
) -> TensorMap:
    """Return the TensorMap of a model with its head; `outer_names` are all other names outside of the layers."""
    return TensorMap(
        layer_names=parts,
        outer_names={**ends, "output.weight": CLASSIFIER_HEAD if args.n_classes else LM_HEAD},
        layers=layers,
        optional_prefix=optional_prefix,
        transposed=transposed,
        tied=args.tied_embeddings,
        head=frozenset({"output.weight"}) if args.n_classes else frozenset(),
    )
