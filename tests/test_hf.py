"""Against transformers' Llama: logits and every gradient; and the folder of safetensors, whole and spoiled."""

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

from tests import checkpoint_plans
from tests.pool import run_ranks
from torchtitan.initialization import initialize
from torchtitan.models import SIZES
from torchtitan.models.hf_folders import INDEX
from torchtitan.models.llama import LlamaArgs, RopeScaling, hf
from torchtitan.models.llama.model import Llama

TINY = LlamaArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, multiple_of=16, max_seq_len=128)
# of the 4 frequencies, one is kept, one blended and two are stretched
SCALING = RopeScaling(factor=8.0, original_max_seq_len=100)
SHAPES = {
    "llama2": TINY,
    "llama3": dataclasses.replace(TINY, n_kv_heads=2, rope_theta=500000.0),
    "llama3.1": dataclasses.replace(TINY, n_kv_heads=2, rope_theta=5000.0, rope_scaling=SCALING),
    "llama3.2": dataclasses.replace(TINY, n_kv_heads=1, tied_embeddings=True, rope_theta=5000.0, rope_scaling=SCALING),
}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def build(args, seed=0):
    model = Llama(args)
    initialize(model, seed, model.init_rule)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm in the wrong place
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    return model


def twin(model, args, dtype):
    """transformers' model with the same weights."""
    config = LlamaConfig(**hf.config_to_hf(args))
    theirs = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    missing = theirs.load_state_dict(hf.to_hf(model.state_dict(), args), strict=False).missing_keys
    assert missing == (["lm_head.weight"] if args.tied_embeddings else [])
    return theirs.to(dtype)


