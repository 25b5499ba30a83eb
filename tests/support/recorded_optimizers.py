"""Recorded steps of optimizers of galore-torch 1.0 (Apache 2.0) and bitsandbytes 0.50.2 (MIT) on a CPU.

They are no dependencies. Where both are installed, `python -m tests.support.recorded_optimizers` records them again.

A singular vector's sign is arbitrary, and with moments that stay while the basis changes it changes what follows. So
galore-torch's are given ours before it takes them: the largest component is positive.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FILE = Path(__file__).parents[1] / "assets" / "optimizer_steps.safetensors"
RATE, BETAS, EPS, STEPS, RANK, GAP, SCALE = 0.01, (0.9, 0.999), 1e-12, 7, 2, 3, 0.25
SHAPES = ((9, 6), (6, 9))
SIDES = ("std", "reverse_std", "left", "right")
INNER = ("adamw", "adafactor")
PACKED = (8, 512)
"""As small as bitsandbytes packs, and rows of whole blocks."""


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scaled(step: int) -> torch.Tensor:
    """Return a gradient with rows that differ by three powers of ten."""
    return normal(*PACKED, seed=step + 1, dtype=torch.float32) * torch.logspace(-3, 0, PACKED[0])[:, None]


def recorded() -> dict[str, torch.Tensor]:
    return load_file(FILE)


def _signed_svd(matrix, full_matrices=True):
    u, values, vh = _svd(matrix.double(), full_matrices=full_matrices)
    count = min(matrix.shape)
    signs = [vh[:count], u[:, :count].T]
    for vectors in signs:
        largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
        vectors.mul_(largest.sign())
    return u.to(matrix.dtype), values.to(matrix.dtype), vh.to(matrix.dtype)


_svd = torch.linalg.svd


def _record() -> None:
    import bitsandbytes
    import galore_torch

    torch.linalg.svd = _signed_svd
    results = {}
    for inner in INNER:
        for side in SIDES:
            for shape in SHAPES:
                weight = torch.nn.Parameter(normal(*shape, seed=0))
                group = dict(params=[weight], rank=RANK, update_proj_gap=GAP, scale=SCALE, proj_type=side)
                if inner == "adamw":
                    optimizer = galore_torch.GaLoreAdamW([group], RATE, BETAS, EPS, no_deprecation_warning=True)
                else:
                    fixed = dict(scale_parameter=False, relative_step=False, warmup_init=False)
                    optimizer = galore_torch.GaLoreAdafactor([group], RATE, **fixed)
                for step in range(STEPS):
                    weight.grad = normal(*shape, seed=step + 1)
                    optimizer.step()
                results[f"galore/{inner}/{side}/{shape[0]}x{shape[1]}"] = weight.detach().clone()
    torch.linalg.svd = _svd
    weight = torch.nn.Parameter(normal(*PACKED, seed=0, dtype=torch.float32))
    optimizer = bitsandbytes.optim.AdamW8bit([weight], RATE, BETAS, 1e-8, weight_decay=0.1)
    for step in range(10):
        weight.grad = scaled(step)
        optimizer.step()
    results["adamw_8bit"] = weight.detach().clone()
    save_file(results, FILE)


if __name__ == "__main__":
    _record()
