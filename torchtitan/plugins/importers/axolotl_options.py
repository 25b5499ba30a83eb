"""The options of Axolotl files: revision of February 2024, a few later ones, and options of launch scripts.

`DEFAULTS` declares what a file means that lacks one of them.

The table defines the translation of each. Those that need other options to be understood are read by axolotl.py and
axolotl_data.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtitan.config.options import hint
from torchtitan.core import yaml_file
from torchtitan.plugins.importers.translation import (
    AUTO,
    BFLOAT16_INSTEAD,
    KINDS,
    CommandLine,
    JobDraft,
    Options,
    Setting,
    flag_value,
    same,
)

UNSET = ("", "None", "none", "NA", "null")
"""Spellings of an unset value in flags."""
TRUTHS = ("true", "1", "yes", "false", "0", "no")
"""Spellings of truth values in flags; of these, the last three and all other texts are false."""
ADAM = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "adamw_hf": "AdamW", "adamw_apex_fused": "AdamW"}
ADAM |= {"paged_adamw_32bit": "AdamW", "adamw_bnb_8bit": "AdamW8bit", "adamw_8bit": "AdamW8bit"}
ADAM |= {"paged_adamw_8bit": "AdamW8bit", "adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW8bit"}
ADAM |= {"adamw_anyprecision": "AdamWBF16"}
OPTIMIZERS = ADAM | {"adafactor": "Adafactor", "lion_pytorch": "Lion", "paged_lion_32bit": "Lion", "sgd": "SGD"}
OPTIMIZERS |= {"galore_adamw": "GaLore", "galore_adamw_8bit": "GaLore", "muon": "Muon"}
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
EXCESS = {"drop": "drop", "truncate": "truncate", "raise": "error"}
OFFLOADED = ("offload", "offload_disk")
"""Values of gradient_checkpointing that keep inputs of blocks in another memory."""
RECOMPUTE = {True: "full", False: "none", AUTO: "full"} | dict.fromkeys(OFFLOADED, "full")
STRATEGIES = ("no", "steps", "epoch")
HALF_TYPES = ("float16", "fp16", "half")
DTYPES = ("bfloat16", "bf16", "float32", "fp32", "float", AUTO, *HALF_TYPES)

NEVER_CODE = "code that comes with a model or with data is never executed"
NO_PUBLISHING = Setting("text", note="a run publishes nothing; upload the folder of the export")
NO_CHOICES = "questions with choices are not supported"
STAYS_ON_DEVICE = "activations stay on their device"
NO_OPTION = "this is no option but a name in Axolotl's source; leave it out"
RESUMES = "a job that is started again resumes by itself; checkpoints of other trainers are not read"


def _note(kind: str, note: str) -> Setting:
    return Setting(kind, note=note)


def _refusal(kind: str, reason: str) -> Setting:
    return Setting(kind, reason=reason)


FAMILY = _note("any", "the folder's config.json tells the family")
COMPILED = _note("bool", "compile.enable = true fuses it")
LIGER = _note("bool", "the kernel gives the same results; compile.enable = true fuses operations here")
KERNEL = _note("bool", "the fastest suitable attention kernel is used, see model.attention_backend")
EXACT_ATTENTION: tuple[str, ...] = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "xformers",
)
EXACT_ATTENTION += tuple(f"kernels-community/{name}" for name in ("flash-attn2", "flash-attn3", "vllm-flash-attn3"))
OTHER_ATTENTION = "sage and fp8 round attention, and other kernels are unknown: leave it out for exact attention"
TOKENIZER = _note("any", "the kind of a tokenizer is read from its files")
DEVICES = _note("any", "the launcher chooses the devices")
COMPUTED = _note("any", "it is computed, and logged at the start")
UPLOADS = _note("text", "checkpoints are not uploaded")
EXPERTS = _note("any", "products of experts are grouped where the device has a kernel for it")
NOT_ROUNDED = _note("any", "not the same: the adapter is trained and merged without rounding to NVFP4")
FASTER_PLUGINS: tuple[str, ...] = (
    "cut_cross_entropy.CutCrossEntropyPlugin",
    "liger.LigerPlugin",
    "kernels.KernelsPlugin",
)
FASTER_PLUGINS += ("expert_parallel.ExpertParallelPlugin", "swanlab.SwanLabPlugin")
PLUGINS = tuple(f"axolotl.integrations.{name}" for name in FASTER_PLUGINS)
"""Plugins that change no result: they make a step faster or smaller, or report it."""
UNREAD = _note("any", "Axolotl has no such option, so it has no effect there either")
NOT_REPORTED = _note("any", "nothing is sent there; metrics.trackers names the trackers that are supported")
SMALLER = _note("any", "it takes less memory there and changes no result")
RAY = _note("any", "torchtitan train starts the ranks")
ONLINE = "training on answers that the model generates and a reward are not supported"
STEPWISE = "reward models of single steps are not supported"
SCORES = "answers are not scored in a run: torchtitan evaluate --tasks does it, and validation.generated shows some"
ALWAYS_SKIPPED = "no service is asked; metrics.trackers names trackers"

MODEL: dict[str, Setting] = {
    **same("base_model base_model_config", Setting("text")),
    **same("model_type model_config_type is_falcon_derived_model is_llama_derived_model", FAMILY),
    **same("is_mistral_derived_model is_qwen_derived_model", FAMILY),
    **same("model_config rope_scaling special_tokens", Setting("table")),
    "model_kwargs": _refusal("table", "models of transformers are not built; set sizes in model.overrides"),
    **same("model_revision revision_of_model", _note("text", "not checked: download this revision into the folder")),
    "trust_remote_code": _note("bool", f"{NEVER_CODE}; the model is the one of this family here"),
    **same("device device_map local_rank world_size", DEVICES),
    **same("tokenizer_type tokenizer_use_fast tokenizer_legacy", TOKENIZER),
    "tokenizer_config": Setting("text", to="model.tokenizer_path"),
    "tokens": Setting("words"),
    "base_model_ignore_patterns": _note("any", "weights are read from files of safetensors, never from others"),
    **same("resize_token_embeddings_to_32x s2_attention", Setting("bool")),
    **same("flash_attention sdp_attention xformers_attention eager_attention flex_attention flash_optimum", KERNEL),
    "attn_implementation": Setting("text", choices=EXACT_ATTENTION, note=KERNEL.note, reason=OTHER_ATTENTION),
    "flash_attn_cross_entropy": _note("bool", "logits are never all in memory: training.loss_chunks"),
    **same("flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv", COMPILED),
    **same("lora_mlp_kernel lora_qkv_kernel lora_o_kernel", COMPILED),
    **same("liger_rope liger_rms_norm liger_glu_activation liger_fused_linear_cross_entropy", LIGER),
    **same("liger_layer_norm liger_rms_norm_gated liger_cross_entropy", LIGER),
    "cut_cross_entropy": _note("bool", "logits are never all in memory: training.loss_chunks"),
    "fused_attn_kernel": KERNEL,
    "flex_attn_compile_kwargs": _note("table", KERNEL.note),
    **same("use_kernels use_scattermoe use_sonicmoe experts_implementation", EXPERTS),
    **same("moe_grouped_backend moe_dequant_chunk_size moe_bnb_fast use_dsv4_kernels use_glm_dsa_kernels", EXPERTS),
    "dsv4_fp4_grouped_mode": _note("text", "not the same: inputs of experts are not rounded to 4 bits here"),
    **same("nvfp4_merge_aware nvfp4_merge_aware_start_step", NOT_ROUNDED),
    "expert_parallel_token_capacity": _note("any", "not the same: every token reaches its experts here"),
    **same("experimental_skip_move_to_device low_cpu_mem_usage", DEVICES),
    "plugins": Setting("words"),
    "processor_type": _refusal("text", "images and sound are not supported: train on records of text"),
    "tokenizer_use_mistral_common": _note(
        "bool",
        "the folder's tokenizer and template are used, which may differ from Mistral's: see `torchtitan preview`",
    ),
    **same("gemma4_hybrid_attn_impl", KERNEL),
    **same("tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp", SMALLER),
    "model_quantization_config": Setting("text"),
    "model_quantization_config_kwargs": Setting("table"),
    "reinit_weights": Setting("bool"),
    "torch_compile_mode": _note("text", "blocks are compiled in the default mode"),
    "llama4_linearized_experts": _note("bool", "folders with separate experts are read too"),
    "use_onebitllms": _refusal("bool", "training for a model of one or two bits is not supported"),
    "num_labels": Setting("int"),
    "center_rewards_coefficient": Setting("float", least=0),
    "process_reward_model": _refusal("bool", STEPWISE),
    "diffusion": _refusal("table", "masked diffusion is not supported"),
    "llmcompressor": _refusal("table", "pruned models are not trained"),
    **same("use_eaft eaft_alpha eaft_k", _refusal("any", "losses weighted by entropy are not supported")),
    **same("lisa_n_layers lisa_step_interval lisa_layers_attribute", _refusal("any", "LISA is not supported")),
    "qat": Setting("table"),
    "reward_model": Setting("bool"),
    "fp8": Setting("bool"),
    "fp8_enable_fsdp_float8_all_gather": _note("bool", "weights are gathered in bfloat16, then rounded to the same"),
    "freeze_mm_modules": _note("bool", "models here have no part for images and sound"),
    "cls_model_config": FAMILY,
    "torch_compile": Setting("bool", to="compile.enable"),
    "torch_compile_backend": Setting("text", to="compile.backend"),
}
DATA: dict[str, Setting] = {
    **same("datasets test_datasets", Setting("list")),
    "val_set_size": Setting("float"),
    "pretraining_dataset": Setting("any"),
    **same("chat_template chat_template_jinja train_data_uri val_data_uri", Setting("text")),
    "eot_tokens": _note("any", "a turn ends with the special token that the template writes after it"),
    "default_system_message": Setting("text", to="data.default_system"),
    **same("streaming streaming_multipack_buffer_size", _note("any", "records of a task are read before the run")),
    **same(
        "pretrain_multipack_attn train_on_inputs sample_packing pad_to_sequence_len group_by_length", Setting("bool")
    ),
    **same("curriculum_sampling shuffle_merged_datasets shuffle_before_merging_datasets", Setting("bool")),
    "dataset_exact_deduplication": Setting("bool"),
    "sample_packing_sequentially": _note(
        "bool", "not the same: samples are filled best with the records of data.packing_window, not one by one"
    ),
    "skip_prepare_dataset": _refusal("bool", "records are always tokenized by their format: leave it out"),
    "dataset_prepared_path": Setting("text", to="data.cache_dir"),
    "is_preprocess": _note("bool", "records are tokenized once, at the start of train"),
    **same("dataset_processes dataset_num_proc", Setting("int", to="data.num_proc")),
    "dataset_keep_in_memory": _note("bool", "tokenized data are mapped into memory"),
    **same("dataset_shard_num dataset_shard_idx max_packed_sequence_len", Setting("int")),
    "push_dataset_to_hub": _refusal("text", "data are not published"),
    "hf_use_auth_token": _note("bool", "a token of the hub is only read from HF_TOKEN, never from a file"),
    "remove_unused_columns": _note("bool", "only the fields of a record's format are read"),
    "sequence_len": Setting("int", to="training.seq_len data.max_tokens", least=2),
    "excess_length_strategy": Setting("word", "drop", "data.too_long", EXCESS),
    "min_sample_len": Setting("int", least=0),
    "sample_packing_group_size": Setting("int", to="data.packing_window"),
    "sample_packing_bin_size": _note("int", "a sample takes as many records as it has room for"),
    "eval_sample_packing": _note("bool", "the validation loss is the same packed or not"),
    **same("sample_packing_eff_est total_num_tokens total_supervised_tokens", COMPUTED),
    "dataloader_num_workers": Setting("int", to="training.dataloader.num_workers"),
    "dataloader_pin_memory": Setting("bool", to="training.dataloader.pin_memory"),
    "dataloader_prefetch_factor": Setting("int", to="training.dataloader.prefetch_factor"),
    "dataloader_drop_last": _note("bool", "the last step is filled up with samples without weight in the loss"),
}
_ENTRY_KEYS = """path type conversation name data_files ds_type split field field_messages field_instruction field_input
    field_output field_system message_field_role message_field_content format no_input_format system_format
    system_prompt roles field_chosen field_rejected message_property_mappings field_thinking template_thinking_key
    drop_system_message"""
ENTRY_KEYS = _ENTRY_KEYS.split()
"""Keys of an entry of datasets, or of a table that is the entry's type."""
ADAPTER: dict[str, Setting] = {
    "adapter": Setting("text"),
    "lora_r": Setting("int", to="adapter.rank"),
    "lora_alpha": Setting("float", to="adapter.alpha"),
    "lora_dropout": Setting("float", to="adapter.dropout"),
    **same("lora_modules_to_save lora_target_parameters unfrozen_parameters", Setting("words")),
    "lora_target_modules": Setting("any"),
    **same("lora_target_linear peft_use_dora load_in_4bit load_in_8bit", Setting("bool")),
    "peft_layers_to_transform": Setting("list", to="adapter.layers"),
    **same("lora_model_dir peft_adapter", Setting("text", to="adapter.initial_path")),
    "lora_fan_in_fan_out": _note("bool", "GPT-2's matrices are transposed when they are read"),
    "lora_on_cpu": _note("bool", "torchtitan export merges on the CPU"),
    "merge_lora": _note("bool", "to merge: torchtitan export FOLDER --merge --to MERGED"),
    "peft": _refusal("table", "other initial values of A and B (LoftQ) are not supported"),
    "peft_use_rslora": Setting("bool", to="adapter.rslora"),
    "loraplus_lr_ratio": Setting("float", to="adapter.lr_ratio_b"),
    **same("relora_steps relora_warmup_steps", Setting("int")),
    "relora": Setting("bool"),
    "relora_prune_ratio": Setting("float", least=0),
    "relora_prune_method": Setting("text", choices=("magnitude", "random", "reset")),
    **same("jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps", Setting("int", least=0)),
    "relora_cpu_offload": _note("bool", "matrices are merged on their device"),
    "bnb_config_kwargs": Setting("table"),
    "quantize_moe_experts": Setting("bool"),
    "gptq": _refusal("bool", "its library is no longer maintained; use adapter: qlora"),
    "gptq_disable_exllama": _note("bool", "GPTQ is not supported"),
}
PRECISION: dict[str, Setting] = {
    "bf16": Setting("choice", choices=(True, False, AUTO, "full")),
    "bfloat16": Setting("bool"),
    "torch_dtype": Setting("text", choices=DTYPES),
    "fp16": Setting("bool", note=BFLOAT16_INSTEAD),
    "float16": Setting("bool"),
    "tf32": _note("bool", "matrix products are in bfloat16 or in full float32"),
    "gradient_checkpointing": Setting(
        "choice", None, "activation_checkpoint.mode", choices=RECOMPUTE, reason=STAYS_ON_DEVICE
    ),
    "gradient_checkpointing_kwargs": _note("table", "recompute is never of the reentrant kind"),
    "activation_offloading": _note("any", f"{STAYS_ON_DEVICE}, which takes more memory and changes no result"),
    **same("gpu_memory_limit max_memory", Setting("any")),
}
OPTIMIZATION: dict[str, Setting] = {
    "optimizer": Setting("text", None, "optimizer.name", OPTIMIZERS, reason="others are not supported"),
    "learning_rate": Setting("float", to="optimizer.lr", required=True),
    "weight_decay": Setting("float", to="optimizer.weight_decay"),
    **same("adam_beta1 adam_beta2 adam_epsilon", Setting("float")),
    "max_grad_norm": Setting("float", to="training.max_norm"),
    "torchdistx_path": _refusal("text", "torchdistx is not needed for optimizer: adamw_anyprecision"),
    "lr_scheduler": Setting("text", None, "lr_scheduler.decay_type", SCHEDULES, reason="others are not supported"),
    "lr_scheduler_kwargs": _refusal("table", "write the schedule's settings into [lr_scheduler]"),
    "cosine_min_lr_ratio": Setting("float"),
    "cosine_constant_lr_ratio": _refusal("float", "write the schedule's settings into [lr_scheduler]"),
    "lr_quadratic_warmup": Setting("bool", to="lr_scheduler.warmup_type", choices={True: "quadratic", False: None}),
    "warmup_steps": Setting("float", least=0),
    **same("eta_min adam_eps", UNREAD),
    "warmup_ratio": Setting("float"),
    **same("neftune_noise_alpha noisy_embedding_alpha", Setting("float", to="training.neftune_alpha")),
    "micro_batch_size": Setting("int", to="training.local_batch_size", least=1),
    **same("gradient_accumulation_steps batch_size eval_batch_size max_steps", Setting("int")),
    "num_epochs": Setting("float"),
    "seed": Setting("int", to="debug.seed"),
}
OUTPUT: dict[str, Setting] = {
    **same("eval_steps save_steps logging_steps", Setting("float")),
    **same("evaluation_strategy eval_strategy save_strategy", Setting("word", choices=STRATEGIES)),
    **same("evals_per_epoch saves_per_epoch early_stopping_patience eval_table_size", Setting("int")),
    "save_total_limit": Setting("int"),
    "save_only_model": _note("bool", "checkpoints have the optimizer's state, so that a run can go on"),
    **same("load_best_model_at_end greater_is_better cleanup_output_dir_on_start", Setting("bool")),
    "metric_for_best_model": Setting("text"),
    "loss_watchdog_threshold": Setting("float", to="guard.loss_threshold"),
    "loss_watchdog_patience": Setting("int", to="guard.loss_patience"),
    "eval_table_max_new_tokens": Setting("int"),
    "do_causal_lm_eval": Setting("bool"),
    "eval_causal_lm_metrics": Setting("words"),
    "eval_max_new_tokens": _note("int", "answers are not scored in a run, so none are generated for it"),
    "do_bench_eval": _refusal("bool", NO_CHOICES),
    "bench_dataset": _refusal("text", NO_CHOICES),
    "output_dir": Setting("text", to="job.dump_folder"),
    "resume_from_checkpoint": Setting("choice", choices=(True, False, AUTO), reason=RESUMES),
    "auto_resume_from_checkpoints": _note("bool", "a job that is started again resumes by itself"),
    "save_safetensors": Setting("bool", choices=(True,), reason="weights are never pickled"),
    **same("hub_model_id hub_strategy push_to_hub_model_id", NO_PUBLISHING),
    "use_wandb": Setting("bool", to="metrics.enable_wandb"),
    "wandb_project": Setting("text"),
    **same("wandb_name mlfoundry_run_name", Setting("text", to="job.description")),
    "wandb_run_id": _note("text", "a resumed run continues its run in Weights & Biases by itself"),
    "wandb_entity": _note("text", "set WANDB_ENTITY in the environment instead"),
    "wandb_mode": _note("text", "set WANDB_MODE in the environment instead"),
    "wandb_watch": _note("text", "metrics.histogram_freq writes histograms of weights and gradients"),
    "wandb_log_model": UPLOADS,
    **same("use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode", NOT_REPORTED),
    **same("swanlab_workspace swanlab_log_model swanlab_log_completions swanlab_completion_max_buffer", NOT_REPORTED),
    **same("swanlab_completion_log_interval swanlab_lark_webhook_url swanlab_lark_secret", NOT_REPORTED),
    **same("use_otel_metrics otel_metrics_host otel_metrics_port", NOT_REPORTED),
    "use_tensorboard": Setting("bool", to="metrics.enable_tensorboard"),
    "include_tokens_per_second": _note("bool", "tokens per second are always in metrics.jsonl"),
    "use_mlflow": Setting("bool", to="metrics.trackers", choices={True: ["mlflow"], False: None}),
    "mlflow_experiment_name": _note("text", "set MLFLOW_EXPERIMENT_NAME in the environment instead"),
    "axolotl_config_path": _note("text", "the job is always written into job.dump_folder"),
    "mlfoundry_enable_reporting": _note("bool", ALWAYS_SKIPPED),
    "mlfoundry_ml_repo": _note("text", ALWAYS_SKIPPED),
    "mlfoundry_checkpoint_artifact_name": UPLOADS,
    "mlfoundry_log_checkpoints": _note("bool", UPLOADS.note),
}
PREFERENCE: dict[str, Setting] = {
    "rl": Setting("text"),
    **same("dpo_beta dpo_label_smoothing rl_beta orpo_alpha", Setting("float")),
    "rpo_alpha": _refusal("float", "dpo only learns preferences; orpo learns the preferred answers too"),
    "simpo_gamma": _refusal("float", "SimPO is not supported"),
    "cpo_alpha": _refusal("float", "CPO is not supported"),
    **same("kto_desirable_weight kto_undesirable_weight", _refusal("float", "KTO is not supported")),
    "trl": _refusal("table", "online training on rewarded answers (GRPO) is not supported; for pairs set rl_beta"),
    **same("ebft vllm", _refusal("table", ONLINE)),
    "rl_adapter_ref_model": _note("bool", "the reference is always base_model"),
    "precompute_ref_log_probs": _note("bool", "reference log-probabilities are always computed once before training"),
}
PLAN: dict[str, Setting] = {
    "ddp": _note("bool", "without fsdp and deepspeed every rank has the whole model"),
    "ddp_timeout": Setting("int", to="comm.train_timeout_seconds"),
    "ddp_bucket_cap_mb": _note("int", "gradients are exchanged block by block"),
    "ddp_find_unused_parameters": _note("bool", "parameters without a gradient need no search"),
    "ddp_broadcast_buffers": _note("bool", "buffers are the same on all ranks"),
    **same("context_parallel_size sequence_parallel_degree tensor_parallel_size", Setting("int", least=1)),
    **same("dp_shard_size dp_replicate_size expert_parallel_size", Setting("int", least=1)),
    **same("use_ray ray_num_workers resources_per_worker ray_run_name", RAY),
    "heads_k_stride": _note("int", "context parallel has its own order of messages"),
    "fsdp": Setting("list"),
    "fsdp_config": Setting("table"),
    "fsdp_version": _note("int", "FSDP2 (fully_shard) is used, Axolotl's version 2"),
    "deepspeed": Setting("text"),
    "accelerator_config": _refusal("table", "write the plan and the batch into the job"),
    "zero_optimization": _refusal("any", "a key of a DeepSpeed file; name that file by deepspeed"),
    "strict": _note("bool", "unknown options are always refused"),
    "debug": _note("bool", "torchtitan preview shows the samples"),
    **same("is_file read_text", _refusal("any", NO_OPTION)),
}
DEFAULTS: dict[str, Any] = {
    "sequence_len": 512,
    "bf16": AUTO,
    "gradient_checkpointing": False,
    "optimizer": "adamw_torch",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler": "cosine",
    "micro_batch_size": 1,
    "num_epochs": 1.0,
    "seed": 42,
    "save_total_limit": 4,
    "output_dir": "./model-out",
}
"""Values of options that a file lacks: Axolotl v0.18 (July 2026) with transformers' TrainingArguments.

Those of February 2024 are the same, but for a sequence_len of 1024. All other options are off or unset without a value,
and the warmup is 3 % of the steps.
"""
DEFAULT_STRATEGY = "epoch"
"""When a run is saved and validated that does not say it."""
NEVER_NULL = ("sequence_len", "micro_batch_size", "num_epochs")
"""Options with which Axolotl fails if they are there without a value."""
OPTIONS = MODEL | DATA | ADAPTER | PRECISION | OPTIMIZATION | OUTPUT | PREFERENCE | PLAN
OPTIONS |= {name: replace(OPTIONS[name], default=default) for name, default in DEFAULTS.items()}
"""Of Axolotl and of Truefoundry's trainer (train_data_uri, val_data_uri, cleanup_output_dir_on_start, mlfoundry_*)."""


