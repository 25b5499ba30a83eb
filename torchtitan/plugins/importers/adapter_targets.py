"""Translate the target modules of a file for peft to the targets of an adapter here.

peft tries them on the modules of the Hugging Face model: names that are a module's, or the end of one behind a dot, or
one regex for the whole name. They are tried here on the same names, which follow from the folder's config.json. Without
it the family's published sizes stand for it: only names are translated, which do not depend on the number of layers,
and these only if they are the same modules in all kinds of sizes, such as those with experts and without.

transformers 5 has stacks of experts, which are parameters (`target_parameters`), with one A for gate and up. In some
families peft takes a name of the matrices that single experts had before, as gate_proj, for the stacks of all layers,
also where it is that of a linear layer of the model. Then the pair of gate and up has twice the rank, and twice alpha.
"""

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from torchtitan.adapters.targets import ALL_LINEAR, EXPERT_MATRICES, is_expert_stack, layer_of, with_wildcards
from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, SIZES
from torchtitan.models.hf.config import find_text_config
from torchtitan.models.hf.wrappers import memory_prefix
from torchtitan.models.sizes import linears, parameters
from torchtitan.plugins.importers.regexes import Regex, RegexError
from torchtitan.plugins.importers.translation import JobDraft

PARAMETERS = "lora_target_parameters"
"""The option of Axolotl and trl with parameters that get a pair."""
FAMILIES = "torchtitan.models.spec:MODELS"
"""Resolved by name, as it needs torch."""
RENAMED = frozenset(("deepseek", "glm4_moe", "glm4_moe_lite", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next"))
RENAMED |= {"afmoe", "minimax_m2"}
"""Families in which peft takes the names of single experts' matrices for the stacks (0.21)."""


class TargetError(JobError):
    """Target modules that cannot be translated. `allowed`, `remedy`: parts of the refusal."""

    def __init__(self, allowed: str, remedy: str = "") -> None:
        super().__init__(f"allowed: {allowed}; {remedy}")
        self.allowed, self.remedy = allowed, remedy


class ParameterError(TargetError):
    """Target parameters that cannot be translated."""


class ModelModules(NamedTuple):
    """The modules of a model.

    `linears`: linear layers, our name -> Hugging Face's. `other_modules`: Hugging Face's names of all other modules.
    `stacks`: parameters of transformers that are stacks of experts -> our names of their matrices. `of_experts`: names
    that peft takes for matrices of experts -> which ones. `names`: of all linears and stacks of experts here.
    """

    linears: dict[str, str]
    other_modules: set[str]
    stacks: dict[str, list[str]]
    of_experts: dict[str, str]
    names: list[str]

    def available(self) -> str:
        return ", ".join(with_wildcards(self.linears.values()))


class Targets(NamedTuple):
    """`patterns`: of adapter.target. `unmatched`: names that no module has. `is_partial`: some linears are left out.

    `gate_up`: rank of the pair of gate and up of experts, in ranks of other pairs; 0 without. `renamed`: names that
    peft takes for experts. `has_stacks`: some stacks of experts are targets.
    """

    patterns: list[str]
    unmatched: list[str]
    is_partial: bool
    gate_up: int = 0
    renamed: tuple[str, ...] = ()
    has_stacks: bool = False


def has_experts(family: str) -> bool:
    return any(is_expert_stack(name) for sizes in SIZES[family].values() for name in linears(sizes))


def translate_targets(
    modules: str | Sequence[str],
    all_linear: bool,
    family: str,
    folder: str,
    saved: Collection[str] = (),
    parameters: Sequence[str] = (),
) -> Targets:
    """Translate target modules: a regex, or names. Raises TargetError if there is no translation.

    `all_linear`: all linear layers but the head are targets too, by the last parts of their names. `saved`: modules
    that are trained themselves (modules_to_save), which get no adapter. `parameters`: those that are targets too.
    """
    if not modules and not parameters and all_linear and not has_experts(family):
        return Targets([ALL_LINEAR], [], is_partial=False)
    kinds = _kinds_of(family, folder, is_regex=isinstance(modules, str))
    translations = [_translate(model, modules, all_linear, saved, parameters) for model in kinds]
    if any(targets != translations[0] for targets in translations):
        allowed = f"names that are the same modules in all sizes of {family}, or its config.json in {folder}"
        raise TargetError(allowed, "download the model, or write adapter.target into the job")
    return translations[0]


def _translate(
    model: ModelModules,
    modules: str | Sequence[str],
    all_linear: bool,
    saved: Collection[str],
    parameters: Sequence[str],
) -> Targets:
    matches = _regex_matches(modules) if isinstance(modules, str) else _names_match(modules)
    if unsupported := sorted(name for name in model.other_modules if matches(name)):
        raise TargetError(f"linear layers: {model.available()}", f"{unsupported[0]} is none: leave it out")
    saved_parts = [f".{name}." for name in saved]
    candidates = {
        ours: name for ours, name in model.linears.items() if not any(part in f".{name}." for part in saved_parts)
    }
    chosen = {ours for ours, name in candidates.items() if matches(name) or (all_linear and layer_of(ours) is not None)}
    names = [] if isinstance(modules, str) else list(modules)
    renamed = _names_of_experts(model, modules, matches, [candidates[ours] for ours in chosen] if all_linear else [])
    if isinstance(modules, str) and model.of_experts:
        last_parts = {_last_part(candidates[ours]) for ours in chosen}
        renamed |= last_parts & model.of_experts.keys()
        if chosen != {ours for ours, name in candidates.items() if _last_part(name) in last_parts}:
            allowed = "with experts, a regex that leaves out none of the modules with a name, as peft takes all of them"
            raise TargetError(allowed, "write adapter.target into the job")
    chosen -= {ours for ours in chosen if _last_part(candidates[ours]) in renamed}
    stacks = _chosen_stacks(model, renamed, parameters)
    if not chosen and not stacks:
        raise TargetError(f"some of {model.available()}")
    unmatched = [
        name
        for name in names
        if _last_part(name) not in renamed and not any(map(_names_match([name]), candidates.values()))
    ]
    unmatched += [name for name in parameters if not any(map(_names_match([name]), model.stacks))]
    of_stacks = [name for names in model.stacks.values() for name in names]
    full = {_stack_of(name) for name in stacks} - {_stack_of(name) for name in of_stacks if name not in stacks}
    is_partial = any(layer_of(name) is not None for name in model.linears.keys() - chosen)
    patterns = [ALL_LINEAR]
    if chosen | full != {name for name in model.names if layer_of(name) is not None}:
        remaining = {matrix for matrix in stacks if _stack_of(matrix) not in full}
        kinds = dict.fromkeys(map(_last_part, of_stacks))
        of_stacks = [f"{name}.{kind}" for name in model.names if is_expert_stack(name) for kind in kinds]
        patterns = patterns_of(chosen | full, model.names) + (patterns_of(remaining, of_stacks) if remaining else [])
    gate_up = any(matrix.endswith(".w3") for matrix in stacks) * (
        2 if "w1" in map(model.of_experts.get, renamed) else 1
    )
    return Targets(patterns, unmatched, is_partial, gate_up, tuple(sorted(renamed)), bool(stacks))


def _names_of_experts(
    model: ModelModules, modules: str | Sequence[str], matches: Callable[[str], bool], linears: Sequence[str]
) -> set[str]:
    """Return the names among the targets that peft takes for matrices of experts. `linears`: further targets."""
    if isinstance(modules, str):
        probes = {f"{stack.rpartition('.')[0]}.{name}" for stack in model.stacks for name in model.of_experts}
        return {_last_part(name) for name in probes | model.stacks.keys() if matches(name)} & model.of_experts.keys()
    return {_last_part(name) for name in [*modules, *linears]} & model.of_experts.keys()


def _chosen_stacks(model: ModelModules, renamed: Collection[str], parameters: Sequence[str]) -> set[str]:
    """Return our names of the experts' matrices that get a pair."""
    matrices = {model.of_experts[name] for name in renamed}
    if len(matrices & {"w1", "w3"}) == 1:
        one = next(name for name in renamed if model.of_experts[name] != "w2")
        both = " and ".join(name for name, matrix in model.of_experts.items() if matrix != "w2")
        raise TargetError(f"both {both} with experts", f"peft has one stack of them and refuses {one} alone")
    matches = _names_match(parameters)
    weights = [f"{name}.weight" for name in [*model.linears.values(), *model.other_modules]]
    if plain_weights := sorted(name for name in weights if matches(name)):
        raise ParameterError(", ".join(with_wildcards(model.stacks)), f"{plain_weights[0]} is none of them")
    chosen = {ours for name, names in model.stacks.items() if matches(name) for ours in names}
    if parameters and not chosen:
        available = ", ".join(with_wildcards(model.stacks))
        raise ParameterError(available or "nothing for a model without experts")
    of_all = {ours for names in model.stacks.values() for ours in names}
    return chosen | {ours for ours in of_all if _last_part(ours) in matrices}


def _stack_of(matrix: str) -> str:
    return matrix.rpartition(".")[0]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def add_targets(
    draft: JobDraft,
    option: str,
    modules: str | Sequence[str],
    all_linear: bool,
    folder: str,
    saved: Collection[str],
    quantizer: str = "",
    parameters: Sequence[str] = (),
) -> Targets | None:
    """Add adapter.target to a draft that has its model's family, or refuse `option` and return None.

    `quantizer`: the program that quantizes the linear layers, also those without an adapter, but no experts.
    """
    try:
        targets = translate_targets(modules, all_linear, draft.values["model.name"], folder, saved, parameters)
        _add_gate_up(draft, targets)
    except TargetError as error:
        refused = (PARAMETERS, parameters) if isinstance(error, ParameterError) else (option, modules or None)
        draft.refuse(*refused, error.allowed, error.remedy)
        return None
    draft.values["adapter.target"] = targets.patterns
    if targets.has_stacks and quantizer:
        draft.values["adapter.quantized_experts"] = "none"
    if targets.unmatched:
        draft.notes.append(f"{option}: no module of the model has the name {' or '.join(targets.unmatched)}")
    if targets.is_partial and quantizer:
        layers = "linear layers without an adapter"
        draft.notes.append(f"not the same: {layers} keep their exact weights, quantized in {quantizer}")
    return targets


def _add_gate_up(draft: JobDraft, targets: Targets) -> None:
    """Add the rank of the pair of gate and up of experts, and say which names peft takes for experts."""
    values = draft.values
    if targets.gate_up:
        values["adapter.gate_up_rank"] = targets.gate_up * values.get("adapter.rank", 0)
    if targets.gate_up > 1 and values.get("adapter.rslora"):
        allowed = f"no {', '.join(targets.renamed)} with rsLoRA in a model with experts"
        raise TargetError(allowed, "peft scales gate and up of experts differently then")
    if targets.renamed:
        names = ", ".join(targets.renamed)
        draft.notes.append(f"{names}: peft takes them for the experts of all layers, and gives no other layer a pair")


def _kinds_of(family: str, folder: str, is_regex: bool) -> list[ModelModules]:
    """Return the modules of the folder's model; without its config.json those of each kind of the family's sizes."""
    try:
        args = CONFIG_CONVERTERS[family].args_from_folder(folder)
    except (JobError, OSError) as error:
        if is_regex:
            remedy = "download the model, so that it can be tried on its names, or write adapter.target into the job"
            raise TargetError(f"a regex for a model with its config.json in {folder}", f"{remedy} ({error})") from None
        kinds = dict[frozenset[str], Any]()
        for sizes in SIZES[family].values():
            kinds.setdefault(frozenset(with_wildcards(linears(sizes))), sizes)
        return [model_modules(family, sizes) for sizes in kinds.values()]
    return [model_modules(family, args, memory_prefix(find_text_config(Path(folder))))]


def model_modules(family: str, args: Any, prefix: str = "model.") -> ModelModules:
    """Return the modules of a model. `prefix`: beginning of its names, where it is part of one that reads images."""
    form = resolve_name(FAMILIES)[family].hf.tensor_map(args).within(prefix)
    names = list(linears(args))
    our_linears = {name for name in names if not is_expert_stack(name)}
    hf_linears, other_modules = dict[str, str](), set[str]()
    stacks, of_experts, stacked = dict[str, list[str]](), dict[str, str](), form.with_stacks()
    for parameter in parameters(args):
        if (layer_of(parameter) or 0) >= args.n_layers:  # of multi-token prediction, which transformers' models lack
            continue
        module, name = parameter.rpartition(".")[0], stacked.hf_names(parameter)[0]
        hf_module = name.rpartition(".")[0]
        if module in our_linears:
            hf_linears[module] = hf_module
        elif is_expert_stack(module):
            other_modules.add(hf_module)
            if _last_part(parameter) in EXPERT_MATRICES:
                stacks.setdefault(name, []).append(parameter)
                if family in RENAMED:
                    of_experts[form.hf_names(parameter)[0].split(".")[-2]] = _last_part(parameter)
        else:
            other_modules.add(hf_module)
    for name in [*hf_linears.values(), *other_modules]:
        parts = name.split(".")
        other_modules |= {".".join(parts[:length]) for length in range(1, len(parts))}
    return ModelModules(hf_linears, other_modules - set(hf_linears.values()), stacks, of_experts, names)


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
