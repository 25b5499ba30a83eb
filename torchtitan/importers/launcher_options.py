"""What becomes of each option of accelerate launch, torchrun and deepspeed. launchers.py reads those that are neither
the same here, nor noted, nor refused.
"""

from collections.abc import Mapping
from typing import Any

from torchtitan.importers.axolotl_options import Fate

START = "torchtitan train starts the ranks"
"""The note of options that say how processes are started, and nothing about the training."""
MACHINES = "start torchtitan train on every machine, see docs/jobs.md"
NO_TPU = "there are no TPUs here"
NO_MEGATRON = "no model of Megatron-LM is built; parallelism.* shards the model"
NO_FP8 = "products are in bfloat16 or float32"
NO_SEQUENCE_PARALLEL = (
    "DeepSpeed's sequence parallelism is not here; parallelism.context_parallel_degree shards sequences"
)
NO_DISK = "nothing is moved to disks"


def _started(kind: str) -> Fate:
    return Fate(kind, note=START)


def _all(names: str, fate: Fate) -> dict[str, Fate]:
    return dict.fromkeys(names.split(), fate)


FLAG, TEXT, INT = Fate("bool"), Fate("text"), Fate("int")
"""Read by launchers.py. An option of kind bool takes no value."""
ACCELERATE: dict[str, Fate] = {
    **_all("config_file mixed_precision", TEXT),
    **_all("num_processes", INT),
    **_all("quiet multi_gpu module m no_python q no_tpu_cluster", _started("bool")),
    **_all("tee t log_dir role monitor_interval rdzv_conf", _started("text")),
    **_all("num_machines machine_rank main_process_ip main_process_port rdzv_backend", Fate("text", note=MACHINES)),
    **_all("mpirun_hostfile", Fate("text", note=MACHINES)),
    "same_network": Fate("bool", note=MACHINES),
    "max_restarts": Fate("int", to="job.max_restarts"),
    "cpu": Fate("bool", note="CUDA_VISIBLE_DEVICES= (empty) in the environment keeps a job on the CPU"),
    "gpu_ids": Fate("text", note="CUDA_VISIBLE_DEVICES in the environment says on which GPUs a job runs"),
    "num_cpu_threads_per_process": Fate("int", note="OMP_NUM_THREADS in the environment says this"),
    "enable_cpu_affinity": Fate("bool", note="ranks always run on the processors next to their GPU"),
    "debug": Fate("bool", note="it only adds checks of what ranks send each other"),
    **_all("tpu tpu_cluster tpu_use_sudo downcast_bf16", Fate("bool", reason=NO_TPU)),
    **_all("vm env main_training_function", Fate("text", reason=NO_TPU)),
    **_all("aws_access_key_id aws_secret_access_key", Fate("text", reason="nothing is started on SageMaker")),
}
COMPILING: dict[str, Fate] = {
    "dynamo_backend": TEXT,
    "dynamo_mode": Fate("text"),
    "dynamo_use_fullgraph": Fate("bool", note="blocks are always compiled as one graph each"),
    "dynamo_use_dynamic": Fate("bool", note="shapes are dynamic only where batches have several lengths"),
    "dynamo_use_regional_compilation": Fate("bool", note="blocks are always compiled one by one"),
}
DEEPSPEED: dict[str, Fate] = {
    "use_deepspeed": FLAG,
    "deepspeed_config_file": TEXT,
    "zero_stage": INT,
    **_all("offload_optimizer_device offload_param_device", TEXT),
    **_all("offload_optimizer_nvme_path offload_param_nvme_path", Fate("text", reason=NO_DISK)),
    "gradient_accumulation_steps": INT,
    "gradient_clipping": Fate("float"),
    "zero3_init_flag": Fate("text", note="weights are always made on the rank that holds them"),
    "zero3_save_16bit_model": Fate("text", note="checkpoint.export_dtype is the type of what is exported"),
    **_all("deepspeed_hostfile deepspeed_exclusion_filter", Fate("text", note=MACHINES)),
    **_all("deepspeed_inclusion_filter deepspeed_multinode_launcher", Fate("text", note=MACHINES)),
    "deepspeed_moe_layer_cls_names": Fate("text", note="parameters are gathered block by block, experts too"),
}
FSDP: dict[str, Fate] = {
    "use_fsdp": FLAG,
    **_all("fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_offload_params fsdp_activation_checkpointing", TEXT),
    "fsdp_activation_checkpointing_offload": TEXT,
    "fsdp_version": Fate("text", note="FSDP is that of fully_shard, version 2"),
    **_all(
        "fsdp_auto_wrap_policy fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
        Fate("text", note="each block of the model is gathered by itself"),
    ),
    **_all("fsdp_backward_prefetch fsdp_forward_prefetch", Fate("text", note="the next block is always prefetched")),
    "fsdp_state_dict_type": Fate("text", note="checkpoints are always sharded; torchtitan export joins them"),
    "fsdp_use_orig_params": Fate("text", note="parameters always keep their names and shapes"),
    **_all(
        "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states",
        Fate("text", note="each rank reads from a checkpoint only what it holds"),
    ),
}
PARALLELISM: dict[str, Fate] = {
    "use_parallelism_config": FLAG,
    "parallelism_config_dp_replicate_size": Fate("int", to="parallelism.data_parallel_replicate_degree"),
    "parallelism_config_dp_shard_size": Fate("int", to="parallelism.data_parallel_shard_degree"),
    "parallelism_config_tp_size": Fate("int", to="parallelism.tensor_parallel_degree"),
    "parallelism_config_cp_size": Fate("int", to="parallelism.context_parallel_degree"),
    "parallelism_config_cp_comm_strategy": Fate("text", to="parallelism.context_parallel_rotate_method"),
    "parallelism_config_cp_backend": Fate("text", note="context parallelism is always torch's own"),
    "parallelism_config_sp_size": INT,
    **_all(
        "parallelism_config_sp_backend parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable",
        Fate("text", reason=NO_SEQUENCE_PARALLEL),
    ),
    "parallelism_config_sp_attn_implementation": Fate("text", reason=NO_SEQUENCE_PARALLEL),
}
MEGATRON: dict[str, Fate] = _all(
    """tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim
    optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree num_micro_batches
    sequence_parallelism recompute_activations use_distributed_optimizer gradient_clipping recompute_granularity
    recompute_method recompute_num_layers attention_backend expert_model_parallel_size context_parallel_size
    attention_dropout hidden_dropout attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss
    use_rotary_position_embeddings""",
    Fate("text", reason=NO_MEGATRON),
)
FP8: dict[str, Fate] = _all(
    """fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo
    fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim""",
    Fate("text", reason=NO_FP8),
)
SETUP = COMPILING | DEEPSPEED | FSDP | PARALLELISM | FP8
SETUP |= {f"megatron_lm_{name}": fate for name, fate in MEGATRON.items()}
SETUP |= {"use_megatron_lm": Fate("bool", reason=NO_MEGATRON), "mixed_precision": TEXT}
SETUP |= {"fp8_use_autocast_during_eval": Fate("bool", reason=NO_FP8)}
"""What accelerate sets up for a script that asks it to, and what has no effect in one that does not."""
TORCHRUN: dict[str, Fate] = {
    "nproc_per_node": TEXT,
    "nnodes": Fate("text"),
    "max_restarts": Fate("int", to="job.max_restarts"),
    **_all("standalone m module no_python run_path virtual_local_rank use_env", _started("bool")),
    **_all("monitor_interval start_method event_log_handler role log_dir redirects r tee t", _started("text")),
    **_all("local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters logs_specs", _started("text")),
    **_all("signals_to_handle shutdown_timeout", _started("text")),
    **_all("rdzv_backend rdzv_endpoint rdzv_id rdzv_conf node_rank", Fate("text", note=MACHINES)),
    **_all("master_addr master_port local_addr", Fate("text", note=MACHINES)),
    "numa_binding": Fate("text", note="ranks always run on the processors next to their GPU"),
}
DEEPSPEED_LAUNCHER: dict[str, Fate] = {
    **_all("num_gpus num_nodes", INT),
    **_all("module no_python no_local_rank enable_each_rank_log save_pid", _started("bool")),
    **_all("hostfile H include i exclude e master_addr master_port node_rank", Fate("text", note=MACHINES)),
    **_all("launcher launcher_args ssh_port", Fate("text", note=MACHINES)),
    **_all("force_multi no_ssh no_ssh_check", Fate("bool", note=MACHINES)),
    "bind_cores_to_rank": Fate("bool", note="ranks always run on the processors next to their GPU"),
    "bind_core_list": Fate("text", note="ranks always run on the processors next to their GPU"),
    "autotuning": Fate("text", reason="torchtitan bench measures what a job of other sizes would take"),
    "elastic_training": Fate("bool", reason="the number of ranks does not change within a run"),
    **_all("min_elastic_nodes max_elastic_nodes", Fate("int", reason="the number of ranks does not change in a run")),
}
OPTIONS: dict[str, dict[str, Fate]] = {
    "accelerate": ACCELERATE | SETUP,
    "torchrun": TORCHRUN,
    "deepspeed": DEEPSPEED_LAUNCHER,
}
"""By launcher; names have underscores and no dashes ahead."""
MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
MODULES |= {"accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed"}
"""Launchers by the module that python -m runs."""
OF_FILES = (
    "compute_environment",
    "main_training_function",
    "tpu_env",
    "tpu_use_cluster",
    "fp8_config",
    "mpirun_config",
)
"""Keys of a file of `accelerate config` that stand for no option."""
KINDS_OF_FILES = {"DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu"}
"""Options by what such a file has as distributed_type."""


def takes_value(launcher: str, name: str) -> bool:
    """Whether an option is followed by its value; an unknown one is taken to be."""
    fate = OPTIONS[launcher].get(name)
    return fate is None or fate.kind != "bool"


def options_of_file(config: Mapping[str, Any]) -> dict[str, str]:
    """The options of accelerate launch that a file of `accelerate config` stands for; nested tables hold some, too."""
    options: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            options |= options_of_file(value)
        elif name == "distributed_type":
            options |= {KINDS_OF_FILES[value]: ""} if isinstance(value, str) and value in KINDS_OF_FILES else {}
        elif name not in OF_FILES and value not in (None, [], {}):
            name = "cpu" if name == "use_cpu" else name
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if takes_value("accelerate", name):
                options[name] = text
            elif text not in ("false", "no"):
                options[name] = ""
    return options
