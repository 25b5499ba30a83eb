"""A block's forward as a list of named steps, which a pipeline may schedule separately.

A step computes named tensors from other named tensors. A block's forward runs its steps in order, in one autograd
graph. A pipeline that hides the all-to-alls of experts (DualPipe) runs the same steps as separate graphs, interleaved
with the steps of another microbatch (pipeline/overlap/). So the model defines the computation once and knows nothing of
its schedule.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.parallelisms.plan import ParallelPlan, declaration_holds, match_blocks
from torchtitan.torch_internals.dispatch import has_hooks


class Notes:
    """Data without gradients that a block's steps share for one microbatch.

    `shared`: the model's context for the microbatch (from its positions and documents), the same for all blocks.
    """

    def __init__(self, shared: Any):
        self.shared = shared
        self._saved: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return make(), and the same result again when the step is recomputed.

        It is for results that a recomputation might change (the choice of experts) and for side effects (counting their
        load). The result must not contain tensors that require gradients.
        """
        if name not in self._saved:
            self[name] = make()
        return self._saved[name]

    def get(self, name: str) -> Any:
        """Return the value, or None if it is not set yet."""
        return self._saved.get(name)

    def __getitem__(self, name: str) -> Any:
        return self._saved[name]

    def __setitem__(self, name: str, value: Any) -> None:
        for tensor in value if isinstance(value, tuple) else (value,):
            assert not (isinstance(tensor, torch.Tensor) and tensor.requires_grad), f"{name} is kept without its graph"
        self._saved[name] = value


@contextmanager
def running(notes: Notes) -> Iterator[None]:
    """Let `running_notes` return `notes` inside this context.

    It serves modules that need the microbatch's notes but are called with tensors only. They must not store notes: the
    steps of several microbatches may alternate, and a step may run twice.
    """
    before, _now.notes = _now.notes, notes
    try:
        yield
    finally:
        _now.notes = before


def running_notes() -> Notes | None:
    """Return the notes of the running step."""
    return _now.notes


class _Now:
    def __init__(self) -> None:
        # of the instance, not defaults of the class: the first assignment would add them, and torch.compile would
        # compile each block again for that
        self.notes: Notes | None = None
        self.begin: Callable[[Any], Notes] | None = None


_now = _Now()


def same_notes() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return two contexts, as the `context_fn` of torch.utils.checkpoint: the recomputation of a block reuses the notes
    of its forward.
    """
    noted: list[Notes] = []

    def begin(shared: Any) -> Notes:
        noted.append(Notes(shared))
        return noted[-1]

    return _Beginning(lambda: begin), _Beginning(lambda: partial(_next, iter(noted)))


def _next(noted: Iterator[Notes], shared: Any) -> Notes:
    return next(noted)


class _Beginning(AbstractContextManager):
    """A reusable context. Inside it, a Stepwise forward gets its notes from the function that `make` returns."""

    def __init__(self, make: Callable[[], Callable[[Any], Notes]]):
        self.make = make

    def __enter__(self) -> None:
        self._before, _now.begin = _now.begin, self.make()

    def __exit__(self, *error: object) -> None:
        _now.begin = self._before


class Segment(NamedTuple):
    """A step of local compute: run(notes, *inputs) -> a tensor, or a tuple in the order of `outputs`, then `losses`.

    `losses`: scalars that are added to the objective. `light`: too short to hide an all-to-all, or to be worth a
    backward that is split into input and weight gradients.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    losses: tuple[str, ...] = ()
    light: bool = False


class RoutedExperts(NamedTuple):
    """The step that expert parallel distributes over ranks: module(rows sorted by expert [R, D], counts [E]) -> [R, D].

    notes["counts"] holds the number of rows for each expert. A block has at most one step of this kind.
    """

    name: str
    module: nn.Module
    source: str
    target: str


class StepChain(NamedTuple):
    """The steps from `x` to `out` of one block, of the embedding or of the head.

    `make_shared`: a function from the model's context to notes.shared of these steps; None: the context itself.
    `recompute`: True for a block, which activation checkpointing may recompute in backward.
    """

    name: str
    steps: tuple[Segment | RoutedExperts, ...]
    make_shared: Callable[[Any], Any] | None = None
    recompute: bool = True


class Stepwise(nn.Module):
    """A module with a forward that runs its `steps` in order."""

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """Return the steps from the tensor called "x" to the one called "out"; each name is assigned once."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, shared: Any = None) -> torch.Tensor:
        """Run the steps: x [B, S, D] -> [B, S, D]. `shared`: the model's context, as notes.shared."""
        # a fully compiled block has no dynamic choices to pass to its recomputation
        fresh = torch.compiler.is_compiling() or _now.begin is None
        notes, values = Notes(shared) if fresh else _now.begin(shared), {"x": x}
        for step in self.steps():
            with running(notes):
                if isinstance(step, RoutedExperts):
                    values[step.target] = step.module(values[step.source], notes["counts"])
                    continue
                results = step.run(notes, *[values[name] for name in step.inputs])
            values.update(zip(step.outputs, results if isinstance(results, tuple) else (results,), strict=True))
        return values["out"]


class StepwiseModel(Protocol):
    """The interface of a pipeline part that is run step by step. Its forward runs its chains in order."""

    def chains(self) -> list[StepChain]:
        """Return the chains of the part's embedding, blocks and head, as far as it has them."""
        ...

    def context(self, x: torch.Tensor, **batch: torch.Tensor) -> Any:
        """Return notes.shared for one microbatch.

        x: the part's input, tokens [B, S] or hidden states [B, S, D]. `batch`: the other arguments of its forward.
        """
        ...


def require_steps(model: nn.Module, plan: ParallelPlan) -> None:
    """Raise a JobError that names the first module with an overridden forward or forward hooks.

    Only steps would run, so these would be skipped. Call it before parallelisms are applied, as they add hooks too.
    """
    if not declaration_holds(model, "chains", "forward"):
        _refuse("the model", model, "a forward that overrides `chains`", "override `chains` too, to do the same")
    for name, block in match_blocks(model, plan):
        if not isinstance(block, Stepwise) or type(block).forward is not Stepwise.forward or "forward" in vars(block):
            _refuse(name, block, "a forward that is not Stepwise's", "define its computation in `steps` instead")
        if has_hooks(block):
            _refuse(name, block, "hooks around its forward", "move them into its `steps`")


def _refuse(name: str, module: nn.Module, fault: str, remedy: str) -> None:
    raise JobError(
        f"{name} ({type(module).__name__}) has {fault}, which pipeline_parallel_expert_parallel_overlap would not run: "
        f"it schedules the steps of each block; {remedy}, or turn the overlap off"
    )
