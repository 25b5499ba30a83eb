"""A block's forward as named steps: one source of its arithmetic, for whoever runs it.

A step computes named tensors of others. The block's forward runs the steps one after the other in one graph, under
whatever wraps the block. A pipeline that hides the all-to-alls of experts runs the same steps cut apart, among those of
another microbatch (pipeline/overlap/). So a model says what is computed and never how it is scheduled, and a block is
changed in one place: its steps, or the methods that they call.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from torchtitan.core.errors import JobError
from torchtitan.parallelisms.plan import ParallelPlan, declaration_holds, match_blocks


class Notes:
    """The data of a microbatch that a block's steps share, apart from tensors with gradients.

    shared: what the model computed from the microbatch's positions and documents, the same for all blocks.
    """

    def __init__(self, shared: Any):
        self.shared = shared
        self._saved: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return make() the first time, and the same result when the step is run again. For choices that a second run
        might not repeat (routed experts) and for counting (their load). No tensors that need gradients.
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
    """Make `notes` those of the running step, for modules that steps call with tensors alone and that need to know the
    microbatch. A step may run at any time and again, so notes that a module had stored earlier would be wrong.
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
    notes: Notes | None = None
    begin: Callable[[Any], Notes] | None = None


_now = _Now()


def same_notes() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of a block's first run and of its recomputation, which reuses the notes of the first. For
    torch's checkpoint, as its `context_fn`.
    """
    noted: list[Notes] = []

    def begin(shared: Any) -> Notes:
        noted.append(Notes(shared))
        return noted[-1]

    return _Beginning(lambda: begin), _Beginning(lambda: partial(_next, iter(noted)))


def _next(noted: Iterator[Notes], shared: Any) -> Notes:
    return next(noted)


class _Beginning(AbstractContextManager):
    """A context, which may be entered several times, inside which blocks begin with notes from what `make` returns."""

    def __init__(self, make: Callable[[], Callable[[Any], Notes]]):
        self.make = make

    def __enter__(self) -> None:
        self._before, _now.begin = _now.begin, self.make()

    def __exit__(self, *error: object) -> None:
        _now.begin = self._before


class Segment(NamedTuple):
    """Local compute: run(notes, *inputs) -> a tensor, or a tuple of them in the order of `outputs` and then `losses`.

    Its parameters are those that it uses, and need not be named. `losses`: scalars that are added to the objective.
    `light`: too short to hide an all-to-all behind it, or to be worth a backward in two halves.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    losses: tuple[str, ...] = ()
    light: bool = False


class RoutedExperts(NamedTuple):
    """The one step of a block that other ranks may have a part in: module(rows sorted by expert [R, D], counts [E]) ->
    [R, D]. The counts, how many rows each expert gets, are notes["counts"].
    """

    name: str
    module: nn.Module
    source: str
    target: str


class Chain(NamedTuple):
    """Steps from `x` to `out`, of one block or of an end of the model. `own`: what its steps find as notes.shared, made
    of the model's context. `recompute`: whether it is a block's, which may be computed again in backward.
    """

    name: str
    steps: tuple[Segment | RoutedExperts, ...]
    own: Callable[[Any], Any] | None = None
    recompute: bool = True


class Stepwise(nn.Module):
    """A module whose forward is its steps."""

    def steps(self) -> tuple[Segment | RoutedExperts, ...]:
        """Return the steps from the tensor called x to the one called out; each name is made once."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, shared: Any = None) -> torch.Tensor:
        """x [B, S, D] -> [B, S, D]. `shared`: what the steps find as notes.shared."""
        # a block that is compiled whole has nothing to tell its second run
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
    """The interface of a pipeline part that is run by its steps: its forward runs its chains one after the other."""

    def chains(self) -> list[Chain]:
        """Return the chains of the embedding, if there is one, the blocks and the head."""
        ...

    def context(self, x: torch.Tensor, **batch: torch.Tensor) -> Any:
        """Return notes.shared for the steps, from the part's input, tokens [B, S] or hidden states [B, S, D], and the
        other arguments of its forward.
        """
        ...


def require_steps(model: nn.Module, plan: ParallelPlan) -> None:
    """Raise a JobError that names the first module whose forward does something else than its steps, which is what
    would run: it overrides forward, or has hooks around it. Call it on the plain model: parallelisms add hooks too.
    """
    if not declaration_holds(model, "chains", "forward"):
        _refuse("the model", model, "a forward of its own", "give it `chains` beside it that do the same")
    for name, block in match_blocks(model, plan):
        if not isinstance(block, Stepwise) or type(block).forward is not Stepwise.forward or "forward" in vars(block):
            _refuse(
                name, block, "a forward of its own", "say in its `steps` what it computes, and leave forward as it is"
            )
        if block._forward_hooks or block._forward_pre_hooks or block._backward_hooks or block._backward_pre_hooks:
            _refuse(name, block, "hooks around its forward", "do in its `steps` what they do")


def _refuse(name: str, module: nn.Module, fault: str, remedy: str) -> None:
    raise JobError(
        f"{name} ({type(module).__name__}) has {fault}, which pipeline_parallel_expert_parallel_overlap would not run: "
        f"it schedules the steps that a block offers; {remedy}, or turn the overlap off"
    )
