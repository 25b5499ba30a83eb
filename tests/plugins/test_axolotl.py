"""`torchtitan import` of Axolotl's files, DeepSpeed's and the notes' launch script.

Each of Axolotl's 181 options is translated, noted or refused in at least one test.
"""

import itertools
import json
import shutil

import pytest
import yaml

from tests.support.importing import difference
from tests.support.jobs import ROOT
from tests.support.notes_rows import base, write_rows
from torchtitan import cli
from torchtitan.config.layers import as_file, layer_of
from torchtitan.config.manager import load
from torchtitan.config.sections.training import DataSource
from torchtitan.core import yaml_file
from torchtitan.core.cadence import cadence_of
from torchtitan.core.errors import JobError
from torchtitan.datasets import open_source
from torchtitan.datasets.record_format import record_reader
from torchtitan.datasets.template_process import render
from torchtitan.datasets.template_worker import BEGIN, END
from torchtitan.plugins.importers import axolotl, deepspeed, launchers, parse, split
from torchtitan.plugins.importers.axolotl_options import ENTRY_KEYS
from torchtitan.plugins.importers.axolotl_options import OPTIONS as TABLE
from torchtitan.plugins.importers.axolotl_templates import OWN, own_template

ESSENTIAL = """
    adam_beta1 adam_beta2 adam_epsilon adapter auto_resume_from_checkpoints axolotl_config_path base_model
    batch_size bf16 bfloat16 bnb_config_kwargs chat_template conversation cosine_min_lr_ratio dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataset_prepared_path dataset_processes
    datasets ddp ddp_broadcast_buffers ddp_bucket_cap_mb ddp_timeout debug deepspeed default_system_message
    dpo_beta eager_attention early_stopping_patience eval_batch_size eval_sample_packing eval_steps evals_per_epoch
    evaluation_strategy field_input field_instruction field_output field_system flash_attention
    flash_attn_cross_entropy flash_optimum format fsdp fsdp_config gpu_memory_limit gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs greater_is_better is_preprocess learning_rate
    load_best_model_at_end load_in_4bit logging_steps lora_alpha lora_dropout lora_model_dir lora_modules_to_save
    lora_r lora_target_linear lora_target_modules loss_watchdog_patience loss_watchdog_threshold lr_scheduler
    lr_scheduler_kwargs max_grad_norm max_memory max_packed_sequence_len max_steps merge_lora metric_for_best_model
    micro_batch_size model_config model_config_type model_type no_input_format num_epochs optimizer output_dir
    pad_to_sequence_len path peft_adapter peft_layers_to_transform pretraining_dataset relora_steps
    relora_warmup_steps resize_token_embeddings_to_32x resume_from_checkpoint rl rl_adapter_ref_model rope_scaling
    sample_packing sample_packing_eff_est save_safetensors save_steps save_strategy save_total_limit
    saves_per_epoch sdp_attention seed sequence_len special_tokens strict system_format system_prompt test_datasets
    tokenizer_config tokens torch_compile torch_compile_backend torch_dtype total_num_tokens
    total_supervised_tokens train_on_inputs type use_wandb val_set_size wandb_name wandb_project wandb_run_id
    warmup_ratio warmup_steps weight_decay xformers_attention zero_optimization
"""
OPTIONAL = """
    base_model_config bench_dataset dataset_keep_in_memory dataset_shard_idx dataset_shard_num do_bench_eval
    dpo_label_smoothing eval_table_max_new_tokens eval_table_size float16 fp16 group_by_length hub_model_id
    hub_strategy load_in_8bit lora_on_cpu lr_quadratic_warmup mlflow_experiment_name model_revision
    neftune_noise_alpha noisy_embedding_alpha peft precompute_ref_log_probs push_to_hub_model_id relora_cpu_offload
    s2_attention tf32 unfrozen_parameters use_mlflow
"""
UNSUPPORTED = """
    device device_map flash_attn_fuse_mlp flash_attn_fuse_qkv flash_attn_rms_norm gptq gptq_disable_exllama
    hf_use_auth_token is_falcon_derived_model is_file is_llama_derived_model is_mistral_derived_model
    is_qwen_derived_model local_rank lora_fan_in_fan_out model_kwargs push_dataset_to_hub read_text
    remove_unused_columns tokenizer_legacy tokenizer_type tokenizer_use_fast torchdistx_path trust_remote_code
    world_size
"""
OPTIONS = (ESSENTIAL + OPTIONAL + UNSUPPORTED).split()
"""Axolotl's options at its revision of February 2024."""

