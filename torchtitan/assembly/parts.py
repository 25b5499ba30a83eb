"""Build the parts of a job: model, adapter, optimizers, schedulers, checkpointer. Only this package builds parts."""

import dataclasses
from collections.abc import Callable, Collection
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.adapters import ADAPTERS, NONE
from torchtitan.adapters.interface import Adapter, Unfrozen
from torchtitan.checkpoint import Checkpointer, TrainerHooks, base_weights
from torchtitan.checkpoint.folders import Metric
from torchtitan.checkpoint.layout import MODEL
from torchtitan.checkpoint.loading import NO_HEADS, Heads
from torchtitan.checkpoint.tokenization import tokenization_version
from torchtitan.config.batch_shape import batch_rows, microbatch_rows, padding_multiple, rows_per_sample
from torchtitan.config.changes import kept_job
from torchtitan.config.job import JobConfig
from torchtitan.config.sections.model import Parallelism
from torchtitan.core.cadence import Cadence, cadence_of
from torchtitan.core.constraints import check_measured_saves
from torchtitan.core.float8 import has_kernel
from torchtitan.datasets.conversations import end_of_turn_ids
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.datasets.tokenizer.chat_templates import resolve_template
from torchtitan.datasets.tokenizer.hf_json import template_file
from torchtitan.losses.objective import Objective
from torchtitan.losses.tasks import task_of
from torchtitan.lr_schedules import LRSchedule, schedule_of
from torchtitan.lr_scheduling import LRSchedulers, build_lr_schedulers
from torchtitan.models import converter_of, sizes_of
from torchtitan.models.attention import activate_flash_attention, use_shifted_groups
from torchtitan.models.dropout import add_embedding_noise
from torchtitan.models.float8 import use_float8
from torchtitan.models.hf.config import CONFIG, end_token_ids
from torchtitan.models.hf.save import build_extra_files, read_source
from torchtitan.models.spec import MODELS, ModelSpec
from torchtitan.optimizers.build import Optimizers, build_optimizers
from torchtitan.optimizers.spec import SHARED
from torchtitan.parallelisms.fsdp_messages import BITS, resharding
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.parallelisms.parallelize import ParallelOptions
from torchtitan.parallelisms.pipeline.pipeline_parallel import PipelineOptions
from torchtitan.parallelisms.plan import ParallelPlan
from torchtitan.process.distributed import device_type

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def matching_options(section: Any, target: Callable[..., Any], prefix: str = "") -> dict[str, Any]:
    """Return the options of a section that are arguments of `target`, with `prefix` removed from their names."""
    argument_names = signature(target).parameters
    values = {field.name.removeprefix(prefix): getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if name in argument_names}


def dims(config: JobConfig, world_size: int) -> ParallelDims:
    degrees = config.parallelism
    return ParallelDims(
        world_size=world_size,
        dp_replicate=degrees.data_parallel_replicate_degree,
        dp_shard=degrees.data_parallel_shard_degree,
        cp=degrees.context_parallel_degree,
        tp=degrees.tensor_parallel_degree,
        pp=degrees.pipeline_parallel_degree,
        ep=degrees.expert_parallel_degree,
    )


def tokenizer(config: JobConfig) -> Tokenizer:
    return build_tokenizer(config.model.tokenizer_path, **tokenizer_kwargs(config))


def tokenizer_kwargs(config: JobConfig) -> dict[str, Any]:
    """Return the arguments of build_tokenizer after the path."""
    return {
        "chat_template": config.data.chat_template,
        "version": tokenization_version(config.data, config.checkpoint, config.job),
    } | {"ignored_keys": config.model.ignore_config_keys}


def model_args(config: JobConfig, weights: str | Path | None = None) -> Any:
    """Return the model's sizes with the job's overrides; with `weights`, the sizes to read foreign weights with."""
    model = config.model
    args = sizes_of(model)
    return args if weights is None else converter_of(model).args_for_weights(weights, args, model.overrides)


def portable_job(config: JobConfig) -> JobConfig:
    """Return the job as saved with a run: absolute paths, the text of its template, the rules of its tokenization."""
    paths = {name: getattr(config.model, name) for name in ("tokenizer_path", "hf_folder")}
    absolute: dict[str, Any] = {n: str(Path(p).resolve()) for n, p in paths.items() if p and Path(p).exists()}
    template = config.data.chat_template and resolve_template(config.data.chat_template)
    version = tokenization_version(config.data, config.checkpoint, config.job)
    data = dataclasses.replace(config.data, chat_template=template, tokenization_version=version)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **absolute), data=data)