def exact_norm(module, x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


# float32: sums of 32 to 64 terms taken in another order, a few units of 2**-24 on values around 1, relative to the
# largest element. float64: with transformers' frequencies, as ours may differ in their last float32 bit.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers(shape, dtype, tolerance, monkeypatch):
    args = SHAPES[shape]
    model = build(args).to(dtype)
    theirs = twin(model, args, dtype)
    if dtype == torch.float64:
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", exact_norm)  # theirs goes through float32
        model.rotary.frequencies = lambda device: theirs.model.rotary_emb.inv_freq.float()
    tokens = torch.randint(0, args.vocab_size, (2, 100))
    ours_logits, their_logits = model(tokens), theirs(tokens).logits
    assert close(ours_logits, their_logits, tolerance)
    weight = torch.randn_like(ours_logits) / 100
    (ours_logits * weight).sum().backward()
    (their_logits * weight).sum().backward()
    gradients = hf.to_hf({name: p.grad for name, p in model.named_parameters()}, args)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert set(gradients) == set(expected)
    for name, gradient in gradients.items():
        assert close(gradient, expected[name], tolerance), name


def close(ours, theirs, tolerance):
    return (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_the_scaling_of_the_test_shape_touches_every_case():
    plain, stretched = (
        build(a).rotary.frequencies(torch.device("cpu"))
        for a in (dataclasses.replace(SHAPES["llama3.1"], rope_scaling=None), SHAPES["llama3.1"])
    )
    ratio = (plain / stretched).tolist()
    assert ratio[0] == 1 and 1 < ratio[1] < 8 and ratio[2] == pytest.approx(8) and ratio[3] == pytest.approx(8)


def test_positions_are_understood_alike():
    args = SHAPES["llama3.1"]
    model = build(args)
    tokens, positions = torch.randint(0, 64, (1, 9)), torch.tensor([[4, 5, 6, 7, 8, 9, 10, 11, 12]])
    expected = twin(model, args, torch.float32)(tokens, position_ids=positions).logits
    assert close(model(tokens, positions=positions), expected, 2e-6)


LLAMAS = [family for family in SIZES if family.startswith("llama")]


@pytest.mark.parametrize("family", LLAMAS)
def test_names_go_both_ways_and_are_those_of_transformers(family):
    args = dataclasses.replace(SIZES[family]["debugmodel"], n_layers=2)
    with torch.device("meta"):
        model, theirs = Llama(args), LlamaForCausalLM(LlamaConfig(**hf.config_to_hf(args)))
    names = [name for name, _ in model.named_parameters()]
    form = hf.form(args)
    assert {theirs for name in names for theirs in form.hf_names(name)} == {n for n, _ in theirs.named_parameters()}
    assert [form.our_name(form.hf_names(name)[0]) for name in names] == [(name, None) for name in names]
    shapes = {name: tuple(value.shape) for name, value in hf.to_hf(model.state_dict(), args).items()}
    assert shapes == {name: tuple(p.shape) for name, p in theirs.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES)
def test_state_dicts_go_both_ways(shape):
    args = SHAPES[shape]
    state = build(args).state_dict()
    back = hf.from_hf(hf.to_hf(state, args), args)
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("family, flavor", [(f, s) for f in LLAMAS for s in SIZES[f]])
def test_config_goes_both_ways_and_through_transformers(family, flavor, tmp_path):
    args = SIZES[family][flavor]
    config = hf.config_to_hf(args, torch.bfloat16)
    LlamaConfig(**config).save_pretrained(tmp_path)  # its present spelling: rope_parameters, dtype
    for stored in (config, json.loads((tmp_path / "config.json").read_text())):
        read = hf.config_from_hf(stored)
        assert read.ffn_dim == args.ffn_dim
        same_width = dataclasses.replace(read, multiple_of=args.multiple_of, ffn_dim_multiplier=args.ffn_dim_multiplier)
        assert same_width == dataclasses.replace(args, n_kv_heads=args.num_kv_heads)


def test_a_feed_forward_narrower_than_usual_is_read_exactly():
    config = hf.config_to_hf(TINY) | {"intermediate_size": 50}
    assert hf.config_from_hf(config).ffn_dim == 50


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mistral"}, "model_type = 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"head_dim": 16}, "head_dim = 16.*only has 8"),
        ({"hidden_size": "wide"}, "no whole number above 0 for hidden_size"),
        ({"num_attention_heads": 0}, "no whole number above 0 for num_attention_heads"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary scaling.*linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rotary scaling.*low_freq_factor"),
        ({"num_key_value_heads": 3}, "n_kv_heads = 3"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf.config_from_hf(hf.config_to_hf(TINY) | change)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["llama3.1", "llama3.2"])
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    args = SHAPES[shape]
    model, tokens = build(args), torch.randint(0, 64, (1, 9))
    hf.save_hf(tmp_path, model.state_dict(), args, shard_bytes=shard_bytes)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 if shard_bytes == 10000 else files == ["model-00001-of-00001.safetensors"]
    other = build(args, seed=1)
    hf.load_hf(tmp_path, other, args)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert close(model(tokens), theirs(tokens).logits, 2e-6)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * args.num_parameters


@pytest.mark.parametrize("shape", ["llama3", "llama3.2"])
def test_a_folder_of_transformers_loads(shape, tmp_path):
    args = SHAPES[shape]
    theirs = twin(build(args), args, torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    assert not (tmp_path / INDEX).exists(), "this one is a single file"
    model = build(args, seed=1)
    hf.load_hf(tmp_path, model, args)
    loaded = hf.to_hf(model.state_dict(), args)
    assert all(torch.equal(loaded[name], p.float()) for name, p in theirs.named_parameters())


def test_exports_with_computed_tensors_and_a_stored_tied_head_load(tmp_path):
    args = SHAPES["llama3.2"]
    state = hf.to_hf(build(args).state_dict(), args)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    extra["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    write_folder(tmp_path, state | extra, args)
    hf.load_hf(tmp_path, build(args, seed=1), args)


def test_a_saved_type_is_kept_to(tmp_path):
    hf.save_hf(tmp_path, build(TINY).state_dict(), TINY, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def sharded_round_trip(folder):
    """FSDP over two ranks, with head_dim 8 and rows cut inside a head, and one matrix sharded by columns."""
    args = dataclasses.replace(SHAPES["llama3"], n_heads=4, n_kv_heads=1)
    model, fresh = build(args), build(args, seed=1)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (2,))
    column = fresh.layers["0"].attention
    for part in (model, fresh):
        fully_shard(part, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p is column.wq.weight else Shard(0))
    assert column.wq.weight.placements == (Shard(1),)
    assert model.layers["0"].attention.wk.weight.to_local().shape[0] == 4, "half a head per rank"
    hf.save_hf(folder, model.state_dict(), args, write=mesh.get_rank() == 0)
    torch.distributed.barrier()
    hf.load_hf(folder, fresh, args)
    return all(torch.equal(p.full_tensor(), whole[name]) for name, p in fresh.named_parameters())


def test_sharded_models_save_and_load(tmp_path):
    assert run_ranks(2, sharded_round_trip, str(tmp_path)) == [True, True]


def cut_and_sharded(folder, plan):
    """Saved and loaded under a plan, in files of about three tensors. A rank's places that are wrong afterwards."""
    held = checkpoint_plans.Held(plan)
    state = {name: parameter for part in held.parts for name, parameter in part.named_parameters()}
    expected, rank = held.snapshot(), torch.distributed.get_rank()
    hf.save_hf(folder, state, checkpoint_plans.TIED, shard_bytes=5000, write=rank == 1)
    torch.distributed.barrier()
    held.spoil()
    for part in held.parts:
        hf.load_hf(folder, part, checkpoint_plans.TIED)
    return held.differing(expected)


V = {"pp": 2, "stages": 2, "style": "v"}
PIPELINES = [{"pp": 2}, V, {"tp": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "pp": 2}, {"tp": 2, **V}, {"pp": 4}]


@pytest.mark.parametrize("degrees", PIPELINES, ids=str)
def test_any_plan_saves_the_same_folder_and_loads_it(degrees, tmp_path):
    plan = checkpoint_plans.Plan(**degrees)
    assert run_ranks(plan.world, cut_and_sharded, str(tmp_path / "cut"), plan) == [[]] * plan.world
    plain = checkpoint_plans.reference(checkpoint_plans.TIED)
    hf.save_hf(tmp_path / "whole", plain.state_dict(), plain.args, shard_bytes=5000)
    whole, cut = (sorted((tmp_path / name).iterdir()) for name in ("whole", "cut"))
    assert [path.name for path in whole] == [path.name for path in cut] and len(whole) > 8
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(whole, cut, strict=True))


def half_of_the_folder(folder):
    """Refused by all ranks with the same words, though each has half of the names."""
    held = checkpoint_plans.Held(checkpoint_plans.Plan(pp=2))
    before = held.snapshot()
    with pytest.raises(ValueError) as caught:
        hf.load_hf(folder, held.parts[0], checkpoint_plans.TIED)
    return str(caught.value), held.differing(before)


def test_pipeline_ranks_refuse_a_folder_alike(tmp_path):
    args = checkpoint_plans.TIED
    content = hf.to_hf(checkpoint_plans.reference(args).state_dict(), args)
    del content["model.norm.weight"]  # of the last part
    content["model.layers.9.mlp.up_proj.weight"] = torch.ones(1)
    write_folder(tmp_path, content, args)
    (one, untouched), other = run_ranks(2, half_of_the_folder, str(tmp_path))
    assert (one, untouched) == other and untouched == []
    assert "does not fit the model: model.norm.weight is missing; model.layers.9.mlp.up_proj.weight is not part" in one
    content["model.norm.weight"] = torch.ones(3)
    del content["model.layers.9.mlp.up_proj.weight"]
    write_folder(tmp_path, content, args)
    (one, untouched), other = run_ranks(2, half_of_the_folder, str(tmp_path))
    assert (one, untouched) == other and untouched == []
    assert "model.norm.weight has shape (3,), the model's is (20,)" in one


def write_folder(folder, tensors, args, index=None):
    (folder / "config.json").write_text(json.dumps(hf.config_to_hf(args)))
    save_file(tensors, folder / "model.safetensors")
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def tensors():
    return hf.to_hf(build(TINY).state_dict(), TINY)


def refused(folder, match):
    model = build(TINY, seed=1)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=match):
        hf.load_hf(folder, model, TINY)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


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
    write_folder(tmp_path, content, TINY)
    refused(tmp_path, message)


OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", "c:\\x.safetensors"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_may_only_name_plain_files_of_its_folder(name, tmp_path):
    write_folder(tmp_path, tensors(), TINY, index={NORM: name})
    refused(tmp_path, "not the plain name of a .safetensors file")


def test_an_index_that_lies_is_refused(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    write_folder(tmp_path, tensors(), TINY, index=dict.fromkeys(tensors(), "other.safetensors"))
    refused(tmp_path, "norm.weight is not in other.safetensors, where the index says it is")


@pytest.mark.parametrize("index", ["[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weig'])
def test_an_index_of_another_form_is_refused(index, tmp_path):
    write_folder(tmp_path, tensors(), TINY)
    (tmp_path / INDEX).write_text(index)
    refused(tmp_path, "model.safetensors.index.json")


def test_missing_and_cut_files_are_named(tmp_path):
    refused(tmp_path, "config.json cannot be read")
    write_folder(tmp_path, tensors(), TINY, index=dict.fromkeys(tensors(), "gone.safetensors"))
    refused(tmp_path, "cannot read the weights.*gone.safetensors")
    (tmp_path / INDEX).unlink()
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, "neither model.safetensors.index.json nor a readable model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "neither model.safetensors.index.json nor a readable model.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_heads": 8}, "n_heads is 8, the job's is 4"),
        ({"rope_theta": 7.0}, "rope_theta is 7.0"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06"),
        ({"rope_scaling": SCALING}, "rope_scaling is RopeScaling"),
        ({"tied_embeddings": True}, "tied_embeddings is True"),
    ],
)
def test_constants_that_no_shape_shows_are_compared(change, message, tmp_path):
    write_folder(tmp_path, tensors(), dataclasses.replace(TINY, **change))
    refused(tmp_path, message + "[^;]*.*Choose its model.name")


def test_a_config_that_makes_no_sense_names_its_file(tmp_path):
    write_folder(tmp_path, tensors(), TINY)
    for content in (
        "[1]",
        '{"model_type": "gpt2"}',
        json.dumps(hf.config_to_hf(TINY) | {"num_key_value_heads": "two"}),
    ):
        (tmp_path / "config.json").write_text(content)
        refused(tmp_path, "config.json")
