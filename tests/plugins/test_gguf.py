"""`torchtitan export --format gguf`: tensors and metadata as gguf's reader returns them, against the model's own and
transformers'; the vocabulary, Ollama's template, and refusals.
"""

import json
import shutil

import numpy
import pytest
import torch

from tests.support.hf_parity import peer_class
from tests.support.jobs import arguments, train, write_texts
from tests.support.pool import run_ranks
from torchtitan import cli
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.config import manager
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import initialize
from torchtitan.datasets.template_process import render
from torchtitan.datasets.template_worker import BEGIN, END
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.datasets.tokenizer.chat_templates import NAMED
from torchtitan.datasets.tokenizer.hf_export import QWEN2
from torchtitan.job import ResolvedJob
from torchtitan.models.spec import MODELS
from torchtitan.plugins.gguf.export import GGUFExport
from torchtitan.plugins.gguf.modelfile import modelfile, ollama_template
from torchtitan.plugins.gguf.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, vocabulary_fields

gguf = pytest.importorskip("gguf")

SIZES = {
    "llama3.2": "dim=128, n_heads=4, n_kv_heads=2, vocab_size=2400, multiple_of=64",
    "mistral": "dim=128, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=192, vocab_size=2400, sliding_window=48",
    "qwen2": "dim=128, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=2400",
    "qwen3": "dim=128, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=192, vocab_size=2400",
    "qwen3_moe": "dim=128, n_heads=4, n_kv_heads=2, head_dim=32, expert_dim=64, n_experts=12, top_k=2, vocab_size=2400",
}
DENSE = "dim=128, n_heads=4, n_kv_heads=2, head_dim=32, ffn_dim=192, vocab_size=2400"
EXPERTS = "dim=128, n_heads=4, n_kv_heads=2, head_dim=32, expert_dim=64, n_experts=12, top_k=2, vocab_size=2400"
DELTA = ", delta_key_heads=2, delta_value_heads=4, delta_key_dim=32, delta_value_dim=16, rotary_dim=16, full_interval=4"
MINISTRAL = ", rope_scaling={kind='yarn', factor=16.0, original_max_seq_len=32, attention_factor=1.0}"
OTHERS = {
    "gemma2": (DENSE + ", sliding_window=16, query_scalar=32", "gemma2"),
    "gemma3": (DENSE + ", sliding_window=16, query_scalar=32, global_interval=6", "gemma3"),
    "phi3": (DENSE, "phi3"),
    "olmo2": (DENSE, "olmo2"),
    "olmo3": (DENSE + ", sliding_window=16, global_interval=4", "olmo2"),
    "granite": (DENSE, "granite"),
    "smollm3": (DENSE + ", no_rope_interval=4", "smollm3"),
    "glm4": (DENSE + ", rotary_dim=16", "glm4"),
    "glm4_moe": (EXPERTS + ", ffn_dim=192, rotary_dim=16, route_scale=1.5", "glm4moe"),
    "mixtral": (EXPERTS, "llama"),
    "qwen2_moe": (EXPERTS, "qwen2moe"),
    "seed_oss": (DENSE, "seed_oss"),
    "glm": (DENSE + ", rotary_dim=16", "chatglm"),
    "gpt_oss": (EXPERTS + ", sliding_window=16", "gpt-oss"),
    "deepseek": (
        "dim=128, n_heads=4, vocab_size=2400, n_dense_layers=1, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, "
        "qk_rope_head_dim=16, v_head_dim=24, ffn_dim=192, expert_dim=64, n_experts=12, top_k=2, n_groups=2, "
        "top_groups=1, group_score='top2'",
        "deepseek2",
    ),
    "qwen3_next": (EXPERTS + DELTA, "qwen3next"),
    "qwen3_5": (DENSE + DELTA, "qwen35"),
    "falcon_h1": (DENSE + ", ssm_heads=4, ssm_head_dim=32, ssm_state_dim=32, gate_multiplier=0.5", "falcon-h1"),
    "gpt2": ("dim=128, n_heads=4, vocab_size=2400", "gpt2"),
    "ministral3": (DENSE + ", sliding_window=0, query_growth=0.1, query_period=32" + MINISTRAL, "mistral3"),
}
"""Family -> sizes, and llama.cpp's name of its computation."""
SIZES |= {family: sizes for family, (sizes, _) in OTHERS.items()}
RENAMED = {"wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wo": "attn_output"}


def write_folder(folder, family, tokenizer="debug", dtype="float32"):
    """Write a Hugging Face folder with initial weights; return the job, the model's state and the extra files."""
    family_name, _, flavor = {"ministral3": "mistral"}.get(family, family).partition(":")
    options = dict(model__name=family_name, model__overrides=f"{{n_layers=2, {SIZES[family]}}}")
    options |= {"model__flavor": flavor} if flavor else {}
    job = ResolvedJob(manager.load(arguments(folder, folder, model__tokenizer_path=tokenizer, **options)))
    model = ModelBuilder(job).meta_model().to_empty(device="cpu")
    initialize(model, 0, model.init_rule)
    for name, value in model.state_dict().items():
        if name.endswith("bias") or "scale" in name:
            torch.nn.init.normal_(value)
    files = parts.hf_extra_files(job.model, job.tokenizer(), dtype)
    state = model.state_dict()
    MODELS[family_name].hf.save_hf(folder, state, job.model.args, dtype=parts.DTYPES[dtype], extra_files=files)
    return job, state, files


