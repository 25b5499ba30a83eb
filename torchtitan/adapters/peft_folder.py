"""Low-rank matrices beside what is one matrix in the form of Hugging Face and several here, as queries, keys and values
of GPT-2 are.

Here each of them has its own pair. All together these are one pair whose rank is the sum of theirs: their A below each
other, their B in blocks along a diagonal. A pair that was trained beside the whole is read as several with the same A.

Low-rank adapters alone, in the layout of the library peft: adapter_config.json and adapter_model.safetensors.

Names are those of the model in the form of Hugging Face. Where rows of a matrix come in another order there, so do
those of its B; stacks of experts are one pair of matrices for each expert there, and several of ours that are one
matrix there are one pair too (peft_folder.py).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan.adapters.peft_config import BY_MODULE, CONFIG, WEIGHTS, differences, of_options, read
from torchtitan.config.sections.adapter import Adapter as Options
from torchtitan.core.errors import JobError
from torchtitan.core.files import require_file
from torchtitan.models.hf.names import Form


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


PREFIX = "base_model.model."
_ENDINGS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}

Tensors = dict[str, torch.Tensor]


def to_peft(state: Mapping[str, torch.Tensor], form: Form) -> Tensors:
    """Whole adapter tensors by our names -> by peft's."""
    theirs: Tensors = {}
    for name, value in state.items():
        module, kind, matrix = _split(name)
        weight = f"{module}.{matrix or 'weight'}"
        names = [PREFIX + each.removesuffix("weight") + _ENDINGS[kind] for each in form.hf_names(weight)]
        if matrix:
            theirs |= {each: part.t().contiguous() for each, part in zip(names, value, strict=True)}
        elif len(together := form.together(weight)) > 1:
            theirs[names[0]] = joined(state, kind, together)
        else:
            turned = kind != "lora_A" and form.is_turned(weight)
            theirs[names[0]] = (form.rows_to_hf(value) if turned else value).contiguous()
    return theirs


def from_peft(theirs: Mapping[str, torch.Tensor], form: Form, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """The inverse, for the adapter tensors of these names and shapes. JobError that names all that does not fit."""
    ours, wanted, faults = {}, {}, []
    for name in shapes:
        module, kind, matrix = _split(name)
        endings = [
            each.removesuffix("weight") + _ENDINGS[kind] for each in form.hf_names(f"{module}.{matrix or 'weight'}")
        ]
        wanted[name] = [PREFIX + each for each in endings]
    known = {each for names in wanted.values() for each in names}
    faults += [f"it lacks {each}" for each in sorted(known - theirs.keys())]
    faults += [f"it also holds {each}" for each in sorted(theirs.keys() - known)]
    for name, shape in shapes.items() if not faults else ():
        module, kind, matrix = _split(name)
        parts = [theirs[each] for each in wanted[name]]
        if matrix:
            value = torch.stack([part.t() for part in parts]) if len({part.shape for part in parts}) == 1 else parts[0]
        elif len(together := form.together(f"{module}.weight")) > 1:
            value = part_of(parts[0], name, shape, together, shapes)
        else:
            turned = kind != "lora_A" and form.is_turned(f"{module}.weight")
            (value,) = parts
            value = form.rows_from_hf(value) if turned and value.shape == shape else value
        if tuple(value.shape) != shape:
            faults.append(f"{wanted[name][0]} makes {name} of {tuple(value.shape)}, the job's is {shape}")
        ours[name] = value
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise JobError(
            f"{'; '.join(faults[:5])}{more}. Give the job's [adapter] the kind, rank and target it was made with"
        )
    return ours


def config_of(options: Options, names: list[str], form: Form, base: str) -> dict[str, Any]:
    """Of adapters of these names (ours); `base`: where their model is."""
    modules: dict[str, int] = {}  # with the number of ours that they are
    transposed = False
    for module, _, matrix in map(_split, names):
        weight = f"{module}.{matrix or 'weight'}"
        transposed |= form.is_transposed(weight)
        together = form.together(weight)
        for each in form.hf_names(weight):
            modules[each.removesuffix(".weight")] = len(having(together, names)) if len(together) > 1 else 1
    ranks = {module: options.rank * number for module, number in modules.items() if number > 1}
    alphas = {m: options.alpha * (n**0.5 if options.rslora else n) for m, n in modules.items() if n > 1}
    return of_options(options) | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "lora_dropout": options.dropout,
        "target_modules": list(modules),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "fan_in_fan_out": transposed,
        "inference_mode": True,
    }


def save(folder: Path, state: Mapping[str, torch.Tensor], options: Options, form: Form, base: str = "") -> None:
    """Whole adapter tensors by our names. OSError where the folder cannot be written."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_peft(state, form), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config_of(options, list(state), form, base), indent=2) + "\n")


def load(folder: Path, options: Options, form: Form, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Adapter tensors by our names. JobError where the folder is another adapter's, or none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    mine = config_of(options, list(shapes), form, "")
    if wrong := list(differences(read(folder), options, {key: mine[key] for key in BY_MODULE})):
        raise JobError(f"{folder / CONFIG}: {'; '.join(wrong)}")
    try:
        require_file(folder / WEIGHTS, missing_ok=True)
        theirs = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise JobError(f"{folder}: no adapter in peft's layout ({CONFIG}, {WEIGHTS}): {error}") from error
    try:
        return from_peft(theirs, form, shapes)
    except JobError as error:
        raise JobError(f"{folder}: {error}") from None


def _split(name: str) -> tuple[str, str, str]:
    """Of one of our adapter's parameters: module, what it is, and of experts which matrix it is beside."""
    module, _, own = name.rpartition(".")
    matrix = next((each for each in ("w1", "w2", "w3") if own.endswith(f"_{each}")), "")
    return module, own.removesuffix(f"_{matrix}") if matrix else own, matrix
