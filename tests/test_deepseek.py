"""DeepSeek V2 and V3: published sizes, against transformers (logits, every gradient, folders), cutting, documents."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from tests.hf_parity import build, close, compare, exact, twin
from tests.pool import run_ranks
from torchtitan.initialization import Constant, Normal, initialize
from torchtitan.loss import SummedCrossEntropy
from torchtitan.models import SIZES
from torchtitan.models.deepseek import DeepseekArgs, YarnScaling, hf
from torchtitan.models.deepseek.model import Deepseek
from torchtitan.models.layers import AttentionKernel
from torchtitan.models.moe.layer import MoEBlock
from torchtitan.models.qwen3_moe import Qwen3MoEArgs
from torchtitan.models.registry import MODELS
from torchtitan.parallelisms.tensor_parallel import apply_tensor_parallel

PLAIN = DeepseekArgs(
    dim=32,
    n_layers=3,
    n_dense_layers=1,
    n_heads=2,
    vocab_size=64,
    ffn_dim=48,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=16,
    v_head_dim=12,
    expert_dim=16,
    n_experts=8,
    top_k=3,
    n_shared_experts=2,
    rope_scaling=None,
    max_seq_len=128,
)
YARN = YarnScaling(factor=4.0, original_max_seq_len=20, mscale=0.7, mscale_all_dim=0.5)
SHAPES = {
    "v2 lite": dataclasses.replace(PLAIN, rope_scaling=YARN),
    "v2": dataclasses.replace(PLAIN, q_lora_rank=20, n_groups=4, top_groups=2, route_scale=16.0),
    "v3": dataclasses.replace(
        PLAIN,
        q_lora_rank=20,
        score="sigmoid",
        normalize_top_k=True,
        expert_bias=True,
        n_groups=4,
        top_groups=2,
        group_score="top2",
        route_scale=2.5,
        n_shared_experts=1,
        n_dense_layers=2,
        rope_scaling=YARN,
    ),
    "v3 plain": dataclasses.replace(
        PLAIN, score="sigmoid", expert_bias=True, n_dense_layers=0, tied_embeddings=True, norm_eps=1e-5
    ),
}
TINY = SHAPES["v3"]
QWEN = Qwen3MoEArgs(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=64, expert_dim=16, n_experts=6, top_k=2
)
THEIRS = {
    2: (DeepseekV2ForCausalLM, DeepseekV2Config, modeling_deepseek_v2),
    3: (DeepseekV3ForCausalLM, DeepseekV3Config, modeling_deepseek_v3),
}


def theirs_of(model, dtype=torch.float32):
    config = hf.config_to_hf(model.args)
    theirs_class, config_class, _ = THEIRS[int(config["model_type"][-1])]
    return twin(theirs_class, config_class(**config), model, hf, dtype)


def tokens(batch=2, length=12):
    return torch.randint(0, TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


# -- sizes ------------------------------------------------------------------------------------------------------------

PUBLISHED = {  # in all, and those that one token uses
    "16B": (15_706_484_224, 2_661_150_208),
    "236B": (235_741_434_880, 21_375_800_320),
    "671B": (671_026_404_352, 37_552_282_624),  # without multi-token prediction and the 14,848 biases
}


@pytest.mark.parametrize("flavor", SIZES["deepseek"])
def test_parameter_counts(flavor):
    args = SIZES["deepseek"][flavor]
    with torch.device("meta"):
        model = MODELS["deepseek"].build(args)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == args.num_parameters
    assert PUBLISHED.get(flavor, (counted, args.num_active_parameters)) == (counted, args.num_active_parameters)
    outside = sum(p.numel() for name, p in model.named_parameters() if "norm" in name or "tok_embeddings" in name)
    assert args.num_active_parameters - args.num_matmul_parameters == outside
    idle = (args.n_layers - args.n_dense_layers) * (args.n_experts - args.top_k) * args.expert_parameters
    assert counted - args.num_active_parameters == idle


def test_biases_of_the_largest_are_as_many_as_published():
    with torch.device("meta"):
        model = Deepseek(SIZES["deepseek"]["671B"])
    assert sum(b.numel() for name, b in model.named_buffers() if name.endswith("expert_bias")) == 14_848


def test_the_debug_model_is_the_one_that_is_measured_against():
    args = SIZES["deepseek"]["debugmodel"]
    assert (args.dim, args.n_layers, args.n_dense_layers, args.vocab_size) == (256, 6, 1, 2048)
    latent = (args.kv_lora_rank, args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim)
    assert latent == (512, 128, 64, 128)
    assert (args.n_experts, args.top_k, args.n_shared_experts, args.expert_dim) == (8, 3, 2, 256)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_heads": 0}, "n_heads = 0: must be at least 1"),
        ({"q_lora_rank": -1}, "q_lora_rank = -1: must be 0"),
        ({"n_dense_layers": 4}, "n_dense_layers = 4 with n_layers = 3: must be from 0"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7: must be even"),
        ({"v_head_dim": 32}, "v_head_dim = 32: must be at most .* = 24"),
        ({"top_k": 9}, "top_k = 9 with n_experts = 8"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **change)


# -- against transformers ---------------------------------------------------------------------------------------------


def exact_rotation(xq, xk, freqs_cis):
    """transformers' V2, whose own goes through float32."""
    turned = []
    for x in (xq, xk):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * freqs_cis.unsqueeze(1)
        turned.append(torch.view_as_real(pairs).flatten(3))
    return turned


