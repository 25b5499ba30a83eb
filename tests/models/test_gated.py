"""Families of gated decoders against transformers: logits, every gradient, names, folders and configs."""

import dataclasses
import json
import sys
from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from tests.support.hf_parity import (
    build,
    check_names_convert_both_ways,
    close,
    compare,
    configs,
    exact,
    refuse_config,
    save_and_load,
    tokens_for,
    twin,
)
from tests.support.tiny_decoders import GATED
from torchtitan.adapters.low_rank import LoRA
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.models import SIZES
from torchtitan.models.dropout import Dropout, layer_keys, token_keys
from torchtitan.models.hf.save import SourceConfigs, build_extra_files, read_source
from torchtitan.models.sizes import STACK, LongRope, RopeScaling
from torchtitan.models.spec import MODELS

FAMILIES = list(dict.fromkeys(shape.split()[0] for shape in GATED))
NEW = [family for family in FAMILIES if family != "llama3"]


def parts(shape):
    """Return the family's spec, the sizes, and transformers' model and config of a shape."""
    spec, args = MODELS[shape.split()[0]], GATED[shape]
    config = spec.hf.config_to_hf(args)
    return spec, args, getattr(transformers, config["architectures"][0]), CONFIG_MAPPING[config["model_type"]]


# Sums taken in another order: units of 2**-24, or of 2**-53, relative to the largest element. Where keys with a bias
# are normalized, the gradients of their weights are differences of terms a hundred times as large (1.1e-5 on one
# processor).
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", GATED)
def test_logits_and_every_gradient_equal_transformers(shape, dtype, tolerance, monkeypatch):
    spec, args, reference, config_class = parts(shape)
    model = build(spec.build, args, dtype=dtype)
    hf_model = twin(reference, config_class, model, spec.hf, dtype)
    exactly = dtype == torch.float64
    with exact(sys.modules[reference.__module__], model, hf_model, monkeypatch) if exactly else nullcontext():
        compare(model, hf_model, spec.hf, tolerance)


@pytest.mark.parametrize("shape", GATED)
def test_folders_and_names_go_both_ways(shape, tmp_path):
    spec, args, reference, _ = parts(shape)
    check_names_convert_both_ways(build(spec.build, args), spec.hf)
    save_and_load(spec.build, args, spec.hf, reference, tmp_path, 10000)


@pytest.mark.parametrize("family, flavor", [(family, flavor) for family in NEW for flavor in SIZES[family]])
def test_configs_go_both_ways_and_through_transformers(family, flavor, tmp_path):
    args, hf = SIZES[family][flavor], MODELS[family].hf
    config_class = CONFIG_MAPPING[hf.config_to_hf(args)["model_type"]]
    for stored in configs(args, hf, config_class, tmp_path):
        assert hf.config.args_from_config(stored) == args


