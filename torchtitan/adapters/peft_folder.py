"""Low-rank adapters in the layout of the library peft: adapter_config.json and adapter_model.safetensors.

Names are from the Hugging Face model. If it orders the rows of a matrix differently, the rows of B follow. Pairs of
experts: peft_experts.py.

Several of our matrices can be one matrix in Hugging Face, as queries, keys and values of GPT-2 are. Here each has its
own pair A, B. They are saved as one pair with the sum of their ranks: the A stacked, the B as diagonal blocks.
A pair that was trained on the joint matrix is read as several pairs with the same A.
"""

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan.adapters.peft_config import (
    CONFIG,
    PER_MODULE_KEYS,
    WEIGHTS,
    config_entries,
    mismatches,
    read_config,
)
from torchtitan.adapters.peft_experts import (
    PREFIX,
    A,
    B,
    Tensors,
    is_of_experts,
    pair_of_stack,
    read_stack,
    stack_singles,
    stacks_with_pairs,
)
from torchtitan.config.sections.model import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.files import require_file
from torchtitan.core.hub import name_and_commit
from torchtitan.models.hf.load import READABLE_DTYPES
from torchtitan.models.hf.names import TensorMap

logger = logging.getLogger(__name__)


def adapted_modules(weights: Sequence[str], names: Collection[str]) -> list[str]:
    """Return the modules of these weights that have a low-rank pair among the names."""
    modules = [weight.removesuffix(".weight") for weight in weights]
    return [module for module in modules if f"{module}.lora_A" in names]


def join_tensors(state: Mapping[str, torch.Tensor], kind: str, weights: Sequence[str], form: TensorMap) -> torch.Tensor:
    """Join one kind of tensor over the modules of these weights, of N rows in all; k of them have an adapter.

    lora_A: [k rank, in], lora_B: [N, k rank], lora_magnitude: [N]. Raises JobError if only some of the modules
    have magnitudes, as the missing ones would have to be computed.
    """
    modules = adapted_modules(weights, state)
    parts = [state[f"{module}.{kind}"] for module in modules]
    if kind == "lora_A":
        return torch.cat(parts)
    places = [form.place(f"{module}.weight", len(part)) for module, part in zip(modules, parts, strict=True)]
    parts = [_in_peft_order(part, f"{module}.weight", form) for module, part in zip(modules, parts, strict=True)]
    if kind != "lora_B":
        if len(parts) < len(weights):
            raise JobError(f"{', '.join(modules)}: in peft's layout {', '.join(weights)} have a DoRA together or none")
        return form.rows_to_groups(weights[0], torch.cat(parts))
    rank = parts[0].shape[1]
    joint = parts[0].new_zeros(places[0][1], rank * len(parts))
    for index, ((row, _), part) in enumerate(zip(places, parts, strict=True)):
        joint[row : row + len(part), index * rank : (index + 1) * rank] = part
    return form.rows_to_groups(weights[0], joint)


def _in_peft_order(value: torch.Tensor, weight: str, form: TensorMap) -> torch.Tensor:
    """Order the rows of a B, or of magnitudes, as those of the weight in the Hugging Face format."""
    return form.rows_to_hf(weight, value) if form.is_reordered(weight) else value


def extract_tensor(
    joined_tensor: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    weights: Sequence[str],
    names: Collection[str],
    form: TensorMap,
) -> torch.Tensor:
    """Return the view of our tensor `name` of this shape in a joined one, or the joined one if it does not fit."""
    module, _, kind = name.rpartition(".")
    modules, weight = adapted_modules(weights, names), f"{module}.weight"
    if kind == "lora_A":
        return (
            joined_tensor
            if joined_tensor.shape[0] == shape[0]
            else _cut(joined_tensor, 0, len(modules), modules.index(module))
        )
    first, total = form.place(weight, shape[0])
    is_whole = len(joined_tensor) == total
    rows = form.rows_from_groups(weight, joined_tensor)[first : first + shape[0]] if is_whole else joined_tensor
    rows = form.rows_from_hf(weight, rows) if form.is_reordered(weight) and len(rows) == shape[0] else rows
    if kind != "lora_B" or rows.shape == shape:
        return rows
    block = _cut(rows, 1, len(modules), modules.index(module))
    return (
        block if block.count_nonzero() == rows.count_nonzero() else joined_tensor
    )  # else another module's A reaches these outputs


