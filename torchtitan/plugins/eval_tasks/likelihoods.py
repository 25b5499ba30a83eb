"""The log-likelihood of continuations.

They are scored as lm-eval requests them, in batches of similar length. A request is a prompt and a continuation, both
as token ids. A model with a memory reads requests of any length in segments, each from an empty cache. For other models
a request that exceeds the context is truncated on the left.
"""

from collections.abc import Iterator, Mapping, Sequence
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
