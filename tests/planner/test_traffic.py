"""Bytes and calls of every collective of a step are minimal: they equal the formulas below.

Each formula is {(kind, axis): (calls, bytes that a rank sends)}; a plan's formulas add up. They hold for any sizes.
"""

from collections import Counter
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.plans.combinations import Combination
from tests.support import table_rows
from tests.support.pool import run_ranks
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.planner.time.traffic import Traffic, axes_of

LAYERS, WIDTH = 3, table_rows.MICRO_SIZE["dim"]


def step(row):
    """Measure a second step: traffic of forward and backward, gloo's number of calls, and traffic of clipping."""
    torch._dynamo.reset()
    model = table_rows.assembled(row)
    full_batch = table_rows.batch()
    valid = int((full_batch["labels"] != IGNORE_INDEX).sum())
    size = table_rows.SAMPLES // model.dims.dp // row.accumulation
    local_batch = {
        name: full_batch[name][model.dims.dp_rank(model.mesh) :: model.dims.dp] for name in ("tokens", "labels")
    }
    for _ in range(2):
        with Traffic() as traffic, profile(activities=[ProfilerActivity.CPU]) as trace:
            for index in range(row.accumulation):
                part = {name: tensor[index * size : (index + 1) * size] for name, tensor in local_batch.items()}
                model.forward_backward(part, valid, is_last=index == row.accumulation - 1)
    with Traffic() as clipping:
        model.clip_gradients(1.0)
    axes = axes_of(model.mesh)
    issued = sum(event.name.startswith("gloo:") for event in trace.events())
    return traffic.totals(axes), issued, clipping.totals(axes)


def add(*parts):
    """Add formulas and drop entries without calls."""
    total = Counter()
    for part in parts:
        for key, (calls, sent) in part.items():
            total[key, "calls"] += calls
            total[key, "bytes"] += sent
    keys = {key for key, _ in total}
    return {key: (total[key, "calls"], total[key, "bytes"]) for key in keys if total[key, "calls"]}


def sizes(row):
    """Return elements of a rank before FSDP: (blocks, others). Tensor parallel splits matrices but not norms."""
    blocks = other_elements = 0
    for name, parameter in table_rows.build_plain(Combination(model=row.model)).named_parameters():
        elements = parameter.numel() // (1 if "norm" in name else row.tp)
        blocks, other_elements = (
            (blocks + elements, other_elements) if name.startswith("layers.") else (blocks, other_elements + elements)
        )
    return blocks, other_elements


def num_other_units(row):
    """Return the number of FSDP units other than blocks: the embedding, and last norm with head unless tied."""
    return 1 if table_rows.build_plain(Combination(model=row.model)).args.tied_embeddings else 2


def precision(row):
    """Return bytes per element of (activations and gathered parameters, reduced gradients)."""
    return (2 if row.precision == "bfloat16" else 4), 4


def fully_sharded(row):
    """FSDP gathers blocks for forward and again for backward, the other units once, and reduces gradients once.

    The head is a separate unit, so that its reduction, the largest, overlaps the backward of the blocks.
    """
    (blocks, other_elements), (gathered, reduced), n = sizes(row), precision(row), row.dp_shard
    part, times = Fraction(n - 1, n), row.accumulation if n > 1 else 0
    regathers = 1 if row.reshard else 0
    gather = part * gathered * ((1 + regathers) * blocks + other_elements)
    reduce = part * reduced * (blocks + other_elements)
    return {
        ("all_gather", "dp_shard"): (times * (LAYERS * (1 + regathers) + num_other_units(row)), times * gather),
        ("all_to_all", "dp_shard"): (times * (LAYERS + num_other_units(row)), times * reduce),
    }


def replicas(row):
    """Replicas sum FSDP's reduced gradients once per step, for any number of microbatches."""
    (blocks, other_elements), (_, reduced), r = sizes(row), precision(row), row.dp_replicate
    sent = Fraction(2 * (r - 1), r) * (blocks + other_elements) / row.dp_shard * reduced
    return {("all_reduce", "dp_replicate"): (LAYERS + num_other_units(row) if r > 1 else 0, sent)}


