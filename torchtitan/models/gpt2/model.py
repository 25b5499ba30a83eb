"""GPT-2 as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: learned positions; norms before attention and feed-forward, with means and biases; a feed-forward of tanh's
GELU; the head is the embedding's matrix, or makes classes, without a bias.
"""

from functools import partial

import torch.nn.functional as F
from torch import nn

from torchtitan.models.classic.model import Classic, block_of, norm_of
from torchtitan.models.decoder import Entrance
from torchtitan.models.gpt2 import GPT2Args


class GPT2(Classic):
    narrows = True

    def __init__(self, args: GPT2Args, attention_backend: str = "auto"):
        super().__init__(
            args,
            None,
            partial(block_of, args, partial(F.gelu, approximate="tanh"), "pre"),
            attention_backend,
            entrance=Entrance(args.dim, args.max_seq_len, dropout=args.dropout),
            norm=norm_of(args),
            head=nn.Linear(args.dim, args.outputs, bias=False),
            attention_dropout=args.attention_dropout,
        )
