"""How rotary wavelengths are stretched, in numbers; rope.py makes frequencies of them. No torch."""

from dataclasses import dataclass
from typing import Literal


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
