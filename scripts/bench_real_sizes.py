"""Measure training at sizes that users have, each method as shipped, next to the program that they would use instead.

    python scripts/bench_real_sizes.py [--only NAME ...] [--size 120M 350M 1.2B] [--turns 2] [--same-allocator]

Llamas of 120 M, 350 M and 1.24 B with random weights in a Hugging Face folder. Each row runs whole programs in turns
(A B, B A, ...): A is `torchtitan train` or `export` with the options of ROWS and defaults otherwise, B is
`bench_real_sizes_peer.py`: transformers.Trainer with peft, bitsandbytes or galore-torch (the extra `bench`), and peft's
merge. Seconds of a step are the median of all but the first two; the peak is of the process's resident memory. If a
package is missing that B needs, only A runs. --same-allocator starts B with the settings of glibc's malloc that A makes
itself (torchtitan/process/machine.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from bench_timing import ROOT, heading

STEPS, WARM_UP = 6, 2
SIZES = {  # of transformers.LlamaConfig
    "quick": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    | {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "120M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000}
    | {"num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False},
    "350M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "vocab_size": 32000}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True},
}
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Row:
    """A method of training: our options, the peer's name for it, and the packages that the peer needs."""

    options: tuple[str, ...] = ()
    peer: str = ""
    packages: tuple[str, ...] = ("transformers", "accelerate")
    sizes: tuple[str, ...] = ("quick", "120M", "350M")
    seq_len: int = 512


def optimizer(name: str) -> tuple[str, ...]:
    return (f"--optimizer.name={name}",)


def adapter(kind: str, *options: str) -> tuple[str, ...]:
    shared = ("--adapter.rank=16", "--adapter.alpha=32", "--adapter.target=['all-linear']", "--adapter.save=alone")
    return (f"--adapter.kind={kind}", *shared, *options)


PEFT = ("transformers", "accelerate", "peft")
ALL_SIZES = ("quick", "120M", "350M", "1.2B")
GALORE = (*optimizer("GaLore"), "--optimizer.options={rank = 256, update_gap = 200}")
FULL_RECOMPUTE = ("--activation_checkpoint.mode=full",)
MERGE = "LoRA, merge and export"
ROWS = {
    "AdamW": Row(peer="adamw_torch"),
    "AdamW8bit": Row(optimizer("AdamW8bit"), "adamw_bnb_8bit", ("transformers", "accelerate", "bitsandbytes")),
    "AdamWBF16": Row((*optimizer("AdamWBF16"), "--training.dtype=bfloat16")),
    "Adafactor": Row(optimizer("Adafactor"), "adafactor"),
    "Lion": Row(optimizer("Lion"), "lion_32bit", ("transformers", "accelerate", "bitsandbytes")),
    "GaLore": Row(GALORE, "galore_adamw", ("transformers", "accelerate", "galore_torch"), ("120M", "350M")),
    "LoRA": Row(adapter("lora"), "lora", PEFT, ALL_SIZES),
    "DoRA": Row(adapter("dora"), "dora", PEFT, ALL_SIZES),
    "QLoRA": Row(adapter("qlora"), "qlora", (*PEFT, "bitsandbytes"), ALL_SIZES),
    MERGE: Row(adapter("lora"), "merge", PEFT, ALL_SIZES),
    "LoRA, 6,144 tokens": Row((*adapter("lora"), *FULL_RECOMPUTE), "lora-recompute", PEFT, ("350M",), 6144),
}


@dataclass
class Result:
    """Seconds of a step (the median), peak of resident memory in GiB, and seconds of the whole program."""

    step: float
    peak: float
    program: float


