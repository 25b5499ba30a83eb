"""The rules on plans of parallelism: a table of jobs that cannot work and what is said of each, and some that can.

The model is the debug model (6 layers, 16 heads, feed-forward width 768, vocabulary 2048) unless a job says otherwise.
"""

import re
from pathlib import Path

import pytest

from torchtitan.config import Parallelism
from torchtitan.config_manager import load
from torchtitan.parallelisms.pipeline_cut import SCHEDULES
from torchtitan.rules import check
from torchtitan.rules.pipeline import WHOLE_BACKWARD
from torchtitan.rules.plan import NEEDS_DEGREE

TP, CP, PP = (f"--parallelism.{axis}_parallel_degree=" for axis in ("tensor", "context", "pipeline"))
SCHEDULE, CSV = "--parallelism.pipeline_parallel_schedule=", "--parallelism.pipeline_parallel_schedule_csv="
METHOD, PARTS = "--parallelism.context_parallel_rotate_method=", "--parallelism.module_fqns_per_model_part="
FIRST_HALF = "['tok_embeddings', 'layers.0', 'layers.1', 'layers.2']"
SECOND_HALF = "['layers.3', 'layers.4', 'layers.5', 'norm', 'output']"


@pytest.fixture(autouse=True)
def anywhere(tmp_path, monkeypatch):
    """Jobs are checked in a folder of their own, which has the schedules of the tests below."""
    monkeypatch.chdir(tmp_path)
    for name, text in SCHEDULE_FILES.items():
        Path(name).write_text(text)
    yield
    assert not (tmp_path / "outputs").exists()


def lines(*words: str, ranks: int | None = None, device: str = "cpu") -> list[str]:
    """The faults of a job that runs on as many ranks as its degrees need, if nothing else is said."""
    for word in words if ranks is None else ():
        degree = re.fullmatch(r"--parallelism\.(?!expert)\w+_degree=(\d+)", word)
        ranks = (ranks or 1) * (int(degree[1]) if degree else 1)
    faults = check(load(["--model.tokenizer_path=bytes", *words]), ranks or 1, device)
    return [str(fault).removeprefix("the job: parallelism.").removeprefix("the job: ") for fault in faults]


SCHEDULE_FILES = {
    "good.csv": "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "split.csv": "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n",
    "gap.csv": "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1\n",
    "deadlock.csv": "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
}


# Jobs -> faults

