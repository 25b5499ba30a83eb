"""Small model families and tasks that differ from the project's own, as examples of what models may do."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.losses.objective import IGNORE_INDEX, Objective, cross_entropies, summed_cross_entropy
from torchtitan.models.attention import GroupedQueryAttention
from torchtitan.models.decoder import AttentionKind, Block, Decoder, InputEmbedding
from torchtitan.models.family import Family
from torchtitan.models.flops import flops_per_token
from torchtitan.models.layers import MLP, LayerNorm
from torchtitan.models.spec import ModelSpec
from torchtitan.parallelisms.plan import ParallelPlan


@dataclass(frozen=True)
class OtherArgs:
    may_be_zero: ClassVar = ("dropout", "attention_dropout", "n_classes")

    dim: int = 16
    n_layers: int = 2
    n_heads: int = 2
    vocab_size: int = 64
    causal: bool = True
    order: Literal["pre", "post"] = "pre"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    tied_embeddings: bool = False
    n_classes: int = 0  # classes of the head in place of a vocabulary
    norm_eps: float = 1e-5
    max_seq_len: int = 32

    @property
    def num_kv_heads(self) -> int:
        return self.n_heads

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def ffn_dim(self) -> int:
        return 4 * self.dim

    @property
    def num_matmul_parameters(self) -> int:
        return 12 * self.n_layers * self.dim**2 + self.dim * self.vocab_size

    @property
    def num_parameters(self) -> int:
        norms = 2 * self.dim * (2 * self.n_layers + 1)
        embeddings = (self.vocab_size + self.max_seq_len) * self.dim
        return self.n_layers * (12 * self.dim**2 + 9 * self.dim) + norms + embeddings + self.dim * self.vocab_size


class Other(Decoder):
    """A decoder or encoder with pre- or post-norm LayerNorms, learned positions, a plain feed-forward, biases
    everywhere except in the head, and dropout of residuals and attention probabilities.
    """

    def __init__(self, args: OtherArgs, attention_backend: str = "auto"):
        norm = partial(LayerNorm, args.dim, args.norm_eps)
        post = args.order == "post"

        def block(layer, kernel):
            attention = GroupedQueryAttention(args, kernel, bias=True)
            return Block(args, attention, MLP(args.dim, args.ffn_dim, F.gelu), norm, args.order, args.dropout)

        super().__init__(
            args,
            AttentionKind(),
            block,
            attention_backend,
            causal=args.causal,
            entrance=InputEmbedding(args.dim, args.max_seq_len, norm() if post else None, args.dropout),
            norm=nn.Identity() if post else norm(),
            head=nn.Linear(args.dim, args.n_classes) if args.n_classes else None,
            attention_dropout=args.attention_dropout,
        )


class SequenceClasses(Objective):
    """Classification of samples by their first token; classes [B]."""

    targets = ("classes",)

    def count(self, batch):
        return int((batch["classes"] != IGNORE_INDEX).sum())

    def rows(self, hidden, batch):
        first = batch["positions"] == 0  # [B or 1, S], which under context parallel one rank has
        classes = torch.where(first.any(1), batch["classes"], IGNORE_INDEX)
        return (hidden * first[..., None]).sum(1), classes  # [B, D], [B]

    def compute_loss(self, head, hidden, *targets):
        return summed_cross_entropy(head(hidden), *targets)


class PairMargin(Objective):
    """Preference loss: -log sigmoid of the difference of log-probabilities of rows 2i (preferred) and 2i + 1."""

    def count(self, batch):
        return len(batch["labels"]) // 2

    def rows(self, hidden, batch):
        return hidden.unflatten(0, (-1, 2)), batch["labels"].unflatten(0, (-1, 2))  # [P, 2, S, D], [P, 2, S]

    def compute_loss(self, head, hidden, *targets):
        (labels,) = targets
        losses = cross_entropies(head(hidden.flatten(0, 2)), labels.flatten()).view(labels.shape).sum(-1)  # [P, 2]
        return -F.logsigmoid(losses[:, 1] - losses[:, 0]).sum()


PLAN = ParallelPlan(
    with_embedding=("entrance",),
    gathered=("attention", "feed_forward"),
    column=("attention.w[qkv]", "feed_forward.w1"),
    row=("attention.wo", "feed_forward.w2"),
    sequence=("attention_norm", "ffn_norm"),
    keyed=("attention_dropout", "ffn_dropout"),
    optional=("attention_dropout", "ffn_dropout"),
)
SIZES = {
    "other_decoder": {"debugmodel": OtherArgs(dropout=0.25)},
    "classifier": {"debugmodel": OtherArgs(causal=False, order="post", dropout=0.1, n_classes=4)},
    "pairs": {"debugmodel": OtherArgs()},
}
SPEC = ModelSpec(build=Other, plan=PLAN, hf=None, flops_per_token=flops_per_token)
MODELS = dict.fromkeys(SIZES, SPEC)
FAMILIES = {name: Family(sizes=sizes, config=None, spec=f"{__name__}:SPEC") for name, sizes in SIZES.items()}
OBJECTIVES = {"classifier": SequenceClasses, "pairs": PairMargin}
"""Tasks of the families that do not predict the next token."""
