"""Tensors of model and optimizers by name, host copies for background saves, and comparison with a checkpoint.

On a rank of a pipeline these are only its parts of the model. Under any parallel plan a tensor has its name in the full
model, and the names of all ranks are compared together.

The names are the same as in torch.distributed.checkpoint.state_dict (a test compares them). It is not used, because
with an optimizer per parameter (`early_step_in_backward`) it walks all parameters for each of them, which takes 0.8 s
per save for 300 parameters, against 2 ms here (measured: torch 2.13, CPU).
"""

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtitan.checkpoint.layout import MODEL, OPTIMIZER, CheckpointError, TensorEntry
from torchtitan.core.random_draws import clean_name
from torchtitan.torch_internals.memory import pin_memory, unpin_memory

Tensors = dict[str, torch.Tensor]
VALUE = TensorEntry("value", [])
"""Placeholder for a number or flag of an optimizer's state when names are compared."""
_NAMED_IN_ERRORS = 5


def model_tensors(model_parts: Iterable[nn.Module]) -> Tensors:
    """Return parameters and persistent buffers, sharing memory with the model; a tied tensor once, by its first
    name.
    """
    return {MODEL + name: tensor.detach() for name, tensor in _owned_and_copied(model_parts)[0].items()}


def optimizer_state(
    model_parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> tuple[Tensors, dict[str, Any]]:
    """Return the optimizers' tensors, sharing memory with them, and other state values (numbers, flags), by name.

    Hyperparameters are not included, because they follow from the job and the schedule.
    """
    names, copies = _names(model_parts)
    tensors: Tensors = {}
    values: dict[str, Any] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter not in copies else ():
                name = _state_name(names[parameter], key)
                if isinstance(value, torch.Tensor):
                    tensors[name] = value.detach()
                else:
                    values[name] = value
    return tensors, values


def copied_tensors(model_parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> Tensors:
    """Return copies of tensors that another part of a pipeline also holds and saves, and of their optimizer state, by
    the names of the originals. They are not saved, but filled by a load.
    """
    _, copied_params = _owned_and_copied(model_parts)
    names = {tensor: name for name, tensor in copied_params.items()}
    copies = {MODEL + name: tensor.detach() for name, tensor in copied_params.items()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter in names else ():
                if isinstance(value, torch.Tensor):
                    copies[_state_name(names[parameter], key)] = value.detach()
    return copies


def set_optimizer_values(
    model_parts: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer], values: dict[str, Any]
) -> None:
    """Restore the values from `optimizer_state` that are not tensors. Raises `CheckpointError` if one is missing."""
    first_names, copies = _names(model_parts)
    names = first_names | copies
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                name = _state_name(names[parameter], key)
                if not isinstance(value, torch.Tensor):
                    if name not in values:
                        raise CheckpointError(f"it lacks {name}")
                    state[key] = values[name]


def allocate_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make optimizers that have not stepped yet create their state, by a step with learning rate 0 and zero gradients.

    Only the optimizer knows its state, so this works for any optimizer. Weights do not change; the new state counts one
    step too many and must be overwritten.
    """
    for optimizer in optimizers:
        if optimizer.state:
            continue
        rates = [group["lr"] for group in optimizer.param_groups]
        gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in gradients:
            parameter.grad = gradient


def entries(tensors: Tensors, values: Iterable[str] = ()) -> dict[str, TensorEntry]:
    """Return dtype and global shape by name, comparable with a manifest; placeholders for non-tensor values."""
    of_tensors = {name: TensorEntry(str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
    return of_tensors | dict.fromkeys(values, VALUE)


def merge_entries(shares: Iterable[dict[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Merge the ranks' entries; under a pipeline each rank has other layers."""
    union: dict[str, TensorEntry] = {}
    for share in shares:
        for name, entry in share.items():
            assert union.setdefault(name, entry) == entry, (name, entry, union[name])
    return union


def differences(
    expected: dict[str, TensorEntry], saved: dict[str, TensorEntry], cast: bool = False
) -> tuple[str | None, set[str]]:
    """Return why a checkpoint does not fit (None: it does), and which dtypes a load would cast (if `cast`)."""
    shared = expected.keys() & saved.keys()
    casts = {name for name in shared if expected[name].dtype != saved[name].dtype}
    allowed = {name for name in casts if cast and _is_floating(expected[name]) and _is_floating(saved[name])}
    mismatched = {name for name in shared if expected[name].shape != saved[name].shape} | (casts - allowed)
    messages = [
        _join_names("it lacks", sorted(expected.keys() - saved.keys())),
        _join_names("it also holds", sorted(saved.keys() - expected.keys())),
        _join_names(
            "they differ in", [f"{name} (saved {saved[name]}, job {expected[name]})" for name in sorted(mismatched)]
        ),
    ]
    return "; ".join(text for text in messages if text) or None, {saved[name].dtype for name in allowed}


def not_finite(tensors: Tensors) -> list[str]:
    """Return the names of tensors with a NaN or an infinity in this rank's part. Waits for the device once."""
    floating = {name: local_part(t) for name, t in tensors.items() if t.is_floating_point() and local_part(t).numel()}
    if not floating:
        return []
    largest = torch.stack([part.abs().amax().to(torch.float64) for part in floating.values()])  # NaN propagates
    return [name for name, finite in zip(floating, torch.isfinite(largest).tolist(), strict=True) if not finite]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor of any shape; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


ALIGNMENT = 64
"""Alignment in bytes of a tensor in the memory of Staging."""


class Staging:
    """Host copies of this rank's parts of the tensors, in buffers that live as long as the job.

    The first allocation of that much memory takes longer than ten copies into it, so a thread does it in advance. With
    `pinned`, copies from a GPU run at the speed of the bus. All buffers are in one piece of memory that is pinned in
    place: torch's allocator of pinned memory rounds each tensor up to a power of two of bytes, up to twice as much in
    total.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.memory: torch.Tensor | None = None
        self.buffers: Tensors = {}
        self.fresh = True
        self.preparing: threading.Thread | None = None

    def prepare(self, tensors: Tensors) -> None:
        """Allocate the buffers for these tensors in the background. Only while `fresh`, because it overwrites them."""
        self.fresh = False
        device = torch.cuda.current_device() if self.pinned else None
        self.preparing = threading.Thread(target=self._allocate, args=(tensors, device), name="staging")
        self.preparing.start()

    def copy(self, tensors: Tensors) -> Tensors:
        """Copy the current values of the tensors; the copies are valid until the next call."""
        self.fresh = False
        if self.preparing is not None:
            self.preparing.join()
        self._make_room(tensors)
        for name, buffer in self.buffers.items():
            buffer.copy_(local_part(tensors[name]), non_blocking=self.pinned)
        if self.pinned:
            torch.cuda.synchronize()
        return self.buffers

    def _allocate(self, tensors: Tensors, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # set per thread; otherwise pinning opens a context on GPU 0
        self._make_room(tensors)

    def _make_room(self, tensors: Tensors) -> None:
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        current, needed = ({name: (t.shape, t.dtype) for name, t in group.items()} for group in (self.buffers, parts))
        if current == needed:
            return
        offsets, end = {}, 0
        for name, part in parts.items():
            offsets[name] = end
            end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        if self.pinned and self.memory is not None:
            unpin_memory(self.memory.data_ptr())
        self.buffers, self.memory = {}, None  # freed before the new allocation
        memory = torch.zeros(end, dtype=torch.uint8, device="cpu")
        if self.pinned:
            pin_memory(memory.data_ptr(), end)
        self.memory = memory
        for name, part in parts.items():
            bytes_ = memory[offsets[name] : offsets[name] + part.nbytes]
            self.buffers[name] = bytes_.view(part.dtype).view(part.shape)


def _owned_and_copied(model_parts: Iterable[nn.Module]) -> tuple[Tensors, Tensors]:
    """Return the tensors that the parts own, and their copies of tied tensors, by the names used in checkpoints.

    Where a pipeline separates tied weights, the last part declares it: `tied_names` = {its name: first name}.
    """
    owned: Tensors = {}
    tied: list[tuple[str, torch.Tensor]] = []
    owned_ids: set[int] = set()
    for part in model_parts:
        module = part.module if isinstance(part, DistributedDataParallel) else part
        first_names = getattr(module, "tied_names", {})
        for path, tensor in module.state_dict(keep_vars=True).items():
            name = clean_name(path)
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"{name} of the model is no tensor; checkpoints hold parameters and buffers only")
            if name in first_names:
                tied.append((first_names[name], tensor))
            elif id(tensor) not in owned_ids:
                assert name not in owned, name
                owned[name] = tensor
                owned_ids.add(id(tensor))
    # if both ends are on one rank, they may be the same tensor
    copies = [(name, tensor) for name, tensor in tied if id(tensor) not in owned_ids]
    assert len(dict(copies)) == len(copies), [name for name, _ in copies]
    return owned, dict(copies)


def _names(model_parts: Iterable[nn.Module]) -> tuple[dict[torch.Tensor, str], dict[torch.Tensor, str]]:
    """Return `_owned_and_copied` with names by tensor."""
    owned, copies = _owned_and_copied(model_parts)
    return {tensor: name for name, tensor in owned.items()}, {tensor: name for name, tensor in copies.items()}


def _state_name(parameter: str, key: str) -> str:
    return f"{OPTIMIZER}state.{parameter}.{key}"


def _is_floating(entry: TensorEntry) -> bool:
    return entry.dtype in ("float32", "bfloat16", "float16", "float64")


def _join_names(prefix: str, names: list[str]) -> str:
    if not names:
        return ""
    remainder = f" and {len(names) - _NAMED_IN_ERRORS} more" if len(names) > _NAMED_IN_ERRORS else ""
    return f"{prefix} {', '.join(names[:_NAMED_IN_ERRORS])}{remainder}"
