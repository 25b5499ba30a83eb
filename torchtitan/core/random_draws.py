"""Random numbers that no plan changes: draws keyed by what they are for, and initial weights.

A draw is a 32-bit hash of a key, independent of the drawing order. The hash is two rounds of multiply and shift, in
int64 so that no product overflows and all devices agree; the multipliers are below 2^31.

Initial weights are a function of (seed, parameter name, global shape) only. Rows (the first dimension) are drawn in
blocks of about 65536 elements. Each block has its own generator, seeded by a hash of seed, name and block number. If a
row is larger and itself a matrix (an expert), its rows are drawn this way. A rank draws only the blocks that its shard
overlaps, so no rank ever holds a full tensor of a large model, and any number of ranks starts from the same bits.
Values are drawn on the CPU in float32, so another device, dtype or mesh starts from the same values too (up to the
cast).
"""

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.core.fused import NEVER, Fused
from torchtitan.torch_internals.dtensor import compute_local_shape_and_global_offset

MASK = 2**32 - 1
MULTIPLIERS = (0x7FEB352D, 0x21F0AAAD)  # odd, by C. Wellons' search for hashes without bias
STRIDES = (0x1E3779B1, 0x2545F491, 0x3C6EF35F)  # odd; one for each quantity that is counted in parallel


def key_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """Permute 32-bit numbers, element by element of an int64 tensor of any shape. Higher bits are ignored."""
    x = x & MASK
    for multiplier, shift in zip(MULTIPLIERS, (16, 15), strict=True):
        x = ((x ^ (x >> shift)) * multiplier) & MASK
    return x ^ (x >> 15)


def scramble_int32_(x: torch.Tensor) -> torch.Tensor:
    """Apply `scrambled` in place to 32-bit numbers in an int32 tensor of any shape, in half of the memory.

    Products wrap around to the same 32 bits; shifts keep the sign, so a mask clears the bits that they shift in.
    """
    for multiplier, shift in zip(MULTIPLIERS, (16, 15), strict=True):
        x ^= (x >> shift).bitwise_and_(MASK >> shift)
        x *= multiplier
    x ^= (x >> 15).bitwise_and_(MASK >> 15)
    return x


def of_tokens(key: str, samples: torch.Tensor, length: int) -> torch.Tensor:
    """Return a 32-bit number, int64 [B, length], for each token of the samples with indices [B]."""
    tokens = torch.arange(length, device=samples.device) * STRIDES[0]
    return scrambled(scrambled(samples ^ key_of(key))[:, None] + tokens)


