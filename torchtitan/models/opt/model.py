"""OPT: the model, and its names in the Hugging Face format.

Features: learned positions, numbered from 2; norms with means and biases, pre-norm except in the 350M, which is
post-norm; a feed-forward with ReLU; the head is tied to the embedding, which in the 350M is narrower than the model.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.decoder import AttentionKind, InputEmbedding
from torchtitan.models.flops import flops_per_token
from torchtitan.models.hf.names import TensorMap, is_other_head, with_biases
from torchtitan.models.learned_positions.model import (
    PLAN,
    LearnedPositionDecoder,
    make_block,
    make_norm,
    make_tensor_map,
)
from torchtitan.models.opt import CONFIG, UNUSED, OPTArgs
from torchtitan.models.spec import HuggingFace, ModelSpec


class OutputProjection(nn.Module):
    """The final norm of pre-norm models, and the projection to the width of the word embedding if it differs."""

    def __init__(self, args: OPTArgs):
        super().__init__()
        self.norm = make_norm(args) if args.order == "pre" else None
        self.project = nn.Linear(args.dim, args.word_dim, bias=False) if args.projects else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., width of the word embedding]"""
        x = x if self.norm is None else self.norm(x)
        return x if self.project is None else self.project(x)


class OPT(LearnedPositionDecoder):
    def __init__(self, args: OPTArgs, attention_backend: str = "auto"):
        project = nn.Linear(args.word_dim, args.dim, bias=False) if args.projects else None
        super().__init__(
            args,
            AttentionKind(),
            partial(make_block, args, F.relu, args.order),
            attention_backend,
            word_dim=args.word_dim,
            entrance=InputEmbedding(args.dim, args.max_seq_len, first=UNUSED, project=project),
            norm=OutputProjection(args),
            head=nn.Linear(args.word_dim, args.outputs, bias=False),
            attention_dropout=args.attention_dropout,
        )


PARTS = with_biases(
    {
        "attention_norm": "self_attn_layer_norm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.out_proj",
        "ffn_norm": "final_layer_norm",
        "feed_forward.w1": "fc1",
        "feed_forward.w2": "fc2",
    }
)
ENDS = {
    "tok_embeddings.weight": "model.decoder.embed_tokens.weight",
    "entrance.project.weight": "model.decoder.project_in.weight",
    "entrance.positions.weight": "model.decoder.embed_positions.weight",
    **with_biases({"norm.norm": "model.decoder.final_layer_norm"}),
    "norm.project.weight": "model.decoder.project_out.weight",
}


def tensor_map(args: OPTArgs) -> TensorMap:
    return make_tensor_map(args, PARTS, ENDS, layers="model.decoder.layers.", optional_prefix="model.")


HF = HuggingFace(build=OPT, tensor_map=tensor_map, config=CONFIG, is_ignored=is_other_head)


SPEC = ModelSpec(build=OPT, plan=PLAN, hf=HF, flops_per_token=flops_per_token)
