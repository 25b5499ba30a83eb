"""Sizes of the frozen model under an adapter: against the parameters of a model with that adapter installed."""

import pytest
import torch

from torchtitan.adapters.quantized import NF4, Int8
from torchtitan.adapters.targets import packed_bytes
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.manager import load
from torchtitan.job import ResolvedJob
from torchtitan.planner.frozen_base import FrozenBase
from torchtitan.planner.plan import planning_obstacle

LORA = ("--model.flavor=debugmodel", "--model.tokenizer_path=bytes", "--adapter.rank=4")


def resolved(*options):
    return ResolvedJob(load([*LORA, *options]))


@pytest.mark.parametrize(("kind", "quantizer"), [("qlora", NF4()), ("lora_int8", Int8())])
@pytest.mark.parametrize("shape", [(256, 512), (4096, 14336), (48, 32)])
def test_packed_matrices_have_the_bytes_of_their_parameters(kind, quantizer, shape):
    assert packed_bytes(kind, *shape) == sum(part.nbytes for part in quantizer.empty_parameters(*shape))


@pytest.mark.parametrize("kind", ["lora", "qlora", "lora_int8"])
@pytest.mark.parametrize("target", ['["all-linear"]', '["*.wq", "*.w2"]'])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_are_those_of_a_model(kind, target, dtype):
    job = resolved(f"--adapter.kind={kind}", f"--adapter.target={target}", f"--training.dtype={dtype}")
    base, args = FrozenBase.of(job), job.model.args
    model, _, adapter = ModelBuilder(job).adapted_model()
    adapter.cast_frozen(model, {4: torch.float32, 2: torch.bfloat16}[base.stored_bytes])
    block = list(model.get_submodule("layers.0").parameters())
    assert base.added(args.block_linears(0), 1) == sum(p.numel() for p in block if p.requires_grad)
    frozen = base.frozen(args.block_linears(0), 1, 2 * args.dim)
    assert frozen.stored == sum(p.nbytes for p in block if not p.requires_grad)
    assert (frozen.unpacked > 0) == (kind != "lora")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--adapter.kind=dora",), "adapter.kind = 'dora': the formulas are of lora, qlora, lora_int8"),
        (("--adapter.kind=lora", "--adapter.train_dense_rest=true"), "adapter.train_dense_rest: the formulas"),
        (("--adapter.kind=lora", '--adapter.target=["output", "*.wq"]'), "the same targets in all layers"),
        (("--adapter.kind=lora", '--adapter.target=["layers.0.*"]'), "the same targets in all layers"),
        (('--training.unfrozen=["*norm*"]',), "training.unfrozen: the formulas"),
        (("--model.name=falcon_h1",), "model.name = 'falcon_h1': the formulas do not describe layers with a state"),
        (("--model.name=llama4",), "model.name = 'llama4': the formulas do not describe experts in every n-th layer"),
        (("--model.name=gemma4",), "model.name = 'gemma4': the formulas do not describe heads of two widths"),
        (("--model.name=qwen3_5",), "model.name = 'qwen3_5': the formulas do not describe layers with a state"),
        (("--model.name=nemotron_h", '--model.overrides={layer_pattern = "*E"}'), "do not describe layers of one part"),
        (("--model.name=granite", "--model.overrides={attention_dropout = 0.1}"), "that attention_dropout keeps; set"),
        (("--adapter.kind=qlora",), ""),
        ((), ""),
    ],
)
def test_models_and_trained_parameters_without_formulas_are_left_to_the_rehearsal(options, text):
    obstacle = planning_obstacle(resolved(*options).model)
    assert text in obstacle and bool(obstacle) == bool(text)
