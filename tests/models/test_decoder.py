"""Properties of every decoder family: published sizes, causality, packed documents, cuts, the loss, tensor parallel."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.hf_parity import build, close, tokens_for
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import (
    DEEPSEEK,
    GATED,
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL,
    OPT,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    ROBERTA,
)
from torchtitan.losses.objective import SummedCrossEntropy
from torchtitan.models import SIZES
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms.sequence_layout import default_positions
from torchtitan.parallelisms.tensor_parallel import apply_tensor_parallel

PUBLISHED = {  # parameters, as transformers counts them in the published checkpoints
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama3.1", "8B"): 8_030_261_248,
    ("llama3.1", "70B"): 70_553_706_496,
    ("llama3.1", "405B"): 405_853_388_800,
    ("llama3.2", "1B"): 1_235_814_400,
    ("llama3.2", "3B"): 3_212_749_824,
    ("deepseek", "16B"): 15_706_484_224,
    ("deepseek", "236B"): 235_741_434_880,
    ("deepseek", "671B"): 671_026_404_352,  # without multi-token prediction and the 14,848 biases
    ("deepseek", "Kimi-K2"): 1_026_408_209_408,  # without the 23,040 biases
    ("gemma", "2B"): 2_506_172_416,
    ("gemma", "7B"): 8_537_680_896,
    ("gemma2", "2B"): 2_614_341_888,
    ("gemma2", "9B"): 9_241_705_984,
    ("gemma2", "27B"): 27_227_128_320,
    ("gemma3", "270M"): 268_098_176,
    ("gemma3", "1B"): 999_885_952,
    # without the 416,866,032 parameters that read images, and their projection, width x 1152 + 1152
    ("gemma3", "4B"): 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    ("gemma3", "12B"): 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    ("gemma3", "27B"): 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    ("gemma4", "26B-A4B"): 25_233_141_760,  # the text part
    ("gemma4", "31B"): 30_697_345_280,
    ("gpt2", "124M"): 124_439_808,
    ("gpt2", "355M"): 354_823_168,
    ("gpt2", "774M"): 774_030_080,
    ("gpt2", "1558M"): 1_557_611_200,
    ("gpt_oss", "20B"): 20_914_757_184,
    ("gpt_oss", "120B"): 116_829_156_672,
    # the text part
    ("llama4", "scout"): 107_769_861_120,
    ("llama4", "maverick"): 400_711_848_960,
    ("granite", "2B"): 2_533_531_648,
    ("olmo2", "1B"): 1_484_916_736,
    ("olmo2", "7B"): 7_298_617_344,
    ("opt", "125M"): 125_239_296,
    ("opt", "350M"): 331_196_416,
    ("opt", "1.3B"): 1_315_758_080,
    ("opt", "2.7B"): 2_651_596_800,
    ("opt", "6.7B"): 6_658_473_984,
    ("phi3", "mini-4k"): 3_821_079_552,
    ("phi4", "14B"): 14_659_507_200,
    ("roberta", "125M"): 124_697_433,  # without the pooler, which no head uses
    ("roberta", "355M"): 355_412_057,
    ("mistral", "7B"): 7_241_732_096,
    ("mistral", "7B-v0.2"): 7_241_732_096,
    ("mistral", "7B-v0.3"): 7_248_023_552,
    ("mistral", "Nemo-12B"): 12_247_782_400,
    ("mixtral", "8x7B"): 46_702_792_704,
    ("mixtral", "8x22B"): 140_620_634_112,
    ("glm", "9B"): 9_399_951_360,
    ("glm4", "9B"): 9_400_279_040,
    # without multi-token prediction and the biases of experts
    ("glm4_moe", "106B-A12B"): 106_852_245_504,
    ("glm4_moe", "355B-A32B"): 352_797_814_784,
    ("glm4_moe_lite", "30B-A3B"): 29_943_390_976,
    ("mistral4", "Small-119B"): 118_972_826_624,
    ("minimax_m2", "230B-A10B"): 228_689_748_992,  # without multi-token prediction and the biases of experts
    ("falcon", "7B"): 6_921_720_704,
    ("falcon", "40B"): 41_303_293_952,
    ("cohere", "aya-8B"): 8_028_033_024,
    ("cohere", "35B"): 34_980_831_232,
    ("cohere2", "7B"): 8_028_033_024,
    ("gpt_neox", "pythia-1.4B"): 1_414_647_808,
    ("gpt_neox", "pythia-6.9B"): 6_857_302_016,
    ("gpt_neox", "pythia-12B"): 11_846_072_320,
    ("gpt_neox", "20B"): 20_554_567_680,
    ("gptj", "6B"): 6_050_882_784,
    ("starcoder2", "3B"): 3_030_371_328,
    ("starcoder2", "7B"): 7_173_923_840,
    ("starcoder2", "15B"): 15_957_889_024,
    ("phi", "1.3B"): 1_418_270_720,
    ("phi", "2.7B"): 2_779_683_840,
    ("stablelm", "2-1.6B"): 1_644_515_328,
    ("stablelm", "2-12B"): 12_143_185_920,
    ("stablelm", "3B"): 2_795_443_200,
    ("qwen2_moe", "A2.7B"): 14_315_784_192,
    ("qwen2_moe", "57B-A14B"): 57_408_658_944,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
    ("qwen3_next", "80B-A3B"): 79_674_391_296,  # without multi-token prediction
    # the text part, without multi-token prediction
    ("qwen3_5_moe", "35B-A3B"): 34_660_610_688,
    ("qwen3_5_moe", "122B-A10B"): 122_111_526_912,
    ("qwen3_5_moe", "397B-A17B"): 396_346_350_336,
    ("seed_oss", "36B"): 36_151_104_512,
    ("smollm3", "3B"): 3_075_098_624,
}
ACTIVE = {  # parameters that one token uses
    ("deepseek", "16B"): 2_661_150_208,
    ("deepseek", "236B"): 21_375_800_320,
    ("deepseek", "671B"): 37_552_282_624,
    ("deepseek", "Kimi-K2"): 32_861_477_888,
    # without the embedding 3.61 and 5.13 billion, as published
    ("gpt_oss", "20B"): 4_187_440_704,
    ("gpt_oss", "120B"): 5_711_982_912,
    ("glm4_moe", "106B-A12B"): 13_424_123_904,
    ("glm4_moe", "355B-A32B"): 33_632_251_904,
    ("glm4_moe_lite", "30B-A3B"): 3_896_763_136,
    ("mistral4", "Small-119B"): 6_632_588_288,
    ("minimax_m2", "230B-A10B"): 11_030_537_216,
    ("qwen2_moe", "A2.7B"): 2_689_173_504,
    ("qwen2_moe", "57B-A14B"): 14_249_270_784,
    ("mixtral", "8x7B"): 12_879_925_248,
    ("mixtral", "8x22B"): 39_152_031_744,
    ("qwen3_moe", "30B-A3B"): 3_353_032_704,
    ("qwen3_moe", "235B-A22B"): 22_190_763_520,
    ("qwen3_5_moe", "35B-A3B"): 3_454_988_928,
    ("qwen3_5_moe", "122B-A10B"): 9_771_288_576,
    ("qwen3_5_moe", "397B-A17B"): 17_349_040_896,
}
ROUTED = [name for name in SIZES if MODELS[name].balance is not None]
DENSE = [name for name in SIZES if name not in ROUTED]
TINY = {
    "llama": ("llama3", LLAMA["llama3"]),
    "v2 lite": ("deepseek", DEEPSEEK["v2 lite"]),
    "v2": ("deepseek", DEEPSEEK["v2"]),
    "v3": ("deepseek", DEEPSEEK["v3"]),
    "mistral": ("mistral", MISTRAL["window"]),
    "gemma": ("gemma3", GEMMA3["plain"]),
    "qwen 2": ("qwen2", QWEN2["plain"]),
    "dense qwen": ("qwen3", QWEN3["plain"]),
    "qwen": ("qwen3_moe", QWEN3_MOE["published"]),
    "gpt2": ("gpt2", GPT2["words"]),
    "opt": ("opt", OPT["words"]),
    "opt 350M": ("opt", OPT["350M"]),
    "roberta": ("roberta", ROBERTA["words"]),
    "classes": ("roberta", ROBERTA["classes"]),
    **{shape: (shape.split()[0], args) for shape, args in GATED.items()},
}
ONE_OF_EACH = ["llama", "v3", "mistral", "gemma", "qwen 2", "dense qwen", "qwen", "gpt2", "opt 350M", "roberta", *GATED]


def tiny_model(name, dtype=torch.float32):
    family, args = TINY[name]
    return build(MODELS[family].build, args, dtype=dtype)


def tokens(name, batch=2):
    return tokens_for(TINY[name][1], batch)


def on_meta(family, flavor):
    with torch.device("meta"):
        return MODELS[family].build(SIZES[family][flavor])


@pytest.mark.parametrize("family, flavor", [(family, flavor) for family in SIZES for flavor in SIZES[family]])
def test_parameter_counts(family, flavor):
    args, model = SIZES[family][flavor], on_meta(family, flavor)
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters == args.num_parameters == PUBLISHED.get((family, flavor), num_parameters)


@pytest.mark.parametrize("family, flavor", [(f, flavor) for f in DENSE for flavor in SIZES[f]])
def test_matmul_parameters_are_those_of_linear_layers(family, flavor):
    linear = [module for module in on_meta(family, flavor).modules() if isinstance(module, nn.Linear)]
    assert sum(module.weight.numel() for module in linear) == SIZES[family][flavor].num_matmul_parameters


WITH_EXPERTS = [(f, flavor) for f in ROUTED for flavor, args in SIZES[f].items() if hasattr(args, "n_experts")]


@pytest.mark.parametrize("family, flavor", WITH_EXPERTS)
def test_active_parameters_count_only_the_chosen_experts(family, flavor):
    args, model = SIZES[family][flavor], on_meta(family, flavor)
    assert ACTIVE.get((family, flavor), args.num_active_parameters) == args.num_active_parameters
    others = ("norm.weight", "bias", "sinks.weight", "scale.weight", "log_rate", "skip.weight")
    others += tuple(f"conv_{part}.weight" for part in ("short", *"qkvxbc"))
    others += () if args.tied_embeddings else ("tok_embeddings.weight",)
    outside = sum(p.numel() for name, p in model.named_parameters() if name.endswith(others))
    of_experts = sum(p.numel() for name, p in model.named_parameters() if "experts.w" in name and "bias" in name)
    idle_experts = args.n_experts - args.top_k
    idle_biases = of_experts * idle_experts // args.n_experts
    assert args.num_active_parameters - args.num_matmul_parameters == outside - idle_biases
    layers = sum(getattr(block, "moe", None) is not None for block in model.layers.values())
    idle = layers * idle_experts * args.expert_parameters
    assert args.num_parameters - args.num_active_parameters == idle + idle_biases


# an expert multiplies its rows together, so another row may change the last bit
@pytest.mark.parametrize(
    "name, tolerance",
    [
        ("llama", 0.0),
        ("v3", 1e-12),
        ("mistral", 0.0),
        ("gemma", 0.0),
        ("qwen 2", 0.0),
        ("dense qwen", 0.0),
        ("qwen", 1e-12),
    ]
    + [("gpt2", 0.0)],
)
def test_a_later_token_changes_nothing_before_it(name, tolerance):
    model, x = tiny_model(name, torch.float64), tokens(name)
    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % model.args.vocab_size
    before, after = model(x), model(changed)
    assert close(before[:, :7], after[:, :7], tolerance)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_packed_documents_equal_separate_ones(name, backend):
    model, x, lengths = tiny_model(name, torch.float64), tokens(name, 1), [5, 3, 4]
    model.set_attention_backend(backend)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(x, positions=positions, document_ids=ids)
    separate = torch.cat([model(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate)
    assert not torch.allclose(packed, model(x))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_model_cut_into_two_stages_gives_the_same_logits(name):
    full_model, first, last = (tiny_model(name) for _ in range(3))
    first.norm = first.output = last.tok_embeddings = None
    end = str(len(full_model.layers) - 1)
    del first.layers[end]
    for layer in first.layers:
        del last.layers[layer]
    assert set(first.state_dict()) | set(last.state_dict()) == set(full_model.state_dict())
    x = tokens(name)
    hidden = first(x)
    assert hidden.shape == (2, 12, full_model.args.dim)
    assert torch.equal(last(hidden, default_positions(x)), full_model(x))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_labels_give_the_attached_loss(name):
    model, x = tiny_model(name), tokens(name)
    names = set(model.state_dict())
    with pytest.raises(AssertionError, match="targets need a loss"):
        model(x, labels=x)
    model.loss = SummedCrossEntropy(1)
    expected = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="sum")
    torch.testing.assert_close(model(x, labels=x), expected)
    assert set(model.state_dict()) == names


def outputs_under_tensor_parallel(name, sequence_parallel):
    """Return the logits and full gradients of a model under tensor parallel."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, plan = tiny_model(name, torch.float64), MODELS[TINY[name][0]].plan
    apply_tensor_parallel(model, mesh, plan, sequence_parallel=sequence_parallel, loss_parallel=False)
    logits = model(tokens(name))
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", [name for name, (_, args) in TINY.items() if args.num_kv_heads > 1])
def test_tensor_parallel_gives_the_same_logits_and_gradients(name, sequence_parallel):
    model = tiny_model(name, torch.float64)
    logits = model(tokens(name))
    logits.square().sum().backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other_logits, gradients in run_ranks(2, outputs_under_tensor_parallel, name, sequence_parallel):
        assert close(other_logits, logits, 1e-10)
        for parameter_name, parameter in model.named_parameters():
            other = gradients[parameter_name]
            # without rotation it does not change the softmax: only rounding
            unrotated = [f"layers.{i}." for i, k in enumerate(model.kind_of_layer) if model.kinds[k].rotary is None]
            if parameter_name.startswith(tuple(unrotated)) and parameter_name.endswith("wk.bias"):
                assert (other - parameter.grad).abs().max() <= 1e-10 * norm
            else:
                assert close(other, parameter.grad, 1e-10), parameter_name
