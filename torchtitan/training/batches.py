"""Prepare a step's microbatches: agree on them with all ranks and move them to the device."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

import torch
from torch import nn

from torchtitan.assembly.parts import ModelBuilder
from torchtitan.core.machine_errors import MachineError
from torchtitan.datasets.loader import Loader
from torchtitan.datasets.position import Position
from torchtitan.datasets.samples import global_sample_numbers
from torchtitan.datasets.segments import SegmentLoader, SegmentPosition
from torchtitan.datasets.sources import DataError
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.losses.classification import ClassCrossEntropy, classification_metrics
from torchtitan.losses.masked_lm import HELD_OUT, Masking
from torchtitan.losses.objective import Objective
from torchtitan.losses.tasks import TaskSpec, mask_token
from torchtitan.models.decoder import MEMORY_INPUTS
from torchtitan.models.dropout import record_lengths, token_keys
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed

Batch = dict[str, torch.Tensor]


class ReferenceLookup(Protocol):
    def add(self, batch: Batch) -> Batch: ...


MACHINE_FAILURE = 2**20
"""Added to the number of ranks without data for each whose machine cannot read them; there are fewer ranks."""


class UnreadableData(MachineError):
    """The machine of a rank cannot read its data. Raised on all ranks."""


class PeerStopped(RuntimeError):
    """Another rank cannot continue and has logged the reason; this rank stops with it."""


def batch_keys(objective: Objective, document_mask: bool, extra_keys: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the batch tensors that a model with this objective reads."""
    # positions restart with each document, so they are only right with a mask
    return ("tokens", *objective.targets, *(("positions", "document_ids") if document_mask else ()), *extra_keys)


@dataclass(frozen=True)
class BatchSpec:
    """The contents of a job's batches in addition to tokens and targets."""

    document_mask: bool = False
    """Attention stays within documents."""
    seed: int | None = None
    """Seed of dropout and noise; None if the model has neither."""
    has_noise: bool = False
    group_size: int = 1
    """Number of adjacent samples kept on one rank."""
    extra_keys: tuple[str, ...] = ()
    """Further batch tensors passed to the model."""
    masking: Masking | None = None
    """Masks words for masked language modelling."""
    num_classes: int = 0
    """Number of classes to count predictions of; 0 for other tasks."""
    varies_in_length: bool = False
    """Batches are padded to their longest sample, not to training.seq_len."""


