"""The project's own optimizers: 8-bit state, stochastic rounding to bfloat16, and updates of full matrices on ranks."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.optimization import Adafactor as TheirAdafactor

from tests.support.pool import run_ranks
from tests.support.random_tensors import random
from tests.support.recorded_optimizers import PACKED, normal, recorded, scaled
from torchtitan.checkpoint.tensors import optimizer_state
from torchtitan.core import fused, random_draws
from torchtitan.core.fused import Fused
from torchtitan.optimizers import OPTIMIZERS, adam_step
from torchtitan.optimizers.adam_step import add_with_lost, stochastically_rounded
from torchtitan.optimizers.build import build_optimizers
from torchtitan.optimizers.layout import ON_CPU, Layout, by_owners, pieces_of
from torchtitan.optimizers.moments import BLOCK, Adam, Packed, code_table, codebook, nearest_codes

SETTINGS = dict(lr=0.01, weight_decay=0.1, shared=dict(beta1=0.9, beta2=0.95, eps=1e-8))
CPU = torch.device("cpu")


def one_matrix(*shape, dtype=torch.float32):
    """Return a module with one random weight."""
    model = nn.Module()
    model.weight = nn.Parameter(random(*shape).to(dtype))
    return model


def take_steps(model, optimizers, steps=4):
    """Take steps with gradients that depend on step and parameter only; return the model."""
    for step in range(steps):
        for seed, parameter in enumerate(model.parameters()):
            gradient = random(*parameter.shape, seed=100 * step + seed).to(parameter.dtype)
            mesh = getattr(parameter, "device_mesh", None)
            parameter.grad = distribute_tensor(gradient, mesh, parameter.placements) if mesh else gradient
        optimizers.step()
    return model


def test_the_codebook_has_256_values_in_order():
    for signed, lowest in ((True, -1.0), (False, 0.0)):
        values = codebook(signed, CPU)
        assert len(values.unique()) == 256 and torch.equal(values, values.sort().values)
        assert values.max() == 1 and 0 in values and (lowest < values[0] < -0.99 if signed else values[0] == 0)


@pytest.mark.parametrize("table", [codebook, code_table])
def test_tables_first_used_in_a_rehearsal_have_values(table):
    expected = table(True, CPU)
    table.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        table(True, CPU)
    assert torch.equal(table(True, CPU), expected)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code_is_found(signed):
    book = codebook(signed, CPU)
    borders = (book[:-1] + book[1:]) / 2
    values = torch.cat([book, borders, borders.nextafter(book[1:]), random(50_000).clamp(-1, 1), random(999) * 1e-6])
    values = values if signed else values.abs()
    assert torch.equal(nearest_codes(values, signed, code_table(signed, CPU)).long(), torch.bucketize(values, borders))


@pytest.mark.parametrize("signed", [True, False])
def test_unpacked_values_are_within_half_a_gap(signed):
    values = random(8, 600) * torch.logspace(-6, 2, 600)
    values = values if signed else values.square()
    values[3] = 0.0
    state, packed = {}, Packed(Layout.of(values))
    packed.begin(state, "m", CPU, signed)
    assert not packed.read(state, "m", signed, torch.float32).any()
    packed.write(state, "m", signed, values)
    read = packed.read(state, "m", signed, torch.float32)
    assert state["m_codes"].dtype == torch.uint8 and state["m_scales"].shape == (8, 3)
    assert not read[3].any(), "a block of zeros"
    for start in range(0, 600, BLOCK):
        block, back = values[:, start : start + BLOCK], read[:, start : start + BLOCK]
        scale = block.abs().amax(1, keepdim=True).clamp_min(1e-30)
        book = codebook(signed, CPU).double()
        nearest = (block.div(scale)[..., None].double() - book).abs().amin(-1)
        torch.testing.assert_close(((block - back) / scale).abs().double(), nearest, rtol=0, atol=1e-6)
        assert (nearest <= book.diff().max() / 2).all()


def test_adamw_8bit_has_small_state_and_stays_near_adamw():
    model, exact = one_matrix(64, 1024), one_matrix(64, 1024)
    optimizers = build_optimizers([model], name="AdamW8bit", **SETTINGS)
    take_steps(model, optimizers, 20)
    take_steps(exact, build_optimizers([exact], name="AdamW", **SETTINGS), 20)
    tensors, _ = optimizer_state([model], optimizers)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 2 * 64 * 1024 * (1 + 4 / 256)
    moved = (exact.weight - one_matrix(64, 1024).weight).abs().mean()
    # the distance of bitsandbytes on such gradients, see docs/optimizers.md
    assert 0 < (model.weight - exact.weight).abs().mean() < 0.02 * moved


LAYOUTS = {"rows": (Shard(0),), "columns": (Shard(1),), "replicas": (Replicate(),)}


def sharded_step(name, options, layout, shape, dtype):
    """Take steps with a sharded weight; return the full weight."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = one_matrix(*shape, dtype=dtype)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, LAYOUTS[layout]))
    take_steps(model, build_optimizers([model], name=name, options=options, **SETTINGS))
    return model.weight.detach().full_tensor()