def run_program(command: list[str], log: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Run a program and return its seconds and the peak of its resident memory in GiB. Raises RuntimeError."""
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    return time.perf_counter() - started, usage.ru_maxrss / 2**20


def measure_ours(row: Row, model: Path, folder: Path) -> Result:
    job = {
        "job.dump_folder": folder,
        "model.flavor": "from_hf",
        "model.hf_folder": model,
        "model.tokenizer_path": "bytes",
        "checkpoint.enable": "true",
        "checkpoint.initial_load_path": model,
        "checkpoint.initial_load_in_hf": "true",
        "checkpoint.interval": 10**6,
        "training.local_batch_size": 1,
        "training.seq_len": row.seq_len,
        "training.steps": STEPS,
        "metrics.log_freq": 1,
    }
    command = [sys.executable, "-m", "torchtitan.train", *(f"--{key}={value}" for key, value in job.items())]
    program, peak = run_program([*command, *row.options], folder.with_suffix(".log"), {})
    if row.peer == "merge":
        export = ["export", str(folder), "--merge", "--dtype", "bfloat16", "--to", str(folder / "merged")]
        program, peak = run_program([sys.executable, "-m", "torchtitan", *export], folder.with_suffix(".export"), {})
        return Result(program, peak, program)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    return Result(median(seconds[WARM_UP:]), peak, program)


def measure_peer(name: str, model: Path, seq_len: int, folder: Path, environment: dict[str, str]) -> Result:
    script = [sys.executable, str(ROOT / "scripts/bench_real_sizes_peer.py")]
    arguments = [str(model), "--seq-len", str(seq_len), "--steps", str(STEPS), "--to", str(folder)]
    method = "lora" if name == "merge" else name
    program, peak = run_program([*script, method, *arguments], folder.with_suffix(".log"), environment)
    if name == "merge":
        command = [*script, "merge", str(model), "--adapter", str(folder), "--to", str(folder / "merged")]
        program, peak = run_program(command, folder.with_suffix(".export"), environment)
        return Result(program, peak, program)
    return Result(median(json.loads((folder / "seconds.json").read_text())[WARM_UP:]), peak, program)


def measure(name: str, size: str, models: Path, turns: int, environment: dict[str, str]) -> str:
    """Run both programs in turns and return the row of a table: medians of step, tokens per second and peak."""
    row, model = ROWS[name], models / size
    results: dict[str, list[Result]] = {"A": [], "B": []}
    compared = bool(row.peer) and all(find_spec(package) for package in row.packages)
    with tempfile.TemporaryDirectory(dir=models) as scratch:
        for turn in range(turns):
            for program in ("AB" if turn % 2 == 0 else "BA") if compared else "A":
                folder = Path(scratch) / f"{program}{turn}"
                if program == "A":
                    results["A"].append(measure_ours(row, model, folder))
                else:
                    results["B"].append(measure_peer(row.peer, model, row.seq_len, folder, environment))
    cells = []
    for program in "AB":
        if results[program]:
            fields = ("step", "peak", "program")
            step, peak, seconds = (median(getattr(r, field) for r in results[program]) for field in fields)
            rate = "" if name == MERGE else f"{step:.2f} s, {row.seq_len / step:.0f} tok/s, "
            cells.append(f"{rate}{peak:.1f} GiB, {seconds:.0f} s")
        else:
            cells.append("-")
    return f"| {name}, {size} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help="; ".join(ROWS))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES)[1:], help="quick: shows that it runs")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the models there (default: a temporary folder)")
    parser.add_argument("--same-allocator", action="store_true")
    options = parser.parse_args()
    print(*heading(threads=os.cpu_count() or 1).splitlines()[:2], sep="\n")
    print("| | torchtitan: step, tokens/s, peak, program | peer |\n|---|---|---|", flush=True)
    environment = KEEP_FREED_MEMORY if options.same_allocator else {}
    with tempfile.TemporaryDirectory() as temporary:
        models = options.folder or Path(temporary)
        for size in options.size:
            if not (models / size).exists():
                arguments = [str(models / size), "--config", json.dumps(SIZES[size])]
                run_program(
                    [sys.executable, str(ROOT / "scripts/bench_real_sizes_peer.py"), "make", *arguments],
                    models / f"{size}.log",
                    {},
                )
            for name in options.only:
                if size in ROWS[name].sizes:
                    print(measure(name, size, models, options.turns, environment), flush=True)


if __name__ == "__main__":
    main()
