"""FSDP's quantized collectives: error bounds, equal weights on all ranks, bytes, and losses over 150 steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.plans.combinations import Combination
from tests.support import table_rows
from tests.support.pool import run_ranks
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.parallelisms import quantized_collectives
from torchtitan.parallelisms.data_parallel import fsdp_modules
from torchtitan.parallelisms.fsdp_messages import BLOCK, message_bytes, split_parts
from torchtitan.parallelisms.quantized_collectives import (
    QuantizedAllGather,
    QuantizedReduceScatter,
    error_bound,
    pack,
    reduction_hops,
    unpack,
)
from torchtitan.planner.rehearsal import rehearse
from torchtitan.planner.time.traffic import Traffic
from torchtitan.training.reporting import describe_quantized_messages

SIZES = [43, 32]
"""Parts of a rank's shard: no block spans two of them."""


def largest_of_blocks(rows, sizes):
    """Return the largest absolute value of each number's block, in the shape of rows [R, N]."""
    parts = []
    for part in rows.split(sizes, 1):
        padded = torch.nn.functional.pad(part, (0, -part.size(1) % BLOCK))
        largest = padded.abs().view(len(rows), -1, BLOCK).amax(2)
        parts.append(largest.repeat_interleave(BLOCK, 1)[:, : part.size(1)])
    return torch.cat(parts, 1)


def numbers(rows, size, dtype=torch.float32, seed=0):
    """Draw numbers of very different blocks [rows, size]."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-20, 10, size).to(dtype)
    return torch.randn(rows, size, generator=generator, dtype=dtype) * scales


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sizes", [[1], [31], [32, 64], [4097], [1, 31, 33, 8]], ids=str)
def test_numbers_change_by_at_most_the_bound(bits, sizes):
    rows = numbers(3, sum(sizes))
    message = pack(rows, sizes, bits)
    assert message.dtype == torch.uint8 and message.shape == (3, message_bytes(sizes, bits))
    error = (unpack(message, sizes, bits) - rows).abs()
    assert (error <= error_bound(largest_of_blocks(rows, sizes), bits)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_every_largest_value_of_a_block(bits):
    """All mantissas of a block's largest value, with many values below it: within the bound, and close to it."""
    largest = torch.linspace(1, 2, 4097)[:, None]
    rows = torch.cat([largest, largest * torch.linspace(-1, 1, BLOCK - 1)], dim=1)
    error = (unpack(pack(rows, [BLOCK], bits), [BLOCK], bits) - rows).abs() / error_bound(largest, bits)
    assert 0.95 < error.max() <= 1


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_representable_does_not_change(bits):
    """Integers times a power of two arrive exactly, in bfloat16 too as they have at most 8 bits; zeros stay zeros."""
    top = 2 ** (bits - 1) - 1
    integers = torch.randint(-top, top + 1, (3, 4, BLOCK), generator=torch.Generator().manual_seed(0)).float()
    integers[..., -1] = top
    rows = (integers * 2.0 ** torch.tensor([-100, 0, 90])[:, None, None]).flatten(1)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(unpack(pack(rows.to(dtype), [4 * BLOCK], bits), [4 * BLOCK], bits).to(dtype), rows.to(dtype))
    assert torch.equal(unpack(pack(torch.zeros(2, 40), [40], bits), [40], bits), torch.zeros(2, 40))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_not_finite_numbers_are_not_hidden(bits, value):
    """Their block arrives without a finite number, so that the guards see it; other blocks are as before."""
    rows = numbers(1, 96)
    expected = unpack(pack(rows, [96], bits), [96], bits)
    rows[0, 40] = value
    received = unpack(pack(rows, [96], bits), [96], bits)
    assert not received[0, 32:64].isfinite().any()
    assert torch.equal(received[0, :32], expected[0, :32]) and torch.equal(received[0, 64:], expected[0, 64:])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("most", [1, 32, 100, 4096])
