"""Build the parts of a job: model, adapter, optimizers, schedulers, checkpointer. Only this package builds parts."""

import dataclasses
import logging
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.adapters import ADAPTERS, NONE
from torchtitan.adapters.interface import Adapter, Unfrozen
from torchtitan.adapters.targets import unreadable_by_peft, with_wildcards
from torchtitan.checkpoint import Checkpointer, TrainerHooks
from torchtitan.checkpoint.layout import MODEL
from torchtitan.checkpoint.loading import NO_HEADS, Heads
from torchtitan.config.sections.training import Optimizer
from torchtitan.core.fake_quantization import formats_of
from torchtitan.core.float8 import has_kernel
from torchtitan.datasets.conversations import end_of_turn_ids
from torchtitan.datasets.tokenizer import Tokenizer
from torchtitan.datasets.tokenizer.hf_json import template_file
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.losses.objective import Objective
from torchtitan.lr_scheduling import LRSchedulers, build_lr_schedulers
from torchtitan.models.attention import activate_flash_attention, use_shifted_groups
from torchtitan.models.dropout import add_embedding_noise
from torchtitan.models.fake_quantized import FakeQuantizationStart, use_fake_quantization
from torchtitan.models.hf.config import find_text_config
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.hf.save import build_extra_files, read_source
from torchtitan.models.hf.wrappers import memory_prefix
from torchtitan.models.layers import use_float8
from torchtitan.models.sizes import linears
from torchtitan.models.spec import MODELS, ModelSpec
from torchtitan.optimizers.build import Optimizers, build_optimizers
from torchtitan.optimizers.spec import SHARED
from torchtitan.parallelisms.fsdp_messages import BITS, resharding
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.parallelisms.parallelize import ParallelOptions
from torchtitan.parallelisms.pipeline.pipeline_parallel import PipelineOptions
from torchtitan.parallelisms.plan import ParallelPlan

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def matching_options(section: Any, target: Callable[..., Any], prefix: str = "") -> dict[str, Any]:
    """Return the options of a section that are arguments of `target`, with `prefix` removed from their names."""
    argument_names = signature(target).parameters
    values = {field.name.removeprefix(prefix): getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if name in argument_names}


def model_spec(model: JobModel) -> ModelSpec:
    return MODELS[model.model.name]


def tensor_map(model: JobModel) -> TensorMap:
    """Return the names and shapes of the model's tensors in Hugging Face's format."""
    return model_spec(model).hf.tensor_map(model.args)


def hf_extra_files(model: JobModel, vocabulary: Tokenizer, dtype: str) -> dict[str, bytes]:
    """Return config and tokenizer files of a Hugging Face export, name -> content. JobError if it has no such model."""
    return build_extra_files(
        model.converter,
        model.args,
        dtype,
        source=read_source(model.source_folder, trained=True) if model.source_folder else None,
        tokenizer_files=vocabulary.as_hf_files() | template_file(vocabulary),
        bos_id=vocabulary.bos_id,
        end_ids=sorted(end_of_turn_ids(vocabulary)),
        pad_id=vocabulary.pad_id,
        labels=model.task.labels,
    )


def heads(model: JobModel) -> Heads:
    """Return the heads of the model for the job's task and for the other kind of task."""
    args, map_of = model.args, model_spec(model).hf.tensor_map
    if not hasattr(args, "n_classes"):
        return NO_HEADS
    other_args = dataclasses.replace(args, n_classes=0 if args.n_classes else 2)
    names, other_names = (
        map_of(sizes).head | ({"output.weight"} if not getattr(sizes, "tied_embeddings", True) else set())
        for sizes in (args, other_args)
    )
    return Heads.of(names, other_names, args.vocab_size, args.n_classes > 0)


def trained_heads(model: JobModel, adapter: Adapter | None) -> Heads:
    """Return `heads` if checkpoints of the job hold the head, so that the weights that it starts from need none."""
    model_heads = heads(model)
    frozen = {MODEL + name for name in adapter.frozen_parameters} if adapter is not None else set()
    return NO_HEADS if model_heads.names & frozen else model_heads


