"""Activation checkpointing."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.utils import checkpoint

from torchtitan.torch_internals.dispatch import disable_current_modes

checkpoint_wrapper = wrapper.checkpoint_wrapper
"""torch 2.13: wraps a module so that backward recomputes it."""


def unwrapped(module: nn.Module) -> nn.Module:
    """torch 2.13: the module in a wrapper, to compile it without; any other module itself."""
    return module._checkpoint_wrapped_module if isinstance(module, wrapper.CheckpointWrapper) else module


def without_selective_recompute(function: Callable) -> Callable:
    """torch 2.13: return `function` wrapped to run without the dispatch modes of selective recompute.

    All other modes stay active, such as the fake tensors of a dry run, which must not gather real parameters.
    """

    @wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        with disable_current_modes() as modes, ExitStack() as other_modes:
            for mode in reversed(modes):  # `modes` begins with the innermost
                if not isinstance(mode, (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)):
                    other_modes.enter_context(mode)
            return function(*args, **kwargs)

    return run


def ignore_profiler_markers() -> None:
    """torch 2.13: let selective recompute ignore the profiler's markers in all of this process, which compute nothing.

    FSDP adds one if a module inside a block is the first FSDP module to run, as in recomputation.
    """
    profiler = torch.ops.profiler
    checkpoint.SAC_IGNORED_OPS |= {
        profiler._record_function_enter_new.default,
        profiler._record_function_exit._RecordFunction,
    }


def operator_of(function: Any) -> Any:
    """torch 2.13: the operator of a function made by torch.library.custom_op, as dispatch modes see it."""
    return function._opoverload
