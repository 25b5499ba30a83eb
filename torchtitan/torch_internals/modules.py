"""torch.nn.Module."""

from torch import nn


def local_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """torch 2.13: the parameters of a module without those of its children, by name, with None for one that is absent.

    A function, because the compiler cannot trace an `attrgetter`.
    """
    return module._parameters


def has_hooks(module: nn.Module) -> bool:
    """torch 2.13: whether calling the module does more than its forward."""
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return any(hooks)
