"""Adafactor (arXiv:1804.04235): the second moment of a matrix [m, n] in m + n numbers.

The rate is the schedule's, as for every optimizer here; torch.optim.Adafactor derives one from the step and the
weights' size.
"""

from typing import Any

from torchtitan.optimizers import moments
from torchtitan.optimizers.by_parameter import ByMoments


class Adafactor(ByMoments):
    moments = moments.Adafactor()

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)
