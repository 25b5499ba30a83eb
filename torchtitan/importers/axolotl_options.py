"""What becomes of each option of an Axolotl file: of its revision of February 2024, a few of later ones, and those of
the launch scripts that came with it. axolotl.py reads by subject what is neither the same here, nor noted, nor refused.
"""

from dataclasses import dataclass

NEVER_CODE = "no code that comes with a model or with data is run here"
NOT_YET = "not here yet"


@dataclass(frozen=True)
class Fate:
    """`kind`: one of axolotl_values.KINDS. With none of the others axolotl.py looks at it."""

    kind: str
    to: str = ""
    """The option of a job that has its value as it is."""
    note: str = ""
    """What is said where it is given, and all that becomes of it."""
    reason: str = ""
    """Why it is refused, unless it is off: false, 0 or empty."""


def _same(kind: str, to: str) -> Fate:
    return Fate(kind, to=to)


def _noted(kind: str, note: str) -> Fate:
    return Fate(kind, note=note)


def _refused(kind: str, reason: str) -> Fate:
    return Fate(kind, reason=reason)


FAMILY = _noted("any", "the folder's config.json tells the family")
COMPILED = _noted("bool", "compile.enable = true fuses it")
LIGER = _noted("bool", "a kernel that computes the same; compile.enable = true fuses what is here")
KERNEL = _noted("bool", "the fastest attention that fits is taken, see model.attention_backend")
TOKENIZER = _noted("any", "the kind of a tokenizer is read from its files")
RUNTIME = _noted("any", "the launcher says on which devices a job runs")
COMPUTED = _noted("any", "it is computed, and said at the start")
NO_OPTION = "this is no option but a name in Axolotl's source; leave it out"

