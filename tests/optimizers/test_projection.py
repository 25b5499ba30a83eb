"""GaLore on several ranks: shapes that do not divide, sharded state, and resumes on other numbers of ranks."""

import statistics

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support import jobs
from tests.support.galore_steps import Matrix, build_galore, take_steps
from tests.support.pool import run_ranks
from tests.support.random_tensors import random
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.build import Optimizers
from torchtitan.optimizers.layout import local

PLACEMENTS = {"rows": (Shard(0),), "columns": (Shard(1),), "replicas": (Replicate(),)}
UNEVEN = [(9, 14), (14, 9), (7, 7), (3, 11)]  # a fourth rank has no row of the last


def step_sharded(options, placement):
    """Return for each shape the gathered weight, this rank's bytes of the first moment, and the basis energy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for shape in UNEVEN:
        model = Matrix(*shape)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, PLACEMENTS[placement]))

        def gradient(step, parameter):
            return distribute_tensor(
                random(*parameter.shape, seed=step, dtype=torch.float64), mesh, PLACEMENTS[placement]
            )

        optimizer = build_galore(model, targets=["*"], rank=2, update_gap=2, **options)
        take_steps(model, optimizer, 5, gradient)
        moment_bytes = local(optimizer.state[model.weight].get("exp_avg", torch.empty(0))).nbytes
        measured = Optimizers([optimizer], OPTIMIZERS["GaLore"].measures).measured()
        results.append((model.weight.detach().full_tensor(), moment_bytes, measured["basis_energy"]))
    return results


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"side": "reverse_std"},
        {"side": "full"},
        {"residual": "fira"},
        {"inner": "adafactor"},
        {"inner": "adamw_8bit"},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shapes_that_do_not_divide_step_as_on_one_rank(ranks, options, placement):
    """Results equal those on one rank, and the state is sharded without duplication, for all sides and placements."""
    by_rank = run_ranks(ranks, step_sharded, options, placement)
    for shape, parts in zip(UNEVEN, zip(*by_rank, strict=True), strict=True):
        reference = Matrix(*shape)
        optimizer = build_galore(reference, targets=["*"], rank=2, update_gap=2, **options)
        take_steps(reference, optimizer, 5)
        energy = statistics.mean(optimizer.seen["basis_energy"])
        for part, _, measured in parts:
            # the order of sums differs, and then small square roots divide
            torch.testing.assert_close(part, reference.weight.detach(), rtol=1e-10, atol=1e-10)
            assert measured == pytest.approx(energy, rel=1e-12)
        if placement != "replicas" and options.get("side") != "full" and options.get("inner") != "adafactor":
            long_side = min(shape) if "side" in options else max(shape)
            assert sum(moment_bytes for _, moment_bytes, _ in parts) == 8 * 2 * long_side


def train_losses(argv):
    rows = jobs.train(argv)[0]
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(
    "options", ["{rank = 4, update_gap = 4}", '{rank = 4, update_gap = 4, inner = "adamw_8bit", residual = "fira"}']
)
def test_a_resume_between_refreshes_on_other_ranks(options, tmp_path):
    """Two steps on two ranks, one on one and three on four give the losses of six steps on one rank."""
    texts = jobs.write_texts(tmp_path / "data")

    def job(folder, **more):
        settings = dict(optimizer__name="GaLore", optimizer__options=options, optimizer__lr=1e-2, training__steps=6)
        settings |= dict(checkpoint__enable=True, checkpoint__interval=1, training__global_batch_size=8)
        return jobs.arguments(tmp_path / folder, texts, **(settings | more))

    (straight,) = run_ranks(1, train_losses, job("straight", training__local_batch_size=8))
    losses = []
    for ranks, until in ((2, 2), (1, 3), (4, 6)):
        more = dict(training__local_batch_size=8 // ranks, training__steps=until, lr_scheduler__total_steps=6)
        losses += run_ranks(ranks, train_losses, job("moved", **more))[0]
    assert losses[-6:] == pytest.approx(straight, rel=1e-4)
