"""Buffers that training moves: what a forward adds up for the trainer, and biases of experts."""

from collections.abc import Callable

import torch
from torch import nn


class ZeroedBuffers(nn.Module):
    """A module whose own buffers start at zero, and keep their type."""

    def _apply(self, fn: Callable, recurse: bool = True) -> "ZeroedBuffers":
        """Buffers have no rule of initial values, so they get theirs on leaving the meta device. They keep their type:
        in bfloat16, steps of a thousandth would be rounded away.
        """
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if old.is_meta and not new.is_meta:
                setattr(self, name, torch.zeros_like(old, device=new.device))
            elif new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        return self


@torch.library.custom_op("torchtitan::add_once", mutates_args=("total",))
def add_once(total: torch.Tensor, amount: torch.Tensor) -> None:
    """total += amount, of the same shape, but not in a forward that runs inside a backward: activation checkpointing,
    the second time.

    An operator, and so one node of a compiled graph, because the compiler could not ask which of the two it is.
    """
    if torch._C._current_graph_task_id() == -1:
        total += amount


@add_once.register_fake
def _(total: torch.Tensor, amount: torch.Tensor) -> None:
    pass
