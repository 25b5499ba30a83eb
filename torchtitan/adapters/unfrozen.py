"""Some of a model's own parameters trained, and nothing added: all others are frozen."""

from collections.abc import Sequence

from torch import nn

from torchtitan.adapters.interface import Adapter, matching
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.parallelisms.plan import ParallelPlan

KEY = "training.unfrozen"


class Unfrozen(Adapter):
    """`patterns`: of the names of what is trained."""

    name = "unfrozen"

    def __init__(self, patterns: Sequence[str]):
        super().__init__(Options(kind=self.name))
        self.patterns = patterns

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        return plan

    def trained_of_base(self, names: Sequence[str]) -> frozenset[str]:
        return frozenset(matching(names, self.patterns, KEY))