FULL = {"base_model": "llama", "datasets": [{"path": "a.jsonl"}], "learning_rate": 1e-4, "max_steps": 100}
LORA = FULL | {"adapter": "lora", "lora_target_linear": True, "lora_r": 8, "lora_alpha": 16}
TWO_SETS = FULL | {"datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}
QUANTIZED = FULL | {"adapter": "qlora", "load_in_4bit": True, "lora_target_modules": ["q_proj"], "lora_r": 8}
QUANTIZED |= {"lora_alpha": 16, "base_model": "experts"}
HELD_OUT = FULL | {"val_set_size": 0.1}
RESTARTED = {"adapter.relora.every": 150, "adapter.relora.reset": "magnitude", "adapter.relora.prune_ratio": 0.9}
RESTARTED |= {"adapter.save": None, "adapter.last_save_in_peft": None, "optimizer.name": None}
REWARDED = {"path": "a.jsonl", "type": "bradley_terry.chat_template"}
DROPPED = {"path": "a.jsonl", "type": "chat_template", "drop_system_message": True}
STREAM = FULL | {"pretraining_dataset": [{"path": "owner/text"}], "datasets": None}


@pytest.fixture(scope="module")
def folder_with_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    (folder / "llama").mkdir()
    (folder / "llama/config.json").write_text('{"model_type": "llama"}')
    (folder / "experts").mkdir()
    (folder / "experts/config.json").write_text('{"model_type": "qwen3_moe"}')
    (folder / "llama/tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
    sizes |= dict(rms_norm_eps=1e-5, max_position_embeddings=64, num_key_value_heads=2)
    (folder / "small").mkdir()
    (folder / "small/config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    (folder / "z2.json").write_text('{"zero_optimization": {"stage": 2}}')
    return folder


@pytest.fixture(autouse=True)
def in_folder_with_model(folder_with_model, monkeypatch):
    monkeypatch.chdir(folder_with_model)


def import_config(config, flags="", launcher="accelerate launch --num_processes 2 -m axolotl.cli.train"):
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    with open("job.yml", "w") as file:
        file.write(text)
    return axolotl.read(parse(split([f"{launcher} job.yml {flags}"])))


def changes_by(added, before):
    return difference(import_config(before), import_config(before | added))


TRANSLATED = [  # added options, the job they are added to, and the options of the result that change
    ({"base_model": "microsoft/phi-4"}, FULL, {"model.name": "phi3", "model.hf_folder": "microsoft/phi-4"}),
    ({"base_model": "allenai/OLMo-2-1124-7B"}, FULL, {"model.name": "olmo2"}),
    ({"base_model": "mistralai/Ministral-3-8B-Base-2512"}, FULL, {"model.name": "mistral"}),
    ({"base_model": "ibm-granite/granite-3.1-8b-base"}, FULL, {"model.name": "granite"}),
    ({"base_model": "tiiuae/Falcon-H1-1.5B-Deep-Base"}, FULL, {"model.name": "falcon_h1"}),
    ({"base_model": "my/Mistral-7B"}, FULL, {"model.name": "mistral", "model.hf_folder": "my/Mistral-7B"}),
    ({"base_model": "google/gemma-3-1b-pt"}, FULL, {"model.name": "gemma3", "model.hf_folder": "google/gemma-3-1b-pt"}),
    ({"base_model": "google/gemma-3-4b-it"}, FULL, {"model.name": "gemma3"}),
    ({"base_model": "mistralai/Mistral-Small-3.1-24B-Instruct-2503"}, FULL, {"model.name": "mistral"}),
    ({"base_model": "mistralai/Mistral-Small-4-119B-2603"}, FULL, {"model.name": "mistral4"}),
    ({"base_model": "MiniMaxAI/MiniMax-M2"}, FULL, {"model.name": "minimax_m2"}),
    ({"base_model": "arcee-ai/Trinity-Nano-Preview"}, FULL, {"model.name": "afmoe"}),
    ({"base_model": "EleutherAI/gpt-j-6b"}, FULL, {"model.name": "gptj"}),
    ({"base_model": "mistral-community/pixtral-12b"}, FULL, {"model.name": "mistral"}),
    ({"base_model": "llava-hf/llava-1.5-7b-hf"}, FULL, {"model.name": None}),  # llama3 as before
    ({"base_model": "Qwen/Qwen2.5-VL-7B-Instruct"}, FULL, {"model.name": "qwen2"}),
    ({"base_model": "moonshotai/Kimi-K2-Base"}, FULL, {"model.name": "deepseek"}),
    ({"base_model": "deepseek-ai/DeepSeek-V3"}, FULL, {"model.name": "deepseek"}),
    ({"base_model": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"}, FULL, {"model.name": "qwen3"}),
    ({"base_model": "mistralai/Mixtral-8x7B-v0.1"}, FULL, {"model.name": "mixtral"}),
    ({"base_model": "zai-org/GLM-4.5-Air"}, FULL, {"model.name": "glm4_moe"}),
    ({"base_model": "zai-org/GLM-4.7-Flash"}, FULL, {"model.name": "glm4_moe_lite"}),
    ({"base_model": "microsoft/phi-1_5"}, FULL, {"model.name": "phi"}),
    ({"base_model": "cognitivecomputations/dolphin-2.9-mistral"}, FULL, {"model.name": "mistral"}),
    ({"base_model": "Qwen/Qwen3-Next-80B-A3B-Instruct"}, FULL, {"model.name": "qwen3_next"}),
    ({"base_model": "Qwen/Qwen3.5-35B-A3B"}, FULL, {"model.name": "qwen3_5_moe"}),
    ({"base_model": "Qwen/Qwen3.6-27B"}, FULL, {"model.name": "qwen3_5"}),
    ({"base_model": "Qwen/Qwen1.5-MoE-A2.7B"}, FULL, {"model.name": "qwen2_moe"}),
    ({"base_model": "Qwen/Qwen2-57B-A14B"}, FULL, {"model.name": "qwen2_moe"}),
    ({"base_model": "Qwen/Qwen3-30B-A3B"}, FULL, {"model.name": "qwen3_moe"}),
    ({"base_model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}, FULL, {"model.name": "qwen2"}),
    ({"base_model": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"}, FULL, {"model.name": None}),  # llama3 as before
    ({"base_model": "Qwen/Qwen2.5-7B"}, FULL, {"model.name": "qwen2", "model.hf_folder": "Qwen/Qwen2.5-7B"}),
    ({"base_model_config": "llama"}, FULL, {}),
    ({"model_config": {"rope_theta": 5e5}}, FULL, {"model.overrides": {"rope_theta": 5e5}}),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        FULL,
        {"model.overrides": {"rope_scaling": {"kind": "linear", "factor": 2.0}}},
    ),
    ({"tokenizer_config": "other"}, FULL, {"model.tokenizer_path": "other"}),
    ({"special_tokens": {"bos_token": "<s>", "eos_token": "</s>"}}, FULL, {}),
    (
        {"qat": {"weight_dtype": "int4", "activation_dtype": "int8"}},
        FULL,
        {"qat.weight_dtype": "int4", "qat.activation_dtype": "int8", "qat.group_size": 32},
    ),
    ({"s2_attention": True}, FULL | {"sequence_len": 64}, {"model.s2_group_size": 16}),
    ({"s2_attention": True}, FULL, {"model.s2_group_size": 128}),
    ({"s2_attention": False}, FULL, {}),
    ({"torch_compile": True}, FULL, {"compile.enable": True}),
    ({"torch_compile_backend": "eager"}, FULL, {"compile.backend": "eager"}),
    ({"datasets": [{"path": "b.jsonl"}]}, FULL, {"training.dataset_path": "b.jsonl"}),
    ({"datasets": [{"path": "owner/set", "name": "en"}]}, FULL, {"training.dataset_path": "owner/set:en"}),
    (
        {"datasets": [{"path": "a.jsonl", "type": "completion"}]},
        FULL,
        {
            "data.too_long": "split",
            "training.dataset": None,
            "training.dataset_path": None,
            "training.sources": [{"dataset": "text", "dataset_path": "a.jsonl", "format": "completion"}],
        },
    ),
    ({"datasets": [{"path": "a.jsonl", "conversation": "llama-2"}]}, FULL, {"data.chat_template": "llama2"}),
    ({"chat_template": "chatml"}, FULL, {"data.chat_template": "chatml"}),
    ({"default_system_message": "Be kind."}, FULL, {"data.default_system": "Be kind."}),
    ({"chat_template": "tokenizer_default"}, FULL, {}),
    ({"train_on_inputs": True}, FULL, {"data.train_on": "all"}),
    ({"train_on_inputs": False}, FULL, {}),
    ({"test_datasets": [{"path": "t.jsonl"}]}, FULL, {"validation.dataset_path": "t.jsonl"}),
    ({"val_set_size": 0.1}, FULL, {"validation.split": 0.1, "validation.samples": 0, "validation.enable": True}),
    ({"dataset_prepared_path": "p"}, FULL, {"data.cache_dir": "p"}),
    ({"dataset_processes": 3}, FULL, {"data.num_proc": 3}),
    ({"dataset_num_proc": 3}, FULL, {"data.num_proc": 3}),
    ({"sample_packing_group_size": 50}, FULL, {"data.packing_window": 50}),
    ({"chat_template": "jinja", "chat_template_jinja": "{{ x }}"}, FULL, {"data.chat_template": "{{ x }}"}),
    ({"chat_template_jinja": "mine.jinja"}, FULL, {"data.chat_template": "mine.jinja"}),
    ({"use_tensorboard": True}, FULL, {"metrics.enable_tensorboard": True}),
    ({"eval_strategy": "no"}, HELD_OUT, {"validation.enable": None}),
    ({"rl_beta": 0.3}, FULL | {"rl": "ipo"}, {"dpo.beta": 0.3}),
    ({"sequence_len": 512}, FULL, {}),
    ({"sequence_len": 4096}, FULL, {"training.seq_len": 4096, "data.max_tokens": 4096}),
    ({"excess_length_strategy": "truncate"}, FULL, {"data.too_long": "truncate"}),
    ({"excess_length_strategy": "raise"}, FULL, {"data.too_long": "error"}),
    ({"sample_packing": True}, FULL, {"data.packing": "best_fit"}),
    ({"pad_to_sequence_len": False}, FULL, {"data.pad_to": "batch"}),
    ({"pad_to_sequence_len": True}, FULL, {"data.pad_to": "seq_len"}),
    ({"pad_to_sequence_len": True}, FULL | {"sample_packing": True}, {"data.pad_to": None}),
    ({"group_by_length": True}, FULL, {"data.group_by_length": True}),
    ({"group_by_length": True}, FULL | {"sample_packing": True}, {}),
    ({"dataset_shard_num": 4, "dataset_shard_idx": 1}, FULL, {"data.shards": "2/4"}),
    ({"max_packed_sequence_len": 64}, FULL | {"sequence_len": 64}, {}),
    ({"dataloader_num_workers": 2}, FULL, {"training.dataloader.num_workers": 2}),
    ({"dataloader_pin_memory": False}, FULL, {"training.dataloader.pin_memory": False}),
    ({"dataloader_prefetch_factor": 4}, FULL, {"training.dataloader.prefetch_factor": 4}),
    ({"adapter": "qlora", "load_in_4bit": True}, LORA, {"adapter.kind": "qlora"}),
    ({"load_in_8bit": True}, LORA, {"adapter.kind": "lora_int8"}),
    ({"quantize_moe_experts": True}, QUANTIZED, {"adapter.quantized_experts": "all"}),
    (  # the same targets as those of the layers, and w1, w2 and w3
        {"quantize_moe_experts": True, "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        QUANTIZED | {"adapter": "lora", "load_in_8bit": True, "load_in_4bit": None},
        {"adapter.quantized_experts": "all", "adapter.gate_up_rank": 8}
        | {"adapter.target": ["layers.*.attention.wq", "layers.*.moe.experts"]},
    ),
    (
        {"lora_target_parameters": ["experts.down_proj"]},
        QUANTIZED,
        {"adapter.quantized_experts": "none"}
        | {"adapter.target": ["layers.*.attention.wq", "layers.*.moe.experts.w2"]},
    ),
    ({"quantize_moe_experts": True}, QUANTIZED | {"base_model": "llama"}, {}),
    ({"peft_use_dora": True}, LORA, {"adapter.kind": "dora"}),
    ({"lora_r": 32}, LORA, {"adapter.rank": 32}),
    ({"lora_alpha": 64}, LORA, {"adapter.alpha": 64.0}),
    ({"lora_dropout": 0.05}, LORA, {"adapter.dropout": 0.05}),
    (
        {"lora_target_linear": False, "lora_target_modules": ["q_proj", "down_proj"]},
        LORA,
        {"adapter.target": ["layers.*.attention.wq", "layers.*.feed_forward.w2"]},
    ),
    ({"peft_layers_to_transform": [1, 2]}, LORA, {"adapter.layers": [1, 2]}),
    ({"lora_modules_to_save": ["embed_tokens"]}, LORA, {"adapter.train_fully": ["tok_embeddings.weight"]}),
    (
        {"reward_model": True, "datasets": [REWARDED], "lora_modules_to_save": ["score"]},
        LORA,
        {"adapter.train_fully": ["output.weight"], "adapter.last_save_in_peft": None},
    ),
    ({"lora_model_dir": "old"}, LORA, {"adapter.initial_path": "old"}),
    ({"peft_adapter": "old"}, LORA, {"adapter.initial_path": "old"}),
    ({"relora_steps": 20, "relora_warmup_steps": 5}, LORA, {"adapter.relora.every": 20, "adapter.save": None}),
    ({"bnb_config_kwargs": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}}, LORA, {}),
    ({"bf16": True}, FULL, {}),  # as without it: auto
    ({"bf16": None}, FULL, {"training.mixed_precision_param": "float32"}),
    ({"bfloat16": True}, FULL, {"training.dtype": "bfloat16"}),
    ({"torch_dtype": "bfloat16"}, FULL, {"training.dtype": "bfloat16"}),
    ({"fp16": False, "float16": False}, FULL, {}),
    ({"fp16": True}, FULL | {"bf16": False}, {"training.mixed_precision_param": "bfloat16", "training.dtype": None}),
    ({"float16": True}, FULL | {"bf16": False}, {"training.dtype": "bfloat16"}),
    ({"torch_dtype": "float16"}, FULL, {"training.dtype": "bfloat16"}),
    ({"bnb_config_kwargs": {"bnb_4bit_compute_dtype": "float16"}}, LORA, {}),
    ({"fp8": True, "fp8_enable_fsdp_float8_all_gather": True}, FULL, {"training.float8": "tensorwise"}),
    ({"min_sample_len": 300}, FULL, {"data.min_tokens": 300}),
    ({"min_sample_len": 300}, FULL | {"rl": "dpo"}, {"data.min_tokens": None}),
    ({"min_sample_len": 300}, STREAM, {"data.min_tokens": None}),
    ({"dataset_exact_deduplication": True}, FULL, {"data.deduplicate": True}),
    ({"dataset_exact_deduplication": True}, FULL | {"rl": "dpo"}, {"data.deduplicate": True}),
    ({"do_causal_lm_eval": True, "eval_causal_lm_metrics": ["perplexity"]}, HELD_OUT, {}),
    ({"do_causal_lm_eval": True, "eval_causal_lm_metrics": ["perplexity"]}, FULL, {}),
    ({"tokens": {"bos_token": "<s>", "eos_token": "</s>"}}, FULL, {}),
    ({"relora": True, "jagged_restart_steps": 150}, LORA, RESTARTED | {"adapter.relora.warmup_steps": 10}),
    (
        {"relora": True, "jagged_restart_steps": 150, "jagged_restart_warmup_steps": 5}
        | {"jagged_restart_anneal_steps": 4, "relora_prune_ratio": 0.8},
        LORA | {"adapter": "qlora", "load_in_4bit": True, "optimizer": "adamw_bnb_8bit"},
        {"adapter.kind": "lora", "optimizer.name": "AdamW", "adapter.relora.warmup_steps": 5}
        | {"adapter.relora.prune_ratio": 0.8, "adapter.relora.anneal_steps": 4},
    ),
    (
        {"relora": True, "jagged_restart_steps": 150, "relora_prune_method": "random"},
        LORA,
        {"adapter.relora.reset": "random", "adapter.relora.prune_ratio": 0.9},
    ),
    (
        {"relora": True, "jagged_restart_steps": 150, "relora_prune_method": "reset"},
        LORA | {"cosine_min_lr_ratio": 0.1},
        {"adapter.relora.reset": "random", "adapter.relora.prune_ratio": 0.999},
    ),
    ({"datasets": [DROPPED, DROPPED | {"path": "b.jsonl"}]}, FULL, {"data.drop_system": True}),
    ({"reward_model": True, "datasets": [REWARDED]}, FULL, {"task.kind": "reward", "data.deduplicate": None}),
    (
        {"reward_model": True, "datasets": [REWARDED], "num_labels": 1, "center_rewards_coefficient": 0.01},
        FULL | {"min_sample_len": 9, "train_on_inputs": True, "excess_length_strategy": "truncate"},
        {"task.options": {"center_coefficient": 0.01}, "model.overrides": {"n_classes": 1}, "data.min_tokens": None}
        | {"data.train_on": "completion", "data.too_long": "drop"},
    ),
    ({"bf16": "full"}, FULL, {"training.dtype": "bfloat16"}),
    ({"bf16": "yes"}, FULL | {"bf16": None}, {"training.mixed_precision_param": "bfloat16"}),
    ({"bf16": "false"}, FULL, {"training.mixed_precision_param": "float32"}),
    ({"torch_dtype": "float32"}, FULL, {}),
    ({"gradient_checkpointing": True}, FULL, {"activation_checkpoint.mode": "full"}),
    ({"gradient_checkpointing": "false"}, FULL, {}),
    ({"lora_target_modules": ["q_proj"]}, LORA, {}),
    ({"lora_model_dir": False, "deepspeed": False, "rl": False, "wandb_name": False}, LORA, {}),
    ({"optimizer": "paged_adamw_8bit"}, FULL, {"optimizer.name": "AdamW8bit"}),
    ({"optimizer": "adamw_anyprecision"}, FULL, {"optimizer.name": "AdamWBF16", "training.dtype": "bfloat16"}),
    ({"learning_rate": "2e-5"}, FULL, {"optimizer.lr": 2e-5}),
    ({"weight_decay": 0.01}, FULL, {"optimizer.weight_decay": 0.01}),
    ({"adam_beta1": 0.8}, FULL, {"optimizer.beta1": 0.8}),
    ({"adam_beta2": 0.99}, FULL, {"optimizer.beta2": 0.99}),
    ({"adam_epsilon": 1e-6}, FULL, {"optimizer.eps": 1e-6}),
    ({"max_grad_norm": 0.3}, FULL, {"training.max_norm": 0.3}),
    ({"lr_scheduler": "linear"}, FULL, {"lr_scheduler.decay_type": "linear"}),
    ({"cosine_min_lr_ratio": 0.1}, FULL, {"lr_scheduler.min_lr_factor": 0.1}),
    ({"warmup_steps": 7}, FULL, {"lr_scheduler.warmup_steps": 7}),
    ({"warmup_ratio": 0.07}, FULL, {"lr_scheduler.warmup_steps": 0.07}),
    ({"lr_quadratic_warmup": True}, FULL, {"lr_scheduler.warmup_type": "quadratic"}),
    ({"neftune_noise_alpha": 5}, FULL, {"training.neftune_alpha": 5.0}),
    ({"noisy_embedding_alpha": 5}, FULL, {"training.neftune_alpha": 5.0}),
    ({"micro_batch_size": 4}, FULL, {"training.local_batch_size": 4, "training.global_batch_size": 8}),
    ({"gradient_accumulation_steps": 4}, FULL, {"training.global_batch_size": 8}),
    ({"batch_size": 4}, FULL, {"training.global_batch_size": 8}),
    ({"eval_batch_size": 3}, HELD_OUT, {"validation.local_batch_size": 3}),
    ({"max_steps": -1, "num_epochs": 3}, FULL, {"training.epochs": 3, "training.steps": None}),
    ({"max_steps": 0}, FULL, {"training.epochs": 1, "training.steps": None}),
    ({"num_epochs": 3}, FULL, {}),
    ({"seed": 1}, FULL, {"debug.seed": 1}),
    ({"eval_steps": 0.05}, HELD_OUT, {"validation.freq": 0.05}),
    ({"save_steps": 0.07}, FULL, {"checkpoint.interval": 0.07}),
    ({"save_steps": 500}, FULL, {"checkpoint.interval": 500}),
    ({"saves_per_epoch": 2, "max_steps": 0}, FULL, {"checkpoint.interval": "2/epoch"}),
    ({"evaluation_strategy": "epoch", "max_steps": 0}, HELD_OUT, {"validation.freq": "epoch"}),
    (
        {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False},
        HELD_OUT,
        {"checkpoint.best_metric": "validation_loss", "checkpoint.export_best": True},
    ),
    (
        {"load_best_model_at_end": True},
        HELD_OUT | LORA | {"peft_use_dora": True},
        {"checkpoint.export_best": True, "checkpoint.last_save_model_only": True},
    ),
    ({"load_best_model_at_end": True}, FULL, {}),
    ({"eval_table_size": 5}, HELD_OUT, {"validation.generated": 5, "validation.generated_tokens": 128}),
    ({"eval_table_size": 5, "eval_table_max_new_tokens": 32}, HELD_OUT, {"validation.generated_tokens": 32}),
    ({"eval_table_size": 0}, HELD_OUT, {}),
    ({"eval_table_max_new_tokens": 32}, HELD_OUT, {}),
    ({"eval_table_size": 5, "eval_table_max_new_tokens": 32}, FULL, {}),
    ({"early_stopping_patience": 3}, HELD_OUT, {"early_stop.patience": 3}),
    ({"early_stopping_patience": 3}, FULL, {}),
    ({"loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 4}, FULL, {"guard.loss_threshold": 5.0}),
    ({"loss_watchdog_patience": 4}, FULL, {"guard.loss_patience": 4}),
    ({"gpu_memory_limit": "20GiB"}, FULL, {"memory.limit": "20GiB"}),
    ({"cleanup_output_dir_on_start": True}, FULL, {"job.clean_start": "unsaved"}),
    (
        {"cleanup_output_dir_on_start": True, "resume_from_checkpoint": False},
        FULL,
        {"job.clean_start": "always"},
    ),
    ({"gpu_memory_limit": 20}, FULL, {"memory.limit": "20GiB"}),
    ({"max_memory": {0: "20GB", 1: "20GB", "cpu": "64GB"}}, FULL, {"memory.limit": "20GB"}),
    ({"logging_steps": 5}, FULL, {"metrics.log_freq": 5}),
    ({"evaluation_strategy": "no"}, HELD_OUT, {"validation.enable": None, "validation.split": None}),
    ({"save_strategy": "no"}, FULL, {"checkpoint.interval": 100}),
    ({"save_strategy": "epoch", "num_epochs": 3}, FULL, {"checkpoint.interval": 34}),
    ({"evals_per_epoch": 2, "num_epochs": 2}, HELD_OUT, {"validation.freq": 25}),
    ({"saves_per_epoch": 1}, FULL, {"checkpoint.interval": 100}),
    ({"save_total_limit": 3}, FULL, {"checkpoint.keep_latest_k": 3}),
    ({"output_dir": "out"}, FULL, {"job.dump_folder": "out"}),
    ({"save_safetensors": True}, FULL, {}),
    ({"use_wandb": True}, FULL, {"metrics.enable_wandb": True}),
    ({"wandb_project": "p"}, FULL, {"metrics.enable_wandb": True}),
    ({"wandb_name": "n"}, FULL, {"job.description": "n"}),
    ({"use_mlflow": True}, FULL, {"metrics.trackers": ["mlflow"]}),
    ({"ddp_timeout": 60}, FULL, {"comm.train_timeout_seconds": 60}),
    (
        {"fsdp": ["full_shard", "auto_wrap"]},
        FULL,
        {"parallelism.fsdp_reshard_after_forward": "always", "parallelism.data_parallel_replicate_degree": None},
    ),
    (
        {"fsdp": "shard_grad_op", "fsdp_config": {"fsdp_offload_params": True}},
        FULL,
        {"training.enable_cpu_offload": True, "parallelism.fsdp_reshard_after_forward": "never"},
    ),
    ({"deepspeed": "z2.json"}, FULL, {"parallelism.fsdp_reshard_after_forward": "never"}),
    (
        {"pretraining_dataset": [{"path": "owner/text"}], "datasets": None},
        FULL,
        {"task.kind": None, "training.dataset": "huggingface", "training.dataset_path": "owner/text"},
    ),
    ({"sample_packing": True}, STREAM, {"training.document_mask": True}),
    ({"pretrain_multipack_attn": True}, STREAM, {}),
    ({"sample_packing": True, "pretrain_multipack_attn": False}, STREAM, {}),
    ({"chat_template": "qwen3"}, FULL | {"base_model": "my/qwen3_tuned"}, {}),
    ({"rl": "dpo"}, FULL, {"task.kind": "dpo"}),
    (  # Axolotl counts pairs too
        {"rl": "dpo", "micro_batch_size": 3, "gradient_accumulation_steps": 4},
        FULL,
        {"training.local_batch_size": 3, "training.global_batch_size": 24},
    ),
    ({"rl": "ipo", "dpo_beta": 0.2}, FULL, {"task.kind": "ipo", "dpo.beta": 0.2}),
    ({"rl": "dpo", "lora_model_dir": "begun"}, LORA, {"dpo.reference": "llama", "adapter.initial_path": "begun"}),
    ({"rl": "ipo", "peft_adapter": "begun"}, LORA, {"dpo.reference": "llama"}),
    ({"rl": "orpo", "peft_adapter": "begun"}, LORA, {"task.kind": "orpo", "dpo.reference": None}),
    ({"dpo_label_smoothing": 0.1}, FULL | {"rl": "dpo"}, {"dpo.label_smoothing": 0.1}),
    ({"orpo_alpha": 0.2}, FULL | {"rl": "orpo"}, {"dpo.beta": 0.2}),
    ({"unfrozen_parameters": ["^lm_head"]}, FULL | {"base_model": "small"}, {"training.unfrozen": ["output.weight"]}),
    (
        {"unfrozen_parameters": ["model.embed_tokens", "embed_tokens"]},  # the second begins no name
        FULL | {"base_model": "small"},
        {"training.unfrozen": ["tok_embeddings.weight"]},
    ),
    ({"peft_use_rslora": True}, LORA, {"adapter.rslora": True}),
    ({"loraplus_lr_ratio": 16}, LORA, {"adapter.lr_ratio_b": 16.0}),
    ({"train_data_uri": "rows.jsonl", "datasets": None}, FULL, {"training.dataset_path": "rows.jsonl"}),
    ({"val_data_uri": "rows.jsonl"}, FULL, {"validation.dataset_path": "rows.jsonl"}),
    ({"val_data_uri": "NA"}, FULL, {}),
    ({"mlfoundry_run_name": "n"}, FULL, {"job.description": "n"}),
    ({"attn_implementation": "flash_attention_2"}, FULL, {}),
    ({"shuffle_merged_datasets": True}, FULL, {}),
    ({"shuffle_merged_datasets": False}, FULL, {}),
    ({"shuffle_before_merging_datasets": True}, FULL, {}),
    ({"curriculum_sampling": True}, FULL, {"training.shuffle": False}),
    ({"curriculum_sampling": True}, TWO_SETS, {}),
    ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, FULL, {}),
    ({"optimizer": "adamw_torch_4bit"}, FULL, {"optimizer.name": "AdamW8bit"}),
    ({"model_config": {"output_router_logits": True}}, FULL, {}),
    (  # the two ranks read the same samples
        {"context_parallel_size": 2},
        FULL,
        {
            "parallelism.context_parallel_degree": 2,
            "training.global_batch_size": 1,
            "parallelism.data_parallel_replicate_degree": None,
        },
    ),
    (
        {"sequence_parallel_degree": 2},
        FULL,
        {"parallelism.context_parallel_degree": 2, "training.global_batch_size": 1},
    ),
    ({"tensor_parallel_size": 2}, FULL, {"parallelism.tensor_parallel_degree": 2, "training.global_batch_size": 1}),
    (
        {"dp_shard_size": 2},
        FULL | {"fsdp_config": {"reshard_after_forward": True}},
        {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": 2},
    ),
    ({"dp_replicate_size": 2}, FULL, {}),  # as it is without fsdp
    (  # experts are spread over ranks that have samples of their own, which are sharded
        {"expert_parallel_size": 2, "plugins": ["axolotl.integrations.expert_parallel.ExpertParallelPlugin"]},
        FULL,
        {"parallelism.expert_parallel_degree": 2, "parallelism.data_parallel_replicate_degree": None},
    ),
    ({"reinit_weights": True}, FULL, {"checkpoint.initial_load_path": None, "checkpoint.initial_load_in_hf": None}),
    ({"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"dequantize": True}}, FULL, {}),
    ({"gradient_checkpointing": "offload"}, FULL, {"activation_checkpoint.mode": "full"}),
    ({"warmup_steps": 0.1}, FULL, {"lr_scheduler.warmup_steps": 0.1}),
    ({"warmup_steps": 1}, FULL, {"lr_scheduler.warmup_steps": 2}),
    ({"warmup_steps": 0}, FULL, {"lr_scheduler.warmup_steps": 0}),
    ({"attn_implementation": "kernels-community/vllm-flash-attn3"}, FULL, {}),
    ({"base_model": "deepseek-ai/DeepSeek-R1"}, FULL, {"model.name": "deepseek"}),
    ({"base_model": "my/Qwen3_0.6B"}, FULL, {"model.name": "qwen3"}),
]


@pytest.mark.parametrize("added, before, expected", TRANSLATED, ids=[str(added) for added, *_ in TRANSLATED])
def test_supported_options_are_translated(added, before, expected):
    values, _ = changes_by(added, before)
    assert {key: values.get(key) for key in expected} == expected
    assert expected or not values


def _nested(name, value):
    """Return a config with the option where it belongs: in an entry of `datasets`, or at the top level."""
    if name in ENTRY_KEYS:
        kind = {name: value} if name == "type" else {"type": {name: value}}
        return FULL | {"datasets": [{"path": "a.jsonl"} | kind]}
    return (LORA if name == "peft" else FULL) | {name: value}


def test_a_target_that_lora_target_linear_includes_is_noted():
    note = changes_by({"lora_target_modules": ["q_proj"]}, LORA)[1]
    assert note == "lora_target_linear includes q_proj"
    values, note = changes_by({"lora_target_modules": ["wide"]}, LORA)
    assert not values and note == "lora_target_modules: no module of the model has the name wide"


@pytest.mark.parametrize("name", ["lora_target_modules", "lora_modules_to_save", "lora_target_parameters"])
def test_targets_without_an_adapter_have_no_effect(name):
    values, note = changes_by({name: ["q_proj"]}, FULL)
    assert values == {} and f"no adapter, so {name} has no effect" in note


VALUES = {"bool": True, "int": 3, "float": 3.0, "text": "some", "list": ["some"], "table": {"some": 1}, "any": "some"}
NOTED = sorted(name for name, fate in TABLE.items() if fate.note and not fate.choices)
REFUSED = sorted(name for name, fate in TABLE.items() if fate.reason and not fate.choices)


@pytest.mark.parametrize("name", NOTED)
def test_options_without_effect_are_noted(name):
    values, note = changes_by({name: VALUES[TABLE[name].kind]}, FULL)
    assert values == {} and f"{name}: {TABLE[name].note}" in note


def test_the_shortest_record_of_axolotl_is_harmless():
    assert changes_by({"min_sample_len": 2}, FULL) == ({}, "")


def test_what_is_not_the_same_is_noted():
    notes = {
        "fp16": changes_by({"fp16": True}, FULL)[1],
        "fp8": changes_by({"fp8": True}, FULL)[1],
        "tokens": changes_by({"tokens": {"bos_token": "<s>"}}, FULL)[1],
        "rl": changes_by({"min_sample_len": 9}, FULL | {"rl": "dpo"})[1],
        "pairs": changes_by(
            {"dataset_exact_deduplication": True}, FULL | {"rl": "dpo", "test_datasets": [{"path": "b.jsonl"}]}
        )[1],
        "shards": changes_by({"dataset_exact_deduplication": True}, FULL | {"dataset_shard_num": 2})[1],
        "restarts": changes_by(
            {"relora": True, "jagged_restart_steps": 9, "optimizer": "adamw_bnb_8bit", "load_in_8bit": True}, LORA
        )[1],
    }
    assert "fp16: not the same: computed in bfloat16" in notes["fp16"]
    assert "fp8: the head stays in bfloat16" in notes["fp8"]
    assert "tokens: a table, as Axolotl had it in 2023: read as special_tokens" in notes["tokens"]
    assert "min_sample_len: no effect with rl" in notes["rl"]
    assert "not the same: pairs of test_datasets" in notes["pairs"]
    assert "not the same: records are compared before" in notes["shards"]
    for text in ("a restart follows the step", "the frozen matrices are in float32", "AdamW's moments"):
        assert f"relora: not the same: {text}" in notes["restarts"]


def test_kernels_of_exact_attention_are_noted_and_others_refused():
    values, note = changes_by({"attn_implementation": "flash_attention_2"}, FULL)
    assert values == {} and "attn_implementation: the fastest suitable attention kernel" in note
    for name in ("sage", "fp8", "somebody/flash-attn3"):
        (fault,) = import_config(FULL | {"attn_implementation": name}).faults
        assert fault.key == "attn_implementation" and "leave it out" in fault.remedy


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_are_refused_unless_off(name):
    faults = import_config(_nested(name, VALUES[TABLE[name].kind])).faults
    assert [(fault.key, fault.remedy, fault.file) for fault in faults] == [(name, TABLE[name].reason, "job.yml")]
    off = {"bool": False, "int": 0, "float": 0.0, "list": [], "table": {}}.get(TABLE[name].kind)
    assert changes_by({name: off}, FULL) == ({}, "")


@pytest.mark.parametrize(
    "options, key",
    [
        ({"use_eaft": True, "eaft_alpha": 1.0, "eaft_k": 20}, "use_eaft"),
        ({"lisa_n_layers": 4, "lisa_step_interval": 20, "lisa_layers_attribute": "model.layers"}, "lisa_n_layers"),
        ({"ebft": {"mode": "strided"}, "rl": "ebft", "trl": {"beta": 1}, "vllm": {"a": 1}}, "ebft"),
        ({"rl": "kto", "kto_desirable_weight": 0.2}, "rl"),
        ({"process_reward_model": True, "num_labels": 2}, "process_reward_model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_done_here_is_refused_in_one_line(options, key):
    assert [fault.key for fault in import_config(FULL | options).faults] == [key]


RESIZED = {"model.hf_folder": "llama-resized", "model.tokenizer_path": "llama-resized"}
RESIZED |= {"checkpoint.initial_load_path": "llama-resized"}
TRAINED_EMBEDDINGS = {
    "adapter.train_fully": ["tok_embeddings.weight", "output.weight"],
    "adapter.last_save_in_peft": None,
}
SPECIAL_TOKENS = {"additional_special_tokens": ["<b>"], "eos_token": "<end>", "bos_token": "<s>"}
ADDED = [  # added options, the job, the changed options, and arguments of `torchtitan convert llama llama-resized`
    ({"tokens": ["<a>", "<b c>"]}, FULL, RESIZED, "--add-tokens '<a>' '<b c>'"),
    ({"resize_token_embeddings_to_32x": True}, FULL, RESIZED, "--vocab-multiple 32"),
    ({"resize_token_embeddings_to_32x": True}, LORA, RESIZED, "--vocab-multiple 32"),
    (
        {"tokens": ["<a>"], "special_tokens": SPECIAL_TOKENS, "resize_token_embeddings_to_32x": True},
        LORA,
        RESIZED | TRAINED_EMBEDDINGS,
        "--add-tokens '<a>' '<b>' '<end>' --eos-token '<end>' --vocab-multiple 32",
    ),
    (
        {"tokens": ["<a>"]},
        LORA | {"lora_modules_to_save": ["norm"], "tokenizer_config": "other"},
        RESIZED | {"adapter.train_fully": ["norm.weight", *TRAINED_EMBEDDINGS["adapter.train_fully"]]},
        "--add-tokens '<a>' --model.tokenizer_path=other",
    ),
]


@pytest.mark.parametrize("added, before, expected, arguments", ADDED, ids=[str(added) for added, *_ in ADDED])
def test_tokens_are_added_to_the_folder_first(added, before, expected, arguments):
    values, notes = changes_by(added, before)
    assert values == expected
    first = notes.partition(" rows of new tokens")[0]
    assert first == f"llama-resized has to be made first: torchtitan convert llama llama-resized {arguments}"
    assert ("rows of new tokens are trained, so embed_tokens and lm_head are trained with the adapter" in notes) == (
        "adapter.train_fully" in expected
    )


BEGINLESS = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
BEGINS = [  # changes of the tokenizer's config and of the file that make Axolotl write the begin token somewhere
    ({}, {}, False),
    ({"bos_token": "<s>"}, {}, True),
    ({"add_bos_token": True}, {}, True),
    ({"tokenizer_class": "LlamaTokenizerFast"}, {}, True),
    ({"eos_token": "</s>"}, {}, True),
    ({}, {"chat_template": "chatml"}, True),
    ({}, {"datasets": [{"path": "a.jsonl", "type": "chat_template"}]}, True),
]


@pytest.mark.parametrize("tokenizer, changed, refused", BEGINS, ids=str)
def test_a_begin_token_that_is_never_written(folder_with_model, tokenizer, changed, refused):
    (folder_with_model / "falcon-7b").mkdir(exist_ok=True)
    (folder_with_model / "falcon-7b/tokenizer_config.json").write_text(json.dumps(BEGINLESS | tokenizer))
    prompts = {"base_model": "falcon-7b", "datasets": [{"path": "a.jsonl", "type": "alpaca:chat"}]}
    draft = import_config(FULL | prompts | {"special_tokens": {"bos_token": "<end>"}} | changed)
    assert ("special_tokens.bos_token" in {fault.key for fault in draft.faults}) == refused
    assert ("special_tokens.bos_token: no effect; this tokenizer begins no text with one" in draft.notes) != refused


def test_an_existing_resized_folder_is_checked(folder_with_model):
    config = FULL | {"tokens": ["<a>", "<b>"]}
    (folder_with_model / "llama-resized").mkdir()
    (folder_with_model / "llama-resized/config.json").write_text('{"model_type": "llama"}')
    tokens = folder_with_model / "llama-resized/tokenizer.json"
    command = "torchtitan convert llama llama-resized --add-tokens '<a>' '<b>'"
    try:
        assert f"llama-resized exists and is used, as made by: {command}" in changes_by(config, FULL)[1]
        tokens.write_text('{"added_tokens": [{"content": "<a>"}]}')
        assert f"llama-resized exists without <b>: make it again: {command}" in changes_by(config, FULL)[1]
        tokens.write_text('{"added_tokens": 3}')
        assert "exists without <a> <b>" in changes_by(config, FULL)[1]
    finally:
        shutil.rmtree(folder_with_model / "llama-resized")


WRONG = [  # an option, its value, the job it is added to, and a part of the error
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}, FULL, "depends on the length of a text"),
    ("rope_scaling", {"type": "linear", "fctor": 2.0}, FULL, "linear, ntk, yarn or llama3"),
    ("special_tokens", {"bos_token": "<end>"}, FULL, "the tokenizer's own"),
    ("special_tokens", {"eos_token": 3}, FULL, "allowed: text"),
    ("special_tokens", {"additional_special_tokens": "<end>"}, FULL, "a list of texts"),
    ("sequence_len", 60, FULL | {"s2_attention": True}, "a multiple of 8 with s2_attention"),
    ("base_model_config", "other", FULL, "as base_model"),
    ("base_model", "my/thing", FULL, "no other family is here"),
    ("model_config", {"width": 3}, FULL, "rope_theta"),
    ("val_set_size", 0.1, FULL | {"test_datasets": [{"path": "t"}]}, "0 with test_datasets"),
    ("val_set_size", 0.1, FULL | {"pretraining_dataset": "a.txt"}, "nothing with pretraining_dataset"),
    ("max_packed_sequence_len", 64, FULL | {"sequence_len": 32}, "samples are of one length"),
    ("chat_template", "vicuna", FULL, "tokenizer_default, chatml"),
    ("datasets", [], FULL, "at least one entry"),
    ("adapter", "llama-adapter", FULL, "lora, qlora or dora"),
    ("load_in_4bit", True, LORA, "or adapter: qlora"),
    ("load_in_4bit", False, LORA | {"adapter": "qlora"}, "true with adapter: qlora"),
    ("load_in_8bit", True, FULL, "or adapter: lora"),
    ("peft_use_dora", True, LORA | {"adapter": "qlora"}, "not quantized"),
    ("lora_target_modules", ["wide"], LORA | {"lora_target_linear": False}, "q_proj"),
    ("lora_target_parameters", ["experts.gate_up_proj"], LORA, "nothing for a model without experts"),
    ("quantize_moe_experts", True, FULL, "nothing without an adapter"),
    ("quantize_moe_experts", True, QUANTIZED | {"lora_target_linear": True}, "as Axolotl demands"),
    ("quantize_moe_experts", True, QUANTIZED | {"adapter": "lora", "load_in_4bit": None}, "true with load_in_4bit or"),
    ("lora_modules_to_save", ["wide"], LORA, "embed_tokens, lm_head, norm"),
    ("relora_steps", 5, FULL, "nothing without an adapter"),
    ("relora_warmup_steps", 5, LORA, "nothing without relora_steps"),
    ("relora", True, FULL, "nothing without an adapter"),
    ("relora", True, LORA, "true with jagged_restart_steps"),
    ("jagged_restart_steps", 5, LORA, "nothing without relora: true"),
    ("jagged_restart_warmup_steps", -5, LORA, "at least 0"),
    ("jagged_restart_anneal_steps", "all", LORA, "a whole number"),
    ("relora_prune_ratio", 0.5, LORA, "nothing without relora: true"),
    ("relora_prune_method", "magnitude", LORA, "nothing without relora: true"),
    ("relora_prune_method", "some", LORA, "one of magnitude, random, reset"),
    ("eval_causal_lm_metrics", ["sacrebleu"], HELD_OUT | {"do_causal_lm_eval": True}, "answers are not scored"),
    ("tokens", {"bos_token": "<end>"}, FULL | {"special_tokens": {}}, "a list of texts"),
    ("rl", "dpo", FULL | {"datasets": [REWARDED], "reward_model": True}, "choose one"),
    ("datasets", [REWARDED], FULL, "give reward_model: true"),
    ("datasets", [{"path": "a", "type": "alpaca"}], FULL | {"reward_model": True}, "bradley_terry.chat_template with"),
    ("datasets", [REWARDED | {"field": "a"}], FULL | {"reward_model": True}, "it belongs to another type"),
    ("num_labels", 2, FULL | {"reward_model": True, "datasets": [REWARDED]}, "other heads are not trained"),
    ("num_labels", 1, FULL, "1, with reward_model: true"),
    ("jagged_restart_warmup_steps", 5, LORA, "nothing without relora: true"),
    ("jagged_restart_anneal_steps", 5, LORA, "nothing without relora: true"),
    ("jagged_restart_anneal_steps", 5, FULL, "nothing without an adapter"),
    ("center_rewards_coefficient", 0.1, FULL, "nothing without reward_model: true"),
    ("center_rewards_coefficient", -0.1, FULL, "at least 0"),
    ("dataset_exact_deduplication", True, STREAM, "nothing with pretraining_dataset"),
    ("datasets", [DROPPED, {"path": "b"}], FULL, "the same for all datasets"),
    ("datasets", [DROPPED | {"type": "alpaca"}], FULL, "nothing without type: chat_template"),
    ("bnb_config_kwargs", {"bnb_4bit_quant_type": "fp4"}, LORA, "nf4"),
    ("bnb_config_kwargs", {"llm_int8_threshold": 6.0}, LORA, "bnb_4bit_quant_type"),
    ("torch_dtype", "int8", FULL, "one of bfloat16, bf16, float32"),
    ("bf16", "fast", FULL, "one of true, false, auto, full"),
    ("bf16", [True], FULL, "one of true, false, auto, full"),
    ("gradient_checkpointing", "unsloth", FULL, "stay on their device"),
    ("gradient_checkpointing", 2, FULL, "one of true, false, auto"),
    ("resume_from_checkpoint", 2, FULL, "one of true, false, auto"),
    ("lora_model_dir", True, LORA, "allowed: text"),
    ("optimizer", "adamw_magic", FULL, "adamw_torch"),
    ("adam_beta1", 0.9, FULL | {"optimizer": "sgd"}, "it belongs to Adam"),
    ("lr_scheduler", "one_cycle", FULL, "others are not supported"),
    ("cosine_min_lr_ratio", 0.1, FULL | {"lr_scheduler": "linear"}, "nothing with lr_scheduler: linear"),
    ("warmup_ratio", 0.2, FULL | {"warmup_steps": 3}, "nothing with warmup_steps"),
    ("micro_batch_size", 0, FULL, "at least 1"),
    ("batch_size", 3, FULL | {"micro_batch_size": 2}, "a multiple of micro_batch_size 2"),
    ("num_epochs", 0.5, FULL | {"max_steps": 0}, "a whole number"),
    ("eval_steps", -0.1, HELD_OUT, "a number above 0"),
    ("evals_per_epoch", 2, HELD_OUT | {"eval_steps": 5}, "nothing with eval_steps"),
    ("saves_per_epoch", -2, FULL, "a number above 0"),
    ("metric_for_best_model", "eval_f1", HELD_OUT, "loss or eval_loss"),
    ("greater_is_better", True, HELD_OUT | {"load_best_model_at_end": True}, "the lowest loss is the best"),
    ("max_memory", {0: "20GB", 1: "10GB"}, FULL, "all ranks have one limit"),
    ("max_memory", "20GB", FULL, "give gpu_memory_limit"),
    ("save_steps", 2.5, FULL, "a share below 1"),
    ("model_quantization_config", "Mxfp4Config", FULL, "{dequantize = true}"),
    ("model_quantization_config_kwargs", {"dequantize": False}, FULL, "{dequantize = true}"),
    ("warmup_steps", -1, FULL, "at least 0"),
    ("base_model", "google/gemma-3n-E2B", FULL, "no other family is here"),
    ("base_model", "meta-llama/Llama-3.2-11B-Vision-Instruct", FULL, "no other family is here"),
    ("base_model", "Qwen/Qwen3-VL-30B-A3B-Instruct", FULL, "no other family is here"),
    ("save_strategy", "best", FULL, "one of no, steps, epoch"),
    ("evaluation_strategy", "often", HELD_OUT, "one of no, steps, epoch"),
    ("eval_strategy", "often", HELD_OUT, "one of no, steps, epoch"),
    ("save_safetensors", False, FULL, "never pickled"),
    ("resume_from_checkpoint", "checkpoint-100", FULL, "checkpoints of other trainers"),
    ("fsdp", ["hybrid"], FULL, "full_shard"),
    ("fsdp", ["full_shard"], FULL | {"deepspeed": "z2.json"}, "nothing with deepspeed"),
    ("learning_rate", "fast", FULL, "a finite number"),
    ("num_epochs", float("inf"), FULL | {"max_steps": 0}, "a finite number"),
    ("num_epochs", float("nan"), FULL | {"max_steps": 0}, "a finite number"),
    ("warmup_ratio", float("inf"), FULL | {"max_steps": 10}, "a finite number"),
    ("warmup_ratio", float("nan"), FULL | {"max_steps": 10}, "a finite number"),
    ("lora_target_modules", [["q_proj"]], LORA | {"lora_target_linear": False}, "a list of texts"),
    ("lora_modules_to_save", [["lm_head"]], LORA, "a list of texts"),
    ("lora_rr", 3, FULL, "did you mean lora_r?"),
    ("max_steps", float("inf"), FULL, "a whole number"),
    ("rl", "simpo", FULL, "dpo, ipo, orpo"),
    ("rl", "kto", FULL, "KTO needs a mean"),
    ("rl_beta", 0.1, FULL, "nothing without rl"),
    ("chat_template", "jinja", FULL, "tokenizer_default, chatml"),
    ("chat_template_jinja", "{{ x }}", FULL | {"chat_template": "chatml"}, "nothing with chat_template: chatml"),
    ("rl", "kto_pair", FULL, "KTO needs a mean over all pairs of a step"),
    ("dpo_beta", 0.1, FULL, "nothing without rl"),
    ("orpo_alpha", 0.1, FULL | {"rl": "dpo"}, "nothing without rl: orpo"),
    ("type", "alpaca", FULL, "in an entry of datasets"),
    ("unfrozen_parameters", ["lm_head"], FULL | {"base_model": "my/Mistral-7B"}, "download the model"),
    ("unfrozen_parameters", ["lm_head"], LORA, "nothing with an adapter"),
    ("dataset_shard_idx", 4, FULL | {"dataset_shard_num": 4}, "from 0 to 3, one of dataset_shard_num 4"),
    ("dataset_shard_idx", 1, FULL, "nothing without dataset_shard_num"),
    ("plugins", ["my.Plugin"], FULL, "never executed"),
    ("curriculum_sampling", True, TWO_SETS | {"shuffle_merged_datasets": False}, "write the records into one file"),
    ("context_parallel_size", 3, FULL, "divides the 2 ranks"),
    ("dp_shard_size", 4, FULL, "divides the 2 ranks"),
    ("dp_shard_size", 2, FULL, "1 without fsdp"),
    ("dp_shard_size", 2, FULL | {"fsdp": ["no_shard"]}, "1 without fsdp"),
    ("dp_shard_size", 2, FULL | {"deepspeed": "z2.json"}, "1 with deepspeed"),
    ("model_config", {"output_router_logits": "no"}, FULL, "rope_theta"),
]


@pytest.mark.parametrize("name, value, before, message", WRONG, ids=[f"{name}-{value}" for name, value, *_ in WRONG])
def test_invalid_values_are_refused(name, value, before, message):
    faults = [fault for fault in import_config(before | {name: value}).faults if fault.key.startswith(name)]
    assert faults and message in str(faults[0])


ODD_VALUES = ("fast", -3, [None])


def test_no_option_is_ignored_silently():
    """Each odd value of each option changes the job, adds a note or is refused."""
    before, dropped = HELD_OUT | LORA, []
    plain = import_config(before)
    for name, value in itertools.product(TABLE, ODD_VALUES):
        try:
            job = import_config(before | {name: value})
        except JobError as error:
            assert name == "deepspeed" and "cannot be read" in str(error)
            continue
        if not job.faults and job.notes == plain.notes and job.values == plain.values:
            dropped.append((name, value))
    assert not dropped


@pytest.mark.parametrize("name", ["base_model", "tokenizer_config", "deepspeed", "output_dir", "lora_model_dir"])
def test_a_path_that_is_too_long_does_not_crash(name):
    try:
        assert import_config(LORA | {name: "x" * 5000}) is not None
    except JobError as error:
        assert "File name too long" in str(error)


ENTRY = {
    "path": ("https://a.b/c.jsonl", "download it first"),
    "type": ("vicuna", "write the records as prompt and completion"),
    "conversation": ("vicuna", "tokenizer_default, chatml"),
    "field_instruction": (3, "text"),
    "field_input": (3, "text"),
    "field_output": (["answer"], "text"),
    "field_system": (3, "text"),
    "format": (3, "text"),
    "no_input_format": (3, "text"),
    "system_format": (3, "text"),
    "system_prompt": (3, "text"),
    "roles": ({"user": [["x"]]}, "rename the roles"),
    "field_chosen": ("better", "rename the field"),
    "field_rejected": ("worse", "rename the field"),
    "message_property_mappings": ({"tool_calls": "calls"}, "a table with role and content"),
    "split": ("test", "write the records of the split into a file"),
    "data_files": (3, "paths"),
    "feild": ("text", "did you mean field?"),
    "field_thinking": ("thoughts", "one name for both"),
    "name": (["en", "de"], "text"),
    "field": (3, "text"),
    "ds_type": (3, "text"),
    "drop_system_message": ("some", "true or false"),
}


@pytest.mark.parametrize("key", ENTRY)
def test_invalid_entries_of_datasets_are_refused(key):
    value, message = ENTRY[key]
    entry = {"path": "a.jsonl", key: value}
    assert any(message in str(fault) for fault in import_config(FULL | {"datasets": [entry]}).faults)
    if key not in ("path", "type", "conversation", "split", "data_files", "feild"):
        assert any(
            message in str(fault) for fault in import_config(FULL | {"datasets": [{"path": "a", "type": entry}]}).faults
        )


SLICED = [  # an entry, and its sources or the beginning of the error
    ({"path": "o/n", "split": "train[:20%]"}, [("huggingface", "o/n", "[:20%]")]),
    ({"path": "o/n", "split": "train[:1_000] + train[-5%:]"}, [("huggingface", "o/n", "[:1000]+[-5%:]")]),
    ({"path": "o/n", "name": "en", "split": "validation[9:]"}, [("huggingface_validation", "o/n:en", "[9:]")]),
    ({"path": "a.jsonl", "split": "train[:100]"}, [("text", "a.jsonl", "[:100]")]),
    ({"path": "json", "data_files": ["a.jsonl"], "split": "train[:9]"}, [("text", "a.jsonl", "[:9]")]),
    ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "split": "train[:9]"}, "datasets[0].data_files"),
    ({"path": "a.jsonl", "split": "validation"}, "datasets[0].split"),
    ({"path": "o/n", "split": "train[:9]+validation[:9]"}, "datasets[0].split"),
    ({"path": "o/n", "split": "train[:9]+train"}, "datasets[0].split"),
    ({"path": "o/n", "split": "train+train"}, "datasets[0].split"),
    ({"path": "o/n", "split": "train[:9%](pct1_dropremainder)"}, "datasets[0].split"),
    ({"path": "o/n", "split": "train[::2]"}, "training.sources[0].slice"),
    ({"path": "o/n", "split": 3}, "datasets[0].split"),
    ({"path": "saved", "split": "train[:9]"}, "datasets[0].split"),
]


@pytest.mark.parametrize("entry, expected", SLICED, ids=[str(entry) for entry, _ in SLICED])
def test_slices_of_a_split_are_those_of_a_source(entry, expected, folder_with_model):
    (folder_with_model / "saved").mkdir(exist_ok=True)
    (folder_with_model / "saved/state.json").write_text("{}")
    draft = import_config(FULL | {"datasets": [entry]})
    faults = [*draft.faults, *layer_of("", draft.values.items()).all_faults()]
    if isinstance(expected, str):
        assert [fault.key for fault in faults] == [expected]
    else:
        names = ("dataset", "dataset_path", "slice")
        assert draft.values["training.sources"] == [dict(zip(names, source, strict=True)) for source in expected]
        assert not faults


PAIRS = [  # an entry of pairs, and its options; its records
    ({"type": "chat_template.default"}, {}, "messages"),
    ({"type": "chat_template.default", "field_messages": "conversation"}, {"messages": "conversation"}, "conversation"),
    (
        {"type": "chat_template.default", "field_chosen": "good", "message_property_mappings": {"role": "from"}},
        {"chosen": "good", "role": "from"},
        "messages",
    ),
    ({"type": "chat_template.argilla"}, {}, None),
]


@pytest.mark.parametrize("entry, fields, prompt", PAIRS, ids=[str(entry) for entry, *_ in PAIRS])
def test_pairs_of_messages_are_read_with_their_fields(entry, fields, prompt, tmp_path):
    job = import_config(FULL | {"rl": "dpo", "datasets": [{"path": str(tmp_path / "a.jsonl")} | entry]})
    assert job.faults == []
    source = job.values.get("training.sources", [{}])[0]
    assert source.get("fields", {}) == fields
    role = fields.get("role", "role")
    question, *answers = ({role: who, "content": text} for who, text in (("user", "q"), *[("assistant", "a")] * 2))
    pair = {fields.get("chosen", "chosen"): answers[0], "rejected": answers[1] | {"content": "b"}}
    if prompt is None:
        pair = {name: [question, answer] for name, answer in pair.items()}
    (tmp_path / "a.jsonl").write_text(json.dumps(pair | ({prompt: [question]} if prompt else {})))
    reader = record_reader(DataSource(**{"dataset": "text"} | source), None, True, True)
    (document,) = open_source("text", str(tmp_path / "a.jsonl"), reader).documents()
    texts = [[message["content"] for message in answer.content.messages] for answer in document.content]
    assert texts == [["q", "a"], ["q", "b"]]


def test_thoughts_have_one_name():
    names = {"field_thinking": "thinking", "template_thinking_key": "thinking"}
    entry = {"path": "a.jsonl", "type": "chat_template"}
    assert import_config(FULL | {"datasets": [entry | names]}).faults == []
    assert import_config(FULL | {"datasets": [entry | {"field_thinking": "reasoning_content"}]}).faults == []
    for name in names:
        (fault,) = import_config(FULL | {"datasets": [entry | {name: "thinking"}]}).faults
        assert fault.key == f"datasets[0].{name}" and "one name for both" in str(fault)


def test_a_stream_is_not_sliced():
    stream = FULL | {"datasets": None, "pretraining_dataset": [{"path": "o/n", "split": "train[:9]"}]}
    (fault,) = import_config(stream).faults
    assert fault.key == "pretraining_dataset[0].split" and "has no slices" in fault.remedy


def test_degrees_need_the_number_of_ranks():
    line = "accelerate launch -m axolotl.cli.train"
    (fault,) = import_config(FULL | {"tensor_parallel_size": 2}, launcher=line).faults
    assert fault.key == "tensor_parallel_size" and "--world-size" in fault.remedy


PARALLEL = "--use_parallelism_config"
OF_LAUNCHER = [  # sizes of the file, options of the launcher; tensor parallel, replicas, shards, samples of a step
    ({}, f"{PARALLEL} --parallelism_config_tp_size 2", (2, 2, 1, 4)),
    ({"tensor_parallel_size": 2}, PARALLEL, (2, 2, 1, 4)),
    ({"tensor_parallel_size": 2}, f"{PARALLEL} --parallelism_config_tp_size 4", (2, 2, 1, 4)),
    ({"tensor_parallel_size": 2}, "--parallelism_config_tp_size 4", (2, 2, 1, 4)),
    ({}, f"{PARALLEL} --parallelism_config_dp_shard_size 2 --use_fsdp", (1, 2, 2, 8)),
    ({"dp_replicate_size": 2}, f"{PARALLEL} --parallelism_config_tp_size 2", (2, 2, 1, 4)),
]


@pytest.mark.parametrize("sizes, options, expected", OF_LAUNCHER)
def test_sizes_of_the_file_precede_those_of_the_launcher(sizes, options, expected):
    """The global batch counts the ranks that read samples, also where the launcher repeats the passes."""
    file = FULL | {"gradient_accumulation_steps": 2} | sizes
    for launched in (options, f"{options} --gradient_accumulation_steps 2"):
        with open("job.yml", "w") as text:
            text.write(yaml.safe_dump(file))
        line = parse(split([f"accelerate launch --num_processes 4 {launched} train.py job.yml"]))
        draft = axolotl.read(line)
        launchers.add(line, draft, True)
        names = ("tensor_parallel", "data_parallel_replicate", "data_parallel_shard")
        degrees = [draft.values.get(f"parallelism.{name}_degree", 1) for name in names]
        assert (*degrees, draft.values["training.global_batch_size"]) == expected and not draft.faults


CONTRADICTIONS = [
    ({"dp_shard_size": 2, "dp_replicate_size": 2, "fsdp": ["full_shard"]}, 8, "", "4, which makes 8 ranks"),
    ({"dp_shard_size": 2}, 4, "--use_deepspeed --zero_stage 3", "1 with deepspeed"),
    ({"tensor_parallel_size": 2}, 4, f"{PARALLEL} --parallelism_config_dp_shard_size 4", "divides the 4 ranks"),
]


@pytest.mark.parametrize("sizes, ranks, options, message", CONTRADICTIONS)
def test_sizes_that_contradict_are_refused(sizes, ranks, options, message):
    launcher = f"accelerate launch --num_processes {ranks} {options} -m axolotl.cli.train"
    assert message in str(import_config(FULL | sizes, launcher=launcher).faults[0])


def test_the_newer_name_of_context_parallel_precedes():
    both = {"context_parallel_size": 1, "sequence_parallel_degree": 2}
    assert "parallelism.context_parallel_degree" not in import_config(FULL | both).values


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"])
def test_experts_are_balanced_only_where_transformers_does(model):
    job = FULL | {"base_model": model}
    plain = import_config(job)
    assert plain.values["model.overrides"] == {"aux_loss_weight": 0.0, "bias_rate": 0.0}
    assert any("no loss balances the experts" in note for note in plain.notes)
    for value in (True, False):
        values = import_config(job | {"model_config": {"output_router_logits": value}}).values
        assert values.get("model.overrides") == (None if value else plain.values["model.overrides"])


def test_the_weight_of_the_balance_is_converted_where_layers_are_summed_here(tmp_path):
    sizes = dict(hidden_size=64, num_hidden_layers=8, num_attention_heads=2, vocab_size=64, rms_norm_eps=1e-6)
    sizes |= dict(num_key_value_heads=2, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    sizes |= dict(model_type="qwen3_moe", router_aux_loss_coef=0.02, intermediate_size=64, head_dim=32)
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"output_router_logits": True}))
    values = import_config(FULL | {"base_model": str(tmp_path)}).values
    assert values["model.overrides"] == {"aux_loss_weight": 0.005, "bias_rate": 0.0}


def test_the_weight_of_a_balance_that_a_folder_turns_off_is_its_coefficient(tmp_path):
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, model_type="gpt_oss")
    sizes |= dict(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, head_dim=32)
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"router_aux_loss_coef": 0.9}))
    job = FULL | {"base_model": str(tmp_path), "model_config": {"output_router_logits": True}}
    assert import_config(job).values["model.overrides"] == {"aux_loss_weight": 0.9, "bias_rate": 0.0}
    job["base_model"] = "openai/gpt-oss-20b"  # not on this machine
    assert any("router_aux_loss_coef of config.json" in note for note in import_config(job).notes)


def test_fields_of_messages_are_refused_with_pairs():
    entry = {"path": "a.jsonl", "message_property_mappings": {"role": "from", "content": "value"}}
    (fault,) = import_config(FULL | {"rl": "dpo", "datasets": [entry]}).faults
    assert "nothing with rl" in str(fault)


@pytest.mark.parametrize(
    "key, value", [("conversation", [1]), ("conversation", 3), ("message_property_mappings", {"role": 3})]
)
def test_odd_types_in_an_entry_are_faults(key, value):
    (fault,) = import_config(FULL | {"datasets": [{"path": "a.jsonl", key: value}]}).faults
    assert fault.key == f"datasets[0].{key}"


def test_degrees_leave_the_other_ranks_to_data():
    config = FULL | {"tensor_parallel_size": 2, "dp_shard_size": 2, "fsdp_config": {"reshard_after_forward": True}}
    line = "accelerate launch --num_processes 8 -m axolotl.cli.train"
    values = import_config(config | {"micro_batch_size": 3, "gradient_accumulation_steps": 5}, launcher=line).values
    assert values["training.global_batch_size"] == 3 * 5 * 4
    degrees = {key.rpartition(".")[2]: value for key, value in values.items() if key.endswith("_degree")}
    sizes = {"tensor_parallel": 2, "data_parallel_replicate": 2, "data_parallel_shard": 2}
    assert degrees == {f"{name}_degree": size for name, size in sizes.items()}


@pytest.mark.parametrize("kind", ["sharegpt", "completion", "input_output", "chat_template"])
def test_instruction_fields_are_refused_for_other_types(kind):
    entry = {"path": "a.jsonl", "type": kind, "field_output": "reply"}
    (fault,) = import_config(FULL | {"datasets": [entry]}).faults
    assert fault.key == "datasets[0].field_output" and f"nothing with type: {kind}" in fault.allowed


DEFAULT_TEMPLATE = {
    "format": "{instruction} {input} ",
    "no_input_format": "{instruction} ",
    "system_format": "{system}",
}
DEFAULT_TEMPLATE |= {"system_prompt": ""}
"""The template of an entry with a table as `type`, where the table has no templates."""


def test_entries_of_datasets_become_sources(folder_with_model):
    default_fields = {
        "field_instruction": "instruction",
        "field_input": "input",
        "field_output": "output",
        "format": None,
    }
    entries = [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "ds_type": "json", "split": "train"}]
    entries += [
        {"path": "c.jsonl", "field": "content", "type": "completion"},
        {"path": "d.jsonl", "type": default_fields},
    ]
    job = import_config(FULL | {"datasets": entries})
    assert job.faults == [] and job.values["training.sources"] == [
        {"dataset": "text", "dataset_path": "a.jsonl"},
        {"dataset": "text", "dataset_path": "b.jsonl"},
        {"dataset": "text", "dataset_path": "c.jsonl", "format": "completion", "fields": {"text": "content"}},
        {"dataset": "text", "dataset_path": "d.jsonl", "format": "instruct", "template": DEFAULT_TEMPLATE},
    ]
    spelled = [note.partition(":")[0] for note in job.notes if "special tokens that its texts spell out" in note]
    assert spelled == ["datasets[1]", "datasets[2]"]
    for sources in (job.values["training.sources"], job.values["training.sources"][:3]):  # with a table inside, without
        (folder_with_model / "job.toml").write_text(as_file([], job.values | {"training.sources": sources}))
        read = load(["--job.config_file", str(folder_with_model / "job.toml")]).training
        assert read.sources == [DataSource(**source) for source in sources]
    pairs = import_config(FULL | {"rl": "dpo", "datasets": [{"path": "a.jsonl", "type": "chatml.default"}]})
    assert "llama3.argilla_chat; write the records with chosen" in str(pairs.faults[0])
    texts = import_config(HELD_OUT | {"datasets": [{"path": "a.jsonl", "type": "completion"}]})
    assert texts.values["data.too_long"] == "drop" and any("Axolotl cuts them" in note for note in texts.notes)
    two = [{"path": "a.jsonl", "conversation": "chatml"}, {"path": "b.jsonl", "conversation": "llama-3"}]
    assert "one for all datasets" in str(import_config(FULL | {"datasets": two}).faults[0])
    for entry in (3, {"path": ""}, {"path": "none"}):
        assert "tables that have a path" in str(import_config(FULL | {"datasets": [entry]}).faults[0])
    assert any("fsdp_config" in str(text) for text in import_config(FULL | {"fsdp_config": {1: 2}}).notes)
    roles = import_config(FULL | {"datasets": [{"path": "a.jsonl", "type": "alpaca.load_role"}]})
    assert 'given "alpaca.load_role"' in str(roles.faults[0])
    idle = import_config(FULL | {"datasets": [{"path": "a.jsonl", "type": "alpaca", "field": "content"}]})
    assert any("datasets[0]: 'content' is not read" in note for note in idle.notes)


PROMPTS = [  # keys of an entry of `datasets`, and the source that it becomes
    (
        {"type": {"format": "Q: {instruction} {input}\nA:", "system_prompt": "Be kind.", "field_output": "reply"}},
        {
            "format": "instruct",
            "fields": {"output": "reply"},
            "template": DEFAULT_TEMPLATE | {"format": "Q: {instruction} {input}\nA:", "system_prompt": "Be kind."},
        },
    ),
    (
        {"type": {"field_instruction": "question", "field_output": "output", "field_system": "role"}},
        {"format": "instruct", "fields": {"instruction": "question", "system": "role"}, "template": DEFAULT_TEMPLATE},
    ),
    (
        {"type": "alpaca", "field_instruction": "question"},
        {"format": "instruct", "fields": {"instruction": "question"}},
    ),
    (
        {"type": "chat_template", "field_messages": "talk", "message_field_role": "who"},
        {"format": "chat", "fields": {"messages": "talk", "role": "who"}},
    ),
    ({"type": "chat_template", "field_messages": "talk"}, {"format": "chat", "fields": {"messages": "talk"}}),
    (
        {
            "type": "chat_template",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
            "roles": {"user": ["human", "user"], "assistant": ["gpt"]},
        },
        {"format": "chat", "fields": {"messages": "conversations", "role": "from", "content": "value"}},
    ),
    ({"type": "alpaca"}, {"format": "instruct"}),
    (
        {"type": "sharegpt.load_role", "field": "talk"},
        {"format": "sharegpt", "fields": {"conversations": "talk", "content": "value"}},
    ),
    ({"field": "content"}, {"text_field": "content"}),
]


@pytest.mark.parametrize("entry, expected", PROMPTS, ids=range(len(PROMPTS)))
def test_custom_prompts_and_fields(entry, expected, folder_with_model):
    """The prompts survive when the job is written as TOML and loaded."""
    job = import_config(FULL | {"datasets": [{"path": "a.jsonl"} | entry], "default_system_message": "Be kind."})
    assert job.faults == [] and job.values["data.default_system"] == "Be kind."
    assert job.values["training.sources"] == [{"dataset": "text", "dataset_path": "a.jsonl"} | expected]
    (folder_with_model / "job.toml").write_text(as_file([], job.values))
    source = load(["--job.config_file", str(folder_with_model / "job.toml")]).training.sources[0]
    assert {name: getattr(source, name) for name in expected} == expected


def test_short_model_types_are_words_of_a_name():
    names = ("org/phi-2", "org/my_opt_125m", "org/sapphire-7b", "dolphin", "graphite-3b", "adopt/model", "chatglm3-6b")
    assert [axolotl.guess_model_type(name) for name in names] == ["phi", "opt", None, None, None, None, None]


GUESSES = [  # names whose model types are parts of others, or that name another family too
    ("ibm-granite/granite-4.0-h-micro", "granitemoehybrid"),
    ("ibm-granite/granite-3.1-8b-base", "granite"),
    ("ibm-granite/granite-3.1-3b-a800m-instruct", "granitemoe"),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h"),
    ("unsloth/Nemotron-3-Nano-30B-A3B", "nemotron_h"),
    ("nvidia/Nemotron-H-8B-Base-8K", "nemotron_h"),
    ("nvidia/Nemotron-Mini-4B-Instruct", "nemotron"),
    ("nvidia/Minitron-8B-Base", "nemotron"),
    ("nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "llama"),
    ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "nemotron-nas"),
    ("nvidia/OpenReasoning-Nemotron-7B", "qwen2"),
    ("LiquidAI/LFM2-8B-A1B", "lfm2_moe"),
    ("LiquidAI/LFM2.5-1.2B-Base", "lfm2"),
    ("google/gemma-2b-it", "gemma"),
    ("google/gemma-2-2b", "gemma2"),
    ("arcee-ai/AFM-4.5B", "arcee"),
    ("arcee-ai/Virtuoso-Small", None),
    ("stabilityai/stablelm-tuned-alpha-7b", "gpt_neox"),
    ("stabilityai/stablelm-2-1_6b", "stablelm"),
]


@pytest.mark.parametrize("name, model_type", GUESSES)
def test_model_types_of_names(name, model_type):
    assert axolotl.guess_model_type(name) == model_type


def test_a_template_of_the_models_family_is_the_tokenizers():
    gemma = FULL | {"base_model": "google/gemma-3-1b-it"}
    values, note = changes_by({"chat_template": "gemma3"}, gemma)
    assert values == {} and "the tokenizer's is used" in note
    for model, name in (
        ("Llama-2-7b", "llama4"),
        ("DeepSeek-R1-Distill-Llama-8B", "deepseek_v3"),
        ("Qwen2.5-7B", "qwen3"),
    ):
        assert import_config(FULL | {"base_model": model, "chat_template": name}).faults
    for name in ("gemma3.x", "metharme", "phi_4"):
        (fault,) = import_config(gemma | {"chat_template": name}).faults
        assert fault.key == "chat_template"
    assert changes_by({"chat_template": "llama3"}, FULL) == ({"data.chat_template": "llama3"}, "")


CONVERSATION = [("system", " Be kind."), ("user", "Why? "), ("assistant", "So.\n"), ("user", "Oh")]
IM = "<|im_start|>"
WRITTEN = {  # what Axolotl's templates of these names write, with <s> and </s>
    "qwen_25": f"{IM}system\n Be kind.<|im_end|>\n{IM}user\nWhy? <|im_end|>\n{IM}assistant\nSo.\n<|im_end|>\n"
    f"{IM}user\nOh<|im_end|>\n{IM}assistant\n",
    "phi_35": "<|system|>\n Be kind.<|end|>\n<|user|>\nWhy? <|end|>\n<|assistant|>\nSo.\n<|end|>\n<|user|>\nOh<|end|>\n"
    "<|assistant|>\n",
    "gemma3": "<s><start_of_turn>user\n Be kind.\n\nWhy?<end_of_turn>\n<start_of_turn>model\nSo.<end_of_turn>\n"
    "<start_of_turn>user\nOh<end_of_turn>\n<start_of_turn>model\n",
}
WRITTEN |= {"falcon_h1": "<s>" + WRITTEN["qwen_25"], "gemma3n": WRITTEN["gemma3"]}


@pytest.mark.parametrize("name", OWN)
def test_a_template_named_after_another_model_is_written_as_axolotl_does(name):
    values, _ = changes_by({"chat_template": name}, FULL)
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}
    (text,) = render(values["data.chat_template"], messages, variables, [(len(messages), True)])
    assert text.replace(BEGIN, "").replace(END, "") == WRITTEN[name]


@pytest.mark.parametrize("name", OWN)
def test_a_template_named_after_another_model_writes_no_other_conversations(name):
    """Axolotl writes an empty system message, but for phi_35, and a header for each message."""
    variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": None}

    def text_of(*roles):
        messages = [{"role": role, "content": "" if role == "system" else "Hi"} for role in roles]
        return render(own_template(name), messages, variables, [(len(messages), roles[-1] == "user")])[0]

    plain = WRITTEN[name].replace(" Be kind.", "", 1)
    start = plain[: plain.index("Why?")] if name != "phi_35" else "<|user|>\n"
    assert text_of("system", "user").startswith(f"{start}Hi")
    for roles in (
        ("assistant",),
        ("system", "assistant", "user"),
        ("user", "user"),
        ("user", "assistant", "assistant"),
    ):
        with pytest.raises(Exception, match="questions and answers have to alternate"):
            text_of(*roles)


def test_several_datasets_are_joined_as_axolotl_concatenates_them():
    """They are joined also if a number of steps is given, and a note says so. One dataset needs neither."""
    several = {"datasets": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}
    job = import_config(FULL | several)
    assert job.values["training.mixing"] == "sizes" and job.values["training.steps"] == 100
    assert [note for note in job.notes if "every record equally often" in note] == [
        "training: the 2 sources are read as one, every record equally often, as Axolotl joins them"
    ]
    assert "training.mixing" not in import_config(FULL).values
    assert any(
        "every record equally often" in note for note in import_config(FULL | {"max_steps": None} | several).notes
    )
    held_out = import_config(FULL | {"test_datasets": several["datasets"]})
    assert "training.mixing" not in held_out.values
    assert any("validation: the 2 sources are read as one" in note for note in held_out.notes)
    texts = {"datasets": None, "pretraining_dataset": [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}]}
    assert any("equal shares of the samples" in note for note in import_config(FULL | texts).notes)
    (fault,) = import_config(FULL | texts | {"pretraining_dataset": ["a.jsonl", "b.jsonl"]}).faults
    assert fault.key == "pretraining_dataset" and "only reads the first" in str(fault)


def test_each_of_the_181_options_is_tested():
    assert [len(part.split()) for part in (ESSENTIAL, OPTIONAL, UNSUPPORTED)] == [127, 29, 25] and len(
        set(OPTIONS)
    ) == 181
    tested = (
        {name for added, *_ in TRANSLATED + ADDED for name in added}
        | {*NOTED, *REFUSED, *ENTRY}
        | {name for name, *_ in WRONG}
    )
    assert set(OPTIONS) <= tested and set(TABLE) <= tested
    mapped = {name for added, *_ in TRANSLATED + ADDED for name in added}
    mapped |= {"lora_target_parameters"}  # of models with experts: test_adapter_targets.py
    only_refused = {name for name, fate in TABLE.items() if not fate.note and not fate.reason} - mapped
    assert not only_refused


def test_flags_override_the_file():
    job = import_config(FULL | {"lora_r": 4, "val_set_size": 0.2}, "--lora_r 8 --val_set_size None --bf16 --seed=7")
    assert job.values["debug.seed"] == 7 and "validation.split" not in job.values
    assert job.values["training.mixed_precision_param"] == "bfloat16"
    assert any("no adapter, so no effect: adapter.rank = 8" in note for note in job.notes)
    for text, expected in {"false": "completion", "False": "completion", "yes": "all", "1": "all"}.items():
        assert import_config(FULL, f"--train_on_inputs {text}").values["data.train_on"] == expected
    assert "true or false" in str(import_config(FULL, "--train_on_inputs maybe").faults[0])
    assert "gradient_accumulation_steps" in str(
        import_config(FULL, "--gradient_accumulation_steps 2", "accelerate launch -m axolotl.cli.train").faults[0]
    )
    assert "not a YAML value" in str(pytest.raises(JobError, import_config, FULL, "--datasets '[1'").value)


HOSTILE = {
    "a: &a [1]\nb: *a": "an alias (*a); write out",
    "a: 1\na: 2": "'a' twice",
    "a: !!python/object/apply:os.getcwd []": "could not determine a constructor",
    "[" * 5000: "not valid YAML",
    "- a": "not a table",
    "1: a": "not a table",
    "a: \x00": "not valid YAML",
    "a: 2026-99-99": "not valid YAML",
    "a" * (yaml_file.LARGEST + 1): "at most 1,048,576 (1.0 MiB) are read",
}


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:20] for text in HOSTILE])
def test_hostile_files_are_refused(text):
    assert HOSTILE[text] in str(pytest.raises(JobError, import_config, text).value)
    assert "cannot be read" in str(pytest.raises(JobError, yaml_file.read, "nowhere.yml").value)


