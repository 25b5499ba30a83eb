"""The arguments of LLaMA-Factory (August 2026) beside those of transformers' Trainer, with its defaults.

The table says what becomes of each. Those that need others to be understood are read by llama_factory.py and
llama_factory_data.py.
"""

from torchtitan.plugins.importers.hf_trainer import ARGUMENTS, FASTER, noted, refused
from torchtitan.plugins.importers.translation import Setting, same

STAGES, METHODS = ("pt", "sft", "dpo"), ("lora", "full", "freeze")
NO_STAGE = "reward models, PPO and KTO are not supported"
LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo"}
"""pref_loss -> task.kind."""
NO_LOSS = "other losses are not supported"
NEW_TOKENS = "make the folder before: torchtitan convert FOLDER LARGER --add-tokens ..."
NO_MEDIA = "images, videos and sound are not read"
NEVER_CODE = "code that comes with a model is never executed; the model is the one of its family here"
TOKENS = "a token of the hub is only read from HF_TOKEN, never from a file"
INFERENCE = "it belongs to inference or exports"
NOT_NEEDED = "it is not needed here"

MODEL: dict[str, Setting] = {
    "model_name_or_path": Setting("text", required=True),
    "adapter_name_or_path": Setting("text"),
    **refused("put the adapter into a folder of its own", adapter_folder=None),
    **refused(NEW_TOKENS, add_tokens="", add_special_tokens="", new_special_tokens_config="", resize_vocab=False),
    "init_special_tokens": Setting("text", note=NEW_TOKENS),
    **refused("set rope_scaling in model.overrides", rope_scaling=""),
    **refused("mixtures of depths are not supported", mixture_of_depths=""),
    "shift_attn": Setting("bool"),
    "moe_aux_loss_coef": Setting("float"),
    "disable_gradient_checkpointing": Setting("bool", False),
    "train_from_scratch": Setting("bool", False),
    "quantization_method": Setting(
        "text", "bnb", choices=("bnb",), reason="weights are quantized as bitsandbytes does"
    ),
    "quantization_bit": Setting("int", choices=(4, 8), reason="other widths are not supported"),
    "quantization_type": Setting("text", "nf4", choices=("nf4",), reason="the only format of 4 bits here"),
    "double_quantization": Setting("bool", True, choices=(True,), reason="scales are always in 8 bits here"),
    **refused("ranks hold their own weights", quantization_device_map=""),
    **refused("experts stay on the GPU", use_kt=False),
    **noted({"any": "model_revision"}, "not checked: download this revision into the folder"),
    **noted({"any": "cache_dir low_cpu_mem_usage offload_folder print_param_status use_fast_tokenizer"}, NOT_NEEDED),
    **noted(
        {"any": "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_v1_kernels use_reentrant_gc"}, FASTER
    ),
    **noted({"any": "upcast_layernorm upcast_lmhead_output"}, "norms and the loss are always computed in float32"),
    **noted({"any": "split_special_tokens"}, "special tokens that records spell out are always ordinary text"),
    **noted({"any": "hf_hub_token ms_hub_token om_hub_token"}, TOKENS),
    "trust_remote_code": Setting("bool", note=NEVER_CODE),
    **noted(
        {"any": "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels"}, NO_MEDIA
    ),
    **noted(
        {"any": "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate media_dir"}, NO_MEDIA
    ),
    **noted({"any": "infer_backend use_kv_cache infer_dtype export_dir export_size export_device"}, INFERENCE),
    **noted({"any": "export_quantization_bit export_quantization_dataset export_quantization_nsamples"}, INFERENCE),
    **noted({"any": "export_quantization_maxlen export_legacy_format export_hub_model_id vllm_maxlen"}, INFERENCE),
    **noted({"any": "vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen"}, INFERENCE),
    **noted({"any": "sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend do_sample"}, INFERENCE),
    **noted({"any": "temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty"}, INFERENCE),
    **noted({"any": "length_penalty skip_special_tokens eval_num_beams"}, INFERENCE),
}
DATA: dict[str, Setting] = {
    **same("dataset eval_dataset template tokenized_path", Setting("text")),
    "dataset_dir": Setting("any", "data"),
    "cutoff_len": Setting("int", 2048, "training.seq_len data.max_tokens", least=2),
    **same("train_on_prompt mask_history neat_packing preserve_thinking", Setting("bool", False)),
    "packing": Setting("bool"),
    "enable_thinking": Setting("any", True),
    "default_system": Setting("text", to="data.default_system"),
    **refused("write conversations with tools for the model's own template", tool_format=""),
    "mix_strategy": Setting("text", "concat", choices=("concat",), reason="give each source a weight instead"),
    **refused("give each source a weight instead", interleave_probs=""),
    "max_samples": Setting("int", least=1),
    "val_size": Setting("float", 0.0, least=0),
    **refused("all held-out data have one loss", eval_on_each_dataset=False),
    "preprocessing_batch_size": Setting("int", 1000, least=1),
    "preprocessing_num_workers": Setting("int", to="data.num_proc"),
    "ignore_pad_token_for_loss": Setting("bool", True, choices=(True,), reason="padding is never learned"),
    **noted({"any": "streaming buffer_size"}, "records are tokenized once, before the run, and shuffled as a whole"),
    "overwrite_cache": Setting("bool", note="tokenized data are made again when files or options change"),
    "data_shared_file_system": Setting("bool", note=NOT_NEEDED),
}
METHOD: dict[str, Setting] = {
    "stage": Setting("text", "sft", choices=STAGES, reason=NO_STAGE),
    "finetuning_type": Setting("text", "lora", choices=METHODS, reason="other methods are not supported"),
    "pure_bf16": Setting("bool", False),
    "lora_rank": Setting("int", 8, least=1),
    "lora_alpha": Setting("float"),
    "lora_dropout": Setting("float", 0.0),
    "lora_target": Setting("text", "all"),
    "additional_target": Setting("text"),
    "loraplus_lr_ratio": Setting("float"),
    "loraplus_lr_embedding": Setting("float", note="embeddings have no A and B here"),
    **same("use_rslora use_dora use_llama_pro", Setting("bool", False)),
    **refused("other initial values of A and B are not supported", pissa_init=False, pissa_convert=False),
    "pissa_iter": Setting("int", note="no effect without pissa_init"),
    **refused("adapters are not merged before: `torchtitan export --merge`", create_new_adapter=False),
    "freeze_trainable_layers": Setting("int", 2),
    "freeze_trainable_modules": Setting("text", "all", choices=("all",), reason="write training.unfrozen yourself"),
    "freeze_extra_modules": Setting("text"),
    "disable_shuffling": Setting("bool", to="training.shuffle", choices={True: False, False: None}),
    "early_stopping_steps": Setting("int", least=1),
    **refused(
        "other losses on answers are not supported", use_dft_loss=False, use_asft_loss=False, use_eaft_loss=False
    ),
    **noted({"any": "asft_alpha eaft_alpha"}, "no effect without use_asft_loss and use_eaft_loss"),
    **noted({"any": "module_dropout oft_rank oft_block_size oft_target"}, "no effect without finetuning_type: oft"),
    **noted({"any": "freeze_vision_tower freeze_multi_modal_projector freeze_language_model"}, NO_MEDIA),
    "compute_accuracy": Setting("bool", note="the loss alone is measured"),
    "plot_loss": Setting("bool", note="training.png is always drawn"),
    "include_effective_tokens_per_second": Setting("bool", note="tokens per second are always in metrics.jsonl"),
}
OPTIMIZERS: dict[str, Setting] = {
    "use_galore": Setting("bool", False),
    "galore_target": Setting("text", "all", choices=("all",), reason="set targets in optimizer.options"),
    "galore_rank": Setting("int", 16, least=1),
    "galore_update_interval": Setting("int", 200, least=1),
    "galore_scale": Setting("float", 2.0),
    "galore_proj_type": Setting("text", "std", choices=("std", "reverse_std", "left", "right", "full")),
    "galore_layerwise": Setting("bool", False),
    "use_muon": Setting("bool", False),
    **refused("APOLLO here scales otherwise: set optimizer.name yourself", use_apollo=False),
    **noted({"any": "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj"}, "of use_apollo"),
    **noted({"any": "apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front"}, "of use_apollo"),
    **refused("BAdam is not supported", use_badam=False),
    **noted({"any": "badam_mode badam_start_block badam_switch_mode badam_switch_interval"}, "of use_badam"),
    **noted({"any": "badam_update_ratio badam_mask_mode badam_verbose"}, "of use_badam"),
    **refused("Adam-mini is not supported", use_adam_mini=False),
}
PREFERENCE: dict[str, Setting] = {
    "pref_beta": Setting("float", 0.1),
    "pref_loss": Setting("text", "sigmoid", choices=LOSSES, reason=NO_LOSS),
    **refused("a mixture of losses is not supported", pref_ftx=0.0, pref_bco_weight=0.0),
    "dpo_label_smoothing": Setting("float", 0.0),
    **refused("answers are not weighted by their length", ld_alpha=1.0),
    "ref_model": Setting("text"),
    **refused("merge it into a folder of its own", ref_model_adapters="", ref_model_quantization_bit=None),
    **noted({"any": "simpo_gamma kto_chosen_weight kto_rejected_weight ppo_buffer_size ppo_epochs"}, "of other stages"),
    **noted({"any": "ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters"}, "of PPO"),
    **noted({"any": "reward_model_quantization_bit reward_model_type"}, "of PPO"),
}
OTHERS: dict[str, Setting] = {
    **refused("metrics.trackers names the trackers that are supported", use_swanlab=False),
    **noted(
        {"any": "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key"}, "of use_swanlab"
    ),
    **noted({"any": "swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret"}, "of use_swanlab"),
    **refused("set training.float8 in the job", fp8=False, fp8_enable_fsdp_float8_all_gather=False),
    **noted({"any": "fp8_backend"}, "of fp8"),
    **refused("parallelism.* is the plan", use_mca=False, use_megatron_bridge=False, use_hyper_parallel=False),
    **refused(
        "parallelism.* is the plan",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        sequence_parallel=False,
    ),
    **noted({"any": "hyper_parallel_args hyper_parallel_cp_size"}, "of use_hyper_parallel"),
    "ray_num_workers": Setting("int", note="it counts with USE_RAY=1 before the command, or give --world-size N"),
    **noted({"any": "ray_init_kwargs master_addr master_port ray_run_name ray_storage_path"}, "of the start"),
    **noted({"any": "resources_per_worker placement_strategy ray_storage_filesystem"}, "of the start"),
    **noted(
        {"any": "enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps"}, "[profiling]"
    ),
    **noted(
        {"any": "profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory"}, "[profiling]"
    ),
    **noted({"any": "profiler_with_stack profile_modules"}, "[profiling]"),
    **noted(
        {"any": "kt_cpu_activation kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path"}, "of use_kt"
    ),
    **noted({"any": "kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size kt_config"}, "of use_kt"),
}
OPTIONS = ARGUMENTS | MODEL | DATA | METHOD | OPTIMIZERS | PREFERENCE | OTHERS
