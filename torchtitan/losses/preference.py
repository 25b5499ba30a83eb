"""Losses for pairs of answers, one preferred to the other: rows 2i and 2i + 1 of a batch.

Let w be the preferred answer, l the other, ref log-probabilities of the initial model, and

    h = (log p_w - ref_w) - (log p_l - ref_l)

DPO (arXiv:2305.18290): -log sigmoid(beta h); with label smoothing e, (1 - e) times this plus e times -log sigmoid(-beta
h). IPO (arXiv:2310.12036): (h - 1 / (2 beta))^2, with means over tokens. ORPO (arXiv:2403.07691), without a reference:
the mean loss of the preferred answer's tokens, plus beta times -log sigmoid of the difference of the answers' log-odds.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.losses.objective import IGNORE_INDEX, Batch, Objective, choose, head_losses, in_recomputed_chunks


class Preference(Objective):
    """DPO, and the base of IPO and ORPO. The loss is counted in pairs.

    Batches also hold `reference` [B], the log-probabilities of the answers under the initial model. `sums` accumulates
    in training, until take_sums: the rewards (beta times an answer's gain over the reference) of preferred and other
    answers, how often and by how much the preferred one has the larger reward, and the number of pairs.
    """

    targets: tuple[str, ...] = ("labels", "reference")
    form: Literal["dpo", "ipo", "orpo"] = "dpo"
    measured = ("reward_chosen", "reward_rejected", "reward_accuracy", "reward_margin")
    leaves_out = True

    def __init__(self, num_chunks: int = 1, beta: float = 0.1, label_smoothing: float = 0.0):
        super().__init__(num_chunks)
        self.beta, self.label_smoothing = beta, label_smoothing
        self.asked: list[torch.Tensor] | None = None
        """Collects log-probabilities [P, 2] of what is evaluated, while it is a list; the loss is then none."""
        self.sums: torch.Tensor | None = None

    def count(self, batch: Batch) -> int:
        return int(have_labels(batch["labels"].unflatten(0, (-1, 2))).sum())

    def first(self, batch: Batch, rows: int) -> dict[str, torch.Tensor]:
        labels = batch["labels"].clone()
        labels[rows:] = IGNORE_INDEX
        return {**batch, "labels": labels}

    def join_documents(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Leave out padding. Targets keep their shapes, and `places` [1, T] are the indices of the tokens in labels."""
        labels = batch["labels"]
        inputs = {name: x for name, x in batch.items() if name not in self.targets}
        places = torch.arange(labels.numel()).view_as(labels)
        joined = self._join_labelled(inputs | {"labels": labels, "places": places})
        return batch if joined is None else joined | {name: batch[name] for name in self.targets if name in batch}

    def rows(self, hidden: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Return hidden states [P, 2, S, D], labels [P, 2, S] and reference log-probabilities [P, 2].

        Hidden states are 0 for tokens that `join_documents` has left out.
        """
        labels, width = batch["labels"], hidden.shape[-1]
        if "places" in batch:
            empty = hidden.new_zeros(labels.numel(), width)
            hidden = empty.index_copy(0, batch["places"][0], hidden[0]).view(*labels.shape, width)
        hidden, labels = (x.unflatten(0, (-1, 2)) for x in (hidden, labels))
        reference = batch["reference"] if "reference" in batch else labels.new_zeros(2 * len(labels))
        return hidden, labels, reference.unflatten(0, (-1, 2))

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        labels, reference = targets
        tokens = hidden.flatten(0, 2), labels.flatten()
        chosen = choose(tokens[1] != IGNORE_INDEX) if self.may_leave_out(labels) else None
        if chosen is not None:
            tokens = tokens[0].index_select(0, chosen), tokens[1][chosen]
        # A chunk of one pair may still be too large. Compiled, forward and recomputation would save different tensors.
        keeps_pairs = self.num_chunks or torch.compiler.is_compiling()
        num_chunks = 1 if keeps_pairs else self.chunks_of(tokens[0])
        losses = in_recomputed_chunks(head_losses, head, num_chunks, *tokens)
        if chosen is not None:
            losses = losses.new_zeros(labels.numel()).index_copy(0, chosen, losses)
        losses = losses.view(labels.shape)
        log_probs = -losses.sum(-1)  # [P, 2]
        if self.asked is not None:
            self.asked.append(log_probs.detach())
            return log_probs.sum()
        lengths = (labels != IGNORE_INDEX).sum(-1).clamp(min=1)  # [P, 2]
        pair_losses, gained = self.losses(log_probs, reference.to(log_probs.dtype), lengths)
        counts = have_labels(labels)
        if self.training:
            self._note(gained.detach(), counts)
        return pair_losses.where(counts, 0).sum()

    def losses(
        self, log_probs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each pair [P] and the gain of each answer over the reference [P, 2].

        All arguments are [P, 2]: log-probabilities of the model and of the reference, and lengths of the answers in
        tokens.
        """
        gained = log_probs - reference
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
        rewards = self.beta * gained.float().where(counts[:, None], 0)  # selecting pairs would wait for their number
        margins = rewards[:, 0] - rewards[:, 1]
        columns = (rewards[:, 0], rewards[:, 1], margins > 0, margins, counts)
        sums = torch.stack([column.float().sum() for column in columns])
        self.sums = sums if self.sums is None else self.sums + sums


class IPO(Preference):
    """IPO: a squared loss of the difference of mean log-probabilities."""

    form = "ipo"

    def losses(
        self, log_probs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gained = (log_probs - reference) / lengths
        return (gained[:, 0] - gained[:, 1] - 1 / (2 * self.beta)) ** 2, gained


class ORPO(Preference):
    """ORPO: no reference; the gain of an answer is its mean log-probability."""

    targets = ("labels",)
    form = "orpo"

    def losses(
        self, log_probs: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        means = log_probs / lengths
        odds = means - torch.log1p(-means.exp().clamp(max=1 - 1e-6))
        return -means[:, 0] - self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1]), means


def have_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return for each pair, labels [P, 2, S] -> bool [P], whether both answers have labels."""
    return (labels != IGNORE_INDEX).any(-1).all(-1)
