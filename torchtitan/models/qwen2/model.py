"""Qwen 2 and 2.5 without experts: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.qwen2 import CONFIG


class Qwen2(GatedDecoder):
    """A Llama with biases of queries, keys and values (arXiv:2407.10671)."""


SPEC = gated_spec(Qwen2, CONFIG)
HF = SPEC.hf
