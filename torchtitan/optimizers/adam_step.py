"""AdamW's step on a shard, from the gradient to the weight, without temporaries of the shard's size.

On a CPU it computes a piece of the shard at a time, so that temporaries stay in its cache. Elsewhere it is compiled: an
element is read and written once.

A weight in bfloat16 has 8 bits of precision, and plain addition loses changes below 1/512 of it. There are two ways to
preserve them: `add_with_lost` and `stochastically_rounded`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchtitan.core import random_draws
from torchtitan.core.fused import NEVER, Fused
from torchtitan.optimizers import moments
from torchtitan.optimizers.layout import ON_CPU, Index, Layout, local, pieces_of
from torchtitan.optimizers.moments import BLOCK, Adam, AdamNumbers, Columns, Options, Packed, State


class Addition(NamedTuple):
    """The way a step adds its change to the weight: multiplied by `times`, unless it has `lost` or `key`.

    These are for weights in bfloat16. `lost`: this rank's shard of the rounding errors, for `add_with_lost`. `key`: of
    the random numbers, for `stochastically_rounded`.
    """

    times: float = 1.0
    lost: torch.Tensor | None = None
    key: int | None = None


class PackingTables(NamedTuple):
    """The parts of moments in 8 bits that a step reads in addition to their codes and scales.

    `tables`: codebooks and code tables of both. `old_scales`: of both before the step, if the scales are new already.
    """

    columns: Columns
    tables: tuple[torch.Tensor, ...]
    old_scales: tuple[torch.Tensor, ...] | None = None


class Shard(NamedTuple):
    """This rank's shard of all tensors that a step reads and changes, or a piece of it.

    `stored`: both moments, or the codes and scales of each. `offset`: of its first element in the full tensor.
    """

    weight: torch.Tensor
    gradient: torch.Tensor
    stored: Sequence[torch.Tensor]
    packing: PackingTables | None
    addition: Addition
    offset: tuple[int, ...]

    def at(self, index: Index) -> "Shard":
        """Return a piece."""
        packing, lost = self.packing, self.addition.lost
        if packing is not None and packing.old_scales is not None:
            packing = packing._replace(old_scales=tuple(scales[index] for scales in packing.old_scales))
        addition = self.addition if lost is None else self.addition._replace(lost=lost[index])
        offset = tuple(begin + (cut.start or 0) for begin, cut in zip(self.offset, index, strict=False))
        offset += self.offset[len(index) :]
        stored = [tensor[index] for tensor in self.stored]
        return Shard(self.weight[index], self.gradient[index], stored, packing, addition, offset)

    def pieces(self) -> Iterator["Shard"]:
        """Yield all pieces, of whole rows if moments are packed."""
        return map(self.at, pieces_of(self.weight, 1 if self.packing is None else self.weight.shape[-1]))


def step_by_adam(
    adam: Adam, parameter: torch.Tensor, state: State, group: Options, decay: float, addition: Addition
) -> None:
    """Step a parameter of any shape, which has a gradient. `decay`: the factor of weight decay."""
    layout = Layout.of(parameter)
    assert parameter.grad is not None
    numbers = adam.numbers(state, group, group["lr"])
    weight = local(parameter.detach())  # the compiler would compile again for each shape of a Parameter
    shard = Shard(weight, local(parameter.grad), adam.stored(state, layout), None, addition, layout.offset)
    if adam.packs(layout):
        shard = _with_packing(shard, Packed(layout), numbers)
    if shard.packing is not None and shard.packing.old_scales is None and weight.shape[-1] % BLOCK == 0:
        # in rows of one block, so that the step is compiled once for all shapes
        stored = [tensor.view(-1, size) for tensor, size in zip(shard.stored, (BLOCK, 1) * 2, strict=True)]
        weight, gradient = weight.view(-1, BLOCK), shard.gradient.reshape(-1, BLOCK)
        shard = shard._replace(weight=weight, gradient=gradient, stored=stored, offset=(0, 0))
    elif not shard.offset:
        shard = shard.at((None,))._replace(offset=(0,))  # type: ignore[arg-type]
    step = _fused_step if _is_fused(shard) else _step_in_pieces
    step(shard, numbers, decay, adam.eps_first)


def _with_packing(shard: Shard, packed: Packed, numbers: AdamNumbers) -> Shard:
    """Add the packing of moments. If columns are sharded, all ranks that share a row compute the scales first."""
    device, scales = shard.weight.device, shard.stored[1::2]
    tables = [table(signed, device) for table in (moments.codebook, moments.code_table) for _, signed in Adam.KEYS]
    packing = PackingTables(packed.columns, tuple(tables))
    if packed.layout.is_cut(-1):
        packing = packing._replace(old_scales=tuple(tensor.clone() for tensor in scales))
        for tensor in scales:
            tensor.zero_()
        for piece in shard._replace(packing=packing).pieces():
            for piece_scales, moment in zip(piece.stored[1::2], _moved(piece, numbers, stores=False), strict=True):
                moments.set_scales(piece_scales, moment, packing.columns)
        for tensor in scales:
            packed.agree(tensor)
    return shard._replace(packing=packing)


def _is_fused(shard: Shard) -> bool:
    """Return True if a step is compiled as one graph, where it is compiled.

    With packed moments, only rows of one block are. An earlier form of this step had wrong scales in rows of several,
    compiled for a CPU by torch 2.13; the present one is right for [32, 512] and [32, 700]. The cause is not known.
    """
    return shard.packing is None or shard.weight.shape[-1] == BLOCK


Pair = Sequence[torch.Tensor]
"""A tensor for each of the two moments."""


def _move_packed(
    codes: Pair,
    scales: Pair,
    gradient: torch.Tensor,
    betas: tuple[float, float],
    packing: PackingTables,
    dtype: torch.dtype,
    stores: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments after the step, in the dtype of computation; store them if `stores`.

    Codes [.., n] and scales [.., blocks] of both moments, the gradient [.., n].
    """
    columns, tables, old_scales = packing
    stored = zip(codes, old_scales or scales, tables[:2], strict=True)
    first, second = (moments.unpacked(*moment, columns, dtype) for moment in stored)
    moments.move(first, second, gradient.to(dtype), betas, packed=True)
    if stores:
        signs = [signed for _, signed in Adam.KEYS]
        for moment in zip(codes, scales, (first, second), signs, tables[2:], strict=True):
            moments.pack(*moment, columns, sets_scales=old_scales is None)
    return first, second


