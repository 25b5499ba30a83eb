"""What the model reads: a step's microbatches, agreed on by all ranks, on the device."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from torchtitan.build.data import documents, documents_apart, multiple_of
from torchtitan.build.parts import model_args, objective
from torchtitan.config.batch_shape import batch_rows
from torchtitan.config.job import JobConfig
from torchtitan.datasets.loader import Loader
from torchtitan.datasets.position import Position
from torchtitan.datasets.samples import global_sample_numbers
from torchtitan.datasets.segments import HeldOutSegments, SegmentLoader, SegmentPosition
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.losses.classification import ClassCrossEntropy, measures
from torchtitan.losses.masked_lm import HELD_OUT, Masking
from torchtitan.losses.objective import Objective
from torchtitan.losses.tasks import mask_token, task_of
from torchtitan.models.decoder import LANES
from torchtitan.models.dropout import record_lengths, token_keys
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed

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


def names_read(objective: Objective, document_mask: bool, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Of a batch, what a model under this objective reads."""
    # positions restart with each document: not without a mask
    return ("tokens", *objective.targets, *(("positions", "document_ids") if document_mask else ()), *more)


class Feed:
    """Of one rank. `document_mask`: whether attention is kept inside documents. `seed`: of dropout and noise, where
    there is any, and `noisy` whether there is noise. `together`: neighbouring samples that are dealt out to a rank.
    `more`: of a batch, what a model reads beside these. `masking`: of words that are to be found. `num_classes`: that
    are told apart and counted. `shortened`: whether batches have only as much padding as their longest sample wants.
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
        noisy: bool = False,
        shortened: bool = False,
    ):
        self.objective, self.dims, self.dp_rank, self.device, self.seed = objective, dims, dp_rank, device, seed
        self.together, self.masking, self.num_classes, self.noisy = together, masking, num_classes, noisy
        self.shortened = shortened
        self.references: References | None = None
        """What else a batch is given, by the rows in it."""
        self.share = 1.0
        """Of the valid tokens that were agreed on last, those of this data-parallel rank."""
        self.read = 0
        """Tokens of what was agreed on last, of all ranks, with padding."""
        self.names = names_read(objective, document_mask, more)

    def agree(self, taken: Sequence[Batch], failure: DataError | None, stop: bool, what: str) -> tuple[int, bool]:
        """The valid tokens in what all ranks together have taken, and whether anybody was asked to stop; at once.
        Raises as `Taken.settle`.
        """
        whole = Taken(self, taken, failure, what=what)
        whole.begin(stop)
        return whole.settle(), whole.stopping

    def tokens_of(self, samples: int, seq_len: int) -> int:
        """What so many samples of a step, which has been agreed on, count for: all of seq_len, or, where batches are of
        other lengths, what ranks have read."""
        return self.read if self.shortened else samples * seq_len

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
        return global_sample_numbers(own, self.dp_rank, self.dims.dp, self.together)

    def to_device(self, batch: Batch) -> Batch:
        """What the model reads of a batch."""
        return {name: batch[name].to(self.device, non_blocking=True) for name in self.names}

    def to_train_on(self, batch: Batch, index: int, step: int) -> Batch:
        """This rank's batch number `index` of a step, with what dropout and noise draw by."""
        batch = self.to_device(batch)
        if self.seed is None:
            return batch
        size, length = batch["tokens"].shape
        samples = self.numbers(index, size, self.device)
        lengths = {"lengths": record_lengths(batch)} if self.noisy else {}
        return batch | {"keys": token_keys(self.seed, step, samples, length)} | lengths


