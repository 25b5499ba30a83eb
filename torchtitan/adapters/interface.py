"""Floating-point operations of a model that is trained in part, in the convention of models/flops.py.

A weight that is trained costs 6 for each token that meets it, one that is frozen 4: its gradient is a matrix product
that nobody makes. A and B are trained weights. (Below the first matrix that is trained nothing runs backward, which
saves a little more and is not counted; nor is what unpacks a packed matrix, or measures the rows of DoRA.)

What an adapter is: parameters added to a plain model, and the choice of which are trained, before anything is made
parallel.

Names stay: a module that gets parameters of its own changes its class and not its place, so every pattern of a plan,
every cut of a pipeline and every name in a checkpoint means what it meant. All that comes later is told by the modules
themselves, whatever wraps, splits or copies them in between. A converted module may have

    own_init(name)   the initial values (an Init) of the parameter that it calls so; None for the model's own rule
    folds            its names of the plain parameters that it can fold the adapter's into
    folded(name, value)    one of these, of this value without the adapter, with the adapter's folded in; laid out alike
    tensor_placements(role, whole)    how its own parameters lie under tensor parallel (parallelisms/tensor_parallel.py)
    follow_base()    called once the plain parameters have their values: sets what is made of them

and beside these an adapter only says which names it added and which it froze.

Some of a model's own parameters trained, and nothing added: all others are frozen.
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
from torchtitan.models.linears import HEAD
from torchtitan.models.moe.experts import Experts
from torchtitan.parallelisms.plan import ParallelPlan


def weights_met(model: nn.Module, names: Iterable[str]) -> float:
    """How many weights of these parameters, by their first names in the whole plain model, a token is multiplied with:
    of stacks of experts those that it goes to, the head once more for each depth of multi-token prediction.
    """
    return sum(_met(model, *name.rpartition(".")[::2]) for name in names)


def _met(model: nn.Module, path: str, own: str) -> float:
    module = model.get_submodule(path)
    parameter, args = getattr(module, own), getattr(model, "args", None)
    if isinstance(module, Experts):
        return parameter.numel() * args.top_k / args.n_experts
    head = getattr(model, HEAD, None)
    heads = 1 + getattr(args, "n_mtp_layers", 0)
    if isinstance(module, nn.Embedding):
        return parameter.numel() * heads if parameter is getattr(head, own, None) else 0.0
    return parameter.numel() * (heads if module is head else 1) if parameter.dim() > 1 else 0.0


def in_part(plain: FlopsPerToken, weights: int, trained: float, added: float, left_out: float) -> FlopsPerToken:
    """Of a model whose `plain` operations are those of training all its `weights`, as met by a token, of which
    `trained` are and `left_out` are not there, beside as many as are `added`.
    """
    change = 6 * added - 2 * (weights - trained) - 4 * left_out
    return FlopsPerToken(full=plain.full + change, causal=plain.causal + change)


class Adapter:
    """Of one job. After `install`, names of the whole plain model:

    `fresh`: parameters that were added; a base checkpoint lacks them. `frozen`: those that are not trained: they get no
    gradient, no reduction and no optimizer state. `num_trained`, `num_parameters`: how many numbers both are;
    `met_trained`, `met_added`: how many weights of the base that are trained, and of the fresh, a token meets.
    `left_out`: shapes of matrices of the base that the adapted model has in no form. `also_trained`: parameters of the
    base that are trained beside the fresh.

    A hook of the step (parallelisms/parallel_model.py).
    """

    name = "adapter"
    layout = "peft's layout"
    """In which such adapters are passed on, as a folder."""
    other_form = "write the whole model (torchtitan export --merge)"
    """What keeps all that was trained, where the adapter's own layout does not."""

    def __init__(self, options: Options, seed: int = 0):
        self.options, self.seed = options, seed
        self.fresh: frozenset[str] = frozenset()
        self.frozen: frozenset[str] = frozenset()
        self.also_trained: frozenset[str] = frozenset()
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the fresh
        self.replaced: set[str] = set()  # of the base, what the fresh are trained instead of
        self.num_trained = self.num_parameters = 0
        self.met_trained = self.met_added = 0.0
        self.left_out: dict[str, tuple[int, ...]] = {}

    def install(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Change the whole plain model in place, which is usually on the meta device; the plan that fits it then.
        JobError where the options do not fit the model.
        """
        before = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        of_base = sum(parameter.numel() for parameter in model.parameters())
        plan = self.convert(model, plan)
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        packed, kept = packed_names(model), {name for name, _ in stores(model)}
        self.left_out = {name: shape for name, shape in before.items() if name not in names | kept}
        self.fresh = frozenset(names - before.keys() - packed)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name in self.fresh}
        trained = self.fresh | self.trained_of_base(sorted(names & before.keys()))
        named = list(model.named_parameters(remove_duplicate=False))
        asked = {parameter for name, parameter in named if name in trained}  # tied ones have two names, either counts
        for _, parameter in named:
            parameter.requires_grad_(parameter in asked)
        self.frozen = frozenset(
            name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
        )
        gone = sum(map(math.prod, self.left_out.values()))
        self.num_parameters = of_base - gone + sum(map(math.prod, self.shapes.values()))
        learning = {name for name, p in model.named_parameters() if p.requires_grad}
        self.num_trained = sum(model.get_parameter(name).numel() for name in learning)
        self.also_trained = frozenset(learning - self.fresh)
        self.met_trained = weights_met(model, self.also_trained)
        self.met_added = weights_met(model, self.fresh)
        return plan

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        """Give modules of the model their new class and parameters."""
        raise NotImplementedError

    def trained_of_base(self, names: Sequence[str]) -> frozenset[str]:
        """Which of the plain model's parameters are trained beside the new ones."""
        if self.options.train_dense_rest:
            return frozenset(names) - self.replaced
        return frozenset(matching(names, self.options.train_fully, "adapter.train_fully"))

    def follow_base(self, parts: Iterable[nn.Module]) -> None:
        """After initial values, and again after a base checkpoint has been loaded."""
        for _, module in _with(parts, "follow_base"):
            module.follow_base()

    @torch.no_grad()
    def begin_from(self, parts: Iterable[nn.Module], whole: Mapping[str, torch.Tensor]) -> None:
        """Take the adapter's parameters from whole tensors by name; a rank takes its parts of those that it has."""
        for name, parameter in self._parameters(parts):
            local, _, offset = local_part(parameter)
            spans = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
            local.copy_(whole[name][spans])

    def whole_tensors(self, parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        """The adapter's parameters of these parts, whole, on the CPU. Every rank calls it."""
        values = ((name, parameter.detach()) for name, parameter in self._parameters(parts))
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).cpu() for name, v in values}

    def read_folder(self, folder: Path, form: Form) -> dict[str, torch.Tensor]:
        """Whole tensors, by our names and of `shapes`, of a folder in the layout in which such adapters are passed on.
        JobError where it holds another, or there is no such layout.
        """
        raise JobError(f"adapter.kind = {self.options.kind!r} has no layout of its own that could be read")

    def write_folder(self, folder: Path, form: Form, whole: Mapping[str, torch.Tensor], base: str) -> None:
        """The inverse, of `whole_tensors`; `base`: where the model is. OSError; JobError where that is not all that was
        trained, or there is no such layout.
        """
        self.refuse_what_has_no_place()
        raise JobError(f"adapter.kind = {self.options.kind!r} has no layout of its own; {self.other_form}")

    def refuse_what_has_no_place(self) -> None:
        """JobError where whoever reads such a folder would compute something else than what was trained."""
        wrong = None
        if self.also_trained:
            names = ", ".join(without_numbers(sorted(self.also_trained)))
            wrong = f"it has no place for what was trained beside it ({names})"
        elif self.left_out:
            wrong = "there A and B stand beside a matrix, which this model has not (adapter.lora_only)"
        elif self.options.train_scaling:
            wrong = "peft knows no strength that is learned (adapter.train_scaling)"
        if wrong is not None:
            raise JobError(f"the adapter's folder would not be what was trained: {wrong}; {self.other_form}")

    def _parameters(self, parts: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
        for part in parts:
            for wrapped, parameter in part.named_parameters():
                if (name := clean_name(wrapped)) in self.fresh:
                    yield name, parameter

    def merged(self, parts: Sequence[nn.Module], original: Mapping[str, Deferred] | None = None) -> dict[str, Value]:
        """What the plain model would be saved as if it had learned what the adapter did, by the plain model's names:
        tensors as they are laid out here, and where something is folded in, made when they are asked for, one by one.
        Every rank asks for those that it has, in the same order. `original`: by name, what to fold into instead of the
        value that is computed with.
        """
        tensors: dict[str, Value] = {}
        for part in parts:
            aside, kept = self.fresh | packed_names(part), dict(stores(part))
            live = {clean_name(name): tensor for name, tensor in part.state_dict(keep_vars=True).items()}
            tensors |= {name: tensor for name, tensor in live.items() if name not in aside}
            for module_name, module in _with([part], "folded"):
                for own in module.folds:
                    name = f"{module_name}.{own}"
                    plain: Value | None = (original or {}).get(name, live.get(name))
                    if name in self.left_out:
                        plain = Deferred(self.left_out[name], partial(_zeros, module, self.left_out[name]))
                    elif plain is None:
                        plain = Deferred(kept[name].shape, kept[name].read)
                    tensors[name] = _folded(module, own, plain)
        return tensors

    def check_parts(self, parts: Iterable[nn.Module]) -> None:
        """JobError where a pipeline has cut apart what belongs together."""

    recalls = 0
    """Of how many tokens that a row of batches has read last of its document the adapter has kept something, which has
    to be read again where a run goes on."""

    taken_back = False
    """Whether what it has kept has come from the checkpoint that the run goes on from."""

    keeps = False
    """Whether checkpoints are to hold what it has kept, and a run that goes on takes it from there."""

    def kept(self, parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        """Where it `keeps`: tensors that this rank alone has, beside parameters, and that a checkpoint holds, too."""
        return {}

    def take_back(
        self, parts: Iterable[nn.Module], shapes: Mapping[str, list[int]], rows: int, device: torch.device
    ) -> dict[str, torch.Tensor] | None:
        """The same to be filled, as this rank of an equal plan has saved them, of these shapes, on the device that
        computes; `rows` of a batch are read. None where they do not fit, which is no fault.
        """
        return {}

    def begin_recall(self, parts: Iterable[nn.Module]) -> None:
        """What is read from here on, in evaluation, has been read in training before; nothing else has."""

    def readings(self, parts: Iterable[nn.Module]) -> Iterator[str]:
        """The ways in which a model is evaluated, one after the other, by what their losses are called behind the
        name; the first is the model's own, and has no name.
        """
        yield ""

    looks_at = 0
    """Of how many segments of the training data, about, it has to see the states before it can begin."""

    def begin_looking(self, parts: Iterable[nn.Module]) -> None:
        """What is read from here on, in evaluation, is to be looked at; every rank calls it."""

    def follow_what_was_seen(self, parts: Sequence[nn.Module]) -> None:
        """Behind that: set what is made of it."""

    def after_batch(self, parts: Sequence[nn.Module]) -> None:
        """After forward and backward of each batch, or its forward alone, on every rank."""

    def after_step(self, step: int, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """After each optimizer step, the `step`-th of the schedule, on every rank."""

    def metrics(self, parts: Sequence[nn.Module]) -> dict[str, float]:
        """What is logged of it, the same on all ranks, which all call it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What of `after_step` has to survive, JSON-able and the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave."""

    def flops_per_token(self, plain: FlopsPerToken, weights: int, seq_len: int) -> FlopsPerToken:
        """`plain`: of training the model itself, which multiplies a token of a sequence of `seq_len` with so many
        `weights`.
        """
        return in_part(plain, weights, self.met_trained, self.met_added, sum(map(math.prod, self.left_out.values())))

    def rate_of(self, name: str) -> float:
        """Of a trained parameter: its learning rate, as a factor of the job's."""
        return 1.0

    def warnings(self, passes: int) -> Iterable[str]:
        """What is said at the start of a run that makes so many passes a step."""
        return ()

    def describe(self) -> str:
        """In one line, at the start of a run."""
        share = 100 * self.num_trained / self.num_parameters
        return (
            f"{self.options.kind}: {self.num_trained:,} of {self.num_parameters:,} parameters trained ({share:.2g} %)"
        )


def _zeros(module: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    of_its_own = local_part(next(module.parameters()))[0]
    return torch.zeros(shape, dtype=of_its_own.dtype, device=of_its_own.device)


def _folded(module: Any, own: str, plain: Value) -> Deferred:
    return Deferred(tuple(plain.shape), torch.no_grad()(lambda: module.folded(own, plain.detach())))


def matching(names: Iterable[str], patterns: Iterable[str], key: str) -> list[str]:
    """The names that fit one of the patterns, in which `*` stands for anything, dots too. JobError for a pattern that
    fits none.
    """
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = ", ".join(sorted(without_numbers(names)))
            raise JobError(f"{key} = {pattern!r} fits nothing in this model; it has {known}: correct or drop it")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _with(parts: Iterable[nn.Module], method: str) -> Iterator[tuple[str, nn.Module]]:
    """Converted modules by their names in the whole model; of those inside wrappers, the module and not the wrapper."""
    for part in parts:
        for name, module in part.named_modules():
            if hasattr(type(module), method):
                yield clean_name(name), module


KEY = "training.unfrozen"


class Unfrozen(Adapter):
    """`patterns`: of the names of what is trained."""

    name = "unfrozen"

    def __init__(self, patterns: Sequence[str]):
        super().__init__(Options(kind=self.name))
        self.patterns = patterns

    def convert(self, model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
        return plan

    def trained_of_base(self, names: Sequence[str]) -> frozenset[str]:
        return frozenset(matching(names, self.patterns, KEY))
