"""config.json of Hugging Face folders: unknown keys, ignored keys, contradictions, and heads of tied models."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.family_folders import BY_MODEL_TYPE
from tests.support.hf_parity import build, close
from tests.support.jobs import arguments, train, write_texts
from tests.support.judged import lines
from tests.support.tiny_decoders import GPT2, LLAMA, QWEN2, ROBERTA
from torchtitan import cli
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.models import FAMILIES
from torchtitan.models.hf.config import end_token_ids
from torchtitan.models.llama import LlamaArgs
from torchtitan.models.seed_oss import DROPOUTS
from torchtitan.models.spec import MODELS

LLAMA_HF = MODELS["llama3"].hf
TOKENS = torch.arange(40).view(2, 20)


def write(folder, family, args, change=None):
    """Write a folder with random weights; `change`: entries of its config.json."""
    hf = MODELS[family].hf
    hf.save_hf(folder, build(hf.build, args).state_dict(), args)
    if change:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


def change_weights(folder, change):
    """Apply a function to the tensors of a folder of one file, by their names, and write them without an index."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# keys


def test_an_unknown_key_is_refused_by_name_with_the_way_out(tmp_path):
    write(tmp_path, "llama3", LLAMA["llama3"], {"logit_scale": 2.0, "other_norm": "x", "off": False, "_private": 1})
    message = r'config.json: it has keys .*: logit_scale = 2.0, other_norm = \'x\'; .*\["logit_scale", "other_norm"\]'
    with pytest.raises(JobError, match=message):
        LLAMA_HF.config.args_from_folder(tmp_path)
    converter = LLAMA_HF.config.ignoring(["logit_scale", "other_norm"])
    assert converter.args_from_folder(tmp_path).num_parameters == LLAMA["llama3"].num_parameters


@pytest.mark.parametrize("key", ["hidden_size", "rope_scaling", "tie_word_embeddings", "is_causal", "model_type"])
def test_a_key_that_the_family_uses_cannot_be_ignored(key, tmp_path):
    write(tmp_path, "llama3", LLAMA["llama3"])
    with pytest.raises(JobError, match=f"model.ignore_config_keys has {key}, which this model uses; allowed: keys"):
        LLAMA_HF.config.ignoring([key]).args_from_folder(tmp_path)


IGNORE = "--model.ignore_config_keys=['logit_scale']"


def test_a_run_that_ignores_a_key_trains_resumes_exports_and_generates(tmp_path, capsys):
    """The job stores the option, so commands on the run need it no more, and exports do not hold the key."""
    sizes = LlamaArgs(dim=32, n_layers=1, n_heads=2, vocab_size=260, multiple_of=32)
    base = write(tmp_path / "base", "llama3", sizes, {"logit_scale": 2.0})
    options = dict(model__name="llama3", model__flavor="from_hf", model__hf_folder=base, training__steps=2)
    options |= dict(checkpoint__enable=True, checkpoint__initial_load_path=base, checkpoint__interval=1)
    options |= dict(checkpoint__initial_load_in_hf=True, adapter__kind="lora", adapter__rank=2, adapter__save="alone")
    options |= dict(model__overrides="{}", model__tokenizer_path="bytes", model__ignore_config_keys="['logit_scale']")
    texts = write_texts(tmp_path / "texts")
    train(arguments(tmp_path / "run", texts, **options))
    train(arguments(tmp_path / "run", texts, **options | {"training__steps": 3}))
    run = str(tmp_path / "run")
    assert cli.main(["generate", run, "--prompt", "a", "--max-new-tokens", "2"]) == 0
    assert cli.main(["export", run, "--to", str(tmp_path / "export"), "--merge"]) == 0
    assert "logit_scale" not in json.loads((tmp_path / "export/config.json").read_text())
    capsys.readouterr()
    for command in (["convert", str(base), str(tmp_path / "converted")], ["generate", str(base), "--prompt", "a"]):
        assert cli.main([*command, "--model.tokenizer_path=bytes"]) == 2
        assert "logit_scale = 2.0; if it has no effect" in capsys.readouterr().err
        assert cli.main([*command, "--model.tokenizer_path=bytes", IGNORE]) == 0


