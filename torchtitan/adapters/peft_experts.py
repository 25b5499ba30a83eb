"""Low-rank pairs of experts in the layout of the library peft (0.21, `target_parameters`).

transformers 5 has two stacks in a layer with experts: gate_up_proj, in which the outputs of gate and up follow each
other or alternate, and down_proj. peft gives a stack one pair, A [experts x rank, in], where an expert's rows are
together, and B [out, rank x experts], where the columns of a rank are together. It stores that of down_proj below
"experts." and that of gate_up_proj below "experts.base_layer.", or below "experts." if the other has none.

Gate and up may share an A here too (adapter.gate_up_rank). If each has its own pair, they are saved as one with the sum
of their ranks: the A stacked, the B as diagonal blocks. A pair with a shared A of the job's rank is read as two
with the same A. Pairs of single experts, of the linears that transformers 4 had, are read as those of a stack too.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from torchtitan.adapters.targets import EXPERT_MATRICES, GATE_UP
from torchtitan.models.hf.names import TensorMap

PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stack:
    """A stack of transformers with a pair, in one layer.

    `parameter`: its name. `key`: the beginning of its pair's names in peft's files. `module`: the experts, by our name.
    `matrices`: those of ours that the stack consists of, in order; `adapted`: the ones of these that have a pair.
    `shares_a`: all have one A. `alternates`: their outputs alternate. `swaps`: peft
    takes the stack's inputs for outputs, so its A is B here, and its B is A.
    """

    parameter: str
    key: str
    module: str
    matrices: tuple[str, ...]
    adapted: tuple[str, ...]
    shares_a: bool
    alternates: bool
    swaps: bool

    def names(self, matrix: str) -> tuple[str, str]:
        """Return our names of the A and B of a matrix."""
        down = GATE_UP if self.shares_a else matrix
        return f"{self.module}.lora_A_{down}", f"{self.module}.lora_B_{matrix}"

    def join(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """Join B of each matrix, [experts, rank, outputs], to that of the stack."""
        return torch.stack(blocks, dim=-1).flatten(-2) if self.alternates else torch.cat(blocks, dim=-1)

    def split(self, joined: torch.Tensor) -> list[torch.Tensor]:
        """Invert `join`: [experts, rank, outputs of the stack] -> [experts, rank, outputs] for each matrix."""
        number = len(self.matrices)
        if joined.shape[-1] % number:
            return [joined] * number
        return [joined[..., i::number] for i in range(number)] if self.alternates else [*joined.chunk(number, dim=-1)]


def is_of_experts(name: str) -> bool:
    """Return True for the name of an A or B of experts."""
    return name.rpartition("_")[2] in (*EXPERT_MATRICES, GATE_UP)


def stacks_with_pairs(names: Collection[str], form: TensorMap) -> Iterator[Stack]:
    """Yield the stacks that have pairs with these names, ours."""
    stacked = form.with_stacks()
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names if is_of_experts(name)):
        adapted = [matrix for matrix in EXPERT_MATRICES if f"{module}.lora_B_{matrix}" in names]
        parameters = {matrix: stacked.hf_names(f"{module}.{matrix}")[0] for matrix in adapted}
        outer = parameters.get("w2", next(iter(parameters.values())))
        for parameter in dict.fromkeys(parameters.values()):
            first = next(matrix for matrix in adapted if parameters[matrix] == parameter)
            matrices = tuple(name.rpartition(".")[2] for name in stacked.joined_names(f"{module}.{first}"))
            yield Stack(
                parameter=parameter,
                key=f"{PREFIX}{parameter.rpartition('.')[0]}." + "base_layer." * (parameter != outer),
                module=module,
                matrices=matrices,
                adapted=tuple(matrix for matrix in matrices if matrix in adapted),
                shares_a=len(matrices) > 1 and f"{module}.lora_A_{GATE_UP}" in names,
                alternates=stacked.is_interleaved(f"{module}.{first}"),
                swaps=stacked.has_joined_columns(f"{module}.{first}"),
            )


def pair_of_stack(state: Mapping[str, torch.Tensor], stack: Stack) -> Tensors:
    """Return peft's pair of a stack from full tensors by our names."""
    names = {matrix: stack.names(matrix) for matrix in stack.adapted}
    offsets, rank = dict[str, int](), 0
    for down in dict.fromkeys(down for down, _ in names.values()):
        offsets[down], rank = rank, rank + state[down].shape[2]
    joined_down = torch.cat([state[down] for down in offsets], dim=2)
    experts, _, outputs = state[names[stack.adapted[0]][1]].shape
    blocks = [joined_down.new_zeros(experts, rank, outputs) for _ in stack.matrices]
    for matrix, (down, up) in names.items():
        start = offsets[down]
        blocks[stack.matrices.index(matrix)][:, start : start + state[up].shape[1]] = state[up]
    rows, columns = joined_down.transpose(1, 2), stack.join(blocks)
    rows, columns = (columns, rows) if stack.swaps else (rows, columns)  # each [experts, rank, features]
    return {
        stack.key + A: rows.flatten(0, 1).contiguous(),
        stack.key + B: columns.permute(2, 1, 0).flatten(1).contiguous(),
    }


