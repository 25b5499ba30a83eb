"""RoBERTa: the model, and its names in the Hugging Face format.

Features: attention to the full document; post-norm, and a norm after the embeddings; learned positions, numbered from
pad_id + 1; one more layer before the head over words or classes.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.decoder import AttentionKind, InputEmbedding
from torchtitan.models.flops import bidirectional_flops_per_token
from torchtitan.models.hf.names import TensorMap, with_biases
from torchtitan.models.learned_positions.model import PLAN, LearnedPositionDecoder, make_block, make_norm
from torchtitan.models.roberta import CONFIG, RobertaArgs
from torchtitan.models.spec import HuggingFace, ModelSpec


class PredictionTransform(nn.Module):
    """The layer before the head. `activation` preserves the shape.

    It acts on each token, so it takes the place of the final norm.
    """

    def __init__(self, dim: int, activation: Callable[[torch.Tensor], torch.Tensor], norm: nn.Module | None):
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.activation = activation
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        x = self.activation(self.dense(x))
        return x if self.norm is None else self.norm(x)


class Roberta(LearnedPositionDecoder):
    def __init__(self, args: RobertaArgs, attention_backend: str = "auto"):
        entrance = InputEmbedding(
            args.dim, args.max_seq_len, make_norm(args), args.dropout, first=args.pad_id + 1, num_types=args.n_types
        )
        classes = args.n_classes > 0
        super().__init__(
            args,
            AttentionKind(),
            partial(make_block, args, F.gelu, "post"),
            attention_backend,
            causal=args.causal,
            entrance=entrance,
            norm=PredictionTransform(args.dim, torch.tanh if classes else F.gelu, None if classes else make_norm(args)),
            head=nn.Linear(args.dim, args.outputs),
            attention_dropout=args.attention_dropout,
        )


PARTS = with_biases(
    {
        "attention.wq": "attention.self.query",
        "attention.wk": "attention.self.key",
        "attention.wv": "attention.self.value",
        "attention.wo": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward.w1": "intermediate.dense",
        "feed_forward.w2": "output.dense",
        "ffn_norm": "output.LayerNorm",
    }
)
EMBEDDINGS = {
    "tok_embeddings.weight": "roberta.embeddings.word_embeddings.weight",
    "entrance.positions.weight": "roberta.embeddings.position_embeddings.weight",
    "entrance.types.weight": "roberta.embeddings.token_type_embeddings.weight",
    **with_biases({"entrance.norm": "roberta.embeddings.LayerNorm"}),
}
WORDS = with_biases({"norm.dense": "lm_head.dense", "norm.norm": "lm_head.layer_norm"})
WORDS |= {"output.bias": "lm_head.bias"}
CLASSES = with_biases({"norm.dense": "classifier.dense", "output": "classifier.out_proj"})
COPY = {"output.weight": "lm_head.decoder.weight"}


def tensor_map(args: RobertaArgs) -> TensorMap:
    head = CLASSES if args.n_classes else WORDS
    return TensorMap(
        layer_names=PARTS,
        outer_names=EMBEDDINGS | COPY | head,
        layers="roberta.encoder.layer.",
        optional_prefix="roberta.",
        head=frozenset(head),
        tied=args.tied_embeddings,
    )


def _is_ignored(name: str, args: RobertaArgs) -> bool:
    """Return True for unused tensors and copies, and for a language model's head if the model classifies."""
    other = args.n_classes > 0 and name.startswith("lm_head.")
    copy = name in ("lm_head.decoder.weight", "lm_head.decoder.bias")
    return copy or other or "pooler." in name or name.endswith("embeddings.position_ids")


HF = HuggingFace(build=Roberta, tensor_map=tensor_map, config=CONFIG, is_ignored=_is_ignored)


SPEC = ModelSpec(build=Roberta, plan=PLAN, hf=HF, flops_per_token=bidirectional_flops_per_token)