@pytest.mark.parametrize("sizes", [[1], [64], [43, 32], [1, 31, 33, 8, 500], [4097]], ids=str)
def test_pieces_have_the_blocks_of_the_row(bits, most, sizes):
    pieces = list(split_parts(sizes, most))
    assert all(0 < sum(piece) <= max(BLOCK, most) for piece in pieces)
    rows = numbers(3, sum(sizes))
    columns = rows.split([sum(piece) for piece in pieces], 1)
    messages = [pack(part, piece, bits) for part, piece in zip(columns, pieces, strict=True)]
    assert torch.equal(torch.cat(messages, 1), pack(rows, sizes, bits))
    assert len(list(split_parts(sizes, 10**6))) == 1


def with_small_pieces(bits, inner):
    """Return the results of `gathered_and_reduced` in pieces of a block of each of 4 ranks, which cut a parameter."""
    before, quantized_collectives.PIECE = quantized_collectives.PIECE, 4 * BLOCK
    try:
        return gathered_and_reduced(bits, inner)
    finally:
        quantized_collectives.PIECE = before


@pytest.mark.parametrize("bits, inner", [(8, 1), (4, 2)])
def test_pieces_change_no_bits(bits, inner):
    results = (run_ranks(4, function, bits, inner) for function in (gathered_and_reduced, with_small_pieces))
    for whole, pieces in zip(*results, strict=True):
        assert np.array_equal(whole[0], pieces[0]) and np.array_equal(whole[1], pieces[1])
        assert len(pieces[2]) == 3 * len(whole[2])
        assert sum(sent for *_, sent in pieces[2]) == sum(sent for *_, sent in whole[2])


def gathered_and_reduced(bits, inner):
    """Return the numbers that this rank gathers and reduces, and the traffic of the reduction."""
    ranks, rank, world = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    output, sums = torch.empty(ranks * sum(SIZES), dtype=torch.bfloat16), torch.empty(sum(SIZES))
    QuantizedAllGather(ranks, SIZES)(output, numbers(1, sum(SIZES), torch.bfloat16, seed=rank)[0], world)
    hops = reduction_hops(DeviceMesh("cpu", torch.arange(ranks)), inner) if inner > 1 else []
    with Traffic() as traffic:
        gradients = numbers(ranks, sum(SIZES), seed=rank).flatten()
        QuantizedReduceScatter(bits, hops, SIZES)(sums, gradients, world, op=None)
    return output.float().numpy(), sums.numpy(), [(e.kind, e.group, e.sent) for e in traffic.exchanges]


@pytest.mark.parametrize("bits, inner", [(8, 1), (4, 1), (8, 2), (4, 2)])
def test_collectives_of_four_ranks(bits, inner):
    """Parameters are equal on all ranks, and the errors of sums are bounded by the messages in them."""
    results = run_ranks(4, gathered_and_reduced, bits, inner)
    shards = torch.cat([numbers(1, sum(SIZES), torch.bfloat16, seed=rank).float() for rank in range(4)])
    assert all(np.array_equal(gathered, results[0][0]) for gathered, _, _ in results)
    error = (torch.from_numpy(results[0][0]).view(4, -1) - shards).abs()
    assert error.max() > 0 and (error <= error_bound(largest_of_blocks(shards, SIZES), 8)).all()
    gradients = torch.stack([numbers(4, sum(SIZES), seed=rank) for rank in range(4)])  # [from, for, N]
    message = message_bytes(SIZES, bits)
    for rank, (_, sums, traffic) in enumerate(results):
        summands = gradients[:, rank]
        errors = error_bound(largest_of_blocks(summands, SIZES), bits)
        errors[rank] = 0
        if inner == 1:
            assert traffic == [("all_to_all", (0, 1, 2, 3), 3 * message)]
        else:
            other = (rank + 2) % 4
            neighbors, places = sorted((rank, rank ^ 1)), sorted((rank, other))
            assert traffic == [("all_to_all", tuple(neighbors), 2 * message), ("all_to_all", tuple(places), message)]
            errors[other] = 0  # which adds its summand unrounded, and then rounds the sum
            partial_sum = (summands[other].abs() + summands[other ^ 1].abs() + errors[other ^ 1])[None]
            errors[other] = error_bound(largest_of_blocks(partial_sum, SIZES), bits)[0]
        error = (torch.from_numpy(sums).double() - summands.double().sum(0)).abs()
        assert (error <= errors.sum(0) + 1e-6 * summands.abs().sum(0)).all()


