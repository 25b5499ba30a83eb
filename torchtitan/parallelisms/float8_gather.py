"""Gather weights in float8 (FSDP2's all-gather extensions), for linears that multiply in float8 with one scale.

Each rank sends its rows in 8 bits, rounded with the scale of the full matrix. The gathered matrix is expanded, which is
exact, and a linear that rounds it again gets the same numbers. So results have the same bits as with a gather in 16
bits, at half of the traffic, and modules see ordinary parameters.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from torchtitan.core.float8 import E4M3, power_of_two
from torchtitan.torch_internals.autograd import preserve_version_counter
from torchtitan.torch_internals.dtensor import local_part
from torchtitan.torch_internals.fsdp import fsdp_units, full_shape, gather_by, local_rows, owner_and_name
from torchtitan.torch_internals.operators import foreach_norm

Bytes = tuple[torch.Tensor, torch.Tensor]
"""Rows of a weight, uint8 [R, K], and the float32 that undoes their scale, uint8 [4]. gloo does not support float8."""


class UnitScales:
    """The scales of the weights of an FSDP unit, from one reduction for each gather of the unit."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        """This rank's rows [R, K] of each weight."""
        self._unused: dict[int, torch.Tensor] = {}

    def pop_factor(self, index: int, mesh: DeviceMesh, dtype: torch.dtype) -> torch.Tensor:
        """Return the factor, float32 [], of a weight that is computed with in `dtype`.

        All ranks ask for the factors of a unit in the same order, so they reduce together.
        """
        if index not in self._unused:
            largest = torch.stack(foreach_norm(self.weights, math.inf))
            dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
            self._unused = dict(enumerate(power_of_two(largest.to(dtype), E4M3)))
        return self._unused.pop(index)


class Float8Gather:
    """The gather of one weight, of which this rank has `rows` [R, K]: two functions that FSDP looks up on `rows`."""

    def __init__(self, scales: UnitScales, rows: torch.Tensor):
        self.scales, self.rows, self.index = scales, rows, len(scales.weights)
        scales.weights.append(rows)

    def pack(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[Bytes, None]:
        """Return this rank's contribution; FSDP's signature, with its metadata."""
        dtype = policy.param_dtype or self.rows.dtype
        factor = self.scales.pop_factor(self.index, mesh, dtype)
        values = (self.rows.to(dtype) * factor.to(dtype)).to(E4M3)
        return (values.view(torch.uint8), factor.reciprocal().view(1).view(torch.uint8)), None

    @torch.no_grad()
    def expand(
        self, gathered: Bytes, metadata: None, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]]:
        """Write the weight [N, K], from all ranks' bytes, to `out`, for which FSDP has allocated storage, if given.

        Return the weight, and the tensors to free and to allocate again with it.
        """
        values, inverse = gathered[0].view(E4M3), gathered[1].view(torch.float32)[0]
        full = torch.empty_like(values, dtype=dtype) if out is None else local_part(out)
        with preserve_version_counter(full):  # as FSDP does in its own copies
            torch.mul(values.to(dtype), inverse.to(dtype), out=full)
        for tensor in gathered:
            tensor.untyped_storage().resize_(0)  # FSDP would keep it as long as the weight
        return full, (full,)


def gather_in_float8(model: nn.Module) -> None:
    """Gather the weights of modules with `gathers_float8` in 8 bits, where FSDP shards them evenly over several ranks.

    `model`: with its parameters allocated, because their local tensors carry the functions.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in (unit for module in modules for unit in fsdp_units(module)):
        scales = UnitScales()
        for param in unit.fsdp_params:
            shards, rows = param.mesh_info.shard_mesh_size, local_rows(param)
            is_even = shards > 1 and rows.shape[0] * shards == full_shape(param)[0]
            module, name = owner_and_name(param)
            if is_even and name == "weight" and getattr(module, "gathers_float8", False):
                gather = Float8Gather(scales, rows)
                gather_by(param, gather.pack, gather.expand)
