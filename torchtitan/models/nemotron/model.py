"""Nemotron 4 and Minitron: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.nemotron import CONFIG


class Nemotron(GatedDecoder):
    """A Llama with LayerNorms that multiply by 1 + weight, and a feed-forward that squares relu (arXiv:2402.16819)."""


SPEC = gated_spec(Nemotron, CONFIG)
HF = SPEC.hf
