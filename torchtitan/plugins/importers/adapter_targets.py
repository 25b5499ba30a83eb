"""Translate the target modules of a file for peft to the targets of an adapter here.

peft tries them on the modules of the Hugging Face model: names that are a module's, or the end of one behind a dot, or
one regex for the whole name. They are tried here on the same names, which follow from the folder's config.json. Without
it the family's smallest model stands for it, and only names are translated, as these do not depend on the layers.

In peft a name of an expert's matrix, as gate_proj, stands for the stacks of all experts, where the stack of gate
and up has one A. That is not supported here, so such names are refused for models with experts.
"""

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torchtitan.adapters.targets import ALL_LINEAR, is_expert_stack, layer_of, with_wildcards
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, SIZES
from torchtitan.models.hf.config import find_text_config
from torchtitan.models.hf.wrappers import memory_prefix
from torchtitan.models.sizes import linears, parameters
from torchtitan.plugins.importers.regexes import Regex, RegexError
from torchtitan.plugins.importers.translation import JobDraft

FAMILIES = "torchtitan.models.spec:MODELS"
"""Resolved by name, as it needs torch."""


class TargetError(JobError):
    """Target modules that cannot be translated. `allowed`, `remedy`: parts of the refusal."""

    def __init__(self, allowed: str, remedy: str = "") -> None:
        super().__init__(f"allowed: {allowed}; {remedy}")
        self.allowed, self.remedy = allowed, remedy


class ModelModules(NamedTuple):
    """The modules of a model.

    `linears`: linear layers, our name -> Hugging Face's. `other_modules`: Hugging Face's names of all other modules.
    `of_experts`: last parts of the names of matrices that each expert has in a folder. `names`: of all linears and
    stacks of experts here.
    """

    linears: dict[str, str]
    other_modules: set[str]
    of_experts: set[str]
    names: list[str]

    def available(self) -> str:
        return ", ".join(with_wildcards(self.linears.values()))


class Targets(NamedTuple):
    """`patterns`: of adapter.target. `unmatched`: names that no module has. `is_partial`: some linears are left out."""

    patterns: list[str]
    unmatched: list[str]
    is_partial: bool


def has_experts(family: str) -> bool:
    return any(is_expert_stack(name) for sizes in SIZES[family].values() for name in linears(sizes))


def translate_targets(
    modules: str | Sequence[str], all_linear: bool, family: str, folder: str, saved: Collection[str] = ()
) -> Targets:
    """Translate target modules: a regex, or names. Raises TargetError if there is no translation.

    `all_linear`: all linear layers but the head are targets too, by the last parts of their names. `saved`: modules
    that are trained themselves (modules_to_save), which get no adapter.
    """
    if not modules and all_linear and not has_experts(family):
        return Targets([ALL_LINEAR], [], is_partial=False)
    model = _modules_of(family, folder, is_regex=isinstance(modules, str))
    matches = _regex_matches(modules) if isinstance(modules, str) else _names_match(modules)
    saved_parts = [f".{name}." for name in saved]
    candidates = {
        ours: name for ours, name in model.linears.items() if not any(part in f".{name}." for part in saved_parts)
    }
    chosen = {ours for ours, name in candidates.items() if matches(name) or (all_linear and layer_of(ours) is not None)}
    if unsupported := sorted(name for name in model.other_modules if matches(name)):
        raise TargetError(f"linear layers: {model.available()}", f"{unsupported[0]} is none: leave it out")
    names = [] if isinstance(modules, str) else list(modules)
    last_parts = {name.rpartition(".")[2] for name in [*names, *(model.linears[ours] for ours in chosen)]}
    if of_experts := sorted(last_parts & model.of_experts):
        allowed = f"linear layers without those named {', '.join(of_experts)}, which stand for stacks of experts"
        remedy = "name different ones, or write adapter.target: there *moe.experts gives each matrix its own pair"
        raise TargetError(allowed, remedy)
    if not chosen:
        raise TargetError(f"some of {model.available()}")
    of_same_names = {ours for ours, name in candidates.items() if name.rpartition(".")[2] in last_parts}
    if isinstance(modules, str) and model.of_experts and chosen != of_same_names:
        allowed = "with experts, a regex that leaves out none of the modules with a name, as peft takes all of them"
        raise TargetError(allowed, "write adapter.target into the job")
    unmatched = [name for name in names if not any(map(_names_match([name]), candidates.values()))]
    if chosen == {name for name in model.names if layer_of(name) is not None}:
        return Targets([ALL_LINEAR], unmatched, is_partial=False)
    is_partial = any(layer_of(name) is not None for name in model.linears.keys() - chosen)
    return Targets(patterns_of(chosen, model.names), unmatched, is_partial)


