"""A section's options reach the part that they are for, by their names."""

from dataclasses import replace
from inspect import signature

import pytest

from torchtitan.assembly import parts
from torchtitan.config.sections.model import ActivationCheckpoint, Parallelism
from torchtitan.config.sections.run import Guard
from torchtitan.config.sections.training import DataLoader, Optimizer
from torchtitan.datasets.loader import WorkerOptions
from torchtitan.guards import StepGuard
from torchtitan.optimizers.build import build_optimizers
from torchtitan.parallelisms.parallelize import ParallelOptions
from torchtitan.parallelisms.pipeline.pipeline_parallel import PipelineOptions

TAKEN = {
    build_optimizers: (Optimizer(lr=0.5, options={"a": 1}), "", {"name", "lr", "options", "implementation"}),
    WorkerOptions: (DataLoader(num_workers=2), "", {"num_workers", "persistent_workers", "pin_memory"}),
    ParallelOptions: (ActivationCheckpoint(early_stop=True), "", {"memory_budget", "preserve_rng_state", "early_stop"}),
    StepGuard: (Guard(patience=3), "", {"patience", "spike_sigmas"}),
    PipelineOptions: (
        Parallelism(pipeline_parallel_microbatch_size=4),
        "pipeline_parallel_",
        {"microbatch_size", "schedule", "layers_per_stage"},
    ),
}


@pytest.mark.parametrize("part", TAKEN, ids=lambda part: part.__name__)
def test_options_reach_their_part(part):
    section, prefix, expected = TAKEN[part]
    arguments = parts.matching_options(section, part, prefix)
    assert expected <= arguments.keys() <= signature(part).parameters.keys()
    for name, value in arguments.items():
        assert value == getattr(section, name if hasattr(section, name) else prefix + name)


def test_an_option_of_another_name_is_not_taken():
    assert "mode" not in parts.matching_options(replace(ActivationCheckpoint(), mode="full"), ParallelOptions)
