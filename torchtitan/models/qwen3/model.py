"""Qwen 3 without experts as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: grouped key/value heads, whose queries and keys are normed; a width of heads that does not follow from the
model's; weights of the head and the embedding may be one.
"""

from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.layers import GroupedQueryAttention, Rotary
from torchtitan.models.qwen3 import Qwen3Args


class Qwen3(Decoder):
    def __init__(self, args: Qwen3Args, attention_backend: str = "auto"):
        super().__init__(
            args,
            Rotary(args.head_dim, args.rope_theta, args.rope_scaling),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel, qk_norm=True)),
            attention_backend,
        )
