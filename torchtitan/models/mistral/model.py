"""Mistral without experts as a plain torch model: it knows nothing of meshes, process groups or the job.

Notable: a Llama whose tokens see only a window of those before them (arXiv:2310.06825), in the sizes that have one, and
whose width of heads need not follow from the model's.
"""

from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.layers import GroupedQueryAttention, Rotary
from torchtitan.models.mistral import MistralArgs


class Mistral(Decoder):
    def __init__(self, args: MistralArgs, attention_backend: str = "auto"):
        super().__init__(
            args,
            Rotary(args.head_dim, args.rope_theta, args.rope_scaling),
            lambda layer, kernel: Block(args, GroupedQueryAttention(args, kernel)),
            attention_backend,
            window=args.sliding_window,
        )
