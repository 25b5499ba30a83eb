"""Folders packed by bitsandbytes in 4 or 8 bits: read exactly, by slices, by shards and under QLoRA, or refused."""

import json
import random
from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.support.hf_parity import build, refuse_config, refuse_folder, same, write_folder
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import GPT2, QWEN3
from torchtitan.adapters.quantized import QLoRA
from torchtitan.models.gpt2.model import HF as GPT2_HF
from torchtitan.models.hf import packed
from torchtitan.models.hf.bitsandbytes import BitsAndBytes
from torchtitan.models.hf.load import Shards
from torchtitan.models.qwen3.model import HF, Qwen3

ARGS = QWEN3["plain"]
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CONFIG |= {"_load_in_4bit": True, "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": ["lm_head"]}
NAME = "model.layers.0.mlp.down_proj.weight"
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


def state_of(shape, block, dtype=torch.float32, **nested):
    """Return the tensor that holds the sizes of a matrix in 4 bits."""
    state = {"quant_type": "nf4", "blocksize": block, "dtype": str(dtype).removeprefix("torch."), "shape": [*shape]}
    return torch.frombuffer(bytearray(json.dumps(state | nested).encode()), dtype=torch.uint8)


def pack(weight, block=64, nested=0, storage=torch.uint8):
    """Pack a matrix in 4 bits: its tensors, by the ends of their names, and its numbers, by the definition."""
    levels, count = torch.tensor(NF4), weight.numel()
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -count % block)).view(-1, block)
    scales = blocks.abs().amax(1).clamp(min=1e-9)
    tensors, sizes = {".absmax": scales, ".quant_map": levels}, {}
    if nested:
        maps, numbers = torch.linspace(-1, 1, 256), torch.randint(0, 256, (len(scales),), dtype=torch.uint8)
        above = torch.rand(-(-len(scales) // nested))
        tensors |= {".absmax": numbers, ".nested_absmax": above, ".nested_quant_map": maps}
        scales = maps[numbers.int()] * above.repeat_interleave(nested)[: len(scales)] + 1.5
        sizes = {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 1.5}
    codes = (blocks[..., None] / scales[:, None, None] - levels).abs().argmin(-1)
    numbers = (levels[codes] * scales[:, None]).flatten()[:count].view(weight.shape)
    flat = torch.nn.functional.pad(codes.flatten()[:count], (0, count % 2)).to(torch.uint8)
    packed = (flat[::2] << 4 | flat[1::2]).view(storage)[:, None]
    tensors |= {"": packed, ".quant_state.bitsandbytes__nf4": state_of(weight.shape, block, weight.dtype, **sizes)}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, numbers


def pack_rows(weight):
    """Pack a matrix in 8 bits: its tensors, by the ends of their names, and its numbers."""
    scales = weight.abs().amax(1)
    codes = (weight / scales[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * scales[:, None] * (1 / 127)


def opened(folder, tensors, stack):
    save_file(tensors, folder / "model.safetensors")
    return Shards(folder, dict.fromkeys(tensors, "model.safetensors"), BitsAndBytes(), stack)


PUBLISHED = "7947a6e17686b8a98b51ca67afe2c9f656597793688b37ab5f56a0d6c21b35dd75a61e2da7244330"
PUBLISHED += "8663f9169992d7353234be5806a172e1e7677ce2"
"""Numbers that bitsandbytes 0.50 packed, of a matrix [3, 40] in blocks of 32."""


def test_the_bytes_of_bitsandbytes_are_its_numbers(tmp_path):
    """A matrix that it packed, and what it unpacks: corners, and two sums."""
    scales, maps = torch.tensor([224, 214, 141, 0], dtype=torch.uint8), torch.zeros(256)
    maps[scales.int()] = torch.tensor([0.5695, 0.4297, 0.0009, -0.9930], dtype=torch.float32)
    tensors, _ = pack(torch.zeros(3, 40), 32)
    sizes = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.9852420091629028}
    tensors |= {"": torch.frombuffer(bytearray.fromhex(PUBLISHED), dtype=torch.uint8)[:, None]}
    tensors |= {".absmax": scales, ".nested_absmax": torch.tensor([0.79215455]), ".nested_quant_map": maps}
    tensors[".quant_state.bitsandbytes__nf4"] = state_of((3, 40), 32, **sizes)
    with ExitStack() as stack:
        shards = opened(tmp_path, {f"w.weight{end}": tensor for end, tensor in tensors.items()}, stack)
        assert shards.mismatches("w.weight", (3, 40)) == []
        numbers = shards.stored("w.weight")[0:3, 0:40]
    first, last = (0.0, 0.39228934, -0.69336474, 0.0), (0.0, 0.52826005, 0.86657745, -0.62938261)
    torch.testing.assert_close(numbers[0, :4], torch.tensor(first), rtol=1e-3, atol=0)
    torch.testing.assert_close(numbers[2, -4:], torch.tensor(last), rtol=1e-3, atol=0)
    assert float(numbers.square().sum()) == pytest.approx(91.862398, rel=1e-3)


def test_slices_of_drawn_matrices(tmp_path, monkeypatch):
    """Blocks that cross rows, last blocks that are short, scales of scales, bytes stored as other types."""
    monkeypatch.setattr(packed, "AT_ONCE", 200)
    draws = random.Random(1)
    torch.manual_seed(1)
    with ExitStack() as stack:
        for number in range(60):
            storage = draws.choice((torch.uint8, torch.bfloat16, torch.float32))
            shape = (draws.randint(1, 40), draws.choice((2, 7, 33, 64, 96)))
            if shape[0] * shape[1] % 8 and storage != torch.uint8:
                continue
            weight = torch.randn(shape).to(draws.choice((torch.float32, torch.bfloat16)))
            tensors, numbers = pack(weight.float(), draws.choice((32, 64, 256)), draws.choice((0, 4, 256)), storage)
            folder = tmp_path / f"{number}"
            folder.mkdir()
            shards = opened(folder, {f"w.weight{end}": tensor for end, tensor in tensors.items()}, stack)
            assert shards.mismatches("w.weight", shape) == []
            first, before = draws.randrange(shape[0]), draws.randrange(shape[1])
            spans = slice(first, draws.randint(first + 1, shape[0])), slice(before, draws.randint(before + 1, shape[1]))
            assert torch.equal(shards.stored("w.weight")[spans], numbers[spans])


def folder_tensors(bits):
    """Return a folder's tensors, with packed linear layers, and the tensors of the plain folder that equals it."""
    tensors, expected = {}, {}
    torch.manual_seed(0)
    for name, weight in HF.to_hf(build(Qwen3, ARGS).state_dict(), ARGS).items():
        tensors[name] = expected[name] = weight
        if "proj" in name:
            parts, expected[name] = pack(weight, nested=256) if bits == 4 else pack_rows(weight)
            base = name if bits == 4 else name.removesuffix("weight")
            tensors |= {base + end: tensor for end, tensor in parts.items()}
    return tensors, HF.from_hf(expected, ARGS)


def write(folder, bits=4, change=None, config=None):
    tensors, expected = folder_tensors(bits)
    tensors = {name: tensor for name, tensor in (tensors | (change or {})).items() if tensor is not None}
    write_folder(folder, tensors, ARGS, HF, config={"quantization_config": CONFIG | (config or {})})
    return expected


@pytest.mark.parametrize("bits", [4, 8])
def test_a_folder_is_read_exactly(bits, tmp_path):
    expected = write(tmp_path, bits)
    model = build(Qwen3, ARGS, seed=1)
    HF.load_hf(tmp_path, model, ARGS)
    assert same(model.state_dict(), expected)


def load_sharded(folder, dim):
    model = build(Qwen3, ARGS, seed=1)
    matrices = {p for p in model.parameters() if p.dim() == 2}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(dim * (p in matrices)))
    HF.load_hf(folder, model, ARGS)
    return {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in model.state_dict().items()}


@pytest.mark.parametrize("bits, dim", [(4, 0), (4, 1), (8, 0), (8, 1)])
def test_ranks_read_their_shards(bits, dim, tmp_path):
    expected = write(tmp_path, bits)
    for state in run_ranks(2, load_sharded, str(tmp_path), dim):
        assert same(state, expected)


SCALES, STATE = f"{NAME}.absmax", f"{NAME}.quant_state.bitsandbytes__nf4"
SHAPE = (ARGS.dim, ARGS.ffn_dim)


@pytest.mark.parametrize(
    "change, message",
    [
        ({SCALES: None}, f"{SCALES} is missing"),
        ({SCALES: torch.ones(3, dtype=torch.uint8)}, rf"{SCALES} is \(3,\) of U8, the model's is \(\d+,\) of U8"),
        ({SCALES: torch.ones(3)}, rf"{SCALES} is \(3,\) of F32, the model's is .* of U8"),
        ({NAME: None}, f"{NAME} is missing"),
        ({NAME: torch.zeros(4, 1, dtype=torch.uint8)}, rf"{NAME} is \(4, 1\) of U8, the model's is"),
        ({NAME: torch.zeros(4, 1, dtype=torch.int64)}, f"{NAME} is in 4 bits, stored as I64; allowed are U8"),
        ({STATE: None}, f"{NAME} is in 4 bits of a form that is not read: of .*__nf4, .*__fp4 there are 0"),
        ({STATE: torch.ones(5000, dtype=torch.uint8)}, r"is \(5000,\) of U8; allowed: at most 4096 of U8"),
        ({STATE: torch.tensor([255, 7], dtype=torch.uint8)}, "is in 4 bits of a form that is not read: 'utf-8' codec"),
        ({STATE: torch.tensor([91, 93], dtype=torch.uint8)}, "form that is not read: it is no table"),
        ({STATE: state_of(SHAPE[::-1], 64)}, rf"{NAME} has shape \(\d+, \d+\), the model's is \(\d+, \d+\)"),
        ({STATE: state_of(SHAPE, 12)}, "blocksize = 12"),
        ({STATE: state_of(SHAPE, 64, nested_blocksize=-1)}, "nested_blocksize = -1"),
        ({STATE: state_of(SHAPE, 64, nested_blocksize=256, nested_offset="x")}, "nested_offset = 'x'"),
        ({STATE: state_of(SHAPE, 64, packing="rows")}, "a key that this program does not know.*packing = 'rows'"),
        ({f"{NAME}.more": torch.ones(1)}, f"{NAME}.more is not part of the model"),
    ],
)
def test_a_matrix_in_4_bits_that_does_not_fit_is_reported(change, message, tmp_path):
    write(tmp_path, 4, change)
    refuse_folder(Qwen3, ARGS, HF, tmp_path, message)


NORM = "model.layers.0.input_layernorm.weight"
LAYOUT, ROWS = f"{NAME}_format", NAME.replace("weight", "SCB")


@pytest.mark.parametrize(
    "change, message",
    [
        ({LAYOUT: torch.tensor(1, dtype=torch.uint8)}, f"{LAYOUT} is 1; allowed: 0, rows one after the other"),
        ({ROWS: torch.ones(3)}, rf"{ROWS} is \(3,\) of F32, the model's is"),
        ({NORM.replace("weight", "SCB"): torch.ones(3)}, f"{NORM} is no matrix: the model's has shape"),
        ({ROWS: None}, f"{NAME} is in 4 bits of a form that is not read"),
        ({ROWS: None, LAYOUT: None}, f"{NAME} is stored as I8; readable are"),
        ({NAME: torch.ones(SHAPE)}, f"{NAME} is .* of F32, the model's is .* of I8"),
    ],
)
def test_a_matrix_in_8_bits_that_does_not_fit_is_reported(change, message, tmp_path):
    write(tmp_path, 8, change)
    refuse_folder(Qwen3, ARGS, HF, tmp_path, message)


def test_an_unknown_key_is_refused(tmp_path):
    write(tmp_path, 4, config={"bnb_4bit_order": "columns"})
    refuse_folder(Qwen3, ARGS, HF, tmp_path, "a key that this program does not know.*bnb_4bit_order = 'columns'")


def test_gpt2_is_not_read():
    """transformers packs the transposes of its matrices; a square one would be read as it is."""
    message = "quant_method = 'bitsandbytes', which this model's weights are not read from; convert the weights to"
    refuse_config(GPT2["words"], GPT2_HF, {"quantization_config": CONFIG}, message)


def test_a_text_config_may_say_how_its_weights_are_packed(tmp_path):
    expected, config = write(tmp_path), tmp_path / "config.json"
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    text = json.loads(config.read_text()) | {"model_type": "qwen3_vl_text"}
    config.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text, "tie_word_embeddings": False}))
    model = build(Qwen3, ARGS, seed=1)
    HF.load_hf(tmp_path, model, ARGS)
    assert same(model.state_dict(), expected)


def test_qlora_packs_the_same_codes():
    """Its blocks of 64 do not cross rows, so with rows of n x 64 they are bitsandbytes'; only scales are rounded again.

    A scale is 8 bits of the largest one in its row, so it differs by at most 1/510 of that.
    """
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    parts, numbers = pack(weight)
    blocks = numbers.view(8, 2, 64)
    codes, scales, rows = QLoRA.linear_class.quantizer.quantize(blocks, blocks.abs().amax((-1, -2)))
    assert torch.equal(codes.flatten(), parts[""].flatten())
    differ = (QLoRA.linear_class.quantizer.dequantize(codes, scales, rows, dtype=torch.float32) - numbers).abs()
    assert bool((differ.amax(1) <= numbers.abs().amax(1) / 510 + 1e-7).all())
