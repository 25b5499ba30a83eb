"""Tests of the learning-rate schedule: its shape, several optimizers and parameter groups, and a resume."""

import math
import subprocess
import sys

import pytest
import torch
import transformers

from torchtitan.lr_schedules import DECAYS, LRSchedule, ScheduleError, jagged, resolve_warmup
from torchtitan.lr_scheduling import build_lr_schedulers

PEAK = 8e-4


def multipliers(schedule: LRSchedule, steps: int) -> list[float]:
    return [schedule.multiplier(s) for s in range(steps)]


@pytest.mark.parametrize("decay_type", [*DECAYS, "constant"])
@pytest.mark.parametrize("total, warmup", [(10, 2), (10, 0), (100, 10), (3, 2), (1, 0), (2, 1)])
def test_multipliers_at_the_corners(decay_type, total, warmup):
    schedule = LRSchedule(total, warmup, decay_type=decay_type)
    floor = 1.0 if decay_type == "constant" else 0.1
    if warmup:
        assert schedule.multiplier(0) == 1 / warmup
        assert schedule.multiplier(warmup - 1) == 1.0
    if warmup < total - 1:
        after = schedule.multiplier(warmup)
        assert after == 1.0 if decay_type == "constant" else floor < after < 1.0
    for step in (total - 1, total, total + 5, 10 * total):
        assert schedule.multiplier(step) == floor


def test_linear_decay_equals_the_formula():
    """T = 10, W = 2, m = 0.1: the floor is reached at the last step, where other implementations end at 0.2125."""
    decay = [0.1 + 0.9 * (1 - (s + 1 - 2) / 8) for s in range(2, 10)]
    assert multipliers(LRSchedule(10, 2), 10) == pytest.approx([0.5, 1.0, *decay], rel=1e-15)
    assert decay[-1] == 0.1


def test_the_floor_may_come_one_step_after_the_last():
    for warmup, ratio, begin in ((2, None, 3), (2, 0.5, 6), (0, 0.0, 11), (10, None, 11)):
        schedule = LRSchedule(10, warmup, ratio, convention="torchtitan")
        decay = 11 - begin
        expected = [(s + 1) / warmup for s in range(warmup)] + [1.0] * (begin - warmup)
        expected += [0.1 + 0.9 * (1 - (s + 1) / decay) for s in range(decay)]
        assert multipliers(schedule, 11) == pytest.approx(expected[:11], rel=1e-14)
        assert decay == 0 or schedule.multiplier(10) == schedule.multiplier(100) == 0.1
    with pytest.raises(ScheduleError, match="lr_scheduler.warmup_steps = 11: must be at most the 10 steps in all"):
        LRSchedule(10, 11, convention="torchtitan").describe(1.0)


@pytest.mark.parametrize("total, warmup", [(10, 0), (10, 1), (10, 3), (10, 10), (57, 20)])
def test_the_convention_of_transformers_equals_its_schedules(total, warmup):
    references = {
        "linear": transformers.get_linear_schedule_with_warmup,
        "cosine": transformers.get_cosine_schedule_with_warmup,
        "constant": lambda optimizer, warmup, total: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
    }
    for decay_type, build in references.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
        reference = build(optimizer, warmup, total)
        schedule = LRSchedule(total, warmup, decay_type=decay_type, min_lr_factor=0.0, convention="transformers")
        for step in range(total):
            assert schedule.multiplier(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-12, abs=1e-15)
            optimizer.step()
            reference.step()


@pytest.mark.parametrize(
    "decay_type, f",
    {
        "sqrt": lambda p: 1 - math.sqrt(p),
        "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
        "cosine_restarts": lambda p: (1 + math.cos(math.pi * math.fmod(3 * p, 1))) / 2,
    }.items(),
)
def test_other_decays_equal_the_formula(decay_type, f):
    schedule = LRSchedule(22, 2, decay_type=decay_type, num_cycles=3, min_lr_factor=0.25)
    for step in range(2, 21):
        assert schedule.multiplier(step) == pytest.approx(0.25 + 0.75 * f((step - 1) / 20), rel=1e-15)


@pytest.mark.parametrize(
    "warmup_type, g",
    {
        "linear": lambda q: q,
        "quadratic": lambda q: q**2,
        "cosine": lambda q: math.sin(math.pi * q / 2) ** 2,
    }.items(),
)
def test_warmups_equal_the_formula(warmup_type, g):
    schedule, linear = (LRSchedule(50, 20, warmup_type=name) for name in (warmup_type, "linear"))
    assert multipliers(schedule, 20) == pytest.approx([g((s + 1) / 20) for s in range(20)], rel=1e-14)
    assert (
        multipliers(schedule, 60)[19:] == multipliers(linear, 60)[19:]
    )  # the peak at its last step, the same after it
    assert ("quadratic warmup 20" in schedule.describe(PEAK)) == (warmup_type == "quadratic")


