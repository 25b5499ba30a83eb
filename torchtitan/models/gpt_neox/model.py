"""GPT-NeoX, Pythia and RedPajama: the model and its names in the Hugging Face format."""

from dataclasses import replace
from functools import partial
from typing import Any

from torchtitan.models.gated import DROPPED_PLAN, GatedDecoder, gated_spec, joined_map
from torchtitan.models.gpt_neox import CONFIG
from torchtitan.models.sizes import QKV


class GPTNeoX(GatedDecoder):
    """A decoder with LayerNorms and attention and feed-forward side by side (arXiv:2204.06745)."""


NAMES = {
    **{f"{name}.weight": "attention.query_key_value.weight" for name in QKV},
    "attention.wo.weight": "attention.dense.weight",
    "feed_forward.w1.weight": "mlp.dense_h_to_4h.weight",
    "feed_forward.w2.weight": "mlp.dense_4h_to_h.weight",
}
ENDS = {
    "tok_embeddings.weight": "gpt_neox.embed_in.weight",
    "norm.weight": "gpt_neox.final_layer_norm.weight",
    "output.weight": "embed_out.weight",
}


def _is_ignored(name: str, args: Any) -> bool:
    """Return True for attention masks, which old folders hold, and for the copy of a tied embedding."""
    return name.endswith((".attention.bias", ".attention.masked_bias")) or (
        args.tied_embeddings and name == ENDS["output.weight"]
    )


SPEC = gated_spec(GPTNeoX, CONFIG, plan=DROPPED_PLAN)
joined = partial(joined_map, names=NAMES, ends=ENDS, layers="gpt_neox.layers.", in_memory={"embed_out.": "lm_head."})
SPEC = replace(SPEC, hf=replace(SPEC.hf, tensor_map=joined, is_ignored=_is_ignored))
HF = SPEC.hf
