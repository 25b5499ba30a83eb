"""A rank that is slower than its peers is named, and noise names none."""

import json
import logging
import time

import pytest
import torch
from torch import nn

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.commands import why
from torchtitan.config import manager
from torchtitan.metrics import stragglers
from torchtitan.metrics.logger import tags_of
from torchtitan.metrics.stragglers import SECONDS_TO_NAME, STEPS_TO_NAME, BlockTimer, SlowRanks
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

NOISE = {
    "clocks": lambda shape: torch.normal(1.0, 0.05, shape),
    "other programs": lambda shape: torch.normal(1.0, 0.05, shape) * torch.where(torch.rand(shape) < 0.05, 3.0, 1.0),
    "shared cores": lambda shape: 1 + 0.3 * torch.empty(shape).exponential_(),
    "samples of other lengths": lambda shape: torch.empty(shape).uniform_(0.0, 1.0),
    "a few long samples": lambda shape: torch.empty(shape).log_normal_(0, 0.7),
    "a few very long samples": lambda shape: torch.empty(shape).log_normal_(0, 1.0),
}


@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize("kind", NOISE)
def test_a_thousand_steps_of_noise_name_nobody(kind, world_size):
    torch.manual_seed(0)
    ranks = SlowRanks(world_size, stages=1)
    for seconds in NOISE[kind]((1000, world_size)):
        ranks.update(seconds[None], SECONDS_TO_NAME)
        assert not ranks.slow()


@pytest.mark.parametrize("steps_at_once", [1, 4, 10])
def test_a_slow_rank_is_named_within_twenty_steps_and_until_it_recovers(steps_at_once):
    ranks, changes = SlowRanks(4, stages=1), {}
    factors = torch.tensor([1.2] * 40 + [1.05] * 40)
    seconds = torch.normal(1.0, 0.02, (80, 4), generator=torch.Generator().manual_seed(0))
    seconds[:, 2] *= factors
    for step in range(0, 80, steps_at_once):
        ratios = ranks.update(seconds[step : step + steps_at_once], SECONDS_TO_NAME / steps_at_once)
        assert ratios.shape == (min(steps_at_once, 80 - step), 4)
        changes.setdefault(tuple(ranks.slow()), step + steps_at_once)
    step_named = -(-(STEPS_TO_NAME + 1) // steps_at_once) * steps_at_once
    assert changes == {(): steps_at_once, (2,): step_named} and step_named <= 20
    assert not ranks.slow() and ranks.update(seconds[:1], 1.0)[0, 2] == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize(("world_size", "steps"), [(1, 16), (2, 16), (3, 17), (8, 18), (64, 21)])
def test_more_ranks_take_more_steps(world_size, steps):
    """Each of them may have longer samples by chance."""
    ranks, seconds = SlowRanks(world_size, stages=1), torch.ones(world_size)
    seconds[-1] = 2.0
    for step in range(1, 25):
        ranks.update(seconds[None], SECONDS_TO_NAME)
        assert bool(ranks.slow()) == (world_size > 1 and step >= steps)


def test_peers_hold_the_same_stage_and_a_group_is_named_together():
    ranks = SlowRanks(10, stages=2)
    seconds = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.6, 3.6])
    ratios = ranks.update(seconds.expand(STEPS_TO_NAME + 3, 10), SECONDS_TO_NAME)
    assert ranks.slow() == {8: pytest.approx(1.2), 9: pytest.approx(1.2)}
    without_blocks = ranks.update(torch.tensor([[1.0] * 5 + [0.0] * 5]), 1.0)
    assert ratios.amin() == 1 and without_blocks.unique().tolist() == [1]


def test_short_steps_have_to_be_slow_for_some_seconds():
    """Another program on a core for a second is no reason to name a rank."""
    ranks, step_seconds = SlowRanks(2, stages=1), SECONDS_TO_NAME / 64
    for step in range(1, 129):
        ranks.update(torch.tensor([[1.0, 1.3]]), step_seconds)
        assert bool(ranks.slow()) == (step >= 64)