MOVES = [
    ("AdamW8bit", {}, torch.float32),
    ("AdamWBF16", {"rounding": "stochastic"}, torch.bfloat16),
    ("AdamWBF16", {"rounding": "kahan"}, torch.bfloat16),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, options, dtype", MOVES, ids=lambda value: str(value))
def test_a_shard_steps_as_the_full_tensor_bit_for_bit(name, options, dtype, layout):
    """A shard has the 8-bit blocks and random bits of the full tensor; halving 700 columns cuts a block in two."""
    shape = (7, 700)
    reference = one_matrix(*shape, dtype=dtype)
    take_steps(reference, build_optimizers([reference], name=name, options=options, **SETTINGS))
    for part in run_ranks(2, sharded_step, name, options, layout, shape, dtype):
        assert torch.equal(part, reference.weight.detach())


PIECEWISE = [*MOVES, ("AdamW8bit", {}, torch.float64), ("Lion", {}, torch.float32), ("Lion", {}, torch.bfloat16)]


def steps_of(name, options, dtype, shapes):
    """Take steps with weights of these shapes; return the weights and the tensors of their state."""
    model = nn.ParameterList(random(*shape, seed=number).to(dtype) for number, shape in enumerate(shapes))
    settings = SETTINGS if OPTIMIZERS[name].shared else SETTINGS | {"shared": {}}
    optimizers = build_optimizers([model], name=name, options=options, **settings)
    take_steps(model, optimizers)
    return [*model, *optimizer_state([model], optimizers)[0].values()]


@pytest.mark.parametrize("name, options, dtype", PIECEWISE, ids=str)
def test_pieces_of_a_shard_step_as_all_of_it_bit_for_bit(name, options, dtype, monkeypatch):
    shapes = [(64, 1024), (7, 700), (3, 8, 300), (5000,), (9,), ()]
    expected = steps_of(name, options, dtype, shapes)
    monkeypatch.setattr("torchtitan.optimizers.layout.ON_CPU", 1000)
    for part, tensor in zip(steps_of(name, options, dtype, shapes), expected, strict=True):
        assert torch.equal(part, tensor)


def test_one_piece_is_rehearsed():
    with FakeTensorMode():
        embedding = torch.empty(128256, 4096)
    assert list(pieces_of(embedding)) == [(slice(0, 512),)]
    assert len(list(pieces_of(torch.empty(128, 4096)))) == 2
    assert len(list(pieces_of(torch.empty(2**12, 256), 256))) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_in_8_bits_is_a_step_of_unpacked_moments(dtype):
    model, expected = one_matrix(40, 700, dtype=dtype), one_matrix(40, 700, dtype=dtype)
    take_steps(model, build_optimizers([model], name="AdamW8bit", **SETTINGS))
    adam, state, group = Adam(packed=True), {}, {**SETTINGS["shared"], "lr": 0.01}
    layout = Layout.of(expected.weight)
    adam.begin(state, layout, group, dtype, CPU)
    for step in range(4):
        change = adam.change(random(40, 700, seed=100 * step).to(dtype), layout, state, group, 0.01)
        expected.weight.data.mul_(1 - 0.01 * 0.1).add_(change)
    assert torch.equal(model.weight, expected.weight)


COMPILED = [(*move, 1) for move in MOVES + PIECEWISE[-2:-1]]
COMPILED += [("Adafactor", {}, torch.float32, 5), ("APOLLO", {"rank": 8, "targets": ["*"]}, torch.float32, 5)]


@pytest.mark.parametrize("name, options, dtype, graphs", COMPILED, ids=str)
@pytest.mark.parametrize("with_tensors", sorted({True, fused.IS_COMPILED_FOR_EACH_FLOAT}))
def test_a_compiled_step_is_that_of_eager(name, options, dtype, graphs, with_tensors, monkeypatch):
    """The compiler fuses or splits products and sums, so that last bits differ. It compiles once for all shapes.

    Without its own rounding, the compiled form of kahan would find that rounding loses nothing. `with_tensors`: numbers
    arrive as tensors, as before torch 2.13.
    """
    monkeypatch.setattr(fused, "IS_COMPILED_FOR_EACH_FLOAT", with_tensors)
    shapes = [(32, 512), (48, 768), (16, 1024)]
    eager = steps_of(name, options, dtype, shapes)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(Fused, "_compiles", lambda self, first: True)
    for tensor, expected in zip(steps_of(name, options, dtype, shapes), eager, strict=True):
        differs = ~torch.isclose(tensor.double(), expected.double(), rtol=2**-7, atol=1e-7)
        assert differs.double().mean() < 0.01
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_moments_compiled_for_a_cpu_have_the_bits_of_eager(monkeypatch):
    """Two steps from zeros, also with blocks of zeros, of the smallest floats, and gradients that are not finite."""
    shape = (ON_CPU // BLOCK, BLOCK)
    gradient = random(*shape) * torch.logspace(-30, 30, shape[0])[:, None]
    gradient[0], gradient[1, 7], gradient[2, 8], gradient[3] = 0, torch.nan, torch.inf, 1e-45 * torch.arange(BLOCK)
    tables = tuple(table(signed, CPU) for table in (codebook, code_table) for signed in (True, False))

    def two_steps(move: Callable) -> list[torch.Tensor]:
        codes = [torch.full(shape, zero, dtype=torch.uint8) for zero in (127, 0)]
        scales = [torch.zeros(shape[0], 1) for _ in codes]
        packing = adam_step.PackingTables((0, 0), tables)
        for _ in range(2):
            both = move(codes, scales, gradient, (0.9, 0.95), packing, torch.float32, True)
        return [*codes, *scales, *both]

    expected = two_steps(adam_step._move_packed)
    monkeypatch.setattr(Fused, "_compiles", lambda self, first: True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for result, eager in zip(two_steps(adam_step._fused_move_packed), expected, strict=True):
        torch.testing.assert_close(result, eager, rtol=0, atol=0, equal_nan=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name, options", [("Adafactor", {"beta1": 0.9}), ("Muon", {"targets": ["*"]})])
def test_a_shard_steps_as_the_full_tensor_up_to_order_of_sums(name, options, layout):
    options = options | ({"precision": "float32"} if name == "Muon" else {})
    shape = (9, 14)
    reference = one_matrix(*shape, dtype=torch.float64)
    take_steps(reference, build_optimizers([reference], name=name, options=options, **SETTINGS))
    tolerance = 1e-5 if name == "Muon" else 1e-12  # it multiplies in float32
    for part in run_ranks(2, sharded_step, name, options, layout, shape, torch.float64):
        torch.testing.assert_close(part, reference.weight.detach(), rtol=tolerance, atol=tolerance)


def test_muon_equals_torchs_bit_for_bit():
    for shape in ((12, 20), (20, 12)):
        ours, torch_model = one_matrix(*shape), one_matrix(*shape)
        take_steps(ours, build_optimizers([ours], name="Muon", options={"targets": ["*"]}, **SETTINGS))
        take_steps(torch_model, torch.optim.Muon(torch_model.parameters(), 0.01, 0.1, adjust_lr_fn="match_rms_adamw"))
        assert torch.equal(ours.weight, torch_model.weight)
    original = one_matrix(20, 12)
    take_steps(
        original,
        build_optimizers([original], name="Muon", options={"targets": ["*"], "adjust": "original"}, **SETTINGS),
    )
    torch_model = one_matrix(20, 12)
    take_steps(torch_model, torch.optim.Muon(torch_model.parameters(), 0.01, 0.1))
    assert torch.equal(original.weight, torch_model.weight) and not torch.equal(original.weight, ours.weight)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(12, 20), (20,)])
def test_adafactor_equals_that_of_transformers(shape, beta1):
    ours, hf_model = one_matrix(*shape), one_matrix(*shape)
    take_steps(ours, build_optimizers([ours], name="Adafactor", lr=0.01, weight_decay=0.1, options={"beta1": beta1}))
    fixed = dict(scale_parameter=False, relative_step=False, warmup_init=False)
    take_steps(hf_model, TheirAdafactor(hf_model.parameters(), 0.01, beta1=beta1 or None, weight_decay=0.1, **fixed))
    torch.testing.assert_close(ours.weight, hf_model.weight, rtol=1e-6, atol=1e-7)


def test_ten_thousand_small_changes_reach_a_weight_in_bfloat16():
    """Each change is 1e-4, too small for a bfloat16 at 1.0; the exact sum is 2.0."""
    plain, kahan, chance = (torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(3))
    lost, change = torch.zeros(64, 64, dtype=torch.bfloat16), torch.full((64, 64), 1e-4)
    for step in range(10_000):
        plain += change.bfloat16()
        add_with_lost(kahan, lost, change, 1.0)
        if step % 10 == 0:  # ten times as large and as rare: the same expectation, and faster
            chance = stochastically_rounded(chance.float() + 10 * change, step, (0, 0))
    assert (plain == 1).all()
    total = kahan.double() + lost.double()
    assert (total - 2).abs().max() < 0.05  # the compensation has 8 bits too
    # 4096 random walks of 1000 steps of at most half a gap (2^-8) each: 5 standard deviations of their mean
    assert abs(chance.double().mean() - 2) < 5 * 2**-8 * 1000**0.5 / 64


def test_weight_decay_too_small_for_bfloat16_is_not_lost():
    weight, lost = torch.ones(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.bfloat16)
    for _ in range(1000):
        add_with_lost(weight, lost, torch.zeros(16), 1 - 1e-4)
    assert (weight.float() + lost.float()).mean() == pytest.approx((1 - 1e-4) ** 1000, rel=0.01)


def test_stochastic_rounding_keeps_exact_and_non_finite_values():
    values = torch.tensor([1.0, -2.5, 0.0, float("inf"), float("-inf")])
    assert torch.equal(stochastically_rounded(values, 1, (0,)).float(), values)
    assert stochastically_rounded(torch.tensor([float("nan")]), 1, (0,)).isnan()
    assert torch.equal(
        stochastically_rounded(torch.full((3, 5), 1.001), 1, (0, 0))[1:, 2:],
        stochastically_rounded(torch.full((2, 3), 1.001), 1, (1, 2)),
    )


def test_keyed_numbers_of_a_part_are_normal_and_those_of_the_full_matrix():
    matrix = random_draws.normal("key", (0, 0), (300, 400), CPU)
    assert torch.equal(random_draws.normal("key", (20, 30), (7, 9), CPU), matrix[20:27, 30:39])
    assert not torch.equal(random_draws.normal("other", (0, 0), (300, 400), CPU), matrix)
    assert abs(matrix.mean()) < 5 / 120_000**0.5 and abs(matrix.var() - 1) < 5 * (2 / 120_000) ** 0.5
    rows = matrix @ matrix.T / 400 - torch.eye(300)
    assert rows.abs().max() < 6 / 400**0.5  # 90 000 of them


PLACEMENTS = {  # mesh axes, and placements of a matrix [12, 8] under FSDP, HSDP, FSDP with tensor parallel
    (2,): [[Shard(0)], [Shard(1)]],
    (2, 2): [
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [Replicate(), Replicate()],
    ],
}


def work_by_owners(axes, in_full):
    """Return this rank's errors, the rank that worked on each task, the number of own tasks and the bytes sent."""
    mesh = init_device_mesh("cpu", axes)
    cases = [(layout, size) for layout in PLACEMENTS[axes] for size in ((12, 8), (7, 5), (1, 3))]
    cases = [case for case in cases if case[1] == (12, 8) or not isinstance(case[0][0], _StridedShard)]
    matrices = [random(*size, seed=seed) for seed, (_, size) in enumerate(cases)]
    layouts = [Layout(size, mesh, tuple(placements)) for placements, size in cases]
    tasks = [layout.placed(layout.part(m).clone()) for m, layout in zip(matrices, layouts, strict=True)]
    worked, traffic = [], []

    def work(task, matrix):
        worked.append(task)
        return 2 * matrix + dist.get_rank()

    def count(output, tensor, received, sent, group):
        traffic.append(sum(sent) - sent[dist.get_rank(group)])
        return original(output, tensor, received, sent, group)

    original, dist.all_to_all_single = dist.all_to_all_single, count
    try:
        results = {"result": lambda task: torch.empty(task.shape)} if in_full else {}
        answers = list(by_owners(tasks, Layout.of, lambda task: task.to_local(), work, **results))
    finally:
        dist.all_to_all_single = original
    errors = []
    for number, (task, answer) in enumerate(answers):
        expected = 2 * matrices[number] + number % mesh.size()
        assert task is tasks[number]
        expected = expected if in_full else layouts[number].part(expected)
        errors.append((answer - expected).abs().max().item() if expected.numel() else 0.0)
    return errors, len(worked), sum(traffic), sum(m.numel() for m in matrices)


@pytest.mark.parametrize("in_full", [False, True])
@pytest.mark.parametrize("axes", [(2,), (2, 2)])
def test_owners_work_on_full_matrices_and_ranks_receive_their_shards(axes, in_full):
    ranks = 2 ** len(axes)
    answers = run_ranks(ranks, work_by_owners, axes, in_full)
    for errors, worked, _, _ in answers:
        assert max(errors) == 0 and worked in (len(errors) // ranks, len(errors) // ranks + 1)
    total, numbers = sum(sent for _, _, sent, _ in answers), answers[0][-1]
    # A shard of each matrix goes to its owner and back. Without owners each rank would need the other shards of all.
    assert total <= 2 * numbers * (ranks - 1) / ranks if axes == (2,) else total <= 3 * numbers


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.state_size])
def test_predicted_optimizer_state_has_the_real_size(name):
    model = nn.ModuleDict({"attention": nn.Linear(300, 40), "output": nn.Linear(70, 80), "small": nn.Linear(6, 5)})
    optimizers = build_optimizers(
        [model], name=name, **SETTINGS if OPTIMIZERS[name].shared else SETTINGS | {"shared": {}}
    )
    take_steps(model, optimizers, 1)
    spec = OPTIMIZERS[name]
    options = spec.arguments(SETTINGS["shared"], {})
    tensors, _ = optimizer_state([model], optimizers)
    for parameter, tensor in model.named_parameters():
        predicted = spec.state_size(options, parameter, tuple(tensor.shape))
        num_bytes = sum(t.nbytes for key, t in tensors.items() if key.startswith(f"optimizer.state.{parameter}."))
        assert num_bytes == predicted.values * 4 + predicted.bytes + predicted.everywhere * 4, parameter


def test_adamw_8bit_is_close_to_bitsandbytes():
    """Both are much closer to each other than to AdamW: codes are the same, only last bits of scales differ."""
    weights = {}
    for name in ("AdamW8bit", "AdamW"):
        model = one_matrix(*PACKED)
        model.weight.data = normal(*PACKED, seed=0, dtype=torch.float32)
        shared = dict(beta1=0.9, beta2=0.999, eps=1e-8)
        optimizers = build_optimizers([model], name=name, lr=0.01, weight_decay=0.1, shared=shared)
        for step in range(10):
            model.weight.grad = scaled(step)
            optimizers.step()
        weights[name] = model.weight.detach()
    recorded_weights = recorded()["adamw_8bit"]
    ours, exact = ((weights[name] - recorded_weights).abs().mean() for name in ("AdamW8bit", "AdamW"))
    assert ours < 2e-5 and exact > 10 * ours
