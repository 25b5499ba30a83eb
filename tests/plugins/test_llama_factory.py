"""`torchtitan import` of LLaMA-Factory's files: every option, its defaults, its data and templates, and mutations."""

import itertools
import json
import random
import re

import numpy as np
import pytest
import yaml

from tests.support.importing import difference
from torchtitan import cli
from torchtitan.config.layers import layer_of
from torchtitan.config.manager import load
from torchtitan.core.errors import JobError
from torchtitan.datasets.conversations import chat_spans
from torchtitan.datasets.encoding import encode
from torchtitan.datasets.record_format import RecordReader
from torchtitan.datasets.sources import Chat, Document
from torchtitan.datasets.tokenizer import build_tokenizer
from torchtitan.lr_schedules import TRANSFORMERS
from torchtitan.plugins.importers import llama_factory, parse, split
from torchtitan.plugins.importers.llama_factory_options import OPTIONS
from torchtitan.plugins.importers.llama_factory_templates import TEMPLATES, chat_template
from torchtitan.rules import check

FULL = {
    "model_name_or_path": "llama",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "dataset": "plain",
    "template": "llama3",
    "bf16": True,
}
LORA = FULL | {"finetuning_type": "lora"}
PAIRS = LORA | {"stage": "dpo", "dataset": "pairs"}
TEXTS = {key: value for key, value in FULL.items() if key != "template"} | {"stage": "pt", "dataset": "texts"}
HELD_OUT = FULL | {"val_size": 0.1}
INFO = {
    "plain": {"file_name": "plain.json"},
    "other": {"file_name": "other.jsonl", "columns": {"prompt": "q", "response": "a", "system": "s", "history": "h"}},
    "chats": {"file_name": "chats.json", "formatting": "sharegpt"},
    "messages": {
        "file_name": "messages.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "tools": "tools"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "renamed": {"file_name": "r.json", "formatting": "sharegpt", "tags": {"role_tag": "who", "content_tag": "text"}},
    "hub": {"hf_hub_url": "owner/set", "ms_hub_url": "o/s", "subset": "en"},
    "pairs": {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "questions": {
        "file_name": "questions.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "chosen": "good", "rejected": "rejected"},
    },
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "content"}},
    "images": {"file_name": "i.json", "columns": {"prompt": "q", "response": "a", "images": "i"}},
    "kto": {"file_name": "k.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "label"}},
    "lines": {"file_name": "lines.txt"},
    "script": {"script_url": "a.py"},
    "modelscope": {"ms_hub_url": "o/s"},
    "split": {"hf_hub_url": "o/s", "split": "dev"},
    "held out": {"hf_hub_url": "o/s", "split": "test"},
    "sampled": {"file_name": "a.json", "num_samples": 5},
    "openai": {"file_name": "a.json", "formatting": "openai"},
    "roles": {"file_name": "a.json", "formatting": "sharegpt", "tags": {"user_tag": "Customer"}},
    "unknown": {"file_name": "a.json", "colums": {}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("factory")
    for name, config in {
        "llama": {"model_type": "llama", "torch_dtype": "bfloat16"},
        "half": {"model_type": "llama", "torch_dtype": "float16"},
        "experts": {"model_type": "qwen3_moe"},
        "gpt2": {"model_type": "gpt2"},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=2048)
    sizes |= dict(rms_norm_eps=1e-5, max_position_embeddings=4096, num_key_value_heads=2)
    (folder / "small").mkdir()
    (folder / "small/config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    (folder / "data").mkdir()
    (folder / "data/dataset_info.json").write_text(json.dumps(INFO))
    (folder / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def import_table(table, line="NPROC_PER_NODE=2 llamafactory-cli train job.yaml"):
    with open("job.yaml", "w") as file:
        yaml.safe_dump(table, file)
    return llama_factory.read(parse(split([line])))


def source_of(name, **options):
    (source,) = import_table(FULL | {"dataset": name} | options).values["training.sources"]
    return source


def test_what_a_file_means_that_lacks_everything():
    """The defaults are those of LLaMA-Factory and of transformers."""
    job = import_table({key: FULL[key] for key in ("model_name_or_path", "do_train", "dataset", "template")})
    assert job.faults == []
    assert job.values == {
        "adapter.alpha": 16.0,
        "adapter.dropout": 0.0,
        "adapter.kind": "lora",
        "adapter.last_save_in_peft": True,
        "adapter.rank": 8,
        "adapter.save": "alone",
        "adapter.target": ["all-linear"],
        "activation_checkpoint.mode": "full",
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": "llama",
        "checkpoint.interval": 500,
        "checkpoint.keep_latest_k": 0,
        "data.chat_template": chat_template(TEMPLATES["llama3"]),
        "data.packing": "off",
        "data.too_long": "drop",
        "data.train_on": "completion",
        "debug.seed": 42,
        "job.dump_folder": "trainer_output",
        "lr_scheduler.convention": TRANSFORMERS,
        "lr_scheduler.decay_type": "linear",
        "lr_scheduler.min_lr_factor": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "metrics.log_freq": 500,
        "model.flavor": "from_hf",
        "model.hf_folder": "llama",
        "model.name": "llama3",
        "model.tokenizer_path": "llama",
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.999,
        "optimizer.decay_norms_and_biases": False,
        "optimizer.eps": 1e-8,
        "optimizer.lr": 5e-5,
        "optimizer.name": "AdamW",
        "optimizer.weight_decay": 0.0,
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 1,
        "task.kind": "sft",
        "training.dtype": "float32",
        "training.epochs": 3,
        "training.global_batch_size": 16,
        "training.local_batch_size": 8,
        "training.max_norm": 1.0,
        "training.mixed_precision_param": "bfloat16",
        "training.seq_len": 2048,
        "data.max_tokens": 2048,
        "training.sources": [
            {
                "dataset": "text",
                "dataset_path": "data/plain.json",
                "format": "alpaca_chat",
                "fields": {"history": "", "system": "", "tools": ""},
            }
        ],
    }
    notes = " ".join(job.notes)
    assert "without bf16 frozen layers compute in the type of their weights" in notes
    assert "not the same: records of more than cutoff_len tokens are left out" in notes


RATE = {"learning_rate": 1e-3}
TRANSLATED = [  # added options, the file they are added to, and the options of the job that change
    ({"model_name_or_path": "Qwen/Qwen3-4B"}, FULL, {"model.name": "qwen3", "model.hf_folder": "Qwen/Qwen3-4B"}),
    (
        {"finetuning_type": "freeze", "model_name_or_path": "small"},
        FULL,
        {"training.unfrozen": ["layers.2.*", "layers.3.*"]},
    ),
    (
        {"freeze_trainable_layers": -1, "freeze_extra_modules": "lm_head, norm"},
        FULL | {"finetuning_type": "freeze", "model_name_or_path": "small"},
        {"training.unfrozen": ["layers.0.*", "output.weight", "norm.weight"]},
    ),
    (
        {"use_llama_pro": True},
        FULL | {"finetuning_type": "freeze", "model_name_or_path": "small", "freeze_trainable_modules": "all"},
        {"training.unfrozen": ["layers.1.*", "layers.3.*"]},
    ),
    ({"use_llama_pro": True}, LORA | {"model_name_or_path": "small"}, {"adapter.layers": [1, 3]}),
    ({"pure_bf16": True}, FULL, {"training.dtype": "bfloat16"}),
    ({"bf16": False}, FULL, {"training.mixed_precision_param": "float32"}),
    ({"train_from_scratch": True}, FULL, {"checkpoint.initial_load_path": None, "checkpoint.initial_load_in_hf": None}),
    ({"disable_gradient_checkpointing": True}, FULL, {"activation_checkpoint.mode": "none"}),
    ({"shift_attn": True}, FULL | {"cutoff_len": 64}, {"model.s2_group_size": 16}),
    (
        {"moe_aux_loss_coef": 0.01},
        FULL | {"model_name_or_path": "experts"},
        {"model.overrides": {"aux_loss_weight": 0.01, "bias_rate": 0.0}},
    ),
    ({"quantization_bit": 4, "quantization_method": "bnb"}, LORA, {"adapter.kind": "qlora"}),
    ({"quantization_bit": 8}, LORA, {"adapter.kind": "lora_int8"}),
    ({"quantization_type": "nf4", "double_quantization": True}, LORA, {}),
    ({"use_dora": True}, LORA, {"adapter.kind": "dora", "adapter.last_save_in_peft": None}),
    ({"lora_rank": 16}, LORA, {"adapter.rank": 16, "adapter.alpha": 32.0}),
    ({"lora_alpha": 8}, LORA, {"adapter.alpha": 8.0}),
    ({"lora_dropout": 0.1}, LORA, {"adapter.dropout": 0.1}),
    ({"lora_target": "q_proj, v_proj"}, LORA, {"adapter.target": ["layers.*.attention.wq", "layers.*.attention.wv"]}),
    ({"use_rslora": True}, LORA, {"adapter.rslora": True}),
    ({"loraplus_lr_ratio": 16}, LORA, {"adapter.lr_ratio_b": 16.0}),
    ({"adapter_name_or_path": "a"}, LORA, {"adapter.initial_path": "a"}),
    ({"adapter_name_or_path": "a"}, PAIRS, {"adapter.initial_path": "a", "dpo.reference": "llama"}),
    (
        {"additional_target": "embed_tokens,lm_head"},
        LORA,
        {"adapter.train_fully": ["tok_embeddings.weight", "output.weight"], "adapter.last_save_in_peft": None},
    ),
    ({"cutoff_len": 512}, FULL, {"training.seq_len": 512, "data.max_tokens": 512}),
    ({"train_on_prompt": True}, FULL, {"data.train_on": "all"}),
    ({"mask_history": True}, FULL, {"data.train_on": "last_turn"}),
    ({"neat_packing": True}, FULL, {"data.packing": "best_fit", "data.packing_window": 1000}),
    ({"preprocessing_batch_size": 50}, FULL | {"neat_packing": True}, {"data.packing_window": 50}),
    ({"packing": False}, FULL, {}),
    ({"packing": True}, TEXTS, {"training.seq_len": 2047}),
    (
        {"packing": False},
        TEXTS,
        {
            "task.kind": "sft",
            "data.packing": "off",
            "data.too_long": "truncate",
            "data.max_tokens": 2048,
            "data.train_on": "all",
            "training.sources": [
                {
                    "dataset": "text",
                    "dataset_path": "data/texts.jsonl",
                    "format": "completion",
                    "fields": {"text": "content"},
                }
            ],
        },
    ),
    ({"default_system": "Be kind."}, FULL, {"data.default_system": "Be kind."}),
    ({"preprocessing_num_workers": 4}, FULL, {"data.num_proc": 4}),
    ({"tokenized_path": "nowhere"}, FULL, {"data.cache_dir": "nowhere"}),
    ({"template": "qwen3"}, FULL, {"data.chat_template": chat_template(TEMPLATES["qwen3"])}),
    (
        {"enable_thinking": False},
        FULL | {"template": "qwen3"},
        {"data.chat_template": chat_template(TEMPLATES["qwen3"], False)},
    ),
    (
        {"preserve_thinking": True},
        FULL | {"template": "qwen3", "mask_history": True},
        {"data.chat_template": chat_template(TEMPLATES["qwen3"])},
    ),
    (
        {"val_size": 0.1},
        FULL,
        {
            "validation.enable": True,
            "validation.split": 0.1,
            "validation.samples": 0,
            "validation.local_batch_size": 8,
            "validation.freq": "epoch",
        },
    ),
    ({"val_size": 20}, HELD_OUT, {"validation.split": 20.0}),
    ({"disable_shuffling": True}, FULL, {"training.shuffle": False}),
    ({"train_sampling_strategy": "sequential"}, FULL, {"training.shuffle": False}),
    ({"train_sampling_strategy": "group_by_length"}, FULL, {"data.group_by_length": True}),
    ({"group_by_length": True}, FULL, {"data.group_by_length": True}),
    ({"early_stopping_steps": 3}, HELD_OUT, {"early_stop.patience": 3}),
    ({"pref_beta": 0.5}, PAIRS, {"dpo.beta": 0.5}),
    ({"pref_loss": "ipo"}, PAIRS, {"task.kind": "ipo"}),
    ({"pref_loss": "orpo"}, PAIRS, {"task.kind": "orpo"}),
    ({"dpo_label_smoothing": 0.1}, PAIRS, {"dpo.label_smoothing": 0.1}),
    ({"ref_model": "a"}, PAIRS, {"dpo.reference": "a"}),
    (
        {"stage": "dpo", "dataset": "pairs", "model_name_or_path": "gpt2"},
        FULL,
        {"model.overrides": {"dropout": 0.0, "attention_dropout": 0.0}},
    ),
    ({"use_muon": True}, FULL, {"optimizer.name": "Muon", "optimizer.decay_norms_and_biases": True}),
    (
        {
            "use_galore": True,
            "galore_rank": 4,
            "galore_update_interval": 9,
            "galore_scale": 1.5,
            "galore_proj_type": "left",
            "galore_target": "all",
        },
        FULL,
        {
            "optimizer.name": "GaLore",
            "optimizer.options": {
                "rank": 4,
                "update_gap": 9,
                "scale": 1.5,
                "side": "left",
                "inner": "adamw",
                "formula": "galore_torch",
            },
        },
    ),
    (
        {"galore_layerwise": True},
        FULL | {"use_galore": True},
        {"optimizer.early_step_in_backward": True, "training.max_norm": 0.0},
    ),
    ({"output_dir": "out"}, FULL, {"job.dump_folder": "out"}),
    ({"run_name": "one"}, FULL, {"job.description": "one"}),
    ({"per_device_train_batch_size": 3}, FULL, {"training.local_batch_size": 3, "training.global_batch_size": 6}),
    ({"per_device_eval_batch_size": 3}, HELD_OUT, {"validation.local_batch_size": 3}),
    ({"gradient_accumulation_steps": 4}, FULL, {"training.global_batch_size": 64}),
    ({"num_train_epochs": 1.0}, FULL, {"training.epochs": 1}),
    ({"max_steps": 50}, FULL, {"training.epochs": None, "training.steps": 50}),
    (RATE, FULL, {"optimizer.lr": 1e-3}),
    ({"lr_scheduler_type": "cosine"}, FULL, {"lr_scheduler.decay_type": "cosine"}),
    ({"lr_scheduler_type": "constant"}, FULL, {"lr_scheduler.decay_type": "constant"}),
    ({"lr_scheduler_type": "polynomial"}, FULL, {"lr_scheduler.min_lr_factor": 1e-7 / 5e-5}),
    (
        {"lr_scheduler_kwargs": {"num_cycles": 3}},
        FULL | {"lr_scheduler_type": "cosine_with_restarts"},
        {"lr_scheduler.num_cycles": 3},
    ),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
        FULL | RATE,
        {"lr_scheduler.min_lr_factor": pytest.approx(0.1), "lr_scheduler.decay_type": "cosine"},
    ),
    ({"warmup_steps": 7}, FULL, {"lr_scheduler.warmup_steps": 7}),
    ({"warmup_ratio": 0.1}, FULL, {"lr_scheduler.warmup_steps": 0.1}),
    ({"warmup_steps": 0.1}, FULL, {"lr_scheduler.warmup_steps": 0.1}),
    ({"optim": "adamw_8bit"}, FULL, {"optimizer.name": "AdamW8bit"}),
    ({"optim": "adamw_torch_fused"}, FULL, {}),
    ({"weight_decay": 0.1}, FULL, {"optimizer.weight_decay": 0.1}),
    (
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        FULL,
        {"optimizer.beta1": 0.8, "optimizer.beta2": 0.95, "optimizer.eps": 1e-6},
    ),
    ({"max_grad_norm": 0.3}, FULL, {"training.max_norm": 0.3}),
    ({"neftune_noise_alpha": 5}, FULL, {"training.neftune_alpha": 5.0}),
    (
        {"torch_compile": True, "torch_compile_backend": "eager"},
        FULL,
        {"compile.enable": True, "compile.backend": "eager"},
    ),
    ({"logging_steps": 10}, FULL, {"metrics.log_freq": 10}),
    ({"logging_strategy": "epoch"}, FULL, {"metrics.log_freq": "epoch"}),
    ({"save_steps": 0.1}, FULL, {"checkpoint.interval": 0.1}),
    ({"save_strategy": "epoch"}, FULL, {"checkpoint.interval": "epoch"}),
    ({"save_strategy": "no"}, FULL | {"max_steps": 9}, {"checkpoint.interval": 9}),
    ({"save_total_limit": 3}, FULL, {"checkpoint.keep_latest_k": 3}),
    ({"save_total_limit": 1}, FULL, {"checkpoint.keep_latest_k": 2}),
    ({"eval_strategy": "steps", "eval_steps": 20}, HELD_OUT, {"validation.freq": 20}),
    ({"evaluation_strategy": "steps"}, HELD_OUT, {"validation.freq": 500}),
    ({"eval_strategy": "epoch"}, HELD_OUT, {}),
    (
        {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False},
        HELD_OUT,
        {"checkpoint.best_metric": "validation_loss", "checkpoint.export_best": True},
    ),
    ({"report_to": "wandb"}, FULL, {"metrics.trackers": ["wandb"]}),
    ({"report_to": ["tensorboard", "mlflow"]}, FULL, {"metrics.trackers": ["tensorboard", "mlflow"]}),
    ({"report_to": "none"}, FULL, {}),
    ({"seed": 7}, FULL, {"debug.seed": 7}),
    (
        {
            "dataloader_num_workers": 4,
            "dataloader_prefetch_factor": 2,
            "dataloader_pin_memory": False,
            "dataloader_persistent_workers": True,
        },
        FULL,
        {
            "training.dataloader.num_workers": 4,
            "training.dataloader.prefetch_factor": 2,
            "training.dataloader.pin_memory": False,
            "training.dataloader.persistent_workers": True,
        },
    ),
    ({"ddp_timeout": 180000000}, FULL, {"comm.train_timeout_seconds": 180000000}),
    (
        {"deepspeed": "z3.json"},
        FULL,
        {
            "parallelism.fsdp_reshard_after_forward": "always",
            "parallelism.data_parallel_replicate_degree": None,
            "parallelism.data_parallel_shard_degree": None,
        },
    ),
    (
        {"fsdp": "full_shard auto_wrap"},
        FULL,
        {
            "parallelism.fsdp_reshard_after_forward": "always",
            "parallelism.data_parallel_replicate_degree": None,
            "parallelism.data_parallel_shard_degree": None,
        },
    ),
    (
        {"fsdp_config": {"reshard_after_forward": False, "offload_params": True}},
        FULL | {"fsdp": ["full_shard"]},
        {"parallelism.fsdp_reshard_after_forward": "never", "training.enable_cpu_offload": True},
    ),
    ({"fp16": True}, FULL | {"bf16": False}, {"training.mixed_precision_param": "bfloat16"}),
    ({"average_tokens_across_devices": True, "ignore_pad_token_for_loss": True, "save_safetensors": True}, FULL, {}),
    (
        {
            "mix_strategy": "concat",
            "label_smoothing_factor": 0.0,
            "fp16": False,
            "ld_alpha": 1.0,
            "resize_vocab": False,
        },
        FULL,
        {},
    ),
    ({"do_eval": True, "overwrite_output_dir": False, "resume_from_checkpoint": None}, HELD_OUT, {}),
    (
        {"max_samples": 100},
        FULL,
        {
            "training.sources": [
                {
                    "dataset": "text",
                    "dataset_path": "data/plain.json",
                    "format": "alpaca_chat",
                    "fields": {"history": "", "system": "", "tools": ""},
                    "slice": "[:100]",
                }
            ]
        },
    ),
    ({"dataset_dir": "data"}, FULL, {}),
    ({"gradient_checkpointing": True}, FULL, {}),
    ({"activation_checkpointing": True}, FULL, {}),
]


@pytest.mark.parametrize("added, before, expected", TRANSLATED, ids=lambda value: str(value)[:60])
def test_translated(added, before, expected):
    changed, _ = difference(import_table(before), import_table(before | added))
    assert {key: changed.get(key) for key in expected} == expected
    assert changed.keys() - expected.keys() <= (
        {"training.unfrozen"}
        if "freeze" in str(added)
        else changed.keys()
        if "stage" in added or len(added) > 2
        else set()
    ) | {"model.name", "model.hf_folder", "model.tokenizer_path", "checkpoint.initial_load_path", "training.dtype"}


@pytest.mark.parametrize(
    "added",
    [
        {"fsdp_config": {1: 2}},
        {"learning_rate": 0, "lr_scheduler_type": "polynomial"},
        {
            "learning_rate": 0,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1e-5},
        },
        {"dataset_dir": {"plain": {"file_name": "a", 1: 2}}},
        {"dataset_dir": {"plain": {"file_name": "a", "columns": {1: 2}}}},
        {"dataset_dir": {"plain": {"file_name": "a", "formatting": "sharegpt", "tags": {1: 2}}}},
    ],
    ids=lambda value: str(value)[-50:],
)
def test_odd_values_are_noted_or_refused(added):
    job = import_table(FULL | added)
    assert faults_of(job) or any("fsdp_config" in note for note in job.notes)


def test_stacks_of_experts_have_no_adapter_as_peft_gives_them_none():
    """They are no linear layers in transformers."""
    job = import_table(LORA | {"model_name_or_path": "experts"})
    assert job.values["adapter.target"] == [f"layers.*.attention.w{name}" for name in "qkvo"]


@pytest.mark.parametrize(
    "template, token", [("llama3", "<|end_of_text|>"), ("qwen3", "<|im_end|>"), ("yi", ""), ("mistral", ""), (None, "")]
)
def test_texts_end_with_another_token_if_the_template_replaces_it(template, token):
    notes = import_table(TEXTS | {"template": template}).notes
    expected = [f"documents end with the tokenizer's end token; with this template there with {token}"] if token else []
    assert [note for note in notes if note.startswith("documents end")] == expected


@pytest.mark.parametrize("name, value", [("dataset", ["plain", "chats"]), ("lora_target", ["q_proj", "v_proj"])])
def test_names_may_be_a_list(name, value):
    listed, joined = import_table(LORA | {name: value}), import_table(LORA | {name: ",".join(value)})
    assert listed.faults == [] and listed.values == joined.values != import_table(LORA).values


@pytest.mark.parametrize("preserves", [True, False])
def test_the_last_answer_alone_of_a_pair_gets_an_empty_thought(preserves):
    job = import_table(PAIRS | {"template": "qwen3", "preserve_thinking": preserves})
    assert job.values["data.chat_template"] == chat_template(TEMPLATES["qwen3"], thinks_at_the_end=True)
    assert any("leaves their thoughts out" in note for note in job.notes) is not preserves


def test_unknown_targets_are_noted():
    job = import_table(LORA | {"lora_target": "q_proj,router"})
    assert job.faults == [] and "lora_target: no module of the model has the name router" in job.notes


def test_pairs_are_learned_without_the_loss_that_balances_experts():
    job = import_table(PAIRS | {"model_name_or_path": "experts", "moe_aux_loss_coef": 0.1})
    assert job.values["model.overrides"] == {"aux_loss_weight": 0.0, "bias_rate": 0.0}
    assert "no effect with stage: dpo: moe_aux_loss_coef" in job.notes


REFUSED = [  # added options, the file they are added to, the key and the text of a fault
    ({"stage": "kto"}, FULL, "stage", "reward models, PPO and KTO are not supported"),
    ({"finetuning_type": "oft"}, FULL, "finetuning_type", "other methods are not supported"),
    ({"do_train": False}, FULL, "do_train", "a job trains"),
    ({"do_predict": True}, FULL, "do_predict", "torchtitan generate"),
    ({"model_name_or_path": "other/Model"}, FULL, "model_name_or_path", "no other family is here"),
    ({"model_name_or_path": None}, FULL, "model_name_or_path", "the program needs it too"),
    ({"dataset": None}, FULL, "dataset", "LLaMA-Factory needs it too"),
    ({"dataset": "plian"}, FULL, "dataset", "did you mean plain?"),
    ({"dataset_dir": "nowhere"}, FULL, "dataset_dir", "a folder with dataset_info.json"),
    ({"dataset_dir": "REMOTE:owner/set"}, FULL, "dataset_dir", "download it to a folder of that name here"),
    ({"dataset": "pairs"}, FULL, "ranking", "true with stage: dpo, and false otherwise"),
    ({"dataset": "images"}, FULL, "columns.images", "images, sound and KTO are not supported"),
    ({"dataset": "kto"}, FULL, "columns.kto_tag", "images, sound and KTO are not supported"),
    ({"dataset": "lines"}, FULL, "file_name", "write its lines as records"),
    ({"dataset": "script"}, FULL, "script_url", "never executed"),
    ({"dataset": "modelscope"}, FULL, "file_name", "other hubs are not read"),
    ({"dataset": "split"}, FULL, "split", "write the split into a file"),
    ({"dataset": "sampled"}, FULL, "num_samples", "max_samples takes the first ones"),
    ({"dataset": "openai"}, FULL, "formatting", "adds words to the system message"),
    ({"dataset": "roles"}, FULL, "tags.user_tag", "rename the roles in the records"),
    ({"dataset": "unknown"}, FULL, "colums", "did you mean columns?"),
    ({"dataset": "plain"}, TEXTS, "columns", "prompt alone with stage: pt"),
    ({"template": "breeze"}, FULL, "template", "leave it out for the tokenizer's own"),
    ({"template": "lama3"}, FULL, "template", "did you mean llama3?"),
    ({"packing": True}, FULL, "packing", "neat_packing: true keeps them apart"),
    ({"neat_packing": True}, PAIRS, "neat_packing", "never packed"),
    ({"mask_history": True, "train_on_prompt": True}, FULL, "mask_history", "LLaMA-Factory refuses it too"),
    ({"val_size": 0.1, "eval_dataset": "other"}, FULL, "val_size", "LLaMA-Factory refuses it too"),
    ({"val_size": 20, "dataset": "plain,other"}, FULL, "val_size", "give a fraction"),
    ({"val_size": 0.1}, TEXTS, "val_size", "name held-out texts by eval_dataset"),
    ({"tokenized_path": "data"}, FULL, "tokenized_path", "its samples are not read"),
    ({"enable_thinking": "maybe"}, FULL, "enable_thinking", "true, false or null"),
    ({"bf16": False, "model_name_or_path": "half"}, LORA, "bf16", "float16 overflows"),
    ({"quantization_bit": 4}, FULL, "quantization_bit", "nothing without finetuning_type: lora"),
    ({"quantization_bit": 3}, LORA, "quantization_bit", "other widths are not supported"),
    ({"quantization_method": "hqq"}, LORA, "quantization_method", "as bitsandbytes does"),
    ({"quantization_type": "fp4"}, LORA, "quantization_type", "the only format of 4 bits"),
    ({"double_quantization": False}, LORA, "double_quantization", "scales are always in 8 bits"),
    ({"use_dora": True, "quantization_bit": 4}, LORA, "use_dora", "the base of DoRA is not quantized"),
    ({"adapter_name_or_path": "a,b"}, LORA, "adapter_name_or_path", "merge the others before"),
    ({"lora_target": "router"}, LORA, "lora_target", "some of model.layers.*.self_attn.q_proj"),
    ({"lora_target": "gate_proj"}, LORA | {"model_name_or_path": "experts"}, "lora_target", "peft has one stack of"),
    ({"additional_target": "router"}, LORA, "additional_target", "some of embed_tokens"),
    ({"pissa_init": True}, LORA, "pissa_init", "other initial values of A and B"),
    ({"create_new_adapter": True}, LORA, "create_new_adapter", "are not merged"),
    ({"use_llama_pro": True}, FULL, "use_llama_pro", "LLaMA-Factory refuses it too"),
    (
        {"freeze_trainable_layers": 3, "use_llama_pro": True},
        LORA | {"model_name_or_path": "small"},
        "freeze_trainable_layers",
        "a divisor of the 4 layers",
    ),
    ({"moe_aux_loss_coef": 0.1}, FULL, "moe_aux_loss_coef", "a model without experts"),
    ({"shift_attn": True, "cutoff_len": 12}, FULL, "cutoff_len", "a multiple of 8 with shift_attn"),
    ({"use_galore": True}, LORA, "use_galore", "LLaMA-Factory refuses it too"),
    ({"use_galore": True, "optim": "lion_pytorch"}, FULL, "optim", "with use_galore"),
    ({"use_galore": True, "use_muon": True}, FULL, "use_muon", "choose one of the two"),
    (
        {"use_galore": True, "galore_layerwise": True, "gradient_accumulation_steps": 2},
        FULL,
        "gradient_accumulation_steps",
        "1 with galore_layerwise",
    ),
    ({"galore_target": "q_proj"}, FULL, "galore_target", "set targets in optimizer.options"),
    ({"use_apollo": True}, FULL, "use_apollo", "APOLLO here scales otherwise"),
    ({"use_badam": True}, FULL, "use_badam", "BAdam is not supported"),
    ({"pref_loss": "simpo"}, PAIRS, "pref_loss", "other losses are not supported"),
    ({"pref_ftx": 0.5}, PAIRS, "pref_ftx", "a mixture of losses"),
    ({"dpo_label_smoothing": 0.1, "pref_loss": "ipo"}, PAIRS, "dpo_label_smoothing", "0 with another pref_loss"),
    ({"dataset": "plain"}, PAIRS, "ranking", "true with stage: dpo"),
    ({"early_stopping_steps": 3}, FULL, "early_stopping_steps", "nothing without held-out data"),
    ({"num_train_epochs": 0.5}, FULL, "num_train_epochs", "set max_steps"),
    ({"warmup_steps": 2.5}, FULL, "warmup_steps", "a whole number, or a share"),
    ({"warmup_ratio": 2}, FULL, "warmup_ratio", "at most 1"),
    ({"warmup_ratio": 1}, FULL, "warmup_ratio", "a share below 1"),
    ({"lr_scheduler_type": "inverse_sqrt"}, FULL, "lr_scheduler_type", "write it yourself"),
    ({"lr_scheduler_kwargs": {"a": 1}}, FULL, "lr_scheduler_kwargs", "nothing else with linear"),
    ({"lr_scheduler_type": "cosine_with_min_lr"}, FULL, "lr_scheduler_kwargs", "one of min_lr and min_lr_rate"),
    ({"optim": "adamw_apex"}, FULL, "optim", "others are not supported"),
    ({"optim": "sgd", "adam_beta1": 0.8}, FULL, "adam_beta1", "it belongs to Adam"),
    ({"save_strategy": "best"}, FULL, "save_strategy", "checkpoint.best_metric keeps the best"),
    ({"save_strategy": "epoch", "max_steps": 9}, FULL, "save_steps", "the length of an epoch is not known"),
    ({"logging_steps": 2.5}, FULL, "logging_steps", "a whole number, or a share"),
    (
        {"metric_for_best_model": "f1", "load_best_model_at_end": True},
        HELD_OUT,
        "metric_for_best_model",
        "only the loss",
    ),
    ({"greater_is_better": True, "load_best_model_at_end": True}, HELD_OUT, "greater_is_better", "the lowest loss"),
    ({"report_to": "swanlab"}, FULL, "report_to", "metrics.trackers names"),
    ({"resume_from_checkpoint": "a/b"}, FULL, "resume_from_checkpoint", "checkpoints of other trainers"),
    ({"deepspeed": "nowhere.json"}, FULL, "deepspeed", "a DeepSpeed file"),
    ({"deepspeed": {"a": 1}}, FULL, "deepspeed", "write the table into one"),
    ({"deepspeed": "z3.json", "fsdp": "full_shard"}, FULL, "fsdp", "nothing with deepspeed"),
    ({"fsdp": "hybrid_shard"}, FULL, "fsdp", "some of full_shard"),
    ({"fsdp_config": "a.json"}, FULL, "fsdp_config", "write the file's table into it"),
    ({"average_tokens_across_devices": False}, FULL, "average_tokens_across_devices", "a mean over all tokens"),
    ({"learning_rat": 1}, FULL, "learning_rat", "did you mean learning_rate?"),
    ({"learning_rate": None}, FULL, "learning_rate", "or leave it out"),
]


@pytest.mark.parametrize("added, before, key, message", REFUSED, ids=lambda value: str(value)[:60])
def test_refused(added, before, key, message):
    faults = {fault.key.rpartition(": ")[2]: str(fault) for fault in import_table(before | added).faults}
    assert message in next(text for name, text in faults.items() if name.endswith(key))


def test_every_option_is_tried_noted_or_refused_by_a_table():
    tried = {name for added, before, *_ in (*TRANSLATED, *REFUSED) for name in added | before}
    for name, option in OPTIONS.items():
        if option.note:
            value = {"bool": True, "int": 1, "float": 1.0, "text": "a", "any": 1}[option.kind]
            assert any(name in note for note in import_table(FULL | {name: value}).notes), name
        elif name not in tried:
            assert option.reason and not option.choices, name
            other = {"bool": True, "int": 77, "float": 0.77, "text": "x", "any": 1}[option.kind]
            assert any(name in str(fault) for fault in import_table(FULL | {name: other}).faults), name
            assert import_table(FULL | {name: option.default}).faults == [], name


def test_data():
    unread = {"history": "", "system": "", "tools": ""}
    assert source_of("other")["fields"] == {
        "instruction": "q", "input": "", "output": "a", "history": "h", "system": "s", "tools": ""
    }  # fmt: skip
    assert source_of("chats") == {
        "dataset": "text",
        "dataset_path": "data/chats.json",
        "format": "sharegpt",
        "fields": {"system": "", "tools": ""},
    }
    assert source_of("messages")["fields"] == {"system": "", "conversations": "messages"}
    assert source_of("renamed")["fields"] == {"system": "", "tools": "", "role": "who", "content": "text"}
    assert source_of("hub") == {
        "dataset": "huggingface",
        "dataset_path": "owner/set:en",
        "format": "alpaca_chat",
        "fields": unread,
    }
    assert source_of("owner/set", dataset_dir="ONLINE")["dataset_path"] == "owner/set"
    pairs = import_table(PAIRS | {"dataset": "questions"}).values["training.sources"][0]
    assert pairs["fields"] == {"question": "instruction", "chosen": "good", "system": "", "tools": ""}
    values = import_table(FULL | {"dataset": "plain, other", "eval_dataset": "chats", "max_samples": 9}).values
    assert values["training.mixing"] == "sizes" and len(values["training.sources"]) == 2
    assert values["validation.enable"] and values["validation.sources"][0]["slice"] == "[:9]"
    assert import_table(TEXTS).values["training.sources"][0]["text_field"] == "content"


def test_records_are_read_as_llama_factory_reads_them():
    """The input follows the instruction on a line of its own; other fields than those of the entry are not read."""
    record = {"instruction": "add", "input": "1 2", "output": "3", "system": "no", "history": [["a", "b"]]}
    reader = RecordReader(format_name="alpaca_chat", fields=source_of("plain")["fields"])
    assert [m["content"] for m in reader.document(record, "", "").content.messages] == ["add\n1 2", "3"]
    record = {"q": "add", "input": "no", "a": "3", "s": "Be kind.", "h": [["a", "b"]]}
    reader = RecordReader(format_name="alpaca_chat", fields=source_of("other")["fields"])
    messages = reader.document(record, "", "").content.messages
    assert [m["content"] for m in messages] == ["Be kind.", "a", "b", "add", "3"]


CHATS = [
    [("user", "Hi there"), ("assistant", "Hello you")],
    [
        ("system", "Be kind"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "<think>\nd\n</think>\n\ne"),
    ],
]
NAMES = re.compile(r"<\|[^|]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>")
SPECIAL = {name for turns in TEMPLATES.values() for text in turns[:4] for name in NAMES.findall(text)}
SPECIAL |= {"<s>", "</s>", "<think>", "</think>"}


def text_of(tokenizer, ids):
    """Return the text of ids, with the names of special tokens."""
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    pieces = (list(group) for _, group in itertools.groupby(ids.tolist(), names.get))
    return "".join(names[ids[0]] * len(ids) if ids[0] in names else tokenizer.decode(ids) for ids in pieces)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    model.add_special_tokens(sorted(SPECIAL))
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return folder


def expected_text(turns, messages, thinks):
    """Write a conversation as LLaMA-Factory does, from the texts of its template: (text, whether it is learned)."""

    def fill(text, content):
        return text.replace("{content}", content).replace("{bos}", "<s>").replace("{eos}", "</s>")

    system = dict(messages).get("system") or turns.default_system
    pieces, first = [(fill(turns.prefix, ""), False)], True
    for role, content in messages:
        if role == "user":
            lead = fill(turns.system, system) if first and system else ""
            question = fill(turns.user, lead + content) if turns.joins_system else lead + fill(turns.user, content)
            pieces.append((question, False))
            first = False
        elif role == "assistant":
            thought = turns.thought if turns.thought and "<think>" not in content else ""
            pieces += [(thought, bool(thinks)), (fill(turns.assistant, content), True)]
    return pieces


@pytest.mark.parametrize("thinks", [True, None])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_write_what_llama_factory_writes(name, thinks, tokenizer):
    turns = TEMPLATES[name]
    built = build_tokenizer(str(tokenizer), chat_template=chat_template(turns, thinks))
    for messages in CHATS:
        chat = Chat([{"role": role, "content": content} for role, content in messages])
        if not turns.assistant.rstrip().endswith(("{eos}", *SPECIAL)):
            continue
        ids, trained = encode(built, Document(chat, ""))
        pieces = expected_text(turns, messages, thinks)
        assert text_of(built, ids) == "".join(text for text, _ in pieces)
        learned = "".join(text.rstrip() if text != turns.thought else text for text, is_learned in pieces if is_learned)
        assert text_of(built, ids[trained]).replace("\n", "") == learned.replace("\n", "")
        assert np.any(trained) and not trained[0]


def test_templates_of_known_models(tokenizer):
    def text(name, messages):
        built = build_tokenizer(str(tokenizer), chat_template=chat_template(TEMPLATES[name]))
        ids, _ = encode(built, Document(Chat([{"role": r, "content": c} for r, c in messages]), ""))
        return text_of(built, ids)

    assert text("qwen3_nothink", CHATS[0]) == (
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nHello you<|im_end|>\n"
    )
    assert text("qwen", CHATS[0]).startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert text("qwen3", CHATS[0]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nHello you<|im_end|>\n")
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert text("llama3", CHATS[0]) == (
        "<s>" + header.format("user") + "Hi there<|eot_id|>" + header.format("assistant") + "Hello you<|eot_id|>"
    )
    llama2 = text("llama2", CHATS[1])
    assert llama2.startswith("<s>[INST] <<SYS>>\nBe kind\n<</SYS>>\n\na [/INST]b</s><s>[INST] c [/INST]")
    assert text("mistral", CHATS[0]) == "<s>[INST] Hi there[/INST] Hello you</s>"
    with pytest.raises(JobError, match="no place for a message of role tool"):
        text("llama3", [*CHATS[0], ("tool", "a")])
    built = build_tokenizer(str(tokenizer), chat_template=chat_template(TEMPLATES["qwen3"], False))
    with pytest.raises(JobError, match="take them out of the records"):
        chat_spans(built, Chat([{"role": r, "content": c} for r, c in CHATS[1]]), "a.json:1")


RANKS = {
    "job.yaml": None,
    "llamafactory-cli train job.yaml": None,
    "CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train job.yaml": 2,
    "USE_RAY=1 llamafactory-cli train job.yaml": 4,
    "torchrun --nproc-per-node 3 src/train.py job.yaml": 3,
    "accelerate launch --num_processes 2 --use_fsdp src/train.py job.yaml": 2,
    "llamafactory-cli train job.yaml per_device_train_batch_size=4 --world-size 2": 2,
}


@pytest.mark.parametrize("line", RANKS)
def test_the_global_batch_is_that_of_all_ranks(line):
    table = FULL | {"gradient_accumulation_steps": 2, "ray_num_workers": 4}
    job, local = import_table(table, line), 4 if "=4" in line else 8
    if RANKS[line] is None:
        assert "--world-size N" in str(job.faults[0])
        job = import_table(FULL, line)
        assert job.faults == [] and "a step has 8 samples of each rank" in " ".join(job.notes)
        return
    assert job.faults == [] and job.values["training.global_batch_size"] == local * 2 * RANKS[line]
    assert job.values["training.local_batch_size"] == local
    is_sharded = "parallelism.data_parallel_replicate_degree" not in job.values
    assert is_sharded == ("fsdp" in line)


def test_other_backends_are_refused():
    assert "USE_MCA" in str(import_table(FULL, "USE_MCA=1 llamafactory-cli train job.yaml").faults[0])
    job = llama_factory.read(parse(split(["lmf train --stage sft --model_name_or_path llama --do_train --bf16"])))
    assert [fault.key for fault in job.faults] == ["--dataset"]


WRONG = [[], [1, 2], {}, {"a": 1}, "garbage", "", -1, 10**30, float("nan"), float("inf"), True]


def faults_of(job):
    return [*job.faults, *layer_of(job.source, job.values.items()).all_faults()]


@pytest.mark.parametrize("base", [LORA, PAIRS, HELD_OUT], ids=["lora", "pairs", "full"])
def test_mutations_change_the_job_or_are_noted_or_refused(base, is_full_run):
    """A key is never dropped: another value changes the job, is named in a note or a fault, or is the default."""
    draw, before, counts = random.Random("factory"), import_table(base), {"refused": 0, "noted": 0, "read": 0}
    for name in OPTIONS if is_full_run else draw.sample(sorted(OPTIONS), 60):
        option = OPTIONS[name]
        for value in draw.sample(WRONG, 5 if is_full_run else 2):
            job = import_table({key: v for key, v in base.items() if key != name} | {name: value})
            if any(name in str(fault) for fault in job.faults) or (faults_of(job) and not faults_of(before)):
                counts["refused"] += 1
            elif any(name in note for note in job.notes):
                counts["noted"] += 1
            elif job.values == before.values:
                is_off = value in ("", [], {}, -1, option.default, base.get(name)) or option.kind == "any"
                assert is_off or name in BELONGS.split(), (name, value)
            else:
                counts["read"] += 1
    assert counts["refused"] > 20 and counts["read"] > 0


BELONGS = """eval_steps eval_strategy evaluation_strategy per_device_eval_batch_size load_best_model_at_end do_eval
    freeze_trainable_layers freeze_extra_modules freeze_trainable_modules adapter_name_or_path additional_target
    preserve_thinking gradient_checkpointing activation_checkpointing packing preprocessing_batch_size max_steps
    warmup_ratio bf16 enable_thinking early_stopping_steps use_llama_pro metric_for_best_model greater_is_better
    train_on_prompt mask_history mix_strategy ignore_pad_token_for_loss save_safetensors double_quantization
    average_tokens_across_devices do_train fsdp report_to use_rslora use_dora"""
"""Options that have an effect only with others, or that are on already."""


def test_the_walk_of_a_user(folder, tokenizer, capsys):
    """A file, its data and a model's folder become a job that can start."""
    rows = [{"instruction": "add", "input": "1 2", "output": "3"}, {"instruction": "b", "input": "", "output": "c"}]
    (folder / "data/plain.json").write_text(json.dumps(rows * 10))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "small" / name).write_bytes((tokenizer / name).read_bytes())
    table = FULL | {"model_name_or_path": "small", "train_from_scratch": True, "max_samples": 15, "warmup_ratio": 0.1}
    import_table(table | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1})
    assert cli.main(["import", "job.yaml", "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    (folder / "job.toml").write_text(text)
    config = load([f"--job.config_file={folder}/job.toml"])
    assert check(config, 2, "cpu") == [] and config.training.global_batch_size == 4
    assert config.training.sources[0].slice == "[:15]"
    assert text.startswith("# Translated from job.yaml (llamafactory).")


def test_truth_values_in_quotes_are_refused():
    """HfArgumentParser.parse_dict gives them to the dataclass unparsed, where each text but the empty one is true."""
    for value in ("false", "no", "true"):
        (fault,) = import_table(FULL | {"bf16": value}).faults
        assert "bf16" in fault.key and "true or false without quotes" in str(fault)


def test_flags_without_a_file_are_those_of_argparse_and_words_after_one_those_of_omegaconf():
    args = "--model_name_or_path llama --do_train --dataset plain --finetuning_type full --template llama3"
    job = llama_factory.read(
        parse(split([f"NPROC_PER_NODE=1 llamafactory-cli train {args} --seed 010 --output_dir 010"]))
    )
    assert (job.values["debug.seed"], job.values["job.dump_folder"], job.faults) == (10, "010", [])
    job = llama_factory.read(parse(split([f"NPROC_PER_NODE=1 llamafactory-cli train {args} --seed 1:30"])))
    assert "--seed" in str(job.faults[0])
    command = "llamafactory-cli train job.yaml seed=010 bf16=no learning_rate=1e-3 seed=011"
    values = import_table(FULL, line=f"NPROC_PER_NODE=1 {command}").values
    assert (values["debug.seed"], values["training.mixed_precision_param"], values["optimizer.lr"]) == (
        9,
        "float32",
        1e-3,
    )
