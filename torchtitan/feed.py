"""What the model reads: a step's microbatches, agreed on by all ranks, on the device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from torchtitan import distributed
from torchtitan.classes import ClassCrossEntropy, measures
from torchtitan.datasets.samples import dealt
from torchtitan.datasets.sources import DataError
from torchtitan.loss import Objective
from torchtitan.masking import HELD_OUT, Masking
from torchtitan.models.dropout import token_keys
from torchtitan.parallelisms.parallel_dims import ParallelDims

Batch = dict[str, torch.Tensor]


class References(Protocol):
    def add(self, batch: Batch) -> Batch: ...


class PeerStopped(RuntimeError):
    """Another rank cannot go on and has said why; this one stops with it."""


def take(batches: Iterator[Batch], count: int) -> tuple[list[Batch], DataError | None]:
    """The next batches, or why there are none: what one rank alone cannot raise, as the others would wait for it."""
    try:
        taken = list(islice(batches, count))
    except DataError as error:
        return [], error
    return taken, None if len(taken) == count else DataError(f"the data ended after {len(taken)} of {count} batches")


class Feed:
    """Of one rank. `document_mask`: whether attention is kept inside documents. `seed`: of dropout, where there is any.
    `together`: neighbouring samples that are dealt out to a rank. `more`: of a batch, what a model reads beside these.
    `masking`: of words that are to be found. `num_classes`: that are told apart and counted.
    """

    def __init__(
        self,
        objective: Objective,
        dims: ParallelDims,
        dp_rank: int,
        device: torch.device,
        document_mask: bool,
        seed: int | None,
        together: int = 1,
        more: Sequence[str] = (),
        masking: Masking | None = None,
        num_classes: int = 0,
    ):
        self.objective, self.dims, self.dp_rank, self.device, self.seed = objective, dims, dp_rank, device, seed
        self.together, self.masking, self.num_classes = together, masking, num_classes
        self.references: References | None = None
        """What else a batch is given, by the rows in it."""
        self.share = 1.0
        """Of the valid tokens that were agreed on last, those of this data-parallel rank."""
        # positions restart with each document: not without a mask
        self.names = ("tokens", *objective.targets, *(("positions", "document_ids") if document_mask else ()), *more)

    def agree(self, taken: Sequence[Batch], failure: DataError | None, stop: bool, what: str) -> tuple[int, bool]:
        """The valid tokens in what all ranks together have taken, and whether anybody was asked to stop.

        The same small reduction says whether somebody has no data, so that all ranks stop at the same step: with the
        failure, or PeerStopped, which names `what` is missing.
        """
        own = sum(map(self.objective.count, taken))
        valid, failed, stopping = distributed.sum_over_ranks(own, failure is not None, stop)
        if failed:
            raise failure or PeerStopped(f"another rank has no {what}")
        valid = max(valid // self.dims.readers, 1)
        self.share = max(own, 1) / valid
        return valid, bool(stopping)

    def take(
        self, batches: Iterator[Batch], count: int, step: int | str = HELD_OUT
    ) -> tuple[list[Batch], DataError | None]:
        """As `take`, of a step; where the task hides words, they are hidden, and pairs get their reference."""
        taken, failure = take(batches, count)
        if self.references is not None:
            try:
                taken = [self.references.add(batch) for batch in taken]
            except DataError as error:  # which this rank alone may meet
                return [], error
        if self.masking is not None:
            numbered = enumerate(taken)
            taken = [self.masking.hide(batch, self.numbers(i, len(batch["tokens"])), step) for i, batch in numbered]
        return taken, failure

    def measured(self, parts: Iterable[nn.Module]) -> Mapping[str, float]:
        """Of what these parts of the model have evaluated, by name in metrics, over all ranks, which all call it."""
        if not self.num_classes:
            return {}
        counts = [part.loss.take_counts() for part in parts if isinstance(part.loss, ClassCrossEntropy)]
        here = [told for told in counts if told is not None]  # of a pipeline, the last stage has them
        own = sum(here).tolist() if here else [0] * self.num_classes**2
        told = distributed.sum_over_ranks(*own)
        return measures(torch.tensor(told) // self.dims.tp)

    def numbers(self, index: int, size: int, device: torch.device | None = None) -> torch.Tensor:
        """[size], of the samples of this rank's batch number `index` of a step, among all of the step's."""
        own = torch.arange(index * size, (index + 1) * size, device=device)
        return dealt(own, self.dp_rank, self.dims.dp, self.together)

    def to_device(self, batch: Batch) -> Batch:
        """What the model reads of a batch."""
        return {name: batch[name].to(self.device, non_blocking=True) for name in self.names}

    def to_train_on(self, batch: Batch, index: int, step: int) -> Batch:
        """This rank's batch number `index` of a step, with what dropout draws by."""
        batch = self.to_device(batch)
        if self.seed is None:
            return batch
        size, length = batch["tokens"].shape
        samples = self.numbers(index, size, self.device)
        return batch | {"keys": token_keys(self.seed, step, samples, length)}
