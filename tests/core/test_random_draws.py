"""Initial weights depend on seed, name and shape, and on nothing else: not on ranks, shards, wrappers or types."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.jobs import arguments, full, write_texts
from tests.support.pool import run_ranks
from torchtitan.config import manager
from torchtitan.core import random_draws
from torchtitan.core.random_draws import Constant, Normal, clean_name, initialize
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer


class Small(nn.Module):
    """Shapes that do not divide into blocks and ranks: 301 rows in blocks of 65, 7 rows, a vector, a 3-d tensor with
    slices larger than a block.
    """

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(1000, 301)
        self.short = nn.Linear(4, 7)
        self.vector = nn.Parameter(torch.empty(70000))
        self.experts = nn.Parameter(torch.empty(3, 5, 6))
        self.large_experts = nn.Parameter(torch.empty(2, 1200, 500))


def rule(name):
    return Constant(0.5) if name == "short.bias" else Normal(0.02)


def drawn(seed=0, prepare=lambda model: None):
    with torch.device("meta"):
        model = Small()
    prepare(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)
    initialize(model, seed, rule)
    return model


def full_tensors(model):
    return {clean_name(name): full(p.detach()) for name, p in model.named_parameters()}


def by_rows(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


def by_columns(model):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def inside_experts(model):
    """Shard inside experts, as with fewer experts than ranks: each rank has a part of every expert."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.shape[1:] == (1200, 500) else Shard(0))


def both_ways(model):
    """Tensor parallel over two ranks, one layer by rows, one by columns; what they hold is sharded over two more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"wide": ColwiseParallel(), "short": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


def replicated_and_sharded(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)


def shards(prepare):
    model = drawn(prepare=prepare)
    return full_tensors(model), [tuple(p.to_local().shape) for p in model.parameters()]


@pytest.mark.parametrize(
    "world_size, prepare",
    [
        (2, by_rows),
        (2, by_columns),
        (2, inside_experts),
        (4, by_rows),
        (4, both_ways),
        (4, inside_experts),
        (4, replicated_and_sharded),
    ],
)
def test_every_sharding_starts_from_the_same_bits(world_size, prepare):
    expected = full_tensors(drawn())
    answers = run_ranks(world_size, shards, prepare)
    for tensors, _ in answers:
        assert set(tensors) == set(expected)
        for name in expected:
            assert torch.equal(tensors[name], expected[name]), name
    assert len({str(shapes) for _, shapes in answers}) > 1 or prepare is not by_rows, "301 and 7 rows are uneven"


@contextmanager
def counted_draws():
    """Record how many numbers each call of the generator draws."""
    counts, original = [], random_draws._values
    random_draws._values = lambda shape, *args: counts.append(math.prod(shape)) or original(shape, *args)
    try:
        yield counts
    finally:
        random_draws._values = original


def draws_of_rank(prepare):
    with counted_draws() as counts:
        drawn(prepare=prepare)
    return sum(counts)


@pytest.mark.parametrize("world_size, prepare", [(2, by_rows), (2, inside_experts), (4, inside_experts)])
def test_a_rank_draws_only_the_blocks_it_needs(world_size, prepare):
    """Both ranks of a border draw its block: up to two blocks per matrix, or per expert."""
    total = sum(p.numel() for p in Small().parameters())
    for elements in run_ranks(world_size, draws_of_rank, prepare):
        assert elements < total / world_size + 8 * random_draws.BLOCK_ELEMENTS


def draws_of_jobs(*jobs):
    """Train a step of each job; return the numbers drawn and the sum of squared weights after it."""
    answers = []
    for argv in jobs:
        with counted_draws() as counts:
            trainer = Trainer(manager.load(argv), read_ranks())
        trainer.train()
        squares = sum(p.detach().double().square().sum().item() for _, p in trainer.model.named_parameters())
        answers.append((sum(counts), squares))
        trainer.metrics.close()
    return answers


def test_what_a_checkpoint_fills_is_not_drawn(tmp_path):
    """With an adapter and a loaded base, only the adapter's matrices are drawn."""
    texts = write_texts(tmp_path)

    def job(name, steps=1, **options):
        return arguments(tmp_path / name, texts, training__steps=steps, checkpoint__enable=True, **options)

    base = str(tmp_path / "first" / "checkpoint")
    adapter = dict(adapter__kind="lora", adapter__rank=4, checkpoint__initial_load_path=base)
    jobs = [job("first"), job("first", 2), job("other", checkpoint__initial_load_path=base), job("lora", **adapter)]
    jobs += [job("lora", 2, **adapter)]
    ((first, *resumed),) = run_ranks(1, draws_of_jobs, *jobs)
    assert first[0] > 0
    assert [count for count, _ in resumed[:2]] == [0, 0]
    assert 0 < resumed[2][0] < first[0]
    assert resumed[3][0] == 0
    assert all(math.isfinite(squares) for _, squares in resumed)


