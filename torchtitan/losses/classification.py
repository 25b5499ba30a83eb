"""Classification: cross-entropy of a record's class, which is the label of one token of the record.

Evaluation also counts the confusion matrix.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy, summed_cross_entropy


class ClassCrossEntropy(SummedCrossEntropy):
    """Cross-entropy of class logits [B, S, C] at the tokens that have a label in labels [B, S]."""

    leaves_out = True

    def __init__(self, num_chunks: int = 1):
        super().__init__(num_chunks)
        self.confusion: torch.Tensor | None = None  # [C C], flattened: true class by predicted class

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        if not self.training:
            self._count(logits, *targets)
        return summed_cross_entropy(logits, *targets)

    @torch.compiler.disable
    @torch.no_grad()
    def _count(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits  # sharded by tensor parallel
        valid, classes = labels != IGNORE_INDEX, logits.shape[-1]
        pairs = labels[valid] * classes + logits[valid].argmax(-1)
        counts = torch.bincount(pairs, minlength=classes**2)
        self.confusion = counts if self.confusion is None else self.confusion + counts

    def take_confusion(self) -> torch.Tensor | None:
        """Return the flattened confusion matrix [C * C] and reset it; None if nothing was evaluated."""
        confusion, self.confusion = self.confusion, None
        return confusion


def classification_metrics(confusion: torch.Tensor) -> Mapping[str, float]:
    """Return accuracy and F1 of a flattened confusion matrix [C * C], with true classes as rows.

    F1 is for class 1 if there are two classes, and the mean over the classes otherwise.
    """
    classes = round(confusion.numel() ** 0.5)
    table = confusion.double().view(classes, classes)
    correct, actual, predicted = table.diagonal(), table.sum(1), table.sum(0)
    f1 = 2 * correct / (actual + predicted).clamp(min=1)
    return {
        "accuracy": (correct.sum() / table.sum().clamp(min=1)).item(),
        "f1": (f1[1] if classes == 2 else f1.mean()).item(),
    }