# float32: sums taken in another order, a few units of 2**-24 relative to the largest element
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers(shape):
    model = build(Deepseek, SHAPES[shape])
    compare(model, theirs_of(model), hf, 2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient_equal_transformers_exactly(shape, monkeypatch):
    model = build(Deepseek, SHAPES[shape], dtype=torch.float64)
    theirs = theirs_of(model, torch.float64)
    modeling = THEIRS[2 if SHAPES[shape].score == "softmax" else 3][2]
    if modeling is modeling_deepseek_v2:
        monkeypatch.setattr(modeling, "apply_rotary_emb", exact_rotation)
    lengthening = theirs.model.rotary_emb.attention_scaling
    with exact(modeling, model, theirs, monkeypatch):
        plain = model.rotary.forward
        model.rotary.forward = lambda positions: plain(positions) * lengthening
        compare(model, theirs, hf, 1e-12)


@pytest.mark.parametrize("scaling", [None, YARN, YarnScaling(), YarnScaling(factor=0.5), YarnScaling(beta_fast=1.0)])
def test_frequencies_are_those_of_transformers(scaling):
    args = dataclasses.replace(SIZES["deepseek"]["671B"], rope_scaling=scaling)
    config = DeepseekV3Config(**hf.config_to_hf(args))
    theirs = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config)
    with torch.device("meta"):
        rotary = Deepseek(dataclasses.replace(args, n_layers=1, n_dense_layers=0)).rotary
    ours = rotary.frequencies(torch.device("cpu"))
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=3e-7, atol=0)  # float32, one rounding or two
    positions = torch.tensor([[0, 5, 4000]])
    cos, sin = theirs(torch.zeros(1), positions)
    expected = torch.stack((cos, sin), dim=-1)[:, :, None, :32]
    torch.testing.assert_close(rotary(positions), expected, rtol=1e-5, atol=1e-3)  # angles of 4000, in float32


def test_positions_are_understood_alike():
    model = build(Deepseek, TINY)
    positions = torch.arange(4, 16)[None].expand(2, -1)
    expected = theirs_of(model)(tokens(), position_ids=positions).logits
    assert close(model(tokens(), positions=positions), expected, 2e-6)


# -- the model --------------------------------------------------------------------------------------------------------