def reaches_others(
    joined_tensor: torch.Tensor,
    kind: str,
    weights: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    form: TensorMap,
) -> bool:
    """Return whether a joined tensor changes outputs of modules that have no pair among `shapes`.

    Magnitudes always do, as those of a matrix without a change are its row norms.
    """
    modules = adapted_modules(weights, shapes)
    if kind == "lora_A" or len(modules) == len(weights):
        return False
    heights = {f"{module}.weight": shapes[f"{module}.lora_B"][0] for module in modules}
    places = {weight: form.place(weight, height) for weight, height in heights.items()}
    if kind != "lora_B" or any(total != len(joined_tensor) for _, total in places.values()):
        return kind != "lora_B"
    rows = form.rows_from_groups(weights[0], joined_tensor)
    reached = sum(rows[first : first + heights[weight]].count_nonzero() for weight, (first, _) in places.items())
    return bool(reached != rows.count_nonzero())


def _cut(tensor: torch.Tensor, dim: int, parts: int, index: int) -> torch.Tensor:
    return tensor.chunk(parts, dim)[index] if tensor.shape[dim] % parts == 0 else tensor


_ENDINGS = {"lora_A": A, "lora_B": B, "lora_magnitude": "lora_magnitude_vector"}


def to_peft(state: Mapping[str, torch.Tensor], form: TensorMap) -> Tensors:
    """Convert full adapter tensors by our names to peft's names and layout."""
    peft_tensors: Tensors = {}
    for stack in stacks_with_pairs(state.keys(), form):
        peft_tensors |= pair_of_stack(state, stack)
    for name in _of_linears(state):
        value, (weight, kind, peft_name) = state[name], _peft_name(name, form)
        if len(joined_weights := form.joined_names(weight)) > 1:
            peft_tensors[peft_name] = join_tensors(state, kind, joined_weights, form)
        else:
            reordered = kind != "lora_A" and form.is_reordered(weight)
            peft_tensors[peft_name] = (form.rows_to_hf(weight, value) if reordered else value).contiguous()
    return peft_tensors


def from_peft(
    peft_tensors: Mapping[str, torch.Tensor], form: TensorMap, shapes: Mapping[str, tuple[int, ...]]
) -> Tensors:
    """Convert peft's tensors to ours, which have these names and shapes. Raises JobError listing all misfits."""
    ours, faults, stacks = Tensors(), list[str](), [*stacks_with_pairs(shapes.keys(), form)]
    peft_tensors = dict(peft_tensors)
    for stack in stacks:
        peft_tensors = stack_singles(peft_tensors, stack, form)
    expected = {stack.key + ending for stack in stacks for ending in (A, B)}
    expected |= {_peft_name(name, form)[2] for name in _of_linears(shapes)}
    faults += [f"it lacks {peft_name}" for peft_name in sorted(expected - peft_tensors.keys())]
    faults += [f"it also holds {peft_name}" for peft_name in sorted(peft_tensors.keys() - expected)]
    for stack in stacks if not faults else ():
        tensors, fault = read_stack(peft_tensors, stack, shapes)
        ours |= tensors
        faults += [fault] * bool(fault)
    for name in _of_linears(shapes) if not faults else ():
        shape, (weight, kind, peft_name) = shapes[name], _peft_name(name, form)
        value = peft_tensors[peft_name]
        if len(joined_weights := form.joined_names(weight)) > 1:
            if reaches_others(value, kind, joined_weights, shapes, form):
                adapted = ", ".join(adapted_modules(joined_weights, shapes))
                names = ", ".join(joined.removesuffix(".weight") for joined in joined_weights)
                faults.append(f"{peft_name} reaches all of {names}, the job only {adapted}")
            value = extract_tensor(value, name, shape, joined_weights, shapes, form)
        elif kind != "lora_A" and form.is_reordered(weight) and value.shape == shape:
            value = form.rows_from_hf(weight, value)
        if tuple(value.shape) != shape:
            faults.append(f"{peft_name} makes {name} of {tuple(value.shape)}, the job's is {shape}")
        ours[name] = value
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise JobError(
            f"{'; '.join(faults[:5])}{more}. Give the job's [adapter] the kind, rank and target it was made with"
        )
    return ours


