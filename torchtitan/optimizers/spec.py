"""The specification of an optimizer, and sizes of states that depend on a parameter's name and full shape.

It does not import torch, as `torchtitan check` reads it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
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
    step_size: Callable[..., Any] | None = None
    """What a step allocates and frees for a parameter, a StepSize (step_sizes.py), given the options with weight_decay
    and the flags of the implementation, the parameter's name, full shape and RankShare. None: next to nothing."""
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


LAYER_MATRICES = ["*attn*", "*attention*", "*mlp*", "*feed_forward*"]
"""Patterns for the matrices of the layers, in the model families' names."""


def is_target_matrix(name: str, shape: Iterable[int], patterns: Iterable[str]) -> bool:
    """Return True for a matrix with a name that matches a pattern; `*` matches anything, dots too."""
    return len(tuple(shape)) == 2 and any(fnmatchcase(name, pattern) for pattern in patterns)


def sides(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sides of a parameter [m, n] that an optimizer with a `rank`, and maybe a `side`, projects.

    There are none if the rank reaches the short side, as nothing would be saved.
    """
    if not is_target_matrix(name, shape, options["targets"]) or options["rank"] >= min(shape):
        return ()
    side = options.get("side", "std")
    if side == "full":
        return "left", "right"
    if side in ("left", "right"):
        return (side,)
    tall = shape[0] >= shape[1]
    return ("right",) if tall == (side == "std") else ("left",)


def sides_under_plan(allowed_sides: tuple[str, ...], cut: Collection[str], on_conflict: str) -> tuple[str, ...]:
    """Return the sides to project, given the result of `sides` and the sharded sides `cut`.

    With `on_conflict` = "flip", a sharded single side is replaced by the other side if that is not sharded.
    """
    if on_conflict != "flip" or len(allowed_sides) != 1 or allowed_sides[0] not in cut:
        return allowed_sides
    other = "left" if allowed_sides[0] == "right" else "right"
    return allowed_sides if other in cut else (other,)


def projected_shape(name: str, shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a projected gradient."""
    projected = sides(name, shape, options)
    sizes = zip(("left", "right"), shape, strict=False)
    return tuple(options["rank"] if side in projected else size for side, size in sizes) if projected else shape


BLOCK, SMALLEST = 256, 4096
"""For moments in 8 bits: elements per scale, and the size of a tensor below which it is not packed."""

Shape = tuple[int, ...]


def adam(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    return StateSize(values=2 * prod(shape))


def adam_8bit(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    if prod(shape) < SMALLEST:
        return StateSize(bytes=2 * 4 * prod(shape))
    return StateSize(bytes=2 * (prod(shape) + 4 * prod(shape[:-1]) * -(-shape[-1] // BLOCK)))


def adafactor(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    second = prod(shape) if len(shape) < 2 else prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]
    return StateSize(values=second + (prod(shape) if options["beta1"] else 0))


def muon(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    return StateSize(values=prod(shape) * (1 if is_target_matrix(name, shape, options["targets"]) else 2))


INNER = {"adamw": adam, "adamw_8bit": adam_8bit, "adafactor": adafactor}


def galore(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    """Return GaLore's state: bases in full on every rank; moments sharded like the matrix, or over its other side."""
    projected = sides(name, shape, options)
    moments = INNER[options["inner"]](options, name, projected_shape(name, shape, options))
    bases = options["rank"] * sum(shape[("left", "right").index(side)] for side in projected)
    limit = bool(projected) and options["residual"] == "fira"
    return moments.plus(StateSize(everywhere=bases, bytes=4 * limit))


def apollo(options: Mapping[str, Any], name: str, shape: Shape) -> StateSize:
    limit = bool(sides(name, shape, options))
    return StateSize(values=2 * prod(projected_shape(name, shape, options)), bytes=4 * limit)
