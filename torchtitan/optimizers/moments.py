"""The moments of Adam and Adafactor and the updates computed from them, for this rank's shard of a tensor.

The tensor may be a parameter, or a gradient's projection, which is smaller. The optimizers here combine one of these
with a way to apply the update.

Moments can be stored in 8 bits (arXiv:2110.02861): blocks of 256 with a scale each, and 256 levels between -1 and 1, or
0 and 1, which are denser near 0. A block never crosses rows of its tensor (the last block of a row may be shorter), so
sharding does not change it. If columns are sharded, ranks that share a block take the maximum of their scales.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from torchtitan.core.fused import NEVER, Fused
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.spec import BLOCK, SMALLEST
from torchtitan.torch_internals.dispatch import unset_fake_temporarily


@cache
@unset_fake_temporarily()  # a rehearsal, too, caches values
def codebook(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the [256] levels in ascending order, float32.

    These are 0, 1 and for each of seven powers of ten the centres of equal steps, twice as many for each higher power.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float64)
        centres = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).tolist()
        values += centres + [-centre for centre in centres] * signed
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
@unset_fake_temporarily()
def code_table(signed: bool, device: torch.device) -> torch.Tensor:
    """Return [2^16] by the upper 16 bits of a float32 (see `_ordered`): 2^16 times the code, for `nearest_codes`.

    A border within the 2^16 floats of an entry is stored as what its lower 16 bits lack to 2^16 - 1, so that adding the
    bits of a larger float carries over to the next code. No entry has two borders.
    """
    values = codebook(signed, torch.device("cpu"))
    borders = torch.cat([(values[:-1] + values[1:]) / 2, torch.full((1,), torch.inf)])
    cells = torch.arange(2**16, dtype=torch.int32)[:, None] << 16
    ends = _ordered((cells | torch.tensor([0, 0xFFFF], dtype=torch.int32)), signed).view(torch.float32)
    ends = ends.where(ends.isfinite().all(1, keepdim=True), 0).clamp(-1, 1)
    low, high = torch.bucketize(ends, borders).to(torch.int32).unbind(1)
    missing = 0xFFFF - (_ordered(borders.view(torch.int32), signed).index_select(0, low) & 0xFFFF)
    return ((low << 16) + torch.where(high > low, missing, 0)).to(device)


def _ordered(bits: torch.Tensor, signed: bool) -> torch.Tensor:
    """Map the bits of float32, int32 of any shape, to integers in the order of the floats; it is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF) if signed else bits


def nearest_codes(values: torch.Tensor, signed: bool, table: torch.Tensor) -> torch.Tensor:
    """Return the int32 codes of the nearest levels for float32 between -1 and 1, of any shape.

    It equals torch.bucketize by the midpoints between levels, in a fraction of its time. `table`: `code_table`.
    """
    bits = _ordered(values.contiguous().view(torch.int32), signed)
    cells = (bits >> 16).bitwise_and_(0xFFFF)
    return _entries(table, cells).add_(bits & 0xFFFF).bitwise_right_shift_(16)


