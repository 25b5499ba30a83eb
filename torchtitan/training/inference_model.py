"""Build models next to the one that is trained: with the weights of a checkpoint, for export and generation, and the
reference model of preference pairs."""

import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.adapters import NONE
from torchtitan.adapters.interface import Adapter
from torchtitan.assembly import parts
from torchtitan.assembly.parts import ModelBuilder
from torchtitan.checkpoint import base_weights, load_model_for_inference, read_state
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.checkpoint.layout import MODEL
from torchtitan.checkpoint.weight_sources import fill, load_foreign, open_weights
from torchtitan.config.sections.model import ActivationCheckpoint, Compile, Parallelism
from torchtitan.core.errors import JobError
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.job.saving import JobSaving
from torchtitan.models.attention import activate_flash_attention
from torchtitan.parallelisms.degrees import LimitError
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed, machine
from torchtitan.process.ranks import Ranks

logger = logging.getLogger(__name__)

ATTENTION = "model.attention_backend"


def load_model(job: ResolvedJob, step_folder: Path, device: torch.device) -> tuple[nn.Module, Adapter | None]:
    """Load the job's model on one device, in evaluation mode, and its adapter.

    `step_folder`: a checkpoint, or a Hugging Face folder; the latter is combined with the adapter of
    `adapter.initial_path`. Raises CheckpointError if these do not fit, or if the adapter belongs to another base.
    """
    if device.type == "cpu":
        machine.keep_freed_memory()
    backend = available_attention(job.config.model.attention_backend, device)
    built, _, installed = ModelBuilder(job.with_options({ATTENTION: backend})).adapted_model()
    built.to_empty(device=device)
    _fill(built, job.model, job.saving, step_folder, installed)
    return built.eval(), installed


def available_attention(backend: str, device: torch.device) -> str:
    """Activate an attention kernel, and return its name, or "auto" if the device is not one that has it."""
    try:
        activate_flash_attention(backend, device)
    except JobError as error:
        logger.info('attention_backend = "auto" is used instead (%s)', error)
        return "auto"
    return backend


def _fill(built: nn.Module, model: JobModel, saving: JobSaving, step_folder: Path, installed: Adapter | None) -> None:
    if find_weights(step_folder)[0] != "native":
        extra_adapter = None if model.adapter.initial_path is None else installed
        fresh = extra_adapter.added_parameters if extra_adapter else ()
        _load_foreign(model, step_folder, [built], fresh)
        if extra_adapter is not None:
            extra_adapter.load_tensors([built], parts.peft_tensors(model, extra_adapter))
        return
    adapter_only = saved_adapter_alone(saving, step_folder)
    if adapter_only:
        fill_base(model, built, installed)
    load_model_for_inference(step_folder, built, installed.frozen_parameters if adapter_only else ())


def _load_foreign(
    model: JobModel, location: Path, modules: list[nn.Module], fresh: Collection[str], head: Collection[str] = ()
) -> None:
    """Load weights of another program, without the parameters `fresh` and, if they lack it, the head."""
    options, args = model.model, model.args_for_weights(location)
    load_foreign(location, modules, options.name, args, fresh, head, options.ignore_config_keys)


def saved_adapter_alone(saving: JobSaving, step_folder: Path) -> bool:
    """Return True if a checkpoint holds an adapter alone.

    Raises CheckpointError if the adapter belongs to another base than the job's.
    """
    if saving.adapter.kind == NONE or saving.adapter.save == "whole":
        return False
    trainer = read_state(step_folder)["trainer"]
    if saving.adapter.save is None and base_weights.KEY not in trainer:  # the job does not say; the checkpoint does
        return False
    path = saving.checkpoint.initial_load_path
    assert path is not None  # the rules require it
    base_weights.refuse_other_base(trainer, base_weights.describe_base(path))
    return True


