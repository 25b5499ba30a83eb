"""Measure how time and memory grow with sizes of model, sequence, checkpoint and data, next to lower bounds.

    python scripts/bench_scaling.py [--only NAME ...] [--rounds 2] [--write] [--quick]

  seq_len, documents (with document_mask), layers, vocabulary: CPU time of a step, each size in a new process. Bounds:
      FLOPs by formula at the speed of plain matrix products, and the memory that `torchtitan estimate` predicts.
  saves: checkpoints. Bound: plain writes and reads of as many bytes.
  data: `prepare` (bound: the tokenizer alone), and the loader (bound: a memory map).
  generate: prompt and new tokens. Bounds: matrix products, and products of all matrices with a vector.
  start: seconds of each phase.

One thread, float32. --folder keeps the results, so that parts can be measured in several calls; --write puts them into
docs/ as tables and a picture.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench_rank import matmul_gflops
from bench_scaling_page import PHASES, PICTURE, Rows, draw, shown, write_page
from bench_timing import ROOT, heading, throw_lines_away
from bench_trainer import MemoryMap, arguments, megabytes_of_state, saves_in_turn, shuffled, trainer_of, write_shards

from torchtitan import launch
from torchtitan.assembly import parts
from torchtitan.commands.generate import sample
from torchtitan.config import manager
from torchtitan.core.files import TOKENIZER
from torchtitan.datasets import open_source
from torchtitan.datasets.preparing import prepare
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.job import ResolvedJob
from torchtitan.launcher.multi_node import Coordinator
from torchtitan.launcher.processes import SignalQueue
from torchtitan.launcher.run_folder import hold_lock, this_process
from torchtitan.metrics.device import GIB
from torchtitan.models.kv_cache import CachedDecoder
from torchtitan.planner.estimate import flops_of_a_rank, predict, worst
from torchtitan.process.exit import exit_with


def fastest_seconds(call: Callable[[], object], times: int) -> float:
    """Return the seconds of the fastest call; other processes can only slow it down."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def spread(key: str, values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum as columns of a row."""
    return {key: median(values), f"{key}_low": min(values), f"{key}_high": max(values)}


# Steps


def measure_steps(key: str, cases: dict[Any, dict[str, object]], folder: Path, options: argparse.Namespace) -> Rows:
    """Measure the steps of jobs and return one row for each size, in column `key`.

    Every round measures all sizes, each in a new process; every second round goes in reverse order.
    """
    jobs = {}
    for number, (size, case) in enumerate(cases.items()):
        settings = {"job__dump_folder": folder / f"{number}", "training__steps": 3 if options.quick else 4}
        jobs[size] = arguments(folder, **settings, **case)
    measurements: dict[Any, list[dict]] = {size: [] for size in cases}
    for number in range(options.rounds):
        for size in cases if number % 2 == 0 else reversed(cases):
            measurements[size].append(measure_job(folder, jobs[size]))
    table = []
    for size, job in jobs.items():
        resolved, rounds = ResolvedJob(manager.load(job)), measurements[size]
        training = resolved.layout.training
        flops, seconds = flops_of_a_rank(resolved), [median(value["steps"]) for value in rounds]
        row = {key: size, "tokens": training.local_batch_size * training.seq_len, "gflop": flops / 1e9}
        row["estimated"] = worst(predict(resolved)).peak / GIB
        shares = [flops / 1e9 / value / one["peak"] for value, one in zip(seconds, rounds, strict=True)]
        table.append(
            row | spread("seconds", seconds) | spread("share", shares) | {"gib": max(r["gib"] for r in rounds)}
        )
    return table


def measure_job(folder: Path, job: list[str]) -> dict[str, Any]:
    """Run a job with bench_rank.py and return its report."""
    report = folder / "told.json"
    os.environ["STARTED"] = str(time.time())
    command = [sys.executable, str(ROOT / "scripts/bench_rank.py"), str(report), *job]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return json.loads(report.read_text())


