"""Axolotl's unfrozen_parameters, regexes of Hugging Face's names: tried on those of the model's folder, they become
patterns of the names here.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name

from torchtitan.errors import JobError
from torchtitan.importers.folder import family_in
from torchtitan.importers.meaning import Meaning
from torchtitan.importers.name_regex import RegexError, fits
from torchtitan.models import CONFIGS
from torchtitan.models.linears import HEAD, parameters

KEY = "unfrozen_parameters"
FAMILIES = "torchtitan.models.registry:MODELS"
"""By name, as it needs torch."""
MANY = 2000
"""Regexes of a file, at most: two for each matrix of a large model."""
ROWS = re.compile(r"\[(\d*:[^]\[]*|\d+)\]\Z")
"""Of a matrix: some, or the one of a number, which is no class of characters at the end of an entry."""


def unfrozen(regexes: Sequence[str], folder: str, meaning: Meaning) -> list[str]:
    """Of training.unfrozen. What has no meaning is said to `meaning`."""
    wanted = []
    for regex in regexes[:MANY]:
        if rows := ROWS.search(regex[-50:]):
            why = f"of a matrix all rows are trained, or none: drop {rows[0]}, or the whole entry"
            meaning.refuse(KEY, regex, "names without a range of rows", why)
            continue
        try:
            wanted.append((regex, fits(regex)))
        except RegexError as error:
            why = "or write the patterns of training.unfrozen yourself"
            meaning.refuse(KEY, regex, f"regexes without {error}", why)
    if len(regexes) > MANY:
        meaning.refuse(KEY, f"{len(regexes)} regexes", f"at most {MANY}")
    if meaning.faults:
        return []
    try:
        theirs, names = _names(folder)
    except JobError as error:
        why = "fetch the model, so that they can be tried on its names, or write training.unfrozen into the job"
        meaning.refuse(KEY, list(regexes), f"regexes of a model whose config.json is in {folder}", f"{why} ({error})")
        return []
    chosen = set()
    for regex, begins in wanted:
        found = {name for name in names if any(map(begins, theirs[name]))}
        if not found:
            known = sorted({re.sub(r"\b\d+\b", "*", each) for of_one in theirs.values() for each in of_one})
            meaning.refuse(KEY, regex, f"regexes of how some of these begin: {', '.join(known)}", "correct or drop it")
        for name in sorted(found):
            if not all(any(fit(each) for _, fit in wanted) for each in theirs[name]):
                why = "its experts are one parameter here: name all of them"
                meaning.refuse(KEY, regex, f"none, or all, of {name}", why)
        chosen |= found
    return _patterns(chosen, names)


def _names(folder: str) -> tuple[dict[str, list[str]], list[str]]:
    """Of all parameters that a folder's model has: theirs, by ours, and ours. JobError for a folder without one."""
    family = family_in(Path(folder))
    if family is None:
        raise JobError(f"{folder}: its family is not here")
    args = CONFIGS[family].args_of(folder)
    form = resolve_name(FAMILIES)[family].hf.form(args)
    own = [name for name in parameters(args) if not (args.tied_embeddings and name == f"{HEAD}.weight")]
    return {name: form.hf_names(name) for name in own}, own


def _patterns(chosen: set[str], names: Sequence[str]) -> list[str]:
    """Few that fit these of the names and no others: whole layers, a part in all layers, single names."""
    of_layers = [name.split(".", 2) for name in names if name.startswith("layers.")]
    layers = list(dict.fromkeys(layer for _, layer, _ in of_layers))
    whole = [layer for layer in layers if all(n in chosen for n in names if n.startswith(f"layers.{layer}."))]
    found = ["layers.*"] if whole == layers else [f"layers.{layer}.*" for layer in whole]
    for part in dict.fromkeys(part for _, layer, part in of_layers if layer not in whole):
        having = [layer for _, layer, each in of_layers if each == part]
        there = [layer for layer in having if f"layers.{layer}.{part}" in chosen]
        everywhere = there == having
        found += [f"layers.*.{part}"] if everywhere else [f"layers.{n}.{part}" for n in there if n not in whole]
    found += [name for name in names if name in chosen and not name.startswith("layers.")]
    assert {name for name in names if any(fnmatchcase(name, each) for each in found)} == chosen
    return found