@pytest.mark.parametrize("shape", GATED)
def test_an_export_with_the_config_of_its_source_is_the_same_model(shape, tmp_path):
    """Here and in transformers, which reads what it wrote before and what has been written in its place."""
    spec, args, _, config_class = parts(shape)
    config_class(**spec.hf.config_to_hf(args)).save_pretrained(tmp_path)
    source = read_source(tmp_path)
    options = dict(source=source, tokenizer_files={}, bos_id=None, end_ids=[])
    config = json.loads(build_extra_files(spec.hf.config, args, torch.bfloat16, **options)["config.json"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_again = config_class.from_pretrained(tmp_path)
    for written in (config, json.loads(read_again.to_json_string(use_diff=False))):
        written = {key: value for key, value in written.items() if key in {*config, *source.config}}
        assert spec.hf.config.differing_fields(spec.hf.config.args_from_config(written), args) == []


def test_an_export_of_an_olmo_published_for_older_programs_can_be_read():
    """Its rotary scaling is in another place there, without the numbers that have defaults."""
    spec, args, *_ = parts("olmo3")
    args = dataclasses.replace(
        args, rope_scaling=RopeScaling(4.0, original_max_seq_len=64, kind="yarn", attention_factor=1.2)
    )
    config = spec.hf.config_to_hf(args)
    scaling = config.pop("rope_parameters")["full_attention"]
    rope = {key: scaling[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
    config |= {"rope_theta": scaling["rope_theta"], "rope_scaling": rope | {"attention_factor": 1.2}}
    assert spec.hf.config.args_from_config(config) == args
    options = dict(source=SourceConfigs(config), tokenizer_files={}, bos_id=None, end_ids=[])
    written = json.loads(build_extra_files(spec.hf.config, args, torch.bfloat16, **options)["config.json"])
    assert spec.hf.config.args_from_config(written) == args


@pytest.mark.parametrize("shape", GATED)
def test_factors_of_low_rank_adapters_are_trained(shape):
    """All linear layers of the blocks have them, and each gets a gradient."""
    spec, args, *_ = parts(shape)
    model = build(spec.build, args)
    LoRA(Options(rank=2, target=["all-linear"])).install(model, spec.plan)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.1)  # more would be clamped in gpt-oss, or capped in Gemma 2
    model(torch.arange(12)[None]).square().sum().backward()
    linear_layers = [name for layer in range(args.n_layers) for name in args.block_linears(layer)]
    of_experts = 6 if getattr(args, "gated_experts", True) else 4  # they have three matrices or two
    assert len(trained) == sum(of_experts if name == STACK else 2 for name in linear_layers)
    assert all(p.grad.any() for p in trained.values())


def test_dropout_of_residuals_is_where_transformers_has_it(monkeypatch):
    """Both draw by keys, which each layer has in two streams: of attention and of the feed-forward."""
    spec, args, reference, config_class = parts("seed_oss")
    model = build(spec.build, dataclasses.replace(args, residual_dropout=0.4)).train()
    hf_model, tokens = twin(reference, config_class, model, spec.hf).train(), tokens_for(args)
    keys, places = token_keys(1, 2, torch.arange(2), tokens.shape[1]), iter(range(2 * args.n_layers))

    def dropout(x, p, training):
        layer, stream = divmod(next(places), 2)
        return Dropout(p, stream).train(training)(x, layer_keys(keys, layer))

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    assert close(model(tokens, keys=keys), hf_model(tokens).logits, 2e-6)
    assert not [*places], "transformers drops out twice in each layer"


@pytest.mark.parametrize(
    "shape, change, message",
    [
        ("qwen2 windows", {"window_layers": "3,1"}, "window_layers = '3,1' with n_layers = 4: .*; write '1,3'"),
        ("qwen2 windows", {"window_layers": "1,2"}, "window_layers = '1,2' with n_layers = 4: .*; write '1-2'"),
        ("qwen2 windows", {"window_layers": "0-3"}, "window_layers = '0-3' with.* or be '' for all; write ''"),
        ("qwen2 windows", {"window_layers": "2-4"}, "window_layers = '2-4' with.*from 0 to 3.*; write '2-3'"),
        ("qwen2 windows", {"window_layers": "one"}, "window_layers = 'one' with n_layers = 4.*for all$"),
        ("qwen2 windows", {"window_layers": "1,"}, "window_layers = '1,' with n_layers = 4.*for all$"),
        ("qwen2 windows", {"window_layers": "5"}, "window_layers = '5' with n_layers = 4.*for all$"),
        ("qwen2_moe windows", {"window_layers": "-1"}, "window_layers = '-1' with n_layers = 3.*for all$"),
        ("mistral growing", {"query_period": 0}, "query_period = 0: must be at least 1"),
        ("olmo3", {"sliding_window": -1}, "sliding_window = -1: must not be negative"),
        ("olmo3", {"global_interval": -1}, "global_interval = -1: must not be negative"),
        ("smollm3", {"no_rope_interval": 0}, "no_rope_interval = 0: must be at least 1"),
        ("falcon", {"norms": 3}, "norms = 3: must be 1 or 2, or 0 for a feed-forward"),
        ("falcon", {"norms": -1}, "norms = -1: must be 1 or 2, or 0"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale = 0.0: must be above 0"),
        ("nemotron", {"rotary_dim": 14}, "rotary_dim = 14: must be at most head_dim = 12"),
        ("gpt_neox", {"attention_dropout": -0.1}, "attention_dropout = -0.1: must be"),
        ("starcoder2", {"embedding_dropout": 1.0}, "embedding_dropout = 1.0: must be"),
        ("phi", {"rotary_dim": 10}, "rotary_dim = 10: must be at most head_dim = 8"),
        ("phi", {"residual_dropout": 1.0}, "residual_dropout = 1.0: must be"),
        ("stablelm", {"rotary_dim": 3}, "rotary_dim = 3: must be even"),
        ("gptj", {"embedding_dropout": 1.0}, "embedding_dropout = 1.0: must be"),
        ("minimax_m2", {"rotary_dim": 5}, "rotary_dim = 5: must be even"),
        ("afmoe", {"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
        ("mistral4", {"n_mtp_layers": 1}, "n_mtp_layers = 1: Mistral 4 has no multi-token prediction"),
        ("mistral4", {"query_period": 0}, "query_period = 0: must be at least 1"),
        ("glm4_moe_lite", {"v_head_dim": 25}, "v_head_dim = 25: must be at most"),
        ("phi4 long", {"rope_scaling": RopeScaling()}, "longrope and rope_scaling are both set"),
        ("phi4 long", {"rotary_factor": 0.5}, r"longrope has short_factors = \(1.0, .*; must be 2 numbers"),
        ("phi4", {"longrope": LongRope()}, r"longrope has short_factors = \(\); must be 4 numbers above 0"),
        ("llama3 biased", {"head_width": 7}, "head_width = 7: must be even"),
        ("llama3 biased", {"head_width": 0}, "head_dim = 0: must be at least 1"),
        ("glm4_moe", {"n_dense_layers": 4}, "n_dense_layers = 4 with n_layers = 3: must be from 0 to n_layers"),
        ("falcon_h1", {"ssm_groups": 3}, "ssm_groups = 3 with ssm_heads = 4.*divide"),
        ("falcon_h1", {"conv_taps": 0}, "conv_taps = 0: must be at least 1"),
        ("falcon_h1", {"head_multiplier": 0.0}, "head_multiplier = 0.0: must be above 0"),
        ("falcon_h1", {"ssm_dt_multiplier": -1.0}, "ssm_dt_multiplier = -1.0: must be above 0"),
        ("granite4", {"ssm_groups": 3}, "ssm_groups = 3 with ssm_heads = 4.*divide"),
        ("lfm2", {"conv_taps": 0}, "conv_taps = 0: must be at least 1"),
        ("lfm2", {"layer_pattern": "M"}, "layer_pattern = 'M': must be one or more of the letters . C, one for each"),
        ("arcee", {"n_heads": 6}, "dim = 32 with n_heads = 6: dim must be a multiple of n_heads"),
        ("nemotron_h", {"min_step": -0.1}, "min_step = -0.1: must not be negative"),
        ("nemotron_h", {"layer_pattern": "M-"}, "layer_pattern = 'M-': must be one or more of the letters . M E"),
        ("gemma2", {"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
        ("gemma2", {"query_scalar": 0}, "query_scalar = 0: must be at least 1"),
        ("gemma2", {"score_cap": -1.0}, "score_cap = -1.0: must not be negative"),
        ("gemma2", {"n_heads": 6}, "dim = 64 with n_heads = 6: dim must be a multiple of n_heads"),
        ("glm4", {"rotary_dim": 7}, "rotary_dim = 7: must be even"),
        ("glm4", {"rotary_dim": 10}, "rotary_dim = 10: must be at most head_dim = 8"),
        ("glm4_moe", {"rotary_dim": 7}, "rotary_dim = 7: must be even"),
        ("qwen3_5", {"rotary_dim": 18}, "rotary_dim = 18: must be at most head_dim = 16"),
        ("qwen3_5", {"full_interval": 0}, "full_interval = 0: must be at least 1"),
        ("qwen3_next", {"conv_taps": 0}, "conv_taps = 0: must be at least 1"),
        ("qwen3_next", {"delta_value_heads": 3}, "delta_value_heads = 3 with delta_key_heads = 2.*multiple"),
        ("mixtral", {"sliding_window": -1}, "sliding_window = -1: must not be negative"),
        ("mixtral", {"top_k": 7}, "top_k = 7 with n_experts = 6"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
        ("gpt_oss", {"global_interval": 0}, "global_interval = 0: must be at least 1"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit = 0.0: must be above 0"),
        ("mixtral", {"n_kv_heads": 3}, "n_kv_heads = 3 with n_heads = 4.*divide"),
    ],
)
def test_impossible_sizes_are_refused(shape, change, message):
    with pytest.raises(JobError, match=message):
        dataclasses.replace(GATED[shape], **change)


LONG = {"type": "longrope", "short_factor": [1.0, 1.0, 2.0, 3.0], "long_factor": [1.0, 4.0, 8.0, 9.0]}


@pytest.mark.parametrize(
    "shape, change, message",
    [
        (
            "olmo3",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "layer_types = .*allowed: 3",
        ),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 4e3}}},
            "rope_theta = 4000.0, but this model",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
            "long_factor = None; allowed: a list of numbers",
        ),
        ("phi3", {"rope_scaling": LONG | {"rope_type": "yarn"}}, "the type of rotary positions: .*'yarn'"),
        ("phi3", {"rope_scaling": LONG | {"shift": 1}}, "rope_scaling has a key .*: shift = 1"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1.0] * 3}}, "longrope has short_factors = .*; must be 4"),
        (
            "phi3",
            {"rope_scaling": LONG | {"long_factor": [1.0, 1.0, 0.0, 1.0]}},
            "longrope has long_factors = .*; must",
        ),
        ("phi3", {"rope_scaling": LONG | {"original_max_position_embeddings": 64}}, "but the model's is 128; remove"),
        ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 1}, "_embeddings = 1; allowed: at least 2"),
        ("phi3", {"rope_scaling": LONG, "head_dim": 16}, "head_dim = 16 with longrope; allowed: hidden_size / num_at"),
        ("phi3", {"rope_scaling": LONG, "rope_parameters": LONG | {"factor": 9.0}}, "rotary positions: .* must be eq"),
        ("phi3", {"rope_scaling": {"type": "default"}, "rope_parameters": LONG}, "rotary positions: .* must be equal"),
        ("phi3", {"rope_scaling": LONG | {"attention_factor": -1.0}}, "attention_factor = -1.0; allowed: from 0.001"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "of type 'linear': transformers' Phi 3 only has"),
        ("phi3", {"resid_pdrop": None}, "resid_pdrop = None; allowed: a finite number"),
        ("phi3", {"partial_rotary_factor": 0.4}, "rotary_dim = 3: must be even"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias = True"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop = 0.1, but this model only has 0.0"),
        ("phi3", {"sliding_window": 0}, "sliding_window = 0; allowed: a number of tokens, or null"),
        ("falcon", {"alibi": True}, "alibi = True, but this model only has False"),
        ("falcon", {"alibi": None}, "alibi = None; allowed: true or false"),
        ("falcon", {"activation": "relu"}, "activation = 'relu', but this model only has 'gelu'"),
        ("falcon", {"hidden_dropout": 0.1}, "hidden_dropout = 0.1, but this model only has 0.0"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2, but this model only has 1, or 2 with"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads = 2, but without new_decoder_arch.* has 4"),
        ("falcon new", {"parallel_attn": False}, "parallel_attn = False, but this model only has True with new_de"),
        ("falcon new", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn = 3, but this model only has 1, or 2"),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("falcon", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("falcon", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor of rotary positions"),
        ("hunyuan_v1_dense", {"attention_head_dim": 16}, "attention_head_dim = 16, but this model only has 8"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm = False"),
        ("hunyuan_v1_dense", {"rope_scaling": {"alpha": 9.0, "rope_type": "yarn"}}, "alpha is only read with the type"),
        ("hunyuan_v1_dense", {"rope_scaling": {"alpha": "9", "type": "dynamic"}}, "alpha = '9'; allowed: a finite"),
        ("hunyuan_v1_dense", {"rope_scaling": {"alpha": -1.0, "type": "dynamic"}}, "factor = -1.0; allowed: from"),
        ("hunyuan_v1_dense", {"rope_scaling": {"factor": 2.0, "type": "dynamic"}}, "rotary scaling .*'dynamic'"),
        ("hunyuan_v1_dense", {"rope_scaling": {"alpha": 9.0, "type": "dynamic", "shift": 1}}, "a key .*: shift = 1"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "default"}},
            "alpha of rotary positions: rope_parameters is 0.0, but rope_scaling is 30.0",
        ),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act = 'silu', but this model only has 'relu2'"),
        ("nemotron", {"partial_rotary_factor": 0.25}, "rotary_dim = 3: must be even"),
        ("nemotron", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm = True, but this model only has False"),
        ("cohere", {"sliding_window": 4}, "sliding_window in a cohere model, which transformers ignores; remove it"),
        ("cohere", {"logit_scale": None}, "logit_scale = None; allowed: a finite number"),
        ("cohere2", {"sliding_window": None}, "sliding_window = None; allowed: a whole number"),
        ("cohere2", {"layer_switch": 3}, "layer_switch = 3, but this model only has 2"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block = False"),
        ("cohere2", {"layer_types": None, "sliding_window_pattern": 0}, "_pattern = 0; allowed: at least 1"),
        ("nemotron_h", {"attention_head_dim": 64}, "attention_head_dim = 64, but this model only has"),
        ("nemotron_h", {"rms_norm_eps": 1e-3}, "rms_norm_eps = 0.001, but this model only has"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias = True, but this model only has False"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act = 'relu', but this model only has 'gelu' and gelu_new"),
        ("gpt_neox", {"rope_theta": 1e4}, "rope_theta: rotary_emb_base or its default is 5000.0, but rope_theta is 1"),
        ("gpt_neox", {"partial_rotary_factor": 1.0}, "rotary_pct or its default is 0.5, but partial_rotary_factor is"),
        ("gpt_neox", {"use_parallel_residual": None}, "use_parallel_residual = None; allowed: true or false"),
        ("gpt_neox", {"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        ("starcoder2", {"hidden_act": "gelu"}, "hidden_act = 'gelu', but this model only has 'gelu_pytorch_tanh'"),
        ("starcoder2", {"num_key_value_heads": None}, "num_key_value_heads = None; allowed: a whole number"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type = 'rms_norm'"),
        ("phi", {"embd_pdrop": 0.1}, "embd_pdrop = 0.1, but this model only has 0.0"),
        ("phi", {"qk_layernorm": None}, "qk_layernorm = None; allowed: true or false"),
        ("phi", {"hidden_act": "gelu"}, "hidden_act = 'gelu', but this model only has 'gelu_new'"),
        ("phi", {"head_dim": 16}, "head_dim = 16"),
        ("stablelm", {"hidden_dropout": 0.1}, "hidden_dropout = 0.1, but this model only has 0.0"),
        ("stablelm", {"num_key_value_heads": None}, "num_key_value_heads = None; allowed: a whole number"),
        ("stablelm", {"use_parallel_residual": 1}, "use_parallel_residual = 1; allowed: true or false"),
        ("stablelm", {"norm_bias": False, "rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types = .*allowed: 3 entries"),
        ("glm4_moe_lite", {"mlp_layer_types": "dense"}, "mlp_layer_types = 'dense'; allowed: 3 entries"),
        ("glm4_moe_lite", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1, but mlp_layer_types .* has 2"),
        ("glm4_moe_lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5, but this model only has 1.0"),
        ("glm4_moe_lite", {"n_group": None}, "n_group = None; allowed: a whole number"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave = False, but this model only has True"),
        ("glm4_moe_lite", {"num_local_experts": 4}, "n_routed_experts"),
        ("gptj", {"rotary_dim": None}, "rotary_dim = None; allowed: a whole number"),
        ("gptj", {"scale_attn_weights": False}, "scale_attn_weights = False, but this model only has True"),
        ("gptj", {"activation_function": "gelu"}, "activation_function = 'gelu', but this model only has 'gelu_new'"),
        ("gptj", {"n_head": 5}, "n_embd = 32 with n_head = 5; allowed: a multiple of n_head"),
        ("gptj", {"hidden_size": 8}, "n_embd: .*must be equal"),
        ("gptj", {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters"),
        ("minimax_m2", {"rotary_dim": 8}, "rotary_dim = 8, but partial_rotary_factor makes it 6; remove the wrong"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list = \[1, 0\], but this model only has \[1, 1\]"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias = False"),
        ("minimax_m2", {"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta = 3.5"),
        ("minimax_m2", {"head_dim": 0}, "no whole number above 0 for head_dim"),
        ("afmoe", {"layer_types": ["full_attention"] + ["sliding_attention"] * 2}, "layer_types = .*; allowed: 3 entr"),
        ("afmoe", {"sliding_window": None}, "sliding_window = None; allowed: a whole number"),
        ("afmoe", {"mup_enabled": None}, "mup_enabled = None; allowed: true or false"),
        ("afmoe", {"n_group": 2}, "n_group = 2"),
        ("afmoe", {"score_func": "softmax"}, "score_func = 'softmax'"),
        (
            "mistral4",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_type 'default'; allowed: 'yarn'",
        ),
        ("mistral4", {"rope_parameters": {"rope_type": "yarn"}}, "has no rope_theta"),
        ("mistral4", {"partial_rotary_factor": 0.5}, "partial_rotary_factor.*must be equal"),
        ("mistral4", {"rope_interleave": False}, "rope_interleave = False, but this model only has True"),
        ("mistral4", {"norm_topk_prob": None}, "norm_topk_prob = None; allowed: true or false"),
        ("mistral4", {"n_group": None}, "n_group = None; allowed: a whole number"),
        ("mistral4", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rotary positions: .*must be equal"),
        ("mistral4", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("mistral4", {"attention_bias": True}, "attention_bias = True"),
        ("glm4_moe_lite", {"head_dim": 8}, "head_dim = 8"),
        ("mistral growing", {"rope_parameters": None}, "rope_parameters = None; allowed: an object"),
        (
            "mistral growing",
            {"rope_parameters": {"llama_4_scaling_beta": "1"}},
            "llama_4_scaling_beta = '1'; allowed: a",
        ),
        ("granite", {"attention_dropout": 1.5}, "attention_dropout = 1.5: must be"),
        ("seed_oss", {"residual_dropout": 1.0}, "residual_dropout = 1.0: must be"),
        ("seed_oss", {"residual_dropout": None}, "residual_dropout = None; allowed: a finite number"),
        ("seed_oss", {"attention_out_bias": None}, "attention_out_bias = None; allowed: true or false"),
        ("smollm3", {"no_rope_layers": [0, 1, 0]}, r"no_rope_layers = \[0, 1, 0\]; allowed: 3 entries"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window = True, but this model"),
        ("llama3 biased", {"mlp_bias": 1}, "mlp_bias = 1; allowed: true or false"),
        ("mixtral", {"model_type": "mistral"}, "model_type = 'mistral', but this model is a mixtral"),
        ("mixtral", {"num_local_experts": None}, "no whole number above 0 for num_local_experts"),
        ("mixtral", {"num_experts": 4}, "num_local_experts"),
        ("mixtral", {"sliding_window": 0}, "sliding_window = 0; allowed: a number of tokens, or null for none"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1, but this model only has 0.0"),
        ("mixtral", {"attention_bias": True}, "attention_bias = True"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 24}, "allowed: a multiple of moe_intermediate_size = 16"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\], but this model only has \[\]"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2, but this model only has 1"),
        ("qwen2_moe", {"layer_types": ["sliding_attention"] * 2}, "without use_sliding_window = true and a "),
        ("qwen2_moe windows", {"sliding_window": None}, "sliding_window = None; allowed: a whole number"),
        ("qwen2 windows", {"sliding_window": 0}, "sliding_window = 0; allowed: a number of tokens, or null for none"),
        ("qwen2 windows", {"sliding_window": None}, "without use_sliding_window = true and a "),
        ("qwen2 windows", {"layer_types": ["full_attention"]}, "layer_types = .*allowed: 4 entries, each"),
        ("qwen3 windows", {"layer_types": [["full_attention"]] * 3}, "layer_types = .*allowed: 3 entries, each"),
        ("qwen2 windows", {"use_sliding_window": False, "sliding_window": 1.5}, "sliding_window = 1.5"),
        ("qwen3 windows", {"use_sliding_window": None}, "use_sliding_window = None; allowed: true or false"),
        ("qwen3 windows", {"max_window_layers": None}, "max_window_layers = None; allowed: a whole number"),
        ("qwen3_moe window", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "rotary_dim = 24: must be at most head_dim = 16"),
        ("falcon_h1", {"mamba_n_heads": 5}, "mamba_n_heads = 5 of mamba_d_head = 6 do not make up .* width 24"),
        ("falcon_h1", {"mamba_n_heads": 0}, "mamba_n_heads = 0 of mamba_d_head = 6 do not make up"),
        ("falcon_h1", {"mamba_d_ssm": "24"}, "mamba_d_ssm = '24'; allowed: a whole number, or null for 64"),
        ("falcon_h1", {"mamba_d_ssm": None}, "do not make up the mixer's width 64"),
        ("falcon_h1", {"mamba_d_head": "5"}, "mamba_d_head = '5'; allowed: a whole number"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, r"ssm_multipliers = .*; allowed: null or 5 numbers"),
        ("falcon_h1", {"key_multiplier": 2}, "key_multiplier = 2; allowed: a number with a decimal .*; write 2.0"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 3]}, "mlp_multipliers = 3; allowed: a number with .*; write 3.0"),
        ("falcon_h1", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers = 'x'; allowed: a finite number"),
        ("falcon_h1", {"time_step_limit": [0.001, 0.1]}, r"time_step_limit = \[0.001, 0.1\], but .* \[0.0, Infinity\]"),
        ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp = False"),
        ("falcon_h1", {"mamba_rms_norm": None}, "mamba_rms_norm = None; allowed: true or false"),
        ("falcon_h1", {"layers_block_type": ["hybrid"]}, "layers_block_type"),
        ("granite4", {"mamba_n_heads": 5}, "5 of mamba_d_head = 8 do not .* width 32 .mamba_expand x hidden_siz"),
        ("granite4", {"layer_types": ["mamba"] * 3}, "layer_types = .*; allowed: 4 entries, each one of linear_att"),
        ("granite4", {"layer_types": ["mamba"] * 3 + [["x"]]}, "layer_types = .*; allowed: 4 entries, each one of"),
        ("granite4", {"layer_types": None}, "layer_types = None; allowed: 4 entries"),
        ("granite4", {"layers_block_type": ["mamba"] * 4}, "layer_types: .* must be equal; remove the wrong one"),
        ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'; allowed: 'rope', or 'n"),
        ("granite4", {"position_embedding_type": ["rope"]}, "position_embedding_type = .'rope'.; allowed: 'rope', or"),
        ("granite4", {"shared_intermediate_size": 24}, "24; allowed: a multiple of intermediate_size = 16"),
        ("granite4", {"normalization_function": "layernorm"}, "normalization_function = 'layernorm'"),
        ("granite4", {"attention_dropout": 0.1}, "attention_dropout = 0.1, but attention of this family drops no"),
        ("granite4 dense", {"time_step_limit": None}, "time_step_limit = None, but .* allowed: .0.0, Infinity"),
        ("granite4 dense", {"num_local_experts": None}, "num_local_experts = None; allowed: a whole number"),
        ("lfm2", {"layer_types": ["conv"] * 2}, "layer_types = .*; allowed: 3 entries, each one of conv, "),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [3]}, r"full_attn_idxs = \[3\]; allowed: null or a lis"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 1}, "full_attn_idxs = 1; allowed: null or a list of layers"),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 0}, "block_multiple_of = 0; allowed: at le"),
        ("lfm2", {"block_ffn_dim_multiplier": None}, "block_ffn_dim_multiplier = None; allowed: a finite number; corr"),
        ("lfm2", {"block_ff_dim": 9}, "intermediate_size: .* must be equal; remove the wrong one"),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu = False"),
        ("lfm2", {"conv_bias": None}, "conv_bias = None; allowed: true or false"),
        ("lfm2_moe", {"layer_types": None}, "layer_types = None; allowed: 4 entries"),
        ("lfm2_moe", {"use_expert_bias": 1}, "use_expert_bias = 1; allowed: true or false"),
        ("gemma", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new', but this model only has 'gelu_pytorch_tanh'"),
        ("gemma", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu', but this model only has 'gelu_pytorch"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True, but this model"),
        ("gemma", {"num_key_value_heads": None}, "num_key_value_heads = None; allowed: a whole number"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act = 'silu', but this model only has 'xielu'"),
        ("apertus", {"rope_scaling": None}, "rope_scaling = None; allowed: with rope_parameters"),
        ("apertus", {"qk_norm": False}, "qk_norm = False"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act = 'silu', but this model only has 'relu2'"),
        ("nemotron_h", {"layers_block_type": ["x"] * 5}, "layers_block_type = .*; allowed: 5 entries, each one of"),
        ("nemotron_h", {"layers_block_type": None}, "layers_block_type = None; allowed: 0 entries"),
        ("nemotron_h", {"layer_types": None}, "layer_types = None; allowed: 0 entries"),
        ("nemotron_h", {"layer_types": ["moe"] * 5}, "the kinds of layers: layers_block_type is 'ME.EM', but layer_ty"),
        ("nemotron_h", {"layers_block_type": []}, "num_hidden_layers = None, but 0 layers have a kind"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*E"}, "the kinds of layers: hybrid_override_pattern is 'ME.E'"),
        ("nemotron_h", {"hybrid_override_pattern": "ME+EM"}, "hybrid_override_pattern = 'ME.EM'; allowed: a text of"),
        ("nemotron_h", {"num_hidden_layers": 4}, "num_hidden_layers = 4, but 5 layers have a kind"),
        ("nemotron_h", {"layers_block_type": ["moe"] * 4 + ["mlp"]}, "the kinds mlp and moe; allowed: one of the two"),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 24}, "24; allowed: a multiple of moe_intermediate_siz"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size = 8"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings = True, but this model only has False"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias = True, but this model only has False"),
        ("nemotron_h dense", {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu', but this model only has 'relu2'"),
        ("nemotron_h dense", {"time_step_limit": [0.1, 1.0]}, r"time_step_limit = \[0.1, 1.0\], but .* allowed"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping = 0.0; allowed: a number above 0, or null"),
        ("gemma2", {"final_logit_softcapping": -3.0}, "final_logit_softcapping = -3.0; allowed: a number above 0"),
        (
            "gemma2",
            {"final_logit_softcapping": 1e7},
            "final_logit_softcapping = 10000000.0; allowed: from 0 to 1e\\+06",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True, but this model"),
        ("gemma2", {"sliding_window_size": 6}, "sliding_window_size = 6, but this model only has 5"),
        ("gemma2", {"sliding_window": None}, "sliding_window = None; allowed: a whole number"),
        ("gemma2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types = .*allowed: 3"),
        ("glm", {"num_key_value_heads": None}, "num_key_value_heads = None; allowed: a whole number"),
        ("glm", {"head_dim": None}, "head_dim = None; allowed: a whole number"),
        ("glm4", {"attention_bias": None}, "attention_bias = None; allowed: true or false"),
        ("glm4", {"model_type": "glm4_moe"}, "model_type = 'glm4_moe', but this model is one of glm, glm4"),
        ("glm4", {"partial_rotary_factor": 0.375}, "rotary_dim = 3: must be even"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor.*must be equal"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = None; allowed: a whole number"),
        ("gpt_oss", {"swiglu_alpha": -1.0}, "swiglu_alpha = -1.0: must be above 0"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("gpt_oss", {"experts_per_token": 2}, "num_experts_per_tok"),
        ("gpt_oss", {"initial_context_length": 32}, "the length before the scaling"),
        ("qwen3_next", {"shared_expert_intermediate_size": 24}, "allowed: a multiple of moe_intermediate_size = 16"),
        ("qwen3_next", {"moe_intermediate_size": 0}, "allowed: a multiple of moe_intermediate_size = 0"),
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2, but this model only has 1"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 2}, "layer_types = .*allowed: 3 entries"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias = True, but this model only has False"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("qwen3_5_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 24}, "allowed: a multiple of moe_intermediate_size = 16"),
        ("qwen2_moe", {"qkv_bias": None}, "qkv_bias = None; allowed: true or false"),
        *((shape, {"hidden_act": "relu"}, "hidden_act = 'relu'") for shape in GATED),
        *((shape, {"attention_sinks": 4}, "attention_sinks") for shape in GATED),
    ],
)
def test_a_config_of_another_model_is_refused(shape, change, message):
    spec, args, *_ = parts(shape)
    refuse_config(args, spec.hf, change, message)


ROUTERS = {"gpt_oss": "mlp.router", "granite4": "block_sparse_moe.router"}
"""transformers' names, where they are no mlp.gate."""


@pytest.mark.parametrize("n_layers", [1, 3])
@pytest.mark.parametrize("shape", [*ROUTERS, "mixtral", "mixtral window", "qwen2_moe", "qwen3_next", "qwen3_5_moe"])
def test_the_auxiliary_loss_of_experts_is_that_of_transformers(shape, n_layers):
    """Of a sequence, as the mean over the layers; transformers joins the layers before it judges their balance."""
    spec, args, reference, config_class = parts(shape)
    args = dataclasses.replace(args, n_layers=n_layers, aux_loss_weight=0.3)
    model = build(spec.build, args, dtype=torch.float64).train()
    hf_model = twin(reference, config_class, model, spec.hf, torch.float64)
    tokens = tokens_for(args, 1, 20)
    spec.balance.set_aux_loss_scale(model, 1 / tokens.numel())
    (0 * model(tokens)).sum().backward()
    logits = hf_model(tokens, output_router_logits=True, use_cache=False).router_logits
    losses = [
        sys.modules[reference.__module__].load_balancing_loss_func((of_layer,), args.n_experts, args.top_k)
        for of_layer in logits
    ]
    loss = hf_model.config.router_aux_loss_coef * torch.stack(losses).mean()
    loss.backward()
    assert spec.balance.take_aux_loss(model).item() / tokens.numel() == pytest.approx(loss.item(), rel=1e-6)
    for layer in range(n_layers):
        ours = model.get_parameter(f"layers.{layer}.moe.router.gate.weight").grad
        router = ROUTERS.get(shape, "mlp.gate")
        assert close(ours, hf_model.get_parameter(f"model.layers.{layer}.{router}.weight").grad, 1e-5)


@pytest.mark.parametrize(
    "shape, change, message",
    [
        ("mixtral", {"n_shared_experts": 1}, "n_shared_experts = 1: transformers' Mixtral only has 0"),
        (
            "qwen2_moe",
            {"n_shared_experts": 0},
            "n_shared_experts = 0: transformers' Qwen 2 with experts has at least 1",
        ),
        ("glm4_moe", {"score": "softmax"}, "score = 'softmax': transformers' GLM 4 only has 'sigmoid'"),
        (
            "qwen3_next",
            {"n_shared_experts": 0},
            "n_shared_experts = 0: transformers' Qwen 3-Next has at least 1",
        ),
        ("granite4", {"n_shared_experts": 0}, "n_shared_experts = 0: transformers' Granite 4 has at least 1"),
        ("granite4", {"normalize_top_k": False}, "normalize_top_k = False: transformers' Granite 4 only has True"),
        ("granite4 dense", {"ssm_head_dim": 6}, "ssm_heads = 4 of ssm_head_dim = 6: .* multiple of it, here of dim"),
        ("lfm2_moe", {"n_shared_experts": 1}, "n_shared_experts = 1: transformers' LFM 2 only has 0"),
        ("nemotron_h", {"n_shared_experts": 0}, "n_shared_experts = 0: transformers' Nemotron-H has at least 1"),
        ("nemotron_h", {"score_before_experts": True}, "score_before_experts = True: transformers' Nemotron-H only"),
        ("mixtral", {"normalize_top_k": False}, "normalize_top_k = False: transformers' Mixtral only has True"),
        ("qwen3_5_moe", {"normalize_top_k": False}, "normalize_top_k = False: transformers' Qwen 3.5 only has True"),
        ("glm4_moe_lite", {"score": "softmax"}, "score = 'softmax': transformers' GLM 4.7 Flash only has 'sigmoid'"),
        ("gptj", {"n_kv_heads": 2}, "n_kv_heads = 2: transformers' GPT-J only has 4"),
        ("gptj", {"head_dim": 16, "rotary_dim": 8}, "head_dim = 16: transformers' GPT-J only has 8"),
        ("gptj", {"rope_theta": 5000.0}, "rope_theta = 5000.0: transformers' GPT-J only has 10000.0"),
        ("minimax_m2", {"route_scale": 2.0}, "route_scale = 2.0: transformers' MiniMax M2 only has 1.0"),
        ("afmoe", {"n_shared_experts": 0}, "n_shared_experts = 0: transformers' AFMoE has at least 1"),
        ("mistral4", {"score": "sigmoid"}, "score = 'sigmoid': transformers' Mistral 4 only has 'softmax'"),
        ("mistral4", {"query_period": 10}, "query_period = 10: transformers' Mistral 4 only has 20"),
        ("mistral4", {"rope_scaling": None}, "rope_scaling is not set: transformers' Mistral 4 has YaRN always"),
        ("gpt_neox", {"n_kv_heads": 2}, "n_kv_heads = 2: transformers' GPT-NeoX only has n_heads = 4"),
        ("phi", {"head_dim": 16}, "head_dim = 16: transformers' Phi only has dim / n_heads, here 32 / 4"),
        ("falcon", {"rotary_dim": 4}, "rotary_dim = 4: transformers' Falcon only has head_dim = 8"),
        ("falcon in turn", {"n_kv_heads": 2}, "n_kv_heads = 2 with norms = 0: transformers' Falcon only has 1 or n"),
        ("gpt_oss", {"score": "sigmoid"}, "score = 'sigmoid': transformers' gpt-oss only has 'softmax'"),
    ],
)
def test_features_missing_in_transformers_are_not_exported(shape, change, message):
    with pytest.raises(JobError, match=message):
        MODELS[shape.split()[0]].hf.config_to_hf(dataclasses.replace(GATED[shape], **change))
