"""Tests of the rules on tensor and context parallel: impossible jobs and their faults, and some possible jobs."""

import pytest

from tests.support import judged
from tests.support.judged import CP, METHOD, TP, lines, name

anywhere = judged.anywhere
TENSOR = [
    (
        [TP + "3", "--training.seq_len=99"],
        "tensor_parallel_degree: given 3, which does not divide n_heads 16 and n_kv_heads 16 and vocab_size 2048; "
        "allowed: a divisor of these and feed-forward width 768: 1, 2, 4, 8, 16; write one of these",
    ),
    (
        [TP + "4", "--model.overrides={n_kv_heads = 2}"],
        "tensor_parallel_degree: given 4, which does not divide n_kv_heads 2; allowed: a divisor of it and n_heads 16, "
        "feed-forward width 768, vocab_size 2048: 1, 2; write one of these",
    ),
    (
        [TP + "4", "--model.overrides={multiple_of = 1}"],
        "tensor_parallel_degree: given 4, which does not divide feed-forward width 682; allowed: a divisor of it and "
        "n_heads 16, n_kv_heads 16, vocab_size 2048: 1, 2; write one of these",
    ),
    (
        [TP + "4", "--model.overrides={vocab_size = 258}"],
        "tensor_parallel_degree: given 4, which does not divide vocab_size 258; allowed: a divisor of it and n_heads "
        "16, n_kv_heads 16, feed-forward width 768: 1, 2; write one of these, or fill it up: model.overrides = "
        "{vocab_size = 260}",
    ),
    (
        [TP + "4", "--model.name=qwen3_5", "--model.overrides={delta_key_heads = 2}"],
        "tensor_parallel_degree: given 4, which does not divide delta_key_heads 2; allowed: a divisor of it and "
        "n_heads 8, n_kv_heads 4, feed-forward width 768, vocab_size 2048: 1, 2; write one of these",
    ),
    (
        [TP + "4", "--model.name=falcon_h1", "--model.overrides={ssm_heads = 12, ssm_groups = 3}"],
        "tensor_parallel_degree: given 4; allowed: a divisor or a multiple of ssm_groups 3, as a rank reads whole "
        "groups or one; write one of these",
    ),
    (
        [TP + "4", "--model.name=falcon_h1", "--model.overrides={ssm_heads = 6}"],
        "tensor_parallel_degree: given 4, which does not divide ssm_heads 6; allowed: a divisor of it and n_heads 8, "
        "n_kv_heads 4, feed-forward width 768, vocab_size 2048: 1, 2; write one of these",
    ),
    (  # seq_len need not be a multiple of what tensor parallel cannot be
        [TP + "3"],
        "tensor_parallel_degree: given 3, which does not divide n_heads 16 and n_kv_heads 16 and vocab_size 2048; "
        "allowed: a divisor of these and feed-forward width 768: 1, 2, 4, 8, 16; write one of these",
    ),
    (
        [TP + "2", "--compile.enable", "--activation_checkpoint.mode=memory_budget"],
        'activation_checkpoint.mode: given "memory_budget"; allowed: another mode with tensor parallel; the compiler '
        'cannot determine the mesh sizes of sharded weights (torch 2.13); write "full" or "selective"',
    ),
    (
        [TP + "2", "--activation_checkpoint.mode=memory_budget"],
        'activation_checkpoint.mode: given "memory_budget"; allowed: another mode with tensor parallel; the compiler '
        'cannot determine the mesh sizes of sharded weights (torch 2.13); write "full" or "selective"',
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
        'context_parallel_degree: given 3; allowed: with "ulysses" a divisor of the 16 query heads of a rank: 1, 2, 4, '
        '8, 16; write one of these, or parallelism.context_parallel_rotate_method = "allgather"',
    ),
    (  # nor a multiple of what context parallel cannot be
        [CP + "3", METHOD + "ulysses", "--training.seq_len=2048"],
        'context_parallel_degree: given 3; allowed: with "ulysses" a divisor of the 16 query heads of a rank: 1, 2, 4, '
        '8, 16; write one of these, or parallelism.context_parallel_rotate_method = "allgather"',
    ),
    (
        [CP + "8", TP + "4", METHOD + "ulysses", "--training.seq_len=64"],
        'context_parallel_degree: given 8; allowed: with "ulysses" a divisor of the 4 query heads of a rank (n_heads '
        "16 / tensor_parallel 4): 1, 2, 4; write one of these, or parallelism.context_parallel_rotate_method = "
        '"allgather"',
    ),
    *(
        (
            [CP + "2", METHOD + method, "--compile.enable"],
            f'context_parallel_rotate_method: given "{method}"; allowed: "allgather" or "ulysses" with a compiled '
            'model, as its graph cannot send between two ranks; write "allgather", or compile.enable = false',
        )
        for method in ("ring", "alltoall")
    ),
    *(
        (
            [CP + "2", METHOD + method, "--model.name=mistral"],
            f'context_parallel_rotate_method: given "{method}"; allowed: "allgather" or "ulysses" with a sliding '
            'window (of 64 tokens); write "allgather", or model.overrides = {sliding_window = 0}',
        )
        for method in ("ring", "alltoall")
    ),
    (
        [CP + "2", METHOD + "alltoall", "--model.name=gemma3"],
        'context_parallel_rotate_method: given "alltoall"; allowed: "allgather" or "ulysses" with a sliding '
        'window (of 64 tokens); write "allgather"',
    ),
    (
        [CP + "2", METHOD + "ring", "--model.name=llama4"],
        'context_parallel_rotate_method: given "ring"; allowed: "allgather" or "ulysses" with attention within chunks '
        '(of 128 tokens); write "allgather"',
    ),
]


