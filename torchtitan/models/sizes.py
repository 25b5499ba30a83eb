"""How rotary wavelengths are stretched, in numbers; rope.py makes frequencies of them. No torch.

What sizes of any family have to be, in one wording. No torch. All raise JobError.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.core.errors import JobError


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary wavelengths, by which a model trained on `original_max_seq_len` tokens reads further.

    llama3 (Llama 3.1): wavelengths above original_max_seq_len / low_freq_factor become `factor` times longer, those
    below original_max_seq_len / high_freq_factor stay, and those between are blended. linear: all become `factor` times
    longer (arXiv:2306.15595). ntk: the longest do and the shortest stay, by a larger rope_theta. yarn: those that turn
    less than beta_slow times within original_max_seq_len tokens do, those that turn more than beta_fast times stay,
    those between are blended, and scores are scaled (arXiv:2309.00071).
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192
    kind: Literal["llama3", "linear", "ntk", "yarn"] = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def theta(self, theta: float, head_dim: int) -> float:
        """Another one for ntk, under which the slowest pair of features turns `factor` times slower."""
        return theta * self.factor ** (head_dim / (head_dim - 2)) if self.kind == "ntk" else theta


def check_positive(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 1:
            raise JobError(f"{name} = {getattr(args, name)}: must be at least 1")


def check_not_negative(args: Any, *names: str) -> None:
    for name in names:
        if getattr(args, name) < 0:
            raise JobError(f"{name} = {getattr(args, name)}: must not be negative")


def check_turned(args: Any, name: str) -> None:
    """Of a width that rotary embeddings turn."""
    if getattr(args, name) % 2:
        raise JobError(f"{name} = {getattr(args, name)}: must be even, as rotary embeddings turn pairs")


def check_shares(args: Any, *names: str) -> None:
    """Of what is dropped."""
    for name in names:
        if not 0 <= getattr(args, name) < 1:
            raise JobError(f"{name} = {getattr(args, name)}: must be at least 0 and less than 1")


def check_whole_heads(args: Any) -> None:
    """Where heads add up to the model's width."""
    if args.dim % args.n_heads:
        raise JobError(f"dim = {args.dim} with n_heads = {args.n_heads}: dim must be a multiple of n_heads")


def check_grouped_heads(args: Any) -> None:
    if args.num_kv_heads < 1 or args.n_heads % args.num_kv_heads:
        raise JobError(
            f"n_kv_heads = {args.n_kv_heads} with n_heads = {args.n_heads}: every key/value head serves the same "
            f"number of query heads, so n_kv_heads must divide n_heads"
        )
