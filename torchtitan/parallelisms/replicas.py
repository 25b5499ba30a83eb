"""FSDP2 over replicas on a CPU: sums of gradients under way while backward computes, and no copies of gradients and
parameters.

On a GPU FSDP2 issues the all-reduce of a unit's gradients on a second stream, next to backward. A CPU has no streams,
so with gloo the host would wait for each sum. Here it waits for all of them at the end of backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from torchtitan.torch_internals.autograd import preserve_version_counter
from torchtitan.torch_internals.fsdp import DefaultReduceScatter, HSDPMeshInfo, alloc_storage, fsdp_units, local_shard
from torchtitan.torch_internals.replacement import replace


class DeferredGroup:
    """The replicas of an FSDP unit: its process group, with all-reduces that `wait` waits for.

    It equals the group, because torch looks up the group of an all-reduce that fails, and would raise another error.
    """

    def __init__(self, unit: Any) -> None:
        self.unit, self.group = unit, unit.mesh_info.replicate_process_group
        self.pending: list[dist.Work] = []

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.group

    def __hash__(self) -> int:
        return hash(self.group)

    def size(self) -> int:
        """Return 1: FSDP divides gradients by it if no factor is set."""
        return 1

    def allreduce(self, tensors: list[torch.Tensor], options: dist.AllreduceOptions) -> dist.Work | None:
        """Start the sum of tensors of any shape. Return it if its result is read at once.

        That is by a cast, by a hook, or by the addition to the gradient of an earlier step.
        """
        options.asyncOp = True
        work = self.group.allreduce(tensors, options)
        parameters = [parameter.sharded_param for parameter in self.unit.fsdp_params]
        awaited = any(p.grad is not None or p._post_accumulate_grad_hooks for p in parameters)
        if awaited or tensors[0].dtype != self.unit._orig_dtype:
            return work
        self.pending.append(work)
        return None

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending.clear()


class SingleBuffer(DefaultReduceScatter):
    """The reduction over one shard, which copies its input: to itself, if both buffers are the same tensor."""

    def __init__(self) -> None:
        self.input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer, flat [size], for the input, and the same one for the output that is asked for next."""
        buffer, self.input = self.input, None
        if buffer is None:
            buffer = self.input = super().allocate(size, dtype=dtype, device=device)
        return buffer


def _unshard(unit: Any) -> None:
    """Make the parameters of a unit with one shard ready for computation, in place of FSDP's `wait_for_unshard`.

    FSDP copies the shard, which is the full parameter, in each forward. Here a parameter of the shard's type shares its
    storage, and another type is cast to without a temporary copy.
    """
    if unit._all_gather_result is None:
        return
    unit._all_gather_result = None
    for parameter in unit.fsdp_params:
        shard = local_shard(parameter)
        if parameter.param_dtype is not None or shard.storage_offset():  # FSDP views a storage from its start
            if parameter.__dict__.pop("shared_storage", None) is not None:
                parameter.__dict__.pop("_unsharded_param", None)
            dtype = parameter.param_dtype or shard.dtype
            parameter.init_all_gather_outputs([shard.numel()], [dtype], 1, unit.device)
            (output,) = parameter.all_gather_outputs
            alloc_storage(output)
            with preserve_version_counter(output):  # as FSDP does
                output.copy_(shard)
            parameter.init_unsharded_param()
        elif getattr(parameter, "shared_storage", None) is not shard:  # FSDP replaces it if the parameter's moves
            parameter.__dict__.pop("_unsharded_param", None)
            parameter.all_gather_outputs = [shard]
            parameter.init_unsharded_param()
            parameter.all_gather_outputs = []  # which FSDP frees
            parameter.shared_storage = shard
    unit._to_unsharded()


def overlap_replicas(module: FSDPModule) -> None:
    """Let the sums over replicas of one FSDP unit end with backward, and its only shard be used in place, on a CPU.

    A gradient is a view of its sum, and further microbatches are added before the sum, so nothing reads it earlier.
    """
    for unit in fsdp_units(module):
        info = unit.mesh_info
        if unit.device.type != "cpu":
            continue
        if info.shard_mesh_size == 1:
            replace(unit, "wait_for_unshard", partial(_unshard, unit))
        if not isinstance(info, HSDPMeshInfo):
            continue
        if info.shard_mesh_size == 1:
            replace(unit, "gradient_divide_factor", None)  # torch would divide by 1 into a copy
            module.set_custom_reduce_scatter(SingleBuffer())
        if not isinstance(info.replicate_process_group, DeferredGroup):  # set by another module of the unit
            replicas = DeferredGroup(unit)
            replace(info, "replicate_process_group", replicas)
            replace(unit, "finalize_backward", _chain(unit.finalize_backward, replicas.wait))


def _chain(*functions: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for function in functions:
            function()

    return run
