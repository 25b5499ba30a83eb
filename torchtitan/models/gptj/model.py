"""GPT-J: the model and its names in the Hugging Face format."""

from dataclasses import replace
from typing import Any

from torchtitan.models.gated import DROPPED_PLAN, GatedDecoder, gated_spec, tensor_map
from torchtitan.models.gptj import CONFIG
from torchtitan.models.hf.names import TensorMap


class GPTJ(GatedDecoder):
    """A decoder with attention and feed-forward side by side after one LayerNorm, which rotates adjacent features."""


NAMES = {
    "attention_norm.weight": "ln_1.weight",
    **{f"attention.w{part}.weight": f"attn.{part}_proj.weight" for part in "qkv"},
    "attention.wo.weight": "attn.out_proj.weight",
    "feed_forward.w1.weight": "mlp.fc_in.weight",
    "feed_forward.w2.weight": "mlp.fc_out.weight",
}
ENDS = {"tok_embeddings.weight": "transformer.wte.weight", "norm.weight": "transformer.ln_f.weight"}


def gptj_map(args: Any) -> TensorMap:
    return replace(tensor_map(args, NAMES, ends=ENDS), layers="transformer.h.", _ours={})


def _is_ignored(name: str, args: Any) -> bool:
    """Return True for attention masks, which old folders hold."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))


SPEC = gated_spec(GPTJ, CONFIG, plan=DROPPED_PLAN)
SPEC = replace(SPEC, hf=replace(SPEC.hf, tensor_map=gptj_map, is_ignored=_is_ignored))
HF = SPEC.hf