def peft_config(options: Options, names: list[str], form: TensorMap, base: str) -> dict[str, Any]:
    """Return peft's config for an adapter with these names (ours); `base`: path of its model."""
    ranks: dict[str, int] = {}  # of each module or parameter in Hugging Face
    transposed, parameters = False, list[str]()
    for name in _of_linears(names):
        weight, _, _ = _peft_name(name, form)
        transposed |= form.is_transposed(weight)
        joined_weights = form.joined_names(weight)
        number = len(adapted_modules(joined_weights, names)) if len(joined_weights) > 1 else 1
        module = form.hf_names(weight)[0].removesuffix(".weight")
        if options.kind != "dora" and module.rpartition(".")[2] in _names_of_experts(form):
            module += ".weight"
            parameters.append(module)
        ranks[module] = options.rank * number
    modules = [module for module in ranks if module not in parameters]
    for stack in stacks_with_pairs(names, form):
        parameters.append(stack.parameter)
        ranks[stack.parameter] = options.gate_up_rank if stack.shares_a else options.rank * len(stack.adapted)
    parts = {module: rank / options.rank for module, rank in ranks.items() if rank != options.rank}
    name, commit = name_and_commit(base)
    return config_entries(options) | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": commit,
        "lora_dropout": 0.0 if parameters else options.dropout,  # of a parameter's input peft drops nothing
        "target_modules": modules,
        **({"target_parameters": list(dict.fromkeys(parameters))} if parameters else {}),
        "rank_pattern": {module: ranks[module] for module in parts},
        "alpha_pattern": {module: options.alpha * (n**0.5 if options.rslora else n) for module, n in parts.items()},
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def _names_of_experts(form: TensorMap) -> set[str]:
    """Return names of linears in the folder's experts, if each has its own.

    peft takes targets of these names for the stacks of experts; as parameters it takes them for what they are.
    """
    return {name.split(".")[-2] for name in form.layer_names.values() if ".experts.*." in name}


def save(folder: Path, state: Mapping[str, torch.Tensor], options: Options, form: TensorMap, base: str = "") -> None:
    """Write an adapter in peft's layout: its full tensors by our names, and a config made from the job's `options`.

    `form`: our names to those of Hugging Face. `base`: path of the base model, for peft to find it. Raises OSError if
    the folder cannot be written.
    """
    from safetensors.torch import save_file

    if any(name.rpartition(".")[0].endswith(".ssm_out") for name in state):
        logger.warning(
            "adapters of *ssm_out: peft refuses them, as kernels of Mamba would not apply them; leave them out of "
            "adapter.target, or write the whole model (torchtitan export --merge)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_peft(state, form), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(peft_config(options, list(state), form, base), indent=2) + "\n")


def load(folder: Path, options: Options, form: TensorMap, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Read adapter tensors by our names. Raises JobError if the folder holds a different adapter, or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    job_config = peft_config(options, list(shapes), form, "")
    modules = [*job_config["target_modules"], *job_config.get("target_parameters", ())]
    config = _with_names(read_config(folder), modules)
    if reasons := list(mismatches(config, options, {key: job_config[key] for key in PER_MODULE_KEYS})):
        raise JobError(f"{folder / CONFIG}: {'; '.join(reasons)}")
    try:
        require_file(folder / WEIGHTS, missing_ok=True)
        peft_tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise JobError(f"{folder}: no adapter in peft's layout ({CONFIG}, {WEIGHTS}): {error}") from error
    for name, tensor in peft_tensors.items():
        is_readable = tensor.dtype in READABLE_DTYPES.values()
        if not is_readable or not tensor.isfinite().all():
            fault = "NaN or infinity" if is_readable else str(tensor.dtype).removeprefix("torch.")
            raise JobError(
                f"{folder / WEIGHTS}: {name} holds {fault}; allowed: finite floats of 16 bits or more; save it again "
                "with peft"
            )
    try:
        return from_peft(peft_tensors, form, shapes)
    except JobError as error:
        raise JobError(f"{folder}: {error}") from None


def _of_linears(names: Iterable[str]) -> list[str]:
    return [name for name in names if not is_of_experts(name)]


def _peft_name(name: str, form: TensorMap) -> tuple[str, str, str]:
    """Return the weight that a tensor of ours adapts, the tensor's kind, and peft's name of it."""
    module, _, kind = name.rpartition(".")
    weight = f"{module}.weight"
    return weight, kind, PREFIX + form.hf_names(weight)[0].removesuffix("weight") + _ENDINGS[kind]


def _with_names(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    r"""Return the config with the names that a key ".*\\.last_part" of PER_MODULE_KEYS stands for in its place.

    peft writes such keys when it reads pairs of single experts.
    """
    expanded = dict(config)
    for key in PER_MODULE_KEYS:
        entries = config.get(key)
        for pattern, value in entries.items() if isinstance(entries, dict) else ():
            last_part = pattern.removeprefix(r".*\.")
            if last_part != pattern and (matching := [name for name in names if name.endswith(f".{last_part}")]):
                entries_left = {k: v for k, v in expanded[key].items() if k != pattern}
                expanded[key] = entries_left | dict.fromkeys(matching, value)
    return expanded
