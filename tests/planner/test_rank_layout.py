"""The layers and microbatches of a pipeline rank, as the parallelized model has them."""

import pytest

from torchtitan.assembly.parts import ModelBuilder, model_spec
from torchtitan.config.job import JobConfig
from torchtitan.job import ResolvedJob
from torchtitan.planner.memory.rank_layout import RankLayout
from torchtitan.planner.plan import Plan

PIPELINE = {
    "model.name": "llama3",
    "model.flavor": "debugmodel",
    "training.local_batch_size": 8,
    "parallelism.pipeline_parallel_degree": 2,
}
PARTS = [["tok_embeddings", *(f"layers.{n}" for n in range(5))], ["layers.5", "norm", "output"]]


def pipeline(**options: object) -> ResolvedJob:
    named = {f"parallelism.{name}": value for name, value in options.items()}
    return ResolvedJob(JobConfig(), 2).with_options(PIPELINE | {"model.overrides": {"n_layers": 6}} | named)


CUTS = {
    "1F1B": {},
    "an expensive head": {"pipeline_parallel_last_stage_less_layers": 3},
    "two stages a rank": {"pipeline_parallel_schedule": "Interleaved1F1B"},
    "small stages": {"pipeline_parallel_schedule": "LoopedBFS", "pipeline_parallel_layers_per_stage": 1}
    | {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")},
    "in a V": {"pipeline_parallel_schedule": "ZBVZeroBubble"},
    "modules by name": {"module_fqns_per_model_part": PARTS},
}


@pytest.mark.parametrize("cut", CUTS)
def test_stages_are_those_of_the_cut_model(cut):
    job = pipeline(**CUTS[cut])
    builder = ModelBuilder(job)
    stages = builder.pipeline_options().stages(builder.meta_model(), model_spec(job.model).plan, 2)
    layers = [[int(name[7:]) for name in stage if name.startswith("layers.")] for stage in stages]
    n_layers = job.model.args.n_layers
    assert job.layout.num_stages(n_layers) == len(stages) == 2 * Plan.of(job, 8).stages_per_rank
    assert job.layout.layers_by_stage(n_layers) == list(map(len, layers))
    for rank in range(2):
        owned = builder.pipeline_options().stages_of_rank(rank, 2, len(stages))
        assert RankLayout(job, rank).stages == [layers[stage] for stage in owned]


@pytest.mark.parametrize(
    ("options", "merged"),
    [
        ({"activation_checkpoint.mode": "none"}, False),
        ({"activation_checkpoint.mode": "full"}, True),
        ({"activation_checkpoint.mode": "none", "compile.enable": True}, True),
        # only compiled blocks need it: ParallelModel merges the gradients by `compile_model`
        ({"activation_checkpoint.mode": "none", "compile.enable": True, "compile.components": ["loss"]}, False),
    ],
)
def test_gradients_are_merged_as_the_parallel_model_merges_them(options, merged):
    job = pipeline(pipeline_parallel_schedule="InterleavedZeroBubble").with_options(options)
    parallel = ModelBuilder(job).parallel_options()
    assert (parallel.recompute != "none" or parallel.compile_model) is merged
    assert Plan.of(job, 8).merges_backward is merged
    assert RankLayout(job, 1).waiting_weight_gradients == (0 if merged else 1)
