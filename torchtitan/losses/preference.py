"""What is learned of pairs of answers, of which one is preferred: rows 2i and 2i + 1 of a batch.

DPO (arXiv:2305.18290): with h = (log p_w - ref_w) - (log p_l - ref_l), w the preferred answer, l the other and ref the
log-probabilities of the model that the run began from, the loss of a pair is -log sigmoid(beta h); with label smoothing
e, (1 - e) times that and e times -log sigmoid(-beta h). IPO (arXiv:2310.12036): (h - 1 / (2 beta))^2 of means over
tokens. ORPO (arXiv:2403.07691) has no reference: the mean loss of the preferred answer's tokens, and beta times
-log sigmoid of the difference of the answers' log-odds.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.losses.objective import IGNORE_INDEX, Batch, Objective, cross_entropies


class Preference(Objective):
    """Counted in pairs. Its batches also hold `reference` [B]: log-probabilities, as `log_probabilities` gives them of
    the reference. `sums`: of rewards (beta times what an answer has gained over the reference), of how often and how
    far the preferred one has the larger, and the pairs; in training, since they were taken.
    """

    targets: tuple[str, ...] = ("labels", "reference")
    form: Literal["dpo", "ipo", "orpo"] = "dpo"
    measured = ("reward_chosen", "reward_rejected", "reward_accuracy", "reward_margin")

    def __init__(self, num_chunks: int = 1, beta: float = 0.1, label_smoothing: float = 0.0):
        super().__init__(num_chunks)
        self.beta, self.label_smoothing = beta, label_smoothing
        self.asked: list[torch.Tensor] | None = None
        """Collects log-probabilities [P, 2] of what is evaluated, while it is a list; the loss is then none."""
        self.sums: torch.Tensor | None = None

    def count(self, batch: Batch) -> int:
        return int(_counts(batch["labels"].unflatten(0, (-1, 2))).sum())

    def first(self, batch: Batch, rows: int) -> dict[str, torch.Tensor]:
        labels = batch["labels"].clone()
        labels[rows:] = IGNORE_INDEX
        return {**batch, "labels": labels}

    def rows(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        """[P, 2, S, D], [P, 2, S] and [P, 2]"""
        hidden, labels = (x.unflatten(0, (-1, 2)) for x in (hidden, batch["labels"]))
        reference = batch["reference"] if "reference" in batch else labels.new_zeros(2 * len(labels))
        return hidden, labels, reference.unflatten(0, (-1, 2))

    def loss_of(self, head: nn.Module, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        labels, reference = others
        losses = cross_entropies(head(hidden.flatten(0, 2)), labels.flatten()).view(labels.shape)
        own = -losses.sum(-1)  # [P, 2]
        if self.asked is not None:
            self.asked.append(own.detach())
            return own.sum()
        lengths = (labels != IGNORE_INDEX).sum(-1).clamp(min=1)  # [P, 2]
        each, gained = self.losses(own, reference.to(own.dtype), lengths)
        counts = _counts(labels)
        if self.training:
            self._note(gained.detach(), counts)
        return each.where(counts, 0).sum()

    def losses(
        self, own: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the model and of its reference, and lengths of the answers in tokens, all [P, 2] -> the
        loss of each pair [P] and what each answer has gained [P, 2].
        """
        gained = own - reference
        h = gained[:, 0] - gained[:, 1]
        smoothed = (1 - self.label_smoothing) * F.logsigmoid(self.beta * h)
        if self.label_smoothing:
            smoothed = smoothed + self.label_smoothing * F.logsigmoid(-self.beta * h)
        return -smoothed, gained

    def take_sums(self) -> torch.Tensor | None:
        sums, self.sums = self.sums, None
        return sums

    @torch.no_grad()
    def _note(self, gained: torch.Tensor, counts: torch.Tensor) -> None:
        rewards = (self.beta * gained.float())[counts]  # [those that count, 2]
        margins = rewards[:, 0] - rewards[:, 1]
        told = (rewards[:, 0], rewards[:, 1], margins > 0, margins, torch.ones_like(margins))
        sums = torch.stack([column.float().sum() for column in told])
        self.sums = sums if self.sums is None else self.sums + sums


class IPO(Preference):
    form = "ipo"

    def losses(
        self, own: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gained = (own - reference) / lengths
        return (gained[:, 0] - gained[:, 1] - 1 / (2 * self.beta)) ** 2, gained


class ORPO(Preference):
    """What an answer has gained is its mean log-probability."""

    targets = ("labels",)
    form = "orpo"

    def losses(
        self, own: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        means = own / lengths
        odds = means - torch.log1p(-means.exp().clamp(max=1 - 1e-6))
        return -means[:, 0] - self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1]), means


def _counts(labels: torch.Tensor) -> torch.Tensor:
    """[P, 2, S] -> [P] whether both answers have labels."""
    return (labels != IGNORE_INDEX).any(-1).all(-1)
