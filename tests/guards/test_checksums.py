"""Tests of the replica check: it finds a flipped bit, names the rank that differs, and raises no false alarm."""

import pytest
import torch

from tests.support import jobs
from tests.support.damaged_shards import OF_OPTIMIZER
from tests.support.expert_jobs import EP
from tests.support.expert_jobs import JOB as DEEPSEEK
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.core.random_draws import local_part
from torchtitan.guards import ReplicasDiffer
from torchtitan.guards.checksums import describe_differences, digest, key_of
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

# Digests of tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4)])
def test_every_flipped_bit_changes_the_digest(dtype, shape):
    tensor = torch.randint(1, 100, shape).to(dtype)
    before, digests = int(digest(tensor)), set()
    raw = tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    flat = raw.view(-1)
    for position in range(flat.numel()):
        flat[position] ^= 8
        digests.add(int(digest(tensor)))
        flat[position] ^= 8
    assert int(digest(tensor)) == before and before not in digests
    assert len(digests) == flat.numel() or len(shape) > 1  # flips within one row may have equal digests


def test_changes_that_cancel_in_an_exclusive_or_change_the_digest():
    """Make an even number of equal changes: all weights of a norm, one bit in two rows, exchanged rows."""
    assert int(digest(torch.ones(32))) != int(digest(torch.full((32,), 2.0)))
    rows = torch.rand(4, 6)
    flipped_twice = rows.clone()
    flipped_twice.view(torch.int32)[1:3, 4] ^= 1 << 20
    assert len({int(digest(rows_variant)) for rows_variant in (rows, flipped_twice, rows[[1, 0, 2, 3]])}) == 3


def test_keys_of_shards_are_distinct():
    tensor = torch.zeros(3)
    places = [("a", (0,), (3,)), ("a", (3,), (3,)), ("b", (0,), (3,))]
    keys = {key_of(place, tensor) for place in places} | {key_of(places[0], tensor.double())}
    assert len(keys) == 4 and all(-(2**63) <= key < 2**63 for key in keys)


def test_the_minority_of_ranks_is_named():
    names = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}
    assert describe_differences({1: {0: 7, 1: 7, 2: 8, 3: 7}}, names) == "rank 2 differs from ranks 0, 1, 3 in one"
    assert describe_differences({2: {1: 7, 3: 8}}, names) == "ranks 1, 3 differ, and which is right is not known in two"
    many = dict.fromkeys(names, {0: 1, 1: 2, 2: 1})
    assert describe_differences(many, names) == "rank 1 differs from ranks 0, 2 in five, four, one and 2 more"
    assert (
        describe_differences({1: {0: 1, 1: 1, 2: 1, 3: 5, 4: 6}}, names)
        == "ranks 3, 4 differ from ranks 0, 1, 2 in one"
    )


# In a run

TP = dict(parallelism__tensor_parallel_degree=2)
DDP = dict(parallelism__data_parallel_replicate_degree=2, parallelism__data_parallel_shard_degree=1)
HSDP = dict(parallelism__data_parallel_replicate_degree=2)
PP = dict(parallelism__pipeline_parallel_degree=2)


class FlippingTrainer(Trainer):
    """A trainer that flips one bit of one rank's parameter or optimizer state after the third step."""

    rank, target = -1, ""

    def step(self, batch):
        super().step(batch)
        if self.current_step == 3 and self.ranks.rank == self.rank:
            name, _, entry = self.target.partition(":")
            parameter = dict(self.model.named_parameters())[name]
            tensor = parameter.detach()
            if entry:
                tensor = next(o.state[parameter][entry] for o in self.optimizers if parameter in o.state)
            local = local_part(tensor)[0]
            assert local.numel()
            local.view(torch.int32).view(-1)[0] ^= 1 << 3


def train_with_flip(argv, rank, target):
    """Train with a flipped bit; return the last step and the replica check's message, if any."""
    trainer = FlippingTrainer(manager.load(argv), read_ranks())
    trainer.rank, trainer.target = rank, target
    try:
        trainer.train()
    except ReplicasDiffer as error:
        return trainer.current_step, str(error)
    finally:
        trainer.metrics.close()
    return trainer.current_step, ""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def job(folder, texts, **options):
    every = dict(training__steps=8, training__local_batch_size=2, guard__replica_check_interval=4)
    return jobs.arguments(folder, texts, **every | options)


