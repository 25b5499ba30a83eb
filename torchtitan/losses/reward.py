"""The loss of a reward model: pairs of answers, rows 2i and 2i + 1 of a batch, of which the first is preferred.

A head of one output gives each answer a number, its reward r, at its last token. With the Bradley-Terry model the
preferred answer w wins over the other, l, with the probability sigmoid(r_w - r_l), so the loss of a pair is

    -log sigmoid(r_w - r_l) + c (r_w + r_l)^2

where c (0 by default) draws rewards, which the first term leaves free up to a constant, to a mean of 0
(arXiv:2312.09244).
"""

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.losses.objective import IGNORE_INDEX, Batch
from torchtitan.losses.preference import Preference, have_labels


class Reward(Preference):
    """Bradley-Terry loss. The label of an answer marks its last token. The loss is counted in pairs."""

    targets = ("labels",)
    leaves_out = True

    def __init__(self, num_chunks: int = 1, center_coefficient: float = 0.0):
        super().__init__(num_chunks, beta=1.0)
        self.center_coefficient = center_coefficient

    def rows(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return the hidden states [P, 2, D] of the last tokens, and whether the pair has labels, bool [P]."""
        hidden, labels, _ = super().rows(hidden, batch)
        last = (labels != IGNORE_INDEX).int().argmax(-1)  # [P, 2]
        return hidden.take_along_dim(last[..., None, None], 2).squeeze(2), have_labels(labels)

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        (counts,) = targets
        rewards = head(hidden.flatten(0, 1)).unflatten(0, (-1, 2)).squeeze(-1)  # [P, 2]
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1])
        if self.center_coefficient:
            losses = losses + self.center_coefficient * rewards.sum(-1) ** 2
        if self.training:
            self._note(rewards.detach(), counts)
        return losses.where(counts, 0).sum()
