"""Measure this machine and describe it as a file of hardware (core/hardware.py).

Rates are measured at growing sizes, and a saturating curve is fitted to each kind of operation. On a GPU that the
package knows, peaks, memory and names come from its file. Collectives are measured by kind and group size. The network
is not measured: it is assumed to be like the links of the machine.
"""

import dataclasses
import itertools
import math
import multiprocessing
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtitan.core.errors import JobError
from torchtitan.core.hardware import CollectiveKind, Hardware, find_hardware, load_hardware
from torchtitan.process.distributed import device_type
from torchtitan.process.exit import die_with_parent
from torchtitan.process.machine import SHARED_MEMORY_REMEDY, shared_memory_obstacle

Sample = tuple[tuple[float, ...], float]
"""Sizes of an operation, and the FLOP/s or bytes/s that it reached."""
DTYPES = (torch.bfloat16, torch.float32)
HALVES = [0.0, *(2.0**power for power in range(4, 27))]
"""Candidates for the size at which half of the best rate is reached."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes to measure."""

    products: tuple[int, ...]
    """Values of m, n and k, varied one by one around the largest."""
    keys: tuple[int, ...]
    copied: tuple[int, ...]
    """Bytes."""
    sent: tuple[int, ...]
    """Bytes of a rank's part of a collective: two or more, in ascending order."""
    seconds: float
    """Time of each measurement."""
    heads: int = 8
    """Of attention."""
    min_seconds: float = 0.0
    """Seconds that a GPU computes between two readings of the clock, so that starting a kernel does not count."""


USUAL_SIZES = {
    "cpu": Sizes((64, 128, 256, 512, 1024), (128, 256, 512, 1024), (2**25, 2**26, 2**27), (2**12, 2**18, 2**24), 0.1),
    "cuda": Sizes(
        (256, 512, 1024, 2048, 4096, 8192),
        (512, 2048, 8192),
        (2**20, 2**24, 2**28),
        (2**14, 2**21, 2**28),
        0.2,
        128,
        5e-3,
    ),
}


def write_hardware(path: Path, ranks: int, sizes: Sizes | None = None) -> Hardware:
    """Measure this machine, write `path`, and return what the file describes. Raises JobError if it cannot be written.

    `ranks`: processes that exchange messages; links are assumed for one alone.
    """
    if path.suffix != ".toml":
        raise JobError(f"--hardware: given {str(path)!r}; allowed: a name with .toml")
    if path.exists():
        raise JobError(f"{path}: exists already; give another name")
    text = tomli_w.dumps(measure_hardware(ranks, sizes))
    try:
        path.write_text(text)
    except OSError as error:
        raise JobError(f"{path}: cannot be written ({error.strerror}); give another name") from None
    return load_hardware(str(path))


class Measured(NamedTuple):
    """Rates of a rank, while all ranks measure. On a CPU of a core."""

    products: dict[torch.dtype, list[Sample]]
    attention: dict[torch.dtype, list[Sample]]
    copies: list[Sample]
    collectives: dict[tuple[CollectiveKind, int], list[float]]
    """Seconds of each kind in groups of so many ranks, by size."""


def measure_hardware(ranks: int, sizes: Sizes | None = None) -> dict[str, Any]:
    """Return the table of a hardware file for this machine. `ranks`: processes that exchange messages."""
    kind = device_type()
    sizes = sizes or USUAL_SIZES[kind]
    measured = _measure_in_ranks(ranks, sizes) if ranks > 1 else _measure(1, sizes, torch.device(kind))
    bandwidth, peak = _rounded(max(rate for _, rate in measured.copies)), _peaks(measured.products)
    published = find_hardware(torch.cuda.get_device_name()) if kind == "cuda" else None
    # a file without names is of a CPU
    device_names = [f"^{re.escape(torch.cuda.get_device_name())}$"] if kind == "cuda" else []
    if published is not None:
        device_names, bandwidth = list(published.device_names), published.memory_bandwidth
        peak = {key: flops for key, flops in dataclasses.asdict(published.peak).items() if flops is not None}
    link = {"evidence": f"measured between {ranks} ranks"} | (
        _link(ranks, sizes, _exchange_seconds(ranks, measured))
        if ranks > 1
        else {"bandwidth": bandwidth / 4, "latency": 1e-5, "evidence": "assumed"}
    )

    def curves(dtype: torch.dtype) -> dict[str, Any]:
        limit = peak[str(dtype).removeprefix("torch.")]
        return {
            "products": fit(measured.products[dtype], limit, 3),
            "attention": fit(measured.attention[dtype], limit, 1),
        }

    shared = {"cores": _cores(), "float32": curves(torch.float32)} if kind == "cpu" else {}
    return {
        "title": torch.cuda.get_device_name() if kind == "cuda" else f"{platform.machine()}, {_cores()} cores",
        "chip": published.chip if published else "",
        "device_names": device_names,
        "memory_gib": round(_memory(kind) / 2**30, 2),
        "memory_bandwidth": bandwidth,
        "devices_per_machine": ranks,
        "peak": peak,
        "machine_link": link,
        "network_link": {**link, "evidence": "assumed to be like the links of the machine"},
        **({"collectives": {"version": 1, "rows": _rows(measured, sizes)}} if ranks > 1 else {}),
        "memory_bound": fit(measured.copies, bandwidth, 1),
        **curves(torch.bfloat16),
        **shared,
    }


