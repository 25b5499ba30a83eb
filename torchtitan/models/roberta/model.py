"""RoBERTa as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: tokens see their whole document; norms behind what adds to the stream, and one behind the embeddings; learned
positions, of which the first is not number 0; before the matrix that makes words or classes stands one more layer.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.classic.model import Classic, block_of, norm_of
from torchtitan.models.decoder import Entrance
from torchtitan.models.roberta import RobertaArgs


class LastLayer(nn.Module):
    """What the head reads: of each token alone, so that it stands where other models have their last norm.
    `activation` keeps the shape.
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


class Roberta(Classic):
    def __init__(self, args: RobertaArgs, attention_backend: str = "auto"):
        entrance = Entrance(
            args.dim, args.max_seq_len, norm_of(args), args.dropout, first=args.pad_id + 1, num_types=args.n_types
        )
        classes = args.n_classes > 0
        super().__init__(
            args,
            None,
            partial(block_of, args, F.gelu, "post"),
            attention_backend,
            causal=args.causal,
            entrance=entrance,
            norm=LastLayer(args.dim, torch.tanh if classes else F.gelu, None if classes else norm_of(args)),
            head=nn.Linear(args.dim, args.outputs),
            attention_dropout=args.attention_dropout,
        )