def read_file(path):
    """Return the tensors of a file as numpy arrays, and its metadata."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return {tensor.name: tensor for tensor in reader.tensors}, fields


@pytest.mark.parametrize("family", [family for family in SIZES if family not in OTHERS])
def test_tensors_are_those_of_transformers_and_rotate_as_in_llama_cpp(tmp_path, family):
    """llama.cpp's Llama rotates adjacent features, as this project does, and its Qwen as transformers does."""
    from transformers import AutoModelForCausalLM

    job, state, files = write_folder(tmp_path / "hf", family)
    GGUFExport(files, job.tokenizer()).write(tmp_path / "hf", tmp_path / "gguf", "a model")
    tensors, fields = read_file(tmp_path / "gguf" / "model.gguf")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    layer = "model.layers.1."
    expected = {"token_embd.weight": reference["model.embed_tokens.weight"]}
    expected |= {"output_norm.weight": reference["model.norm.weight"]}
    adjacent = family in ("llama3.2", "mistral")
    for ours, name in RENAMED.items():
        hf_name = f"{layer}self_attn.{ours[1]}_proj.weight"
        expected[f"blk.1.{name}.weight"] = (
            state[f"layers.1.attention.{ours}.weight"] if adjacent else reference[hf_name]
        )
    if family == "qwen2":
        expected["blk.1.attn_k.bias"] = reference[f"{layer}self_attn.k_proj.bias"]
    if family == "qwen3_moe":
        gate_up = reference[f"{layer}mlp.experts.gate_up_proj"]
        expected["blk.1.ffn_gate_exps.weight"], expected["blk.1.ffn_up_exps.weight"] = gate_up.chunk(2, 1)
        expected["blk.1.ffn_gate_inp.weight"] = reference[f"{layer}mlp.gate.weight"]
    for name, value in expected.items():
        numpy.testing.assert_array_equal(tensors[name].data, value.numpy(), err_msg=name)
    tied = job.model.args.tied_embeddings
    count = len(state) - tied + (family == "llama3.2")  # rotary factors
    assert len(tensors) == count and ("output.weight" in tensors) == (not tied)
    architecture = fields["general.architecture"]
    assert architecture == {"llama3.2": "llama", "mistral": "llama", "qwen3_moe": "qwen3moe"}.get(family, family)
    assert fields[f"{architecture}.attention.head_count_kv"] == 2 and fields[f"{architecture}.block_count"] == 2
    assert fields[f"{architecture}.context_length"] == (48 if family == "mistral" else job.model.args.max_seq_len)
    assert fields["general.file_type"] == gguf.LlamaFileType.ALL_F32


