"""Tests of loading folders in float8 with a scale for each block: exactly, in full and by shards, or refused."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.support.hf_parity import build, refuse_folder, same, to_memory_names, write_folder
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import DEEPSEEK, GATED, QWEN3_MOE
from torchtitan.models.deepseek.model import HF, Deepseek
from torchtitan.models.hf.quantization import Quantization, read_quantization
from torchtitan.models.hf.scaled import Dequantized
from torchtitan.models.minimax_m2.model import HF as MINIMAX_HF
from torchtitan.models.minimax_m2.model import MiniMaxM2
from torchtitan.models.qwen3_moe.model import HF as QWEN3_HF
from torchtitan.models.qwen3_moe.model import Qwen3MoE

TINY = DEEPSEEK["v3"]
WIDE = replace(TINY, dim=200, ffn_dim=300, expert_dim=136)  # blocks of 128 are cut by edges and by ranks
FAMILIES = {
    "wide": (Deepseek, WIDE, HF),
    "v3": (Deepseek, TINY, HF),
    "qwen": (Qwen3MoE, QWEN3_MOE["published"], QWEN3_HF),
    "minimax_m2": (MiniMaxM2, GATED["minimax_m2"], MINIMAX_HF),
}
IN_16_BITS = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "moe.gate.")
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
SCALES = f"{EXPERT}_scale_inv"


def quantize(weight, block):
    """Quantize by blocks: (float8 codes, scales, dequantized weight)."""
    rows, columns = block
    codes, dequantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block_slice = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[block_slice].abs().max() / 448
            codes[block_slice] = (weight[block_slice] / scales[i, j]).to(torch.float8_e4m3fn)
            dequantized[block_slice] = codes[block_slice].float() * scales[i, j]
    return codes, scales, dequantized


def config_of(block, **change):
    return {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)} | change}


def folder_tensors(case, block):
    """Return a folder's tensors, quantized, and the model's state dict that they load as."""
    family, args, hf = FAMILIES[case]
    tensors, expected = {}, {}
    for name, weight in hf.to_hf(build(family, args).state_dict(), args).items():
        tensors[name] = expected[name] = weight
        if weight.dim() == 2 and not any(part in name for part in IN_16_BITS):
            tensors[name], tensors[f"{name}_scale_inv"], expected[name] = quantize(weight, block)
    return tensors, hf.from_hf(expected, args)


@pytest.mark.parametrize(
    "case, block",
    [("wide", (128, 128)), ("v3", (7, 10)), ("v3", (100, 100)), ("qwen", (7, 10)), ("minimax_m2", (7, 10))],
)
def test_an_fp8_folder_is_dequantized_exactly(case, block, tmp_path):
    family, args, hf = FAMILIES[case]
    tensors, expected = folder_tensors(case, block)
    assert sum(value.dtype == torch.float8_e4m3fn for value in tensors.values()) > 20
    write_folder(tmp_path, tensors, args, hf, config=config_of(block))
    model = build(family, args, seed=1)
    hf.load_hf(tmp_path, model, args)
    assert same(model.state_dict(), expected)


def load_sharded(folder, case, dim):
    """Load a model sharded over two ranks by rows or columns (vectors and experts by rows); return full tensors."""
    family, args, hf = FAMILIES[case]
    model = build(family, args, seed=1)
    columns = {p for name, p in model.named_parameters() if dim and p.dim() == 2}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(int(p in columns)))
    hf.load_hf(folder, model, args)
    return {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in model.state_dict().items()}


@pytest.mark.parametrize("case, block, dim", [("wide", (128, 128), 0), ("v3", (7, 10), 1), ("qwen", (7, 10), 0)])
def test_each_rank_loads_its_shard(case, block, dim, tmp_path):
    _, args, hf = FAMILIES[case]
    tensors, expected = folder_tensors(case, block)
    write_folder(tmp_path, tensors, args, hf, config=config_of(block))
    for state in run_ranks(2, load_sharded, str(tmp_path), case, dim):
        assert same(state, expected)


class RecordingTensor:
    def __init__(self, tensor):
        self.tensor, self.read = tensor, []

    def __getitem__(self, spans):
        self.read.append(tuple((span.start, span.stop) for span in spans))
        return self.tensor[spans]


def test_only_the_blocks_of_a_slice_are_read():
    bits, scales, back = quantize(torch.randn(200, 300, generator=torch.Generator().manual_seed(0)), (16, 24))
    weight, numbers = RecordingTensor(bits), RecordingTensor(scales)
    part = Dequantized(weight, numbers, (16, 24))[100:112, 48:299]
    assert torch.equal(part, back[100:112, 48:299])
    assert weight.read == [((100, 112), (48, 299))]
    assert numbers.read == [((6, 7), (2, 13))]


@pytest.mark.parametrize("block", [(100, 10**12), (10**30, 10**30)])
def test_blocks_larger_than_their_matrices_load(block, tmp_path):
    """A block size is an unchecked number of the config; no more memory than the matrix takes is allocated."""
    tensors, expected = folder_tensors("v3", (100, 100))
    write_folder(tmp_path, tensors, TINY, HF, config=config_of(block))
    model = build(Deepseek, TINY, seed=1)
    HF.load_hf(tmp_path, model, TINY)
    assert same(model.state_dict(), expected)


def split_experts(folder, dim):
    """Load a folder with experts sharded along a dimension; return their full tensors."""
    model = build(Deepseek, WIDE, seed=1)
    experts = model.layers["2"].moe.experts
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda p: Shard(dim))
    HF.load_hf(folder, model, WIDE)
    return {f"layers.2.moe.experts.{name}": p.full_tensor().detach() for name, p in experts.named_parameters()}


@pytest.mark.parametrize("dim", [1, 2])
def test_experts_load_sharded_within_their_matrices(dim, tmp_path):
    tensors, expected = folder_tensors("wide", (128, 128))
    write_folder(tmp_path, tensors, WIDE, HF, config=config_of((128, 128)))
    for state in run_ranks(2, split_experts, str(tmp_path), dim):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


# experts in one tensor


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_experts_that_are_one_tensor_load_whole_and_sharded(dim, tmp_path):
    expected = build(Deepseek, WIDE).state_dict()
    write_folder(tmp_path, to_memory_names(HF.to_hf(expected, WIDE), WIDE), WIDE, HF)
    model = build(Deepseek, WIDE, seed=1)
    HF.load_hf(tmp_path, model, WIDE)
    assert same(model.state_dict(), expected)
    for state in run_ranks(2, split_experts, str(tmp_path), dim):
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


STACK = "model.layers.2.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "change, message",
    [
        ({STACK: None}, f"{STACK} is missing"),
        ({STACK: torch.ones(8, 16, 32)}, rf"{STACK} has shape \(8, 16, 32\), the model's is \(8, 32, 32\)"),
        ({EXPERT: torch.ones(16, 32)}, f"{EXPERT} is not part of the model"),
        ({STACK: torch.ones(8, 32, 32).to(torch.float8_e4m3fn)}, f"{STACK} is stored as F8_E4M3; readable are"),
    ],
)
def test_one_tensor_of_experts_that_does_not_fit_is_reported(change, message, tmp_path):
    tensors = to_memory_names(HF.to_hf(build(Deepseek, TINY).state_dict(), TINY), TINY) | change
    tensors = {name: value for name, value in tensors.items() if value is not None}
    write_folder(tmp_path, tensors, TINY, HF, config=config_of((7, 10)))
    refuse_folder(Deepseek, TINY, HF, tmp_path, message)


def assert_refused(folder, message, change=None, config=None):
    """Write a folder with a fault and expect this message when it loads."""
    tensors = {
        n: value for n, value in (folder_tensors("v3", (7, 10))[0] | (change or {})).items() if value is not None
    }
    write_folder(folder, tensors, TINY, HF, config=config_of((7, 10)) if config is None else config)
    refuse_folder(Deepseek, TINY, HF, folder, message)


@pytest.mark.parametrize(
    "change, message",
    [
        ({SCALES: None}, f"{EXPERT} is stored as F8_E4M3, but its scales, {SCALES}, are missing"),
        ({SCALES: torch.ones(3, 3)}, rf"{SCALES} has shape \(3, 3\), blocks of \(7, 10\) make \(3, 4\)"),
        ({SCALES: torch.ones(3, 4, dtype=torch.uint8)}, f"{SCALES} is stored as U8"),
        ({EXPERT: torch.ones(16, 32)}, f"{SCALES} is there, but {EXPERT} is stored as F32 instead of F8_E4M3"),
        (
            {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)},
            "norm.weight is stored as F8_E4M3; readable are",
        ),
        ({EXPERT: None, SCALES: None}, f"{EXPERT} is missing"),
        ({SCALES.replace("3", "8"): torch.ones(3, 4)}, "experts.8.up_proj.weight_scale_inv is not part of the model"),
    ],
)
def test_scales_that_do_not_fit_are_reported(change, message, tmp_path):
    assert_refused(tmp_path, message, change)


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "scale_inv is not part of the model"),
        (config_of((8, 10)), r"blocks of \(8, 10\) make"),
        (
            config_of((7, 10), quant_method="gptq"),
            "config.json: quantization_config = .*'gptq'.*Convert the weights to",
        ),
        (config_of((7, 10), fmt="e5m2"), "'e5m2'.*allowed for quant_method 'fp8' are fmt 'e4m3'"),
        (config_of((7, 10), weight_block_size=None), r"blocks of \(all rows, all columns\) make \(1, 1\)"),
        (config_of((7, 10, 3)), r"\[7, 10, 3\].*two whole numbers"),
        (config_of((7, 0)), r"\[7, 0\].*two whole numbers"),
        ({"quantization_config": "fp8"}, "quantization_config = 'fp8'"),
    ],
)
def test_another_quantization_is_refused(config, message, tmp_path):
    assert_refused(tmp_path, message, config=config)


def test_fp8_matrices_need_a_quantization_config(tmp_path):
    tensors = {n: value for n, value in folder_tensors("v3", (7, 10))[0].items() if not n.endswith("_scale_inv")}
    write_folder(tmp_path, tensors, TINY, HF)
    message = (
        "is stored as F8_E4M3; readable are BF16, F16, F32, F64, and packed ones for matrices if config.json has a"
    )
    refuse_folder(Deepseek, TINY, HF, tmp_path, message)


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn"])  # of DeepSeek V3, and of MiniMax M2
def test_the_published_quantization_config_is_read(fmt):
    published = {"activation_scheme": "dynamic", "fmt": fmt, "quant_method": "fp8", "weight_block_size": [128, 128]}
    assert read_quantization({"quantization_config": published}) == Quantization("fp8", ((128, 128),), ("F8_E4M3",))
    assert read_quantization({}) is None
