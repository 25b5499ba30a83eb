"""Decoders with grouped attention and a gated feed-forward: the model, its parallel plan, and its names elsewhere.

A family that is a Llama with other options (`GatedDecoderSizes` of sizes.py) is a subclass of GatedDecoder and a
`gated_spec`. The one difference from transformers beyond names: heads rotate adjacent pairs of features (Meta's order),
transformers in most families feature i with i + head_dim / 2, so the rows of wq and wk, their biases and the weights of
their norms are in another order.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.core.random_draws import Constant, Init, Normal
from torchtitan.models.attention import AttentionKernel, GroupedQueryAttention
from torchtitan.models.decoder import (
    DECODER_PLAN,
    AttentionKind,
    Block,
    Decoder,
    EmbeddingDropout,
    ResidualBlock,
)
from torchtitan.models.family import ConfigConverter
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import (
    ATTENTION,
    CLASSIFIER_HEAD,
    ENDS,
    FEED_FORWARD,
    QK_NORMS,
    REORDERED,
    ROUTER_BIAS,
    TensorMap,
    is_other_head,
)
from torchtitan.models.layers import (
    MLP,
    XIELU,
    GeGLU,
    HeadNorm,
    LayerNorm,
    RMSNorm,
    Rotary,
    SwiGLU,
    ZeroCenteredLayerNorm,
    ZeroCenteredRMSNorm,
    squared_relu,
)
from torchtitan.models.sizes import QKV, SINKS, Rope, bias_of
from torchtitan.models.spec import HuggingFace, ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


class GatedDecoder(Decoder):
    """A decoder with sizes of the kind GatedDecoderSizes."""

    def __init__(self, args: Any, attention_backend: str = "auto"):
        def block(layer: int, kernel: AttentionKernel) -> ResidualBlock:
            layer_block = self.build_block(args, layer, self.build_attention(args, layer, kernel))
            layer_block.residual_multiplier = args.residual_multiplier
            return layer_block

        @cache
        def kind(width: int, rope: Rope | None, window: int, kernel: Callable[[], nn.Module] | None) -> AttentionKind:
            return AttentionKind(rope and Rotary(width, *rope), window, kernel)

        kinds = [
            kind(args.rope_width(layer), args.rope(layer), args.window_of(layer), self.kernel_of(args, layer))
            for layer in range(args.n_layers)
        ]
        final_norm = norm_of(args)(args.dim, args.norm_eps)
        kernel = dict(attention_dropout=getattr(args, "attention_dropout", 0.0), score_cap=args.score_cap)
        head = nn.Linear(args.dim, args.outputs, args.head_bias)
        entrance = EmbeddingDropout(args.embedding_dropout) if hasattr(args, "embedding_dropout") else None
        ends = dict(entrance=entrance, norm=final_norm, head=head)
        super().__init__(args, kinds, block, attention_backend, **ends, **kernel)
        if args.logit_cap and not getattr(args, "n_classes", 0):
            self.output.register_forward_hook(partial(_cap_output, args.logit_cap))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up and scale the embeddings: [B, S] -> [B, S, D]. The scale is rounded to their dtype."""
        x, multiplier = super().embed(tokens), self.args.embedding_multiplier
        return x if multiplier == 1 else x * x.new_full((), multiplier)

    def apply_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the final norm: [B, S, D] -> [B, S, D], divided as the logits are, as the head is linear."""
        y, divisor = super().apply_norm(x), self.args.logits_divisor
        return y if self.norm is None or divisor == 1 else y / divisor

    def init_rule(self, name: str) -> Init:
        """Return Decoder's rule, with embeddings of standard deviation 1 after they are scaled."""
        if name.startswith("tok_embeddings.") and not self.args.tied_embeddings:
            return Normal(1 / self.args.embedding_multiplier)
        if name.rpartition(".")[2] in XIELU.init_values:
            return Constant(XIELU.init_values[name.rpartition(".")[2]])
        return Constant(0.0) if "norm" in name and self.args.zero_centered else super().init_rule(name)

    @staticmethod
    def kernel_of(args: Any, layer: int) -> Callable[[], nn.Module] | None:
        """Return what makes the kernel of a layer that is not attention alone; None for attention."""
        return None

    @staticmethod
    def build_attention(args: Any, layer: int, kernel: AttentionKernel) -> nn.Module:
        return GroupedQueryAttention(
            args,
            kernel,
            (HeadNorm if args.qk_norm_by_head else norm_of(args)) if args.qk_norm else None,
            bias="attention.wq" in args.biases,
            query_scale=args.query_scale,
            output_bias="attention.wo" in args.biases,
            over_heads=args.qk_norm_over_heads,
            by_head=args.qk_norm_by_head,
            growth=(args.query_growth, args.query_period, 0),
            sinks=args.sinks,
            gated=args.attention_gate,
            gate_matrix=args.gate_matrix,
            norms_rotated=args.qk_norm_rotated,
        )

    @staticmethod
    def build_block(args: Any, layer: int, attention: nn.Module) -> ResidualBlock:
        feed_forward = feed_forward_of(args, "feed_forward.w1" in args.biases)
        norm, dropout = partial(norm_of(args), args.dim, args.norm_eps), getattr(args, "residual_dropout", 0.0)
        return Block(args, attention, feed_forward, norm, args.norm_order, dropout)


def _cap_output(cap: float, head: torch.nn.Module, inputs: tuple, logits: torch.Tensor) -> torch.Tensor:
    """Cap logits [..., V], or a tensor-parallel rank's shard of them, as a hook: the head stays a linear layer."""
    return (logits / cap).tanh() * cap


