"""A run returns to its newest checkpoint, once, if a hardware error damages weights or optimizer state."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from tests.support import jobs, judged
from tests.support.damaged_shards import OF_OPTIMIZER
from tests.support.guarded_jobs import PLANS, options
from tests.support.judged import lines
from tests.support.pool import run_ranks
from tests.support.relora_jobs import RELORA
from torchtitan.config import manager
from torchtitan.core.random_draws import local_part
from torchtitan.guards import BadStep, Guards, NonFiniteError, StepGuard
from torchtitan.guards.checksums import bit_sum
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.process import distributed
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

anywhere = judged.anywhere

DAMAGED_STEP = 5


class DamagingTrainer(Trainer):
    """A trainer that damages the last rank's memory after its fifth step."""

    entry, once, damaged = "", True, False

    def step(self, batch):
        super().step(batch)
        if self.current_step == DAMAGED_STEP and not (self.once and self.damaged):
            self.damaged = True
            if self.ranks.rank == self.ranks.world_size - 1:
                damage(self, self.entry)


def damage(trainer, entry):
    """Write NaN to a weight or, with `entry`, to this optimizer state."""
    for name, parameter in trainer.model.named_parameters():
        state = next((o.state[parameter] for o in trainer.optimizers if parameter in o.state), None)
        if state is None or "embed" in name or not local_part(parameter.detach())[0].numel():
            continue  # not every row of an embedding is read in every step
        local_part(state[entry] if entry else parameter.detach())[0].view(-1)[0] = math.nan
        return


