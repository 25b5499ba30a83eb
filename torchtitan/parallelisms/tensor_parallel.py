"""Tensor parallel: each matrix split over the ranks of one axis, and with sequence parallel (arXiv:2205.05198) also the
tokens between the split matrices, so that norms and the residual stream are computed once and not by every rank.

Parameters become DTensors, activations stay plain tensors, with one invariant. Outside a region (see ParallelPlan) a
rank has its tokens, [B, S / tp, D] (all of them without sequence parallel), and the gradient is theirs. Inside, a
tensor is either split, by heads, features or words, or whole on all ranks, and then its gradient is a *partial sum*. So
only the border of a region communicates: an all-gather on entering and a reduce-scatter on leaving, each the backward
of the other (without sequence parallel: an all-reduce on leaving, and one on entering in backward).

Why not the styles of torch.distributed.tensor.parallel, which make DTensors of the activations too (torch 2.13):

- ColwiseParallel adds up the gradient of a plain input over the ranks, once for each of wq, wk and wv, and for the head
  once per piece of the loss. With a DTensor as input it need not, but a latent attention's own arithmetic has to.
- RowwiseParallel of an embedding hands an AsyncCollectiveTensor to the first block, which must not be when that is
  compiled (see parallelize.py), and its backward makes the gradient of the whole embedding on every rank.
- SequenceParallel forgets that a weight is frozen.
- Where the compiler traces a backward, a DTensor's gradient claims the placement of the forward, partial sum or not; so
  what turns DTensors into plain tensors has to be told how the gradient will lie, and here all of it is.
"""

from functools import cache, partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from torchtitan.parallelisms.plan import ParallelPlan, match_blocks, match_end


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
) -> None:
    """Split `model`, whole or a pipeline part, in place over `mesh`, the axis tp. ValueError where it does not divide,
    or where a parameter is in none of the plan's patterns.

    With `loss_parallel` the head's logits are a DTensor split by vocabulary, which loss.py takes; else plain and whole.
    """
    embedding, norm, head = (match_end(model, name) for name in (plan.embedding, *plan.head))
    if (norm is None) != (head is None):
        raise ValueError(
            f"a pipeline part has only one of {' and '.join(plan.head)}, but the hidden states are gathered between "
            f"the two under tensor parallel; cut the model elsewhere"
        )
    require_even_split(model, mesh.size(), plan)
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    border = Border(mesh, sequence_parallel)
    tokens_gradient = Partial() if sequence_parallel else Replicate()

    for module in _matching(model, plan, plan.column):
        _split(module, mesh, _Column, Shard(0), Shard(0))
    for module in _matching(model, plan, plan.row):
        _split(module, mesh, _Row, Shard(1), Replicate(), border=border, gradient=tokens_gradient)
    for module in _matching(model, plan, plan.replicated):
        _split(module, mesh, _Whole, Replicate(), Replicate(), gradient=Partial())
    norms = [m for m in _matching(model, plan, plan.sequence) if not _is_split(m)]  # by expert parallel
    for module in norms if norm is None else [*norms, norm]:
        _split(module, mesh, _Whole, Replicate(), Replicate(), gradient=tokens_gradient)
    if embedding is not None:
        _split(embedding, mesh, _Embedding, Shard(0), Shard(0), border=border)
    if head is not None:
        _split(head, mesh, _Head, Shard(0), Shard(0), loss_parallel=loss_parallel)
        # once, before the loss: its pieces then need no communication for the hidden states
        norm.register_forward_hook(lambda _, inputs, output: border.enter(output))
    if tied:
        head.weight = embedding.weight
    hook = partial(_enter_first, border)  # one for all: the compiler knows it by its identity
    for module in _matching(model, plan, plan.gathered):
        module.register_forward_pre_hook(hook)
    scale = mesh.size() if sequence_parallel and embedding is None else 1
    model.register_forward_pre_hook(partial(_give_positions, scale), with_kwargs=True)

    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}: no pattern of the tensor-parallel plan covers this parameter; "
                f"add its module to column, row, replicated or sequence"
            )


def require_even_split(model: nn.Module, tp: int, plan: ParallelPlan) -> None:
    """ValueError that names the first module whose heads, width or vocabulary do not divide by `tp`."""

    def require(name: str, what: str, size: int, unit: int = 1) -> None:
        if size % (unit * tp):
            raise ValueError(
                f"{name}: {size // unit} {what} cannot be split over {tp} tensor-parallel ranks; "
                f"choose a tensor_parallel_degree that divides {size // unit}"
            )

    for patterns, side in ((plan.column, "out_features"), (plan.row, "in_features")):
        for pattern in patterns:
            for name, module in match_blocks(model, plan, pattern):
                unit = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", 1)
                require(name, "heads" if unit > 1 else side, getattr(module, side), unit)
    for name, side in ((plan.embedding, "num_embeddings"), (plan.head[1], "out_features")):
        end = match_end(model, name)
        if end is not None:
            require(name, "words", getattr(end, side))


