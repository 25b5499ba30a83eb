"""Bytes and calls of every collective of a step are the least there can be: exactly those of the formulas below.

Each formula is {(kind, axis): (calls, bytes that a rank sends)}; those of a plan add up. Sizes are small, but nothing
in a formula depends on them.
"""

from collections import Counter
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests import test_combinations
from tests.combinations import Combination
from tests.support.pool import run_ranks
from torchtitan.losses.objective import IGNORE_INDEX
from torchtitan.planner.traffic import Traffic, axes_of

LAYERS, WIDTH = 3, test_combinations.MICRO_SIZE["dim"]


def step(row):
    """Traffic of forward and backward of one step, then of clipping; after a step that may have set things up."""
    torch._dynamo.reset()
    model = test_combinations.assembled(row)
    whole = test_combinations.batch()
    valid = int((whole["labels"] != IGNORE_INDEX).sum())
    size = test_combinations.SAMPLES // model.dims.dp // row.accumulation
    mine = {name: whole[name][model.dims.dp_rank(model.mesh) :: model.dims.dp] for name in ("tokens", "labels")}
    for _ in range(2):
        with Traffic() as traffic, profile(activities=[ProfilerActivity.CPU]) as trace:
            for index in range(row.accumulation):
                part = {name: tensor[index * size : (index + 1) * size] for name, tensor in mine.items()}
                model.forward_backward(part, valid, is_last=index == row.accumulation - 1)
    with Traffic() as clipping:
        model.clip_gradients(1.0)
    axes = axes_of(model.mesh)
    issued = sum(event.name.startswith("gloo:") for event in trace.events())
    return traffic.totals(axes), issued, clipping.totals(axes)


def add(*parts):
    """Formulas together, without what is nothing."""
    total = Counter()
    for part in parts:
        for key, (calls, sent) in part.items():
            total[key, "calls"] += calls
            total[key, "bytes"] += sent
    keys = {key for key, _ in total}
    return {key: (total[key, "calls"], total[key, "bytes"]) for key in keys if total[key, "calls"]}


def sizes(row):
    """Elements of a rank before FSDP: (blocks, the rest). Matrices are split by tensor parallel, norms are not."""
    blocks = rest = 0
    for name, parameter in test_combinations.build_plain(Combination(model=row.model)).named_parameters():
        elements = parameter.numel() // (1 if "norm" in name else row.tp)
        blocks, rest = (blocks + elements, rest) if name.startswith("layers.") else (blocks, rest + elements)
    return blocks, rest


def ends(row):
    """Units beside the blocks: the embedding; last norm and head, where the head has a matrix of its own."""
    return 1 if test_combinations.build_plain(Combination(model=row.model)).args.tied_embeddings else 2


def precision(row):
    """Bytes of (activations and gathered parameters, reduced gradients)."""
    return (2 if row.precision == "bfloat16" else 4), 4


def fully_sharded(row):
    """Blocks are gathered for forward and again for backward, the ends once; gradients are reduced once. The head is a
    unit of its own so that its sum, the largest, is made while blocks go backward.
    """
    (blocks, rest), (gathered, reduced), n = sizes(row), precision(row), row.dp_shard
    part, times = Fraction(n - 1, n), row.accumulation if n > 1 else 0
    again = 1 if row.reshard else 0
    gather = part * gathered * ((1 + again) * blocks + rest)
    reduce = part * reduced * (blocks + rest)
    return {
        ("all_gather", "dp_shard"): (times * (LAYERS * (1 + again) + ends(row)), times * gather),
        ("reduce_scatter", "dp_shard"): (times * (LAYERS + ends(row)), times * reduce),
    }


def replicas(row):
    """What FSDP has reduced is added up once per step, however many microbatches there are."""
    (blocks, rest), (_, reduced), r = sizes(row), precision(row), row.dp_replicate
    sent = Fraction(2 * (r - 1), r) * (blocks + rest) / row.dp_shard * reduced
    return {("all_reduce", "dp_replicate"): (LAYERS + ends(row) if r > 1 else 0, sent)}


