"""Qwen 2 with experts: the model and its spec."""

from torchtitan.models.hf.names import EXPERTS, ROUTER, SHARED_EXPERTS
from torchtitan.models.moe import SHARED_GATE
from torchtitan.models.moe.decoder import ExpertDecoder, expert_spec
from torchtitan.models.qwen2_moe import CONFIG


class Qwen2MoE(ExpertDecoder):
    """A Qwen 2 with experts in all layers, and shared ones that a gate weighs."""


NAMES = {name: hf_name.replace("shared_experts", "shared_expert") for name, hf_name in SHARED_EXPERTS.items()}
NAMES |= ROUTER | EXPERTS | {SHARED_GATE: "mlp.shared_expert_gate.weight"}
SPEC = expert_spec(Qwen2MoE, CONFIG, NAMES)
HF = SPEC.hf
