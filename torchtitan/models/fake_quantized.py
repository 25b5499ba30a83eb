"""Quantization-aware training: linears and embeddings that compute with fake-quantized numbers.

Forward rounds weights, and inputs of linears, to the numbers of a format (core/fake_quantization.py). Backward is
straight-through (arXiv:1308.3432): the gradient of a rounded number is that of the number, 0 where it was clipped.
Parameters, gradients and optimizer state keep their types.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from torchtitan.core.errors import JobError
from torchtitan.core.fake_quantization import Formats, NumberFormat, Rounded
from torchtitan.core.fused import pieces
from torchtitan.core.tensor_storage import Deferred, Value
from torchtitan.models.layers import autocast_dtype, is_wanted
from torchtitan.torch_internals import collectives

PIECE = 2**22
"""Numbers that are rounded at once in eager."""


def _extent(x: torch.Tensor, rounding: NumberFormat | None, group: str | None) -> torch.Tensor | None:
    """Return the extent of x [R, C], over the ranks of the process group of this name."""
    extent = None if rounding is None else rounding.extent(x)
    if extent is None:
        return None
    extent = _wide(extent)
    if group is None:
        return extent
    return collectives.wait_tensor(collectives.all_reduce(extent, "max", group))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _round(x: torch.Tensor, rounding: NumberFormat | None, extent: torch.Tensor | None) -> Rounded:
    """Round x [R, C] and keep its type. Without a format it stays.

    In eager, rows are rounded in pieces: the temporary tensors of all would take several times the memory of x.
    """
    if rounding is None:
        return Rounded(x)
    if x.numel() <= PIECE or torch.compiler.is_compiling():
        rounded = rounding.round(_wide(x), extent)
        return rounded._replace(values=rounded.values.to(x.dtype))
    values, inside = torch.empty_like(x, memory_format=torch.contiguous_format), None
    for piece in pieces(len(x), max(1, PIECE // x.shape[1])):
        of_piece = extent if extent is None or len(extent) == 1 else extent[piece]
        rounded = rounding.round(_wide(x[piece]), of_piece)
        values[piece] = rounded.values
        if rounded.inside is not None:
            inside = torch.empty_like(values, dtype=torch.bool) if inside is None else inside
            inside[piece] = rounded.inside
    return Rounded(values, inside)


class _FakeQuantizedMatmul(torch.autograd.Function):
    """Compute x W^T of rounded operands. It saves x and W as they are, which backward rounds again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        of_inputs: NumberFormat | None,
        of_weights: NumberFormat | None,
        groups: tuple[str | None, str | None],
    ) -> torch.Tensor:
        """[T, K], [N, K] -> [T, N]. `groups`: names of the process groups over which the extents of x and W are taken,
        None for this rank alone.
        """
        formats = of_inputs, of_weights
        extents = [_extent(*arguments) for arguments in zip((x, weight), formats, groups, strict=True)]
        ctx.save_for_backward(x, weight, *extents)
        ctx.formats = formats
        return _round(x, of_inputs, extents[0]).values @ _round(weight, of_weights, extents[1]).values.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, g W [T, K], and of W, g^T x [N, K], with rounded W and x."""
        x, weight, *extents = ctx.saved_tensors
        rounded_x = _round(x, ctx.formats[0], extents[0])
        rounded_weight = _round(weight, ctx.formats[1], extents[1])
        of_x = rounded_x.masked(grad @ rounded_weight.values) if is_wanted(ctx, 0) else None
        of_weight = rounded_weight.masked(grad.t() @ rounded_x.values) if is_wanted(ctx, 1) else None
        return of_x, of_weight, None, None, None


class _FakeQuantizedRows(torch.autograd.Function):
    """Round x [R, C], whose scales depend on their groups alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounding: NumberFormat) -> torch.Tensor:
        rounded = _round(x, rounding, None)
        ctx.save_for_backward(rounded.inside)
        return rounded.values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Rounded(grad, *ctx.saved_tensors).masked(grad), None


class FakeQuantizedLinear(nn.Linear):
    """A linear of rounded weights and inputs; the bias is not rounded."""

    formats: Formats
    enabled = True
    extent_groups: tuple[str | None, str | None] = (None, None)

    def share_rows(self, name: str, role: str, group: str) -> None:
        """Take the extents over the ranks of tensor parallel where a scale is of numbers that several of them hold.

        `name`: of the module. `role`: the field of the plan that matched. `group`: name of the process group. Raises
        JobError if a rank's part of a row is not a whole number of groups.
        """
        splits_rows = role == "row"
        if splits_rows:
            part = f"the part of {name} on each rank of tensor parallel; take fewer ranks"
            _require_whole_groups(part, self.weight.to_local().shape[1], self.formats.weights)
        splits_matrix = splits_rows or (role in ("column", "head") and self.formats.weights.shared == "matrix")
        self.extent_groups = (group if splits_rows else None, group if splits_matrix else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]"""
        if not self.enabled:
            return F.linear(x, self.weight, self.bias)
        dtype = autocast_dtype(x.device.type) or x.dtype
        # views, because is_wanted cannot ask about leaves in autograd.grad
        operands = (operand.view_as(operand) for operand in (x.flatten(0, -2).to(dtype), self.weight.to(dtype)))
        of_weights, of_inputs = self.formats
        y = _FakeQuantizedMatmul.apply(*operands, of_inputs, of_weights, self.extent_groups)
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias.to(dtype)


class FakeQuantizedEmbedding(nn.Embedding):
    """An embedding of rounded weights, of a format whose scales depend on their groups alone."""

    rounding: NumberFormat
    enabled = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., D]. Only the rows that are looked up are rounded."""
        rows = F.embedding(tokens, self.weight)
        if not self.enabled:
            return rows
        rows = rows.to(autocast_dtype(rows.device.type) or rows.dtype)
        return _FakeQuantizedRows.apply(rows.flatten(0, -2), self.rounding).view_as(rows)


