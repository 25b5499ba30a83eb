"""gpt-oss: published configs, weights in MXFP4 exactly as transformers dequantizes them, and exports without them."""

import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.test_load import RecordingTensor
from tests.support.hf_parity import build, refuse_config, refuse_folder, same, write_folder
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import GATED, LLAMA
from torchtitan.models import SIZES
from torchtitan.models.gpt_oss.model import HF, GptOss
from torchtitan.models.hf.mxfp4 import PackedExperts, decode
from torchtitan.models.llama.model import HF as LLAMA_HF

TINY = replace(GATED["gpt_oss"], dim=64, expert_dim=96)
QUANTIZED = {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
}
PUBLISHED_20B = {  # openai/gpt-oss-20b
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    **QUANTIZED,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_a_published_config_is_read():
    assert HF.config.args_from_config(PUBLISHED_20B) == SIZES["gpt_oss"]["20B"]
    without = {key: value for key, value in PUBLISHED_20B.items() if key not in ("rope_scaling", "layer_types")}
    assert HF.config.args_from_config(without) == SIZES["gpt_oss"]["20B"]  # transformers' defaults


def test_the_balance_loss_is_on_where_a_config_says_so():
    args = HF.config.args_from_config(PUBLISHED_20B | {"output_router_logits": True})
    assert args.aux_loss_weight == 0.9
    assert HF.config.args_from_config(HF.config_to_hf(args)) == args


def packed(dtype=torch.float32):
    """Return a folder's tensors, with the experts packed at random, and those that transformers makes of them."""
    tensors = HF.to_hf(build(GptOss, TINY).state_dict(), TINY)
    expected, generator = dict(tensors), torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 125, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return tensors, HF.from_hf(expected, TINY)


def test_every_byte_and_scale_is_decoded_as_by_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(16, 1, 16).expand(16, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).expand(16, 256)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()
        assert torch.equal(decode(blocks, scales).to(dtype).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_folder_is_read_bit_by_bit_as_transformers_does(dtype, tmp_path):
    tensors, expected = packed(dtype)
    write_folder(tmp_path, tensors, TINY, HF, config=QUANTIZED)
    model = build(GptOss, TINY, seed=1, dtype=dtype)
    HF.load_hf(tmp_path, model, TINY)
    assert same(model.state_dict(), {name: value.to(dtype) for name, value in expected.items()})


def test_an_export_of_a_packed_folder_is_plain_and_loads_in_transformers(tmp_path):
    tensors, _ = packed()
    write_folder(tmp_path, tensors, TINY, HF, config=QUANTIZED)
    model = build(GptOss, TINY, seed=1)
    HF.load_hf(tmp_path, model, TINY)
    HF.save_hf(tmp_path / "plain", model.state_dict(), TINY, dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    assert same(HF.from_hf(theirs.state_dict(), TINY), model.to(torch.bfloat16).state_dict())


def load_sharded(folder, dim):
    """Load the experts sharded over two ranks along a dimension; return full tensors."""
    model = build(GptOss, TINY, seed=1)
    for layer in model.layers.values():
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(layer.moe.experts, mesh=mesh, shard_placement_fn=lambda p: Shard(min(dim, p.dim() - 1)))
    HF.load_hf(folder, model, TINY)
    return {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in model.state_dict().items()}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_rank_reads_its_part(dim, tmp_path):
    """Of experts, inputs (of 96 a rank's end within a block) or outputs."""
    tensors, expected = packed()
    write_folder(tmp_path, tensors, TINY, HF, config=QUANTIZED)
    for state in run_ranks(2, load_sharded, str(tmp_path), dim):
        assert same(state, expected)


def test_only_the_blocks_of_a_slice_are_read():
    blocks = RecordingTensor(torch.randint(0, 256, (4, 8, 3, 16), dtype=torch.uint8))
    scales = RecordingTensor(torch.full((4, 8, 3), 127, dtype=torch.uint8))
    whole = decode(blocks.tensor, scales.tensor).transpose(1, 2)
    assert torch.equal(PackedExperts(blocks, scales)[1:3, 40:60, 2:6], whole[1:3, 40:60, 2:6])
    assert blocks.read == scales.read == [((1, 3), (2, 6), (1, 2))]


NAME = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    "change, message",
    [
        ({f"{NAME}_scales": None}, f"{NAME}_scales is missing"),
        ({f"{NAME}_blocks": None}, f"{NAME}_blocks is missing"),
        ({f"{NAME}_scales": torch.zeros(8, 64, 2, dtype=torch.uint8)}, r"_scales is \(8, 64, 2\) of U8, the model's"),
        ({f"{NAME}_blocks": torch.zeros(8, 64, 3, 16)}, r"_blocks is \(8, 64, 3, 16\) of F32, .* of U8"),
        ({NAME: torch.zeros(8, 96, 64)}, f"{NAME}_blocks is not part of the model"),
    ],
)
def test_a_damaged_packed_folder_is_refused(change, message, tmp_path):
    tensors, _ = packed()
    tensors = {name: value for name, value in (tensors | change).items() if value is not None}
    write_folder(tmp_path, tensors, TINY, HF, config=QUANTIZED)
    refuse_folder(GptOss, TINY, HF, tmp_path, message)


def test_packed_tensors_need_a_quantization_config(tmp_path):
    write_folder(tmp_path, packed()[0], TINY, HF)
    refuse_folder(GptOss, TINY, HF, tmp_path, f"{NAME.replace('1', '0', 1)} is missing")


def test_widths_that_are_no_multiple_of_a_block_are_refused(tmp_path):
    write_folder(tmp_path, packed()[0], TINY, HF, config=QUANTIZED | {"intermediate_size": 80})
    refuse_folder(GptOss, TINY, HF, tmp_path, "is in blocks of 32 rows", replace(TINY, expert_dim=80))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"quantization_config": {"quant_method": "mxfp4", "group": 16}}, "quantization_config has a key.*group = 16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "Convert the weights to bfloat16 first"),
        ({"output_router_logits": 1}, "output_router_logits = 1; allowed: true or false"),
    ],
)
def test_other_configs_are_refused(change, message):
    refuse_config(TINY, HF, change, message)


def test_a_family_without_packed_weights_refuses_them():
    refuse_config(LLAMA["llama3"], LLAMA_HF, QUANTIZED, "'mxfp4', which this model's weights are not read from")
