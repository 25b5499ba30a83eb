"""Qwen 3 with experts as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: grouped key/value heads, whose queries and keys are normed; a width of heads that does not follow from the
model's; experts in all layers, none of them shared.
"""

from torchtitan.models.decoder import Decoder
from torchtitan.models.layers import GroupedQueryAttention, Rotary
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.qwen3_moe import Qwen3MoEArgs


class Qwen3MoE(Decoder):
    def __init__(self, args: Qwen3MoEArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            Rotary(args.head_dim, args.rope_theta, args.rope_scaling),
            lambda layer, kernel: MoEBlock(args, GroupedQueryAttention(args, kernel, qk_norm=True)),
            attention_backend,
        )
