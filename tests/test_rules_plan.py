"""The rules on degrees of parallelism, and plans of several at once."""

import pytest

from tests.support import judged
from tests.support.judged import CP, METHOD, PARTS, PP, SCHEDULE, TP, lines, name
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.constraints import LimitError
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.rules.parallelism import NEEDS_DEGREE

anywhere = judged.anywhere
COMPILE = [
    (
        [TP + "2", CP + "2", PP + "2", "--compile.enable", "--compile.scope=model"],
        'compile.scope: given "model"; allowed: "block" where the model itself is cut (tp 2, cp 2, pp 2); write '
        '"block"',
    ),
]


@pytest.mark.parametrize("case", COMPILE, ids=name)
def test_plans_that_cannot_work(case):
    words, *expected = case
    assert lines(*words) == expected


@pytest.mark.parametrize(
    "words",
    [
        [PP + "2", TP + "2", CP + "2", "--parallelism.data_parallel_shard_degree=2"]
        + ["--parallelism.data_parallel_replicate_degree=2", "--compile.enable"],
    ],
    ids=" ".join,
)
def test_plans_that_can_work(words):
    assert lines(*words) == []


def test_sizes_that_are_wrong_have_no_more_faults():
    """What cannot be worked out is left to the rule that says why."""
    wrong = "--model.overrides={n_heads = 3}"
    for words in ([TP + "2"], [CP + "2", METHOD + "ulysses"], [PP + "2", SCHEDULE + "DualPipeV"]):
        (line,) = lines(*words, wrong)
        assert line.startswith("model.overrides")
    found = lines(PP + "2", SCHEDULE + "none", PARTS + "[['norm']]", wrong, "--compile.enable")
    assert [line.split(":")[0] for line in found] == ["model.overrides", "pipeline_parallel_schedule"]


def test_all_at_once():
    words = [
        TP + "3",
        CP + "2",
        PP + "8",
        METHOD + "ring",
        SCHEDULE + "1F1",
        "--compile.enable",
        "--training.seq_len=7",
    ]
    words += ["--training.local_batch_size=3", "--parallelism.pipeline_parallel_microbatch_size=2"]
    keys = ["tensor_parallel_degree", "training.seq_len", "context_parallel_rotate_method"]
    keys += ["pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"]
    assert [line.split(":")[0] for line in lines(*words)] == keys


# Degrees


@pytest.mark.parametrize(
    ("shard", "others", "ranks", "expected"),
    [
        (2, {}, 2, None),
        (-1, {"data_parallel_replicate": 2}, 4, None),
        (2, {"data_parallel_replicate": 2}, 4, None),
        (-1, {"context_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2}, 16, None),
        (
            4,
            {},
            2,
            "given data_parallel_shard 4 = 4; allowed: degrees whose product is the number of ranks, 2; "
            "start 4 ranks, or write -1 to shard over those that are left",
        ),
        (
            2,
            {"data_parallel_replicate": 3},
            4,
            "given data_parallel_shard 2 x data_parallel_replicate 3 = 6; allowed: degrees whose product is the number "
            "of ranks, 4; start 6 ranks, or write -1 to shard over those that are left",
        ),
        (
            -1,
            {"data_parallel_replicate": 3},
            4,
            "given 4 ranks; allowed: ranks that can be divided by data_parallel_replicate 3; start a multiple of 3 "
            "ranks, or lower a degree",
        ),
        (
            -1,
            {"context_parallel": 2, "tensor_parallel": 4, "pipeline_parallel": 2},
            8,
            "given 8 ranks; allowed: ranks that can be divided by context_parallel 2 x tensor_parallel 4 x "
            "pipeline_parallel 2 = 16; start a multiple of 16 ranks, or lower a degree",
        ),
        (0, {}, 1, "given 0; allowed: at least 1, or -1 for the ranks that are left; write -1"),
    ],
)
def test_degrees_and_ranks(shard, others, ranks, expected):
    words = [f"--parallelism.{name}_degree={degree}" for name, degree in others.items()]
    found = lines(f"--parallelism.data_parallel_shard_degree={shard}", *words, ranks=ranks)
    assert found == ([f"data_parallel_shard_degree: {expected}"] if expected else [])


GIVEN = {bool: lambda default: str(not default).lower(), int: lambda default: str(default + 1)}
WORDS = {
    "context_parallel_load_balancer": "none",
    "context_parallel_rotate_method": "ring",
    "module_fqns_per_model_part": "[['norm']]",
    "pipeline_parallel_layers_per_stage": "2",
    "pipeline_parallel_schedule": "GPipe",
    "pipeline_parallel_schedule_csv": "good.csv",
}


@pytest.mark.parametrize(
    ("degree", "name"), [(degree, name) for degree, names in NEEDS_DEGREE.items() for name in names]
)
def test_options_of_a_degree_that_is_1(degree, name):
    default = getattr(Parallelism(), name)
    given = WORDS[name] if name in WORDS else GIVEN[type(default)](default)
    (line,) = lines(f"--parallelism.{name}={given}", ranks=1)
    assert line.startswith(f"{name}: given ")
    assert line.endswith(f"; allowed: its default while parallelism.{degree} = 1; leave it out")


def test_every_option_of_a_degree_is_known():
    prefixes = {"tensor": "tensor_parallel", "context": "context_parallel", "pipeline": "pipeline_parallel"}
    for axis, prefix in prefixes.items():
        options = {name for name in vars(Parallelism()) if name.startswith(prefix) and not name.endswith("_degree")}
        assert options - {"pipeline_parallel_expert_parallel_overlap"} <= set(NEEDS_DEGREE[f"{axis}_parallel_degree"])


@pytest.mark.parametrize(
    "ranks, degrees",
    [
        (4, {"tp": 3}),
        (6, {"tp": 2, "pp": 2}),
        (4, {"dp_shard": 3}),
        (8, {"dp_shard": 2, "cp": 2, "tp": 4}),
        (2, {"dp_shard": 0}),
        (4, {"ep": 8}),
    ],
)
def test_a_mesh_refuses_in_the_words_of_the_rules(ranks, degrees):
    """One limit, one text: what is judged before a start is what would be refused in it."""
    names = {"dp_shard": "data_parallel_shard", "ep": "expert_parallel", "cp": "context_parallel"}
    names |= {"tp": "tensor_parallel", "pp": "pipeline_parallel"}
    words = [f"--parallelism.{names[axis]}_degree={n}" for axis, n in degrees.items()]
    words += ["--model.name=deepseek"] * ("ep" in degrees)
    with pytest.raises(LimitError) as error:
        ParallelDims(ranks, **degrees)
    said = str(error.value).removeprefix("parallelism.")
    judged = lines(*words, ranks=ranks)
    assert said.partition("; write ")[0] in [line.partition("; write ")[0] for line in judged]
    assert "ep" in degrees or said in judged  # only the rules know how many experts there are, and what would fit