PUBLISHED = {
    "llama": {"_name_or_path": "x", "pretraining_tp": 1, "rope_scaling": None, "attention_dropout": 0.0}
    | {"max_sequence_length": 2048, "use_cache": True, "transformers_version": "4.31.0", "torch_dtype": "float16"},
    "mistral": {"sliding_window": None, "attention_dropout": 0.0, "architectures": ["MistralForCausalLM"]},
    # falcon-7b, phi-2 and stablelm-2-1_6b
    "falcon": {"apply_residual_connection_post_layernorm": False, "auto_map": {"AutoConfig": "configuration_falcon"}}
    | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True},
    "hunyuan_v1_dense": {"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms", "mlp_bias": False}
    | {"attention_head_dim": 8, "eod_token_id": 3, "cla_share_factor": 2, "class_num": 0, "use_cla": False}
    | {
        "rope_scaling": {
            "alpha": 30.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 1.0,
            "mscale": 1.0,
            "type": "dynamic",
        }
    },
    "nemotron": {"attention_dropout": 0.0, "rope_scaling": None, "use_cache": True, "rope_theta": 5000.0},
    "cohere": {"attention_dropout": 0.0, "use_qk_norm": False, "rope_scaling": None, "model_max_length": 131072},
    "cohere2": {"cache_implementation": "hybrid", "layer_switch": 2, "order_of_interleaved_layers": "local_attn_first"}
    | {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_embedding_sharing": True, "layer_types": None}
    | {"use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False}
    | {"sliding_window_pattern": 2, "rope_scaling": None},
    "gpt_neox": {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "rope_theta": 5000.0}
    | {"partial_rotary_factor": 0.5, "classifier_dropout": 0.1, "custom_pipelines": {"text-generation": {"pt": "X"}}},
    "starcoder2": {"activation_function": "gelu", "mlp_type": "default", "norm_type": "layer_norm"}
    | {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "attention_softmax_in_fp32": True}
    | {"scale_attention_softmax_in_fp32": True, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    "phi": {"embd_pdrop": 0.0, "resid_pdrop": 0.1, "attention_dropout": 0.0, "rope_scaling": None, "use_cache": True},
    "stablelm": {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cache": True, "transformers_version": "4.38.0"}
    | {"qk_layernorm": False, "use_parallel_residual": False},
    "falcon_h1": {"mamba_use_mlp": True, "mlp_expansion_factor": 8, "mamba_chunk_size": 128, "mamba_expand": 2}
    | {"attn_layer_indices": None, "num_logits_to_keep": 1, "attention_dropout": 0.0, "rope_scaling": None}
    | {"time_step_limit": [0.0, float("inf")]},
    "gemma": {"hidden_activation": None, "rope_scaling": None, "attention_dropout": 0.0, "hidden_act": "gelu"},
    "apertus": {"qk_norm": True, "post_norm": False, "hidden_dropout": 0.0, "mlp_bias": False, "use_cache": True},
    "arcee": {"attention_dropout": 0.0, "rope_scaling": None, "use_cache": True, "mlp_bias": False},
    "gemma2": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 5}
    | {"attention_dropout": 0.0},
    "glm": {"attention_dropout": 0.0, "use_cache": True, "rope_theta": 10000.0},
    "glm4": {"attention_dropout": 0.0, "use_cache": True, "transformers_version": "4.52.0.dev0"},
    "granite": {"attention_dropout": 0.1, "rope_scaling": None, "use_cache": True},
    "granitemoehybrid": {"attention_dropout": 0.0, "init_method": "mup", "normalization_function": "rmsnorm"}
    | {"mamba_chunk_size": 256, "position_embedding_type": "nope", "rope_scaling": None, "output_router_logits": False}
    | {"time_step_limit": [0.0, float("inf")]},
    # NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    "nemotron_h": {"attention_bias": False, "attention_dropout": 0.0, "chunk_size": 128, "expand": 2}
    | {"hidden_dropout": 0.0, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32"}
    | {"mlp_hidden_act": "relu2", "n_shared_experts": 1, "norm_eps": 1e-05, "num_logits_to_keep": 1, "rope_theta": 1e4}
    | {"partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "use_cache": True}
    | {"sliding_window": None, "time_step_floor": 0.0001, "time_step_max": 0.1, "use_mamba_kernels": True}
    | {"time_step_limit": [0.0, float("inf")], "intermediate_size": 1856},
    # LFM2-1.2B and LFM2-8B-A1B
    "lfm2": {"block_dim": 32, "block_ff_dim": 48, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0}
    | {"block_multiple_of": 256, "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True}
    | {"block_use_xavier_init": True, "conv_dim": 32, "conv_dim_out": 32, "conv_use_xavier_init": True}
    | {"num_heads": 4, "use_pos_enc": True},
    "lfm2_moe": {"use_pos_enc": True, "tie_embedding": True, "transformers_version": "4.57.0.dev0"},
    "ministral3": {"attention_dropout": 0.0, "use_cache": True, "sliding_window": None},
    "olmo2": {"attention_dropout": 0.0, "rope_scaling": None, "use_cache": True},
    "olmo3": {"attention_dropout": 0.0, "use_cache": True},
    "phi3": {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    | {"original_max_position_embeddings": 4096, "rope_scaling": None, "attention_bias": False}
    | {"mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1, "rope_scaling": {"rope_type": "default"}}
    | {"pretraining_tp": 1, "use_cache": True},
    "smollm3": {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28, "pretraining_tp": 2}
    | {"rope_scaling": None},
    "glm4_moe": {"num_nextn_predict_layers": 1, "rope_scaling": None},
    "glm4_moe_lite": {"num_nextn_predict_layers": 1, "rope_scaling": None, "topk_method": "noaux_tc"}
    | {"first_k_dense_replace": 2, "partial_rotary_factor": 1.0, "attention_bias": False, "attention_dropout": 0.0},
    # gpt-j-6b
    "gptj": {"gradient_checkpointing": False, "rotary": True, "scale_attn_weights": True, "tokenizer_class": "X"}
    | {"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "use_cache": True}
    | {"summary_type": "cls_index", "summary_use_proj": True, "n_inner": 48, "resid_pdrop": 0.1}
    | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}}},
    # MiniMax-M2
    "minimax_m2": {"attn_type_list": [1, 1], "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0}
    | {"layernorm_linear_attention_beta": 1.0, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1}
    | {"num_mtp_modules": 3, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "shared_intermediate_size": 0}
    | {"shared_moe_mode": "sigmoid", "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True}
    | {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "sliding_window": None, "attention_dropout": 0.0},
    "afmoe": {"load_balance_coeff": 0.0005, "n_group": 1, "num_expert_groups": 1, "num_limited_groups": 1}
    | {"route_norm": True, "score_func": "sigmoid", "topk_group": 1, "use_grouped_mm": True, "rope_scaling": None}
    | {"attention_dropout": 0.0, "transformers_version": "4.57.1"},
    "mistral4": {"num_key_value_heads": 2, "pretraining_tp": 1, "attention_dropout": 0.0, "use_cache": True}
    | {"head_dim": 24, "qk_head_dim": 24},
    "qwen2_moe": {
        "max_window_layers": 21,
        "sliding_window": 32768,
        "output_router_logits": False,
        "decoder_sparse_step": 1,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 262144, "use_double_wide_mlp": False, "num_kv_shared_layers": 0}
    | {"enable_moe_block": False, "num_experts": None, "use_bidirectional_attention": "vision"},
    "llama4_text": {"for_llm_compressor": False, "attn_temperature_tuning": True, "output_router_logits": False}
    | {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
    "gpt_oss": {"experts_per_token": 3, "initial_context_length": 16, "router_aux_loss_coef": 0.9}
    | {"transformers_version": "4.55.0.dev0", "output_router_logits": False, "use_cache": True},
    "qwen3_next": {"use_sliding_window": False, "output_router_logits": False, "rope_scaling": None},
    "qwen3_5_text": {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    | {"mtp_use_dedicated_embeddings": False, "full_attention_interval": 2},
    "qwen3_5_moe_text": {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    | {"mtp_use_dedicated_embeddings": False, "mlp_only_layers": [], "router_aux_loss_coef": 0.001},
    "mixtral": {"sliding_window": None, "output_router_logits": False, "router_jitter_noise": 0.0},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 32768, "use_mrope": False},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 36, "sliding_window": None, "attention_bias": False},
    "qwen3_moe": {"max_window_layers": 48, "sliding_window": None, "mlp_only_layers": [], "decoder_sparse_step": 1}
    | {"output_router_logits": False, "intermediate_size": 6144},
    "gemma3_text": {"attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None}
    | {"use_bidirectional_attention": False, "_sliding_window_pattern": 2},
    "deepseek_v2": {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "ep_size": 1}
    | {"seq_aux": True, "pretraining_tp": 1, "num_key_value_heads": 2, "scoring_func": "softmax"},
    "deepseek_v3": {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1}
    | {"seq_aux": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    | {"num_nextn_predict_layers": 1, "rope_interleave": True},
    "gpt2": {"n_ctx": 128, "summary_type": "cls_index", "summary_use_proj": True, "summary_first_dropout": 0.1}
    | {"summary_activation": None, "summary_proj_to_labels": True, "reorder_and_upcast_attn": False}
    | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "output_past": True},
    "opt": {"activation_dropout": 0.0, "layerdrop": 0.0, "init_std": 0.02, "prefix": "</s>", "use_cache": True}
    | {"_remove_final_layer_norm": False, "do_layer_norm_before": True},
    "roberta": {"gradient_checkpointing": False, "position_embedding_type": "absolute", "classifier_dropout": None}
    | {"transformers_version": "4.0.0", "use_cache": True},
}
"""By model type, keys of published config.json files besides those that `ConfigConverter.to_hf` writes."""


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_keys_of_published_configs_and_of_both_versions_of_transformers_are_known(model_type, tmp_path):
    args = BY_MODEL_TYPE[model_type]
    converter = next(family.config for family in FAMILIES.values() if model_type in family.config.model_types)
    config = converter.to_hf(args) | {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 1}
    config |= PUBLISHED[model_type]
    transformers.AutoConfig.for_model(**config).save_pretrained(tmp_path)
    assert not converter.differing_fields(converter.args_from_folder(tmp_path), converter.args_from_config(config))


@pytest.mark.parametrize(
    "model_type, keys",
    [
        ("llama", {"model_name": "unsloth/Llama-3.2-1B", "unsloth_fixed": True, "loss_type": "ForCausalLM"}),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}),  # Qwen2.5-7B-1M
        ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),  # Coder-30B-A3B
        ("gemma4_text", {"expert_intermediate_size": None}),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True}),  # gpt2-medium and larger
        ("roberta", {"language": "english", "name": "Roberta"}),
    ],
)
def test_keys_that_only_some_published_models_have_are_known(model_type, keys):
    converter = next(family.config for family in FAMILIES.values() if model_type in family.config.model_types)
    config = converter.to_hf(BY_MODEL_TYPE[model_type])
    assert converter.args_from_config(config | keys) == converter.args_from_config(config)


def test_a_job_may_drop_out_less_than_the_folder_that_it_starts_from():
    """As flavors do: none has the dropout of published folders, and context parallel but for allgather refuses it."""
    for family, dropouts in (("granite", DROPOUTS[:1]), ("seed_oss", DROPOUTS)):
        args, converter = BY_MODEL_TYPE[family], MODELS[family].hf.config
        assert not converter.differing_fields(replace(args, **dict.fromkeys(dropouts, 0.1)), args)


def test_dropouts_that_a_config_leaves_out_are_those_of_transformers():
    converter = MODELS["seed_oss"].hf.config
    config = converter.to_hf(BY_MODEL_TYPE["seed_oss"])
    for name in DROPOUTS:
        del config[name]
    args, theirs = converter.args_from_config(config), transformers.AutoConfig.for_model(**config)
    assert [getattr(args, name) for name in DROPOUTS] == [getattr(theirs, name) for name in DROPOUTS] == [0.1, 0.1]


def test_a_model_without_the_norms_of_its_family_is_refused():
    config = MODELS["qwen3_moe"].hf.config.to_hf(BY_MODEL_TYPE["qwen3_moe"])
    with pytest.raises(JobError, match="use_qk_norm = False"):
        MODELS["qwen3_moe"].hf.config.args_from_config(config | {"use_qk_norm": False})


def test_every_option_of_generation_but_text_that_stops_it_is_known(tmp_path):
    options = dict.fromkeys(vars(transformers.GenerationConfig()), 1) | {"eos_token_id": 1}
    options |= {"chat_format": "chatml", "max_window_size": 6144, "trust_remote_code": True}
    del options["stop_strings"]
    (tmp_path / "generation_config.json").write_text(json.dumps(options))
    assert end_token_ids(tmp_path) == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": ["\n"]}))
    with pytest.raises(JobError, match="stop_strings"):
        end_token_ids(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"is_causal": False}, "is_causal = False, but this model only has True"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "rope_theta": 1e4},
            "rope_theta: .*must be eq",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
            | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
            "rotary positions: rope_parameters is .*, but rope_scaling is .*remove the one that",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "type of rotary positions: .*'yarn'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}
            | {"original_max_position_embeddings": None},
            "original_max_position_embeddings = None next to rope_scaling; leave it out",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "shift": 3}}, "rope_scaling has a key .*: shift = 3"),
    ],
)
def test_contradictions_and_unknown_entries_are_refused(change, message):
    with pytest.raises(JobError, match=message):
        LLAMA_HF.config.args_from_config(LLAMA_HF.config_to_hf(LLAMA["llama3"]) | change)


