"""Hunyuan without experts: the model and its spec."""

from torchtitan.models.gated import GatedDecoder, gated_spec
from torchtitan.models.hunyuan import CONFIG


class Hunyuan(GatedDecoder):
    """A Llama with norms of queries and keys after their rotation."""


NAMES = {
    f"attention.{x}_norm.weight": f"self_attn.{name}_layernorm.weight" for x, name in (("q", "query"), ("k", "key"))
}
SPEC = gated_spec(Hunyuan, CONFIG, NAMES)
HF = SPEC.hf
