"""Tests of batches on several ranks: agreement on a step's tokens, and equal held-out samples under every plan."""

from itertools import count

import numpy as np
import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.datasets.loader import HeldOutBatches
from torchtitan.datasets.samples import RankSamples
from torchtitan.datasets.sources import DataError
from torchtitan.losses.objective import IGNORE_INDEX, SummedCrossEntropy
from torchtitan.parallelisms.degrees import ParallelDims
from torchtitan.process.ranks import read_ranks
from torchtitan.training.batches import BatchPreparer, BatchSpec, PeerStopped
from torchtitan.training.trainer import Trainer

OBJECTIVE = SummedCrossEntropy()


def agreed() -> tuple[int, bool, float]:
    """Agree on a batch where rank 1 has padding; return tokens, stop flag, and this rank's share."""
    rank = torch.distributed.get_rank()
    preparer = BatchPreparer(OBJECTIVE, ParallelDims(2, dp_shard=2), rank, torch.device("cpu"), BatchSpec())
    labels = torch.zeros(2, 4, dtype=torch.int64)
    labels[0, : 3 * rank] = IGNORE_INDEX
    agreed = preparer.agree([{"labels": labels}], None, rank == 1, "data")
    assert preparer.trained_tokens(4, 4) == 16 == preparer.tokens_read
    return *agreed, preparer.valid_share


class ReferencesWithAMissingPair:
    def add(self, batch):
        if torch.distributed.get_rank() == 1:
            raise DataError("a pair is missing")
        return batch


def error_without_reference() -> str:
    """Fetch a batch whose reference is missing on rank 1; return this rank's error."""
    preparer = BatchPreparer(OBJECTIVE, ParallelDims(2, dp_shard=2), 0, torch.device("cpu"), BatchSpec())
    preparer.references = ReferencesWithAMissingPair()
    batches, failure = preparer.fetch(iter([{"labels": torch.zeros(2, 4, dtype=torch.int64)}]), 1)
    try:
        preparer.agree(batches, failure, False, "data")
    except (DataError, PeerStopped) as error:
        return str(error)
    return "nothing"


def test_all_ranks_stop_if_one_has_no_reference():
    assert run_ranks(2, error_without_reference) == ["another rank has no data", "a pair is missing"]


def test_agreement_returns_the_global_tokens_and_the_share_of_a_rank():
    assert run_ranks(2, agreed) == [(13, True, 8 / 13), (13, True, 5 / 13)]


def collectives_of_steps(argv):
    """Train; for each step, list its phases and the begin, wait or block of reductions over all ranks, in order."""
    trainer, of_steps, reduce = Trainer(manager.load(argv), read_ranks()), [], torch.distributed.all_reduce

    class Work:
        def __init__(self, work):
            self.work = work

        def wait(self):
            of_steps[-1].append("wait")
            self.work.wait()

    def noted(tensor, *args, **kwargs):
        if kwargs.get("group") is not None or args:
            return reduce(tensor, *args, **kwargs)
        of_steps[-1].append("begin" if kwargs.get("async_op") else "block")
        work = reduce(tensor, **kwargs)
        return Work(work) if work is not None else None

    def part(owner, name):
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: (of_steps[-1].append(name), function(*args, **kwargs))[1])

    part(trainer.model, "forward_backward")
    part(trainer.optimizers, "step")
    fetch = trainer.fetch
    trainer.fetch = lambda: (of_steps.append([]), fetch())[1]
    torch.distributed.all_reduce = noted
    try:
        trainer.train()
    finally:
        torch.distributed.all_reduce = reduce
        trainer.metrics.close()
    return of_steps


def test_agreement_on_a_step_overlaps_the_previous_one(tmp_path):
    """The host waits for other ranks only at the end of a step that is not logged, and after the last step no
    reduction is pending: the ranks agree once more on whether the time limit has ended the run.
    """
    steps = dict(training__local_batch_size=4, training__steps=4, metrics__log_freq=4)
    argv = jobs.arguments(tmp_path / "run", jobs.write_texts(tmp_path), **steps)
    first, *between, last = run_ranks(2, collectives_of_steps, argv)[0]
    step = ["begin", "forward_backward", "begin", "wait", "step", "wait"]  # the norm is agreed on, on a CPU
    assert between == [step, step]
    assert first[:3] == ["begin", "wait", "begin"] and first.count("wait") == 3 and first[-1] == "wait"
    assert (last.count("begin"), last.count("wait"), last[-2:]) == (2, 2, ["wait", "block"])


@pytest.mark.parametrize("axis", ["context", "tensor", "pipeline"])
def test_max_loss_of_one_data_parallel_rank_is_the_loss(axis, tmp_path):
    """Under context parallel two ranks hold the tokens of one data-parallel rank, with different losses."""
    texts = jobs.write_texts(tmp_path)
    plan = {f"parallelism__{axis}_parallel_degree": 2, "training__steps": 3}
    rows, _ = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "run", texts, **plan))[0]
    for row in rows:
        assert row["max_loss"] == pytest.approx(row["loss"], rel=1e-6)


class CountingLoader:
    """A loader with the sample numbers as labels, [batch, 1]."""

    def __init__(self, share: RankSamples):
        self.share = share

    def __iter__(self):
        for index in count():
            yield {"labels": torch.from_numpy(self.share.samples(np.array([index])).T)}


@pytest.mark.parametrize(
    "size, ranks, group_size", [(1, 1, 1), (3, 1, 1), (16, 1, 2), (2, 2, 2), (3, 4, 1), (5, 16, 1)]
)
@pytest.mark.parametrize("samples", [1, 7, 12])
def test_held_out_samples_do_not_depend_on_the_plan(samples, size, ranks, group_size):
    """Pairs (group_size = 2) are held out as a unit."""
    parts = [
        HeldOutBatches(CountingLoader(RankSamples(0, r, ranks, size, group_size)), samples, OBJECTIVE.first)
        for r in range(ranks)
    ]
    of_ranks = [list(part) for part in parts]
    assert {len(batches) for batches in of_ranks} == {parts[0].batches}, "as many forwards on each"
    labels = torch.cat([batch["labels"].flatten() for batches in of_ranks for batch in batches])
    assert sorted(labels[labels != IGNORE_INDEX].tolist()) == list(range(samples + samples % group_size))
