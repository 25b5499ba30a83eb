"""QLoRA: the levels of the paper, sizes in bytes, and the same packed bits on all ranks and from all weight sources."""

import json
import math
import random

import pytest
import torch
import torch.nn.functional as F

from scripts import compare_nf4
from tests.support import judged
from tests.support.jobs import arguments, full, train, write_texts
from tests.support.judged import lines
from tests.support.memory import Peak
from tests.support.pool import run_ranks
from torchtitan.adapters.low_rank import LoRASettings, LowRankExperts
from torchtitan.adapters.quantized import LEVELS, NF4, Int8, Int8Experts, NF4Experts, _QuantizedMatmul
from torchtitan.adapters.targets import quantization_block
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.core.tensor_storage import stores
from torchtitan.job import ResolvedJob
from torchtitan.models.moe.layer import Experts, SquaredReLU
from torchtitan.models.spec import MODELS
from torchtitan.process.ranks import read_ranks
from torchtitan.training.trainer import Trainer

anywhere = judged.anywhere


def packed(weight, block=64):
    return NF4().quantize(weight.unflatten(1, (-1, block)), weight.abs().amax(1))


def test_levels_are_the_quantiles_of_the_paper():
    """Compute the levels as section 3 of the paper does; appendix E lists them in float32.

    Each half has the mean quantiles of 2^3 and 2^3 + 1 levels; 0 is shared, and the largest is 1.
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
    unpacked = NF4().dequantize(codes, scales, rows, dtype=torch.float32)
    of_block = (scales.float() * rows.view(torch.float32)[:, None] / 255).repeat_interleave(64, 1)
    nearest = (weight / of_block)[..., None].sub(torch.tensor(LEVELS)).abs().argmin(-1)
    torch.testing.assert_close(torch.tensor(LEVELS)[nearest] * of_block, unpacked, rtol=1e-6, atol=0)
    # 8-bit scales are off by half a step of 255 at most, so the error is nearly that with exact scales
    exact = weight.unflatten(1, (-1, 64)).abs().amax(-1).repeat_interleave(64, 1)
    with_exact_scales = (
        torch.tensor(LEVELS)[(weight / exact)[..., None].sub(torch.tensor(LEVELS)).abs().argmin(-1)] * exact
    )
    assert (unpacked - weight).norm() <= 1.01 * (with_exact_scales - weight).norm()
    assert (unpacked - weight).norm() / weight.norm() < 0.1


def test_codes_differ_from_torchaos_in_few_places():
    """Compare with codes that torchao 0.18 wrote (scripts/compare_nf4.py).

    It quantizes the scales in another way, so a weight between two levels may get the other one; our error is not
    larger. Its levels have four digits.
    """
    recorded = json.loads(compare_nf4.FIXTURE.read_text())
    assert torch.tensor(recorded["levels"]).allclose(torch.tensor(LEVELS), rtol=0, atol=5.1e-5)
    weight = compare_nf4.weights()
    our_codes, unpacked = compare_nf4.our_quantize(weight)
    torchao_codes = compare_nf4.codes_of(torch.tensor(list(bytes.fromhex(recorded["codes"])), dtype=torch.uint8))
    distance = (our_codes - torchao_codes).abs()
    assert distance.max() == 1 and (distance > 0).float().mean() < 0.004
    assert (unpacked - weight).norm() / weight.norm() < recorded["lost"]


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 64), torch.full((2, 64), 3.0), torch.tensor([[0.0] * 64 + [1.0] * 64])]
)
def test_constant_blocks_are_exact(weight):
    assert torch.equal(NF4().dequantize(*packed(weight), dtype=torch.float32), weight)
    eight = Int8().quantize(weight[:, None], weight.abs().amax(1))
    torch.testing.assert_close(Int8().dequantize(*eight, dtype=torch.float32), weight, rtol=1e-6, atol=0)


def test_int8_errors_are_at_most_half_a_step():
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    codes, rows = Int8().quantize(weight[:, None], weight.abs().amax(1))
    assert (codes.dtype, rows.dtype) == (torch.int8, torch.int32) and codes.min() >= -127
    error = (Int8().dequantize(codes, rows, dtype=torch.float32) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 253.9).all()
    assert sum(t.numel() * t.element_size() for t in (codes, rows)) == weight.numel() * (1 + 4 / 256)


@pytest.mark.parametrize("quantizer, block", [(NF4(), 16), (Int8(), 1)])
def test_rows_of_a_rank_are_packed_as_in_the_full_matrix(quantizer, block):
    """Of four rows, six ranks have one or none."""
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    full_parts = quantizer.quantize(weight.unflatten(1, (-1, block)), weight.abs().amax(1))
    for rows in weight.tensor_split(6):
        of_rank = quantizer.quantize(rows.unflatten(1, (-1, block)), rows.abs().amax(1))
        first = 0 if not len(rows) else int((weight == rows).all(1).nonzero())
        assert [part.tolist() for part in of_rank] == [part[first : first + len(rows)].tolist() for part in full_parts]
        assert quantizer.dequantize(*of_rank, dtype=torch.float32).shape == rows.shape


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


OF_EXPERTS = QLORA | dict(
    model__name="qwen3_moe",
    model__overrides="{dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, expert_dim=32, n_experts=4, "
    "vocab_size=260}",
    adapter__target='["*attention*", "*.moe.experts.w2"]',
    adapter__quantized_experts="all",
)


def write_bases(folder, texts, options):
    """Write a trained model into `folder`: a checkpoint, model/ and model_hf/."""
    plain = {name: value for name, value in options.items() if not name.startswith("adapter__")}
    plain |= dict(checkpoint__last_save_model_only=True)
    run_ranks(1, train, arguments(folder, texts, **plain))
    run_ranks(1, train, arguments(folder, texts, **plain, checkpoint__last_save_in_hf=True))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory, texts):
    return write_bases(tmp_path_factory.mktemp("base"), texts, QLORA)


@pytest.fixture(scope="module")
def base_of_experts(tmp_path_factory, texts):
    return write_bases(tmp_path_factory.mktemp("experts"), texts, OF_EXPERTS)


def packed_adapters_and_losses(argv):
    """Train a job; return the full packed parameters after loading, the adapters after training, and the losses."""
    trainer = Trainer(manager.load(argv), read_ranks())
    names = dict(trainer.model.named_parameters())
    before = {name: full(p.detach()).clone().numpy() for name, p in names.items() if name.endswith(NF4.suffixes)}
    trainer.train()
    after = {name: full(p.detach()).clone().numpy() for name, p in names.items() if "lora" in name}
    optimized = sum(len(optimizer.state) for optimizer in trainer.optimizers)
    assert optimized == len(after), "packed weights must have no optimizer state"
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


def test_every_source_of_weights_is_packed_to_the_same_bits(tmp_path, texts, base):
    """Load a checkpoint, an export and a Hugging Face folder on one rank, FSDP, DDP, TP and PP; losses agree."""
    assert number_of_equal_parts(tmp_path, texts, base, QLORA, WAYS) == 3 * 7 * 4


EXPERT_PARALLEL = {"parallelism__expert_parallel_degree": 2}
WAYS_OF_EXPERTS = [
    ("model_hf", 1, {}),
    ("model", 4, EXPERT_PARALLEL | {"training__local_batch_size": 2}),
    ("model_hf", 8, {"training__local_batch_size": 1}),  # shards of outputs
]


def test_experts_are_packed_to_the_same_bits_by_all_ranks(tmp_path, texts, base_of_experts):
    number = number_of_equal_parts(tmp_path, texts, base_of_experts, OF_EXPERTS, WAYS_OF_EXPERTS)
    assert number == 3 * (4 + 3) * 2


def number_of_equal_parts(tmp_path, texts, base, job, ways):
    """Train a job from weights of several forms and under several plans; return the number of equal packed tensors."""
    first = None
    for index, (form, ranks, degrees) in enumerate(ways):
        options = job | dict(checkpoint__initial_load_path=base / form)
        options |= dict(checkpoint__initial_load_in_hf=form == "model_hf")
        one_batch = ranks == 1 or "tensor" in str(degrees) or "pipeline" in str(degrees)
        options |= dict(training__local_batch_size=8 if one_batch else 4) | degrees
        answers = run_ranks(ranks, packed_adapters_and_losses, arguments(tmp_path / str(index), texts, **options))
        packed_bits = {name: value for answer in answers for name, value in answer[0].items()}
        adapters = {name: value for answer in answers for name, value in answer[1].items()}
        losses = answers[0][2]
        if first is None:
            first = packed_bits, adapters, losses
        assert packed_bits.keys() == first[0].keys() and adapters.keys() == first[1].keys()
        for name, value in first[0].items():
            assert (packed_bits[name] == value).all(), (form, degrees, name)
        assert losses == pytest.approx(first[2], rel=1e-5)
    return len(first[0])


@pytest.mark.parametrize("save", ["whole", "alone"])
def test_quantized_experts_resume_under_another_plan(tmp_path, texts, base_of_experts, save):
    options = OF_EXPERTS | dict(adapter__save=save, checkpoint__interval=2, training__local_batch_size=4)
    options |= dict(checkpoint__initial_load_path=base_of_experts / "model_hf", checkpoint__initial_load_in_hf=True)
    losses = [row["loss"] for row in run_ranks(2, train, arguments(tmp_path, texts, **options))[0][0]]
    other = options | EXPERT_PARALLEL | dict(checkpoint__load_step=2)
    resumed = run_ranks(2, train, arguments(tmp_path, texts, **other))[0][0]
    assert resumed[-1]["loss"] == pytest.approx(losses[-1], rel=1e-5) and losses[-1] != losses[-2]
    saved = json.loads((tmp_path / "checkpoint" / "step-00000003" / "manifest.json").read_text())["tensors"]
    of_stacks = {name.rpartition(".")[2] for name in saved if "experts.w" in name}
    assert of_stacks == ({f"w{i}{suffix}" for i in (1, 2, 3) for suffix in NF4.suffixes} if save == "whole" else set())


@pytest.mark.parametrize("save", ["whole", "alone"])
def test_resume_is_exact(tmp_path, texts, base, save):
    options = QLORA | dict(adapter__save=save, checkpoint__interval=2, training__local_batch_size=4)
    options |= dict(checkpoint__initial_load_path=base / "model_hf", checkpoint__initial_load_in_hf=True)
    uninterrupted = run_ranks(2, train, arguments(tmp_path, texts, **options))[0][1]
    assert run_ranks(2, train, arguments(tmp_path, texts, **options, checkpoint__load_step=2))[0][1] == uninterrupted
    saved = json.loads((tmp_path / "checkpoint" / "step-00000003" / "manifest.json").read_text())["tensors"]
    assert any(name.endswith("weight_codes") for name in saved) == (save == "whole")
    assert not any(name.endswith("attention.wq.weight") for name in saved)
    if save == "alone":
        frozen = [name for name in saved if name.startswith("model.") and "lora" not in name]
        assert not frozen


def packed_stack(generator):
    """Return experts with some matrices packed, the same with these dequantized, and the weights before."""
    kind, has_gate = generator.choice((NF4Experts, Int8Experts)), generator.random() < 0.7
    dim, width = (generator.choice((16, 32, 48, 256, 320)) for _ in range(2))
    names = ("w1", "w2", "w3") if has_gate else ("w1", "w2")
    adapted, quantized = (tuple(n for n in names if generator.random() < 0.6) for _ in range(2))
    gate_up = 5 if {"w1", "w3"} <= {*adapted} and generator.random() < 0.5 else 0
    settings = LoRASettings(3, 0.7, matrices=adapted, packed=quantized or ("w2",), gate_up_rank=gate_up)
    activation, biases = None if has_gate else SquaredReLU(), generator.random() < 0.5
    ours, plain = (Experts(dim, width, 5, biases, activation).double().requires_grad_(False) for _ in range(2))
    for experts, experts_class in ((ours, kind), (plain, LowRankExperts)):
        experts.__class__ = experts_class
        experts.add_low_rank_parameters(settings)
    torch.manual_seed(generator.randrange(2**31))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.3)
        originals = {name: getattr(plain, name).clone() for name in names}
        for name, store in ours.stores().items():
            store.write(originals[name])
            getattr(plain, name).copy_(store.read())
        for name, parameter in ours.named_parameters():
            if parameter.is_floating_point():
                parameter.copy_(plain.get_parameter(name))
    return ours, plain, originals


@pytest.mark.parametrize("seed", range(12))
def test_experts_are_packed_one_by_one_and_compute_as_their_dequantized_weights(seed):
    """Outputs and gradients are those of LoRA on the weights that are read back, each packed like a matrix alone."""
    ours, plain, originals = packed_stack(random.Random(seed))
    for name, store in ours.stores().items():
        read = store.read()
        for matrix, unpacked in zip(originals[name].float().mT, read.mT, strict=True):
            block = ours.quantizer.block_size(*ours.quantizer.empty_parameters(*matrix.shape))
            parts = ours.quantizer.quantize(matrix.unflatten(1, (-1, block)), matrix.abs().amax(1))
            assert torch.equal(ours.quantizer.dequantize(*parts, dtype=torch.float64), unpacked)
        assert store.holds(originals[name]) and not store.holds(originals[name].flip(0))
        merged = plain.merged_weight(name, read) if name in ours.settings.matrices else read
        assert torch.equal(ours.merged_weight(name, read), merged)
    sizes = torch.tensor([3, 0, 7, 1, 4])
    x = torch.randn(15, originals["w1"].shape[1], dtype=torch.float64)
    answers = []
    for experts in (ours, plain):
        rows = x.clone().requires_grad_()
        y = experts(rows, sizes)
        y.square().sum().backward()
        gradients = {name: p.grad for name, p in experts.named_parameters() if p.requires_grad}
        answers.append((y.detach(), rows.grad, gradients))
    torch.testing.assert_close(*answers, rtol=1e-10, atol=1e-10)


def test_packed_weights_take_little_more_than_half_a_byte():
    """The packed linears of a wide model take at most 0.53 bytes a weight."""
    argv = [
        "--adapter.kind=qlora",
        "--model.tokenizer_path=bytes",
        "--model.overrides={dim=1024,n_layers=1,n_heads=16}",
    ]
    model, _, adapter = ModelBuilder(ResolvedJob(manager.load(argv))).adapted_model()
    packed_parameters = [p for name, p in model.named_parameters() if name.endswith(NF4.suffixes)]
    size = sum(p.numel() * p.element_size() for p in packed_parameters)
    weights = sum(math.prod(store.empty().shape) for _, store in stores(model))
    assert weights == sum(m for m in [4 * 1024**2 + 3 * 1024 * 2816]) and size <= 0.53 * weights
    assert (
        adapter.num_parameters - sum(map(math.prod, adapter.added_shapes.values()))
        == ResolvedJob(manager.load(argv)).model.args.num_parameters
    )


def test_backward_saves_no_unpacked_matrix():
    weight, x = torch.randn(32, 64), torch.randn(5, 64, requires_grad=True)
    parts = packed(weight)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = _QuantizedMatmul.apply(x, NF4(), None, *parts)
    assert sum(t.numel() * t.element_size() for t in saved) == sum(t.numel() * t.element_size() for t in parts)
    y.square().sum().backward()
    gradient, x.grad = x.grad, None
    F.linear(x, NF4().dequantize(*parts, dtype=torch.float32)).square().sum().backward()
    assert torch.equal(gradient, x.grad)


def test_backward_of_experts_saves_no_unpacked_stack():
    """Saved are x, the parts and where rows end; of 4 experts, a packed stack takes a seventh of one in float32."""
    experts = Experts(64, 32, 4)
    experts.__class__ = NF4Experts
    experts.add_low_rank_parameters(LoRASettings(2, 1.0, matrices=(), packed=("w1", "w2", "w3")))
    for name, store in experts.stores().items():
        store.write(torch.randn(store.shape, generator=torch.Generator().manual_seed(len(name))))
    x, saved = torch.randn(6, 64, requires_grad=True), dict[int, torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        experts(x, torch.tensor([1, 2, 0, 3])).sum().backward()
    assert max(t.nbytes for t in saved.values()) == experts.w1_codes.nbytes == 4 * 32 * 64 // 2


@pytest.mark.parametrize(
    "options, message",
    [
        (['--adapter.target=["output"]'], "leave out output, or write kind"),
        (["--model.overrides={multiple_of=3}"], "leave out layers.*.feed_forward.w2, or write kind"),
    ],
)
def test_faults(options, message):
    (fault,) = lines("--adapter.kind=qlora", *options)
    assert message in fault and "adapter.target" in fault


EXPERTS = {"adapter.kind": "qlora", "adapter.rank": 4, "adapter.target": '["*attention*"]', "model.name": "qwen3_moe"}
ALL, STACKS = {"adapter.quantized_experts": "all"}, {"adapter.target": '["*.experts"]'}
NARROW = {"model.overrides": "{expert_dim=24}"}


@pytest.mark.parametrize(
    "options, message",
    [
        (ALL | {"model.name": "llama3"}, '"adapted" in a model without experts; leave it out'),
        (ALL | NARROW, 'given "all"; allowed: "none" with inputs of layers.*.moe.experts that'),
        (STACKS | NARROW, "that are no multiple of 16; weights are packed in blocks"),
        ({"adapter.target": '["*moe.experts.w1"]'} | NARROW, ""),
        (ALL | {"adapter.kind": "lora"}, 'nothing with adapter.kind = "lora"'),
        (ALL | {"adapter.train_fully": '["*.w2"]'}, "adapter.train_fully"),
        (STACKS | {"adapter.train_scaling": "true"}, "stacks of experts have no trained scale"),
        (ALL | {"adapter.train_scaling": "true", "adapter.dropout": 0.1}, ""),
        (STACKS | NARROW | {"adapter.quantized_experts": "none"}, ""),
        (ALL | NARROW | {"adapter.kind": "lora_int8"}, ""),
    ],
    ids=str,
)
def test_faults_of_experts(options, message):
    faults = lines(*(f"--{key}={value}" for key, value in (EXPERTS | options).items()))
    assert (len(faults) == 1 and message in faults[0]) if message else not faults


def test_tensor_parallel_that_cuts_blocks_is_refused():
    """11008 inputs are 172 blocks, which not every degree divides; 8-bit scales are by row and have no blocks."""
    llama = ["--model.name=llama2", "--model.flavor=7B", "--adapter.rank=8"]
    eight, four = ("--parallelism.tensor_parallel_degree=" + degree for degree in "84")
    (fault,) = lines("--adapter.kind=qlora", *llama, eight)
    assert fault == (
        "tensor_parallel_degree: given 8, which does not divide blocks of layers.*.feed_forward.w2 172; allowed: a "
        "divisor of it and blocks of layers.*.attention.wo 64: 1, 2, 4; write one of these"
    )
    assert not lines("--adapter.kind=qlora", *llama, four) and not lines("--adapter.kind=lora_int8", *llama, eight)
    assert not lines("--adapter.kind=qlora", '--adapter.target=["*attention*"]', *llama, eight)


@pytest.mark.parametrize("kind", ["qlora", "lora_int8"])
def test_peak_memory_of_loading_does_not_grow_with_depth(kind, tmp_path):
    """Matrices are loaded and packed one at a time, whatever the number of layers.

    Packing the largest matrix takes five copies of 4 bytes and one of 8; nothing else is held besides the model.
    """
    hf, extra_bytes = MODELS["llama3"].hf, []
    for layers in (2, 6):
        sizes = f"--model.overrides={{dim=64,n_layers={layers},n_heads=4,n_kv_heads=2,vocab_size=260,multiple_of=64}}"
        plain = (
            ModelBuilder(ResolvedJob(manager.load(["--model.tokenizer_path=bytes", sizes])))
            .meta_model()
            .to_empty(device="cpu")
        )
        hf.save_hf(tmp_path / f"{layers}", plain.state_dict(), plain.args)
        config = manager.load(["--model.tokenizer_path=bytes", sizes, f"--adapter.kind={kind}", "--adapter.rank=4"])
        model, _, adapter = ModelBuilder(ResolvedJob(config)).adapted_model()
        model.to_empty(device="cpu")
        with Peak(model) as peak:
            hf.load_hf(tmp_path / f"{layers}", model, plain.args, adapter.added_parameters)
        extra_bytes.append(peak.bytes)
    shapes = [store.empty().shape for _, store in stores(model)]
    assert extra_bytes[0] == extra_bytes[1] <= (5 * 4 + 8) * max(map(math.prod, shapes))
    packed = {f"{name.rpartition('.')[0]}.{suffix}" for name, store in stores(model) for suffix in store.packed}
    num_bytes = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if name in packed)
    assert num_bytes + extra_bytes[1] < 4 * sum(map(math.prod, shapes)), (
        "the peak must be below the size of the unpacked matrices"
    )
