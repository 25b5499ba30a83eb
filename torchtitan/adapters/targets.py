"""Which modules an adapter's options name, and what is wrong with that. No torch: `torchtitan check` asks it of the
sizes of a model, the adapter of the model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.models.linears import HEAD

ALL_LINEAR = "all-linear"
"""As a target: every linear but the head, which every token's loss goes through."""


EXPERTS = "experts"
PACKING = {"qlora": 16, "lora_int8": 1}
"""Kinds that keep the matrices themselves in few bits: of what the number of inputs has to be a multiple."""
BLOCK, SMALLEST = 64, PACKING["qlora"]
OF_LINEARS = ("dora", *PACKING)
"""Kinds without a form for stacks of experts."""


class Misfit(NamedTuple):
    """Of an option and a model."""

    key: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: allowed: {self.allowed}; {self.remedy}"


def of_linears(options: Options) -> Options | None:
    """What stands beside linears: these options, or those of what a cache has beside it; None where nothing does."""
    if options.kind != "neurocache":
        return options
    return None if options.neurocache.beside == "none" else replace(options, kind=options.neurocache.beside)


def targets(linears: Iterable[str], options: Options) -> list[str]:
    """Those of the names that the options choose, in their order."""
    return [
        name
        for name in linears
        if any(_fits(name, pattern) for pattern in options.target)
        and (not options.layers or layer_of(name) in options.layers)
    ]


def misfits(linears: Mapping[str, tuple[int, int]], options: Options) -> Iterator[Misfit]:
    """`linears`: name -> outputs, inputs."""
    known = ", ".join(without_numbers(linears))
    written = options.target != Options().target  # the default has names of several families
    idle = [pattern for pattern in options.target if written and not any(_fits(name, pattern) for name in linears)]
    for pattern in idle:
        yield Misfit("adapter.target", f"patterns that fit one of {known}", f'"{pattern}" fits none')
    last = max((layer_of(name) or 0 for name in linears), default=0)
    if beyond := [layer for layer in options.layers if layer > last]:
        yield Misfit("adapter.layers", f"layers from 0 to {last}", f"drop {', '.join(map(str, beyond))}")
    chosen = targets(linears, options)
    if not chosen and not idle and not beyond:
        yield Misfit("adapter.target", f"at least one of {known}", "nothing would have an adapter")
    stacks = [name for name in chosen if is_stack(name)]
    if options.train_scaling and stacks:
        what = f"false with {', '.join(without_numbers(stacks))} in adapter.target"
        yield Misfit("adapter.train_scaling", what, "stacks of experts have no number of their own: leave these out")
    if options.lora_only and (kept := [name for name in chosen if is_stack(name) or name == HEAD]):
        what = f"false with {', '.join(without_numbers(kept))} in adapter.target"
        yield Misfit("adapter.lora_only", what, "stacks of experts and the head keep their matrices: leave these out")
    narrow = {name: min(linears[name]) for name in chosen if min(linears[name]) < options.rank}
    if narrow:
        name = min(narrow, key=narrow.get)
        what = f"at most {narrow[name]}, the smaller side of {name}: a higher rank says no more than the matrix"
        yield Misfit("adapter.rank", what, f"lower it, or leave {', '.join(without_numbers(narrow))} out of the target")
    if options.kind in OF_LINEARS and (stacks := [name for name in chosen if is_stack(name)]):
        what = f"linears with adapter.kind = {options.kind!r}, which has no form for stacks of experts"
        yield Misfit("adapter.target", what, f'leave out {", ".join(without_numbers(stacks))}, or write kind = "lora"')
        chosen = [name for name in chosen if not is_stack(name)]
    if options.dropout and (without := [name for name in chosen if is_stack(name) or name == HEAD]):
        what = "0 with " + ", ".join(without_numbers(without)) + " in adapter.target"
        yield Misfit(
            "adapter.dropout", what, "rows of experts and pieces of the loss are not by token: leave these out"
        )
    if multiple := PACKING.get(options.kind):
        odd = [name for name in chosen if linears[name][1] % multiple or layer_of(name) is None]
        if odd:
            blocks = f", of a multiple of {multiple} inputs, which are packed in blocks" if multiple > 1 else ""
            what = f"linears of the layers with adapter.kind = {options.kind!r}{blocks}"
            yield Misfit("adapter.target", what, f'leave out {", ".join(without_numbers(odd))}, or write kind = "lora"')


def block_of(inputs: int) -> int:
    """Weights of a block that is packed together: 64, or 32 or 16 where no more divide, and 16 in matrices so small
    that tensor parallel could not cut between blocks of 64; 0 where none does.
    """
    block = math.gcd(inputs, BLOCK if inputs >= 4 * BLOCK else SMALLEST)
    return block if block >= SMALLEST else 0


def without_numbers(names: Iterable[str]) -> list[str]:
    """What stands for the names, a star in place of numbers, each once."""
    return list(dict.fromkeys(".".join("*" if p.isdecimal() else p for p in name.split(".")) for name in names))


def is_stack(name: str) -> bool:
    """Of experts."""
    return name.rpartition(".")[2] == EXPERTS


def layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _fits(name: str, pattern: str) -> bool:
    if pattern == ALL_LINEAR:
        return layer_of(name) is not None
    return fnmatchcase(name, pattern)
