"""Hugging Face folders of DeepSeek: config.json, names, sharded and damaged folders. FP8 is in test_load.py."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    close,
    configs,
    refuse_config,
    refuse_folder,
    same,
    save_and_load,
    tokens_for,
    twin,
    write_folder,
)
from tests.support.jobs import full
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import DEEPSEEK, MULTI_TOKEN
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.deepseek.model import HF, Deepseek
from torchtitan.models.hf.save import SourceConfigs, build_extra_files

TINY = DEEPSEEK["v3"]


def hf_classes(args):
    v2 = args.score == "softmax"
    return (DeepseekV2ForCausalLM, DeepseekV2Config) if v2 else (DeepseekV3ForCausalLM, DeepseekV3Config)


@pytest.mark.parametrize("flavor", SIZES["deepseek"])
def test_configs_convert_both_ways_and_through_transformers(flavor, tmp_path):
    args = SIZES["deepseek"][flavor]
    for stored in configs(args, HF, hf_classes(args)[1], tmp_path):
        assert dataclasses.replace(HF.config.args_from_config(stored), bias_rate=args.bias_rate) == args


@pytest.mark.parametrize("shape", DEEPSEEK)
def test_state_dicts_convert_both_ways(shape):
    check_names_convert_both_ways(build(Deepseek, DEEPSEEK[shape]), HF)


@pytest.mark.parametrize("shape", DEEPSEEK)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    args = DEEPSEEK[shape]
    save_and_load(Deepseek, args, HF, hf_classes(args)[0], tmp_path, shard_bytes)


def test_a_folder_of_transformers_loads(tmp_path):
    hf_model = twin(*hf_classes(TINY), build(Deepseek, TINY), HF)
    hf_model.save_pretrained(tmp_path)
    model = build(Deepseek, TINY, seed=1)
    HF.load_hf(tmp_path, model, TINY)
    assert close(model(tokens_for(TINY)), hf_model(tokens_for(TINY)).logits, 2e-6)


def test_expert_biases_are_saved_in_float32(tmp_path):
    model = build(Deepseek, TINY)
    HF.save_hf(tmp_path, model.state_dict(), TINY, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    (bias,) = [name for name, value in stored.items() if value.dtype == torch.float32]
    assert bias == "model.layers.2.mlp.gate.e_score_correction_bias"
    with pytest.raises(JobError, match="the state lacks layers.2.moe.router.expert_bias. Pass parameters and"):
        HF.save_hf(tmp_path, dict(model.named_parameters()), TINY)


def sharded_round_trip(folder):
    model, loaded = build(Deepseek, TINY), build(Deepseek, TINY, seed=1)
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2,))
    for part in (model, loaded):
        fully_shard(part, mesh=mesh)
    assert loaded.layers["2"].moe.experts.w1.to_local().shape[0] == 4
    HF.save_hf(folder, model.state_dict(), TINY, write=mesh.get_rank() == 0)
    torch.distributed.barrier()
    HF.load_hf(folder, loaded, TINY)
    return same({name: full(v) for name, v in loaded.state_dict().items()}, expected)


def test_sharded_models_save_and_load(tmp_path):
    assert run_ranks(2, sharded_round_trip, str(tmp_path)) == [True, True]


def test_unused_multi_token_layers_are_not_read(tmp_path):
    model = build(Deepseek, TINY)
    longer = dataclasses.replace(TINY, n_layers=4)
    HF.save_hf(tmp_path, build(Deepseek, longer).state_dict(), longer)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    HF.load_hf(tmp_path, model, TINY)


def args_with_depths(number, **sizes):
    return dataclasses.replace(MULTI_TOKEN, n_mtp_layers=number, **sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_depths_convert_both_ways_with_copies_of_shared_weights(tied, tmp_path):
    """Names equal the published folder's, and transformers reads the main model."""
    args = args_with_depths(2, tied_embeddings=tied)
    model, other = build(Deepseek, args), build(Deepseek, args, seed=1)
    check_names_convert_both_ways(model, HF)
    HF.save_hf(tmp_path, model.state_dict(), args)
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    for layer in ("model.layers.3.", "model.layers.4."):
        assert torch.equal(stored[layer + "embed_tokens.weight"], model.tok_embeddings.weight)
        assert torch.equal(stored[layer + "shared_head.head.weight"], model.output.weight)
    block = {name.removeprefix("model.layers.3.") for name in stored if name.startswith("model.layers.3.")}
    depth_names = {name for name in block if name.split(".")[0] not in ("self_attn", "mlp")}
    norms = {"enorm.weight", "hnorm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}
    assert depth_names == norms | {f"{name}.weight" for name in ("eh_proj", "embed_tokens", "shared_head.norm")} | {
        "shared_head.head.weight"
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 2
    HF.load_hf(tmp_path, other, args)
    assert same(model.state_dict(), other.state_dict())
    hf_model = DeepseekV3ForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert close(model(tokens_for(args)), hf_model(tokens_for(args)).logits, 2e-6)


def test_copied_weights_count_in_the_file_size(tmp_path):
    """Embedding and head take 8192 bytes each, and so does each of their two copies."""
    HF.save_hf(tmp_path, build(Deepseek, MULTI_TOKEN).state_dict(), MULTI_TOKEN, shard_bytes=25000)
    for file in tmp_path.glob("*.safetensors"):
        assert sum(value.nbytes for value in load_file(file).values()) <= 25000


@pytest.mark.parametrize("stored, requested", [(2, 1), (1, 0), (0, 0)])
def test_a_folder_may_hold_more_depths_than_the_job(stored, requested, tmp_path):
    model = build(Deepseek, args_with_depths(stored))
    other = build(Deepseek, args_with_depths(requested), seed=1)
    HF.save_hf(tmp_path, model.state_dict(), args_with_depths(stored))
    HF.load_hf(tmp_path, other, args_with_depths(requested, mtp_loss_weight=0.1))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


def test_a_folder_with_fewer_depths_than_the_job_is_refused(tmp_path):
    HF.save_hf(tmp_path, build(Deepseek, args_with_depths(1)).state_dict(), args_with_depths(1))
    message = "does not fit the model: model.layers.4.input_layernorm.weight is missing.*Choose its .* or overrides"
    refuse_folder(Deepseek, args_with_depths(2), HF, tmp_path, message)


def assert_refused(folder, message, args=TINY):
    refuse_folder(Deepseek, TINY, HF, folder, message, args)


def test_mismatching_folders_are_refused(tmp_path):
    model = build(Deepseek, TINY)
    state = HF.to_hf(model.state_dict(), TINY)
    expert = "model.layers.2.mlp.experts.3.up_proj.weight"
    for change, message in (
        ({expert: None}, f"{expert} is missing"),
        ({expert: torch.ones(32, 16)}, r"up_proj.weight has shape \(32, 16\), the model's is \(16, 32\)"),
        ({expert: torch.ones(16, 32, dtype=torch.uint8)}, "is stored as U8; readable are"),
        ({expert.replace("3", "8"): torch.ones(1)}, "experts.8.up_proj.weight is not part of the model"),
    ):
        write_folder(tmp_path, {n: value for n, value in (state | change).items() if value is not None}, TINY, HF)
        assert_refused(tmp_path, message)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert_refused(tmp_path, "neither model.safetensors.index.json nor a readable model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "../model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(tmp_path, "not the plain name of a .safetensors file")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert_refused(tmp_path, "no weight_map")
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(state, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(tmp_path, "a.safetensors cannot be read")
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    assert_refused(tmp_path, "is not in a.safetensors, where the index says it is; .* more")
    (tmp_path / "config.json").write_text("[]")
    assert_refused(tmp_path, "config.json holds no JSON object")
    (tmp_path / "config.json").write_text("{")
    assert_refused(tmp_path, "config.json cannot be read")


def test_config_constants_without_a_tensor_are_compared(tmp_path):
    model = build(Deepseek, TINY)
    HF.save_hf(tmp_path, model.state_dict(), TINY)
    assert_refused(tmp_path, "route_scale is 2.5, the job's is 1.0", dataclasses.replace(TINY, route_scale=1.0))
    assert_refused(tmp_path, "top_k is 3, the job's is 2", dataclasses.replace(TINY, top_k=2))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "model_type = 'llama', but this model is one of deepseek_v2"),
        ({"kv_lora_rank": None}, "no whole number above 0 for kv_lora_rank"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1, but this model only has 2"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling.*linear.*allowed are none and type yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rotary scaling.*original_max_position_embeddings"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    refuse_config(TINY, HF, change, message)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"expert_bias": False}, "expert_bias = False with score = 'sigmoid': transformers' DeepSeek V3 only has True"),
        ({"score_before_experts": True}, "score_before_experts = True"),
        ({"group_score": "max"}, "group_score = 'max'"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0"),
    ],
)
def test_features_missing_in_transformers_are_not_exported(change, message):
    with pytest.raises(JobError, match=message):
        HF.config_to_hf(dataclasses.replace(TINY, **change))


def test_kimi_k2_is_read_as_deepseek_and_keeps_its_name():
    """Published with the classes of DeepSeek V3, which transformers has under the other model type only."""
    args = DEEPSEEK["kimi k2"]
    published = HF.config_to_hf(args, "bfloat16") | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "ep_size": 1,
        "pretraining_tp": 1,
    }
    assert HF.config.args_from_config(published) == args
    files = build_extra_files(
        HF.config,
        args,
        "bfloat16",
        source=SourceConfigs(published),
        tokenizer_files={},
        bos_id=None,
        end_ids=(),
    )
    written = json.loads(files["config.json"])
    assert written["model_type"] == "kimi_k2" and written["architectures"] == ["DeepseekV3ForCausalLM"]
    assert "auto_map" not in written and HF.config.args_from_config(written) == args