@pytest.mark.parametrize("case", [*TENSOR, *CONTEXT], ids=name)
def test_impossible_plans_are_refused(case):
    arguments, *expected = case
    assert lines(*arguments) == expected


@pytest.mark.parametrize(
    "arguments",
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
        [CP + "2", METHOD + "ulysses", "--training.seq_len=18"],  # no head and tail, as ranks have full sequences
        [CP + "2", "--parallelism.fsdp_prefetch=2"],  # parameters are sharded over the ranks of a sequence too
    ],
    ids=" ".join,
)
def test_possible_plans_pass(arguments):
    assert lines(*arguments) == []


def test_async_tensor_parallel_on_gpus():
    arguments = [TP + "2", "--parallelism.enable_async_tensor_parallel"]
    assert lines(*arguments, "--compile.enable", device="cuda") == []
    (line,) = lines(*arguments, device="cuda")
    assert line.endswith("add a compiled model (compile.enable), or leave it out")
    (line,) = lines(*arguments, "--compile.enable", "--training.float8=tensorwise", device="cuda")
    assert line == (
        "enable_async_tensor_parallel: given true; allowed: false with training.float8; it fuses gathers "
        "with bfloat16 products, but rounding comes between; leave one of the two out"
    )


def test_capped_scores_leave_no_choice_of_the_kernel():
    (line,) = lines("--model.name=gemma2", "--model.attention_backend=sdpa")
    assert line.startswith(
        'model.attention_backend: given "sdpa"; allowed: "auto" with attention scores capped at 50, which no kernel of '
        'torch computes; write "auto", or model.overrides = {score_cap = 0}'
    )
    uncapped = "--model.overrides={score_cap = 0}"
    assert lines("--model.name=gemma2", "--model.attention_backend=sdpa", uncapped) == []


def test_flex_attention_is_refused_with_ring_and_alltoall():
    flex = [CP + "2", "--model.attention_backend=flex"]
    for method in ("ring", "alltoall"):
        (line,) = lines(*flex, METHOD + method, device="cuda")
        assert line == (
            'model.attention_backend: given "flex"; allowed: "auto" or "sdpa" with context_parallel_rotate_method = '
            f'"{method}", which merges the attention of chunks; write "auto"'
        )
    for method in ("allgather", "ulysses"):
        assert lines(*flex, METHOD + method, device="cuda") == []
