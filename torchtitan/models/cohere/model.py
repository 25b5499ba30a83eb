"""Cohere's Command R, R7B and Aya: the model and its spec."""

from torchtitan.models.cohere import CONFIG
from torchtitan.models.gated import GatedDecoder, gated_spec


class Cohere(GatedDecoder):
    """A Llama with attention and feed-forward side by side after one LayerNorm without a bias, and scaled logits."""


SPEC = gated_spec(Cohere, CONFIG)
HF = SPEC.hf
