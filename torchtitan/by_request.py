"""How likely a model finds texts behind others, as benchmarks ask it: of each request, in batches of about one length.

A request is ids that are given and ids behind them that are told. A model with a memory reads requests of any length in
segments, each from an empty cache; of others a request has to fit the context, and loses its beginning where it does
not.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtitan.errors import JobError
from torchtitan.loss import IGNORE_INDEX, Objective, auto_chunks, cross_entropies

Request = tuple[list[int], list[int]]
"""Ids that are given, at least one, and those that are told behind them."""


class Likelihood(NamedTuple):
    """Of what is told: the logarithm of its probability, and whether each of its tokens is the likeliest one."""

    log: float
    greedy: bool


class LossByRequest(Objective):
    """The sum of the losses of tokens, as SummedCrossEntropy has it; `nats` and `missed`, float64 [requests], have
    grown by those of each token's request, whose number is in `requests` [B, S], and by those of its tokens that are
    not the likeliest.
    """

    targets = ("labels", "requests")

    def __init__(self, num_chunks: int, num_requests: int, device: torch.device):
        super().__init__(num_chunks)
        self.nats = torch.zeros(num_requests, dtype=torch.float64, device=device)
        self.missed = torch.zeros_like(self.nats)

    def rows(self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Those that are told, [N, D], [N], [N]: most of a request is only read."""
        told = batch["labels"] != IGNORE_INDEX
        return hidden[told], batch["labels"][told], batch["requests"][told]

    def loss_of(self, head: nn.Module, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        labels, requests = others
        logits = head(hidden)
        losses = cross_entropies(logits, labels)
        self.nats.index_add_(0, requests, losses.double())
        self.missed.index_add_(0, requests, (logits.argmax(-1) != labels).double())
        return losses.sum()


@torch.no_grad()
def likelihoods(
    model: nn.Module, requests: Sequence[Request], *, seq_len: int, context: int, rows: int
) -> Iterator[tuple[int, Likelihood]]:
    """The number of each request with what is found, the longest first, of a model in evaluation on one device:
    `seq_len` tokens at once, `context` of them together at most, `rows` requests in a batch. JobError where more is
    told than the context has tokens.
    """
    for _, told in requests:
        if len(told) > context:
            remedy = "give a longer context, --training.seq_len, where the model has one, or shorter texts"
            raise JobError(f"a text of {len(told)} tokens is asked for behind another; allowed: {context}; {remedy}")
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        found = _batch(model, [requests[i] for i in numbers], seq_len, context)
        yield from zip(numbers, found, strict=True)


def _batch(model: Any, requests: Sequence[Request], seq_len: int, context: int) -> list[Likelihood]:
    device = next(model.parameters()).device
    whole = [(given + told)[-context - 1 :] for given, told in requests]
    lengths = torch.tensor([max(1, len(ids) - 1) for ids in whole], device=device)  # of what is read
    width = int(lengths.max())
    tokens = torch.zeros(len(whole), width, dtype=torch.long)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, (ids, (_, told)) in enumerate(zip(whole, requests, strict=True)):
        if told:  # nothing is certain, and needs no reading
            tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
            labels[row, len(ids) - 1 - len(told) : len(ids) - 1] = torch.tensor(told)
    numbers = torch.arange(len(whole))[:, None].expand_as(tokens)
    batch = {"tokens": tokens, "labels": labels, "requests": numbers}
    chunks = auto_chunks(len(whole) * min(width, seq_len), model.args.vocab_size)
    before, objective = model.loss, LossByRequest(chunks, len(whole), device)
    model.loss = objective
    if model.memory is not None:
        model.memory.forget()
    try:
        for start in range(0, width, seq_len):
            part = {name: each[:, start : start + seq_len].to(device) for name, each in batch.items()}
            begins = torch.full_like(lengths, start == 0, dtype=torch.bool)
            model(**part, begins=begins, filled=(lengths - start).clamp(0, part["tokens"].shape[1]))
            if model.memory is not None:
                model.memory.commit()
    finally:
        model.loss = before
    pairs = zip(objective.nats.tolist(), objective.missed.tolist(), strict=True)
    return [Likelihood(-nats, missed == 0) for nats, missed in pairs]


def windows(ids: list[int], first: int, context: int) -> Iterator[Request]:
    """A text, behind the token `first`, as requests that tell each of its tokens once: of `context` tokens, of which
    later ones overlap with those before only as far as they have to in order to be full.
    """
    whole = [first, *ids]
    for start in range(0, len(ids), context):
        end = min(start + context, len(ids))
        yield whole[max(0, end - context) : start + 1], ids[start:end]
