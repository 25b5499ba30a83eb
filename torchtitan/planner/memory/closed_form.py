"""The memory of a rank by formula, in about a millisecond and without torch, for a search over many plans.

A step has a few moments that may need the most memory: the loss, the backward of some layers or, in a pipeline, of its
stages, the reductions of FSDP's units, and the optimizer's step. In each the formula adds up the tensors that a
rehearsal counts (planner/rehearsal.py): shards of parameters, gradients and optimizer state, gathered parameters with
FSDP's buffers, activations by recompute mode, and logits. `scripts/compare_memory.py` compares both; docs/planning.md
has the errors.

Letters: T tokens of a microbatch on this rank, D width, F width of the feed-forward, V vocabulary.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan.core.hardware import Hardware
from torchtitan.job import ResolvedJob
from torchtitan.planner.memory.rank_layout import fullest_ranks
from torchtitan.planner.memory.rank_sizes import RankSizes


class Bytes(NamedTuple):
    """Bytes by kind, as the fields of MemoryPrediction are named. A Counter would take most of a prediction's time."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    gathered: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":  # type: ignore[override]
        """Return the sums, or 0 for a kind that is negative, as where more is subtracted than there is."""
        return Bytes(*[size if size > 0 else 0 for size in map(operator.add, self, other)])

    def total(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self)


RESERVED = (1.13, 1.42)
"""Lowest and highest memory that a GPU reserves, as multiples of the tensors at their peak: with the allocator's gaps,
libraries and communicators, where there is room. 13 of 14 figures that PyTorch's torchtitan published lie between
(tests/planner/test_memory.py)."""
NEEDED = 1.25
"""Memory in which a plan counts as fitting, as a multiple of the tensors at their peak: the allocator returns what it
caches when a device is full. 27 published runs trained on GPUs with 1.14 to 1.24 times their tensors (llm-foundry,
fms-fsdp and NeMo, by this formula)."""


LIMITS = ("low", "high", "needed")
"""Fields of MemoryPrediction that are no kind of memory."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes of the rank that needs the most, at its peak, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    low: float
    """Least bytes that are reserved. A plan does not fit in less."""
    high: float
    """Most bytes that are reserved, where there is room."""
    needed: float
    """Bytes in which a plan counts as fitting."""

    @property
    def total(self) -> float:
        """Bytes of all tensors."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered


def reserved(tensors: float, *, on_gpu: bool) -> tuple[float, float]:
    """Return the least and the most bytes that a device reserves for tensors of this many bytes at their peak."""
    low, high = RESERVED if on_gpu else (1.0, 1.0)
    return low * tensors, high * tensors


def needed(tensors: float, *, on_gpu: bool) -> float:
    """Return the bytes of a device in which tensors of this many bytes at their peak count as fitting."""
    return NEEDED * tensors if on_gpu else tensors


def fit(low: float, needed: float, memory: float) -> str:
    """Return "fits", "may fit" or "does not fit" for `memory` bytes."""
    return "fits" if needed <= memory else "may fit" if low <= memory else "does not fit"


def predict_memory(
    job: ResolvedJob, hardware: Hardware | None = None, *, drops_every_second_product: bool = False
) -> MemoryPrediction:
    """Predict the peak of a job that has no faults.

    `drops_every_second_product`: selective recompute by operator repeats every second matrix product, as torchtitan's
    did when its figures were published (commit 9dec370). Here it keeps them all.
    """
    candidates = [moment for sizes in fullest(job, drops_every_second_product) for moment in moments(sizes)]
    worst = max(candidates, key=Bytes.total)
    on_gpu = hardware is None or bool(hardware.device_names)
    low, high = reserved(worst.total(), on_gpu=on_gpu)
    return MemoryPrediction(*worst, low=low, high=high, needed=needed(worst.total(), on_gpu=on_gpu))


def fullest(job: ResolvedJob, drops_every_second_product: bool = False) -> list[RankSizes]:
    """Return one of each set of pipeline ranks with equal stages: the one that stores the most between passes."""
    numbers = fullest_ranks(job)
    equals = [[RankSizes(job, rank, drops_every_second_product) for rank in ranks] for ranks in numbers]
    return [_fullest_of_equals(ranks) for ranks in equals]


def _fullest_of_equals(ranks: list[RankSizes]) -> RankSizes:
    """Return the rank that stores the most between passes, of ranks whose stages need as much for one microbatch."""
    if len(ranks) == 1:
        return ranks[0]
    stored, gradients = ranks[0].stored_of_stages, ranks[0].most_result_gradients

    def between_passes(sizes: RankSizes) -> float:
        return max(sizes.stored_with(stored)) + sizes.waiting_weight_gradients * gradients

    return max(ranks, key=between_passes)


def _sizes(**kinds: float) -> Bytes:
    return Bytes(**{kind: round(size) for kind, size in kinds.items()})


