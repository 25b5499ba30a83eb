"""What a user could have seen: a job of a hundred steps under a plan beside the same job on one device.

    python -m tests.mutants.curves examine ROW     a row of the table as JSON, e.g. {"ranks": 2, "tp": 2}
    python -m tests.mutants.curves obstacle ROW    why no job can show the row, or ""

Prints the results of four methods as JSON. curve: a logged loss differs from the one device's by more than 0.5 %,
which others accept as parity. guards: the run ends in an error or reports one, with replicas compared every ten steps.
check: the rules refuse the job, or the estimate fails. replay: `torchtitan replay --under` finds that the third step of
the job on one device differs under the plan. Rows with settings that are no options of a job are skipped.
"""

import io
import json
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.plans.combinations import Combination
from tests.plans.combinations_optimizers import KINDS
from tests.support import jobs
from tests.support.table_rows import MICRO_SIZE, MICRO_SIZES
from torchtitan import cli
from torchtitan.config.manager import load
from torchtitan.config.sections.model import Parallelism
from torchtitan.models import SIZES
from torchtitan.parallelisms.degrees import AXIS_OPTIONS
from torchtitan.rules import check

STEPS, SAMPLES, VOCABULARY = 100, 8, 264
PARITY = 0.005
ADAPTERS = {"none": {}} | {kind: {"adapter__kind": kind, "adapter__rank": 4} for kind in ("lora", "dora")}
PROBLEMS = ("replica", "not finite", "differ between")
"""Words of the warnings of guards."""


def plan_options(row: Combination) -> dict[str, Any]:
    """Return the options of the row's plan."""
    options: dict[str, Any] = {
        "data_parallel_replicate_degree": row.dp_replicate,
        "data_parallel_shard_degree": row.dp_shard,
        "context_parallel_degree": row.cp,
        "tensor_parallel_degree": row.tp,
        "pipeline_parallel_degree": row.pp,
        "expert_parallel_degree": row.ep,
        "context_parallel_rotate_method": row.method,
        "context_parallel_load_balancer": "headtail" if row.balance else "none",
        "disable_sequence_parallel": not row.sequence_parallel,
        "disable_loss_parallel": not row.loss_parallel,
    }
    if row.pp > 1:
        size = min(row.microbatch_size, SAMPLES // row.dp_replicate // row.dp_shard // row.accumulation // (2 * row.pp))
        options |= {"pipeline_parallel_schedule": row.schedule, "pipeline_parallel_microbatch_size": max(size, 1)}
        options |= {"pipeline_parallel_expert_parallel_overlap": row.overlap}
    return {f"parallelism__{name}": value for name, value in options.items()}


def job_options(row: Combination) -> dict[str, Any] | None:
    """Return the options of the row's job that hold under any plan; None if a job cannot have the row's settings."""
    extras = row.rope != "plain" or row.groups or row.reduce_bits or row.gather_int8 or row.task != "pretrain"
    if row.model not in SIZES or row.adapter not in ADAPTERS or extras:
        return None
    sizes = MICRO_SIZE | MICRO_SIZES[row.model] | {"vocab_size": VOCABULARY, "n_layers": row.layers}
    if row.multi_token_prediction:
        sizes |= {"n_mtp_layers": row.multi_token_prediction}
    options: dict[str, Any] = {
        "model__name": row.model,
        "model__flavor": "debugmodel",
        "model__overrides": "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in sizes.items()) + "}",
        "training__steps": STEPS,
        "training__global_batch_size": SAMPLES,
        "training__document_mask": row.document_mask,
        "training__loss_chunks": row.loss_chunks if row.loss_chunks > 1 else 0,
        "training__mixed_precision_param": "bfloat16" if row.precision == "bfloat16" else "float32",
        "training__neftune_alpha": 5.0 if row.noise else 0.0,
        "training__float8": row.float8,
        "optimizer__lr": 3e-3,
        "guard__replica_check_interval": 10,
    }
    if row.optimizer != "none":
        name, settings = KINDS[row.optimizer]
        options |= {"optimizer__name": name}
        if settings:
            fields = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
            options |= {"optimizer__options": "{" + fields + "}"}
    if row.recompute in ("full", "full_keep_comm", "op", "2"):
        is_selective = row.recompute in ("op", "2")
        options["activation_checkpoint__mode"] = "selective" if is_selective else row.recompute
        options |= {"activation_checkpoint__selective_ac_option": row.recompute} if is_selective else {}
    return options | ADAPTERS[row.adapter]


