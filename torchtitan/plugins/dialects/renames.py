"""Options of the TOML dialects of PyTorch's torchtitan that have moved or no longer exist.

Covers all dialects from the flat one of July 2024 to v0.2.2 (February 2026). upgrade.py translates whole jobs; the
options of float8 training, which have to be read together, are translated here.
"""

from collections.abc import Callable
from typing import Any

from torchtitan.config.changes import Moved, Removed
from torchtitan.core.errors import JobError

# float8 training, which the older dialects spread over up to three sections
FLOAT8_CONVERTERS = ("float8", "quantize.linear.float8", "quantize.dense.float8")
"""Names of the conversion in model.converters; also the sections of its options."""
FLOAT8_SWITCHES = ("training.enable_float8_linear", "float8.enable_float8_linear")
FLOAT8_RECIPES = ("tensorwise", "rowwise")
FLOAT8_HEAD = "output"
FLOAT8_AUTOMATIC = "auto_filter_small_kn"
"""Excluded the matrices that torchao measured as too small."""
FLOAT8_EXPERTS = (
    "float8.moe_fqns",
    "float8.moe_fqns_prototype",
    "quantize.moe.float8.fqns",
    "quantize.grouped_mm.float8.fqns",
)
FLOAT8, FLOAT8_EXCLUDE = "training.float8", "training.float8_exclude"


def _negated(value: Any) -> Any:
    return not value if isinstance(value, bool) else value  # other values are refused at the new option


def _fused(value: Any) -> Any:
    return {True: "fused", False: "foreach"}[value] if isinstance(value, bool) else value


def _new_values(**new_names: str | None) -> Callable[[Any], Any]:
    """Return a function that renames values and leaves others, to be checked at the new option."""
    return lambda value: new_names.get(value, value) if isinstance(value, str) else value


def _by_hand(advice: str) -> Callable[[Any], Any]:
    def refuse(value: Any) -> Any:
        raise JobError(advice)

    return refuse


def _split_points(value: Any) -> None:
    if value:
        raise JobError('list the module names of each stage there, e.g. [["tok_embeddings", "layers.0"], ...]')


def _checkpoint_folder(value: Any) -> Any:
    if value:
        raise JobError(
            "checkpoints were on where a folder was given: set checkpoint.enable = true, and the folder there"
        )
    return None


def _fp8_linear(value: Any) -> Any:
    """Translate the first name of float8 training: a switch, then the kind of its scales."""
    if value not in (False, "", True, "dynamic"):
        raise JobError('only dynamic scales are here: write "tensorwise"')
    return "tensorwise" if value else "none"


_masks = {"causal": None, "block_causal": True}
_schedule = _new_values(
    **{"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"},
    # classes that ran the schedule of a file; None: left out, since the file is enough
    **{"PipelineScheduleSingle": None, "PipelineScheduleMulti": None, "_PipelineScheduleRuntime": None},
)
_fp8 = "the device and the recipe decide it"
_gathers = "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp"
_fp8_gather = "tensorwise weights are gathered in float8, at the same results"
_fp8_experts = "stacks of experts stay in training.mixed_precision_param"
_mx = "mx formats are not in this version"
_ft = "fault tolerance by torchft is not in this version"
_plugin = "code named by a job file is not run"
_estimate = "torchtitan estimate predicts the memory"
_recorder = "torch's environment variables set where the flight recorder writes"
_image = "models of images (flux, vlm) are not in this version"
_compiler = "passes of experimental compilers are not in this version"
_balance = "tokens go to the experts that the router chooses"
_flat: tuple[str, ...] = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "context_parallel_degree")
_flat += ("tensor_parallel_degree", "pipeline_parallel_degree", "enable_async_tensor_parallel")
_flat += ("context_parallel_rotate_method", "fsdp_reshard_after_forward", "disable_loss_parallel")

BEFORE_JULY_2024: dict[str, Moved] = {
    "global.dump_folder": Moved("job.dump_folder"),
    "profiling.run_profiler": Moved("profiling.enable_profiling"),
    "profiling.profile_every_x_iter": Moved("profiling.profile_freq"),
    "training.checkpoint_folder": Moved("checkpoint.folder", _checkpoint_folder),
    "training.checkpoint_interval": Moved("checkpoint.interval"),
    "training.fp8_linear": Moved("training.float8", _fp8_linear),
    "training.enable_fp8_linear": Moved("training.float8", _fp8_linear),
    "training.sequence_parallel_degree": Moved("parallelism.tensor_parallel_degree"),
    "training.enable_selective_ac": Moved(
        "activation_checkpoint.mode", _by_hand('write "selective" for true; for false, "full"')
    ),
    "training.warmup_pct": Moved(
        "lr_scheduler.warmup_steps", _by_hand("give the number of steps: this share of training.steps")
    ),
}
"""Options that only the first dialect had, before its first release."""