TENSOR = [
    (
        [TP + "3", "--training.seq_len=99"],
        "tensor_parallel_degree: given 3, which does not divide n_heads 16 and n_kv_heads 16 and vocab_size 2048; "
        "allowed: what divides n_heads 16, n_kv_heads 16, feed-forward width 768, vocab_size 2048, as ranks do not get "
        "uneven shares: 1, 2, 4, 8, 16; write one of these",
    ),
    (
        [TP + "4", "--model.overrides={n_kv_heads = 2}"],
        "tensor_parallel_degree: given 4, which does not divide n_kv_heads 2; allowed: what divides n_heads 16, "
        "n_kv_heads 2, feed-forward width 768, vocab_size 2048, as ranks do not get uneven shares: 1, 2; write one of "
        "these",
    ),
    (
        [TP + "4", "--model.overrides={multiple_of = 1}"],
        "tensor_parallel_degree: given 4, which does not divide feed-forward width 682; allowed: what divides n_heads "
        "16, n_kv_heads 16, feed-forward width 682, vocab_size 2048, as ranks do not get uneven shares: 1, 2; write "
        "one of these",
    ),
    (
        [TP + "4", "--model.overrides={vocab_size = 258}"],
        "tensor_parallel_degree: given 4, which does not divide vocab_size 258; allowed: what divides n_heads 16, "
        "n_kv_heads 16, feed-forward width 768, vocab_size 258, as ranks do not get uneven shares: 1, 2; write one of "
        "these, or fill it up: model.overrides = {vocab_size = 260}",
    ),
    (
        [TP + "2", "--training.seq_len=33"],
        "training.seq_len: given 33; allowed: a multiple of tensor_parallel 2 (sequence parallel); write 32 or 34",
    ),
    (
        [TP + "2", "--parallelism.enable_async_tensor_parallel", "--parallelism.disable_sequence_parallel"],
        "enable_async_tensor_parallel: given true; allowed: true only with GPUs, a compiled model (compile.enable), "
        "sequence parallel (no disable_sequence_parallel); add GPUs and a compiled model (compile.enable) and sequence "
        "parallel (no disable_sequence_parallel), or leave it out",
    ),
]
CONTEXT = [
    (
        [CP + "2", "--training.seq_len=30", "--validation.enable", "--validation.seq_len=2"],
        "training.seq_len: given 30; allowed: a multiple of 2 x context_parallel 2 (a head and a tail each); write 28 "
        "or 32",
        "validation.seq_len: given 2; allowed: a multiple of 2 x context_parallel 2 (a head and a tail each); write 4",
    ),
    (
        [CP + "2", "--training.seq_len=31", "--parallelism.context_parallel_load_balancer=none"],
        "training.seq_len: given 31; allowed: a multiple of context_parallel 2; write 30 or 32",
    ),
    (
        [CP + "2", TP + "4", "--training.seq_len=36"],
        "training.seq_len: given 36; allowed: a multiple of 2 x context_parallel 2 (a head and a tail each) and of "
        "context_parallel 2 x tensor_parallel 4 (sequence parallel), so of 8; write 32 or 40",
    ),
    (
        [CP + "3", METHOD + "ulysses", "--training.seq_len=48"],
        'context_parallel_degree: given 3; allowed: with "ulysses" what divides the 16 query heads of a rank: 1, 2, 4, '
        '8, 16; write one of these, or parallelism.context_parallel_rotate_method = "allgather"',
    ),
    (
        [CP + "8", TP + "4", METHOD + "ulysses", "--training.seq_len=64"],
        'context_parallel_degree: given 8; allowed: with "ulysses" what divides the 4 query heads of a rank (n_heads '
        "16 / tensor_parallel 4): 1, 2, 4; write one of these, or parallelism.context_parallel_rotate_method = "
        '"allgather"',
    ),
    *(
        (
            [CP + "2", METHOD + method, "--compile.enable"],
            f'context_parallel_rotate_method: given "{method}"; allowed: "allgather" or "ulysses" with a compiled '
            'model, whose graph has no messages between two ranks; write "allgather", or compile.enable = false',
        )
        for method in ("ring", "alltoall")
    ),
]
PIPELINE = [
    (
        [PP + "2", SCHEDULE + "Interleaved1F1"],
        'pipeline_parallel_schedule: given "Interleaved1F1"; allowed: one of "GPipe", "1F1B", "LoopedBFS", '
        '"Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"; did you mean "Interleaved1F1B"?',
    ),
    (
        [PP + "2", "--training.local_batch_size=6", "--parallelism.pipeline_parallel_microbatch_size=4"],
        "pipeline_parallel_microbatch_size: given 4; allowed: what divides training.local_batch_size; a local batch of "
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
        "stages (on 8 ranks); use at most 6 stages: fewer ranks, or a schedule with fewer stages per rank (GPipe and "
        "1F1B have 1)",
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
    (  # Interleaved1F1B would not do either
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
        "optimizer.early_step_in_backward: given true; allowed: false with tensor or context parallel; it has been "
        "shown equal to one device with data parallel alone",
    ),
    (
        [PP + "2", "--optimizer.early_step_in_backward", "--training.max_norm=0"],
        "optimizer.early_step_in_backward: given true; allowed: false with a pipeline; each microbatch adds to the "
        "gradients, and a step is due after the last",
    ),
    (
        [PP + "2", "--parallelism.data_parallel_shard_degree=2", "--parallelism.fsdp_prefetch=1"]
        + ["--parallelism.fsdp_reshard_after_forward=always"],
        "fsdp_prefetch: given 1; allowed: 0 with a pipeline; stages keep what they gather until the last microbatch",
        'fsdp_reshard_after_forward: given "always"; allowed: "default" or "never" with a pipeline; parameters would '
        "be gathered again for each microbatch",
    ),
]
FILES = [
    (
        [PP + "2", CSV + "good.csv", "--training.local_batch_size=2", SCHEDULE + "GPipe"]
        + ["--parallelism.pipeline_parallel_layers_per_stage=4"],
        'pipeline_parallel_schedule: given "GPipe"; allowed: its default with '
        "parallelism.pipeline_parallel_schedule_csv; drop one of the two",
        "pipeline_parallel_layers_per_stage: given 4; allowed: unset with parallelism.pipeline_parallel_schedule_csv, "
        "whose stages decide; drop one of the two",
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
COMPILE = [
    (
        [TP + "2", CP + "2", PP + "2", "--compile.enable", "--compile.scope=model"],
        'compile.scope: given "model"; allowed: "block" where the model itself is cut (tp 2, cp 2, pp 2); write '
        '"block"',
    ),
]


MOE, EP = "--model.name=deepseek", "--parallelism.expert_parallel_degree="
OVERLAP = "--parallelism.pipeline_parallel_expert_parallel_overlap"
EXPERTS = [
    (
        [EP + "2"],
        "expert_parallel_degree: given 2; allowed: 1 for a model without experts; leave it out, or choose a model with "
        "experts; llama3 has none",
    ),
    (
        [MOE, EP + "3"],
        "expert_parallel_degree: given 3; allowed: what divides the 8 experts and the ranks that it borrows; write one "
        "of 1, 2, 4",
    ),
    (
        [MOE, EP + "8", TP + "2"],
        "expert_parallel_degree: given 8; allowed: what divides data_parallel_shard 2 x context_parallel 1 x "
        "tensor_parallel 2 = 4, the ranks that it borrows; write one of 1, 2, 4, or lend it a multiple of 8 ranks",
    ),
    (
        [MOE, EP + "2", TP + "2", "--parallelism.disable_sequence_parallel"],
        "disable_sequence_parallel: given true; allowed: false with parallelism.expert_parallel_degree and tensor "
        "parallel; tensor-parallel ranks would all send the same tokens",
    ),
    (
        [MOE, EP + "2", "--compile.enable"],
        "compile.enable: given true; allowed: false with parallelism.expert_parallel_degree, or without the component "
        "model; the host reads how many tokens go where, which would break the graph",
    ),
    (
        [OVERLAP],
        "pipeline_parallel_expert_parallel_overlap: given true; allowed: true with expert_parallel_degree > 1 and "
        "pipeline_parallel_degree > 1, whose all-to-alls it hides; leave it out",
    ),
    (
        [MOE, EP + "2", PP + "2", "--activation_checkpoint.mode=full_keep_comm"],
        'activation_checkpoint.mode: given "full_keep_comm"; allowed: with '
        'parallelism.pipeline_parallel_expert_parallel_overlap only; write "full", or set it',
    ),
    (
        [MOE, EP + "4", "--training.local_batch_size=1"],
        "expert_parallel_degree: given 4; allowed: a degree that leaves 12 / 4 = 3 ranks, which divide the 2 experts "
        "of each, or dim 256 and expert_dim 256; write one of 1",
    ),
    (
        [MOE, TP + "2", "--model.overrides={n_dense_layers = 6}"],
        "model.overrides: given n_dense_layers = 6; allowed: n_dense_layers between 1 and 5 with tensor parallel; "
        "change it, or write parallelism.tensor_parallel_degree = 1",
    ),
    (
        [MOE, "--model.overrides={top_k = 9}"],
        "model.overrides: given {top_k = 9}; allowed: sizes that fit together: top_k = 9 with n_experts = 8: a token "
        "goes to different experts, so top_k can be 8 at most",
    ),
    (
        [MOE, "--model.overrides={n_groups = 3}"],
        "model.overrides: given {n_groups = 3}; allowed: sizes that fit together: n_groups = 3 with n_experts = 8: "
        "groups are equally large, so n_groups must divide n_experts",
    ),
]


@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: " ".join(case[0])[:90])
def test_expert_plans_that_cannot_work(case):
    words, line = case
    assert line in lines(*words, ranks=12 if {EP + "3", EP + "4"} & set(words) else 4)


@pytest.mark.parametrize(
    "plan", [[EP + "4"], [EP + "2", TP + "2"], [EP + "2", PP + "2", SCHEDULE + "DualPipeV", OVERLAP]]
)
def test_expert_plans_that_work(plan):
    assert lines(MOE, *plan, "--training.local_batch_size=8", ranks=4) == []


@pytest.mark.parametrize(
    "case", [*TENSOR, *CONTEXT, *PIPELINE, *FILES, *COMPILE], ids=lambda case: " ".join(case[0])[:90]
)
def test_plans_that_cannot_work(case):
    words, *expected = case
    assert lines(*words) == expected


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("none.csv", "the file: what cannot be read (No such file or directory)"),
        ("gap.csv", "rank 1, stage 1: no action 1B1"),
        ("deadlock.csv", "rank 0, step 1, action 0B0: a deadlock: "),
    ],
)
def test_files_that_hold_no_schedule(file, place):
    """What is wrong with a table, and where, is said by schedule_actions."""
    (line,) = lines(PP + "2", CSV + file, "--training.local_batch_size=2")
    assert line.startswith(f"pipeline_parallel_schedule_csv: given {file}, {place}") and "; allowed: " in line


