"""Config -> parts. The only reader of the whole config; the trainer, the command line and the tests build by it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.checkpoint import Checkpointer
from torchtitan.config import JobConfig, Parallelism, Training, Validation, as_dict
from torchtitan.datasets.loader import Loader, build_loader
from torchtitan.datasets.tokenizer import Tokenizer, build_tokenizer
from torchtitan.distributed import device_type
from torchtitan.loss import SummedCrossEntropy, auto_chunks
from torchtitan.lr_scheduling import LRSchedulers, build_lr_schedulers
from torchtitan.lr_shapes import LRSchedule
from torchtitan.metrics import MetricsLogger, TensorBoard, WeightsAndBiases
from torchtitan.models import SIZES
from torchtitan.models.registry import MODELS
from torchtitan.models.spec import ModelSpec
from torchtitan.optimizers.build import Optimizers, build_optimizers
from torchtitan.parallelisms.parallel_dims import ParallelDims
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.parallelisms.parallelize import ParallelOptions
from torchtitan.parallelisms.pipeline_parallel import PipelineOptions
from torchtitan.profiling import Profiler
from torchtitan.ranks import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    return build_tokenizer(config.model.tokenizer_path)


def model_args(config: JobConfig) -> Any:
    """The family's frozen dataclass of sizes, with the job's overrides."""
    return dataclasses.replace(SIZES[config.model.name][config.model.flavor], **config.model.overrides)


def movable(config: JobConfig) -> JobConfig:
    """The job as it is kept with a run: its tokenizer is found from any folder."""
    path = Path(config.model.tokenizer_path)
    absolute = str(path.resolve()) if path.exists() else config.model.tokenizer_path
    return dataclasses.replace(config, model=dataclasses.replace(config.model, tokenizer_path=absolute))


def model_spec(config: JobConfig) -> ModelSpec:
    return MODELS[config.model.name]


def reshards(options: Parallelism) -> bool:
    """Whether blocks free their gathered parameters after forward. In a pipeline they would be gathered again for every
    microbatch, so there it has to be asked for.
    """
    asked = options.fsdp_reshard_after_forward
    return options.pipeline_parallel_degree == 1 if asked == "default" else asked == "always"


def parallel_options(config: JobConfig) -> ParallelOptions:
    recompute, compile_ = config.activation_checkpoint, config.compile
    # under a dtype of bfloat16 there is nothing to mix
    compute = "bfloat16" if config.training.dtype == "bfloat16" else config.training.mixed_precision_param
    return ParallelOptions(
        param_dtype=DTYPES[compute],
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
        reshard_after_forward=reshards(config.parallelism),
        prefetch=config.parallelism.fsdp_prefetch,
        cpu_offload=config.training.enable_cpu_offload,
        sequence_parallel=not config.parallelism.disable_sequence_parallel,
        loss_parallel=not config.parallelism.disable_loss_parallel,
        async_tp=config.parallelism.enable_async_tensor_parallel,
        cp_method=config.parallelism.context_parallel_rotate_method,
        cp_load_balance=config.parallelism.context_parallel_load_balancer == "headtail",
        overlap=config.parallelism.pipeline_parallel_expert_parallel_overlap,
        recompute=recompute.mode,
        selective_option=recompute.selective_ac_option,
        memory_budget=recompute.memory_budget,
        preserve_rng_state=recompute.preserve_rng_state,
        early_stop=recompute.early_stop,
        compile_model=compile_.enable and "model" in compile_.components,
        compile_loss=compile_.enable and "loss" in compile_.components,
        compile_scope=compile_.scope,
        compile_backend=compile_.backend,
    )


def describe_precision(config: JobConfig) -> str:
    compute = str(parallel_options(config).param_dtype).removeprefix("torch.")
    if compute == config.training.dtype:
        return compute
    return f"{compute} with {config.training.dtype} parameters and {config.training.mixed_precision_reduce} reduction"


def loss_chunks(config: JobConfig) -> int:
    """As many as keep the logits small that a rank makes at once, of its tokens and its share of the vocabulary."""
    training, held_out, degrees = config.training, config.validation, config.parallelism

    def tokens(local_batch_size: int, seq_len: int) -> int:
        in_pipeline = degrees.pipeline_parallel_degree > 1
        samples = degrees.pipeline_parallel_microbatch_size if in_pipeline else local_batch_size
        return samples * seq_len // degrees.context_parallel_degree

    most = tokens(training.local_batch_size, training.seq_len)
    if held_out.enable:
        most = max(most, tokens(held_out.local_batch_size, held_out.seq_len or training.seq_len))
    shards = 1 if degrees.disable_loss_parallel else degrees.tensor_parallel_degree
    return auto_chunks(most, model_args(config).vocab_size // shards)


def meta_model(config: JobConfig) -> nn.Module:
    """The plain model of the job, without values, its loss attached."""
    with torch.device("meta"):
        built = model_spec(config).build(model_args(config))
    built.loss = SummedCrossEntropy(config.training.loss_chunks or loss_chunks(config))
    built.set_attention_backend(config.model.attention_backend)
    return built


def pipeline_options(config: JobConfig) -> PipelineOptions:
    degrees = config.parallelism
    return PipelineOptions(
        hidden_dim=model_args(config).dim,
        local_batch_size=config.training.local_batch_size,
        microbatch_size=degrees.pipeline_parallel_microbatch_size,
        schedule=degrees.pipeline_parallel_schedule,
        csv=degrees.pipeline_parallel_schedule_csv,
        layers_per_stage=degrees.pipeline_parallel_layers_per_stage,
        first_less=degrees.pipeline_parallel_first_stage_less_layers,
        last_less=degrees.pipeline_parallel_last_stage_less_layers,
        modules=degrees.module_fqns_per_model_part,
    )


def model(config: JobConfig, mesh: DeviceMesh, plan: ParallelDims, device: torch.device) -> ParallelModel:
    """The job's model, parallel and with its initial weights, a function of seed and parameter name."""
    return ParallelModel(
        meta_model(config).to(DTYPES[config.training.dtype]),
        mesh,
        plan,
        model_spec(config).plan,
        parallel_options(config),
        device=device,
        seed=config.debug.seed,
        pipeline=pipeline_options(config),
        balance=model_spec(config).balance,
    )


