"""The tables of all schedules by name (`build_table`).

Most come from torch, which is imported when the first one of them is built, so that plans without a pipeline are found
without it. Tables of ours replace those that torch does not offer (GPipe) or lists incorrectly (1F1B: torch 2.13 lists
the last rank's forwards from microbatch 1 but runs them from 0).
"""

from pkgutil import resolve_name
from types import SimpleNamespace

from torchtitan.parallelisms.pipeline.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    OVERLAP,
    WEIGHT_GRAD,
    Action,
    Table,
    split_pairs,
    with_full_backward,
)
from torchtitan.parallelisms.pipeline.cut import check_microbatches, check_stages, schedule_traits


def build_table(
    schedule: str,
    pp: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    *,
    merge_backward: bool = False,
    overlap: bool = False,
) -> Table:
    """Return the table of a schedule, one row of actions per rank.

    `stages_per_rank`: None for the schedule's default. `merge_backward`: merge I and W to B, as recompute needs it.
    `overlap`: keep DualPipeV's pairs, for a runtime that overlaps them. Raises JobError if the schedule does not
    support these numbers.
    """
    traits = schedule_traits(schedule)
    stages_per_rank = traits.stages_per_rank if stages_per_rank is None else stages_per_rank
    check_stages(traits.name, pp, pp * stages_per_rank)
    check_microbatches(traits.name, microbatches, pp, pp * stages_per_rank)
    if traits.name in TABLE_BUILDERS:
        table = [TABLE_BUILDERS[traits.name](rank, pp, microbatches) for rank in range(pp)]
    else:
        table = _torch_table(traits.name, pp, microbatches, stages_per_rank)
    table = table if overlap else split_pairs(table)
    return with_full_backward(table) if merge_backward else table


def _gpipe(rank: int, pp: int, microbatches: int) -> list[Action]:
    return [Action(rank, kind, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches)]


def _1f1b(rank: int, pp: int, microbatches: int) -> list[Action]:
    """Return the row of 1F1B: warm-up forwards until the first gradient can arrive, then B and F in turn."""
    warmup = min(pp - rank, microbatches)
    row = [Action(rank, FORWARD, m) for m in range(warmup)]
    for m in range(microbatches):
        row.append(Action(rank, BACKWARD, m))
        row += [Action(rank, FORWARD, m + warmup)] if m + warmup < microbatches else []
    return row


TABLE_BUILDERS = {"GPipe": _gpipe, "1F1B": _1f1b}


def _torch_table(schedule: str, pp: int, microbatches: int, stages_per_rank: int) -> Table:
    """Return torch's table of a schedule with several stages per rank. Its constructor computes the rows of all ranks
    from the sizes in these stand-ins for stages.
    """
    stages = [
        SimpleNamespace(num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, submod=None)
        for _ in range(stages_per_rank)
    ]
    compute_order = resolve_name("torchtitan.torch_internals.pipelining:compute_order")  # needs torch
    order = compute_order(schedule, stages, microbatches)
    rows = [[_from_torch(action) for action in order[rank] if action is not None] for rank in range(pp)]  # None: idle
    return [[action for action in row if action.kind in COMPUTED] for row in rows]


COMPUTED = FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD, OVERLAP
"""Kinds of compute actions. REDUCE_GRAD is added by the runtime."""


def _from_torch(action) -> Action:
    kind = action.computation_type.value
    if action.sub_actions is not None:
        return Action(-1, kind, -1, tuple(map(_from_torch, action.sub_actions)))
    return Action(action.stage_index, kind, action.microbatch_index)
