"""The cut of a model into pipeline stages, their ranks, and the requirements of each schedule. It does not import
torch, so that a job can be checked quickly.

A stage is a list of module names in the model's order. Layers are distributed by cost: every stage gets one, then each
further layer goes to the stage with the lowest cost. The embedding costs as much as `embedding_cost` layers, and norm
and head together as `head_cost`. If the cost divides evenly, pytorch/torchtitan cuts the same way.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchtitan.core.errors import JobError


@dataclass(frozen=True, kw_only=True)
class ScheduleTraits:
    """The requirements of a schedule, named as in torch.distributed.pipelining.

    Style "loop": stage s is on rank s % pp. Style "v": the second half of the stages runs over the ranks in reverse.
    """

    name: str
    style: str = "loop"  # loop or v
    stages_per_rank: int = 2  # default
    fixed_stages: bool = True  # only this number of stages per rank
    split_backward: bool = False  # gradients of inputs and of weights are separate actions
    microbatch_per_stage: bool = False  # at least as many microbatches as stages
    equal_rounds: bool = False  # microbatches are divisible by max(1, microbatches // pp)


SCHEDULES = {
    traits.name: traits
    for traits in (
        ScheduleTraits(name="GPipe", stages_per_rank=1),
        ScheduleTraits(name="1F1B", stages_per_rank=1),
        ScheduleTraits(name="LoopedBFS", fixed_stages=False),
        ScheduleTraits(name="Interleaved1F1B", fixed_stages=False, equal_rounds=True),
        ScheduleTraits(name="InterleavedZeroBubble", fixed_stages=False, equal_rounds=True, split_backward=True),
        ScheduleTraits(name="ZBVZeroBubble", style="v", split_backward=True),
        ScheduleTraits(name="DualPipeV", style="v", split_backward=True, microbatch_per_stage=True),
    )
}


def schedule_traits(name: str) -> ScheduleTraits:
    """Return the traits of a schedule by its name, in any case."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    for traits in SCHEDULES.values():
        if traits.name.lower() == name.lower():
            return traits
    raise JobError(f"there is no pipeline schedule {name!r}; choose one of {', '.join(SCHEDULES)}")


