"""Searches for the plans of small jobs on H100s."""

from dataclasses import replace

from torchtitan.config import manager
from torchtitan.core.hardware import load_hardware
from torchtitan.job import ResolvedJob
from torchtitan.planner.plan import Plan, Workload
from torchtitan.planner.search import Limits, Search
from torchtitan.planner.time.measured_runs import usual_calibration

H100 = load_hardware("h100-80")
NO_LIMIT = Limits(2.0**60)


def search_of(samples: int, settings: dict[str, object]) -> Search:
    options = [f"--{name}={value}" for name, value in settings.items()]
    job = ResolvedJob(manager.load([*options, "--model.tokenizer_path=bytes"]), 1, "cuda")
    return Search(job, Workload.of(job, samples), samples, H100, usual_calibration(H100))


def small_search(samples: int) -> Search:
    """Return the search of a small job on machines of one GPU, so that all messages need the network."""
    search = search_of(samples, {"model.name": "llama3", "model.flavor": "debugmodel", "training.seq_len": 256})
    return search.with_hardware(replace(H100, devices_per_machine=1))


def all_plans(search: Search, gpus: int) -> list[Plan]:
    """Return all plans that a search looks at, to judge each of them."""
    space = search.space(gpus)
    return [
        chunked
        for layout in space.layouts()
        for variant in space.variants(layout)
        for scheduled in space.scheduled(variant)
        for replicated in space.replicated(scheduled)
        for chunked in space.with_loss_chunks(replicated)
    ]