WEIGHT, NORM = "layers.1.attention.wq.weight", "layers.1.attention_norm.weight"
NOT_KNOWN = "ranks 0, 1 differ, and which is right is not known in "
FLIPS = {
    "DDP": (2, DDP, WEIGHT, NOT_KNOWN + WEIGHT),
    "a moment": (2, DDP, f"{WEIGHT}:exp_avg_sq", f"{NOT_KNOWN}{WEIGHT}"),
    "a basis": (
        2,
        DDP | dict(optimizer__name="GaLore") | OF_OPTIMIZER["GaLore"],
        f"{WEIGHT}:right",
        NOT_KNOWN + WEIGHT,
    ),
    "TP": (2, TP, NORM, NOT_KNOWN + NORM),
    "TP without sequence parallel": (2, TP | dict(parallelism__disable_sequence_parallel=True), NORM, NOT_KNOWN + NORM),
    "HSDP": (4, HSDP, WEIGHT, "ranks 1, 3 differ, and which is right is not known in " + WEIGHT),
    "DDP of four": (4, DDP | dict(parallelism__data_parallel_replicate_degree=4), WEIGHT, "rank 1 differs from ranks"),
}


@pytest.mark.parametrize("plan", FLIPS)
def test_a_flipped_bit_is_found_within_the_interval(plan, texts, tmp_path):
    world, options, target, message = FLIPS[plan]
    results = run_ranks(world, train_with_flip, job(tmp_path, texts, **options), 1, target)
    assert len(set(results)) == 1 and results[0][0] == 4
    first = results[0][1]
    # by the update of step 4 a flip in a moment has reached the weight, and no other parameter
    assert message.split(" in ")[0] in first and target.partition(":")[0] in first


def test_differing_ranks_are_never_saved(texts, tmp_path):
    options = DDP | dict(guard__replica_check_interval=100, checkpoint__enable=True, checkpoint__interval=1)
    results = run_ranks(2, train_with_flip, job(tmp_path, texts, **options), 1, WEIGHT)
    assert [step for step, _ in results] == [3, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*")) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(("options", "target"), [(DDP | dict(guard__replica_check_interval=0), WEIGHT), ({}, WEIGHT)])
def test_without_a_check_or_a_replica_a_flip_goes_unnoticed(options, target, texts, tmp_path):
    """Control of the tests above. A shard that only one rank holds cannot be compared, as the docs say."""
    assert run_ranks(2, train_with_flip, job(tmp_path, texts, **options), 1, target) == [(8, "")] * 2


TIED = "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, tied_embeddings=true}"
PLANS = {
    "DDP": (2, DDP),
    "TP": (2, TP),
    "TP without sequence parallel": (2, TP | dict(parallelism__disable_sequence_parallel=True)),
    "PP, tied": (2, PP | dict(model__overrides=TIED)),
    "DDP x TP": (4, DDP | TP),
    "EP": (4, DEEPSEEK | EP | DDP | dict(parallelism__data_parallel_shard_degree=2)),
}


def train_and_count_shared(argv, steps):
    """Train with a replica check after every step; return how many tensors of this rank have replicas."""
    trainer = Trainer(manager.load(argv), read_ranks())
    trainer.train()
    trainer.metrics.close()
    assert trainer.current_step == steps
    return trainer.guards.replicas.shared


@pytest.mark.parametrize("plan", PLANS)
def test_no_plan_raises_a_false_alarm(plan, texts, tmp_path):
    world, options = PLANS[plan]
    steps = 60 if plan == "DDP" else 8
    options |= dict(training__steps=steps, guard__replica_check_interval=1, metrics__log_freq=100)
    shared = run_ranks(world, train_and_count_shared, job(tmp_path, texts, **options), steps)
    assert min(shared) > 0


def train_with_every_optimizer(folder, texts, plan):
    """Train with each optimizer and a replica check after every step; return (last step, message) by name."""
    results = {}
    for name in OPTIMIZERS:
        options = plan | dict(optimizer__name=name, guard__replica_check_interval=1, training__steps=4)
        argv = job(folder / name, texts, optimizer__lr=1e-3, **options | OF_OPTIMIZER.get(name, {}))
        results[name] = train_with_flip(argv, -1, "")
    return results


def test_no_optimizer_makes_replicas_differ(texts, tmp_path):
    """Random rounding and random bases are keyed by step and name, so they are equal on all replicas."""
    for results in run_ranks(2, train_with_every_optimizer, tmp_path, texts, DDP):
        assert results == dict.fromkeys(OPTIMIZERS, (4, ""))
