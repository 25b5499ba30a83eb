"""Llama 2, 3, 3.1 and 3.2: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.llama import CONFIG


class Llama(GatedDecoder):
    """A decoder without biases, norms of queries and keys, or windows."""


SPEC = gated_spec(Llama, CONFIG)
HF = SPEC.hf
