"""StableLM: arguments, published sizes, and conversion from and to config.json (StableLmConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_supported, read_flag, read_number
from torchtitan.models.hf.config_keys import config_keys
from torchtitan.models.layer_norms import KEYS, LayerNormArgs, layer_norm_config, layer_norm_sizes
from torchtitan.models.sizes import DEBUG, QKV, Names, NormOrder


@dataclass(frozen=True, kw_only=True)
class StableLMArgs(LayerNormArgs):
    vocab_size: int = 100352
    max_seq_len: int = 4096
    qkv_bias: bool = False
    qk_norm: bool = False
    side_by_side: bool = False  # attention and feed-forward read the same norm

    qk_norm_by_head: ClassVar = True

    @property
    def biases(self) -> Names:
        return QKV if self.qkv_bias else ()

    @property
    def norm_order(self) -> NormOrder:
        return "shared" if self.side_by_side else "pre"


_3b: dict[str, Any] = dict(dim=2560, n_layers=32, n_heads=32, n_kv_heads=32, head_dim=80, ffn_dim=6912, rotary_dim=20)
STABLELM = {
    "debugmodel": StableLMArgs(**DEBUG, rotary_dim=8, qkv_bias=True),
    "2-1.6B": StableLMArgs(
        **_3b | dict(dim=2048, n_layers=24, head_dim=64, ffn_dim=5632, rotary_dim=16), qkv_bias=True
    ),
    "2-12B": StableLMArgs(
        **_3b | dict(dim=5120, n_layers=40, n_kv_heads=8, head_dim=160, ffn_dim=13824, rotary_dim=40),
        qk_norm=True,
        side_by_side=True,
    ),
    "3B": StableLMArgs(**_3b, vocab_size=50304),  # stablelm-3b-4e1t
}
FLAGS = {"qkv_bias": "use_qkv_bias", "qk_norm": "qk_layernorm", "side_by_side": "use_parallel_residual"}


def _to_hf(args: StableLMArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' StableLmConfig."""
    fields = {key: getattr(args, name) for name, key in FLAGS.items()}
    return layer_norm_config(args, dtype, "StableLm") | fields


def _from_hf(config: Mapping[str, Any]) -> StableLMArgs:
    dropout = {"hidden_dropout": read_number(config, "hidden_dropout", 0.0)}  # of the feed-forward's outputs alone
    check_supported(config | dropout, {"hidden_act": "silu", "hidden_dropout": 0.0})
    sizes = layer_norm_sizes(config, 4096, 0.25)
    sizes |= {"n_kv_heads": read_number(config, "num_key_value_heads", 32)}  # transformers refuses null
    return StableLMArgs(**sizes, **{name: read_flag(config, key, False) for name, key in FLAGS.items()})


USED = config_keys(KEYS | {*FLAGS.values(), "hidden_dropout"})
CONFIG = ConfigConverter(model_types=("stablelm",), to_hf=_to_hf, from_hf=_from_hf, keys=USED)


FAMILY = Family(sizes=STABLELM, config=CONFIG, spec="torchtitan.models.stablelm.model:SPEC", publisher="stabilityai")