def job_of_checkpoint(config: JobConfig, plan: ParallelDims) -> dict[str, Any]:
    """Return the part of the job that a checkpoint stores and a resume compares."""
    return kept_job(portable_job(config), dataclasses.asdict(model_args(config)), global_batch_size(config, plan))


def source_folder(config: JobConfig) -> str | None:
    """Return the Hugging Face folder that the job's model came from, if it has a config.json."""
    sources = (config.model.hf_folder, config.checkpoint.initial_load_path)
    return next((path for path in sources if path and Path(path, CONFIG).is_file()), None)


def end_ids(config: JobConfig, weights: Path | None = None) -> frozenset[int]:
    """Return the tokens that end a text by the folder of the weights, or by the one that the model came from.

    An export of the run lists the same (`hf_extra_files`).
    """
    folder = None if weights is None else weights.parent if weights.is_file() else weights
    source = folder if folder is not None and (folder / CONFIG).is_file() else source_folder(config)
    return frozenset() if source is None else end_token_ids(Path(source), config.model.ignore_config_keys)


def hf_extra_files(config: JobConfig, vocabulary: Tokenizer) -> dict[str, bytes]:
    """Return config and tokenizer files of a Hugging Face export, name -> content. JobError if it has no such model."""
    folder = source_folder(config)
    return build_extra_files(
        converter_of(config.model),
        model_args(config),
        config.checkpoint.export_dtype,
        source=read_source(folder, trained=True) if folder else None,
        tokenizer_files=vocabulary.as_hf_files() | template_file(vocabulary),
        bos_id=vocabulary.bos_id,
        end_ids=sorted(end_of_turn_ids(vocabulary)),
        labels=config.task.labels,
    )


def head_parameters(config: JobConfig) -> frozenset[str]:
    """Return the names of the task head's parameters, which weights trained for another task lack."""
    return model_spec(config).hf.tensor_map(model_args(config)).head


def heads(config: JobConfig) -> Heads:
    """Return the heads of the model for the job's task and for the other kind of task."""
    args, tensor_map = model_args(config), model_spec(config).hf.tensor_map
    if not hasattr(args, "n_classes"):
        return NO_HEADS
    other_args = dataclasses.replace(args, n_classes=0 if args.n_classes else 2)
    return Heads.of(tensor_map(args).head, tensor_map(other_args).head)


def trained_heads(config: JobConfig, adapter: Adapter | None) -> Heads:
    """Return `heads` if checkpoints of the job hold the head, so that the weights that it starts from need none."""
    model_heads = heads(config)
    frozen = {MODEL + name for name in adapter.frozen_parameters} if adapter is not None else set()
    return NO_HEADS if model_heads.names & frozen else model_heads


def has_experts(config: JobConfig) -> bool:
    """Return True if at least one layer of the model is a mixture of experts."""
    return getattr(model_args(config), "expert_layers", 0) > 0


def isolates_documents(config: JobConfig) -> bool:
    """Return True if attention and positions are confined to a document."""
    return config.training.document_mask or task_of(config.task.kind).whole_records


def length_multiple(config: JobConfig) -> int:
    """Return the multiple that batch lengths are rounded up to; 0 if all batches have one length."""
    return padding_multiple(config, device_type(), has_experts(config))


def model_spec(config: JobConfig) -> ModelSpec:
    return MODELS[config.model.name]


def parallel_options(config: JobConfig) -> ParallelOptions:
    recompute, compile_, degrees = config.activation_checkpoint, config.compile, config.parallelism
    # weights in bfloat16 are always computed with in bfloat16
    compute = "bfloat16" if config.training.dtype == "bfloat16" else config.training.mixed_precision_param
    return ParallelOptions(
        param_dtype=DTYPES[compute],
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
        reshard_after_forward=resharding(degrees.fsdp_reshard_after_forward, degrees.pipeline_parallel_degree),
        prefetch=degrees.fsdp_prefetch,
        cpu_offload=config.training.enable_cpu_offload,
        gather_int8=degrees.fsdp_quantized_gather == "int8",
        reduce_bits=BITS[degrees.fsdp_quantized_reduce],
        sequence_parallel=not degrees.disable_sequence_parallel,
        loss_parallel=not degrees.disable_loss_parallel,
        async_tp=degrees.enable_async_tensor_parallel,
        cp_method=degrees.context_parallel_rotate_method,
        cp_load_balance=degrees.context_parallel_load_balancer == "headtail",
        overlap=degrees.pipeline_parallel_expert_parallel_overlap,
        recompute=recompute.mode,
        selective_option=recompute.selective_ac_option,
        **matching_options(recompute, ParallelOptions),
        compile_model=compile_.enable and "model" in compile_.components,
        compile_loss=compile_.enable and "loss" in compile_.components,
        compile_scope=compile_.scope,
        compile_backend=compile_.backend,
    )