def import_deepspeed(config, flags="", launcher="torchrun --nproc_per_node 2 -m x"):
    with open("ds.json", "w") as file:
        json.dump(config, file)
    return deepspeed.read(parse(split([f"{launcher} ds.json {flags}"])))


STAGES = [
    ({"stage": 0}, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}),
    ({"stage": 1}, {"fsdp_reshard_after_forward": "never"}),
    ({"stage": 2, "overlap_comm": True}, {"fsdp_reshard_after_forward": "never"}),
    ({"stage": 3, "zero_hpz_partition_size": 1}, {"fsdp_reshard_after_forward": "always"}),
    ({"stage": 3, "zero_hpz_partition_size": 2}, {"fsdp_reshard_after_forward": "always"}),
    ({"stage": 3, "zero_hpz_partition_size": 8}, {"fsdp_reshard_after_forward": 8}),
    (
        {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": False},
        {"fsdp_reshard_after_forward": "always", "fsdp_quantized_gather": "int8"},
    ),
    (
        {"stage": 3, "zero_hpz_partition_size": 4, "zero_quantized_gradients": True},
        {"fsdp_reshard_after_forward": 4, "fsdp_quantized_reduce": "int4"},
    ),
    ({"stage": 2, "zero_quantized_gradients": True}, {"fsdp_reshard_after_forward": "never"}),
]


