"""Settings of fully_shard. The table of combinations compares its gradients."""

import time
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plans.combinations import Combination
from tests.support import table_rows
from tests.support.pool import run_ranks
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models.decoder import DECODER_PLAN
from torchtitan.parallelisms import data_parallel
from torchtitan.parallelisms.data_parallel import apply_data_parallel
from torchtitan.process.exit import failure_kind

MICROBATCHES, DISTINCT = 64, 4
PASSES = {"FSDP 2": dict(dp_shard=2), "DDP 2": dict(dp_replicate=2)}
"""The second reduces gradients once, after the last microbatch."""


@pytest.mark.parametrize("shape, sharded", [((8, 6, 16), 0), ((3, 8, 16), 1), ((3, 6, 16), 0)], ids=str)
def test_parts_of_a_quantized_stack_are_sharded_alike(shape, sharded):
    """Codes, scales and numbers of rows differ in the last dimension, which FSDP could shard if all weights were."""
    parts = [nn.Parameter(torch.empty(*shape[:2], last, dtype=torch.uint8), False) for last in (shape[2], 8, 1)]
    assert [data_parallel._shard_experts(8, part).dim for part in parts] == [sharded] * 3
    assert data_parallel._shard_experts(8, nn.Parameter(torch.empty(3, 6, 16))).dim == 2


