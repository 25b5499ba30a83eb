"""Segmented stages under every schedule and recompute policy give the gradients of one process, also with FSDP."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support import toy_moe
from tests.support.overlap_runs import CUTS, EP, MICROBATCHES, PP, SCHEDULES, check, random_case, run_case
from tests.support.pool import run_ranks
from tests.support.segment_policies import POLICIES
from torchtitan.parallelisms.pipeline.overlap.stage import SegmentedStage
from torchtitan.parallelisms.pipeline.tables import build_table


def table_case(schedule, policy):
    """Run a named schedule under a recompute policy on this rank."""
    name, chunks, overlap = SCHEDULES[schedule]
    table = build_table(name, PP, MICROBATCHES, chunks, overlap=overlap)
    return run_case(name, policy, overlap, table, CUTS[PP * chunks])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_and_policy_gives_the_gradients_of_one_process(schedule, policy):
    """Segments are recomputed once, sizes exchanged once, and both ranks of a group issue the fewest all-to-alls."""
    for result in run_ranks(4, table_case, schedule, policy):
        check(result, policy)


def random_cases(seed, number):
    """Run random schedules on this rank."""
    results = []
    chooser = random.Random(seed)
    for _ in range(number):
        name, table, cuts, kinds, policy, overlap, microbatches = random_case(chooser)
        result = run_case(name, policy, overlap, table, cuts, kinds, microbatches)
        results.append(result | {"policy": policy, "microbatches": microbatches})
    return results


def test_random_stages_over_gloo():
    for results in run_ranks(4, random_cases, 1, 8):
        for result in results:
            check(result, result["policy"], result["microbatches"])


# FSDP


def shard(part, mesh, precision):
    """Apply FSDP as data_parallel.py does; experts stay on their rank."""
    experts = {p for name, p in part.named_parameters() if ".experts." in name}
    for module in [*part.layers.values(), part]:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False, ignored_params=experts)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def run_under_fsdp(schedule, policy, dtype=torch.float64, kinds=toy_moe.LAYERS, microbatches=MICROBATCHES):
    """Run a schedule on this rank with stages under FSDP."""
    name, chunks, overlap = SCHEDULES[schedule]
    mesh = dist.init_device_mesh("cpu", (PP, EP), mesh_dim_names=("pp", "dp"))["dp"]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64, cast_forward_inputs=False)
    table = build_table(name, PP, microbatches, chunks, overlap=overlap)
    return run_case(
        name,
        policy,
        overlap,
        table,
        CUTS[PP * chunks],
        kinds,
        microbatches,
        prepare=lambda part: shard(part, mesh, precision),
        dtype=dtype,
    )


@pytest.mark.parametrize("policy", ["none", "full_keep_comm", "full"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble + overlap", "DualPipeV + overlap"])
def test_gradients_under_fsdp(schedule, policy):
    for result in run_ranks(4, run_under_fsdp, schedule, policy):
        check(result, policy)


def bfloat16_errors(microbatches):
    """Return the errors with bfloat16 microbatches: with our accumulation, and with autograd's."""
    error_pairs = []
    add_up = SegmentedStage.accumulate_gradients
    for change in (add_up, lambda stage: None):
        SegmentedStage.accumulate_gradients = change
        try:
            error_pairs.append(
                run_under_fsdp("DualPipeV + overlap", "none", torch.bfloat16, "dddddd", microbatches)["error"]
            )
        finally:
            SegmentedStage.accumulate_gradients = add_up
    return error_pairs


def test_mixed_precision_accumulates_in_the_reduce_dtype():
    """Compare with bfloat16 microbatches summed in float64: only the order of sums inside one differs, at most 2^-9.

    A sum in bfloat16 would round once a microbatch.
    """
    results = run_ranks(4, bfloat16_errors, 32)
    assert (
        max(float32_error for float32_error, _ in results)
        < 2**-9
        < max(bfloat16_error for _, bfloat16_error in results)
    ), results
