"""Llama against transformers: logits and all gradients; Hugging Face folders, valid and damaged."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from tests.support import checkpoint_plans
from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    compare,
    compare_positions,
    configs,
    exact,
    refuse_config,
    refuse_folder,
    save_and_load,
    twin,
    write_folder,
)
from tests.support.pool import run_ranks
from tests.support.tiny_decoders import LLAMA, SCALING
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.hf.config import INDEX
from torchtitan.models.llama import LLAMAS
from torchtitan.models.llama.model import HF, Llama

TINY = LLAMA["llama2"]


def build_llama(args, seed=0, dtype=torch.float32):
    return build(Llama, args, seed, dtype)


def to_transformers(model, dtype=torch.float32):
    return twin(LlamaForCausalLM, LlamaConfig, model, HF, dtype)


# float32: sums of 32 to 64 terms taken in another order, a few units of 2**-24 on values around 1, relative to the
# largest element
@pytest.mark.parametrize("shape", LLAMA)
def test_logits_and_every_gradient_equal_transformers(shape):
    model = build_llama(LLAMA[shape])
    compare(model, to_transformers(model), HF, 2e-6, length=100)


@pytest.mark.parametrize("shape", LLAMA)
def test_logits_and_every_gradient_equal_transformers_exactly(shape, monkeypatch):
    model = build_llama(LLAMA[shape], dtype=torch.float64)
    hf_model = to_transformers(model, torch.float64)
    with exact(modeling_llama, model, hf_model, monkeypatch):
        compare(model, hf_model, HF, 1e-12, length=100)


def test_the_rope_scaling_of_the_test_shape_covers_every_case():
    plain, stretched = (
        build_llama(a).kinds[0].rotary.frequencies(torch.device("cpu"))
        for a in (dataclasses.replace(LLAMA["llama3.1"], rope_scaling=None), LLAMA["llama3.1"])
    )
    ratio = (plain / stretched).tolist()
    assert ratio[0] == 1 and 1 < ratio[1] < 8 and ratio[2] == pytest.approx(8) and ratio[3] == pytest.approx(8)


def test_positions_mean_the_same_in_transformers():
    model = build_llama(LLAMA["llama3.1"])
    compare_positions(model, to_transformers(model))


@pytest.mark.parametrize("family", LLAMAS)
def test_names_convert_both_ways_and_are_those_of_transformers(family):
    args = dataclasses.replace(SIZES[family]["debugmodel"], n_layers=2)
    with torch.device("meta"):
        model, hf_model = Llama(args), LlamaForCausalLM(LlamaConfig(**HF.config_to_hf(args)))
    names = [name for name, _ in model.named_parameters()]
    form = HF.tensor_map(args)
    assert {hf_name for name in names for hf_name in form.hf_names(name)} == {n for n, _ in hf_model.named_parameters()}
    assert [form.our_names(form.hf_names(name)[0]) for name in names] == [([name], None) for name in names]
    shapes = {name: tuple(value.shape) for name, value in HF.to_hf(model.state_dict(), args).items()}
    assert shapes == {name: tuple(p.shape) for name, p in hf_model.named_parameters()}


@pytest.mark.parametrize("shape", LLAMA)
def test_state_dicts_convert_both_ways(shape):
    check_names_convert_both_ways(build_llama(LLAMA[shape]), HF)


@pytest.mark.parametrize("family, flavor", [(f, s) for f in LLAMAS for s in SIZES[f]])
def test_configs_convert_both_ways_and_through_transformers(family, flavor, tmp_path):
    args = SIZES[family][flavor]
    for stored in configs(args, HF, LlamaConfig, tmp_path):
        read = HF.config.args_from_config(stored)
        assert read.ffn_dim == args.ffn_dim
        same_width = dataclasses.replace(read, multiple_of=args.multiple_of, ffn_dim_multiplier=args.ffn_dim_multiplier)
        assert same_width == dataclasses.replace(args, n_kv_heads=args.num_kv_heads)


def test_a_feed_forward_narrower_than_usual_is_read_exactly():
    config = HF.config_to_hf(TINY) | {"intermediate_size": 50}
    assert HF.config.args_from_config(config).ffn_dim == 50


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mistral"}, "model_type = 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": None}, "attention_bias = None; allowed: true or false"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1, but attention of this family drops no probabilities"),
        ({"head_dim": 7}, "head_width = 7: must be even"),
        ({"hidden_size": "wide"}, "no whole number above 0 for hidden_size"),
        ({"num_attention_heads": 0}, "no whole number above 0 for num_attention_heads"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary scaling.*dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rotary scaling.*low_freq_factor"),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]; allowed are null and an object"),
        ({"rope_parameters": "llama3"}, "rope_parameters = 'llama3'; allowed are null and an object"),
        ({"num_key_value_heads": 3}, "n_kv_heads = 3"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    refuse_config(TINY, HF, change, message)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["llama3.1", "llama3.2"])
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    save_and_load(Llama, LLAMA[shape], HF, LlamaForCausalLM, tmp_path, shard_bytes)


@pytest.mark.parametrize("shape", ["llama3", "llama3.2"])
def test_a_folder_of_transformers_loads(shape, tmp_path):
    args = LLAMA[shape]
    hf_model = to_transformers(build_llama(args), torch.bfloat16)
    hf_model.save_pretrained(tmp_path)
    assert not (tmp_path / INDEX).exists(), "this one is a single file"
    model = build_llama(args, seed=1)
    HF.load_hf(tmp_path, model, args)
    loaded = HF.to_hf(model.state_dict(), args)
    assert all(torch.equal(loaded[name], p.float()) for name, p in hf_model.named_parameters())


def test_exports_with_computed_tensors_and_a_stored_tied_head_load(tmp_path):
    args = LLAMA["llama3.2"]
    state = HF.to_hf(build_llama(args).state_dict(), args)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    extra["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    write_folder(tmp_path, state | extra, args, HF)
    HF.load_hf(tmp_path, build_llama(args, seed=1), args)


def test_export_dtype_is_respected(tmp_path):
    HF.save_hf(tmp_path, build_llama(TINY).state_dict(), TINY, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def sharded_round_trip(folder):
    """Save and load under FSDP on two ranks, with rows cut inside a head and one matrix sharded by columns."""
    args = dataclasses.replace(LLAMA["llama3"], n_heads=4, n_kv_heads=1)
    model, loaded = build_llama(args), build_llama(args, seed=1)
    reference = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    column = loaded.layers["0"].attention
    for part in (model, loaded):
        fully_shard(part, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p is column.wq.weight else Shard(0))
    assert column.wq.weight.placements == (Shard(1),)
    assert model.layers["0"].attention.wk.weight.to_local().shape[0] == 4, "half a head per rank"
    HF.save_hf(folder, model.state_dict(), args, write=mesh.get_rank() == 0)
    torch.distributed.barrier()
    HF.load_hf(folder, loaded, args)
    return all(torch.equal(p.full_tensor(), reference[name]) for name, p in loaded.named_parameters())


def test_sharded_models_save_and_load(tmp_path):
    assert run_ranks(2, sharded_round_trip, str(tmp_path)) == [True, True]


def save_and_load_under_plan(folder, plan):
    """Save and load under a plan, in files of about three tensors; return this rank's tensors that differ."""
    job = checkpoint_plans.PlannedModel(plan)
    state = {name: parameter for part in job.parts for name, parameter in part.named_parameters()}
    expected, rank = job.snapshot(), torch.distributed.get_rank()
    HF.save_hf(folder, state, checkpoint_plans.TIED, shard_bytes=5000, write=rank == 1)
    torch.distributed.barrier()
    job.spoil()
    for part in job.parts:
        HF.load_hf(folder, part, checkpoint_plans.TIED)
    return job.differing(expected)


