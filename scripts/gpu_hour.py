"""Run parts of the first hour on GPUs; scripts/gpu_hour.sh explains the use. Imports nothing but the standard library.

Environment: OUT, WHEELS, and TINY=1, which runs the debug model at small sizes, to try the parts on a CPU.
"""

import functools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", "outputs/gpu")).absolute()
TINY = bool(os.environ.get("TINY"))
PART_SECONDS = 540


@dataclass(frozen=True)
class Step:
    """A command of a part. `expected`: what its row of the table should show. `seconds`: its time limit."""

    name: str
    expected: str
    command: list[str]
    seconds: int = 100
    environment: dict[str, str] = field(default_factory=dict)


DATA = ["--training.dataset=python_stdlib", "--model.tokenizer_path=bytes", "--training.global_batch_size=-1"]
QUIET = ["--metrics.plot=false", "--checkpoint.enable=false", "--validation.enable=false"]
SAME = ["--training.mixed_precision_param=float32"]
LLAMA_1B = ["--model.name=llama3.2", "--model.flavor=1B"]
LONG = ["--training.seq_len=4096", "--optimizer.lr=1e-4", "--metrics.log_freq=3"]  # a logged step waits for the device
WIDTHS = "dim = 2048, n_layers = 4, n_heads = 32, n_kv_heads = 4, head_dim = 128"
EXPERTS = ["--model.name=qwen3_moe"]
DENSE = ["--model.name=qwen3"]
PAIRS = ["--model.name=deepseek", "--training.local_batch_size=16", "--activation_checkpoint.mode=full", *DATA]
PAIRS += ["--parallelism.pipeline_parallel_degree=2", "--parallelism.expert_parallel_degree=4"]
PAIRS += ["--parallelism.pipeline_parallel_schedule=DualPipeV"]
LLAMA_8B = [*DATA, "--lr_scheduler.warmup_steps=2"]
DEEPSEEK = ["--", "--model.name", "deepseek"]
if TINY:
    LLAMA_1B, LONG = [], ["--training.seq_len=128"]
else:
    EXPERTS += [f"--model.overrides={{{WIDTHS}, expert_dim = 768, n_experts = 64, top_k = 8}}"]
    DENSE += [f"--model.overrides={{{WIDTHS}, ffn_dim = 6144}}"]
SAMPLES = [*LONG, *DATA, "--training.local_batch_size=4"]
UNRECOMPUTED = [*SAMPLES, "--activation_checkpoint.mode=none"]
FOUR = [*LLAMA_1B, *UNRECOMPUTED]
RECOMPUTED = [*LLAMA_1B, *SAMPLES, "--activation_checkpoint.mode=full"]
IN_BACKWARD = ["--optimizer.early_step_in_backward", "--training.max_norm=0"]
COMPILED = ["--compile.enable", *(["--compile.backend=aot_eager"] if TINY else [])]
OVERLAP = ["--parallelism.pipeline_parallel_expert_parallel_overlap=true"]
EP_8 = [*UNRECOMPUTED, *EXPERTS, "--parallelism.expert_parallel_degree=8"]
TP_8 = ["--parallelism.tensor_parallel_degree=8"]
PP_2 = ["--training.local_batch_size=8", "--parallelism.pipeline_parallel_degree=2"]
PP_2 += ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]
TRACED = ["--profiling.enable_profiling", "--profiling.profile_freq=4"]


def job(
    name: str,
    expected: str,
    options: list[str],
    steps: int,
    seconds: int = 100,
    *,
    ranks: int = 1,
    file: str = "debug_model",
    program: str = "",
    **environment: str,
) -> Step:
    """Return a step that trains. `program`: a script that runs torchtitan.train, instead of the launcher."""
    start = [program] if program else ["-m", "torchtitan.launch", str(ranks)]
    command = [sys.executable, *start, f"--job.config_file=train_configs/{file}.toml"]
    command += [f"--job.dump_folder={OUT}/runs/{name}", f"--training.steps={min(steps, 4) if TINY else steps}", *QUIET]
    return Step(name, expected, [*command, *options], seconds, environment)


def script(name: str, expected: str, *command: str, seconds: int = PART_SECONDS, **environment: str) -> Step:
    return Step(name, expected, [sys.executable, *command], seconds, environment)


