"""FSDP's collectives with quantized messages: int8 or float8 gathers of parameters, int8 or int4 reductions.

A message holds blocks of 32 numbers, each as signed integers and one byte for the block's scale, a power of two: the
formats MXINT8 and its 4-bit analog (OCP Microscaling Formats 1.0, sections 5.3 and 6.3). The receiver multiplies, which
is exact in float32 and, for 8 bits, in bfloat16. A number changes by at most max|block| / (2^(bits - 1) - 1/2)
(`error_bound`). Rounding is to the nearest, so a message depends on its numbers only: nothing is drawn, and a resumed
run repeats its bits. No block spans two parameters, so ranks round copies of a parameter alike, also where tensor
parallel splits its neighbors. A block with NaN or infinity arrives without any finite number.

ZeRO++: Wang et al., arXiv 2306.10209, sections 3.1 (qwZ) and 3.3 (qgZ).

Weights are gathered in float8 (FSDP2's all-gather extensions) for linears that multiply in float8 with one scale. Each
rank sends its rows in 8 bits, rounded with the scale of the full matrix. The gathered matrix is expanded, which is
exact, and a linear that rounds it again gets the same numbers. So results have the same bits as with a gather in 16
bits, at half of the traffic, and modules see ordinary parameters.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from torchtitan.core.errors import JobError
from torchtitan.core.float8 import E4M3, power_of_two
from torchtitan.parallelisms.fsdp_messages import BLOCK, PIECE, block_bytes, message_bytes, split_parts
from torchtitan.torch_internals.dispatch import foreach_norm, preserve_version_counter
from torchtitan.torch_internals.dtensor import local_part
from torchtitan.torch_internals.fsdp import (
    DefaultAllGather,
    DefaultReduceScatter,
    fsdp_units,
    full_shape,
    gather_by,
    local_rows,
    local_shard,
    owner_and_name,
)

MANTISSA_BITS, MAX_EXPONENT = 23, 254
"""Of float32: bits below the exponent, and the largest exponent field of a finite number."""


def error_bound(largest: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the largest change of a number in a block with this largest absolute value, both of any shape.

    It is half of the scale, as the scale is less than twice what maps `largest` to the largest integer.
    """
    return largest / (2 ** (bits - 1) - 0.5)


def pack(rows: torch.Tensor, sizes: Sequence[int], bits: int) -> torch.Tensor:
    """Quantize each row of [R, N] floating-point numbers; return messages [R, message_bytes(sizes, bits)], uint8.

    `sizes`: of the parts of a row, such as parameters; no block spans two.
    """
    rows = rows.float()
    if any(size % BLOCK for size in sizes):
        rows = torch.cat([F.pad(part, (0, -part.size(1) % BLOCK)) for part in rows.split(sizes, 1)], 1)
    blocks = rows.view(len(rows), -1, BLOCK)
    largest_integer = 2 ** (bits - 1) - 1
    # exponent field of the largest value, one higher where that would round to above the largest integer
    largest = blocks.abs().amax(2, keepdim=True) * ((largest_integer + 1) / (largest_integer + 0.5))
    field = largest.view(torch.int32) >> MANTISSA_BITS & 255
    field = torch.where(field > MAX_EXPONENT, field, (field - (bits - 2)).clamp_(min=0))
    reciprocal = ((MAX_EXPONENT - field).clamp_(min=0) << MANTISSA_BITS).view(torch.float32)
    integers = (blocks * reciprocal).round_().clamp_(-largest_integer, largest_integer).to(torch.int8)
    if bits == 4:
        integers = (integers[..., ::2] & 15) | (integers[..., 1::2] << 4)
    return torch.cat([integers.view(torch.uint8), field.to(torch.uint8)], dim=2).flatten(1)


