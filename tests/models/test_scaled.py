"""Folders of compressed-tensors, of ModelOpt and in float8 with one scale: read exactly, by slices, or refused.

The expected numbers follow from the definitions. What the libraries pack (compressed-tensors 0.20, 800 slices of drawn
matrices; ModelOpt 0.47, 60 matrices) was compared bit for bit, too.
"""

import random
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.support.hf_parity import build, refuse_config, refuse_folder, same, write_folder
from tests.support.tiny_decoders import QWEN3
from torchtitan.models.hf import packed
from torchtitan.models.hf.load import Shards
from torchtitan.models.hf.mxfp4 import VALUES
from torchtitan.models.hf.quantization import Quantization, read_quantization
from torchtitan.models.hf.scaled import ScaledMatrices
from torchtitan.models.qwen3.model import HF, Qwen3

ARGS = QWEN3["plain"]
NAME = "model.layers.0.mlp.down_proj.weight"
LARGEST = {"F8": 448, "I8": 127, "int4": 7, "int8": 127, "fp4": 6}
"""The largest number of each kind of codes: of its own type, integers packed in I32, and floats of 4 bits."""


def grid(values, block, shape):
    """Repeat the scales of blocks to the shape of a matrix."""
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    return values.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def pack(weight, kind, block, scale=1.0):
    """Return codes, scales in float32 [rows, columns of blocks], and numbers. `scale`: of the matrix."""
    shape = weight.shape
    rows, columns = block[0] or shape[0], block[1] or shape[1]
    padded = F.pad(weight.abs(), (0, -shape[1] % columns, 0, -shape[0] % rows))
    scales = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3)) / LARGEST[kind] / scale
    scales = scales.to(torch.float8_e4m3fn).float() if scale != 1 else scales.bfloat16().float()
    ratios = (weight / grid(scales * scale, block, shape)).clamp(-LARGEST[kind], LARGEST[kind])
    if kind == "F8":
        codes = ratios.to(torch.float8_e4m3fn)
        numbers = codes.float()
    elif kind == "fp4":
        table = torch.tensor(VALUES)
        bits = (ratios[..., None] - table).abs().argmin(-1).to(torch.uint8)
        codes, numbers = bits[:, ::2] | bits[:, 1::2] << 4, table[bits.int()]
    else:
        numbers = ratios.round()
        codes = numbers.to(torch.int8)
    if kind == "int4":
        bits = F.pad((numbers + 8).to(torch.uint8), (0, -shape[1] % 8))
        codes = (bits[:, ::2] | bits[:, 1::2] << 4).contiguous().view(torch.int32)
    elif kind == "int8":
        codes = F.pad((numbers + 128).to(torch.uint8), (0, -shape[1] % 4)).view(torch.int32)
    return codes, scales, numbers * grid(scales * scale, block, shape)


def compressed(weight, kind, block):
    """Return the tensors of a matrix of compressed-tensors, by the ends of their names, and its numbers."""
    scale = 0.0078125 if kind == "fp4" else 1.0
    codes, scales, numbers = pack(weight, kind, block, scale)
    if kind == "fp4":
        tensors = {
            "_packed": codes,
            "_scale": scales.to(torch.float8_e4m3fn),
            "_global_scale": torch.tensor([1 / scale]),
        }
    elif kind in ("int4", "int8"):
        tensors = {"_packed": codes, "_scale": scales.bfloat16(), "_shape": torch.tensor(weight.shape)}
    else:
        tensors = {"": codes, "_scale": scales.reshape(1) if block == (0, 0) else scales.bfloat16()}
    return tensors, numbers


def modelopt(weight, kind, block):
    scale = 0.0078125 if kind == "fp4" else 1.0
    codes, scales, numbers = pack(weight, kind, block, scale)
    if kind == "fp4":
        return {"": codes, "_scale": scales.to(torch.float8_e4m3fn), "_scale_2": torch.tensor(scale)}, numbers
    return {"": codes, "_scale": scales.reshape(()) if block == (0, 0) else scales}, numbers


def float8(weight, kind, block):
    codes, scales, numbers = pack(weight, kind, block)
    return {"": codes, "_scale_inv": scales.reshape(())}, numbers


def group(block, bits, kind, **change):
    """Return a config's group of layers."""
    strategy = {(0, 0): "tensor", (1, 0): "channel"}.get(block, "group" if block[0] == 1 else "block")
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    weights |= {"group_size": block[1]} if strategy == "group" else {}
    weights |= {"block_structure": [*block]} if strategy == "block" else {}
    return {"targets": ["Linear"], "weights": weights | change, "input_activations": None, "output_activations": None}


def compressed_config(form, *groups, **change):
    tables = {f"group_{number}": table for number, table in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": tables,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    } | change


def modelopt_config(algorithm, *groups, **change):
    tables = {f"group_{number}": table for number, table in enumerate(groups)}
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}, "ignore": []}
    return config | ({"config_groups": tables} if groups else {}) | change


STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
FORMS = {
    "float8, tensor": (compressed, "F8", (0, 0), compressed_config("float-quantized", group((0, 0), 8, "float"))),
    "float8, channel": (compressed, "F8", (1, 0), compressed_config("float-quantized", group((1, 0), 8, "float"))),
    "float8, block": (compressed, "F8", (7, 12), compressed_config("naive-quantized", group((7, 12), 8, "float"))),
    "int8, channel": (compressed, "I8", (1, 0), compressed_config("int-quantized", group((1, 0), 8, "int"))),
    "4 bits, group": (compressed, "int4", (1, 16), compressed_config("pack-quantized", group((1, 16), 4, "int"))),
    "4 bits, channel": (compressed, "int4", (1, 0), compressed_config("pack-quantized", group((1, 0), 4, "int"))),
    "8 bits, packed": (compressed, "int8", (1, 16), compressed_config("pack-quantized", group((1, 16), 8, "int"))),
    "NVFP4": (compressed, "fp4", (1, 16), compressed_config("nvfp4-pack-quantized", group((1, 16), 4, "float"))),
    "ModelOpt, NVFP4": (modelopt, "fp4", (1, 16), modelopt_config("NVFP4", group((1, 16), 4, "float"))),
    "ModelOpt, FP8": (modelopt, "F8", (0, 0), modelopt_config("FP8")),
    "ModelOpt, FP8 by channel": (modelopt, "F8", (1, 0), modelopt_config("FP8_PER_CHANNEL_PER_TOKEN")),
    "one scale": (float8, "F8", (0, 0), STATIC),
}


@pytest.mark.parametrize("form", FORMS)
def test_slices_of_drawn_matrices(form, tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "AT_ONCE", 200)
    make, kind, block, config = FORMS[form]
    reader, draws = ScaledMatrices(read_quantization({"quantization_config": config})), random.Random(form)
    torch.manual_seed(0)
    with ExitStack() as stack:
        for number in range(12):
            shape = (draws.randint(1, 40), draws.choice((16, 32, 48, 96)))
            parts, numbers = make(torch.randn(shape), kind, block)
            tensors = {f"w.weight{end}": tensor for end, tensor in parts.items()}
            file = f"{number}.safetensors"
            save_file(tensors, tmp_path / file)
            shards = Shards(tmp_path, dict.fromkeys(tensors, file), reader, stack)
            assert shards.mismatches("w.weight", shape) == []
            first, before = draws.randrange(shape[0]), draws.randrange(shape[1])
            spans = slice(first, draws.randint(first + 1, shape[0])), slice(before, draws.randint(before + 1, shape[1]))
            assert torch.equal(shards.stored("w.weight")[spans], numbers[spans])


def write(folder, form, change=None, config=None):
    """Write a folder with packed linear layers and scales of activations; return the state dict that it loads as."""
    make, kind, block, table = FORMS[form]
    tensors, expected = {}, {}
    torch.manual_seed(0)
    for name, weight in HF.to_hf(build(Qwen3, ARGS).state_dict(), ARGS).items():
        tensors[name] = expected[name] = weight
        if "proj" in name:
            del tensors[name]
            parts, expected[name] = make(weight, kind, block)
            tensors |= {name + end: tensor for end, tensor in parts.items()}
            tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    for name in ("model.layers.0.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_scale"):
        tensors[name] = torch.ones(1)
    tensors = {name: tensor for name, tensor in (tensors | (change or {})).items() if tensor is not None}
    write_folder(folder, tensors, ARGS, HF, config={"quantization_config": table | (config or {})})
    return HF.from_hf(expected, ARGS)


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_read_exactly(form, tmp_path):
    expected = write(tmp_path, form)
    model = build(Qwen3, ARGS, seed=1)
    HF.load_hf(tmp_path, model, ARGS)
    assert same(model.state_dict(), expected)


PACKED, SCALES = f"{NAME}_packed", f"{NAME}_scale"


