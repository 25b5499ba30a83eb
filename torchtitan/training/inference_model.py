"""Build models next to the one that is trained: with the weights of a checkpoint, for export and generation, and the
reference model of preference pairs."""

import dataclasses
import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.adapters import NONE
from torchtitan.adapters.interface import Adapter
from torchtitan.assembly import parts
from torchtitan.checkpoint import base_weights, load_model_for_inference, read_state
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.checkpoint.layout import MODEL
from torchtitan.checkpoint.weight_sources import fill, load_foreign, open_weights
from torchtitan.config.job import JobConfig
from torchtitan.config.sections.model import ActivationCheckpoint, Compile, Parallelism
from torchtitan.core.errors import JobError
from torchtitan.models.attention import activate_flash_attention
from torchtitan.models.kv_cache import store_for_single_rows
from torchtitan.parallelisms.degrees import LimitError
from torchtitan.parallelisms.parallel_model import ParallelModel
from torchtitan.process import distributed, machine
from torchtitan.process.ranks import Ranks

logger = logging.getLogger(__name__)


def load_model(config: JobConfig, step_folder: Path, device: torch.device) -> tuple[nn.Module, Adapter | None]:
    """Load the job's model on one device, in evaluation mode, and its adapter.

    `step_folder`: a checkpoint, or a Hugging Face folder; the latter is combined with the adapter of
    `adapter.initial_path`. Raises CheckpointError if these do not fit, or if the adapter belongs to another base.
    """
    if device.type == "cpu":
        machine.keep_freed_memory()
    config = with_available_attention(config, device)
    built, _, installed = parts.adapted_model(config)
    built.to_empty(device=device)
    _fill(built, config, step_folder, installed)
    return built.eval(), installed


def with_available_attention(config: JobConfig, device: torch.device) -> JobConfig:
    """Activate the job's attention kernel, or return the job with another: it may have been trained on another GPU."""
    try:
        activate_flash_attention(config.model.attention_backend, device)
    except JobError as error:
        logger.info('attention_backend = "auto" is used instead (%s)', error)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, attention_backend="auto"))
    return config


def load_decoder(config: JobConfig, step_folder: Path, device: torch.device) -> nn.Module:
    """Load a model as `load_model` does, to read single tokens fast."""
    model, _ = load_model(config, step_folder, device)
    store_for_single_rows(model)
    return model


def _fill(built: nn.Module, config: JobConfig, step_folder: Path, installed: Adapter | None) -> None:
    if find_weights(step_folder)[0] != "ours":
        extra_adapter = None if config.adapter.initial_path is None else installed
        fresh = extra_adapter.added_parameters if extra_adapter else ()
        load_foreign(
            step_folder,
            [built],
            config.model.name,
            parts.model_args(config, step_folder),
            fresh,
            (),
            config.model.ignore_config_keys,
        )
        if extra_adapter is not None:
            extra_adapter.load_tensors([built], parts.peft_tensors(config, extra_adapter))
        return
    adapter_only = saved_adapter_alone(config, step_folder)
    if adapter_only:
        fill_base(config, built, installed)
    load_model_for_inference(step_folder, built, installed.frozen_parameters if adapter_only else ())


def saved_adapter_alone(config: JobConfig, step_folder: Path) -> bool:
    """Return True if a checkpoint holds an adapter alone.

    Raises CheckpointError if the adapter belongs to another base than the job's.
    """
    is_adapter_only = parts.saves_adapter_alone(config)
    if config.adapter.kind != NONE and config.adapter.save is None:  # the job does not say; the checkpoint does
        is_adapter_only = base_weights.KEY in read_state(step_folder)["trainer"]
    if is_adapter_only:
        base_weights.refuse_other_base(read_state(step_folder)["trainer"], parts.base_reference(config))
    return is_adapter_only


