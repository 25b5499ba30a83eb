"""Rules on optimizers and the options that they depend on."""

import pytest

from torchtitan.config.manager import load
from torchtitan.config.options import ConfigError
from torchtitan.rules import check


def lines(*arguments, ranks=1, device="cpu"):
    faults = check(load([*arguments, "--model.tokenizer_path=bytes"]), ranks, device)
    return [str(fault).removeprefix("the job: ") for fault in faults]


REFUSED = {
    "a pattern that fits nothing": (
        ["--optimizer.name=Muon", '--optimizer.options={targets = ["*attention*", "*atention*"]}'],
        'optimizer.options: given targets = ["*atention*"]; allowed: targets that fit one of '
        "layers.*.attention.wq.weight, ",
    ),
    "no pattern": (
        ["--optimizer.name=Muon", "--optimizer.options={targets = []}"],
        "optimizer.options: given targets = []; allowed: targets that fit one of layers.*.attention.wq.weight, ",
    ),
    "no list": (
        ["--optimizer.name=Muon", '--optimizer.options={targets = "*attention*"}'],
        'optimizer.options: given targets = "*attention*"; allowed: targets = a list, each text',
    ),
    "weights that lose nothing": (
        ["--optimizer.name=AdamWBF16"],
        'optimizer.name: given "AdamWBF16"; allowed: another with training.dtype = "float32"; '
        'set training.dtype = "bfloat16", or write optimizer.name = "AdamW"',
    ),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED)
def test_refused(arguments, message):
    (line,) = lines(*arguments)
    assert line.startswith(message)


def test_muon_is_refused_with_offload_on_gpus():
    arguments = ["--training.enable_cpu_offload", "--optimizer.name=Muon"]
    (line,) = lines(*arguments, ranks=2, device="cuda")
    assert line == (
        'training.enable_cpu_offload: given true; allowed: false with optimizer.name = "Muon"; its step reduces '
        "over ranks, which needs tensors on the GPU"
    )
    assert not lines(*arguments, ranks=2) and not lines(*arguments[:1], ranks=2, device="cuda")


def test_accepted():
    assert not lines("--optimizer.name=AdamWBF16", "--training.dtype=bfloat16")
    assert not lines("--optimizer.name=Muon", "--adapter.kind=lora", "--adapter.rank=8")
    assert not lines("--optimizer.name=Muon", "--model.name=deepseek")
    adapter = ["--adapter.kind=lora", "--adapter.rank=8", '--adapter.train_fully=["output.weight"]']
    assert not lines("--optimizer.name=Muon", '--optimizer.options={targets = ["output.weight"]}', *adapter)


GALORE = ["--optimizer.name=GaLore", "--model.flavor=debugmodel"]
REFUSED_GALORE = {
    "a rank that saves nothing": (
        ["--optimizer.options={rank = 256}"],
        "optimizer.options: given rank = 256; allowed: rank below 256, the longest short side of its matrices; ",
    ),
    "a rank above that of the adapter": (
        ["--adapter.kind=lora", "--adapter.rank=8", "--optimizer.options={rank = 8}"],
        "optimizer.options: given rank = 8; allowed: rank below 8, the longest short side of its matrices; lower it, ",
    ),
    "factors of both sides": (
        ['--optimizer.options={rank = 8, residual = "fira", side = "full"}'],
        'optimizer.options: given residual = "fira"; allowed: "none" with side = "full"; its factors are those of rows',
    ),
    "sums that cannot be turned": (
        ['--optimizer.options={rank = 8, inner = "adafactor", state_on_refresh = "rotate"}'],
        'optimizer.options: given state_on_refresh = "rotate"; allowed: keep or reset with inner = "adafactor"; ',
    ),
    "a formula of one kind of moments": (
        ['--optimizer.options={rank = 8, formula = "galore_torch", inner = "adamw_8bit"}'],
        'optimizer.options: given formula = "galore_torch"; allowed: "torch" with inner = "adamw_8bit"; leave it out, ',
    ),
    "an option without effect": (
        ['--optimizer.options={rank = 8, inner = "adafactor"}', "--optimizer.beta2=0.9"],
        'optimizer.beta2: given beta2 = 0.9; allowed: its default with inner = "adafactor", which does not read it',
    ),
    "float16": (
        ["--optimizer.options={rank = 8}", "--training.dtype=float16"],
        'training.dtype: given "float16"; allowed: one of "float32", "bfloat16"',
    ),
    "early steps and clipping": (
        ["--optimizer.options={rank = 8}", "--optimizer.early_step_in_backward"],
        "training.max_norm: given 1.0; allowed: 0 with optimizer.early_step_in_backward",
    ),
    "early steps and accumulation": (
        [
            "--optimizer.options={rank = 8}",
            "--optimizer.early_step_in_backward",
            "--training.max_norm=0",
            "--training.global_batch_size=32",
        ],
        "training.global_batch_size: given 32; allowed: -1 or ",
    ),
    "no rank": (
        ["--optimizer.options={rank = 0}"],
        "optimizer.options: given rank = 0; allowed: rank = a whole number",
    ),
}


@pytest.mark.parametrize("arguments, message", REFUSED_GALORE.values(), ids=REFUSED_GALORE)
def test_refused_galore_options(arguments, message):
    try:
        faults = lines(*GALORE, *arguments)
    except ConfigError as error:
        faults = [str(fault).removeprefix("command line: ") for fault in error.faults]
    assert len(faults) == 1 and faults[0].startswith(message), faults


def test_sides_that_are_sharded_can_be_refused():
    arguments = [*GALORE, '--optimizer.options={rank = 8, on_conflict = "error"}']
    assert not lines(*arguments)
    (line,) = lines(*arguments, ranks=2)
    assert line == (
        'optimizer.options: given on_conflict = "error"; allowed: on_conflict = "gather" or "flip" for '
        'layers.*.feed_forward.w2.weight; FSDP shards rows; write side = "right" too'
    )
    assert not lines(*GALORE, '--optimizer.options={rank = 8, on_conflict = "error", side = "right"}', ranks=2)


def test_sides_that_tensor_parallel_splits_can_be_refused():
    """GaLore shortens columns of square and tall matrices; tensor parallel splits columns of wo and rows of wq."""
    options = '--optimizer.options={rank = 8, on_conflict = "error", targets = [%s]}'
    split = [*GALORE, "--parallelism.tensor_parallel_degree=2"]
    (line,) = lines(*split, options % '"*.wo.*", "*.wq.*"', ranks=2)
    assert line == (
        'optimizer.options: given on_conflict = "error"; allowed: on_conflict = "gather" or "flip" for '
        "layers.*.attention.wo.weight; each rank has only a part of the projected side; or leave these out of targets"
    )
    assert not lines(*split, options % '"*.wq.*", "*.w2.*"', ranks=2)
    adapter = ["--adapter.kind=lora", "--adapter.rank=16", options.replace("targets", 'side = "reverse_std", targets')]
    (line,) = lines(*split, *adapter[:2], adapter[2] % '"*attention.w[qo].*"', ranks=2)
    assert "for layers.*.attention.wo.lora_A, layers.*.attention.wq.lora_B; each rank has" in line


def test_an_adapter_of_more_than_the_rank_is_projected():
    assert not lines(*GALORE, "--adapter.kind=lora", "--adapter.rank=8", "--optimizer.options={rank = 2}")
    assert not lines("--optimizer.name=APOLLO", '--optimizer.options={rank = 1, per = "tensor", scale = 11.3}')