def optimizers(config: JobConfig, built: ParallelModel) -> Optimizers:
    options = config.optimizer
    return build_optimizers(
        built.parts,
        name=options.name,
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        decay_norms_and_biases=options.decay_norms_and_biases,
        implementation=options.implementation,
        in_backward=options.early_step_in_backward,
    )


def lr_schedule(config: JobConfig) -> LRSchedule:
    shape = config.lr_scheduler
    return LRSchedule(
        total_steps=shape.total_steps or config.training.steps,
        warmup_steps=shape.warmup_steps,
        decay_ratio=shape.decay_ratio,
        decay_type=shape.decay_type,
        num_cycles=shape.num_cycles,
        min_lr_factor=shape.min_lr_factor,
    )


def lr_schedulers(config: JobConfig, built: Optimizers) -> LRSchedulers:
    return build_lr_schedulers(built.optimizers, lr_schedule(config))


def global_batch_size(config: JobConfig, plan: ParallelDims) -> int:
    """Samples of one optimizer step over all ranks."""
    asked = config.training.global_batch_size
    return asked if asked > 0 else config.training.local_batch_size * plan.dp


def training_loader(
    config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims, state: dict[str, Any] | None = None
) -> Loader:
    batch = global_batch_size(config, plan)
    return _loader(config, config.training, vocabulary, dp_rank, plan, batch, config.training.seq_len, state)


def validation_loader(config: JobConfig, vocabulary: Tokenizer, dp_rank: int, plan: ParallelDims) -> Loader:
    """Always the same batches: its own data set, from the start."""
    part = config.validation
    batch = part.local_batch_size * plan.dp
    return _loader(config, part, vocabulary, dp_rank, plan, batch, part.seq_len or config.training.seq_len, None)