def tensor_parallel(row):
    """A layer has two regions, each entered and left in forward and in backward; the embedding is left, the head
    entered. Full recompute goes through the forward's four borders again; selective recompute has kept them.
    """
    activation, _ = precision(row)
    tokens = test_combinations.SAMPLES * test_combinations.SEQ_LEN // (row.dp_shard * row.dp_replicate)
    one = Fraction(row.tp - 1, row.tp) * tokens * WIDTH * activation
    recomputed = {"none": 0, "op": 0, "full": LAYERS, "2": (LAYERS + 1) // 2}[row.recompute]
    borders = 4 * LAYERS + 2 + 2 * recomputed
    calls = row.accumulation * borders
    if row.tp == 1:
        return {}
    if not row.sequence_parallel:  # an all-reduce to leave, and one to enter in backward
        return {("all_reduce", "tp"): (calls, 2 * borders * one)}
    return {(kind, "tp"): (calls, borders * one) for kind in ("all_gather", "reduce_scatter")}


def split_words(row):
    """Three float32 numbers per token in two calls, or all logits."""
    tokens = test_combinations.SAMPLES * test_combinations.SEQ_LEN // (row.dp_shard * row.dp_replicate)
    pieces = row.accumulation * row.loss_chunks
    if row.tp == 1:
        return {}
    if row.loss_parallel:
        return {("all_reduce", "tp"): (2 * pieces, Fraction(2 * (row.tp - 1), row.tp) * 3 * tokens * 4)}
    words = test_combinations.MICRO_SIZE["vocab_size"]
    return {("all_gather", "tp"): (pieces, Fraction(row.tp - 1, row.tp) * tokens * words * precision(row)[0])}


def norms(row):
    """Under sequence parallel a norm sees a rank's tokens: its gradient is added up. (Beside FSDP by FSDP, each by
    itself and every microbatch; else all at once before clipping.) Returns what there is in backward, and in clipping.
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
    """A number for each axis that gradients are sharded on, and for each set of such axes."""
    number = {
        axis: (1, Fraction(2 * (n - 1), n) * 4) for axis, n in (("dp_shard", row.dp_shard), ("tp", row.tp)) if n > 1
    }
    both = dict(dp_shard=2) if len(number) == 2 else {}  # matrices are on both, norms on dp_shard alone
    return {("all_reduce", axis): tuple(both.get(axis, 1) * x for x in value) for axis, value in number.items()}


FSDP2, FSDP4, HSDP = dict(ranks=2, dp_shard=2), dict(ranks=4, dp_shard=4), dict(ranks=4, dp_replicate=2, dp_shard=2)
DDP2, TP2, FSDP2_TP2 = dict(ranks=2, dp_replicate=2), dict(ranks=2, tp=2), dict(ranks=4, dp_shard=2, tp=2)
row_of = partial(Combination, precision="float32")
"""A row in the precision whose bytes the formulas count."""
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
def test_no_byte_and_no_call_too_many(row):
    in_backward, in_clipping = norms(row)
    expected = add(fully_sharded(row), replicas(row), tensor_parallel(row), split_words(row), in_backward)
    for found, issued, clipped in run_ranks(row.ranks, step, row):
        assert found == expected
        assert issued == sum(calls for calls, _ in found.values()), "gloo counts otherwise"
        assert clipped == add(clipping(row), in_clipping)


@pytest.mark.parametrize("row", [row_of(**plan, adapter="lora") for plan in (FSDP2, DDP2)], ids=str)
def test_what_is_frozen_is_not_reduced(row):
    """An adapter's gradients alone are, in as few calls; parameters are gathered as ever."""
    model, _, adapter = test_combinations.build_adapted(row)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == sum(p.numel() for name, p in model.named_parameters() if name in adapter.added_parameters) > 0
    for found, _, _ in run_ranks(2, step, row):
        reduced = {key: value for key, value in found.items() if key[0] != "all_gather"}
        kind, times = ("reduce_scatter", 1) if row.dp_shard > 1 else ("all_reduce", 2)
        assert reduced == {
            (kind, "dp_shard" if row.dp_shard > 1 else "dp_replicate"): (LAYERS + 1, times * 2 * trained)
        }
