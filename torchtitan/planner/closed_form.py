"""The memory of a rank by formula, in about a millisecond and without torch, for a search over many plans.

A step has a few moments that may need the most memory: the loss, the backward of the last and of the first layer, the
reduction of the last gradients, and the optimizer's step. In each the formula adds up what a rehearsal counts
(planner/rehearsal.py): shards of parameters, gradients and optimizer state, gathered parameters with FSDP's buffers,
activations by recompute mode, and logits. `scripts/compare_memory.py` compares both; docs/planning.md has the errors.

Letters: T tokens of a microbatch on this rank, D width, F width of the feed-forward, V vocabulary.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.config.job import JobConfig
from torchtitan.core.hardware import Hardware
from torchtitan.models import resolve_sizes
from torchtitan.planner.rank_layout import kinds_of_layers
from torchtitan.planner.rank_sizes import RankSizes

Bytes = Counter[str]
"""Bytes by kind, as the fields of MemoryPrediction are named."""
RESERVED = (1.13, 1.42)
"""Lowest and highest memory that a GPU reserves, as multiples of the tensors at their peak: with the allocator's gaps,
libraries and communicators. 13 of 14 figures that torchtitan published lie between (tests/test_closed_form.py)."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes of the rank that needs the most, at its peak, by kind. `low` and `high`: what a device will reserve."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    low: float
    high: float

    @property
    def total(self) -> float:
        """Bytes of all tensors."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.gathered


def reserved(tensors: float, *, on_gpu: bool) -> tuple[float, float]:
    """Return the least and the most bytes that a device reserves for tensors of this many bytes at their peak."""
    low, high = RESERVED if on_gpu else (1.0, 1.0)
    return low * tensors, high * tensors


def predict_memory(
    config: JobConfig, hardware: Hardware | None = None, *, drops_every_second_product: bool = False
) -> MemoryPrediction:
    """Predict the peak of a job that has no faults. Its degrees give the number of ranks; -1 shards count as 1.

    `drops_every_second_product`: selective recompute by operator repeats every second matrix product, as torchtitan's
    did when its figures were published (commit 9dec370). Here it keeps them all.
    """
    pp = config.parallelism.pipeline_parallel_degree
    args = resolve_sizes(config.model.name, config.model.flavor, config.model.hf_folder, config.model.overrides)
    ranks = [RankSizes(config, args, rank, drops_every_second_product) for rank in range(pp)]
    candidates = [moment for sizes in fullest(ranks) for moment in moments(sizes)]
    worst = max(candidates, key=Counter.total)
    low, high = reserved(worst.total(), on_gpu=hardware is None or bool(hardware.device_names))
    kinds = {kind: worst[kind] for kind in MemoryPrediction.__dataclass_fields__ if kind not in ("low", "high")}
    return MemoryPrediction(**kinds, low=low, high=high)


def fullest(ranks: list[RankSizes]) -> list[RankSizes]:
    """Return one of each set of pipeline ranks with equal stages: the one with the most microbatches in flight."""
    if len(ranks) == 1:
        return ranks
    kind_of_layer = kinds_of_layers(ranks[0].args)
    by_content: dict[object, RankSizes] = {}
    for sizes in ranks:
        stages = tuple(tuple(kind_of_layer[layer] for layer in stage) for stage in sizes.stages)
        content = stages, sizes.has_embedding, sizes.has_head
        by_content[content] = max(by_content.get(content, sizes), sizes, key=lambda equal: equal.in_flight)
    return list(by_content.values())


def _sizes(**kinds: float) -> Bytes:
    return Counter({kind: round(size) for kind, size in kinds.items()})


def moments(sizes: RankSizes) -> Iterator[Bytes]:
    """Yield the bytes by kind at each moment that may be the peak of the rank."""
    state = _sizes(parameters=sizes.parameters, optimizer=sizes.optimizer)
    yield state + _sizes(gradients=sizes.gradients)  # the optimizer's step
    yield from (state + moment for moment in (_in_pipeline(sizes) if sizes.in_pipeline else _without_pipeline(sizes)))


def _in_pipeline(sizes: RankSizes) -> Iterator[Bytes]:
    """Yield what a pipeline rank needs beside its state: loss, backward of a block, reduction of the gradients.

    All its parameters stay gathered, and its gradients are reduced after the last microbatch.
    """
    earlier = sizes.gradients if sizes.accumulates and sizes.fully_sharded else 0.0  # of earlier batches of the step
    always = _sizes(gathered=sizes.all_gathered, gradients=sizes.unsharded_gradients + earlier)
    pending = sizes.pending_losses if sizes.has_head else 0.0
    if sizes.has_head:
        loss = _sizes(activations=sizes.stored + sizes.head_inputs, logits=sizes.loss_peak + pending)
        yield (_sizes(gathered=sizes.all_gathered) if pending else always) + loss  # all forwards precede the gradients
    work = sizes.recomputed + sizes.hidden
    if sizes.forwards_first and sizes.microbatches > 1:
        yield from (
            _sizes(gathered=sizes.all_gathered) + moment
            for moment in _after_all_forwards(sizes, work, earlier, pending)
        )
    else:
        yield always + _sizes(activations=sizes.stored + work)
    yield always + _sizes(gradients=sizes.pipeline_tail)


def _after_all_forwards(sizes: RankSizes, work: float, earlier: float, pending: float) -> Iterator[Bytes]:
    """Yield bytes of the backward after all forwards: at its start and after each stage's first microbatch.

    Gradients arise stage by stage, while the microbatches that are done free what they have stored. `work`: bytes of
    the backward of a block, `earlier` of gradients of earlier batches, `pending` of losses of other microbatches.
    """
    yield _sizes(activations=sizes.stored + work, gradients=earlier + sizes.head_unsharded, logits=pending)
    chunk, count = sizes.stored / sizes.chunks, sizes.microbatches
    losses = pending * (count - 2) / (count - 1)
    gradients = earlier + sizes.unsharded_gradients / sizes.chunks
    if sizes.has_head and sizes.loss_chunks == 1:  # backward of the second loss
        yield _sizes(activations=sizes.stored - chunk / count, gradients=gradients, logits=losses + sizes.loss_peak)
    for done in range(sizes.chunks):
        remaining = sizes.stored - (done + 1 / count) * chunk + sizes.block_stored
        gradients = earlier + sizes.unsharded_gradients * (done + 1) / sizes.chunks
        yield _sizes(activations=remaining + work, gradients=gradients, logits=0.0 if done else losses)


def _without_pipeline(sizes: RankSizes) -> Iterator[Bytes]:
    """Yield what a rank without a pipeline needs beside its state.

    That is for the loss, for the backward of the last and of the first block, and for the embedding's gradient.
    """
    accumulated = sizes.gradients if sizes.accumulates else 0.0
    if sizes.stays_gathered:
        blocks, buffer = sizes.all_gathered - sizes.embedding_gathered - sizes.head_gathered, 0.0
    else:
        blocks, buffer = 0.0, sizes.block_gathered
    ends = sizes.embedding_gathered + sizes.head_gathered
    loss_buffer = buffer if sizes.loss_chunks == 1 else sizes.head_gathered * (sizes.shards > 1)
    yield _sizes(
        gathered=ends + blocks + loss_buffer,
        activations=sizes.stored + sizes.head_inputs,
        logits=sizes.loss_peak,
        gradients=accumulated,
    )
    backward = _sizes(gathered=sizes.embedding_gathered + 2 * buffer, activations=sizes.recomputed + sizes.hidden)
    yield backward + _sizes(
        gathered=blocks,
        activations=sizes.stored + sizes.head_reduced,
        gradients=max(accumulated, sizes.head_gradients),
    )
    first = sizes.block_gathered if sizes.stays_gathered else 0.0
    reduced = sizes.gradients - sizes.head_gradients - sizes.block_gradients
    gradients = max(accumulated, reduced)
    sums = sizes.replica_sums(max(0.0, reduced - sizes.block_gradients))  # the last block that gathers another
    yield backward + _sizes(
        gathered=first,
        activations=sizes.block_stored + sizes.block_reduced + sums,
        gradients=gradients,
    )
    reducing = _sizes(gathered=sizes.embedding_gathered + 2 * buffer, activations=sizes.block_reducing + sizes.hidden)
    yield reducing + _sizes(gathered=first, gradients=gradients, activations=sizes.replica_sums(reduced))
    yield reducing + _sizes(
        gathered=blocks,
        activations=sizes.stored - sizes.last_resident,
        gradients=max(accumulated, sizes.head_gradients),
    )
    embedding = sizes.embedding_reduced + sizes.replica_sums(sizes.gradients)
    yield _sizes(gathered=sizes.embedding_gathered, activations=embedding, gradients=sizes.gradients)