def _flags(line: CommandLine, in_file: Mapping[str, Any], draft: JobDraft) -> dict[str, Any]:
    """Return the values of flags: of --name, and of --no-name, which is false."""
    values: dict[str, Any] = {}
    for flag, text in line.flags:
        positive = flag.removeprefix("no_")
        is_off = text is None and flag not in OPTIONS and positive in OPTIONS and OPTIONS[positive].kind == "bool"
        name = positive if is_off else flag
        if isinstance(in_file.get(name), bool) and text not in (None, *UNSET) and text.lower() not in TRUTHS:
            draft.refuse(name, text, "true or false, as the file has it", "Axolotl takes other texts for false there")
            continue
        values[name] = False if is_off else flag_value(OPTIONS.get(name), text)
        if in_file.get("strict") and name not in in_file:
            draft.refuse(name, values[name], "nothing with strict: true", "Axolotl ignores it: write it into the file")
    return values


def read_options(line: CommandLine, draft: JobDraft) -> Options:
    """Read a file's options, overridden by flags. Record their translations by the table in `draft`."""
    options = Options(OPTIONS, draft)
    raw_values = yaml_file.read(line.config or "")
    raw_values |= _flags(line, raw_values, draft)
    for name, value in raw_values.items():
        if value is None or (isinstance(value, str) and value in UNSET):
            if name in NEVER_NULL:
                draft.refuse(name, None, OPTIONS[name].allowed(), f"leave it out for Axolotl's {DEFAULTS[name]:g}")
            elif name == "bf16":
                options.add(name, value, False)  # without a value it is off, though it is on if it is absent
            continue
        if name == "tokens" and isinstance(value, dict) and "special_tokens" not in raw_values:
            name = "special_tokens"
            draft.notes.append("tokens: a table, as Axolotl had it in 2023: read as special_tokens")
        option = OPTIONS.get(name)
        if option is None and name in ENTRY_KEYS:
            draft.refuse(name, value, "in an entry of datasets, not next to it")
        elif option is None:
            draft.refuse(name, value, "a known option", hint(name, [*OPTIONS, *ENTRY_KEYS]))
        elif value is False and (option.kind == "text" or name == "jagged_restart_anneal_steps"):
            continue  # Axolotl reads false as unset here
        else:
            parsed_value = KINDS[option.kind][1](value)
            if parsed_value is None and value == AUTO:
                draft.notes.append(f"{name}: auto, so that it is chosen here")
            else:
                options.add(name, value, parsed_value)
    if "sequence_len" not in raw_values:
        draft.notes.append(f"no sequence_len: Axolotl's default, {DEFAULTS['sequence_len']} (1024 until 2024)")
    options.translate()
    return options
