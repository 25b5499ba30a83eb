"""Qwen 2 with experts: arguments, published sizes, and conversion from and to config.json (Qwen2MoeConfig).

No torch here, so `torchtitan check` stays quick.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.family import ConfigConverter, Family
from torchtitan.models.hf.config import check_numbers, read_flag, read_number
from torchtitan.models.hf.config_keys import DECODER_KEYS, config_keys
from torchtitan.models.hf.layer_kinds import read_windows
from torchtitan.models.moe import PLAIN_SOFTMAX, GroupedMoEArgs, check_exported, number_of_shared_experts
from torchtitan.models.qwen3_moe import ALIASES, NOT_COMPUTED, qwen_config, qwen_sizes
from torchtitan.models.qwen3_moe import USED as QWEN3_USED
from torchtitan.models.sizes import QKV, Names


@dataclass(frozen=True, kw_only=True)
class Qwen2MoEArgs(GroupedMoEArgs):
    """Arguments of Qwen 2 with experts in all layers."""

    vocab_size: int = 151936
    max_seq_len: int = 32768
    n_shared_experts: int = 4  # as one feed-forward with a gate
    qkv_bias: bool = True
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it
    window_layers: str = ""  # the layers with a window; "": all
    may_be_zero: ClassVar = (*GroupedMoEArgs.may_be_zero, "sliding_window")
    shared_gate: ClassVar = True
    mean_aux_loss: ClassVar = True

    @property
    def biases(self) -> Names:
        return QKV if self.qkv_bias else ()


def _qwen2(**sizes: Any) -> Qwen2MoEArgs:
    return Qwen2MoEArgs(aux_loss_weight=0.001, **sizes)


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048)
QWEN2_MOE = {
    "debugmodel": _qwen2(**_debug, expert_dim=128, n_experts=8, top_k=2, n_shared_experts=2),
    # Qwen 1.5
    "A2.7B": _qwen2(dim=2048, n_layers=24, n_heads=16, n_kv_heads=16, expert_dim=1408, n_experts=60, top_k=4),
    "57B-A14B": _qwen2(
        dim=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        expert_dim=2560,
        n_experts=64,
        top_k=8,
        n_shared_experts=8,
        max_seq_len=131072,
    ),
}


SHARED_KEY = "shared_expert_intermediate_size"


def _to_hf(args: Qwen2MoEArgs, dtype: Any = "float32") -> dict[str, Any]:
    """Return the fields of transformers' Qwen2MoeConfig. Raises JobError for unsupported routing."""
    check_exported(args, PLAIN_SOFTMAX, "Qwen 2 with experts", shares=True)
    config = qwen_config(args, dtype)
    del config["attention_bias"]  # no field of Qwen2MoeConfig
    return config | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "qkv_bias": args.qkv_bias,
        SHARED_KEY: args.n_shared_experts * args.expert_dim,
    }


def _from_hf(config: Mapping[str, Any]) -> Qwen2MoEArgs:
    sizes = qwen_sizes(config)
    check_numbers(config, (SHARED_KEY,))
    last = read_number(config, "max_window_layers", 28)
    windows = read_windows(config, [i % 2 == 0 and i < last for i in range(sizes["n_layers"])], nullable=False)
    width = config[SHARED_KEY]
    shared = number_of_shared_experts(SHARED_KEY, width, "moe_intermediate_size", sizes["expert_dim"])
    return Qwen2MoEArgs(**sizes, **windows, n_shared_experts=shared, qkv_bias=read_flag(config, "qkv_bias", True))


USED = (*QWEN3_USED, "qkv_bias", SHARED_KEY, "layer_types", "max_window_layers")
KEYS = config_keys(
    DECODER_KEYS - {"attention_bias", "intermediate_size"} | {*USED}, harmless=(*NOT_COMPUTED, "attention_bias")
)
CONFIG = ConfigConverter(model_types=("qwen2_moe",), to_hf=_to_hf, from_hf=_from_hf, keys=KEYS, aliases=ALIASES)


FAMILY = Family(sizes=QWEN2_MOE, config=CONFIG, spec="torchtitan.models.qwen2_moe.model:SPEC", publisher="Qwen")