MODEL: dict[str, Fate] = {
    "base_model": Fate("text"),
    "base_model_config": Fate("text"),
    "model_type": FAMILY,
    "model_config_type": FAMILY,
    "model_config": Fate("table"),
    "model_kwargs": _refused("table", "no model of Hugging Face is built; sizes are model.overrides"),
    "model_revision": _noted("text", "what is in the folder is taken: fetch this revision into it"),
    "rope_scaling": Fate("table"),
    "is_falcon_derived_model": FAMILY,
    "is_llama_derived_model": FAMILY,
    "is_mistral_derived_model": FAMILY,
    "is_qwen_derived_model": FAMILY,
    "trust_remote_code": _refused("bool", NEVER_CODE),
    "device": RUNTIME,
    "device_map": RUNTIME,
    "local_rank": RUNTIME,
    "world_size": RUNTIME,
    "tokenizer_type": TOKENIZER,
    "tokenizer_use_fast": TOKENIZER,
    "tokenizer_legacy": TOKENIZER,
    "tokenizer_config": _same("text", "model.tokenizer_path"),
    "special_tokens": Fate("table"),
    "tokens": Fate("words"),
    "resize_token_embeddings_to_32x": Fate("bool"),
    "flash_attention": KERNEL,
    "sdp_attention": KERNEL,
    "xformers_attention": KERNEL,
    "eager_attention": KERNEL,
    "flex_attention": KERNEL,
    "flash_optimum": KERNEL,
    "flash_attn_cross_entropy": _noted("bool", "logits are never whole: training.loss_chunks"),
    "flash_attn_rms_norm": COMPILED,
    "flash_attn_fuse_mlp": COMPILED,
    "flash_attn_fuse_qkv": COMPILED,
    "lora_mlp_kernel": COMPILED,
    "lora_qkv_kernel": COMPILED,
    "lora_o_kernel": COMPILED,
    "liger_rope": LIGER,
    "liger_rms_norm": LIGER,
    "liger_glu_activation": LIGER,
    "liger_fused_linear_cross_entropy": LIGER,
    "plugins": _refused("list", f"{NEVER_CODE}; kernels (Liger, Cut Cross Entropy) change no answer: leave them out"),
    "s2_attention": Fate("bool"),
    "torch_compile": _same("bool", "compile.enable"),
    "torch_compile_backend": _same("text", "compile.backend"),
}
DATA: dict[str, Fate] = {
    "datasets": Fate("list"),
    "test_datasets": Fate("list"),
    "val_set_size": Fate("float"),
    "pretraining_dataset": Fate("any"),
    "chat_template": Fate("text"),
    "chat_template_jinja": Fate("text"),
    "eot_tokens": _noted("any", "a turn ends by the special token that the template writes behind it"),
    "default_system_message": _same("text", "data.default_system"),
    "train_on_inputs": Fate("bool"),
    "dataset_prepared_path": _same("text", "data.cache_dir"),
    "is_preprocess": _noted("bool", "records are tokenized at the start of train, once"),
    "dataset_processes": _same("int", "data.num_proc"),
    "dataset_num_proc": _same("int", "data.num_proc"),
    "dataset_keep_in_memory": _noted("bool", "what was tokenized is mapped into memory"),
    "dataset_shard_num": Fate("int"),
    "dataset_shard_idx": Fate("int"),
    "push_dataset_to_hub": _refused("text", "a trainer publishes no data"),
    "hf_use_auth_token": _noted("bool", "a token of the hub is read from HF_TOKEN and never from a file"),
    "remove_unused_columns": _noted("bool", "of a record its format's fields are read"),
    "sequence_len": _same("int", "training.seq_len"),
    "sample_packing": Fate("bool"),
    "max_packed_sequence_len": Fate("int"),
    "sample_packing_group_size": _same("int", "data.packing_window"),
    "sample_packing_bin_size": _noted("int", "a sample takes as many records as it has room for"),
    "eval_sample_packing": _noted("bool", "the validation loss is the same packed and not"),
    "sample_packing_eff_est": COMPUTED,
    "total_num_tokens": COMPUTED,
    "total_supervised_tokens": COMPUTED,
    "pad_to_sequence_len": Fate("bool"),
    "group_by_length": Fate("bool"),
    "dataloader_num_workers": _same("int", "training.dataloader.num_workers"),
    "dataloader_pin_memory": _same("bool", "training.dataloader.pin_memory"),
    "dataloader_prefetch_factor": _same("int", "training.dataloader.prefetch_factor"),
    "dataloader_drop_last": _noted("bool", "the last step is filled up with samples that do not count"),
}
TABLE_OF_DATA: dict[str, str] = {
    "path": "",
    "type": "",
    "conversation": "",
    "name": "",
    "data_files": "",
    "ds_type": "",
    "split": "train",
    "field": "",
    "field_messages": "",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "message_field_role": "role",
    "message_field_content": "content",
    "format": "",
    "no_input_format": "",
    "system_format": "",
    "system_prompt": "",
}
"""Of one entry of datasets, or of the table that is its type, what may stand there; of fields, what they are called
where nothing is said."""
ADAPTER: dict[str, Fate] = {
    "adapter": Fate("text"),
    "lora_r": _same("int", "adapter.rank"),
    "lora_alpha": _same("float", "adapter.alpha"),
    "lora_dropout": _same("float", "adapter.dropout"),
    "lora_target_modules": Fate("words"),
    "lora_target_linear": Fate("bool"),
    "peft_layers_to_transform": _same("list", "adapter.layers"),
    "lora_modules_to_save": Fate("words"),
    "lora_model_dir": _same("text", "adapter.initial_path"),
    "peft_adapter": _same("text", "adapter.initial_path"),
    "lora_fan_in_fan_out": _noted("bool", "GPT-2's matrices are turned as they are read"),
    "lora_on_cpu": _noted("bool", "torchtitan export merges on the CPU"),
    "merge_lora": _noted("bool", "merge by: torchtitan export FOLDER --merge --to MERGED"),
    "peft": _refused("table", f"other first values of A and B (LoftQ) are {NOT_YET}"),
    "peft_use_dora": Fate("bool"),
    "peft_use_rslora": _same("bool", "adapter.rslora"),
    "loraplus_lr_ratio": _same("float", "adapter.lr_ratio_b"),
    "relora_steps": Fate("int"),
    "relora_warmup_steps": Fate("int"),
    "relora_cpu_offload": _noted("bool", "matrices are merged where they lie"),
    "unfrozen_parameters": Fate("words"),
    "load_in_4bit": Fate("bool"),
    "load_in_8bit": Fate("bool"),
    "bnb_config_kwargs": Fate("table"),
    "gptq": _refused("bool", "its library is no longer kept; take adapter: qlora"),
    "gptq_disable_exllama": _noted("bool", "there is no GPTQ here"),
}
PRECISION: dict[str, Fate] = {
    "bf16": Fate("choice"),
    "bfloat16": Fate("bool"),
    "torch_dtype": Fate("text"),
    "fp16": _refused("bool", "float16 overflows without a scaler; bf16 needs none"),
    "float16": _refused("bool", "float16 overflows without a scaler; bf16 needs none"),
    "tf32": _noted("bool", "products are in bfloat16 or in whole float32"),
    "gradient_checkpointing": Fate("choice"),
    "gradient_checkpointing_kwargs": _noted("table", "recompute is never of the reentrant kind"),
    "activation_offloading": _refused("bool", "what is kept stays on its device; gradient_checkpointing keeps less"),
    "gpu_memory_limit": Fate("any"),
    "max_memory": Fate("any"),
}
OPTIMIZATION: dict[str, Fate] = {
    "optimizer": Fate("text"),
    "learning_rate": _same("float", "optimizer.lr"),
    "weight_decay": Fate("float"),
    "adam_beta1": Fate("float"),
    "adam_beta2": Fate("float"),
    "adam_epsilon": Fate("float"),
    "max_grad_norm": _same("float", "training.max_norm"),
    "torchdistx_path": _refused(
        "text", "torchdistx is no longer kept; optimizer: adamw_anyprecision is here without it"
    ),
    "lr_scheduler": Fate("text"),
    "lr_scheduler_kwargs": _refused("table", "a schedule has what [lr_scheduler] has; write it there"),
    "cosine_min_lr_ratio": Fate("float"),
    "lr_quadratic_warmup": Fate("bool"),
    "warmup_steps": Fate("int"),
    "warmup_ratio": Fate("float"),
    "neftune_noise_alpha": _same("float", "training.neftune_alpha"),
    "noisy_embedding_alpha": _same("float", "training.neftune_alpha"),
    "micro_batch_size": Fate("int"),
    "gradient_accumulation_steps": Fate("int"),
    "batch_size": Fate("int"),
    "eval_batch_size": Fate("int"),
    "num_epochs": Fate("float"),
    "max_steps": Fate("int"),
    "seed": Fate("int"),
}
OUTPUT: dict[str, Fate] = {
    "eval_steps": Fate("float"),
    "save_steps": Fate("float"),
    "logging_steps": Fate("float"),
    "evaluation_strategy": Fate("word"),
    "eval_strategy": Fate("word"),
    "save_strategy": Fate("word"),
    "evals_per_epoch": Fate("int"),
    "saves_per_epoch": Fate("int"),
    "save_total_limit": Fate("int"),
    "load_best_model_at_end": Fate("bool"),
    "metric_for_best_model": Fate("text"),
    "greater_is_better": Fate("bool"),
    "early_stopping_patience": Fate("int"),
    "loss_watchdog_threshold": _same("float", "guard.loss_threshold"),
    "loss_watchdog_patience": _same("int", "guard.loss_patience"),
    "eval_table_size": Fate("int"),
    "eval_table_max_new_tokens": Fate("int"),
    "do_bench_eval": _refused("bool", f"questions with choices are {NOT_YET}"),
    "bench_dataset": _refused("text", f"questions with choices are {NOT_YET}"),
    "output_dir": Fate("text"),
    "resume_from_checkpoint": Fate("choice"),
    "auto_resume_from_checkpoints": _noted("bool", "a job that is started again goes on by itself"),
    "save_safetensors": Fate("bool"),
    "hub_model_id": _refused("text", "a trainer publishes no models; upload the folder of the export"),
    "hub_strategy": _refused("text", "a trainer publishes no models; upload the folder of the export"),
    "push_to_hub_model_id": _refused("text", "a trainer publishes no models; upload the folder of the export"),
    "use_wandb": _same("bool", "metrics.enable_wandb"),
    "wandb_project": Fate("text"),
    "wandb_name": _same("text", "job.description"),
    "wandb_run_id": _noted("text", "a run that goes on keeps its line in Weights & Biases by itself"),
    "wandb_entity": _noted("text", "WANDB_ENTITY in the environment says this"),
    "wandb_mode": _noted("text", "WANDB_MODE in the environment says this"),
    "wandb_watch": _noted("text", "metrics.histogram_freq writes histograms of weights and gradients"),
    "wandb_log_model": _noted("text", "checkpoints are uploaded nowhere"),
    "use_tensorboard": _same("bool", "metrics.enable_tensorboard"),
    "include_tokens_per_second": _noted("bool", "tokens per second are always in metrics.jsonl"),
    "use_mlflow": Fate("bool"),
    "mlflow_experiment_name": _noted("text", "MLFLOW_EXPERIMENT_NAME in the environment says this"),
    "axolotl_config_path": _noted("text", "the whole job is written into job.dump_folder"),
}
PREFERENCE: dict[str, Fate] = {
    "rl": Fate("text"),
    "dpo_beta": Fate("float"),
    "dpo_label_smoothing": Fate("float"),
    "rl_beta": Fate("float"),
    "orpo_alpha": Fate("float"),
    "rpo_alpha": _refused("float", "dpo learns preferences alone; orpo learns the preferred answers too"),
    "simpo_gamma": _refused("float", f"SimPO is {NOT_YET}"),
    "cpo_alpha": _refused("float", f"CPO is {NOT_YET}"),
    "kto_desirable_weight": _refused("float", f"KTO is {NOT_YET}"),
    "kto_undesirable_weight": _refused("float", f"KTO is {NOT_YET}"),
    "trl": _refused("table", "it is of answers that are made and rewarded in the run (GRPO); pairs have rl_beta"),
    "rl_adapter_ref_model": _noted("bool", "the reference is base_model, with it and without"),
    "precompute_ref_log_probs": _noted("bool", "what the reference says is always worked out before the run"),
}
PLAN: dict[str, Fate] = {
    "ddp": _noted("bool", "without fsdp and deepspeed every rank has the whole model"),
    "ddp_timeout": _same("int", "comm.train_timeout_seconds"),
    "ddp_bucket_cap_mb": _noted("int", "gradients are exchanged block by block"),
    "ddp_broadcast_buffers": _noted("bool", "buffers are the same on all ranks"),
    "fsdp": Fate("list"),
    "fsdp_config": Fate("table"),
    "fsdp_version": _noted("int", "FSDP is that of fully_shard, Axolotl's version 2"),
    "deepspeed": Fate("text"),
    "zero_optimization": _refused("any", "a key of a DeepSpeed file; name that file by deepspeed"),
    "strict": _noted("bool", "what is unknown is always refused"),
    "debug": _noted("bool", "torchtitan preview shows what the model will see"),
    "is_file": _refused("any", NO_OPTION),
    "read_text": _refused("any", NO_OPTION),
}
SCRIPT: dict[str, Fate] = {
    "train_data_uri": Fate("text"),
    "val_data_uri": Fate("text"),
    "cleanup_output_dir_on_start": Fate("bool"),
    "mlfoundry_enable_reporting": _noted("bool", "no service is asked; metrics.trackers names trackers"),
    "mlfoundry_ml_repo": _noted("text", "no service is asked; metrics.trackers names trackers"),
    "mlfoundry_run_name": _same("text", "job.description"),
    "mlfoundry_checkpoint_artifact_name": _noted("text", "checkpoints are uploaded nowhere"),
    "mlfoundry_log_checkpoints": _noted("bool", "checkpoints are uploaded nowhere"),
}
"""Of Truefoundry's trainer, beside Axolotl's."""
FATES = MODEL | DATA | ADAPTER | PRECISION | OPTIMIZATION | OUTPUT | PREFERENCE | PLAN | SCRIPT
OF_AN_ENTRY = ("path", "type", "conversation", "format", "no_input_format", "system_format", "system_prompt")
"""Names that stand in an entry of datasets and nowhere else."""
