"""Rules on the degrees of parallelism, the ranks and the batches."""

import math
import os
from collections.abc import Iterator

from torchtitan.config.batch_shape import rows_per_sample
from torchtitan.config.options import Fault
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.core.constraints import LimitError, check_global_batch
from torchtitan.rules.facts import Facts

NEEDS_DEGREE = {
    "tensor_parallel_degree": (
        "disable_sequence_parallel",
        "disable_loss_parallel",
        "enable_async_tensor_parallel",
    ),
    "context_parallel_degree": ("context_parallel_load_balancer", "context_parallel_rotate_method"),
    "pipeline_parallel_degree": (
        "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule",
        "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size",
    ),
}
"""Options that do nothing while their degree is 1."""


def degrees_fit_the_ranks(facts: Facts) -> Iterator[Fault]:
    if isinstance(facts.shard_or_error, LimitError):
        yield facts.refused(facts.shard_or_error)


def model_allows_the_plan(facts: Facts) -> Iterator[Fault]:
    """What a family alone asks for is said by its sizes."""
    if hasattr(facts.args, "limits"):
        limits = facts.args.limits(facts.config.model.overrides, tp=facts.tp, cp=facts.cp, pp=facts.pp)
        yield from map(facts.refused, limits)


def batch_divides(facts: Facts) -> Iterator[Fault]:
    asked, local = facts.config.training.global_batch_size, facts.config.training.local_batch_size
    if asked == 0 or facts.samples:
        yield from facts.judged(check_global_batch, asked, local, (facts.samples or local) // local)


def needs_its_degree(facts: Facts) -> Iterator[Fault]:
    degrees, defaults = facts.config.parallelism, Parallelism()
    for degree, names in NEEDS_DEGREE.items():
        if getattr(degrees, degree) > 1:
            continue
        for name in names:
            if getattr(degrees, name) != getattr(defaults, name):
                allowed = f"its default while parallelism.{degree} = 1"
                yield facts.fault(f"parallelism.{name}", allowed, "leave it out")


def needs_shards(facts: Facts) -> Iterator[Fault]:
    """Beside a pipeline, which excludes prefetch and "always" on any number of shards (excluded_by_a_pipeline)."""
    degrees = facts.config.parallelism
    if facts.fsdp_shards != 1 or facts.config.training.enable_cpu_offload:
        return
    ranks = f"{facts.world_size} rank{'s' * (facts.world_size > 1)}"
    where, remedy = f"where nothing is sharded, as here on {ranks}", "leave it out, or start more ranks"
    if degrees.fsdp_prefetch and facts.pp == 1:
        yield facts.fault("parallelism.fsdp_prefetch", f"0 {where}", remedy)
    if degrees.fsdp_reshard_after_forward != "default" and (
        facts.pp == 1 or degrees.fsdp_reshard_after_forward == "never"
    ):
        yield facts.fault("parallelism.fsdp_reshard_after_forward", f'"default" {where}', remedy)


def batch_fits_the_memory(facts: Facts) -> Iterator[Fault]:
    """Of what is far beyond it: the ids of a batch alone, their labels, positions and documents."""
    training = facts.config.training
    bytes_of_a_sample = 4 * 8 * training.seq_len * rows_per_sample(facts.config)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if training.local_batch_size * bytes_of_a_sample > memory:
        key = "local_batch_size" if training.local_batch_size > 1 else "seq_len"
        allowed = f"a batch whose ids fit into this machine's {memory / 2**30:.0f} GiB"
        most = int(memory // (bytes_of_a_sample if key == "local_batch_size" else bytes_of_a_sample / training.seq_len))
        yield facts.fault(f"training.{key}", allowed, f"write much less than {most:,}")
