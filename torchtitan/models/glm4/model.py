"""Dense GLM 4: the model and its spec."""

from torchtitan.models.gated import FUSED_GATE, GatedDecoder, gated_spec
from torchtitan.models.glm4 import CONFIG


class Glm4(GatedDecoder):
    """A decoder that rotates a part of each head, with biases of queries, keys and values (arXiv:2406.12793)."""


OUTPUT_NORMS = {
    "attention_post_norm.weight": "post_self_attn_layernorm.weight",
    "ffn_post_norm.weight": "post_mlp_layernorm.weight",
}
SPEC = gated_spec(Glm4, CONFIG, FUSED_GATE | OUTPUT_NORMS)
HF = SPEC.hf
