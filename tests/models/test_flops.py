"""FLOPs per token against published anchors and against torch's own counter."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchtitan.adapters.low_rank import LoRA
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.random_draws import initialize
from torchtitan.models import SIZES, flops, linear_attention
from torchtitan.models.flops import causal_keys, flops_per_token, with_keys
from torchtitan.models.moe import layer, router
from torchtitan.models.spec import MODELS
from torchtitan.parallelisms import attention_kernels


def test_llama_31_8b_at_8192():
    args = SIZES["llama3.1"]["8B"]
    flops = MODELS["llama3.1"].flops_per_token(args, 8192)
    assert round(args.num_matmul_parameters / 1e9, 4) == 7.5047
    assert (round(flops.full / 1e9, 2), round(flops.causal / 1e9, 2)) == (57.91, 51.47)


def test_llama_32_1b_at_4096():
    flops = flops_per_token(SIZES["llama3.2"]["1B"], 4096)
    assert round(flops.causal / 1e9, 2) == 8.22


def counted_per_token(args, build, length=64):
    """Count FLOPs per token with torch's counter."""
    return counted_of(build(args), length)


def counted_of(model, length=64):
    tokens = torch.zeros(2, length, dtype=torch.int64)
    initialize(model, 0, model.init_rule)
    router.set_aux_loss_scale(model, 1.0)
    # the fused kernels of a CPU are counted as nothing, and causality never is
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    return counter.get_total_flops() / tokens.numel()


WITH_STATE = [name for name in SIZES if hasattr(SIZES[name]["debugmodel"], "n_state_layers")]


# plain, grouped, grouped and tied heads; heads that do not add up to the width
@pytest.mark.parametrize("family", [name for name in SIZES if MODELS[name].balance is None and name not in WITH_STATE])
def test_equal_to_torchs_counter(family):
    args = dataclasses.replace(SIZES[family]["debugmodel"], n_layers=2, vocab_size=256)
    spec = MODELS[family]
    assert counted_per_token(args, spec.build) == pytest.approx(spec.flops_per_token(args, 64).full, rel=1e-3)


LATENT = {"n_layers": 3, "n_heads": 2, "vocab_size": 256, "ffn_dim": 128, "kv_lora_rank": 64}


@pytest.mark.parametrize(
    "family, change",
    [
        ("deepseek", LATENT),
        ("deepseek", LATENT | {"q_lora_rank": 96, "n_dense_layers": 2, "n_shared_experts": 0, "top_k": 1}),
        ("qwen3_moe", {"n_layers": 2, "vocab_size": 256}),
        ("mixtral", {"n_layers": 2, "vocab_size": 256}),
        ("qwen2_moe", {"n_layers": 2, "vocab_size": 256}),
        ("glm4_moe", {"n_layers": 3, "vocab_size": 256}),
        ("llama4", {"n_layers": 4, "vocab_size": 256}),
        ("glm4_moe_lite", LATENT | {"q_lora_rank": 96}),
        ("mistral4", LATENT | {"q_lora_rank": 96}),
        ("minimax_m2", {"n_layers": 2, "vocab_size": 256}),
        ("afmoe", {"n_layers": 3, "vocab_size": 256, "sliding_window": 64}),
        ("qwen3_moe", {"n_layers": 2, "vocab_size": 256, "top_k": 8, "tied_embeddings": True}),
    ],
)
def test_experts_equal_to_torchs_counter(family, change, monkeypatch):
    """Only those that a token goes to. torch counts its grouped product as nothing, so the loop runs."""
    monkeypatch.setattr(layer, "_native", None)
    args = dataclasses.replace(SIZES[family]["debugmodel"], **change)
    spec = MODELS[family]
    assert counted_per_token(args, spec.build) == pytest.approx(spec.flops_per_token(args, 64).full, rel=1e-3)


def test_attention_sinks_and_biases_of_experts_count_nothing(monkeypatch):
    """torch counts also the product that sums the gradients of the biases, and scores that backward computes again."""
    monkeypatch.setattr(layer, "_native", None)
    monkeypatch.setattr(attention_kernels, "kernel_for", lambda *_: "written out")
    args = dataclasses.replace(SIZES["gpt_oss"]["debugmodel"], n_layers=2, vocab_size=256)
    sums = 2 * args.n_layers * args.top_k * args.n_experts * (2 * args.expert_dim + args.dim)
    again = 2 * args.n_layers * args.n_heads * args.head_dim * 64
    expected = MODELS["gpt_oss"].flops_per_token(args, 64).full + sums + again
    assert counted_per_token(args, MODELS["gpt_oss"].build) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("family", WITH_STATE)
