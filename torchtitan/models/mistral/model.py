"""Mistral without experts: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.mistral import CONFIG


class Mistral(GatedDecoder):
    """A Llama with sliding-window attention (arXiv:2310.06825) in some sizes."""


SPEC = gated_spec(Mistral, CONFIG)
HF = SPEC.hf
