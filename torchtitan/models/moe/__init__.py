"""Mixture of experts: the arguments of a layer and of a decoder. No torch here. The other files:

router.py    the choice of experts for each token, their weights, the balance of their load, its metrics
layer.py     sorting tokens by expert, the experts as one grouped matrix product, the way back; the transformer block
decoder.py   decoders with grouped attention and experts, from which families are made
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchtitan.core.errors import JobError
from torchtitan.models.sizes import (
    ENDS,
    STACK,
    GatedDecoderSizes,
    Names,
    RopeScaling,
    Sizes,
    check_even,
    check_grouped_heads,
    check_not_negative,
    check_positive,
    gated,
    ungated,
)

ROUTER = "moe.router.gate.weight"
BIASES: Names = ("moe.router.gate.bias", *(f"{STACK}.w{i}_bias" for i in (1, 2, 3)))
"""Names of the biases of a layer whose router and experts have them."""
SHARED_GATE = "moe.shared_gate.weight"


@dataclass(frozen=True, kw_only=True)
class MoEArgs:
    """Arguments of an MoE layer. A family's arguments inherit them, so that a job can override each by its name."""

    dim: int
    expert_dim: int  # width of one expert
    n_experts: int
    top_k: int  # experts of a token
    n_shared_experts: int = 0  # experts that see every token
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = False  # a token's weights add up to route_scale
    route_scale: float = 1.0
    score_before_experts: bool = False  # weights multiply the experts' inputs, not their outputs
    # A token's experts come from its best `top_groups` of `n_groups` groups; each group is on one node.
    n_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"  # of a group: its best expert's score, or the sum of its two best
    # Balance without a loss (arXiv:2408.15664): a bias on the scores, for the choice only, updated once per step.
    expert_bias: bool = False
    bias_rate: float = 0.001
    # Balance by a loss within each sequence (arXiv:2405.04434, 2412.19437); 0 leaves it out.
    aux_loss_weight: float = 0.0
    may_be_zero: ClassVar = ("n_shared_experts", "aux_loss_weight", "bias_rate")
    """Sizes that may be 0, which removes a part of the model."""
    shared_gate: ClassVar = False
    """True if the output of shared experts is multiplied by the sigmoid of a number for each token."""
    moe_biases: ClassVar = False
    """True if the router and each matrix of an expert have a bias."""
    gated_experts: ClassVar = True
    """False if experts have two matrices, and the square of relu between them."""
    gelu_experts: ClassVar = False
    """True if the gate of experts, also of shared ones, is the approximation of gelu by tanh, and not silu."""
    weight_eps: ClassVar = 1e-20
    """Added to the sum of a token's weights, by which normalize_top_k divides them."""
    swiglu_limit = 0.0
    """Bound of an expert's gate and of what it multiplies, if its activation is ClampedGated (layer.py)."""
    swiglu_alpha = 1.702

    def __post_init__(self) -> None:
        check_positive(self, "dim", "expert_dim", "n_experts", "top_k", "n_groups", "top_groups")
        check_not_negative(self, "n_shared_experts", "bias_rate", "aux_loss_weight")
        if self.top_k > self.n_experts:
            raise JobError(
                f"top_k = {self.top_k} with n_experts = {self.n_experts}: a token goes to different experts, so top_k "
                f"can be {self.n_experts} at most"
            )
        if self.n_experts % self.n_groups:
            raise JobError(
                f"n_groups = {self.n_groups} with n_experts = {self.n_experts}: groups are equally large, so n_groups "
                f"must divide n_experts"
            )
        size = self.n_experts // self.n_groups
        if self.top_groups > self.n_groups or self.top_groups * size < self.top_k:
            raise JobError(
                f"top_groups = {self.top_groups} with n_groups = {self.n_groups} of {size} experts: must be between "
                f"{-(-self.top_k // size)}, to have top_k = {self.top_k} experts in them, and {self.n_groups}"
            )
        if self.n_groups > 1 and self.group_score == "top2" and size < 2:
            raise JobError(
                f"n_groups = {self.n_groups}: group_score 'top2' needs groups of at least 2 experts, but n_experts = "
                f"{self.n_experts} makes groups of {size}"
            )

    @property
    def expert_parameters(self) -> int:
        return (3 if self.gated_experts else 2) * self.dim * self.expert_dim

    @property
    def aux_loss_factor(self) -> float:
        """Factor of aux_loss_weight in a layer's loss, where transformers' coefficient has another meaning."""
        return 1.0

    @property
    def moe_linears(self) -> Sizes:
        width = self.n_shared_experts * self.expert_dim
        shared = (gated if self.gated_experts else ungated)("moe.shared_experts", self.dim, width)
        return {STACK: (self.expert_dim, self.dim)} | (shared if self.n_shared_experts else {})

    @property
    def moe_parameters(self) -> int:
        """Number of parameters of one layer: router, experts, shared experts and their gate."""
        routers = self.n_experts + (self.shared_gate and self.n_shared_experts > 0)
        return self.dim * routers + (self.n_experts + self.n_shared_experts) * self.expert_parameters

    def moe_bias_parameters(self, experts: int) -> int:
        """Return the number of biases in one layer, of the router and of so many experts."""
        return self.n_experts + experts * (2 * self.expert_dim + self.dim) if self.moe_biases else 0

    @property
    def active_moe_parameters(self) -> int:
        """Number of parameters of one layer that a token is multiplied with."""
        return self.moe_parameters - (self.n_experts - self.top_k) * self.expert_parameters


