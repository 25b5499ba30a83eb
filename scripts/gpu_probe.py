"""Time single operations on the GPU, with the time that each took on an H100: part `probe` of gpu_hour.sh.

Without a GPU all sizes are divided, which only shows that the operations run. An operation that fails has a line that
says so, and exit code 1 follows.
"""

import copy
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan.adapters.quantized import NF4
from torchtitan.core.errors import JobError
from torchtitan.core.float8 import has_kernel
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models.dropout import Dropout
from torchtitan.models.layers import convert
from torchtitan.models.moe.layer import grouped_mm
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.build import build_optimizers

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHRINK = 1 if ON_GPU else 64
BF16 = torch.bfloat16


def milliseconds(function: Callable[[], object], repeats: int = 10) -> float:
    """Return the mean time of a call, after three calls to warm up."""
    if not ON_GPU:
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    for _ in range(3):
        function()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / repeats


def row(name: str, function: Callable[[], object], expected: str, repeats: int = 10) -> None:
    print(f"  {name:56} {milliseconds(function, repeats):9.3f} ms   expected {expected}", flush=True)


def attention() -> None:
    length = 4096 // SHRINK
    shapes = ((4, 32, length, 64), (4, 8, length, 64), (4, 8, length, 64))
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=BF16, requires_grad=True) for shape in shapes)

    def both_ways() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    row("attention, causal, 4 x 32 (8) heads of 64 x 4096, auto", both_ways, "4.0 by FlashAttention 2, 2.5 by cuDNN")
    if not ON_GPU:
        return
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel([backend]):
                row(f"  {backend.name}", both_ways, "")
        except RuntimeError as error:
            print(f"  {backend.name}: not here: {str(error).splitlines()[0][:100]}")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        both_ways()
    print("  kernels of auto:", ", ".join(event.key[:60] for event in profile.key_averages()[:6]))


def head_and_loss() -> None:
    vocabulary, width, tokens = 128256 // SHRINK, 2048, 16384 // SHRINK
    head = torch.nn.Linear(width, vocabulary, bias=False, device=DEVICE, dtype=BF16)
    hidden = torch.randn(1, tokens, width, device=DEVICE, dtype=BF16, requires_grad=True)
    labels = {"labels": torch.randint(0, vocabulary, (1, tokens), device=DEVICE)}
    for chunks, expected in ((16, "75"), (4, "71"), (1, "67")):
        objective = SummedCrossEntropy(chunks)

        def both_ways(objective: SummedCrossEntropy = objective) -> None:
            torch.autograd.grad(objective(hidden, head, labels), (hidden, head.weight))

        row(f"head and loss, 16384 tokens x 128256 x 2048, {chunks} chunks", both_ways, expected, 4)


