"""AdamW with moments in 8 bits (arXiv:2110.02861), for tensors with 4096 elements or more."""

from typing import Any

from torchtitan.optimizers import moments
from torchtitan.optimizers.by_parameter import ByMoments


class AdamW8bit(ByMoments):
    moments = moments.Adam(packed=True)

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)
