"""Compare our NF4 quantization (adapters/quantized.py) with torchao's: the share of equal codes, and each one's error.

torchao is no dependency: install it in a separate environment, or in a folder (pip install --no-deps --target FOLDER
torchao, then PYTHONPATH=FOLDER). `--write` writes its codes to tests/fixtures/nf4_torchao.json, for the tests.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan.adapters.quantized import NF4

FIXTURE = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "nf4_torchao.json"
ROWS, COLUMNS = 32, 512
"""The smallest size that torchao quantizes: 256 scales of 64 weights each."""


def weights() -> torch.Tensor:
    """Return normally distributed weights [ROWS, COLUMNS] by a formula, with rows of different scale."""
    golden = (5**0.5 - 1) / 2
    spread = torch.arange(1, ROWS * COLUMNS + 1, dtype=torch.float64).mul(golden).frac()
    sizes = torch.linspace(0.5, 2, ROWS, dtype=torch.float64)[:, None]
    return (0.02 * sizes * torch.special.ndtri(spread).view(ROWS, COLUMNS)).float()


def our_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize by our NF4; return the codes [ROWS, COLUMNS] and the dequantized weights."""
    parts = NF4().quantize(weight.unflatten(1, (-1, 64)), weight.abs().amax(1))
    return codes_of(parts[0]), NF4().dequantize(*parts, dtype=torch.float32)


def codes_of(packed: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 with two codes each, the first in the high bits."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2).long().view(ROWS, COLUMNS)


def torchao_quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize by torchao; return its packed codes, the dequantized weights, and its levels."""
    from torchao.quantization import to_nf4

    packed = to_nf4(weight)
    return packed.quantized_data, packed.get_original_weight(), packed.nf4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep torchao's codes for the tests")
    options = parser.parse_args()
    weight = weights()
    packed_codes, torchao_weights, levels = torchao_quantize(weight)
    (our_codes, our_weights), torchao_codes = our_quantize(weight), codes_of(packed_codes)
    our_error, torchao_error = (
        (reconstructed - weight).norm() / weight.norm() for reconstructed in (our_weights, torchao_weights)
    )
    difference = (our_codes - torchao_codes).abs()
    print(f"the same code: {(difference == 0).float().mean():.2%}, at most {difference.max()} apart")
    print(f"lost of the weights' norm: {our_error:.4%} here, {torchao_error:.4%} there")
    if options.write:
        fixture = {"torchao": version("torchao"), "levels": levels.tolist(), "lost": torchao_error.item()}
        fixture["codes"] = packed_codes.flatten().numpy().tobytes().hex()
        FIXTURE.write_text(json.dumps(fixture, indent=1) + "\n")


if __name__ == "__main__":
    main()
