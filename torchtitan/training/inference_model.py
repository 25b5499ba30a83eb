"""Build models next to the one that is trained: with the weights of a checkpoint, for export and generation, and the
reference model of preference pairs.

A run's model can be read from its files one tensor or layer at a time, to compute with it and to merge its adapter. It
stays on the meta device, so the memory does not grow with the number of layers.
"""

import logging
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
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
from torchtitan.checkpoint.base_weights import find_weights, rounding_of
from torchtitan.checkpoint.layout import MODEL
from torchtitan.checkpoint.weight_sources import NativeWeights, Weights, fill, load_foreign, open_weights
from torchtitan.config.sections.model import ActivationCheckpoint, Compile, Parallelism
from torchtitan.core.errors import JobError
from torchtitan.core.tensor_storage import Deferred, Store, Value, packed_names, stores
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.job.saving import JobSaving
from torchtitan.models.attention import activate_flash_attention
from torchtitan.models.fake_quantized import leave_rounded_weights, round_weights
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
    builder = ModelBuilder(job.with_options({ATTENTION: backend}))
    built, _, installed = builder.adapted_model()
    builder.fake_quantize(built)
    built.to_empty(device=device)
    _fill(built, job.model, job.saving, step_folder, installed)
    _leave_rounded(job, step_folder, built)
    round_weights(built)
    return built.eval(), installed


def _leave_rounded(job: ResolvedJob, step_folder: Path, model: nn.Module) -> None:
    """Let a model not round weights once more that an export has rounded. JobError if the job rounds in another way."""
    rounding, options = rounding_of(step_folder), job.config.qat
    if rounding is None or options.weight_dtype == "none":
        return
    if rounding != options.of_weights:
        raise JobError(
            f"{step_folder}: its weights are rounded with {rounding}, and the job says {options.of_weights}; give the "
            "job of its run, or qat.weight_dtype = none to compute with the weights as they are"
        )
    leave_rounded_weights(model, job.model.args.tied_embeddings)


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
    _leave_rounded(job, step_folder, full_model)
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
    types: dict[str, Any] = {"training.mixed_precision_param": dtype, "training.frozen_dtype": dtype}
    types |= {"training.float8": "none", "qat.after_steps": 0}
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


UNPACKED = "or merge into the dequantized weights: --merge-base unpacked"


class RunWeights(Weights):
    """The weights of a checkpoint by the names of its adapted model; those that it lacks are the base's.

    `added`: parameters of the adapter, which stay in memory.
    """

    def __init__(self, saved: NativeWeights, base: Weights | None, packed: set[str], added: Collection[str]):
        self.saved, self.base, self.step = saved, base, saved.step
        self.packed = frozenset(packed & saved.templates.keys())
        self.added = saved.full_tensors(added) if added else {}

    def source_of(self, name: str) -> Weights:
        return self.saved if name in self.saved.templates or self.base is None else self.base

    def dtype(self, name: str) -> torch.dtype:
        return self.source_of(name).dtype(name)

    def full_tensor(self, name: str) -> torch.Tensor:
        return self.added[name] if name in self.added else self.source_of(name).full_tensor(name)


@contextmanager
def open_run(job: ResolvedJob, step_folder: Path, model: nn.Module, adapter: Adapter | None) -> Iterator[RunWeights]:
    """Open a checkpoint of this project, and the job's base weights if only the adapter was saved.

    `model`: the job's adapted model, on the meta device. Raises JobError if they do not fit it, or if the adapter
    belongs to another base.
    """
    needs_base = adapter is not None and saved_adapter_alone(job.saving, step_folder)
    absent = set(adapter.frozen_parameters) if adapter is not None and needs_base else set()
    if job.model.args.tied_embeddings:
        absent.add("output.weight")
    saved = NativeWeights(
        step_folder, {name: tensor for name, tensor in model.state_dict().items() if name not in absent}
    )
    with ExitStack() as stack:
        base = stack.enter_context(open_base(job.model, adapter)) if needs_base else None
        yield RunWeights(saved, base, packed_names(model), adapter.added_parameters if adapter else ())


def open_base(model: JobModel, adapter: Adapter | None) -> Any:
    """Return a context that opens the weights that the job starts from, which may lack a head that the run trains."""
    path, options = model.initial_load_path, model.model
    assert path is not None  # the caller has checked
    args, heads = model.args_for_weights(path), parts.trained_heads(model, adapter)
    return open_weights(path, options.name, args, options.ignore_config_keys, heads)