def accumulation() -> None:
    a = torch.randn(128256 // SHRINK, 1024, device=DEVICE, dtype=BF16)
    b = torch.randn(1024, 2048, device=DEVICE, dtype=BF16)
    total = torch.zeros(len(a), 2048, device=DEVICE)
    row("product of bfloat16, added to float32", lambda: total.add_(a @ b), "1.8")
    if ON_GPU:
        fused = torch.zeros_like(total)
        row("  by addmm", lambda: torch.addmm(fused, a, b, out_dtype=torch.float32, out=fused), "1.1")
        fused.zero_()
        torch.addmm(fused, a, b, out_dtype=torch.float32, out=fused)
        error = (fused - a.float() @ b.float()).abs().max().item()
        print(f"  largest difference from the product in float32: {error:.1e}, expected below 1e-2")


def nf4() -> None:
    quantizer, weight = NF4(), torch.randn(4096 // SHRINK, 14336, device=DEVICE)
    packed = quantizer.quantize(weight.unflatten(1, (-1, 64)), weight.abs().amax(1))
    row("NF4 to bfloat16, 4096 x 14336", lambda: quantizer.dequantize(*packed, dtype=BF16), "0.19")


def dropout() -> None:
    x = torch.randn(4, 4096 // SHRINK, 4096, device=DEVICE, dtype=BF16)
    keys = torch.randint(0, 2**31, x.shape[:2], device=DEVICE)
    module = Dropout(0.05)
    row("Dropout, 16384 x 4096", lambda: module(x, keys), "0.26")
    row("  F.dropout", lambda: F.dropout(x, 0.05), "0.13")


def float8_linears() -> None:
    x = torch.randn(8192 // SHRINK, 4096 // SHRINK, device=DEVICE, dtype=BF16, requires_grad=True)
    plain = torch.nn.Linear(4096 // SHRINK, 14336 // SHRINK, bias=False, device=DEVICE, dtype=BF16)
    for recipe, expected in (("none", "3.8"), ("tensorwise", "2.8"), ("rowwise", "3.3")):
        linear = copy.deepcopy(plain)
        if recipe != "none":
            convert(linear, recipe, use_kernel=has_kernel(DEVICE) or not ON_GPU)

        def both_ways(linear: torch.nn.Linear = linear) -> list[torch.Tensor]:
            out = linear(x)
            return [out, *torch.autograd.grad(out, (x, linear.weight), torch.ones_like(out))]

        row(f"linear, 8192 x 4096 x 14336, float8: {recipe}", both_ways, expected)
        if recipe != "none":
            by_kernel, linear.use_kernel = both_ways(), False
            pairs = zip(by_kernel, both_ways(), strict=True)
            error = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            print(f"  largest difference from imitated products: {error:.1e}, expected below 1e-2")


def optimizers() -> None:
    for name, dtype, expected in (
        ("AdamW", torch.float32, "0.6"),
        ("AdamW8bit", torch.float32, "0.6"),
        ("Muon", torch.float32, "9"),
        ("Lion", torch.float32, "0.4"),
        ("Adafactor", torch.float32, "0.9"),
        ("AdamWBF16", BF16, "0.4"),
    ):
        part = torch.nn.Module()
        part.layers = torch.nn.ModuleDict({"0": torch.nn.Module()})
        part.layers["0"].attention = torch.nn.Module()  # the name decides whether Muon takes it
        linear = torch.nn.Linear(14336 // SHRINK, 4096, bias=False, device=DEVICE, dtype=dtype)
        part.layers["0"].attention.wq, linear.weight.grad = linear, torch.randn_like(linear.weight)
        options = {key: option.default for key, option in OPTIMIZERS[name].options.items()}
        shared = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        built = build_optimizers([part], name=name, lr=1e-3, weight_decay=0.1, shared=shared, options=options)
        built.step()  # creates the state
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if ON_GPU else 0
        row(f"{name}, a step of 4096 x 14336", built.step, expected, 5)
        if ON_GPU:
            size = (torch.cuda.max_memory_allocated() - before) / linear.weight.numel()
            print(f"    temporaries: {size:.1f} bytes a weight")


def experts() -> None:
    x = torch.randn(8192 // SHRINK, 2048, device=DEVICE, dtype=BF16, requires_grad=True)
    w = torch.randn(64, 2048, 768, device=DEVICE, dtype=BF16, requires_grad=True)
    ends = torch.full((64,), len(x) // 64, device=DEVICE).cumsum(0).int()

    def both_ways() -> None:
        out = grouped_mm(x, w, ends)
        torch.autograd.grad(out, (x, w), torch.ones_like(out))

    row("grouped_mm, 8192 rows, 64 experts", both_ways, "0.4")


def main() -> int:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if ON_GPU else 'CPU, sizes divided by 64'}")
    torch.manual_seed(0)
    code = 0
    for probe in (attention, head_and_loss, accumulation, nf4, dropout, float8_linears, optimizers, experts):
        try:
            probe()
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, JobError) as error:
            print(f"  {probe.__name__} FAILED: {type(error).__name__}: {str(error)[:300]}")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
