"""Translate float8 training of torchtitan's older dialects, which spread it over up to three sections."""

from typing import Any

CONVERTERS = ("float8", "quantize.linear.float8", "quantize.dense.float8")
"""Names of the conversion in model.converters; also the sections of its options."""
SWITCHES = ("training.enable_float8_linear", "float8.enable_float8_linear")
RECIPES = ("tensorwise", "rowwise")
HEAD = "output"
AUTOMATIC = "auto_filter_small_kn"
"""Excluded the matrices that torchao measured as too small."""
EXPERTS = (
    "float8.moe_fqns",
    "float8.moe_fqns_prototype",
    "quantize.moe.float8.fqns",
    "quantize.grouped_mm.float8.fqns",
)
RECIPE, EXCLUDE = "training.float8", "training.float8_exclude"


def translate_float8(
    old: dict[str, Any], values: dict[str, Any], notes: list[str], stuck: list[tuple[str, Any, str]]
) -> None:
    """Move the options of float8 from `old` to `values`, or drop them where it was off.

    Notes and options without a translation (option, value, reason) are appended to the lists.
    """
    converters = old.get("model.converters") or []
    if not isinstance(converters, list):  # v0.1.0 separated the names by commas
        converters = [name.strip() for name in str(converters).split(",")]
    was_on = any(old.get(key) is True for key in SWITCHES) or any(name in CONVERTERS for name in converters)
    options = {key: old.pop(key) for key in list(old) if _is_option(key)}
    if not was_on:
        notes.extend(f"left out, changed nothing: {key} (float8 was off)" for key in options)
        return
    if other_names := [name for name in converters if name not in CONVERTERS]:
        old["model.converters"] = other_names
    else:
        old.pop("model.converters", None)
    recipe: str = "tensorwise"
    excluded: list[Any] = []
    for key, value in options.items():
        name = key.rpartition(".")[2]
        if name == "recipe_name" and value is not None:
            if value in RECIPES:
                recipe = value
            else:
                stuck.append((key, value, f"{RECIPE} is one of {', '.join(RECIPES)}"))
        elif name == "filter_fqns":
            excluded = value if isinstance(value, list) else [value]
            if AUTOMATIC in excluded:
                stuck.append((key, value, f"list the linears to leave out, in {EXCLUDE}"))
        elif "scaling_type" in name and value != "dynamic":
            stuck.append((key, value, "scales follow from the numbers of each product"))
        elif key in EXPERTS and value:
            stuck.append((key, value, "stacks of experts stay in training.mixed_precision_param"))
    values[RECIPE] = recipe
    if patterns := [f"*{name}*" for name in excluded if name not in (HEAD, AUTOMATIC)]:
        values[EXCLUDE] = patterns
    notes.append(f"moved: {', '.join([*options] or ['model.converters'])} -> {RECIPE}")
    if SWITCHES[0] not in options and HEAD not in excluded:
        notes.append("not the same: the head multiplied in float8 too; here it does not")


def _is_option(key: str) -> bool:
    section = key.rpartition(".")[0]
    return section in CONVERTERS or key in EXPERTS or (section == "training" and "float8" in key)