def _entries(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the entries of a table [n] at int32 indices of any shape.

    An embedding has no negative indices: compiled, it takes a fifth less time than `index_select`, and in eager more.
    """
    if torch.compiler.is_compiling():
        return torch.nn.functional.embedding(indices, table[:, None]).squeeze(-1)
    return table.index_select(0, indices.flatten()).view(indices.shape)


class Packed:
    """A moment stored as codes [.., n], uint8, and the blocks' largest magnitudes [.., n / 256], float32."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.scales = layout.resized(-1, -(-layout.shape[-1] // BLOCK))
        self.columns = layout.offset[-1] // BLOCK, layout.offset[-1] % BLOCK

    def begin(self, state: dict[str, torch.Tensor], key: str, device: torch.device, signed: bool) -> None:
        """Initialize the moment to zeros."""
        zero = int(torch.searchsorted(codebook(signed, torch.device("cpu")), 0.0))
        codes = torch.full(self.layout.local_shape, zero, dtype=torch.uint8, device=device)
        state[f"{key}_codes"] = self.layout.placed(codes)
        state[f"{key}_scales"] = self.scales.zeros(torch.float32, device)

    def read(self, state: dict[str, torch.Tensor], key: str, signed: bool, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's shard of the moment, [.., columns of this rank]."""
        codes, scales = local(state[f"{key}_codes"]), local(state[f"{key}_scales"])
        return unpacked(codes, scales, codebook(signed, codes.device), self.columns, dtype)

    def write(self, state: dict[str, torch.Tensor], key: str, signed: bool, values: torch.Tensor) -> None:
        """Store `values` [.., columns of this rank]. If columns are sharded, all ranks that share a row call it."""
        codes, scales = local(state[f"{key}_codes"]), local(state[f"{key}_scales"])
        set_scales(scales.zero_(), values, self.columns)
        self.agree(scales)
        pack(codes, scales, values, signed, code_table(signed, codes.device), self.columns, False)

    def agree(self, scales: torch.Tensor) -> None:
        """Take the maximum of this rank's scales [.., n / 256] over the ranks that share their rows, in place."""
        if self.layout.is_cut(-1):
            self.layout.summed(scales, -1, op=dist.ReduceOp.MAX)


Columns = tuple[int, int]
"""The first block of a shard's columns, and how many elements of this block lie on another rank."""


def _with_scales(values: torch.Tensor, scales: torch.Tensor, columns: Columns, combine: Any) -> torch.Tensor:
    """Return combine(values, scales of their blocks), of the shape of `values` [.., n]; scales [.., blocks]."""
    first, skipped = columns
    count = -(-(skipped + values.shape[-1]) // BLOCK)
    scales = scales[..., first : first + count].to(values.dtype)
    if not skipped and values.shape[-1] == count * BLOCK:
        return combine(values.unflatten(-1, (count, BLOCK)), scales[..., None]).flatten(-2)
    return combine(values, scales.repeat_interleave(BLOCK, -1)[..., skipped : skipped + values.shape[-1]])


def unpacked(
    codes: torch.Tensor, scales: torch.Tensor, book: torch.Tensor, columns: Columns, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values [.., n] of codes [.., n] and scales [.., blocks]; `book`: `codebook`."""
    return _with_scales(_entries(book, codes.int()).to(dtype), scales, columns, torch.mul)


def set_scales(scales: torch.Tensor, values: torch.Tensor, columns: Columns) -> None:
    """Set the scales [.., blocks] of this rank's columns to the largest magnitudes in the blocks of values [.., n]."""
    first, skipped = columns
    count = -(-(skipped + values.shape[-1]) // BLOCK)
    if values.shape[-1]:
        magnitudes, after = values.abs(), count * BLOCK - skipped - values.shape[-1]
        if skipped or after:
            magnitudes = torch.nn.functional.pad(magnitudes, (skipped, after))
        scales[..., first : first + count] = magnitudes.unflatten(-1, (count, BLOCK)).amax(-1)


def pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    signed: bool,
    table: torch.Tensor,
    columns: Columns,
    sets_scales: bool,
) -> None:
    """Store values [.., n] as codes [.., n], and scales [.., blocks] if these are to be set; `table`: `code_table`.

    Other scales must not be less than the largest magnitudes of their blocks.
    """
    if sets_scales:
        set_scales(scales, values, columns)
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    codes.copy_(nearest_codes(_with_scales(values, scales, columns, torch.div).float(), signed, table))


State = dict[str, Any]
Options = Mapping[str, Any]
"""Options of a parameter's group."""


class Moments(Protocol):
    def begin(self, state: State, layout: Layout, group: Options, dtype: torch.dtype, device: torch.device) -> None:
        """Initialize the state of a tensor before its first gradient. `dtype`: the parameter's."""
        ...

    def change(self, gradient: torch.Tensor, layout: Layout, state: State, group: Options, rate: float) -> torch.Tensor:
        """Return the update to add to this rank's shard, of its shape like `gradient`, in the gradient's dtype."""
        ...


class Adam:
    """Two moments in the dtype of the parameter, or `packed` in 8 bits for large tensors.

    Not packed, it computes the operations of torch.optim.AdamW after weight decay: float32 results are bitwise equal.
    `eps_first`: add eps to the root of the second moment before its bias correction, as GaLore's library and the former
    AdamW of transformers do. Early steps are then shorter where gradients are small.
    """

    KEYS = (("exp_avg", True), ("exp_avg_sq", False))
    """Names of the moments, with True for the signed one."""

    def __init__(self, packed: bool = False, eps_first: bool = False):
        self.packed, self.eps_first = packed, eps_first

    def packs(self, layout: Layout) -> bool:
        return self.packed and layout.numel >= SMALLEST

    def begin(self, state: State, layout: Layout, group: Options, dtype: torch.dtype, device: torch.device) -> None:
        state["step"] = 0
        dtype = torch.float32 if self.packed and dtype != torch.float64 else dtype
        for key, signed in self.KEYS:
            if self.packs(layout):
                Packed(layout).begin(state, key, device, signed)
            else:
                state[key] = layout.zeros(dtype, device)

    def read(self, state: State, layout: Layout, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return both moments, of this rank's shard's shape, to be modified in place and passed to `write`."""
        if self.packs(layout):
            packed = Packed(layout)
            return [packed.read(state, key, signed, dtype) for key, signed in self.KEYS]
        return [local(state[key]).to(dtype) for key, _ in self.KEYS]

    def stored(self, state: State, layout: Layout) -> list[torch.Tensor]:
        """Return this rank's shards of both moments, of the shard's shape, or of the codes and the scales of each."""
        suffixes = ("_codes", "_scales") if self.packs(layout) else ("",)
        return [local(state[key + suffix]) for key, _ in self.KEYS for suffix in suffixes]

    def write(self, state: State, layout: Layout, moments: list[torch.Tensor]) -> None:
        """Store both moments, of the shapes that `read` returned."""
        for (key, signed), moment in zip(self.KEYS, moments, strict=True):
            if self.packs(layout):
                Packed(layout).write(state, key, signed, moment)
            elif local(state[key]) is not moment:
                local(state[key]).copy_(moment)

    def change(self, gradient: torch.Tensor, layout: Layout, state: State, group: Options, rate: float) -> torch.Tensor:
        numbers = self.numbers(state, group, rate)
        read = self.read(state, layout, gradient.dtype)
        change = _move_and_change(read, gradient, numbers, self.eps_first, self.packs(layout))
        self.write(state, layout, read)  # the update uses the moments before packing
        return change

    def numbers(self, state: State, group: Options, rate: float) -> "AdamNumbers":
        """Count a step; return its numbers."""
        state["step"] += 1
        beta1, beta2 = group["beta1"], group["beta2"]
        correction = (1 - beta2 ** state["step"]) ** 0.5
        return AdamNumbers((beta1, beta2), group["eps"], correction, -rate / (1 - beta1 ** state["step"]))


class AdamNumbers(NamedTuple):
    """Numbers of a step. `correction`: root of the second moment's bias; `rate`: with the first moment's, negative."""

    betas: tuple[float, float]
    eps: float
    correction: float
    rate: float


def move(
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    betas: tuple[float, float],
    packed: bool = False,
) -> None:
    """Move both moments towards the gradient and its square, in place. All tensors have one shape and dtype.

    `packed`: as moments in 8 bits are moved, by products and sums that have the same bits compiled. torch.optim.AdamW
    and thus the others use lerp_, which eager computes with one rounding less.
    """
    beta1, beta2 = betas
    if packed:
        first.mul_(beta1).add_(gradient * (1 - beta1))
        second.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
    else:
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)


def adam_denominator(second: torch.Tensor, numbers: AdamNumbers, eps_first: bool) -> torch.Tensor:
    """Return the denominator of the update, of the shape of the second moment. `eps_first`: see `Adam`."""
    if eps_first:
        return second.sqrt().add_(numbers.eps).div_(numbers.correction)
    return second.sqrt().div_(numbers.correction).add_(numbers.eps)


def adam_change(first: torch.Tensor, second: torch.Tensor, numbers: AdamNumbers, eps_first: bool) -> torch.Tensor:
    """Return the update to add to a weight, of the moments' shape. `eps_first`: see `Adam`."""
    return (first * numbers.rate).div_(adam_denominator(second, numbers, eps_first))


def _moments_and_change(
    moments: list[torch.Tensor], gradient: torch.Tensor, numbers: AdamNumbers, eps_first: bool, packed: bool
) -> torch.Tensor:
    """Move both moments in place; return the update. All tensors have one shape and dtype. `packed`: see `move`."""
    first, second = moments
    move(first, second, gradient, numbers.betas, packed)
    return adam_change(first, second, numbers, eps_first)


_move_and_change = Fused(_moments_and_change, dynamic=True, after=NEVER)


class AdafactorMoments:
    """The second moment of a matrix as one number per row and one per column (arXiv:1804.04235, algorithm 4).

    The rate comes from the schedule, not from the paper's relative step. With `beta1` there is also a running mean of
    updates.
    """

    DECAY = -0.8  # exponent of 1 - t^-0.8, the weight of the old mean in step t

    def begin(self, state: State, layout: Layout, group: Options, dtype: torch.dtype, device: torch.device) -> None:
        state["step"] = 0
        if len(layout.shape) < 2:
            state["exp_avg_sq"] = layout.zeros(dtype, device)
        else:
            state["exp_avg_sq_row"] = layout.resized(-1, 1).zeros(dtype, device)
            state["exp_avg_sq_col"] = layout.resized(-2, 1).zeros(dtype, device)
        if group["beta1"]:
            state["exp_avg"] = layout.zeros(dtype, device)

    def change(self, gradient: torch.Tensor, layout: Layout, state: State, group: Options, rate: float) -> torch.Tensor:
        state["step"] += 1
        fresh = _scalar(state["step"] ** self.DECAY, gradient)
        if "exp_avg_sq" in state:
            second = _moved(local(state["exp_avg_sq"]), gradient.square() + group["tiny"], fresh)
            change = gradient * second.rsqrt()
            total = change.square().sum()
        else:
            sums = _fused_square_sums(gradient, group["tiny"])
            for dim, part in zip((-1, -2), sums, strict=True):
                layout.summed(part, dim)
            stored = local(state["exp_avg_sq_row"]), local(state["exp_avg_sq_col"])
            rows, columns, total = _fused_means(sums, stored, layout.shape[-2:], fresh)
            layout.resized(-1, 1).summed(total, -2)
            change, total = _fused_change(gradient, rows, columns, total, layout.shape[-2])
        _fused_shortening(change, layout.summed(total), layout.numel, group["clip"], rate)
        if not group["beta1"]:
            return change
        return _moved(local(state["exp_avg"]), change, _scalar(1 - group["beta1"], change))


def _scalar(number: float, like: torch.Tensor) -> torch.Tensor:
    """Return a number as a tensor, because lerp would be compiled for each number."""
    return torch.full((), number, dtype=like.dtype, device=like.device)


def _moved(stored: torch.Tensor, towards: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Update a stored running mean by `towards`, of its shape; return it in the dtype of this. `weight`: a scalar."""
    mean = stored.to(towards.dtype)
    mean.lerp_(towards, weight)
    if mean is not stored:
        stored.copy_(mean)
    return mean


def _square_sums(gradient: torch.Tensor, tiny: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums of the squares of [.., m, n] plus `tiny`, of rows [.., m, 1] and of columns [.., 1, n]."""
    square = gradient.square() + tiny
    return square.sum(-1, keepdim=True), square.sum(-2, keepdim=True)


def _means(
    sums: tuple[torch.Tensor, ...], stored: tuple[torch.Tensor, ...], size: tuple[int, ...], weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Update the stored means by sums of rows [.., m, 1] and columns [.., 1, n] of a matrix of that full size.

    Return both means, and the sum [.., 1, 1] of the rows' means.
    """
    rows = _moved(stored[0], sums[0] / size[1], weight)
    columns = _moved(stored[1], sums[1] / size[0], weight)
    return rows, columns, rows.sum(-2, keepdim=True)


def _change(
    gradient: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, total: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [.., m, n] over the root of its factored second moment, and the sum of squares of the result.

    `total` [.., 1, 1]: sum of the means of `count` rows.
    """
    change = gradient * (rows / (total / count)).rsqrt() * columns.rsqrt()
    return change, change.square().sum()


def _shorten(change: torch.Tensor, total: torch.Tensor, count: int, limit: float, rate: float) -> None:
    """Multiply `change` by -rate and limit its root of mean squares, from their `total` of `count` elements."""
    change.mul_(-rate / ((total / count).sqrt() / limit).clamp_min(1.0))


_fused_square_sums, _fused_means, _fused_change, _fused_shortening = (
    Fused(formula, dynamic=True, after=NEVER) for formula in (_square_sums, _means, _change, _shorten)
)