def test_linear_attention_equals_torchs_counter(family, monkeypatch):
    """Of many chunks: the first one begins with zeros and nothing reads the last state, so they have less backward."""
    monkeypatch.setattr(layer, "_native", None)
    for module in (linear_attention, flops):
        monkeypatch.setattr(module, "CHUNK" if module is linear_attention else "STATE_CHUNK", 8)
    args = dataclasses.replace(SIZES[family]["debugmodel"], n_layers=2, vocab_size=256)
    letter = getattr(args, "STATE", "")
    kinds = {"full_interval": 2, "layer_pattern": f"{letter}*"}
    args = dataclasses.replace(args, **{name: kind for name, kind in kinds.items() if hasattr(args, name)})
    spec = MODELS[family]
    counted = counted_of(spec.build(args), 1024)
    assert counted == pytest.approx(spec.flops_per_token(args, 1024).full, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compilers_product_is_counted(dtype):
    x, w = torch.randn(6, 8, dtype=dtype, requires_grad=True), torch.randn(2, 8, 4, dtype=dtype, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        torch.ops.torchtitan.grouped_mm(x, w, torch.tensor([2, 6], dtype=torch.int32)).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 8 * 4


def test_a_model_with_experts_costs_its_active_weights():
    """Values narrower than keys: 6 x (128 + 64 + 128) per head and key; Qwen's are as wide, 12 x 128."""
    latent, grouped = SIZES["deepseek"]["671B"], SIZES["qwen3_moe"]["30B-A3B"]
    flops = MODELS["deepseek"].flops_per_token(latent, 4096)
    summed = 58 * 6 * 8 * 7168  # in its layers with experts
    assert flops.full - 6 * latent.num_matmul_parameters == 61 * 128 * 6 * 320 * 4096 + summed
    assert flops.causal - 6 * latent.num_matmul_parameters == 61 * 128 * 6 * 320 * 4097 / 2 + summed
    assert round(6 * latent.num_matmul_parameters / 1e9) == 220  # 36.6e9 of 671e9 weights
    flops = MODELS["qwen3_moe"].flops_per_token(grouped, 4096)
    assert flops.full == 6 * grouped.num_matmul_parameters + 48 * 32 * 12 * 128 * 4096 + 48 * 6 * 8 * 2048


@pytest.mark.parametrize("window", [1, 4, 10, 20])
def test_keys_per_query_in_a_window_by_counting(window):
    visible = torch.ones(10, 10).tril().triu(1 - window)
    assert causal_keys(10, window) == pytest.approx(visible.sum().item() / 10)


def test_a_window_bounds_the_keys():
    """Mistral 7B at 32768 tokens: at most 4096 keys a query, on the mean 3840.1."""
    args = SIZES["mistral"]["7B"]
    flops, weights = MODELS["mistral"].flops_per_token(args, 32768), 6 * args.num_matmul_parameters
    assert flops.full - weights == 12 * 32 * 4096 * 4096
    assert flops.causal - weights == pytest.approx(12 * 32 * 4096 * (4096 - 4096 * 4095 / 2 / 32768))


def test_windows_of_some_layers_bound_their_keys():
    """Of the 26 layers of Gemma 3 1B, 22 have a window of 512 and 4 have none."""
    args = SIZES["gemma3"]["1B"]
    flops, weights = MODELS["gemma3"].flops_per_token(args, 32768), 6 * args.num_matmul_parameters
    assert flops.full - weights == pytest.approx(12 * 4 * 256 * (22 * 512 + 4 * 32768))
    causal = 22 * causal_keys(32768, 512) + 4 * causal_keys(32768)
    assert flops.causal - weights == pytest.approx(12 * 4 * 256 * causal)


def test_keys_per_query_by_counting():
    assert causal_keys(10) == torch.ones(10, 10).tril().sum().item() / 10


def test_without_keys_only_weights_are_left():
    args = SIZES["llama3"]["debugmodel"]
    assert with_keys(args, 0) == 6 * args.num_matmul_parameters


ADAPTED = [
    ("llama3", dict(target=["all-linear", "output"]), LoRA, {}),
    ("llama3.2", dict(target=["*attention*"], train_fully=["*norm*"]), LoRA, {}),
    ("llama3", dict(target=["*w2"], train_dense_rest=True), LoRA, {}),
    ("qwen3_moe", dict(target=["all-linear"]), LoRA, {}),
    ("deepseek", dict(target=["*attention*"], train_fully=["output.weight", "*experts*"]), LoRA, LATENT),
]


@pytest.mark.parametrize("family, options, kind, change", ADAPTED)
def test_what_is_frozen_costs_two_thirds(family, options, kind, change, monkeypatch):
    """With trained embeddings the backward reaches every layer, so torch counts like the convention."""
    monkeypatch.setattr(layer, "_native", None)
    args = dataclasses.replace(SIZES[family]["debugmodel"], **{"n_layers": 2, "vocab_size": 256} | change)
    options = {"train_fully": []} | options
    model, adapter = MODELS[family].build(args), kind(Options(rank=4, **options))
    embedded = ["tok_embeddings.weight"] * (not options.get("train_dense_rest"))
    adapter.options = dataclasses.replace(adapter.options, train_fully=options["train_fully"] + embedded)
    adapter.install(model, MODELS[family].plan)
    plain = MODELS[family].flops_per_token(args, 64)
    adapted = adapter.flops_per_token(plain, args.num_matmul_parameters, 64)
    assert counted_of(model) == pytest.approx(adapted.full, rel=5e-3)
    assert adapted.causal - plain.causal == adapted.full - plain.full < 0
