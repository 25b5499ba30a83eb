"""Arcee's AFM: the model and its spec."""

from torchtitan.models.arcee import CONFIG
from torchtitan.models.gated import GatedDecoder, gated_spec


class Arcee(GatedDecoder):
    """A Llama whose feed-forward has no gate, and squares relu."""


SPEC = gated_spec(Arcee, CONFIG)
HF = SPEC.hf
