"""The compiler. Nothing here imports it before it is used, which takes two seconds."""

import importlib
from collections.abc import Callable

import torch
import torch._functorch.config
from torch import nn


def load() -> None:
    """torch 2.13: import the compiler now, as it asks for devices when it is imported."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor")


def set_memory_budget(budget: float) -> None:
    """torch 2.13: set the share of activations that compiled functions of this process keep for backward."""
    torch._functorch.config.activation_memory_budget = budget


def allow_side_effects_in_recomputation() -> None:
    """torch 2.13: let compiled modules have side effects under activation checkpointing, without them in backward."""
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def wrap_compiled_call(module: nn.Module, wrap: Callable[[Callable], Callable]) -> None:
    """torch 2.13: replace what `module.compile()` has set to run in place of the module's forward."""
    assert module._compiled_call_impl is not None
    module._compiled_call_impl = wrap(module._compiled_call_impl)


def recompile_limit_error() -> type[Exception]:
    """torch 2.13: raised with fullgraph for one more compiled form of a function than torch's limit."""
    return torch._dynamo.exc.FailOnRecompileLimitHit


def compiler_error() -> type[Exception]:
    """torch 2.13: the base class of the compiler's errors; any other is one of the computation."""
    return torch._dynamo.exc.TorchDynamoException
