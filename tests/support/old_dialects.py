"""The options of versions of PyTorch's torchtitan; for v0.2.2 with their defaults."""

JULY_2024 = """
[job] config_file dump_folder description use_for_integration_test
[profiling] enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder
[metrics] log_freq enable_color_printing enable_tensorboard save_tb_folder rank_0_only
[model] name flavor norm_type tokenizer_path
[optimizer] name lr fused
[training] dataset dataset_path batch_size seq_len warmup_steps max_norm steps data_parallel_degree
[training] tensor_parallel_degree enable_loss_parallel data_parallel_type mixed_precision_param mixed_precision_reduce
[training] compile enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp
[training] float8_scaling_type_input float8_scaling_type_weight float8_scaling_type_grad_output gc_freq
[experimental] pipeline_parallel_degree pipeline_parallel_split_points pipeline_parallel_schedule
[experimental] pipeline_parallel_split_mode pipeline_parallel_microbatches enable_async_tensor_parallel
[experimental] enable_compiled_autograd
[checkpoint] enable_checkpoint folder interval_type interval model_weights_only export_dtype create_seed_checkpoint
[checkpoint] async_mode keep_latest_k
[activation_checkpoint] mode selective_ac_option
[comm] init_timeout_seconds train_timeout_seconds trace_buf_size
[memory_estimation] enabled disable_fake_mode
"""
V0_1_0 = """
[job] config_file dump_folder description use_for_integration_test print_args
[profiling] enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder
[metrics] log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
[model] name flavor tokenizer_path converters print_after_conversion use_flex_attn attn_mask_type
[optimizer] name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
[lr_scheduler] warmup_steps decay_ratio decay_type lr_min
[training] dataset dataset_path batch_size local_batch_size global_batch_size seq_len max_norm steps
[training] enable_cpu_offload mixed_precision_param mixed_precision_reduce compile gc_freq gc_debug seed deterministic
[parallelism] data_parallel_replicate_degree enable_compiled_autograd data_parallel_shard_degree
[parallelism] fsdp_reshard_after_forward tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel
[parallelism] pipeline_parallel_degree pipeline_parallel_split_points pipeline_parallel_layers_per_stage
[parallelism] pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size
[parallelism] context_parallel_degree context_parallel_rotate_method
[checkpoint] enable_checkpoint folder initial_load_path initial_load_model_weights_only interval
[checkpoint] last_save_model_weights_only export_dtype create_seed_checkpoint async_mode keep_latest_k load_step
[checkpoint] exclude_from_loading enable_first_step_checkpoint
[activation_checkpoint] mode selective_ac_option
[float8] enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd
[float8] recipe_name filter_fqns emulate
[mx] use_fp8_dim1_cast_triton_kernel recipe_name filter_fqns
[comm] init_timeout_seconds train_timeout_seconds trace_buf_size
[memory_estimation] enabled disable_fake_mode
[fault_tolerance] enable replica_id group_size min_replica_size semi_sync_method sync_steps should_quantize
[fault_tolerance] fragment_sync_delay fragment_update_alpha
[experimental] custom_import custom_args_module
"""
AUGUST_2025 = """
[model] hf_assets_path
[training] debug_moe_force_load_balance
[parallelism] module_fqns_per_model_part pipeline_parallel_first_stage_less_layers
[parallelism] pipeline_parallel_last_stage_less_layers expert_parallel_degree
[compile] enable components
[checkpoint] initial_load_model_only initial_load_in_hf last_save_model_only last_save_in_hf
[checkpoint] last_save_in_safetensors_format
[activation_checkpoint] per_op_sac_force_recompute_mm_shapes_by_fqns
[float8] moe_fqns_prototype moe_fqns
[mx] mxfp8_dim1_cast_kernel_choice moe_fqns
[quantize.dense.float8] enable_fsdp_float8_all_gather recipe_name filter_fqns emulate
[quantize.dense.mx] mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns
[quantize.moe.float8] fqns
[quantize.moe.mx] recipe_name fqns
[fault_tolerance] process_group process_group_timeout_ms num_fragments module_fqns_per_model_fragment
[comm] save_traces_folder
[validation] enabled dataset dataset_path local_batch_size seq_len freq steps
"""
BETWEEN = """
[training] data_parallel_replicate_degree data_parallel_shard_degree context_parallel_degree enable_cpu_offload
[experimental] context_parallel_degree custom_model_path
[float8] enable_float8_linear scaling_type_input scaling_type_weight scaling_type_grad_output
"""
EXPERIMENTS = """
[training] classifer_free_guidance_prob classifier_free_guidance_prob img_size test_mode
[encoder] t5_encoder clip_encoder autoencoder_path max_t5_encoding_len
[eval] enable_classifer_free_guidance classifier_free_guidance_scale denoising_steps eval_freq save_img_folder
[validation] enable_classifier_free_guidance classifier_free_guidance_scale denoising_steps all_timesteps
[validation] save_img_count save_img_folder
[inference] save_img_folder prompts_path local_batch_size
[data] max_images_per_batch max_patches_per_image patch_size spatial_merge_size packing_buffer_size
[hf_transformers] model
[compile] model_backend_override passes joint_passes
"""
V0_2_2 = """
[job]
dump_folder = './outputs'
description = 'default job'
print_config = false
custom_config_module = ''
[profiling]
enable_profiling = false
save_traces_folder = 'profile_traces'
profile_freq = 10
profiler_active = 1
profiler_warmup = 3
enable_memory_snapshot = false
save_memory_snapshot_folder = 'memory_snapshot'
[metrics]
log_freq = 10
enable_tensorboard = false
disable_color_printing = false
save_tb_folder = 'tb'
save_for_all_ranks = false
enable_wandb = false
[model]
name = 'llama3'
flavor = 'debugmodel'
hf_assets_path = './tests/assets/tokenizer'
converters = []
print_after_conversion = false
[optimizer]
name = 'AdamW'
lr = 0.0008
beta1 = 0.9
beta2 = 0.95
eps = 1e-08
weight_decay = 0.1
implementation = 'fused'
early_step_in_backward = false
[lr_scheduler]
warmup_steps = 200
decay_type = 'linear'
min_lr_factor = 0.0
[training]
dataset = 'c4_test'
local_batch_size = 8
global_batch_size = -1
seq_len = 2048
max_norm = 1.0
steps = 10000
enable_cpu_offload = false
dtype = 'float32'
mixed_precision_param = 'bfloat16'
mixed_precision_reduce = 'float32'
gc_freq = 50
gc_debug = false
[training.dataloader]
num_workers = 0
persistent_workers = false
pin_memory = false
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = 'default'
tensor_parallel_degree = 1
disable_loss_parallel = false
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_first_stage_less_layers = 1
pipeline_parallel_last_stage_less_layers = 1
pipeline_parallel_schedule = '1F1B'
pipeline_parallel_schedule_csv = ''
pipeline_parallel_microbatch_size = 1
pipeline_parallel_expert_parallel_overlap = true
context_parallel_degree = 1
context_parallel_load_balancer = 'headtail'
context_parallel_rotate_method = 'allgather'
expert_parallel_degree = 1
expert_tensor_parallel_degree = 1
expert_parallel_comm_backend = 'standard'
[checkpoint]
enable = false
enable_ft_dataloader_checkpoints = true
folder = 'checkpoint'
interval = 500
initial_load_model_only = true
initial_load_in_hf = false
initial_load_in_hf_quantized = false
last_save_model_only = true
last_save_in_hf = false
export_dtype = 'float32'
async_mode = 'disabled'
keep_latest_k = 10
load_step = -1
exclude_from_loading = []
enable_first_step_checkpoint = false
create_seed_checkpoint = false
load_only = false
[activation_checkpoint]
mode = 'selective'
selective_ac_option = '2'
per_op_sac_force_recompute_mm_shapes_by_fqns = ['moe.router.gate']
early_stop = false
memory_budget = 0.5
visualize_memory_budget_pareto = false
preserve_rng_state = true
determinism_check = 'default'
debug = false
[compile]
enable = false
components = ['model', 'loss']
backend = 'inductor'
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = []
emulate = false
[quantize.linear.mx]
mxfp8_dim1_cast_kernel_choice = 'triton'
recipe_name = 'mxfp8_cublas'
filter_fqns = ['output']
[quantize.grouped_mm.float8]
fqns = []
[quantize.grouped_mm.mx]
recipe_name = 'mxfp8'
fqns = []
[comm]
init_timeout_seconds = 300
train_timeout_seconds = 100
trace_buf_size = 20000
save_traces_folder = 'comm_traces'
save_traces_file_prefix = 'rank_'
mode = 'default'
[memory_estimation]
enable = false
disable_fake_mode = false
[fault_tolerance]
enable = false
process_group = 'gloo'
process_group_timeout_ms = 10000
replica_id = 0
group_size = 0
min_replica_size = 1
[experimental]
custom_import = ''
custom_args_module = ''
[validation]
enable = false
dataset = 'c4_validation'
local_batch_size = 8
seq_len = 2048
freq = 10
steps = -1
[validation.dataloader]
num_workers = 0
persistent_workers = false
pin_memory = false
[debug]
deterministic = false
deterministic_warn_only = false
moe_force_load_balance = false
"""
UNSET_IN_V0_2_2 = """
[job] config_file save_config_file
[model] tokenizer_path
[lr_scheduler] total_steps decay_ratio
[training] dataset_path
[training.dataloader] prefetch_factor
[parallelism] module_fqns_per_model_part pipeline_parallel_layers_per_stage
[checkpoint] initial_load_path
[quantize.linear.float8] recipe_name
[fault_tolerance] semi_sync_method
[validation] dataset_path
[validation.dataloader] prefetch_factor
[debug] seed
"""


def option_names(text: str) -> list[str]:
    """Return the full names of the options listed in a dialect."""
    qualified_names = []
    for line in text.strip().splitlines():
        section, _, names = line.partition("] ")
        qualified_names += [f"{section[1:]}.{name}" for name in names.split()]
    return qualified_names


def flatten(table: dict, prefix: str = "") -> dict:
    """Flatten nested tables to {"section.option": value}."""
    values = {}
    for key, value in table.items():
        values |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values