def _is_split(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


def _matching(model: nn.Module, plan: ParallelPlan, patterns: tuple[str, ...]) -> list[nn.Module]:
    return [module for pattern in patterns for _, module in match_blocks(model, plan, pattern)]


# The border of a region. The compiler sees functional collectives that name their group by a string.


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[B, S / tp, D] -> [B, S, D]."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered)
    return torch.cat(gathered.chunk(size), dim=1)


def _reduce_scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """[B, S, D] -> [B, S / tp, D], summed over the ranks."""
    pieces = torch.cat(x.chunk(size, dim=1))  # a rank's tokens of all samples together
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.reduce_scatter_tensor(pieces, "sum", size, group)
    )


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence: bool, size: int, group: str) -> torch.Tensor:
        ctx.border = sequence, size, group
        return _all_gather(x, size, group) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sequence, size, group = ctx.border
        return (_reduce_scatter(grad, size, group) if sequence else _all_reduce(grad, group)), None, None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence: bool, size: int, group: str) -> torch.Tensor:
        ctx.border = sequence, size, group
        return _reduce_scatter(x, size, group) if sequence else _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sequence, size, group = ctx.border
        return (_all_gather(grad, size, group) if sequence else grad), None, None, None


class Border:
    """Between the tokens of a rank and a region of split matrices."""

    def __init__(self, mesh: DeviceMesh, sequence: bool):
        self.sequence, self.size, self.group = sequence, mesh.size(), mesh.get_group().group_name
        self.rank = mesh.get_local_rank()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S / tp, D], a rank's tokens, -> [B, S, D], all of them, with partial sums as gradient."""
        return _Enter.apply(x, self.sequence, self.size, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, D], a rank's share of a sum, -> [B, S / tp, D], the sum."""
        return _Leave.apply(x, self.sequence, self.size, self.group)


# How each kind of module runs: its own forward, with this rank's weights. Modules change their class, as fully_shard's
# do, and not their `forward`: blocks whose modules have objects of their own there cannot share a compiled graph.


class LocalWeights:
    """A module as its forward sees it, with plain tensors for DTensors: this rank's part of each weight."""

    def __init__(self, module: nn.Module, gradient: Placement | None = None, **other: torch.Tensor | None):
        placements = None if gradient is None else (gradient,)
        for name, parameter in module._parameters.items():
            if name not in other:
                other[name] = None if parameter is None else parameter.to_local(grad_placements=placements)
        self.__dict__.update(other, _module=module)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return MethodType(value.__func__, self) if isinstance(value, MethodType) else value


class _Column:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain.forward(LocalWeights(self), x)


class _Row:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.border.leave(self.plain.forward(LocalWeights(self, bias=None), x))
        return share if self.bias is None else share + self.bias.to_local(grad_placements=(self.gradient,))


class _Whole:
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.plain.forward(LocalWeights(self, self.gradient), *inputs, **options)


class _Head(_Column):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = DTensor.from_local(super().forward(x), self.weight.device_mesh, [Shard(x.dim() - 1)], run_check=False)
        return logits if self.loss_parallel else logits.redistribute(placements=[Replicate()]).to_local()


class _Embedding:
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [B, S] -> [B, S / tp, D], or [B, S, D] without sequence parallel: a rank looks up the words it has."""
        if self.border.sequence and tokens.shape[1] % self.border.size:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens cannot be split over {self.border.size} tensor-parallel "
                f"ranks; choose a multiple of {self.border.size}, or set disable_sequence_parallel"
            )
        weight = self.weight.to_local()  # [V / tp, D]
        rows = tokens - self.border.rank * weight.shape[0]
        here = (rows >= 0) & (rows < weight.shape[0])
        return self.border.leave(F.embedding(rows.where(here, 0), weight).where(here[..., None], 0))


def _split(
    module: nn.Module, mesh: DeviceMesh, kind: type, weight: Placement, bias: Placement, **settings: object
) -> None:
    """Make DTensors of the parameters, and of the module one of that kind."""
    assert all("." not in name for name, _ in module.named_parameters()), "a module with weights of its own only"
    for name, parameter in module.named_parameters():
        # every rank takes its part of its own values: they are the same everywhere, or have yet to come
        part = distribute_tensor(parameter, mesh, [bias if name == "bias" else weight], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
    module.__class__ = _converted(kind, type(module))
    for name, value in settings.items():
        setattr(module, name, value)


@cache
def _converted(kind: type, plain: type) -> type:
    return type(f"{plain.__name__}{kind.__name__}", (kind, plain), {"plain": plain})


def _enter_first(border: Border, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return border.enter(inputs[0]), *inputs[1:]


def _give_positions(
    scale: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the model's forward: positions 0..S-1 where none are given. The model would count the tokens of this rank,
    but queries and keys have all of them. `scale`: S over the length of the first argument.
    """
    call = signature(model.forward).bind(*args, **kwargs)
    if call.arguments.get("positions") is None:
        first = next(iter(call.arguments.values()))
        call.arguments["positions"] = torch.arange(first.shape[1] * scale, device=first.device)[None]  # [1, S]
    return call.args, call.kwargs


def enable_async_tensor_parallel(mesh: DeviceMesh, compiled: bool) -> None:
    """Let the compiler cut gathers and the matrix products beside them into pieces that overlap (symmetric memory)."""
    if mesh.device_type != "cuda" or not compiled:
        how = "compiled" if compiled else "not compiled"
        raise ValueError(
            f"enable_async_tensor_parallel with a model that is {how}, on {mesh.device_type}: it needs CUDA and "
            f"compile.enable with the component model; turn it off or compile on CUDA"
        )
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
