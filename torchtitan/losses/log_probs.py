"""Losses that a user writes as a function of the log-probabilities of the labels, for any plan.

The function gets whole sequences, whatever the plan: neither the vocabulary's shards nor the chunks of the head nor the
sequence's shards of context parallel are visible to it. Whole logits are not offered, because no rank has them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.losses.objective import (
    IGNORE_INDEX,
    Batch,
    Objective,
    cross_entropies,
    entropies,
    head_losses,
    in_recomputed_chunks,
)


class LossError(JobError):
    """A loss function of the user's that cannot be trained with."""


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a loss function: B whole sequences. It is called once for each microbatch."""

    log_probs: torch.Tensor
    """[B, S], log-probability of each label, in float32 or wider; 0 where there is no label. Differentiable."""
    labels: torch.Tensor
    """[B, S], the token that follows each position, or IGNORE_INDEX (-100)."""
    mask: torch.Tensor
    """[B, S] bool, True where there is a label."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The batch's own tensors by name, [B, S, ...] or [B], e.g. advantages."""
    entropy: torch.Tensor | None = None
    """[B, S], entropy of the next token in nats, differentiable, where it was asked for; also where `mask` is False."""


LossFunction = Callable[[LossInputs], torch.Tensor]
"""Returns the sum of the losses of all tokens, a scalar."""


def call(function: LossFunction, inputs: LossInputs) -> torch.Tensor:
    """Return the loss of a microbatch, a scalar. Raise LossError unless it is one that has a gradient."""
    loss, name = function(inputs), getattr(function, "__name__", type(function).__name__)
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
        is_tensor = isinstance(loss, torch.Tensor)
        kind = f"a tensor of shape {list(loss.shape)} and {loss.dtype}" if is_tensor else f"a {type(loss).__name__}"
        raise LossError(f"the loss {name} returns {kind}; return the sum of the losses of all tokens, a scalar tensor")
    if inputs.log_probs.requires_grad and not loss.requires_grad:
        raise LossError(
            f"the loss {name} does not depend on log_probs, so nothing can learn from it; compute with them"
        )
    return loss


def try_function(function: LossFunction, batch: Batch, columns: Sequence[str], with_entropy: bool) -> None:
    """Try a loss function on log-probabilities that are made up. Raise LossError if it fails or returns a mean.

    The sum over twice the same samples is twice as large, a mean is not. Every rank can try it, before the model runs,
    so that no rank waits for another one that has raised.
    """
    name = getattr(function, "__name__", type(function).__name__)
    labels = batch["labels"]
    log_probs = torch.linspace(-0.5, -2.5, labels.numel(), device=labels.device).view(labels.shape)

    def loss_of(copies: int) -> float:
        repeated = {key: torch.cat([batch[key]] * copies) for key in ("labels", *columns)}
        mask = repeated["labels"] != IGNORE_INDEX
        made_up = (torch.cat([log_probs] * copies) * mask).requires_grad_()
        columns_of_copies = {key: repeated[key] for key in columns}
        entropy = torch.ones_like(made_up) if with_entropy else None
        return float(call(function, LossInputs(made_up, repeated["labels"], mask, columns_of_copies, entropy)).detach())

    try:
        with torch.enable_grad():
            single, double = loss_of(1), loss_of(2)
    except LossError:
        raise
    except Exception as error:
        raise LossError(f"the loss {name} raised {type(error).__name__}: {error}") from error
    if abs(double - single) < abs(double - 2 * single) - 1e-6 * abs(single):
        raise LossError(
            f"the loss {name} looks like a mean: twice the same samples have {double:.4g} and not 2 x {single:.4g}; "
            "return the sum over tokens, which forward_backward divides by the number of labels of all ranks, or by "
            "`normalizer`"
        )


class LogProbObjective(Objective):
    """A loss function of log-probabilities. Without one it collects them in `collected`, [B, S] of each microbatch.

    `gather`: whole sequences from a context-parallel rank's tokens, [B, s, ...] -> [B, S, ...]. `cp`: number of these
    ranks, which all compute the same loss and have an equal share of it.
    """

    def __init__(
        self,
        function: LossFunction | None,
        gather: Callable[[torch.Tensor], torch.Tensor],
        cp: int,
        columns: Sequence[str] = (),
        with_entropy: bool = False,
        num_chunks: int = 1,
    ):
        super().__init__(num_chunks)
        self.function, self.gather, self.cp, self.with_entropy = function, gather, cp, with_entropy
        self.columns = tuple(columns)
        self.targets = ("labels", *self.columns)
        self.collected: list[torch.Tensor] = []

    @torch.compiler.disable
    def forward(self, hidden: torch.Tensor, head: nn.Module, batch: Batch) -> torch.Tensor:
        """Return this rank's share of the summed loss, a scalar, of hidden states [B, S, D]."""
        labels = batch["labels"]
        rows = hidden.flatten(0, 1), labels.flatten()
        function = _losses_and_entropies if self.with_entropy else head_losses
        measured = in_recomputed_chunks(function, head, self.chunks_of(rows[0]), *rows)
        losses, *entropy = measured.unflatten(-1, labels.shape).view(-1, *labels.shape).unbind()
        log_probs = self.gather(-losses)
        if self.function is None:
            self.collected.append(log_probs.detach())
            return log_probs.sum() / self.cp
        labels = self.gather(labels)
        gathered = {name: self.gather(x) if (x := batch[name]).dim() > 1 else x for name in self.columns}
        inputs = LossInputs(log_probs, labels, labels != IGNORE_INDEX, gathered, *map(self.gather, entropy))
        return call(self.function, inputs) / self.cp


def _losses_and_entropies(head: nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return cross-entropies and entropies [2, N] of hidden states [N, D] and labels [N]."""
    logits = head(hidden)
    return torch.stack((cross_entropies(logits, labels), entropies(logits)))