def use_fake_quantization(model: nn.Module, formats: Formats, embedding: NumberFormat | None) -> None:
    """Let all linears of a model compute with fake-quantized numbers, in place: those of blocks and the head.

    Routers and other gates of experts, and stacks of experts, are left: most of them are no nn.Linear in transformers 5
    either. `embedding`: the format of the token embedding; None leaves it. Raises JobError for a width that is not a
    whole number of groups.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            _require_whole_groups(name, module.in_features, formats.weights)
            module.__class__ = FakeQuantizedLinear
            module.formats = formats
    if embedding is not None:
        module = model.get_submodule("tok_embeddings")
        _require_whole_groups("tok_embeddings", module.embedding_dim, embedding)
        module.__class__ = FakeQuantizedEmbedding
        module.rounding = embedding


def _require_whole_groups(name: str, width: int, rounding: NumberFormat) -> None:
    if width % rounding.group:
        raise JobError(f"qat.group_size: given {rounding.group}; allowed: a divisor of {width}, the width of {name}")


def _fake_quantized(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FakeQuantizedLinear | FakeQuantizedEmbedding)]


class FakeQuantizationStart:
    """Lets the parts of a model round their numbers from a step on, a step hook (parallelisms/parallel_model.py)."""

    name = "qat"

    def __init__(self, parts: Iterable[nn.Module], first: int):
        """`first`: the number of steps without."""
        self.modules, self.first = [module for part in parts for module in _fake_quantized(part)], first
        self._continue_after(0)

    def _continue_after(self, step: int) -> None:
        for module in self.modules:
            module.enabled = step >= self.first

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._continue_after(step)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the trainer's step says it, also where a run without rounding wrote the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after state["step"], the steps of the schedule so far."""
        self._continue_after(state["step"])


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Replace the weights of a model on one device by their fake-quantized numbers, which forward then does not round.

    A head that is tied to the embedding gets its own weights.
    """
    for module in _fake_quantized(model):
        if (rounding := _weight_format(module)) is not None:
            module.weight = nn.Parameter(fake_quantized(module.weight, rounding), requires_grad=False)
            _leave_weights(module)


def leave_rounded_weights(model: nn.Module, tied: bool) -> None:
    """Let a model not round weights that `round_weights_alone` and `rounded_state` have rounded: once more would move
    them."""
    exact = [model.get_submodule(name) for name in ("tok_embeddings", "output") if tied]
    for module in _fake_quantized(model):
        if module not in exact:
            _leave_weights(module)


def _weight_format(module: FakeQuantizedLinear | FakeQuantizedEmbedding) -> NumberFormat | None:
    """Return the format that forward rounds weights to."""
    if not module.enabled:
        return None
    return module.formats.weights if isinstance(module, FakeQuantizedLinear) else module.rounding


def _leave_weights(module: FakeQuantizedLinear | FakeQuantizedEmbedding) -> None:
    if isinstance(module, FakeQuantizedLinear):
        module.formats = module.formats._replace(weights=None)
    else:
        module.enabled = False


def fake_quantized(weight: torch.Tensor, rounding: NumberFormat) -> torch.Tensor:
    """Return the rounded matrix [N, K], in its type."""
    return _round(weight, rounding, _extent(weight, rounding, None)).values


def round_weights_alone(model: nn.Module, tied: bool) -> None:
    """Let a model with its embedding and head round no inputs, nor a matrix that is `tied`, which both read."""
    for module in _fake_quantized(model):
        if isinstance(module, FakeQuantizedLinear):
            module.formats = module.formats._replace(inputs=None)
    for name in ("tok_embeddings", "output") if tied else ():
        model.get_submodule(name).enabled = False


def rounded_state(model: nn.Module, state: Mapping[str, Value]) -> dict[str, Value]:
    """Return full tensors by name, those that the model rounds as it rounds them, each when it is read."""
    formats = {
        f"{name}.weight": rounding
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear | FakeQuantizedEmbedding)
        and (rounding := _weight_format(module)) is not None
    }
    return {
        name: Deferred(tuple(value.shape), partial(_read_rounded, value, formats[name])) if name in formats else value
        for name, value in state.items()
    }


def _read_rounded(value: Value, rounding: NumberFormat) -> torch.Tensor:
    return fake_quantized(value.detach(), rounding)