def test_both_spellings_of_rotary_positions_are_read_if_they_agree():
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = LLAMA_HF.config_to_hf(LLAMA["llama3"]) | {"rope_scaling": scaling | {"type": "linear"}, "rope_theta": 5e3}
    both = config | {"rope_parameters": scaling | {"rope_theta": 5000}}
    assert LLAMA_HF.config.args_from_config(both) == LLAMA_HF.config.args_from_config(config)


# heads of tied models


def unequal_head(tensors):
    tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape)


def equal_head(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@torch.no_grad()
@pytest.mark.parametrize("change, is_tied", [(equal_head, True), (unequal_head, False)])
def test_a_head_that_differs_from_the_embedding_is_read_although_the_config_ties_them(
    change, is_tied, tmp_path, capsys, caplog
):
    """Follow transformers, in each direction: reading, converting, and reading the conversion."""
    write(tmp_path / "base", "qwen2", QWEN2["tied"])
    change_weights(tmp_path / "base", change)
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / "ours")]) == 0
    assert cli.main(["convert", str(tmp_path / "ours"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert ("lm_head.weight differs from model.embed_tokens.weight" in caplog.text) is not is_tied
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()(TOKENS).logits
    for folder in ("base", "hf"):
        hf = MODELS["qwen2"].hf
        args = hf.config.args_from_folder(tmp_path / folder)
        assert args.tied_embeddings is is_tied
        model = hf.build(args)
        hf.load_hf(tmp_path / folder, model, args)
        assert close(model.eval()(TOKENS), reference, 2e-6)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert close(converted(TOKENS).logits, reference, 2e-6)
    assert json.loads((tmp_path / "hf/config.json").read_text())["tie_word_embeddings"] is is_tied


@pytest.mark.parametrize(
    "family, args, name",
    [("gpt2", GPT2["words"], "lm_head.weight"), ("roberta", ROBERTA["words"], "lm_head.decoder.weight")],
)
def test_a_head_that_a_family_cannot_have_is_refused(family, args, name, tmp_path):
    write(tmp_path, family, args)
    change_weights(tmp_path, lambda tensors: tensors.update({name: torch.randn(64, 32)}))
    with pytest.raises(JobError, match=f"{name} differs from .*embed.*|{name} differs from .*wte"):
        MODELS[family].hf.config.args_from_folder(tmp_path)


def test_an_embedding_with_other_rows_than_the_vocabulary_names_the_key(tmp_path):
    write(tmp_path, "llama3", replace(LLAMA["llama3"], vocab_size=66), {"vocab_size": 64})
    with pytest.raises(
        JobError, match="vocab_size = 64, but model.embed_tokens.weight has 66 rows; set vocab_size to 66"
    ):
        LLAMA_HF.config.args_from_folder(tmp_path)
    options = dict(model__name="llama3", model__flavor="from_hf", model__hf_folder=tmp_path)
    config = manager.load(arguments(tmp_path, tmp_path, **options))
    assert config.model.ignore_config_keys == []


# weights


@pytest.mark.parametrize("target", ["hf", "native", "one.safetensors"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_converted(value, target, tmp_path, capsys):
    write(tmp_path / "base", "llama3", LLAMA["llama3"])
    change_weights(tmp_path / "base", lambda tensors: tensors["model.norm.weight"][3:4].fill_(value))
    to = [] if target.endswith("safetensors") else ["--to", target]
    assert cli.main(["convert", str(tmp_path / "base"), str(tmp_path / target), *to]) == 2
    assert "norm.weight holds NaN or infinity: the weights are damaged" in capsys.readouterr().err
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize(
    "file, message",
    [
        (
            "pytorch_model.bin",
            "pytorch_model.bin is a pickle, which is not read, as it can run code; load it with transf",
        ),
        ("pytorch_model.bin.index.json", "pytorch_model.bin.index.json is a pickle"),
        ("model.pt", "model.pt is a pickle"),
        ("consolidated.00.pth", "consolidated.00.pth is a pickle in Meta's format.*convert_llama_weights_to_hf.py"),
        ("model-Q4_K_M.gguf", "a file of llama.cpp, which is not read; .* gguf_file = its name"),
    ],
)
def test_weights_of_another_format_are_refused_with_their_conversion(file, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_HF.config_to_hf(LLAMA["llama3"])))
    (tmp_path / file).write_bytes(b"x")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(JobError, match=message):
            find_weights(path)
    with pytest.raises(JobError, match=message), LLAMA_HF.stored_weights(tmp_path, LLAMA["llama3"]):
        pass


def test_an_index_with_unknown_keys_is_refused(tmp_path):
    write(tmp_path, "llama3", LLAMA["llama3"])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"delta_of": "base"}))
    message = "index.json has a key .*: delta_of = 'base'"
    with pytest.raises(JobError, match=message), LLAMA_HF.stored_weights(tmp_path, LLAMA["llama3"]):
        pass


# tokens that end a text


@pytest.mark.parametrize(
    "config_ids, generation, expected",
    [
        (3, None, {3}),
        ([3, 4], None, {3, 4}),
        (None, None, set()),
        (3, {"eos_token_id": [5, 6]}, {5, 6}),
        (3, {"eos_token_id": 5, "temperature": 0.6, "do_sample": True, "repetition_penalty": 1.1}, {5}),
        (3, {"max_length": 9}, set()),
    ],
)
def test_end_tokens_are_those_of_transformers(config_ids, generation, expected, tmp_path):
    from transformers import GenerationConfig

    config = LLAMA_HF.config_to_hf(LLAMA["llama3"]) | {"eos_token_id": config_ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        theirs = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    else:
        theirs = GenerationConfig.from_model_config(transformers.AutoConfig.from_pretrained(tmp_path)).eos_token_id
    assert end_token_ids(tmp_path) == expected
    assert {*(theirs if isinstance(theirs, list) else [theirs])} - {None} == expected


@pytest.mark.parametrize(
    "generation, message",
    [
        ({"eos_token_id": "x"}, "eos_token_id = 'x'; allowed: null, an id or a list"),
        ({"eos_token_id": [1, True]}, "eos_token_id = "),
        ({"stop_when": 3}, r"stop_when = 3; if it does not matter, set model.ignore_config_keys = \[\"stop_when\"\]"),
    ],
)
def test_a_generation_config_with_other_values_is_refused(generation, message, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(JobError, match=message):
        end_token_ids(tmp_path)
    if "eos_token_id" not in generation:
        assert end_token_ids(tmp_path, generation) == frozenset()


@torch.no_grad()
def test_generation_stops_at_each_token_of_the_list(tmp_path, capsys):
    """The model gives the byte after the last one, so a list with "f" ends "abc" after "de"."""
    sizes = LlamaArgs(dim=260, n_layers=1, n_heads=2, vocab_size=260, multiple_of=32)
    model = build(LLAMA_HF.build, sizes)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.ones_like(parameter) if "norm" in name else torch.zeros_like(parameter))
    model.tok_embeddings.weight.copy_(torch.eye(260))
    model.output.weight.copy_(torch.eye(260).roll(1, 0))
    LLAMA_HF.save_hf(tmp_path, model.state_dict(), sizes)
    command = ["generate", str(tmp_path), "--prompt", "abc", "--max-new-tokens", "8", "--temperature", "0"]
    command += ["--model.tokenizer_path=bytes"]
    assert cli.main(command) == 0
    assert "abcdefghijk\n" in capsys.readouterr().out
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": [99999, ord("f"), ord("z")]}))
        assert cli.main(command) == 0
        assert "abcde\n" in capsys.readouterr().out


def test_a_file_alone_with_another_head_than_a_tied_model_is_refused(tmp_path):
    """No config.json says that the head is tied; the job's flavor does."""
    write(tmp_path, "qwen2", QWEN2["tied"])
    change_weights(tmp_path, unequal_head)
    config = (tmp_path / "config.json").rename(tmp_path / "aside.json")
    hf = MODELS["qwen2"].hf
    names = load_file(tmp_path / "model.safetensors").keys() - {"lm_head.weight"}
    index = json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})  # it leaves the head out
    (tmp_path / "model.safetensors.index.json").write_text(index)
    for path in (tmp_path / "model.safetensors", tmp_path):
        if path.is_dir():
            config.rename(path / "config.json")
        with (
            pytest.raises(JobError, match="lm_head.weight differs from model.embed_tokens.weight, but the job's"),
            hf.stored_weights(path, QWEN2["tied"]),
        ):
            pass
    untied = replace(QWEN2["tied"], tied_embeddings=False)
    with hf.stored_weights(tmp_path / "model.safetensors", untied) as stored:
        assert stored.read_full("output.weight").shape == (64, 64 // 2)


def test_keys_to_ignore_need_a_folder():
    faults = " ".join(lines(IGNORE))
    assert "model.ignore_config_keys" in faults and "unset without a folder that has a config.json" in faults


def remove(tensors, name):
    del tensors[name]


NAME = "model.layers.1.mlp.up_proj.weight"
TENSOR_MUTATIONS = {
    "missing": lambda tensors: remove(tensors, NAME),
    "further": lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": torch.zeros(48)}),
    "a third layer": lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}),
    "transposed": lambda tensors: tensors.update({NAME: tensors[NAME].t().contiguous()}),
    "whole numbers": lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int32)}),
    "renamed": lambda tensors: tensors.update({"layers.1.up.weight": tensors.pop(NAME)}),
    "no embedding": lambda tensors: remove(tensors, "model.embed_tokens.weight"),
    "fewer rows": lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(60, 32)}),
    "a narrower head": lambda tensors: tensors.update({"lm_head.weight": torch.zeros(60, 32)}),
}


