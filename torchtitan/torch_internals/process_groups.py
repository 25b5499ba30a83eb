"""Process groups of torch.distributed."""

from torch.distributed import ProcessGroup, distributed_c10d

set_group_timeout = distributed_c10d._set_pg_timeout
"""torch 2.13: changes the timeout of a group, which is longer before the first step than after it."""
resolve_process_group = distributed_c10d._resolve_process_group
"""torch 2.13: the group of the name that a functional collective takes, to record who exchanges messages."""


def process_groups() -> list[ProcessGroup]:
    """torch 2.13: all groups of this process, to change their timeouts."""
    return list(distributed_c10d._world.pg_map)
