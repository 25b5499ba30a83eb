"""AdamW's step on a shard, from the gradient to the weight, without temporaries of the shard's size.

On a CPU it computes a piece of the shard at a time, so that temporaries stay in its cache. Elsewhere it is compiled: an
element is read and written once.

A weight in bfloat16 has 8 bits of precision, and plain addition loses changes below 1/512 of it. There are two ways to
preserve them: `add_with_lost` and `stochastically_rounded`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchtitan.core import keyed_rng
from torchtitan.core.fused import Fused
from torchtitan.optimizers import moments
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.moments import BLOCK, Adam, AdamNumbers, Columns, Options, Packed, State
from torchtitan.optimizers.pieces import Index, piece_size, pieces


class Addition(NamedTuple):
    """The way a step adds its change to the weight: multiplied by `times`, unless it has `lost` or `key`.

    These are for weights in bfloat16. `lost`: this rank's shard of the rounding errors, for `add_with_lost`. `key`: of
    the random numbers, for `stochastically_rounded`.
    """

    times: float = 1.0
    lost: torch.Tensor | None = None
    key: int | None = None


class Packing(NamedTuple):
    """The parts of moments in 8 bits that a step reads in addition to their codes and scales.

    `tables`: codebooks and code tables of both. `old_scales`: of both before the step, if the scales are new already.
    """

    columns: Columns
    tables: tuple[torch.Tensor, ...]
    old_scales: tuple[torch.Tensor, ...] | None = None


def step_by_adam(
    adam: Adam, parameter: torch.Tensor, state: State, group: Options, decay: float, addition: Addition
) -> None:
    """Step a parameter of any shape, which has a gradient. `decay`: the factor of weight decay."""
    layout = Layout.of(parameter)
    assert parameter.grad is not None
    numbers = adam.numbers(state, group, group["lr"])
    weight = local(parameter.detach())  # the compiler would compile again for each shape of a Parameter
    gradient, stored = local(parameter.grad), adam.stored(state, layout)
    packing = _packing(Packed(layout), gradient, stored, numbers) if adam.packs(layout) else None
    offset = layout.offset
    if packing is not None and packing.old_scales is None and weight.shape[-1] % BLOCK == 0:
        # in rows of one block, so that the step is compiled once for all shapes
        weight, gradient, offset = weight.view(-1, BLOCK), gradient.reshape(-1, BLOCK), (0, 0)
        stored = [stored[0].view(-1, BLOCK), stored[1].view(-1, 1), stored[2].view(-1, BLOCK), stored[3].view(-1, 1)]
    elif not offset:
        weight, gradient, stored, offset = weight[None], gradient[None], [tensor[None] for tensor in stored], (0,)
        addition = addition._replace(lost=None if addition.lost is None else addition.lost[None])
    step = _fused_step if _compiles(weight, packing) else _step_in_pieces
    step(weight, gradient, stored, packing, addition, offset, numbers, decay, adam.eps_first)


def _packing(packed: Packed, gradient: torch.Tensor, stored: Sequence[torch.Tensor], numbers: AdamNumbers) -> Packing:
    """Return the packing of moments. If columns are sharded, all ranks that share a row compute the scales first."""
    device = gradient.device
    tables = [table(signed, device) for table in (moments.codebook, moments.code_table) for _, signed in Adam.KEYS]
    packing = Packing(packed.columns, tuple(tables))
    if packed.layout.is_cut(-1):
        packing = packing._replace(old_scales=tuple(scales.clone() for scales in stored[1::2]))
        for scales in stored[1::2]:
            scales.zero_()
        _scales_in_pieces(gradient, stored, packing, numbers)
        for scales in stored[1::2]:
            packed.agree(scales)
    return packing


def _compiles(weight: torch.Tensor, packing: Packing | None) -> bool:
    """Return True if a step is compiled.

    With packed moments, only rows of one block are. An earlier form of this step had wrong scales in rows of several,
    compiled for a CPU by torch 2.13; the present one is right for [32, 512] and [32, 700]. The cause is not known.
    """
    return weight.device.type != "cpu" and (packing is None or weight.shape[-1] == BLOCK)


def _moved(
    gradient: torch.Tensor, stored: Sequence[torch.Tensor], packing: Packing | None, numbers: AdamNumbers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments after the step, in the gradient's dtype; those stored in this dtype are moved in place."""
    if packing is None:
        first, second = (tensor.to(gradient.dtype) for tensor in stored)
    else:
        first, second = (
            moments.unpacked(codes, scales, book, packing.columns, gradient.dtype)
            for codes, scales, book in zip(
                stored[::2], packing.old_scales or stored[1::2], packing.tables[:2], strict=True
            )
        )
    moments.move(first, second, gradient, numbers)
    return first, second


