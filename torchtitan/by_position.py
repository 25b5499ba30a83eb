"""The loss of a model by the place of its tokens in their documents, which are read from beginning to end: what a model
makes of what stands far back shows there alone.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from torchtitan.loss import IGNORE_INDEX, Objective, cross_entropies

BORDERS = (1, 4, 16)
"""Of the classes of places, in segments: up to one, up to four, up to sixteen, and beyond."""


@dataclass(frozen=True)
class Measured:
    """Of one class of places, or of all: tokens that count, and the sum of their losses in nats."""

    tokens: int
    nats: float

    @property
    def loss(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class LossByPlace(Objective):
    """The sum of the losses of tokens, as SummedCrossEntropy has it; `nats` and `tokens`, float64 [classes], have grown
    by those of each class of `places` [B, S].
    """

    targets = ("labels", "places")

    def __init__(self, num_chunks: int, num_classes: int, device: torch.device):
        super().__init__(num_chunks)
        self.nats = torch.zeros(num_classes, dtype=torch.float64, device=device)
        self.tokens = torch.zeros_like(self.nats)

    def count(self, batch: Mapping[str, torch.Tensor]) -> int:
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def rows(self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return hidden.flatten(0, 1), batch["labels"].flatten(), batch["places"].flatten()  # [B S, D], [B S], [B S]

    def loss_of(self, head: nn.Module, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        labels, places = others
        losses = cross_entropies(head(hidden), labels)
        self.nats.index_add_(0, places, losses.double())
        self.tokens.index_add_(0, places, (labels != IGNORE_INDEX).double())
        return losses.sum()


def names_of(seq_len: int) -> list[str]:
    """Of the classes, by the tokens ahead."""
    ends = [border * seq_len for border in BORDERS]
    return [f"{first:,}-{last:,}" for first, last in zip([0, *ends], ends, strict=False)] + [f"{ends[-1]:,}-"]


@torch.no_grad()
def measure(
    model: nn.Module, batches: Iterable[Mapping[str, torch.Tensor]], seq_len: int, num_chunks: int
) -> list[Measured]:
    """Of each class of places, of a model in evaluation on one device and batches [B, S] of datasets/segments.py."""
    device = next(model.parameters()).device
    objective = LossByPlace(num_chunks, len(BORDERS) + 1, device)
    before, model.loss = model.loss, objective
    ends = torch.tensor([border * seq_len for border in BORDERS], device=device)
    try:
        for whole in batches:
            batch = {name: tensor.to(device) for name, tensor in whole.items()}
            ahead = batch["offsets"][:, None] + torch.arange(batch["tokens"].shape[1], device=device)
            told = {name: batch[name] for name in ("tokens", "labels", "begins", "filled")}
            model(**told, places=torch.bucketize(ahead, ends, right=True))
            if model.memory is not None:
                model.memory.commit()
    finally:
        model.loss = before
    return [Measured(int(n), nats) for n, nats in zip(objective.tokens.tolist(), objective.nats.tolist(), strict=True)]


def total(measured: Iterable[Measured]) -> Measured:
    parts = list(measured)
    return Measured(sum(part.tokens for part in parts), math.fsum(part.nats for part in parts))
