"""Qwen 3 with experts: the model and its spec."""

from torchtitan.models.moe.decoder import ExpertDecoder, expert_spec
from torchtitan.models.qwen3_moe import CONFIG


class Qwen3MoE(ExpertDecoder):
    """A Qwen 3 with experts in all layers, none shared."""


SPEC = expert_spec(Qwen3MoE, CONFIG)
HF = SPEC.hf