def _loader(
    config: JobConfig,
    part: Training | Validation,
    vocabulary: Tokenizer,
    dp_rank: int,
    plan: ParallelDims,
    batch: int,
    seq_len: int,
    state: dict[str, Any] | None,
) -> Loader:
    workers = config.training.dataloader
    return build_loader(
        dataset=part.dataset,
        dataset_path=part.dataset_path,
        text_field=config.training.text_field,
        tokenizer=vocabulary,
        seq_len=seq_len,
        local_batch_size=part.local_batch_size,
        global_batch_size=batch,
        dp_rank=dp_rank,
        dp_size=plan.dp,
        seed=config.debug.seed,
        shuffle=config.training.shuffle,
        document_mask=config.training.document_mask,
        on_bad_data=config.training.on_bad_data,
        num_workers=workers.num_workers,
        persistent_workers=workers.persistent_workers,
        pin_memory=device_type() == "cuda" if workers.pin_memory is None else workers.pin_memory,
        prefetch_factor=workers.prefetch_factor,
        state=state,
    )


def checkpointer(
    config: JobConfig,
    built: ParallelModel,
    built_optimizers: Optimizers,
    trainer_state: Callable[[], dict[str, Any]],
    rank_state: Callable[[], dict[str, Any]],
    load_state: Callable[[dict[str, Any], list[dict[str, Any]]], None],
    before_save: Callable[[], None],
) -> Checkpointer | None:
    options = config.checkpoint
    if not options.enable:
        return None
    return Checkpointer(
        Path(config.job.dump_folder, options.folder),
        model_parts=built.parts,
        optimizers=built_optimizers.optimizers,
        trainer_state=trainer_state,
        rank_state=rank_state,
        load_state=load_state,
        interval=options.interval,
        interval_type=options.interval_type,
        keep_latest_k=options.keep_latest_k,
        async_mode=options.async_mode,
        load_step=options.load_step,
        exclude_from_loading=options.exclude_from_loading,
        enable_first_step_checkpoint=options.enable_first_step_checkpoint,
        load_only=options.load_only,
        before_save=before_save,
    )


def metrics(
    config: JobConfig, device: torch.device, ranks: Ranks, resumed_from: int | None, tokens_seen: int
) -> MetricsLogger:
    options, folder, args = config.metrics, Path(config.job.dump_folder), model_args(config)
    trackers = []
    if options.enable_tensorboard and (ranks.is_main or options.save_for_all_ranks):
        events = folder / options.save_tb_folder
        events = events / f"rank_{ranks.rank}" if options.save_for_all_ranks else events
        trackers.append(TensorBoard(events, resumed_from))
    if options.enable_wandb and ranks.is_main:
        trackers.append(WeightsAndBiases(folder, resumed_from, config.job.description, as_dict(config)))
    flops = model_spec(config).flops_per_token(args, config.training.seq_len)
    return MetricsLogger(
        folder,
        writes=ranks.is_main,
        log_freq=options.log_freq,
        total_steps=config.training.steps,
        device=device,
        compute_dtype=parallel_options(config).param_dtype,
        world_size=ranks.world_size,
        num_parameters=args.num_parameters,
        flops_per_token_full=flops.full,
        flops_per_token_causal=flops.causal,
        resume_step=resumed_from,
        tokens_seen=tokens_seen,
        trackers=trackers,
        color=ranks.on_terminal and not options.disable_color_printing,
        log_lr=options.log_lr,
    )


def profiler(config: JobConfig, device: torch.device, ranks: Ranks, step: int) -> Profiler:
    options, folder = config.profiling, Path(config.job.dump_folder)
    return Profiler(
        traces=folder / options.save_traces_folder if options.enable_profiling else None,
        snapshots=folder / options.save_memory_snapshot_folder if options.enable_memory_snapshot else None,
        freq=options.profile_freq,
        active=options.profiler_active,
        warmup=options.profiler_warmup,
        device=device,
        rank=ranks.rank,
        start_step=step,
    )
