"""LoRA beside matrices in 8 bits: each weight a whole number from -127 to 127 times a float of its row, the largest
magnitude there over 127. A weight takes 1 + 4/in bytes, and is off by at most 1/254 of its row's largest.
"""

import torch

from torchtitan.adapters.low_rank import LowRank
from torchtitan.adapters.packed import PackedLinear

LARGEST = 127


class Int8:
    names = ("weight_codes", "weight_rows")

    def like(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """codes int8 [out, in]; the bits of the rows' float32, int32 [out], which mixed precision does not round."""
        codes = torch.empty(outputs, inputs, dtype=torch.int8, device="meta")
        return codes, torch.empty(outputs, dtype=torch.int32, device="meta")

    def block_in(self, *parts: torch.Tensor) -> int:
        return 1

    def pack(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (row / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (blocks.flatten(1) / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        return codes, scale.float().view(torch.int32)

    def unpack(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, rows = parts
        return (codes.float() * rows.view(torch.float32)[:, None]).to(dtype)


class Int8Linear(PackedLinear):
    form = Int8()


class Int8LoRA(LowRank):
    linear = Int8Linear