def unpack(messages: torch.Tensor, sizes: Sequence[int], bits: int) -> torch.Tensor:
    """Return the numbers of messages [R, message_bytes(sizes, bits)] as float32 [R, sum of sizes]."""
    blocks = messages.view(len(messages), -1, block_bytes(bits))
    integers = blocks[..., :-1].view(torch.int8)
    if bits == 4:
        integers = torch.stack([integers << 4, integers], dim=3).flatten(2) >> 4  # shifts keep the sign
    # an exponent field of 255 is infinity, and infinity times zero NaN
    scales = (blocks[..., -1:].to(torch.int32) << MANTISSA_BITS).view(torch.float32)
    rows = (integers * scales).flatten(1)
    if any(size % BLOCK for size in sizes):
        parts = rows.split([-(-size // BLOCK) * BLOCK for size in sizes], 1)
        rows = torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1)
    return rows


class QuantizedAllGather(DefaultAllGather):
    """Gather shards of parameters in int8. All ranks compute with the same numbers, the owner of a shard too.

    A second copy for backward (reshard_after_forward) consists of whole shards of forward. Its blocks are those of the
    first gather, so their numbers are representable and backward computes with the weights of forward, bit for bit.
    """

    def __init__(self, shards: int, sizes: Sequence[int]) -> None:
        """`shards`: their number. `sizes`: of this rank's shards of the parameters."""
        self.shards, self.sizes = shards, sizes

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor`, flat [ranks x N], from `input_tensor`, flat [N], before it returns."""
        sizes = [size for size in self.sizes for _ in range(self.shards // group.size())]
        message = pack(input_tensor.view(1, -1), sizes, 8)
        messages = message.new_empty(group.size(), message.size(1))
        super().__call__(messages, message, group)
        output = output_tensor.view(group.size(), -1)
        start = begin = 0  # of a piece in the output, and of its message
        for piece in split_parts(sizes, PIECE // group.size()):
            end, message_end = start + sum(piece), begin + message_bytes(piece, 8)
            output[:, start:end] = unpack(messages[:, begin:message_end], piece, 8)
            start, begin = end, message_end
        return None


class QuantizedReduceScatter(DefaultReduceScatter):
    """Sum gradients in float32 from quantized messages, with an all-to-all in each of `hops`.

    `hops`: groups that together span all ranks, neighbors first, such as the ranks of a machine and then those with the
    same place in other machines. Empty: all ranks at once. A rank adds its numbers unrounded.
    """

    def __init__(self, bits: int, hops: Sequence[dist.ProcessGroup], sizes: Sequence[int]) -> None:
        """`sizes`: of this rank's shards of the gradients."""
        self.bits, self.hops, self.sizes = bits, hops, list(sizes)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor`, flat [N], with this rank's part of the sum of `input_tensor`, flat [ranks x N]."""
        size = output_tensor.numel()
        if size != sum(self.sizes):  # FSDP passes only parameters with a gradient
            raise JobError(
                f"only {size} of {sum(self.sizes)} numbers of an FSDP unit have gradients, as parameters are unused: "
                'set parallelism.fsdp_quantized_reduce = "none"'
            )
        parts, start = input_tensor.view(-1, size), 0
        for sizes in split_parts(self.sizes, PIECE // len(parts)):
            end = start + sum(sizes)
            sums = parts[:, start:end].float()
            for hop in self.hops or (group,):  # the parts for the ranks at each place of the group become one row
                rows = sums.view(-1, hop.size(), end - start).transpose(0, 1).flatten(1)
                sums = self._sum_of_rows(rows, hop, sizes)
            output_tensor[start:end] = sums
            start = end
        return None

    def _sum_of_rows(self, rows: torch.Tensor, group: dist.ProcessGroup, sizes: list[int]) -> torch.Tensor:
        """Send row i of [ranks of the group, M] to the group's rank i; return the sum [M] of the rows for this rank.

        `sizes`: of the parts of a piece, of which a row has one or several.
        """
        sizes = sizes * (rows.size(1) // sum(sizes))
        messages = pack(rows, sizes, self.bits)
        received = torch.empty_like(messages)
        dist.all_to_all_single(received, messages, group=group)
        summands = unpack(received, sizes, self.bits)
        summands[group.rank()] = rows[group.rank()]
        return summands.sum(0)


def quantize_collectives(
    modules: Iterable[FSDPModule], mesh: DeviceMesh, inner: int, gather_int8: bool, reduce_bits: int
) -> None:
    """Quantize the gathers of the units' parameters to int8, and the reductions of their gradients to `reduce_bits`.

    0 bits leave reductions as they are. With `inner` above 1 those over `mesh`, [shards] or [replicas, shards] of all
    ranks, take two hops: among `inner` neighboring shards and then between such groups. All ranks call it together.
    """
    hops = reduction_hops(mesh, inner) if reduce_bits and inner > 1 else []
    for module in modules:
        for unit in fsdp_units(module):
            sizes = [local_shard(parameter).numel() for parameter in unit.fsdp_params]
            if gather_int8:
                module.set_custom_all_gather(QuantizedAllGather(unit.mesh_info.shard_mesh_size, sizes))
            if reduce_bits:
                unit_hops = hops if unit.mesh_info.mesh == mesh else []
                module.set_custom_reduce_scatter(QuantizedReduceScatter(reduce_bits, unit_hops, sizes))


def reduction_hops(mesh: DeviceMesh, inner: int) -> list[dist.ProcessGroup]:
    """Return this rank's group of `inner` neighboring shards, and its group across these, one shard from each."""
    hops = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, mesh.size(-1) // inner, inner))
    return [hops.get_group(2), hops.get_group(1)]


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
