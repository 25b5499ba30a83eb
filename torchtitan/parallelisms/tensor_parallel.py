"""Tensor parallel (Megatron-LM, arXiv:1909.08053), by default with sequence parallel (arXiv:2205.05198).

Each weight matrix is sharded over the ranks of the tp axis. Sequence parallel also shards the tokens between these
matrices, so that ranks do not all compute the same norms and residual stream.

Parameters become DTensors; activations stay plain tensors and keep one invariant. Outside a region (see ParallelPlan) a
rank holds its tokens, [B, S / tp, D] (all tokens without sequence parallel), and their complete gradient. Inside, a
tensor is either sharded, by heads, features or vocabulary, or replicated. The gradient of a replicated tensor is a
*partial sum*. So only the border of a region communicates: an all-gather on entry and a reduce-scatter on exit, each
the backward of the other (without sequence parallel: an all-reduce on exit, and in backward one on entry).

The styles of torch.distributed.tensor.parallel make the activations DTensors too, which has drawbacks (torch 2.13):

- ColwiseParallel sums the gradient of a plain input over the ranks once each for wq, wk and wv, and for the head once
  per chunk of the loss. A DTensor input avoids this, but then the arithmetic inside latent attention sums it instead.
- RowwiseParallel of an embedding passes an AsyncCollectiveTensor to the first block, which breaks a compiled block
  (see parallelize.py). Its backward materializes the gradient of the full embedding on every rank.
- SequenceParallel ignores that a weight is frozen.
- When the compiler traces a backward, it assumes that a DTensor's gradient has the forward's placement, even where it
  is a partial sum. So every to_local for which the two differ needs grad_placements, as it has here.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from torchtitan.core.errors import JobError
from torchtitan.parallelisms.degrees import (
    SEQ_LEN,
    check_async_tensor_parallel,
    check_even_split,
    check_sequence_length,
    sequence_multiples,
)
from torchtitan.parallelisms.plan import ParallelPlan, get_end_module, match_blocks, match_modules
from torchtitan.parallelisms.sequence_layout import all_parts, depends_on_head_index
from torchtitan.torch_internals import collectives
from torchtitan.torch_internals.dispatch import local_parameters


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: ParallelPlan,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = True,
) -> None:
    """Shard `model`, full or a pipeline part, in place over `mesh`, the axis tp. With `loss_parallel` the logits
    [.., V] are a DTensor sharded by vocabulary (losses/objective.py), otherwise a plain full tensor. Raises JobError
    for sizes not divisible by tp, and ValueError for a parameter that no pattern of the plan matches.
    """
    embedding, norm, head = (get_end_module(model, name) for name in (plan.embedding, *plan.head))
    if (norm is None) != (head is None):
        raise JobError(
            f"a pipeline part has only one of {' and '.join(plan.head)}, but the hidden states are gathered between "
            f"the two under tensor parallel; cut the model elsewhere"
        )
    require_even_split(model, mesh.size(), plan)
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    border = RegionBorder(mesh, sequence_parallel)
    tokens_gradient = Partial() if sequence_parallel else Replicate()
    for kernel in filter(depends_on_head_index, all_parts(getattr(model, "kernels", ()))):
        kernel.head_shard = border.rank

    for name, module in _matching(model, plan, plan.column):
        _split(name, module, mesh, "column", _Column, BY_OUTPUT)
    _split_norms_and_heads(model, mesh, plan, border)
    for name, module in _matching(model, plan, plan.row):
        placements = {"weight": (Shard(1), Shard(1)), "bias": (Replicate(), tokens_gradient)}
        _split(name, module, mesh, "row", _Row, placements, border=border)
    for name, module in _matching(model, plan, plan.replicated):
        _split(name, module, mesh, "replicated", _Replicated, defaultdict(lambda: (Replicate(), Partial())))
    norms = [(name, m) for name, m in _matching(model, plan, plan.sequence) if not _is_split(m)]  # by expert parallel
    for name, module in norms if norm is None else [*norms, *_leaf_modules(model, plan.head[0])]:
        placements = defaultdict(lambda: (Replicate(), tokens_gradient))
        _split(name, module, mesh, "sequence", _Replicated, placements, tokens_gradient, border=border)
    end_leaves = [leaf for name in plan.with_embedding if embedding is not None for leaf in _leaf_modules(model, name)]
    for name, module in [*_matching(model, plan, plan.keyed), *end_leaves]:
        placements = defaultdict(lambda: (Replicate(), tokens_gradient))
        _split(name, module, mesh, "keyed", _Keyed, placements, tokens_gradient, border=border)
    _split_with_block(model, mesh, plan, border)
    if embedding is not None:
        _split(plan.embedding, embedding, mesh, "embedding", _Embedding, BY_OUTPUT, border=border)
    if head is not None:
        _split(plan.head[1], head, mesh, "head", _Head, BY_OUTPUT, loss_parallel=loss_parallel)
        # gather once, before the loss, so that its chunks need no communication for the hidden states
        norm.register_forward_hook(lambda _, inputs, output: border.enter(output))
    if tied:
        head.weight = embedding.weight
    hook = partial(_gather_first_input, border)  # one object for all modules: the compiler guards on its identity
    for _, module in _matching(model, plan, plan.gathered):
        module.register_forward_pre_hook(hook)

    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}: no pattern of the tensor-parallel plan covers this parameter; "
                f"add its module to column, row, by_head, replicated or sequence"
            )


def _split_norms_and_heads(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, border: "RegionBorder") -> None:
    """Shard the RMS norms over features that are themselves sharded, and parameters of heads."""
    for name, module in _matching(model, plan, plan.by_head):
        _split(name, module, mesh, "by_head", _Replicated, BY_OUTPUT)
    for name, module in _matching(model, plan, plan.split_norms):
        if not isinstance(module, nn.RMSNorm):
            raise ValueError(
                f"{name}: a {type(module).__name__} in split_norms, which is for RMS norms; correct the plan"
            )
        _split(name, module, mesh, "split_norms", _SplitNorm, BY_OUTPUT, border=border)


def _split_with_block(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, border: "RegionBorder") -> None:
    """Replicate the modules of `plan.with_block`.

    Each rank's heads use part of their output, so gradients of their parameters are partial sums.
    """
    for name, _ in plan.with_block:
        if (module := get_end_module(model, name)) is not None:
            module.border = border
            for inner, leaf in _leaf_modules(model, name):
                _split(inner, leaf, mesh, "replicated", _Replicated, defaultdict(lambda: (Replicate(), Partial())))


def require_even_split(model: nn.Module, tp: int, plan: ParallelPlan) -> None:
    """Raise a JobError that names the first module with heads, width or vocabulary not divisible by `tp`."""
    for patterns, side in ((plan.column, "out_features"), (plan.row, "in_features")):
        for pattern in patterns:
            for name, module in match_blocks(model, plan, pattern):
                if not hasattr(module, side):
                    raise ValueError(
                        f"{name}: a {type(module).__name__} among the linears of column and row in the plan; list an "
                        f"RMS norm over sharded features in split_norms, and modules that every rank holds in full in "
                        f"replicated"
                    )
                unit = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", 1)
                unit_name = "heads" if unit > 1 else side
                check_even_split(tp, {f"{unit_name} of {name}": getattr(module, side) // unit})
    for name, side in ((plan.embedding, "num_embeddings"), (plan.head[1], "out_features")):
        end = get_end_module(model, name)
        if end is not None:
            check_even_split(tp, {f"vocabulary of {name}": getattr(end, side)})


def _is_split(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


def _matching(model: nn.Module, plan: ParallelPlan, patterns: tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    return [match for pattern in patterns for match in match_blocks(model, plan, pattern)]


def _leaf_modules(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return the modules without children inside the module called `name`, with their names."""
    inside = match_modules(model, name)[0][1].named_modules(prefix=name)
    return [(inner, module) for inner, module in inside if not list(module.children())]


