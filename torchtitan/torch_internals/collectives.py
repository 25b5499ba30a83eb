"""Functional collectives, which the compiler can trace and which take the name of a process group, and these groups."""

import torch
from torch.distributed import ProcessGroup, _functional_collectives, _symmetric_memory, distributed_c10d

all_gather_into_tensor = torch.ops._c10d_functional.all_gather_into_tensor
"""torch 2.13: (x, size, group): concatenates the ranks' tensors along the first dimension."""
all_reduce = torch.ops._c10d_functional.all_reduce
"""torch 2.13: (x, operation, group): reduces over the ranks."""
all_to_all_single = torch.ops._c10d_functional.all_to_all_single
"""torch 2.13: (x, received rows, sent rows, group): exchanges rows."""
reduce_scatter_tensor = torch.ops._c10d_functional.reduce_scatter_tensor
"""torch 2.13: (x, operation, size, group): reduces over the ranks and keeps this rank's rows."""
wait_tensor = torch.ops._c10d_functional.wait_tensor
"""torch 2.13: waits for the result of any of these."""
reduce_over_mesh = _functional_collectives.all_reduce
"""torch 2.13: (x, operation, (mesh, axis)): waits on first use, for the loss of a sharded vocabulary."""
AsyncCollectiveTensor = _functional_collectives.AsyncCollectiveTensor
"""torch 2.13: a result that waits on first use, which a compiled block must not be given."""


def overlap_collectives_with_products(group: str) -> None:
    """torch 2.13: let the compiler cut collectives of this group and adjacent products in chunks that overlap."""
    torch._inductor.config._micro_pipeline_tp = True
    _symmetric_memory.enable_symm_mem_for_group(group)  # type: ignore[arg-type]


set_group_timeout = distributed_c10d._set_pg_timeout
"""torch 2.13: changes the timeout of a group, which is longer before the first step than after it."""
resolve_process_group = distributed_c10d._resolve_process_group
"""torch 2.13: the group of the name that a functional collective takes, to record who exchanges messages."""


def process_groups() -> list[ProcessGroup]:
    """torch 2.13: all groups of this process, to change their timeouts."""
    return list(distributed_c10d._world.pg_map)
