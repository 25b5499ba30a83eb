"""LoRA on matrices quantized to 8 bits.

Each weight is an integer from -127 to 127 times a float per row, the row's largest magnitude over 127. A weight takes
1 + 4/in bytes; its error is at most 1/254 of its row's largest magnitude.
"""

import torch

from torchtitan.adapters.low_rank import LowRank
from torchtitan.adapters.quantized import QuantizedLinear

LARGEST_CODE = 127


class Int8:
    parameter_names = ("weight_codes", "weight_rows")

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
        codes, rows = parts
        return (codes.float() * rows.view(torch.float32)[:, None]).to(dtype)


class Int8Linear(QuantizedLinear):
    quantizer = Int8()


class Int8LoRA(LowRank):
    linear_class = Int8Linear