def test_a_unit_with_an_unused_parameter_is_refused():
    reduction, sums = QuantizedReduceScatter(8, [], SIZES), torch.empty(SIZES[0])
    message = 'only 43 of 75 numbers .*parallelism.fsdp_quantized_reduce = "none"'
    with pytest.raises(JobError, match=message):
        reduction(sums, torch.ones(2 * SIZES[0]), None, op=None)


def gathered_again():
    """Return whether 2 neighbors of 4 ranks gather for backward the numbers that all gathered for forward.

    FSDP gives each neighbor half of every parameter: two whole shards of forward, one after the other.
    """
    rank, world, size = dist.get_rank(), dist.group.WORLD, sum(SIZES)
    gather, forward = QuantizedAllGather(4, SIZES), torch.empty(4 * size, dtype=torch.bfloat16)
    gather(forward, numbers(1, size, torch.bfloat16, seed=rank)[0], world)
    parameters = [part.reshape(2, -1) for part in forward.view(4, size).split(SIZES, 1)]
    halves, backward = torch.cat(parameters, 1), torch.empty(4 * size, dtype=torch.bfloat16)
    neighbors = reduction_hops(DeviceMesh("cpu", torch.arange(4)), 2)[0]
    gather(backward, halves[rank % 2], neighbors)
    return torch.equal(backward.view(2, -1), halves)


def test_a_second_gather_rounds_nothing():
    assert all(run_ranks(4, gathered_again))


TWO_MACHINES = Combination(ranks=4, dp_shard=4, precision="bfloat16")
"""Of two ranks each: 0 and 1, 2 and 3."""
ZERO_PLUS_PLUS = replace(TWO_MACHINES, second_shards=2, gather_int8=True, reduce_bits=4)


