"""Codes of quantized matrices: NF4 codes of weights, and operators that unpack matrices to the computation's dtype.

On CUDA a matrix is unpacked by one compiled kernel. On a CPU it is done in pieces that stay in the cache. These are
custom operators, single nodes for the compiler, for activation checkpointing and for the planner, which sees no
temporary tensors. Unpacked in bfloat16 on one core of an AMD EPYC with AVX-512 (torch 2.13), a weight in NF4 takes 0.5
ns compiled and 1.2 ns in eager, and bitsandbytes' 0.50 kernel takes 0.15.
"""

from functools import cache
from itertools import pairwise

import torch

from torchtitan.core.fused import LARGE, Fused, pieces

# The 16 levels of the paper's appendix E: quantiles of the normal distribution, equally likely, 0 among them.
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


_EDGES = tuple((low + high).item() / 2 for low, high in pairwise(torch.tensor(LEVELS)))
"""Numbers between neighbouring levels, rounded to float32."""


@cache
def levels(device: torch.device) -> torch.Tensor:
    """Return the levels, float32 [16], copied to the device once, because the host waits for the copy."""
    return torch.tensor(LEVELS, device=device)


@cache
def _level_pairs(device: torch.device) -> torch.Tensor:
    """Return the two levels of each byte of codes, float32 pairs viewed as int64 [256]: one look-up finds both."""
    table = levels(device)
    return torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=-1).view(torch.int64).flatten()


def _unpack_blocks(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> None:
    """Fill `values` [N, block] with the levels of `codes` [N, block / 2] times `scales` [N]; `table`: the levels."""
    numbers = codes.int()
    pairs = torch.stack((table[numbers >> 4], table[numbers & 15]), dim=-1)
    values.copy_((pairs * scales[:, None, None]).flatten(1))


def _look_blocks_up(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> None:
    pairs = _level_pairs(codes.device).index_select(0, codes.flatten().int())
    values.copy_(pairs.view(torch.float32).view_as(values).mul_(scales[:, None]))


def _unpack_rows(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Fill `values` [rows, in] with `codes` int8 [rows, in] times `scales` [rows]."""
    values.copy_(codes.float() * scales[:, None])


def _pack_blocks(blocks: torch.Tensor, codes: torch.Tensor) -> None:
    """Fill `codes` [N, block / 2] with the nearest levels of `blocks` [N, block], which are divided by their scales."""
    numbers = torch.zeros_like(blocks, dtype=torch.int32)
    for edge in _EDGES:
        numbers = numbers + (blocks > edge)
    _write_pairs(codes, numbers)


def _pack_blocks_in_place(blocks: torch.Tensor, codes: torch.Tensor) -> None:
    numbers, above = (torch.zeros_like(blocks, dtype=dtype) for dtype in (torch.uint8, torch.bool))
    for edge in _EDGES:
        numbers += torch.gt(blocks, edge, out=above).view(torch.uint8)
    _write_pairs(codes, numbers)


def _write_pairs(codes: torch.Tensor, numbers: torch.Tensor) -> None:
    """Fill `codes` [N, block / 2] with pairs of `numbers` [N, block]."""
    codes.copy_(numbers[:, ::2] << 4 | numbers[:, 1::2])


# Shapes of blocks are fixed, because with dynamic ones inductor's C++ takes six times as long.
_blocks_on_cpu = Fused(_unpack_blocks, _look_blocks_up, dynamic=False)
_blocks_on_gpu = Fused(_unpack_blocks, _look_blocks_up, dynamic=True)
_fused_packing = Fused(_pack_blocks, _pack_blocks_in_place, dynamic=False)
_rows = Fused(_unpack_rows, dynamic=True)


def nf4_codes(weights: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
    """Return uint8 [out, in / 2] of weights float32 [out, blocks, block] with scales [out, blocks], in pieces.

    The first weight of a byte is in the high bits. Levels are counted by comparing with all edges: for torch.bucketize
    the processor mispredicts most branches, which takes 20 ns a weight, compared with 7 for this in eager and 1.3
    compiled.
    """
    blocks, divisors = weights.flatten(0, 1), block_scales.flatten()
    codes = torch.empty(len(blocks), blocks.shape[1] // 2, dtype=torch.uint8, device=weights.device)
    for piece in pieces(len(blocks), LARGE // blocks.shape[1]):
        scales = divisors[piece, None]
        _fused_packing(torch.where(scales > 0, blocks[piece] / scales, 0.0), codes[piece])
    return codes.view(len(weights), -1)


@torch.library.custom_op("torchtitan::unpack_nf4", mutates_args=())
def unpack_nf4(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack codes uint8 [out, in / 2], scales uint8 [out, blocks] and the bits of row scales int32 [out] -> [out, in].

    Scales of blocks are computed in eager: compiled for CUDA, the division might be rounded otherwise.
    """
    block_scales = (scales * (rows.view(torch.float32) / 255)[:, None]).flatten()
    codes_of_blocks = codes.reshape(-1, codes.shape[1] // scales.shape[1])
    values = codes.new_empty(len(block_scales), 2 * codes_of_blocks.shape[1], dtype=dtype)
    table = levels(codes.device)
    if codes.device.type == "cuda":
        _blocks_on_gpu(values, codes_of_blocks, block_scales, table)
    else:
        for piece in pieces(len(values), LARGE // values.shape[1]):
            _blocks_on_cpu(values[piece], codes_of_blocks[piece], block_scales[piece], table)
    return values.view(codes.shape[0], 2 * codes.shape[1])


@unpack_nf4.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)


@torch.library.custom_op("torchtitan::unpack_int8", mutates_args=())
def unpack_int8(codes: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Unpack codes int8 [out, in] and the bits of the row scales int32 [out] -> [out, in]."""
    values, scales = torch.empty_like(codes, dtype=dtype), rows.view(torch.float32)
    size = len(codes) if codes.device.type == "cuda" else -(-LARGE // codes.shape[1])
    for piece in pieces(len(codes), size):
        _rows(values[piece], codes[piece], scales[piece])
    return values


@unpack_int8.register_fake
def _(codes: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(codes, dtype=dtype)
