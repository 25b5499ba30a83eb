"""Translate what a file says about names of Hugging Face's parameters to names here.

unfrozen_parameters holds regexes of parameters. They are tried on the names of the folder's model, and become patterns
of the names here. Axolotl's regexes have two peculiarities: a dot matches only a dot, except in .+, and a regex only
has to match the beginning of a name.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name

from torchtitan.core.errors import JobError
from torchtitan.models import CONFIG_CONVERTERS, family_in
from torchtitan.models.hf.config import find_text_config
from torchtitan.models.hf.wrappers import memory_prefix
from torchtitan.models.sizes import HEAD, parameters
from torchtitan.plugins.importers.adapter_targets import FAMILIES, patterns_of
from torchtitan.plugins.importers.regexes import Regex, RegexError
from torchtitan.plugins.importers.translation import JobDraft

KEY = "unfrozen_parameters"
MAX_REGEXES = 2000
"""Two for each matrix of a large model."""
TIED = "lm_head.weight"
ROWS = re.compile(r"\[(\d*:[^]\[]*|\d+)\]\Z")
"""A range of a matrix's rows, or one row, at the end of an entry."""


def unfrozen(regexes: Sequence[str], folder: str, draft: JobDraft) -> list[str]:
    """Return training.unfrozen for the regexes. Refuses in `draft` the ones that cannot be translated."""
    matchers = []
    for regex in regexes[:MAX_REGEXES]:
        if rows := ROWS.search(regex[-50:]):
            remedy = f"all rows of a matrix are trained, or none: drop {rows[0]}, or the whole entry"
            draft.refuse(KEY, regex, "names without a range of rows", remedy)
            continue
        try:
            matchers.append((regex, Regex(regex, plain_dots=True).matches_prefix))
        except RegexError as error:
            draft.refuse(KEY, regex, f"regexes without {error}", "or write the patterns of training.unfrozen yourself")
    if len(regexes) > MAX_REGEXES:
        draft.refuse(KEY, f"{len(regexes)} regexes", f"at most {MAX_REGEXES}")
    if draft.faults:
        return []
    try:
        hf_names = _hf_names(folder)
    except JobError as error:
        remedy = "download the model, so that they can be tried on its names, or write training.unfrozen into the job"
        allowed = f"regexes for a model with its config.json in {folder}"
        draft.refuse(KEY, list(regexes), allowed, f"{remedy} ({error})")
        return []
    chosen = set()
    all_names = [hf_name for names in hf_names.values() for hf_name in names]
    unfreezing = {hf_name for _, matches in matchers for hf_name in all_names if matches(hf_name)}
    for regex, matches in matchers:
        matched = {name for name in hf_names if any(map(matches, hf_names[name]))}
        within = {hf_name for hf_name in all_names if _is_within(matches, hf_name)}
        if not matched and within and within <= unfreezing:
            draft.notes.append(f"{KEY}: {regex}: no effect, as no name begins so; others train what it is a part of")
        elif not matched and unfreezing and f"{HEAD}.weight" not in hf_names and matches(TIED):
            draft.notes.append(f"{KEY}: {regex}: no effect, as the head is the embedding, for Axolotl too")
        elif not matched:
            candidates = {re.sub(r"\b\d+\b", "*", hf_name) for hf_name in all_names}
            allowed = f"regexes of how some of these begin: {', '.join(sorted(candidates))}"
            draft.refuse(KEY, regex, allowed, "correct or drop it")
        for name in sorted(matched):
            if not all(any(matches_name(hf_name) for _, matches_name in matchers) for hf_name in hf_names[name]):
                draft.refuse(KEY, regex, f"none, or all, of {name}", "its experts are one parameter: name all of them")
        chosen |= matched
    return patterns_of(chosen, list(hf_names))


def _is_within(matches: Callable[[str], bool], hf_name: str) -> bool:
    """Return True if a name matches from one of its dots on."""
    return any(matches(hf_name[dot.end() :]) for dot in re.finditer(r"\.", hf_name))


def _hf_names(folder: str) -> dict[str, list[str]]:
    """Return Hugging Face's names of each parameter of a folder's model. Raises JobError for an unknown model."""
    family = family_in(Path(folder))
    if family is None:
        raise JobError(f"{folder}: its family is not supported")
    args = CONFIG_CONVERTERS[family].args_from_folder(folder)
    form = resolve_name(FAMILIES)[family].hf.tensor_map(args).within(memory_prefix(find_text_config(Path(folder))))
    names = [name for name in parameters(args) if not (args.tied_embeddings and name == f"{HEAD}.weight")]
    return {name: form.hf_names(name) for name in names}
