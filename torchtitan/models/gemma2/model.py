"""Gemma 2: the model and its spec."""

from torchtitan.models.gated import SANDWICH_NORMS, GatedDecoder, gated_spec
from torchtitan.models.gemma2 import CONFIG


class Gemma2(GatedDecoder):
    """A Llama with capped attention scores and logits, and a window in every other layer (arXiv:2408.00118).

    It has norms before and after each part, which multiply by 1 + weight.
    """


SPEC = gated_spec(Gemma2, CONFIG, SANDWICH_NORMS)
HF = SPEC.hf
