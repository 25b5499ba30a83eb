"""Gemma 3 for text: the model and its spec."""

from torchtitan.models.gated import SANDWICH_NORMS, GatedDecoder, gated_spec
from torchtitan.models.gemma3 import CONFIG


class Gemma3(GatedDecoder):
    """A Llama with a window in most layers, and with norms before and after each part (arXiv:2503.19786).

    Its norms multiply by 1 + weight. Layers with a window and layers without have different rotary positions.
    """


SPEC = gated_spec(Gemma3, CONFIG, SANDWICH_NORMS)
HF = SPEC.hf
