"""StarCoder 2: the model and its spec."""

from torchtitan.models.gated import DROPPED_PLAN, GatedDecoder, gated_spec
from torchtitan.models.starcoder2 import CONFIG


class Starcoder2(GatedDecoder):
    """A Llama with LayerNorms, biases, a window and a feed-forward without a gate (arXiv:2402.19173)."""


NAMES = {"feed_forward.w1.weight": "mlp.c_fc.weight", "feed_forward.w2.weight": "mlp.c_proj.weight"}
SPEC = gated_spec(Starcoder2, CONFIG, NAMES, DROPPED_PLAN)
HF = SPEC.hf