V = {"pp": 2, "stages": 2, "style": "v"}
PIPELINES = [{"pp": 2}, V, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}, {"tp": 2, **V}, {"pp": 4}]


@pytest.mark.parametrize("degrees", PIPELINES, ids=str)
def test_any_plan_saves_the_same_folder_and_loads_it(degrees, tmp_path):
    plan = checkpoint_plans.Plan(**degrees)
    assert run_ranks(plan.world, save_and_load_under_plan, str(tmp_path / "cut"), plan) == [[]] * plan.world
    plain = checkpoint_plans.reference(checkpoint_plans.TIED)
    HF.save_hf(tmp_path / "whole", plain.state_dict(), plain.args, shard_bytes=5000)
    unsharded, cut = (sorted((tmp_path / name).iterdir()) for name in ("whole", "cut"))
    assert [path.name for path in unsharded] == [path.name for path in cut] and len(unsharded) > 8
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(unsharded, cut, strict=True))


def load_incomplete_folder(folder):
    """Load an incomplete folder; return the error, the same on all ranks, and the tensors that changed."""
    job = checkpoint_plans.PlannedModel(checkpoint_plans.Plan(pp=2))
    before = job.snapshot()
    with pytest.raises(JobError) as caught:
        HF.load_hf(folder, job.parts[0], checkpoint_plans.TIED)
    return str(caught.value), job.differing(before)