def norm_of(args: Any) -> Callable[[int, float], nn.Module]:
    if args.layer_norm:
        return partial(ZeroCenteredLayerNorm if args.zero_centered else LayerNorm, bias=args.norm_bias)
    return ZeroCenteredRMSNorm if args.zero_centered else RMSNorm


ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu_squared": squared_relu}
"""Those of a feed-forward without a gate."""


def feed_forward_of(args: Any, bias: bool) -> nn.Module:
    if args.gate:
        return (GeGLU if args.activation == "gelu_tanh" else SwiGLU)(args.dim, args.ffn_dim, bias)
    activation = XIELU() if args.activation == "xielu" else ACTIVATIONS[args.activation]
    return MLP(args.dim, args.ffn_dim, activation, bias)


QK_NORM = "attention.[qk]_norm"
BY_HEAD = "attention.sinks"
GATE_MATRIX = "attention.wg"
ACTIVATION = "feed_forward.activation"
POST_NORMS = ("attention_post_norm", "ffn_post_norm")
DROPOUTS = ("attention_dropout", "ffn_dropout")
PLAN = replace(
    DECODER_PLAN,
    column=(*DECODER_PLAN.column, GATE_MATRIX),
    by_head=(BY_HEAD,),
    replicated=(QK_NORM, ACTIVATION),  # each rank has its own heads and features
    sequence=(*DECODER_PLAN.sequence, *POST_NORMS),
    keyed=DROPOUTS,
    optional=(GATE_MATRIX, BY_HEAD, QK_NORM, ACTIVATION, "ffn_norm", *POST_NORMS, *DROPOUTS),
)
DROPPED_PLAN = replace(PLAN, with_embedding=("entrance",))
"""Of families with a size `embedding_dropout`."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})
SANDWICH_NORMS = {
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "ffn_post_norm.weight": "post_feedforward_layernorm.weight",
}
OUTPUT_NORMS = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "post_feedforward_layernorm.weight",
}
UNGATED = {f"feed_forward.w{n}.weight": f"mlp.{name}_proj.weight" for n, name in ((1, "up"), (2, "down"))}
FUSED_QKV = {f"{name}.weight": "self_attn.qkv_proj.weight" for name in QKV}
FUSED_GATE = {f"feed_forward.{matrix}.weight": "mlp.gate_up_proj.weight" for matrix in ("w1", "w3")}


def tensor_map(
    args: Any,
    family_names: Mapping[str, str] = NO_NAMES,
    interleaved: frozenset[str] = frozenset(),
    ends: Mapping[str, str] = NO_NAMES,
) -> TensorMap:
    """Return the names; `family_names`: those within a layer that a Llama does not have or calls otherwise.

    `ends`: the same outside of the layers. `interleaved`: see TensorMap.
    """
    names = ATTENTION | (FEED_FORWARD if args.gate else UNGATED) | (QK_NORMS if args.qk_norm else {}) | family_names
    names |= {SINKS: "self_attn.sinks"} if args.sinks else {}
    biased = [f"{name}.weight" for name in args.biases]
    biased += [name for name in args.norm_widths if bias_of(name) in args.norm_widths and not name.endswith(".bias")]
    names |= {bias_of(name): bias_of(names[name]) for name in biased}
    outer_names = ENDS | ends
    classifies = getattr(args, "n_classes", 0) > 0
    outer_names |= {"output.weight": CLASSIFIER_HEAD} if classifies else {}
    outer_names |= {
        bias_of(name): bias_of(outer_names[name]) for name in outer_names if bias_of(name) in args.end_others
    }
    rows = {f"{name}.weight": outputs for name, (outputs, _) in args.block_linears(0).items() if name in QKV}
    rows |= {bias_of(name): outputs for name, outputs in rows.items()}
    turned = set() if args.rotates_adjacent else {*QK_NORMS, *REORDERED}
    turned |= {bias_of(name) for name in turned}
    return TensorMap(
        layer_names=names,
        outer_names=outer_names,
        n_experts=getattr(args, "n_experts", 0),
        reordered=frozenset(turned),
        interleaved=interleaved,
        float32=frozenset({ROUTER_BIAS}),
        by_head=dict(zip(QK_NORMS, (args.n_heads, args.num_kv_heads), strict=True)) if args.qk_norm_by_head else {},
        head_dim=args.head_dim,
        rows=rows,
        rotary_dim=args.rotary_dim,
        tied=args.tied_embeddings,
        head=frozenset({"output.weight"}) if classifies else frozenset(),
    )


def joined_map(
    args: Any, names: Mapping[str, str], ends: Mapping[str, str], layers: str, in_memory: Mapping[str, str] = NO_NAMES
) -> TensorMap:
    """Return the names of a family that has one matrix for queries, keys and values.

    In each group it has the heads of queries, the head of keys and that of values that serves them. `names` and `ends`:
    see tensor_map. `layers`, `in_memory`: see TensorMap.
    """
    form = tensor_map(args, names, ends=ends)
    return replace(form, layers=layers, in_memory=in_memory, groups=args.num_kv_heads, _ours={})


def gated_spec(
    build: Callable[..., GatedDecoder],
    config: ConfigConverter,
    names: Mapping[str, str] = NO_NAMES,
    plan: ParallelPlan = PLAN,
    ends: Mapping[str, str] = NO_NAMES,
) -> ModelSpec:
    """Return the spec of a family of gated decoders. `names` and `ends`: see tensor_map."""
    names_of = partial(tensor_map, family_names=names, ends=ends)
    hf = HuggingFace(build=build, tensor_map=names_of, config=config, is_ignored=is_other_head)
    return ModelSpec(build=build, plan=plan, hf=hf, flops_per_token=flops_per_token)
