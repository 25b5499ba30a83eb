"""Qwen 2 and 2.5 without experts: arguments, published sizes, and conversion from and to config.json (Qwen2Config).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import CLASS_KEYS, ConfigConverter, Family, read_num_classes, task_fields
from torchtitan.models.hf.config import check_supported, gated_config, gated_sizes, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, WINDOW_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import read_windows, window_config
from torchtitan.models.sizes import DEBUG, QKV, GatedArgs


@dataclass(frozen=True, kw_only=True)
class Qwen2Args(GatedArgs):
    vocab_size: int = 151936
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    window_layers: str = ""  # the layers with a window; "": all
    n_classes: int = 0  # 0: the head predicts words

    may_be_zero: ClassVar = ("sliding_window", "n_classes")
    biases: ClassVar = QKV


_small: dict[str, Any] = dict(n_kv_heads=2, tied_embeddings=True)
_long: dict[str, Any] = dict(vocab_size=152064, max_seq_len=131072)
_large: dict[str, Any] = _long | dict(n_kv_heads=8, norm_eps=1e-5)
# the base models of Qwen 2.5; its instructed models have a norm_eps of 1e-6 and 32768 positions in all sizes
QWEN2 = {
    "debugmodel": Qwen2Args(**DEBUG),
    "0.5B": Qwen2Args(dim=896, n_layers=24, n_heads=14, head_dim=64, ffn_dim=4864, **_small),
    "1.5B": Qwen2Args(dim=1536, n_layers=28, n_heads=12, ffn_dim=8960, max_seq_len=131072, **_small),
    "3B": Qwen2Args(dim=2048, n_layers=36, n_heads=16, ffn_dim=11008, **_small),
    "7B": Qwen2Args(dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18944, **_long),
    "14B": Qwen2Args(dim=5120, n_layers=48, n_heads=40, ffn_dim=13824, **_large),
    "32B": Qwen2Args(dim=5120, n_layers=64, n_heads=40, ffn_dim=27648, **_large),
    "72B": Qwen2Args(dim=8192, n_layers=80, n_heads=64, ffn_dim=29568, **_large),
}


def _to_hf(args: Qwen2Args, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen2Config."""
    fields = task_fields("Qwen2", args) | {"model_type": "qwen2"}
    config = gated_config(args, dtype) | fields | window_config(args)
    del config["attention_bias"]  # no field of Qwen2Config: queries, keys and values always have biases
    return config


def _from_hf(config: Mapping[str, Any]) -> Qwen2Args:
    check_supported(config, {"hidden_act": "silu"})
    sizes = gated_sizes(config, 32768, kv_heads=32)
    windows = read_windows(config, windows_from_layer(config, sizes["n_layers"]))
    return Qwen2Args(**sizes, **windows, n_classes=read_num_classes(config))


def windows_from_layer(config: Mapping[str, Any], n_layers: int) -> list[bool]:
    """Return for each layer of Qwen 2 or 3 whether it has a window by max_window_layers: if it is not below it."""
    first = read_number(config, "max_window_layers", 28)
    return [layer >= first for layer in range(n_layers)]


KEYS = config_keys(
    DECODER_KEYS - {"attention_bias"} | {"head_dim", *WINDOW_KEYS, "max_window_layers"} | CLASS_KEYS,
    # biases are in every file; the last is of other programs, for very long texts
    harmless=("attention_bias", "dual_chunk_attention_config"),
)
CONFIG = ConfigConverter(model_types=("qwen2",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS)


FAMILY = Family(sizes=QWEN2, config=CONFIG, spec="torchtitan.models.qwen2.model:SPEC", publisher="Qwen")
