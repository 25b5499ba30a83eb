"""AFMoE: the model and its spec."""

from torchtitan.models.afmoe import CONFIG
from torchtitan.models.gated import GATE_MATRIX
from torchtitan.models.hf.names import EXPERTS, ROUTER_BIAS, SHARED_EXPERTS
from torchtitan.models.moe.decoder import ExpertDecoder, expert_spec


class Afmoe(ExpertDecoder):
    """A decoder with experts, norms before and after attention and feed-forwards, and gates of attention's outputs."""


NAMES = {
    "moe.router.gate.weight": "mlp.router.gate.weight",
    ROUTER_BIAS: "mlp.expert_bias",
    f"{GATE_MATRIX}.weight": "self_attn.gate_proj.weight",
    "attention_post_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "ffn_post_norm.weight": "post_mlp_layernorm.weight",
}
SPEC = expert_spec(Afmoe, CONFIG, NAMES | EXPERTS | SHARED_EXPERTS)
HF = SPEC.hf
