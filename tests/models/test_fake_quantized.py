"""Quantization-aware training: straight-through gradients, the start of rounding, rounded weights, and a run."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import jobs
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.core.fake_quantization import AffineInt4, formats_of
from torchtitan.core.random_draws import initialize
from torchtitan.job import ResolvedJob
from torchtitan.models import fake_quantized
from torchtitan.models.fake_quantized import (
    FakeQuantizationStart,
    FakeQuantizedEmbedding,
    FakeQuantizedLinear,
    round_weights,
    use_fake_quantization,
)
from torchtitan.training.inference_model import load_model

KINDS = ["int4 int8", "int4 fp8", "int8 int8", "fp8 fp8", "nvfp4 nvfp4", "mxfp4 mxfp4"]
TINY = [
    "--model.tokenizer_path=bytes",
    "--model.overrides={dim=32, n_layers=1, n_heads=4, n_kv_heads=2, multiple_of=16}",
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.linear = nn.Embedding(10, 64), nn.Linear(64, 12)


def small_model(kind="int4 int8", embedding=None):
    torch.manual_seed(0)
    model, (weights, inputs) = Model().double(), kind.split()
    use_fake_quantization(model, formats_of(weights, inputs, 16), embedding)
    return model


def built_model(*options):
    builder = ModelBuilder(ResolvedJob(load([*TINY, *options])))
    model = builder.adapted_model()[0]
    builder.fake_quantize(model)
    model.to_empty(device="cpu")
    initialize(model, 7, model.init_rule)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_gradients_are_those_of_rounded_operands(kind):
    model, (weights, inputs) = small_model(kind), (formats_of(*kind.split(), 16))
    linear, x = model.linear, torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 5, 12, dtype=torch.float64)
    rows, weight = x.detach().flatten(0, 1), linear.weight.detach()
    of_x, of_weight = inputs.round(rows, inputs.extent(rows)), weights.round(weight, weights.extent(weight))
    y = linear(x)
    y.backward(grad)
    expected = F.linear(of_x.values, of_weight.values, linear.bias).view(2, 5, 12)
    torch.testing.assert_close(y, expected)
    flat = grad.flatten(0, 1)
    torch.testing.assert_close(x.grad.flatten(0, 1), of_x.masked(flat @ of_weight.values))
    torch.testing.assert_close(linear.weight.grad, of_weight.masked(flat.t() @ of_x.values))
    torch.testing.assert_close(linear.bias.grad, flat.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", [format for kind in KINDS for format in formats_of(*kind.split(), 16)], ids=str)
def test_pieces_of_rows_are_rounded_as_all_at_once(rounding, dtype, monkeypatch):
    x, piece_sizes = torch.randn(7, 64).to(dtype), []
    extent, expected = fake_quantized._extent(x, rounding, None), rounding.round(x.float(), rounding.extent(x.float()))
    monkeypatch.setattr(fake_quantized, "PIECE", 192)
    monkeypatch.setattr(fake_quantized, "_wide", lambda piece: piece_sizes.append(piece.numel()) or piece.float())
    values, inside = fake_quantized._round(x, rounding, extent)
    assert piece_sizes == [192, 192, 192]
    assert torch.equal(values, expected.values.to(dtype))
    assert inside is expected.inside is None or torch.equal(inside, expected.inside)


def test_embedding_rounds_the_rows_that_it_returns():
    model, rounding = small_model(embedding=AffineInt4(16)), AffineInt4(16)
    tokens, weight = torch.tensor([[3, 1], [3, 0]]), model.tok_embeddings.weight
    rows = model.tok_embeddings(tokens)
    torch.testing.assert_close(rows, rounding.round(weight, None).values[tokens])
    rows.sum().backward()
    assert weight.grad[:, 0].tolist() == [1, 1, 0, 2] + [0] * 6


def test_all_linears_but_routers_and_experts_are_rounded():
    options = ["--qat.weight_dtype=int4", "--qat.quantize_embedding", "--qat.group_size=8"]
    model = built_model(*options)
    rounded = {name for name, module in model.named_modules() if isinstance(module, FakeQuantizedLinear)}
    assert rounded == {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} >= {"output"}
    assert isinstance(model.tok_embeddings, FakeQuantizedEmbedding)
    model = ModelBuilder(ResolvedJob(load(["--model.name=qwen2_moe", "--model.tokenizer_path=bytes", *options])))
    built = model.adapted_model()[0]
    model.fake_quantize(built)
    left = {
        name for name, m in built.named_modules() if isinstance(m, nn.Linear) and type(m) is not FakeQuantizedLinear
    }
    assert {name.partition(".moe.")[2] for name in left} == {"router.gate", "shared_gate"}


def test_a_width_that_is_no_whole_number_of_groups():
    with pytest.raises(JobError, match="qat.group_size: given 48; allowed: a divisor of 64, the width of linear"):
        use_fake_quantization(Model(), formats_of("int4", None, 48), None)
    with pytest.raises(JobError, match="given 48; allowed: a divisor of 64, the width of tok_embeddings"):
        use_fake_quantization(Model(), formats_of("fp8", "fp8", 1), AffineInt4(48))


def test_a_part_of_a_row_on_a_rank_that_is_no_whole_number_of_groups():
    linear = small_model().linear
    linear.weight.to_local = lambda: linear.weight.detach()[:, :24]
    linear.share_rows("layers.0.attention.wo", "column", "0")
    with pytest.raises(JobError, match="given 16; allowed: a divisor of 24, the width of the part of layers.0.att"):
        linear.share_rows("layers.0.attention.wo", "row", "0")


def test_rounding_begins_after_some_steps_and_goes_back_with_a_checkpoint():
    model, x = small_model(embedding=AffineInt4(16)), torch.randn(3, 64, dtype=torch.float64)
    rounds = lambda: not torch.equal(model.linear(x), F.linear(x, model.linear.weight, model.linear.bias))  # noqa: E731
    assert rounds()
    hook = FakeQuantizationStart([model], 2)
    assert not rounds() and not model.tok_embeddings.enabled
    hook.after_step(1, [model], [])
    assert not rounds()
    hook.after_step(2, [model], [])
    assert rounds() and model.tok_embeddings.enabled
    hook.load_state_dict({"step": 1})
    assert not rounds() and not hook.state_dict()
    hook.load_state_dict({"step": 2})
    assert rounds()


@pytest.mark.parametrize("kind", ["int4 none", "int4 int8", "nvfp4 nvfp4"])
def test_weights_rounded_once_give_the_same_logits(kind):
    weights, inputs = kind.split()
    options = [f"--qat.weight_dtype={weights}", f"--qat.activation_dtype={inputs}"]
    model, tokens = built_model(*options, "--model.name=llama3.2"), torch.arange(12)[None]  # with tied embeddings
    with torch.no_grad():
        expected = model(tokens)
        round_weights(model)
        torch.testing.assert_close(model(tokens), expected)
        assert model.output.weight is not model.tok_embeddings.weight
        changed = model.layers["0"].attention.wq.weight
        assert changed.abs().max() > 0 and model.layers["0"].attention.wq.formats.weights is None


QAT = {"qat.weight_dtype": "int4", "qat.activation_dtype": "int8", "qat.group_size": 8, "qat.after_steps": 2}


def test_a_run_resumes_on_both_sides_of_the_start(tmp_path):
    texts = jobs.write_texts(tmp_path / "data", 40)
    common = dict(
        model__overrides=jobs.SHALLOW,
        training__steps=4,
        checkpoint__enable=True,
        checkpoint__interval=1,
        checkpoint__keep_latest_k=0,
    )

    def losses(folder, **options):
        return [step["loss"] for step in jobs.train(jobs.arguments(tmp_path / folder, texts, **common, **options))[0]]

    options = {name.replace(".", "__"): value for name, value in QAT.items()}
    plain, whole = losses("plain"), losses("whole", **options)
    assert whole[:2] == plain[:2] and whole[2:] != plain[2:]
    for step in (1, 3):
        part = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole", part)
        for other in range(step + 1, 5):
            shutil.rmtree(part / "checkpoint" / f"step-{other:08}")
        assert losses(f"from {step}", **options)[-(4 - step) :] == whole[step:]
    shutil.copytree(tmp_path / "plain", tmp_path / "from 2")  # by a run that did not round, as no step so far
    for other in (3, 4):
        shutil.rmtree(tmp_path / "from 2" / "checkpoint" / f"step-{other:08}")
    allowed = json.dumps(list(QAT))
    assert losses("from 2", **options, checkpoint__allow_config_change=allowed)[-2:] == whole[2:]
    job = ResolvedJob(load(jobs.arguments(tmp_path / "whole", texts, **common, **options)))
    model, _ = load_model(job, tmp_path / "whole" / "checkpoint" / "step-00000001", torch.device("cpu"))
    assert model.output.formats.weights is None and model.output.enabled  # also before the start