def adapter(config: JobConfig) -> Adapter | None:
    """Return the job's adapter, not yet installed; None without one."""
    options = config.adapter
    if config.training.unfrozen:
        return Unfrozen(config.training.unfrozen)
    return None if options.kind == NONE else resolve_name(ADAPTERS[options.kind].make)(options, config.debug.seed)


def adapted_model(config: JobConfig) -> tuple[nn.Module, ParallelPlan, Adapter | None]:
    """Return the model on the meta device in training.dtype, with NEFTune and adapter, its plan and the adapter."""
    built = meta_model(config).to(DTYPES[config.training.dtype])
    plan = add_embedding_noise(built, model_spec(config).plan, config.training.neftune_alpha)
    if (installed := adapter(config)) is not None:
        plan = installed.install(built, plan)
    return built, plan, installed


def peft_tensors(config: JobConfig, installed: Adapter) -> dict[str, torch.Tensor]:
    """Read the full tensors of adapter.initial_path by their names in this project."""
    path = config.adapter.initial_path
    assert path is not None  # the caller has checked
    return installed.read_folder(Path(path), model_spec(config).hf.tensor_map(model_args(config)))


def save_peft(config: JobConfig, folder: Path, installed: Adapter, tensors: dict[str, torch.Tensor]) -> None:
    form, path = model_spec(config).hf.tensor_map(model_args(config)), config.checkpoint.initial_load_path
    installed.write_folder(folder, form, tensors, path or "")


def objective(config: JobConfig) -> Objective:
    """Build the task's objective: its loss and the normalizer."""
    task, degrees = task_of(config.task.kind), config.parallelism
    objective_class = resolve_name(task.objective)
    built = objective_class(
        config.training.loss_chunks,
        **matching_options(getattr(config, task.options_section), objective_class) if task.options_section else {},
    )
    shards = 1 if degrees.disable_loss_parallel else degrees.tensor_parallel_degree
    built.logits_width = model_args(config).vocab_size // shards
    return built


def meta_model(config: JobConfig) -> nn.Module:
    """Build the plain model of the job on the meta device, with its loss."""
    with torch.device("meta"):
        built = model_spec(config).build(model_args(config))
    built.loss = objective(config)
    built.set_attention_backend(config.model.attention_backend)
    use_shifted_groups(built, config.model.s2_group_size)
    return built


def pipeline_options(config: JobConfig) -> PipelineOptions:
    degrees = config.parallelism
    return PipelineOptions(
        hidden_dim=model_args(config).dim,
        local_batch_size=batch_rows(config),
        **matching_options(degrees, PipelineOptions, "pipeline_parallel_")
        | {"microbatch_size": microbatch_rows(config)},
        csv=degrees.pipeline_parallel_schedule_csv,
        embedding_cost=degrees.pipeline_parallel_first_stage_less_layers,
        head_cost=degrees.pipeline_parallel_last_stage_less_layers,
        modules=degrees.module_fqns_per_model_part,
    )


def model(
    config: JobConfig,
    mesh: DeviceMesh,
    plan: ParallelDims,
    device: torch.device,
    policy: ParallelModel | None = None,
    options: ParallelOptions | None = None,
    **kwargs: Any,
) -> ParallelModel:
    """Return the parallelized model with its initial weights, which depend on the seed and the parameter names only.

    Frozen weights are stored in training.frozen_dtype. `policy`: the model to build the reference of, without adapter
    and noise. It gets the types of the policy, so that equal weights give equal log-probabilities. `options`: used
    instead of the job's. `kwargs` (init_weights, storage): see `ParallelModel`.
    """
    activate_flash_attention(config.model.attention_backend, device)
    built, patterns, installed = adapted_model(config if policy is None else reference_job(config))
    trained_by = installed if policy is None else policy.adapter
    if (
        trained_by is not None
        and (
            frozen := base_weights.frozen_dtype(
                config.training, config.adapter, config.checkpoint, config.job.dump_folder
            )
        )
        is not None
    ):
        trained_by.cast_frozen(built, DTYPES[frozen])
    if (recipe := config.training.float8) != "none":
        use_float8(built, patterns, recipe, config.training.float8_exclude, has_kernel(device.type))
    parallel = ParallelModel(
        built,
        mesh,
        plan,
        patterns,
        options or parallel_options(config),
        device=device,
        seed=config.debug.seed,
        pipeline=pipeline_options(config),
        balance=model_spec(config).balance,
        adapter=installed,
        **kwargs,
    )
    if policy is not None:
        parallel.autocast = policy.autocast  # even if all weights of the reference have the compute type
    return parallel


