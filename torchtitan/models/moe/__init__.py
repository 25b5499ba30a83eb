"""Mixture of experts: the arguments of a layer and of a decoder. No torch here. The other files:

router.py    the choice of experts for each token, their weights, the balance of their load, its metrics
layer.py     sorting tokens by expert, the experts as one grouped matrix product, the way back; the transformer block
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torchtitan.core.errors import JobError
from torchtitan.models.sizes import ENDS, STACK, Names, Sizes, check_not_negative, check_positive, gated

ROUTER = "moe.router.gate.weight"


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
        return 3 * self.dim * self.expert_dim

    @property
    def moe_linears(self) -> Sizes:
        shared = gated("moe.shared_experts", self.dim, self.n_shared_experts * self.expert_dim)
        return {STACK: (self.expert_dim, self.dim)} | (shared if self.n_shared_experts else {})

    @property
    def moe_parameters(self) -> int:
        """Number of parameters of one layer: router, experts, shared experts."""
        return self.dim * self.n_experts + (self.n_experts + self.n_shared_experts) * self.expert_parameters

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

    @abstractmethod
    def _matrices(self, moe: int) -> int:
        """Return the number of weights of all layers and the head, with `moe` in each layer with experts."""

    @property
    @abstractmethod
    def _norm_parameters(self) -> int: ...

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
        return self._matrices(self.moe_parameters) + self._other_parameters

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token uses, with the full embedding and the head, as published."""
        return self._matrices(self.active_moe_parameters) + self._other_parameters

    @property
    def _other_parameters(self) -> int:
        return self._norm_parameters + (0 if self.tied_embeddings else self.vocab_size * self.dim)
