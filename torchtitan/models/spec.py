"""The interface between a model family and the rest of the project."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.hf.family import HuggingFace
from torchtitan.parallelisms.expert_balance import Balance
from torchtitan.parallelisms.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    build: Callable[..., nn.Module]  # build(args, attention_backend="auto")
    plan: ParallelPlan
    hf: HuggingFace
    flops_per_token: Callable[[Any, int], FlopsPerToken]  # (args, seq_len)
    balance: Balance | None = None  # of a family with experts, as models/moe/balance.py has it
