"""GLM 4 with experts: the model and its spec."""

from torchtitan.models.glm4_moe import CONFIG
from torchtitan.models.hf.names import EXPERTS, ROUTER, ROUTER_BIAS, SHARED_EXPERTS
from torchtitan.models.moe.decoder import ExpertDecoder, expert_spec


class Glm4MoE(ExpertDecoder):
    """A decoder that rotates a part of each head, with biases of queries, keys and values."""


NAMES = {**ROUTER, **EXPERTS, **SHARED_EXPERTS, ROUTER_BIAS: "mlp.gate.e_score_correction_bias"}
SPEC = expert_spec(Glm4MoE, CONFIG, NAMES)
HF = SPEC.hf