def features() -> list[Step]:
    """Return a step for each kernel of ours that eager and compiled runs of the plain model do not use."""
    steps = [
        job("lora", "0.88 of eager's time on an H100", [*FOUR, "--adapter.kind=lora"], 12),
        job(
            "lora_dropout",
            "1.13 of lora's time on an H100",
            [*FOUR, "--adapter.kind=lora", "--adapter.dropout=0.05"],
            12,
        ),
        job("qlora", "1.03 of lora's time on an H100", [*FOUR, "--adapter.kind=qlora"], 12),
        job("qlora_compiled", "0.85 of qlora's time on an H100", [*FOUR, "--adapter.kind=qlora", *COMPILED], 12, 150),
    ]
    for name in ("AdamW8bit", "Muon", "GaLore", "Adafactor", "Lion"):
        steps.append(job(name, "little more than eager", [*FOUR, f"--optimizer.name={name}"], 12))
    bfloat16 = [*FOUR, "--training.dtype=bfloat16", "--optimizer.name=AdamWBF16"]
    return [
        *steps,
        job("kahan", "little more than eager, less memory", bfloat16, 12),
        job("stochastic", "as kahan", [*bfloat16, '--optimizer.options={rounding = "stochastic"}'], 12),
        job("documents", "1.06 of eager's time on an H100", [*FOUR, "--training.document_mask"], 12, 120),
        job("experts", "half to three quarters of dense's MFU", [*UNRECOMPUTED, *EXPERTS], 12),
        job("dense", "as many weights a token as experts", [*UNRECOMPUTED, *DENSE], 12),
        job("experts_compiled", "faster than experts", [*UNRECOMPUTED, *EXPERTS, *COMPILED], 12, 150),
        job("float8", "less time than compiled", [*FOUR, *COMPILED, "--training.float8=tensorwise"], 25, 180),
        job("float8_rowwise", "more than float8", [*FOUR, *COMPILED, "--training.float8=rowwise"], 25, 180),
        job("in_backward", "less memory than eager", [*FOUR, *IN_BACKWARD], 12),
    ]


def parts() -> dict[str, list[Step]]:
    """Return the steps of each part."""
    tests = ["-m", "pytest", "-q", "--quick", "-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal"]
    tests += ["-p", "no:cacheprovider", *(["tests/losses/test_objective.py", "-k", "automatic"] if TINY else [])]
    eight = functools.partial(job, ranks=8)
    large = functools.partial(eight, file="llama3_8b", seconds=170)
    pairs = functools.partial(eight, file="deepseek_debug")
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    return {
        "probe": [script("probe", "operations one by one, beside what they should take", "scripts/gpu_probe.py")],
        "programs": [script("programs", "GPU and CPU agree; a resume repeats the bits", "scripts/gpu_programs.py")],
        "same": [
            job("float32", "losses within 1e-4 of float32_cpu's", SAME, 10),
            job("float32_cpu", "the losses of a CPU", SAME, 10, CUDA_VISIBLE_DEVICES=""),
            job("bfloat16", "the loss falls as in float32", [], 20),
            job("bfloat16_compiled", "as bfloat16", COMPILED, 20, 150),
        ],
        "speed": [
            job("eager", "MFU (causal) 43 % on an H100, 42.3 GiB", FOUR, 25),
            job("eager_16_chunks", "1 % slower than eager, less memory", [*FOUR, "--training.loss_chunks=16"], 25),
            job("compiled", "MFU (causal) 50 % on an H100", [*FOUR, *COMPILED], 40, 180),
            job("recomputed", "a fifth slower than eager, far less memory", RECOMPUTED, 25),
        ],
        "watch": [
            job("waits", "no line of the package more than once", FOUR, 12, 150, program="scripts/gpu_waits.py"),
            job("trace", "kernels without gaps: the host is ahead", [*FOUR, *TRACED, *COMPILED], 10, 150),
            job("experts_trace", "grouped_mm is one kernel, no host wait", [*UNRECOMPUTED, *EXPERTS, *TRACED], 10, 150),
        ],
        "features": features(),
        "suite": [script("suite", "all tests pass, on CPUs", *tests, CUDA_VISIBLE_DEVICES="")],
        "plans": [
            script("plans", "every plan within 1e-5 of one GPU", "scripts/compare_plans.py", seconds=270),
            script("plans_experts", "as plans", "scripts/compare_plans.py", *DEEPSEEK),
        ],
        "large": [
            large("llama_8b", "5,700 to 6,700 tok/s a GPU (H100), 60 GiB", LLAMA_8B, 40),
            large("llama_8b_tp", "slower, a third of the memory of activations", [*LLAMA_8B, *TP_8], 20),
            large("llama_8b_pp", "slower by a bubble of 6 %", [*LLAMA_8B, *PP_2], 20),
        ],
        "sharded": [
            eight("experts_ep", "one host wait a layer", EP_8, 40, 200),
            eight("experts_ep_compiled", "the same losses, 10 to 15 % faster", [*EP_8, *COMPILED], 40, 300),
        ],
        "pairs": [
            pairs("pairs_plain", "DualPipeV, nothing overlaps", PAIRS, 20),
            pairs("pairs", "the same losses, not slower", [*PAIRS, *OVERLAP], 20),
            pairs("pairs_connections", "faster than pairs?", [*PAIRS, *OVERLAP], 20, **connections),
            pairs("pairs_priority", "faster?", [*PAIRS, *OVERLAP], 20, **connections, TORCH_NCCL_HIGH_PRIORITY="1"),
            pairs("pairs_trace", "all-to-all next to products", [*PAIRS, *OVERLAP, *TRACED], 10),
        ],
    }


