"""Rules on degrees of parallelism and their combinations."""

import pytest

from tests.support import judged
from tests.support.judged import CP, METHOD, MOE, PARTS, PP, SCHEDULE, TP, lines, name
from torchtitan.config.sections.model import Parallelism
from torchtitan.parallelisms.degrees import NEEDS_DEGREE

anywhere = judged.anywhere
COMPILE = [
    (
        [TP + "2", CP + "2", PP + "2", "--compile.enable", "--compile.scope=model"],
        'compile.scope: given "model"; allowed: "block" if the model is split (tp 2, cp 2, pp 2); write "block"',
    ),
]


SHARDS, SECOND = "--parallelism.data_parallel_shard_degree=", "--parallelism.fsdp_reshard_after_forward="
GATHER, REDUCE = "--parallelism.fsdp_quantized_gather=int8", "--parallelism.fsdp_quantized_reduce=int4"
MESSAGES = [
    (
        [SHARDS + "8", SECOND + "3"],
        'fsdp_reshard_after_forward: given 3; allowed: "always" or "never", or a divisor of the 8 shards: 2, 4; write '
        '"always" to gather among all shards',
    ),
    (
        [SHARDS + "3", SECOND + "3"],
        'fsdp_reshard_after_forward: given 3; allowed: "always" or "never"; write "always" to gather among all shards',
    ),
    (
        [SHARDS + "4", TP + "2", SECOND + "2"],
        'fsdp_reshard_after_forward: given 2; allowed: "always" or "never" with tensor parallel; FSDP2 cannot shard a '
        'tensor-parallel weight a second time (torch 2.13); write "always"',
    ),
    (
        [SHARDS + "16", SECOND + "2", "--model.name=mixtral"],
        'fsdp_reshard_after_forward: given 2; allowed: "always" or "never" with 8 experts over 16 shards; a second '
        'copy is sharded by experts, of which each rank\'s part would be padded; write "always"',
    ),
    (
        ["--parallelism.data_parallel_replicate_degree=2", REDUCE],
        'fsdp_quantized_reduce: given "int4"; allowed: "none" where nothing is sharded; leave it out, or start more '
        "ranks",
    ),
    (
        [SHARDS + "2", GATHER, REDUCE, "--adapter.kind=lora"],
        'fsdp_quantized_gather: given "int8"; allowed: "none" with an adapter or training.unfrozen; frozen weights '
        "would be trained against in int8 and exported exact; leave it out",
        'fsdp_quantized_reduce: given "int4"; allowed: "none" with an adapter or training.unfrozen; an adapter has few '
        "gradients; leave it out",
    ),
    (
        [SHARDS + "2", GATHER, REDUCE, MOE],
        'fsdp_quantized_gather: given "int8"; allowed: "none" for a model with experts; routers would choose other '
        "experts with rounded weights; leave it out",
    ),
    (
        [SHARDS + "2", REDUCE, "--training.unfrozen=norm*"],
        'fsdp_quantized_reduce: given "int4"; allowed: "none" with an adapter or training.unfrozen; an adapter has few '
        "gradients; leave it out",
    ),
]


@pytest.mark.parametrize("case", COMPILE + MESSAGES, ids=name)
def test_plans_that_cannot_work(case):
    arguments, *expected = case
    assert lines(*arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        [PP + "2", TP + "2", CP + "2", "--parallelism.data_parallel_shard_degree=2"]
        + ["--parallelism.data_parallel_replicate_degree=2", "--compile.enable"],
        [SHARDS + "8", SECOND + "4", GATHER, REDUCE],
        [SHARDS + "2", PP + "2", TP + "2", GATHER, REDUCE],
    ],
    ids=" ".join,
)
def test_plans_that_can_work(arguments):
    assert lines(*arguments) == []


def test_an_invalid_size_is_the_only_fault():
    """Only the rule on the invalid size reports a fault; rules that depend on it stay silent."""
    invalid_size = "--model.overrides={n_heads = 3}"
    for arguments in ([TP + "2"], [CP + "2", METHOD + "ulysses"], [PP + "2", SCHEDULE + "DualPipeV"]):
        (line,) = lines(*arguments, invalid_size)
        assert line.startswith("model.overrides")
    faults = lines(PP + "2", SCHEDULE + "none", PARTS + "[['norm']]", invalid_size, "--compile.enable")
    assert [line.split(":")[0] for line in faults] == ["model.overrides", "pipeline_parallel_schedule"]


def test_several_faults_at_once():
    arguments = [
        TP + "3",
        CP + "2",
        PP + "8",
        METHOD + "ring",
        SCHEDULE + "1F1",
        "--compile.enable",
        "--training.seq_len=7",
    ]
    arguments += ["--training.local_batch_size=3", "--parallelism.pipeline_parallel_microbatch_size=2"]
    keys = ["tensor_parallel_degree", "training.seq_len", "context_parallel_rotate_method"]
    keys += ["pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"]
    assert [line.split(":")[0] for line in lines(*arguments)] == keys


# Degrees


@pytest.mark.parametrize(
    ("shard", "other_degrees", "ranks", "expected"),
    [
        (2, {}, 2, None),
        (-1, {"data_parallel_replicate": 2}, 4, None),
        (2, {"data_parallel_replicate": 2}, 4, None),
        (-1, {"context_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2}, 16, None),
        (
            4,
            {},
            2,
            "given data_parallel_shard 4 = 4; allowed: degrees that multiply to the number of ranks, 2; "
            "start 4 ranks, or write -1 to shard over those that are left",
        ),
        (
            2,
            {"data_parallel_replicate": 3},
            4,
            "given data_parallel_shard 2 x data_parallel_replicate 3 = 6; allowed: degrees that multiply to the number "
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
def test_degrees_and_ranks(shard, other_degrees, ranks, expected):
    arguments = [f"--parallelism.{name}_degree={degree}" for name, degree in other_degrees.items()]
    faults = lines(f"--parallelism.data_parallel_shard_degree={shard}", *arguments, ranks=ranks)
    assert faults == ([f"data_parallel_shard_degree: {expected}"] if expected else [])


VALUE_OF_TYPE = {bool: lambda default: str(not default).lower(), int: lambda default: str(default + 1)}
VALUES = {
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
    value = VALUES[name] if name in VALUES else VALUE_OF_TYPE[type(default)](default)
    (line,) = lines(f"--parallelism.{name}={value}", ranks=1)
    assert line.startswith(f"{name}: given ")
    assert line.endswith(f"; allowed: its default while parallelism.{degree} = 1; leave it out")


def test_the_rule_covers_every_option_of_a_degree():
    prefixes = {"tensor": "tensor_parallel", "context": "context_parallel", "pipeline": "pipeline_parallel"}
    for axis, prefix in prefixes.items():
        options = {name for name in vars(Parallelism()) if name.startswith(prefix) and not name.endswith("_degree")}
        assert options - {"pipeline_parallel_expert_parallel_overlap"} <= set(NEEDS_DEGREE[f"{axis}_parallel_degree"])
