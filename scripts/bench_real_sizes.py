"""Measure training at sizes that users have, each method as shipped, next to the program that they would use instead.

    python scripts/bench_real_sizes.py [--only NAME ...] [--size 120M 350M 1.2B] [--recompute default none]
        [--turns 2] [--steps 6] [--same-allocator | --alone]

Llamas of 120 M, 350 M and 1.24 B with random weights in a Hugging Face folder. Each row runs whole programs in turns
(A B, B A, ...): A is `torchtitan train`, `export` or `generate` with the options of ROWS and defaults otherwise, B is
`bench_real_sizes_peer.py`: transformers.Trainer with peft, bitsandbytes or galore-torch (the extra `bench`), peft's
merge, torch.distributed.checkpoint.save of as many tensors, or transformers' greedy generate. Seconds of a step are the
median of all but the first two; the peak is of the process's resident memory. If a package is missing that B needs,
only A runs.

Rows of training are measured twice. In the first both sides recompute what they do by default: A every second block
(`activation_checkpoint.mode`), B all blocks under an adapter (trl's SFTConfig, peft's prepare_model_for_kbit_training)
and nothing otherwise (transformers.TrainingArguments). In the second neither recomputes anything. --recompute chooses.

--same-allocator starts B with the settings of glibc's malloc that A makes itself (torchtitan/process/machine.py).
--alone runs A only.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from bench_timing import ROOT, heading

WARM_UP = 2
RECORDS, NEW_TOKENS = 8, 8
"""Records of a padded batch, and new tokens, for each of --steps."""
PACK, RECORD_TOKENS = 2048, (6, 520)
"""Tokens of a pack, and of its records."""
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
RECOMPUTE = ("default", "none")
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
    unit: str = "step"
    """Unit of the seconds: step, record, token, save, or program."""
    recompute: str = "default"
    """What both sides recompute in backward: default, none, or full."""

    @property
    def peer_recomputes(self) -> bool:
        """Return whether the peer recomputes all blocks."""
        return self.recompute == "full" or (self.recompute == "default" and "peft" in self.packages)

    def variants(self, name: str, recompute: list[str]) -> "Iterator[tuple[str, Row]]":
        """Yield the rows to measure, one for each choice of `recompute`, with their names in the table."""
        if self.unit not in ("step", "record") or self.recompute == "full":
            yield name, self
            return
        if "default" in recompute:
            yield name, self
        if "none" in recompute:
            options = (*self.options, "--activation_checkpoint.mode=none")
            yield f"{name}, nothing recomputed", replace(self, options=options, recompute="none")


def optimizer(name: str) -> tuple[str, ...]:
    return (f"--optimizer.name={name}",)


def adapter(kind: str, *options: str) -> tuple[str, ...]:
    shared = ("--adapter.rank=16", "--adapter.alpha=32", "--adapter.target=['all-linear']", "--adapter.save=alone")
    return (f"--adapter.kind={kind}", *shared, *options)


PEFT = ("transformers", "accelerate", "peft")
ALL_SIZES = ("quick", "120M", "350M", "1.2B")
GALORE = (*optimizer("GaLore"), "--optimizer.options={rank = 256, update_gap = 200}")
PACKED = ("--task.kind=sft", "--training.dataset=text", "--data.train_on=all")
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
    "LoRA, merge and export": Row(adapter("lora"), "merge", PEFT, ALL_SIZES, unit="program"),
    "LoRA, 6,144 tokens": Row(
        (*adapter("lora"), "--activation_checkpoint.mode=full"), "lora", PEFT, ("350M",), 6144, recompute="full"
    ),
    "LoRA, records": Row((*adapter("lora"), *PACKED), "lora", PEFT, seq_len=PACK, unit="record"),
    "save": Row(peer="save", seq_len=64, unit="save"),
    "generate, float32": Row(("--training.dtype=float32",), "generate-float32", sizes=ALL_SIZES, unit="token"),
    "generate, bfloat16": Row(("--training.dtype=bfloat16",), "generate-bfloat16", sizes=ALL_SIZES, unit="token"),
}


@dataclass
class Result:
    """Seconds of the row's unit, peak of resident memory in GiB, and seconds of the whole program."""

    seconds: float
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


def steady(seconds: list[float]) -> float:
    """Return the median of steps without the first ones."""
    return median(seconds[WARM_UP:] or seconds)


def record_lengths(count: int) -> list[int]:
    """Return the lengths of `count` records, in tokens."""
    lengths = random.Random(0)
    return [lengths.randint(*RECORD_TOKENS) for _ in range(count)]