class Taken:
    """What this rank has taken, or why it has not, on which all ranks agree while the host does other things.

    One reduction of few integers is on its way from `begin` until somebody asks for what it brings. The same says
    whether somebody has no data, so that all ranks stop at the same step, and whether anybody was asked to stop.
    """

    def __init__(self, feed: Feed, batches: Sequence[Batch], failure: DataError | None, what: str = "data"):
        self.feed, self.batches, self.failure, self.what = feed, batches, failure, what
        self.own = sum(map(feed.objective.count, batches))
        self.answer: Callable[[], list[int]] | None = None

    def begin(self, stop: bool) -> None:
        """Tell all ranks of this, which begin theirs in the same order; and whether this one was asked to stop."""
        read = sum(batch["labels"].numel() for batch in self.batches)
        self.answer = distributed.begin_sum(self.own, read, self.failure is not None, stop)

    @cached_property
    def sums(self) -> list[int]:
        """Valid tokens, all tokens, ranks without data, ranks that were asked to stop. Waits for all ranks."""
        assert self.answer is not None
        return self.answer()

    @property
    def stopping(self) -> bool:
        return bool(self.sums[3])

    def settle(self) -> int:
        """The valid tokens of all ranks, of which the feed tells its share from now on. Raises the failure, or
        PeerStopped, which names what is missing.
        """
        valid, read, failed, _ = self.sums
        if failed:
            raise self.failure or PeerStopped(f"another rank has no {self.what}")
        readers = self.feed.dims.readers
        valid, self.feed.read = max(valid // readers, 1), read // readers
        self.feed.share = max(self.own, 1) / valid
        return valid


class Ahead:
    """Steps' batches, taken a step ahead: all ranks agree on a step while the one before it is trained.

    `count` on this rank of each of `steps`. `batches` and `position`, behind the last of them, are of the step under
    way.
    """

    batches: Sequence[Batch]
    position: Position | SegmentPosition

    def __init__(self, feed: Feed, count: int, steps: int):
        self.feed, self.count, self.steps = feed, count, steps
        self._next: tuple[Taken, Position | SegmentPosition] | None = None

    def take(self, batches: Iterator[Batch], position: Callable[[], Position | SegmentPosition], step: int) -> None:
        """Those of the step after `step`, unless they are taken, and of the one after it."""
        self._now, self.position = self._next or (self._taken(batches, step), position())
        self.batches, self._next = self._now.batches, (self._taken(batches, step + 1), position())

    def _taken(self, batches: Iterator[Batch], step: int) -> Taken:
        return Taken(self.feed, *self.feed.take(batches, self.count if step < self.steps else 0, step))

    def agree(self, stop: bool) -> int:
        """The valid tokens of all ranks in the step under way; raises as `Taken.settle`. From now on ranks tell one
        another of the next, and whether they were asked to stop.
        """
        assert self._next is not None
        if self._now.answer is None:
            self._now.begin(stop)
        valid = self._now.settle()
        self._next[0].begin(stop)
        return valid

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop before the step under way. Waits for all ranks."""
        assert self._next is not None
        return self._next[0].stopping

    def drop(self) -> bool:
        """The steps to come are others. Nothing is under way any more afterwards; whether any rank was asked to stop
        before.
        """
        begun = self._next is not None and self._next[0].answer is not None
        stopping, self._next = begun and self.stopping, None
        return stopping


def feed(
    config: JobConfig, vocabulary: Tokenizer, plan: ParallelDims, dp_rank: int, device: torch.device, draws: bool
) -> Feed:
    """What the model of a rank reads. `draws`: whether it has dropout or noise."""
    task = task_of(config)
    return Feed(
        objective(config),
        plan,
        dp_rank,
        device,
        documents_apart(config),
        seed=config.debug.seed if draws else None,
        together=task.rows_per_sample,
        more=_of_lanes(config, plan),
        masking=masking(config, vocabulary) if task.labels == "same" else None,
        num_classes=model_args(config).n_classes if task.labels == "classes" else 0,
        noisy=config.training.neftune_alpha > 0,
        shortened=multiple_of(config) > 0,
    )


def _of_lanes(config: JobConfig, plan: ParallelDims) -> tuple[str, ...]:
    if not task_of(config).streams_documents:
        return ()
    return LANES if plan.pp > 1 else LANES[1:]  # whose number the host would wait for


def batch_without_values(config: JobConfig, plan: ParallelDims, draws: bool) -> Batch:
    """What the model of a rank reads of a batch to train on, on the CPU and all zeros."""
    length = config.training.seq_len
    drawn_by = ["keys"] * draws + ["lengths"] * (config.training.neftune_alpha > 0)
    names = names_read(objective(config), documents_apart(config), (*_of_lanes(config, plan), *drawn_by))
    of_rows = {"begins": torch.bool, "reference": torch.float32} | dict.fromkeys(("lanes", "filled"), torch.int64)
    shapes = {name: (batch_rows(config),) if name in of_rows else (batch_rows(config), length) for name in names}
    return {name: torch.zeros(shape, dtype=of_rows.get(name, torch.int64)) for name, shape in shapes.items()}


def masking(config: JobConfig, vocabulary: Tokenizer) -> Masking:
    """How words are hidden; never those that begin or end texts, or have another meaning."""
    ends = [id_ for id_ in (vocabulary.bos_id, vocabulary.eos_id) if id_ is not None]
    apart = {*vocabulary.special_tokens.values(), *ends}
    mask_id = vocabulary.special_tokens[mask_token(vocabulary.special_tokens, config.task.mask_token)]
    pad_id = getattr(model_args(config), "pad_id", None)
    return Masking(
        config.debug.seed, config.task.mask_share, mask_id, vocabulary.vocab_size, tuple(sorted(apart)), pad_id
    )


def prepare_adapter(
    config: JobConfig,
    plan: ParallelDims,
    dp_rank: int,
    loader: Loader | SegmentLoader,
    model: ParallelModel,
    reads: Feed,
    is_fresh: bool = False,
) -> None:
    """Let an adapter with state read training data before the next step.

    After a resume or a rollback these are the documents that the rows are in. If the adapter `is_fresh`, they are also
    the first segments of the training data, the same for any number of ranks.
    """

    def replay(tokens: int) -> Iterator[Batch]:
        if isinstance(loader, SegmentLoader) and loader.resumed:
            yield from map(reads.to_device, loader.again(tokens))

    def first_segments(count: int) -> Iterator[Batch]:
        how = dict(seq_len=config.training.seq_len, rows=batch_rows(config), rank=dp_rank, ranks=plan.dp)
        yield from map(reads.to_device, HeldOutSegments(documents(config, "training"), count, **how))

    model.prepare_adapter(replay, first_segments if is_fresh else None)