def peft_map(model: JobModel) -> TensorMap:
    """Return the names of an adapter in peft's format: those that its base model has in transformers."""
    path = model.initial_load_path
    return tensor_map(model).within(memory_prefix(find_text_config(Path(path)) if path else None))


def peft_tensors(model: JobModel, installed: Adapter) -> dict[str, torch.Tensor]:
    """Read the full tensors of adapter.initial_path by their names in this project."""
    path = model.adapter.initial_path
    assert path is not None  # the caller has checked
    return installed.read_folder(Path(path), peft_map(model))


def save_peft(model: JobModel, folder: Path, installed: Adapter, tensors: dict[str, torch.Tensor]) -> None:
    if refused := unreadable_by_peft(model.model.name, linears(model.args), model.adapter):
        logger.warning("peft refuses a DoRA of %s; --merge writes the whole model", ", ".join(with_wildcards(refused)))
    installed.write_folder(folder, peft_map(model), tensors, model.initial_load_path or "")


class ModelBuilder:
    """Builds the model of a job, on the meta device or parallelized."""

    def __init__(self, job: ResolvedJob) -> None:
        self.job = job

    def parallel_options(self) -> ParallelOptions:
        config, layout = self.job.config, self.job.layout
        recompute, degrees = config.activation_checkpoint, config.parallelism
        return ParallelOptions(
            param_dtype=DTYPES[self.job.model.compute_dtype],
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
            compile_model=layout.compiles_model,
            compile_loss=layout.compiles_loss,
            compile_scope=config.compile.scope,
            compile_backend=config.compile.backend,
        )

    def adapter(self) -> Adapter | None:
        """Return the job's adapter, not yet installed; None without one."""
        options, seed = self.job.config.adapter, self.job.config.debug.seed
        if self.job.config.training.unfrozen:
            return Unfrozen(self.job.config.training.unfrozen)
        return None if options.kind == NONE else resolve_name(ADAPTERS[options.kind].make)(options, seed)

    def adapted_model(self) -> tuple[nn.Module, ParallelPlan, Adapter | None]:
        """Return the model on the meta device in training.dtype, with NEFTune and adapter, its plan and the adapter."""
        training = self.job.config.training
        built = self.meta_model().to(DTYPES[training.dtype])
        plan = add_embedding_noise(built, model_spec(self.job.model).plan, training.neftune_alpha)
        if (installed := self.adapter()) is not None:
            plan = installed.install(built, plan)
        return built, plan, installed

    def fake_quantize(self, built: nn.Module) -> None:
        """Let a model compute with the numbers of the section [qat], in place."""
        options = self.job.config.qat
        if options.weight_dtype == "none":
            return
        embedding = (
            formats_of(options.weight_dtype, None, options.group).weights if options.quantize_embedding else None
        )
        use_fake_quantization(built, formats_of(options.weight_dtype, options.inputs, options.group), embedding)

    def objective(self) -> Objective:
        """Build the task's objective: its loss and the normalizer."""
        task, config = self.job.model.spec, self.job.config
        objective_class = resolve_name(task.objective)
        built: Objective = objective_class(
            config.training.loss_chunks,
            **matching_options(getattr(config, task.options_section), objective_class) if task.options_section else {},
            **task.arguments(config.task.options),
        )
        built.logits_width = self.job.model.args.vocab_size // self.job.layout.vocabulary_shards
        return built

    def meta_model(self) -> nn.Module:
        """Build the plain model of the job on the meta device, with its loss."""
        with torch.device("meta"):
            built = model_spec(self.job.model).build(self.job.model.args)
        built.loss = self.objective()
        built.set_attention_backend(self.job.config.model.attention_backend)
        use_shifted_groups(built, self.job.config.model.s2_group_size)
        return built

    def pipeline_options(self) -> PipelineOptions:
        degrees = self.job.config.parallelism
        return PipelineOptions(
            hidden_dim=self.job.model.args.dim,
            local_batch_size=self.job.layout.batch_rows(),
            **matching_options(degrees, PipelineOptions, "pipeline_parallel_")
            | {"microbatch_size": self.job.layout.microbatch_rows},
            csv=degrees.pipeline_parallel_schedule_csv,
            embedding_cost=degrees.pipeline_parallel_first_stage_less_layers,
            head_cost=degrees.pipeline_parallel_last_stage_less_layers,
            modules=degrees.module_fqns_per_model_part,
        )

    def model(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        policy: ParallelModel | None = None,
        options: ParallelOptions | None = None,
        **kwargs: Any,
    ) -> ParallelModel:
        """Return the parallelized model with its initial weights, which depend on the seed and parameter names only.

        Frozen weights are stored in training.frozen_dtype. `policy`: the model to build the reference of, without
        adapter and noise. It gets the types of the policy, so that equal weights give equal log-probabilities.
        `options`: used instead of the job's. `kwargs` (init_weights, storage): see `ParallelModel`.
        """
        config = self.job.config
        activate_flash_attention(config.model.attention_backend, device)
        builder = self if policy is None else ModelBuilder(self.job.reference())
        built, patterns, installed = builder.adapted_model()
        trained_by = installed if policy is None else policy.adapter
        if trained_by is not None and (frozen := self.job.saving.frozen_dtype) is not None:
            trained_by.cast_frozen(built, DTYPES[frozen])
        if (recipe := config.training.float8) != "none":
            use_float8(built, patterns, recipe, config.training.float8_exclude, has_kernel(device.type))
        builder.fake_quantize(built)
        parallel = ParallelModel(
            built,
            mesh,
            self.job.layout.dims,
            patterns,
            options or self.parallel_options(),
            device=device,
            seed=config.debug.seed,
            pipeline=self.pipeline_options(),
            balance=model_spec(self.job.model).balance_of(self.job.model.args),
            adapter=installed,
            **kwargs,
        )
        if config.qat.after_steps:
            parallel.hooks.append(FakeQuantizationStart(parallel.parts, config.qat.after_steps))
        if policy is not None:
            parallel.autocast = policy.autocast  # even if all weights of the reference have the compute type
        return parallel