# The border of a region. The compiler can trace these functional collectives, which take the group's name.


def _all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Gather the tokens: [B, S / tp, D] -> [B, S, D]."""
    gathered = collectives.all_gather_into_tensor(x.contiguous(), size, group)
    gathered = collectives.wait_tensor(gathered)
    return torch.cat(gathered.chunk(size), dim=1)


def _reduce_scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Sum over the ranks and keep this rank's tokens: [B, S, D] -> [B, S / tp, D]."""
    pieces = torch.cat(x.chunk(size, dim=1))  # make each rank's tokens, of all samples, contiguous
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(pieces, "sum", size, group))


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


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


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class RegionBorder:
    """The collectives on entry to and exit from a region of sharded matrices.

    `sequence`: True under sequence parallel; otherwise every rank has all tokens outside a region too.
    """

    def __init__(self, mesh: DeviceMesh, sequence: bool):
        self.sequence, self.size, self.group = sequence, mesh.size(), mesh.get_group().group_name
        self.rank = mesh.get_local_rank()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Gather a rank's tokens [B, S / tp, D] to all tokens [B, S, D]. Backward reduce-scatters partial sums."""
        return _Enter.apply(x, self.sequence, self.size, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter partial sums [B, S, D] to the sum for this rank's tokens, [B, S / tp, D]."""
        return _Leave.apply(x, self.sequence, self.size, self.group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All-reduce [B, S, n]. The gradient is a partial sum on each rank, so backward all-reduces it too."""
        return _Sum.apply(x, self.group)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate [B, n, ...] of all ranks, in rank order, to [B, tp n, ...]; not differentiable."""
        return _all_gather(x, self.size, self.group)

    def local_tokens(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Return this rank's part of integers [B or 1, S] for all tokens. Activations are returned unchanged."""
        if x is None or x.is_floating_point() or not self.sequence:
            return x
        return x.chunk(self.size, dim=1)[self.rank]


# Each kind of module runs its original forward on this rank's weights. As in fully_shard, a module's class is replaced
# and not its `forward`: blocks could not share a compiled graph if each had a different object there.


class LocalWeights:
    """A stand-in for `self` in a module's forward: each parameter is a plain local shard, or `other` of its shape."""

    def __init__(self, module: nn.Module, **other: torch.Tensor | None):
        gradients = getattr(module, "gradient_placements", {})  # default: a gradient is placed like its parameter
        for name, parameter in local_parameters(module).items():
            if name not in other:
                other[name] = None if parameter is None else parameter.to_local(grad_placements=gradients.get(name))
        self.__dict__.update(other, _module=module)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return MethodType(value.__func__, self) if isinstance(value, MethodType) else value


class _Column:
    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.plain.forward(LocalWeights(self), *inputs)


class _Row:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.border.leave(self.plain.forward(LocalWeights(self, bias=None), x))
        if self.bias is None:
            return output
        return output + self.bias.to_local(grad_placements=self.gradient_placements["bias"])


class _Replicated:
    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.plain.forward(LocalWeights(self), *inputs, **options)


class _SplitNorm:
    """An RMS norm over sharded features: the sum of squares is all-reduced.

    A norm of each of its `groups` of features needs that only where several ranks share one.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize over all N features, or over each group: [B, S, N / tp] -> [B, S, N / tp]."""
        groups, ranks = getattr(self, "groups", 1), self.border.size
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (max(groups // ranks, 1), -1))
        squares = wide.square().sum(-1)  # [..., groups of this rank]
        if groups < ranks:
            first = self.border.rank * groups // ranks
            squares = self.border.all_reduce(F.pad(squares, (first, groups - 1 - first)))[..., first : first + 1]
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        r = (squares / (ranks * x.shape[-1] // groups) + eps).rsqrt()
        return ((wide * r[..., None]).flatten(-2) * self.weight.to_local()).to(x.dtype)


class _Keyed(_Replicated):
    def forward(self, *inputs: torch.Tensor | None) -> torch.Tensor:
        return super().forward(*map(self.border.local_tokens, inputs))


class _Head(_Column):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.place(super().forward(x))

    def place(self, local_logits: torch.Tensor) -> torch.Tensor:
        """Return a rank's logits [..., V / tp] as a DTensor, or gathered to [..., V] without a parallel loss."""
        logits = DTensor.from_local(local_logits, self.weight.device_mesh, [Shard(-1)], run_check=False)
        return logits if self.loss_parallel else logits.redistribute(placements=[Replicate()]).to_local()


class _Embedding:
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up tokens [B, S] in this rank's shard of the vocabulary and sum over the ranks: [B, S / tp, D], or
        [B, S, D] without sequence parallel.
        """
        if self.border.sequence:
            needs = sequence_multiples(1, self.border.size, load_balanced=False, sequence_parallel=True)
            check_sequence_length(SEQ_LEN, tokens.shape[1], needs)
        weight = self.weight.to_local()  # [V / tp, D]
        rows = tokens - self.border.rank * weight.shape[0]
        is_local = (rows >= 0) & (rows < weight.shape[0])
        looked_up = self.plain.forward(LocalWeights(self, weight=weight), rows.where(is_local, 0))
        return self.border.leave(looked_up.where(is_local[..., None], 0))


Placements = tuple[Placement, Placement]
"""The placements of a parameter and of its gradient."""
BY_OUTPUT: dict[str, Placements] = {"weight": (Shard(0), Shard(0)), "bias": (Shard(0), Shard(0))}


def _split(
    name: str,
    module: nn.Module,
    mesh: DeviceMesh,
    role: str,
    kind: type,
    defaults: Mapping[str, Placements],
    replicated_gradient: Placement = Partial(),  # noqa: B008
    **settings: object,
) -> None:
    """Turn the parameters of `module`, called `name`, into DTensors, and its class into a subclass of `kind`.

    `defaults`: the placements of a parameter and of its gradient, by the parameter's name. A method of the class,
    `tensor_placements(role, replicated_gradient)`, overrides them with {name: Placements}: `role` is the plan's field
    that matched, `replicated_gradient` the placement of a replicated parameter's gradient. A method
    `share_rows(name, role, group)` is told the process group of the ranks that have the other parts of its matrix.
    """
    assert all("." not in leaf for leaf, _ in module.named_parameters()), "parameters are in leaf modules"
    placements = {}
    if hasattr(type(module), "tensor_placements"):
        placements = module.tensor_placements(role, replicated_gradient)
    gradients = {}
    for leaf, parameter in module.named_parameters():
        try:
            placement, gradient = placements[leaf] if leaf in placements else defaults[leaf]
        except KeyError:
            raise ValueError(
                f"{name}.{leaf}: tensor parallel knows weight and bias of a {role} module; give "
                f"{type(module).__name__} a method tensor_placements that returns the placement of this parameter"
            ) from None
        if isinstance(placement, Shard):
            dim = placement.dim
            check_even_split(mesh.size(), {f"dimension {dim} of {name}.{leaf}": parameter.shape[dim]})
        # without a broadcast: values are the same on all ranks, or not yet initialized
        part = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(leaf, nn.Parameter(part, parameter.requires_grad))
        gradients[leaf] = (_SHARED_PLACEMENTS.setdefault(gradient, gradient),)
    module.__class__ = _sharded_class(kind, type(module))
    module.gradient_placements = gradients
    for key, value in settings.items():
        setattr(module, key, value)
    if hasattr(module, "share_rows"):
        module.share_rows(name, role, mesh.get_group().group_name)


_SHARED_PLACEMENTS: dict[Placement, Placement] = {}
"""Equal placements as one object, because the compiler guards on identity."""


@cache
def _sharded_class(kind: type, plain: type) -> type:
    return type(f"{plain.__name__}{kind.__name__}", (kind, plain), {"plain": plain})


def _gather_first_input(border: RegionBorder, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return border.enter(inputs[0]), *inputs[1:]


def enable_async_tensor_parallel(mesh: DeviceMesh, compiled: bool, sequence_parallel: bool = True) -> None:
    """Let the compiler overlap chunks of collectives and adjacent matrix products (async TP, symmetric memory)."""
    check_async_tensor_parallel(mesh.device_type, compiled, sequence_parallel)
    collectives.overlap_collectives_with_products(mesh.get_group().group_name)
