"""Apertus: the model and its spec."""

from torchtitan.models.apertus import CONFIG
from torchtitan.models.gated import GatedDecoder, gated_spec


class Apertus(GatedDecoder):
    """A Llama with norms of queries and keys, and a feed-forward with xIELU in place of a gate (arXiv:2509.14233)."""


NAMES = {
    "attention_norm.weight": "attention_layernorm.weight",
    "ffn_norm.weight": "feedforward_layernorm.weight",
    **{f"feed_forward.activation.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
}
SPEC = gated_spec(Apertus, CONFIG, NAMES)
HF = SPEC.hf
