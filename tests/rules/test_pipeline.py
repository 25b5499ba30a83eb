"""Rules on pipelines: a table of impossible jobs with their faults, and some possible ones."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.support import judged
from tests.support.judged import CP, CSV, PARTS, PP, SCHEDULE, TP, lines, name
from torchtitan.parallelisms.pipeline.cut import SCHEDULES
from torchtitan.rules.pipeline import WHOLE_BACKWARD

anywhere = judged.anywhere
FIRST_HALF = "['tok_embeddings', 'layers.0', 'layers.1', 'layers.2']"
SECOND_HALF = "['layers.3', 'layers.4', 'layers.5', 'norm', 'output']"
SCHEDULE_FILES = {
    "good.csv": "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "split.csv": "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n",
    "gap.csv": "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1\n",
    "deadlock.csv": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
}


@pytest.fixture(autouse=True)
def schedule_files(anywhere):
    for file, text in SCHEDULE_FILES.items():
        Path(file).write_text(text)


PIPELINE = [
    (
        [PP + "2", SCHEDULE + "Interleaved1F1"],
        'pipeline_parallel_schedule: given "Interleaved1F1"; allowed: one of "GPipe", "1F1B", "LoopedBFS", '
        '"Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"; did you mean "Interleaved1F1B"?',
    ),
    (
        [PP + "2", "--training.local_batch_size=6", "--parallelism.pipeline_parallel_microbatch_size=4"],
        "pipeline_parallel_microbatch_size: given 4; allowed: a divisor of training.local_batch_size; a local batch of "
        "6 samples does not divide into pipeline microbatches of 4; microbatch sizes that would do: 1, 2, 3, 6; local "
        "batch sizes that would do: 4, 8",
    ),
    (
        [PP + "2", SCHEDULE + "DualPipeV", "--training.local_batch_size=3"],
        "training.local_batch_size: given 3, 3 microbatches; allowed: microbatches that suit DualPipeV; DualPipeV with "
        "4 stages needs at least 4 microbatches in a local batch, not 3; use a local batch of at least 4 microbatches, "
        "or smaller microbatches",
    ),
    (
        [PP + "2", SCHEDULE + "InterleavedZeroBubble", "--training.local_batch_size=5"],
        "training.local_batch_size: given 5, 5 microbatches; allowed: microbatches that suit InterleavedZeroBubble; "
        "InterleavedZeroBubble on 2 ranks runs its 5 microbatches in 2 rounds of equal size, and 5 does not divide by "
        "2; the nearest numbers that would do: 4, 6",
    ),
    (
        [PP + "8"],
        "pipeline_parallel_degree: given 8; allowed: stages that suit 1F1B on 8 ranks; 6 layers cannot fill 8 pipeline "
        "stages (on 8 ranks); use at most 6 stages: fewer ranks",
    ),
    (
        [PP + "4", SCHEDULE + "ZBVZeroBubble"],
        "pipeline_parallel_degree: given 4; allowed: stages that suit ZBVZeroBubble on 4 ranks; 6 layers cannot fill 8 "
        "pipeline stages (on 4 ranks); use at most 6 stages: fewer ranks, or a schedule with fewer stages per rank "
        "(GPipe and 1F1B have 1)",
    ),
    (
        [PP + "2", SCHEDULE + "ZBVZeroBubble", "--parallelism.pipeline_parallel_layers_per_stage=1"],
        "pipeline_parallel_layers_per_stage: given 1; allowed: stages that suit ZBVZeroBubble on 2 ranks; 1 layers per "
        "stage make 8 stages of 6 layers (the embedding counts as 1, the head as 1); ZBVZeroBubble needs exactly 2 "
        "stages per rank, 4 on 2 ranks; layers per stage that would do: 2",
    ),
    (
        [PP + "2", SCHEDULE + "DualPipeV", f"{PARTS}[{FIRST_HALF}, {SECOND_HALF}]"],
        "module_fqns_per_model_part: given 2 stages; allowed: stages that suit DualPipeV on 2 ranks; 2 pipeline "
        "stages: DualPipeV needs exactly 2 stages per rank, 4 on 2 ranks",
    ),
    (
        [PP + "2", f"{PARTS}[{FIRST_HALF}, ['layers.3', 'layers.6', 'norm', 'output']]"],
        "module_fqns_per_model_part: given 2 stages; allowed: a list of module names for each stage; modules of the 2 "
        "pipeline stages: the model has no layers.6; no stage has layers.4, layers.5; the model's modules in order are "
        "tok_embeddings, layers.0, layers.1, layers.2, layers.3, layers.4, layers.5, norm, output",
    ),
    (
        [PP + "2", f"{PARTS}[{FIRST_HALF}, {SECOND_HALF}]", "--parallelism.pipeline_parallel_layers_per_stage=4"]
        + ["--parallelism.pipeline_parallel_last_stage_less_layers=0"],
        "pipeline_parallel_layers_per_stage: given 4; allowed: its default with "
        "parallelism.module_fqns_per_model_part; drop one of the two",
        "pipeline_parallel_last_stage_less_layers: given 0; allowed: its default with "
        "parallelism.module_fqns_per_model_part; drop one of the two",
    ),
    *(
        (
            [PP + "2", SCHEDULE + name, "--compile.enable"],
            f'pipeline_parallel_schedule: given "{name}"; allowed: a schedule without split backward with compile; '
            'write "Interleaved1F1B", or compile.enable = false',
        )
        for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
    (  # Interleaved1F1B is impossible too
        [PP + "2", SCHEDULE + "ZBVZeroBubble", "--compile.enable", "--training.local_batch_size=5"],
        'pipeline_parallel_schedule: given "ZBVZeroBubble"; allowed: a schedule without split backward with compile; '
        'write "LoopedBFS", or compile.enable = false',
    ),
    (
        [TP + "2", "--optimizer.early_step_in_backward", "--training.max_norm=0"],
        "optimizer.early_step_in_backward: given true; allowed: false with tensor or context parallel; norms' "
        "gradients are summed over tensor-parallel ranks after backward",
    ),
    (
        [CP + "2", "--optimizer.early_step_in_backward", "--training.max_norm=0"],
        "optimizer.early_step_in_backward: given true; allowed: false with tensor or context parallel; it has only "
        "been verified with data parallel",
    ),
    (
        [PP + "2", "--optimizer.early_step_in_backward", "--training.max_norm=0"],
        "optimizer.early_step_in_backward: given true; allowed: false with a pipeline; gradients are complete "
        "only after the last microbatch",
    ),
    (
        [PP + "2", "--parallelism.data_parallel_shard_degree=2", "--parallelism.fsdp_prefetch=1"]
        + ["--parallelism.fsdp_reshard_after_forward=always"],
        "fsdp_prefetch: given 1; allowed: 0 with a pipeline; stages keep gathered parameters until the last microbatch",
        'fsdp_reshard_after_forward: given "always"; allowed: "default" or "never" with a pipeline; parameters would '
        "be gathered again for each microbatch",
    ),
]
ONE_CAUSE = [
    (  # also without sharding
        [PP + "2", "--parallelism.fsdp_prefetch=1"],
        "fsdp_prefetch: given 1; allowed: 0 with a pipeline; stages keep gathered parameters until the last microbatch",
    ),
    (
        [PP + "2", "--parallelism.fsdp_reshard_after_forward=always"],
        'fsdp_reshard_after_forward: given "always"; allowed: "default" or "never" with a pipeline; parameters would '
        "be gathered again for each microbatch",
    ),
    (
        [PP + "2", "--parallelism.data_parallel_shard_degree=4", "--parallelism.fsdp_reshard_after_forward=2"],
        'fsdp_reshard_after_forward: given 2; allowed: "default" or "never" with a pipeline; parameters would '
        "be gathered again for each microbatch",
    ),
    (
        [PP + "2", "--parallelism.fsdp_reshard_after_forward=never"],
        'fsdp_reshard_after_forward: given "never"; allowed: "default" where nothing is sharded, as here on 2 ranks; '
        "leave it out, or start more ranks",
    ),
]
FILES = [
    (
        [PP + "2", CSV + "good.csv", "--training.local_batch_size=2", SCHEDULE + "GPipe"]
        + ["--parallelism.pipeline_parallel_layers_per_stage=4"],
        'pipeline_parallel_schedule: given "GPipe"; allowed: its default with '
        "parallelism.pipeline_parallel_schedule_csv; drop one of the two",
        "pipeline_parallel_layers_per_stage: given 4; allowed: unset with parallelism.pipeline_parallel_schedule_csv, "
        "which sets the stages; drop one of the two",
    ),
    (
        [PP + "2", CSV + "good.csv", "--training.local_batch_size=2", "--model.overrides={n_layers = 1}"],
        "pipeline_parallel_schedule_csv: given good.csv with 2 stages; allowed: at most as many stages as layers, 1; "
        "write a schedule with fewer stages",
    ),
    (
        [PP + "2", CSV + "split.csv", "--training.local_batch_size=2", "--compile.enable"],
        'pipeline_parallel_schedule_csv: given "split.csv"; allowed: a schedule without split backward (I and W) with '
        "compile; write B for the two, or compile.enable = false",
    ),
]


@pytest.mark.parametrize("case", [*PIPELINE, *ONE_CAUSE, *FILES], ids=name)
def test_impossible_plans_have_faults(case):
    options, *expected = case
    assert lines(*options) == expected


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("none.csv", "the file: what cannot be read (No such file or directory)"),
        ("gap.csv", "rank 1, stage 1: no action 1B1"),
        ("deadlock.csv", "rank 0, step 1, action 0B0: a deadlock: "),
    ],
)
def test_malformed_schedule_files_are_refused(file, place):
    """The errors and their positions come from schedule_actions."""
    (line,) = lines(PP + "2", CSV + file, "--training.local_batch_size=2")
    assert line.startswith(f"pipeline_parallel_schedule_csv: given {file}, {place}") and "; allowed: " in line


def test_a_schedule_file_with_another_number_of_stages_is_refused():
    stages = f"{PARTS}[{FIRST_HALF}, ['layers.3'], ['layers.4'], ['layers.5', 'norm', 'output']]"
    (line,) = lines(PP + "2", CSV + "good.csv", "--training.local_batch_size=2", stages)
    assert line.startswith("pipeline_parallel_schedule_csv: given good.csv, the table: 2 stages; allowed: 4")


@pytest.mark.parametrize(
    "options",
    [
        [PP + "2"],
        [PP + "6", "--training.local_batch_size=1"],
        [PP + "2", "--parallelism.pipeline_parallel_microbatch_size=2", "--validation.enable"]
        + ["--validation.local_batch_size=3"],
        [PP + "2", "--parallelism.data_parallel_shard_degree=2", "--parallelism.fsdp_reshard_after_forward=never"],
        [PP + "2", SCHEDULE + "interleaved1f1b"],  # upper and lower case are equal, as in torch
        *([PP + "2", SCHEDULE + name, "--activation_checkpoint.mode=full"] for name in SCHEDULES),
        *([PP + "2", SCHEDULE + name, "--compile.enable"] for name in WHOLE_BACKWARD),
        [PP + "2", "--activation_checkpoint.mode=memory_budget", "--compile.enable"],
        [PP + "2", "--parallelism.pipeline_parallel_layers_per_stage=2", SCHEDULE + "LoopedBFS"],
        [PP + "2", f"{PARTS}[{FIRST_HALF}, {SECOND_HALF}]"],
        [PP + "2", CSV + "good.csv", "--training.local_batch_size=2"],
        [PP + "2", CSV + "split.csv", "--training.local_batch_size=4"]
        + ["--parallelism.pipeline_parallel_microbatch_size=2"],
        [PP + "2", "--model.overrides={tied_embeddings = true}"],
    ],
    ids=" ".join,
)
def test_possible_plans_have_no_faults(options):
    assert lines(*options) == []


def test_a_wrong_cut_and_compile_are_both_reported():
    options = [PP + "2", SCHEDULE + "DualPipeV", "--compile.enable", "--model.overrides={n_layers = 1}"]
    cut, compiled = lines(*options)
    assert cut.startswith("pipeline_parallel_degree: given 2") and "1 layers cannot fill 4 pipeline stages" in cut
    assert compiled.endswith("with compile; set compile.enable = false")


def test_schedules_that_compile_have_undivided_backwards():
    assert set(WHOLE_BACKWARD) == {name for name, traits in SCHEDULES.items() if not traits.split_backward}


@pytest.mark.parametrize(
    ("version", "device", "is_refused"),
    [
        ("2.11.0+cu130", "cuda", True),
        ("2.12.0", "cuda", True),
        ("2.12.1", "cuda", False),
        ("2.13.0", "cuda", False),
        ("2.11.0", "cpu", False),
    ],
)
def test_pipelines_on_gpus_need_a_newer_torch(monkeypatch, version, device, is_refused):
    monkeypatch.setattr("torchtitan.rules.pipeline.metadata.version", {"torch": version}.__getitem__)
    assert lines(TP + "2", device=device) == []
    refusal = [
        f"pipeline_parallel_degree: given 2; allowed: 1 with torch {version} on GPUs; before torch 2.12.1 the ranks of "
        "a pipeline wait for each other forever; install torch 2.12.1 or newer, or use another plan"
    ]
    assert lines(PP + "2", device=device) == refusal * is_refused


def test_pipelines_are_judged_where_torch_is_not_installed(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("torchtitan.rules.pipeline.metadata.version", missing)
    assert lines(PP + "2", device="cuda") == []