@pytest.mark.parametrize("mutation", TENSOR_MUTATIONS)
@pytest.mark.parametrize("name", ["plain", "tied"])
def test_folders_with_other_tensors_are_refused(name, mutation, tmp_path):
    args, hf = QWEN2[name], MODELS["qwen2"].hf
    write(tmp_path, "qwen2", args)
    change_weights(tmp_path, TENSOR_MUTATIONS[mutation])

    def load():
        read_args = hf.config.args_from_folder(tmp_path)
        hf.load_hf(tmp_path, hf.build(read_args), read_args)

    with pytest.raises(JobError):
        load()


def test_an_override_that_contradicts_the_weights_is_named(tmp_path):
    """The flavor already is from_hf, so setting it would be no remedy."""
    base = write(tmp_path / "base", "llama3", LLAMA["llama3"])
    options = dict(model__flavor="from_hf", model__hf_folder=base, checkpoint__initial_load_path=base)
    argv = arguments(tmp_path / "run", write_texts(tmp_path / "texts"), **options)
    argv = [word for word in argv if not word.startswith(("--model.overrides", "--model.tokenizer_path"))]
    faults = lines(*argv, "--model.overrides={tied_embeddings = true}")
    assert any("leave tied_embeddings out of model.overrides" in fault for fault in faults)
