"""Select the modules that an adapter's options target, and report options that do not fit the model.

It does not import torch: `torchtitan check` calls it with the sizes of a model, the adapter with the model itself.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from torchtitan.adapters import NONE, spec_of
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.models.sizes import HEAD, STACK

ALL_LINEAR = "all-linear"
"""A target that matches every linear but the head, as every token's loss goes through that one."""


EXPERTS = "experts"
EXPERT_MATRICES = ("w1", "w2", "w3")
"""Names of the matrices of experts: gate, down and up."""
GATE_UP = "w13"
"""Part of the name of an A that w1 and w3 share."""
QUANTIZED_MULTIPLES = {"qlora": 16, "lora_int8": 1}
"""Kinds that quantize the base matrices -> number that their inputs have to be a multiple of."""
LARGEST_BLOCK, SMALLEST_BLOCK = 64, QUANTIZED_MULTIPLES["qlora"]
LINEAR_ONLY_KINDS = ("dora",)
"""Kinds that do not support stacks of experts."""

PEFT_EXPERTS = dict.fromkeys(
    ("deepseek", "glm4_moe", "glm4_moe_lite", "qwen3_next", "afmoe"), ("*feed_forward.w?", "*shared_experts.w?")
)
PEFT_EXPERTS["afmoe"] += ("*attention.wg",)
"""Families -> linears with the last names of experts in Hugging Face (gate_proj, up_proj, down_proj): peft 0.21 takes
them for experts, of which it has no DoRA."""


class Misfit(NamedTuple):
    """An option that does not fit the model."""

    key: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: allowed: {self.allowed}; {self.remedy}"


def linear_adapter_options(options: Options) -> Options | None:
    """Return the options of the adapter on linears, which may be next to the job's; None if the job's has none."""
    kind = spec_of(options).linear_kind(options)
    if kind == options.kind:
        return options
    return None if kind == NONE else replace(options, kind=kind)


def target_linears(linears: Iterable[str], options: Options) -> list[str]:
    """Return the names that the options select, in their order."""
    return [
        name
        for name in linears
        if any(_matches(name, pattern) for pattern in options.target)
        and (not options.layers or layer_of(name) in options.layers)
    ]


