"""GaLore on several ranks: shapes that do not divide, what each rank keeps, and runs that go on on others."""

import statistics

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support import jobs
from tests.support.pool import run_ranks
from tests.test_galore import Matrix, build_galore, take_steps
from tests.test_own_optimizers import random
from torchtitan.optimizers import OPTIMIZERS
from torchtitan.optimizers.build import Optimizers
from torchtitan.optimizers.layout import local

CUT = {"rows": (Shard(0),), "columns": (Shard(1),), "replicas": (Replicate(),)}
UNEVEN = [(9, 14), (14, 9), (7, 7), (3, 11)]  # of the last a fourth rank has no row


def sharded(options, how):
    """Of each shape this rank's weight, whole, the bytes that it holds of the first moment, and the bases' energy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for shape in UNEVEN:
        model = Matrix(*shape)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, CUT[how]))

        def gradient(step, parameter):
            return distribute_tensor(random(*parameter.shape, seed=step, dtype=torch.float64), mesh, CUT[how])

        optimizer = build_galore(model, targets=["*"], rank=2, update_gap=2, **options)
        take_steps(model, optimizer, 5, gradient)
        held = local(optimizer.state[model.weight].get("exp_avg", torch.empty(0))).nbytes
        measured = Optimizers([optimizer], OPTIMIZERS["GaLore"].measures).measured()
        found.append((model.weight.detach().full_tensor(), held, measured["basis_energy"]))
    return found


@pytest.mark.parametrize("how", CUT)
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
def test_shapes_that_do_not_divide_step_as_the_whole(ranks, options, how):
    """And of what is kept each rank has its share and no more, whichever side is projected and whichever is cut."""
    by_rank = run_ranks(ranks, sharded, options, how)
    for shape, parts in zip(UNEVEN, zip(*by_rank, strict=True), strict=True):
        whole = Matrix(*shape)
        optimizer = build_galore(whole, targets=["*"], rank=2, update_gap=2, **options)
        take_steps(whole, optimizer, 5)
        energy = statistics.mean(optimizer.seen["basis_energy"])
        for part, _, measured in parts:
            # sums in another order, behind a division by roots of small squares
            torch.testing.assert_close(part, whole.weight.detach(), rtol=1e-10, atol=1e-10)
            assert measured == pytest.approx(energy, rel=1e-12)
        if how != "replicas" and options.get("side") != "full" and options.get("inner") != "adafactor":
            kept = min(shape) if "side" in options else max(shape)
            assert sum(held for _, held, _ in parts) == 8 * 2 * kept


def trained(argv):
    rows = jobs.train(argv)[0]
    return [row["loss"] for row in rows]


@pytest.mark.parametrize(
    "options", ["{rank = 4, update_gap = 4}", '{rank = 4, update_gap = 4, inner = "adamw_8bit", residual = "fira"}']
)
def test_a_run_goes_on_in_the_middle_of_a_period_on_other_ranks(options, tmp_path):
    """Two steps on two ranks, one on one, three on four: the losses of six steps on one."""
    texts = jobs.write_texts(tmp_path / "data")

    def job(folder, **more):
        words = dict(optimizer__name="GaLore", optimizer__options=options, optimizer__lr=1e-2, training__steps=6)
        words |= dict(checkpoint__enable=True, checkpoint__interval=1, training__global_batch_size=8)
        return jobs.arguments(tmp_path / folder, texts, **(words | more))

    (straight,) = run_ranks(1, trained, job("straight", training__local_batch_size=8))
    found = []
    for ranks, until in ((2, 2), (1, 3), (4, 6)):
        more = dict(training__local_batch_size=8 // ranks, training__steps=until, lr_scheduler__total_steps=6)
        found += run_ranks(ranks, trained, job("moved", **more))[0]
    assert found[-6:] == pytest.approx(straight, rel=1e-4)
