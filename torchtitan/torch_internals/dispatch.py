"""Dispatch modes, fake tensors, and trees of tensors."""

from operator import attrgetter

import torch
import torch._ops
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch, _pytree

from torchtitan.torch_internals.replacement import replace

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""torch 2.13: the base class of modes that see each operator, with which a rehearsal counts memory and messages."""
disable_current_modes = _python_dispatch._disable_current_modes
"""torch 2.13: a context without dispatch modes that yields them, to hide FSDP's gathers from selective recompute."""
is_in_torch_dispatch_mode = _python_dispatch.is_in_torch_dispatch_mode
"""torch 2.13: whether a mode is entered, to take the operator that modes see and not one in place."""
OpOverload = torch._ops.OpOverload
"""torch 2.13: the class of an operator with a schema; operators of higher order have none."""
FakeTensor = fake_tensor.FakeTensor
"""torch 2.13: a tensor without values, as rehearsals use it."""
FakeTensorMode = fake_tensor.FakeTensorMode
"""torch 2.13: the mode in which new tensors have no values."""
unset_fake_temporarily = fake_tensor.unset_fake_temporarily
"""torch 2.13: a context that leaves this mode, for numbers that a rehearsal needs too."""
VALUES_NEEDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
"""torch 2.13: what a step without values raises: for values, shapes that depend on them, operators without a rule."""
storage_key = attrgetter("_cdata")
"""torch 2.13: the address of a storage, to tell which tensors share one."""
tree_iter = _pytree.tree_iter
"""torch 2.13: iterates over the tensors of an operator's result."""
tree_leaves = _pytree.tree_leaves
"""torch 2.13: lists the tensors of a module's output or of an operator's arguments."""
tree_map_only = _pytree.tree_map_only
"""torch 2.13: replaces the floats among a function's arguments."""


def ignore_device_guard() -> None:
    """torch 2.13: let fake tensors of CUDA exist without a driver, which they ask for the guard of a device."""
    replace(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)
