"""The interface of adapters: they add parameters to a plain model and choose which parameters are trained.

An adapter is installed before the model is parallelized. Converting a module changes its class and keeps its name, so
the patterns of a parallel plan, pipeline splits and checkpoint keys stay valid. Later stages query the modules
directly, whatever wraps, splits or copies them in between. A converted module may have

    own_init(name)   the Init of its parameter `name`; None for the model's default
    folds            names of its plain parameters that the adapter can be merged into
    folded(name, value)    the plain parameter `name` of this value with the adapter merged in; same layout
    tensor_placements(role, whole)    placements of its parameters in tensor parallel (parallelisms/tensor_parallel.py)
    follow_base()    called once the plain parameters have values: initializes what is derived from them

The adapter itself only lists the names that it added and those that it froze. `Unfrozen` adds nothing: it trains some
of the model's parameters and freezes all others.

Floating-point operations of a partly trained model follow the convention of models/flops.py. A trained weight costs 6
for each token that it is multiplied with. A frozen weight costs 4, as its gradient's matrix product is not computed. A
and B count as trained. Not counted: the backward pass that ends at the first trained matrix, unpacking quantized
matrices, and the row norms of DoRA.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtitan.adapters.targets import without_numbers
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.initialization import clean_name, local_part
from torchtitan.core.tensor_storage import Deferred, Value, packed_names, stores
from torchtitan.models.flops import FlopsPerToken
from torchtitan.models.hf.names import Form
from torchtitan.models.moe.experts import Experts
from torchtitan.models.sizes import HEAD
from torchtitan.parallelisms.plan import ParallelPlan


def weights_met(model: nn.Module, names: Iterable[str]) -> float:
    """Return how many weights of these parameters one token is multiplied with.

    `names`: first names in the full plain model. A stack of experts counts by the experts that a token is routed to,
    the head once more for each depth of multi-token prediction.
    """
    return sum(_met(model, *name.rpartition(".")[::2]) for name in names)


def _met(model: nn.Module, path: str, attribute: str) -> float:
    module = model.get_submodule(path)
    parameter, args = getattr(module, attribute), getattr(model, "args", None)
    if isinstance(module, Experts):
        return parameter.numel() * args.top_k / args.n_experts
    head = getattr(model, HEAD, None)
    heads = 1 + getattr(args, "n_mtp_layers", 0)
    if isinstance(module, nn.Embedding):
        return parameter.numel() * heads if parameter is getattr(head, attribute, None) else 0.0
    return parameter.numel() * (heads if module is head else 1) if parameter.dim() > 1 else 0.0


def in_part(plain: FlopsPerToken, weights: int, trained: float, added: float, left_out: float) -> FlopsPerToken:
    """Return the operations per token of a partly trained model.

    `plain`: operations when all `weights` (those that a token is multiplied with) are trained. `trained`: how many of
    these are trained. `added`: weights of the adapter. `left_out`: weights of the base that the model lacks.
    """
    change = 6 * added - 2 * (weights - trained) - 4 * left_out
    return FlopsPerToken(full=plain.full + change, causal=plain.causal + change)


class Adapter:
    """The adapter of one job, also a hook of the training step (parallelisms/parallel_model.py).

    After `install`, by names in the full plain model:

    `fresh`: parameters that were added; a base checkpoint lacks them. `frozen`: parameters that are not trained: no
    gradient, no reduction and no optimizer state. `num_trained`, `num_parameters`: number of trained elements, and of
    all. `met_trained`, `met_added`: how many trained weights of the base, and of the fresh parameters, a token is
    multiplied with. `left_out`: shapes of matrices of the base that the adapted model has in no form. `also_trained`:
    parameters of the base that are trained in addition to the fresh ones.
    """

    name = "adapter"
    layout = "peft's layout"
    """Name of the folder layout in which these adapters are shared."""
    other_form = "write the whole model (torchtitan export --merge)"
    """Alternative that keeps all trained parameters where the adapter's layout cannot; part of error messages."""

    def __init__(self, options: Options, seed: int = 0):
        self.options, self.seed = options, seed
        self.fresh: frozenset[str] = frozenset()
        self.frozen: frozenset[str] = frozenset()
        self.also_trained: frozenset[str] = frozenset()
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the fresh parameters
        self.replaced: set[str] = set()  # base parameters that the fresh ones are trained instead of
        self.num_trained = self.num_parameters = 0
        self.met_trained = self.met_added = 0.0
        self.left_out: dict[str, tuple[int, ...]] = {}

    def install(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Convert the full plain model in place and return the plan that fits it then.

        The model is usually on the meta device. Raises JobError if the options do not fit the model.
        """
        before = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        num_base = sum(parameter.numel() for parameter in model.parameters())
        plan = self.convert(model, plan)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        packed, store_names = packed_names(model), {name for name, _ in stores(model)}
        self.left_out = {name: shape for name, shape in before.items() if name not in names | store_names}
        self.fresh = frozenset(names - before.keys() - packed)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in self.fresh}
        trained = self.fresh | self.trained_of_base(sorted(names & before.keys()))
        named_parameters = list(model.named_parameters(remove_duplicate=False))
        # tied parameters have two names, and either counts
        trained_parameters = {parameter for name, parameter in named_parameters if name in trained}
        for _, parameter in named_parameters:
            parameter.requires_grad_(parameter in trained_parameters)
        self.frozen = frozenset(
            name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
        )
        num_left_out = sum(map(math.prod, self.left_out.values()))
        self.num_parameters = num_base - num_left_out + sum(map(math.prod, self.shapes.values()))
        trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
        self.num_trained = sum(model.get_parameter(name).numel() for name in trained_names)
        self.also_trained = frozenset(trained_names - self.fresh)
        self.met_trained = weights_met(model, self.also_trained)
        self.met_added = weights_met(model, self.fresh)
        return plan

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Give modules of the model their new class and parameters; return the adjusted plan."""
        raise NotImplementedError

    def trained_of_base(self, names: Sequence[str]) -> frozenset[str]:
        """Return the plain model's parameters that are trained in addition to the new ones."""
        if self.options.train_dense_rest:
            return frozenset(names) - self.replaced
        return frozenset(matching(names, self.options.train_fully, "adapter.train_fully"))

    def follow_base(self, parts: Iterable[nn.Module]) -> None:
        """Update what derives from base weights: after initialization and after loading a base checkpoint."""
        for _, module in _with(parts, "follow_base"):
            module.follow_base()

    @torch.no_grad()
    def begin_from(self, parts: Iterable[nn.Module], whole: Mapping[str, torch.Tensor]) -> None:
        """Load the adapter's parameters from full tensors by name; each rank copies its local shards."""
        for name, parameter in self._parameters(parts):
            local, _, offset = local_part(parameter)
            spans = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
            local.copy_(whole[name][spans])

    def whole_tensors(self, parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        """Gather the adapter's parameters of these model parts as full tensors on the CPU. Every rank calls it."""
        values = ((name, parameter.detach()) for name, parameter in self._parameters(parts))
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).cpu() for name, v in values}

    def read_folder(self, folder: Path, form: Form) -> dict[str, torch.Tensor]:
        """Read full tensors, by our names and of `shapes`, from a folder in the adapter's shared layout.

        Raises JobError if the folder holds a different adapter, or if there is no such layout.
        """
        raise JobError(f"adapter.kind = {self.options.kind!r} has no layout of its own that could be read")

    def write_folder(self, folder: Path, form: Form, whole: Mapping[str, torch.Tensor], base: str) -> None:
        """Write `whole_tensors` to a folder, the inverse of `read_folder`; `base`: path of the model.

        Raises OSError, and JobError if the layout cannot hold all that was trained, or if there is no such layout.
        """
        self.refuse_what_has_no_place()
        raise JobError(f"adapter.kind = {self.options.kind!r} has no layout of its own; {self.other_form}")

    def refuse_what_has_no_place(self) -> None:
        """Raise JobError if a model loaded from the adapter's folder would differ from the trained one."""
        reason = None
        if self.also_trained:
            names = ", ".join(without_numbers(sorted(self.also_trained)))
            reason = f"it has no place for what was trained beside it ({names})"
        elif self.left_out:
            reason = "there A and B stand beside a matrix, which this model has not (adapter.lora_only)"
        elif self.options.train_scaling:
            reason = "peft knows no strength that is learned (adapter.train_scaling)"
        if reason is not None:
            raise JobError(f"the adapter's folder would not be what was trained: {reason}; {self.other_form}")

    def _parameters(self, parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        for part in parts:
            for wrapped_name, parameter in part.named_parameters():
                if (name := clean_name(wrapped_name)) in self.fresh:
                    yield name, parameter

    def merged(self, parts: Sequence[nn.Module], original: Mapping[str, Deferred] | None = None) -> dict[str, Value]:
        """Return the plain model's tensors with the adapter merged in, by the plain model's names.

        Tensors keep their layout over the ranks. Merged ones are computed lazily, one by one: every rank asks for those
        that it has, in the same order. `original`: by name, values to merge into instead of those computed with.
        """
        tensors: dict[str, Value] = {}
        for part in parts:
            adapter_names, part_stores = self.fresh | packed_names(part), dict(stores(part))
            live = {clean_name(name): tensor for name, tensor in part.state_dict(keep_vars=True).items()}
            tensors |= {name: tensor for name, tensor in live.items() if name not in adapter_names}
            for module_name, module in _with([part], "folded"):
                for attribute in module.folds:
                    name = f"{module_name}.{attribute}"
                    plain: Value | None = (original or {}).get(name, live.get(name))
                    if name in self.left_out:
                        plain = Deferred(self.left_out[name], partial(_zeros, module, self.left_out[name]))
                    elif plain is None:
                        plain = Deferred(part_stores[name].shape, part_stores[name].read)
                    tensors[name] = _folded(module, attribute, plain)
        return tensors

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Run after each optimizer step, the `step`-th of the schedule, on every rank."""

    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        """Return the adapter's metrics to log, the same on all ranks, which all call it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `after_step` to checkpoint, JSON-serializable and the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def flops_per_token(self, plain: FlopsPerToken, weights: int, seq_len: int) -> FlopsPerToken:
        """Return the floating-point operations per token of training with the adapter.

        `plain`: those of training the model itself, which multiplies a token of a sequence of `seq_len` with `weights`
        weights.
        """
        return in_part(plain, weights, self.met_trained, self.met_added, sum(map(math.prod, self.left_out.values())))

    def rate_of(self, name: str) -> float:
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


def _zeros(module: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    reference = local_part(next(module.parameters()))[0]
    return torch.zeros(shape, dtype=reference.dtype, device=reference.device)


def _folded(module: Any, attribute: str, plain: Value) -> Deferred:
    return Deferred(tuple(plain.shape), torch.no_grad()(lambda: module.folded(attribute, plain.detach())))


def matching(names: Iterable[str], patterns: Iterable[str], key: str) -> list[str]:
    """Return the names that match one of the patterns, in which `*` matches anything, dots too.

    Raises JobError for a pattern that matches none.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            available = ", ".join(sorted(without_numbers(names)))
            raise JobError(f"{key} = {pattern!r} fits nothing in this model; it has {available}: correct or drop it")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _with(parts: Iterable[nn.Module], method: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have `method`, with their names in the full model; wrappers are skipped."""
    for part in parts:
        for name, module in part.named_modules():
            if hasattr(type(module), method):
                yield clean_name(name), module


KEY = "training.unfrozen"


class Unfrozen(Adapter):
    """Trains the model's parameters whose names match `patterns`, adds nothing and freezes all others."""

    name = "unfrozen"

    def __init__(self, patterns: Sequence[str]):
        super().__init__(Options(kind=self.name))
        self.patterns = patterns

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        return plan

    def trained_of_base(self, names: Sequence[str]) -> frozenset[str]:
        return frozenset(matching(names, self.patterns, KEY))
