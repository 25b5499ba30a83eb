"""The engine driven from Python: the losses of `torchtitan train` to the bit under plans, and its refusals."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.engine import Engine

EXPERTS = dict(
    model__name="deepseek",
    model__overrides="{dim=32, n_layers=3, n_heads=2, vocab_size=260, ffn_dim=64, expert_dim=32, kv_lora_rank=16, "
    "qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8}",
)
DUAL = dict(
    parallelism__pipeline_parallel_degree=2,
    parallelism__pipeline_parallel_schedule="DualPipeV",
    parallelism__pipeline_parallel_microbatch_size=1,
    training__local_batch_size=8,
)
PLANS = {
    "one": (1, {}),
    "fsdp": (2, dict(training__local_batch_size=2)),
    "tp": (2, dict(parallelism__tensor_parallel_degree=2)),
    "cp": (2, dict(parallelism__context_parallel_degree=2)),
    "pp": (2, DUAL),
    "ep": (2, EXPERTS | dict(training__local_batch_size=4, parallelism__expert_parallel_degree=2)),
}
SHORT = dict(training__steps=4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def drive(argv):
    """Run a job by the engine; return the logged rows, the hash of the final state, and the results of the steps."""
    results = []
    with Engine.from_job(manager.load(argv)) as engine:
        for batch in engine.data:
            loss = engine.forward_backward(batch)
            result = engine.optim_step()
            results.append((result.step, float(loss), float(result.grad_norm), result.lr))
        final = jobs.state_hash(engine)
        dist.barrier()
        engine.metrics.close()
        engine.close = lambda: None  # the pool's process group stays
    return jobs.logged_steps(Path(engine.config.job.dump_folder)), final, results


@pytest.mark.parametrize("plan", PLANS)
def test_the_losses_are_those_of_train(plan, texts, tmp_path):
    ranks, options = PLANS[plan]
    options = SHORT | options
    trained = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "trained", texts, **options))
    driven = run_ranks(ranks, drive, jobs.arguments(tmp_path / "driven", texts, **options))
    for (rows, state), (other_rows, other_state, results) in zip(trained, driven, strict=True):
        names = ("step", "loss", "grad_norm", "lr", "tokens")
        assert [[row.get(name) for name in names] for row in rows] == [
            [row.get(name) for name in names] for row in other_rows
        ]
        assert state == other_state
        assert [result[:3] for result in results] == [
            (row["step"], pytest.approx(row["loss"], rel=1e-6), pytest.approx(row["grad_norm"], rel=1e-6))
            for row in rows
        ]
