"""Evaluation of language models by the loss of single tokens, by their position.

The loss by position of the tokens in their documents, which are read in order, shows how much a model gains from
distant context.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan.losses.objective import IGNORE_INDEX, Objective, cross_entropies

BORDERS = (1, 4, 16)
"""Upper bounds of the position classes, in segments; a last class holds all later positions."""


@dataclass(frozen=True)
class PositionLoss:
    """Number of tokens with a loss, and the sum of their losses in nats, for one class of positions or for all."""

    tokens: int
    nats: float

    @property
    def loss(self) -> float:
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class LossByPosition(Objective):
    """Summed cross-entropy that also accumulates losses and token counts by class of position.

    `nats` and `tokens` are float64 [classes]; the batch gives each token's class as `position_classes` [B, S].
    """

    targets = ("labels", "position_classes")

    def __init__(self, num_chunks: int, logits_width: int, num_classes: int, device: torch.device):
        super().__init__(num_chunks)
        self.logits_width = logits_width
        self.nats = torch.zeros(num_classes, dtype=torch.float64, device=device)
        self.tokens = torch.zeros_like(self.nats)

    def count(self, batch: Mapping[str, torch.Tensor]) -> int:
        return int((batch["labels"] != IGNORE_INDEX).sum())

    def rows(self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return hidden states [B S, D], labels [B S] and position classes [B S]."""
        return hidden.flatten(0, 1), batch["labels"].flatten(), batch["position_classes"].flatten()

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        labels, position_classes = targets
        losses = cross_entropies(head(hidden), labels)
        self.nats.index_add_(0, position_classes, losses.double())
        self.tokens.index_add_(0, position_classes, (labels != IGNORE_INDEX).double())
        return losses.sum()


def position_class_names(seq_len: int) -> list[str]:
    """Return the names of the position classes, as ranges of tokens."""
    ends = [border * seq_len for border in BORDERS]
    return [f"{first:,}-{last:,}" for first, last in zip([0, *ends], ends, strict=False)] + [f"{ends[-1]:,}-"]


@torch.no_grad()
def measure_position_losses(
    model: Any, batches: Iterable[Mapping[str, torch.Tensor]], seq_len: int, num_chunks: int
) -> list[PositionLoss]:
    """Measure each class of positions with a model in evaluation mode, on batches [B, S] of datasets/segments.py.

    `num_chunks`: see Objective.
    """
    device = next(model.parameters()).device
    objective = LossByPosition(num_chunks, model.args.vocab_size, len(BORDERS) + 1, device)
    before, model.loss = model.loss, objective
    ends = torch.tensor([border * seq_len for border in BORDERS], device=device)
    try:
        for host_batch in batches:
            batch = {name: tensor.to(device) for name, tensor in host_batch.items()}
            positions = batch["offsets"][:, None] + torch.arange(batch["tokens"].shape[1], device=device)
            inputs = {name: batch[name] for name in ("tokens", "labels", "begins", "filled")}
            model(**inputs, position_classes=torch.bucketize(positions, ends, right=True))
            if model.memory is not None:
                model.memory.commit()
    finally:
        model.loss = before
    sums = zip(objective.tokens.tolist(), objective.nats.tolist(), strict=True)
    return [PositionLoss(int(tokens), nats) for tokens, nats in sums]


def total_loss(measurements: Iterable[PositionLoss]) -> PositionLoss:
    """Sum measurements over classes."""
    parts = list(measurements)
    return PositionLoss(sum(part.tokens for part in parts), math.fsum(part.nats for part in parts))