def load_model_over_ranks(config: JobConfig, step_folder: Path, ranks: Ranks) -> nn.Module:
    """Load the job's model over all ranks, in evaluation mode. All ranks get the same tokens and the same logits.

    Tensor parallelism splits a dense model; expert parallelism and FSDP split a model with experts. Raises JobError if
    the number of ranks does not divide it.
    """
    device = distributed.init(ranks, config.comm.init_timeout_seconds)
    config = with_available_attention(_split_over(config, ranks.world_size), device)
    plan = parts.dims(config, ranks.world_size)
    try:
        built = parts.model(config, plan.build_mesh(device.type), plan, device)
    except LimitError as error:
        raise JobError(f"--ranks: given {error.given}; allowed: {error.allowed}; {error.remedy}") from None
    (full_model,) = built.parts
    _fill(full_model, config, step_folder, built.adapter)
    return full_model.eval()


def _split_over(config: JobConfig, world_size: int) -> JobConfig:
    experts = getattr(parts.model_args(config), "n_experts", 0)
    if experts:
        degrees = Parallelism(expert_parallel_degree=math.gcd(experts, world_size))
    else:
        degrees = Parallelism(
            data_parallel_shard_degree=1,
            tensor_parallel_degree=world_size,
            disable_sequence_parallel=True,
            disable_loss_parallel=True,
        )
    return dataclasses.replace(
        config,
        parallelism=degrees,
        training=dataclasses.replace(
            config.training,
            mixed_precision_param=config.training.dtype,
            frozen_dtype=config.training.dtype,
            float8="none",
        ),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        compile=Compile(),
    )


def broadcast_from_first(choice: torch.Tensor) -> torch.Tensor:
    """Broadcast rank 0's tensor, of any shape: sums of reductions may differ in their last bits between ranks."""
    dist.broadcast(choice, 0)
    return choice


def fill_base(config: JobConfig, built: nn.Module, installed: Adapter | None) -> None:
    """Load the weights that the job starts from into a model on one device."""
    path = config.checkpoint.initial_load_path
    assert path is not None  # the rules require it if an adapter is saved alone
    kind, location = find_weights(Path(path))
    fresh, heads = installed.added_parameters if installed else (), parts.trained_heads(config, installed)
    if kind == "ours":
        load_model_for_inference(location, built, fresh, heads)
    else:
        load_foreign(
            location,
            [built],
            config.model.name,
            parts.model_args(config, location),
            fresh,
            {name.removeprefix(MODEL) for name in heads.names},
            config.model.ignore_config_keys,
        )


def load_reference_model(config: JobConfig, path: str, model: ParallelModel) -> ParallelModel:
    """Build a model from the weights at a path, sharded as the run's. JobError if they are of another model."""
    _, location = find_weights(Path(path))
    built = parts.model(config, model.mesh, model.dims, model.device, policy=model, init_weights=False)
    with open_weights(
        location, config.model.name, parts.model_args(config, location), config.model.ignore_config_keys
    ) as weights:
        for part in built.parts:
            fill(part, weights, parts.model_args(config).tied_embeddings)
    logger.info("the reference of the pairs is %s", location)
    return built


def rebuild_initial_model(config: JobConfig, model: ParallelModel) -> ParallelModel:
    """Rebuild the model as it was before the first step, under the run's plan."""
    quiet = parts.without_noise(config)
    built = parts.model(quiet, model.mesh, model.dims, model.device, init_weights=False)
    adapter, path = built.adapter, config.checkpoint.initial_load_path
    if path is None:
        built.initialize()
    else:
        head, (kind, location) = parts.head_parameters(config), find_weights(Path(path))
        if kind == "ours" and adapter is not None:  # the checkpoint may hold a trained adapter
            raise JobError(
                f"training.steps: given {config.training.steps}; allowed: as many as the run began with, because the "
                "reference of further pairs cannot be rebuilt from a checkpoint and an adapter; start with more steps "
                "in another job.dump_folder"
            )
        fresh = adapter.added_parameters if adapter else frozenset()
        built.initialize(head | fresh)
        load_foreign(
            location,
            built.parts,
            config.model.name,
            parts.model_args(config, location),
            fresh,
            head,
            config.model.ignore_config_keys,
        )
        if adapter is not None:
            adapter.init_from_base(built.parts)
    if config.adapter.initial_path:
        adapter.load_tensors(built.parts, parts.peft_tensors(config, adapter))
    logger.info("reference  the run reads further pairs: the model is rebuilt as it was before the first step")
    return built