def test_only_seed_name_and_shape_matter():
    first = full_tensors(drawn())
    torch.manual_seed(123)
    assert all(torch.equal(value, first[name]) for name, value in full_tensors(drawn()).items())
    other = full_tensors(drawn(seed=1))
    assert not any(torch.equal(other[name], first[name]) for name in first if name != "short.bias")
    assert not torch.equal(first["wide.bias"][:7], first["vector"][:7])
    assert (first["short.bias"] == 0.5).all()


def test_global_generator_and_threads_are_left_alone():
    state = torch.get_rng_state()
    drawn()
    assert torch.equal(torch.get_rng_state(), state)


def test_names_are_those_without_wrappers():
    def wrap(model):
        model.wide = checkpoint_wrapper(model.wide)
        model.short = torch.compile(model.short)

    expected, wrapped = full_tensors(drawn()), full_tensors(drawn(prepare=wrap))
    assert all(torch.equal(wrapped[name], expected[name]) for name in expected)
    assert clean_name("layers.0._checkpoint_wrapped_module._orig_mod.wq.weight") == "layers.0.wq.weight"
    assert clean_name("_orig_mod") == "" and clean_name("output.weight") == "output.weight"


def test_another_type_is_a_cast():
    expected = full_tensors(drawn())
    low = full_tensors(drawn(prepare=lambda model: model.to(torch.bfloat16)))
    assert all(torch.equal(low[name], expected[name].bfloat16()) for name in expected)


def test_distribution():
    values = full_tensors(drawn())["wide.weight"].flatten().double() / 0.02
    assert values.abs().max() <= 3
    # moments of a standard normal cut at 3: variance 1 - 6 phi(3) / (2 Phi(3) - 1)
    variance = 1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2))
    error = 1 / math.sqrt(values.numel())
    assert abs(values.mean()) < 4 * error
    assert abs(values.var() - variance) < 6 * error
    inside = (values.abs() < 1).double().mean()
    assert abs(inside - math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2))) < 4 * error


def test_blocks_are_not_copies_of_each_other():
    rows = full_tensors(drawn())["wide.weight"]
    per_block = random_draws.BLOCK_ELEMENTS // 1000
    assert not torch.equal(rows[:per_block], rows[per_block : 2 * per_block])


def test_a_tied_tensor_is_drawn_once_under_its_first_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    names = []
    initialize(Tied(), 0, lambda name: names.append(name) or Normal(1.0))
    assert names == ["a.weight"]


def test_a_model_without_storage_is_our_mistake():
    with torch.device("meta"):
        model = Small()
    with pytest.raises(AssertionError, match="to_empty"):
        initialize(model, 0, rule)


def replicated_tensor():
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(4, 3, bias=False)
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(3, 4), mesh, [Replicate()]))
    initialize(module, 0, rule)
    return module.weight.detach().to_local()


def test_replicated_tensors_are_drawn_whole():
    first, second = run_ranks(2, replicated_tensor)
    assert torch.equal(first, second) and first.all()


def test_threads_draw_the_same_bits_and_leave_the_number_of_threads():
    before = torch.get_num_threads()
    drawn = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            weights = torch.empty(7, 65536)
            random_draws.draw(weights, Normal(0.02), "a weight")
            drawn.append(weights)
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*drawn)
