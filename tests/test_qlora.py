"""Matrices in 4 bits: the codes of the paper, bytes, the same bits on every rank, the same model by every way in."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from scripts import compare_nf4
from tests.support import judged
from tests.support.jobs import arguments, full, train, write_texts
from tests.support.judged import lines
from tests.support.memory import Peak
from tests.support.pool import run_ranks
from torchtitan.adapters.quantized import LEVELS, NF4, Int8
from torchtitan.adapters.targets import quantization_block
from torchtitan.build import parts as build
from torchtitan.config import manager
from torchtitan.core.tensor_storage import stores
from torchtitan.models.spec import MODELS
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

anywhere = judged.anywhere


def packed(weight, block=64):
    return NF4().quantize(weight.unflatten(1, (-1, block)), weight.abs().amax(1))


def test_levels_are_the_quantiles_of_the_paper():
    """Section 3: for each half the mean quantiles of 2^3 and 2^3 + 1 levels, 0 shared, the largest at 1 (appendix E has
    them to float32).
    """
    offset = 0.9677083
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat((negative, torch.zeros(1, dtype=torch.float64), positive.flip(0))).div(positive.max())
    torch.testing.assert_close(torch.tensor(LEVELS, dtype=torch.float64), levels, rtol=0, atol=2e-6)


def test_each_weight_becomes_the_nearest_level_of_its_block():
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    codes, scales, rows = packed(weight)
    assert (codes.dtype, scales.dtype, rows.dtype) == (torch.uint8, torch.uint8, torch.int32)
    again = NF4().dequantize(codes, scales, rows, dtype=torch.float32)
    of_block = (scales.float() * rows.view(torch.float32)[:, None] / 255).repeat_interleave(64, 1)
    nearest = (weight / of_block)[..., None].sub(torch.tensor(LEVELS)).abs().argmin(-1)
    torch.testing.assert_close(torch.tensor(LEVELS)[nearest] * of_block, again, rtol=1e-6, atol=0)
    # the largest scale is off by half a step of 255 at most, so the error is nearly that of 16 levels alone
    exact = weight.unflatten(1, (-1, 64)).abs().amax(-1).repeat_interleave(64, 1)
    alone = torch.tensor(LEVELS)[(weight / exact)[..., None].sub(torch.tensor(LEVELS)).abs().argmin(-1)] * exact
    assert (again - weight).norm() <= 1.01 * (alone - weight).norm()
    assert (again - weight).norm() / weight.norm() < 0.1


def test_codes_are_torchaos_but_for_a_few():
    """Of torchao 0.18 (scripts/compare_nf4.py): the scales are in 8 bits in another way, so that a weight between two
    levels may become the other; more is not lost here than there. Its levels have four digits.
    """
    kept = json.loads(compare_nf4.FIXTURE.read_text())
    assert torch.tensor(kept["levels"]).allclose(torch.tensor(LEVELS), rtol=0, atol=5.1e-5)
    weight = compare_nf4.weights()
    mine, again = compare_nf4.ours(weight)
    theirs = compare_nf4.codes_of(torch.tensor(list(bytes.fromhex(kept["codes"])), dtype=torch.uint8))
    apart = (mine - theirs).abs()
    assert apart.max() == 1 and (apart > 0).float().mean() < 0.004
    assert (again - weight).norm() / weight.norm() < kept["lost"]


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 64), torch.full((2, 64), 3.0), torch.tensor([[0.0] * 64 + [1.0] * 64])]
)
def test_plain_blocks_are_exact(weight):
    assert torch.equal(NF4().dequantize(*packed(weight), dtype=torch.float32), weight)
    eight = Int8().quantize(weight[:, None], weight.abs().amax(1))
    torch.testing.assert_close(Int8().dequantize(*eight, dtype=torch.float32), weight, rtol=1e-6, atol=0)


def test_eight_bits_are_off_by_half_a_step_at_most():
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    codes, rows = Int8().quantize(weight[:, None], weight.abs().amax(1))
    assert (codes.dtype, rows.dtype) == (torch.int8, torch.int32) and codes.min() >= -127
    error = (Int8().dequantize(codes, rows, dtype=torch.float32) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 253.9).all()
    assert sum(t.numel() * t.element_size() for t in (codes, rows)) == weight.numel() * (1 + 4 / 256)


def test_bytes_of_a_weight():
    for inputs in (1024, 4096, 11008):
        codes, scales, rows = packed(torch.randn(8, inputs), quantization_block(inputs))
        size = sum(t.numel() * t.element_size() for t in (codes, scales, rows)) / (8 * inputs)
        assert size == 1 / 2 + 1 / 64 + 4 / inputs <= 0.53


QLORA = dict(
    adapter__kind="qlora",
    adapter__rank=4,
    adapter__lr_ratio_b=4.0,
    model__overrides="{dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=260, multiple_of=64}",
    checkpoint__enable=True,
    training__steps=3,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("base")
    plain = QLORA | dict(adapter__kind="none", checkpoint__last_save_model_only=True)
    plain |= dict(adapter__rank=128, adapter__lr_ratio_b=1.0)
    run_ranks(1, train, arguments(folder, texts, **plain))
    run_ranks(1, train, arguments(folder, texts, **plain, checkpoint__last_save_in_hf=True))
    return folder


def bits(argv):
    """Of a trainer that has loaded: the packed parameters, whole, and after training the adapters', and the losses."""
    trainer = Trainer(manager.load(argv), read_ranks())
    names = dict(trainer.model.named_parameters())
    before = {name: full(p.detach()).clone().numpy() for name, p in names.items() if name.endswith(NF4.parameter_names)}
    trainer.train()
    after = {name: full(p.detach()).clone().numpy() for name, p in names.items() if "lora" in name}
    optimized = sum(len(optimizer.state) for optimizer in trainer.optimizers)
    assert optimized == len(after), "what is packed has no optimizer state"
    trainer.metrics.close()
    return before, after, [row["loss"] for row in _rows(trainer)]


