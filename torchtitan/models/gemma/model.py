"""Gemma 1: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.gemma import CONFIG


class Gemma(GatedDecoder):
    """A Llama with scaled embeddings, gelu, and norms that multiply by 1 + weight (arXiv:2403.08295)."""


SPEC = gated_spec(Gemma, CONFIG)
HF = SPEC.hf
