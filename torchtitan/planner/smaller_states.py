"""Options with which a job's state needs less memory of a GPU, and how much it needs with each. Imports no torch."""

from collections.abc import Iterator
from math import gcd

from torchtitan.core.errors import JobError, format_bytes
from torchtitan.planner.memory.closed_form import MemoryPrediction, fit, predict_memory
from torchtitan.planner.plan import Changes, Plan, planning_obstacle
from torchtitan.planner.search import Search, faults_as_new

SMALLER_STATES: tuple[Changes, ...] = (
    {"adapter.kind": "qlora", "adapter.rank": 16},
    {"adapter.kind": "lora", "adapter.rank": 16},
    {"optimizer.name": "AdamW8bit"},
    {"optimizer.name": "AdamW8bit", "training.dtype": "bfloat16"},
    {"training.enable_cpu_offload": True},
)


def smaller_states(search: Search, gpus: int) -> Iterator[tuple[Changes, MemoryPrediction]]:
    """Yield options that the job does not have yet, with the memory of a GPU in the plan that needs the least.

    The plan shards everything over the GPUs, computes a sample at a time, and recomputes all blocks.
    """
    job, shards = search.base, gcd(gpus, search.samples)
    rows = search.workload.rows_per_sample
    plan = Plan(shards=shards, microbatch=rows, passes=search.samples // shards, recompute="full", loss_chunks=0)
    faults_before = {fault.key for fault in search.faults(plan)}
    for changes in SMALLER_STATES:
        if "adapter.kind" in changes and job.config.adapter.kind != "none":
            continue
        try:
            changed = job.with_options(plan.changes(job.layout, search.samples) | changes).on_ranks(shards)
            has_faults = any(fault.key not in faults_before for fault in faults_as_new(changed))
        except JobError:
            continue
        if not has_faults and changed.config != search.job(plan).config and not planning_obstacle(changed.model):
            yield changes, predict_memory(changed, search.hardware)


def remedy(search: Search, gpus: int, memory: float) -> str:
    """Format the memory that a GPU of `memory` bytes needs with each of these options; empty if there are none."""
    texts = []
    for changes, predicted in smaller_states(search, gpus):
        options = " and ".join(f"{name} = {_toml(value)}" for name, value in changes.items())
        verdict = fit(predicted.low, predicted.needed, memory)
        texts.append(f"{format_bytes(predicted.needed)} with {options} ({verdict})")
    if not texts:
        return ""
    return f"with full recompute and a sample at a time a GPU needs {', '.join(texts)}"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
