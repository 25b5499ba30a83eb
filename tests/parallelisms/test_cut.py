"""Pipeline cuts, stages of ranks and limits of schedules, against PyTorch's torchtitan and torch's classes."""

import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest

from tests.support.jobs import ROOT
from torchtitan.core.errors import JobError
from torchtitan.parallelisms.pipeline.cut import (
    SCHEDULES,
    check_microbatches,
    check_stage_modules,
    check_stages,
    choose_num_stages,
    forward_order,
    model_modules,
    num_microbatches,
    schedule_traits,
    split_layers,
    stage_modules,
    stages_of_rank,
)


def even_cut(num_layers: int, num_stages: int, embedding_cost: int, head_cost: int) -> list[int]:
    """Return the cut of PyTorch's torchtitan: layers plus the ends' weights in equal shares, the first one more."""
    share, more = divmod(num_layers + embedding_cost + head_cost, num_stages)
    layers = [share + (stage < more) for stage in range(num_stages)]
    layers[0] -= embedding_cost
    layers[-1] -= head_cost
    return layers


def test_cut_is_torchtitans_where_that_leaves_no_stage_empty():
    compared = 0
    for layers, stages, first, last in product(range(1, 41), range(2, 9), range(4), range(4)):
        expected = even_cut(layers, stages, first, last)
        if min(expected) >= 1:
            assert split_layers(layers, stages, first, last) == expected
            compared += 1
    assert compared > 2000


def test_every_stage_has_a_layer():
    for layers, stages, first, last in product(range(1, 20), range(2, 9), range(6), range(6)):
        if layers >= stages:
            cut = split_layers(layers, stages, first, last)
            assert sum(cut) == layers and min(cut) >= 1
    assert split_layers(4, 4, 1, 1) == [1, 1, 1, 1]
    assert split_layers(8, 4, 5, 0) == [1, 3, 2, 2]


def test_names_of_a_cut():
    assert stage_modules(5, 3, 1, 2) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "norm", "output"],
    ]
    other = dict(blocks="h.*.block", embedding="wte", head=("head",))
    assert stage_modules(2, 2, **other) == [["wte", "h.0.block"], ["h.1.block", "head"]]


def test_names_given_by_hand():
    modules = model_modules(3)
    check_stage_modules([modules[:2], modules[2:]], modules)
    for stages, message in (
        ([modules[:2], modules[2:-1]], "no stage has output"),
        ([modules[:2], [*modules[1:]]], "layers.0 is named more than once"),
        ([[*modules[:2], "layers.7"], modules[2:]], "the model has no layers.7"),
        ([[modules[1], modules[0]], modules[2:]], "layers.0 stands where tok_embeddings comes in the model"),
        ([modules[:1], modules[1:]], "stage 0 has none of the layers"),
    ):
        with pytest.raises(JobError, match=f"{message}.*in order are tok_embeddings, layers.0, .*, norm, output"):
            check_stage_modules(stages, modules)


def test_stages_are_assigned_to_ranks_as_in_torch():
    from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

    for pp, stages_per_rank, style in product((1, 2, 3, 4, 8), (1, 2, 3, 4), ("loop", "v")):
        of_rank = generate_rank_to_stage_mapping(pp, pp * stages_per_rank, style)
        assert [stages_of_rank(rank, pp, pp * stages_per_rank, style) for rank in range(pp)] == [
            of_rank[r] for r in range(pp)
        ]


