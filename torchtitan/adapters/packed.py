"""LoRA beside matrices that are kept in few bits, in one of several forms (nf4.py, int8.py).

A packed matrix is a few frozen parameters without a gradient, of whole numbers, which FSDP gathers and tensor parallel
splits as it would the matrix. It is unpacked where it is used, once forward and once backward, and never kept.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan.adapters.low_rank import LowRankLinear, Strength, plus_learned
from torchtitan.core.tensor_storage import Store
from torchtitan.models.layers import autocast_dtype


class Form(Protocol):
    """Of a matrix [out, in] whose rows are packed each by itself, by a number of its own at least: what a rank makes of
    some rows, or of some of each row's blocks, has to be the bits that the whole matrix has there.
    """

    names: tuple[str, ...]
    """Of the parameters; the first has codes, [out, in / n], the last one number for each row, [out]."""

    def like(self, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
        """Parameters on the meta device, of a matrix [outputs, inputs]."""

    def block_in(self, *parts: torch.Tensor) -> int:
        """How many weights of a row are packed together, read off a rank's parameters, which are parts of those of
        `like`'s shapes.
        """

    def pack(self, blocks: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """float32 [out, blocks, block], of whose whole rows `row` [out] are the largest magnitudes."""

    def unpack(self, *parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[out, in], rounded once."""


class PackedLinear(LowRankLinear):
    """A LowRankLinear whose `weight` is packed into parameters of the form's names."""

    form: Form

    def add_parameters(self, strength: Strength) -> None:
        super().add_parameters(strength)
        self.dtype, device = self.weight.dtype, self.weight.device
        del self.weight
        for name, like in zip(self.form.names, self.form.like(self.out_features, self.in_features), strict=True):
            parameter = nn.Parameter(torch.empty_like(like, device=device), requires_grad=False)
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (getattr(self, name) for name in self.form.names)
        y = _Packed.apply(x.flatten(0, -2), self.form, *parts)
        return plus_learned(self, x, y if self.bias is None else y + self.bias.to(y.dtype))

    def tensor_placements(self, role: str, whole: Placement) -> dict[str, tuple[Placement, Placement]]:
        told = super().tensor_placements(role, whole)
        lies = {"column": Shard(0), "head": Shard(0), "row": Shard(1)}.get(role, Replicate())
        of_rows = self.form.names[-1]
        for name in self.form.names:
            told[name] = (Replicate(), Replicate()) if name == of_rows and role == "row" else (lies, lies)
        return told

    def stores(self) -> dict[str, Store]:
        return {"weight": PackedWeight(self)}


class _Packed(torch.autograd.Function):
    """x W^T of a packed W, which backward unpacks again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        # one name for all: the compiler takes the context for an input where it counts one more than there are names
        x, form, *packed = inputs
        ctx.save_for_backward(*packed)
        ctx.form, ctx.types = form, (x.dtype, autocast_dtype(x.device.type) or x.dtype)
        return F.linear(x.to(ctx.types[1]), form.unpack(*packed, dtype=ctx.types[1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        others = (None,) * (1 + len(ctx.form.names))
        if not ctx.needs_input_grad[0]:
            return None, *others
        of_input, computed = ctx.types
        return (grad.to(computed) @ ctx.form.unpack(*ctx.saved_tensors, dtype=computed)).to(of_input), *others


class PackedWeight:
    """Writes and reads the matrix of a PackedLinear, a rank its part of it."""

    def __init__(self, linear: PackedLinear):
        self.linear, self.form, self.packed = linear, linear.form, linear.form.names
        self.shape = (linear.out_features, linear.in_features)

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """This rank's."""
        parts = (getattr(self.linear, name).detach() for name in self.packed)
        return [part.to_local() if isinstance(part, DTensor) else part for part in parts]

    @property
    def _codes(self) -> torch.Tensor:
        return getattr(self.linear, self.packed[0])

    def empty(self) -> torch.Tensor:
        local = self._parameters[0]
        columns = local.shape[1] * self.linear.in_features // self._codes.shape[1]
        return self._laid_out(local.new_empty((local.shape[0], columns), dtype=self.linear.dtype))

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        for part, packed in zip(self._parameters, self._pack(values), strict=True):
            part.copy_(packed)

    @torch.no_grad()
    def holds(self, values: torch.Tensor) -> bool:
        """Whether it is what these are packed into; of a thousand codes one may have been rounded otherwise, as
        another device does.
        """
        agree = self._pack(values.to(self.linear.dtype))[0] == self._parameters[0]
        return agree.float().mean().item() >= 0.999

    def _pack(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = self._codes
        block = self.form.block_in(*self._parameters)
        local = (values.to_local() if isinstance(values, DTensor) else values).float().unflatten(1, (-1, block))
        row = local.abs().amax((-1, -2))
        if isinstance(codes, DTensor):
            for axis, placement in enumerate(codes.placements):
                if placement.is_shard(1):  # the others on this axis have the rest of these rows
                    dist.all_reduce(row, op=dist.ReduceOp.MAX, group=codes.device_mesh.get_group(axis))
        return self.form.pack(local, row)

    @torch.no_grad()
    def read(self) -> torch.Tensor:
        """The matrix [out, in] as it is computed with, laid out over the ranks as `empty` is."""
        return self._laid_out(self.form.unpack(*self._parameters, dtype=self.linear.dtype))

    def _laid_out(self, local: torch.Tensor) -> torch.Tensor:
        codes = self._codes
        if not isinstance(codes, DTensor):
            return local
        how = dict(run_check=False, shape=torch.Size(self.shape), stride=(self.shape[1], 1))
        return DTensor.from_local(local, codes.device_mesh, codes.placements, **how)