def run(argv, entry, once=True, kind=DamagingTrainer):
    """Train; return the error or None, last step, hash of the final state, and number of returns to a checkpoint."""
    trainer = kind(manager.load(argv), read_ranks())
    trainer.entry, trainer.once, raised = entry, once, None
    try:
        trainer.train()
    except BadStep as error:
        raised = f"{type(error).__name__}: {error}"
    trainer.metrics.close()
    if raised is None:
        return raised, trainer.current_step, jobs.state_hash(trainer), trainer.guards.steps.rolled_back
    return raised, trainer.current_step, "", trainer.guards.steps.rolled_back


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize(("plan", "entry"), [*((plan, "") for plan in PLANS), ("FSDP", "exp_avg_sq")])
def test_a_run_returns_to_its_checkpoint_and_ends_with_the_same_bits(plan, entry, texts, tmp_path):
    """NaN in a weight shows in the next loss. In a moment it shows in the next save, after an update with it."""
    job = options(**PLANS[plan])
    straight = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "straight", texts, **job))
    healed = run_ranks(2, run, jobs.arguments(tmp_path / "healed", texts, **job), entry)
    assert healed == [(None, 8, state, 1) for _, state in straight]
    rows = [json.loads(line) for line in (tmp_path / "healed/metrics.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row.get("event") == "rollback"]
    assert event["step"] == 3 and [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert "weights or moments are NaN or infinite" in event["cause"]


def test_a_second_fault_at_the_same_step_ends_the_run(texts, tmp_path):
    argv = jobs.arguments(tmp_path, texts, **options())
    first = run_ranks(2, run, argv, "", False)
    assert {(error.split(":")[0], step, ways_back) for error, step, _, ways_back in first} == {
        ("NonFiniteError", DAMAGED_STEP, 1)
    }
    assert "although the run went back to its checkpoint for that step before" in first[0][0]
    # another process: the first one may have died on its way back
    restarted = run_ranks(2, run, argv, "", False)
    assert [(step, ways_back) for _, step, _, ways_back in restarted] == [(DAMAGED_STEP, 0)] * 2
    assert "before" in restarted[0][0]


def test_without_a_checkpoint_it_ends_the_run(texts, tmp_path):
    error, step, _, ways_back = run_ranks(1, run, jobs.arguments(tmp_path, texts, training__steps=8), "")[0]
    assert error.startswith("NonFiniteError") and (step, ways_back) == (DAMAGED_STEP, 0)


@pytest.fixture
def guards(monkeypatch):
    """Return the guards of one rank, without a process group, that can go back to no checkpoint."""
    monkeypatch.setattr(distributed, "sum_ints", lambda *numbers: list(numbers))
    monkeypatch.setattr(distributed, "sum_floats", lambda *numbers: list(numbers))
    monkeypatch.setattr(distributed, "all_gather_json", lambda value: [value])
    dims = SimpleNamespace(tp=1, world_size=1)
    guards = Guards(StepGuard(), None, SimpleNamespace(dims=dims, not_finite_layers=list), compare_every=0)
    guards.checkpointer = SimpleNamespace(not_finite=list, prepare_roll_back=lambda: False)
    return guards


@pytest.mark.parametrize("judges", [False, True], ids=["norm", "loss and norm"])
def test_the_update_that_damaged_the_weights_is_the_one_to_look_into(guards, judges):
    guards.steps = StepGuard(loss_threshold=5.0 if judges else None)
    guards.checkpointer.not_finite = lambda: ["norm.weight", "output.weight"]
    loss, norm = torch.tensor(2.0), torch.tensor(1.0)
    assert guards.reason_to_skip(4, loss, norm, can_skip=False) == ""
    with pytest.raises(NonFiniteError) as raised:
        guards.reason_to_skip(5, math.nan * loss, math.nan * norm, can_skip=False)
    damage = "2 weights or moments are NaN or infinite, norm.weight, output.weight, after step 4; the run stops"
    assert f"in step 5: {damage}" in str(raised.value) and "`torchtitan replay RUN --step 4`" in str(raised.value)
    guards.checkpointer.not_finite = list
    with pytest.raises(NonFiniteError, match="in step 5; .*`torchtitan replay RUN --step 5`"):
        guards.reason_to_skip(5, math.nan * loss, math.nan * norm, can_skip=False)


def test_steps_that_were_not_checked_are_said(guards):
    loss = torch.tensor(math.nan)
    with pytest.raises(NonFiniteError, match="in step 10, the first one checked; "):
        guards.refuse_non_finite("loss", loss, 1, step=10)
    guards.refuse_non_finite("loss", torch.tensor(1.0), 0, step=1)
    guards.refuse_non_finite("gradient norm", torch.tensor(1.0), 0, step=9)
    with pytest.raises(NonFiniteError, match="in step 10, the first one checked since step 1; "):
        guards.refuse_non_finite("loss", loss, 1, step=10)
    with pytest.raises(NonFiniteError, match="in step 2; "):
        guards.refuse_non_finite("loss", loss, 1, step=2)


# Faults on one rank only


def run_with_nan_gradient(argv, where, step):
    """Like `run`, with a NaN in the last rank's reduced gradient of this step, once.

    Unless `where` is "step", the norm is not checked before the update, as on a GPU.
    """
    trainer = Trainer(manager.load(argv), read_ranks())
    clip, spoilt, raised = trainer.model.clip_gradients, [], None

    def spoil(max_norm):
        if trainer.current_step == step - 1 and trainer.ranks.rank == trainer.ranks.world_size - 1 and not spoilt:
            spoilt.append(True)
            gradient = next(parameter.grad for _, parameter in trainer.model.named_parameters())
            gradient.view(-1)[0] = math.nan
        return clip(max_norm)

    trainer.model.clip_gradients = spoil
    if where != "step":
        trainer.guards.reason_to_skip = lambda *args, **options: ""
    try:
        trainer.train()
    except BadStep as error:
        raised = f"{type(error).__name__}: {error}"
    trainer.metrics.close()
    return raised, trainer.current_step, jobs.state_hash(trainer), trainer.guards.steps.rolled_back


DDP = PLANS["DDP"] | dict(comm__train_timeout_seconds=20)


@pytest.mark.parametrize(("where", "step", "every"), [("log", 5, 1), ("save", 6, 100)])
def test_a_nan_on_one_replica_after_an_update_returns_all_to_the_checkpoint(where, step, every, texts, tmp_path):
    """Each replica computes its norm locally, but all ranks act on it together."""
    job = options(**DDP, metrics__log_freq=every, guard__replica_check_interval=0)
    straight = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "straight", texts, **job))
    healed = run_ranks(
        2, run_with_nan_gradient, jobs.arguments(tmp_path / "healed", texts, **job), where, step, limit=120
    )
    assert healed == [(None, 8, state, 1) for _, state in straight]


def test_a_nan_on_one_replica_before_an_update_saves_and_ends_the_run(texts, tmp_path):
    results = run_ranks(
        2, run_with_nan_gradient, jobs.arguments(tmp_path, texts, **options(**DDP)), "step", 5, limit=120
    )
    raised, *steps_states_returns = zip(*results, strict=True)
    assert (
        raised[0] == raised[1]
        and steps_states_returns[0] == (4, 4)
        and steps_states_returns[2] == (0, 0)
        and len(set(steps_states_returns[1])) == 1
    )
    assert raised[0].startswith("NonFiniteError: the gradient norm is NaN or infinite on rank 1 alone in step 5")
    assert (tmp_path / "checkpoint/step-00000004").is_dir()


# Checksums of shards


class FlippingTrainer(DamagingTrainer):
    """A trainer that flips one bit of the last rank's memory before its sixth step."""

    def step(self, batch):
        Trainer.step(self, batch)

    def fetch(self):
        if self.current_step == DAMAGED_STEP and self.entry is not None and not (self.once and self.damaged):
            self.damaged = True
            if self.ranks.rank == self.ranks.world_size - 1:
                flip(self, self.entry)
        return super().fetch()


WEIGHT = "layers.1.attention.wq.weight"


def flip(trainer, entry):
    parameter = dict(trainer.model.named_parameters())[WEIGHT]
    state = next(o.state[parameter] for o in trainer.optimizers if parameter in o.state)
    local_part(state[entry] if entry else parameter.detach())[0].view(torch.int32).view(-1)[7] ^= 1 << 3


def run_with_a_flip(argv, entry, once=True):
    return run(argv, entry, once, FlippingTrainer)


@pytest.mark.parametrize("entry", ["", "exp_avg"], ids=["weight", "moment"])
def test_a_bit_that_flips_in_a_shard_is_found_before_the_next_update(entry, texts, tmp_path):
    job = options(guard__shard_checksums=True)
    straight = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "straight", texts, **options()))[0][1]
    healed = run_ranks(2, run_with_a_flip, jobs.arguments(tmp_path / "healed", texts, **job), entry)
    assert healed == [(None, 8, straight, 1)] * 2
    rows = [json.loads(line) for line in (tmp_path / "healed/metrics.jsonl").read_text().splitlines()]
    (event,) = [row for row in rows if row.get("event") == "rollback"]
    name = f"{entry} of {WEIGHT}" if entry else WEIGHT
    assert event["cause"] == f"bits have changed in the memory of rank 1, in {name}, after step {DAMAGED_STEP}"