def moments(sizes: RankSizes) -> Iterator[Bytes]:
    """Yield the bytes by kind at each moment that may be the peak of the rank.

    With CPU offload the state is on the host; a pipeline's sums of gradients are on the device.
    """
    if sizes.layout.training.enable_cpu_offload:
        for moment in _in_pipeline(sizes) if sizes.in_pipeline else _without_pipeline(sizes):
            yield moment if sizes.in_pipeline else moment._replace(gradients=0)
        return
    state = _sizes(parameters=sizes.parameters, optimizer=sizes.optimizer)
    yield state + _sizes(gradients=sizes.gradients, optimizer=sizes.optimizer_work)  # the optimizer's step
    yield from (state + moment for moment in (_in_pipeline(sizes) if sizes.in_pipeline else _without_pipeline(sizes)))


def _in_pipeline(sizes: RankSizes) -> Iterator[Bytes]:
    """Yield the bytes of a pipeline rank in addition to its state: loss, backward of a block, reduction of gradients.

    All its parameters stay gathered, and its gradients are reduced after the last microbatch.
    """
    earlier, sums = sizes.earlier_gradients, sizes.replica_sums(0.0)
    gathered = _sizes(gathered=sizes.all_gathered, gradients=earlier, activations=sums)
    base = gathered + _sizes(gradients=sizes.all_weights * sizes.summed_bytes)
    base += _sizes(activations=sizes.waiting_gradients)
    forwards_first = sizes.schedule.name in ("GPipe", "LoopedBFS") and sizes.layout.microbatches > 1
    if sizes.has_head:  # where all forwards precede the gradients, the losses of all other microbatches wait
        loss = _sizes(
            activations=sizes.stored_at_loss - sizes.overcount + sizes.head_inputs,
            logits=max(sizes.loss_forward, sizes.loss_backward),
        )
        yield loss + (
            gathered + _sizes(logits=(sizes.layout.microbatches - 1) * sizes.loss_kept) if forwards_first else base
        )
    if forwards_first:
        yield from (state + _sizes(activations=sums) for state in _after_all_forwards(sizes, earlier))
    else:
        transient = sizes.recomputed + sizes.hidden
        stored = sizes.stored - sizes.overcount
        yield base + _sizes(activations=stored + transient, gradients=sizes.head_computed)
        yield base + _sizes(gradients=sizes.pipeline_tail)  # of the first unit
    all_sums = sizes.replica_sums(sizes.gradients)
    yield _sizes(gradients=sizes.gradients, activations=all_sums + sizes.block_reduced)  # of the last unit


def _after_all_forwards(sizes: RankSizes, earlier: float) -> Iterator[Bytes]:
    """Yield bytes of the backward after all forwards, stage by stage: in its first and in its second microbatch.

    Completed microbatches free their stored activations. Gradients of a stage are reduced, and its parameters freed,
    after its last microbatch. `earlier`: bytes of gradients of earlier batches of the step.
    """
    count, transient = sizes.layout.microbatches, sizes.recomputed + sizes.hidden
    for index in reversed(range(sizes.chunks)):
        earlier_stages = count * sum(map(sizes.stored_of_stage, sizes.stages[:index]))
        stored, weights = sizes.stored_of_stage(sizes.stages[index]), sizes.weights_of_stage(sizes.stages[index])
        later_weights = sum(map(sizes.weights_of_stage, sizes.stages[index + 1 :]))
        reduced = max(earlier, sizes.stored_bytes * later_weights / sizes.shards)
        state = _sizes(gathered=sizes.all_gathered * (1 - later_weights / sizes.all_weights), gradients=reduced)
        has_loss = sizes.has_head and index == sizes.chunks - 1
        losses, retained = sizes.loss_kept * has_loss, sizes.loss_retained * has_loss
        head = sizes.head_computed * has_loss
        in_flight = earlier_stages + count * stored
        yield state + _sizes(activations=in_flight + transient, gradients=head, logits=(count - 1) * losses)
        state += _sizes(activations=earlier_stages)
        summed = weights * sizes.summed_bytes
        remaining, waiting = (count - 1) * stored, (count - 2) * losses
        if has_loss:
            logits = waiting + sizes.loss_backward
            yield state + _sizes(activations=remaining, gradients=summed, logits=logits)
        yield state + _sizes(activations=remaining + transient, gradients=summed + head, logits=waiting + retained)
        # not in the sum until the end of backward: the gradients of the head and of the stage's first block
        unsummed = sizes.embedding_weights * sizes.summed_bytes * has_loss + sizes.block_reduced
        yield state + _sizes(
            activations=remaining + sizes.block_stored + transient,
            gradients=summed - unsummed + head,
            logits=waiting + losses + retained,
        )
        yield state + _sizes(gradients=summed + sizes.pipeline_tail)  # reduction of the first unit