def run(step: Step, seconds: float) -> str:
    """Run a step and return its row."""
    log = OUT / f"{step.name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=os.environ | step.environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout=min(step.seconds, seconds))
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = 124
    text = log.read_text(errors="replace")
    if code:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{step.name:18} FAILED ({code}): " + " | ".join(line[:160] for line in lines[-3:])
    records = training_records(OUT / "runs" / step.name / "metrics.jsonl")
    if not records:
        return "\n  ".join([f"{step.name:18} ran", *(line.rstrip() for line in text.splitlines()[-60:])])
    row = f"{step.name:18} {summary(records)}"
    return row + "".join(f"\n{'':18} {line}" for line in host_waits(text) if step.name == "waits")


def training_records(path: Path) -> list[dict]:
    """Return the records of training steps in a metrics.jsonl."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [record for record in records if "loss" in record and "tokens_per_second" in record]


def summary(records: list[dict]) -> str:
    """Return losses, and the medians of the second half of the steps, as one line."""

    def median(key: str) -> float:
        values = [record[key] for record in records[len(records) // 2 :] if record.get(key) is not None]
        return statistics.median(values) if values else float("nan")

    shares = " ".join(f"{key} {median(key):.3f}" for key in records[-1] if "mfu" in key)
    return (
        f"loss {records[0]['loss']:.5f} -> {records[-1]['loss']:.5f}  {median('tokens_per_second'):9,.0f} tok/s  "
        f"{1e3 * median('step_seconds'):8.1f} ms  {shares}  {median('memory_gib'):.1f} GiB"
    )


def host_waits(log: str) -> list[str]:
    """Count the places where scripts/gpu_waits.py saw the host wait for the device, the most frequent first."""
    places = Counter(re.findall(r"host wait at (\S+:\d+)", log))
    return [f"{number:4} x {place}" for place, number in places.most_common(20)]


def losses_differ() -> str:
    """Return the largest relative difference of the losses of `float32` and `float32_cpu`."""
    files = [OUT / "runs" / name / "metrics.jsonl" for name in ("float32", "float32_cpu")]
    losses = [[record["loss"] for record in training_records(file)] for file in files]
    if not all(losses):
        return ""
    difference = max(abs(a / b - 1) for a, b in zip(*losses, strict=False))
    return f"float32 and float32_cpu differ by {difference:.1e}: {'equal' if difference <= 1e-4 else 'NOT EQUAL'}"


def install_wheels(folder: str) -> None:
    """Install the wheels of a folder to $OUT/site, without a network, and let all steps import from there."""
    site, incomplete = OUT / "site", OUT / "site.incomplete"
    if not site.exists():
        shutil.rmtree(incomplete, ignore_errors=True)
        wheels = sorted(map(str, Path(folder).glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(incomplete)]
        subprocess.run([*pip, *wheels], check=True)
        incomplete.rename(site)
    os.environ["PYTHONPATH"] = f"{site}:{os.environ['PYTHONPATH']}"


def main(argv: list[str]) -> int:
    by_part = parts()
    is_list = "--list" in argv
    names = [name for name in argv if name != "--list"]
    if not set(names) <= set(by_part) or not (names or is_list):
        print((ROOT / "scripts/gpu_hour.sh").read_text().split("\n\n")[0].replace("\n#", "\n"), file=sys.stderr)
        return 2
    if is_list:
        for name in names or by_part:
            for step in by_part[name]:
                print(name, step.name, step.expected, json.dumps(step.environment), shlex.join(step.command), sep="\t")
        return 0
    OUT.mkdir(parents=True, exist_ok=True)
    os.environ |= {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1"}
    if wheels := os.environ.get("WHEELS"):
        install_wheels(wheels)
    table = OUT / "table.txt"
    for name in names:
        end = time.monotonic() + PART_SECONDS
        for step in by_part[name]:
            rows = table.read_text().splitlines() if table.exists() else []
            if any(row.startswith(f"{step.name} ") and " FAILED " not in row for row in rows):
                continue
            seconds = end - time.monotonic()
            if seconds < 10:
                print(f"{step.name}: no time is left in this part; run {name} again")
                continue
            print(f"== {step.name}: {step.expected}", flush=True)
            row = run(step, seconds)
            with table.open("a") as file:
                file.write(f"{row}\n")
        if name == "same" and (row := losses_differ()):
            with table.open("a") as file:
                file.write(f"{row}\n")
    print(table.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
