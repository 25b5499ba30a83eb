"""StableLM: the model and its spec."""

from dataclasses import replace

from torchtitan.models.gated import PLAN, QK_NORM, GatedDecoder, gated_spec
from torchtitan.models.stablelm import CONFIG


class StableLM(GatedDecoder):
    """A Llama with LayerNorms, of which a part of each head is rotated."""


NAMES = {f"attention.{x}_norm.weight": f"self_attn.{x}_layernorm.norms.*.weight" for x in "qk"}
SPEC = gated_spec(StableLM, CONFIG, NAMES, replace(PLAN, replicated=(), by_head=(*PLAN.by_head, QK_NORM)))
HF = SPEC.hf
