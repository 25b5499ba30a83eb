"""Gemma 1: arguments, published sizes, and conversion from and to config.json (GemmaConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_flag, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.sizes import GatedArgs


@dataclass(frozen=True, kw_only=True)
class GemmaArgs(GatedArgs):
    """Sizes of all Gemma."""

    head_dim: int = 256
    norm_eps: float = 1e-6
    tied_embeddings: bool = True

    zero_centered: ClassVar = True
    activation: ClassVar = "gelu_tanh"

    @property
    def embedding_multiplier(self) -> float:
        return self.dim**0.5


@dataclass(frozen=True, kw_only=True)
class Gemma1Args(GemmaArgs):
    vocab_size: int = 256000
    max_seq_len: int = 8192
    attention_bias: bool = False


DEBUG: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=768, vocab_size=2048)
GEMMA = {
    "debugmodel": Gemma1Args(**DEBUG),
    "2B": Gemma1Args(dim=2048, n_layers=18, n_heads=8, n_kv_heads=1, ffn_dim=16384),
    "7B": Gemma1Args(dim=3072, n_layers=28, n_heads=16, n_kv_heads=16, ffn_dim=24576),
}
GELU = "gelu_pytorch_tanh"


def _to_hf(args: Gemma1Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' GemmaConfig."""
    fields = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": GELU}
    return gated_config(args, dtype) | fields


def _from_hf(config: Mapping[str, Any]) -> Gemma1Args:
    if config.get("hidden_act") != "gelu":  # of the first files, which mean the approximation
        check_supported(config, {"hidden_act": GELU})
    only = {"hidden_activation": GELU, "use_bidirectional_attention": False}
    check_supported(config, only, nullable=only.keys())
    sizes = gated_sizes(config, 8192, head_dim=256)
    sizes |= {"n_kv_heads": read_number(config, "num_key_value_heads", 16)}  # never null
    sizes |= {"tied_embeddings": config.get("tie_word_embeddings", True)}
    return Gemma1Args(**sizes, attention_bias=read_flag(config, "attention_bias", False))


KEYS = config_keys(DECODER_KEYS | {"head_dim", "hidden_activation", "use_bidirectional_attention"})
CONFIG = ConfigConverter(model_types=("gemma",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=GEMMA, config=CONFIG, spec="torchtitan.models.gemma.model:SPEC", publisher="google")