def load_model_over_ranks(job: ResolvedJob, step_folder: Path, ranks: Ranks) -> nn.Module:
    """Load the job's model over all ranks, in evaluation mode. All ranks get the same tokens and the same logits.

    Tensor parallelism splits a dense model; expert parallelism and FSDP split a model with experts. Raises JobError if
    the number of ranks does not divide it.
    """
    device = distributed.init(ranks, job.config.comm.init_timeout_seconds)
    changes = _split_options(getattr(job.model.args, "n_experts", 0), ranks.world_size, job.config.training.dtype)
    changes[ATTENTION] = available_attention(job.config.model.attention_backend, device)
    job = job.with_options(changes).on_ranks(ranks.world_size)
    try:
        built = ModelBuilder(job).model(job.layout.dims.build_mesh(device.type), device)
    except LimitError as error:
        raise JobError(f"--ranks: given {error.given}; allowed: {error.allowed}; {error.remedy}") from None
    (full_model,) = built.parts
    _fill(full_model, job.model, job.saving, step_folder, built.adapter)
    return full_model.eval()


def _split_options(experts: int, world_size: int, dtype: str) -> dict[str, Any]:
    """Return the options of a job whose model is split over the ranks and computed in `dtype`."""
    if experts:
        degrees = Parallelism(expert_parallel_degree=math.gcd(experts, world_size))
    else:
        degrees = Parallelism(
            data_parallel_shard_degree=1,
            tensor_parallel_degree=world_size,
            disable_sequence_parallel=True,
            disable_loss_parallel=True,
        )
    types = {"training.mixed_precision_param": dtype, "training.frozen_dtype": dtype, "training.float8": "none"}
    recompute = ActivationCheckpoint(mode="none")
    return types | {"parallelism": degrees, "activation_checkpoint": recompute, "compile": Compile()}


def broadcast_from_first(choice: torch.Tensor) -> torch.Tensor:
    """Broadcast rank 0's tensor, of any shape: sums of reductions may differ in their last bits between ranks."""
    dist.broadcast(choice, 0)
    return choice


def fill_base(model: JobModel, built: nn.Module, installed: Adapter | None) -> None:
    """Load the weights that the job starts from into a model on one device."""
    path = model.initial_load_path
    assert path is not None  # the rules require it if an adapter is saved alone
    kind, location = find_weights(Path(path))
    fresh, heads = installed.added_parameters if installed else (), parts.trained_heads(model, installed)
    if kind == "native":
        load_model_for_inference(location, built, fresh, heads)
    else:
        _load_foreign(model, location, [built], fresh, {name.removeprefix(MODEL) for name in heads.names})


def load_reference_model(job: ResolvedJob, path: str, model: ParallelModel) -> ParallelModel:
    """Build a model from the weights at a path, sharded as the run's. JobError if they are of another model."""
    _, location = find_weights(Path(path))
    built = ModelBuilder(job).model(model.mesh, model.device, policy=model, init_weights=False)
    options, args = job.config.model, job.model.args_for_weights(location)
    with open_weights(location, options.name, args, options.ignore_config_keys) as weights:
        for part in built.parts:
            fill(part, weights, job.model.args.tied_embeddings)
    logger.info("the reference of the pairs is %s", location)
    return built


def rebuild_initial_model(job: ResolvedJob, model: ParallelModel) -> ParallelModel:
    """Rebuild the model as it was before the first step, under the run's plan."""
    built = ModelBuilder(job.without_noise()).model(model.mesh, model.device, init_weights=False)
    adapter, path = built.adapter, job.model.initial_load_path
    if path is None:
        built.initialize()
    else:
        head, (kind, location) = parts.tensor_map(job.model).head, find_weights(Path(path))
        if kind == "native" and adapter is not None:  # the checkpoint may hold a trained adapter
            raise JobError(
                f"training.steps: given {job.schedule.steps}; allowed: as many as the run began with, because the "
                "reference of further pairs cannot be rebuilt from a checkpoint and an adapter; start with more steps "
                "in another job.dump_folder"
            )
        fresh = adapter.added_parameters if adapter else frozenset()
        built.initialize(head | fresh)
        _load_foreign(job.model, location, built.parts, fresh, head)
        if adapter is not None:
            adapter.init_from_base(built.parts)
    if job.config.adapter.initial_path:
        adapter.load_tensors(built.parts, parts.peft_tensors(job.model, adapter))
    logger.info("reference  the run reads further pairs: the model is rebuilt as it was before the first step")
    return built