def bits(key: str, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return 32 random bits for each element of a shard, int64 of that `shape`.

    They depend on the key and on the element's index in the full tensor; `offset` is the index of the shard's start.
    """
    return hashed(key_of(key), offset, shape, device)


def hashed(number: int, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return `bits`, int64 of that `shape`, for a key that is already a number.

    A compiled function takes another number without compiling again.
    """
    values = torch.full((), number, dtype=torch.int64, device=device)
    for start, size in zip(offset, shape, strict=True):
        values = scrambled(values[..., None] ^ scrambled(torch.arange(start, start + size, device=device)))
    return values


def normal(key: str, offset: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return standard normal values of a shard, float32 of that `shape`, by inverting the distribution function.

    Arguments as for `bits`.
    """
    values = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    _fused_normal(values, key_of(key), tuple(offset))
    return values


def _fill_with_normal(values: torch.Tensor, number: int, offset: tuple[int, ...]) -> None:
    """Fill a shard of any shape; `number` and `offset` as for `hashed`."""
    centred = (hashed(number, offset, values.shape, values.device).double() + 0.5) / 2**31 - 1  # within (-1, 1)
    values.copy_(torch.erfinv(centred) * math.sqrt(2))


_fused_normal = Fused(_fill_with_normal, dynamic=True, after=NEVER)


# Initial weights

BLOCK_ELEMENTS = 65536
TRUNCATE_AT = 3.0  # standard deviations

_buffers = threading.local()

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0, truncated (not clamped) at 3 `std`; `std` is that before truncation, as in trunc_normal_."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Uniform between -`bound` and `bound`."""

    bound: float


@dataclass(frozen=True)
class Constant:
    value: float


Init = Normal | Uniform | Constant


def clean_name(name: str) -> str:
    """Remove the path components that wrappers (recompute, compile, FSDP) add to the name of a parameter or module."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    rule: Callable[[str], Init],
    drawn_as: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Fill all parameters in place, plain tensors or DTensors, or only those with these clean `names`.

    A module class may define `parameter_init(name)`, which may return an Init for a parameter; otherwise `rule` is
    called with the clean name. A tensor with several names (tied weights) is drawn once, under its first name.
    `drawn_as` maps the name of a copy that a pipeline made to the name under which it is drawn.
    """
    for wrapped_name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"{wrapped_name} has no storage yet: call to_empty before initialize"
        if not parameter.is_floating_point():  # quantized: see tensor_storage.py
            continue
        name = clean_name(wrapped_name)
        if names is not None and name not in names:
            continue
        name = (drawn_as or {}).get(name, name)
        draw(parameter, _own_init(model, wrapped_name) or rule(name), f"{seed}/{name}")


def _own_init(model: nn.Module, name: str) -> Init | None:
    path, _, local_name = name.rpartition(".")
    owner = model.get_submodule(path)
    return owner.parameter_init(local_name) if hasattr(type(owner), "parameter_init") else None


@torch.no_grad()
def draw(parameter: torch.Tensor, init: Init, key: str) -> None:
    """Fill this rank's part of a tensor in place. Values depend only on `key` and the global shape."""
    local, shape, offset = local_part(parameter)
    if isinstance(init, Constant):
        local.fill_(init.value)
    elif local.numel():
        values = local.detach() if local.device.type == "cpu" else torch.empty(local.shape, dtype=local.dtype)
        _draw(values, shape, offset, init, key)
        if values.device != local.device:
            local.copy_(values)  # at once: each copy to a GPU waits for it


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return this rank's tensor, the global shape, and the offset of the rank's tensor in it."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(parameter.shape), (0,) * parameter.dim()
    shape = tuple(parameter.shape)
    _, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), shape, offset


def _draw(
    local: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], init: Normal | Uniform, key: str
) -> None:
    row_shape = shape[1:]
    if len(row_shape) > 1 and math.prod(row_shape) > BLOCK_ELEMENTS:  # a rank may have a part of every expert
        for index, row in enumerate(local, start=offset[0]):
            _draw(row, row_shape, offset[1:], init, f"{key}/{index}")
        return
    rows_per_block = max(1, BLOCK_ELEMENTS // math.prod(row_shape))
    within_row = tuple(slice(start, start + size) for start, size in zip(offset[1:], local.shape[1:], strict=True))
    first, last = offset[0], offset[0] + local.shape[0]

    def draw_block(block: int) -> None:
        start = block * rows_per_block
        stop = min(start + rows_per_block, shape[0])
        values = _values((stop - start, *row_shape), init, f"{key}/{block}")
        rows = slice(max(first, start), min(last, stop))
        local[rows.start - first : rows.stop - first].copy_(
            values[(slice(rows.start - start, rows.stop - start), *within_row)]
        )

    blocks = range(first // rows_per_block, -(-last // rows_per_block))
    num_threads = torch.get_num_threads()
    if len(blocks) == 1 or num_threads == 1:
        for block in blocks:
            draw_block(block)
        return
    # A generator draws on one thread, with which 1.2 billion weights took most of a start of 14 s beside an H100. The
    # last call is for threads that start later, as set_num_threads also holds for them.
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            list(threads.map(draw_block, blocks))
    finally:
        torch.set_num_threads(num_threads)


def _values(shape: tuple[int, ...], init: Normal | Uniform, key: str) -> torch.Tensor:
    """Draw a block; it is valid until this thread draws the next."""
    digest = hashlib.sha256(key.encode()).digest()[:4]  # torch's CPU generator keeps 32 bits of a seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    size = math.prod(shape)
    if size > len(getattr(_buffers, "values", ())):  # fresh memory for each block takes longer than the drawing
        _buffers.values = torch.empty(size, dtype=torch.float32)
    values = _buffers.values[:size].view(shape)
    if isinstance(init, Uniform):
        return values.uniform_(-init.bound, init.bound, generator=generator)
    return _truncated_normal(values, init.std, generator)


def _truncated_normal(values: torch.Tensor, std: float, generator: torch.Generator) -> torch.Tensor:
    """Fill `values` (any shape) by inverting the normal distribution function between -3 and 3 standard deviations."""
    edge = math.erf(TRUNCATE_AT / math.sqrt(2))
    values.uniform_(-edge, edge, generator=generator)
    limit = TRUNCATE_AT * std  # erfinv may round beyond the edge
    return values.erfinv_().mul_(std * math.sqrt(2)).clamp_(-limit, limit)