@pytest.mark.parametrize("option, value", [("torch_compile", False), ("torch_compile_backend", "eager")])
def test_compile_of_a_deepspeed_file_may_not_contradict_the_job(option, value):
    with open("z.json", "w") as file:
        json.dump({"compile": {"disable": False}}, file)
    (fault,) = import_config(FULL | {"deepspeed": "z.json", option: value}).faults
    assert fault.key == "compile" and "as in the job" in fault.allowed


@pytest.mark.parametrize("is_off", [False, True])
def test_compile_of_a_deepspeed_file(is_off):
    with open("z.json", "w") as file:
        json.dump({"compile": {"disable": is_off, "backend": "inductor"}}, file)
    values, _ = changes_by({"deepspeed": "z.json"}, FULL | {"deepspeed": "z2.json"})
    expected = {"compile.enable": True, "compile.backend": "inductor"}
    assert {key: value for key, value in values.items() if key.startswith("compile")} == ({} if is_off else expected)


@pytest.mark.parametrize("table, expected", STAGES)
def test_stages_of_zero(table, expected):
    job = import_deepspeed({"zero_optimization": table})
    assert job.faults == [] and job.values == {f"parallelism.{key}": value for key, value in expected.items()}


def test_the_rest_of_a_deepspeed_file():
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
    config = {"zero_optimization": offload, "bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}
    config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": "auto"}}}
    job = import_deepspeed(config | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}})
    assert job.faults == [] and "kept on the host together" in " ".join(job.notes)
    expected = {"training.enable_cpu_offload": True, "training.mixed_precision_param": "bfloat16"}
    expected |= {"training.local_batch_size": 2, "training.global_batch_size": 16, "training.max_norm": 0.5}
    expected |= {"optimizer.lr": 1e-3, "optimizer.beta2": 0.95, "optimizer.name": "AdamW"}
    assert {key: job.values[key] for key in expected} == expected and "optimizer.eps" not in job.values