def _step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    stored: Sequence[torch.Tensor],
    packing: Packing | None,
    addition: Addition,
    offset: tuple[int, ...],
    numbers: AdamNumbers,
    decay: float,
    eps_first: bool,
) -> None:
    """Step a piece of a shard. `stored`: both moments, or the codes and scales of each; `offset`: of the piece."""
    gradient = gradient.to(torch.promote_types(weight.dtype, torch.float32))
    both = _moved(gradient, stored, packing, numbers)
    if packing is not None:
        for number, moment in enumerate(both):
            codes, scales = stored[2 * number : 2 * number + 2]
            if packing.old_scales is None:
                moments.set_scales(scales, moment, packing.columns)
            signed, table = Adam.KEYS[number][1], packing.tables[2 + number]
            codes.copy_(moments.packed(moment, scales, signed, table, packing.columns))
    elif stored[0].dtype != gradient.dtype:
        for tensor, moment in zip(stored, both, strict=True):
            tensor.copy_(moment)
    change = moments.adam_change(*both, numbers, eps_first)
    if addition.lost is not None:
        add_with_lost(weight, addition.lost, change, decay)
    elif addition.key is not None:
        total = weight.to(change.dtype).mul_(decay).add_(change)
        weight.copy_(stochastically_rounded(total, addition.key, offset))
    else:
        add(weight, change, decay, addition.times)


def _step_in_pieces(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    stored: Sequence[torch.Tensor],
    packing: Packing | None,
    addition: Addition,
    offset: tuple[int, ...],
    *numbers: object,
) -> None:
    """Do as `_step`, a piece after the other."""
    for index in _pieces(weight, packing):
        piece_packing, lost = _packing_at(packing, index), addition.lost
        piece_addition = addition if lost is None else addition._replace(lost=lost[index])
        start = tuple(begin + (cut.start or 0) for begin, cut in zip(offset, index, strict=False))
        start += offset[len(index) :]
        at = (weight[index], gradient[index], [tensor[index] for tensor in stored])
        _step(*at, piece_packing, piece_addition, start, *numbers)  # type: ignore[arg-type]


def _pieces(weight: torch.Tensor, packing: Packing | None) -> list[Index]:
    """Return the indices of pieces, of whole rows if moments are packed."""
    size, shape = piece_size(weight), weight.shape
    if packing is not None:
        size, shape = max(1, size // max(1, shape[-1])), shape[:-1]
    return list(pieces(shape, size))


def _packing_at(packing: Packing | None, index: Index) -> Packing | None:
    if packing is None or packing.old_scales is None:
        return packing
    return packing._replace(old_scales=tuple(scales[index] for scales in packing.old_scales))


def _scales_in_pieces(
    gradient: torch.Tensor, stored: Sequence[torch.Tensor], packing: Packing, numbers: AdamNumbers
) -> None:
    """Set this rank's scales of the moments after the step; the moments themselves stay as they are."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    for index in _pieces(gradient, packing):
        at = _packing_at(packing, index)
        both = _moved(gradient[index].to(dtype), [tensor[index] for tensor in stored], at, numbers)
        for scales, moment in zip(stored[1::2], both, strict=True):
            moments.set_scales(scales[index], moment, packing.columns)


_fused_step = Fused(_step, _step_in_pieces, dynamic=True)


def add(weight: torch.Tensor, change: torch.Tensor, decay: float, times: float) -> None:
    """Set the weight to weight * decay + times * change (of its shape), rounded once if dtypes differ."""
    if weight.dtype == change.dtype:
        weight.mul_(decay).add_(change, alpha=times)
    else:
        weight.copy_(weight.to(change.dtype).mul_(decay).add_(change, alpha=times))


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

    `key`: see keyed_rng.key_of; `offset`: index of the first element in the full tensor.
    """
    values = values.float()
    noise = keyed_rng.hashed(key, offset, values.shape, values.device).bitwise_and_(0xFFFF)
    lifted = (values.view(torch.int32) + noise.int()).bitwise_and_(-0x10000)  # bfloat16 is the upper half of float32
    return torch.where(values.isfinite(), lifted.view(torch.float32), values).to(torch.bfloat16)