PRE_NORMS = {"attention_norm": "attn_norm", "ffn_norm": "ffn_norm"}
SANDWICH = PRE_NORMS | {"attention_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}
NORMS = {name: SANDWICH for name in ("gemma2", "gemma3", "glm4")}
NORMS |= dict.fromkeys(("olmo2", "olmo3"), {"attention_norm": "post_attention_norm", "ffn_norm": "post_ffw_norm"})
NORMS["seed_oss"] = {"attention_norm": "attn_norm", "ffn_norm": "post_attention_norm"}
NORMS["glm4_moe"] = {"attention_norm": "attn_norm", "ffn_norm": "post_attention_norm"}
FEED_FORWARD = {"w1": "gate", "w2": "down", "w3": "up"}


def tiled(rows, keys=2):
    """Return the rows of value heads, first those of the first of each key head, then of the second."""
    return rows.unflatten(0, (keys, 2, -1)).transpose(0, 1).flatten(0, 2)


def tensors_in_parts(family, layer):
    """Return those tensors of a layer that have other parts or another order in llama.cpp."""
    of = {name.removesuffix(".weight").rpartition(".")[2]: value for name, value in layer.items()}
    if family == "gpt_oss":
        biases = {f"ffn_{name}_exps.bias": of[f"{ours}_bias"] for ours, name in FEED_FORWARD.items()}
        return biases | {"attn_sinks.weight": of["sinks"], "ffn_gate_inp.bias": layer["moe.router.gate.bias"]}
    if family == "deepseek":
        keys, values = of["wkv_b"].unflatten(0, (4, -1)).split((32, 24), dim=1)
        latent = {"attn_k_b.weight": keys.mT, "attn_v_b.weight": values, "attn_q_b.weight": of["wq"]}
        return latent | {"exp_probs_b.bias": of["expert_bias"], "attn_kv_a_mqa.weight": of["wkv_a"]}
    if family == "qwen3_next":
        parts = [x.flatten(0, 1) for x in of["delta_qkvz"].unflatten(0, (2, -1)).split((32, 32, 32, 32), dim=1)]
        taps = torch.cat([of[f"conv_{name}"] for name in "qkv"]).squeeze(1)
        joint = {"attn_qkv.weight": torch.cat(parts[:3]), "attn_gate.weight": parts[3], "ssm_conv1d.weight": taps}
        return joint | {
            "ssm_a": -of["log_rate"].exp(),
            "ssm_ba.weight": of["delta_ba"],
            "ssm_norm.weight": of["delta_norm"],
        }
    if family == "qwen3_5":
        values, taps = torch.cat((of["delta_q"], of["delta_k"], tiled(of["delta_v"]))), [of["conv_q"], of["conv_k"]]
        apart = {"attn_gate.weight": "delta_z", "ssm_alpha.weight": "delta_a", "ssm_beta.weight": "delta_b"}
        expected = {name: tiled(of[ours]) for name, ours in (apart | {"ssm_dt.bias": "step_bias"}).items()}
        expected |= {"attn_qkv.weight": values, "ssm_out.weight": tiled(of["delta_out"].T).T}
        expected |= {"ssm_conv1d.weight": torch.cat((*taps, tiled(of["conv_v"]))).squeeze(1)}
        return expected | {"ssm_a": tiled(-of["log_rate"].exp())}
    if family == "falcon_h1":
        inputs = torch.cat([of[f"ssm_{name}"] for name in ("z", "x", "b", "c", "dt")])
        return {"ssm_in.weight": inputs, "ssm_a": -of["log_rate"].exp()[:, None], "ffn_gate.weight": of["w1"] * 0.5}
    return {"attn_qkv.weight": torch.cat([of[name] for name in ("wq", "wk", "wv")]), "ffn_up.weight": of["w1"]}


IN_PARTS = ("gpt_oss", "deepseek", "qwen3_next", "qwen3_5", "falcon_h1", "gpt2")


def expected_tensors(family, state):
    """Return tensors of llama.cpp's second layer, made from this project's own."""
    layer = {name.removeprefix("layers.1."): value for name, value in state.items() if name.startswith("layers.1.")}
    if family in IN_PARTS:
        expected = {f"blk.1.{name}": value for name, value in tensors_in_parts(family, layer).items()}
        stacks = (
            {name: f"moe.experts.{ours}" for ours, name in FEED_FORWARD.items()} if "moe.experts.w1" in layer else {}
        )
        return expected | {f"blk.1.ffn_{name}_exps.weight": layer[ours].mT for name, ours in stacks.items()}
    adjacent = family in (
        "granite",
        "smollm3",
        "mixtral",
        "glm4",
        "glm",
        "ministral3",
    )  # llama.cpp rotates as this project does
    attention = () if family == "phi3" else RENAMED if adjacent else ("wv", "wo")
    expected = {RENAMED[name]: layer[f"attention.{name}.weight"] for name in attention}
    for ours, name in NORMS.get(family, PRE_NORMS).items():
        expected[name] = layer[f"{ours}.weight"] + (1 if family.startswith("gemma") else 0)
    if family in ("phi3", "glm4", "glm"):
        expected["ffn_up"] = torch.cat([layer[f"feed_forward.{name}.weight"] for name in ("w1", "w3")])
    elif "moe.experts.w1" in layer:
        expected |= {f"ffn_{name}_exps": layer[f"moe.experts.{ours}"].mT for ours, name in FEED_FORWARD.items()}
        expected["ffn_gate_inp"] = layer["moe.router.gate.weight"]
    else:
        expected |= {f"ffn_{name}": layer[f"feed_forward.{ours}.weight"] for ours, name in FEED_FORWARD.items()}
    return {f"blk.1.{name}.weight": value for name, value in expected.items()}


NUMBERS = {  # metadata without which llama.cpp would compute something else
    "gemma2": {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"attention.sliding_window": 16, "rope.freq_base": 1e6},
    "olmo3": {"attention.sliding_window": 16},
    "granite": {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.03125, "logit_scale": 16.0},
    "glm4": {"rope.dimension_count": 16},
    "glm4_moe": {"rope.dimension_count": 16, "expert_weights_scale": 1.5, "expert_gating_func": 2, "expert_count": 12},
    "mixtral": {"expert_count": 12, "expert_used_count": 2},
    "qwen2_moe": {"expert_shared_feed_forward_length": 128, "expert_feed_forward_length": 64},
    "glm": {"rope.dimension_count": 16},
    "gpt_oss": {
        "attention.sliding_window": 16,
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    },
    "deepseek": {"attention.head_count_kv": 1, "attention.key_length": 48, "attention.value_length": 32}
    | {
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 24,
        "expert_group_count": 2,
        "expert_gating_func": 2,
    }
    | {"rope.scaling.yarn_log_multiplier": 0.1, "leading_dense_block_count": 1, "expert_group_used_count": 1},
    "qwen3_next": {"ssm.inner_size": 64, "ssm.group_count": 2, "ssm.time_step_rank": 4, "full_attention_interval": 4},
    "qwen3_5": {"ssm.state_size": 32, "ssm.conv_kernel": 4, "rope.dimension_count": 16},
    "falcon_h1": {"ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 4, "ssm.group_count": 2},
    "gpt2": {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 1024},
    "ministral3": {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
}


@pytest.mark.parametrize("family", OTHERS)
def test_tensors_and_numbers_of_further_families(tmp_path, family):
    """Their log-probabilities were compared with those of llama.cpp by hand (docs/checkpoints.md)."""
    job, state, files = write_folder(tmp_path / "hf", family)
    GGUFExport(files, job.tokenizer()).write(tmp_path / "hf", tmp_path / "gguf", "a model")
    tensors, fields = read_file(tmp_path / "gguf" / "model.gguf")
    for name, value in expected_tensors(family, state).items():
        numpy.testing.assert_array_equal(tensors[name].data, value.numpy(), err_msg=name)
    architecture = OTHERS[family][1]
    assert fields["general.architecture"] == architecture
    for name, number in NUMBERS.get(family, {}).items():
        assert fields[f"{architecture}.{name}"] == pytest.approx(number), name


NORMED = "dim=128, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=2400"
HYBRID = "dim=128, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=2400"
KINDS = ", sliding_window=16, global_interval=2, global_head_dim=64, global_kv_heads=1, global_rotary_dim=16"
L0, L1 = "model.layers.0.", "model.layers.1."


def joint_rows(groups, name):
    """Return queries, keys and values, each of all heads, of a matrix that has them by head."""

    def rows(of):
        by_head = of[name].unflatten(0, (groups, -1, 32))
        return torch.cat([part.flatten(0, 2) for part in (by_head[:, :-2], by_head[:, -2:-1], by_head[:, -1:])])

    return rows


def half_of(name, second):
    return lambda of: of[name].chunk(2, dim=-2)[second]


RENUMBERED = {  # family -> sizes, llama.cpp's name, tensors from those of transformers, numbers
    "gemma": (DENSE, "gemma", {"blk.1.attn_norm": lambda of: of[L1 + "input_layernorm.weight"] + 1}, {}),
    "arcee": (
        NORMED,
        "arcee",
        {
            "blk.1.ffn_up": lambda of: of[L1 + "mlp.up_proj.weight"],
            "blk.1.attn_q": lambda of: adjacent_rows(of[L1 + "self_attn.q_proj.weight"], 4),
        },
        {"attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "starcoder2": (
        NORMED + ", sliding_window=48",
        "starcoder2",
        {"blk.1.ffn_down": lambda of: of[L1 + "mlp.c_proj.weight"]},
        {"attention.layer_norm_epsilon": 1e-5, "context_length": 48},
    ),
    "stablelm": (
        NORMED + ", rotary_dim=16, qk_norm=true, side_by_side=true",
        "stablelm",
        {
            "blk.1.attn_k_norm": lambda of: torch.stack(
                [of[f"{L1}self_attn.k_layernorm.norms.{head}.weight"] for head in range(2)]
            )
        },
        {"use_parallel_residual": True, "rope.dimension_count": 16},
    ),
    "phi": (NORMED, "phi2", {"blk.1.attn_output": lambda of: of[L1 + "self_attn.dense.weight"]}, {}),
    "gpt_neox": (
        NORMED.replace("heads=2", "heads=4") + ", rotary_dim=8, rope_theta=5000.0",
        "gptneox",
        {"blk.1.attn_qkv": joint_rows(4, "gpt_neox.layers.1.attention.query_key_value.weight")},
        {"use_parallel_residual": True, "rope.dimension_count": 8, "rope.freq_base": 5000.0},
    ),
    "falcon": (
        "dim=128, n_heads=4, n_kv_heads=2, vocab_size=2400, norms=2",
        "falcon",
        {
            "blk.1.attn_qkv": joint_rows(2, "transformer.h.1.self_attention.query_key_value.weight"),
            "blk.1.attn_norm_2": lambda of: of["transformer.h.1.ln_attn.weight"],
        },
        {"attention.head_count_kv": 2, "feed_forward_length": 768},
    ),
    "cohere": (
        DENSE,
        "command-r",
        {"blk.1.attn_q": lambda of: of[L1 + "self_attn.q_proj.weight"]},
        {"logit_scale": 0.0625},
    ),
    "cohere2": (
        DENSE + ", sliding_window=16, global_interval=4",
        "cohere2",
        {"blk.1.attn_q": lambda of: of[L1 + "self_attn.q_proj.weight"]},
        {"attention.sliding_window": 16, "logit_scale": 0.25},
    ),
    "nemotron": (
        DENSE + ", rotary_dim=16",
        "nemotron",
        {
            "blk.1.ffn_norm": lambda of: of[L1 + "post_attention_layernorm.weight"] + 1,
            "output_norm": lambda of: of["model.norm.weight"] + 1,
        },
        {"rope.dimension_count": 16},
    ),
    "hunyuan_v1_dense": (
        DENSE + ", rope_scaling={kind='ntk', factor=1000.0}",
        "hunyuan-dense",
        {"blk.1.attn_q_norm": lambda of: of[L1 + "self_attn.query_layernorm.weight"]},
        {"rope.freq_base": 1e4 * 1000 ** (32 / 30)},
    ),
    "lfm2": (
        DENSE + ", layer_pattern='C*'",
        "lfm2",
        {"blk.0.shortconv.conv": lambda of: of[L0 + "conv.conv.weight"].squeeze(1)},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
    "lfm2_moe": (
        HYBRID + ", layer_pattern='C*', n_dense_layers=1",
        "lfm2moe",
        {"blk.1.ffn_up_exps": half_of(L1 + "feed_forward.experts.gate_up_proj", 1)},
        {"attention.head_count_kv": [0, 2], "expert_gating_func": 2, "leading_dense_block_count": 1},
    ),
    "granite4": (
        HYBRID + ", layer_pattern='M*', ssm_heads=8, rotary=true",
        "granitehybrid",
        {
            "blk.0.ssm_a": lambda of: -of[L0 + "mamba.A_log"].exp()[:, None],
            "blk.1.attn_q": lambda of: adjacent_rows(of[L1 + "self_attn.q_proj.weight"], 4),
            "blk.1.ffn_gate_exps": half_of(L1 + "block_sparse_moe.experts.gate_up_proj", 0),
            "blk.1.ffn_up_shexp": half_of(L1 + "shared_mlp.input_linear.weight", 1),
        },
        {"attention.head_count_kv": [0, 2], "ssm.inner_size": 256, "rope.scaling.finetuned": True},
    ),
    "minimax_m2": (
        EXPERTS + ", rotary_dim=16",
        "minimax-m2",
        {
            "blk.1.ffn_up_exps": half_of(L1 + "mlp.experts.gate_up_proj", 1),
            "blk.1.exp_probs_b.bias": lambda of: of[L1 + "mlp.e_score_correction_bias"],
        },
        {"expert_gating_func": 2, "expert_feed_forward_length": 64, "rope.dimension_count": 16},
    ),
    "afmoe": (
        EXPERTS + ", ffn_dim=192, n_dense_layers=1, sliding_window=16, scaled_embeddings=true, route_scale=1.5",
        "afmoe",
        {
            "blk.1.attn_gate": lambda of: of[L1 + "self_attn.gate_proj.weight"],
            "blk.1.exp_probs_b.bias": lambda of: of[L1 + "mlp.expert_bias"],
        },
        {"expert_weights_norm": True, "expert_weights_scale": 1.5, "attention.sliding_window": 16}
        | {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2},
    ),
    "llama4": (
        EXPERTS + ", ffn_dim=192, moe_interval=2, chunk_size=8192",
        "llama4",
        {
            "blk.0.ffn_gate": lambda of: of[L0 + "feed_forward.gate_proj.weight"],
            "blk.1.ffn_up_exps": lambda of: of[L1 + "feed_forward.experts.gate_up_proj"].mT.chunk(2, dim=1)[1],
            "blk.1.ffn_down_exps": lambda of: of[L1 + "feed_forward.experts.down_proj"].mT,
        },
        {"feed_forward_length": 192, "expert_feed_forward_length": 64, "interleave_moe_layer_step": 2},
    ),
    "mistral4": (
        "dim=128, n_heads=4, vocab_size=2400, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, "
        "qk_rope_head_dim=16, v_head_dim=24, ffn_dim=192, expert_dim=64, n_experts=12, top_k=2",
        "mistral4",
        {
            "blk.1.attn_k_b": lambda of: of[L1 + "self_attn.kv_b_proj.weight"].unflatten(0, (4, -1))[:, :32].mT,
            "blk.1.ffn_gate_up_exps": lambda of: of[L1 + "mlp.experts.gate_up_proj"],
        },
        {"attention.temperature_scale": 0.1, "attention.temperature_length": 8192, "expert_gating_func": 1},
    ),
    "gemma4": (
        DENSE + KINDS,
        "gemma4",
        {
            "blk.1.layer_output_scale": lambda of: of[L1 + "layer_scalar"],
            "rope_freqs": lambda of: torch.tensor([1.0] * 8 + [1e30] * 24),
        },
        {"attention.head_count_kv": [2, 1], "attention.sliding_window_pattern": [True, False]}
        | {"attention.key_length": 64, "attention.key_length_swa": 32, "rope.freq_base_swa": 1e4}
        | {"rope.dimension_count": 64, "rope.dimension_count_swa": 32, "final_logit_softcapping": 0.0},
    ),
    "gemma4:debugmodel_moe": (
        EXPERTS + KINDS + ", logit_cap=20.0",
        "gemma4",
        {
            "blk.1.ffn_gate_up_exps": lambda of: of[L1 + "experts.gate_up_proj"],
            "blk.1.ffn_gate_inp.scale": lambda of: of[L1 + "router.scale"],
            "blk.1.ffn_down_exps.scale": lambda of: of[L1 + "router.per_expert_scale"],
            "blk.1.pre_ffw_norm_2": lambda of: of[L1 + "pre_feedforward_layernorm_2.weight"],
        },
        {"expert_count": 12, "expert_feed_forward_length": 64, "feed_forward_length": 192}
        | {"final_logit_softcapping": 20.0},
    ),
    "granite4:micro": (
        DENSE,
        "granite",
        {"blk.1.ffn_up": half_of(L1 + "shared_mlp.input_linear.weight", 1)},
        {"attention.head_count_kv": 2, "feed_forward_length": 192, "rope.scaling.finetuned": True},
    ),
}


def adjacent_rows(rows, heads):
    """Return the rows of each head in the order 0, half, 1, half + 1 and so on."""
    head_dim = len(rows) // heads
    order = [number for i in range(head_dim // 2) for number in (i, i + head_dim // 2)]
    return rows.unflatten(0, (heads, head_dim))[:, order].flatten(0, 1)


SIZES |= {family: sizes for family, (sizes, *_) in RENUMBERED.items()}


@pytest.mark.parametrize("family", RENUMBERED)
def test_tensors_of_families_with_their_own_names(tmp_path, family):
    """Log-probabilities were compared with llama.cpp's by hand (docs/checkpoints.md)."""
    _, architecture, expected, numbers = RENUMBERED[family]
    job, _, files = write_folder(tmp_path / "hf", family)
    GGUFExport(files, job.tokenizer()).write(tmp_path / "hf", tmp_path / "gguf", "a model")
    tensors, fields = read_file(tmp_path / "gguf" / "model.gguf")
    model = peer_class(json.loads(files["config.json"])).from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, of_reference in expected.items():
        tensor = tensors[name if name in tensors else f"{name}.weight"]
        numpy.testing.assert_array_equal(tensor.data, of_reference(model.state_dict()), err_msg=name)
    assert fields["general.architecture"] == architecture
    for name, number in numbers.items():
        assert fields[f"{architecture}.{name}"] == pytest.approx(number), name


def test_scaled_rotary_angles_are_factors_of_the_frequencies(tmp_path):
    """transformers computes the frequencies that they divide the plain ones to."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    job, _, files = write_folder(tmp_path / "hf", "llama3.2")
    GGUFExport(files, job.tokenizer()).write(tmp_path / "hf", tmp_path / "gguf", "a model")
    tensors, fields = read_file(tmp_path / "gguf" / "model.gguf")
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path / "hf"), torch.device("cpu"))
    plain = 1 / fields["llama.rope.freq_base"] ** (torch.arange(0, 32, 2) / 32)
    assert (scaled != plain).any()
    numpy.testing.assert_allclose(plain / tensors["rope_freqs.weight"].data, scaled, rtol=1e-5)


def test_matrices_keep_their_type_and_vectors_are_float32(tmp_path):
    job, state, files = write_folder(tmp_path / "hf", "llama3.2", dtype="bfloat16")
    GGUFExport(files, job.tokenizer()).write(tmp_path / "hf", tmp_path / "gguf", "a model")
    tensors, fields = read_file(tmp_path / "gguf" / "model.gguf")
    matrix, vector = tensors["blk.0.attn_v.weight"], tensors["blk.0.attn_norm.weight"]
    assert (matrix.tensor_type.name, vector.tensor_type.name) == ("BF16", "F32")
    assert list(matrix.shape) == [128, 64], "GGUF lists the columns first"
    read = torch.from_numpy(matrix.data.copy()).view(torch.bfloat16)
    assert torch.equal(read, state["layers.0.attention.wv.weight"].bfloat16())
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16


def test_a_byte_level_vocabulary(tmp_path):
    job, _, files = write_folder(tmp_path, "llama3.2")
    fields, tokenizer = vocabulary_fields(files, json.loads(files["config.json"]), True), job.tokenizer()
    assert (fields["tokenizer_model"], fields["tokenizer_pre"]) == ("gpt2", "llama-bpe")
    tokens, kinds = fields["token_list"], fields["token_types"]
    assert len(tokens) == 2400 and tokens[tokenizer.bos_id] == "<|begin_of_text|>"
    assert kinds[0] == NORMAL and kinds[tokenizer.bos_id] == CONTROL and kinds[2399] == UNUSED
    ids = tokenizer.encode(" return")
    assert [tokens[id_] for id_ in ids] == ["Ġreturn"] and "Ġ Ġ" in fields["token_merges"]
    assert fields["add_bos_token"] and fields["bos_token_id"] == tokenizer.bos_id
    assert fields["eos_token_id"] == tokenizer.eos_id


def sentencepiece_files():
    """Return files with a tokenizer.json of Llama 2's kind."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x41>": 3, "▁": 4, "a": 5, "b": 6, "ab": 7, "▁ab": 8}
    added = [{"id": id_, "content": name, "special": True} for id_, name in ((0, "<unk>"), (1, "<s>"), (2, "</s>"))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"], ["▁", "ab"]], "unk_token": "<unk>"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [entry | flags for entry in added],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "model": model | {"byte_fallback": True, "fuse_unk": True},
    }
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    generation = {"eos_token_id": [2, 8]}
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(named).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


def test_a_sentencepiece_vocabulary():
    fields = vocabulary_fields(sentencepiece_files(), {"vocab_size": 9}, False)
    assert fields["tokenizer_model"] == "llama" and fields["add_space_prefix"]
    assert fields["token_types"] == [UNKNOWN, CONTROL, CONTROL, BYTE, *[NORMAL] * 5]
    scores = fields["token_scores"]
    assert scores[7] > scores[8], "an earlier merge has the higher score"
    assert (fields["bos_token_id"], fields["eos_token_id"], fields["unk_token_id"]) == (1, 2, 0)
    assert fields["eot_token_id"] == 8 and fields["add_bos_token"] is False


def test_gemmas_split_at_blanks_that_are_replaced_before_is_none():
    from transformers import GemmaTokenizer

    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "a": 4, "▁": 5, "▁a": 6}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=[("▁", "a")])
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    assert content["pre_tokenizer"]["type"] == "Split"
    fields = vocabulary_fields(changed_tokenizer(sentencepiece_files(), **content), {"vocab_size": 7}, True)
    assert fields["tokenizer_model"] == "llama" and not fields["add_space_prefix"]
    with pytest.raises(JobError, match="changes text by Split"):
        vocabulary_fields(
            changed_tokenizer(sentencepiece_files(), **content | {"normalizer": None}), {"vocab_size": 7}, True
        )


def changed_tokenizer(files, **changes):
    return files | {"tokenizer.json": json.dumps(json.loads(files["tokenizer.json"]) | changes).encode()}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": {"type": "Unigram"}}, "is of the kind Unigram"),
        ({"normalizer": {"type": "Lowercase"}}, "changes text by Lowercase"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x"}}},
            "changes text by Split",
        ),
    ],
)
def test_other_tokenizers_are_refused(changes, message):
    with pytest.raises(JobError, match=f"--format gguf: the tokenizer {message}, which llama.cpp cannot be told"):
        vocabulary_fields(changed_tokenizer(sentencepiece_files(), **changes), {"vocab_size": 9}, True)


def test_a_byte_level_split_is_known_by_its_pattern(tmp_path):
    _, _, files = write_folder(tmp_path, "llama3.2")

    def name_of(pattern):
        steps = json.loads(files["tokenizer.json"])["pre_tokenizer"]
        steps["pretokenizers"][0]["pattern"]["Regex"] = pattern
        changed = changed_tokenizer(files, pre_tokenizer=steps)
        return vocabulary_fields(changed, {"vocab_size": 2304}, True)["tokenizer_pre"]

    assert name_of(QWEN2) == "qwen2"
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]
    of_granite = changed_tokenizer(files, pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    assert vocabulary_fields(of_granite, {"vocab_size": 2304}, True)["tokenizer_pre"] == "refact"
    whole = changed_tokenizer(
        files, pre_tokenizer={"type": "Sequence", "pretokenizers": [digits | {"individual_digits": False}, steps[1]]}
    )
    with pytest.raises(JobError, match="splits text by 'Digits'"):
        vocabulary_fields(whole, {"vocab_size": 2304}, True)
    with pytest.raises(JobError, match="splits text by 'x'"):
        name_of("x")


def conversation(template, system, turns):
    """Return what Ollama sends to a model: its template for each turn, joined. It knows `if .System` and `else`."""
    text = ""
    for number, (question, answer) in enumerate(turns):
        head, _, rest = template.partition("{{ end }}")
        with_system, _, without = head.removeprefix("{{ if .System }}").partition("{{ else }}")
        turn = (with_system if system and number == 0 else without) + rest
        values = {"{{ .System }}": system, "{{ .Prompt }}": question, "{{ .Response }}": answer}
        for name, value in values.items():
            turn = turn.replace(name, value or "")
        text += turn
    return text


@pytest.mark.parametrize("name, system", [("llama3", "be brief"), ("llama3", None), ("chatml", "be brief")])
def test_ollamas_template_says_what_the_tokenizers_does(name, system):
    tokenizer = build_tokenizer("debug", NAMED[name])
    template = ollama_template(tokenizer)
    messages = [{"role": "system", "content": system}] * bool(system)
    messages += [{"role": "user", "content": "how?"}, {"role": "assistant", "content": "so"}]
    variables = {"eos_token": "", **tokenizer.template_tokens, "tools": None}
    (expected,) = render(NAMED[name], messages, variables, [(len(messages), False)])
    begin = tokenizer.template_tokens["bos_token"]
    expected = expected.replace(BEGIN, "").replace(END, "").removeprefix(begin)
    assert conversation(template, system, [("how?", "so")]) == expected


def test_a_template_with_a_system_message_of_its_own_and_one_that_cannot_be_told():
    default = (
        "{% if messages[0].role != 'system' %}[S:nice]{% endif %}"
        "{% for m in messages %}[{{ m.role[:1] | upper }}:{{ m.content }}]{% endfor %}"
    )
    tokenizer = build_tokenizer("debug", default)
    assert ollama_template(tokenizer) is None, "an answer does not follow its question as a prompt ends"
    prompted = default.replace("[{{ m.role[:1] | upper }}:", "[{{ m.role[:1] | upper }}:", 1)
    prompted += "{% if add_generation_prompt %}[A:{% endif %}"
    template = ollama_template(build_tokenizer("debug", prompted))
    assert conversation(template, None, [("q", "a")]) == "[S:nice][U:q][A:a]"
    assert conversation(template, "be rude", [("q", "a")]) == "[S:be rude][U:q][A:a]"


def test_the_modelfile_has_the_sampling_of_the_folder_and_its_ends(tmp_path):
    job, _, files = write_folder(tmp_path, "llama3.2")
    generation = json.loads(files["generation_config.json"]) | {"temperature": 0.6, "top_p": 0.9}
    files["generation_config.json"] = json.dumps(generation).encode()
    text = modelfile("model.gguf", files, job.tokenizer(), 4096)
    assert text.splitlines() == [
        "FROM ./model.gguf",
        "PARAMETER num_ctx 4096",
        "PARAMETER temperature 0.6",
        "PARAMETER top_p 0.9",
        'PARAMETER stop "<|end_of_text|>"',
    ]


def test_the_modelfile_has_no_lines_from_other_files(tmp_path):
    job, _, files = write_folder(tmp_path, "llama3.2")
    end = "\nADAPTER /etc/file\n"
    generation = json.loads(files["generation_config.json"]) | {"temperature": "1" + end, "top_k": True}
    files["generation_config.json"] = json.dumps(generation).encode()
    tokenizer = job.tokenizer()
    tokenizer.special_tokens = {f'<"{end}>': token_id for token_id in tokenizer.special_tokens.values()}
    assert modelfile("model.gguf", files, tokenizer, 4096).splitlines() == [
        "FROM ./model.gguf",
        "PARAMETER num_ctx 4096",
    ]


def test_models_that_llama_cpp_computes_differently_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    job, _, files = write_folder(tmp_path / "moe", "qwen3_moe")

    def refused(**changes):
        config = json.loads(files["config.json"]) | changes
        with pytest.raises(JobError) as error:
            GGUFExport(files | {"config.json": json.dumps(config).encode()}, job.tokenizer())
        return str(error.value)

    known = "allowed: causal models of llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, gemma2"
    assert f"given OPTForCausalLM (opt); {known}" in refused(model_type="opt", architectures=["OPTForCausalLM"])
    of_gptj = refused(model_type="gptj", architectures=["GPTJForCausalLM"])
    assert "no model that computes it" in of_gptj and "convert_hf_to_gguf" not in of_gptj
    assert "norm_topk_prob = False; allowed: True" in refused(norm_topk_prob=False)
    for model_type in ("qwen2", "qwen3", "qwen3_moe"):
        window = dict(model_type=model_type, use_sliding_window=True, sliding_window=8)
        assert "use_sliding_window = True; allowed: False" in refused(**window)
    assert "mlp_bias = True; allowed: False" in refused(
        model_type="llama", architectures=["LlamaForCausalLM"], mlp_bias=True
    )
    of_families = {}
    for family, changes, message in (
        ("gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar = 64; allowed: 32"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping = null; allowed: a number"),
        ("gemma3", {"rope_local_base_freq": 5e3}, "rope_local_base_freq = 5000.0; allowed: 10000.0"),
        ("olmo3", {"layer_types": ["full_attention"] * 2}, "allowed: ['sliding_attention', 'sliding_attention']"),
        ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers = [0, 1]; allowed: [1, 1]"),
        ("glm4_moe", {"n_group": 2}, "n_group = 2; allowed: 1"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob = True; allowed: False"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0; allowed: 7.0"),
        ("falcon_h1", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate = True; allowed: False"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias = True; allowed: False"),
        ("falcon_h1", {"mamba_conv_bias": False}, "mamba_conv_bias = False; allowed: True"),
        ("falcon_h1", {"tie_word_embeddings": True, "lm_head_multiplier": 0.5}, "tie_word_embeddings = True; allowed"),
        ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob = False; allowed: True"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias = True; allowed: False"),
        ("deepseek", {"q_lora_rank": None}, "num_hidden_layers = 2; allowed: 27"),
        ("deepseek", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1; allowed: 0"),
        ("starcoder2", {"use_bias": False}, "use_bias = False; allowed: True"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm = True; allowed: False"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias = False; allowed: True"),
        ("falcon", {"bias": True}, "bias = True; allowed: False"),
        ("cohere2", {"layer_types": ["full_attention"] * 2}, "allowed: ['sliding_attention', 'sliding_attention']"),
        ("afmoe", {"mup_enabled": False}, "mup_enabled = False; allowed: True"),
        ("afmoe", {"layer_types": ["full_attention"] * 2}, "allowed: ['sliding_attention', 'sliding_attention']"),
        ("llama4", {"attention_chunk_size": 128}, "attention_chunk_size = 128; allowed: 8192"),
        ("llama4", {"use_qk_norm": False}, "use_qk_norm = False; allowed: True"),
        ("llama4", {"num_local_experts": 128}, "use_qk_norm = True; allowed: False"),
        ("llama4", {"no_rope_layers": [0, 1]}, "no_rope_layers = [0, 1]; allowed: [1, 1]"),
        ("mistral4", {"q_lora_rank": None, "num_hidden_layers": 27}, "q_lora_rank = null; allowed: a number"),
        ("lfm2_moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor = 2.0; allowed: 1.0"),
        ("granite4", {"mamba_proj_bias": True}, "mamba_proj_bias = True; allowed: False"),
        (
            "granite4",
            {"layer_types": ["full_attention"] * 2, "position_embedding_type": "nope"},
            "position_embedding_type = 'nope'; allowed: 'rope'",
        ),
        *(
            (family, {"tie_word_embeddings": True}, "tie_word_embeddings = True; allowed: False")
            for family in ("gpt_neox", "gpt_oss", "minimax_m2", "nemotron", "olmo2")
            + ("olmo3", "phi", "qwen2_moe", "stablelm")
        ),
    ):
        if family not in of_families:
            of_families[family] = write_folder(tmp_path / family, family)[2]
        of_family = of_families[family]
        assert message in refused(**json.loads(of_family["config.json"]) | changes)
    _, _, growing = write_folder(tmp_path / "growing", "ministral3")
    config = json.loads(growing["config.json"])
    rope = config["rope_parameters"]
    config["rope_parameters"] = rope | {"attention_factor": 1.5}
    with pytest.raises(JobError, match="attention_factor = 1.5, set or by mscale and mscale_all_dim; allowed: 1, as"):
        GGUFExport(growing | {"config.json": json.dumps(config).encode()}, job.tokenizer())
    kept = ("original_max_position_embeddings", "llama_4_scaling_beta", "rope_theta")
    config["rope_parameters"] = {key: rope[key] for key in kept} | {"rope_type": "default"}
    fields = GGUFExport(growing | {"config.json": json.dumps(config).encode()}, job.tokenizer()).fields
    assert fields["rope_scaling_orig_ctx_len"] == 32 and "rope_scaling_yarn_log_mul" not in fields
    _, _, latent = write_folder(tmp_path / "latent", "deepseek")
    latent = json.loads(latent["config.json"])
    kimi = latent | {"rope_scaling": latent["rope_scaling"] | {"beta_fast": 1.0}}
    assert "rope_scaling = {" in (error := refused(**kimi)) and "'beta_fast': 32.0" in error
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    for rope in (yarn | {"attention_factor": 1.0}, yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}):
        assert "attention_factor = 1, set or by mscale and mscale_all_dim; allowed: 1.13863" in refused(
            model_type="qwen3", rope_scaling=rope
        )
    longrope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "factor": 2.0}
    assert "rope_scaling of the kind longrope; allowed: none" in refused(rope_scaling=longrope)
    linear = {"rope_type": "linear", "factor": 2.0}
    assert "rope_scaling of the kind linear; allowed: none, in qwen3_moe" in refused(rope_scaling=linear)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "install it with: pip install 'torchtitan-toml[gguf]'" in refused()


def test_the_command_writes_a_file_of_the_verified_weights(tmp_path, capsys):
    texts = write_texts(tmp_path)
    options = dict(model__overrides="{dim=64, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=2400, multiple_of=64}")
    options |= dict(model__name="llama3", model__tokenizer_path="debug", checkpoint__enable=True, training__steps=1)
    run = tmp_path / "run"
    run_ranks(1, train, arguments(run, texts, adapter__kind="lora", adapter__rank=4, **options))
    assert cli.main(["export", str(run), "--to", str(tmp_path / "No"), "--format=gguf"]) == 2
    assert "--format: given gguf for an adapter alone; allowed: the whole model; add --merge" in capsys.readouterr().err
    assert cli.main(["export", str(run), "--to", str(tmp_path / "Out"), "--format=gguf", "--merge"]) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = tmp_path / "Out"
    assert lines[-2:] == [
        f"serve it: llama-server -m {folder / 'model.gguf'}",
        f"or: ollama create out -f {folder / 'Modelfile'}",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["Modelfile", "export.json", "model.gguf"]
    assert not (tmp_path / "Out.unverified").exists()
    assert json.loads((folder / "export.json").read_text())["verified"]
    shutil.rmtree(folder)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:

        def full(*args):
            raise OSError("No space left on device")

        patch.setattr(GGUFExport, "write", full)
        assert cli.main(["export", str(run), "--to", str(folder), "--format=gguf", "--merge"]) == 2
    assert "the file was not written: No space left" in capsys.readouterr().err
    assert (tmp_path / "Out.unverified" / "config.json").exists() and not folder.exists()
