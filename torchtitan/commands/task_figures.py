"""What lm-eval (0.4.13) makes of answers: the filters that they go through, and what is counted of a kind of request.

It would tell only behind the last answer what it does not count, and leaves out in silence what it has no use for.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchtitan.config.options import hint
from torchtitan.errors import JobError

AVERAGES = ("mean", "nanmean", "median")
FIGURES = {
    "multiple_choice": {
        **dict.fromkeys(("acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"), "mean"),
        **{"f1": "f1", "mcc": "matthews_corrcoef", "brier_score": "brier_score"},
    },
    "loglikelihood": {"acc": "mean", "perplexity": "perplexity"},
    "loglikelihood_rolling": {
        **dict.fromkeys(("word_perplexity", "byte_perplexity"), "weighted_perplexity"),
        "bits_per_byte": "bits_per_byte",
    },
    "generate_until": {"exact_match": "mean", "bleu": "bleu", "chrf": "chrf", "chrf++": "chrf++", "ter": "ter"},
}
"""By output_type, each figure and how the documents' values become one."""
OF_EXACT_MATCH = ("regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers")
OF_REGEX = ("regex_pattern", "group_select", "fallback")
FILTERS: dict[str, tuple[str, ...]] = {
    "regex": OF_REGEX,
    "regex_pos": OF_REGEX,
    "multi_choice_regex": (*OF_REGEX, "ignore_case", "ignore_punctuation", "regexes_to_ignore"),
    "map": ("mapping_dict", "default_value"),
    "take_first_k": ("k",),
    **dict.fromkeys(("take_first", "majority_vote", "lowercase", "uppercase", "remove_whitespace", "format_span"), ()),
}
WHOLE, TABLE = (int, "a whole number"), (dict, "a table")
KINDS: dict[str, tuple[type, str]] = {
    **{"k": WHOLE, "group_select": WHOLE, "mapping_dict": TABLE},
    **{"ignore_case": (bool, "true or false"), "ignore_punctuation": (bool, "true or false")},
}
NEEDED = ("k", "mapping_dict")
"""By a filter that takes them."""


def refuse_unknown(where: str, given: Iterable[object], known: Iterable[str], remedy: str = "") -> None:
    """JobError where `given` has what is not in `known`, with what was meant where that is near."""
    allowed = list(known)
    if strange := [str(key) for key in given if key not in allowed]:
        near = "; ".join(filter(None, [*(hint(key, allowed) for key in strange), remedy]))
        told = f"{where}: given {', '.join(strange)}; allowed: {', '.join(allowed) or 'nothing'}"
        raise JobError(f"{told}; {near or 'leave it out'}")


def refuse_what_is_not_counted(task: Mapping[str, Any], where: str) -> None:
    """JobError for a figure or a filter that is none, for what these do not take, and for what is no pattern."""
    kind = task.get("output_type", "generate_until")
    refuse_unknown(f"{where}: output_type", [kind], FIGURES)
    _refuse_kind("repeats", task.get("repeats", 1), *WHOLE, where)
    for entry in tables(task.get("metric_list") or [], f"{where}: metric_list"):
        _refuse_figure(entry, kind, f"{where}: metric_list")
    for entry in tables(task.get("filter_list") or [], f"{where}: filter_list"):
        refuse_unknown(f"{where}: filter_list", entry, ("name", "filter"))
        if set(entry) != {"name", "filter"} or not isinstance(entry["name"], str):
            told = f"given {entry}; allowed: tables with name, a text, and filter, a list of steps"
            raise JobError(f"{where}: filter_list: {told}")
        steps = list(tables(entry["filter"], f"{where}: filter_list"))
        if not steps:
            raise JobError(f"{where}: filter_list: {entry['name']}: given no step; allowed: at least one; leave it out")
        for step in steps:
            _refuse_step(step, f"{where}: filter_list")


def tables(entries: object, where: str) -> Iterator[Mapping[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise JobError(f"{where}: given {entries!r}; allowed: a list of tables")
    yield from entries


def _refuse_figure(entry: Mapping[str, Any], kind: str, where: str) -> None:
    name, how = entry.get("metric"), entry.get("aggregation")
    if name is None or "hf_evaluate" in entry:
        raise JobError(f"{where}: given {entry}; allowed: tables with metric, without hf_evaluate")
    refuse_unknown(f"{where} with output_type = {kind}", [name], FIGURES[kind])
    more = OF_EXACT_MATCH if (name, kind) == ("exact_match", "generate_until") else ()
    refuse_unknown(f"{where}: {name}", entry, ("metric", "aggregation", "higher_is_better", *more))
    own = FIGURES[kind][name]
    if how is not None:
        refuse_unknown(f"{where}: {name}: aggregation", [how], AVERAGES if own in AVERAGES else (own,))
    _refuse_patterns(entry, where)


def _refuse_step(step: Mapping[str, Any], where: str) -> None:
    name = step.get("function")
    if name == "custom":
        raise JobError(f"{where}: given custom, which is code; allowed: filters by name")
    refuse_unknown(f"{where}: function", [name], FILTERS)
    taken = FILTERS[str(name)]
    refuse_unknown(f"{where}: {name}", step, ("function", *taken))
    for key in taken:
        if key in KINDS and (key in step or key in NEEDED):
            _refuse_kind(key, step.get(key), *KINDS[key], f"{where}: {name}")
    _refuse_patterns(step, where)


def _refuse_kind(key: str, given: object, kind: type, words: str, where: str) -> None:
    if not isinstance(given, kind) or isinstance(given, bool) != (kind is bool):
        raise JobError(f"{where}: {key}: given {given!r}; allowed: {words}")


def _refuse_patterns(entry: Mapping[str, Any], where: str) -> None:
    several = entry.get("regexes_to_ignore") or []
    for pattern in [entry.get("regex_pattern", ""), *(several if isinstance(several, list) else [several])]:
        try:
            re.compile(pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise JobError(f"{where}: given {pattern!r}; allowed: a regular expression of Python; {error}") from None
