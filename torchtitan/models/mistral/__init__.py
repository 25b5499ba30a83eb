"""Mistral without experts: the arguments and the published sizes. No torch here, so `torchtitan check` stays quick."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.models.sizes import GatedArgs, check_not_negative


@dataclass(frozen=True, kw_only=True)
class MistralArgs(GatedArgs):
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 8
    ffn_dim: int = 14336
    sliding_window: int = 0  # number of tokens that a token attends to, with itself; 0: all before it

    may_be_zero: ClassVar = ("sliding_window",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "sliding_window")


_debug: dict[str, Any] = dict(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, ffn_dim=768, vocab_size=2048)
MISTRAL = {
    "debugmodel": MistralArgs(**_debug, sliding_window=64),
    "7B": MistralArgs(sliding_window=4096),  # v0.1
    "7B-v0.2": MistralArgs(rope_theta=1e6),
    "7B-v0.3": MistralArgs(rope_theta=1e6, vocab_size=32768),
    "Nemo-12B": MistralArgs(dim=5120, n_layers=40, vocab_size=131072, rope_theta=1e6, max_seq_len=131072),
}
