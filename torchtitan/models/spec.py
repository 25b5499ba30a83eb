"""What the rest of the project needs to know of a model family. A new family is one of these.

What builds each family of models/__init__.py, by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from torch import nn

from torchtitan.core.registry import Registry
from torchtitan.models import FAMILIES
from torchtitan.models.family import GROUP, Family
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.hf.family import HuggingFace
from torchtitan.parallelisms.experts.balance import Balance
from torchtitan.parallelisms.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    build: Callable[..., nn.Module]  # build(args, attention_backend="auto")
    plan: ParallelPlan
    hf: HuggingFace
    flops_per_token: Callable[[Any, int], FlopsPerToken]  # (args, seq_len)
    balance: Balance | None = None  # of a family with experts, as models/moe/balance.py has it


def _spec(family: Family) -> ModelSpec:
    return resolve_name(family.spec)


_specs = {name: _spec(family) for name, family in FAMILIES.items()}
MODELS: Registry[ModelSpec] = Registry(GROUP, _specs, Family, _spec)