def optimizers(options: Optimizer, built: ParallelModel) -> Optimizers:
    """Build the optimizers of a model from the section [optimizer]."""
    return build_optimizers(
        built.parts,
        **matching_options(options, build_optimizers),
        shared={key: getattr(options, key) for key in SHARED},
        in_backward=options.early_step_in_backward,
        rate_of=built.adapter.lr_multiplier if built.adapter else lambda name: 1.0,
    )


def lr_schedulers(job: ResolvedJob, built: Optimizers, start: int) -> LRSchedulers:
    """Build the schedulers of a schedule that begins at step `start`."""
    return build_lr_schedulers(built.optimizers, job.schedule.learning_rate(start), job.config.optimizer.lr)


def checkpointer(
    job: ResolvedJob, built: ParallelModel, built_optimizers: Optimizers, hooks: TrainerHooks
) -> Checkpointer | None:
    """Return the job's checkpointer, or None if it neither saves nor starts from other weights.

    A checkpoint of an adapter alone omits the frozen parameters.
    """
    options, installed = job.config.checkpoint, built.adapter
    if not (options.enable or options.initial_load_path or job.config.adapter.initial_path):
        return None
    return Checkpointer(
        job.saving.folder,
        dataclasses.replace(options, interval=job.schedule.cadence.save),
        built.parts,
        built_optimizers.optimizers,
        hooks,
        added_parameters=installed.added_parameters if installed else (),
        omitted_parameters=installed.frozen_parameters if installed and job.saving.saves_adapter_alone else (),
    )