def train_with_a_sleeper(argv, caught):
    """Train, with a last rank that sleeps a fifth of its step, or 20 ms, in the forward of a block."""
    torch._dynamo.reset()
    logging.getLogger("torchtitan").addHandler(handler := logging.FileHandler(caught))
    try:
        ranks = read_ranks()
        trainer = Trainer(manager.load(argv), ranks)
        stragglers.SECONDS_TO_NAME = 0  # these steps are short
        if ranks.rank == ranks.world_size - 1:
            delay_forward(trainer)
        trainer.train()
        trainer.metrics.close()
    finally:
        stragglers.SECONDS_TO_NAME = SECONDS_TO_NAME
        logging.getLogger("torchtitan").removeHandler(handler)


def delay_forward(trainer):
    block, began = trainer.model.parts[0].layers["0"], [time.perf_counter()]

    def sleep(*_):
        now = time.perf_counter()
        time.sleep(max(0.02, 0.2 * (now - began[0])))
        began[0] = now

    block.attention.register_forward_pre_hook(torch.compiler.disable(sleep))


@pytest.mark.flaky(reruns=3, only_rerun=["AssertionError", "ValueError"])  # a busy machine can delay the other rank
@pytest.mark.parametrize(("shards", "log_freq"), [(1, 1), (2, 10)])
def test_a_rank_that_sleeps_is_named_within_twenty_steps(tmp_path, shards, log_freq):
    """With whole parameters and with FSDP, where all ranks wait for the slow one before each block."""
    options = {"parallelism__data_parallel_replicate_degree": 2 // shards, "training__local_batch_size": 4}
    options |= {"metrics__log_freq": log_freq}
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **options)
    run_ranks(2, train_with_a_sleeper, argv, str(tmp_path / "log"))
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (event,) = [record for record in records if record.get("event") == "straggler"]
    assert event["step"] <= 20 and event["number"] == 1
    assert event["ranks"].startswith("rank 1 (") and ", process " in event["ranks"]
    assert f"step {event['step']}: slower than their peers, which wait for them: rank 1 (" in (
        (tmp_path / "log").read_text()
    )
    (row,) = [record for record in records if record["step"] == 20 and "loss" in record]
    assert row["slowest_rank"] == 1 and row["slowest_ratio"] > 1.1
    assert tags_of(row, 2, 1.0)["stragglers/slowest_rank"] == 1
    (cause,) = why.slow_ranks_of(records, 0.8)
    assert "rank 1 (" in cause.name and 0 < cause.share < 0.8
    assert not any("slow" in line for line in why.Account({}, records, None).unknowns([]))
    unnamed = [record for record in records if record.get("event") != "straggler"]
    # without the event, windows of single steps name it too, if nearly all of them do
    named = ["for rank 1, the slowest in" in cause.name for cause in why.slow_ranks_of(unnamed, 0.8)]
    unknowns = why.Account({}, unnamed, None).unknowns([])
    assert named == [True] or any("a rank that is slow in few steps" in line for line in unknowns)


def rows_of(seconds):
    """Return the records of windows of one step, by each rank's own time [steps, ranks]."""
    ranks = SlowRanks(seconds.shape[1], stages=1)
    rows = []
    for step, ratios in enumerate(ranks.ratios(seconds), start=1):
        slowest = {"slowest_rank": int(ratios.argmax()), "slowest_ratio": float(ratios.max())}
        rows.append({"step": step, "loss": 1.0, "step_seconds": 2 + float(seconds[step - 1].max()), **slowest})
    return rows


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("stopped", [0.3, 0.8])
def test_a_rank_that_is_stopped_in_many_steps_is_named_afterwards(world_size, stopped):
    """Never 16 in a row, as a stop often begins after the forward, whose time is that of a rank."""
    torch.manual_seed(0)
    seconds = torch.normal(1.0, 0.01, (200, world_size))
    is_stopped = torch.rand(200) < stopped
    is_stopped[::8] = False
    seconds[is_stopped, 1] += 4
    (cause,) = why.slow_ranks_of(rows_of(seconds), 1.0)
    assert f"for rank 1, the slowest in {int(is_stopped.sum())} of {int(is_stopped.sum())} windows" in cause.name
    waited = 4 * is_stopped.sum() / (3 * 200 + 4 * is_stopped.sum())
    assert waited <= cause.share == cause.gain < 1.5 * waited  # the whole step is taken to be as slow as its forward


