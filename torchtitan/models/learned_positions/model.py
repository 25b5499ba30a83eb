"""Modules that GPT-2, OPT and RoBERTa share: blocks, their parallel plan, and the head in the Hugging Face format."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch

from torchtitan.core.initialization import Constant, Init, Normal
from torchtitan.models.attention import AttentionKernel, GroupedQueryAttention
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.hf.names import Form
from torchtitan.models.layers import MLP, LayerNorm
from torchtitan.models.learned_positions import ClassicArgs
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
    indexed=("attention_dropout", "ffn_dropout"),
    may_lack=("attention_dropout", "ffn_dropout"),
)


def norm_of(args: ClassicArgs) -> LayerNorm:
    """Return a LayerNorm of the model's width."""
    return LayerNorm(args.dim, args.norm_eps)


def block_of(
    args: ClassicArgs,
    activation: Callable[[torch.Tensor], torch.Tensor],
    order: Literal["pre", "post"],
    layer: int,
    kernel: AttentionKernel,
) -> Block:
    """Return a block with biases in all linear layers. `activation` preserves the shape."""
    attention = GroupedQueryAttention(args, kernel, bias=True)
    return Block(args, attention, MLP(args.dim, args.ffn_dim, activation), partial(norm_of, args), order, args.dropout)


class Classic(Decoder):
    """A decoder with learned positions. Initial weights are normal with a standard deviation of 0.02.

    `narrows`: the deviation of matrices that feed the residual stream shrinks with the number of layers, as in GPT-2.
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


WORDS, CLASSES = "lm_head.weight", "score.weight"


def headed_form(
    args: ClassicArgs,
    parts: Mapping[str, str],
    ends: Mapping[str, str],
    layers: str,
    base: str,
    transposed: frozenset[str] = frozenset(),
) -> Form:
    """Return the Form (hf/names.py) of a model with its head; `ends` are all others outside of the layers."""
    return Form(
        parts=parts,
        ends={**ends, "output.weight": CLASSES if args.n_classes else WORDS},
        layers=layers,
        base=base,
        transposed=transposed,
        tied=args.tied_embeddings,
        head=frozenset({"output.weight"}) if args.n_classes else frozenset(),
    )


def is_other_head(name: str, args: ClassicArgs) -> bool:
    """Return True for the name of a language model's head if the model classifies."""
    return name == WORDS and args.n_classes > 0