def _cores() -> int:
    return os.cpu_count() or 1


def _measure(ranks: int, sizes: Sizes, device: torch.device) -> Measured:
    """Measure computation and messages of this rank, while the others do the same."""
    return Measured(
        products={dtype: products(sizes, device, dtype) for dtype in DTYPES},
        attention={dtype: attention(sizes, device, dtype) for dtype in DTYPES},
        copies=memory_bound(sizes, device),
        collectives=_collectives(ranks, sizes, device) if ranks > 1 else {},
    )


def _peaks(rates: dict[torch.dtype, list[Sample]]) -> dict[str, float]:
    """Return the best measured rate of each type as its peak. Types that are not measured are like bfloat16."""
    best = {str(dtype).removeprefix("torch."): _rounded(max(rate for _, rate in of)) for dtype, of in rates.items()}
    return best | {"float16": best["bfloat16"]}


def _rounded(value: float) -> float:
    """Return the value with four digits."""
    return float(f"{value:.3e}")


def _memory(kind: str) -> int:
    if kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Rates


def timed(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Return the mean seconds of `calls` in a row.

    On a CPU it is the time of this process on the cores, which other programs hardly change. Messages are counted too:
    gloo copies them with the cores.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = clock()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return max(clock() - started, 1e-9) / calls  # the clocks count in nanoseconds


def seconds_of(run: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """Return the median time of a call, after some that do not count, within about `sizes.seconds`."""
    run()
    calls = math.ceil(sizes.min_seconds / timed(run, device)) or 1
    if dist.is_initialized():
        dist.barrier()
    times: list[float] = []
    while not times or (calls * sum(times) < sizes.seconds and len(times) < 1000):
        times.append(timed(run, device, calls))
    return statistics.median(times)


def products(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Measure products of matrices [m, k] and [k, n]: each size alone small, and all equal."""
    largest = max(sizes.products)
    shapes = {
        tuple(size if place == axis else largest for place in range(3)) for axis in range(3) for size in sizes.products
    }
    shapes |= {(size, size, size) for size in sizes.products}
    samples: list[Sample] = []
    for m, n, k in sorted(shapes):
        a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (k, n)))
        took = seconds_of(partial(torch.matmul, a, b), device, sizes)
        samples.append(((m, n, k), 2 * m * n * k / took))
    return samples


def attention(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """Measure causal attention of heads of 64 features in forward, for each number of keys."""
    samples: list[Sample] = []
    for keys in sizes.keys:
        q, k, v = (torch.randn(1, sizes.heads, keys, 64, device=device, dtype=dtype) for _ in range(3))
        run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        samples.append(((keys,), 2 * sizes.heads * 64 * keys**2 / seconds_of(run, device, sizes)))
    return samples


def memory_bound(sizes: Sizes, device: torch.device) -> list[Sample]:
    """Measure copies, which read and write each byte."""
    samples: list[Sample] = []
    for size in sizes.copied:
        source = torch.zeros(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        took = seconds_of(partial(target.copy_, source), device, sizes)
        samples.append(((2 * size,), 2 * size / took))
    return samples


def fit(samples: Sequence[Sample], peak: float, dimensions: int) -> dict[str, Any]:
    """Fit most * product of s / (s + half) to the shares of `peak`, by least squares of logarithms over HALVES."""
    shares = [(sizes, math.log(min(rate / peak, 1.0))) for sizes, rate in samples]
    used = [half for half in HALVES if half <= max(max(sizes) for sizes, _ in samples)]

    def judged(halves: tuple[float, ...]) -> tuple[float, float]:
        """Return the squared error with the best `most`, and the logarithm of that."""
        residuals = [
            log - sum(math.log(s / (s + h)) for s, h in zip(sizes, halves, strict=True)) for sizes, log in shares
        ]
        most = min(statistics.fmean(residuals), 0.0)
        return sum((value - most) ** 2 for value in residuals), most

    halves = min(itertools.product(used, repeat=dimensions), key=lambda candidate: judged(candidate)[0])
    most = math.exp(judged(halves)[1])
    return {
        "most": round(most, 4),
        "half": [max(half, 1.0) for half in halves],
        "evidence": f"fitted on {len(samples)} measurements",
    }


# Ranks


def _measure_in_ranks(ranks: int, sizes: Sizes) -> Measured:
    """Measure in as many processes at once, which share the cores and the memory's bandwidth as those of a job do."""
    if obstacle := shared_memory_obstacle():
        raise JobError(f"--ranks: given {ranks}; {obstacle}; {SHARED_MEMORY_REMEDY}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
        store, results = str(Path(folder, "store")), context.SimpleQueue()
        processes = [context.Process(target=_rank, args=(rank, ranks, store, sizes, results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise JobError(
                f"--ranks: given {ranks}; allowed: ranks of this machine that can exchange messages; see above"
            )
        measured: Measured = results.get()
    return measured


def _rank(rank: int, ranks: int, store: str, sizes: Sizes, results: Any) -> None:
    """Run in a process: rank 0 puts what it has measured in `results`."""
    die_with_parent(os.getppid())
    kind = device_type()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(max(1, _cores() // ranks))  # as the launcher does
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    measured = _measure(ranks, sizes, device)
    if rank == 0:
        results.put(measured)
    dist.destroy_process_group()


def _link(ranks: int, sizes: Sizes, seconds: Sequence[float]) -> dict[str, float]:
    """Return the bandwidth of a rank and the latency of a hop in exchanges between all ranks of this machine."""
    small, *_, large = seconds
    sent = [size * (ranks - 1) for size in sizes.sent]
    bandwidth = _rounded((sent[-1] - sent[0]) / max(large - small, 1e-9))
    hops = ranks - 1
    return {"bandwidth": bandwidth, "latency": _rounded(max(small - sent[0] / bandwidth, 1e-7) / hops)}


def _exchange_seconds(ranks: int, measured: Measured) -> list[float]:
    """Return the mean seconds of an all-gather, a reduce-scatter and an all-to-all between all ranks, by size."""
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_to_all")
    by_kind = [measured.collectives[kind, ranks] for kind in kinds]
    return [statistics.fmean(seconds) for seconds in zip(*by_kind, strict=True)]


def _rows(measured: Measured, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the rows of a file's measured collectives (`MeasuredCollective` in core/hardware.py)."""
    return [
        {
            "kind": kind,
            "ranks": ranks,
            **fit_collective(kind, ranks, list(zip(sizes.sent, seconds, strict=True))),
            "smallest": sizes.sent[0] * ranks,
            "largest": sizes.sent[-1] * ranks,
        }
        for (kind, ranks), seconds in measured.collectives.items()
    ]


def fit_collective(kind: CollectiveKind, ranks: int, samples: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Fit latency and bandwidth to the seconds of collectives, by least squares of relative errors.

    `samples`: bytes of a rank's part, and seconds. A rank sends its part to each other one, in an all-reduce twice.
    """
    hops = (1 + (kind == "all_reduce")) * (ranks - 1)
    points = [(hops / seconds, hops * size / seconds) for size, seconds in samples]
    aa, ab, bb = (
        sum(x * y for x, y in pairs) for pairs in ([(a, a) for a, _ in points], points, [(b, b) for _, b in points])
    )
    a, b = (sum(values) for values in zip(*points, strict=True))
    determinant = aa * bb - ab * ab
    latency, inverse = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if inverse <= 0:  # the largest message is no slower, as on a busy machine
        latency, inverse = a / aa, 0.0
    return {"latency": _rounded(max(latency, 1e-9)), "bandwidth": _rounded(1 / max(inverse, 1e-15))}


def _collectives(ranks: int, sizes: Sizes, device: torch.device) -> dict[tuple[CollectiveKind, int], list[float]]:
    """Measure each kind in groups of neighboring ranks, of each size that divides the ranks; all groups at once."""
    seconds: dict[tuple[CollectiveKind, int], list[float]] = {}
    for number in (number for number in range(2, ranks + 1) if ranks % number == 0):
        groups = [dist.new_group(list(range(start, start + number))) for start in range(0, ranks, number)]
        group = groups[dist.get_rank() // number]
        for size in sizes.sent:
            for kind, run in _calls(number, size, device, group).items():
                seconds.setdefault((kind, number), []).append(_steady_seconds(run, device, sizes))
    return seconds


def _calls(
    ranks: int, size: int, device: torch.device, group: dist.ProcessGroup | None
) -> dict[CollectiveKind, Callable[[], object]]:
    """Return the collectives of a group in which each rank's part has `size` bytes."""
    part = torch.zeros(size // 4, device=device)
    everything, turned = (torch.zeros(size // 4 * ranks, device=device) for _ in range(2))
    parts = list(everything.chunk(ranks))
    return {
        "all_gather": partial(dist.all_gather, parts, part, group),
        "reduce_scatter": partial(dist.reduce_scatter, part, parts, group=group),
        "all_to_all": partial(dist.all_to_all_single, turned, everything, group=group),
        "all_reduce": partial(dist.all_reduce, everything, group=group),
    }


def _steady_seconds(run: Callable[[], object], device: torch.device, sizes: Sizes, least: int = 5) -> float:
    """Return the median time of a collective, within about `sizes.seconds`.

    Rank 0 decides how often all ranks call it: their clocks differ, and another number would hang.
    """
    run()
    dist.barrier()
    count = torch.tensor([math.ceil(sizes.seconds / timed(run, device))], device=device)
    dist.broadcast(count, 0)
    took = []
    for _ in range(min(max(least, int(count)), 100)):
        dist.barrier()
        took.append(timed(run, device))
    return statistics.median(took)
