"""The interface of adapters: they add parameters to a plain model and choose which parameters are trained.

An adapter is installed before the model is parallelized. Converting a module changes its class and keeps its name, so
the patterns of a parallel plan, pipeline splits and checkpoint keys stay valid. Later stages query the modules
directly, whatever wraps, splits or copies them in between. A converted module may have

    parameter_init(name)        the Init of its parameter `name`; None for the model's default
    mergeable                   names of its plain parameters that the adapter can be merged into
    merged_weight(name, value)  the plain parameter `name` of this value with the adapter merged in, in float32 or
                                wider, laid out over the ranks like `value`: see `merge_shards`
    tensor_placements(role, default)    placements of its parameters, see parallelisms/tensor_parallel.py
    init_from_base()            called once the plain parameters have values: initializes tensors derived from them

The adapter itself only lists the names of added and frozen parameters. `Unfrozen` adds nothing: it trains some
of the model's parameters and freezes all others.

Floating-point operations of a partly trained model follow the convention of models/flops.py. A trained weight costs 6
for each token that it is multiplied with. A frozen weight costs 4, as its gradient's matrix product is not computed. A
and B count as trained. Not counted: the backward pass that ends at the first trained matrix, dequantization, and the
row norms of DoRA.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan.adapters.targets import with_wildcards
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.random_draws import clean_name, local_part
from torchtitan.core.tensor_storage import Deferred, Value, packed_names, stores
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.hf.names import TensorMap
from torchtitan.models.moe.layer import Experts
from torchtitan.models.sizes import HEAD
from torchtitan.parallelisms.plan import ParallelPlan


def weights_per_token(model: nn.Module, names: Iterable[str]) -> float:
    """Return how many weights of these parameters one token is multiplied with.

    `names`: first names in the full plain model. A stack of experts counts by the experts that a token is routed to,
    the head once more for each depth of multi-token prediction.
    """
    return sum(_weights_of_parameter(model, *name.rpartition(".")[::2]) for name in names)


def _weights_of_parameter(model: nn.Module, path: str, attribute: str) -> float:
    module = model.get_submodule(path)
    parameter, args = getattr(module, attribute), getattr(model, "args", None)
    if isinstance(module, Experts):
        return parameter.numel() * args.top_k / args.n_experts if parameter.dim() > 2 else 0.0
    head = getattr(model, HEAD, None)
    heads = 1 + getattr(args, "n_mtp_layers", 0)
    if isinstance(module, nn.Embedding):
        return parameter.numel() * heads if parameter is getattr(head, attribute, None) else 0.0
    return parameter.numel() * (heads if module is head else 1) if parameter.dim() > 1 else 0.0


class Adapter:
    """The adapter of one job, also a hook of the training step (parallelisms/parallel_model.py).

    After `install`, by names in the full plain model:

    `added_parameters`: parameters that a base checkpoint lacks, and `added_shapes`, their shapes. `frozen_parameters`:
    parameters without gradient, reduction and optimizer state. `trained_base_parameters`: base parameters that are
    trained in addition. `removed_shapes`: shapes of matrices of the base that the adapted model has in no form.
    `num_trained`, `num_parameters`: number of trained elements, and of all. `trained_weights_per_token`,
    `added_weights_per_token`: number of trained base weights, and of added ones, that a token is multiplied with.
    """

    name = "adapter"
    folder_format = "peft's layout"
    """Name of the folder format for sharing these adapters."""
    alternative = "write the whole model (torchtitan export --merge)"
    """How to save all trained parameters where the folder format cannot hold them; part of error messages."""
    by_token = False
    """True if what an adapter of the same class installs computes each token from that token alone: then a model on a
    CPU may leave tokens without a label out (`may_join_documents` of models/decoder.py)."""

    def __init__(self, options: Options, seed: int = 0):
        self.options, self.seed = options, seed
        self.added_parameters: frozenset[str] = frozenset()
        self.frozen_parameters: frozenset[str] = frozenset()
        self.trained_base_parameters: frozenset[str] = frozenset()
        self.added_shapes: dict[str, tuple[int, ...]] = {}
        self.replaced_parameters: set[str] = set()  # base parameters that the added ones are trained instead of
        self.num_trained = self.num_parameters = 0
        self.trained_weights_per_token = self.added_weights_per_token = 0.0
        self.removed_shapes: dict[str, tuple[int, ...]] = {}

    def install(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Convert the model in place, freeze what is not trained, and return the parallel plan adjusted to it.

        The model is not parallelized yet, and usually on the meta device. Also sets the adapter's parameter names and
        counts. Raises JobError if the options do not fit the model.
        """
        before = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        num_base = sum(parameter.numel() for parameter in model.parameters())
        plan = self.convert(model, plan)
        named_parameters = list(model.named_parameters(remove_duplicate=False))
        names, store_names = {name for name, _ in named_parameters}, {name for name, _ in stores(model)}
        added = frozenset(names - before.keys() - packed_names(model))
        self.added_parameters = added
        self.added_shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in added}
        self.removed_shapes = {name: shape for name, shape in before.items() if name not in names | store_names}
        trained = added | self.base_parameters_to_train(sorted(names & before.keys()))
        # tied parameters have two names, and either counts
        trained_parameters = {parameter for name, parameter in named_parameters if name in trained}
        for _, parameter in named_parameters:
            parameter.requires_grad_(parameter in trained_parameters)
        self.frozen_parameters = frozenset(name for name, p in named_parameters if not p.requires_grad)
        num_removed = sum(map(math.prod, self.removed_shapes.values()))
        self.num_parameters = num_base - num_removed + sum(map(math.prod, self.added_shapes.values()))
        trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
        self.num_trained = sum(model.get_parameter(name).numel() for name in trained_names)
        self.trained_base_parameters = frozenset(trained_names - added)
        self.trained_weights_per_token = weights_per_token(model, self.trained_base_parameters)
        self.added_weights_per_token = weights_per_token(model, added)
        return plan

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Give modules of the model their new class and parameters; return the adjusted plan."""
        raise NotImplementedError

    def base_parameters_to_train(self, names: Sequence[str]) -> frozenset[str]:
        """Return the plain model's parameters that are trained in addition to the added ones."""
        if self.options.train_dense_rest:
            return frozenset(names) - self.replaced_parameters
        return frozenset(matching_names(names, self.options.train_fully, "adapter.train_fully"))

    def cast_frozen(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Store the floating-point parameters that are not trained as `dtype`; the others keep theirs.

        `model`: on the meta device, with this adapter installed, or without any.
        """
        trained = self.added_parameters | self.trained_base_parameters
        for name, parameter in model.named_parameters():
            if name not in trained and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def init_from_base(self, parts: Iterable[nn.Module]) -> None:
        """Update tensors derived from base weights, after initialization and after loading a base checkpoint."""
        for _, module in _modules_with(parts, "init_from_base"):
            module.init_from_base()

    @torch.no_grad()
    def load_tensors(self, parts: Iterable[nn.Module], tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the adapter's parameters from full tensors by name; each rank copies its local shards."""
        for name, parameter in self._parameters(parts):
            local, _, offset = local_part(parameter)
            spans = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
            local.copy_(tensors[name][spans])

    def full_tensors(self, parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        """Gather the adapter's parameters of these model parts as full tensors on the CPU. Every rank calls it."""
        return {name: full_tensor(parameter.detach()).cpu() for name, parameter in self._parameters(parts)}

    def read_folder(self, folder: Path, form: TensorMap) -> dict[str, torch.Tensor]:
        """Read full tensors, by our names and of `added_shapes`, from a folder in the adapter's folder format.

        Raises JobError if the folder holds a different adapter, or if there is no such format.
        """
        raise JobError(f"adapter.kind = {self.options.kind!r} has no folder format that could be read")

    def write_folder(self, folder: Path, form: TensorMap, tensors: Mapping[str, torch.Tensor], base: str) -> None:
        """Write `full_tensors` to a folder, the inverse of `read_folder`; `base`: path of the model.

        Raises OSError, and JobError if the format cannot hold all trained parameters, or if there is no such format.
        """
        require_complete_format(self)
        raise JobError(f"adapter.kind = {self.options.kind!r} has no folder format; {self.alternative}")

    def _parameters(self, parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        for part in parts:
            for wrapped_name, parameter in part.named_parameters():
                if (name := clean_name(wrapped_name)) in self.added_parameters:
                    yield name, parameter

    def merged_tensors(
        self, parts: Sequence[nn.Module], original: Mapping[str, Deferred] | None = None
    ) -> dict[str, Value]:
        """Return the plain model's tensors with the adapter merged in, by the plain model's names.

        Tensors keep their layout over the ranks. Merged ones are computed lazily, one by one: every rank reads those
        that it has, in the same order. `original`: by name, values to merge into instead of the model's.
        """
        tensors: dict[str, Value] = {}
        for part in parts:
            adapter_names, part_stores = self.added_parameters | packed_names(part), dict(stores(part))
            live = {clean_name(name): tensor for name, tensor in part.state_dict(keep_vars=True).items()}
            tensors |= {name: tensor for name, tensor in live.items() if name not in adapter_names}
            for module_name, module in _modules_with([part], "merged_weight"):
                for attribute in module.mergeable:
                    name = f"{module_name}.{attribute}"
                    plain: Value | None = (original or {}).get(name, live.get(name))
                    if name in self.removed_shapes:
                        shape = self.removed_shapes[name]
                        plain = Deferred(shape, partial(_zeros, module, shape))
                    elif plain is None:
                        plain = Deferred(part_stores[name].shape, part_stores[name].read)
                    tensors[name] = _merge_lazily(module, attribute, plain)
        return tensors

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Run after each optimizer step, the `step`-th of the schedule, on every rank."""

    def disabled(self, parts: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which the model computes as its base does. Raises JobError if this kind cannot."""
        raise JobError(
            f"an adapter of the kind {self.options.kind} cannot be disabled; build the base model by a job of its own"
        )

    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        """Return the adapter's metrics to log, the same on all ranks, which all call it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `after_step` to checkpoint, JSON-serializable and the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""

    def flops_per_token(self, plain: FlopsPerToken, weights: int, seq_len: int) -> FlopsPerToken:
        """Return the floating-point operations per token of training with the adapter.

        `plain`: operations to train the model itself. It multiplies each token of a sequence of `seq_len` tokens with
        `weights` weights.
        """
        num_frozen = weights - self.trained_weights_per_token
        num_removed = sum(map(math.prod, self.removed_shapes.values()))
        return plain.with_adapter(self.added_weights_per_token, num_frozen, num_removed)

    def lr_multiplier(self, name: str) -> float:
        """Return the learning-rate multiplier of a trained parameter."""
        return 1.0

    def warnings(self, passes: int) -> Iterable[str]:
        """Return warnings for the start of a run that makes `passes` passes per step."""
        return ()

    def describe(self) -> str:
        """Return a one-line description for the start of a run."""
        share = 100 * self.num_trained / self.num_parameters
        return (
            f"{self.options.kind}: {self.num_trained:,} of {self.num_parameters:,} parameters trained ({share:.2g} %)"
        )


def require_complete_format(adapter: Adapter) -> None:
    """Raise JobError if a model loaded from the adapter's folder would differ from the trained one."""
    reason = None
    if adapter.trained_base_parameters:
        names = ", ".join(with_wildcards(sorted(adapter.trained_base_parameters)))
        reason = f"the format cannot hold the base parameters that were trained too ({names})"
    elif adapter.removed_shapes:
        reason = "the format adds A and B to a matrix, which this model lacks (adapter.lora_only)"
    elif adapter.options.train_scaling:
        reason = "the format cannot hold a trained scale (adapter.train_scaling)"
    if reason is not None:
        raise JobError(f"the adapter's folder would not reproduce the trained model: {reason}; {adapter.alternative}")


def _zeros(module: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    reference = local_part(next(module.parameters()))[0]
    return torch.zeros(shape, dtype=reference.dtype, device=reference.device)


def _merge_lazily(module: Any, attribute: str, plain: Value) -> Deferred:
    return Deferred(tuple(plain.shape), torch.no_grad()(lambda: module.merged_weight(attribute, plain.detach())))


def matching_names(names: Iterable[str], patterns: Iterable[str], key: str) -> list[str]:
    """Return the names that match one of the patterns; `*` matches anything, dots too.

    Raises JobError for a pattern that matches none.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            available = ", ".join(sorted(with_wildcards(names)))
            raise JobError(f"{key} = {pattern!r} fits nothing in this model; it has {available}: correct or drop it")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _modules_with(parts: Iterable[nn.Module], method: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have `method`, with their names in the full model; wrappers are skipped."""
    for part in parts:
        for name, module in part.named_modules():
            if hasattr(type(module), method):
                yield clean_name(name), module


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor of any shape if it is sharded. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def merge_shards(
    weight: torch.Tensor,
    merge: Callable[..., torch.Tensor],
    *other_tensors: tuple[torch.Tensor, tuple[int | None, ...]],
) -> torch.Tensor:
    """Return `merge(weight, *other_tensors)`, laid out over the ranks like `weight`, of any shape. Every rank calls it.

    `merge` is called once per rank with its shard of `weight` and the matching parts of the other tensors, all plain
    and in float32 or wider. So is its result, of the shard's shape, which is rounded once, where it is stored. Each
    other tensor comes with its dimensions: for each of them the dimension of `weight` that it runs along, or None if
    `merge` needs it in full. A product B A added to W [out, in], with B [out, rank] and A [rank, in], is

        merge_shards(W, lambda w, b, a: w + b @ a, (B, (0, None)), (A, (None, 1)))

    Tensors that are sharded like `weight` are not gathered.
    """
    local, shape, offset = local_part(weight)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    shards = [_matching_part(tensor, dims, weight, local, offset).to(dtype) for tensor, dims in other_tensors]
    merged = merge(local.to(dtype), *shards)
    if not isinstance(weight, DTensor):
        return merged
    kwargs = dict(run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride())
    return DTensor.from_local(merged, weight.device_mesh, weight.placements, **kwargs)


def _matching_part(
    tensor: torch.Tensor,
    dims: tuple[int | None, ...],
    weight: torch.Tensor,
    local: torch.Tensor,
    offset: tuple[int, ...],
) -> torch.Tensor:
    """Return the part of a tensor that runs along this rank's shard `local` of `weight`."""
    if isinstance(tensor, DTensor):
        if _is_sharded_alike(tensor, dims, weight):
            return tensor.to_local()
        tensor = tensor.full_tensor()
    for axis, dim in enumerate(dims):
        if dim is not None:
            tensor = tensor.narrow(axis, offset[dim], local.shape[dim])
    return tensor


def _is_sharded_alike(tensor: DTensor, dims: tuple[int | None, ...], weight: torch.Tensor) -> bool:
    if not isinstance(weight, DTensor) or tensor.device_mesh != weight.device_mesh:
        return False
    for placement, reference in zip(tensor.placements, weight.placements, strict=True):
        if placement.is_replicate():
            if not reference.is_replicate() and (not reference.is_shard() or reference.dim in dims):
                return False
        elif placement != reference or dims[placement.dim] != placement.dim:
            return False
    return True


KEY = "training.unfrozen"


class Unfrozen(Adapter):
    """Trains the model's parameters with names that match `patterns`, adds nothing and freezes all others."""

    name, by_token = "unfrozen", True

    def __init__(self, patterns: Sequence[str]):
        super().__init__(Options(kind=self.name))
        self.patterns = patterns

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        return plan

    def base_parameters_to_train(self, names: Sequence[str]) -> frozenset[str]:
        return frozenset(matching_names(names, self.patterns, KEY))
