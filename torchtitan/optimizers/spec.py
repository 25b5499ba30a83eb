"""What the rest of the project needs to know of an optimizer. No torch here, as `torchtitan check` reads it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan.config.options import Option, describe, fits, hint, show

Wrong = tuple[str, str, str, str]
"""(option of [optimizer], what was given, what is allowed, what to do)."""

SHARED = ("beta1", "beta2", "eps")
"""Options that have a place of their own in [optimizer], for the optimizers that read them."""

LOOP: dict[str, dict[str, bool]] = {"for-loop": {}}
TORCHS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
"""Implementations that optimizers of torch have: the words of optimizer.implementation and the flags they mean."""


class Held(NamedTuple):
    """For one parameter, of the whole tensor: `values` in the type that training keeps its numbers in, and `bytes`
    beside them, both sharded as the parameter is; `everywhere`: values that each of its ranks has whole.
    """

    values: float = 0
    bytes: float = 0
    everywhere: float = 0

    def plus(self, other: "Held") -> "Held":
        return Held(*map(sum, zip(self, other, strict=True)))


def _as_list(key: str, value: Any) -> str:
    """The remedy for names that are joined by commas, as lists are said elsewhere on the command line."""
    return f"write {key} = {show(value.split(','))}" if isinstance(value, str) and "," in value else ""


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    make: str
    """Where the constructor is, "module:attribute". It is called as make(groups, lr=..., **options, **flags), groups as
    those of torch.optim, each with its `weight_decay`, and returns a torch.optim.Optimizer. A parameter is a DTensor
    where it is sharded or split: its `shape` is the whole tensor's under every plan, its `full_tensor()` the values.
    A step at rate 0 with gradients of 0 must change no weight: a resume makes the state by it, and then fills it.
    """
    shared: tuple[str, ...] = ()
    """Those of SHARED that it reads."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """What else it reads, from the table optimizer.options."""
    implementations: Mapping[str, Mapping[str, bool]] = field(default_factory=lambda: LOOP)
    """What optimizer.implementation may say, the default first, and the flags that the constructor gets for it."""
    state: Callable[[Mapping[str, Any]], int | None]
    """How many values it keeps for each of a parameter, by its options; None where that depends on shapes."""
    held: Callable[[Mapping[str, Any], str, tuple[int, ...]], Held] | None = None
    """What it keeps for a parameter, by its options, the parameter's name and whole shape, where `state` says None."""
    only_in: str | None = None
    """The training.dtype that it is made for."""
    measures: tuple[str, ...] = ()
    """What its optimizers' `measured()` tells of the steps since its last call, numbers by name, for metrics.jsonl."""
    sums: bool = False
    """Whether its step communicates, with tensors where the parameters are."""
    named: bool = False
    """Whether the groups hold (name, parameter) instead of parameters; torch.optim takes either."""
    group_of: str | None = None
    """Where a function (name, parameter) -> entries of the parameter's group is, "module:attribute". Parameters with
    equal entries, which may have an `lr` of their own among them, are one group. None: all are alike.
    """
    excluded: Callable[[Mapping[str, Any]], Iterator[tuple[str, str, str]]] = lambda options: iter(())
    """(option, allowed, remedy) where its options do not go together: what the constructor would refuse."""

    def arguments(self, shared: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's options, with the defaults of those that are not given."""
        defaults = {name: option.default for name, option in self.options.items()}
        return {name: shared[name] for name in self.shared} | defaults | dict(options)

    def wrong(self, name: str, shared: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Wrong]:
        """Every option that optimizer `name` does not read, or not with this value. `shared`: of SHARED, those that the
        job has set to another value than the default, and all that this optimizer reads.
        """
        told = f'optimizer.name = "{name}"'
        for key in (key for key in shared if key not in self.shared):
            remedy = f"write optimizer.options = {{{key} = ...}}" if key in self.options else "leave it out"
            yield f"optimizer.{key}", show(shared[key]), f"its default with {told}, which does not read it", remedy
        table, faults = "optimizer.options", []
        for key, value in options.items():
            given = f"{key} = {show(value)}"
            if key in self.shared:
                faults.append((table, given, f"{key} as an option of its own", f"write optimizer.{key}"))
            elif key not in self.options:
                known = f"options of {name}: {', '.join(self.options)}" if self.options else f"nothing with {told}"
                faults.append((table, given, known, hint(key, self.options) or "leave it out"))
            elif not fits(self.options[key].annotation, value):
                faults.append((table, given, f"{key} = {describe(self.options[key].annotation)}", _as_list(key, value)))
        yield from faults
        if not faults:
            arguments = self.arguments(shared, options)
            for key, allowed, remedy in self.excluded(arguments):
                place = f"optimizer.{key}" if key in self.shared else table
                yield place, f"{key} = {show(arguments[key])}", allowed, remedy