class BatchPreparer:
    """Prepare one rank's batches and agree on them with the other ranks."""

    def __init__(
        self, objective: Objective, dims: ParallelDims, dp_rank: int, device: torch.device, spec: BatchSpec
    ) -> None:
        self.objective, self.dims, self.dp_rank, self.device, self.spec = objective, dims, dp_rank, device, spec
        self.references: ReferenceLookup | None = None
        """Adds the reference log-probabilities of preference pairs to batches."""
        self.valid_share = 1.0
        """This data-parallel rank's share of the valid tokens agreed on last."""
        self.tokens_read = 0
        """Tokens agreed on last, of all ranks, including padding."""
        self.keys = batch_keys(objective, spec.document_mask, spec.extra_keys)

    def agree(
        self, batches: Sequence[Batch], failure: DataError | MachineError | None, stop: bool, label: str
    ) -> tuple[int, bool]:
        """Return the valid tokens in the batches of all ranks, and True if any rank was asked to stop.

        Waits for all ranks. Raises as `PendingBatches.wait` does.
        """
        pending = PendingBatches(self, batches, failure, label)
        pending.begin(stop)
        return pending.wait(), pending.stopping

    def trained_tokens(self, samples: int, seq_len: int) -> int:
        """Return the tokens of a step of `samples` samples, which all ranks have agreed on."""
        return self.tokens_read if self.spec.varies_in_length else samples * seq_len

    def fetch(
        self, batches: Iterator[Batch], count: int, step: int | str = HELD_OUT
    ) -> tuple[list[Batch], DataError | MachineError | None]:
        """Return the next `count` batches of a step with masks and references, or the error that prevents it.

        The error is returned and not raised, because the other ranks would wait for a rank that raises alone.
        """
        try:
            fetched = list(islice(batches, count))
            if len(fetched) < count:
                return fetched, DataError(f"the data ended after {len(fetched)} of {count} batches")
            if self.references is not None:
                fetched = [self.references.add(batch) for batch in fetched]
        except (DataError, MachineError) as error:
            return [], error
        if (masking := self.spec.masking) is not None:
            numbers = [self.sample_numbers(index, len(batch["tokens"])) for index, batch in enumerate(fetched)]
            fetched = [
                masking.mask_tokens(batch, samples, step) for batch, samples in zip(fetched, numbers, strict=True)
            ]
        return fetched, None

    def task_metrics(self, parts: Iterable[nn.Module]) -> Mapping[str, float]:
        """Return the classification metrics of the batches that these model parts have evaluated, over all ranks.

        All ranks call it. Other tasks have no metrics besides the loss.
        """
        num_classes = self.spec.num_classes
        if not num_classes:
            return {}
        counts = [part.loss.take_confusion() for part in parts if isinstance(part.loss, ClassCrossEntropy)]
        local_counts = [count for count in counts if count is not None]  # only the last pipeline stage has any
        totals = sum(local_counts).tolist() if local_counts else [0] * num_classes**2
        return classification_metrics(torch.tensor(distributed.sum_ints(*totals)) // self.dims.tp)

    def sample_numbers(self, index: int, size: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the numbers [size], within the step, of the samples of this rank's batch `index`."""
        local_numbers = torch.arange(index * size, (index + 1) * size, device=device)
        return global_sample_numbers(local_numbers, self.dp_rank, self.dims.dp, self.spec.group_size)

    def to_device(self, batch: Batch) -> Batch:
        """Return the tensors that the model reads, of the shapes they have in `batch`, on the device."""
        return {name: batch[name].to(self.device, non_blocking=True) for name in self.keys}

    def to_device_for_training(self, batch: Batch, index: int, step: int) -> Batch:
        """Return this rank's batch `index` of a step on the device, with the keys that dropout and noise draw by."""
        return self.with_random_keys(self.to_device(batch), index, step)

    def with_random_keys(self, batch: Batch, index: int, step: int) -> Batch:
        """Add the keys that dropout and noise draw by to this rank's batch `index` of a step, on the device."""
        if self.spec.seed is None:
            return batch
        size, length = batch["tokens"].shape
        samples = self.sample_numbers(index, size, self.device)
        lengths = {"lengths": record_lengths(batch)} if self.spec.has_noise else {}
        return batch | {"keys": token_keys(self.spec.seed, step, samples, length)} | lengths


class PendingBatches:
    """One rank's batches, or the error in their place, and the agreement of all ranks on them.

    The agreement is one small reduction that runs from `begin` until its result is read. It also carries two flags: a
    rank has no more data, and a rank was asked to stop. So all ranks stop at the same step.
    """

    def __init__(
        self,
        preparer: BatchPreparer,
        batches: Sequence[Batch],
        failure: DataError | MachineError | None,
        label: str = "data",
    ) -> None:
        self.preparer, self.batches, self.failure, self.label = preparer, batches, failure, label
        self.local_valid_tokens = sum(map(preparer.objective.count, batches))
        self.read_sums: Callable[[], list[int]] | None = None

    def begin(self, stop: bool) -> None:
        """Begin the reduction; all ranks begin theirs in the same order. `stop`: this rank was asked to stop."""
        tokens = sum(batch["labels"].numel() for batch in self.batches)
        failed = 0 if self.failure is None else 1 + MACHINE_FAILURE * isinstance(self.failure, MachineError)
        self.read_sums = distributed.begin_sum_ints(self.local_valid_tokens, tokens, failed, stop)

    @cached_property
    def sums(self) -> list[int]:
        """Valid tokens, all tokens, ranks without data (MACHINE_FAILURE), ranks asked to stop. Waits for all."""
        assert self.read_sums is not None
        return self.read_sums()

    @property
    def stopping(self) -> bool:
        return bool(self.sums[3])

    def wait(self) -> int:
        """Return the valid tokens of all ranks, which may be 0, and note this rank's share of them.

        Raises this rank's failure, or PeerStopped, naming the missing data, if another rank has a failure. If the
        machine of any rank cannot read its data, all raise UnreadableData.
        """
        valid_tokens, tokens, failed_ranks, _ = self.sums
        if failed_ranks >= MACHINE_FAILURE:
            if isinstance(self.failure, MachineError):
                raise UnreadableData(str(self.failure)) from self.failure
            raise UnreadableData(f"another rank cannot read its {self.label}", on_all_ranks=True)
        if failed_ranks:
            raise self.failure or PeerStopped(f"another rank has no {self.label}")
        readers = self.preparer.dims.model_parallel_size
        valid_tokens, self.preparer.tokens_read = valid_tokens // readers, tokens // readers
        self.preparer.valid_share = max(self.local_valid_tokens, 1) / max(valid_tokens, 1)
        return valid_tokens


class Prefetcher:
    """Fetch batches one step ahead, so that ranks agree on a step while the one before it is trained.

    `count`: batches of a step on this rank. `batches` and `position` (the data position after them) belong to the
    current step.
    """

    batches: Sequence[Batch]
    position: Position | SegmentPosition

    def __init__(self, preparer: BatchPreparer, count: int, steps: int):
        self.preparer, self.count, self.steps = preparer, count, steps
        self._next: tuple[PendingBatches, Position | SegmentPosition] | None = None

    def fetch(self, batches: Iterator[Batch], position: Callable[[], Position | SegmentPosition], step: int) -> None:
        """Fetch the batches of the step after `step`, unless that is done, and of the step after it."""
        self._current, self.position = self._next or (self._fetch(batches, step), position())
        self.batches, self._next = self._current.batches, (self._fetch(batches, step + 1), position())

    def _fetch(self, batches: Iterator[Batch], step: int) -> PendingBatches:
        count = self.count if step < self.steps else 0
        return PendingBatches(self.preparer, *self.preparer.fetch(batches, count, step))

    def agree(self, stop: bool) -> int:
        """Return the valid tokens of all ranks in the current step; raises as `PendingBatches.wait` does.

        Begins the agreement on the next step, which also tells the other ranks whether this one was asked to stop.
        """
        assert self._next is not None
        if self._current.read_sums is None:
            self._current.begin(stop)
        valid_tokens = self._current.wait()
        self._next[0].begin(stop)
        return valid_tokens

    @property
    def stopping(self) -> bool:
        """True if any rank was asked to stop before the current step. Waits for all ranks."""
        assert self._next is not None
        return self._next[0].stopping

    def drop(self) -> bool:
        """Drop the prefetched step and finish its agreement. Return True if any rank was asked to stop."""
        has_begun = self._next is not None and self._next[0].read_sums is not None
        stopping, self._next = has_begun and self.stopping, None
        return stopping


def batch_preparer(
    job: ResolvedJob, tokenizer: Tokenizer, dp_rank: int, device: torch.device, draws: bool
) -> BatchPreparer:
    """Build the preparer of one rank's batches. `draws`: the model has dropout or noise."""
    task, config = job.model.spec, job.config
    spec = BatchSpec(
        document_mask=job.data.isolates_documents,
        seed=config.debug.seed if draws else None,
        has_noise=config.training.neftune_alpha > 0,
        group_size=task.rows_per_sample,
        extra_keys=_stream_keys(task, job.layout.pp),
        masking=masking(job, tokenizer) if task.labels == "same" else None,
        num_classes=job.model.args.n_classes if task.labels == "classes" else 0,
        varies_in_length=job.data.padding_multiple > 0,
    )
    return BatchPreparer(ModelBuilder(job).objective(), job.layout.dims, dp_rank, device, spec)


def _stream_keys(task: TaskSpec, stages: int) -> tuple[str, ...]:
    """Return the further batch tensors that a model with a memory reads (MEMORY_INPUTS); none for other tasks."""
    if not task.streams_documents:
        return ()
    return MEMORY_INPUTS if stages > 1 else MEMORY_INPUTS[1:]  # reading a lane's number synchronizes with the device


def zero_batch(job: ResolvedJob, draws: bool) -> Batch:
    """Return a training batch of zeros on the CPU, [B, S] or [B], with all tensors that a rank's model reads."""
    training, rows = job.config.training, job.layout.batch_rows()
    extra_keys = _stream_keys(job.model.spec, job.layout.pp) + ("keys",) * draws
    extra_keys += ("lengths",) * (training.neftune_alpha > 0)
    names = batch_keys(ModelBuilder(job).objective(), job.data.isolates_documents, extra_keys)
    row_dtypes = {"begins": torch.bool, "reference": torch.float32, "lanes": torch.int64, "filled": torch.int64}
    shapes = {name: (rows,) if name in row_dtypes else (rows, training.seq_len) for name in names}
    return {name: torch.zeros(shape, dtype=row_dtypes.get(name, torch.int64)) for name, shape in shapes.items()}


def masking(job: ResolvedJob, tokenizer: Tokenizer) -> Masking:
    """Build the masking of words; special tokens are never masked."""
    task, seed = job.config.task, job.config.debug.seed
    record_ends = [id_ for id_ in (tokenizer.bos_id, tokenizer.eos_id) if id_ is not None]
    unmasked = {*tokenizer.special_tokens.values(), *record_ends}
    mask_id = tokenizer.special_tokens[mask_token(tokenizer.special_tokens, task.mask_token)]
    pad_id = getattr(job.model.args, "pad_id", None)
    return Masking(seed, task.mask_share, mask_id, tokenizer.vocab_size, tuple(sorted(unmasked)), pad_id)


def prepare_adapter(
    loader: Loader | SegmentLoader,
    model: ParallelModel,
    preparer: BatchPreparer,
    first_segments: Callable[[int], Iterable[Batch]] | None,
) -> None:
    """Let an adapter with state read training data before the next step.

    After a resume or a rollback these are the documents that the rows are in. An adapter that is not trained yet also
    reads `first_segments`, which maps a number of segments to the batches that hold them; None for a trained one.
    """

    def replay(tokens: int) -> Iterator[Batch]:
        if isinstance(loader, SegmentLoader) and loader.resumed:
            yield from map(preparer.to_device, loader.replay(tokens))

    def calibration(count: int) -> Iterator[Batch]:
        assert first_segments is not None
        yield from map(preparer.to_device, first_segments(count))

    model.prepare_adapter(replay, None if first_segments is None else calibration)
