"""What optimizers ask of the rest of a job is said before anything starts."""

import pytest

from torchtitan.config.manager import load
from torchtitan.rules import check


def lines(*words, ranks=1, device="cpu"):
    faults = check(load([*words, "--model.tokenizer_path=bytes"]), ranks, device)
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


@pytest.mark.parametrize("words, said", REFUSED.values(), ids=REFUSED)
def test_refused(words, said):
    (line,) = lines(*words)
    assert line.startswith(said)


def test_sums_over_gpus_of_what_is_on_the_host():
    words = ["--training.enable_cpu_offload", "--optimizer.name=Muon"]
    (line,) = lines(*words, ranks=2, device="cuda")
    assert line == (
        'training.enable_cpu_offload: given true; allowed: false with optimizer.name = "Muon"; its step sums over '
        "ranks, and between GPUs that goes for what is on them"
    )
    assert not lines(*words, ranks=2) and not lines(*words[:1], ranks=2, device="cuda")


def test_accepted():
    assert not lines("--optimizer.name=AdamWBF16", "--training.dtype=bfloat16")
    assert not lines("--optimizer.name=Muon", "--adapter.kind=lora", "--adapter.rank=8")
    assert not lines("--optimizer.name=Muon", "--model.name=deepseek")