def tensor_parallel(row):
    """A layer has two tensor-parallel regions, each entered and left in forward and in backward.

    The embedding is only left, the head only entered. Full recompute repeats two borders of a layer; selective
    recompute saves their results.
    """
    activation, _ = precision(row)
    tokens = table_rows.SAMPLES * table_rows.SEQ_LEN // (row.dp_shard * row.dp_replicate)
    border_bytes = Fraction(row.tp - 1, row.tp) * tokens * WIDTH * activation
    recomputed = {"none": 0, "op": 0, "full": LAYERS, "2": (LAYERS + 1) // 2}[row.recompute]
    borders = 4 * LAYERS + 2 + 2 * recomputed
    calls = row.accumulation * borders
    if row.tp == 1:
        return {}
    if not row.sequence_parallel:  # an all-reduce to leave a region, and one in backward to enter
        return {("all_reduce", "tp"): (calls, 2 * borders * border_bytes)}
    return {(kind, "tp"): (calls, borders * border_bytes) for kind in ("all_gather", "reduce_scatter")}


def split_vocabulary(row):
    """The vocabulary-parallel loss sends three float32 numbers per token in two calls; else all logits are gathered."""
    tokens = table_rows.SAMPLES * table_rows.SEQ_LEN // (row.dp_shard * row.dp_replicate)
    pieces = row.accumulation * row.loss_chunks
    if row.tp == 1:
        return {}
    if row.loss_parallel:
        return {("all_reduce", "tp"): (2 * pieces, Fraction(2 * (row.tp - 1), row.tp) * 3 * tokens * 4)}
    vocab_size = table_rows.MICRO_SIZE["vocab_size"]
    return {("all_gather", "tp"): (pieces, Fraction(row.tp - 1, row.tp) * tokens * vocab_size * precision(row)[0])}


def norms(row):
    """Under sequence parallel a norm sees only a rank's tokens, so its gradient is summed over tensor-parallel ranks.

    With FSDP or bfloat16 each norm is summed in every microbatch, else all at once before clipping. Returns the
    formulas of backward and of clipping.
    """
    if row.tp == 1 or not row.sequence_parallel:
        return {}, {}
    sharded = row.dp_shard * row.dp_replicate > 1 or row.precision == "bfloat16"
    number, size = 2 * LAYERS + 1, precision(row)[0]
    sent = Fraction(2 * (row.tp - 1), row.tp) * number * WIDTH * size
    if sharded:
        return {("all_reduce", "tp"): (row.accumulation * number, row.accumulation * sent)}, {}
    return {}, {("all_reduce", "tp"): (1, sent)}


def clipping(row):
    """Clipping sums one number over each axis that shards gradients, for each set of axes that a parameter has."""
    number = {
        axis: (1, Fraction(2 * (n - 1), n) * 4) for axis, n in (("dp_shard", row.dp_shard), ("tp", row.tp)) if n > 1
    }
    both = dict(dp_shard=2) if len(number) == 2 else {}  # matrices are sharded on both, norms on dp_shard alone
    return {("all_reduce", axis): tuple(both.get(axis, 1) * x for x in value) for axis, value in number.items()}


FSDP2, FSDP4, HSDP = dict(ranks=2, dp_shard=2), dict(ranks=4, dp_shard=4), dict(ranks=4, dp_replicate=2, dp_shard=2)
DDP2, TP2, FSDP2_TP2 = dict(ranks=2, dp_replicate=2), dict(ranks=2, tp=2), dict(ranks=4, dp_shard=2, tp=2)
row_of = partial(Combination, precision="float32")
"""A row in float32, the default precision of the formulas."""
ROWS = [
    *(row_of(**plan) for plan in (FSDP2, FSDP4, HSDP, DDP2, TP2, FSDP2_TP2)),
    *(row_of(**plan, precision="bfloat16", accumulation=2) for plan in (FSDP2, HSDP, TP2, FSDP2_TP2)),
    *(row_of(**TP2, recompute=mode) for mode in ("full", "op", "2")),
    *(row_of(**TP2, sequence_parallel=False, recompute=mode) for mode in ("full", "op")),
    row_of(**FSDP2_TP2, recompute="full"),
    row_of(**FSDP2_TP2, sequence_parallel=False, recompute="op"),
    *(row_of(**plan, loss_chunks=3, model="llama3.2") for plan in (FSDP2, TP2, FSDP2_TP2)),
    row_of(**FSDP2, reshard=False),
    row_of(**FSDP2_TP2, loss_chunks=3, loss_parallel=False),
    row_of(ranks=4, tp=4, model="llama2"),
    row_of(ranks=4, dp_replicate=2, tp=2),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_traffic_equals_the_formulas(row):
    in_backward, in_clipping = norms(row)
    expected = add(fully_sharded(row), replicas(row), tensor_parallel(row), split_vocabulary(row), in_backward)
    for traffic, issued, clipped in run_ranks(row.ranks, step, row):
        assert traffic == expected
        assert issued == sum(calls for calls, _ in traffic.values()), "gloo counts other calls"
        assert clipped == add(clipping(row), in_clipping)


@pytest.mark.parametrize("row", [row_of(**plan, adapter="lora") for plan in (FSDP2, DDP2)], ids=str)
def test_gradients_of_frozen_parameters_are_not_reduced(row):
    """Only the adapter's gradients are reduced, once per unit; parameters are gathered as without an adapter."""
    model, _, adapter = table_rows.build_adapted(row)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == sum(p.numel() for name, p in model.named_parameters() if name in adapter.added_parameters) > 0
    for traffic, _, _ in run_ranks(2, step, row):
        reduced = {key: value for key, value in traffic.items() if key[0] != "all_gather"}
        kind, times = ("all_to_all", 1) if row.dp_shard > 1 else ("all_reduce", 2)
        assert reduced == {
            (kind, "dp_shard" if row.dp_shard > 1 else "dp_replicate"): (LAYERS + 1, times * 2 * trained)
        }


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("adapter", "reached"), [("neurocache", 1), ("unfrozen, last", 0), ("lora", LAYERS)])
def test_backward_gathers_no_block_below_all_that_is_trained(adapter, reached, prefetch):
    """Forward gathers all units, backward the blocks of its path: of a Neurocache the last one."""
    row = row_of(**FSDP2, adapter=adapter, prefetch=prefetch)
    for traffic, _, _ in run_ranks(2, step, row):
        calls, _ = traffic["all_gather", "dp_shard"]
        assert calls == LAYERS + 2 + reached
