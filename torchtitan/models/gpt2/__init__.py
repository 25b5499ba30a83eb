"""GPT-2: the arguments and the published sizes. No torch here, so `torchtitan check` stays quick."""

from dataclasses import dataclass

from torchtitan.models.learned_positions import ClassicArgs
from torchtitan.models.sizes import HEAD, Names, Sizes


@dataclass(frozen=True, kw_only=True)
class GPT2Args(ClassicArgs):
    vocab_size: int = 50257
    max_seq_len: int = 1024

    @property
    def end_others(self) -> Names:
        return ("tok_embeddings.weight", "entrance.positions.weight", "norm.weight", "norm.bias")

    @property
    def head_linears(self) -> Sizes:
        return {HEAD: (self.outputs, self.dim)}

    @property
    def _other_parameters(self) -> int:
        return self.max_seq_len * self.dim + 2 * self.dim


def _sizes(width: int, layers: int, heads: int, **sizes: int) -> GPT2Args:
    return GPT2Args(dim=width, n_layers=layers, n_heads=heads, ffn_dim=4 * width, **sizes)


GPT2 = {
    "debugmodel": _sizes(256, 6, 8, vocab_size=2048, max_seq_len=2048),
    "124M": _sizes(768, 12, 12),
    "355M": _sizes(1024, 24, 16),
    "774M": _sizes(1280, 36, 20),
    "1558M": _sizes(1600, 48, 25),
}