MOVED: dict[str, Moved] = {
    "job.print_args": Moved("job.print_config"),
    "metrics.enable_color_printing": Moved("metrics.disable_color_printing", _negated),
    "metrics.rank_0_only": Moved("metrics.save_for_all_ranks", _negated),
    "model.hf_assets_path": Moved("model.tokenizer_path"),
    "model.attn_mask_type": Moved("training.document_mask", lambda value: _masks.get(value, value)),
    "optimizer.fused": Moved("optimizer.implementation", _fused),
    "lr_scheduler.lr_min": Moved("lr_scheduler.min_lr_factor"),
    "training.warmup_steps": Moved("lr_scheduler.warmup_steps"),
    **{f"{old}.enable_float8_linear": Moved("training.float8") for old in ("training", "float8")},
    **{f"{old}.recipe_name": Moved("training.float8") for old in FLOAT8_CONVERTERS},
    **{f"{old}.filter_fqns": Moved("training.float8_exclude") for old in FLOAT8_CONVERTERS},
    **BEFORE_JULY_2024,
    "training.batch_size": Moved("training.local_batch_size"),
    "training.compile": Moved("compile.enable"),
    "training.seed": Moved("debug.seed"),
    "training.deterministic": Moved("debug.deterministic"),
    "training.enable_loss_parallel": Moved("parallelism.disable_loss_parallel", _negated),
    "training.data_parallel_degree": Moved("parallelism.data_parallel_shard_degree"),
    "training.data_parallel_type": Moved(
        "parallelism.data_parallel_replicate_degree",
        _by_hand('for "fsdp" leave both out; for "ddp" write the ranks here, and data_parallel_shard_degree = 1'),
    ),
    **{f"{old}.{key}": Moved(f"parallelism.{key}") for old in ("training", "experimental") for key in _flat},
    "experimental.pipeline_parallel_schedule": Moved("parallelism.pipeline_parallel_schedule", _schedule),
    "experimental.pipeline_parallel_split_points": Moved("parallelism.module_fqns_per_model_part", _split_points),
    "parallelism.pipeline_parallel_split_points": Moved("parallelism.module_fqns_per_model_part", _split_points),
    "experimental.pipeline_parallel_microbatches": Moved(
        "parallelism.pipeline_parallel_microbatch_size",
        _by_hand("give the samples of one microbatch there: the batch size divided by the number of microbatches"),
    ),
    "checkpoint.enable_checkpoint": Moved("checkpoint.enable"),
    "checkpoint.model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.last_save_model_weights_only": Moved("checkpoint.last_save_model_only"),
    "checkpoint.initial_load_model_weights_only": Moved("checkpoint.initial_load_model_only"),
    "checkpoint.last_save_in_safetensors_format": Moved("checkpoint.last_save_in_hf"),
    "validation.enabled": Moved("validation.enable"),
}