DEEPSPEED_WRONG = [
    ({"zero_optimization": {"stage": 4}}, "0, 1, 2 or 3"),
    ({"zero_optimization": 2}, "a table with its stage"),
    ({"zero_optimization": {"stge": 2}}, "did you mean stage?"),
    ({"zero_optimisation": {}}, "did you mean zero_optimization?"),
    ({"compile": {"mode": "fast"}}, "a table with disable and backend"),
    ({"compile": True}, "a table with disable and backend"),
    ({"compile": {"disable": "false"}}, "disable as true or false"),
    ({"compile": {"backend": 3}}, "backend as text"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offloading to disks is not supported"),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "8"}}, "the number of ranks of a machine"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": 1}}, "true or false"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}}, "set adapter.kind"),
    ({"fp16": {"enabled": True}}, "float16 overflows"),
    ({"gradient_accumulation_steps": 4}, "it needs the batch of a rank"),
    ({"gradient_accumulation_steps": "many"}, "a whole number, or auto"),
    ({"gradient_clipping": "hard"}, "a finite number, or auto"),
    ({"gradient_clipping": float("inf")}, "a finite number, or auto"),
    ({"train_batch_size": float("inf")}, "a finite number, or auto"),
    ({"optimizer": {"type": "Lamb"}}, "AdamW or Adam"),
    ({"optimizer": {"type": "AdamW", "params": {"momentum": 1}}}, "auto"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}, "[lr_scheduler]"),
]


