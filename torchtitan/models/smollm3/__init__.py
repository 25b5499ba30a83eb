"""SmolLM 3: arguments, published sizes, and conversion from and to config.json (SmolLM3Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_biases
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import check_full_attention, every_nth, read_interval
from torchtitan.models.sizes import DEBUG, GatedArgs, Rope, check_positive


@dataclass(frozen=True, kw_only=True)
class SmolLM3Args(GatedArgs):
    """Sizes of SmolLM 3. The last of each `no_rope_interval` layers has no rotary positions."""

    vocab_size: int = 128256
    norm_eps: float = 1e-6
    rope_theta: float = 2000000.0
    no_rope_interval: int = 4
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "no_rope_interval")

    def rope(self, layer: int) -> Rope | None:
        return super().rope(layer) if (layer + 1) % self.no_rope_interval else None


_3b: dict[str, Any] = dict(dim=2048, n_layers=36, n_heads=16, n_kv_heads=4, head_dim=128, ffn_dim=11008)
SMOLLM3 = {
    "debugmodel": SmolLM3Args(**DEBUG, no_rope_interval=3),
    "3B": SmolLM3Args(**_3b, rope_theta=5000000.0, max_seq_len=65536),
}


def _to_hf(args: SmolLM3Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' SmolLM3Config."""
    smollm3_fields = {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "mlp_bias": args.mlp_bias,
        "no_rope_layer_interval": args.no_rope_interval,
        "no_rope_layers": every_nth(args.n_layers, args.no_rope_interval, 0, 1),
        "use_sliding_window": False,
    }
    return gated_config(args, dtype) | smollm3_fields


def _from_hf(config: Mapping[str, Any]) -> SmolLM3Args:
    check_supported(config, {"hidden_act": "silu"})
    sizes = gated_sizes(config, 32768, kv_heads=4, theta=2000000.0)
    check_full_attention(config)
    interval = read_interval(config, sizes["n_layers"], "no_rope_layers", "no_rope_layer_interval", 4, 0, 1)
    tied = config.get("tie_word_embeddings", True)
    return SmolLM3Args(**sizes | {"tied_embeddings": tied}, no_rope_interval=interval, **read_biases(config))


USED = ("head_dim", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window", "layer_types")
KEYS = config_keys(DECODER_KEYS | {*USED}, harmless=("sliding_window", "max_window_layers"))
CONFIG = ConfigConverter(model_types=("smollm3",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=SMOLLM3, config=CONFIG, spec="torchtitan.models.smollm3.model:SPEC", publisher="HuggingFaceTB")
