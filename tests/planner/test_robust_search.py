"""Plans in the order of a slower network, plans that may fit, and searches in several processes."""

import gc
import random
from dataclasses import replace

import pytest

from tests.support.small_searches import NO_LIMIT, all_plans, small_search
from torchtitan.core.errors import JobError
from torchtitan.planner.robust_search import find_plans, find_robust, search_plans, with_network
from torchtitan.planner.search import Limits
from torchtitan.process import workers


def test_processes_search_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine has one GPU, so that four take several."""
    search = small_search(12)
    monkeypatch.setattr(workers, "processors", lambda: 1)
    alone = search_plans(search, 4, 3, NO_LIMIT, with_alternatives=True)
    names = [name for name, _ in alone.alternatives]
    assert names == ["8 GPUs", "2 GPUs", "twice the memory", "twice the network"]
    monkeypatch.setattr(workers, "processors", lambda: 2)
    assert search_plans(search, 4, 3, NO_LIMIT, with_alternatives=True) == alone
    quick = search_plans(search, 4, 3, NO_LIMIT, with_alternatives=False)
    assert quick == alone._replace(alternatives=[])
    with pytest.raises(JobError, match="no legal plan"):
        search_plans(search, 4, 3, Limits(1.0), with_alternatives=True)
    assert gc.isenabled()


def test_a_deadline_is_for_the_times_that_are_shown() -> None:
    search = small_search(12)
    fastest = find_robust(search, 4, 3, NO_LIMIT).best
    seconds = max(one.time.seconds for one in fastest)
    assert seconds < with_network(search, 0.76).timer.step_time(fastest[0].plan).seconds
    in_time = find_robust(search, 4, 3, replace(NO_LIMIT, most_seconds=seconds)).best
    assert [one.plan for one in in_time] == [one.plan for one in fastest]
    least = min(one.time.seconds for one in find_robust(search, 4, 100, NO_LIMIT).judged)
    late = find_robust(search, 4, 3, replace(NO_LIMIT, most_seconds=0.99 * least))
    assert not late.best and set(late.excluded) == {"deadline or budget"} and late.complete


def test_plans_that_may_fit_end_with_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer says so if a faster plan that may fit was not reached."""
    search = small_search(12)
    limits = Limits(max(one.memory.needed for one in find_robust(search, 4, 1, NO_LIMIT).best) - 1)
    assert find_plans(search, 4, 1, limits).complete
    complete = search.find

    def find(*arguments: object, **options: object) -> object:
        result = complete(*arguments, **options)  # type: ignore[arg-type]
        result.complete = arguments[2].certain  # type: ignore[attr-defined]
        return result

    monkeypatch.setattr("torchtitan.planner.search.Search.find", lambda self, *args, **options: find(*args, **options))
    assert not find_plans(search, 4, 1, limits).complete


@pytest.mark.parametrize("number", range(4))
def test_faster_plans_that_may_fit_are_those_of_judging_all(number: int) -> None:
    draw = random.Random(number)
    gpus, search = draw.choice([2, 4]), small_search(12)
    plans = all_plans(search, gpus)
    needs = sorted(search.memory(plan).needed for plan in plans)
    limit = needs[draw.randrange(len(needs) // 4)]
    result = find_plans(search, gpus, 1, Limits(limit), most_uncertain=2)
    slower = with_network(search, 0.76)  # which orders plans
    most = slower.timer.step_time(result.best[0].plan).seconds if result.best else float("inf")
    times: dict[object, float] = {}
    for plan in plans:
        memory, seconds = search.memory(plan), slower.timer.step_time(plan).seconds
        is_faster = seconds < min(most, times.get(plan.layout, most))
        if memory.low <= limit < memory.needed and is_faster and not search.faults(plan):
            times[plan.layout] = seconds
    seconds = [slower.timer.step_time(one.plan).seconds for one in result.may_fit]
    assert seconds == pytest.approx(sorted(times.values())[:2])
    assert [one.time for one in result.may_fit] == [search.timer.step_time(one.plan) for one in result.may_fit]
