"""Evaluation of language models by the loss of single tokens: log-likelihood of continuations, and loss by position.

Continuations are scored as lm-eval requests them, in batches of similar length. A request is a prompt and a
continuation, both as token ids. A model with a memory reads requests of any length in segments, each from an empty
cache. For other models a request that exceeds the context is truncated on the left.

The loss by position of the tokens in their documents, which are read in order, shows how much a model gains from
distant context.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.losses.objective import IGNORE_INDEX, Objective, cross_entropies

Request = tuple[list[int], list[int]]
"""Ids of the prompt, at least one, and of the continuation."""


class Likelihood(NamedTuple):
    """The log-probability of a continuation, and whether greedy decoding would produce it."""

    log: float
    greedy: bool


class LossByRequest(Objective):
    """Summed cross-entropy that also accumulates, for each request, its loss and its non-greedy tokens.

    `nats` and `mismatches` are float64 [requests]; the batch gives each token's request as `requests` [B, S].
    """

    targets = ("labels", "requests")

    def __init__(self, logits_width: int, num_requests: int, device: torch.device):
        super().__init__(num_chunks=0)
        self.logits_width = logits_width
        self.nats = torch.zeros(num_requests, dtype=torch.float64, device=device)
        self.mismatches = torch.zeros_like(self.nats)

    def rows(self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return hidden states [N, D], labels [N] and request numbers [N] of the continuation tokens."""
        valid = batch["labels"] != IGNORE_INDEX
        return hidden[valid], batch["labels"][valid], batch["requests"][valid]

    def compute_loss(self, head: nn.Module, hidden: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        labels, requests = targets
        logits = head(hidden)
        losses = cross_entropies(logits, labels)
        self.nats.index_add_(0, requests, losses.double())
        self.mismatches.index_add_(0, requests, (logits.argmax(-1) != labels).double())
        return losses.sum()


@torch.no_grad()
def likelihoods(
    model: nn.Module, requests: Sequence[Request], *, seq_len: int, context: int, rows: int
) -> Iterator[tuple[int, Likelihood]]:
    """Yield the index of each request with its likelihood, the longest requests first.

    The model must be in evaluation mode on one device. It reads `seq_len` tokens at a time, at most `context` tokens of
    a request, and `rows` requests in a batch. Raises JobError for a continuation longer than the context.
    """
    for _, continuation in requests:
        if len(continuation) > context:
            remedy = "use a longer context (--training.seq_len) if the model has one, or shorter texts"
            raise JobError(f"a continuation has {len(continuation)} tokens; allowed: {context}; {remedy}")
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        results = _batch(model, [requests[i] for i in numbers], seq_len, context)
        yield from zip(numbers, results, strict=True)


def _batch(model: Any, requests: Sequence[Request], seq_len: int, context: int) -> list[Likelihood]:
    device = next(model.parameters()).device
    texts = [(prompt + continuation)[-context - 1 :] for prompt, continuation in requests]
    lengths = torch.tensor([max(1, len(ids) - 1) for ids in texts], device=device)  # of the inputs
    width = int(lengths.max())
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, (ids, (_, continuation)) in enumerate(zip(texts, requests, strict=True)):
        if continuation:  # an empty continuation has probability 1 and needs no forward
            tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            labels[row, len(ids) - 1 - len(continuation) : len(ids) - 1] = torch.tensor(continuation)
    numbers = torch.arange(len(texts))[:, None].expand_as(tokens)
    batch = {"tokens": tokens, "labels": labels, "requests": numbers}
    before, objective = model.loss, LossByRequest(model.args.vocab_size, len(texts), device)
    model.loss = objective
    if model.memory is not None:
        model.memory.clear()
    try:
        for start in range(0, width, seq_len):
            part = {name: tensor[:, start : start + seq_len].to(device) for name, tensor in batch.items()}
            begins = torch.full_like(lengths, start == 0, dtype=torch.bool)
            model(**part, begins=begins, filled=(lengths - start).clamp(0, part["tokens"].shape[1]))
            if model.memory is not None:
                model.memory.commit()
    finally:
        model.loss = before
    pairs = zip(objective.nats.tolist(), objective.mismatches.tolist(), strict=True)
    return [Likelihood(-nats, mismatches == 0) for nats, mismatches in pairs]


def split_into_requests(ids: list[int], first: int, context: int) -> Iterator[Request]:
    """Split a text that starts with the token `first` into requests; their continuations cover each token once.

    Each has `context` tokens; later ones overlap their predecessors only as far as needed to be full.
    """
    text = [first, *ids]
    for start in range(0, len(ids), context):
        end = min(start + context, len(ids))
        yield text[max(0, end - context) : start + 1], ids[start:end]


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
