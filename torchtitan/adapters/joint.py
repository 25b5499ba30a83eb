"""Low-rank matrices beside what is one matrix in the form of Hugging Face and several here, as queries, keys and values
of GPT-2 are.

Here each of them has its own pair. All together these are one pair whose rank is the sum of theirs: their A below each
other, their B in blocks along a diagonal. A pair that was trained beside the whole is read as several with the same A.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from torchtitan.errors import JobError


def having(weights: Sequence[str], names: Collection[str]) -> list[str]:
    """Of the modules of these weights, those that have a pair among the names."""
    modules = [weight.removesuffix(".weight") for weight in weights]
    return [module for module in modules if f"{module}.lora_A" in names]


def joined(state: Mapping[str, torch.Tensor], kind: str, weights: Sequence[str]) -> torch.Tensor:
    """What the modules of these n weights have of a kind, as one: of those k that have it lora_A [k rank, in], of all
    lora_B [n out, k rank] and lora_magnitude [n out]. JobError for magnitudes of some of them, as the others' would
    have to be computed.
    """
    modules = having(weights, state)
    parts = [state[f"{module}.{kind}"] for module in modules]
    if kind == "lora_A":
        return torch.cat(parts)
    if kind != "lora_B":
        if len(parts) < len(weights):
            raise JobError(f"{', '.join(modules)}: in peft's layout {', '.join(weights)} have a DoRA together or none")
        return torch.cat(parts)
    outputs, rank = parts[0].shape
    whole = parts[0].new_zeros(outputs * len(weights), rank * len(parts))
    for place, (module, part) in enumerate(zip(modules, parts, strict=True)):
        row = weights.index(f"{module}.weight") * outputs
        whole[row : row + outputs, place * rank : (place + 1) * rank] = part
    return whole


def part_of(
    whole: torch.Tensor, name: str, shape: tuple[int, ...], weights: Sequence[str], names: Collection[str]
) -> torch.Tensor:
    """The inverse, of one of ours with this shape: a view of `whole`, or `whole` itself where it is no such tensor."""
    module, _, kind = name.rpartition(".")
    modules, place = having(weights, names), weights.index(f"{module}.weight")
    if kind == "lora_A":
        return whole if whole.shape[0] == shape[0] else _cut(whole, 0, len(modules), modules.index(module))
    rows = _cut(whole, 0, len(weights), place)
    if kind != "lora_B" or rows.shape == shape:
        return rows
    own = _cut(rows, 1, len(modules), modules.index(module))
    return own if own.count_nonzero() == rows.count_nonzero() else whole  # outputs that another one's A reaches


def _cut(whole: torch.Tensor, dim: int, parts: int, which: int) -> torch.Tensor:
    return whole.chunk(parts, dim)[which] if whole.shape[dim] % parts == 0 else whole