def measure_ours(row: Row, model: Path, folder: Path, steps: int) -> Result:
    if row.unit == "token":
        return generate(row, model, folder, steps)
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
        "training.steps": 1 if row.unit == "save" else steps,
        "metrics.log_freq": 1,
    }
    lengths = record_lengths(steps * RECORDS)
    if row.unit == "record":
        records = folder.with_suffix(".jsonl")
        texts = ("x" * (length - 2) for length in lengths)  # between a begin and an end token
        records.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        job |= {"training.dataset_path": records, "training.epochs": 1, "training.steps": 10**6}
    command = [sys.executable, "-m", "torchtitan.train", *(f"--{key}={value}" for key, value in job.items())]
    program, peak = run_program([*command, *row.options], folder.with_suffix(".log"), {})
    if row.unit == "program":
        export = ["export", str(folder), "--merge", "--dtype", "bfloat16", "--to", str(folder / "merged")]
        program, peak = run_program([sys.executable, "-m", "torchtitan", *export], folder.with_suffix(".export"), {})
        return Result(program, peak, program)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if row.unit == "save":
        return Result(max(line.get("save_seconds", 0.0) for line in lines), peak, program)
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    share = len(seconds) / len(lengths) if row.unit == "record" else 1
    return Result(steady(seconds) * share, peak, program)


def generate(row: Row, model: Path, folder: Path, steps: int) -> Result:
    """Continue a prompt with `torchtitan generate`."""
    log, prompt = folder.with_suffix(".log"), "x" * (row.seq_len - 1)
    options = ["--prompt", prompt, "--temperature", "0", "--max-new-tokens", str(steps * NEW_TOKENS)]
    command = [sys.executable, "-m", "torchtitan", "generate", str(model), *options, "--model.tokenizer_path=bytes"]
    program, peak = run_program([*command, *row.options], log, {})
    rate = re.search(r"at (\S+) tokens/s", log.read_text())
    if rate is None:
        raise RuntimeError(f"{log}: `torchtitan generate` ended before its second token")
    return Result(1 / float(rate[1]), peak, program)


def measure_peer(row: Row, model: Path, folder: Path, environment: dict[str, str], steps: int) -> Result:
    script = [sys.executable, str(ROOT / "scripts/bench_real_sizes_peer.py")]
    count = steps * NEW_TOKENS if row.unit == "token" else steps
    arguments = [str(model), "--seq-len", str(row.seq_len), "--steps", str(count), "--to", str(folder)]
    lengths = record_lengths(steps * RECORDS)
    if row.unit == "record":
        arguments += ["--batch", str(RECORDS), "--lengths", json.dumps(lengths)]
    if row.peer_recomputes:
        arguments.append("--recompute")
    method = "lora" if row.unit == "program" else row.peer
    program, peak = run_program([*script, method, *arguments], folder.with_suffix(".log"), environment)
    if row.unit == "program":
        command = [*script, "merge", str(model), "--adapter", str(folder), "--to", str(folder / "merged")]
        program, peak = run_program(command, folder.with_suffix(".export"), environment)
        return Result(program, peak, program)
    seconds = json.loads((folder / "seconds.json").read_text())
    share = len(seconds) / len(lengths) if row.unit == "record" else 1
    return Result(steady(seconds) * share, peak, program)


def cell(row: Row, result: Result) -> str:
    """Format a result: seconds of the unit, tokens a second, peak, seconds of the program."""
    tokens = {"step": row.seq_len, "record": sum(RECORD_TOKENS) / 2, "token": 1}.get(row.unit)
    rate = "" if tokens is None else f"{tokens / result.seconds:.4g} tok/s, "
    seconds = "" if row.unit == "program" else f"{result.seconds:.3g} s a {row.unit}, "
    return f"{seconds}{rate}{result.peak:.1f} GiB, {result.program:.0f} s"


def measure(name: str, row: Row, model: Path, options: argparse.Namespace) -> str:
    """Run both programs in turns and return the row of a table, with medians."""
    environment = KEEP_FREED_MEMORY if options.same_allocator else {}
    results: dict[str, list[Result]] = {"A": [], "B": []}
    compared = row.peer and not options.alone and all(find_spec(package) for package in row.packages)
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        for turn in range(options.turns):
            for program in ("AB" if turn % 2 == 0 else "BA") if compared else "A":
                folder = Path(scratch) / f"{program}{turn}"
                if program == "A":
                    results["A"].append(measure_ours(row, model, folder, options.steps))
                else:
                    results["B"].append(measure_peer(row, model, folder, environment, options.steps))
    cells = []
    for program in "AB":
        medians = [median(values) for values in zip(*map(astuple, results[program]), strict=True)]
        cells.append(cell(row, Result(*medians)) if medians else "-")
    return f"| {name}, {model.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help="; ".join(ROWS))
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES)[1:], help="quick: shows that it runs")
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=list(RECOMPUTE), help="rows of training")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="steps of training; 8 records and 8 new tokens for each")
    parser.add_argument("--folder", type=Path, help="keep the models there (default: a temporary folder)")
    parser.add_argument("--same-allocator", action="store_true")
    parser.add_argument("--alone", action="store_true", help="leave the peer out")
    options = parser.parse_args()
    print(*heading(threads=os.cpu_count() or 1).splitlines()[:2], sep="\n")
    print("| | torchtitan: seconds, tokens/s, peak, program | peer |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        models = options.folder or Path(temporary)
        models.mkdir(parents=True, exist_ok=True)
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
                    for title, row in ROWS[name].variants(name, options.recompute):
                        print(measure(title, row, models / size, options), flush=True)


if __name__ == "__main__":
    main()