def test_a_later_token_changes_nothing_before_it():
    model, x = build(Deepseek, TINY, dtype=torch.float64), tokens()
    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % TINY.vocab_size
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])  # rows of an expert are multiplied together
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_packed_documents_are_computed_as_if_alone():
    model, x, lengths = build(Deepseek, TINY, dtype=torch.float64), tokens(1), [5, 3, 4]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(x, positions=positions, document_ids=ids)
    alone = torch.cat([model(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone)
    assert not torch.allclose(packed, model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_narrower_than_keys_are_padded_where_that_is_faster(dtype):
    length = 512 if dtype == torch.float32 else 16
    q, k, v = (torch.randn(1, 2, length, size, dtype=dtype) for size in (72, 72, 64))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    y = AttentionKernel()(q, k, v, None)
    assert y.shape == v.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # bfloat16 has 8 bits
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_cut_model_computes_the_same():
    whole, first, last = (build(Deepseek, TINY) for _ in range(3))
    first.norm = first.output = last.tok_embeddings = None
    del first.layers["2"], last.layers["0"], last.layers["1"]
    assert isinstance(whole.layers["2"], MoEBlock) and not isinstance(whole.layers["1"], MoEBlock)
    assert set(first.state_dict()) | set(last.state_dict()) == set(whole.state_dict())
    x = tokens()
    assert torch.equal(last(first(x)), whole(x))


def test_labels_give_the_attached_loss():
    model, x = build(Deepseek, TINY), tokens()
    model.loss = SummedCrossEntropy(1)
    expected = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="sum")
    torch.testing.assert_close(model(x, labels=x), expected)


def test_initial_weights_follow_the_recipe():
    model = Deepseek(TINY)
    for name, init in {
        "layers.0.attention.kv_norm.weight": Constant(1.0),
        "layers.2.moe.router.gate.weight": Normal(0.02),
        "layers.2.moe.experts.w1": Normal(0.02),
        "layers.2.moe.experts.w2": Normal(0.02 / 6**0.5),
        "layers.2.moe.shared_experts.w3.weight": Normal(0.02 / 6**0.5),
        "layers.2.attention.wkv_a.weight": Normal(0.02),
        "layers.1.attention.wo.weight": Normal(0.02 / 2),
    }.items():
        assert model.init_rule(name) == init, name
    initialize(model, 0, model.init_rule)
    w = model.layers["2"].moe.experts.w1
    assert w.std().item() == pytest.approx(0.9866 * 0.02, rel=0.03)
    assert not torch.equal(w[0], w[1])


def split_over_two(family, shape, sequence_parallel):
    """Logits, and the whole gradients, of a model split by its plan."""
    args = SHAPES.get(shape, QWEN)
    spec, mesh = MODELS[family], init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = build(spec.build, args, dtype=torch.float64)
    apply_tensor_parallel(model, mesh, spec.plan, sequence_parallel=sequence_parallel, loss_parallel=False)
    logits = model(tokens())
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    "family, shape", [("deepseek", "v2 lite"), ("deepseek", "v2"), ("deepseek", "v3"), ("qwen3_moe", "qwen")]
)
def test_the_plans_of_both_families_split_them_rightly(family, shape, sequence_parallel):
    args = SHAPES.get(shape, QWEN)
    model = build(MODELS[family].build, args, dtype=torch.float64)
    logits = model(tokens())
    logits.square().sum().backward()
    for other_logits, gradients in run_ranks(2, split_over_two, family, shape, sequence_parallel):
        assert close(other_logits, logits, 1e-10)
        for name, parameter in model.named_parameters():
            assert close(gradients[name], parameter.grad, 1e-10), name


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", SIZES["deepseek"])
def test_config_goes_both_ways_and_through_transformers(flavor, tmp_path):
    args = SIZES["deepseek"][flavor]
    config = hf.config_to_hf(args, torch.bfloat16)
    THEIRS[int(config["model_type"][-1])][1](**config).save_pretrained(tmp_path)
    for stored in (config, json.loads((tmp_path / "config.json").read_text())):
        read = hf.config_from_hf(stored)
        assert dataclasses.replace(read, bias_rate=args.bias_rate) == args


@pytest.mark.parametrize("shape", SHAPES)
def test_state_dicts_go_both_ways(shape):
    args = SHAPES[shape]
    state = build(Deepseek, args).state_dict()
    back = hf.from_hf(hf.to_hf(state, args), args)
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shard_bytes", [10**9, 10000])
def test_a_saved_folder_loads_here_and_in_transformers(shape, shard_bytes, tmp_path):
    args = SHAPES[shape]
    model = build(Deepseek, args)
    hf.save_hf(tmp_path, model.state_dict(), args, shard_bytes=shard_bytes)
    other = build(Deepseek, args, seed=1)
    hf.load_hf(tmp_path, other, args)
    state, loaded = model.state_dict(), other.state_dict()
    assert all(torch.equal(state[name], loaded[name]) for name in state)
    theirs_class = THEIRS[2 if args.score == "softmax" else 3][0]
    theirs = theirs_class.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert close(model(tokens()), theirs(tokens()).logits, 2e-6)


def test_a_folder_of_transformers_loads(tmp_path):
    theirs = theirs_of(build(Deepseek, TINY))
    theirs.save_pretrained(tmp_path)
    model = build(Deepseek, TINY, seed=1)
    hf.load_hf(tmp_path, model, TINY)
    assert close(model(tokens()), theirs(tokens()).logits, 2e-6)


def test_biases_are_saved_in_float32_and_not_forgotten(tmp_path):
    model = build(Deepseek, TINY)
    hf.save_hf(tmp_path, model.state_dict(), TINY, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    (bias,) = [name for name, value in stored.items() if value.dtype == torch.float32]
    assert bias == "model.layers.2.mlp.gate.e_score_correction_bias"
    with pytest.raises(ValueError, match="the state lacks layers.2.moe.router.expert_bias. Pass parameters and"):
        hf.save_hf(tmp_path, dict(model.named_parameters()), TINY)


def sharded_round_trip(folder):
    model, fresh = build(Deepseek, TINY), build(Deepseek, TINY, seed=1)
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2,))
    for part in (model, fresh):
        fully_shard(part, mesh=mesh)
    assert fresh.layers["2"].moe.experts.w1.to_local().shape[0] == 4
    hf.save_hf(folder, model.state_dict(), TINY, write=mesh.get_rank() == 0)
    torch.distributed.barrier()
    hf.load_hf(folder, fresh, TINY)
    state = fresh.state_dict()
    return all(torch.equal(getattr(v, "full_tensor", lambda v=v: v)(), whole[name]) for name, v in state.items())