@pytest.mark.parametrize(
    "form, change, message",
    [
        ("NVFP4", {SCALES: None}, f"{NAME} is stored as U8, but its scales, {SCALES}, are missing"),
        ("NVFP4", {f"{NAME}_global_scale": None}, f"the scale of the matrix, {NAME}_global_scale, is missing"),
        ("NVFP4", {f"{NAME}_global_scale": torch.ones(2)}, r"is \('F32', \(2,\)\); allowed: one number of F32"),
        ("NVFP4", {SCALES: torch.ones(3, 3)}, rf"{SCALES} has shape \(3, 3\), blocks of \(1, 16\) make \(32, 3\)"),
        ("NVFP4", {PACKED: None}, f"{NAME} is missing"),
        (
            "NVFP4",
            {PACKED: torch.zeros(32, 7, dtype=torch.uint8)},
            rf"{PACKED} has shape \(32, 7\), U8, the model's is",
        ),
        (
            "4 bits, group",
            {f"{NAME}_shape": torch.tensor([32, 47])},
            r"_shape is \[32, 47\], the model's is \[32, 48\]",
        ),
        ("4 bits, group", {f"{NAME}_shape": torch.tensor(32)}, r"_shape is 32, the model's is \[32, 48\]"),
        ("8 bits, packed", {f"{NAME}_shape": None}, f"{NAME}_shape is missing"),
        (
            "float8, block",
            {NAME: torch.ones(32, 48, dtype=torch.int8)},
            f"{NAME} is stored as I8; by the quantization_config allowed are F8_E4M3",
        ),
        ("4 bits, group", {f"{NAME}_zero_point": torch.ones(1)}, f"{NAME}_zero_point is not part of the model"),
        ("4 bits, group", {f"{NAME}_g_idx": torch.ones(1)}, f"{NAME}_g_idx is not part of the model"),
        ("float8, channel", {SCALES: torch.ones(32, 1).to(torch.int32)}, f"{SCALES} is stored as I32; readable are"),
        (
            "float8, channel",
            {SCALES: torch.ones(32, 1).to(torch.float8_e4m3fn)},
            "the scale of the matrix, .*, is missing",
        ),
        ("float8, channel", {NAME: torch.ones(32, 48)}, f"{SCALES} is there, but {NAME} is stored as F32"),
        ("ModelOpt, NVFP4", {NAME.replace("weight", "pre_quant_scale"): torch.ones(48)}, "is not part of the model"),
    ],
)
def test_tensors_that_do_not_fit_are_reported(form, change, message, tmp_path):
    write(tmp_path, form, change)
    refuse_folder(Qwen3, ARGS, HF, tmp_path, message)


FOUR = group((1, 16), 4, "int")
ZEROS, ORDER = group((1, 16), 4, "int", symmetric=False), group((1, 16), 4, "int", actorder="group")


@pytest.mark.parametrize(
    "config, message",
    [
        (compressed_config("marlin-24", FOUR), "format = 'marlin-24'; allowed are float-quantized"),
        (compressed_config("pack-quantized", ZEROS), "group_0 has weights = .*allowed: symmetric ones"),
        (compressed_config("pack-quantized", group((1, 16), 7, "int")), "group_0 has weights = .*of 4 or 8 bits"),
        (compressed_config("mixed-precision", FOUR | {"format": "marlin-24"}), "format = 'marlin-24'; allowed are"),
        (compressed_config("mixed-precision", FOUR), "format = 'mixed-precision'; allowed are"),
        (compressed_config("pack-quantized", FOUR | {"format": ["int"]}), r"format = \['int'\]; allowed are"),
        (compressed_config("pack-quantized", FOUR, ORDER), "group_1 has weights = .*in the order of the columns"),
        (compressed_config("pack-quantized", group((1, 16), 4, "int", strategy="token")), "or block. Convert the"),
        (compressed_config("pack-quantized", group((1, 16), 4, "int", outliers=2)), "outliers = 2"),
        (compressed_config("pack-quantized", FOUR | {"rotation": "hadamard"}), "rotation = 'hadamard'"),
        (compressed_config("pack-quantized", FOUR, transform_config={"u": 1}), "transform_config = "),
        (compressed_config("pack-quantized", FOUR, sparsity_config={"format": "sparse-24"}), "sparsity_config = "),
        (compressed_config("pack-quantized", FOUR | {"weights": None}), "has weights = None; allowed: a table"),
        (compressed_config("pack-quantized", config_groups=["x"]), "allowed: a table of tables"),
        (modelopt_config("NVFP4_AWQ"), "quant_algo = 'NVFP4_AWQ'; allowed are FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4"),
        (modelopt_config(["FP8"]), r"quant_algo = \['FP8'\]"),
        (modelopt_config("FP8", smoothing=True), "smoothing = True"),
        ({"quant_method": ["fp8"]}, "allowed are none, or quant_method bitsandbytes"),
        (
            {"quant_method": "gptq", "bits": 4},
            "allowed are none, or quant_method bitsandbytes, compressed-tensors, fp8",
        ),
    ],
)
def test_a_config_that_is_not_read_is_refused(config, message):
    refuse_config(ARGS, HF, {"quantization_config": config}, message)


def test_sizes_of_blocks_by_config():
    config = compressed_config(
        "mixed", group((1, 0), 8, "float"), group((128, 128), 8, "float"), format="naive-quantized"
    )
    expected = Quantization("compressed-tensors", ((1, 0), (128, 128)), ("F8_E4M3", "F8_E4M3"))
    assert read_quantization({"quantization_config": config}) == expected
    forms = [FOUR | {"format": "pack-quantized"}, group((1, 0), 8, "float") | {"format": "float-quantized"}]
    expected = Quantization("compressed-tensors", ((1, 16), (1, 0)), ("I32", "F8_E4M3"))
    assert read_quantization({"quantization_config": compressed_config("mixed-precision", *forms)}) == expected
    assert read_quantization({"quantization_config": {"quant_method": "fp8"}}) == Quantization(
        "fp8", ((128, 128),), ("F8_E4M3",)
    )