def choose_num_stages(
    schedule: str, pp: int, num_layers: int, layers_per_stage: int | None, embedding_cost: int = 1, head_cost: int = 1
) -> int:
    """Return the total number of stages: the schedule's default, or as given by `layers_per_stage`.

    Raises JobError if it does not divide over the ranks, does not fit the schedule or leaves a stage without layers.
    """
    traits = schedule_traits(schedule)
    if layers_per_stage is None:
        num_stages = pp * traits.stages_per_rank
    else:
        total = num_layers + embedding_cost + head_cost
        num_stages = -(-total // layers_per_stage)
        fault = _stages_fault(traits, pp, num_stages)
        if fault:
            legal = [
                size
                for size in range(1, total + 1)
                if not _stages_fault(traits, pp, n := -(-total // size)) and n <= num_layers
            ]
            raise JobError(
                f"{layers_per_stage} layers per stage make {num_stages} stages of {num_layers} layers (the embedding "
                f"counts as {embedding_cost}, the head as {head_cost}); {fault}; layers per stage that would do: "
                f"{_join(legal)}"
            )
    _check_enough_layers(num_layers, num_stages, pp)
    return num_stages


def check_stages(schedule: str, pp: int, num_stages: int) -> None:
    """Raise a JobError if the schedule does not support this number of stages on `pp` ranks."""
    fault = _stages_fault(schedule_traits(schedule), pp, num_stages)
    if fault:
        raise JobError(f"{num_stages} pipeline stages: {fault}")


def _stages_fault(traits: ScheduleTraits, pp: int, num_stages: int) -> str:
    if traits.fixed_stages and num_stages != pp * traits.stages_per_rank:
        per_rank = "1 stage" if traits.stages_per_rank == 1 else f"{traits.stages_per_rank} stages"
        return f"{traits.name} needs exactly {per_rank} per rank, {pp * traits.stages_per_rank} on {pp} ranks"
    if num_stages % pp or num_stages < 2 * pp and not traits.fixed_stages:
        return f"{traits.name} needs a multiple of {pp} ranks, at least {2 * pp}"
    return ""


def _check_enough_layers(num_layers: int, num_stages: int, pp: int) -> None:
    if num_layers < num_stages:
        remedy = "fewer ranks"
        if num_stages > pp and num_layers >= pp:
            remedy += ", or a schedule with fewer stages per rank (GPipe and 1F1B have 1)"
        raise JobError(
            f"{num_layers} layers cannot fill {num_stages} pipeline stages (on {pp} ranks); use at most "
            f"{num_layers} stages: {remedy}"
        )


def stages_of_rank(rank: int, pp: int, num_stages: int, style: str) -> list[int]:
    """Return the indices of a pipeline rank's stages, ascending. `style`: as in ScheduleTraits."""
    assert num_stages % pp == 0 and style in ("loop", "v")
    rounds = range(num_stages // pp)
    is_reversed = [style == "v" and round_ % 2 == 1 for round_ in rounds]
    return [round_ * pp + (pp - 1 - rank if is_reversed[round_] else rank) for round_ in rounds]


def forward_order(ranks: Sequence[int], microbatches: int) -> list[tuple[int, int]]:
    """Return a global order of (stage, microbatch) for a forward-only pass. `ranks`: the rank of each stage.

    In each tick, every rank with ready inputs runs one microbatch, in its latest ready stage. Ranks that send and
    receive in this order cannot deadlock, as both ends of any two messages agree on which comes first.
    """
    order: list[tuple[int, int]] = []
    at = [0] * len(ranks)  # number of finished microbatches, by stage
    while at[-1] < microbatches:
        ready = [done < microbatches and (not stage or done < at[stage - 1]) for stage, done in enumerate(at)]
        tick = {rank: stage for stage, rank in enumerate(ranks) if ready[stage]}
        for stage in tick.values():
            order.append((stage, at[stage]))
            at[stage] += 1
    return order


def split_layers(num_layers: int, num_stages: int, embedding_cost: int, head_cost: int) -> list[int]:
    """Return the number of layers of each stage: at least 1 each, `num_layers` in all."""
    _check_enough_layers(num_layers, num_stages, num_stages)
    layers = [1] * num_stages
    extra = [0] * num_stages
    extra[0] += embedding_cost
    extra[-1] += head_cost
    for _ in range(num_layers - num_stages):
        least = min(range(num_stages), key=lambda stage: layers[stage] + extra[stage])  # the earliest, on ties
        layers[least] += 1
    return layers


def model_modules(
    num_layers: int,
    blocks: str = "layers.*",
    embedding: str = "tok_embeddings",
    head: Sequence[str] = ("norm", "output"),
) -> list[str]:
    """Return the module names that a cut distributes, in the model's order. The last three arguments are as in
    ParallelPlan.
    """
    return [embedding, *(blocks.replace("*", str(layer)) for layer in range(num_layers)), *head]


def stage_modules(
    num_layers: int, num_stages: int, embedding_cost: int = 1, head_cost: int = 1, **names: str | Sequence[str]
) -> list[list[str]]:
    """Return the module names of each stage, cut by cost. `names`: as in model_modules."""
    modules = model_modules(num_layers, **names)
    counts = split_layers(num_layers, num_stages, embedding_cost, head_cost)
    stages, start = [], 1
    for count in counts:
        stages.append(modules[start : start + count])
        start += count
    stages[0].insert(0, modules[0])
    stages[-1] += modules[start:]
    return stages


def check_stage_modules(stages: Sequence[Sequence[str]], modules: Sequence[str], blocks: str = "layers.*") -> None:
    """Raise a JobError unless `stages` contain all of `modules` once each, in order, with a layer in every stage."""
    prefix = blocks.removesuffix("*")
    names = [name for stage in stages for name in stage]
    unknown = [name for name in names if name not in modules]
    missing = [name for name in modules if name not in names]
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    without_layers = [
        str(index) for index, stage in enumerate(stages) if not any(name.startswith(prefix) for name in stage)
    ]
    faults = []
    if unknown:
        faults.append(f"the model has no {_join(unknown)}")
    if missing:
        faults.append(f"no stage has {_join(missing)}")
    if duplicates:
        faults.append(f"{_join(duplicates)} is named more than once")
    if not faults and names != list(modules):
        first = next(
            index for index, (actual, expected) in enumerate(zip(names, modules, strict=True)) if actual != expected
        )
        faults.append(f"{names[first]} stands where {modules[first]} comes in the model")
    if without_layers:
        faults.append(f"stage {_join(without_layers)} has none of the layers")
    if faults:
        raise JobError(
            f"modules of the {len(stages)} pipeline stages: {'; '.join(faults)}; the model's modules in order are "
            f"{_join(modules)}"
        )


def num_microbatches(local_batch_size: int, microbatch_size: int) -> int:
    """Return the number of microbatches in a local batch. Raises JobError if it is not an integer."""
    if local_batch_size % microbatch_size:
        sizes = [size for size in range(1, local_batch_size + 1) if local_batch_size % size == 0]
        below = local_batch_size - local_batch_size % microbatch_size
        batches = [batch for batch in (below, below + microbatch_size) if batch]
        raise JobError(
            f"a local batch of {local_batch_size} samples does not divide into pipeline microbatches of "
            f"{microbatch_size}; microbatch sizes that would do: {_join(sizes)}; "
            f"local batch sizes that would do: {_join(batches)}"
        )
    return local_batch_size // microbatch_size


def check_microbatches(schedule: str, count: int, pp: int, num_stages: int) -> None:
    """Raise a JobError, with the nearest valid numbers, if the schedule cannot run `count` microbatches."""
    traits = schedule_traits(schedule)
    if traits.microbatch_per_stage and count < num_stages:
        raise JobError(
            f"{traits.name} with {num_stages} stages needs at least {num_stages} microbatches in a local batch, not "
            f"{count}; use a local batch of at least {num_stages} microbatches, or smaller microbatches"
        )
    if traits.equal_rounds and not _has_equal_rounds(count, pp):
        legal = _nearest(count, lambda other: _has_equal_rounds(other, pp))
        raise JobError(
            f"{traits.name} on {pp} ranks runs its {count} microbatches in {count // pp} rounds of equal size, and "
            f"{count} does not divide by {count // pp}; the nearest numbers that would do: {_join(legal)}"
        )


def _has_equal_rounds(count: int, pp: int) -> bool:
    return count % max(1, count // pp) == 0


def _nearest(count: int, legal: Callable[[int], bool]) -> list[int]:
    """Return the nearest valid number below and above `count`. Both exist, as 1 and 2 * count are valid."""
    below = next(other for other in range(count - 1, 0, -1) if legal(other))
    above = next(other for other in range(count + 1, 2 * count + 1) if legal(other))
    return [below, above]


def _join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "none"