_fused_move_packed = Fused(_move_packed, dynamic=False, large=ON_CPU, after=2**29)
"""Compiled for full pieces on a CPU; eager computes the first second or two."""


def _moved(shard: Shard, numbers: AdamNumbers, stores: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments after the step, in the dtype of computation; store packed ones if `stores`.

    Those that are stored in the dtype of computation move in place.
    """
    dtype, packing, stored = torch.promote_types(shard.weight.dtype, torch.float32), shard.packing, shard.stored
    if packing is None:
        first, second = (tensor.to(dtype) for tensor in stored)
        moments.move(first, second, shard.gradient.to(dtype), numbers.betas)
        return first, second
    # a piece of rows of one block, which a step makes of most parameters; others are too many shapes to compile for
    is_piece = shard.weight.device.type == "cpu" and shard.weight.shape == (ON_CPU // BLOCK, BLOCK)
    move = _fused_move_packed if is_piece else _move_packed
    return move(stored[::2], stored[1::2], shard.gradient, numbers.betas, packing, dtype, stores)


def _step(shard: Shard, numbers: AdamNumbers, decay: float, eps_first: bool) -> None:
    """Step a shard or a piece of one."""
    weight, _, stored, packing, addition, offset = shard
    both = _moved(shard, numbers)
    if packing is None and stored[0].dtype != both[0].dtype:
        for tensor, moment in zip(stored, both, strict=True):
            tensor.copy_(moment)
    is_plain = addition.lost is None and addition.key is None and not torch.compiler.is_compiling()
    if is_plain and addition.times == 1 and weight.dtype == both[0].dtype:
        # the sum below in fewer passes, on a CPU with the same bits; compiled, `rate` may be a tensor (Fused)
        denominator = moments.adam_denominator(both[1], numbers, eps_first)
        weight.mul_(decay).addcdiv_(both[0], denominator, value=numbers.rate)
        return
    change = moments.adam_change(*both, numbers, eps_first)
    if addition.lost is not None:
        add_with_lost(weight, addition.lost, change, decay)
    elif addition.key is not None:
        total = weight.to(change.dtype).mul_(decay).add_(change)
        weight.copy_(stochastically_rounded(total, addition.key, offset))
    else:
        add(weight, change, decay, addition.times)


def _step_in_pieces(shard: Shard, *numbers: Any) -> None:
    """Do as `_step`, a piece after the other."""
    for piece in shard.pieces():
        _step(piece, *numbers)


_fused_step = Fused(_step, _step_in_pieces, dynamic=True, after=NEVER)


def _add(weight: torch.Tensor, change: torch.Tensor, decay: float, times: float) -> None:
    """Set the weight to weight * decay + times * change (of its shape), rounded once if dtypes differ."""
    weight.copy_(weight.to(change.dtype) * decay + change * times)  # `alpha` would be compiled for each value


def _add_in_place(weight: torch.Tensor, change: torch.Tensor, decay: float, times: float) -> None:
    if weight.dtype == change.dtype:
        weight.mul_(decay).add_(change, alpha=times)
    else:
        weight.copy_(weight.to(change.dtype).mul_(decay).add_(change, alpha=times))


add = Fused(_add, _add_in_place, dynamic=True, after=NEVER)


def add_with_lost(weight: torch.Tensor, lost: torch.Tensor, change: torch.Tensor, decay: float) -> None:
    """Set `weight` to weight * decay + lost + change, and `lost` to the rounding error. All tensors have one shape.

    The sum is computed in the dtype of `change`, so that weight decay, a small change too, loses nothing either.
    """
    exact_change = change + lost.to(change.dtype) + weight.to(change.dtype) * (decay - 1)
    total = weight.to(change.dtype) + exact_change
    rounded = _rounded(total, weight.dtype)
    weight.copy_(rounded)
    lost.copy_(total - rounded)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round values of any shape to `dtype`, and return them in their own dtype."""
    if dtype != torch.bfloat16 or values.dtype != torch.float32 or not torch.compiler.is_compiling():
        return values.to(dtype).to(values.dtype)
    # the compiler drops such a pair of conversions
    bits = values.view(torch.int32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000  # ties to even; bfloat16 is the upper half of float32
    return torch.where(values.isfinite(), nearest.view(torch.float32), values)


def stochastically_rounded(values: torch.Tensor, key: int, offset: tuple[int, ...]) -> torch.Tensor:
    """Round float32 [n, ..] to bfloat16, up with a probability equal to the remainder's share of the gap.

    `key`: see random_draws.key_of; `offset`: index of the first element in the full tensor.
    """
    values = values.float()
    noise = random_draws.hashed(key, offset, values.shape, values.device).bitwise_and_(0xFFFF)
    lifted = (values.view(torch.int32) + noise.int()).bitwise_and_(-0x10000)  # bfloat16 is the upper half of float32
    return torch.where(values.isfinite(), lifted.view(torch.float32), values).to(torch.bfloat16)