def losses(argv: list[str], folder: Path, ranks: int) -> tuple[list[float], str]:
    """Run the job on `ranks`; return its logged losses, and its error or the warnings of its guards."""
    code, out, err = jobs.run(argv, ranks)
    lines = [line for line in (out + err).splitlines() if any(word in line.lower() for word in PROBLEMS)]
    problem = f"exit code {code}: {err[-500:]}" if code else "; ".join(lines[:2])
    return [step["loss"] for step in jobs.logged_steps(folder)] if not code else [], problem


def arguments(row: Combination, options: dict[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Return the arguments of the job under the row's plan and on one device, in subfolders of `folder`."""
    folder.mkdir(exist_ok=True)
    texts, local = jobs.write_texts(folder), SAMPLES // row.accumulation
    of_plan = {"training__local_batch_size": local // row.dp_replicate // row.dp_shard} | plan_options(row)
    of_one = {"training__local_batch_size": local}
    return (
        jobs.arguments(folder / "plan", texts, **options | of_plan),
        jobs.arguments(folder / "one", texts, **options | of_one),
    )


def obstacle(row: Combination) -> str:
    """Return why no job can show the row, as this tree's rules say; empty if one can. Asked of the tree unmutated."""
    options = job_options(row)
    if options is None:
        return "no job has these settings"
    with tempfile.TemporaryDirectory() as name:
        faults = check(load(arguments(row, options, Path(name))[0]), row.ranks, "cpu")
    return f"the rules refuse the job: {faults[0]}"[:200] if faults else ""


def examine(row: Combination) -> dict[str, dict[str, Any]]:
    """Return the results of curve, guards and check of a row that the unmutated tree accepts."""
    options = job_options(row)
    assert options is not None, "a row that no job can have"
    with tempfile.TemporaryDirectory() as name:
        folders, start = [Path(name, plan) for plan in ("plan", "one")], time.monotonic()
        argv, on_one_device = arguments(row, options, Path(name))
        faults = check(load(argv), row.ranks, "cpu")
        checked = round(time.monotonic() - start, 1)
        if faults:
            refused = {"found": True, "seconds": checked, "by": str(faults[0])[:200]}
            skipped = {"skipped": "the mutated rules refuse it"}
            return {"check": refused, **dict.fromkeys(("curve", "guards", "replay"), skipped)}
        got, problem = losses(argv, folders[0], row.ranks)
        if not got:  # what ended by a guard has no curve
            unguarded = Path(name, "unguarded")
            argv, _ = arguments(row, options | {"guard__replica_check_interval": 0}, unguarded)
            got, _ = losses(argv, unguarded / "plan", row.ranks)
        expected, _ = losses(on_one_device, folders[1], 1)
        gaps = [abs(a - b) / abs(b) for a, b in zip(got, expected, strict=False)]
        seconds = round(time.monotonic() - start, 1)
        replayed = replay(row, folders[1])
    gap = max(gaps, default=0.0)
    return {
        "curve": {"found": gap > PARITY or not got, "seconds": seconds} | _described(gap, got),
        "guards": {"found": bool(problem), "seconds": seconds, "by": problem[:200]},
        "check": {"found": False, "seconds": checked},
        "replay": replayed,
    }


def replay(row: Combination, run: Path) -> dict[str, Any]:
    """Return the result of the replay of a step of the job on one device under the row's plan."""
    start, out = time.monotonic(), io.StringIO()
    degrees = ",".join(f"{axis}={getattr(row, axis)}" for axis in AXIS_OPTIONS if getattr(row, axis) > 1)
    options = {name: value for name, value in plan_options(row).items() if not name.endswith("_degree")}
    defaults = vars(Parallelism())
    changed = {name: value for name, value in options.items() if defaults[name.split("__")[1]] != value}
    arguments = [f"--{name.replace('__', '.')}={str(value).lower()}" for name, value in changed.items()]
    with redirect_stdout(out):
        code = cli.main(["replay", str(run), "--step=3", f"--under={degrees}", "--timeout=120", *arguments])
    lines = [line for line in out.getvalue().splitlines() if "DIFFERS" in line or "first tensor" in line]
    kind = {} if lines or not code else {"kind": "hangs" if "did not end" in out.getvalue() else "raises"}
    by = lines[-1].strip()[:200] if lines else ""
    return {"found": code != 0, "seconds": round(time.monotonic() - start, 1), "by": by} | kind


def _described(gap: float, got: list[float]) -> dict[str, str]:
    return {"by": f"{100 * gap:.3f} % at most"} if got else {"by": "the job ended in an error", "kind": "raises"}


if __name__ == "__main__":
    answer = {"examine": examine, "obstacle": obstacle}[sys.argv[1]]
    print(json.dumps(answer(Combination(**json.loads(sys.argv[2])))))
