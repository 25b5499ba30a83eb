"""Tests of model.flavor = from_hf, which takes a model's sizes from a folder's config.json, for every family."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from tests.support.family_folders import SHAPES
from tests.support.hf_parity import build, close, eager, refuse_config, tokens_for
from tests.support.jobs import ROOT
from tests.support.judged import lines
from tests.support.tiny_decoders import (
    DEEPSEEK,
    LLAMA,
    MULTI_TOKEN,
    QWEN3_MOE,
)
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.models import CONFIG_CONVERTERS, resolve_sizes
from torchtitan.models.deepseek.model import HF, Deepseek
from torchtitan.models.hf.config import find_config, read_header, tensor_files
from torchtitan.models.llama import RopeScaling
from torchtitan.models.spec import MODELS
from torchtitan.training import inference_model

NEVER_IN_A_CONFIG = ("multiple_of", "ffn_dim_multiplier", "n_kv_heads", "bias_rate", "mtp_loss_weight")


def job(family: str, folder: Path, *arguments: str) -> list[str]:
    return [f"--model.name={family}", "--model.flavor=from_hf", f"--model.hf_folder={folder}", *arguments]


def test_every_family_is_covered():
    assert {shape.split()[0] for shape in SHAPES} == set(CONFIG_CONVERTERS) == set(MODELS)


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_and_constants_come_from_the_folder(shape, tmp_path):
    """Read a config.json that transformers wrote; it has no depth of multi-token prediction."""
    args, config_class = SHAPES[shape]
    family = shape.split()[0]
    config_class(**MODELS[family].hf.config_to_hf(args)).save_pretrained(tmp_path)
    from_folder = ResolvedJob(load(job(family, tmp_path))).model.args
    for name in {field.name for field in dataclasses.fields(args)}.difference(NEVER_IN_A_CONFIG):
        assert getattr(from_folder, name) == getattr(args, name), name
    assert from_folder.num_parameters == args.num_parameters
    assert ResolvedJob(load(job(family, tmp_path, "--model.overrides={vocab_size = 9}"))).model.args.vocab_size == 9


def test_check_judges_sizes_of_a_folder_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama3"].hf.config_to_hf(LLAMA["llama3"])))
    arguments = [*job("llama3", tmp_path), "--model.tokenizer_path=bytes"]
    code = (
        "import sys; from torchtitan.cli import main; main(['check', *sys.argv[1:]]); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "torch was imported"
    assert "allowed: at most the 64 tokens of model from_hf" in done.stderr


def faults_of_config(tmp_path, config, family="llama3"):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return " ".join(lines(*job(family, tmp_path)))


LLAMA3 = MODELS["llama3"].hf.config_to_hf(LLAMA["llama3"])


@pytest.mark.parametrize(
    "change, expected",
    [
        (
            {"use_mamba": True, "hidden_act": "gelu"},
            "use_mamba",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling"),
        ({"model_type": "qwen3_moe"}, 'but this model is a llama; set model.name = "qwen3_moe"'),
        ({"model_type": "gemma3", "text_config": {}}, 'but this model is a llama; set model.name = "gemma3"'),
        ({"model_type": "flux"}, "but this model is a llama; families are llama3, llama2"),
        ({"quantization_config": {"quant_method": "gptq"}}, "Convert the weights to bfloat16 first"),
        (
            {"rms_norm_eps": "small"},
            "rms_norm_eps = 'small'; allowed: a finite number; correct it, or leave it out for",
        ),
        ({"tie_word_embeddings": 1}, "tied_embeddings = 1: input should be a valid boolean"),
        ({"rope_theta": [1]}, "rope_theta = [1]; allowed: a finite number"),
    ],
)
def test_configs_that_the_model_cannot_represent_are_refused(tmp_path, change, expected):
    message = faults_of_config(tmp_path, LLAMA3 | change)
    assert f'model.hf_folder: given "{tmp_path}"; allowed: a folder with the config.json of a llama3 model' in message
    assert expected in message


DECODER = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta")
LINEAR = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
LINEAR += ("linear_conv_kernel_dim", "partial_rotary_factor", "full_attention_interval")
ROUTED = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "router_aux_loss_coef")
ROUTED += ("shared_expert_intermediate_size",)
MAMBA = ("mamba_n_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_d_head")
OPTIONAL = {  # numbers that a config may leave out; those that may be null
    "llama3": (DECODER, DECODER[:1]),
    "mistral": ((*DECODER, "head_dim", "sliding_window"), ("num_key_value_heads", "head_dim", "sliding_window")),
    "gemma3": (
        (*DECODER, "head_dim", "rope_local_base_freq", "sliding_window", "sliding_window_pattern")
        + ("query_pre_attn_scalar",),
        (),
    ),
    "gemma4": (
        (*DECODER[:-1], "head_dim", "sliding_window", "global_head_dim", "num_global_key_value_heads")
        + ("final_logit_softcapping",),
        ("num_global_key_value_heads", "final_logit_softcapping"),
    ),
    "gemma": ((*DECODER, "head_dim"), ()),
    "apertus": ((*DECODER, "head_dim"), DECODER[:1]),
    "arcee": ((*DECODER, "head_dim"), (DECODER[0], "head_dim")),
    "gemma2": (
        (*DECODER, "head_dim", "sliding_window", "query_pre_attn_scalar")
        + ("attn_logit_softcapping", "final_logit_softcapping"),
        ("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "falcon_h1": (
        (*DECODER, "head_dim", *MAMBA, "embedding_multiplier", "lm_head_multiplier", "key_multiplier")
        + ("attention_in_multiplier", "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
        DECODER[:1],
    ),
    "falcon": (
        ("num_kv_heads", "layer_norm_epsilon", *DECODER[2:], "ffn_hidden_size"),
        ("num_kv_heads", "ffn_hidden_size"),
    ),
    "hunyuan_v1_dense biased": (DECODER, DECODER[:1]),
    "nemotron": (
        (DECODER[0], *DECODER[2:], "norm_eps", "head_dim", "partial_rotary_factor"),
        (DECODER[0], "head_dim"),
    ),
    "cohere": ((DECODER[0], *DECODER[2:], "layer_norm_eps", "head_dim", "logit_scale"), DECODER[:1]),
    "cohere2": (
        (DECODER[0], *DECODER[2:], "layer_norm_eps", "head_dim", "logit_scale", "sliding_window"),
        DECODER[:1],
    ),
    "gpt_neox": (("layer_norm_eps", DECODER[2], "rotary_emb_base", "rotary_pct", "hidden_dropout"), ()),
    "starcoder2": (
        (DECODER[0], *DECODER[2:], "norm_epsilon", "head_dim", "sliding_window", "residual_dropout"),
        ("head_dim", "sliding_window"),
    ),
    "phi": ((DECODER[0], "layer_norm_eps", *DECODER[2:], "partial_rotary_factor", "resid_pdrop"), DECODER[:1]),
    "stablelm": ((DECODER[0], "layer_norm_eps", *DECODER[2:], "partial_rotary_factor"), ()),
    "granite": ((*DECODER, "head_dim", "embedding_multiplier", "logits_scaling"), DECODER[:1]),
    "llama4": (
        (*DECODER, "head_dim", "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok", "floor_scale")
        + ("attention_chunk_size", "attn_scale", "interleave_moe_layer_step", "no_rope_layer_interval"),
        (DECODER[0], "head_dim"),
    ),
    "granite4": (
        (*DECODER, "head_dim", *MAMBA[:4], "embedding_multiplier", "logits_scaling", "mamba_expand")
        + ("num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "router_aux_loss_coef"),
        DECODER[:1],
    ),
    "lfm2": (
        (DECODER[0], "norm_eps", *DECODER[2:], "head_dim", "conv_L_cache", "block_multiple_of")
        + ("block_ffn_dim_multiplier",),
        (),
    ),
    "lfm2_moe": (
        (DECODER[0], "norm_eps", *DECODER[2:], "head_dim", "conv_L_cache", "num_dense_layers", "routed_scaling_factor")
        + ("moe_intermediate_size", "num_experts", "num_experts_per_tok"),
        (),
    ),
    "nemotron_h": (
        (DECODER[0], "layer_norm_epsilon", DECODER[2], "head_dim", "mamba_num_heads", "ssm_state_size", "time_step_min")
        + ("n_routed_experts", "routed_scaling_factor", "moe_shared_expert_intermediate_size"),
        (),
    ),
    "olmo2": ((*DECODER, "head_dim"), DECODER[:1]),
    "olmo3": ((*DECODER[:-1], "head_dim", "sliding_window"), DECODER[:1]),
    "phi3": ((*DECODER, "head_dim", "sliding_window"), ("num_key_value_heads", "sliding_window")),
    "seed_oss": ((*DECODER, "head_dim", "residual_dropout"), (DECODER[0], "head_dim")),
    "smollm3": ((*DECODER, "head_dim", "no_rope_layer_interval"), DECODER[:1]),
    # transformers cannot build a Qwen whose head_dim is null
    "qwen2": ((*DECODER, "head_dim"), ("num_key_value_heads",)),
    "qwen3": ((*DECODER, "head_dim"), ("num_key_value_heads",)),
    "qwen3_moe": ((*DECODER[1:], "head_dim", "router_aux_loss_coef"), ()),
    "mixtral": (
        (*DECODER, "head_dim", "sliding_window", "router_aux_loss_coef"),
        (DECODER[0], "head_dim", "sliding_window"),
    ),
    "qwen2_moe": ((*DECODER[1:], "head_dim", "router_aux_loss_coef"), ()),
    "glm": ((*DECODER, "head_dim", "partial_rotary_factor"), ()),
    "glm4": ((*DECODER, "head_dim", "partial_rotary_factor"), ()),
    "gpt_oss": (
        (*DECODER, "head_dim", "sliding_window", "swiglu_limit", "swiglu_alpha", "router_aux_loss_coef"),
        (DECODER[0], "head_dim"),
    ),
    "glm4_moe": (
        (*DECODER, "head_dim", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
        + ("first_k_dense_replace", "partial_rotary_factor"),
        (),
    ),
    "glm4_moe_lite": (
        (*DECODER[1:], "q_lora_rank", "routed_scaling_factor", "partial_rotary_factor"),
        ("q_lora_rank",),
    ),
    "gptj": (("n_inner", "rotary_dim", "n_positions", "layer_norm_epsilon", "resid_pdrop", "attn_pdrop"), ("n_inner",)),
    "minimax_m2": ((*DECODER, "head_dim", "rotary_dim", "partial_rotary_factor"), ("rotary_dim",)),
    "afmoe": (
        (*DECODER, "head_dim", "num_shared_experts", "num_dense_layers", "route_scale", "sliding_window")
        + ("global_attn_every_n_layers",),
        DECODER[:1],
    ),
    "mistral4": (
        (*DECODER[:-1], "q_lora_rank", "kv_lora_rank", "n_shared_experts", "routed_scaling_factor", "n_group")
        + ("topk_group", "first_k_dense_replace", "intermediate_size", "num_experts_per_tok"),
        ("q_lora_rank", DECODER[0]),
    ),
    "qwen3_next": ((*DECODER, "head_dim", *LINEAR, *ROUTED), ()),
    "qwen3_5": ((*DECODER, "head_dim", *LINEAR), ()),
    "qwen3_5_moe": ((*DECODER, "head_dim", *LINEAR, *ROUTED), ()),
    "deepseek v3": (
        (*DECODER[1:], "first_k_dense_replace", "q_lora_rank", "n_group", "topk_group", "routed_scaling_factor")
        + ("aux_loss_alpha", "num_nextn_predict_layers"),
        ("q_lora_rank", "n_group", "topk_group", "num_nextn_predict_layers"),
    ),
    "gpt2": (("n_inner", "layer_norm_epsilon", "attn_pdrop", "resid_pdrop", "embd_pdrop", "num_labels"), ("n_inner",)),
    "opt": (("word_embed_proj_dim", "dropout", "attention_dropout", "num_labels"), ("word_embed_proj_dim",)),
    "roberta": (
        ("pad_token_id", "layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size")
        + ("num_labels",),
        (),
    ),
}


@pytest.mark.parametrize("shape", OPTIONAL)
def test_optional_numbers_are_checked_where_present(shape):
    args, _ = SHAPES[shape]
    names, may_be_null = OPTIONAL[shape]
    hf = MODELS[shape.split()[0]].hf
    classes = {"architectures": ["XForSequenceClassification"]}  # num_labels is read with this only
    for name in names:
        for value in ("3", True) if name in may_be_null else ("3", True, None):
            change = classes | {name: value} if name == "num_labels" else {name: value}
            refuse_config(args, hf, change, f"{name} = {value!r}; allowed: a (whole|finite) number.*leave it out for ")
    for name in may_be_null:
        # with null groups all experts are one group
        two = {"num_experts_per_tok": 2} if hasattr(args, "n_experts") else {}
        hf.config.args_from_config(hf.config_to_hf(args) | two | {name: None})


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3"])
def test_null_key_value_heads_equal_the_query_heads(family):
    """Follow transformers: null means the number of query heads, an absent key has another default."""
    args, hf = SHAPES[family][0], MODELS[family].hf
    converted = hf.config.args_from_config(hf.config_to_hf(args) | {"num_key_value_heads": None})
    assert converted.num_kv_heads == args.n_heads != args.num_kv_heads


def test_folders_without_a_usable_config_are_refused(tmp_path):
    assert "config.json cannot be read (No such file or directory)" in " ".join(lines(*job("llama3", tmp_path)))
    assert "config.json cannot be read as JSON" in faults_of_config(tmp_path, "{")
    assert "config.json holds no JSON object" in faults_of_config(tmp_path, "[]")
    with pytest.raises(JobError, match="model.hf_folder is not set"):
        resolve_sizes("llama3", "from_hf", None, {})


def test_the_debug_tokenizer_is_refused_with_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3 | {"vocab_size": 2048}))
    default = load([]).model.tokenizer_path
    (fault,) = lines(*job("llama3", tmp_path), tokenizer=default)
    assert "allowed: the tokenizer of the model in model.hf_folder; write model.tokenizer_path" in fault


def test_the_job_may_override_rope_of_the_folder_and_nothing_else(tmp_path):
    """The rotary wavelengths affect no tensor's shape, so a job may set them.

    Other sizes that contradict the folder are refused, and so is a folder with other wavelengths than the job's flavor.
    """
    args, hf = LLAMA["llama3"], MODELS["llama3"].hf
    model = build(MODELS["llama3"].build, args)
    hf.save_hf(tmp_path, model.state_dict(), args)

    def judge_start(*arguments):
        start = [
            *job("llama3", tmp_path, *arguments),
            "--checkpoint.enable",
            f"--checkpoint.initial_load_path={tmp_path}",
        ]
        return start, [line for line in lines(*start) if "initial_load_path" in line]

    start_arguments, faults = judge_start(
        "--model.overrides={rope_scaling = {kind = 'linear', factor = 2.0}, rope_theta = 9e3}"
    )
    assert faults == []
    loaded, _ = inference_model.load_model(ResolvedJob(load(start_arguments)), tmp_path, torch.device("cpu"))
    longer = dataclasses.replace(args, rope_scaling=RopeScaling(2.0, kind="linear"), rope_theta=9e3)
    stretched = build(MODELS["llama3"].build, longer)
    stretched.load_state_dict(model.state_dict())
    tokens = tokens_for(args)
    torch.testing.assert_close(loaded(tokens), stretched(tokens), rtol=0, atol=0)
    assert (loaded(tokens) - model(tokens)).abs().max() > 5e-5  # initial attention is nearly even
    assert "norm_eps is" in judge_start("--model.overrides={norm_eps = 1e-3}")[1][0]
    (tmp_path / "config.json").write_text(json.dumps(hf.config_to_hf(longer)))
    silent = ["--model.flavor=debugmodel", "--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path}"]
    assert "rope_scaling is RopeScaling" in " ".join(lines(*silent))


# DeepSeek

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}


@pytest.mark.parametrize(
    "rope",
    [None, YARN, YARN | {"mscale": 0.7}, YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, YARN | {"mscale_all_dim": 0}],
)
def test_deepseek_v3_loads_with_every_form_of_yarn(rope, tmp_path):
    """Load a folder that transformers wrote; its config names an MTP depth without tensors for it."""
    config = HF.config_to_hf(DEEPSEEK["v3"]) | {"rope_scaling": rope, "num_nextn_predict_layers": 1}
    reference = DeepseekV3ForCausalLM._from_config(DeepseekV3Config(**config), **eager(DEEPSEEK["v3"])).eval()
    reference.save_pretrained(tmp_path)
    args = resolve_sizes("deepseek", "from_hf", str(tmp_path), {})
    model = build(Deepseek, args)
    HF.load_hf(tmp_path, model, args)
    tokens = tokens_for(args)
    assert close(model(tokens), reference(tokens).logits, 2e-6)
    reference_of_args = DeepseekV3ForCausalLM._from_config(
        DeepseekV3Config(**HF.config_to_hf(args)), **eager(args)
    ).eval()
    reference_of_args.load_state_dict(reference.state_dict())
    assert close(reference_of_args(tokens).logits, reference(tokens).logits, 1e-6)


def test_yarn_factors_that_the_model_cannot_represent_are_refused(tmp_path):
    message = faults_of_config(
        tmp_path, HF.config_to_hf(DEEPSEEK["v3"]) | {"rope_scaling": YARN | {"mscale_all_dim": 1}}, "deepseek"
    )
    assert "with mscale_all_dim the model needs mscale" in message
    message = faults_of_config(
        tmp_path, HF.config_to_hf(DEEPSEEK["v3"]) | {"rope_scaling": YARN | {"truncate": False}}, "deepseek"
    )
    assert "truncate = False, but this model only has True" in message


def test_mtp_depth_comes_from_the_tensors_of_the_folder(tmp_path):
    HF.save_hf(tmp_path, build(Deepseek, MULTI_TOKEN).state_dict(), MULTI_TOKEN)
    assert resolve_sizes("deepseek", "from_hf", str(tmp_path), {}).n_mtp_layers == 2
    (tmp_path / "model.safetensors.index.json").unlink()
    (file,) = tmp_path.glob("*.safetensors")
    file.rename(tmp_path / "model.safetensors")
    assert resolve_sizes("deepseek", "from_hf", str(tmp_path), {}).n_mtp_layers == 2
    (tmp_path / "model.safetensors").unlink()  # a config alone, to train from the start
    assert resolve_sizes("deepseek", "from_hf", str(tmp_path), {}).n_mtp_layers == 2
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)  # reported when it is loaded
    assert resolve_sizes("deepseek", "from_hf", str(tmp_path), {}).n_mtp_layers == 2


def test_headers_of_safetensors(tmp_path):
    save_file({"a": torch.ones(2, 3)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert read_header(tmp_path / "x.safetensors")["a"]["shape"] == [2, 3]
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="x.safetensors is no safetensors file"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("header", [b"[]", b"7", b"[" * 100_000, b"{"])
def test_damaged_headers_are_refused(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert tensor_files(tmp_path) == {}  # reported when it is loaded
    with pytest.raises(JobError, match="model.safetensors is no safetensors file"):
        find_config(file)


@pytest.mark.parametrize("text", ["[1]", "{", 3, "[" * 100_000])
def test_a_damaged_config_inside_a_file_is_refused(tmp_path, text):
    header = json.dumps({"__metadata__": {"config.json": text}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(JobError, match="x.safetensors is no safetensors file, or one that is cut off: "):
        find_config(tmp_path / "x.safetensors")


def test_automodel_opens_an_exported_folder(tmp_path):
    """AutoModel recognizes an exported folder by its config.json."""
    args = QWEN3_MOE["published"]
    MODELS["qwen3_moe"].hf.save_hf(tmp_path, build(MODELS["qwen3_moe"].build, args).state_dict(), args)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference.config.model_type == "qwen3_moe"
