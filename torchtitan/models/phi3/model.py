"""Phi 3 and 4: the model and its spec."""

from torchtitan.models.gated import FUSED_GATE, FUSED_QKV, GatedDecoder, gated_spec
from torchtitan.models.phi3 import CONFIG


class Phi3(GatedDecoder):
    """A Llama, stored with one matrix of queries, keys and values, and one of the feed-forward's gate and inputs."""


SPEC = gated_spec(Phi3, CONFIG, FUSED_QKV | FUSED_GATE)
HF = SPEC.hf
