"""Qwen 3 without experts: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.qwen3 import CONFIG


class Qwen3(GatedDecoder):
    """A Llama with norms of queries and keys."""


SPEC = gated_spec(Qwen3, CONFIG)
HF = SPEC.hf
