"""A rehearsal that runs few microbatches and replays them agrees to the byte with one that runs all."""

import pytest

from tests.support.pool import run_alone
from torchtitan.config import manager
from torchtitan.job import ResolvedJob
from torchtitan.planner import rehearsal
from torchtitan.planner.time import traffic

JOB = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "model.overrides": "{n_layers = 4}",
    "model.tokenizer_path": "bytes",
    "training.seq_len": 32,
    "training.local_batch_size": 8,
    "parallelism.pipeline_parallel_degree": 2,
    "activation_checkpoint.mode": "none",
}
PLANS = {
    "1F1B": {"training.global_batch_size": 32},
    "LoopedBFS": {},  # backward begins with the last microbatch
    "ZBVZeroBubble": {},
    "DualPipeV": {"activation_checkpoint.mode": "full"},
}
"""Schedule -> further options."""


def shortened_and_complete(arguments, running):
    """Return moments and messages of rehearsals with `running` microbatches of each kind of action, and with all."""
    results = []
    for traffic.RUNNING in (running, 10**6):
        result = rehearsal.rehearse(ResolvedJob(manager.load(arguments), 4, "cuda"), 0)
        moments = {name: {kind: size for kind, size in kinds.items() if size} for name, kinds in result.moments.items()}
        results.append((moments, dict(result.sent)))
    return results


@pytest.mark.parametrize("schedule", PLANS)
def test_replayed_microbatches_need_and_send_what_all_do(schedule):
    options = JOB | {"parallelism.pipeline_parallel_schedule": schedule} | PLANS[schedule]
    arguments = [f"--{name}={value}" for name, value in options.items()]
    shortened, complete = run_alone(shortened_and_complete, arguments, 2)
    assert shortened == complete and complete[1]["pp", "send", "calls"] >= 8


def test_the_first_microbatch_alone_is_not_like_the_others():
    """It creates the gradients, so that replaying it counts them for each microbatch."""
    arguments = [f"--{name}={value}" for name, value in JOB.items()]
    shortened, complete = run_alone(shortened_and_complete, arguments, 1)
    assert shortened != complete