@contextmanager
def layers_on_demand(model: nn.Module, weights: Weights, tied: bool) -> Iterator[None]:
    """Fill a decoder on the meta device: each layer while it computes, everything else as long as the context."""
    layers, model.layers = model.layers, nn.ModuleDict()
    try:
        fill(model.to_empty(device="cpu"), weights, tied)
    finally:
        model.layers = layers

    spare: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}  # the next layer's, if it has the same shapes

    def reuse(tensor: torch.Tensor) -> torch.Tensor:
        tensors = spare.get((tensor.shape, tensor.dtype))
        return tensors.pop() if tensors else torch.empty_like(tensor, device="cpu")

    def give_back(tensor: torch.Tensor) -> torch.Tensor:
        spare.setdefault((tensor.shape, tensor.dtype), []).append(tensor.detach())
        return torch.empty_like(tensor, device="meta")

    def fill_layer(prefix: str, layer: nn.Module, inputs: Any) -> None:
        fill(layer._apply(reuse), weights, tied, prefix=prefix)

    def empty_layer(layer: nn.Module, inputs: Any, output: Any) -> None:
        layer._apply(give_back)

    hooks = []
    for name, layer in layers.items():
        hooks.append(layer.register_forward_pre_hook(partial(fill_layer, f"layers.{name}.")))
        hooks.append(layer.register_forward_hook(empty_layer))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.to_empty(device="meta")


@contextmanager
def plain_state(
    job_model: JobModel, model: nn.Module, adapter: Adapter | None, weights: RunWeights, into_unpacked: bool = False
) -> Iterator[tuple[dict[str, Value], str]]:
    """Yield the plain model's tensors, read and merged on access, and the name of the merge's base.

    `model`: the adapted model on the meta device. The base is "original", the weights before quantization, "unpacked",
    the dequantized weights, or "weights", if the base is not quantized. Raises JobError if the job's base cannot be
    read or has changed.
    """
    packed, path = dict(stores(model)), job_model.initial_load_path
    into = "weights" if not packed else "unpacked" if into_unpacked or path is None else "original"
    live = model.state_dict(keep_vars=True)
    state: dict[str, Value] = {
        name: Deferred(tuple(tensor.shape), partial(read_as_computed, weights, name, tensor.dtype))
        for name, tensor in live.items()
    }
    if adapter is None:
        yield state, into
        return
    with ExitStack() as stack:
        originals: dict[str, Deferred] = {}
        if into == "original":
            try:
                base = weights.base or stack.enter_context(open_base(job_model, adapter))
            except JobError as error:
                raise JobError(f"{error}; {UNPACKED}") from error
            for name, store in packed.items():
                check = store if weights.packed else None  # else they were read from this very base
                originals[name] = Deferred(store.shape, partial(read_original, base, name, check, path))
        merged = adapter.merged_tensors([model], _widened(state) | originals)
        yield (
            {
                name: _filled_meanwhile(model, name, value, weights, into)
                if isinstance(value, Deferred)
                else state[name]
                for name, value in merged.items()
            },
            into,
        )


def _widened(state: Mapping[str, Value]) -> dict[str, Deferred]:
    """Return tensors to merge into, in float32 or wider, so that a sum is rounded only to the type that is written."""
    return {name: Deferred(tuple(value.shape), partial(_widen, value)) for name, value in state.items()}


def _widen(value: Value) -> torch.Tensor:
    tensor = value.detach()
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _filled_meanwhile(model: nn.Module, name: str, merged: Deferred, weights: RunWeights, into: str) -> Deferred:
    """Return a merged tensor that fills its module for its computation: A and B, and a packed matrix if needed."""
    path = name.rpartition(".")[0]
    module: Any = model.get_submodule(path)
    plain = {f"{path}.{attribute}" for attribute in module.mergeable} if into != "unpacked" else set()

    def make() -> torch.Tensor:
        for attribute, parameter in module.named_parameters(recurse=False):
            if f"{path}.{attribute}" not in plain:
                setattr(module, attribute, nn.Parameter(torch.empty_like(parameter, device="cpu"), False))
        fill(module, weights, False, plain, prefix=f"{path}.")
        try:
            return merged.detach()
        finally:
            module.to_empty(device="meta")

    return Deferred(merged.shape, make)


def read_as_computed(weights: Weights, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read a tensor of any shape, rounded to the run's `dtype`. One that is stored in a narrower type keeps that."""
    value = weights.finite_tensor(name)
    return value if torch.promote_types(value.dtype, dtype) == dtype else value.to(dtype)


def read_original(weights: Weights, name: str, store: Store | None, path: str | None) -> torch.Tensor:
    """Return a matrix [out, in] of the original base, in float32 or wider. JobError unless `store` has it packed."""
    matrix = weights.full_tensor(name)
    if store is not None and not store.holds(matrix):
        raise JobError(
            f"{path}: its {name} is not the matrix that the run quantized; restore the run's base at this path, "
            f"{UNPACKED}"
        )
    return matrix.to(torch.promote_types(matrix.dtype, torch.float32))