@dataclass(frozen=True, kw_only=True)
class MoEDecoderArgs(MoEArgs, ABC):
    """Arguments of a decoder with experts. A family adds its own, and counts the weights of its matrices and norms."""

    n_layers: int
    n_heads: int
    vocab_size: int
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    max_seq_len: int  # context length of the family's training; the model does not depend on it

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_layers", "n_heads", "vocab_size", "max_seq_len")

    @property
    def end_others(self) -> Names:
        return ENDS

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts, including multi-token prediction's."""
        return self.n_layers

    def ffn_linears(self, layer: int) -> Sizes:
        """Return the linear layers of a layer's feed-forward or experts."""
        return self.moe_linears

    def _ffn_matrices(self, moe: int) -> int:
        """Return the number of weights of all feed-forwards and experts, with `moe` in each layer with experts."""
        return self.expert_layers * moe

    @abstractmethod
    def _matrices(self, moe: int) -> int:
        """Return the number of weights of all layers and the head, with `moe` in each layer with experts."""

    @property
    @abstractmethod
    def _norm_parameters(self) -> int:
        """Return the number of weights of norms, and of biases."""

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights that a token is multiplied with; of the routed experts, only the token's top k."""
        return self._matrices(self.active_moe_parameters)

    @property
    def num_summed(self) -> int:
        """Number of elements of experts' outputs that a token's routing weights multiply."""
        return 0 if self.score_before_experts else self.expert_layers * self.top_k * self.dim

    @property
    def num_parameters(self) -> int:
        return self._matrices(self.moe_parameters) + self._other_parameters(self.n_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token uses, with the full embedding and the head, as published."""
        return self._matrices(self.active_moe_parameters) + self._other_parameters(self.top_k)

    def _other_parameters(self, experts: int) -> int:
        """Return the number of parameters that no token is multiplied with, with the biases of so many experts."""
        biases = self.expert_layers * self.moe_bias_parameters(experts)
        return self._norm_parameters + biases + (0 if self.tied_embeddings else self.vocab_size * self.dim)


@dataclass(frozen=True, kw_only=True)
class DenseFirstArgs(MoEDecoderArgs):
    """Arguments of a decoder with experts from layer `n_dense_layers` on."""

    ffn_dim: int  # of the dense layers
    n_dense_layers: int = 1
    may_be_zero: ClassVar = (*MoEArgs.may_be_zero, "n_dense_layers")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ffn_dim")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            raise JobError(
                f"n_dense_layers = {self.n_dense_layers} with n_layers = {self.n_layers}: must be from 0 to n_layers"
            )

    @property
    def expert_layers(self) -> int:
        return self.n_layers - self.n_dense_layers

    def ffn_linears(self, layer: int) -> Sizes:
        dense = layer < self.n_dense_layers
        return gated("feed_forward", self.dim, self.ffn_dim) if dense else super().ffn_linears(layer)

    def _ffn_matrices(self, moe: int) -> int:
        return self.n_dense_layers * 3 * self.dim * self.ffn_dim + super()._ffn_matrices(moe)


@dataclass(frozen=True, kw_only=True)
class GroupedMoEArgs(MoEDecoderArgs, GatedDecoderSizes):
    """Arguments of a decoder with experts and grouped attention (moe/decoder.py)."""

    n_kv_heads: int
    head_dim: int = 128  # of queries, keys and values; n_heads of them need not add up to dim
    rope_theta: float = 1000000.0
    rope_scaling: RopeScaling | None = None
    mean_aux_loss: ClassVar = False
    """True if aux_loss_weight is transformers' coefficient: of the mean over layers, of top_k if loads are even."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "n_kv_heads", "head_dim")
        self.check_windows()
        check_even(self, "head_dim")
        check_grouped_heads(self)

    @property
    def num_kv_heads(self) -> int:
        return self.n_kv_heads

    @property
    def aux_loss_factor(self) -> float:
        return self.top_k / self.expert_layers if self.mean_aux_loss else 1.0

    def block_linears(self, layer: int) -> Sizes:
        return self.attention_linears(layer) | self.ffn_linears(layer)

    def block_others(self, layer: int) -> Names:
        routers = (ROUTER, SHARED_GATE) if self.shared_gate and self.n_shared_experts else (ROUTER,)
        routers += BIASES if self.moe_biases else ()
        return super().block_others(layer) + (routers if STACK in self.ffn_linears(layer) else ())

    def _matrices(self, moe: int) -> int:
        layers = (self.attention_linears(layer).values() for layer in range(self.n_layers))
        attention = sum(outputs * inputs for layer in layers for outputs, inputs in layer)
        return attention + self._ffn_matrices(moe) + self.dim * self.vocab_size

    @property
    def _norm_parameters(self) -> int:
        return self.num_block_others + self.dim


PLAIN_SOFTMAX: Mapping[str, Any] = {
    "score": "softmax",
    "n_groups": 1,
    "route_scale": 1.0,
    "expert_bias": False,
    "score_before_experts": False,
}
"""Routing of transformers' models without groups of experts, of which n_shared_experts and normalize_top_k differ."""


def number_of_shared_experts(width_key: str, width: int, size_key: str, size: int) -> int:
    """Return the number of shared experts of this width in all, of experts of a size; the keys are config.json's.

    Raises JobError unless it is a whole number.
    """
    if width < 1 or size < 1 or width % size:
        raise JobError(f"{width_key} = {width}; allowed: a multiple of {size_key} = {size}")
    return width // size


def check_exported(args: MoEArgs, only: Mapping[str, Any], family: str, shares: bool = False) -> None:
    """Raise JobError if an argument has another value than the one that transformers' models of a family have.

    `shares`: they have at least one shared expert.
    """
    for name, supported in only.items():
        if getattr(args, name) != supported:
            raise JobError(f"{name} = {getattr(args, name)!r}: transformers' {family} only has {supported!r}")
    if shares and args.n_shared_experts == 0:
        raise JobError(f"n_shared_experts = 0: transformers' {family} has at least 1")
