"""Llama 2, 3, 3.1 and 3.2 as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: grouped key/value heads; rotary positions in float32; a gated feed-forward; norms before, not after; no biases;
weights of the head and the embedding may be one. All of it is of the parts that decoders share.
"""

from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.layers import GroupedQueryAttention, Rotary
from torchtitan.models.llama import LlamaArgs


class Llama(Decoder):
    def __init__(self, args: LlamaArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            Rotary(args.head_dim, args.rope_theta, args.rope_scaling),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel)),
            attention_backend,
        )
