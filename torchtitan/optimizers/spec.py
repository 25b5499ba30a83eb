"""The specification of an optimizer. It does not import torch, as `torchtitan check` reads it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan.config.options import Option, fault_of_entry, show

Fault = tuple[str, str, str, str]
"""(option of [optimizer], given value, allowed values, remedy)."""

SHARED = ("beta1", "beta2", "eps")
"""Options that are keys of [optimizer] itself, for the optimizers that read them."""

LOOP: dict[str, dict[str, bool]] = {"for-loop": {}}
TORCHS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}
"""Implementations of torch's optimizers: values of optimizer.implementation and their constructor flags."""


class StateSize(NamedTuple):
    """Optimizer state of one parameter, for the full tensor.

    `values`: number of values in the training dtype, and `bytes`: further bytes, both sharded like the parameter.
    `everywhere`: values that each of its ranks has in full.
    """

    values: float = 0
    bytes: float = 0
    everywhere: float = 0

    def plus(self, other: "StateSize") -> "StateSize":
        return StateSize(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    make: str
    """The constructor, as "module:attribute". It is called as make(groups, lr=..., **options, **flags), groups as
    those of torch.optim, each with its `weight_decay`, and returns a torch.optim.Optimizer. A parameter is a DTensor
    where it is sharded or split: its `shape` is the whole tensor's under every plan, its `full_tensor()` the values.
    A step at rate 0 with gradients of 0 must change no weight: a resume makes the state by it, and then fills it.
    """
    shared: tuple[str, ...] = ()
    """The options of SHARED that it reads."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Further options that it reads from the table optimizer.options."""
    implementations: Mapping[str, Mapping[str, bool]] = field(default_factory=lambda: LOOP)
    """Allowed values of optimizer.implementation, the default first, with the constructor's flags for each."""
    state: Callable[[Mapping[str, Any]], int | None]
    """Number of state values per element of a parameter, given its options; None if that depends on shapes."""
    state_size: Callable[[Mapping[str, Any], str, tuple[int, ...]], StateSize] | None = None
    """State of a parameter, given the options, the parameter's name and full shape; used if `state` returns None."""
    only_in: str | None = None
    """The only training.dtype that it supports; None: any."""
    measures: tuple[str, ...] = ()
    """Names of the numbers that its `measured()` returns for the steps since the last call, for metrics.jsonl."""
    sums: bool = False
    """True if its step communicates, with tensors on the parameters' device."""
    needs_names: bool = False
    """True if groups hold (name, parameter) instead of parameters; torch.optim accepts either."""
    group_of: str | None = None
    """A function (name, parameter) -> entries of the parameter's group, as "module:attribute". Parameters with equal
    entries, which may include a separate `lr`, form one group. None: no extra entries.
    """
    excluded: Callable[[Mapping[str, Any]], Iterator[tuple[str, str, str]]] = lambda options: iter(())
    """Yields (option, allowed, remedy) for combinations of options that the constructor would reject."""

    def arguments(self, shared: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor's options, with defaults for missing ones."""
        defaults = {name: option.default for name, option in self.options.items()}
        return {name: shared[name] for name in self.shared} | defaults | dict(options)

    def faults(self, name: str, shared: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Fault]:
        """Yield every option that optimizer `name` does not read, or not with this value.

        `shared`: the options of SHARED that this optimizer reads, and those that the job set to a non-default value.
        """
        setting = f'optimizer.name = "{name}"'
        for key in (key for key in shared if key not in self.shared):
            remedy = f"write optimizer.options = {{{key} = ...}}" if key in self.options else "leave it out"
            yield f"optimizer.{key}", show(shared[key]), f"its default with {setting}, which does not read it", remedy
        table, option_faults = "optimizer.options", []
        for key, value in options.items():
            if key in self.shared:
                assignment = f"{key} = {show(value)}"
                option_faults.append((table, assignment, f"{key} as an option of its own", f"write optimizer.{key}"))
            elif entry_fault := fault_of_entry(self.options, name, setting, key, value):
                option_faults.append((table, *entry_fault))
        yield from option_faults
        if not option_faults:
            arguments = self.arguments(shared, options)
            for key, allowed, remedy in self.excluded(arguments):
                key_path = f"optimizer.{key}" if key in self.shared else table
                yield key_path, f"{key} = {show(arguments[key])}", allowed, remedy