def test_a_file_that_does_not_have_the_named_stages():
    named = f"{PARTS}[{FIRST_HALF}, ['layers.3'], ['layers.4'], ['layers.5', 'norm', 'output']]"
    (line,) = lines(PP + "2", CSV + "good.csv", "--training.local_batch_size=2", named)
    assert line.startswith("pipeline_parallel_schedule_csv: given good.csv, the table: 2 stages; allowed: 4")


@pytest.mark.parametrize(
    "words",
    [
        [TP + "2"],
        [TP + "16", "--training.seq_len=32"],
        [TP + "2", "--parallelism.disable_sequence_parallel", "--training.seq_len=33"],
        [TP + "2", "--parallelism.disable_loss_parallel", "--compile.enable"],
        [CP + "2", "--training.document_mask"],
        [CP + "3", "--training.seq_len=48"],
        [CP + "2", METHOD + "ring", "--compile.enable", "--compile.components=loss"],
        [CP + "8", TP + "2", METHOD + "ulysses", "--training.seq_len=64", "--compile.enable"],
        [CP + "2", TP + "2", "--training.seq_len=4"],  # a piece of head and tail each, of one token
        [CP + "2", METHOD + "ulysses", "--training.seq_len=18"],  # whose ranks have whole sequences: no head and tail
        [PP + "2"],
        [PP + "6", "--training.local_batch_size=1"],
        [PP + "2", "--parallelism.pipeline_parallel_microbatch_size=2", "--validation.enable"]
        + ["--validation.local_batch_size=3"],
        [PP + "2", "--parallelism.data_parallel_shard_degree=2", "--parallelism.fsdp_reshard_after_forward=never"],
        [PP + "2", SCHEDULE + "interleaved1f1b"],  # as torch, in any case
        *([PP + "2", SCHEDULE + name, "--activation_checkpoint.mode=full"] for name in SCHEDULES),
        *([PP + "2", SCHEDULE + name, "--compile.enable"] for name in WHOLE_BACKWARD),
        [PP + "2", "--activation_checkpoint.mode=memory_budget", "--compile.enable"],
        [PP + "2", "--parallelism.pipeline_parallel_layers_per_stage=2", SCHEDULE + "LoopedBFS"],
        [PP + "2", f"{PARTS}[{FIRST_HALF}, {SECOND_HALF}]"],
        [PP + "2", CSV + "good.csv", "--training.local_batch_size=2"],
        [PP + "2", CSV + "split.csv", "--training.local_batch_size=4"]
        + ["--parallelism.pipeline_parallel_microbatch_size=2"],
        [PP + "2", "--model.overrides={tied_embeddings = true}"],
        [PP + "2", TP + "2", CP + "2", "--parallelism.data_parallel_shard_degree=2"]
        + ["--parallelism.data_parallel_replicate_degree=2", "--compile.enable"],
        [CP + "2", "--parallelism.fsdp_prefetch=2"],  # parameters are sharded over the ranks of a sequence too
    ],
    ids=" ".join,
)
def test_plans_that_can_work(words):
    assert lines(*words) == []


