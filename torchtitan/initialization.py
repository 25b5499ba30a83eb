"""Initial weights as a function of (seed, parameter name, global shape), and of nothing else.

Rows (the first dimension) are drawn in blocks of about 65536 elements, each block from a generator of its own, seeded
by a hash of seed, name and block number; where a row is larger than that and is itself a matrix (an expert), its own
rows are. A rank draws only the blocks that its shard overlaps, so no rank ever holds a full tensor of a large model,
and one rank or a thousand start from the same bits. Drawing is always done on the CPU in float32: a GPU, another dtype
or another mesh starts from the same values too (up to the cast).
"""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK_ELEMENTS = 65536
TRUNCATE_AT = 3.0  # standard deviations

WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0, cut off (not clamped) at 3 `std`; `std` is that before the cut, as in trunc_normal_."""

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
    """A parameter's or module's name without the path components that wrappers (recompute, compile, FSDP) add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@torch.no_grad()
def initialize(
    model: nn.Module,
    seed: int,
    rule: Callable[[str], Init],
    drawn_as: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Fill every parameter in place, or those of these clean `names`, plain tensors and DTensors alike. `rule` is asked
    with the clean name, after the module that owns the parameter: one whose class has `own_init` may give an Init for
    its own name of it, or None.

    A tensor with several names (tied weights) is drawn once, under its first name. `drawn_as` gives that name to a copy
    that a pipeline made of it: name -> name under which it is drawn.
    """
    for wrapped_name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"{wrapped_name} has no storage yet: call to_empty before initialize"
        if not parameter.is_floating_point():  # packed: see stores.py
            continue
        name = clean_name(wrapped_name)
        if names is not None and name not in names:
            continue
        name = (drawn_as or {}).get(name, name)
        draw(parameter, _own_init(model, wrapped_name) or rule(name), f"{seed}/{name}")


def _own_init(model: nn.Module, name: str) -> Init | None:
    path, _, own = name.rpartition(".")
    owner = model.get_submodule(path)
    return owner.own_init(own) if hasattr(type(owner), "own_init") else None


@torch.no_grad()
def draw(parameter: torch.Tensor, init: Init, key: str) -> None:
    """Fill this rank's part of a tensor, in place; random values follow from `key` and the global shape alone."""
    local, shape, offset = local_part(parameter)
    if isinstance(init, Constant):
        local.fill_(init.value)
    elif local.numel():
        _draw(local, shape, offset, init, key)


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """This rank's tensor, the global shape, and where in it this rank's tensor begins."""
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
    for block in range(first // rows_per_block, -(-last // rows_per_block)):
        start = block * rows_per_block
        stop = min(start + rows_per_block, shape[0])
        values = _values((stop - start, *row_shape), init, f"{key}/{block}")
        mine = slice(max(first, start), min(last, stop))
        local[mine.start - first : mine.stop - first].copy_(
            values[(slice(mine.start - start, mine.stop - start), *within_row)]
        )


def _values(shape: tuple[int, ...], init: Normal | Uniform, key: str) -> torch.Tensor:
    digest = hashlib.sha256(key.encode()).digest()[:4]  # torch's CPU generator keeps 32 bits of a seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    values = torch.empty(shape, dtype=torch.float32)
    if isinstance(init, Uniform):
        return values.uniform_(-init.bound, init.bound, generator=generator)
    return _truncated_normal(values, init.std, generator)


def _truncated_normal(values: torch.Tensor, std: float, generator: torch.Generator) -> torch.Tensor:
    """By the inverse of the normal's distribution function: erfinv of what is uniform between its values at +-3."""
    edge = math.erf(TRUNCATE_AT / math.sqrt(2))
    values.uniform_(-edge, edge, generator=generator)
    limit = TRUNCATE_AT * std  # erfinv's rounding at the edge
    return values.erfinv_().mul_(std * math.sqrt(2)).clamp_(-limit, limit)