@pytest.mark.parametrize("config, message", DEEPSPEED_WRONG, ids=str)
def test_invalid_deepspeed_files_are_refused(config, message):
    faults = import_deepspeed(config).faults
    assert message in str(faults[0]) and str(faults[0]).startswith("ds.json: ")


def test_a_deepspeed_file_may_not_contradict_the_job():
    contradictions = {"train_batch_size": 64, "gradient_clipping": 3.0, "bf16": {"enabled": True}}
    contradictions |= {"gradient_accumulation_steps": 3, "optimizer": {"type": "AdamW", "params": {"lr": 1}}}
    for key, value in contradictions.items():
        with open("other.json", "w") as file:
            json.dump({key: value}, file)
        job = import_config(FULL | {"deepspeed": "other.json", "max_grad_norm": 1.0, "bf16": False})
        assert len(job.faults) == 1 and job.faults[0].key.startswith(key) and job.faults[0].file == "other.json"
    adam = FULL | {"deepspeed": "other.json", "optimizer": "sgd"}
    assert "SGD, as in the job" in str(import_config(adam).faults[0])
    assert "no flags after a DeepSpeed file" in str(import_deepspeed({}, "--lr 1").faults[0])
    assert "--world-size N" in str(import_deepspeed({}, launcher="accelerate launch -m x").faults[0])


