"""Granite 3 without experts: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.granite import CONFIG


class Granite(GatedDecoder):
    """A Llama with factors of embeddings, attention scores, residuals and logits (arXiv:2203.03466)."""


SPEC = gated_spec(Granite, CONFIG)
HF = SPEC.hf