def _rows(trainer):
    return [row for row in map(json.loads, trainer.metrics.path.read_text().splitlines()) if "loss" in row]


WAYS = [
    ("model", 1, {}),
    ("model_hf", 1, {}),
    ("model", 2, {}),
    ("model_hf", 2, {}),
    ("checkpoint", 2, {"parallelism__tensor_parallel_degree": 2}),
    ("model_hf", 2, {"parallelism__tensor_parallel_degree": 2}),
    ("model", 2, {"parallelism__pipeline_parallel_degree": 2}),
    ("model_hf", 2, {"parallelism__data_parallel_replicate_degree": 2}),
]


def test_every_way_in_packs_the_same_bits(tmp_path, texts, base):
    """Checkpoint, export and Hugging Face, on one rank, FSDP, DDP, TP and PP; then three steps with the same losses."""
    first = None
    for index, (form, ranks, degrees) in enumerate(WAYS):
        options = QLORA | degrees | dict(checkpoint__initial_load_path=base / form)
        options |= dict(checkpoint__initial_load_in_hf=form == "model_hf")
        alone = ranks == 1 or "tensor" in str(degrees) or "pipeline" in str(degrees)
        options |= dict(training__local_batch_size=8 if alone else 4)
        answers = run_ranks(ranks, bits, arguments(tmp_path / str(index), texts, **options))
        packed_bits = {name: value for answer in answers for name, value in answer[0].items()}
        learned = {name: value for answer in answers for name, value in answer[1].items()}
        losses = answers[0][2]
        if first is None:
            first = packed_bits, learned, losses
        assert packed_bits.keys() == first[0].keys() and learned.keys() == first[1].keys()
        for name, value in first[0].items():
            assert (packed_bits[name] == value).all(), (form, degrees, name)
        assert losses == pytest.approx(first[2], rel=1e-5)
    assert len(first[0]) == 3 * 7 * 4


@pytest.mark.parametrize("save", ["whole", "alone"])
def test_resumes_to_the_bit(tmp_path, texts, base, save):
    options = QLORA | dict(adapter__save=save, checkpoint__interval=2, training__local_batch_size=4)
    options |= dict(checkpoint__initial_load_path=base / "model_hf", checkpoint__initial_load_in_hf=True)
    whole = run_ranks(2, train, arguments(tmp_path, texts, **options))[0][1]
    assert run_ranks(2, train, arguments(tmp_path, texts, **options, checkpoint__load_step=2))[0][1] == whole
    held = json.loads((tmp_path / "checkpoint" / "step-00000003" / "manifest.json").read_text())["tensors"]
    assert any(name.endswith("weight_codes") for name in held) == (save == "whole")
    assert not any(name.endswith("attention.wq.weight") for name in held)
    if save == "alone":
        frozen = [name for name in held if name.startswith("model.") and "lora" not in name]
        assert not frozen


