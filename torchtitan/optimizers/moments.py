"""What Adam and Adafactor remember of a tensor's gradients, and the change that follows, for this rank's part of it.

The tensor may be a parameter, or a gradient's projection, which is smaller: optimizers here are made of one of these
and of what they do with the change.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from torchtitan.optimizers.blocks import Packed
from torchtitan.optimizers.layout import Layout, local
from torchtitan.optimizers.sizes import SMALLEST

State = dict[str, Any]
Options = Mapping[str, Any]
"""Of a parameter's group."""


class Moments(Protocol):
    def begin(self, state: State, layout: Layout, group: Options, dtype: torch.dtype, device: torch.device) -> None:
        """Of a tensor that has had no gradient. `dtype`: what the parameter is kept in."""
        ...

    def change(self, gradient: torch.Tensor, layout: Layout, state: State, group: Options, rate: float) -> torch.Tensor:
        """What is to be added to this rank's part, of its shape as `gradient` is; computed in the gradient's type."""
        ...


class Adam:
    """Two moments in the type of the parameter, or those of large tensors `packed` in 8 bits (blocks.py).

    Operation by operation what torch.optim.AdamW does behind its weight decay, so that in float32 the bits are its own.
    `eps_first`: add eps to the root of the second moment before its bias correction, as GaLore's library and the former
    AdamW of transformers do. Early steps are then shorter where gradients are small.
    """

    KEYS = (("exp_avg", True), ("exp_avg_sq", False))
    """Each with whether it has a sign."""

    def __init__(self, packed: bool = False, eps_first: bool = False):
        self.packed, self.eps_first = packed, eps_first

    def packs(self, layout: Layout) -> bool:
        return self.packed and layout.numel >= SMALLEST

    def begin(self, state: State, layout: Layout, group: Options, dtype: torch.dtype, device: torch.device) -> None:
        state["step"] = 0
        dtype = torch.float32 if self.packed and dtype != torch.float64 else dtype
        for key, signed in self.KEYS:
            if self.packs(layout):
                Packed(layout).begin(state, key, device, signed)
            else:
                state[key] = layout.zeros(dtype, device)

    def read(self, state: State, layout: Layout, dtype: torch.dtype) -> list[torch.Tensor]:
        """Both, each of this rank's part's shape, to be changed in place and given to `write`."""
        if self.packs(layout):
            packed = Packed(layout)
            return [packed.read(state, key, signed, dtype) for key, signed in self.KEYS]
        return [local(state[key]).to(dtype) for key, _ in self.KEYS]

    def write(self, state: State, layout: Layout, moments: list[torch.Tensor]) -> None:
        """Both, of the shapes that `read` gave."""
        for (key, signed), moment in zip(self.KEYS, moments, strict=True):
            if self.packs(layout):
                Packed(layout).write(state, key, signed, moment)
            elif local(state[key]) is not moment:
                local(state[key]).copy_(moment)

    def change(self, gradient: torch.Tensor, layout: Layout, state: State, group: Options, rate: float) -> torch.Tensor:
        beta1, beta2 = group["beta1"], group["beta2"]
        state["step"] += 1
        first, second = self.read(state, layout, gradient.dtype)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self.write(state, layout, [first, second])  # the change is of the moments as they were before they were packed
        correction = (1 - beta2 ** state["step"]) ** 0.5
        if self.eps_first:
            denominator = second.sqrt().add_(group["eps"]).div_(correction)
        else:
            denominator = (second.sqrt() / correction).add_(group["eps"])
        return (first * (-rate / (1 - beta1 ** state["step"]))).div_(denominator)


class Adafactor:
    """The second moment of a matrix as one number a row and one a column (arXiv:1804.04235, algorithm 4), with a rate
    from outside, so without the paper's relative one; with `beta1` a running mean of changes too.
    """

    DECAY = -0.8  # of 1 - t^-0.8, the weight of what is remembered in step t

    def begin(self, state: State, layout: Layout, group: Options, dtype: torch.dtype, device: torch.device) -> None:
        state["step"] = 0
        if len(layout.shape) < 2:
            state["exp_avg_sq"] = layout.zeros(dtype, device)
        else:
            state["exp_avg_sq_row"] = layout.resized(-1, 1).zeros(dtype, device)
            state["exp_avg_sq_col"] = layout.resized(-2, 1).zeros(dtype, device)
        if group["beta1"]:
            state["exp_avg"] = layout.zeros(dtype, device)

    def change(self, gradient: torch.Tensor, layout: Layout, state: State, group: Options, rate: float) -> torch.Tensor:
        state["step"] += 1
        fresh = state["step"] ** self.DECAY
        square = gradient.square() + group["tiny"]
        if "exp_avg_sq" in state:
            second = _moved(state, "exp_avg_sq", square, fresh)
            change = gradient * second.rsqrt()
        else:
            rows = layout.summed(square.sum(-1, keepdim=True), -1) / layout.shape[-1]
            columns = layout.summed(square.sum(-2, keepdim=True), -2) / layout.shape[-2]
            rows = _moved(state, "exp_avg_sq_row", rows, fresh)
            columns = _moved(state, "exp_avg_sq_col", columns, fresh)
            mean = layout.resized(-1, 1).summed(rows.sum(-2, keepdim=True), -2) / layout.shape[-2]
            change = gradient * (rows / mean).rsqrt() * columns.rsqrt()
        size = (layout.summed(change.square().sum()) / layout.numel).sqrt()
        change.mul_(-rate / (size / group["clip"]).clamp_min(1.0))
        return _moved(state, "exp_avg", change, 1 - group["beta1"]) if group["beta1"] else change


def _moved(state: State, key: str, towards: torch.Tensor, weight: float) -> torch.Tensor:
    """The mean under that key, after `towards` has entered it."""
    kept = local(state[key])
    mean = kept.to(towards.dtype)
    mean.lerp_(towards, weight)
    if mean is not kept:
        kept.copy_(mean)
    return mean
