"""The plans of a job that are fast on a slower network too, uncertain ones, and the best ones on other hardware.

The share of the network that a job gets is uncertain: taken as even between LEAST_NETWORK and all of it.
"""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torchtitan.core.errors import JobError
from torchtitan.planner.answer import gpus_text, no_plan
from torchtitan.planner.plan import Plan, pipeline_obstacle
from torchtitan.planner.search import Candidate, Limits, Result, Search, faults_as_new
from torchtitan.planner.smaller_states import remedy
from torchtitan.process.workers import run_in_processes

LEAST_NETWORK, QUANTILE = 0.7, 0.8
"""Least share of the network that a job is expected to get, and the quantile of the step's time that orders plans."""
SHARE = 1 - QUANTILE * (1 - LEAST_NETWORK)
"""The share of the network at which the time of a step is that quantile."""
MOST_UNCERTAIN = 3
"""Most plans to show that may fit."""


class PlanAnswer(NamedTuple):
    """The plans of a job on some GPUs."""

    result: Result
    job: Candidate | str
    """The prediction of the job's own plan, or why it cannot run."""
    network: list[str]
    """Lines on how much of the network the best plan uses, and what it loses with less of it."""
    alternatives: list[tuple[str, Candidate | None]]
    """The best plan with other hardware, by what differs."""


def search_plans(search: Search, gpus: int, top: int, limits: Limits, with_alternatives: bool) -> PlanAnswer:
    """Search the fastest `top` plans of a job and, `with_alternatives`, the best one with other hardware.

    On several machines, where a search takes seconds, processes share the work. Raises JobError if there is no plan.
    """
    alternatives: dict[str, Callable[[], Result]] = {}
    if with_alternatives:
        no_limit, best_of = Limits(limits.memory), partial(find_robust, top=1)
        numbers = [number for number in (2 * gpus, gpus // 2) if number]
        alternatives = {gpus_text(number): partial(best_of, search, number, limits=no_limit) for number in numbers}
        alternatives["twice the memory"] = partial(best_of, search, gpus, limits=Limits(2 * limits.memory))
        alternatives["twice the network"] = partial(best_of, with_network(search, 2.0), gpus, limits=no_limit)
    # the job's own search and that with another network predict the same memory: one process has them both
    groups: list[dict[str, Callable[[], Any]]] = [{OWN: partial(_answer, search, gpus, top, limits)}]
    for name, function in reversed(alternatives.items()):
        if name == "twice the network":
            groups[0][name] = function
        else:
            groups.append({name: function})
    if gpus > search.hardware.devices_per_machine:
        parts = run_in_processes(_call_all, [(group,) for group in groups], "a search for plans")
    else:
        parts = list(map(_call_all, groups))
    results = {name: result for part in parts for name, result in part.items()}
    bests = {name: results[name].best for name in alternatives}
    return results[OWN]._replace(alternatives=[(name, best[0] if best else None) for name, best in bests.items()])


OWN = "the job's"
"""The name of the job's own search among those with other hardware."""


def _call_all(functions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Call the functions without collections of garbage, which take a fifth of a search's time and find nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return {name: function() for name, function in functions.items()}
    finally:
        if collects:
            gc.enable()


def _answer(search: Search, gpus: int, top: int, limits: Limits) -> PlanAnswer:
    """Answer without alternatives. Raises JobError if there is no plan."""
    result = find_plans(search, gpus, top, limits)
    if not result.plans:
        smaller = remedy(search, gpus, limits.memory)
        raise JobError(no_plan(result, gpus, limits.memory, search.state, smaller))
    return PlanAnswer(result, own_plan(search, gpus), network_lines(search, result.plans[0]), alternatives=[])


def own_plan(search: Search, gpus: int) -> Candidate | str:
    """Return the prediction of the job's own plan, or why it cannot run."""
    job = search.base
    if faults := faults_as_new(job):
        return f"is not legal on {gpus_text(gpus)}: {faults[0]}"
    if obstacle := pipeline_obstacle(job):
        return f"is not predicted: {obstacle}"
    return search.candidate(Plan.of(job, search.samples))


def with_network(search: Search, share: float) -> Search:
    """Return the same search with a share of the network's bandwidth."""
    return search.with_hardware(search.hardware.with_speeds(between=share))


def find_plans(search: Search, gpus: int, top: int, limits: Limits, most_uncertain: int = MOST_UNCERTAIN) -> Result:
    """Find the plans that count as fitting, as `find_robust`, and faster ones that may fit."""
    result = find_robust(search, gpus, top, limits)
    uncertain = find_uncertain(search, gpus, most_uncertain, limits, result)
    result.may_fit = uncertain.best
    result.complete &= uncertain.complete
    return result


def find_robust(search: Search, gpus: int, top: int, limits: Limits) -> Result:
    """Find the plans with the shortest step on a network that is slower than expected.

    More of the network never slows a step, so the step's QUANTILE is the step with that quantile of the missing share.
    The times of the result are those of the whole network, and `limits` are for them.
    """
    # no part of a step takes longer than at this share of its speed
    within = replace(limits, most_seconds=limits.most_seconds / SHARE)
    result = with_network(search, SHARE).find(gpus, top, within, partial(is_in_time, search, limits))
    return on_whole_network(search, result)


def is_in_time(search: Search, limits: Limits, plan: Plan) -> bool:
    """Return whether a step of the plan on the whole network is within the limits."""
    return limits.most_seconds == math.inf or search.timer.step_time(plan).seconds <= limits.most_seconds


def find_uncertain(search: Search, gpus: int, top: int, limits: Limits, certain: Result) -> Result:
    """Find plans that may fit, but do not count as fitting, and are faster than the best one of `certain`."""
    slower = with_network(search, SHARE)
    most_seconds = limits.most_seconds / SHARE
    if certain.best:
        most_seconds = math.nextafter(slower.timer.step_time(certain.best[0].plan).seconds, 0)

    def may_fit(plan: Plan) -> bool:
        return search.memory(plan).needed > limits.memory and is_in_time(search, limits, plan)

    lenient = Limits(limits.memory, most_seconds, certain=False)
    return on_whole_network(search, slower.find(gpus, top, lenient, may_fit, needs_plan=not certain.best))


def on_whole_network(search: Search, result: Result) -> Result:
    """Return the result with the times of its plans on the whole network."""
    for plans in (result.best, result.judged):
        plans[:] = [replace(one, time=search.timer.step_time(one.plan)) for one in plans]
    return result


def network_lines(search: Search, best: Candidate) -> list[str]:
    """Format how much of the network a plan uses, and what it loses with less of it."""
    if best.plan.gpus <= search.hardware.devices_per_machine:
        return []
    slower = with_network(search, LEAST_NETWORK)
    at_full, at_least = (one.timer.timer.messages_of_step(best.plan) for one in (search, slower))
    seconds = sum(message.transfer for axis, message in at_full.items() if message.transfer < at_least[axis].transfer)
    loss = slower.timer.step_time(best.plan).seconds / best.time.seconds - 1
    usage = f"network: busy for {seconds / best.time.seconds:.0%} of a step"
    slowdown = f"with {LEAST_NETWORK:g} of it a step takes {loss:.1%} longer"
    return [f"{usage}; {slowdown}. Plans are ordered by a step with {SHARE:g} of it"]
