"""What several ranks hold alike is compared: a flipped bit is found and its rank named, and nothing else is found."""

import pytest
import torch

from tests.support import jobs
from tests.support.pool import run_ranks
from tests.test_expert_jobs import EP
from tests.test_expert_jobs import JOB as DEEPSEEK
from torchtitan.config import manager
from torchtitan.core.initialization import local_part
from torchtitan.guards import ReplicasDiffer
from torchtitan.guards.checksums import digest, key_of, told
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

# The number of a tensor's content


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4)])
def test_every_flipped_bit_shows(dtype, shape):
    tensor = torch.randint(1, 100, shape).to(dtype)
    before, seen = int(digest(tensor)), set()
    raw = tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    flat = raw.view(-1)
    for place in range(flat.numel()):
        flat[place] ^= 8
        seen.add(int(digest(tensor)))
        flat[place] ^= 8
    assert int(digest(tensor)) == before and before not in seen
    assert len(seen) == flat.numel() or len(shape) > 1  # which of a row's is not told


def test_what_a_plain_exclusive_or_would_not_see():
    """An even number of equal changes: a norm's weights all other ones, a bit flipped in two rows, rows exchanged."""
    assert int(digest(torch.ones(32))) != int(digest(torch.full((32,), 2.0)))
    rows = torch.rand(4, 6)
    both = rows.clone()
    both.view(torch.int32)[1:3, 4] ^= 1 << 20
    assert len({int(digest(each)) for each in (rows, both, rows[[1, 0, 2, 3]])}) == 3


def test_places_have_numbers_of_their_own():
    tensor = torch.zeros(3)
    places = [("a", (0,), (3,)), ("a", (3,), (3,)), ("b", (0,), (3,))]
    keys = {key_of(place, tensor) for place in places} | {key_of(places[0], tensor.double())}
    assert len(keys) == 4 and all(-(2**63) <= key < 2**63 for key in keys)


def test_who_differs_is_who_is_not_like_most():
    names = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}
    assert told({1: {0: 7, 1: 7, 2: 8, 3: 7}}, names) == "rank 2 differs from ranks 0, 1, 3 in one"
    assert told({2: {1: 7, 3: 8}}, names) == "ranks 1, 3 differ, and which is right is not known in two"
    many = dict.fromkeys(names, {0: 1, 1: 2, 2: 1})
    assert told(many, names) == "rank 1 differs from ranks 0, 2 in five, four, one and 2 more"
    assert told({1: {0: 1, 1: 1, 2: 1, 3: 5, 4: 6}}, names) == "ranks 3, 4 differ from ranks 0, 1, 2 in one"


# In a run

TP = dict(parallelism__tensor_parallel_degree=2)
DDP = dict(parallelism__data_parallel_replicate_degree=2, parallelism__data_parallel_shard_degree=1)
HSDP = dict(parallelism__data_parallel_replicate_degree=2)
PP = dict(parallelism__pipeline_parallel_degree=2)


class Flips(Trainer):
    """After its third step one bit of one rank's memory is another."""

    rank, what = -1, ""

    def train_step(self, batches):
        super().train_step(batches)
        if self.step == 3 and self.ranks.rank == self.rank:
            name, _, entry = self.what.partition(":")
            parameter = dict(self.model.named_parameters())[name]
            held = parameter.detach()
            if entry:
                held = next(o.state[parameter][entry] for o in self.optimizers if parameter in o.state)
            local = local_part(held)[0]
            assert local.numel()
            local.view(torch.int32).view(-1)[0] ^= 1 << 3


def flipped(argv, rank, what):
    """What was said at which step, if anything."""
    trainer = Flips(manager.load(argv), read_ranks())
    trainer.rank, trainer.what = rank, what
    try:
        trainer.train()
    except ReplicasDiffer as error:
        return trainer.step, str(error)
    finally:
        trainer.metrics.close()
    return trainer.step, ""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return jobs.write_texts(tmp_path_factory.mktemp("texts"))


def job(folder, texts, **options):
    every = dict(training__steps=8, training__local_batch_size=2, guard__replica_check_interval=4)
    return jobs.arguments(folder, texts, **every | options)


OF_OPTIMIZER = {
    "AdamWBF16": dict(training__dtype="bfloat16", training__mixed_precision_param="bfloat16")
    | dict(optimizer__options='{rounding="stochastic"}'),
    "APOLLO": dict(optimizer__options="{rank=4, update_gap=2}"),
    "GaLore": dict(optimizer__options='{rank=4, update_gap=2, basis="rsvd"}'),
}
"""What some need in a job this small; drawn anew within its steps."""
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
    world, options, what, said = FLIPS[plan]
    found = run_ranks(world, flipped, job(tmp_path, texts, **options), 1, what)
    assert len(set(found)) == 1 and found[0][0] == 4
    first = found[0][1]
    # the update of step 4 has carried it from a moment into the weight, and by the gradient nowhere else
    assert said.split(" in ")[0] in first and what.partition(":")[0] in first


def test_a_save_is_never_of_ranks_that_differ(texts, tmp_path):
    options = DDP | dict(guard__replica_check_interval=100, checkpoint__enable=True, checkpoint__interval=1)
    found = run_ranks(2, flipped, job(tmp_path, texts, **options), 1, WEIGHT)
    assert [step for step, _ in found] == [3, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*")) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(("options", "what"), [(DDP | dict(guard__replica_check_interval=0), WEIGHT), ({}, WEIGHT)])
def test_without_a_comparison_or_a_copy_it_trains_on(options, what, texts, tmp_path):
    """The control; and a shard that one rank alone has cannot be compared, which the docs say."""
    assert run_ranks(2, flipped, job(tmp_path, texts, **options), 1, what) == [(8, "")] * 2


TIED = "{dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=16, tied_embeddings=true}"
PLANS = {
    "DDP": (2, DDP),
    "TP": (2, TP),
    "TP without sequence parallel": (2, TP | dict(parallelism__disable_sequence_parallel=True)),
    "PP, tied": (2, PP | dict(model__overrides=TIED)),
    "DDP x TP": (4, DDP | TP),
    "EP": (4, DEEPSEEK | EP | DDP | dict(parallelism__data_parallel_shard_degree=2)),
}


def compared(argv, steps):
    """A run that compares after every step: how many of the tensors of this rank others have too."""
    trainer = Trainer(manager.load(argv), read_ranks())
    trainer.train()
    trainer.metrics.close()
    assert trainer.step == steps
    return trainer.guards.replicas.shared


@pytest.mark.parametrize("plan", PLANS)
def test_no_alarm_is_false(plan, texts, tmp_path):
    world, options = PLANS[plan]
    steps = 60 if plan == "DDP" else 8
    options |= dict(training__steps=steps, guard__replica_check_interval=1, metrics__log_freq=100)
    shared = run_ranks(world, compared, job(tmp_path, texts, **options), steps)
    assert min(shared) > 0


def with_every_optimizer(folder, texts, plan):
    """What each says of a run that compares after every step."""
    said = {}
    for name in OPTIMIZERS:
        options = plan | dict(optimizer__name=name, guard__replica_check_interval=1, training__steps=4)
        argv = job(folder / name, texts, optimizer__lr=1e-3, **options | OF_OPTIMIZER.get(name, {}))
        said[name] = flipped(argv, -1, "")
    return said


def test_no_optimizer_makes_replicas_differ(texts, tmp_path):
    """One that rounds by chance or draws a basis does so by the step and the name, on every replica alike."""
    for said in run_ranks(2, with_every_optimizer, tmp_path, texts, DDP):
        assert said == dict.fromkeys(OPTIMIZERS, (4, ""))