def unreadable_by_peft(family: str, linears: Iterable[str], options: Options) -> list[str]:
    """Return the linears with an adapter that peft refuses to read."""
    patterns = PEFT_EXPERTS.get(family, ()) if options.kind == "dora" else ()
    return [
        name for name in target_linears(linears, options) if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def expert_matrices(stack: str, options: Options) -> tuple[str, ...]:
    """Return the matrices of a stack of experts that the options select: all, or those that patterns end with."""
    return tuple(
        matrix
        for matrix in EXPERT_MATRICES
        if any(_matches(stack, pattern) and matrix_of(pattern) in ("", matrix) for pattern in options.target)
    )


def packed_matrices(stack: str, options: Options) -> tuple[str, ...]:
    """Return the matrices of a stack of experts that a kind of adapter quantizes."""
    if options.kind not in QUANTIZED_MULTIPLES or options.quantized_experts == "none":
        return ()
    if options.quantized_experts == "all":
        return EXPERT_MATRICES
    return expert_matrices(stack, options) if target_linears([stack], options) else ()


def quantized_stacks(linears: Iterable[str], options: Options) -> list[str]:
    """Return the names of stacks of experts with matrices that are quantized, in order."""
    return sorted(name for name in linears if is_expert_stack(name) and packed_matrices(name, options))


def lora_scale(options: Options) -> float:
    """Return the factor of the product of B and A."""
    return options.alpha / (options.rank**0.5 if options.rslora else options.rank)


def misfits(linears: Mapping[str, tuple[int, int]], options: Options) -> Iterator[Misfit]:
    """Yield the options that do not fit a model; `linears`: name -> outputs, inputs."""
    available = ", ".join(with_wildcards(linears))
    is_explicit = options.target != Options().target  # the default lists names of several model families
    unmatched = [
        pattern for pattern in options.target if is_explicit and not any(_matches(name, pattern) for name in linears)
    ]
    for pattern in unmatched:
        yield Misfit("adapter.target", f"patterns that fit one of {available}", f'"{pattern}" fits none')
    last = max((layer_of(name) or 0 for name in linears), default=0)
    if beyond := [layer for layer in options.layers if layer > last]:
        yield Misfit("adapter.layers", f"layers from 0 to {last}", f"drop {', '.join(map(str, beyond))}")
    chosen = target_linears(linears, options)
    if not chosen and not unmatched and not beyond:
        yield Misfit("adapter.target", f"at least one of {available}", "nothing would have an adapter")
    stacks = [name for name in chosen if is_expert_stack(name)]
    yield from _gate_up_misfits(linears, stacks, options)
    if options.train_scaling and stacks:
        allowed = f"false with {', '.join(with_wildcards(stacks))} in adapter.target"
        yield Misfit("adapter.train_scaling", allowed, "stacks of experts have no trained scale: leave these out")
    if options.lora_only and (unsupported := [name for name in chosen if is_expert_stack(name) or name == HEAD]):
        allowed = f"false with {', '.join(with_wildcards(unsupported))} in adapter.target"
        yield Misfit(
            "adapter.lora_only", allowed, "stacks of experts and the head keep their matrices: leave these out"
        )
    # steps of Mamba are a few rows of a wide joint matrix in Hugging Face's models, whose pair has this rank
    sides = {name: min(linears[name]) for name in chosen if not name.endswith(".ssm_dt")}
    narrow = {name: side for name, side in sides.items() if side < options.rank}
    if narrow:
        name = min(narrow, key=narrow.get)
        allowed = f"at most {narrow[name]}, the smaller side of {name}: a higher rank adds nothing"
        yield Misfit(
            "adapter.rank", allowed, f"lower it, or leave {', '.join(with_wildcards(narrow))} out of the target"
        )
    if options.kind in LINEAR_ONLY_KINDS and (stacks := [name for name in chosen if is_expert_stack(name)]):
        allowed = f"linears with adapter.kind = {options.kind!r}, which has no form for stacks of experts"
        yield Misfit(
            "adapter.target", allowed, f'leave out {", ".join(with_wildcards(stacks))}, or write kind = "lora"'
        )
        chosen = [name for name in chosen if not is_expert_stack(name)]
    if options.dropout and (unsupported_names := [name for name in chosen if is_expert_stack(name) or name == HEAD]):
        allowed = "0 with " + ", ".join(with_wildcards(unsupported_names)) + " in adapter.target"
        yield Misfit(
            "adapter.dropout", allowed, "rows of experts and pieces of the loss are not by token: leave these out"
        )
    yield from _packing_misfits(linears, chosen, options)


def _packing_misfits(
    linears: Mapping[str, tuple[int, int]], chosen: Sequence[str], options: Options
) -> Iterator[Misfit]:
    if multiple := QUANTIZED_MULTIPLES.get(options.kind):
        matrices = [name for name in chosen if not is_expert_stack(name)]
        unpackable = [name for name in matrices if linears[name][1] % multiple or layer_of(name) is None]
        if unpackable:
            blocks = f", of a multiple of {multiple} inputs, which are packed in blocks" if multiple > 1 else ""
            allowed = f"linears of the layers with adapter.kind = {options.kind!r}{blocks}"
            yield Misfit(
                "adapter.target", allowed, f'leave out {", ".join(with_wildcards(unpackable))}, or write kind = "lora"'
            )
        key, stacks = "adapter.quantized_experts", quantized_stacks(linears, options)
        if options.quantized_experts == "all" and not stacks:
            yield Misfit(key, '"adapted" in a model without experts', "leave it out")
        inputs = {name: {linears[name][matrix != "w2"] for matrix in packed_matrices(name, options)} for name in stacks}
        if uneven := [name for name in stacks if any(number % multiple for number in inputs[name])]:
            inputs_of = f"inputs of {', '.join(with_wildcards(uneven))} that are no multiple of {multiple}"
            yield Misfit(key, f'"none" with {inputs_of}', "weights are packed in blocks of them")


def _gate_up_misfits(
    linears: Mapping[str, tuple[int, int]], stacks: Sequence[str], options: Options
) -> Iterator[Misfit]:
    if not options.gate_up_rank:
        return
    if any({"w1", "w3"} - {*expert_matrices(stack, options)} for stack in stacks) or not stacks:
        reason = "it is the rank of the A that both share"
        yield Misfit("adapter.gate_up_rank", "0 without w1 and w3 of experts in adapter.target", reason)
        return
    largest = min(min(inputs, 2 * outputs) for outputs, inputs in (linears[stack] for stack in stacks))
    if options.gate_up_rank > largest:
        allowed = f"at most {largest}, the smaller side of gate and up together"
        yield Misfit("adapter.gate_up_rank", allowed, "a higher rank adds nothing")


def quantization_block(inputs: int) -> int:
    """Return how many weights form a quantization block: the largest of 64, 32 and 16 that divides `inputs`, or 0.

    It is at most 16 for matrices so small that tensor parallel could not split between blocks of 64.
    """
    block = math.gcd(inputs, LARGEST_BLOCK if inputs >= 4 * LARGEST_BLOCK else SMALLEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else 0


def packed_bytes(kind: str, outputs: int, inputs: int) -> float:
    """Return the bytes of a packed matrix [outputs, inputs] of a kind in QUANTIZED_MULTIPLES (quantized.py)."""
    codes = outputs * inputs
    if kind == "lora_int8":
        return codes + 4 * outputs
    return codes / 2 + codes / quantization_block(inputs) + 4 * outputs


def with_wildcards(names: Iterable[str]) -> list[str]:
    """Return the distinct names with a star in place of each number."""
    return list(dict.fromkeys(".".join("*" if p.isdecimal() else p for p in name.split(".")) for name in names))


def is_expert_stack(name: str) -> bool:
    """Return True if the name belongs to a stack of experts."""
    return name.rpartition(".")[2] == EXPERTS


def layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def matrix_of(pattern: str) -> str:
    """Return the matrix of experts that a pattern ends with, as "*moe.experts.w2" does, or ""."""
    stack, _, matrix = pattern.rpartition(".")
    return matrix if matrix in EXPERT_MATRICES and stack.endswith(STACK) else ""


def _matches(name: str, pattern: str) -> bool:
    if pattern == ALL_LINEAR:
        return layer_of(name) is not None
    return fnmatchcase(name, pattern.rpartition(".")[0] if matrix_of(pattern) else pattern)
