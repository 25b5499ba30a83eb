"""Conversion of Llama arguments from and to config.json (transformers' LlamaConfig), and the families. No torch."""

from collections.abc import Mapping
from typing import Any

from torchtitan.models.family import ConfigForm, Family
from torchtitan.models.hf.config import (
    check_only,
    decoder_config,
    decoder_sizes,
    number_of,
    rotary_config,
    scaling_from_hf,
)
from torchtitan.models.llama import LLAMA2, LLAMA3, LLAMA31, LLAMA32, LlamaArgs


def _to_hf(args: LlamaArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' LlamaConfig."""
    llama_fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": args.ffn_dim,
        "head_dim": args.head_dim,
        "mlp_bias": False,
    }
    return decoder_config(args, dtype) | rotary_config(args) | llama_fields


def _from_hf(config: Mapping[str, Any]) -> LlamaArgs:
    sizes = decoder_sizes(config, 2048, "intermediate_size")
    dim, heads, ffn_dim = sizes["dim"], sizes["n_heads"], config["intermediate_size"]
    check_only(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "head_dim": dim // heads})
    plain_width = int(2 * 4 * dim / 3)
    return LlamaArgs(
        **sizes,
        n_kv_heads=number_of(config, "num_key_value_heads", heads, null=heads),
        multiple_of=ffn_dim,  # rounding up yields exactly ffn_dim, because the width before it is not larger
        ffn_dim_multiplier=None if plain_width <= ffn_dim else ffn_dim / plain_width,
        rope_scaling=scaling_from_hf(config),
    )


COMPARED = ("dim", "n_layers", "n_heads", "num_kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta")
COMPARED += ("rope_scaling", "tied_embeddings")
CONFIG = ConfigForm(model_types=("llama",), to_hf=_to_hf, from_hf=_from_hf, compared=COMPARED)


# the first reads a Hugging Face folder without a job
LLAMAS = {
    name: Family(sizes=sizes, config=CONFIG, spec="torchtitan.models.llama.model:SPEC", home="meta-llama")
    for name, sizes in (("llama3", LLAMA3), ("llama2", LLAMA2), ("llama3.1", LLAMA31), ("llama3.2", LLAMA32))
}
