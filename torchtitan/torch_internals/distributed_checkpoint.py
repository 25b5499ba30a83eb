"""torch.distributed.checkpoint (DCP): the format of its index, its writer, and its exchange between ranks."""

from collections.abc import Callable

from torch.distributed.checkpoint import api, filesystem, state_dict_loader, state_dict_saver, utils
from torch.distributed.checkpoint.planner import SavePlanner

from torchtitan.torch_internals.replacement import replace

StorageInfo = filesystem._StorageInfo
"""torch 2.13: the place of a piece of a tensor in the files, as the index has it."""
StoragePrefix = filesystem._StoragePrefix
"""torch 2.13: the beginning of the names of a rank's files, in its plan."""
item_size = filesystem._item_size
"""torch 2.13: the bytes of a planned item, to share large ones among files."""
write_files_from_queue = filesystem._write_files_from_queue
"""torch 2.13: writes files until the queue is empty, in threads of ours, whose errors are not lost."""
is_wrapped_exception = api._is_wrapped_exception
"""torch 2.13: whether an answer of a rank is its error."""
RankExchange = utils._DistWrapper
"""torch 2.13: what ranks exchange plans and results by, as pickles."""


def replace_rank_exchange(make: Callable) -> None:
    """torch 2.13: let DCP's `save` and `load` create the exchange by `make(group, use_dist, coordinator_rank)`."""
    for module in (state_dict_saver, state_dict_loader):
        replace(module, "_DistWrapper", make)


def forget_plans(name: str) -> None:
    """torch 2.13: remove the plans of earlier saves that planners with this `_cached_plans_key` keep."""
    for cache in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        cache.pop(name, None)