def test_the_state_of_a_model():
    """Bytes of the packed linears of a model of some width: 0.53 a weight at most."""
    argv = [
        "--adapter.kind=qlora",
        "--model.tokenizer_path=bytes",
        "--model.overrides={dim=1024,n_layers=1,n_heads=16}",
    ]
    model, _, adapter = build.adapted_model(manager.load(argv))
    kept = [p for name, p in model.named_parameters() if name.endswith(NF4.parameter_names)]
    size = sum(p.numel() * p.element_size() for p in kept)
    weights = sum(math.prod(store.empty().shape) for _, store in stores(model))
    assert weights == sum(m for m in [4 * 1024**2 + 3 * 1024 * 2816]) and size <= 0.53 * weights
    assert (
        adapter.num_parameters - sum(map(math.prod, adapter.added_shapes.values()))
        == build.model_args(manager.load(argv)).num_parameters
    )


def test_backward_keeps_no_unpacked_matrix():
    from torchtitan.adapters.quantized import _QuantizedMatmul

    weight, x = torch.randn(32, 64), torch.randn(5, 64, requires_grad=True)
    parts = packed(weight)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = _QuantizedMatmul.apply(x, NF4(), *parts)
    assert sum(t.numel() * t.element_size() for t in kept) == sum(t.numel() * t.element_size() for t in parts)
    y.square().sum().backward()
    mine, x.grad = x.grad, None
    F.linear(x, NF4().dequantize(*parts, dtype=torch.float32)).square().sum().backward()
    assert torch.equal(mine, x.grad)


@pytest.mark.parametrize(
    "words, said",
    [
        (['--adapter.target=["output"]'], "leave out output, or write kind"),
        (["--model.overrides={multiple_of=3}"], "leave out layers.*.feed_forward.w2, or write kind"),
    ],
)
def test_faults(words, said):
    (fault,) = lines("--adapter.kind=qlora", *words)
    assert said in fault and "adapter.target" in fault


def test_ranks_that_cut_blocks_are_refused():
    """Of 11008 inputs, 172 blocks; eight bits are by row and have none."""
    llama = ["--model.name=llama2", "--model.flavor=7B", "--adapter.rank=8"]
    eight, four = ("--parallelism.tensor_parallel_degree=" + degree for degree in "84")
    (fault,) = lines("--adapter.kind=qlora", *llama, eight)
    assert fault == (
        "tensor_parallel_degree: given 8, which does not divide blocks of layers.*.feed_forward.w2 172; allowed: what "
        "divides it and blocks of layers.*.attention.wo 64: 1, 2, 4; write one of these"
    )
    assert not lines("--adapter.kind=qlora", *llama, four) and not lines("--adapter.kind=lora_int8", *llama, eight)
    assert not lines("--adapter.kind=qlora", '--adapter.target=["*attention*"]', *llama, eight)


@pytest.mark.parametrize("kind", ["qlora", "lora_int8"])
def test_loading_needs_little_more_than_what_is_kept(kind, tmp_path):
    """However many layers there are, the matrices pass by one after the other: beside what the model keeps there is
    never more than the largest of them, as it is read and while it is packed (five copies of 4 bytes, one of 8).
    """
    hf, beside = MODELS["llama3"].hf, []
    for layers in (2, 6):
        sizes = f"--model.overrides={{dim=64,n_layers={layers},n_heads=4,n_kv_heads=2,vocab_size=260,multiple_of=64}}"
        plain = build.meta_model(manager.load(["--model.tokenizer_path=bytes", sizes])).to_empty(device="cpu")
        hf.save_hf(tmp_path / f"{layers}", plain.state_dict(), plain.args)
        config = manager.load(["--model.tokenizer_path=bytes", sizes, f"--adapter.kind={kind}", "--adapter.rank=4"])
        model, _, adapter = build.adapted_model(config)
        model.to_empty(device="cpu")
        with Peak(model) as peak:
            hf.load_hf(tmp_path / f"{layers}", model, plain.args, adapter.added_parameters)
        beside.append(peak.bytes)
    shapes = [store.empty().shape for _, store in stores(model)]
    assert beside[0] == beside[1] <= (5 * 4 + 8) * max(map(math.prod, shapes))
    packed = {f"{name.rpartition('.')[0]}.{own}" for name, store in stores(model) for own in store.packed}
    kept = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if name in packed)
    assert kept + beside[1] < 4 * sum(map(math.prod, shapes)), "less than the plain matrices alone"
