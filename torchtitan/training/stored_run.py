"""Read a run's model from its files one tensor or layer at a time, to compute with it and to merge its adapter.

The model itself stays on the meta device, so the memory does not grow with the number of layers.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtitan.adapters.interface import Adapter
from torchtitan.assembly import parts
from torchtitan.checkpoint.weight_sources import NativeWeights, Weights, fill, open_weights
from torchtitan.core.errors import JobError
from torchtitan.core.tensor_storage import Deferred, Store, Value, packed_names, stores
from torchtitan.job import ResolvedJob
from torchtitan.job.model import JobModel
from torchtitan.training.inference_model import saved_adapter_alone

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
