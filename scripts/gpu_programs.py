"""Compare programs on a GPU with the same on a CPU, in float32: part `programs` of gpu_hour.sh.

Each training job runs on both; losses and gradient norms may differ by 1e-4, as sums are taken in another order. Of
Neurocache only losses are compared: rounding decides between nearly equal entries. A run that resumes must repeat the
losses of the run that it is a copy of, bit for bit. Several programs run at once, so their times mean nothing.
Arguments choose rows. Exit code 1 if anything fails or differs.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", "outputs/gpu")).absolute() / "programs"
TOLERANCE = 1e-4
STEPS = 6
LLAMA = "debug_model"
QUIET = ["--metrics.plot=false", "--metrics.log_freq=1", f"--training.steps={STEPS}", "--validation.freq=3"]
EXACT = {"training.mixed_precision_param": "float32", "training.global_batch_size": -1}
EXACT |= {"training.local_batch_size": 2, "training.seq_len": 128}
DPO = {"task.kind": "dpo", "training.dataset": "text", "data.too_long": "drop", "validation.enable": "false"}
WARM = {"lr_scheduler.warmup_steps": 2}
MASKED = {"model.name": "roberta", "task.kind": "masked_lm", "task.mask_token": "<|reserved_special_token_0|>"}
JOBS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": (LLAMA, {}),
    "deepseek": ("deepseek_debug", {}),
    "qwen3": ("qwen3_debug", {}),
    "qwen3_moe": ("qwen3_moe_debug", {}),
    "relora": ("relora_debug", WARM | {"adapter.relora.every": 3, "lr_scheduler.restart_warmup_steps": 1}),
    "classification": ("sentiment_debug", WARM),
    **{name: (LLAMA, {"model.name": name}) for name in ("gpt2", "opt", "mistral", "gemma3")},
    "masked_words": (LLAMA, MASKED),
    "pairs": (LLAMA, DPO | {"adapter.kind": "lora"}),
    **{f"adapter_{kind}": (LLAMA, {"adapter.kind": kind}) for kind in ("lora", "dora", "qlora")},
    "neurocache": (LLAMA, {"adapter.kind": "neurocache", "task.kind": "documents"}),
    "dropout": (LLAMA, {"adapter.kind": "lora", "adapter.dropout": 0.1}),
    "documents": (LLAMA, {"training.document_mask": "true"}),
    "chunks": (LLAMA, {"training.loss_chunks": 4}),
    "recomputed": (LLAMA, {"activation_checkpoint.mode": "full"}),
    "selective": (LLAMA, {"activation_checkpoint.mode": "selective"}),
    "cpu_offload": (LLAMA, {"training.enable_cpu_offload": "true"}),
    "step_in_backward": (LLAMA, {"optimizer.early_step_in_backward": "true", "training.max_norm": 0}),
    "compiled": (LLAMA, {"compile.enable": "true"}),
    "compiled_documents": (LLAMA, {"compile.enable": "true", "training.document_mask": "true"}),
    **{name: (LLAMA, {"optimizer.name": name}) for name in ("GaLore", "Muon", "Adafactor", "Lion", "APOLLO")},
    "AdamW8bit": (LLAMA, {"optimizer.name": "AdamW8bit"}),
}


def options(values: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def program(name: str, arguments: Iterable[str], *, is_on_gpu: bool) -> str:
    """Run a module of the package and return its output; `name` names its log."""
    environment = os.environ | ({} if is_on_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"})
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    (OUT / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise RuntimeError(f"exit code {done.returncode}: {' | '.join(line[:200] for line in lines[-4:])}")
    return done.stdout


def train(name: str, job: str, values: dict[str, object], *, is_on_gpu: bool) -> list[tuple[float, float]]:
    """Train and return loss and gradient norm of each step."""
    folder = OUT / name
    start = ["torchtitan.train", f"--job.config_file=train_configs/{job}.toml", f"--job.dump_folder={folder}"]
    program(name, [*start, *QUIET, *options(EXACT | values)], is_on_gpu=is_on_gpu)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record.get("grad_norm") or 0.0) for record in records if "tokens_per_second" in record]


def compare_job(name: str, job: str, values: dict[str, object]) -> str:
    """Return a row that says how far losses and gradient norms of GPU and CPU differ."""
    values = {"checkpoint.enable": "false"} | values
    if "dpo" in values.values():
        values |= {"training.dataset_path": str(preference_pairs())}
    gpu, cpu = (train(f"{name}_{end}", job, values, is_on_gpu=end == "gpu") for end in ("gpu", "cpu"))
    compared = 1 if name == "neurocache" else 2  # losses, or losses and norms
    differences = [
        sum(abs(a - b) / max(abs(b), 1e-8) for a, b in list(zip(*step, strict=True))[:compared])
        for step in zip(gpu, cpu, strict=True)
    ]
    is_equal = len(gpu) == STEPS and all(difference <= TOLERANCE for difference in differences)  # False for NaN
    steps = f"step 1 differs by {differences[0]:.1e}, {len(gpu)} steps by {max(differences):.1e}"
    return f"{'equal' if is_equal else 'NOT EQUAL'}: {steps}"


def preference_pairs() -> Path:
    """Write a few pairs of answers and return their file."""
    path = OUT / "pairs.jsonl"
    rows = [{"prompt": f"{n} plus 1 is", "chosen": f" {n + 1}.", "rejected": f" {n}."} for n in range(64)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def compare_resume(name: str, values: dict[str, object]) -> str:
    """Return a row that says whether a run that resumes repeats the losses of the run that it is a copy of."""
    values = {"checkpoint.interval": 3, "training.mixed_precision_param": "bfloat16"} | values
    expected = train(name, LLAMA, values, is_on_gpu=True)[3:]
    copy = OUT / f"{name}_resumed"
    shutil.copytree(OUT / name, copy)
    shutil.rmtree(copy / f"checkpoint/step-{STEPS:08}")
    (copy / "metrics.jsonl").unlink()
    resumed = train(copy.name, LLAMA, values, is_on_gpu=True)
    return f"{'equal' if resumed == expected else 'NOT EQUAL'}: steps 4 to {STEPS} resumed {resumed}, before {expected}"


def compare_uses(name: str) -> str:
    """Return a row that compares generated text, an export and an evaluation of a GPU with a CPU's."""
    train(name, LLAMA, {}, is_on_gpu=True)
    folder, outputs = str(OUT / name), []
    for end in ("gpu", "cpu"):
        run = partial(program, is_on_gpu=end == "gpu")
        greedy = ["--temperature=0", "--max-new-tokens=40", "--prompt=def main("]
        text = run(f"generate_{end}", ["torchtitan", "generate", folder, *greedy])
        report = OUT / f"evaluate_{end}.json"
        run(f"evaluate_{end}", ["torchtitan", "evaluate", folder, "--samples=16", f"--out={report}"])
        run(f"export_{end}", ["torchtitan", "export", folder, f"--to={OUT / f'export_{end}'}", "--merge"])
        weights = (OUT / f"export_{end}/model-00001-of-00001.safetensors").read_bytes()
        loss = json.loads(report.read_text())["runs"][0]["loss"]
        outputs.append((text.partition("tokens, after")[0], weights, loss))
    (gpu_text, gpu_weights, gpu_loss), (text, weights, loss) = outputs
    difference = abs(gpu_loss / loss - 1)
    is_equal = gpu_text == text and gpu_weights == weights and difference <= TOLERANCE
    return f"{'equal' if is_equal else 'NOT EQUAL'}: text, exported bits, and an evaluation's loss to {difference:.1e}"


def attempt(name: str, function: partial) -> str:
    try:
        row = function()
    except Exception as error:
        row = f"FAILED: {type(error).__name__}: {error}"
    row = f"{name:24} {row}"
    print(row, flush=True)
    return row


def main() -> int:
    works = {name: partial(compare_job, name, *job) for name, job in JOBS.items()}
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        works[f"resume_{mode}"] = partial(compare_resume, f"resume_{mode}", {"checkpoint.async_mode": mode})
    works["resume_compiled"] = partial(compare_resume, "resume_compiled", {"compile.enable": "true"})
    works["resume_AdamW8bit"] = partial(compare_resume, "resume_AdamW8bit", {"optimizer.name": "AdamW8bit"})
    works["uses"] = partial(compare_uses, "uses")
    if unknown := set(sys.argv[1:]) - set(works):
        print(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(works)}", file=sys.stderr)
        return 2
    works = {name: work for name, work in works.items() if not sys.argv[1:] or name in sys.argv[1:]}
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        rows = list(pool.map(attempt, works, works.values()))
    return int(any("FAILED" in row or "NOT EQUAL" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
