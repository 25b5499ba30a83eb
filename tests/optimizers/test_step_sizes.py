"""Bytes that steps of optimizers allocate, against the rehearsed step of a model of published width."""

import random
from datetime import date

from tests.support.memory_plans import OPTIMIZERS
from tests.support.pool import run_alone
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.planner.memory.closed_form import moments
from torchtitan.planner.memory.rank_sizes import RankSizes
from torchtitan.planner.rehearsal import rehearse
from torchtitan.rules import check

PLANS = {
    1: (),
    2: ("--parallelism.data_parallel_shard_degree=2",),
    4: ("--parallelism.data_parallel_shard_degree=2", "--parallelism.tensor_parallel_degree=2"),
}
"""Ranks -> options."""
WIDE = ("--model.name=llama3", "--model.flavor=8B", "--model.overrides={n_layers = 2}", "--model.tokenizer_path=bytes")
DRAWN = 4


def jobs_of(draw):
    """Yield the ranks and options of jobs, each with one of the forms of an optimizer."""
    for (name, implementation, options), ranks in zip(
        draw.sample(OPTIMIZERS, DRAWN), draw.choices(list(PLANS), k=DRAWN), strict=True
    ):
        settings = {"name": name, "implementation": implementation, "options": options}
        dtype = "bfloat16" if name == "AdamWBF16" else draw.choice(["float32", "bfloat16"])
        arguments = [*WIDE, *PLANS[ranks], "--training.seq_len=512", f"--training.dtype={dtype}"]
        yield ranks, arguments + [f"--optimizer.{key}={value}" for key, value in settings.items() if value]


def rehearsed_steps(jobs):
    """Return the bytes of all tensors of each job's first rank at the peak of the optimizer's step."""
    resolved = [ResolvedJob(load(arguments), ranks, "cuda") for ranks, arguments in jobs]
    return [rehearse(job, 0).moments["optimizer"].total() for job in resolved]


def step_by_formula(ranks, arguments):
    return next(moments(RankSizes(ResolvedJob(load(arguments), ranks, "cuda"), 0))).total()


def test_drawn_steps_need_what_the_rehearsal_counts():
    """Other optimizers every day; scripts/compare_memory.py --kinds optimizers compares whole plans."""
    jobs = list(jobs_of(random.Random(date.today().toordinal())))
    faults = [fault.key for ranks, arguments in jobs for fault in check(load(arguments), ranks, "cuda")]
    assert not any(key.startswith("optimizer") for key in faults)
    for (ranks, arguments), bytes_ in zip(jobs, run_alone(rehearsed_steps, jobs, limit=300), strict=True):
        error = step_by_formula(ranks, arguments) / bytes_ - 1
        assert abs(error) < 0.03, (error, arguments)


def test_every_optimizer_states_what_its_step_allocates():
    """Fused steps of torch allocate nothing; decayed gradients and directions are as large as a model."""

    def work(*options):
        job = ResolvedJob(load([*WIDE, "--training.seq_len=512", *options]), 1, "cuda")
        return RankSizes(job, 0).optimizer_work

    parameters = 4 * (2 * 128256 * 4096 + 2 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096))
    assert work("--optimizer.name=AdamW") == work("--optimizer.name=SGD", "--optimizer.weight_decay=0") == 0
    assert work("--optimizer.name=SGD") == work("--optimizer.name=AdamW", "--optimizer.implementation=foreach")
    assert work("--optimizer.name=SGD") == parameters
    assert work("--optimizer.name=Adam", "--optimizer.implementation=foreach") == 2 * parameters
    assert work("--optimizer.name=Adafactor") == 2 * 4 * 128256 * 4096
    matrices = parameters - 4 * (2 * 128256 * 4096 + 4 * 4096)
    assert work("--optimizer.name=Muon") == matrices + 2 * (4 * 14336 * 4096 + 2 * 4096**2)


def test_stages_of_a_pipeline_rank_step_one_after_the_other():
    """The directions of the longest stage live at once; the state is of all."""
    options = ["--training.seq_len=512", "--optimizer.name=Muon", "--training.local_batch_size=4"]
    options += ["--model.name=llama3", "--model.flavor=8B", "--model.overrides={n_layers = 6}"]
    options += ["--parallelism.pipeline_parallel_degree=3", "--model.tokenizer_path=bytes"]
    block, one_matrix = 2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096, 2 * (4 * 14336 * 4096 + 2 * 4096**2)
    for schedule, chunks in (("1F1B", 1), ("Interleaved1F1B", 2)):
        job = ResolvedJob(load([*options, f"--parallelism.pipeline_parallel_schedule={schedule}"]), 3, "cuda")
        middle = RankSizes(job, 1)
        assert len(middle.stages) == chunks and not middle.has_embedding and not middle.has_head
        assert middle.optimizer == 4 * len(middle.layers) * (block + 2 * 2 * 4096)
        assert middle.optimizer_work == 4 * max(map(len, middle.stages)) * block + one_matrix
