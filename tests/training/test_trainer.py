"""The trainer: plans do not change the losses, a resumed run equals the uninterrupted one, errors end cleanly."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.plans.combinations import SCHEDULES
from tests.support import jobs
from tests.support.pool import run_ranks
from torchtitan.checkpoint.agreement import Peers
from torchtitan.config import manager
from torchtitan.process import distributed
from torchtitan.process.exit import NOT_EXPORTED
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

TP = dict(parallelism__tensor_parallel_degree=2)
CP = dict(parallelism__context_parallel_degree=2)
PP = dict(parallelism__pipeline_parallel_degree=2)
PLANS = {
    "2 ranks FSDP": (2, dict(training__local_batch_size=4)),
    "2 ranks DDP": (
        2,
        dict(
            training__local_batch_size=4,
            parallelism__data_parallel_replicate_degree=2,
            parallelism__data_parallel_shard_degree=1,
        ),
    ),
    "4 ranks HSDP 2x2": (4, dict(training__local_batch_size=2, parallelism__data_parallel_replicate_degree=2)),
    "accumulation": (1, dict(training__local_batch_size=2)),
    "FSDP, accumulation": (2, dict(training__local_batch_size=2)),
    "HSDP, accumulation": (
        4,
        dict(training__local_batch_size=1, parallelism__data_parallel_replicate_degree=2),
    ),
    "full recompute": (1, dict(activation_checkpoint__mode="full")),
    "recompute every 2nd": (2, dict(training__local_batch_size=4, activation_checkpoint__mode="selective")),
    "recompute by operator": (
        1,
        dict(activation_checkpoint__mode="selective", activation_checkpoint__selective_ac_option="op"),
    ),
    "compiled blocks": (
        2,
        dict(training__local_batch_size=4, compile__enable=True, compile__backend="aot_eager"),
    ),
    "loss in pieces": (1, dict(training__loss_chunks=5)),
    "workers": (2, dict(training__local_batch_size=4, training__dataloader__num_workers=1)),
    "TP": (2, TP),
    "TP without sequence parallel": (2, TP | dict(parallelism__disable_sequence_parallel=True)),
    **{
        f"CP {method}": (2, CP | dict(parallelism__context_parallel_rotate_method=method))
        for method in ("allgather", "ring", "alltoall", "ulysses")
    },
    **{f"PP {name}": (2, PP | dict(parallelism__pipeline_parallel_schedule=name)) for name in SCHEDULES},
    "PP, accumulation": (2, PP | dict(training__local_batch_size=4)),
    "PP x CP, recompute, microbatches of 2": (
        4,
        PP | CP | dict(activation_checkpoint__mode="full", parallelism__pipeline_parallel_microbatch_size=2),
    ),
    # one of this size; scripts/compare_plans.py, run by hand, has the others
    "PP x FSDP x TP": (8, PP | TP | dict(training__local_batch_size=4)),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def plain(texts, tmp_path_factory):
    """Losses of twenty steps on one rank; every plan has to reproduce the first five."""
    argv = jobs.arguments(tmp_path_factory.mktemp("plain"), texts)
    return run_ranks(1, jobs.train, argv)[0]


@pytest.mark.parametrize("plan", PLANS)
def test_losses_are_those_of_one_rank(plan, plain, texts, tmp_path):
    ranks, options = PLANS[plan]
    options = options | dict(training__steps=5, lr_scheduler__total_steps=20)
    rows, _ = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path, texts, **options))[0]
    expected = plain[0][: len(rows)]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # float32 sums in another order: 1e-7 a step, amplified by the updates
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in expected], rel=1e-4)


def test_the_model_learns(plain):
    assert plain[0][-1]["loss"] < plain[0][0]["loss"] - 1


def test_lr_column_is_the_formula(plain):
    warmup, total, peak, floor = 2, 20, 1e-2, 0.1
    formula = [
        peak * min((s + 1) / warmup, floor + (1 - floor) * (1 - max(0, s + 1 - warmup) / (total - warmup)))
        for s in range(total)
    ]
    assert [row["lr"] for row in plain[0]] == pytest.approx(formula, rel=1e-12)


def saving(**options):
    return dict(checkpoint__enable=True, checkpoint__interval=10, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_resumed_run_is_bit_equal(ranks, mode, texts, tmp_path):
    options = saving(training__local_batch_size=8 // ranks, checkpoint__async_mode=mode)
    straight = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "a", texts, **options))[0]
    # the schedule keeps the full run's length
    first = dict(options, training__steps=10, lr_scheduler__total_steps=20)
    run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "b", texts, **first))
    resumed = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path / "b", texts, **options))[0]
    assert [row["step"] for row in resumed[0]] == list(range(1, 21))
    assert [row["loss"] for row in resumed[0]] == [row["loss"] for row in straight[0]]
    assert resumed[1] == straight[1]


@pytest.mark.parametrize("ranks", [1, 4])
def test_resume_on_another_number_of_ranks(ranks, texts, tmp_path):
    on_two = saving(training__local_batch_size=4, training__steps=10, lr_scheduler__total_steps=20)
    before = run_ranks(2, jobs.train, jobs.arguments(tmp_path, texts, **on_two))[0]
    options = saving(training__local_batch_size=8 // ranks, training__steps=10, lr_scheduler__total_steps=20)
    loaded = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path, texts, **options))[0]
    assert loaded[1] == before[1]  # nothing left to train: parameters and moments as saved
    longer = saving(training__local_batch_size=8 // ranks)
    resumed = run_ranks(ranks, jobs.train, jobs.arguments(tmp_path, texts, **longer))[0]
    straight = run_ranks(1, jobs.train, jobs.arguments(tmp_path / "straight", texts))[0]
    assert [row["loss"] for row in resumed[0]] == pytest.approx([row["loss"] for row in straight[0]], rel=1e-5)


# Complete jobs


def test_killed_run_is_resumed_to_the_same_bits(texts, tmp_path):
    options = saving(training__local_batch_size=4, training__steps=40, model__overrides=jobs.SHALLOW)
    options |= dict(checkpoint__async_mode="async")
    process = jobs.start_new(jobs.arguments(tmp_path / "killed", texts, **options), ranks=2)
    jobs.wait_for_step(tmp_path / "killed", 23, process)  # the save after 20 has waited for that after 10
    process.kill()  # the launcher; its ranks do not train on
    process.communicate()
    code, out, err = jobs.run(jobs.arguments(tmp_path / "killed", texts, **options), ranks=2)
    assert code == 0, err
    assert "resumed from step" in out
    straight = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "straight", texts, **options))[0]
    rows = jobs.logged_steps(tmp_path / "killed")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["loss"] for row in rows] == [row["loss"] for row in straight[0]]


def test_interrupt_stops_all_ranks_at_one_step_saved(texts, tmp_path):
    options = saving(training__local_batch_size=4, training__steps=100000, model__overrides=jobs.SHALLOW)
    argv = jobs.arguments(tmp_path, texts, **options)
    process = jobs.start(argv, ranks=2)
    jobs.wait_for_step(tmp_path, 3, process)
    os.kill(process.pid, signal.SIGINT)
    code, out, err = jobs.finish(process)
    assert code == 130
    assert "Traceback" not in err
    last = jobs.logged_steps(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoint" / f"step-{last:08d}" / "manifest.json").exists()


class StopsInForward(Trainer):
    """A trainer that is asked to stop on one rank only, during its fourth step."""

    def step(self, batch):
        super().step(batch)
        if self.current_step == 4 and self.ranks.rank == 1:
            self.stops.requested = True


def train_and_stop(argv):
    config = manager.load(argv)
    trainer = StopsInForward(config, read_ranks())
    finished = trainer.train()
    trainer.metrics.close()
    return finished, trainer.current_step


@pytest.mark.parametrize("saves", [False, True])
def test_a_stop_asked_of_one_rank_stops_all_at_one_step(saves, texts, tmp_path):
    options = dict(training__local_batch_size=4, training__steps=50, checkpoint__enable=saves)
    answers = run_ranks(2, train_and_stop, jobs.arguments(tmp_path, texts, **options))
    assert answers == [(False, 5), (False, 5)]  # asked in step 4, agreed on at the beginning of step 5


def test_sigterm_saves_also_with_loader_workers(texts, tmp_path):
    options = saving(training__local_batch_size=4, training__steps=100000, model__overrides=jobs.SHALLOW)
    options |= dict(training__dataloader__num_workers=1)
    process = jobs.start(jobs.arguments(tmp_path, texts, **options), ranks=2)
    jobs.wait_for_step(tmp_path, 3, process)
    process.terminate()
    code, out, err = jobs.finish(process)
    assert code == 143, err
    assert "Traceback" not in err
    last = jobs.logged_steps(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoint" / f"step-{last:08d}" / "manifest.json").exists()


def test_bad_validation_data_on_one_rank_stops_all(texts, tmp_path):
    file = tmp_path / "bad.jsonl"
    lines = texts.read_text().splitlines()[:40]
    file.write_text("\n".join([lines[0], '{"text": 3}', *lines[1:]]))
    options = dict(
        training__local_batch_size=4,
        training__shuffle=False,
        validation__enable=True,
        validation__dataset="text",
        validation__dataset_path=file,
        validation__local_batch_size=2,
        validation__freq=2,
    )
    code, out, err = jobs.run(jobs.arguments(tmp_path, texts, **options), ranks=2)
    assert code == 2
    assert "bad.jsonl" in err and "Traceback" not in err


def test_a_last_export_that_cannot_be_written_has_its_own_code(texts, tmp_path):
    (tmp_path / "model_hf").write_text("a file where a folder has to be")
    options = saving(
        training__steps=2,
        training__local_batch_size=4,
        checkpoint__last_save_model_only=True,
        checkpoint__last_save_in_hf=True,
    )
    code, out, err = jobs.run(jobs.arguments(tmp_path, texts, **options), ranks=2)
    assert code == NOT_EXPORTED
    assert "model_hf" in err and "Traceback" not in err


def test_the_ranks_that_print_are_chosen(texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, training__local_batch_size=4, training__steps=2)
    code, out, err = jobs.run(argv, ranks=2, LOG_RANK="1")
    assert code == 0, err
    assert "[rank 1] step 2/2" in out and "\n\n[rank 1] step 2/2, loss" in out
    assert not [line for line in out.splitlines() if line.startswith("step 1/2")]


def test_data_that_ends_badly_on_one_rank_stops_all(texts, tmp_path):
    file = tmp_path / "bad.jsonl"
    lines = texts.read_text().splitlines()
    file.write_text("\n".join([*lines[:50], '{"text": "cut o', *lines[50:]]))
    options = dict(training__local_batch_size=4, training__steps=200, training__shuffle=False)
    options |= dict(model__overrides=jobs.SHALLOW)
    argv = jobs.arguments(tmp_path, file, **options)
    code, out, err = jobs.run(argv, ranks=2)
    assert code == 2
    assert "bad.jsonl" in err and "51" in err
    assert "Traceback" not in err


def test_non_finite_loss_stops_with_its_own_code_and_saves_nothing_after_it(texts, tmp_path):
    options = saving(optimizer__lr=1e30, training__max_norm=0, training__local_batch_size=4)
    code, out, err = jobs.run(jobs.arguments(tmp_path, texts, **options), ranks=2)
    assert code == 4
    assert err.startswith("ERROR: the ") and "optimizer.lr" in err and "Traceback" not in err
    assert err.count("ERROR") == 1  # of what all ranks know, one speaks
    bad_step = len(jobs.logged_steps(tmp_path)) + 1
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == [f"step-{bad_step - 1:08d}"]


def test_damaged_checkpoints_are_never_a_fresh_start(texts, tmp_path):
    options = saving(training__steps=10)
    run_ranks(1, jobs.train, jobs.arguments(tmp_path, texts, **options))
    manifest = tmp_path / "checkpoint" / "step-00000010" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    code, out, err = jobs.run(jobs.arguments(tmp_path, texts, **options))
    assert code == 3
    assert "step-00000010" in err and "Traceback" not in err


def test_bad_job_is_explained_before_anything_starts(tmp_path):
    process = jobs.start(["--training.stepz=3", "--model.flavor=9B", f"--job.dump_folder={tmp_path / 'out'}"], ranks=2)
    code, out, err = jobs.finish(process)
    assert code == 2
    assert "training.stepz" in err and "9B" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_collectives_fail_soon_where_no_watchdog_sees_a_hang(device, monkeypatch):
    """The launcher's watchdog takes a rank that spins for a GPU in its first step for one that compiles."""
    monkeypatch.setattr(distributed, "likely_device", lambda: device)

    def timeouts(launcher):
        ranks = SimpleNamespace(launcher=launcher)
        return [distributed.collective_timeout(ranks, 100, may_spin=may_spin) for may_spin in (True, False)]

    assert timeouts(launcher=None) == [100, 100]  # torchrun
    assert timeouts(launcher="ours") == [130 if device == "cuda" else 3700, 3700]


