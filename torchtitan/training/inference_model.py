"""The job's model with what a checkpoint has, on one device or over several: for export and generation."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from torchtitan.adapters import NONE
from torchtitan.adapters.interface import Adapter
from torchtitan.build.parts import (
    adapted_model,
    base_reference,
    dims,
    model,
    model_args,
    peft_tensors,
    saves_adapter_alone,
)
from torchtitan.checkpoint import base_weights, load_model_for_inference, read_state
from torchtitan.checkpoint.base_weights import find_weights
from torchtitan.checkpoint.weight_sources import Weights, load_foreign, opened
from torchtitan.config.job import JobConfig
from torchtitan.config.sections.model import ActivationCheckpoint, Compile
from torchtitan.config.sections.parallelism import Parallelism
from torchtitan.core.errors import JobError
from torchtitan.core.tensor_storage import Deferred, Store, Value, stores
from torchtitan.parallelisms.degrees import LimitError
from torchtitan.process import distributed
from torchtitan.process.ranks import Ranks


def filled_model(config: JobConfig, step_folder: Path, device: torch.device) -> tuple[nn.Module, Adapter | None]:
    """The job's model on one device, with its adapter and the weights of a checkpoint, or of a folder of Hugging Face
    with the adapter of `adapter.initial_path` beside it; in evaluation. CheckpointError where these do not fit, or
    where an adapter's base is not the one it was made for.
    """
    built, _, installed = adapted_model(config)
    built.to_empty(device=device)
    _fill(built, config, step_folder, installed)
    return built.eval(), installed


def _fill(built: nn.Module, config: JobConfig, step_folder: Path, installed: Adapter | None) -> None:
    if find_weights(step_folder)[0] != "ours":
        beside = None if config.adapter.initial_path is None else installed
        fresh = beside.added_parameters if beside else ()
        load_foreign(step_folder, [built], config.model.name, model_args(config, step_folder), fresh)
        if beside is not None:
            beside.load_tensors([built], peft_tensors(config, beside))
        return
    alone = saves_adapter_alone(config)
    if config.adapter.kind != NONE and config.adapter.save is None:  # a job that says nothing, beside a checkpoint
        alone = base_weights.KEY in read_state(step_folder)["trainer"]
    if alone:
        base_weights.refuse_another(read_state(step_folder)["trainer"], base_reference(config))
        fill_base(config, built, installed)
    load_model_for_inference(step_folder, built, installed.frozen_parameters if alone else ())


def model_over_ranks(config: JobConfig, step_folder: Path, ranks: Ranks) -> nn.Module:
    """The same on all devices of the world together, for tokens that are the same on all ranks, as logits are that come
    out: split by tensor parallel, and a model with experts by these and FSDP. JobError for a number of ranks that does
    not divide it.
    """
    device = distributed.init(ranks, config.comm.init_timeout_seconds)
    config = _split_over(config, ranks.world_size)
    plan = dims(config, ranks.world_size)
    try:
        built = model(config, plan.build_mesh(device.type), plan, device)
    except LimitError as error:
        raise JobError(f"--ranks: given {error.given}; allowed: {error.allowed}; {error.remedy}") from None
    (whole,) = built.parts
    _fill(whole, config, step_folder, built.adapter)
    return whole.eval()


def _split_over(config: JobConfig, world_size: int) -> JobConfig:
    experts = getattr(model_args(config), "n_experts", 0)
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
        training=dataclasses.replace(config.training, mixed_precision_param=config.training.dtype),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        compile=Compile(),
    )


def first_ranks(choice: torch.Tensor) -> torch.Tensor:
    """The first rank's, of any shape, on all: sums of reductions may differ in their last bits between ranks."""
    dist.broadcast(choice, 0)
    return choice


@contextmanager
def plain_state(
    config: JobConfig, filled: nn.Module, installed: Adapter | None, into_unpacked: bool = False
) -> Iterator[tuple[dict[str, Value], str]]:
    """The plain model's tensors, which are made when they are asked for, with what its adapter has learned folded in;
    and into what: "original", the weights that a packed base was made of, "unpacked", what it computes with, or
    "weights". JobError where the job's base is none, or by now another.
    """
    path = config.checkpoint.initial_load_path
    packed = dict(stores(filled))
    if installed is None:
        yield dict(filled.state_dict()), "weights"
    elif not packed:
        yield installed.merged_tensors([filled]), "weights"
    elif into_unpacked or path is None:
        yield installed.merged_tensors([filled]), "unpacked"
    else:
        with ExitStack() as stack:
            try:
                weights = stack.enter_context(opened(path, config.model.name, model_args(config, path)))
            except JobError as error:
                raise JobError(f"{error}; {UNPACKED}") from error
            original = {
                name: Deferred(store.shape, partial(_original, weights, name, store, path))
                for name, store in packed.items()
            }
            yield installed.merged_tensors([filled], original), "original"


UNPACKED = "or fold into what the run computed with: --merge-base unpacked"


def _original(weights: Weights, name: str, store: Store, path: str) -> torch.Tensor:
    """A matrix of the base, in float32 at least."""
    matrix = weights.whole(name)
    if not store.holds(matrix):
        raise JobError(
            f"{path}: its {name} is not the matrix that the run has packed; put the run's base there again, {UNPACKED}"
        )
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))


def fill_base(config: JobConfig, built: nn.Module, installed: Adapter | None) -> None:
    """Of a model on one device: the weights that the job starts from."""
    path = config.checkpoint.initial_load_path
    assert path is not None  # the rules ask for it where an adapter is saved alone
    kind, place = find_weights(Path(path))
    fresh = installed.added_parameters if installed else ()
    if kind == "ours":
        load_model_for_inference(place, built, fresh)
    else:
        load_foreign(place, [built], config.model.name, model_args(config, place), fresh)
