"""Telling classes apart: the loss of a record is that of its class, which is the label of the one token that speaks for
it; in evaluation it is also counted which class was told for which.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.loss import IGNORE_INDEX, SummedCrossEntropy, summed_cross_entropy


class ClassCrossEntropy(SummedCrossEntropy):
    """Of classes, logits [B, S, C], at the tokens that have a label in labels [B, S]."""

    def __init__(self, num_chunks: int = 1):
        super().__init__(num_chunks)
        self.told: torch.Tensor | None = None  # [C C], records of each class (rows) for each that was told

    def loss_of(self, head: nn.Module, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        if not self.training:
            self._count(logits, *others)
        return summed_cross_entropy(logits, *others)

    @torch.compiler.disable
    @torch.no_grad()
    def _count(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits  # tensor parallel has split them
        valid, classes = labels != IGNORE_INDEX, logits.shape[-1]
        pairs = labels[valid] * classes + logits[valid].argmax(-1)
        counts = torch.bincount(pairs, minlength=classes**2)
        self.told = counts if self.told is None else self.told + counts

    def take_counts(self) -> torch.Tensor | None:
        """Of what was evaluated here since the last call, [C C]; None of nothing."""
        told, self.told = self.told, None
        return told


def measures(told: torch.Tensor) -> Mapping[str, float]:
    """[C C] records of each class (rows) for each that was told -> the share that is right, and F1: the harmonic mean
    of precision and recall, of class 1 where there are two, else the mean over the classes.
    """
    classes = round(told.numel() ** 0.5)
    table = told.double().view(classes, classes)
    right, wanted, given = table.diagonal(), table.sum(1), table.sum(0)
    f1 = 2 * right / (wanted + given).clamp(min=1)
    return {
        "accuracy": (right.sum() / table.sum().clamp(min=1)).item(),
        "f1": (f1[1] if classes == 2 else f1.mean()).item(),
    }