def test_cosine_equals_torch():
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    schedule = LRSchedule(20, 0, decay_type="cosine")
    for step in range(20):
        optimizer.step()
        reference.step()  # torch holds the peak for step 0 and reaches the floor one step after the last
        assert schedule.multiplier(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-12)


def test_restarts_return_to_the_peak():
    values = multipliers(LRSchedule(40, 0, decay_type="cosine_restarts", num_cycles=2), 40)
    assert values[18] < 0.2 < 0.9 < values[20] and values[39] == 0.1


def test_warmup_stable_decay():
    values = multipliers(LRSchedule(20, 4, decay_ratio=0.25), 25)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4:15] == [1.0] * 11
    assert values[15:20] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    assert values[19:] == [0.1] * 6
    assert multipliers(LRSchedule(20, 4, decay_ratio=0.0), 25)[3:] == [1.0] * 22
    # a share of less than a step is one step, the last, so that a decay always reaches the floor
    assert multipliers(LRSchedule(20, 4, decay_ratio=0.01), 25)[18:] == [1.0] + [0.1] * 6


def test_multipliers_stay_between_floor_and_peak():
    for decay_type in DECAYS:
        for total in range(1, 40):
            values = multipliers(LRSchedule(total, decay_type=decay_type, min_lr_factor=0.3, num_cycles=2), total + 5)
            assert all(0 < v <= 1 for v in values) and min(values[resolve_warmup(None, total) :]) == 0.3


@pytest.mark.parametrize("total, warmup", [(1, 0), (2, 1), (3, 2), (10, 2), (29, 2), (30, 3), (1000, 100)])
def test_unset_warmup_is_a_tenth_and_at_least_two(total, warmup):
    assert resolve_warmup(None, total) == warmup
    assert LRSchedule(total).multiplier(total - 1) == 0.1


def test_impossible_schedules_are_refused():
    for warmup in (10, 11):
        with pytest.raises(ScheduleError, match=f"warmup_steps = {warmup}.*less than the 10 steps.*training.steps"):
            LRSchedule(10, warmup)
    with pytest.raises(ScheduleError, match="decay_ratio = 0.9: 2 warmup and 9 decay steps.*10"):
        LRSchedule(10, 2, decay_ratio=0.9)
    with pytest.raises(ScheduleError, match="decay_type = 'exp': must be one of linear, sqrt, cosine"):
        LRSchedule(10, decay_type="exp")


def test_description():
    line = "learning rate: peak 0.0008, warmup 2, linear decay 8 to floor 8e-05; total 10 steps"
    assert LRSchedule(10).describe(PEAK) == line
    assert "warmup 0, stable 5, cosine decay 5 to" in LRSchedule(10, 0, 0.5, "cosine").describe(PEAK)
    assert "cosine_restarts (3 cycles) decay" in LRSchedule(10, 2, None, "cosine_restarts", 3).describe(PEAK)
    constant = LRSchedule(10, decay_type="constant").describe(PEAK)
    assert constant == "learning rate: peak 0.0008, warmup 2, stable 8; total 10 steps"


def build_optimizers(lr: float = PEAK) -> list[torch.optim.Optimizer]:
    """Build two optimizers; the second has two parameter groups with different rates."""
    a, b, c = (torch.zeros(1, requires_grad=True) for _ in range(3))
    return [torch.optim.AdamW([a], lr=lr), torch.optim.SGD([{"params": [b]}, {"params": [c], "lr": lr / 2}], lr=lr)]


def rates(optimizers: list[torch.optim.Optimizer]) -> list[float]:
    return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]


def run(optimizers, schedulers, steps: int) -> list[float]:
    """Take steps; return the rate of each, which all groups have to follow."""
    rates_of_steps = []
    for _ in range(steps):
        rates_of_steps.append(schedulers.last_lr)
        assert rates(optimizers) == [rates_of_steps[-1], rates_of_steps[-1], rates_of_steps[-1] / 2]
        for optimizer in optimizers:
            optimizer.step()
        schedulers.step()
    return rates_of_steps


