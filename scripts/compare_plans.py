"""Run one job under many plans from the command line and compare the losses.

    python scripts/compare_plans.py [--only NAME ...] [--steps 20] [-- OPTIONS OF THE JOB]
    python scripts/compare_plans.py -- --model.name deepseek

Runs the debug job in float32 on one rank and then under each plan, as a user would, with the same global batch, and
prints the largest relative difference of the losses. With `-- --model.name deepseek` it adds the plans with experts and
lowers the learning rate: after many large steps, nearly tied expert choices would differ and the loss would jump.
Exit code 1 if a plan differs by more than 1e-5. On a machine with GPUs, each plan needs as many as it has ranks.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_timing import ROOT

from torchtitan.metrics.json_lines import read_records
from torchtitan.models import SIZES
from torchtitan.parallelisms.pipeline.cut import SCHEDULES

TOLERANCE = 1e-5  # float32 sums in another order, 1e-7 a step, amplified by 20 updates
JOB = {
    "job.config_file": "train_configs/debug_model.toml",
    "training.global_batch_size": 8,
    "training.mixed_precision_param": "float32",
    "training.seq_len": 128,
    "validation.enable": "false",
    "checkpoint.enable": "false",
    "metrics.plot": "false",
    "metrics.log_freq": 1,
}
TP, CP, PP = ({f"parallelism.{axis}_parallel_degree": 2} for axis in ("tensor", "context", "pipeline"))
EP = {"parallelism.expert_parallel_degree": 2}


def schedule(name: str) -> dict[str, object]:
    return PP | {"parallelism.pipeline_parallel_schedule": name}


def recompute(mode: str) -> dict[str, object]:
    return {"activation_checkpoint.mode": mode}


def overlapped(mode: str) -> dict[str, object]:
    overlap = {"parallelism.pipeline_parallel_expert_parallel_overlap": "true"}
    return EP | schedule("DualPipeV") | overlap | recompute(mode)


def method(name: str) -> dict[str, object]:
    return CP | {"parallelism.context_parallel_rotate_method": name}


Plan = tuple[int, int, dict[str, object]]  # ranks, data-parallel ranks, options
PLANS: dict[str, Plan] = {
    "one rank": (1, 1, {}),
    "fsdp 2": (2, 2, {}),
    "tp 2": (2, 1, TP),
    **{f"cp 2 {name}": (2, 1, method(name)) for name in ("allgather", "ring", "alltoall", "ulysses")},
    **{f"pp 2 {name}": (2, 1, schedule(name)) for name in SCHEDULES},
    "fsdp 2 x tp 2 x pp 2": (8, 2, TP | PP),
    "fsdp 2 x cp 2 x tp 2": (8, 2, CP | TP),
    "tp 2 x cp 2 x pp 2, DualPipeV, recompute": (8, 1, TP | CP | schedule("DualPipeV") | recompute("full")),
}
EXPERT_PLANS: dict[str, Plan] = {
    "fsdp 2, ep 2": (2, 2, EP),
    "fsdp 4, ep 2": (4, 4, EP),
    **{f"pp 2 x fsdp 2, ep 2, {name}": (4, 2, EP | schedule(name)) for name in ("1F1B", "ZBVZeroBubble", "DualPipeV")},
    "pp 2 x fsdp 2, ep 2, DualPipeV, full recompute": (4, 2, EP | schedule("DualPipeV") | recompute("full")),
    **{
        f"pp 2 x fsdp 2, ep 2, DualPipeV with overlap, {mode}": (4, 2, overlapped(mode))
        for mode in ("none", "selective", "full_keep_comm", "full")
    },
    "tp 2 x cp 2, ep 4": (4, 1, TP | CP | {"parallelism.expert_parallel_degree": 4}),
}


def job_of_plan(plan: Plan, folder: str, steps: int, extra: list[str]) -> tuple[int, list[str]]:
    """Return the number of ranks and the command line of the job under a plan."""
    ranks, data_parallel, options = plan
    job = JOB | {"job.dump_folder": folder, "training.steps": steps}
    job |= {"training.local_batch_size": job["training.global_batch_size"] // data_parallel} | options
    return ranks, [*(f"--{key}={value}" for key, value in job.items()), *extra]


def losses(name: str, plans: dict[str, Plan], steps: int, extra: list[str]) -> list[float]:
    """Run the job under a plan and return its losses."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, arguments = job_of_plan(plans[name], folder, steps, extra)
        command = [sys.executable, "-m", "torchtitan.launch", str(ranks), *arguments]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{name} ended with {run.returncode}:\n{run.stderr}")
        return [record["loss"] for record in read_records(Path(folder, "metrics.jsonl")) if "loss" in record]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of plans")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("extra", nargs="*", help="options of the job, after --")
    options = parser.parse_args()
    arguments = " ".join(options.extra).replace("=", " ").split()
    family = arguments[arguments.index("--model.name") + 1] if "--model.name" in arguments else "llama3"
    has_experts = hasattr(SIZES[family]["debugmodel"], "n_experts")
    plans = PLANS | (EXPERT_PLANS if has_experts else {})
    if has_experts:
        options.extra = ["--optimizer.lr=3e-4", *options.extra]
    names = options.only or list(plans)
    if unknown := [name for name in names if name not in plans]:
        parser.error(f"no plan is called {unknown[0]!r}; choose of {', '.join(map(repr, plans))}")
    expected = losses("one rank", plans, options.steps, options.extra)
    print(f"{'one rank':<60} loss {expected[0]:.4f} -> {expected[-1]:.4f} in {len(expected)} steps", flush=True)
    agree = True
    for name in (name for name in names if name != "one rank"):
        plan_losses = losses(name, plans, options.steps, options.extra)
        pairs = zip(plan_losses, expected, strict=True)
        error = max(abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in pairs)
        agree &= error <= TOLERANCE
        print(f"{name:<60} {error:.1e}{'' if error <= TOLERANCE else '  differs'}", flush=True)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
