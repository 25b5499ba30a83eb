"""The plans that a search considers, against all divisors of drawn jobs, judged by the rules of jobs alone."""

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.support.small_searches import H100, NO_LIMIT, search_of
from torchtitan.parallelisms.degrees import divisors
from torchtitan.planner.plan import Plan
from torchtitan.planner.search import Limits, Search


def drawn_job(number: int) -> tuple[int, int, dict[str, object]]:
    """Return GPUs, samples and options of a job that nobody chose."""
    draw = random.Random(number)
    key_heads = draw.choice([1, 2, 3, 5])
    heads = key_heads * draw.choice([1, 2, 3])
    sizes = {
        "n_layers": draw.randint(1, 13),
        "n_heads": heads,
        "n_kv_heads": key_heads,
        "dim": heads * 16,
        "vocab_size": draw.choice([256, 300, 384]),
    }
    gpus = draw.choice([draw.randint(1, 20), 2 * draw.randint(1, 30), 3 * draw.randint(1, 30)])
    settings = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.overrides": "{" + ", ".join(f"{name} = {size}" for name, size in sizes.items()) + "}",
        "training.seq_len": draw.choice([96, 128, 768, 2048, 6144]),
    }
    return gpus, draw.choice([1, 2, 3, 4, 6, 8, 12, 40, 42]), settings


def all_degrees(gpus: int, samples: int) -> Iterator[Plan]:
    """Yield all factorizations of the GPUs with 1F1B, whose tensor-parallel ranks share machines of 8 GPUs."""
    for tp in divisors(gpus):
        if tp > 8 or (gpus > 8 and 8 % tp):
            continue
        for cp, pp in itertools.product(divisors(gpus // tp), repeat=2):
            shards, remainder = divmod(gpus // tp, cp * pp)
            if remainder or samples % shards:
                continue
            number = samples // shards
            batch = {"microbatches": number, "schedule": "1F1B"} if pp > 1 else {"passes": number}
            for method in ("allgather", "ulysses") if cp > 1 else ("allgather",):
                yield Plan(tp, cp, pp, shards=shards, recompute="none", loss_chunks=1, cp_method=method, **batch)


def test_there_is_a_plan_if_the_rules_allow_one() -> None:
    outcomes = set()
    for number in range(24):
        gpus, samples, settings = drawn_job(number)
        search = search_of(samples, settings)
        result = search.find(gpus, 1, NO_LIMIT)
        legal = next((plan for plan in all_degrees(gpus, samples) if not search.faults(plan)), None)
        assert bool(result.best) == (legal is not None), (number, gpus, samples, settings, legal)
        assert result.complete
        outcomes.add(legal is not None)
    assert outcomes == {True, False}


PUBLISHED = {
    "BLOOM": (384, 2048, dict(dim=14336, n_layers=70, n_heads=112, ffn_dim=57344, vocab_size=250880), (4, 12, 8)),
    "Nemotron-4 340B": (
        768,
        768,
        dict(dim=18432, n_layers=96, n_heads=96, ffn_dim=73728, vocab_size=256000),
        (8, 12, 8),
    ),
    "MT-NLG 530B": (
        2240,
        1960,
        dict(dim=20480, n_layers=105, n_heads=128, ffn_dim=81920, vocab_size=51200),
        (8, 35, 8),
    ),
}
"""Published plans: GPUs, samples, sizes, and degrees of tensor, pipeline and data parallel."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_plans_are_legal(name: str) -> None:
    search, gpus, degrees = published(name)
    layouts = [plan for plan in search.space(gpus).layouts() if degrees_of(plan) == degrees]
    plan = layouts[0]._replace(schedule="1F1B", recompute="full")
    assert not search.faults(plan)
    candidate = search.candidate(plan)
    assert candidate.memory.needed <= H100.memory_gib * 2**30 and 0.2 < candidate.time.mfu < 0.6


def test_blooms_plan_is_among_the_fastest() -> None:
    search, gpus, degrees = published("BLOOM")
    result = search.find(gpus, 10, Limits(H100.memory_gib * 2**30))
    assert degrees in [degrees_of(candidate.plan) for candidate in result.best]


def test_numbers_of_gpus_that_are_no_power_of_2_have_plans() -> None:
    """Each is legal and fits, and with the samples of each GPU as they are, 16 times the GPUs lose 20 % at most."""
    sizes = {"model.name": "llama3", "model.flavor": "8B", "model.overrides": "{n_layers = 4}"}
    speeds = {}
    for gpus in (24, 48, 96, 384):
        search = search_of(gpus, sizes | {"training.seq_len": 4096})
        (best,) = search.find(gpus, 1, Limits(H100.memory_gib * 2**30)).best
        assert best.plan.gpus == gpus and not search.faults(best.plan)
        speeds[gpus] = best.time.tokens_per_second
    assert speeds[24] > speeds[48] > speeds[96] > speeds[384] > 0.8 * speeds[24]


def published(name: str) -> tuple[Search, int, tuple[int, int, int]]:
    """Return the search of a published model, its GPUs and its degrees."""
    gpus, samples, sizes, degrees = PUBLISHED[name]
    overrides = ", ".join(f"{key} = {size}" for key, size in (sizes | {"max_seq_len": 2048}).items())
    family = {"model.name": "gpt2", "model.flavor": "1558M", "model.overrides": f"{{{overrides}}}"}
    return search_of(samples, family | {"training.seq_len": 2048}), gpus, degrees


def degrees_of(plan: Plan) -> tuple[int, int, int]:
    return plan.tp, plan.pp, plan.shards * plan.replicas * plan.cp