def test_sharded_models_save_and_load(tmp_path):
    assert run_ranks(2, sharded_round_trip, str(tmp_path)) == [True, True]


def test_layers_of_multi_token_prediction_are_left_unread(tmp_path):
    model = build(Deepseek, TINY)
    longer = dataclasses.replace(TINY, n_layers=4)
    hf.save_hf(tmp_path, build(Deepseek, longer).state_dict(), longer)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf.load_hf(tmp_path, model, TINY)


def spoiled(folder, match, args=TINY):
    model = build(Deepseek, TINY, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        hf.load_hf(folder, model, args)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    model = build(Deepseek, TINY)
    state = hf.to_hf(model.state_dict(), TINY)
    expert = "model.layers.2.mlp.experts.3.up_proj.weight"
    config = json.dumps(hf.config_to_hf(TINY))
    for change, message in (
        ({expert: None}, f"{expert} is missing"),
        ({expert: torch.ones(32, 16)}, r"up_proj.weight has shape \(32, 16\), the model's is \(16, 32\)"),
        ({expert: torch.ones(16, 32, dtype=torch.uint8)}, "is stored as U8; readable are"),
        ({expert.replace("3", "8"): torch.ones(1)}, "experts.8.up_proj.weight is not part of the model"),
    ):
        content = {name: value.contiguous() for name, value in (state | change).items() if value is not None}
        (tmp_path / "config.json").write_text(config)
        save_file(content, tmp_path / "model.safetensors")
        spoiled(tmp_path, message)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    spoiled(tmp_path, "neither model.safetensors.index.json nor a readable model.safetensors")
    index = {"weight_map": dict.fromkeys(state, "../model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    spoiled(tmp_path, "not the plain name of a .safetensors file")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    spoiled(tmp_path, "no weight_map")
    index = {"weight_map": dict.fromkeys(state, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    spoiled(tmp_path, "cannot read the weights.*a.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "a.safetensors")
    spoiled(tmp_path, "is not in a.safetensors, where the index says it is; .* more")
    (tmp_path / "config.json").write_text("[]")
    spoiled(tmp_path, "config.json holds no JSON object")
    (tmp_path / "config.json").write_text("{")
    spoiled(tmp_path, "config.json cannot be read")


def test_constants_that_no_shape_shows_are_compared(tmp_path):
    model = build(Deepseek, TINY)
    hf.save_hf(tmp_path, model.state_dict(), TINY)
    spoiled(tmp_path, "route_scale is 2.5, the job's is 1.0", dataclasses.replace(TINY, route_scale=1.0))
    spoiled(tmp_path, "top_k is 3, the job's is 2", dataclasses.replace(TINY, top_k=2))


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
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rotary scaling.*mscale"),
    ],
)
def test_a_config_of_another_model_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf.config_from_hf(hf.config_to_hf(TINY) | change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"expert_bias": False}, "expert_bias = False with score = 'sigmoid': transformers' DeepSeek V3 only has True"),
        ({"score_before_experts": True}, "score_before_experts = True"),
        ({"group_score": "max"}, "group_score = 'max'"),
        ({"n_shared_experts": 0}, "n_shared_experts = 0"),
    ],
)
def test_what_transformers_does_not_have_is_not_exported(change, message):
    with pytest.raises(ValueError, match=message):
        hf.config_to_hf(dataclasses.replace(TINY, **change))