def test_without_checksums_the_flip_is_trained_on(texts, tmp_path):
    """Control: without the option the flip goes unnoticed."""
    straight = run_ranks(2, jobs.train, jobs.arguments(tmp_path / "straight", texts, **options()))[0][1]
    (raised, step, state, ways_back), _ = run_ranks(
        2, run_with_a_flip, jobs.arguments(tmp_path / "flipped", texts, **options()), ""
    )
    assert (raised, step, ways_back) == (None, 8, 0) and state != straight


def test_a_flip_before_a_save_is_not_saved_and_the_second_one_ends_the_run(texts, tmp_path):
    job = options(guard__shard_checksums=True, checkpoint__interval=DAMAGED_STEP)
    results = run_ranks(2, run_with_a_flip, jobs.arguments(tmp_path, texts, **job), "", False)
    assert {(step, ways_back) for _, step, _, ways_back in results} == {(DAMAGED_STEP, 1)}
    assert results[0][0].startswith("BadStep: bits have changed in the memory of rank 1") and "again" in results[0][0]
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == [f"step-{DAMAGED_STEP:08d}"]


def errors_by_job(folder, texts):
    """Train with each optimizer, and with jobs that change weights outside of a step; return errors by name."""
    relora = {name.replace(".", "__"): value for name, value in RELORA.items()}
    relora |= dict(adapter__relora__every=4, training__steps=8, lr_scheduler__total_steps=8)
    relora |= dict(lr_scheduler__warmup_steps=1, lr_scheduler__restart_warmup_steps=1)
    kinds = {name: dict(optimizer__name=name) | OF_OPTIMIZER.get(name, {}) for name in OPTIMIZERS}
    kinds["validation"] = dict(validation__enable=True, validation__freq=1, validation__steps=1)
    kinds["validation"] |= dict(validation__dataset="text", validation__dataset_path=texts)
    kinds["ReLoRA"] = relora
    kinds["background saves"] = dict(checkpoint__enable=True, checkpoint__interval=1, checkpoint__async_mode="async")
    errors = {}
    for name, kind in kinds.items():
        every = dict(training__steps=4, training__local_batch_size=4, guard__shard_checksums=True, optimizer__lr=1e-3)
        trainer = Trainer(manager.load(jobs.arguments(folder / name, texts, **every | kind)), read_ranks())
        try:
            trainer.train()
            errors[name] = ""
        except BadStep as error:
            errors[name] = str(error)
        trainer.metrics.close()
    return errors


def test_no_optimizer_validation_or_save_raises_a_false_alarm(texts, tmp_path):
    for errors in run_ranks(2, errors_by_job, tmp_path, texts):
        assert set(errors.values()) == {""} and set(errors) > set(OPTIMIZERS)


def test_a_resumed_run_raises_no_alarm(texts, tmp_path):
    for steps in (4, 8):
        job = options(guard__shard_checksums=True, training__steps=steps, lr_scheduler__total_steps=8)
        results = run_ranks(2, run_with_a_flip, jobs.arguments(tmp_path, texts, **job), None)
        assert [(raised, step, ways_back) for raised, step, _, ways_back in results] == [(None, steps, 0)] * 2


def test_checksums_are_refused_with_steps_in_backward(anywhere):
    arguments = ["--guard.shard_checksums", "--optimizer.early_step_in_backward", "--training.max_norm=0"]
    assert lines(*arguments) == [
        "guard.shard_checksums: given true; allowed: false with optimizer.early_step_in_backward; each update happens "
        "in backward, before the checksums can be compared"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4)])
def test_every_flipped_bit_changes_the_sum(dtype, shape):
    tensor = torch.randint(1, 100, shape).to(dtype)
    before, raw = int(bit_sum(tensor)), tensor.reshape(-1).view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert int(bit_sum(tensor)) != before
            raw[place] ^= 1 << bit
    assert int(bit_sum(tensor)) == before
    odd = torch.arange(9, dtype=torch.int32)[1:]  # not aligned to a word
    assert int(bit_sum(odd)) == int(bit_sum(odd.clone()))