def test_a_rank_that_was_stopped_late_is_named_afterwards():
    """As a run was recorded here: 20 slow windows of rank 1 behind many in which either rank is a little slower."""
    torch.manual_seed(0)
    seconds = torch.normal(1.0, 0.2, (200, 2))
    seconds[-21:-8, 1] += 8
    seconds[-7:, 1] += 8
    ((name, share),) = [(cause.name, cause.share) for cause in why.slow_ranks_of(rows_of(seconds), 1.0)]
    assert "for rank 1, the slowest in" in name and 0.1 < share < 0.4


@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize("kind", NOISE)
def test_noise_names_nobody_afterwards(kind, world_size):
    torch.manual_seed(0)
    for steps in (16, 100, 1000):
        assert not list(why.slow_ranks_of(rows_of(NOISE[kind]((steps, world_size))), 1.0))


def test_a_compiled_block_is_timed_without_another_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    block.compile(backend=backend, fullgraph=True)
    timer = BlockTimer([block], torch.device("cpu"), compiled=True)
    block(torch.ones(2, 8))
    for data_seconds in (1.0, 2.0):
        timer.begin_step(data_seconds)
        block(torch.ones(2, 8)), block(torch.ones(2, 8))
    first, second, elapsed = timer.pop_seconds().tolist()
    assert 1 < first < 2 < second and elapsed > 0 and len(graphs) == 1 and len(timer.pop_seconds()) == 1
    block.eval()
    timer.begin_step(1.0)
    block(torch.ones(2, 8))
    assert timer.pop_seconds()[:-1].tolist() == [0]


@pytest.mark.parametrize(("blocks", "timed"), [(0, 0), (1, 1), (4, 4), (6, 3), (80, 4)])
def test_at_most_four_blocks_and_sixteen_steps_are_timed(blocks, timed, monkeypatch):
    """The cost: eight readings of a clock for each microbatch, whatever the size of the model."""
    readings = []
    modules = [nn.Identity() for _ in range(blocks)]
    timer = BlockTimer(modules, torch.device("cpu"), compiled=False)
    monkeypatch.setattr("torchtitan.metrics.stragglers.time.perf_counter", lambda: readings.append(1) or len(readings))
    for _ in range(30):
        timer.begin_step(0.5)
        for module in modules:
            module(torch.ones(2))
    assert len(readings) == 30 * 2 * timed
    timer._last_time = -59
    *seconds, step_seconds = timer.pop_seconds().tolist()
    assert seconds == [timed + 0.5 if timed else 0] * STEPS_TO_NAME
    assert step_seconds == (len(readings) + 59) / 30, "of all steps, not of those that are timed"


def test_a_gpu_is_timed_by_events(monkeypatch):
    recorded = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            recorded.append(self)

        def elapsed_time(self, end):  # in milliseconds, which pass one with each event
            return 1.0 * (recorded.index(end) - recorded.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    block = nn.Linear(2, 2)
    timer = BlockTimer([block], torch.device("cuda"), compiled=False)
    timer.begin_step(0.5)
    block(torch.ones(2)), block(torch.ones(2))
    assert len(recorded) == 4 and timer.pop_seconds()[:-1].tolist() == [pytest.approx(0.502)]
