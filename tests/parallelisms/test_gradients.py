"""Corner cases of the gradient norm. test_combinations.py compares every plan's norm with one device."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.support.pool import run_ranks
from tests.support.shared_meshes import unshared_mesh
from torchtitan.parallelisms.gradients import clip_gradients


def test_a_rank_without_gradients_adds_zero_on_its_device():
    """Other pipeline ranks add their norms to it with a collective on that device."""
    frozen = nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    assert clip_gradients([frozen], 1.0).device.type == "meta"
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    assert clip_gradients(iter([frozen]), 1.0).item() == 0
    assert clip_gradients([], 0.0).item() == 0


def norm_over_equal_meshes() -> float:
    """Compute a norm where ranks 2 and 3 have the second gradient on an equal, but distinct mesh.

    DTensor's caches may cause this.
    """
    first, second = (unshared_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")) for _ in range(2))
    parameters = []
    for mesh in (first, second if dist.get_rank() >= 2 else first):
        value, grad = (DTensor.from_local(torch.full((2, 2), 3.0), mesh, [Shard(0), Shard(1)]) for _ in range(2))
        parameters.append(nn.Parameter(value))
        parameters[-1].grad = grad
    return clip_gradients(parameters, 0.0).item()


def test_equal_meshes_of_different_groups_give_the_same_norm_on_all_ranks():
    assert run_ranks(4, norm_over_equal_meshes) == pytest.approx([(2 * 16 * 9) ** 0.5] * 4)
