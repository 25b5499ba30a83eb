"""LoRA on quantized matrices: QLoRA (arXiv:2305.14314), in 4 bits (NF4), and LoRA on 8 bits.

A packed matrix is a few frozen integer parameters, which FSDP gathers and tensor parallel shards like the matrix
itself. It is unpacked on use, once in forward and once in backward; the unpacked matrix is never stored. The matrices
of a stack of experts are packed one by one, as linears of the same weights would be, and unpacked together for their
grouped product: at its peak it takes one unpacked stack of the rank, of gate, up or down.

On CUDA a matrix is unpacked to the computation's dtype by one compiled kernel. On a CPU it is done in pieces that stay
in the cache. These are custom operators, single nodes for the compiler, for activation checkpointing and for the
planner, which sees no temporary tensors. Unpacked in bfloat16 on one core of an AMD EPYC with AVX-512 (torch 2.13), a
weight in NF4 takes 0.5 ns compiled and 1.2 ns in eager, and bitsandbytes' 0.50 kernel takes 0.15.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.adapters.low_rank import LoRASettings, LowRank, LowRankExperts, LowRankLinear, add_low_rank_output
from torchtitan.adapters.targets import quantization_block
from torchtitan.core.fused import LARGE, Fused, pieces
from torchtitan.core.tensor_storage import Store
from torchtitan.models.layers import autocast_dtype
from torchtitan.models.moe.layer import Experts, grouped_mm

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
    return codes.view(len(weights), weights.shape[1] * codes.shape[1])  # a rank may have no rows


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


LARGEST_CODE = 127


class Quantizer(Protocol):
    """A quantized form of a matrix [out, in], which packs each row independently, with at least one number per row.

    A rank that packs some rows, or some blocks of every row, has to get the same bits as the full matrix has there.
    """

    suffixes: tuple[str, ...]
    """Ends of the parameters' names. The first holds codes [out, in / n], the last one number per row [out]."""

    def empty_parameters(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return the parameters of a matrix [outputs, inputs], on the meta device."""

    def block_size(self, *parts: torch.Tensor) -> int:
        """Return how many weights of a row are packed together.

        `parts`: a rank's shards of the parameters of `empty_parameters`, the first [out, in / n].
        """

    def quantize(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack float32 [out, blocks, block]; `row` [out]: the largest magnitude of each full row."""

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix [out, in], rounded once."""


def part_names(quantizer: Quantizer, matrix: str) -> tuple[str, ...]:
    """Return the names of the parameters that a parameter called `matrix` is packed into."""
    return tuple(matrix + suffix for suffix in quantizer.suffixes)


def _register_packed(module: nn.Module, quantizer: Quantizer, matrix: str, parts: Sequence[torch.Tensor]) -> None:
    """Replace a parameter of `module` by the packed ones, which `parts` resemble."""
    device = getattr(module, matrix).device
    delattr(module, matrix)
    for name, like in zip(part_names(quantizer, matrix), parts, strict=True):
        module.register_parameter(name, nn.Parameter(torch.empty_like(like, device=device), requires_grad=False))


class QuantizedLinear(LowRankLinear):
    """A LowRankLinear with its `weight` packed into the parameters that its quantizer names."""

    quantizer: Quantizer

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        super().add_low_rank_parameters(settings)
        self.dtype = self.weight.dtype
        parts = self.quantizer.empty_parameters(self.out_features, self.in_features)
        _register_packed(self, self.quantizer, "weight", parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (getattr(self, name) for name in part_names(self.quantizer, "weight"))
        y = _QuantizedMatmul.apply(x.flatten(0, -2), self.quantizer, None, *parts)
        return add_low_rank_output(self, x, y if self.bias is None else y + self.bias.to(y.dtype))

    def tensor_placements(self, role: str, default: Placement) -> dict[str, tuple[Placement, Placement]]:
        placements = super().tensor_placements(role, default)
        usual = {"column": Shard(0), "head": Shard(0), "row": Shard(1)}.get(role, Replicate())
        *codes, rows = part_names(self.quantizer, "weight")
        placements |= dict.fromkeys(codes, (usual, usual))
        placements[rows] = (Replicate(), Replicate()) if role == "row" else (usual, usual)
        return placements

    def stores(self) -> dict[str, Store]:
        return {"weight": QuantizedWeight(self, "weight", (self.out_features, self.in_features))}


class QuantizedExperts(LowRankExperts):
    """LowRankExperts with the matrices of `settings.packed` packed, each into the parameters that its quantizer names.

    Those of all experts [experts, in, out] are packed with outputs as rows: codes are [experts, out, in / n], and so
    on, and numbers of rows [experts, out, 1]. FSDP shards experts or outputs.
    """

    quantizer: Quantizer

    @property
    def mergeable(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.settings.matrices, *self.settings.packed)))

    def add_low_rank_parameters(self, settings: LoRASettings) -> None:
        super().add_low_rank_parameters(settings)
        self.dtype, self.shapes = self.w1.dtype, {name: tuple(getattr(self, name).shape) for name in settings.packed}
        for name, (experts, inputs, outputs) in self.shapes.items():
            parts = self.quantizer.empty_parameters(outputs, inputs)
            stacks = [part.new_empty(experts, outputs, part[0].numel()) for part in parts]
            _register_packed(self, self.quantizer, name, stacks)

    @staticmethod
    def frozen_product(
        experts: Any, name: str, x: torch.Tensor, ends: torch.Tensor, shared: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Map x [rows, in] to [rows, out] by matrices that may be packed. The rows of each expert end at `ends`."""
        if name not in experts.settings.packed:
            return Experts.product(experts, name, x, ends, shared)
        parts = (getattr(experts, part) for part in part_names(experts.quantizer, name))
        return _QuantizedMatmul.apply(x, experts.quantizer, ends, *parts)

    def stores(self) -> dict[str, Store]:
        return {name: QuantizedWeight(self, name, shape) for name, shape in self.shapes.items()}

    def merged_weight(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name in self.settings.matrices:
            return super().merged_weight(name, value)
        return value.to(torch.promote_types(value.dtype, torch.float32))


def _dequantized(quantizer: Quantizer, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a packed matrix [out, in], or those of a stack [experts, out, in]."""
    if parts[0].dim() == 2:
        return quantizer.dequantize(*parts, dtype=dtype)
    *codes, rows = parts  # the rows of all experts are those of one matrix
    values = quantizer.dequantize(*(part.flatten(0, 1) for part in codes), rows.flatten(), dtype=dtype)
    return values.unflatten(0, parts[0].shape[:2])


class _QuantizedMatmul(torch.autograd.Function):
    """Compute x W^T for a packed W, or for the W of each expert. Backward unpacks it again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        # A single *inputs: with more parameters than that, the compiler miscounts and takes the context for an input.
        x, quantizer, ends, *packed = inputs  # ends [experts], where the rows of each end; None: W is one matrix
        ctx.save_for_backward(ends, *packed)
        ctx.quantizer, ctx.types = quantizer, (x.dtype, autocast_dtype(x.device.type) or x.dtype)
        return _multiply(x.to(ctx.types[1]), _dequantized(quantizer, packed, ctx.types[1]).mT, ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        no_grads = (None,) * (2 + len(ctx.quantizer.suffixes))
        if not ctx.needs_input_grad[0]:
            return None, *no_grads
        (input_dtype, dtype), (ends, *packed) = ctx.types, ctx.saved_tensors
        grad_x = _multiply(grad.to(dtype), _dequantized(ctx.quantizer, packed, dtype), ends)
        return grad_x.to(input_dtype), *no_grads


def _multiply(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [R, I] by w [I, O], or with `ends` each expert's rows by its matrix in w [E, I, O] -> [R, O]."""
    return x @ w if ends is None else grouped_mm(x.contiguous(), w, ends)


class QuantizedWeight:
    """Writes and reads a packed parameter of a module; each rank handles its shard.

    `shape`: [out, in] of a linear, or [experts, in, out].
    """

    def __init__(self, module: QuantizedLinear | QuantizedExperts, matrix: str, shape: tuple[int, ...]):
        self.module, self.quantizer, self.shape = module, module.quantizer, shape
        self.packed = part_names(module.quantizer, matrix)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """Return this rank's local tensors."""
        parts = (getattr(self.module, name).detach() for name in self.packed)
        return [part.to_local() if isinstance(part, DTensor) else part for part in parts]

    @property
    def _codes(self) -> torch.Tensor:
        return getattr(self.module, self.packed[0])

    def empty(self) -> torch.Tensor:
        local = self._parameters[0]
        inputs = local.shape[-1] * self.shape[-1 if local.dim() == 2 else 1] // self._codes.shape[-1]
        shape = (local.shape[0], inputs) if local.dim() == 2 else (local.shape[0], inputs, local.shape[1])
        return self._like_codes(local.new_empty(shape, dtype=self.module.dtype))

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        for matrix, parts in self._matrices(values):
            for part, packed in zip(parts, self._pack(matrix, parts), strict=True):
                part.copy_(packed.view_as(part))

    @torch.no_grad()
    def holds(self, values: torch.Tensor) -> bool:
        """Return True if packing `values` gives the stored codes.

        One code in a thousand may differ, as another device rounds differently.
        """
        differ, codes = 0, self._parameters[0].numel()
        for matrix, parts in self._matrices(values.to(self.module.dtype)):
            differ += int((self._pack(matrix, parts)[0] != parts[0]).sum())
        return differ <= codes / 1000

    def _matrices(self, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Yield this rank's part of each matrix [out, in] in `values`, and the stored tensors of it."""
        local, parts = values.to_local() if isinstance(values, DTensor) else values, self._parameters
        if local.dim() == 2:
            yield local, parts
            return
        for expert, matrix in enumerate(local):
            yield matrix.t(), [part[expert] for part in parts]

    def _pack(self, matrix: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        codes = self._codes
        blocks = matrix.float().contiguous().unflatten(1, (-1, self.quantizer.block_size(*parts)))
        row = blocks.abs().amax((-1, -2))
        if isinstance(codes, DTensor):
            for axis, placement in enumerate(codes.placements):
                if placement.is_shard(codes.dim() - 1):  # the ranks of this axis share these rows
                    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=codes.device_mesh.get_group(axis))
        return self.quantizer.quantize(blocks, row)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """Return the parameter as used in computation, laid out over the ranks like `empty`."""
        local = _dequantized(self.quantizer, self._parameters, self.module.dtype)
        return self._like_codes(local if local.dim() == 2 else local.mT.contiguous())

    def _like_codes(self, local: torch.Tensor) -> torch.Tensor:
        codes = self._codes
        if not isinstance(codes, DTensor):
            return local
        is_by_output = local.dim() == 3  # of a stack, the last dimension of which are outputs
        placements = [Shard(2) if is_by_output and place.is_shard(1) else place for place in codes.placements]
        kwargs = dict(
            run_check=False, shape=torch.Size(self.shape), stride=torch.empty(self.shape, device="meta").stride()
        )
        return DTensor.from_local(local, codes.device_mesh, placements, **kwargs)


class NF4:
    """Quantization to 4 bits.

    Each weight is one of 16 levels, the quantiles of a normal distribution, times the largest magnitude of its block of
    64. These block scales are stored in 8 bits, relative to the largest one in their row, which is a float. So a weight
    takes 1/2 + 1/64 + 4/in bytes, 0.517 at 4096 inputs.

    Blocks and their scales never cross a row of the matrix. So a rank that has some rows, or some complete blocks of
    every row, packs the same bits as the full matrix has there. (The paper groups 256 scales regardless of rows.)
    """

    suffixes = ("_codes", "_scales", "_rows")

    def empty_parameters(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return codes uint8 [out, in / 2], scales uint8 [out, blocks] and row scales int32 [out].

        A byte of codes has the first weight in the high bits. Row scales are the bits of float32 values, because mixed
        precision would round floats.
        """
        codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(outputs, inputs // quantization_block(inputs), dtype=torch.uint8, device="meta")
        return codes, scales, torch.empty(outputs, dtype=torch.int32, device="meta")

    def block_size(self, *parts: torch.Tensor) -> int:
        codes, scales, _ = parts
        return 2 * codes.shape[1] // scales.shape[1]

    def quantize(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest = blocks.abs().amax(-1)
        scales = (largest / row.clamp(min=torch.finfo(torch.float32).tiny)[:, None] * 255).round().clamp(max=255)
        scales = scales.to(torch.uint8)
        codes = nf4_codes(blocks, scales.float() * (row / 255)[:, None])
        return codes, scales, row.float().view(torch.int32)

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return unpack_nf4(*parts, dtype)


class NF4Linear(QuantizedLinear):
    quantizer = NF4()


class NF4Experts(QuantizedExperts):
    quantizer = NF4()


class QLoRA(LowRank):
    linear_class, experts_class, by_token = NF4Linear, NF4Experts, True


class Int8:
    """Quantization to 8 bits.

    Each weight is an integer from -127 to 127 times a float per row, the row's largest magnitude over 127. A weight
    takes 1 + 4/in bytes; its error is at most 1/254 of its row's largest magnitude.
    """

    suffixes = ("_codes", "_rows")

    def empty_parameters(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Return codes int8 [out, in] and the bits of the float32 row scales, int32 [out].

        Mixed precision does not round integers.
        """
        codes = torch.empty(outputs, inputs, dtype=torch.int8, device="meta")
        return codes, torch.empty(outputs, dtype=torch.int32, device="meta")

    def block_size(self, *parts: torch.Tensor) -> int:
        return 1

    def quantize(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (row / LARGEST_CODE).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (blocks.flatten(1) / scale[:, None]).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
        return codes, scale.float().view(torch.int32)

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return unpack_int8(*parts, dtype)


class Int8Linear(QuantizedLinear):
    quantizer = Int8()


class Int8Experts(QuantizedExperts):
    quantizer = Int8()


class Int8LoRA(LowRank):
    linear_class, experts_class, by_token = Int8Linear, Int8Experts, True
