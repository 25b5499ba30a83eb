"""Falcon of 2023 and 2024: the model and its names in the Hugging Face format."""

from dataclasses import replace
from typing import Any

from torchtitan.models.falcon import CONFIG
from torchtitan.models.gated import GatedDecoder, gated_spec, joined_map
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.sizes import QKV


class Falcon(GatedDecoder):
    """A decoder with LayerNorms and attention and feed-forward side by side (arXiv:2311.16867)."""


NAMES = {
    **{f"{name}.weight": "self_attention.query_key_value.weight" for name in QKV},
    "attention.wo.weight": "self_attention.dense.weight",
    "feed_forward.w1.weight": "mlp.dense_h_to_4h.weight",
    "feed_forward.w2.weight": "mlp.dense_4h_to_h.weight",
}
TWO_NORMS = {"attention_norm.weight": "ln_attn.weight", "ffn_norm.weight": "ln_mlp.weight"}
ENDS = {"tok_embeddings.weight": "transformer.word_embeddings.weight", "norm.weight": "transformer.ln_f.weight"}


def falcon_map(args: Any) -> TensorMap:
    return joined_map(args, NAMES | (TWO_NORMS if args.norms == 2 else {}), ENDS, "transformer.h.")


SPEC = gated_spec(Falcon, CONFIG)
SPEC = replace(SPEC, hf=replace(SPEC.hf, tensor_map=falcon_map))
HF = SPEC.hf