def test_async_tensor_parallel_on_gpus():
    words = [TP + "2", "--parallelism.enable_async_tensor_parallel"]
    assert lines(*words, "--compile.enable", device="cuda") == []
    (line,) = lines(*words, device="cuda")
    assert line.endswith("add a compiled model (compile.enable), or leave it out")


def test_rings_bring_their_own_attention():
    flex = [CP + "2", "--model.attention_backend=flex"]
    for method in ("ring", "alltoall"):
        (line,) = lines(*flex, METHOD + method, device="cuda")
        assert line == (
            'model.attention_backend: given "flex"; allowed: "auto" or "sdpa" with context_parallel_rotate_method = '
            f'"{method}", which joins attention of pieces; write "auto"'
        )
    for method in ("allgather", "ulysses"):
        assert lines(*flex, METHOD + method, device="cuda") == []


def test_sizes_that_are_wrong_have_no_more_faults():
    """What cannot be worked out is left to the rule that says why."""
    wrong = "--model.overrides={n_heads = 3}"
    for words in ([TP + "2"], [CP + "2", METHOD + "ulysses"], [PP + "2", SCHEDULE + "DualPipeV"]):
        (line,) = lines(*words, wrong)
        assert line.startswith("model.overrides")
    found = lines(PP + "2", SCHEDULE + "none", PARTS + "[['norm']]", wrong, "--compile.enable")
    assert [line.split(":")[0] for line in found] == ["model.overrides", "pipeline_parallel_schedule"]


def test_no_schedule_compiles_where_the_cut_is_wrong():
    words = [PP + "2", SCHEDULE + "DualPipeV", "--compile.enable", "--model.overrides={n_layers = 1}"]
    cut, compiled = lines(*words)
    assert cut.startswith("pipeline_parallel_degree: given 2") and "1 layers cannot fill 4 pipeline stages" in cut
    assert compiled.endswith("with compile; set compile.enable = false")


def test_schedules_that_compile_are_those_with_whole_backwards():
    assert set(WHOLE_BACKWARD) == {name for name, traits in SCHEDULES.items() if not traits.split_backward}


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