BASE = """
base_model: mistralai/Mistral-7B-v0.1
load_in_4bit: auto
adapter: qlora
lora_r: 8
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 192
sample_packing: true
chat_template: chatml
train_on_inputs: false
learning_rate: 0.00003
lr_scheduler: cosine
warmup_ratio: 0.1
weight_decay: 0.01
adam_beta2: 0.99
num_epochs: 10
optimizer: adamw_torch_fused
save_total_limit: 1
bf16: auto
"""
SCRIPT = """accelerate launch --mixed_precision bf16 --use_deepspeed train.py config-base.yaml \\
    --deepspeed ./z2.json --flash_attention True --base_model base --train_data_uri ./rows.jsonl --val_data_uri None \\
    --val_set_size 0.1 --max_steps 10 --num_epochs 3 --micro_batch_size 1 --gradient_accumulation_steps 4 \\
    --learning_rate 0.00001 --output_dir run --train_on_inputs False --logging_steps 1 --save_strategy steps \\
    --save_steps 0.05 --evaluation_strategy steps --eval_steps 0.05 --adapter qlora --lora_target_linear True \\
    --lora_r 32 --lora_alpha 64 --gradient_checkpointing True --mlfoundry_enable_reporting True \\
    --mlfoundry_ml_repo repo --mlfoundry_run_name my-run --mlfoundry_checkpoint_artifact_name name \\
    --mlfoundry_log_checkpoints True --resume_from_checkpoint False --cleanup_output_dir_on_start True"""


