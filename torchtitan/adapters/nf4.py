"""QLoRA (arXiv:2305.14314): LoRA on matrices quantized to 4 bits (NF4).

Each weight is one of 16 levels, the quantiles of a normal distribution, times the largest magnitude of its block of 64.
These block scales are stored in 8 bits, relative to the largest of their row, which is a float. So a weight takes
1/2 + 1/64 + 4/in bytes, 0.517 at 4096 inputs.

Blocks and their scales never cross a row of the matrix. So a rank that has some rows, or some complete blocks of every
row, packs the same bits as the full matrix has there. (The paper groups 256 scales regardless of rows.)
"""

import torch

from torchtitan.adapters.low_rank import LowRank
from torchtitan.adapters.quantized import QuantizedLinear
from torchtitan.adapters.targets import quantization_block

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


class NF4:
    parameter_names = ("weight_codes", "weight_scales", "weight_rows")

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
        block_scales = (scales.float() * (row / 255)[:, None])[..., None]
        normal = torch.where(block_scales > 0, blocks / block_scales, 0.0)
        levels = torch.tensor(LEVELS, device=blocks.device)
        codes = torch.bucketize(normal, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
        return codes[:, ::2] << 4 | codes[:, 1::2], scales, row.float().view(torch.int32)

    def dequantize(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, scales, rows = parts
        levels = torch.tensor(LEVELS, device=codes.device)
        indices = torch.stack((codes >> 4, codes & 15), dim=-1).flatten(1).int()  # [out, in]
        block_scales = scales.float() * (rows.view(torch.float32) / 255)[:, None]  # [out, blocks]
        values = levels[indices].unflatten(1, (block_scales.shape[1], -1)) * block_scales[..., None]
        return values.flatten(1).to(dtype)


class NF4Linear(QuantizedLinear):
    quantizer = NF4()


class QLoRA(LowRank):
    linear_class = NF4Linear
