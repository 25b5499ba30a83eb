"""Tests of the rules on experts: impossible jobs and their faults, and some possible jobs."""

import pytest

from tests.support import judged
from tests.support.judged import EP, MOE, PP, SCHEDULE, TP, lines, name

anywhere = judged.anywhere
OVERLAP = "--parallelism.pipeline_parallel_expert_parallel_overlap"
EXPERTS = [
    (
        [EP + "2"],
        "expert_parallel_degree: given 2; allowed: 1 for a model without experts; leave it out, or choose a model with "
        "experts; llama3 has none",
    ),
    (
        [MOE, EP + "3"],
        "expert_parallel_degree: given 3; allowed: a divisor of the 8 experts and the ranks that it borrows; write one "
        "of 1, 2, 4",
    ),
    (
        [MOE, EP + "3", PP + "4"],
        "expert_parallel_degree: given 3; allowed: a divisor of the 8 experts and the ranks that it borrows; write one "
        "of 1, 2, 4, 8, and lend it a multiple of as many ranks",
    ),
    (
        [MOE, EP + "2", "--model.overrides={n_dense_layers = 6}"],
        "expert_parallel_degree: given 2; allowed: 1 for a model without experts; leave it out, or lower "
        "n_dense_layers in model.overrides; all 6 layers are dense",
    ),
    (
        [MOE, EP + "3", "--model.overrides={n_dense_layers = 6, n_mtp_layers = 1}"],
        "expert_parallel_degree: given 3; allowed: a divisor of the 8 experts and the ranks that it borrows; write one "
        "of 1, 2, 4",
    ),
    (
        [MOE, EP + "8", TP + "2"],
        "expert_parallel_degree: given 8; allowed: a divisor of data_parallel_shard 2 x context_parallel 1 x "
        "tensor_parallel 2 = 4, the ranks that it borrows; write one of 1, 2, 4, or lend it a multiple of 8 ranks",
    ),
    (
        [MOE, EP + "2", TP + "2", "--parallelism.disable_sequence_parallel"],
        "disable_sequence_parallel: given true; allowed: false with parallelism.expert_parallel_degree and tensor "
        "parallel; tensor-parallel ranks would all send the same tokens",
    ),
    (
        [MOE, EP + "2", "--compile.enable", "--activation_checkpoint.mode=selective"]
        + ["--activation_checkpoint.selective_ac_option=op"],
        'activation_checkpoint.selective_ac_option: given "op"; allowed: a number n (every n-th layer) with a '
        "compiled model "
        "and parallelism.expert_parallel_degree; operators inside a compiled block cannot be selected; "
        'write "2", or another mode',
    ),
    (
        [MOE, EP + "2", PP + "2", OVERLAP, "--compile.enable"],
        "pipeline_parallel_expert_parallel_overlap: given true; allowed: false with a compiled model; it computes "
        "the gradients of inputs and weights separately, a compiled block both at once; set compile.enable = false",
    ),
    (
        [MOE, EP + "2", "--activation_checkpoint.mode=memory_budget"],
        'activation_checkpoint.mode: given "memory_budget"; allowed: another mode with expert parallel; '
        "expert-parallel "
        'layers are not compiled, so a budget does not apply; write "full" or "selective"',
    ),
    (
        [MOE, "--compile.enable", "--compile.backend=eager", "--activation_checkpoint.mode=full"],
        'compile.backend: given "eager"; allowed: another backend for experts that are recomputed; its recompute '
        'changes the counts of tokens that backward needs (torch 2.13); write "aot_eager", or '
        'activation_checkpoint.mode = "none"',
    ),
    (
        [OVERLAP],
        "pipeline_parallel_expert_parallel_overlap: given true; allowed: true with expert_parallel_degree > 1 and "
        "pipeline_parallel_degree > 1, as it hides all-to-alls; leave it out",
    ),
    (
        [MOE, EP + "2", PP + "2", "--activation_checkpoint.mode=full_keep_comm"],
        'activation_checkpoint.mode: given "full_keep_comm"; allowed: "full_keep_comm" only with '
        'parallelism.pipeline_parallel_expert_parallel_overlap; write "full", or set it',
    ),
    (
        [MOE, EP + "4", "--training.local_batch_size=1"],
        "expert_parallel_degree: given 4; allowed: a degree that leaves 12 / 4 = 3 ranks that divide the 2 experts "
        "of each, or dim 256 and expert_dim 256; write 1",
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


@pytest.mark.parametrize("case", EXPERTS, ids=name)
def test_impossible_expert_plans_are_refused(case):
    arguments, line = case
    assert line in lines(*arguments, ranks=12 if {EP + "3", EP + "4"} & set(arguments) else 4)


@pytest.mark.parametrize(
    "plan",
    [
        [EP + "4"],
        [EP + "4", "--compile.enable", "--activation_checkpoint.mode=full"],
        [EP + "2", TP + "2"],
        [EP + "2", PP + "2", SCHEDULE + "DualPipeV", OVERLAP],
        [EP + "4", "--model.overrides={n_dense_layers = 6, n_mtp_layers = 1}"],  # the depth has experts
        [TP + "2", "--model.overrides={n_dense_layers = 0, n_shared_experts = 0}"],
        [TP + "2", "--model.overrides={n_dense_layers = 6}"],
    ],
)
def test_possible_expert_plans_pass(plan):
    assert lines(MOE, *plan, "--training.local_batch_size=8", ranks=4) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [EP + "3"],  # a model without experts lends them no ranks either
        [EP + "2", TP + "2", "--parallelism.disable_sequence_parallel"],
    ],
    ids=" ".join,
)
def test_a_model_without_experts_has_one_fault(arguments):
    (line,) = lines(*arguments, ranks=4)
    assert line.startswith("expert_parallel_degree: ") and line.endswith("llama3 has none")


def test_a_wrong_tensor_parallel_degree_hides_no_other_fault():
    """Ranks of an impossible tensor-parallel degree are not counted for expert parallel."""
    for degree in ("2", "4"):
        (line,) = lines(MOE, EP + degree, TP + "3")
        assert line.startswith("tensor_parallel_degree: given 3")
