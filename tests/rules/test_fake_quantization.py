"""Rules on quantization-aware training."""

import pytest

from torchtitan.config.manager import load
from torchtitan.rules import check


def lines(*arguments, ranks=1):
    faults = check(load([*arguments, "--model.tokenizer_path=bytes"]), ranks, "cpu")
    return [str(fault).removeprefix("the job: ") for fault in faults]


INT4, INT8 = ["--qat.weight_dtype=int4"], ["--qat.weight_dtype=int4", "--qat.activation_dtype=int8"]
REFUSED = {
    "inputs that torchao does not train with": (
        ["--qat.weight_dtype=int8", "--qat.activation_dtype=fp8"],
        'qat.activation_dtype: given "fp8"; allowed: "none" or "int8" with qat.weight_dtype = "int8"; ',
    ),
    "weights of nvfp4 alone": (
        ["--qat.weight_dtype=nvfp4"],
        'qat.activation_dtype: given "none"; allowed: "nvfp4" with qat.weight_dtype = "nvfp4"; write one of these',
    ),
    "groups of a row": (
        ["--qat.weight_dtype=fp8", "--qat.activation_dtype=fp8", "--qat.group_size=32"],
        'qat.group_size: given 32; allowed: unset with qat.weight_dtype = "fp8"; a row of weights has one scale: ',
    ),
    "groups of another size": (
        ["--qat.weight_dtype=nvfp4", "--qat.activation_dtype=nvfp4", "--qat.group_size=32"],
        'qat.group_size: given 32; allowed: 16 with qat.weight_dtype = "nvfp4"; leave it out',
    ),
    "an embedding without inputs": (
        ["--qat.weight_dtype=mxfp4", "--qat.activation_dtype=mxfp4", "--qat.quantize_embedding"],
        'qat.quantize_embedding: given true; allowed: false with qat.weight_dtype = "mxfp4"; the rows of an embedding ',
    ),
    "rounding that never begins": (
        [*INT4, "--training.steps=10", "--qat.after_steps=10"],
        "qat.after_steps: given 10; allowed: less than training.steps = 10; no step would round: ",
    ),
    "rounding that never begins by tokens": (
        [*INT4, "--training.tokens=163840", "--training.seq_len=2048", "--qat.after_steps=10"],
        "qat.after_steps: given 10; allowed: less than training.steps = 10; no step would round: ",
    ),
    "a group that divides no width": (
        [*INT8, "--qat.group_size=48"],
        "qat.group_size: given 48; allowed: a divisor of 256, the width of layers.*.attention.wq, ",
    ),
    "a width without whole groups": (
        [*INT4, "--model.overrides={dim = 240, n_heads = 8, n_kv_heads = 8, multiple_of = 32}"],
        "qat.group_size: given 32; allowed: a divisor of 240, the width of layers.*.attention.wq, ",
    ),
    "a width without whole groups of the format": (
        [
            "--qat.weight_dtype=mxfp4",
            "--qat.activation_dtype=mxfp4",
            "--model.overrides={dim = 240, n_heads = 8, n_kv_heads = 8, multiple_of = 32}",
        ],
        "qat.group_size: given 32; allowed: a divisor of 240, the width of ",
    ),
    "an embedding of another width": (
        [*INT4, "--qat.quantize_embedding", "--model.name=opt", "--model.overrides={embed_dim = 40}"],
        "qat.group_size: given 32; allowed: a divisor of 40, the width of ",
    ),
    "an adapter": (
        [*INT4, "--adapter.kind=lora", "--adapter.rank=8"],
        'qat.weight_dtype: given "int4"; allowed: "none" with adapter.kind = "lora"; an adapter multiplies ',
    ),
    "products in float8": (
        [*INT4, "--training.float8=rowwise"],
        'qat.weight_dtype: given "int4"; allowed: "none" with training.float8 = "rowwise"; linears would be ',
    ),
    "options without a format": (
        ["--qat.group_size=16"],
        "qat.group_size: given 16; allowed: nothing without qat.weight_dtype; set that, or leave it out",
    ),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_refused(arguments, message):
    line, *_ = lines(*arguments)
    assert line.startswith(message)


def test_groups_are_whole_on_each_rank():
    arguments = [*INT8, "--parallelism.tensor_parallel_degree=4", "--qat.group_size=128"]
    (line,) = [line for line in lines(*arguments, ranks=4) if "attention" in line]
    assert line == (
        "qat.group_size: given 128; allowed: a divisor of 64, the width of layers.*.attention.wo, its part on each of "
        "4 ranks of tensor parallel; lower parallelism.tensor_parallel_degree"
    )
    assert not lines(*arguments[:-1], "--qat.group_size=32", "--model.overrides={multiple_of = 128}", ranks=4)


def test_refused_on_several_ranks():
    (line,) = lines(*INT4, "--parallelism.fsdp_quantized_gather=int8", ranks=2)
    assert line.startswith('parallelism.fsdp_quantized_gather: given "int8"; allowed: "none" with qat.weight_dtype; ')
    tp = ["--parallelism.tensor_parallel_degree=2", "--parallelism.enable_async_tensor_parallel"]
    assert any("false with qat.weight_dtype" in line for line in lines(*INT4, *tp, ranks=2))


def test_refused_with_a_reference():
    assert any('"none" with task.kind = "dpo"' in line for line in lines(*INT4, "--task.kind=dpo"))


@pytest.mark.parametrize("arguments", [INT4, INT8, [*INT4, "--qat.quantize_embedding"]], ids=str)
def test_accepted(arguments):
    assert not lines(*arguments)
    assert not lines(*arguments, "--model.name=qwen3_moe")