def test_pipeline_ranks_refuse_a_folder_alike(tmp_path):
    args = checkpoint_plans.TIED
    content = HF.to_hf(checkpoint_plans.reference(args).state_dict(), args)
    del content["model.norm.weight"]  # a weight of the last pipeline stage
    content["model.layers.9.mlp.up_proj.weight"] = torch.ones(1)
    write_folder(tmp_path, content, args, HF)
    (one, untouched), other = run_ranks(2, load_incomplete_folder, str(tmp_path))
    assert (one, untouched) == other and untouched == []
    assert "does not fit the model: model.norm.weight is missing; model.layers.9.mlp.up_proj.weight is not part" in one
    content["model.norm.weight"] = torch.ones(3)
    del content["model.layers.9.mlp.up_proj.weight"]
    write_folder(tmp_path, content, args, HF)
    (one, untouched), other = run_ranks(2, load_incomplete_folder, str(tmp_path))
    assert (one, untouched) == other and untouched == []
    assert "model.norm.weight has shape (3,), the model's is (20,)" in one


def tensors():
    return HF.to_hf(build_llama(TINY).state_dict(), TINY)


def assert_refused(folder, message):
    refuse_folder(Llama, TINY, HF, folder, message)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        ({NORM: None}, "model.norm.weight is missing"),
        ({NORM: torch.ones(31)}, r"model.norm.weight has shape \(31,\), the model's is \(32,\)"),
        ({NORM: torch.ones(32, dtype=torch.int8)}, "norm.weight is stored as I8; readable are BF16, F16, F32, F64"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, "model.layers.2.mlp.up_proj.weight is not part of the"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, "q_proj.bias is not part of the model"),
        ({"visual.proj": torch.ones(1)}, "visual.proj is not part of the model"),
        ({f"extra.{i}": torch.ones(1) for i in range(20)}, "extra.0 is not.*and 12 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    content = {name: value for name, value in (tensors() | change).items() if value is not None}
    write_folder(tmp_path, content, TINY, HF)
    assert_refused(tmp_path, message)


OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", "c:\\x.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_may_only_name_plain_files_of_its_folder(name, tmp_path):
    write_folder(tmp_path, tensors(), TINY, HF, index={NORM: name})
    assert_refused(tmp_path, "not the plain name of a .safetensors file")


def test_an_index_with_wrong_files_is_refused(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    write_folder(tmp_path, tensors(), TINY, HF, index=dict.fromkeys(tensors(), "other.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    assert_refused(tmp_path, "norm.weight is not in other.safetensors, where the index says it is")


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weig'])
def test_an_index_of_another_form_is_refused(index, tmp_path):
    write_folder(tmp_path, tensors(), TINY, HF)
    (tmp_path / INDEX).write_text(index)
    assert_refused(tmp_path, "model.safetensors.index.json")


SHARDS = ("model-1.safetensors", "model-2.safetensors")


def test_tensors_that_the_index_does_not_place_are_refused(tmp_path):
    """transformers reads every tensor of a file, the later of two, and a single file before those of an index."""
    content = {name: value.contiguous() for name, value in tensors().items()}
    write_folder(tmp_path, content, TINY, HF, index=dict.fromkeys(content, SHARDS[0]) | {NORM: SHARDS[1]})
    save_file({name: value for name, value in content.items() if name != NORM}, tmp_path / SHARDS[0])
    unread = {"model.rotary_emb.inv_freq": torch.ones(4)}
    save_file({NORM: content[NORM]} | unread, tmp_path / SHARDS[1])
    assert_refused(tmp_path, "it has model.safetensors, and other files by model.safetensors.index.json; remove")
    (tmp_path / "model.safetensors").unlink()
    refused = {NORM: content[NORM], "model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    save_file(content | refused, tmp_path / SHARDS[0])
    by_index = f"bias is in {SHARDS[0]}, but by .*json nowhere; {NORM} is in {SHARDS[0]}, but by .*json in {SHARDS[1]}"
    assert_refused(tmp_path, by_index)
    save_file({name: value for name, value in content.items() if name != NORM}, tmp_path / SHARDS[0])
    with HF.stored_weights(tmp_path, TINY) as stored:
        assert torch.equal(stored.read_full("norm.weight"), content[NORM])


def test_missing_and_truncated_files_are_named(tmp_path):
    assert_refused(tmp_path, "config.json cannot be read")
    write_folder(tmp_path, tensors(), TINY, HF, index=dict.fromkeys(tensors(), "gone.safetensors"))
    single, aside = tmp_path / "model.safetensors", tmp_path / "aside"
    assert_refused(tmp_path, "it has model.safetensors, and other files by model.safetensors.index.json; remove")
    single.rename(aside)
    assert_refused(tmp_path, "gone.safetensors cannot be read .No such file")
    aside.rename(single)
    (tmp_path / INDEX).unlink()
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert_refused(tmp_path, "neither model.safetensors.index.json nor a readable model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert_refused(tmp_path, "neither model.safetensors.index.json nor a readable model.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_heads": 8}, "n_heads is 8, the job's is 4"),
        ({"rope_theta": 7.0}, "rope_theta is 7.0"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06"),
        ({"rope_scaling": SCALING}, "rope_scaling is RopeScaling"),
    ],
)
def test_config_constants_without_a_tensor_are_compared(change, message, tmp_path):
    write_folder(tmp_path, tensors(), dataclasses.replace(TINY, **change), HF)
    assert_refused(tmp_path, message + "[^;]*.*Choose its model.name")


def test_errors_of_a_malformed_config_name_its_file(tmp_path):
    write_folder(tmp_path, tensors(), TINY, HF)
    for content in (
        "[1]",
        '{"model_type": "gpt2"}',
        json.dumps(HF.config_to_hf(TINY) | {"num_key_value_heads": "two"}),
        json.dumps(HF.config_to_hf(TINY) | {"rope_scaling": [1]}),
        json.dumps(HF.config_to_hf(TINY) | {"rope_theta": 10**400}),
        json.dumps(HF.config_to_hf(TINY) | {"hidden_size": 10**400}),
        "[" * 10**5,
    ):
        (tmp_path / "config.json").write_text(content)
        assert_refused(tmp_path, "config.json")