def _without_pipeline(sizes: RankSizes) -> Iterator[Bytes]:
    """Yield the bytes of a rank without a pipeline in addition to its state.

    The moments are the loss, the backward of blocks, and the embedding's gradient.
    """
    blocks = sizes.all_gathered - sizes.embedding_gathered - sizes.head_gathered if sizes.stays_gathered else 0.0
    buffer = 0.0 if sizes.stays_gathered else sizes.block_gathered
    ends = sizes.embedding_gathered + sizes.head_gathered
    loss = _sizes(
        gathered=ends + blocks,
        activations=sizes.stored + sizes.head_inputs + sizes.replica_sums(0.0),
        gradients=sizes.earlier_gradients,
    )
    if sizes.base is not None and sizes.shards > 1:  # no gradients make backward need more than forward
        gathered = sizes.embedding_gathered + max(blocks, sizes.block_gathered) + 2 * sizes.block_gathered
        stored = sizes.stored_before(len(sizes.layers) - 1) + sizes.forward_work
        yield _sizes(gathered=gathered, activations=stored, gradients=sizes.earlier_gradients)
    if sizes.head_gathered and sizes.shards > 1:  # the head is gathered, next to the buffer of the last block's gather
        buffers = sizes.head_gathered + sizes.block_gathered
        activations = sizes.stored + sizes.hidden + sizes.replica_sums(0.0)
        yield _sizes(gathered=ends + blocks + buffers, activations=activations, gradients=sizes.earlier_gradients)
    # of the last gather, until the end of the model's forward
    last_buffer = (sizes.block_gathered if sizes.tied else sizes.head_gathered) * (sizes.shards > 1)
    yield loss + _sizes(gathered=last_buffer, logits=sizes.loss_forward)
    yield loss + _sizes(gathered=buffer, logits=sizes.loss_backward)  # with the last block's parameters
    last_layer = len(sizes.layers) - 1
    if not sizes.tied:
        yield _sizes(
            gathered=sizes.embedding_gathered + blocks + buffer,  # of the last block
            activations=sizes.stored + sizes.hidden + sizes.end_reducing + sizes.replica_sums(0.0),
            gradients=sizes.earlier_gradients,
        )
    # bytes are linear in the number of earlier blocks between these
    prefetched = max(1, sizes.layout.parallelism.fsdp_prefetch)
    numbers = {0, *(min(number, last_layer) for number in (1, prefetched)), max(0, last_layer - 1), last_layer}
    for earlier_blocks in sorted(numbers):
        stays = blocks * earlier_blocks / len(sizes.layers) + buffer * min(prefetched, earlier_blocks)
        yield from _backward_of_block(sizes, earlier_blocks, stays)
    reduced = sizes.gradients - sizes.embedding_gradients
    yield _sizes(
        activations=sizes.end_reducing + sizes.replica_sums(reduced), gradients=max(reduced, sizes.earlier_gradients)
    )
    bytes_of_grad = sizes.compute if sizes.fully_sharded else sizes.stored_bytes  # autocast's are of the parameters
    computed = bytes_of_grad * sizes.trained_end * (3 if sizes.tied else 1)  # with the head's, and their sum
    yield _sizes(
        gathered=sizes.embedding_gathered,
        activations=computed + sizes.block_units[-1].reduced + sizes.replica_sums(reduced),
        gradients=max(reduced, sizes.earlier_gradients),
    )


def _backward_of_block(sizes: RankSizes, earlier_blocks: int, gathered: float) -> Iterator[Bytes]:
    """Yield bytes of the backward of the block after `earlier_blocks` others, and of the reduction of its gradients.

    `gathered`: bytes of the gathered parameters of earlier blocks: of the next ones in backward, or of all that stay.
    """
    reduced = sizes.gradients_after(earlier_blocks)
    state = _sizes(
        gathered=gathered + sizes.embedding_gathered,
        activations=sizes.stored_before(earlier_blocks) + sizes.hidden + sizes.replica_sums(reduced),
        gradients=max(reduced, sizes.earlier_gradients),
    )
    *experts, block = sizes.block_units  # in the order of their reductions
    is_last = earlier_blocks == len(sizes.layers) - 1
    previous_buffer = sizes.head_reduced if is_last else block.reduced  # of the reduction before, until the next one
    yield state + _sizes(gathered=sizes.block_gathered, activations=sizes.at_work + previous_buffer)
    for unit in experts:
        remaining = _sizes(gathered=block.gathered, activations=sizes.block_after_experts)
        yield state + remaining + _sizes(activations=unit.reducing)
        yield state + remaining + _sizes(activations=unit.reduced, gradients=unit.gradients)
        state += _sizes(gradients=unit.gradients)
    yield state + _sizes(activations=block.reducing)