def add_targets(
    draft: JobDraft,
    option: str,
    modules: str | Sequence[str],
    all_linear: bool,
    folder: str,
    saved: Collection[str],
    quantizer: str = "",
) -> Targets | None:
    """Add adapter.target to a draft that has its model's family, or refuse `option` and return None.

    `quantizer`: the program that quantizes the linear layers, also those without an adapter.
    """
    try:
        targets = translate_targets(modules, all_linear, draft.values["model.name"], folder, saved)
    except TargetError as error:
        draft.refuse(option, modules or None, error.allowed, error.remedy)
        return None
    draft.values["adapter.target"] = targets.patterns
    if targets.unmatched:
        draft.notes.append(f"{option}: no module of the model has the name {' or '.join(targets.unmatched)}")
    if targets.is_partial and quantizer:
        layers = "linear layers without an adapter"
        draft.notes.append(f"not the same: {layers} keep their exact weights, quantized in {quantizer}")
    return targets


def _modules_of(family: str, folder: str, is_regex: bool) -> ModelModules:
    try:
        args = CONFIG_CONVERTERS[family].args_from_folder(folder)
    except (JobError, OSError) as error:
        if is_regex:
            remedy = "download the model, so that it can be tried on its names, or write adapter.target into the job"
            raise TargetError(f"a regex for a model with its config.json in {folder}", f"{remedy} ({error})") from None
        args = next(iter(SIZES[family].values()))
        return model_modules(family, args)
    return model_modules(family, args, memory_prefix(find_text_config(Path(folder))))


def model_modules(family: str, args: Any, prefix: str = "model.") -> ModelModules:
    """Return the modules of a model. `prefix`: beginning of its names, where it is part of one that reads images."""
    form = resolve_name(FAMILIES)[family].hf.tensor_map(args).within(prefix)
    names = list(linears(args))
    our_linears = {name for name in names if not is_expert_stack(name)}
    hf_linears, other_modules, of_experts = dict[str, str](), set[str](), set[str]()
    for parameter in parameters(args):
        if (layer_of(parameter) or 0) >= args.n_layers:  # of multi-token prediction, which transformers' models lack
            continue
        module, name = parameter.rpartition(".")[0], form.hf_names(parameter)[0]
        hf_module = name.rpartition(".")[0]
        if module in our_linears:
            hf_linears[module] = hf_module
        elif is_expert_stack(module) and form.is_stacked(parameter):
            of_experts.add(hf_module.rpartition(".")[2])
            other_modules.add(hf_module.rpartition(".")[0].rpartition(".")[0])
        else:
            other_modules.add(hf_module)
    for name in [*hf_linears.values(), *other_modules]:
        parts = name.split(".")
        other_modules |= {".".join(parts[:length]) for length in range(1, len(parts))}
    return ModelModules(hf_linears, other_modules - set(hf_linears.values()), of_experts, names)


def _names_match(names: Sequence[str]) -> Callable[[str], bool]:
    return lambda module: any(module == name or module.endswith(f".{name}") for name in names)


def _regex_matches(regex: str) -> Callable[[str], bool]:
    try:
        return Regex(regex).matches
    except RegexError as error:
        raise TargetError(f"a regex without {error}", "or write adapter.target into the job") from None


def patterns_of(chosen: Collection[str], names: Sequence[str]) -> list[str]:
    """Return few patterns that match only the chosen names: layers, a name in all layers, single names."""
    layer_names = [name.split(".", 2)[1:] for name in names if name.startswith("layers.")]
    layers = list(dict.fromkeys(layer for layer, _ in layer_names))
    full_layers = [layer for layer in layers if all(n in chosen for n in names if n.startswith(f"layers.{layer}."))]
    patterns = ["layers.*"] if full_layers == layers else [f"layers.{layer}.*" for layer in full_layers]
    for parameter in dict.fromkeys(parameter for layer, parameter in layer_names if layer not in full_layers):
        having = [layer for layer, layer_parameter in layer_names if layer_parameter == parameter]
        matching = [layer for layer in having if f"layers.{layer}.{parameter}" in chosen]
        if matching == having:
            patterns.append(f"layers.*.{parameter}")
        else:
            patterns += [f"layers.{layer}.{parameter}" for layer in matching if layer not in full_layers]
    patterns += [name for name in names if name in chosen and not name.startswith("layers.")]
    assert {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)} == set(chosen)
    return patterns
