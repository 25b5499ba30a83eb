"""Phi 1, 1.5 and 2: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.phi import CONFIG


class Phi(GatedDecoder):
    """A decoder with attention and feed-forward side by side after one LayerNorm, and biases everywhere."""


NAMES = {
    "attention.wo.weight": "self_attn.dense.weight",
    "feed_forward.w1.weight": "mlp.fc1.weight",
    "feed_forward.w2.weight": "mlp.fc2.weight",
    "attention.q_norm.weight": "self_attn.q_layernorm.weight",
    "attention.k_norm.weight": "self_attn.k_layernorm.weight",
}
SPEC = gated_spec(Phi, CONFIG, NAMES, ends={"norm.weight": "model.final_layernorm.weight"})
HF = SPEC.hf