def timeouts_of_groups(argv: list[str]) -> list[dict[str, float]]:
    """Return the groups' timeouts at the trainer's start and after each change."""
    trainer = Trainer(manager.load(argv), read_ranks())
    axes = [trainer.model.mesh.get_group(axis) for axis in ("dp_replicate", "dp_shard")]
    groups = {"world": dist.group.WORLD, "axis": axes[0], "other axis": axes[1], "saves": Peers("saves").group}
    backends = {name: group._get_backend(torch.device("cpu")) for name, group in groups.items()}
    timeouts = []
    for seconds in (None, 78):
        if seconds:
            distributed.set_timeout(seconds)
        timeouts.append({name: backend.options._timeout.total_seconds() for name, backend in backends.items()})
    return timeouts


def test_until_the_first_step_every_group_but_those_of_checkpoints_waits_as_long_as_the_job_says(texts, tmp_path):
    options = dict(parallelism__data_parallel_replicate_degree=2, training__local_batch_size=2)
    argv = jobs.arguments(tmp_path, texts, comm__init_timeout_seconds=77, **options)
    expected = [dict.fromkeys(("world", "axis", "other axis"), s) | {"saves": 1800.0} for s in (77.0, 78.0)]
    assert run_ranks(4, timeouts_of_groups, argv) == [expected] * 4
