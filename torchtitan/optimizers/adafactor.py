"""Adafactor (arXiv:1804.04235): the second moment of a matrix [m, n] in m + n numbers.

The learning rate comes from the schedule, as for every optimizer here. torch.optim.Adafactor instead derives a rate
from the step and the size of the weights.
"""

from typing import Any

from torchtitan.optimizers import moments
from torchtitan.optimizers.by_parameter import ByMoments


class Adafactor(ByMoments):
    moments = moments.Adafactor()

    def __init__(self, groups: list[dict[str, Any]], lr: float, **options: float) -> None:
        super().__init__(groups, lr=lr, **options)
