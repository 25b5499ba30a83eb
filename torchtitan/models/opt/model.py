"""OPT as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: learned positions, the first of which is number 2; norms with means and biases, before what adds to the stream
or, in the 350M, behind it; a feed-forward of ReLU; the head is the embedding's matrix, which in the 350M is narrower
than the model.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.classic.model import Classic, block_of, norm_of
from torchtitan.models.decoder import Entrance
from torchtitan.models.opt import UNUSED, OPTArgs


class LastLayer(nn.Module):
    """Where other models have their last norm: one before a norm's block, and the way back to the words' width."""

    def __init__(self, args: OPTArgs):
        super().__init__()
        self.norm = norm_of(args) if args.order == "pre" else None
        self.project = nn.Linear(args.dim, args.word_dim, bias=False) if args.projects else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., width of words]"""
        x = x if self.norm is None else self.norm(x)
        return x if self.project is None else self.project(x)


class OPT(Classic):
    def __init__(self, args: OPTArgs, attention_backend: str = "auto"):
        project = nn.Linear(args.word_dim, args.dim, bias=False) if args.projects else None
        super().__init__(
            args,
            None,
            partial(block_of, args, F.relu, args.order),
            attention_backend,
            word_dim=args.word_dim,
            entrance=Entrance(args.dim, args.max_seq_len, first=UNUSED, project=project),
            norm=LastLayer(args),
            head=nn.Linear(args.word_dim, args.outputs, bias=False),
            attention_dropout=args.attention_dropout,
        )