def read_stack(
    pair: Mapping[str, torch.Tensor], stack: Stack, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Tensors, str]:
    """Return our tensors of a stack, which have these shapes, from peft's pair; and what does not fit, or ""."""
    names = {matrix: stack.names(matrix) for matrix in stack.adapted}
    first_down, first_up = names[stack.adapted[0]]
    experts, inputs, rank = shapes[first_down]
    down, up = pair[stack.key + A], pair[stack.key + B]
    outputs = len(stack.matrices) * shapes[first_up][2]
    number = 1 if stack.shares_a else len(stack.adapted)
    ranks = {rank, rank * number}
    widths = (outputs, inputs) if stack.swaps else (inputs, outputs)
    allowed = [((experts * r, widths[0]), (widths[1], r * experts)) for r in sorted(ranks)]
    if (tuple(down.shape), tuple(up.shape)) not in allowed:
        shown = " or ".join(f"A {a} and B {b}" for a, b in allowed)
        return {}, f"{stack.key}* has A {tuple(down.shape)} and B {tuple(up.shape)}, the job's {shown}"
    rows, columns = down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 1, 0)
    rows, columns = (columns, rows) if stack.swaps else (rows, columns)  # each [experts, rank, features]
    down, blocks = rows.transpose(1, 2), dict(zip(stack.matrices, stack.split(columns), strict=True))
    if any(blocks[matrix].any() for matrix in stack.matrices if matrix not in names):
        return {}, f"{stack.key}{B} reaches all of {stack.parameter}, the job only {', '.join(stack.adapted)}"
    tensors = {}
    for index, (matrix, (down_name, up_name)) in enumerate(names.items()):
        part = slice(index * rank, (index + 1) * rank) if down.shape[2] > rank else slice(None)
        tensors[down_name], tensors[up_name] = down[..., part], blocks[matrix][:, part]
        if tensors[up_name].count_nonzero() != blocks[matrix].count_nonzero():
            remedy = f"set adapter.gate_up_rank = {down.shape[2]}"
            return {}, f"{stack.key}{B} reaches both matrices from every row of A: {remedy}"
    return tensors, ""


def stack_singles(peft_tensors: Tensors, stack: Stack, form: TensorMap) -> Tensors:
    """Return the tensors with pairs of single experts replaced by the one of their stack, as peft itself reads them."""
    if not form.is_stacked(f"{stack.module}.{stack.matrices[0]}"):
        return peft_tensors
    remaining, state = dict(peft_tensors), Tensors()
    separate = Stack(**{**vars(stack), "shares_a": False})
    for matrix in stack.matrices:
        modules = [PREFIX + name.removesuffix("weight") for name in form.hf_names(f"{stack.module}.{matrix}")]
        for name, ending in zip(separate.names(matrix), (A, B), strict=True):
            parts = [remaining.get(module + ending) for module in modules]
            if all(part is not None and part.dim() == 2 and part.shape == parts[0].shape for part in parts):
                state[name] = torch.stack([remaining.pop(module + ending).t() for module in modules])
    adapted = tuple(matrix for matrix in stack.matrices if {*separate.names(matrix)} <= state.keys())
    if not adapted:
        return peft_tensors
    return remaining | pair_of_stack(state, Stack(**{**vars(separate), "adapted": adapted}))