def test_every_parameter_group_follows_the_schedule():
    optimizers = build_optimizers()
    schedule = LRSchedule(30)
    rates_of_steps = run(
        optimizers, build_lr_schedulers(optimizers, schedule), 36
    )  # training.steps may be beyond total_steps
    assert rates_of_steps == [PEAK * m for m in multipliers(schedule, 36)]
    assert rates_of_steps[29] == PEAK * 0.1 and rates_of_steps[35] == PEAK * 0.1


def test_resume_continues_exactly():
    schedule = LRSchedule(20, 3)
    straight = build_optimizers()
    expected = run(straight, build_lr_schedulers(straight, schedule), 20)

    first = build_optimizers()
    schedulers = build_lr_schedulers(first, schedule)
    rates_of_steps = run(first, schedulers, 8)
    state, saved = schedulers.state_dict(), [optimizer.state_dict() for optimizer in first]
    assert state["step"] == 8

    second = build_optimizers()
    schedulers = build_lr_schedulers(second, schedule)
    for optimizer, optimizer_state in zip(second, saved, strict=True):
        optimizer.load_state_dict(optimizer_state)
    schedulers.load_state_dict(state)
    assert rates_of_steps + run(second, schedulers, 12) == expected
    assert schedulers.state_dict()["step"] == 20


def test_resume_takes_the_rate_of_the_new_job():
    first = build_optimizers()
    schedulers = build_lr_schedulers(first, LRSchedule(20))
    run(first, schedulers, 8)
    second = build_optimizers(lr=1.0)
    resumed = build_lr_schedulers(second, LRSchedule(20, decay_type="constant"))
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(old.state_dict())
    resumed.load_state_dict(schedulers.state_dict())
    assert rates(second) == [1.0, 1.0, 0.5]
    assert run(second, resumed, 3) == [1.0, 1.0, 1.0]


def test_shapes_import_no_torch():
    code = "import sys, torchtitan.lr_schedules; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rank_without_trained_parameters_follows_the_schedule():
    """A pipeline rank may have only frozen layers; it logs and saves the same rates as the others."""
    schedule, optimizer = LRSchedule(10, 2), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    one, none = build_lr_schedulers([optimizer], schedule, PEAK), build_lr_schedulers([], schedule, PEAK)
    for _ in range(4):
        assert none.last_lr == one.last_lr and none.state_dict() == one.state_dict()
        optimizer.step(), one.step(), none.step()
    later = build_lr_schedulers([], schedule, PEAK)
    later.load_state_dict(one.state_dict())
    assert later.last_lr == one.last_lr == later.rate_before and later.state_dict() == one.state_dict()


def test_a_first_step_that_is_skipped_warns_of_nothing(recwarn):
    """torch takes a schedule that advances before the optimizer for a mistake."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedulers = build_lr_schedulers([optimizer], LRSchedule(10, 2))
    schedulers.step()
    assert not recwarn.list


def test_a_rate_for_one_step_keeps_the_groups_ratios_to_the_rate_of_the_job():
    def optimizer(*rates):
        return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(()))], "lr": rate} for rate in rates])

    one, two = optimizer(PEAK, 16 * PEAK), optimizer(16 * PEAK, PEAK)  # two pipeline ranks with other first groups
    for optimizers, rates in (([one], [0.5, 8.0]), ([two], [8.0, 0.5]), ([], [])):
        schedulers = build_lr_schedulers(optimizers, LRSchedule(10, 2), PEAK)
        before = schedulers.last_lr
        schedulers.use_once(0.5)
        assert [group["lr"] for o in optimizers for group in o.param_groups] == pytest.approx(rates)
        assert schedulers.last_lr == (rates[0] if rates else 0.5)
        for o in optimizers:
            o.step()
        schedulers.step()
        assert schedulers.last_lr == pytest.approx(2 * before)


@pytest.mark.parametrize("adjust", [0, 7])
def test_a_jagged_cosine_drops_to_zero_at_each_restart_and_rises_linearly(adjust):
    """Also at the first one; before it, and between rises, it is the cosine from the end of the warmup on."""
    total, warmup, cycle, rewarmup, floor = 60, 5, 20, 4, 0.1

    def cosine(step):
        return floor + (1 - floor) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2

    rates = {c + adjust: jagged(c, total, warmup, cycle, rewarmup, floor, adjust) for c in range(warmup, 50)}
    for step, rate in rates.items():
        restart, since = divmod(step, cycle)
        risen = since / rewarmup if restart and since < rewarmup else 1.0
        assert rate == pytest.approx(risen * cosine(step if risen == 1 else restart * cycle + rewarmup))
    assert rates[20] == rates[40] == 0 and rates[19] > 0.8