def optimizers(config: JobConfig, built: ParallelModel) -> Optimizers:
    options = config.optimizer
    return build_optimizers(
        built.parts,
        **matching_options(options, build_optimizers),
        shared={key: getattr(options, key) for key in SHARED},
        in_backward=options.early_step_in_backward,
        rate_of=built.adapter.lr_multiplier if built.adapter else lambda name: 1.0,
    )


def cadence(config: JobConfig) -> Cadence:
    """Return the intervals of a job with known steps. LimitError if best_metric is set and a save has no validation."""
    intervals = cadence_of(config, config.training.steps)
    if config.checkpoint.best_metric is not None:
        check_measured_saves(intervals.save, intervals.validate)
    return intervals


def lr_schedule(config: JobConfig, start: int = 0) -> LRSchedule:
    """Return the learning-rate schedule that begins at step `start` of the run."""
    return schedule_of(config.lr_scheduler, config.training, config.training.steps, config.adapter.relora, start)


def lr_schedulers(config: JobConfig, built: Optimizers, start: int) -> LRSchedulers:
    """Build the schedulers of a schedule that begins at step `start`."""
    return build_lr_schedulers(built.optimizers, lr_schedule(config, start), config.optimizer.lr)


def global_batch_size(config: JobConfig, plan: ParallelDims) -> int:
    """Return the samples (or pairs) of one optimizer step over all ranks."""
    size = config.training.global_batch_size
    return size if size > 0 else config.training.local_batch_size * plan.dp


def global_rows(config: JobConfig, plan: ParallelDims) -> int:
    """Return the rows of one optimizer step over all ranks."""
    return global_batch_size(config, plan) * rows_per_sample(config)


def without_noise(config: JobConfig) -> JobConfig:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, neftune_alpha=0))


def reference_job(config: JobConfig) -> JobConfig:
    """Return the job of the reference model of preference pairs: no adapter and no noise."""
    return dataclasses.replace(without_noise(config), adapter=type(config.adapter)())


def restarted_job(config: JobConfig) -> JobConfig:
    """Return the job for a restart after a crash, which resumes its newest checkpoint.

    The first start has already applied load_step and exclude_from_loading.
    """
    return dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, load_step=-1, exclude_from_loading=[])
    )


def checkpointer(
    config: JobConfig, built: ParallelModel, built_optimizers: Optimizers, hooks: TrainerHooks
) -> Checkpointer | None:
    """Return the job's checkpointer, or None if it neither saves nor starts from other weights."""
    options = config.checkpoint
    if not (options.enable or options.initial_load_path or config.adapter.initial_path):
        return None
    return Checkpointer(
        Path(config.job.dump_folder, options.folder),
        dataclasses.replace(options, interval=cadence(config).save),
        built.parts,
        built_optimizers.optimizers,
        hooks,
        added_parameters=built.adapter.added_parameters if built.adapter else (),
        omitted_parameters=omitted_from_checkpoints(config, built),
    )


def one_rank_job(config: JobConfig) -> JobConfig:
    """Return the job without parallelism and gradient accumulation, for commands that inspect its data or model."""
    return dataclasses.replace(
        config, parallelism=Parallelism(), training=dataclasses.replace(config.training, global_batch_size=-1)
    )


def best_metric(config: JobConfig) -> Metric | None:
    """Return the metric that selects the best checkpoint; None without one."""
    name = config.checkpoint.best_metric
    return None if name is None else Metric.of(name, config.checkpoint.best_mode)


def saves_adapter_alone(config: JobConfig) -> bool:
    return config.adapter.kind != NONE and config.adapter.save == "alone"


def with_resolved_options(config: JobConfig) -> JobConfig:
    """Return the job with adapter.save and training.frozen_dtype resolved, which a resumed run keeps."""
    save = base_weights.adapter_save(config.adapter, config.checkpoint, config.job.dump_folder)
    training = dataclasses.replace(
        config.training,
        frozen_dtype=base_weights.frozen_dtype(
            config.training, config.adapter, config.checkpoint, config.job.dump_folder
        ),
    )
    return dataclasses.replace(config, training=training, adapter=dataclasses.replace(config.adapter, save=save))


def omitted_from_checkpoints(config: JobConfig, built: ParallelModel) -> Collection[str]:
    """Return the frozen parameters that an adapter-only checkpoint omits."""
    return built.adapter.frozen_parameters if built.adapter and saves_adapter_alone(config) else ()


def base_reference(config: JobConfig) -> dict[str, str]:
    """Return the reference to the base weights of an adapter job."""
    path = config.checkpoint.initial_load_path
    assert path is not None  # the rules require it
    return base_weights.describe_base(path)