def by_seq_len(mask: bool, folder: Path, options: argparse.Namespace) -> Rows:
    """Measure steps by sequence length, with as many tokens in each."""
    lengths, tokens = ((256, 512, 1024, 2048, 4096), 4096) if not options.quick else ((16, 32), 32)
    common = {"model__overrides": overrides(options), "training__document_mask": str(mask).lower()}
    cases = {n: common | {"training__seq_len": n, "training__local_batch_size": tokens // n} for n in lengths}
    return measure_steps("seq_len", cases, folder, options)


def by_layers(folder: Path, options: argparse.Namespace) -> Rows:
    """Measure steps by number of layers."""
    depths = (1,) if options.quick else (2, 4, 8, 16, 24)
    cases = {n: batch(options) | {"model__overrides": overrides(options, n)} for n in depths}
    return measure_steps("layers", cases, folder, options)


def by_vocabulary(folder: Path, options: argparse.Namespace) -> Rows:
    """Measure steps by size of the vocabulary."""
    sizes = (512, 1024) if options.quick else (2048, 8192, 32000, 128000)
    cases = {n: batch(options) | {"model__overrides": overrides(options, vocab_size=n)} for n in sizes}
    return measure_steps("vocabulary", cases, folder, options)


def overrides(options: argparse.Namespace, layers: int = 4, **more: int) -> str:
    """Return model.overrides for a model of this depth."""
    sizes = {"dim": 32, "n_layers": min(layers, 2)} if options.quick else {"dim": 256, "n_layers": layers}
    sizes |= {"n_heads": 4, "n_kv_heads": 4, **more}
    return f"{{{', '.join(f'{name} = {size}' for name, size in sizes.items())}}}"


def batch(options: argparse.Namespace) -> dict[str, object]:
    """Return the options of the batch."""
    return {"training__local_batch_size": 4, "training__seq_len": 32 if options.quick else 256}


# Saves


def measure_saves(folder: Path, options: argparse.Namespace) -> Rows:
    """Measure saves and loads by size of the state, next to plain writes and reads of as many bytes."""
    sizes = ((256, 4), (512, 8), (768, 12)) if not options.quick else ((32, 1),)
    table = []
    for dim, layers in sizes:
        shape, place = f"{{dim={dim}, n_layers={layers}, n_heads=4, n_kv_heads=4}}", folder / f"{dim}"
        place.mkdir()
        (place / "shards").symlink_to(folder / "shards")
        trainers, (waits, stalls) = saves_in_turn(place, shape, ("disabled", "async"), options.times)
        megabytes = megabytes_of_state(trainers[0])
        saved = [path for path in sorted((place / "saves-0/checkpoint").rglob("*.distcp"))][-1]
        plain, content = place / "plain", os.urandom(2**20) * max(1, round(megabytes))
        write_speed = len(content) / 1e6 / fastest_seconds(partial(write, plain, content), options.times)
        loads, read_speeds = [], []
        for _ in range(options.times):
            loads.append(megabytes / uncached_seconds(trainers[0].checkpointer.load, saved))
            read_speeds.append(len(content) / 1e6 / uncached_seconds(plain.read_bytes, plain))
        table.append(
            {"megabytes": megabytes, "plain_write": write_speed, "plain_read": max(read_speeds)}
            | spread("save", [megabytes / seconds for seconds in waits])
            | spread("load", loads)
            | spread("stall", stalls)
        )
    return table


def write(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())


def uncached_seconds(read: Callable[[], object], path: Path) -> float:
    """Return the seconds of `read` on a file that is not in the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return fastest_seconds(read, 1)


# Data


def measure_data(folder: Path, options: argparse.Namespace) -> Rows:
    """Measure `prepare` next to the tokenizer, and the loader next to a memory map."""
    texts = folder / "texts"
    texts.mkdir()
    library = open_source("python_stdlib", None, RecordReader()).documents()
    content = [document.content for document in islice(library, 20 if options.quick else 600)]
    copies = 1 if options.quick else 6  # enough data to make the start of processes negligible
    for number, text in enumerate(content * copies):
        (texts / f"{number}.txt").write_text(text)
    tokenizer, table = build_tokenizer(str(TOKENIZER)), []
    tokens = sum(len(tokenizer.encode(text)) for text in content)
    tokenizer_speed = tokens / fastest_seconds(lambda: [tokenizer.encode(text) for text in content], options.times)
    for workers in (1, 2):
        speeds = []
        for number in range(options.times):
            source, output = open_source("text", str(texts), RecordReader()), folder / f"made-{workers}-{number}"
            started = time.perf_counter()
            prepare(source, str(TOKENIZER), output, workers, stop=True)
            speeds.append(copies * tokens / (time.perf_counter() - started))
        labels = {
            "what": f"prepare, {workers} processes" if workers > 1 else "prepare, one process",
            "bound": tokenizer_speed,
        }
        table.append(labels | {"by": "by the tokenizer alone"} | spread("speed", speeds))
    many, batch, seq_len = 16 if options.quick else 256, 8, 2048
    consume = lambda batches: lambda: [None for _ in islice(batches, many)]  # noqa: E731
    floor = (
        batch
        * seq_len
        * many
        / fastest_seconds(consume(iter(MemoryMap(folder / "shards", batch, seq_len))), options.times)
    )
    for name, mask in (("prepared shards", False), ("prepared shards, document mask", True)):
        batches = consume(iter(shuffled(folder / "shards", batch, seq_len, mask)))
        speeds = [batch * seq_len * many / fastest_seconds(batches, 1) for _ in range(options.times)]
        labels = {"what": f"loader, {name}", "bound": floor, "by": "by slices of a memory map"}
        table.append(labels | spread("speed", speeds))
    return table


# Generation


def measure_generation(folder: Path, options: argparse.Namespace) -> Rows:
    """Measure tokens per second of reading a prompt and of generating, by length of the prompt."""
    lengths, more = ((256, 1024, 4096), 64) if not options.quick else ((8, 16), 4)
    shape = "{dim = 512, n_layers = 8, n_heads = 8}" if not options.quick else overrides(options)
    trainer = trainer_of(folder, model__overrides=shape)
    model, args = trainer.model.parts[0].eval(), ResolvedJob(trainer.config).model.args
    tokenizer, reader = build_tokenizer("bytes"), CachedDecoder(model)
    peak, speed, table = matmul_gflops(), reading_speed(model), []
    for length in lengths:
        prompt, prompt_speeds, decode_speeds = torch.randint(256, (length,)).tolist(), [], []
        for _ in range(options.times):
            sampling = {"max_new_tokens": more, "context": 2 * length, "temperature": 0, "top_k": 0, "seed": 0}
            tokens = sample(reader, prompt, tokenizer, **sampling)
            started = time.perf_counter()
            next(tokens)
            first = time.perf_counter()
            count = sum(1 for _ in tokens)
            prompt_speeds.append(length / (first - started))
            decode_speeds.append(count / (time.perf_counter() - first))
        forward = parts.model_spec(ResolvedJob(trainer.config).model).flops_per_token(args, length).causal / 3
        bytes_per_token = 4 * (args.num_matmul_parameters + 2 * args.n_layers * args.dim * (length + more / 2))
        table.append(
            {"prompt": length, "read_bound": peak * 1e9 / forward, "written_bound": speed / bytes_per_token}
            | spread("read", prompt_speeds)
            | spread("written", decode_speeds)
        )
    return table


def reading_speed(model: torch.nn.Module) -> float:
    """Return the bytes per second read while a vector is multiplied with each matrix of the model's blocks."""
    matrices = [p.detach() for p in model.layers.parameters() if p.dim() == 2]
    vectors = [torch.ones(matrix.shape[1]) for matrix in matrices]
    seconds = fastest_seconds(lambda: [m @ v for m, v in zip(matrices, vectors, strict=True)], 10)
    return sum(matrix.nbytes for matrix in matrices) / seconds


# Start


def measure_starts(folder: Path, options: argparse.Namespace) -> Rows:
    """Measure the phases of a start, by size of the model and number of ranks."""
    shapes = {6: "{}", 88: "{dim = 768, n_layers = 12, n_heads = 12}"} if not options.quick else {6: "{n_layers = 1}"}
    table = []
    for (millions, shape), ranks in product(shapes.items(), (1, 2)):
        rounds: list[dict[str, float]] = []
        for number in range(options.times):
            report = folder / f"{millions}-{ranks}-{number}.json"
            job = arguments(folder, job__dump_folder=report.with_suffix(""), model__overrides=shape, training__steps=2)
            os.environ["STARTED"] = str(time.time())
            subprocess.run(
                [sys.executable, "-m", "torchtitan", "check", "--no-memory", *job],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            checked = time.time() - float(os.environ["STARTED"])
            os.environ["STARTED"] = str(time.time())
            config, program = manager.load(job), (sys.executable, str(ROOT / "scripts/bench_rank.py"), str(report))
            with hold_lock(Path(config.job.dump_folder), this_process()):
                local_ranks = launch.LocalRanks(config, job, ranks, options.queue, program)
                assert local_ranks.run(Coordinator()).code == 0
            rounds.append({"check": checked} | json.loads(report.read_text())["phases"])
        table.append({"millions": millions, "ranks": ranks} | {key: median(r[key] for r in rounds) for key in PHASES})
        totals = [sum(r.values()) - r["later steps"] for r in rounds]
        table[-1] |= spread("whole", totals)
    return table


PARTS: dict[str, Callable[[Path, argparse.Namespace], Rows]] = {
    "seq_len": partial(by_seq_len, False),
    "documents": partial(by_seq_len, True),
    "layers": by_layers,
    "vocabulary": by_vocabulary,
    "saves": measure_saves,
    "data": measure_data,
    "generate": measure_generation,
    "start": measure_starts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_text = f"parts to measure, of {', '.join(PARTS)} (default: all; none without a NAME)"
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS), metavar="NAME", help=help_text)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of training steps for each size (default: 2)")
    parser.add_argument("--times", type=int, default=5, help="repeats of all other measurements (default: 5)")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write all stored results into docs/; with an empty --only, without measuring",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that the script runs")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/bench_scaling")
    options = parser.parse_args()
    if options.quick:
        options.rounds = options.times = 1
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    throw_lines_away()
    options.queue = SignalQueue()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "measured.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    print(heading(threads=1).rpartition("\n")[0], flush=True)
    for name in options.only:
        when = f"{date.today():%-d %B %Y}, load average {os.getloadavg()[0]:.1f}"
        with tempfile.TemporaryDirectory() as place:
            write_shards(Path(place, "shards"), 100_000 if options.quick else 20_000_000)
            results[name] = {"when": when, "rows": PARTS[name](Path(place), options)}
        if dist.is_initialized():  # of this process's trainer; the estimate must not see it
            dist.destroy_process_group()
        file.write_text(json.dumps(results, indent=1))
        print(shown(name, results[name]), flush=True)
    if set(results) == set(PARTS):
        draw(results, PICTURE if options.write else options.folder / PICTURE.name)
        if options.write:
            write_page(results)


if __name__ == "__main__":
    exit_with(main)