@pytest.mark.parametrize("pp, stages_per_rank, style", product((1, 2, 3, 4), (1, 2, 4), ("loop", "v")))
def test_forward_order(pp, stages_per_rank, style):
    """Each stage runs each microbatch once, in order; ranks are idle only while the pipeline fills and drains.

    The number of microbatches in flight does not grow with their total.
    """
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    of_stage = generate_stage_to_rank_mapping(pp, pp * stages_per_rank, style)
    ranks = [of_stage[stage] for stage in range(pp * stages_per_rank)]
    for microbatches in (1, 2, 5, 16):
        order = forward_order(ranks, microbatches)
        assert sorted(order) == list(product(range(pp * stages_per_rank), range(microbatches)))
        free, done, on_the_way = [0] * pp, {}, 0
        for stage, microbatch in order:
            done[stage, microbatch] = max(free[ranks[stage]], done.get((stage - 1, microbatch), 0)) + 1
            free[ranks[stage]] = done[stage, microbatch]
            on_the_way += (stage == 0) - (stage == pp * stages_per_rank - 1)
            assert on_the_way <= 2 * pp
        assert max(free) <= (microbatches + pp - 1) * stages_per_rank


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_accept_the_same_numbers_as_torchs_classes(name):
    """Ours are the same, but for 1F1B, which runs by a table of ours with fewer microbatches than stages too."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    schedule = get_schedule_class(name)
    for pp, stages_per_rank, count in product((2, 3, 4), (1, 2, 3), range(1, 14)):
        num_stages = pp * stages_per_rank
        stages = [
            SimpleNamespace(
                num_stages=num_stages, group_size=pp, group_rank=0, submod=None, stage_index=i, is_last=False
            )
            for i in range(stages_per_rank)
        ]
        if SCHEDULES[name].stages_per_rank == 1:
            if stages_per_rank > 1:
                with pytest.raises(JobError, match=f"needs exactly 1 stage per rank, {pp} on {pp} ranks"):
                    check_stages(name, pp, num_stages)
            else:
                check_stages(name, pp, num_stages)
                check_microbatches(name, count, pp, num_stages)
            continue
        try:
            schedule(stages, count)
            is_accepted = stages_per_rank > 1  # torch also runs a schedule of several stages with one
        except ValueError:
            is_accepted = False
        try:
            check_stages(name, pp, num_stages)
            check_microbatches(name, count, pp, num_stages)
            assert is_accepted, (pp, stages_per_rank, count)
        except JobError:
            assert not is_accepted, (pp, stages_per_rank, count)


def test_number_of_stages():
    assert choose_num_stages("gpipe", 4, 8, None) == 4
    assert choose_num_stages("ZBVZEROBUBBLE", 2, 5, None) == 4
    assert choose_num_stages("Interleaved1F1B", 2, 6, 2, 1, 1) == 4
    assert choose_num_stages("LoopedBFS", 2, 6, 1, 0, 0) == 6
    for arguments, message in (
        (("1F1B", 4, 3, None), "3 layers cannot fill 4 pipeline stages .* at most 3 stages"),
        (("DualPipeV", 4, 6, None), "6 layers cannot fill 8 pipeline stages"),
        (("ZBVZeroBubble", 2, 6, 3), "3 layers per stage make 3 stages .* exactly 2 stages per rank, 4 on 2 .* do: 2$"),
        (("1F1B", 2, 6, 2), "exactly 1 stage per rank, 2 on 2 ranks; layers per stage that would do: 4, 5, 6, 7$"),
        (("LoopedBFS", 2, 6, 1, 1, 1), "6 layers cannot fill 8"),
        (("LoopedBFS", 4, 6, 3, 1, 1), "multiple of 4 ranks, at least 8; layers per stage that would do: none"),
        (("ZBV", 4, 6, 3), "no pipeline schedule 'ZBV'; choose one of GPipe, 1F1B, .*, DualPipeV"),
    ):
        with pytest.raises(JobError, match=message):
            choose_num_stages(*arguments)


def test_schedule_names_in_any_case():
    assert schedule_traits("dualpipev") is SCHEDULES["DualPipeV"]
    assert all(traits.name == name for name, traits in SCHEDULES.items())


def test_microbatches_of_a_local_batch():
    assert [num_microbatches(8, size) for size in (1, 2, 8)] == [8, 4, 1]
    with pytest.raises(JobError, match="sizes that would do: 1, 2, 4, 8; local batch sizes that would do: 6, 9"):
        num_microbatches(8, 3)
    with pytest.raises(JobError, match="sizes that would do: 1, 3; local batch sizes that would do: 5"):
        num_microbatches(3, 5)


@pytest.mark.parametrize(
    "name, count, pp, message",
    [
        ("Interleaved1F1B", 7, 2, "in 3 rounds of equal size, .* nearest numbers that would do: 6, 8$"),
        ("InterleavedZeroBubble", 11, 4, "in 2 rounds of equal size, .* nearest numbers that would do: 10, 12$"),
        ("DualPipeV", 3, 2, "with 4 stages needs at least 4 microbatches in a local batch, not 3"),
    ],
)
def test_microbatches_that_a_schedule_does_not_take(name, count, pp, message):
    with pytest.raises(JobError, match=message):
        check_microbatches(name, count, pp, 2 * pp)


def test_needs_no_torch():
    code = "import sys, torchtitan.parallelisms.pipeline.cut; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