def test_the_notes_script_is_a_job_that_can_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    base(tmp_path / "base")
    capsys.readouterr()  # discards transformers' progress output
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "config-base.yaml").write_text(BASE)
    (tmp_path / "z2.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    assert cli.main(["import", "--world-size", "2", SCRIPT]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("# Translated from a command line of train.py (axolotl).")
    (tmp_path / "job.toml").write_text(out)
    config = load(["--job.config_file", str(tmp_path / "job.toml")])
    assert cadence_of(config, config.training.steps) == (1, 1, 1) and config.checkpoint.interval == 0.05
    assert (config.adapter.kind, config.adapter.rank, config.adapter.alpha) == ("qlora", 32, 64.0)
    assert (config.training.steps, config.training.global_batch_size, config.optimizer.lr) == (10, 8, 1e-5)
    assert (config.lr_scheduler.warmup_steps, config.validation.split) == (0.1, 0.1)
    assert config.data.chat_template == "chatml"
    assert config.parallelism.fsdp_reshard_after_forward == "never" and config.checkpoint.keep_latest_k == 2
    # without a launcher a file is for all GPUs; a DeepSpeed file alone gives an incomplete job
    rest = ["--base_model", "base", "--train_data_uri", "rows.jsonl", "--lora_alpha", "16"]
    assert cli.main(["import", "config-base.yaml", *rest]) == 0
    assert capsys.readouterr().out.startswith("# Translated from config-base.yaml (axolotl).")
    assert cli.main(["import", "--world-size", "2", "z2.json"]) == 0
    assert 'fsdp_reshard_after_forward = "never"' in capsys.readouterr().out
    assert cli.main(["import", "z2.json", "--world-size", "1"]) == 0
    assert "nothing is sharded over one rank" in capsys.readouterr().out
    assert cli.main(["import", "z2.json"]) == 0
    assert 'fsdp_reshard_after_forward = "never"' in capsys.readouterr().out