GONE: dict[str, Removed] = {
    # a line of 2026, `--module llama3 --config llama3_8b`: its jobs are functions there, and files here
    "module": Removed(
        "translate the line: torchtitan import torchtitan.train --module llama3 --config llama3_8b ...; or give a job "
        "alone, of those that `torchtitan presets ls` lists"
    ),
    "job.use_for_integration_test": Removed("it marked files for the tests of PyTorch's torchtitan", None),
    "metrics.use_for_integration_test": Removed("it marked files for the tests of PyTorch's torchtitan", None),
    "training.checkpoint_interval_type": Removed("checkpoint.interval counts steps", ("steps",)),
    "experimental.torch_spmd": Removed("collectives are not derived from types of tensors", (False,)),
    "job.save_config_file": Removed("the resolved job is always written, as config.toml in job.dump_folder", None),
    "job.custom_config_module": Removed(_plugin, ("",)),
    "experimental.custom_import": Removed(_plugin, ("",)),
    "experimental.custom_args_module": Removed(_plugin, ("",)),
    "experimental.custom_model_path": Removed(_plugin, ("",)),
    "experimental.enable_compiled_autograd": Removed("compiled autograd is not in this version", (False,)),
    "parallelism.enable_compiled_autograd": Removed("compiled autograd is not in this version", (False,)),
    "experimental.pipeline_parallel_split_mode": Removed("models are cut by module names alone", ("manual",)),
    "model.use_flex_attn": Removed("model.attention_backend chooses the kernel that fits the mask", None),
    # norms that compute the same, by other kernels
    "model.norm_type": Removed("norms are RMSNorm", ("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm")),
    "model.converters": Removed("training.float8 takes the place of float8; mx is not in this version", ([], "")),
    "model.print_after_conversion": Removed("there are no model converters", None),
    # settings of the features that the switches above turn on
    **{
        f"{section}.{key}": Removed(reason, None)
        for section, reason, keys in (
            *((name, _fp8_gather, _gathers) for name in ("training", *FLOAT8_CONVERTERS)),
            ("training", _fp8, "float8_scaling_type_input float8_scaling_type_weight float8_scaling_type_grad_output"),
            ("float8", _fp8, "scaling_type_input scaling_type_weight scaling_type_grad_output"),
            ("float8", _fp8, "force_recompute_fp8_weight_in_bwd"),
            ("float8", _fp8_experts, "moe_fqns_prototype moe_fqns"),
            *((name, _fp8, "emulate") for name in FLOAT8_CONVERTERS),
            ("mx", _mx, "moe_fqns"),
            ("mx", _mx, "use_fp8_dim1_cast_triton_kernel mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns"),
            ("quantize.linear.mx", _mx, "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns"),
            # the names of September 2025
            ("quantize.dense.mx", _mx, "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns"),
            ("quantize.moe.float8", _fp8_experts, "fqns"),
            ("quantize.moe.mx", _mx, "recipe_name fqns"),
            ("quantize.grouped_mm.float8", _fp8_experts, "fqns"),
            ("quantize.grouped_mm.mx", _mx, "recipe_name fqns"),
            ("fault_tolerance", _ft, "process_group process_group_timeout_ms replica_id group_size min_replica_size"),
            ("fault_tolerance", _ft, "semi_sync_method sync_steps should_quantize fragment_sync_delay"),
            ("fault_tolerance", _ft, "fragment_update_alpha num_fragments module_fqns_per_model_fragment"),
            ("checkpoint", _ft, "enable_ft_dataloader_checkpoints"),
            ("memory_estimation", _estimate, "disable_fake_mode"),
        )
        for key in keys.split()
    },
    "fault_tolerance.enable": Removed(_ft, (False,)),
    "memory_estimation.enable": Removed(_estimate, (False,)),
    "memory_estimation.enabled": Removed(_estimate, (False,)),
    "parallelism.expert_tensor_parallel_degree": Removed("tensor parallel leaves experts whole", (1,)),
    "parallelism.expert_parallel_comm_backend": Removed("tokens travel by torch's own all-to-all", ("standard",)),
    "debug.moe_force_load_balance": Removed(_balance, (False,)),
    "training.debug_moe_force_load_balance": Removed(_balance, (False,)),
    # options of experiments there, which have no meaning for a language model trained here
    **{
        f"{section}.{key}": Removed(reason)
        for section, reason, keys in (
            ("training", _image, "guidance"),
            ("training", _image, "classifer_free_guidance_prob classifier_free_guidance_prob img_size test_mode"),
            (
                "encoder",
                _image,
                "auto_encoder_path t5_encoder clip_encoder autoencoder_path max_t5_encoding_len test_mode",
            ),
            ("encoder", _image, "autoencoder_shift autoencoder_scale context_in_dim empty_encodings_path"),
            ("eval", _image, "enable_classifer_free_guidance enable_classifier_free_guidance eval_freq"),
            (
                "eval",
                _image,
                "classifer_free_guidance_scale classifier_free_guidance_scale denoising_steps save_img_folder",
            ),
            ("validation", _image, "enable_classifer_free_guidance enable_classifier_free_guidance"),
            ("validation", _image, "classifier_free_guidance_scale denoising_steps all_timesteps eval_freq"),
            ("validation", _image, "save_img_count save_img_folder"),
            ("inference", _image, "save_img_folder prompts_path local_batch_size save_path batch_size img_size"),
            ("data", _image, "max_images_per_batch max_patches_per_image patch_size spatial_merge_size"),
            ("data", _image, "packing_buffer_size"),
            ("compile", _compiler, "model_backend_override passes joint_passes graph_passes"),
            ("hf_transformers", "models of transformers are not run; their weights are read", "model"),
        )
        for key in keys.split()
    },
    "checkpoint.create_seed_checkpoint": Removed(
        "initial weights are a function of debug.seed and the parameter's name, equal on any number of ranks", (False,)
    ),
    "checkpoint.initial_load_in_hf_quantized": Removed("the folder's config.json has the format of its weights", None),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Removed(
        '"op" keeps every matrix product', (["moe.router.gate"], [])
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": Removed("the budget's curve is not drawn", (False,)),
    "activation_checkpoint.determinism_check": Removed("torch's own check stays at its default", ("default",)),
    "activation_checkpoint.debug": Removed("recompute has no debug mode here", (False,)),
    "comm.save_traces_folder": Removed(_recorder, ("comm_traces",)),
    "comm.save_traces_file_prefix": Removed(_recorder, ("rank_",)),
    "comm.mode": Removed("a job trains; it does not run without communication", ("default",)),
    "validation.dataloader.num_workers": Removed("validation uses training.dataloader", (0,)),
    "validation.dataloader.persistent_workers": Removed("validation uses training.dataloader", (False,)),
    "validation.dataloader.pin_memory": Removed("validation uses training.dataloader", (False,)),
    "validation.dataloader.prefetch_factor": Removed("validation uses training.dataloader"),
}

VALUES: dict[str, Callable[[Any], Any]] = {
    "training.dataset": _new_values(c4_mini="c4_test"),
    "parallelism.pipeline_parallel_schedule": _schedule,
    "parallelism.context_parallel_load_balancer": lambda value: value or "none",
    "parallelism.pipeline_parallel_schedule_csv": lambda value: value or None,
}
"""Renamed values of options that kept their names; None: left out, as the value is the default now."""


def translate_float8(
    old: dict[str, Any], values: dict[str, Any], notes: list[str], stuck: list[tuple[str, Any, str]]
) -> None:
    """Move the options of float8 from `old` to `values`, or drop them where it was off.

    Notes and options without a translation (option, value, reason) are appended to the lists.
    """
    converters = old.get("model.converters") or []
    if not isinstance(converters, list):  # v0.1.0 separated the names by commas
        converters = [name.strip() for name in str(converters).split(",")]
    was_on = any(old.get(key) is True for key in FLOAT8_SWITCHES) or any(
        name in FLOAT8_CONVERTERS for name in converters
    )
    options = {key: old.pop(key) for key in list(old) if _is_float8_option(key)}
    if not was_on:
        notes.extend(f"left out, changed nothing: {key} (float8 was off)" for key in options)
        return
    if other_names := [name for name in converters if name not in FLOAT8_CONVERTERS]:
        old["model.converters"] = other_names
    else:
        old.pop("model.converters", None)
    recipe: str = "tensorwise"
    excluded: list[Any] = []
    for key, value in options.items():
        name = key.rpartition(".")[2]
        if name == "recipe_name" and value is not None:
            if value in FLOAT8_RECIPES:
                recipe = value
            else:
                stuck.append((key, value, f"{FLOAT8} is one of {', '.join(FLOAT8_RECIPES)}"))
        elif name == "filter_fqns":
            excluded = value if isinstance(value, list) else [value]
            if FLOAT8_AUTOMATIC in excluded:
                stuck.append((key, value, f"list the linears to leave out, in {FLOAT8_EXCLUDE}"))
        elif "scaling_type" in name and value != "dynamic":
            stuck.append((key, value, "scales follow from the numbers of each product"))
        elif key in FLOAT8_EXPERTS and value:
            stuck.append((key, value, "stacks of experts stay in training.mixed_precision_param"))
    values[FLOAT8] = recipe
    if patterns := [f"*{name}*" for name in excluded if name not in (FLOAT8_HEAD, FLOAT8_AUTOMATIC)]:
        values[FLOAT8_EXCLUDE] = patterns
    notes.append(f"moved: {', '.join([*options] or ['model.converters'])} -> {FLOAT8}")
    if FLOAT8_SWITCHES[0] not in options and FLOAT8_HEAD not in excluded:
        notes.append("not the same: the head multiplied in float8 too; here it does not")


def _is_float8_option(key: str) -> bool:
    section = key.rpartition(".")[0]
    return section in FLOAT8_CONVERTERS or key in FLOAT8_EXPERTS or (section == "training" and "float8" in key)