def accumulation_errors(where):
    """Return relative errors of a step's gradient sum and of a sum in bfloat16.

    The reference is the sum in float64 of the microbatches' gradients, which are all computed in bfloat16.
    """
    row = Combination(ranks=2, **PASSES[where], precision="bfloat16")
    model, full_batch = table_rows.assembled(row), table_rows.batch()
    rows = {name: full_batch[name][:1] for name in ("tokens", "labels", "positions", "document_ids")}
    batches = [rows | {"tokens": (rows["tokens"] + number) % 100} for number in range(DISTINCT)]

    def gradients():
        parameters = [parameter for _, parameter in model.named_parameters()]
        assert all(parameter.grad.dtype == torch.float32 for parameter in parameters)
        flat_gradients = torch.cat([parameter.grad.full_tensor().flatten() for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        return flat_gradients

    ones = []
    for batch in batches:
        model.forward_backward(batch, 1)
        ones.append(gradients())
    exact = sum(one.double() for one in ones) * (MICROBATCHES // DISTINCT)
    narrow = torch.zeros((), dtype=torch.bfloat16)
    for number in range(MICROBATCHES):
        narrow = narrow + ones[number % DISTINCT].bfloat16()
        model.forward_backward(batches[number % DISTINCT], 1, is_last=number == MICROBATCHES - 1)
    return [float((sums.double() - exact).norm() / exact.norm()) for sums in (gradients(), narrow)]


@pytest.mark.parametrize("where", PASSES)
def test_gradients_of_many_microbatches_add_up_in_float32(where):
    """64 additions in float32 round by at most 5e-7 in total; each addition in bfloat16 rounds by 2^-9."""
    summed, narrow = run_ranks(2, accumulation_errors, where)[0]
    assert summed < 1e-6 and narrow > 1e-3


class Divided(TorchDispatchMode):
    """Records sizes of flat tensors that are divided by a number into another tensor."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() in ("aten::div.Scalar", "aten::div.Tensor") and args[0].dim() == 1 and args[0].numel() > 1000:
            self.sizes.append(args[0].numel())
        return op(*args, **(kwargs or {}))


def backward_over_one_rank(tied):
    """Return sizes of divided flat gradients, and the number of the model's FSDP units."""
    model = table_rows.build_plain(Combination(model="llama3.2" if tied else "llama3"))
    model.loss, batch = SummedCrossEntropy(num_chunks=2), table_rows.batch()
    types = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    apply_data_parallel(model, init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)), DECODER_PLAN, **types)
    loss = model(batch["tokens"], labels=batch["labels"])
    with Divided() as divided:
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return divided.sizes, len(model._get_fsdp_state()._state_ctx.all_states)


@pytest.mark.parametrize("tied", [False, True])
def test_over_one_rank_no_gradient_is_divided_by_one(tied):
    """Into a copy: of experts that no other rank has, 0.7 GB a layer. And the head has a unit, unless it is tied."""
    units = 1 + 3 + (not tied)
    assert run_ranks(1, backward_over_one_rank, tied) == [([], units)]


def gradients_over_replicas(row, overlapped):
    """Return gradients of a step, and the sums that are under way when backward has computed its last gradient."""
    function, pending = (data_parallel.adapt_to_gloo if overlapped else lambda module: None), []
    wait = data_parallel.DeferredGroup.wait
    count = patch.object(
        data_parallel.DeferredGroup, "wait", lambda self: (pending.append(len(self.pending)), wait(self))
    )
    with patch.object(data_parallel, "adapt_to_gloo", function), count:
        model = table_rows.assembled(row)
        for number in range(row.accumulation):
            samples = slice(number + 4 * model.dims.dp_rank(model.mesh), None, 2 * model.dims.dp)
            batch = {name: table_rows.batch()[name][samples] for name in ("tokens", "labels")}
            model.forward_backward(batch, 100, is_last=number == row.accumulation - 1)
    return [parameter.grad.to_local().numpy() for _, parameter in model.named_parameters()], pending


REPLICAS = [
    Combination(ranks=2, dp_replicate=2, precision="float32", accumulation=2),
    Combination(ranks=2, dp_replicate=2, precision="bfloat16"),
    Combination(ranks=4, dp_replicate=2, dp_shard=2, precision="float32", accumulation=2),
]


@pytest.mark.parametrize("row", REPLICAS, ids=str)
def test_sums_over_replicas_end_with_backward(row):
    """On a CPU the sum of each of 5 units is under way until the end of the last backward; no bit changes."""
    overlapped, plain = (run_ranks(row.ranks, gradients_over_replicas, row, choice) for choice in (True, False))
    for (gradients, pending), (expected, nothing) in zip(overlapped, plain, strict=True):
        assert all(map(np.array_equal, gradients, expected))
        assert pending == [0] * 5 * (row.accumulation - 1) + [1] * 5 and nothing == []


def exchanged_sum():
    """Return this rank's part of a sum in a module over three shards, and what the sum in rank order is."""
    linear = nn.Linear(4, 6, bias=False)
    fully_shard(linear, mesh=init_device_mesh("cpu", (3,)))
    linear.set_force_sum_reduction_for_comms(True)
    linear.set_gradient_divide_factor(1.0)
    data_parallel.adapt_to_gloo(linear)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    linear(inputs[dist.get_rank()]).sum().backward()
    expected = (inputs[0] + inputs[1] + inputs[2]).expand(2, -1)
    return linear.weight.grad.to_local().numpy(), expected.numpy()


def test_gradients_of_shards_are_summed_in_rank_order():
    """With the bits of a sum in float32 from the first rank to the last, on every rank."""
    for gradient, expected in run_ranks(3, exchanged_sum):
        assert np.array_equal(gradient, expected)


def backward_over_replicas():
    """Return sizes of divided flat gradients, and whether each unit's gradients are views of the buffer they fill."""
    model, batch = table_rows.assembled(Combination(ranks=2, dp_replicate=2)), table_rows.batch()
    loss = model.parts[0](tokens=batch["tokens"], labels=batch["labels"])
    buffers = []
    allocate = data_parallel.SingleBuffer.allocate

    def record(self, *args, **kwargs):
        buffers.append(allocate(self, *args, **kwargs))
        return buffers[-1]

    with Divided() as divided, patch.object(data_parallel.SingleBuffer, "allocate", record):
        loss.backward()
    return divided.sizes, [first is second for first, second in zip(buffers[::2], buffers[1::2], strict=True)]


def test_over_replicas_no_gradient_is_divided_or_copied():
    assert run_ranks(2, backward_over_replicas) == [([], [True] * 5)] * 2


def weights_of_three_steps(row):
    """Return, for steps after an update and after all parameters have moved, a linear's weights in forward and stored,
    and whether they share storage.
    """
    model, batch = table_rows.assembled(row), table_rows.batch()
    linear = next(module for module in model.parts[0].modules() if isinstance(module, nn.Linear))
    seen = []
    linear.register_forward_hook(lambda module, *_: seen.append(module.weight.detach()))
    results = []
    for _ in range(3):
        model.forward_backward({name: batch[name] for name in ("tokens", "labels")}, 100)
        used, stored = seen.pop(), linear.weight.to_local().detach()
        shares = used.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
        results.append((used.float().numpy().copy() if shares else None, stored.numpy().copy(), shares))
        with torch.no_grad():
            for _, parameter in model.named_parameters():
                parameter.to_local().mul_(2)
        if len(results) == 2:
            model.parts[0]._apply(lambda tensor: tensor.clone())
    return results


def test_replicas_compute_with_their_stored_parameters():
    """Without a copy, also after an update and after a move to other storage. Those of another type are cast."""
    for results in run_ranks(2, weights_of_three_steps, REPLICAS[0]):
        assert all(shares and np.array_equal(used, stored) for used, stored, shares in results)
        assert np.array_equal(results[2][1], 4 * results[0][1])
    for results in run_ranks(2, weights_of_three_steps, REPLICAS[1]):
        assert not any(shares for *_, shares in results)


def products_after_loads():
    """Return for parameters that begin at several places of their storage whether they are what is computed with."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    linear = nn.Linear(4, 4, bias=False)
    fully_shard(linear, mesh=mesh)
    data_parallel.adapt_to_gloo(linear)
    results = []
    for begin in (0, 16, 0, 32, 16):
        linear(torch.eye(4)).sum().backward()
        rows = torch.arange(64.0)[begin : begin + 16].view(4, 4)
        loaded = DTensor.from_local(rows, linear.weight.device_mesh, linear.weight.placements)
        linear.load_state_dict({"weight": loaded}, assign=True)
        results.append(torch.equal(linear(torch.eye(4)), rows.T))
    return results


def test_a_parameter_may_be_a_part_of_its_storage():
    assert run_ranks(1, products_after_loads) == [[True] * 5]


def gradients_of_two_steps(overlapped):
    """Return the sum of the gradients of two steps without zero_grad in between. The second rank is late."""
    with patch.object(data_parallel, "adapt_to_gloo", data_parallel.adapt_to_gloo if overlapped else lambda _: None):
        model = table_rows.assembled(REPLICAS[0])
    batch = {name: table_rows.batch()[name][dist.get_rank() :: 2] for name in ("tokens", "labels")}
    model.forward_backward(batch, 100)
    time.sleep(dist.get_rank() / 2)
    model.forward_backward(batch, 100)
    return [parameter.grad.to_local().numpy() for _, parameter in model.named_parameters()]


def test_gradients_of_two_steps_add_up_on_late_ranks():
    overlapped, plain = (run_ranks(2, gradients_of_two_steps, choice) for choice in (True, False))
    for gradients, expected in zip(overlapped, plain, strict=True):
        assert all(map(np.array_equal, gradients, expected))


def failure_without_a_peer(reduce_dtype):
    """Return type and kind of what backward raises on the first of two replicas, if the other takes no part."""
    group, single = dist.new_group(), [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    if dist.get_rank():
        return None
    module, mesh = nn.Linear(4, 4), DeviceMesh.from_group([group, single], "cpu", [[0], [1]], mesh_dim_names=("r", "s"))
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    data_parallel.adapt_to_gloo(module)
    _set_pg_timeout(timedelta(seconds=0.2), group)
    with pytest.raises(Exception) as caught:
        module(torch.ones(1, 4)).sum().backward()
    return caught.type, failure_kind(caught.value)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_a_lost_replica_is_no_failure_of_this_rank(reduce_dtype):
    """Sums in float32 are awaited at the end of backward, and others inside torch's all_reduce."""
    assert run_ranks(2, failure_without_a_peer, reduce_dtype) == [(RuntimeError, "peer"), None]


def gradients_after_another_forward(between):
    """Return the gradients of two blocks, the first of them frozen; maybe with a forward without gradients before."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)))
    blocks[0].requires_grad_(False)
    mesh = init_device_mesh("cpu", (2,))
    for module in (*blocks, blocks):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    data_parallel._prefetch_only_blocks_that_backward_reaches(blocks, list(blocks))
    loss = blocks(torch.ones(2, 4)).square().sum()
    if between:
        with torch.no_grad():
            blocks(torch.zeros(2, 4))
    loss.backward()
    return [parameter.grad.full_tensor().numpy() for parameter in blocks[1:].parameters()]


def test_backward_gathers_its_blocks_after_a_forward_without_gradients():
    between, plain = (run_ranks(2, gradients_after_another_forward, choice) for choice in (True, False))
    for gradients, expected in zip(between, plain, strict=True):
        assert len(gradients) == 8 and all(map(np.array_equal, gradients, expected))
