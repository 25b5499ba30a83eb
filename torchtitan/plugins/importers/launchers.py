"""Translate the options of accelerate launch, torchrun and deepspeed.

Each becomes an option of the job, a note in its head, or a refusal.

accelerate launch sets up mixed precision, sharding and compilation for a script that asks it to, as the Trainer of
transformers does. The script's own options take precedence over it.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torchtitan.config.options import hint
from torchtitan.plugins.importers.translation import FLOAT16, KINDS, CommandLine, JobDraft, Setting, same

START = "torchtitan train starts the ranks"
"""The note of options that say how processes are started, and nothing about the training."""
MACHINES = "start torchtitan train on every machine, see docs/jobs.md"
NO_TPU = "TPUs are not supported"
NO_MEGATRON = "models of Megatron-LM are not supported; parallelism.* shards the model"
NO_FP8 = "its recipes are others; set training.float8 in the job"
NO_SEQUENCE_PARALLEL = "use parallelism.context_parallel_degree, which shards sequences, instead of DeepSpeed's"
NO_DISK = "offloading to disks is not supported"
NUMA = "ranks always run on the processors next to their GPU"
FIXED_RANKS = "the number of ranks does not change within a run"

FLAG, TEXT, INT = Setting("bool"), Setting("text"), Setting("int")
"""Options that the code below reads. An option of kind bool takes no value."""
START_FLAG, START_TEXT = Setting("bool", note=START), Setting("text", note=START)
MACHINES_FLAG, MACHINES_TEXT = Setting("bool", note=MACHINES), Setting("text", note=MACHINES)


def _noted(note: str) -> Setting:
    return Setting("text", note=note)


def _refused(reason: str) -> Setting:
    return Setting("text", reason=reason)


ACCELERATE: dict[str, Setting] = {
    **same("config_file mixed_precision", TEXT),
    "num_processes": INT,
    **same("quiet multi_gpu module m no_python q no_tpu_cluster", START_FLAG),
    **same("tee t log_dir role monitor_interval rdzv_conf", START_TEXT),
    **same("num_machines machine_rank main_process_ip main_process_port rdzv_backend mpirun_hostfile", MACHINES_TEXT),
    "same_network": MACHINES_FLAG,
    "max_restarts": Setting("int", to="job.max_restarts"),
    "cpu": Setting("bool", note="an empty CUDA_VISIBLE_DEVICES in the environment keeps a job on the CPU"),
    "gpu_ids": _noted("set CUDA_VISIBLE_DEVICES in the environment to choose the GPUs"),
    "num_cpu_threads_per_process": Setting("int", note="set OMP_NUM_THREADS in the environment instead"),
    "enable_cpu_affinity": Setting("bool", note=NUMA),
    "debug": Setting("bool", note="it only checks what ranks send each other"),
    **same("tpu tpu_cluster tpu_use_sudo downcast_bf16", Setting("bool", reason=NO_TPU)),
    **same("vm env main_training_function", _refused(NO_TPU)),
    **same("aws_access_key_id aws_secret_access_key", _refused("SageMaker is not supported")),
}
COMPILE: dict[str, Setting] = {
    **same("dynamo_backend dynamo_mode", TEXT),
    "dynamo_use_fullgraph": Setting("bool", note="blocks are always compiled as one graph each"),
    "dynamo_use_dynamic": Setting("bool", note="shapes are dynamic only if batches have several lengths"),
    "dynamo_use_regional_compilation": Setting("bool", note="blocks are always compiled one by one"),
}
DEEPSPEED: dict[str, Setting] = {
    "use_deepspeed": FLAG,
    **same("zero_stage gradient_accumulation_steps", INT),
    **same("deepspeed_config_file offload_optimizer_device offload_param_device", TEXT),
    **same("offload_optimizer_nvme_path offload_param_nvme_path", _refused(NO_DISK)),
    "gradient_clipping": Setting("float"),
    "zero3_init_flag": _noted("weights are always created on the rank that holds them"),
    "zero3_save_16bit_model": _noted("checkpoint.export_dtype is the type of exported weights"),
    **same("deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter", MACHINES_TEXT),
    "deepspeed_multinode_launcher": MACHINES_TEXT,
    "deepspeed_moe_layer_cls_names": _noted("parameters are gathered block by block, including experts"),
}
FSDP: dict[str, Setting] = {
    "use_fsdp": FLAG,
    **same("fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_offload_params fsdp_activation_checkpointing", TEXT),
    "fsdp_activation_checkpointing_offload": TEXT,
    "fsdp_version": _noted("FSDP2 (fully_shard) is used"),
    **same(
        "fsdp_auto_wrap_policy fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
        _noted("each block of the model is always gathered by itself"),
    ),
    **same("fsdp_backward_prefetch fsdp_forward_prefetch", _noted("the next block is always prefetched")),
    "fsdp_state_dict_type": _noted("checkpoints are always sharded; torchtitan export joins them"),
    "fsdp_use_orig_params": _noted("parameters always keep their names and shapes"),
    **same(
        "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states",
        _noted("each rank reads only its own part of a checkpoint"),
    ),
}
GROUPS = ("dp_replicate", "dp_shard", "tp", "cp")
SIZE_OPTION = "parallelism_config_{}_size"
"""Name of the option of a group's size."""
PARALLELISM: dict[str, Setting] = {
    "use_parallelism_config": FLAG,
    **dict.fromkeys(map(SIZE_OPTION.format, GROUPS), INT),
    "parallelism_config_cp_comm_strategy": Setting("text", to="parallelism.context_parallel_rotate_method"),
    "parallelism_config_cp_backend": _noted("context parallelism has one backend"),
    "parallelism_config_sp_size": INT,
    **same(
        """parallelism_config_sp_backend parallelism_config_sp_seq_length parallelism_config_sp_attn_implementation
        parallelism_config_sp_seq_length_is_variable""",
        _refused(NO_SEQUENCE_PARALLEL),
    ),
}
MEGATRON: dict[str, Setting] = same(
    """tp_degree use_custom_fsdp no_load_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d no_save_optim
    optimizer_cpu_offload use_precision_aware_optimizer decoder_last_pipeline_num_layers pp_degree num_micro_batches
    sequence_parallelism recompute_activations use_distributed_optimizer gradient_clipping recompute_granularity
    recompute_method recompute_num_layers attention_backend expert_model_parallel_size context_parallel_size
    attention_dropout hidden_dropout attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss
    use_rotary_position_embeddings""",
    _refused(NO_MEGATRON),
)
FP8: dict[str, Setting] = same(
    """fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo
    fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim""",
    _refused(NO_FP8),
)
SETUP = COMPILE | DEEPSPEED | FSDP | PARALLELISM | FP8
SETUP |= {f"megatron_lm_{name}": option for name, option in MEGATRON.items()}
SETUP |= {"use_megatron_lm": Setting("bool", reason=NO_MEGATRON), "mixed_precision": TEXT}
SETUP |= {"fp8_use_autocast_during_eval": Setting("bool", reason=NO_FP8)}
"""What accelerate sets up for a script that asks it to. In other scripts it has no effect."""
TORCHRUN: dict[str, Setting] = {
    **same("nproc_per_node nnodes", TEXT),
    "max_restarts": Setting("int", to="job.max_restarts"),
    **same("standalone m module no_python run_path virtual_local_rank use_env", START_FLAG),
    **same("monitor_interval start_method event_log_handler role log_dir redirects r tee t", START_TEXT),
    **same("local_ranks_filter duplicate_stdout_filters duplicate_stderr_filters logs_specs", START_TEXT),
    **same("signals_to_handle shutdown_timeout", START_TEXT),
    **same("rdzv_backend rdzv_endpoint rdzv_id rdzv_conf node_rank master_addr master_port local_addr", MACHINES_TEXT),
    "numa_binding": _noted(NUMA),
}
DEEPSPEED_LAUNCHER: dict[str, Setting] = {
    **same("num_gpus num_nodes", INT),
    **same("module no_python no_local_rank enable_each_rank_log save_pid", START_FLAG),
    **same("hostfile H include i exclude e master_addr master_port node_rank", MACHINES_TEXT),
    **same("launcher launcher_args ssh_port", MACHINES_TEXT),
    **same("force_multi no_ssh no_ssh_check", MACHINES_FLAG),
    "bind_cores_to_rank": Setting("bool", note=NUMA),
    "bind_core_list": _noted(NUMA),
    "autotuning": _refused("torchtitan bench measures the time and memory of a job at other sizes"),
    "elastic_training": Setting("bool", reason=FIXED_RANKS),
    **same("min_elastic_nodes max_elastic_nodes", Setting("int", reason=FIXED_RANKS)),
}
OPTIONS: dict[str, dict[str, Setting]] = {
    "accelerate": ACCELERATE | SETUP,
    "torchrun": TORCHRUN,
    "deepspeed": DEEPSPEED_LAUNCHER,
}
"""By launcher; names have underscores and no leading dashes."""
MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
MODULES |= {"accelerate.commands.launch": "accelerate", "deepspeed.launcher.runner": "deepspeed"}
"""Launchers by the module that python -m runs."""
FILE_ONLY_KEYS = (
    *("compute_environment", "main_training_function", "tpu_env", "tpu_use_cluster", "fp8_config"),
    "mpirun_config",
)
"""Keys in a file of `accelerate config` that are no options."""
DISTRIBUTED_TYPES = {"DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "MEGATRON_LM": "use_megatron_lm", "XLA": "tpu"}
"""Values of distributed_type in such a file -> options."""

SHARDING = {"full_shard": "full_shard", "shard_grad_op": "shard_grad_op", "no_shard": "no_shard"}
SHARDING |= {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard"}
STAGES = {0: "no_shard", 1: "shard_grad_op", 2: "shard_grad_op", 3: "full_shard"}
DEFAULT_STAGE = 2
"""ZeRO stage of accelerate launch --use_deepspeed without a file or a stage."""
BACKENDS = ("eager", "aot_eager", "inductor", "cudagraphs")
MAX_NORM = 1.0
"""Default of the Trainer."""
DEFAULT_FILE = Path("~/.cache/huggingface/accelerate/default_config.yaml")
"""The file that `accelerate config` writes, and accelerate launch reads if none is named."""
NO, YES = ("no", "false", "none", ""), ("true", "1", "yes")


def takes_value(launcher: str, name: str) -> bool:
    """Return True if an option is followed by its value. An unknown one is assumed to be."""
    option = OPTIONS[launcher].get(name)
    return option is None or option.kind != "bool"


def options_of_file(config: Mapping[str, Any]) -> dict[str, str]:
    """Convert a file of `accelerate config`, with its nested tables, to options of accelerate launch."""
    options: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            options |= options_of_file(value)
        elif name == "distributed_type":
            options |= {DISTRIBUTED_TYPES[value]: ""} if isinstance(value, str) and value in DISTRIBUTED_TYPES else {}
        elif name not in FILE_ONLY_KEYS and value not in (None, [], {}):
            name = "cpu" if name == "use_cpu" else name
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if takes_value("accelerate", name):
                options[name] = text
            elif text not in ("false", "no"):
                options[name] = ""
    return options


def add(line: CommandLine, draft: JobDraft, is_accelerated: bool) -> None:
    """Add the options of the line's launcher to the draft of its script's job.

    `is_accelerated`: True if the script lets accelerate set up precision, sharding and compilation.
    """
    _Launch(line, draft, is_accelerated).read()


def deepspeed_file(line: CommandLine) -> str | None:
    """Return the path of the file that accelerate passes to DeepSpeed."""
    return line.launched.get("deepspeed_config_file")


def parallel_sizes(line: CommandLine) -> dict[str, int]:
    """Return the sizes of parallel groups that accelerate sets up: of dp_replicate, dp_shard, tp and cp, if given."""
    if "use_parallelism_config" not in line.launched:
        return {}
    sizes = {name: KINDS["int"][1](line.launched.get(SIZE_OPTION.format(name), "")) for name in GROUPS}
    return {name: size for name, size in sizes.items() if size is not None and size >= 1}


def sharding(line: CommandLine) -> set[str]:
    """Return how accelerate shards the model, named as one of FSDP's sharding strategies; empty if it does not."""
    options = line.launched
    if "use_deepspeed" in options or "zero_stage" in options:
        stage = options.get("zero_stage", str(DEFAULT_STAGE))
        return {STAGES[int(stage)]} if stage in map(str, STAGES) else set()
    if "use_fsdp" not in options:
        return set()
    strategy = options.get("fsdp_sharding_strategy", options.get("fsdp_reshard_after_forward", "true")).lower()
    strategy = "full_shard" if strategy in YES else "shard_grad_op" if strategy == "false" else strategy
    return {SHARDING[strategy]} if strategy in SHARDING else set()


class _Launch:
    def __init__(self, line: CommandLine, draft: JobDraft, is_accelerated: bool) -> None:
        self.line, self.job, self.is_accelerated = line, draft, is_accelerated
        self.name = "accelerate launch" if line.launcher == "accelerate" else line.launcher
        self.draft = draft.part_of(draft.source, f"{self.name} --")
        self.values, self.note, self.refuse = draft.values, draft.notes.append, self.draft.refuse
        self.options: dict[str, Any] = {}

    def read(self) -> None:
        if self.line.unread:
            unread = " ".join(self.line.unread)
            self.note(f"not read, before the launcher: {unread}; give the number of ranks with --world-size N")
        if not self.line.launcher:
            return
        of_start = [name for name in self.line.launched if not self._apply(name, self.line.launched[name])]
        if of_start:
            self.note(f"options of {self.name} without effect, as {START}: --{', --'.join(of_start)}")
        if self.is_accelerated:
            has_file = self.line.launcher != "accelerate" or "config_file" in self.line.launched
            if not has_file and DEFAULT_FILE.expanduser().is_file():
                self.note(f"{self.name}: its default file {DEFAULT_FILE} is not read; name it by --config_file")
            self._precision()
            self._compile()
            self._sizes()
            self._deepspeed()
            self._fsdp()

    def _apply(self, name: str, text: str) -> bool:
        """Apply the table to an option. Returns False for one that only says how processes are started."""
        option = OPTIONS[self.line.launcher].get(name)
        if option is None:
            self.refuse(name, text, f"an option of {self.name}", hint(name, OPTIONS[self.line.launcher]))
            return True
        value = True if option.kind == "bool" and not text else KINDS[option.kind][1](text)
        if value is None:
            self.refuse(name, text, option.allowed())
        elif option.reason:
            if value is not False:
                self.refuse(name, value, "nothing", option.reason)
        elif name in SETUP and not self.is_accelerated and text not in NO[:3]:
            reason = f"{self.line.script} does not use accelerate for this: its own flags set precision and sharding"
            self.refuse(name, value, f"nothing before {self.line.script}", reason)
        elif name in PARALLELISM and "use_parallelism_config" not in self.line.launched:
            self.note(f"{self.name} --{name}: no effect without --use_parallelism_config")
        elif option.note == START or (option.note == MACHINES and not self._has_machines()):
            return False
        elif option.note:
            self.note(f"{self.name} --{name}: {option.note}")
        elif option.to:
            self.values[option.to] = value
        self.options[name] = value
        return True

    def _has_machines(self) -> bool:
        counts = (self.line.launched.get(name, "1") for name in ("num_machines", "nnodes", "num_nodes"))
        return any(count != "1" for count in counts)

    def _precision(self) -> None:
        """Use the launcher's mixed precision unless the script's own options say bfloat16."""
        requested = self.options.get("mixed_precision", "no")
        if requested in NO or "mixed_precision" in self.job.launched:
            return
        if self.values.get("training.mixed_precision_param") == "bfloat16":
            if requested != "bf16":
                self.note(f"{self.name} --mixed_precision {requested}: bf16 of the file takes precedence")
        elif requested == "bf16":
            self.values["training.mixed_precision_param"] = "bfloat16"
            self.note(f"{self.name} --mixed_precision bf16: computes in bfloat16, though the file does not set bf16")
        else:
            self.refuse("mixed_precision", requested, "no or bf16", FLOAT16)

    def _compile(self) -> None:
        backend = str(self.options.get("dynamo_backend", "no")).lower()
        if (mode := self.options.get("dynamo_mode", "default")) != "default":
            self.refuse("dynamo_mode", mode, "default", "compile.* has no modes")
        if backend in NO:
            return
        if backend not in BACKENDS:
            self.refuse("dynamo_backend", backend, f"no, {', '.join(BACKENDS)}")
            return
        self.values["compile.enable"] = True
        self.values.setdefault("compile.backend", backend)

    def _sizes(self) -> None:
        """Check the sizes of parallel groups, on which the global batch depends: its reader has to read them."""
        is_read = "use_parallelism_config" in self.job.launched
        for name in map(SIZE_OPTION.format, GROUPS) if "use_parallelism_config" in self.options else ():
            size = self.options.get(name, 1)
            if size < 1:
                self.refuse(name, size, "at least 1")
            elif size > 1 and not is_read:
                remedy = "write the degrees into [parallelism] of the job, and the samples of a step"
                self.refuse(name, size, "1 for this script", remedy)

    def _deepspeed(self) -> None:
        stage = self.options.get("zero_stage")
        if stage is not None and stage not in STAGES:
            self.refuse("zero_stage", stage, "0, 1, 2 or 3")
        for name in ("offload_optimizer_device", "offload_param_device"):
            device = str(self.options.get(name, "none")).lower()
            if device == "cpu":
                self.values["training.enable_cpu_offload"] = True
                self.note(f"{self.name} --{name} cpu: parameters and optimizer are kept on the host together")
            elif device not in NO:
                self.refuse(name, device, "none or cpu", NO_DISK)
        job_values = {
            "gradient_accumulation_steps": self._passes(),
            "gradient_clipping": self.values.get("training.max_norm", MAX_NORM),
        }
        for name, job_value in job_values.items():
            value = self.options.get(name)
            if value is not None and job_value is not None and value != job_value:
                self.refuse(name, value, f"{job_value:g}, as the job has it", "set it only in the script's options")
            elif value is not None and job_value is None and value != 1:
                self.note(f"{self.name} --{name} {value:g}: not compared with the job; give --world-size N")
        if self.options.get("parallelism_config_sp_size", 1) != 1:
            sp_size = self.options["parallelism_config_sp_size"]
            self.refuse("parallelism_config_sp_size", sp_size, "1", NO_SEQUENCE_PARALLEL)

    def _passes(self) -> int | None:
        """Return the job's forward passes per step, or None if they are unknown."""
        local, total = (self.values.get(f"training.{name}_batch_size") for name in ("local", "global"))
        degrees = (self.values.get(f"parallelism.{name}_parallel_degree", 1) for name in ("tensor", "context"))
        ranks = (self.line.ranks or 0) // prod(degrees)
        return total // (local * ranks) if local and total and ranks else None

    def _fsdp(self) -> None:
        strategy = str(self.options.get("fsdp_sharding_strategy", "full_shard")).lower()
        if strategy not in SHARDING and strategy not in (*YES, *NO):
            allowed = "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
            remedy = "for a hybrid, set parallelism.data_parallel_replicate_degree in the job"
            self.refuse("fsdp_sharding_strategy", self.options["fsdp_sharding_strategy"], allowed, remedy)
        if self._is_on("fsdp_offload_params"):
            self.values["training.enable_cpu_offload"] = True
        if self._is_on("fsdp_activation_checkpointing"):
            self.values["activation_checkpoint.mode"] = "full"
        if self._is_on("fsdp_activation_checkpointing_offload"):
            self.refuse("fsdp_activation_checkpointing_offload", True, "false", "activations stay on their device")

    def _is_on(self, name: str) -> bool:
        return str(self.options.get(name, "false")).lower() in YES
