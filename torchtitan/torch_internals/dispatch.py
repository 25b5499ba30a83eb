"""Operators with private names, the modes and the autograd engine that see them, and hooks of modules."""

from operator import attrgetter

import torch
import torch._ops
from torch import nn
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


graph_task_id = torch._C._current_graph_task_id
"""torch 2.13: the number of the backward under way, -1 outside of one, to leave out what a recomputation repeats."""
graph_task_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""torch 2.13: whether the backward under way may run again, so that saved tensors must not be overwritten."""
current_node = torch._C._current_autograd_node
"""torch 2.13: the node under way, None outside of a backward, to tell activations from work of backward."""
will_execute = torch._C._will_engine_execute_node
"""torch 2.13: whether the backward under way computes a node, as a split backward asks for some gradients only."""
preserve_version_counter = torch.autograd._unsafe_preserve_version_counter
"""torch 2.13: hides writes to a tensor that autograd has saved, as FSDP does where it gathers parameters."""


foreach_mul_ = torch._foreach_mul_
"""torch 2.13: multiplies many tensors in one kernel, to clip gradients."""
foreach_norm = torch._foreach_norm
"""torch 2.13: the norms of many tensors in one kernel."""
grouped_mm = torch.ops.aten._grouped_mm
"""torch 2.13: the operator of torch.nn.functional.grouped_mm, whose results selective recompute saves."""
scaled_mm = torch._scaled_mm
"""torch 2.13: a product of float8 matrices with a scale for each, or for each row."""
scaled_mm_operator = torch.ops.aten._scaled_mm
"""torch 2.13: its operator, whose results selective recompute saves."""
local_scalar_dense = torch.ops.aten._local_scalar_dense
"""torch 2.13: the operator of `item`, which a rehearsal answers."""

# Attention below autograd: with the logsumexp, and backward from it
attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""torch 2.13: (q, k, v, dropout, causal, *, attn_mask, scale) -> output, logsumexp."""
attention_for_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""torch 2.13: (grad, q, k, v, output, logsumexp, dropout, causal, *, attn_mask, scale) -> gradients."""
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
"""torch 2.13: (q, k, v, dropout, causal) -> output, logsumexp, lengths and longest of q and k, random state, mask."""
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
"""torch 2.13: (grad, q, k, v, output, logsumexp, lengths and longest, dropout, causal, random state) -> gradients."""
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
"""torch 2.13: (q, k, v, bias, with logsumexp, dropout, causal) -> output, logsumexp, random state."""
efficient_attention_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""torch 2.13: (grad, q, k, v, bias, output, logsumexp, random state, dropout, wanted, causal) -> gradients."""
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
"""torch 2.13: attention that torch may choose on a GPU, whose results selective recompute saves."""


def local_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """torch 2.13: the parameters of a module without those of its children, by name, with None for one that is absent.

    A function, because the compiler cannot trace an `attrgetter`.
    """
    return module._parameters


def has_hooks(module: nn.Module) -> bool:
    """torch 2.13: whether calling the module does more than its forward."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(hooks)
