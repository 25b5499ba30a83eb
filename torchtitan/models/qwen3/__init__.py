"""Qwen 3 without experts: arguments, published sizes, and conversion from and to config.json (Qwen3Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import CLASS_KEYS, ConfigConverter, Family, read_num_classes, task_fields
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes
from torchtitan.models.hf.config_keys import DECODER_KEYS, WINDOW_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import read_windows, window_config
from torchtitan.models.qwen2 import windows_from_layer
from torchtitan.models.sizes import DEBUG, GatedArgs


@dataclass(frozen=True, kw_only=True)
class Qwen3Args(GatedArgs):
    vocab_size: int = 151936
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    max_seq_len: int = 40960
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    window_layers: str = ""  # the layers with a window; "": all
    n_classes: int = 0  # 0: the head predicts words

    may_be_zero: ClassVar = ("sliding_window", "n_classes")
    qk_norm: ClassVar = True


_small: dict[str, Any] = dict(n_heads=16, n_kv_heads=8, tied_embeddings=True)
QWEN3 = {
    "debugmodel": Qwen3Args(**DEBUG),
    "0.6B": Qwen3Args(dim=1024, n_layers=28, ffn_dim=3072, **_small),
    "1.7B": Qwen3Args(dim=2048, n_layers=28, ffn_dim=6144, **_small),
    "4B": Qwen3Args(dim=2560, n_layers=36, ffn_dim=9728, **_small | {"n_heads": 32}),
    "8B": Qwen3Args(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, ffn_dim=12288),
    "14B": Qwen3Args(dim=5120, n_layers=40, n_heads=40, n_kv_heads=8, ffn_dim=17408),
    "32B": Qwen3Args(dim=5120, n_layers=64, n_heads=64, n_kv_heads=8, ffn_dim=25600),
}


def _to_hf(args: Qwen3Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen3Config."""
    fields = task_fields("Qwen3", args) | {"model_type": "qwen3"}
    return gated_config(args, dtype) | fields | window_config(args)


def _from_hf(config: Mapping[str, Any]) -> Qwen3Args:
    check_supported(config, {"hidden_act": "silu", "attention_bias": False})
    sizes = gated_sizes(config, 32768, kv_heads=32, head_dim=128)
    windows = read_windows(config, windows_from_layer(config, sizes["n_layers"]))
    return Qwen3Args(**sizes, **windows, n_classes=read_num_classes(config))


KEYS = config_keys(DECODER_KEYS | {"head_dim", *WINDOW_KEYS, "max_window_layers"} | CLASS_KEYS)
CONFIG = ConfigConverter(model_types=("qwen3",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=QWEN3, config=CONFIG, spec="torchtitan.models.qwen3.model:SPEC", publisher="Qwen")