def bytes_of_a_step(row):
    """Return the bytes that this rank sends in a step: all, and those between machines of two ranks."""
    model, full_batch = table_rows.assembled(row), table_rows.batch()
    part = {name: full_batch[name][model.dims.dp_rank(model.mesh) :: model.dims.dp] for name in ("tokens", "labels")}
    model.forward_backward(part, 100)
    with Traffic() as traffic:
        model.forward_backward(part, 100)
    machine = dist.get_rank() // 2
    share_of_others = [sum(rank // 2 != machine for rank in e.group) / (len(e.group) - 1) for e in traffic.exchanges]
    sent = [float(exchange.sent) for exchange in traffic.exchanges]
    return sum(sent), sum(size * share for size, share in zip(sent, share_of_others, strict=True))


def test_bytes_of_two_machines_are_at_most_three_tenths():
    """Without: two gathers in bfloat16 and a reduction in float32. With: one gather of all shards and one inside a
    machine, in int8, and a reduction in int4."""
    exact, quantized = (run_ranks(4, bytes_of_a_step, row) for row in (TWO_MACHINES, ZERO_PLUS_PLUS))
    for (everything, between), (all_quantized, between_quantized) in zip(exact, quantized, strict=True):
        assert between_quantized <= 0.17 * between and all_quantized <= 0.3 * everything


def weights_of_forward_and_backward(row):
    """Return whether a block's first linear has equal weights in forward and backward, their type and values."""
    model, full_batch = table_rows.assembled(row), table_rows.batch()
    part = {name: full_batch[name][model.dims.dp_rank(model.mesh) :: model.dims.dp] for name in ("tokens", "labels")}
    linear = next(module for module in fsdp_modules(model.parts[0])[1].modules() if isinstance(module, torch.nn.Linear))
    passes = []
    linear.register_forward_hook(lambda module, *_: passes.append(module.weight.detach().clone()))
    linear.register_full_backward_hook(lambda module, *_: passes.append(module.weight.detach().clone()))
    model.forward_backward(part, 100)
    forward, backward = passes
    return torch.equal(forward, backward), forward.dtype, forward.float().numpy()


@pytest.mark.parametrize("second_shards", [0, 2])
def test_all_ranks_and_both_passes_compute_with_the_same_weights(second_shards):
    results = run_ranks(4, weights_of_forward_and_backward, replace(ZERO_PLUS_PLUS, second_shards=second_shards))
    assert all(equal and dtype == torch.bfloat16 for equal, dtype, _ in results)
    assert all(np.array_equal(weights, results[0][2]) for *_, weights in results)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel_ranks_sum_their_copies_alike(sequence_parallel):
    """Norms are copied on both ranks, between matrices that these split: with other scales copies would drift apart."""
    row = Combination(ranks=4, dp_shard=2, tp=2, gather_int8=True, reduce_bits=4, sequence_parallel=sequence_parallel)
    (_, norm, grads, *_), *other_ranks = run_ranks(4, table_rows.run_row, row)
    for _, other_norm, other_grads, *_ in other_ranks:
        assert norm == other_norm and all(np.array_equal(grad, other_grads[name]) for name, grad in grads.items())


JOB = ["--model.tokenizer_path=bytes", "--model.overrides={n_layers = 1, dim = 64}", "--training.seq_len=32"]
LOSSY = ["--parallelism.fsdp_quantized_gather=int8", "--parallelism.fsdp_quantized_reduce=int4"]


def test_the_start_of_a_run_says_what_is_lossy():
    both = "ranks send parameters in int8 and gradients in int4, which is lossy"
    assert describe_quantized_messages(load([*JOB, *LOSSY]).parallelism).startswith(both)
    assert describe_quantized_messages(load([*JOB, LOSSY[1]]).parallelism).startswith("ranks send gradients in int4,")
    assert describe_quantized_messages(load(JOB).parallelism) == ""


def test_an_estimate_knows_the_groups_of_second_shards():
    """Of rank 5 of 8: gathers of backward and the first sum among 4 neighbors, the second sum with rank 1."""
    config = load([*JOB, *LOSSY, "--parallelism.fsdp_reshard_after_forward=4"])
    rehearsed = rehearse(ResolvedJob(config, 8), 5)
    assert rehearsed.groups["inner shards"] == (4, 5, 6, 7) and rehearsed.groups["outer shards"] == (1, 5)
    calls = {(axis, kind): count for (axis, kind, unit), count in rehearsed.sent.items() if unit == "calls"}
    reductions = 3  # of the block, the head and the embedding
    assert calls["inner shards", "all_to_all"] == calls["outer shards", "all_to_all"] == reductions
    assert calls["inner shards", "all_gather"] == 1 and calls["dp_shard", "all_gather"] == 3


def losses_of_150_steps(row):
    """Train on a stream of repeated motifs with noise; return the losses of all ranks' batches, and in evaluation."""
    model = table_rows.assembled(row)
    optimizer = torch.optim.AdamW([p for _, p in model.named_parameters()], lr=3e-3)
    generator, losses = torch.Generator().manual_seed(3), []
    motifs = torch.randint(0, 100, (16, 8), generator=generator)
    for _ in range(150):
        chosen = torch.randint(0, 16, (8, 4), generator=generator)
        text = motifs[chosen].flatten(1)
        noise = torch.rand(text.shape, generator=generator) < 0.1
        text = torch.where(noise, torch.randint(0, 100, text.shape, generator=generator), text)[:, :25]
        part = text[model.dims.dp_rank(model.mesh) :: model.dims.dp]
        loss = model.forward_backward({"tokens": part[:, :-1], "labels": part[:, 1:]}, 8 * 24)
        model.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total.numpy()


def test_losses_of_150_steps_are_within_noise():
    """The mean of the last fifty losses, against its standard error from step to step."""
    exact, quantized = (run_ranks(2, losses_of_150_steps, row)[0] for row in LEARNED)
    noise = np.std(exact[-50:]) / 50**0.5
    assert exact[:10].mean() > 1.5 * exact[-50:].mean(), "nothing was learned"
    assert abs(exact[-50:].mean() - quantized[-50:].mean()) < 2 * noise
    assert np.abs(exact - quantized).max() > 0


LEARNED = [
    Combination(ranks=2, dp_shard=2, precision="bfloat16"),
    Combination(ranks=2, dp_shard=2, precision="bfloat16", gather_int8=True, reduce_bits=4),
]
